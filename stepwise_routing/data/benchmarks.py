"""One record per benchmark: all that models, confidences, routers and graders must know about it.

Here belong the record, the list of registered benchmarks, loading problems by a benchmark's name, and grading them.
Where problems come from belongs in `data.sources`; how two answers are compared in `data.grading`.
"""

import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..records import Problem, boxed, chat_prompt
from ..util import digest, find_project, one_of
from .grading import is_equivalent
from .questions import QuestionFile
from .recorded import MAX_STEPS, SUFFIX, RecordedSet, RecordedVerdict
from .sources import PUBLIC, SPLITS, ShippedSet

MICRO = ('micro-gsm', 'micro-math', 'micro-omni')  # benchmarks that the package ships


def last_box(problem: Problem, steps) -> str | None:
    "The answer in the box of a chain's last step. None if the step has no box."
    return boxed(steps[-1].text, problem.question)


def equals_reference(problem: Problem, answer: str) -> bool:
    return is_equivalent(problem.answer, answer)


@dataclass(frozen=True)
class Benchmark:
    "How a benchmark differs from others. The defaults fit mathematics with boxed answers."

    name: str  # in tables, files and profiles
    # an object with problems(split, data_dir); None: the caller brings problems
    source: object = None
    prompt: Callable = chat_prompt  # a question -> chat messages
    answer: Callable = last_box  # (`Problem`, `Step`s of a chain) -> its answer; None without one
    right: Callable = equals_reference  # (`Problem`, answer) -> bool
    # text of a step -> bool per character: tokens with a True count for the confidences; None: mathematics
    scored: Callable | None = None


# ---- the registered ones

REGISTERED = {}


def register(benchmark: Benchmark) -> Benchmark:
    "Make a benchmark known by its name, in this process. Returns it."
    REGISTERED[benchmark.name] = benchmark
    return benchmark


MATHEMATICS = Benchmark('mathematics')


def find_benchmark(name: str) -> Benchmark:
    "The registered benchmark of this name. For an unknown name: a benchmark with the defaults and no problems."
    return REGISTERED.get(name, MATHEMATICS)


for micro_name in MICRO:
    register(Benchmark(micro_name, ShippedSet(micro_name)))
for public_name, public_set in PUBLIC.items():
    register(Benchmark(public_name, public_set))
for recorded_name in MAX_STEPS:
    record = replace(
        REGISTERED[recorded_name],
        name=recorded_name + SUFFIX,
        source=RecordedSet(recorded_name),
        right=RecordedVerdict(recorded_name),
    )
    register(record)


OWN_FILE = 'own_benchmarks.py'  # in nbs/ of a clone: calls of `register`, for commands and chapters


def register_own() -> None:
    "Run the file `OWN_FILE` of the clone, if there is one."
    try:
        path = find_project().nbs / OWN_FILE
    except FileNotFoundError:
        return
    if path.is_file():
        runpy.run_path(str(path))


def open_benchmark(name: str) -> Benchmark:
    """The benchmark of a name, or of a file (.jsonl, .json, .csv) with questions and answers, by its name without the end.

    Register your own in a notebook, or in nbs/own_benchmarks.py. ValueError, with the nearest name, for an unknown one.
    FileNotFoundError for a file that is not there.
    """
    if name not in REGISTERED:
        register_own()
    if name in REGISTERED:
        return REGISTERED[name]
    path = Path(name).resolve()
    if not is_question_file(name):
        one_of('benchmark', name, tuple(REGISTERED))
    if not path.is_file():
        raise FileNotFoundError(f'no file {name} of questions')
    source = QuestionFile(str(path), path.stem)
    other = REGISTERED.get(path.stem)
    if other and other.source != source:
        raise ValueError(
            f'{name}: a benchmark {path.stem} is there already; give the file another name'
        )
    return register(Benchmark(path.stem, source))


def is_question_file(name: str) -> bool:
    return Path(name).suffix in ('.jsonl', '.json', '.csv')


def prompt_digest(benchmark: str) -> str:
    "What drawn steps depend on besides the models: the chat messages of a question."
    return digest(str(find_benchmark(benchmark).prompt('?')))


# ---- loading


def load_problems(
    benchmark: str,  # name of a registered one, such as "gsm8k" or "micro-math"
    split: str,  # "train", "calibration" or "test"
    n: int | None = None,  # how many problems; None: all
    data_dir=None,  # folder with copies of the public sets, named as in `data.sources`; None: the Hub
) -> list:  # `Problem`s in a fixed random order, so that the first n are a random subset
    """Problems of one split. No question is in two splits.

    ValueError for an unknown name, a bad row or too large an n. FileNotFoundError for a missing copy.
    ImportError if the Hub's client is not installed.
    """
    source = open_benchmark(benchmark).source
    one_of('split', split, SPLITS)
    problems = source.problems(split, data_dir)
    if n is None or n <= len(problems):
        return problems[:n]
    raise ValueError(f'{benchmark} {split} has {len(problems)} problems: n={n} is too many')


# ---- grading


def is_right(problem: Problem, answer: str | None) -> bool:
    "The reward $r(x, \\hat y, y^*)$, as the problem's benchmark defines it. No answer is wrong."
    return answer is not None and bool(find_benchmark(problem.benchmark).right(problem, answer))


def grade_by_rules(pairs) -> list:  # (`Problem`, answer) -> bool
    return [is_right(*pair) for pair in pairs]


def graded(
    grade,  # pairs -> verdicts, such as `grade_by_rules`
    pairs,  # (`Problem`, answer)
) -> dict:  # (problem id, answer) -> bool
    "The verdicts on pairs, each of which is graded once."
    distinct = {(problem.id, answer): (problem, answer) for problem, answer in pairs}
    return dict(zip(distinct, grade([*distinct.values()])))
