"""Jobs in processes side by side, each ended when nobody waits for it.

Here belongs how processes start, end and are interrupted. What a job does belongs in `run.stages` and `run.sweep`.
"""

import logging
import os
import shutil
import signal
import threading
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from ..base.tools import note_progress
from ..data.grading import collected, graded
from ..models.model_name import ModelName

# memory of a process with the micro models: it took 0.6 GiB to draw 100 problems, 1.4 to walk 450
WORKER_GIB = 1.5
PATIENCE = 60  # seconds that a job gets to end the paid calls under way
ONE_THREAD = dict(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')


def interrupt_once(number, _):
    "A handler of signals: the first one interrupts; a second one does not cut short what the first has begun."
    signal.signal(number, signal.SIG_IGN)
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)  # tasks that it ends are no news
    raise KeyboardInterrupt


@contextmanager
def wanted_by(
    parent: int,  # process number of who waits for the job
    flag,  # a folder that the parent removes when it wants no answer any more
):
    "Interrupt a job of a worker process when nobody waits for it; it has a minute to end the calls under way."
    done = threading.Event()
    job = threading.get_ident()

    def watch():
        while os.getppid() == parent and os.path.exists(flag):
            if done.wait(0.5):
                return
        if not done.is_set():
            signal.pthread_kill(job, signal.SIGUSR1)
        if not done.wait(PATIENCE) or os.getppid() != parent:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _in_worker(parent, flag, work, *job):
    "Run one job in a worker process; None after an interrupt."
    if os.getpgrp() != os.getpid():
        os.setsid()  # out of the group that Jupyter interrupts and terminates
    signal.signal(signal.SIGUSR1, interrupt_once)
    with suppress(KeyboardInterrupt), wanted_by(parent, flag):
        return work(*job)


def in_processes(
    work,  # what is called with the arguments of each job
    jobs: list,  # tuples of arguments
    workers: int,  # processes; 1: this one
    size=None,  # arguments of a job -> how much work it is; None: all are alike
    ended=None,  # called without arguments whenever a job has ended
) -> list:  # what `work` returns, in the order of the jobs
    """Do the largest jobs first, in processes side by side; of equal ones the last.

    Errors and interrupts reach all processes. A job under way gets a minute to end its paid
    calls, so that they are booked."""
    if workers == 1 or not jobs:
        return [_in_this_process(work, job, ended) for job in jobs]
    from concurrent.futures import as_completed, wait

    from joblib.externals.loky import get_reusable_executor

    sizes = [size(*job) if size else 0 for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: (-sizes[i], -i))
    pool = get_reusable_executor(min(workers, len(jobs)), env=ONE_THREAD)
    with TemporaryDirectory(ignore_cleanup_errors=True) as flag:
        futures = {i: pool.submit(_in_worker, os.getpid(), flag, work, *jobs[i]) for i in order}
        try:
            for future in as_completed(futures.values()):
                future.result()
                if ended:
                    ended()
        finally:  # calls under way come to their end, then no process stays behind
            for future in futures.values():
                future.cancel()
            shutil.rmtree(flag)
            wait(futures.values(), PATIENCE)
            pool.shutdown(kill_workers=any(future.running() for future in futures.values()))
    return [futures[i].result() for i in range(len(jobs))]


def _in_this_process(work, job, ended):
    result = work(*job)
    if ended:
        ended()
    return result


def free_gib() -> float:
    "Memory that is free on this machine, in GiB; in a container at most what it may have."
    import psutil

    free = psutil.virtual_memory().available / 2**30
    limit = Path('/sys/fs/cgroup/memory.max')
    text = limit.read_text().strip() if limit.is_file() else 'max'
    return free if text == 'max' else min(free, int(text) / 2**30)


def worker_count(run) -> int:
    "In how many processes a `Run` draws and walks: `models.workers`."
    config = run.config
    workers = config.models.workers
    if config.data.grader != 'math-verify':
        return 1  # one server grades
    if workers != 'auto':
        return workers
    models = [ModelName.parse(name) for name in config.open.models]
    small = all(m.kind == 'recorded' or m.name.startswith('micro-') for m in models)
    if config.models.engine == 'ray' or not small:
        return 1  # such models use all cores, or a GPU
    from joblib import cpu_count

    return max(1, min(cpu_count(), int(free_gib() / WORKER_GIB)))


def _jobs(run, workers, parts):
    "(Setting, parts) pairs: one part a job, but for a setting whose calls share a ledger."
    jobs = []
    for setting in run.settings:
        every = []
        for benchmark in setting.benchmarks:
            every += parts.get((setting.name, benchmark), [benchmark])
        if workers > 1 and setting.name == 'open':
            jobs += [(setting, [part]) for part in every]
        else:
            jobs.append((setting, every))
    return jobs


def side_by_side(
    run,  # `Run`: all benchmarks of all its settings
    work,  # (setting, parts) -> a result per part
    desc: str,  # what is done, for the file of what grading gave up and for who watches
    size=None,  # (setting, part) -> how much work it is; None: all are alike
    parts=None,  # (setting's name, benchmark) -> its parts; None: benchmarks are not divided
    workers: int | None = None,  # how many processes; None: as `worker_count` says
) -> list:  # the results, part by part, benchmark by benchmark, setting by setting
    "Do a stage of a run in `models.workers` processes, see `in_processes`, and keep what grading gave up."
    workers = workers or worker_count(run)
    jobs = _jobs(run, workers, parts or {})
    numbers = count(1)

    def job_size(setting, parts_of_job):
        return sum(size(setting, part) for part in parts_of_job)

    def ended():
        if workers > 1:
            note_progress(f'{desc}: {next(numbers):,} of {len(jobs):,} jobs')

    done = in_processes(
        partial(graded, work), jobs, workers, size=job_size if size else None, ended=ended
    )
    return collected(desc, jobs, done)
