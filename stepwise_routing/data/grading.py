"""Is an answer right? Plain comparison decides most answers, Math-Verify in a guarded process the rest.

Here belong the grader, the one grader that a process shares, and how problems are graded with it.
Comparing two texts belongs in `data.answers`, comparing two formulas in `data.algebra`, comparing two
graders in `data.agreement`.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from textwrap import shorten

from ..records import Problem
from ..util import PACKAGE
from .algebra import NO, YES, serve
from .answers import plain_verdict
from .benchmarks import find_benchmark, last_box
from .recorded import RecordedVerdict

START = (  # the code of the process, which finds the package from any folder
    f'import sys; sys.path.append({str(PACKAGE.parent)!r}); '
    f'from {serve.__module__} import serve; serve()'
)


class Grader:
    "Grades answers in a process of its own. A context manager; any thread may use it."

    def __init__(
        self,
        timeout: float = 4.0,  # seconds for one pair of answers
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
        "The process's reply about a pair. Starts the process if needed; ends it if no reply comes."
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
        "Is the answer equivalent to the reference? TypeError for an answer that is not text."
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
    pid: int,  # id of this process, so that a fork starts its own grader
) -> Grader:
    "The grader that all code in a process shares. It ends with the process."
    grader = Grader()
    atexit.register(lambda: os.getpid() == pid and grader.close())
    return grader


def is_equiv(reference: str, answer: str | None) -> bool:
    "Is an answer equivalent to the reference? Asks plain comparison first, then Math-Verify."
    return shared_grader(os.getpid())(reference, answer)


def given_up() -> set:
    "(reference, answer) pairs that `is_equiv` gave up on, in this process. They count as different."
    return shared_grader(os.getpid()).given_up


def is_right(
    problem: Problem,
    answer: str | None,  # None is wrong
) -> bool:
    """The reward $r(x, \\hat y, y^*)$, as the problem's benchmark defines it.

    By default an answer is right if it is equivalent to the reference.
    """
    benchmark = find_benchmark(problem.benchmark)
    if benchmark.right is None:
        return is_equiv(problem.answer, answer)
    if answer is None:
        return False
    return bool(benchmark.right(problem, answer))


def check_gradable(
    name: str,  # of the benchmark of new answers
    grade,  # `is_right`, or a caller's
) -> None:
    "ValueError if this grade cannot grade new answers. It is asked before they are paid."
    benchmark = find_benchmark(name)
    if grade is not is_right:
        return
    if isinstance(benchmark.right, RecordedVerdict):
        raise ValueError(f'{name} knows recorded answers alone: choose another name')


def check_references(problems, grade) -> None:
    "ValueError, with the question, for an answer that no boxed reply can give: its braces do not match."
    for problem in problems:
        benchmark = find_benchmark(problem.benchmark)
        if grade is not is_right or benchmark.right or benchmark.answer is not last_box:
            continue
        if not is_right(problem, last_box([rf'\boxed{{{problem.answer}}}'])):
            raise ValueError(
                f'no reply can be right for the question {shorten(problem.question, 60)!r}: the braces '
                f'of its answer {problem.answer!r:.60} do not match; correct it'
            )


def grade_pairs(
    grade,  # such as `is_right`; it may have an attribute `workers`: pairs graded at a time (default 2)
    pairs,  # (`Problem`, answer) pairs
):
    "Grades each distinct pair once. Yields ((problem id, answer), verdict) in the order of the pairs."
    distinct = {(problem.id, answer): (problem, answer) for problem, answer in pairs}
    with ThreadPoolExecutor(getattr(grade, 'workers', 2)) as pool:
        verdicts = pool.map(lambda pair: bool(grade(*pair)), distinct.values())
        yield from zip(distinct, verdicts)


def graded(work, *job) -> tuple:  # (result of work(*job), pairs that grading gave up on meanwhile)
    "Call work(*job) and collect the pairs that grading gave up on."
    given_up().clear()
    result = work(*job)
    return result, sorted(given_up())
