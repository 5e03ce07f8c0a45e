"""`stepwise-routing reproduce`, its plan beforehand, and mistakes in one line"""

import sys

try:
    import argparse
    import logging
    import os
    import re
    import textwrap
    import time
    from dataclasses import asdict, fields
    from pathlib import Path

    from .. import __version__
    from ..base.tools import PACKAGE, find_project, nearest, write_file
    from .config import Config
    from .publish import PUBLISHED, compared, publish, published, write_back
    from .runner import Manifest, Options, files_in, plan, run_plan, settings_of
except KeyboardInterrupt:  # Ctrl-C before there is a command to interrupt
    print('stepwise-routing: interrupted', file=sys.stderr)
    raise SystemExit(130) from None


def dry_run(plan):
    "Print a plan, what it takes and what this machine lacks; that is returned, too. Writes, downloads, calls nothing."
    from fastcore.xtras import working_directory

    from .needs import needs, report

    short = plan.project.short
    run = plan.run
    size = sum(path.stat().st_size for path in files_in(run.store).values()) / 1e6
    todo = [
        f'run      {name}{plan.took(name)}'
        if name in plan.todo
        else f'skip     {name}{plan.why_not(name)}'
        for name in plan.stages
    ]
    usual = settings_of(Config())
    other = (
        ', '.join(f'{k}={v}' for k, v in settings_of(run.config).items() if v != usual[k])
        or 'the defaults'
    )
    with working_directory(plan.project.nbs):  # that of the notebooks
        lines = report(run)
        missing = needs(run)
    print(
        f'profile  {run.profile}',
        textwrap.fill(f'settings {other}', 110, subsequent_indent=' ' * 9),
        f'run      {short(run.folder)} ({plan.note})',
        f'store    {short(run.store)}: {size:,.1f} MB',
        *todo,
        *lines,
        *missing,
        sep='\n',
    )
    return missing


def reproduce(options: Options) -> Manifest:
    "Run the stages, then put tables, figures and outputs where readers look. Errors as of `plan` and `run_plan`."
    from ..report.tables import summary

    start = time.time()
    work = plan(options)
    run = work.run
    short = work.project.short
    print(f'run {short(run.folder)} ({work.note})', file=sys.stderr)
    if (manifest := run_plan(work))['status'] != 'finished':
        print(f'run {run.folder.name} lacks other notebooks: nothing published')
        return manifest
    same = ''
    where = short(run.folder)
    if options.publish or options.profile in PUBLISHED and not options.changes:
        same = compared(run.tables, published(work, 'tables'))
        publish(work)
        where = ', '.join(short(published(work, kind)) for kind in ('tables', 'figures'))
    for name in work.stages if options.write_back else ():
        write_back(run.folder / f'{name}.ipynb', work.project.nbs / f'{name}.ipynb')
    stages = sum(stage.get('seconds', 0) for stage in manifest['notebooks'].values())
    seconds = time.time() - start, stages
    where += f'; notebooks and receipts: {short(run.folder)}'
    print(*summary(run.tables, seconds, where, same), sep='\n')
    return manifest


def demo(_):
    "Route twenty problems between the shipped models."
    from ..report.transcripts import show_demo

    show_demo()


def figures(options):
    "Draw the committed figures again, from the committed tables alone."
    from ..report.figures import redraw

    root = find_project(options.project).root
    names = [
        name for name in PUBLISHED.values() if (root / 'tables' / name / 'frontiers.csv').is_file()
    ]
    if not names:
        raise FileNotFoundError(
            f'{root / "tables"} holds no tables: reproduce --publish puts them there'
        )
    for name in names:
        print(*redraw(root / 'tables' / name, root / 'figures' / name), sep='\n')


def faults(options):
    "Run the tests of faults, and write their table to tables/faults.md."
    import subprocess

    script = find_project(options.project).root / 'tests' / 'helpers' / 'faults.py'
    if not script.is_file():
        raise FileNotFoundError(f'there are no tests in {script.parents[2]}: it is no clone')
    if status := subprocess.run([sys.executable, script]).returncode:
        raise SystemExit(status)


def init(options):
    "Copy the notebooks and profiles of an installed wheel to a new folder, to run and change them there."
    from importlib.metadata import files

    out = Path(options.project)
    clone = PACKAGE.parent
    if not options.project:
        raise ValueError('say where to: stepwise-routing init DIR')
    if (clone / 'nbs').is_dir():
        raise ValueError(f'this is installed from the clone {clone}: work there')
    if (out / 'nbs').exists():
        raise ValueError(f'{out / "nbs"} is there already: choose a new folder')
    shipped = {
        f.as_posix().partition('share/stepwise-routing/')[2]: f.locate()
        for f in files('stepwise-routing')
    }
    for place, path in shipped.items():
        if place:
            write_file(out / place, Path(path).read_bytes())
    print(
        f'Notebooks and profiles: {out / "nbs"}',
        f'Next: stepwise-routing reproduce {out} --profile smoke',
        sep='\n',
    )


COMMANDS = dict(figures=figures, demo=demo, test=faults, init=init)  # they need no run


class Parser(argparse.ArgumentParser):
    "argparse with one-line errors that offer the nearest name."

    def error(self, message):
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([\w-]+)", message)
        options = [o for a in self._actions for o in (*a.option_strings, *(a.choices or ()))]
        if wrong:
            hint = f'{nearest(wrong[1], options)}; there are: {", ".join(options)}'
            message = f'{wrong[1]!r} is not known to {self.prog}{hint}'
        raise ValueError(message)


def _change(pair):  # "policy.alpha=.05"
    import yaml

    name, equals, value = pair.partition('=')
    if not equals:
        raise argparse.ArgumentTypeError(f'{pair}: write NAME=VALUE')
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f'{value!r} is no value') from None


def _names(text):
    return tuple(filter(None, text.split(',')))  # "04,05"


def build_parser():
    "The command line of `stepwise-routing`: the fields of `Options`."
    from fastcore.docments import docments

    about = 'Run the numbered notebooks and keep the receipts.'
    help = docments(Options)
    parser = Parser('stepwise-routing', description=about, allow_abbrev=False)
    parser.add_argument(
        'command',
        choices=['reproduce', *COMMANDS],
        help='run the notebooks; draw the figures again from tables/; route twenty problems; '
        'try what may go wrong; copy notebooks and profiles to DIR',
    )
    parser.add_argument(
        'project', nargs='?', default=argparse.SUPPRESS, metavar='DIR', help='the same as --project'
    )
    parser.add_argument('--faults', action='store_true', help='of test: what survives which fault')
    parser.add_argument('--version', action='version', version=f'stepwise-routing {__version__}')
    parser.add_argument(
        '--dry-run', action='store_true', help='print the plan, what it takes and what is missing'
    )
    kinds = {bool: dict(action='store_true'), str: {}, tuple: dict(type=_names, metavar='NN[,NN]')}
    for f in fields(Options)[:-1]:  # all but `changes`
        option = kinds[f.type] | dict(default=f.default, help=help[f.name])
        parser.add_argument(f'--{f.name.replace("_", "-")}', **option)
    parser.add_argument(
        '-p',
        '--parameter',
        dest='changes',
        action='append',
        default=[],
        type=_change,
        metavar='NAME=VALUE',
        help=help['changes'],
    )
    return parser


def _check_unused(command, dry, options):
    "ValueError for an option that the command does not have."
    usual = asdict(Options(project=options.project))
    given = ['dry_run'] * dry + [k for k, v in asdict(options).items() if v != usual[k]]
    if given:
        raise ValueError(f'{command} has no option --{given[0].replace("_", "-")}')


def main(argv=None):
    "The console command `stepwise-routing`; ends the process with a status where something went wrong or is missing."
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = vars(build_parser().parse_args(argv))
        command = args.pop('command')
        dry = args.pop('dry_run')
        if args.pop('faults') != (command == 'test'):
            raise ValueError('write: stepwise-routing test --faults')
        options = Options(**args | dict(changes=dict(args['changes'])))
        if command in COMMANDS:
            _check_unused(command, dry, options)
        if command in COMMANDS:
            COMMANDS[command](options)
        elif not dry:
            reproduce(options)
        elif dry_run(plan(options)):
            raise SystemExit(1)
        return
    except KeyboardInterrupt as e:
        logging.getLogger('asyncio').setLevel(
            logging.CRITICAL
        )  # tasks that died with the kernel are no news
        line = str(e) or 'interrupted'
        status = 130
    except BrokenPipeError:  # whoever read what we print has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, FileNotFoundError) as e:
        line, status = str(e), 2
    except (RuntimeError, ImportError, OSError) as e:
        line, status = str(e), 1
    print(f'stepwise-routing: {line}', file=sys.stderr)
    raise SystemExit(status)
