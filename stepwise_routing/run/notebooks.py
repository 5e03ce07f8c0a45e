"""One notebook: its cells, its parameters, and its execution in a kernel

Here belongs all work on a single notebook and its process. Which notebooks run, and in which order,
belongs in `run.runner`.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from unittest import mock

from ..util import END_SIGNALS, install_line, one_line, repeating, told_to_end

ONE_THREAD = {f'{library}_NUM_THREADS': '1' for library in ('OMP', 'MKL', 'OPENBLAS')}

MEMORY = dict(  # environment of kernels: on Linux, reuse freed memory
    MALLOC_MMAP_THRESHOLD_='33554432',
    MALLOC_TRIM_THRESHOLD_='1073741824',
)

KERNEL_SETTINGS = dict(
    MKL_CBWR='COMPATIBLE',
    ATEN_CPU_CAPABILITY='avx2',
    OPENBLAS_CORETYPE='Haswell',
    NPY_DISABLE_CPU_FEATURES='X86_V4 AVX512_ICL AVX512_SPR',
)

SHUTDOWN_SECONDS = 150.0  # time for a kernel to end the paid calls under way
LONGEST_SOCKET_FOLDER = 90  # characters; the path of a socket may have about 100


def now() -> str:
    "The time in UTC, to the millisecond."
    return datetime.now(timezone.utc).isoformat(timespec='milliseconds')


def notebook_cells(path) -> list:  # of dicts
    "The cells of a notebook. The source of each is one text."
    cells = json.loads(Path(path).read_text('utf-8'))['cells']
    return [dict(cell, source=''.join(cell['source'])) for cell in cells]


def parameter_names(path) -> set:
    "Names of a notebook's parameters. Empty if it has no `parameters` cell."
    names = set()
    for cell in notebook_cells(path):
        if 'parameters' in cell['metadata'].get('tags', []):
            for node in ast.walk(ast.parse(cell['source'])):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names


def stage_names(project) -> list:
    "Names of the notebooks with a number and parameters, in the order in which they run."
    numbered = sorted(project.nbs.glob('[0-9][0-9]*_*.ipynb'))
    return [path.stem for path in numbered if parameter_names(path)]


def lesson_sources(project) -> dict:  # name such as "00_records" or "labs/01_micro_models" -> path
    "The notebooks that no run executes, as they have no parameters: lessons, the index and the labs."
    sources = {}
    for path in sorted(project.nbs.rglob('*.ipynb')):
        inside = path.relative_to(project.nbs)
        hidden = any(part.startswith(('.', '_')) for part in inside.parts)
        if not hidden and not parameter_names(path):
            sources[inside.with_suffix('').as_posix()] = path
    return sources


def has_avx2() -> bool:
    "Does Linux say that this processor has AVX2? False on other systems."
    facts = Path('/proc/cpuinfo')
    return facts.is_file() and bool(re.search(r'\bavx2\b', facts.read_text(errors='replace')))


def kernel_environment() -> dict:
    "Environment variables of a kernel: those of this process, and what decides how a kernel rounds and runs."
    defaults = ONE_THREAD | MEMORY
    if has_avx2():
        defaults |= KERNEL_SETTINGS
    always = dict(PYTHONHASHSEED='0', JUPYTER_PREFER_ENV_PATH='1')
    return defaults | os.environ | always


@contextlib.contextmanager
def sole_runner(
    store: Path,  # runs/store/<profile>
):
    """During a `with` block, this process alone may use the store, and kernels inherit its settings.
    RuntimeError if another process uses it."""
    from ..store import one_writer

    store.mkdir(parents=True, exist_ok=True)
    try:
        lock = one_writer(store)
    except BlockingIOError:
        raise RuntimeError(
            f'another run of profile {store.name} is under way: wait for its end'
        ) from None
    with contextlib.closing(lock), mock.patch.dict(os.environ, kernel_environment()):
        yield


def open_lab(
    project,  # `Project`
    options: list,  # of `jupyter lab`
):
    "Become JupyterLab on the chapters of a clone, with kernels that round like those of a run."
    import importlib.util

    if not importlib.util.find_spec('jupyterlab'):
        raise ImportError(f'jupyterlab is not installed: {install_line("dev")}')
    command = [sys.executable, '-m', 'jupyterlab', str(project.nbs), *options]
    os.execve(sys.executable, command, kernel_environment())


LAST_SECONDS = 5.0  # time for processes to end after SIGTERM or SIGHUP


def _end_all():
    "End this process and all processes that it has started."
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    time.sleep(2)  # time for the code that waits for them to print how to continue
    os._exit(1)


@contextlib.contextmanager
def ends_soon():
    """During a `with` block, SIGTERM and SIGHUP act like Ctrl-C, but no process goes on for long.

    After Ctrl-C, paid calls may take their time. The sender of SIGTERM or SIGHUP will not wait for them."""

    def interrupt(*_):
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        timer = threading.Timer(LAST_SECONDS, _end_all)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    with told_to_end(interrupt):
        yield


class NotebookFailed(RuntimeError):
    "A notebook stopped. The message is one line: where, and why."


def _last_cell(source, executed) -> str:
    "Id of the cell that was started last. '' if no cell of the notebook was, or the copy is cut off."
    own_ids = [cell.get('id') for cell in notebook_cells(source)]
    try:
        cells = notebook_cells(executed)
    except (OSError, ValueError):  # no copy yet, or no room for all of it
        return ''
    started = ''
    for cell in cells:
        if cell['metadata'].get('papermill', {}).get('start_time'):
            started = cell.get('id')
    return started if started in own_ids else ''


def failure_line(
    source: Path,  # the notebook
    executed: Path,  # its executed copy, up to the failure
    error: Exception,  # of papermill or of the kernel
) -> str:
    "One line: where a notebook stopped, and why. `05_results, cell 7 (table-1): ValueError: ...`."
    name = getattr(error, 'ename', type(error).__name__)
    reason = getattr(error, 'evalue', error)
    if name == 'DeadKernelError':
        reason = 'the kernel died; often the memory ran out'
    where = source.stem
    cell_id = _last_cell(source, executed)
    if cell_id:
        ids = [cell.get('id') for cell in notebook_cells(source)]
        where += f', cell {ids.index(cell_id)} ({cell_id})'
    reason = one_line(' '.join(str(reason).split()))
    return f'{where}: {name}: {reason[:300]}'


def _print_progress(name, begin, folder, on_terminal):
    "Print one line on stderr: seconds so far, the notes of the processes."
    notes = [f'{time.time() - begin:.0f} s']
    notes += [path.read_text('utf-8') for path in sorted(folder.iterdir())]
    line = one_line(f'{name}: ' + ' | '.join(notes))
    if on_terminal:
        width = shutil.get_terminal_size().columns - 1
        print(f'\r\x1b[K{line[:width]}', end='', file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_shown(
    name: str,  # of the notebook
    folder: Path,  # where processes note their progress
):
    "Print the progress of the running cell, every second on a terminal, else every minute."
    on_terminal = sys.stderr.isatty()
    show = partial(_print_progress, name, time.time(), folder, on_terminal)
    try:
        with repeating(1 if on_terminal else 60, show):
            yield
    finally:
        if on_terminal:
            print('\r\x1b[K', end='', file=sys.stderr, flush=True)


def _engine() -> str:
    "Register our engine with papermill and return its name. It ends a kernel as soon as its cells have run."
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
            client = Client(
                notebook, kernel_name=kernel_name, startup_timeout=start_timeout, **options
            )
            client.execute()

    papermill_engines.register('stepwise', Engine)
    return 'stepwise'


def _kernel_config(
    sockets,  # an empty folder
):
    "Settings of the kernel: how it ends, and that it talks through files of this user only."
    from traitlets.config import Config

    manager = dict(shutdown_wait_time=SHUTDOWN_SECONDS)
    if os.name != 'nt' and len(sockets) < LONGEST_SOCKET_FOLDER:
        manager |= dict(transport='ipc', ip=f'{sockets}/k')
    return Config(KernelManager=manager)


def _kernels() -> set:
    "The kernels that this process has started."
    import psutil

    kernels = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if 'ipykernel_launcher' in process.cmdline():
                kernels.add(process)
    return kernels


def _end_kernels(before: set) -> None:
    "End kernels that are left over: papermill does not know a kernel that was interrupted at its start."
    import psutil

    for process in _kernels() - before:
        with contextlib.suppress(psutil.Error):
            process.kill()
            process.wait(5)


def execute(
    source: Path,  # the notebook
    executed: Path,  # its executed copy; log.txt beside it keeps the printed text
    folder: Path,  # working directory of the kernel
    parameters=None,  # name -> value; None: the notebook's own values
) -> None:
    "Run a notebook in a kernel of its own. `NotebookFailed` if it stops."
    import papermill

    executed.unlink(missing_ok=True)
    with (
        open(executed.with_name('log.txt'), 'a', encoding='utf-8') as log,
        tempfile.TemporaryDirectory(prefix='stepwise-', ignore_cleanup_errors=True) as sockets,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as notes,
        progress_shown(source.stem, Path(notes)),
    ):
        print(now(), source.stem, file=log, flush=True)
        os.environ['STEPWISE_PROGRESS'] = notes
        before = _kernels()
        try:
            papermill.execute_notebook(
                str(source),
                str(executed),
                parameters or {},
                kernel_name='python3',
                language='python',
                start_timeout=300,
                progress_bar=False,
                cwd=str(folder),
                extra_arguments=['--log-level=50'],
                stdout_file=log,
                stderr_file=log,
                engine_name=_engine(),
                config=_kernel_config(sockets),
            )
        except Exception as e:
            raise NotebookFailed(failure_line(source, executed, e)) from None
        finally:
            _end_kernels(before)
