"""`stepwise-routing reproduce`: papermill runs the numbered chapters, and a receipt says what came of it.

Not here: what a chapter computes (`run.stages`). A run of minutes needs no stages that resume: drawn steps and
paid replies are kept in runs/store, and that is the resume that matters.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path

from .. import __version__
from ..data.benchmarks import is_question_file
from ..settings import read_profile
from ..util import find_project, write_file
from .stages import Run, open_run

LESSONS = '01_confidence', '03_policy', '03a_training', '04_baselines'
STAGES = '02_rollouts', '05_results'  # they have parameters: profile, folder, changes, draw
SIDE_BY_SIDE = 2  # chapters at a time

ROUNDING = dict(  # environment of a kernel: all x86 processors with AVX2 round alike
    MKL_CBWR='AVX2',
    ATEN_CPU_CAPABILITY='avx2',
    OPENBLAS_CORETYPE='Haswell',
    NPY_DISABLE_CPU_FEATURES='X86_V4 AVX512_ICL AVX512_SPR',
    PYTHONHASHSEED='0',
    PYTHONWARNINGS='ignore:IProgress not found',  # nobody needs widgets here
    **{f'{library}_NUM_THREADS': '1' for library in ('OMP', 'MKL', 'OPENBLAS')},
)


# ---- one chapter


def failure(name: str, error: Exception) -> RuntimeError:
    "One line: which chapter stopped, and why."
    kind = getattr(error, 'ename', type(error).__name__)
    reason = ' '.join(str(getattr(error, 'evalue', error)).split())
    return RuntimeError(f'{name}: {kind}: {reason:.300}')


def run_chapter(nbs: Path, name: str, folder: Path, parameters: dict) -> float:  # seconds
    "Run a chapter in a kernel of its own; its executed copy lies in the run's folder."
    warnings.filterwarnings('ignore', 'IProgress not found')  # nobody needs widgets here
    import papermill

    start = time.time()
    try:
        papermill.execute_notebook(
            nbs / f'{name}.ipynb',
            folder / f'{name}.ipynb',
            parameters,
            kernel_name='python3',
            progress_bar=False,
            cwd=str(nbs),
            extra_arguments=['--log-level=50'],
            stderr_file=sys.stderr,  # progress of draws
        )
    except papermill.PapermillExecutionError as error:
        raise failure(name, error) from None
    seconds = time.time() - start
    print(f'{name}: {seconds:.0f} s', flush=True)
    return seconds


def interrupt(chapters: list) -> None:  # of futures
    "Stop all chapters. The terminal's Ctrl-C does not reach a kernel, and one that starts does not hear the first one."
    import psutil

    for chapter in chapters:
        chapter.cancel()
    while wait(chapters, timeout=0).not_done:
        for kernel in psutil.Process().children():
            kernel.send_signal(signal.SIGINT)
        wait(chapters, timeout=3)


# ---- outputs back into the chapters


def readable(output: dict) -> dict | None:
    "An output without counters; None for progress."
    text = ''.join(output.get('text', ''))
    if output['output_type'] == 'stream' and (output['name'] == 'stderr' or '\r' in text):
        return None
    return output | {key: None for key in ('execution_count',) if key in output}


def write_back(executed: Path, chapter: Path) -> None:
    "Put the outputs of a run into the chapter in nbs/."
    outputs = {}
    for cell in json.loads(executed.read_text('utf-8'))['cells']:
        kept = [readable(output) for output in cell.get('outputs', ())]
        outputs[cell['id']] = [output for output in kept if output]
    notebook = json.loads(chapter.read_text('utf-8'))
    for cell in notebook['cells']:
        if cell['cell_type'] == 'code':
            cell['outputs'] = outputs[cell['id']]
            cell['execution_count'] = None
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    write_file(chapter, text + '\n')


# ---- comparison with the committed tables


def compared(made: Path, committed: Path) -> str:
    "One line: are these tables identical to the committed ones?"
    names = sorted(path.name for path in made.iterdir() if path.name != 'provenance.json')
    differ = []
    for name in names:
        other = committed / name
        if not other.is_file() or other.read_bytes() != (made / name).read_bytes():
            differ.append(name)
    if not differ:
        return f'all {len(names)} tables are identical to the committed ones'
    return f'different from the committed tables: {", ".join(differ)}'


def publish(run: Run, root: Path) -> None:
    "Copy tables and figures of a run to the top level."
    for kind in ('tables', 'figures'):
        for path in (run.folder / kind).iterdir():
            write_file(root / kind / path.name, path.read_bytes())


def git_commit(root: Path) -> str:
    words = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=12']
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or 'no git'


# ---- the run


def with_whole_paths(profile: str, changes: dict) -> dict:
    "Files of questions by their whole paths: chapters run in another folder."
    names = read_profile(profile, changes).data.benchmarks
    if not any(map(is_question_file, names)):
        return changes
    paths = [str(Path(name).resolve()) if is_question_file(name) else name for name in names]
    return changes | {'data.benchmarks': paths}


def parameters_of(run: Run, profile: str, changes: dict) -> dict:
    return dict(profile=profile, folder=str(run.folder), changes=changes, draw=run.draw)


def reproduce(
    profile: str = 'micro',  # a name of nbs/params, or a .yaml file
    changes: dict | None = None,  # such as {"policy.alpha": 0.05}
    draw: int = 0,  # problems a split of the micro benchmarks that are drawn again; 0: the shipped ones
    keep_outputs: bool = False,  # write the outputs back into the chapters of nbs/
) -> Run:
    "Run all chapters. RuntimeError in one line if one stops; call it again: drawn steps are kept."
    project = find_project()
    changes = with_whole_paths(profile, changes or {})
    stamp = datetime.now(timezone.utc).strftime('%Y%m%d-%H%M%S')
    profile = str(Path(profile).resolve()) if profile.endswith('.yaml') else profile
    run = open_run(profile, project.runs / f'{Path(profile).stem}-{stamp}', changes, draw)
    run.folder.mkdir(parents=True)
    print(f'run {project.short(run.folder)}', file=sys.stderr)
    os.environ.update(ROUNDING | os.environ)
    parameters = parameters_of(run, profile, changes)
    start = time.time()

    def chapter(name):
        return run_chapter(project.nbs, name, run.folder, parameters if name in STAGES else {})

    first = STAGES[0], *LESSONS  # the draws begin first
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        chapters = [pool.submit(chapter, name) for name in first]
        try:
            seconds = {name: begun.result() for name, begun in zip(first, chapters)}
            chapters.append(pool.submit(chapter, STAGES[1]))
            seconds[STAGES[1]] = chapters[-1].result()
        except KeyboardInterrupt:
            interrupt(chapters)
            raise

    is_default = profile == 'micro' and not changes and not draw
    note = 'other settings than those of the committed tables'
    if is_default:
        note = compared(run.tables, project.root / 'tables')
        publish(run, project.root)
    if keep_outputs:
        for name in seconds:
            write_back(run.folder / f'{name}.ipynb', project.nbs / f'{name}.ipynb')
    total = time.time() - start
    receipt = dict(profile=profile, changes=changes, draw=draw, version=__version__)
    receipt |= dict(commit=git_commit(project.root), seconds=seconds, total=total, tables=note)
    write_file(run.folder / 'receipt.json', json.dumps(receipt, indent=1) + '\n')
    print((run.tables / 'table1.md').read_text())
    where = 'tables/ and figures/'
    if not is_default:
        where = f'{project.short(run.tables)} and {project.short(run.figures)}'
    print(f'{total:.0f} s; results in {where}; {note}')
    return run


# ---- JupyterLab


def open_lab(options: list) -> None:
    "Become JupyterLab on the chapters of a clone, with kernels that round like those of a run."
    if not shutil.which('jupyter-lab', path=Path(sys.executable).parent):
        raise ImportError('jupyterlab is not installed: pip install -e ".[dev]" in the clone')
    command = [sys.executable, '-m', 'jupyterlab', str(find_project().nbs), *options]
    os.execve(sys.executable, command, ROUNDING | os.environ)
