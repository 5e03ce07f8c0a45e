"""Runs the numbered notebooks in order, and goes on after an interruption

Here belong the plan of a run and carrying it out. The receipt belongs in `run.manifest`, running one
notebook in `run.notebooks`.
"""

import contextlib
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from ..util import Project, find_project, nearest
from .config import (
    FOLDER_NAME,
    FOLDER_WORDS,
    Run,
    change_words,
    changes_line,
    different_settings,
    read_run,
    settings_receipt,
)
from .manifest import Manifest, git_state, installed_packages
from .notebooks import NotebookFailed, ends_soon, execute, now, sole_runner, stage_names

RESERVED_NAMES = ('store', 'lessons')  # folders in runs/ that are not runs


@dataclass(frozen=True)
class Options:
    "The options of a reproduction. `command_line` turns them into words of the command line."

    profile: str = 'micro'  # a file of nbs/params by name, or a .yaml file; default: micro
    only: tuple = ()  # run only these notebooks, in the run that --run-id or --resume names
    resume: bool = False  # continue the newest unfinished run of the profile, or that of --run-id
    run_id: str = ''  # name of the folder in runs/; default: profile and time
    write_back: bool = False  # store the outputs in the notebooks of nbs/
    publish: bool = False  # copy tables/ and figures/ to the top level, for any profile
    project: str = ''  # the clone; default: the one we are in
    # change a setting, e.g. -p policy.alpha=.05; may be repeated
    changes: dict = field(default_factory=dict)


def past_runs(project: Project, profile: str) -> list:
    "Manifests of a profile's runs, newest first."
    manifests = [Manifest(folder) for folder in project.runs.glob('*')]
    of_profile = [m for m in manifests if m.data.get('profile') == profile]
    return sorted(of_profile, key=lambda m: m['started'], reverse=True)


# settings that may differ from those a run was begun with: they decide no result
FREE = (
    'api.max_cents',
    'api.concurrency',
    'models.workers',
    'models.memory_shares',
    'models.ray_workers',
    'models.ray_gpus',
    'sweep.workers',
)


def _decisive(run):
    "The settings that decide results and differ from those of the run's folder: name -> (there, here)."
    different = different_settings(run)
    return {name: pair for name, pair in different.items() if name not in FREE}


def _newest_unfinished(project, run, options):
    "(Name of the run that `--resume` continues, or of a new run; a note about it)."
    note = 'new'
    if options.resume:
        note = f'new; no unfinished run of profile {run.profile} to resume'
        runs = past_runs(project, run.profile)
        if runs and (options.only or runs[0]['status'] != 'finished'):
            newest = runs[0].folder
            others = _decisive(replace(run, folder=newest))
            if options.only or not others:
                return newest.name, 'continued'
            note = f'new; {newest.name}, which is unfinished, has another {next(iter(others))}'
    time_stamp = datetime.now(timezone.utc).strftime('%Y%m%d-%H%M%S-%f')[:-3]
    return f'{run.profile}-{time_stamp}', note


def _named_run(project, run, options):
    "(Name of the run that `--run-id` names; a note about it). ValueError if it cannot be used."
    name = options.run_id
    if not FOLDER_NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise ValueError(f'{name!r:.90} cannot name a run: use {FOLDER_WORDS}')
    past = Manifest(project.runs / name).data
    if not past:
        return name, 'new; no run of this name to resume' if options.resume else 'new'
    if past['profile'] != run.profile:
        raise ValueError(
            f'run {name!r} belongs to profile {past["profile"]}, not {run.profile}: '
            'choose another --run-id'
        )
    if not (options.resume or options.only):
        raise ValueError(
            f'run {name!r} exists: continue it with --resume, or choose another --run-id'
        )
    return name, 'continued'


def choose(
    wanted,  # such as ("01", "05_results"); (): all
    names,  # of all notebooks
) -> list:
    "The notebooks that `--only 01,05_results` names. ValueError for an unknown one."
    for word in wanted:
        if not any(word in (name, name.split('_')[0]) for name in names):
            there = ', '.join(names)
            raise ValueError(f'no notebook {word!r}{nearest(word, names)}; there are: {there}')
    if not wanted:
        return list(names)
    return [name for name in names if name in wanted or name.split('_')[0] in wanted]


@dataclass(frozen=True)
class Plan:
    "The plan of a reproduction."

    project: Project
    options: Options
    run: Run  # settings and folders
    note: str  # whether the run is new or continued
    stages: tuple  # names of all notebooks, in order
    todo: tuple  # those that will run


def _check_same_settings(run):
    "ValueError if a run that goes on was begun with other settings."
    different = _decisive(run)
    if not different:
        return
    name, (there, here) = next(iter(different.items()))
    more = f' and {len(different) - 1} more' if len(different) > 1 else ''
    begun_with = changes_line({name: pair[0] for name, pair in different.items()})
    raise ValueError(
        f'run {run.folder.name} was made with {name}={there}, not {here}{more}: '
        f'go on with {begun_with}, or make a new run (without --resume and --only)'
    )


def _check_earlier_stages(options, run, names, chosen):
    "ValueError if `--only` leaves out a notebook that the run lacks."
    past = Manifest(run.folder)
    left_out = [name for name in names if name not in chosen and name < chosen[-1]]
    missing = [name for name in left_out if not past.is_finished(name)]
    if missing:
        raise ValueError(
            f'--only {",".join(options.only)} needs the results of {", ".join(missing)}, '
            f'and run {run.folder.name} lacks them: name another run with --run-id, '
            'or continue the newest with --resume'
        )


def plan(options: Options) -> Plan:
    "Decide which notebooks run, and in which folder. Writes nothing. ValueError or FileNotFoundError."
    project = find_project(options.project or None)
    run = read_run(options.profile, '', options.changes, project)
    pick = _named_run if options.run_id else _newest_unfinished
    run_id, note = pick(project, run, options)
    run = replace(run, folder=project.runs / run_id)
    names = stage_names(project)
    if not names:
        raise ValueError(f'{project.nbs} has no notebook with a number and parameters')
    chosen = choose(options.only, names)
    _check_earlier_stages(options, run, names, chosen)
    _check_same_settings(run)
    past = Manifest(run.folder)
    todo = [name for name in chosen if options.only or not past.is_finished(name)]
    return Plan(project, options, run, note, tuple(names), tuple(todo))


def begin(plan: Plan) -> Manifest:
    "Open the run folder and its manifest."
    run = plan.run
    manifest = Manifest(run.folder)
    manifest.update(
        run=run.folder.name,
        profile=run.profile,
        status='running',
        started=manifest.data.get('started', now()),
        git=git_state(plan.project.root),
        packages=installed_packages(),
        settings=settings_receipt(run.config),
        notebooks=manifest.data.get('notebooks', {}),
    )
    return manifest


def run_stage(
    plan: Plan,
    name: str,  # of the notebook
    manifest: Manifest,  # of `begin`
) -> None:
    "Run one notebook and record it in the manifest. `NotebookFailed` if it stops."
    start = time.time()
    nbs = plan.project.nbs
    folder = plan.run.folder
    manifest.record(name, status='running')
    parameters = dict(
        profile=os.path.relpath(plan.run.path, nbs),
        run_dir=os.path.relpath(folder, nbs),
        changes=plan.options.changes,
    )
    execute(nbs / f'{name}.ipynb', folder / f'{name}.ipynb', nbs, parameters)
    manifest.record(name, status='done', seconds=round(time.time() - start, 1))


def _option_words(name, value):  # a field of `Options` as words of a command
    flag = f'--{name.replace("_", "-")}'
    if not value:
        return []
    if value is True:
        return [flag]
    return [flag, value if isinstance(value, str) else ','.join(value)]


def command_line(options: Options) -> str:
    "The shell command with the same options."
    words = ['stepwise-routing', 'reproduce', '--profile', str(options.profile)]
    for name, value in asdict(replace(options, profile='', changes={})).items():
        words += _option_words(name, value)
    for name, value in options.changes.items():
        words += change_words(name, value)
    return shlex.join(words)


def how_to_continue(
    plan: Plan,
    error: BaseException,  # a `NotebookFailed`, a full disk, or an interrupt
) -> str:
    "One line: why a run ended, and the command that continues it with the same settings."
    folder = plan.run.folder
    line = f'run {folder.name} interrupted'
    if not isinstance(error, KeyboardInterrupt):
        line = f'{error} (executed copy and log.txt in {plan.project.short(folder)})'
    command = command_line(replace(plan.options, run_id=folder.name, resume=True))
    if not shutil.which('stepwise-routing'):
        command = f'{os.path.relpath(Path(sys.executable).parent)}/{command}'
    return f'{line}; continue with: {command}'


def run_plan(plan: Plan) -> Manifest:
    "Carry out a plan. After `NotebookFailed` or Ctrl-C the run can be resumed."
    with sole_runner(plan.run.store), ends_soon():
        manifest = begin(plan)
        try:
            for i, name in enumerate(plan.stages, 1):
                skipped = '' if name in plan.todo else ' is not run again'
                print(f'[{i}/{len(plan.stages)}] {name}{skipped}', flush=True)
                if name in plan.todo:
                    run_stage(plan, name, manifest)
                    print(f'{"":6}{manifest.stage(name)["seconds"]:.0f} s', flush=True)
        except (NotebookFailed, OSError, KeyboardInterrupt) as e:
            status = 'interrupted' if isinstance(e, KeyboardInterrupt) else 'failed'
            with contextlib.suppress(OSError):  # the disk may be full
                manifest.record(name, status=status)
                manifest.update(status=status, ended=now())
            raise type(e)(how_to_continue(plan, e)) from None
        complete = all(manifest.is_finished(name) for name in plan.stages)
        manifest.update(status='finished' if complete else 'incomplete', ended=now())
    return manifest
