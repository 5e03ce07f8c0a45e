"""Runs the numbered notebooks in order, can continue after an interruption, and records inputs and outputs

Here belong the plan of a run and carrying it out. The receipt belongs in `run.manifest`, the hash of
a stage in `run.fingerprints`, running one notebook in `run.notebooks`.
"""

import contextlib
import os
import platform
import re
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path

from ..base.tools import Project, check_links, find_project, nearest
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
from .fingerprints import stage_fingerprints
from .manifest import (
    Manifest,
    file_sha256,
    files_in,
    git_state,
    hardware,
    installed_packages,
    shipped_files,
)
from .notebooks import NotebookFailed, ends_soon, execute, now, sole_runner, stage_names

COLD_SHARES = {  # share of the time of a run of profile micro with an empty store, on two cores
    '01_confidence': 0.02,
    '02_rollouts': 0.27,
    '02b_outcomes': 0.03,
    '03b_training': 0.19,
    '04b_comparison': 0.45,
    '05_results': 0.04,
}
MEAN_SHARE = 1 / 6
RESERVED_NAMES = ('store', 'lessons')  # folders in runs/ that are not runs
# folders in a run's folder that are the stages' alone
STAGE_FOLDERS = ('tables', 'figures', 'outcomes', 'policies', 'methods', 'grading', 'api')
WRITTEN_BY_RUNNER = re.compile(r'(\d\d[a-z]?_\w+\.ipynb|manifest\.json|log\.txt)(\.\w+\.part)?')


@dataclass(frozen=True)
class Options:
    "The options of a reproduction. `command_line` turns them into words of the command line."

    profile: str = 'micro'  # a file of nbs/params by name, or a .yaml file; default: micro
    only: tuple = ()  # run only these notebooks, in the run that --run-id or --resume names
    resume: bool = False  # continue the newest unfinished run of the profile, or that of --run-id
    run_id: str = ''  # name of the folder in runs/; default: profile and time
    # run all stages, even those unchanged since an earlier run; the store's draws are still used
    fresh: bool = False
    write_back: bool = False  # store the outputs in the notebooks of nbs/
    publish: bool = False  # copy tables/ and figures/ to the top level, for any profile
    project: str = ''  # the clone; default: the one we are in
    # change a setting, e.g. -p policy.alpha=.05; may be repeated
    changes: dict = field(default_factory=dict)


def past_runs(project: Project, profile: str) -> list:
    "Manifests of a profile's runs, newest first. A run dated in the future, by a wrong clock, counts as the oldest."
    manifests = [Manifest(folder) for folder in project.runs.glob('*')]
    of_profile = [m for m in manifests if m.data.get('profile') == profile]
    time = now()
    return sorted(of_profile, key=lambda m: (m['started'] <= time, m['started']), reverse=True)


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
OF_THE_LAST_STAGE = 'results.n_boot'  # `--only` may change it, too


def _decisive(different):  # of `different_settings`
    "The names of the settings that decide results."
    return [name for name in different if name not in FREE]


def _newest_unfinished(project, run, options):
    "(Name of the run that `--resume` continues, or of a new run; a note about it)."
    note = 'new'
    if options.resume:
        note = f'new; no unfinished run of profile {run.profile} to resume'
        runs = past_runs(project, run.profile)
        if runs and (options.only or runs[0]['status'] != 'finished'):
            newest = runs[0].folder
            others = _decisive(different_settings(replace(run, folder=newest)))
            if options.only or not others:
                return newest.name, 'continued'
            note = f'new; {newest.name}, which is unfinished, has another {others[0]}'
    time_stamp = datetime.now(timezone.utc).strftime('%Y%m%d-%H%M%S-%f')[:-3]
    return f'{run.profile}-{time_stamp}', note


def _named_run(project, run, options):
    "(Name of the run that `--run-id` names; a note about it). ValueError if it cannot be used."
    name = options.run_id
    if not FOLDER_NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise ValueError(f'{name!r:.90} cannot name a run: use {FOLDER_WORDS}')
    past = Manifest(project.runs / name).data
    if not past:
        if (project.runs / name / 'manifest.json').is_file():
            raise ValueError(
                f'runs/{name}/manifest.json cannot be read: '
                'choose another --run-id, or delete that run'
            )
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
    stages: dict  # notebook -> fingerprint, for all notebooks in order
    todo: tuple  # names of the notebooks that will run
    taken: dict  # notebook -> folder of an earlier run, whose unchanged results are taken over

    def why_not(self, name: str) -> str:
        "The reason why a notebook does not run. '' if it runs."
        if name in self.taken:
            return f': unchanged, taken over from {self.taken[name].name}'
        return '' if name in self.todo else ' is not run again'

    def took(self, name: str) -> str:
        "The time a notebook took in the profile's newest run that has it, in words. '' if no run has it."
        for past in past_runs(self.project, self.run.profile):
            seconds = past.stage(name).get('seconds')
            if seconds:
                return f': took {seconds / 60:.1f} min in run {past.folder.name}'
        return ''

    def share_done(self, finished) -> float:
        "The share of the work, 0 to 1, that is done when these notebooks have run. An estimate."
        weights = {name: COLD_SHARES.get(name, MEAN_SHARE) for name in self.todo}
        done = [weight for name, weight in weights.items() if name in finished]
        return sum(done) / sum(weights.values()) if weights else 1.0


def _finished_stages(project, run, options, fingerprints):
    """Notebook -> folder of a run that has finished it and all before it: the resumed run itself, or
    else the newest other run."""
    candidates = []
    if options.resume:
        candidates.append(Manifest(run.folder))
    if run.store.is_dir() and not options.fresh and not options.only:
        candidates += [m for m in past_runs(project, run.profile) if m.folder != run.folder]
    folders = {}
    for manifest in candidates:
        if len(folders) == len(fingerprints):
            break
        finished = takewhile(lambda n: manifest.is_finished(n, fingerprints[n]), fingerprints)
        for name in finished:
            folders.setdefault(name, manifest.folder)
    return folders


def _check_same_settings(options, run):
    "ValueError if a run that goes on was begun with other settings."
    different = different_settings(run)
    settings = _decisive(different)
    if options.only and OF_THE_LAST_STAGE in settings:
        settings.remove(OF_THE_LAST_STAGE)
    if not settings:
        return
    there, here = different[settings[0]]
    more = f' and {len(settings) - 1} more' if len(settings) > 1 else ''
    begun_with = changes_line({name: different[name][0] for name in settings})
    raise ValueError(
        f'run {run.folder.name} was made with {settings[0]}={there}, not {here}{more}: '
        f'go on with {begun_with}, or make a new run '
        '(without --resume and --only), which takes over what has not changed'
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
        raise ValueError(
            f'{project.nbs} has no notebook with a number and parameters, so there is nothing to run: '
            'work in a clone, or make a folder with stepwise-routing init DIR'
        )
    chosen = choose(options.only, names)
    _check_earlier_stages(options, run, names, chosen)
    _check_same_settings(options, run)
    fingerprints = stage_fingerprints(project, run.config)
    finished = _finished_stages(project, run, options, fingerprints)
    taken = {name: folder for name, folder in finished.items() if folder != run.folder}
    todo = tuple(name for name in chosen if name not in finished)
    return Plan(project, options, run, note, fingerprints, todo, taken)


def stage_files(folder: Path) -> dict:  # relative path -> path
    "All files in a run folder that notebooks wrote, and files of the user."
    return {n: path for n, path in files_in(folder).items() if not WRITTEN_BY_RUNNER.fullmatch(n)}


def written_by(stages) -> set:  # entries of a manifest
    "The files that stages wrote, as they are recorded."
    return {file for stage in stages for file in stage.get('artefacts', ())}


def begin(plan: Plan) -> Manifest:
    """Open the run folder and its manifest. Remove old files of the stages that are about to run.

    A stage that was interrupted has recorded no file: what it left in `STAGE_FOLDERS` goes, too.
    """
    run = plan.run
    manifest = Manifest(run.folder)
    recorded = written_by(manifest.data.get('notebooks', {}).values())
    unchanged = {}
    for name in plan.stages:
        is_replaced = name in plan.todo or name in plan.taken
        if manifest.stage(name) and not is_replaced:
            unchanged[name] = manifest.stage(name)
    notebooks = [plan.project.nbs / f'{name}.ipynb' for name in plan.stages]
    inputs = {path.name: file_sha256(path) for path in [*notebooks, run.path]}
    manifest.update(
        run=run.folder.name,
        profile=run.profile,
        status='running',
        continued=now(),
        started=manifest.data.get('started', now()),
        python=platform.python_version(),
        git=git_state(plan.project.root),
        packages=installed_packages(),
        hardware=hardware(),
        settings=settings_receipt(run.config),
        inputs=inputs | shipped_files(),
        notebooks=unchanged,
    )
    kept = written_by(unchanged.values())
    for name, path in stage_files(run.folder).items():
        is_of_a_stage = name in recorded or name.split('/')[0] in STAGE_FOLDERS
        if is_of_a_stage and name not in kept:
            path.unlink()
    return manifest


def progress_words(
    share: float,  # share of the work that is done, 0 to 1
    seconds: float,  # time that it took
) -> str:
    "Words for the share that is done and the time left at this pace. '' at the start and at the end."
    if not 0 < share < 1:
        return ''
    left = seconds * (1 - share) / share
    unit = f'{left / 60:.0f} min' if left > 90 else f'{left:.0f} s'
    return f'about {100 * share:.0f} % of the run done, about {unit} left'


def run_stage(
    plan: Plan,
    name: str,  # of the notebook
    manifest: Manifest,  # of `begin`
    progress: str = '',  # of `progress_words`
) -> None:
    "Run one notebook and record it in the manifest. `NotebookFailed` if it stops."
    start = time.time()
    nbs = plan.project.nbs
    folder = plan.run.folder
    facts = dict(fingerprint=plan.stages[name], started=now())
    times = {file: path.stat().st_mtime_ns for file, path in stage_files(folder).items()}
    manifest.record(name, status='running', **facts)
    parameters = dict(
        profile=os.path.relpath(plan.run.path, nbs),
        run_dir=os.path.relpath(folder, nbs),
        changes=plan.options.changes,
    )
    execute(nbs / f'{name}.ipynb', folder / f'{name}.ipynb', nbs, parameters, progress)
    made = {}
    for file, path in stage_files(folder).items():
        if times.get(file) != path.stat().st_mtime_ns:  # new, or written anew
            made[file] = file_sha256(path)
    seconds = round(time.time() - start, 1)
    manifest.record(name, status='done', **facts, seconds=seconds, artefacts=made)


def take_over(
    plan: Plan,
    name: str,  # of the notebook
    manifest: Manifest,  # of `begin`
) -> None:
    "Copy the results of an unchanged notebook from an earlier run, and its executed copy."
    past = Manifest(plan.taken[name])
    folder = plan.run.folder
    facts = past.stage(name) | dict(taken_from=past.folder.name)
    for file in [f'{name}.ipynb', *facts['artefacts']]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(past.folder / file, folder / file)
    manifest.record(name, **facts)


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
    """Carry out a plan. After `NotebookFailed` or Ctrl-C the run can be resumed.

    ValueError before anything is written, if a folder that it writes to or takes over may lead elsewhere.
    """
    with sole_runner(plan.run.store), ends_soon():
        for folder in (plan.run.folder, plan.run.store, *plan.taken.values()):
            check_links(folder)
        manifest = begin(plan)
        begin_time = time.time()
        finished = []
        progress = ''
        try:
            for i, name in enumerate(plan.stages, 1):
                print(f'[{i}/{len(plan.stages)}] {name}{plan.why_not(name)}', flush=True)
                if name in plan.taken:
                    take_over(plan, name, manifest)
                elif name in plan.todo:
                    run_stage(plan, name, manifest, progress)
                    finished.append(name)
                    share = plan.share_done(finished)
                    progress = progress_words(share, time.time() - begin_time)
                    notes = [f'{manifest.stage(name)["seconds"]:.0f} s', *filter(None, [progress])]
                    print(f'{"":6}{"; ".join(notes)}', flush=True)
        except (NotebookFailed, OSError, KeyboardInterrupt) as e:
            status = 'interrupted' if isinstance(e, KeyboardInterrupt) else 'failed'
            with contextlib.suppress(OSError):  # the disk may be full
                manifest.record(name, **manifest.stage(name) | dict(status=status))
                manifest.update(status=status, ended=now())
            raise type(e)(how_to_continue(plan, e)) from None
        complete = all(manifest.is_finished(name) for name in plan.stages)
        manifest.update(status='finished' if complete else 'incomplete', ended=now())
    return manifest
