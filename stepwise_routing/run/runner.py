"""One command runs the numbered notebooks in order, survives interruption, and records what went in and out"""

import ast
import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import distributions, version
from operator import attrgetter
from pathlib import Path
from unittest import mock

from ..base.tools import PACKAGE, Project, find_project, nearest, write_file
from .config import KEYS, Run, open_run


def notebook_cells(path):
    "The cells of a notebook, each source in one piece."
    return [
        dict(c, source=''.join(c['source']))
        for c in json.loads(Path(path).read_text('utf-8'))['cells']
    ]


def declared(path):
    "Names of the parameters of a notebook; none without a `parameters` cell."
    source = ''.join(
        c['source'] for c in notebook_cells(path) if 'parameters' in c['metadata'].get('tags', [])
    )
    return {
        n.id
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def stages(project):
    "Names of the notebooks that have a number and parameters, in running order."
    return [p.stem for p in sorted(project.nbs.glob('[0-9][0-9]*_*.ipynb')) if declared(p)]


def _receipt(file):
    "What a manifest says; {} without one, or with one that this version cannot read, which is told once."
    try:
        if not file.is_file():
            return {}
        data = json.loads(file.read_text('utf-8'))
        done = [
            Path(f)
            for past in data['notebooks'].values()
            if past['status'] == 'done'
            for f in past['artefacts']
        ]
        texts = all(isinstance(data[k], str) for k in ('profile', 'started', 'status'))
        if texts and not any(f.is_absolute() or '..' in f.parts for f in done):
            return data
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return _skip(file)


@lru_cache
def _skip(file):
    print(f'{file} is damaged or of another version: skipped', file=sys.stderr)
    return {}


class Manifest:
    "The receipt of a run, `runs/<id>/manifest.json`; empty where there is none."

    def __init__(self, folder):
        self.folder, self.data = Path(folder), _receipt(Path(folder) / 'manifest.json')

    def __getitem__(self, key):
        return self.data[key]

    def stage(self, name):
        return self.data.get('notebooks', {}).get(name, {})

    def record(self, name, **facts):
        self.update(notebooks={**self.data.get('notebooks', {}), name: facts})

    def update(self, **facts):
        self.data |= facts
        write_file(self.folder / 'manifest.json', json.dumps(self.data, indent=1) + '\n')


def files_in(folder):  # relative path -> path
    return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob('*')) if p.is_file()}


def file_sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def settings_of(config):
    return {k: attrgetter(k)(config) for k in KEYS}  # by their full names


def _now():
    return datetime.now(timezone.utc).isoformat(timespec='milliseconds')


def _output_of(*command, cwd=None):
    "What a command prints; None where it is missing or fails."
    options = dict(
        cwd=cwd, capture_output=True, text=True, check=True, timeout=20, stdin=subprocess.DEVNULL
    )
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, **options).stdout.strip()


def _hardware():
    "The machine."
    import psutil

    info = Path('/proc/cpuinfo')
    cpu = platform.processor() or platform.machine()
    if info.is_file():
        cpu = ([*re.findall(r'model name\s*: (.+)', info.read_text()), cpu])[0]
    gpus = _output_of('nvidia-smi', '--query-gpu=name', '--format=csv,noheader') or ''
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    system = f'{platform.system()} {platform.machine()}'
    return dict(
        cpus=os.cpu_count(), cpu=cpu, memory_gib=memory, gpus=gpus.splitlines(), system=system
    )


def library_versions(package=PACKAGE):
    "The `VERSION` of every module that has one, read without importing it."
    texts = {
        name: path.read_text('utf-8')
        for name, path in files_in(package).items()
        if name.endswith('.py')
    }
    return {
        name: int(m[1])
        for name, text in texts.items()
        if (m := re.search(r'^VERSION\s*=\s*(\d+)', text, re.M))
    }


def shipped_models():
    "SHA-256 of every file of the micro models, which are part of the package."
    return {
        f'micro_models/{name}': file_sha256(path)
        for name, path in files_in(PACKAGE / 'micro_models').items()
    }


SINCE = dict(
    policy='03', sweep='03', baselines='04', results='05'
)  # the first stage that reads a section; others: all

DECISIVE = (
    'numpy scipy torch numba safetensors math-verify scikit-learn pandas matplotlib seaborn'.split()
)  # packages


def _fingerprints(project, config):
    "Notebook -> a hash of what this stage is made of, in running order."
    data = [
        file_sha256(f)
        for f in sorted((project.nbs / config.data.data_dir).glob('*.jsonl'))
        if config.data.data_dir
    ]
    shared = [
        library_versions(),
        shipped_models(),
        data,
        {name: version(name) for name in DECISIVE},
    ]
    out = {}
    past = ''
    for name in stages(project):
        source = [
            c['source']
            for c in notebook_cells(project.nbs / f'{name}.ipynb')
            if c['cell_type'] == 'code'
        ]
        read = {
            k: v
            for k, v in settings_of(config).items()
            if name >= SINCE.get(k.partition('.')[0], '')
        }
        out[name] = past = hashlib.sha256(
            json.dumps([shared, past, source, read]).encode()
        ).hexdigest()
    return out


def _is_finished(manifest, name, mark=None):
    "Has this stage finished in this run, are its files there and untouched, is its fingerprint (None: any) this one?"
    past = manifest.stage(name)
    executed = manifest.folder / f'{name}.ipynb'
    if past.get('status') != 'done' or mark not in (None, past.get('fingerprint')):
        return False
    files = {manifest.folder / f: sha for f, sha in past['artefacts'].items()}
    return executed.is_file() and all(
        f.is_file() and file_sha256(f) == sha for f, sha in files.items()
    )


@dataclass(frozen=True)
class Options:
    "What a reproduction is asked for: the words of the command line, see `command_line`."

    profile: str = 'micro'  # a file of nbs/params by name, or a .yaml file; default: micro
    only: tuple = ()  # only these notebooks, of the run that --run-id or --resume names
    resume: bool = False  # continue the newest unfinished run of the profile, or the one named
    run_id: str = ''  # name of the folder in runs/; default: profile and time
    fresh: bool = (
        False  # take over no stage from earlier runs; what the store holds is not drawn again
    )
    write_back: bool = False  # store the outputs in the notebooks of nbs/
    publish: bool = False  # copy tables/ and figures/ to the top level whatever the profile
    project: str = ''  # the clone; default: the one we are in
    changes: dict = field(
        default_factory=dict
    )  # change a setting, e.g. -p policy.alpha=.05; may be repeated


def _past_runs(project, profile):
    "Manifests of the runs of a profile, the newest first."
    found = [m for m in map(Manifest, project.runs.glob('*')) if m.data.get('profile') == profile]
    return sorted(found, key=lambda m: m['started'], reverse=True)


def _newest_unfinished(project, profile, options):
    "The run that `--resume` means, or a new one."
    newest = next(iter(_past_runs(project, profile)), None)
    if options.resume and newest and (options.only or newest['status'] != 'finished'):
        return newest.folder.name, 'continued'
    none = f'; no unfinished run of profile {profile} to resume' if options.resume else ''
    return f'{profile}-{datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")[:-3]}', f'new{none}'


def _pick_run(project, profile, options):
    "Name of the folder to write to, what to say about it. ValueError for a run that cannot be used."
    name = options.run_id
    past = Manifest(project.runs / options.run_id).data
    if not name:
        return _newest_unfinished(project, profile, options)
    if not re.fullmatch(r'\w[\w.-]*', name) or name in ('store', 'lessons'):
        raise ValueError(f'{name!r} cannot name a run: use letters, digits, ".", "-" and "_"')
    if not past and (project.runs / name / 'manifest.json').is_file():
        raise ValueError(
            f'runs/{name}/manifest.json cannot be read: choose another --run-id, or delete that run'
        )
    if past and past['profile'] != profile:
        raise ValueError(f'run {name!r} is of profile {past["profile"]}, not {profile}')
    if past and not (options.resume or options.only):
        raise ValueError(
            f'run {name!r} exists: continue it with --resume, or choose another --run-id'
        )
    return name, 'continued' if past else 'new' + '; no run of this name to resume' * options.resume


def choose(wanted, names):
    "Those notebooks that `--only 01,05_results` means, all if none. ValueError for one that is not there."
    for w in wanted:
        if not any(w in (n, n.split('_')[0]) for n in names):
            raise ValueError(f'no notebook {w!r}{nearest(w, names)}; there are: {", ".join(names)}')
    return [n for n in names if not wanted or {n, n.split('_')[0]} & set(wanted)]


@dataclass(frozen=True)
class Plan:
    "What a reproduction will do."

    project: Project
    options: Options
    run: Run  # settings and folders
    note: str  # whether the run is new or continued
    stages: dict  # notebook -> fingerprint, all of them in order
    todo: tuple  # the names of those that will run
    taken: dict  # notebook -> folder of an earlier run that has it unchanged

    def why_not(self, name):  # '' where it runs
        "Why a notebook is not run."
        if name in self.taken:
            return f': unchanged, taken over from {self.taken[name].name}'
        return '' if name in self.todo else ' is not run again'

    def took(self, name):  # '' where it has not run yet
        "How long a notebook took in the newest run of the profile that has it."
        for past in _past_runs(self.project, self.run.profile):
            if t := past.stage(name).get('seconds'):
                return f': took {t / 60:.1f} min in run {past.folder.name}'
        return ''


def _unchanged(project, run, options, marks):
    "Notebook -> folder of a run that has it and all before it finished: this one if resumed, else the newest other."
    alone = options.fresh or options.only or not run.store.is_dir()
    others = [m for m in _past_runs(project, run.profile) if m.folder != run.folder and not alone]
    out = {}
    for manifest in [Manifest(run.folder)] * options.resume + others:
        if len(out) == len(marks):
            break
        for name in itertools.takewhile(lambda n: _is_finished(manifest, n, marks[n]), marks):
            out.setdefault(name, manifest.folder)
    return out


def plan(options: Options) -> Plan:
    "Decide what runs where, and write nothing. ValueError or FileNotFoundError where it cannot work."
    project = find_project(options.project or None)
    run = open_run(options.profile, '', options.changes, project)
    names, (run_id, note) = stages(project), _pick_run(project, run.profile, options)
    run = replace(run, folder=project.runs / run_id)
    chosen = choose(options.only, names)
    marks = _fingerprints(project, run.config)
    past = Manifest(run.folder)
    missing = [n for n in names if n not in chosen and n < chosen[-1] and not _is_finished(past, n)]
    if missing:
        reads = f'--only {",".join(options.only)} reads what {", ".join(missing)} wrote, and run {run_id} lacks it'
        raise ValueError(
            f'{reads}: name another with --run-id, or continue the newest with --resume'
        )
    there = _unchanged(project, run, options, marks)
    taken = {n: folder for n, folder in there.items() if folder != run.folder}
    return Plan(
        project, options, run, note, marks, tuple(n for n in chosen if n not in there), taken
    )


THREADS = {f'{library}_NUM_THREADS': '1' for library in ('OMP', 'MKL', 'OPENBLAS')}

MEMORY = dict(
    MALLOC_MMAP_THRESHOLD_='33554432', MALLOC_TRIM_THRESHOLD_='1073741824'
)  # Linux: reuse what was freed

KERNEL_SETTINGS = dict(
    MKL_CBWR='COMPATIBLE',
    ATEN_CPU_CAPABILITY='avx2',
    OPENBLAS_CORETYPE='Haswell',
    NPY_DISABLE_CPU_FEATURES='X86_V4 AVX512_ICL AVX512_SPR',
)


def has_avx2():  # as Linux tells it; elsewhere nobody asks
    facts = Path('/proc/cpuinfo')
    return facts.is_file() and bool(re.search(r'\bavx2\b', facts.read_text(errors='replace')))


@contextlib.contextmanager
def sole_runner(store):
    "Let one process at a time use runs/store/<profile>, and set what kernels inherit. RuntimeError for the second."
    from ..base.store import one_writer

    store.mkdir(parents=True, exist_ok=True)
    given = THREADS | MEMORY | (KERNEL_SETTINGS if has_avx2() else {})
    inherited = {**given, **os.environ, 'PYTHONHASHSEED': '0', 'JUPYTER_PREFER_ENV_PATH': '1'}
    try:
        lock = one_writer(store)
    except BlockingIOError:
        raise RuntimeError(
            f'another run of profile {store.name} is going on: wait for it'
        ) from None
    with contextlib.closing(lock), mock.patch.dict(os.environ, inherited):
        yield


class NotebookFailed(RuntimeError):
    "A notebook stopped; the message is one line that says where and why."


def _failure(source, executed, error):
    "Where a notebook stopped, in the last cell begun, and why: `05_results, cell 7 (table-1): ValueError: ...`."
    cells = notebook_cells(executed) if executed.is_file() else []
    ids = [c.get('id') for c in notebook_cells(source)]
    begun = [c.get('id') for c in cells if c['metadata'].get('papermill', {}).get('start_time')]
    place = next((f', cell {ids.index(i)} ({i})' for i in begun[-1:] if i in ids), '')
    name = getattr(error, 'ename', type(error).__name__)
    value = getattr(error, 'evalue', error)
    if name == 'DeadKernelError':
        value = 'the kernel died; often the memory ran out'
    return f'{source.stem}{place}: {name}: {" ".join(str(value).split())[:300]}'


@contextlib.contextmanager
def _watched(name, folder):  # where processes note their progress
    "Say how far the running cell is: once a second on a terminal, else once a minute."
    end = threading.Event()
    begin = time.time()
    looks = sys.stderr.isatty()

    def watch():
        while not end.wait(1 if looks else 60):
            notes = [
                f'{time.time() - begin:.0f} s',
                *(p.read_text('utf-8') for p in sorted(folder.iterdir())),
            ]
            line = f'{name}: ' + ' | '.join(notes)
            width = shutil.get_terminal_size().columns - 1
            print(
                f'\r\x1b[K{line[:width]}' if looks else line,
                end='' if looks else '\n',
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        if looks:
            print('\r\x1b[K', end='', file=sys.stderr, flush=True)


def _engine():
    "Name of papermill's engine that ends a kernel at once when its cells have run."
    from papermill.engines import NBClientEngine, PapermillNotebookClient, papermill_engines

    class Client(PapermillNotebookClient):
        def papermill_execute_cells(self):
            super().papermill_execute_cells()
            self.shutdown_kernel = 'immediate'

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(
            cls, notebook, kernel_name, start_timeout, input_path, **options
        ):
            Client(
                notebook, kernel_name=kernel_name, startup_timeout=start_timeout, **options
            ).execute()

    papermill_engines.register('stepwise', Engine)
    return 'stepwise'


def execute(source, executed, folder, parameters={}):
    "Run a notebook in a folder, keep its executed copy and, in log.txt beside that, what it prints; or NotebookFailed."
    import papermill as pm
    from traitlets.config import Config

    executed.unlink(missing_ok=True)
    options = dict(
        kernel_name='python3',
        language='python',
        start_timeout=300,
        progress_bar=False,
        cwd=str(folder),
    )
    with (
        open(executed.with_name('log.txt'), 'a', encoding='utf-8') as log,
        tempfile.TemporaryDirectory(prefix='stepwise-', ignore_cleanup_errors=True) as sockets,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as notes,
        _watched(source.stem, Path(notes)),
    ):
        print(_now(), source.stem, file=log, flush=True)
        os.environ['STEPWISE_PROGRESS'], manager = (
            notes,
            dict(shutdown_wait_time=150.0),
        )  # calls under way may end
        options |= dict(
            extra_arguments=['--log-level=50'],
            stdout_file=log,
            stderr_file=log,
            engine_name=_engine(),
        )
        if os.name != 'nt' and len(sockets) < 90:  # a socket's path ends near 100 characters
            manager |= dict(transport='ipc', ip=f'{sockets}/k')
        options['config'] = Config(KernelManager=manager)
        try:
            pm.execute_notebook(str(source), str(executed), parameters, **options)
        except Exception as e:
            raise NotebookFailed(_failure(source, executed, e)) from None


def _artefacts(folder):
    "Every file in a run folder that a notebook wrote."
    own = re.compile(r'(\d\d[a-z]?_\w+\.ipynb|manifest\.json|log\.txt)(\.part)?')
    return {name: path for name, path in files_in(folder).items() if not own.fullmatch(name)}


def _begin(plan):
    "Open the run folder and its manifest."
    manifest = Manifest(plan.run.folder)
    run = plan.run
    root = plan.project.root
    keep = {
        n: manifest.stage(n)
        for n in plan.stages
        if n not in {*plan.todo, *plan.taken} and manifest.stage(n)
    }
    settings = json.dumps(settings_of(run.config)).replace(
        f'{Path.home()}/', '~/'
    )  # a receipt names nobody
    packages = dict(sorted((d.metadata['Name'], d.version) for d in distributions()))
    inputs = [*(plan.project.nbs / f'{name}.ipynb' for name in plan.stages), run.path]
    manifest.update(
        run=run.folder.name,
        profile=run.profile,
        status='running',
        continued=_now(),
        started=manifest.data.get('started', _now()),
        python=platform.python_version(),
        git=_output_of(
            'git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*', cwd=root
        ),
        packages=packages,
        hardware=_hardware(),
        settings=json.loads(settings),
        inputs={p.name: file_sha256(p) for p in inputs} | shipped_models(),
        notebooks=keep,
    )
    recorded = {f for past in keep.values() for f in past.get('artefacts', ())}
    for name, path in _artefacts(run.folder).items():
        if name not in recorded:
            path.unlink()  # left by a stage that is about to run, or half done
    return manifest


def _run_stage(plan, name, manifest):
    "Run one notebook and enter it into the manifest."
    start = time.time()
    nbs = plan.project.nbs
    folder = plan.run.folder
    facts = dict(fingerprint=plan.stages[name], started=_now())
    before = _artefacts(folder)
    paths = {
        k: os.path.relpath(p, nbs) for k, p in dict(profile=plan.run.path, run_dir=folder).items()
    }
    manifest.record(name, status='running', **facts)
    execute(
        nbs / f'{name}.ipynb',
        folder / f'{name}.ipynb',
        nbs,
        paths | dict(changes=plan.options.changes),
    )
    new = {f: file_sha256(p) for f, p in _artefacts(folder).items() if f not in before}
    manifest.record(
        name, status='done', **facts, seconds=round(time.time() - start, 1), artefacts=new
    )


def _take_over(plan, name, manifest):
    "Copy what an unchanged notebook made in an earlier run, and the executed notebook."
    past = Manifest(plan.taken[name])
    folder = plan.run.folder
    facts = past.stage(name) | dict(taken_from=past.folder.name)
    for file in (f'{name}.ipynb', *facts['artefacts']):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(past.folder / file, folder / file)
    manifest.record(name, **facts)


def command_line(options: Options) -> str:
    "The command that asks for the same, for a shell."
    import yaml

    words = ['stepwise-routing', 'reproduce', '--profile', str(options.profile)]
    for name, value in asdict(replace(options, profile='', changes={})).items():
        flag = f'--{name.replace("_", "-")}'
        if value:
            words += (
                [flag]
                if value is True
                else [flag, value if isinstance(value, str) else ','.join(value)]
            )
    for k, v in options.changes.items():
        value = yaml.safe_dump(
            [v if type(v) is not tuple else [*v]], default_flow_style=True, width=math.inf
        )
        words += ['-p', f'{k}={value.strip()[1:-1]}']
    return shlex.join(words)


def _told(plan, error):
    "What ended a run, and the command that continues it with the same settings."
    folder, line = plan.run.folder, f'run {plan.run.folder.name} interrupted'
    if isinstance(error, NotebookFailed):
        line = f'{error} (executed copy and log.txt in {plan.project.short(folder)})'
    command = command_line(replace(plan.options, run_id=folder.name, resume=True))
    if not shutil.which('stepwise-routing'):
        command = f'{os.path.relpath(Path(sys.executable).parent)}/{command}'
    return f'{line}; continue with: {command}'


def run_plan(plan: Plan) -> Manifest:
    "Run what a plan says; a `NotebookFailed` or Ctrl-C leaves a run that can be resumed."
    with sole_runner(plan.run.store):
        manifest = _begin(plan)
        try:
            for i, name in enumerate(plan.stages, 1):
                print(f'[{i}/{len(plan.stages)}] {name}{plan.why_not(name)}', flush=True)
                if name in plan.taken:
                    _take_over(plan, name, manifest)
                elif name in plan.todo:
                    _run_stage(plan, name, manifest)
                    print(f"{'':6}{manifest.stage(name)['seconds']:.0f} s", flush=True)
        except (NotebookFailed, KeyboardInterrupt) as e:
            status = 'failed' if isinstance(e, NotebookFailed) else 'interrupted'
            manifest.record(name, **manifest.stage(name) | dict(status=status))
            manifest.update(status=status, ended=_now())
            raise type(e)(_told(plan, e)) from None
        complete = all(_is_finished(manifest, name) for name in plan.stages)
        manifest.update(status='finished' if complete else 'incomplete', ended=_now())
    return manifest
