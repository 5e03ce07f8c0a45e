"""The command line `stepwise-routing`: its commands, their help, and mistakes in one line

Here belong the words that the command line reads and prints. The work of a command belongs in the
modules that it calls. They are imported on demand: `stepwise-routing --help` loads none of them.
"""

import shlex
import sys

try:
    import argparse
    import logging
    import os
    import textwrap
    import time
    from dataclasses import asdict, fields
    from pathlib import Path

    from .. import __version__
    from ..base.tools import PACKAGE, find_project, one_line
    from .config import Config, load_yaml, settings_of
    from .manifest import Manifest, files_in
    from .parser import Parser
    from .publish import PUBLISHED, compared, publish, published, write_back
    from .runner import Options, plan, run_plan
except KeyboardInterrupt:  # Ctrl-C before there is a command to interrupt
    print('stepwise-routing: interrupted', file=sys.stderr)
    raise SystemExit(130) from None


def _settings_line(config):
    "A line with the settings that differ from the defaults."
    defaults = settings_of(Config())
    changed = [one_line(f'{k}={v}') for k, v in settings_of(config).items() if v != defaults[k]]
    text = f'settings {", ".join(changed) or "the defaults"}'
    return textwrap.fill(text, 110, subsequent_indent=' ' * 9)


def dry_run(plan) -> list:  # the lines about what is missing, which begin with "needs"
    "Print a plan, its costs, and what this machine lacks. It writes, downloads and calls nothing."
    from fastcore.xtras import working_directory

    from .needs import needs, report

    short = plan.project.short
    run = plan.run
    megabytes = sum(path.stat().st_size for path in files_in(run.store).values()) / 1e6
    lines = [
        f'profile  {run.profile}',
        _settings_line(run.config),
        f'run      {short(run.folder)} ({plan.note})',
        f'store    {short(run.store)}: {megabytes:,.1f} MB',
    ]
    for name in plan.stages:
        if name in plan.todo:
            lines.append(f'run      {name}{plan.took(name)}')
        else:
            lines.append(f'skip     {name}{plan.why_not(name)}')
    with working_directory(plan.project.nbs):  # that of the notebooks
        lines += report(run)
        missing = needs(run)
    print(*map(one_line, '\n'.join([*lines, *missing]).split('\n')), sep='\n')
    return missing


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


def demo(options):
    "Route twenty problems between the shipped models."
    from ..report.transcripts import show_demo

    if options.project:
        raise ValueError('demo takes no folder: stepwise-routing demo')
    show_demo()


def figures(options):
    "Draw the committed figures again, from the committed tables alone."
    from ..report.figures import redraw

    root = find_project(options.project).root
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


def faults(options):
    "Run the tests of faults. Write their table to tables/faults.md."
    import subprocess

    script = find_project(options.project).root / 'tests' / 'helpers' / 'faults.py'
    if not script.is_file():
        raise FileNotFoundError(
            f'{script.parents[2]} has no tests: run this command in a clone of the repository'
        )
    status = subprocess.run([sys.executable, script]).returncode
    if status:
        raise SystemExit(status)


def init(options):
    "Copy the notebooks, profiles, tables and figures of an installed wheel to a new folder."
    from .new_folder import make_folder, shared_files

    out = Path(options.project)
    clone = PACKAGE.parent
    if not options.project:
        raise ValueError('name the new folder: stepwise-routing init DIR')
    if (clone / 'nbs').is_dir():
        raise ValueError(
            f'the package is installed from the clone {clone}: work in the clone, it needs no init'
        )
    if (out / 'nbs').exists():
        raise ValueError(f'{out / "nbs"} exists already: choose a new folder')
    make_folder(out, shared_files())
    print(f'Notebooks and profiles: {out / "nbs"}; committed results: {out / "tables"}')
    reproduce_words = ['stepwise-routing', 'reproduce', str(out), '--profile', 'smoke']
    print(f'Next: {shlex.join(reproduce_words)}, or in that folder: stepwise-routing lab')


COMMANDS = dict(figures=figures, demo=demo, test=faults, init=init)  # commands without a run


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
}


COMMAND_MEANINGS = dict(
    reproduce='Run the numbered notebooks. Every run keeps a receipt.',
    figures='Draw the figures again, from tables/ alone.',
    demo='Route twenty problems between the shipped models, and show transcripts.',
    test='With --faults: run the tests of faults, and write tables/faults.md. Needs a clone.',
    init='Copy notebooks, profiles and committed results from an installed wheel to a new folder.',
    serve='Serve your own routers in the OpenAI protocol.',
    lab='Open the chapters in JupyterLab. Further words are options of `jupyter lab`.',
)


def _add_options(parser):
    "The options of `reproduce`: the fields of `Options`."
    from fastcore.docments import docments

    meaning = docments(Options)
    parser.add_argument(
        '--dry-run',
        action='store_true',
        help='print the plan, its costs and what is missing; run nothing',
    )
    for option in fields(Options):
        if option.name != 'changes':
            flag = f'--{option.name.replace("_", "-")}'
            kind = OPTION_KINDS[option.type]
            parser.add_argument(flag, default=option.default, help=meaning[option.name], **kind)
    parser.add_argument(
        '-p',
        '--parameter',
        dest='changes',
        action='append',
        default=[],
        type=_change,
        metavar='NAME=VALUE',
        help=meaning['changes'],
    )


def _add_folder(parser):
    meaning = 'the clone to work in, or the new folder of init; the same as --project'
    parser.add_argument(
        'project', nargs='?', default=argparse.SUPPRESS, metavar='DIR', help=meaning
    )


def build_parser() -> Parser:
    "The parser of the whole command line: the commands, and the fields of `Options`."
    lines = [f'  {name:10} {meaning}' for name, meaning in COMMAND_MEANINGS.items()]
    lines.append('`stepwise-routing COMMAND --help` explains one command.')
    parser = Parser(
        'stepwise-routing',
        description='\n'.join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('command', choices=list(COMMAND_MEANINGS))
    _add_folder(parser)
    parser.add_argument('--faults', action='store_true', help='for the command test: see there')
    parser.add_argument('--version', action='version', version=f'stepwise-routing {__version__}')
    _add_options(parser)
    return parser


def command_help(command: str) -> str:
    "The help page of one command."
    description = COMMAND_MEANINGS[command]
    parser = Parser(f'stepwise-routing {command}', description=description, allow_abbrev=False)
    if command not in ('demo', 'lab'):
        _add_folder(parser)
    if command == 'test':
        parser.add_argument(
            '--faults', action='store_true', help='cause faults, and record what survives'
        )
    if command == 'reproduce':
        _add_options(parser)
    return parser.format_help()


def _check_unused(command, is_dry_run, options):
    "ValueError for an option that the command does not have."
    defaults = asdict(Options(project=options.project))
    given = ['dry_run'] if is_dry_run else []
    given += [name for name, value in asdict(options).items() if value != defaults[name]]
    if given:
        raise ValueError(f'{command} has no option --{given[0].replace("_", "-")}')


def run_command(argv) -> None:  # the words after `stepwise-routing`
    "Do what the command line says. Exits with 1 after a dry run on a machine that lacks something."
    for word in argv:
        if '\0' in word:
            raise ValueError(f'{word!r:.90} holds a character that no name can have')
    if argv[:1] == ['serve']:
        from .serve_command import serve

        serve(argv[1:])
        return
    if argv[:1] and argv[0] in COMMAND_MEANINGS and {'-h', '--help'} & {*argv[1:]}:
        print(command_help(argv[0]), end='')
        return
    if argv[:1] == ['lab']:
        from .notebooks import open_lab

        open_lab(find_project(), argv[1:])
        return
    words = vars(build_parser().parse_args(argv))
    command = words.pop('command')
    is_dry_run = words.pop('dry_run')
    if words.pop('faults') != (command == 'test'):
        raise ValueError(
            '--faults and the command test belong together: stepwise-routing test --faults'
        )
    words['changes'] = dict(words['changes'])
    options = Options(**words)
    if command in COMMANDS:
        _check_unused(command, is_dry_run, options)
        COMMANDS[command](options)
    elif is_dry_run:
        if dry_run(plan(options)):
            raise SystemExit(1)
    else:
        reproduce(options)


def main(argv=None):  # words of the command line; None: those of this process
    """The console command `stepwise-routing`. It ends the process with a non-zero status after an
    error, or if something is missing."""
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
