"""The command line `stepwise-routing`: its commands, their help, and mistakes in one line

Here belong the words that the command line reads and prints. The work of a command belongs in the
modules that it calls. They are imported on demand: `stepwise-routing --help` loads none of them.
"""

import sys

try:
    import argparse
    import logging
    import os
    import time
    from dataclasses import fields

    from .. import __version__
    from ..util import find_project, one_line
    from .config import load_yaml
    from .manifest import Manifest
    from .parser import Parser
    from .publish import PUBLISHED, compared, publish, published, write_back
    from .runner import Options, plan, run_plan
except KeyboardInterrupt:  # Ctrl-C before there is a command to interrupt
    print('stepwise-routing: interrupted', file=sys.stderr)
    raise SystemExit(130) from None


def reproduce(options: Options) -> Manifest:
    """Run the stages, then publish tables, figures and outputs as the options say. Errors as of `plan`
    and `run_plan`."""
    from ..report.tables import summary

    start = time.time()
    work = plan(options)
    run = work.run
    short = work.project.short
    print(f'run {short(run.folder)} ({work.note})', file=sys.stderr)
    manifest = run_plan(work)
    if manifest['status'] != 'finished':
        print(f'run {run.folder.name} lacks other notebooks: nothing published')
        return manifest
    comparison = ''
    where = short(run.folder)
    is_committed = options.profile in PUBLISHED and not options.changes
    if options.publish or is_committed:
        comparison = compared(run.tables, published(work, 'tables'))
        publish(work)
        where = ', '.join(short(published(work, kind)) for kind in ('tables', 'figures'))
    if options.write_back:
        for name in work.stages:
            write_back(run.folder / f'{name}.ipynb', work.project.nbs / f'{name}.ipynb')
    stage_seconds = sum(stage.get('seconds', 0) for stage in manifest['notebooks'].values())
    seconds = (time.time() - start, stage_seconds)
    where += f'; notebooks and receipts: {short(run.folder)}'
    print(*summary(run.tables, seconds, where, comparison), sep='\n')
    return manifest


def demo():
    "Route twenty problems between the shipped models."
    from ..report.transcripts import show_demo

    show_demo()


def figures(project):
    "Draw the committed figures again, from the committed tables alone."
    from ..report.figures import redraw

    root = find_project(project).root
    folders = []
    for name in PUBLISHED.values():
        if (root / 'tables' / name / 'frontiers.csv').is_file():
            folders.append(name)
    if not folders:
        raise FileNotFoundError(
            f'{root / "tables"} holds no tables: make them with stepwise-routing reproduce --publish'
        )
    for name in folders:
        print(*redraw(root / 'tables' / name, root / 'figures' / name), sep='\n')


def _change(pair):  # "policy.alpha=.05" -> (name, value)
    name, equals, value = pair.partition('=')
    if not equals:
        raise argparse.ArgumentTypeError(f'{pair}: write NAME=VALUE')
    try:
        return name, load_yaml(value, name)
    except ValueError as error:
        line = f'{value!r:.80} cannot be read as a value: {error}'
        raise argparse.ArgumentTypeError(line) from None


def _names(text):  # "04,05" -> ("04", "05")
    names = tuple(name for name in text.split(',') if name)
    if not names:
        raise argparse.ArgumentTypeError(f'{text!r} names no notebook')
    return names


OPTION_KINDS = {  # type of a field of `Options` -> how argparse reads it
    bool: dict(action='store_true'),
    str: {},
    tuple: dict(type=_names, metavar='NN[,NN]'),
    dict: dict(action='append', type=_change, metavar='NAME=VALUE'),
}


COMMAND_MEANINGS = dict(
    reproduce='Run the numbered notebooks. Every run keeps a receipt.',
    figures='Draw the figures again, from tables/ alone.',
    demo='Route twenty problems between the shipped models, and show transcripts.',
    serve='Serve your own routers in the OpenAI protocol.',
    lab='Open the chapters in JupyterLab. Further words are options of `jupyter lab`.',
)


def _add_options(parser):
    "The options of `reproduce`: the fields of `Options`."
    from fastcore.docments import docments

    meaning = docments(Options)
    for option in fields(Options):
        words = [f'--{option.name.replace("_", "-")}']
        kind = dict(default=option.default, help=meaning[option.name], **OPTION_KINDS[option.type])
        if option.name == 'changes':
            words = ['-p', '--parameter']
            kind |= dict(dest='changes', default=[])
        parser.add_argument(*words, **kind)


def build_parser() -> Parser:
    "The parser of the whole command line: the commands, and the fields of `Options`."
    parser = Parser('stepwise-routing', allow_abbrev=False)
    parser.add_argument('--version', action='version', version=f'stepwise-routing {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name, meaning in COMMAND_MEANINGS.items():
        command = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        if name == 'reproduce':
            _add_options(command)
        if name == 'figures':
            command.add_argument('--project', help='the clone; default: the one we are in')
    return parser


def run_command(argv) -> None:  # the words after `stepwise-routing`
    "Do what the command line says."
    if argv[:1] == ['serve']:
        from .serve_command import serve

        return serve(argv[1:])
    if argv[:1] == ['lab'] and not {'-h', '--help'} & {*argv[1:]}:
        from .notebooks import open_lab

        return open_lab(find_project(), argv[1:])
    words = vars(build_parser().parse_args(argv))
    command = words.pop('command')
    if command == 'demo':
        demo()
    elif command == 'figures':
        figures(words['project'])
    else:
        reproduce(Options(**words | dict(changes=dict(words['changes']))))


def main(argv=None):  # words of the command line; None: those of this process
    "The console command `stepwise-routing`. It ends the process with a non-zero status after an error."
    try:
        run_command(sys.argv[1:] if argv is None else argv)
        return
    except KeyboardInterrupt as e:
        # asyncio would report tasks that died with the kernel
        logging.getLogger('asyncio').setLevel(logging.CRITICAL)
        line = str(e) or 'interrupted'
        status = 130
    except BrokenPipeError:  # the reader of our output has gone, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, FileNotFoundError) as e:
        line = str(e)
        status = 2
    except MemoryError as e:
        line = f'this process may not have more memory: {e or "no size is known"}'
        status = 1
    except (RuntimeError, ImportError, OSError) as e:
        line = str(e)
        status = 1
    print(f'stepwise-routing: {one_line(line)}', file=sys.stderr)
    raise SystemExit(status)
