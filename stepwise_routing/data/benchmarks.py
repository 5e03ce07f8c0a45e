"""One record per benchmark: all that models, confidences, routers and graders must know about it.

Here belong the record, the list of registered benchmarks, and loading problems by a benchmark's name. Where problems
come from belongs in `data.sources`.
"""

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..records import chat_prompt, extract_boxed
from ..util import digest, find_project, one_of
from .questions import QuestionFile
from .recorded import MAX_STEPS, SUFFIX, RecordedSet, RecordedVerdict
from .sources import PUBLIC, SPLITS, ShippedSet

MICRO = ('micro-gsm', 'micro-math', 'micro-omni')  # benchmarks that the package ships


def last_box(texts) -> str | None:  # texts of the steps of a chain
    "The answer in the `\\boxed{}` of a chain's last step. None if the step has no box."
    return extract_boxed(texts[-1])


def never(text: str) -> bool:
    return False


SAMPLES = (  # texts of steps; what a user's rules say about them tells rules apart
    '1 + 1 = 2',
    'So x is 3.',
    r'Answer: \boxed{2}',
    '#### 2',
    'def f(x):',
    '    return x  # one',
    'assert f(1) == 2',
    '```',
    'done',
)


def is_own(rule) -> bool:
    "Did a user write this rule? The package's rules belong to its version."
    if rule is None:
        return False
    return not str(getattr(rule, '__module__', '')).startswith('stepwise_routing.')


def behaviour(rule) -> str:  # a function of a text
    "A digest of what a rule says about some texts. A change that shows on none of them is not noticed."
    import numpy as np

    answers = [np.asarray(rule(text), bool).tolist() for text in SAMPLES]
    return digest(str(answers))


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark differs from others. The defaults fit mathematics with boxed answers.

    ValueError in one line if a field cannot work.
    """

    name: str  # in tables, files and profiles
    # an object with problems(split, data_dir) and licence; None: the caller brings problems
    source: object = None
    prompt: Callable = chat_prompt  # a question -> chat messages
    # the text that ends a step: a blank line, or '\n', which keeps the indentation of lines
    separator: str = '\n\n'
    is_last: Callable = never  # text of a step -> does it end the chain? A boxed answer always does
    answer: Callable = last_box  # texts of a chain's steps -> its answer; None without one
    right: Callable | None = None  # (`Problem`, answer) -> bool; None: equivalent to the reference
    # text of a step -> bool per character: tokens with a True count for the confidences; None: mathematics
    scored: Callable | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not re.fullmatch(r'\w[\w.-]*', self.name):
            raise ValueError(
                f'benchmark name={self.name!r}: give it a name of letters, digits, - and _'
            )
        if self.separator not in ('\n\n', '\n'):
            raise ValueError(
                f'benchmark {self.name!r}: separator is {self.separator!r}: give a blank line or a line end'
            )

    def messages(self, question: str) -> list:
        "The chat messages that ask a question."
        return self.prompt(question)

    def ends_with(self, text: str) -> bool:
        "Does this step end the chain?"
        return bool(self.is_last(text))

    def read_answer(self, steps) -> str | None:
        "The answer of a chain of `Step`s."
        return self.answer(tuple(step.text for step in steps))

    @property
    def draws(self) -> dict:
        "What the draws depend on besides the models, as JSON. Empty for the paper's prompt and steps."
        rules = dict(is_last=self.is_last, scored=self.scored)
        own_rules = {}
        for name, rule in rules.items():
            if is_own(rule):
                own_rules[name] = behaviour(rule)
        is_usual = self.prompt is chat_prompt and self.separator == '\n\n' and self.is_last is never
        if is_usual and not own_rules:
            return {}
        return dict(prompt=digest(str(self.messages('?'))), separator=self.separator) | own_rules


# ---- the registered ones

REGISTERED = {}
SHIPPED = set()  # names that `register` refuses


def register(
    benchmark: Benchmark,  # replaces one of the same name, unless the package ships it
) -> Benchmark:
    "Make a benchmark known by its name, in this process. Returns the benchmark. ValueError for a shipped name."
    if not isinstance(benchmark, Benchmark):
        raise ValueError(f'register takes a Benchmark, got {benchmark!r:.60}: Benchmark(name, ...)')
    if benchmark.name in SHIPPED:
        raise ValueError(f'{benchmark.name} is shipped with the package: choose another name')
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


SHIPPED.update(REGISTERED)

OWN_FILE = 'own_benchmarks.py'  # in nbs/ of a clone: calls of `register`, for commands and chapters


def register_own() -> None:
    "Run the file `OWN_FILE` of the clone, if there is one. ValueError in one line if it fails."
    try:
        path = find_project().nbs / OWN_FILE
    except FileNotFoundError:
        return
    if path.is_file():
        try:
            runpy.run_path(str(path))
        except Exception as error:
            raise ValueError(f'{path.name}: {type(error).__name__}: {error}') from error


def open_benchmark(name: str) -> Benchmark:
    """The benchmark of a name, or of a JSONL file with questions and answers.

    Register your own in a notebook, or in nbs/own_benchmarks.py. ValueError, with the nearest name, for an unknown one.
    """
    if name not in REGISTERED:
        register_own()
    if name in REGISTERED:
        return REGISTERED[name]
    path = Path(name)
    if path.suffix != '.jsonl':
        one_of('benchmark', name, tuple(REGISTERED))
    source = QuestionFile(str(path), path.stem)
    registered = REGISTERED.get(path.stem)
    if registered and registered.source != source:
        raise ValueError(f'{name}: there is a benchmark {path.stem!r} already; rename the file')
    return register(Benchmark(path.stem, source))


# ---- loading


def of_benchmark(
    value,  # one for all benchmarks, or a dict by benchmark and "default"
    benchmark: str,
    parameter: str,  # its name, for error lines
):
    "The value of a parameter for one benchmark. ValueError if the dict has neither it nor \"default\"."
    values = value if isinstance(value, dict) else dict(default=value)
    for name in values:
        one_of(f'benchmark in {parameter}', name, (*REGISTERED, 'default'))
    if benchmark in values:
        return values[benchmark]
    if 'default' in values:
        return values['default']
    raise ValueError(f'{parameter} has no value for {benchmark}: add one, or one named "default"')


def step_limit(max_steps: int | dict, benchmark: str) -> int:
    "The largest number of steps in a chain of this benchmark."
    return of_benchmark(max_steps, benchmark, 'max_steps')


def load_problems(
    benchmark: str,  # name of a registered one, such as "gsm8k" or "micro-math"
    split: str,  # "train", "calibration" or "test"
    n: int | dict | None = None,  # how many problems, also {benchmark: number}; None: all
    data_dir=None,  # folder with copies of the public sets, named as in `data.sources`; None: the Hub
) -> list:  # `Problem`s in a fixed random order, so that the first n are a random subset
    """Problems of one split. No question is in two splits.

    ValueError for an unknown name, a bad row or too large an n. FileNotFoundError for a missing copy.
    ImportError if the Hub's client is not installed.
    """
    record = open_benchmark(benchmark)
    one_of('split', split, SPLITS)
    n = of_benchmark(n, benchmark, 'n')
    if n is not None and n < 1:
        raise ValueError(f'n must be at least 1, got {n}')
    problems = record.source.problems(split, data_dir)
    if record.source.is_public:
        problems = sorted(problems, key=lambda p: p.id)
    if n is None or n <= len(problems):
        return problems[:n]
    raise ValueError(f'{benchmark} {split} has {len(problems)} problems: n={n} is too many')
