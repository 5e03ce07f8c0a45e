"""When is an answer right? Plain comparison first, Math-Verify in a guarded process for the rest.

Here belong the grader, the one that everybody shares, and how problems are graded with it. How two
texts are compared belongs in `data.answers`, how two formulas are compared in `data.algebra`, how
two graders are compared in `data.agreement`.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from ..base.records import Problem
from ..base.tools import PACKAGE, write_file
from .algebra import NO, YES, serve
from .answers import plain_verdict
from .benchmarks import find_benchmark
from .programs import RISK

START = (  # the code of the process, which finds the package from any folder
    f'import sys; sys.path.append({str(PACKAGE.parent)!r}); '
    f'from {serve.__module__} import serve; serve()'
)


class Grader:
    "Grades answers in a process of its own; a context manager, for any thread."

    def __init__(
        self,
        timeout: float = 4.0,  # seconds for a pair
    ):
        self.timeout = timeout
        self.process = None
        self.turn = threading.Lock()
        self.given_up = set()  # (reference, answer) pairs without a verdict

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def start(self) -> None:
        "Start the process. RuntimeError if it does not start."
        self.process = subprocess.Popen(
            [sys.executable, '-c', START],
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self.process.stdout.readline() != 'ready\n':
            raise RuntimeError('grading does not start: it needs math-verify and os.fork')

    def close(self) -> None:
        "End the process, if there is one."
        process = self.process
        self.process = None
        if process is None:
            return
        process.kill()
        process.communicate()

    def ask(self, reference: str, answer: str) -> str:
        "The process's word on a pair. It is started if none is alive, and ended if it has no word."
        word = ''
        try:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self.start()
            request = json.dumps([reference, answer, self.timeout])
            print(request, file=self.process.stdin, flush=True)
            word = self.process.stdout.readline().strip()
        except BrokenPipeError:
            pass
        finally:
            if not word:
                self.close()
        return word

    def __call__(
        self,
        reference: str,
        answer: str | None,  # None is wrong
    ) -> bool:
        "Is an answer equivalent to the reference? TypeError for an answer that is no text."
        verdict = plain_verdict(reference, answer)
        if verdict is not None:
            return verdict
        with self.turn:
            word = self.ask(reference, answer) or self.ask(reference, answer)
        if word not in (YES, NO):
            self.given_up.add((reference, answer))
        return word == YES


@lru_cache(1)
def shared_grader(
    pid: int,  # of this process; a fork starts a grader of its own
) -> Grader:
    "The grader that everybody in a process shares; it ends with the process."
    grader = Grader()
    atexit.register(lambda: os.getpid() == pid and grader.close())
    return grader


def is_equiv(reference: str, answer: str | None) -> bool:
    "Is an answer equivalent to the reference? Plain comparison first, Math-Verify for the rest."
    return shared_grader(os.getpid())(reference, answer)


def given_up() -> set:
    "(reference, answer) pairs that `is_equiv` gave up in this process and counted as different."
    return shared_grader(os.getpid()).given_up


def is_right(
    problem: Problem,
    answer: str | None,  # None is wrong
    run_code: bool = False,  # may programs that a model wrote be run, if the benchmark's tests need that?
) -> bool:
    """The reward $r(x, \\hat y, y^*)$, as the problem's benchmark defines it.

    Unless it says something else: is the answer equivalent to the reference? PermissionError if programs may
    not be run.
    """
    benchmark = find_benchmark(problem.benchmark)
    if benchmark.right is None:
        return is_equiv(problem.answer, answer)
    if benchmark.runs_code and not run_code:
        raise PermissionError(f'grading {benchmark.name}: {RISK}')
    return answer is not None and bool(benchmark.right(problem, answer))


def grade_pairs(
    grade,  # such as `is_right`; its attribute `workers`, if any: how many pairs at a time (2)
    pairs,  # (`Problem`, answer)
):
    "Yields ((problem id, answer), verdict) of the distinct pairs, in their order."
    distinct = {(problem.id, answer): (problem, answer) for problem, answer in pairs}
    with ThreadPoolExecutor(getattr(grade, 'workers', 2)) as pool:
        verdicts = pool.map(lambda pair: bool(grade(*pair)), distinct.values())
        yield from zip(distinct, verdicts)


def graded(work, *job) -> tuple:  # what work(*job) returns; the pairs that grading gave up in it
    "Do a piece of work, and notice what grading gave up."
    given_up().clear()
    result = work(*job)
    return result, sorted(given_up())


def keep_given_up(
    stage: str,  # name of the file
    given_up_pairs,  # (setting, pairs that `graded` returned) of every job
) -> None:
    "Keep the pairs that grading gave up in a stage, if any, beside the results of their setting."
    pairs = {}
    for setting, pairs_of_job in given_up_pairs:
        pairs.setdefault(setting.folder, set()).update(pairs_of_job)
    for folder, lost in pairs.items():
        file = folder / 'grading' / f'given-up-{stage}.json'
        if lost:
            write_file(file, json.dumps(sorted(lost)))
        else:
            file.unlink(missing_ok=True)  # of an earlier attempt
