"""Runs jobs in several processes. A job ends when its caller has gone.

Here belong starting, ending and interrupting processes. The work of a job belongs in `run.stages` and `run.sweep`.
"""

import logging
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from ..util import note_progress
from ..data.grading import graded, keep_given_up
from ..models.model_name import ModelName

# GiB of a process with the micro models: drawing 100 problems took 0.6, walking 450 took 1.4
WORKER_GIB = 1.5
PATIENCE = 60  # seconds for a job to end the paid calls under way
ORPHANED = 6  # the same, if the process that started it has ended
ONE_THREAD = dict(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')


def interrupt_once(number, _):
    "A handler of signals. The first signal interrupts; a second one does not cut that short."
    signal.signal(number, signal.SIG_IGN)
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)  # no lines about the tasks it ends
    raise KeyboardInterrupt


@contextmanager
def wanted_by(
    parent: int,  # number of the process that waits for the job
    flag,  # a folder that the parent removes when it no longer wants the answer
):
    """In a worker process: interrupt the job when its parent no longer waits for it.

    The job gets `PATIENCE` seconds to end the calls under way, or `ORPHANED` seconds if the parent has ended: then
    somebody may be waiting for the terminal."""
    done = threading.Event()
    job = threading.get_ident()

    def watch():
        while os.getppid() == parent and os.path.exists(flag):
            if done.wait(0.5):
                return
        if not done.is_set():
            signal.pthread_kill(job, signal.SIGUSR1)
        begin = time.monotonic()
        while not done.wait(0.5):
            patience = PATIENCE if os.getppid() == parent else ORPHANED
            if time.monotonic() - begin > patience:
                os._exit(1)
        if os.getppid() != parent:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _in_worker(parent, flag, work, *job):
    "Run one job in a worker process. Returns None after an interrupt."
    if os.getpgrp() != os.getpid():
        os.setsid()  # leave the group of processes that Jupyter interrupts and terminates
    signal.signal(signal.SIGUSR1, interrupt_once)
    with suppress(KeyboardInterrupt), wanted_by(parent, flag):
        return work(*job)


class Course:
    "Follows a generator of rounds. It yields a list of jobs, is sent their results, and so on to its end."

    def __init__(self, rounds):
        self.rounds = rounds
        self.futures = []  # of the jobs under way
        self.results = None  # of its latest round

    def next_jobs(self) -> list:
        "The jobs of the next round that has any. [] if the generator has ended."
        jobs = []
        with suppress(StopIteration):
            while not jobs:
                jobs = self.rounds.send(self.results)
                self.results = []
        return jobs


def in_rounds(
    work,  # function, called with the arguments of each job
    courses: list,  # generators, see `Course`
    workers: int,  # processes; 1: this one
    size=None,  # arguments of a job -> amount of its work; None: all jobs are alike
    ended=None,  # called without arguments whenever a job has ended
) -> list:  # per course: the results of `work` for the jobs of its last round
    """Follow all courses to their ends, in several processes. No course waits for another.

    The largest job is done first; of equal ones, the last. Errors and interrupts reach all
    processes. A job under way gets a minute to end its paid calls, so that they are booked."""
    courses = [Course(rounds) for rounds in courses]
    if workers == 1:
        return [_in_this_process(work, course, ended) for course in courses]
    jobs = _next_jobs(courses)
    if jobs:
        _side_by_side(work, courses, jobs, min(workers, len(jobs)), size, ended)
    return [course.results for course in courses]


def _in_this_process(work, course, ended):
    "Follow one course in this process. Returns the results of its last round."
    while jobs := course.next_jobs():
        course.results = []
        for job in jobs:
            course.results.append(work(*job))
            if ended:
                ended()
    return course.results


def _next_jobs(courses):
    "The next jobs of some courses, as (course, place in its round, job)."
    jobs = []
    for course in courses:
        each = course.next_jobs()
        course.futures = [None] * len(each)
        jobs += [(course, place, job) for place, job in enumerate(each)]
    return jobs


def _side_by_side(work, courses, jobs, workers, size, ended):
    "Do the first jobs of courses, and all jobs that follow from them. Parameters as of `in_rounds`."
    from concurrent.futures import FIRST_COMPLETED, wait

    from joblib.externals.loky import get_reusable_executor

    every = []
    pool = get_reusable_executor(workers, env=ONE_THREAD)
    with TemporaryDirectory(ignore_cleanup_errors=True) as flag:

        def begin(new):
            sizes = [size(*job) if size else 0 for *_, job in new]
            for i in sorted(range(len(new)), key=lambda i: (-sizes[i], -i)):
                course, place, job = new[i]
                future = pool.submit(_in_worker, os.getpid(), flag, work, *job)
                course.futures[place] = future
                every.append(future)
                under_way.add(future)

        try:
            under_way = set()
            begin(jobs)
            while under_way:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    if ended:
                        ended()
                ready = [c for c in courses if c.futures and under_way.isdisjoint(c.futures)]
                for course in ready:
                    course.results = [future.result() for future in course.futures]
                begin(_next_jobs(ready))
        finally:  # calls under way end, and no process is left over
            for future in every:
                future.cancel()
            shutil.rmtree(flag)
            wait(every, PATIENCE)
            pool.shutdown(kill_workers=any(future.running() for future in every))


def one_round(jobs):
    "A course of one round."
    yield jobs


def in_processes(
    work,
    jobs: list,  # tuples of arguments
    workers: int,
    size=None,
    ended=None,
) -> list:  # results of `work`, in the order of the jobs
    "Do jobs that do not depend on each other. Other parameters as of `in_rounds`."
    (results,) = in_rounds(work, [one_round(jobs)], workers, size, ended)
    return results or []


def free_gib() -> float:
    "Free memory of this machine, in GiB. In a container, at most the container's share."
    import psutil

    free = psutil.virtual_memory().available / 2**30
    limit = Path('/sys/fs/cgroup/memory.max')
    text = limit.read_text().strip() if limit.is_file() else 'max'
    return free if text == 'max' else min(free, int(text) / 2**30)


def worker_count(run) -> int:
    "The number of processes in which a `Run` draws and walks, from `models.workers`."
    config = run.config
    workers = config.models.workers
    if config.data.grader != 'math-verify':
        return 1  # there is one server that grades
    if workers != 'auto':
        return workers
    models = [ModelName.parse(name) for name in config.models.names]
    small = all(m.kind == 'recorded' or m.name.startswith('micro-') for m in models)
    if config.models.ray_workers or not small:
        return 1  # such models use all cores, or a GPU
    from joblib import cpu_count

    return max(1, min(cpu_count(), int(free_gib() / WORKER_GIB)))


def _jobs(run, workers, parts):
    "(Run, parts) pairs, with one part per job. Calls that share a ledger are one job."
    every = []
    for benchmark in run.benchmarks:
        every += parts.get(benchmark, [benchmark])
    if workers > 1 and not run.is_paid:
        return [(run, [part]) for part in every]
    return [(run, every)]


def note_given_up(
    course,  # see `Course`
    begun: list,  # the jobs are appended to it
    lost: list,  # (run, pairs that grading gave up on) of each job is appended to it
):
    "The same course for a `graded` work. The course sees only the results of the work."
    results = None
    with suppress(StopIteration):
        while True:
            jobs = course.send(results)
            begun += jobs
            answers = yield jobs
            lost += [(run, pairs) for (run, *_), (_, pairs) in zip(jobs, answers)]
            results = [result for result, _ in answers]


def with_benchmarks(work, run, *details):
    "Do a job in a process that may not know the run's benchmarks yet. Returns the result of `work`."
    run.register_files()
    return work(run, *details)


def follow(
    run,  # `Run`
    work,  # function: arguments of a job, the run first -> list of results
    desc: str,  # name of the stage, for progress and for the file of pairs that grading gave up on
    courses: list,  # generators, see `Course`
    size=None,  # arguments of a job -> how much work it is; None: all are alike
    workers: int | None = None,  # number of processes; None: `worker_count`
) -> list:  # the results of the last rounds, course by course, job by job
    "Do a stage of a run in `models.workers` processes, see `in_rounds`. Keep the pairs that grading gave up on."
    workers = workers or worker_count(run)
    numbers = count(1)
    begun = []
    lost = []

    def ended():
        if workers > 1:
            note_progress(f'{desc}: {next(numbers):,} of {len(begun):,} jobs')

    courses = [note_given_up(course, begun, lost) for course in courses]
    graded_work = partial(graded, partial(with_benchmarks, work))
    last_rounds = in_rounds(graded_work, courses, workers, size, ended)
    keep_given_up(desc, lost)
    return [result for each in last_rounds for results, _ in each or [] for result in results]


def side_by_side(
    run,  # `Run`
    work,  # function: (run, parts) -> a result per part
    desc: str,  # as of `follow`
    size=None,  # (run, part) -> amount of its work; None: all parts are alike
    parts=None,  # benchmark -> list of its parts; None: benchmarks are not divided
    workers: int | None = None,  # as of `follow`
) -> list:  # the results, part by part, benchmark by benchmark
    "Do a stage of a run whose parts do not depend on each other. See `follow`."
    workers = workers or worker_count(run)

    def job_size(run, parts_of_job):
        return sum(size(run, part) for part in parts_of_job)

    jobs = _jobs(run, workers, parts or {})
    return follow(run, work, desc, [one_round(jobs)], job_size if size else None, workers)
