"""GSM8K, MATH500, OmniMath and the micro benchmarks, each in three splits that share no question.

Here belong the problems: where they come from, how their rows are read, and who is in which split.
Grading belongs in `data.grading`; the generators of the micro problems are in nbs/labs.
"""

import json
import lzma
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.records import Problem, extract_boxed
from ..base.tools import (
    PACKAGE,
    bad_row,
    digest,
    install_line,
    nearest,
    one_of,
    require_fields,
)

SPLITS = ('train', 'calibration', 'test')
MICRO = ('micro-gsm', 'micro-math', 'micro-omni')  # benchmarks that the package ships


def make_problem(
    benchmark: str,
    question: str,
    answer: str,
    difficulty: float | None = None,
    solution: str | None = None,  # steps, with blank lines between them
) -> Problem:
    "A `Problem` whose id is the hash of its question, white space aside."
    name = f'{benchmark}-{digest(" ".join(question.split()), size=6)}'
    return Problem(benchmark, name, question, answer, difficulty, solution)


# ---- the rows of the public benchmarks


def read_gsm8k(row: dict) -> Problem:
    "Lines are steps, the answer follows `####`, calculator notes in << >> are dropped."
    solution, mark, answer = row['answer'].rpartition('####')
    if not mark:
        raise ValueError('field \'answer\' has no "#### number" at its end')
    lines = re.sub(r'<<[^<>\n]*>>', '', solution).strip().split('\n')
    number = answer.strip().replace(',', '')
    return make_problem('gsm8k', row['question'], number, solution='\n\n'.join(lines))


def read_math(row: dict) -> Problem:
    "The answer is given (MATH-500), or it is the last box of the solution; levels from 1 to 5."
    answer = row.get('answer') or extract_boxed(row['solution']) or ''
    digit = re.search(r'\d', str(row.get('level')))
    level = float(digit[0]) if digit else None
    return make_problem('math500', row['problem'], answer.strip(), level, row['solution'])


def read_omnimath(row: dict) -> Problem:
    "Difficulties from 1 to 10."
    answer = str(row['answer'] or '').strip()
    difficulty = float(row['difficulty'])
    return make_problem('omnimath', row['problem'], answer, difficulty, row.get('solution'))


# ---- where they are


@dataclass(frozen=True)
class Source:
    "One set of rows, on the Hub or in a folder of copies."

    dataset: str  # on the Hub
    revision: str  # pinned
    split: str  # on the Hub
    file: str  # its name in a folder of copies
    configurations: tuple = (None,)  # on the Hub, one after the other


@dataclass(frozen=True)
class Benchmark:
    "A public benchmark."

    test: Source
    train: Source
    fields: tuple  # that a row needs; the first is the question
    read: Callable  # a row -> `Problem`; ValueError


GSM8K = 'openai/gsm8k', '740312add88f781978c0658806c59bc2815b9866'
MATH_500 = 'HuggingFaceH4/MATH-500', '6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be'
MATH = 'EleutherAI/hendrycks_math', '21a5633873b6a120296cce3e2df9d5550074f4a3'
OMNI_MATH = 'KbsdJames/Omni-MATH', '40ba231d8f16e29ecd40e6407e2c8640145a8f62'
SUBJECTS = (  # configurations of MATH
    'algebra',
    'counting_and_probability',
    'geometry',
    'intermediate_algebra',
    'number_theory',
    'prealgebra',
    'precalculus',
)
OMNIMATH = Source(*OMNI_MATH, 'test', 'omni_math.jsonl')  # it has no training set

SOURCES = {
    'gsm8k': Benchmark(
        test=Source(*GSM8K, 'test', 'gsm8k_test.jsonl', ('main',)),
        train=Source(*GSM8K, 'train', 'gsm8k_train.jsonl', ('main',)),
        fields=('question', 'answer'),
        read=read_gsm8k,
    ),
    'math500': Benchmark(
        test=Source(*MATH_500, 'test', 'math500.jsonl'),
        train=Source(*MATH, 'train', 'math_train.jsonl', SUBJECTS),
        fields=('problem', 'solution'),
        read=read_math,
    ),
    'omnimath': Benchmark(
        test=OMNIMATH,
        train=OMNIMATH,
        fields=('problem', 'answer', 'difficulty'),
        read=read_omnimath,
    ),
}


def hub_rows(source: Source) -> list:
    "Rows of a dataset of the Hub. ImportError if the extra is not installed."
    try:
        from datasets import load_dataset
    except ImportError as error:
        hint = f'{install_line("hub")}, or give a folder of copies as data_dir'
        raise ImportError(f'{source.dataset} comes from the Hugging Face Hub: {hint}') from error
    rows = []
    for configuration in source.configurations:
        rows += load_dataset(
            source.dataset, configuration, split=source.split, revision=source.revision
        )
    return rows


def file_rows(path) -> list:
    "Rows of a JSONL file, mostly dicts. FileNotFoundError or ValueError naming file and row."
    path = Path(path)
    if not path.is_file():
        neighbours = [file.name for file in path.parent.glob('*')]
        raise FileNotFoundError(f'{path} is not a file{nearest(path.name, neighbours)}')
    rows = []
    text = path.read_bytes().removeprefix(b'\xef\xbb\xbf')  # the mark that Windows puts first
    for number, line in enumerate(text.split(b'\n'), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            reason = f'not a JSON object ({error}); is the file cut off?'
            raise bad_row(path, number, reason) from None
    return rows


def read_row(row, benchmark: Benchmark) -> Problem:
    "One row as a `Problem`. ValueError, TypeError or AttributeError if it cannot be read."
    require_fields(row, benchmark.fields)
    question = benchmark.fields[0]
    if not isinstance(row[question], str):
        raise ValueError(f'field {question!r} is not text')
    return benchmark.read(row)


def source_problems(
    benchmark: Benchmark,
    source: Source,  # its test or its training set
    data_dir=None,  # a folder of copies; None: the Hub
) -> list:
    "Every problem of one set. ValueError naming file, row and field."
    if data_dir:
        name = Path(data_dir) / source.file
        rows = file_rows(name)
    else:
        name = source.dataset
        rows = hub_rows(source)
    if not rows:
        raise ValueError(f'{name} holds no rows')
    problems = []
    for number, row in enumerate(rows, 1):
        try:
            problems.append(read_row(row, benchmark))
        except (ValueError, TypeError, AttributeError) as error:
            raise bad_row(name, number, error) from None
    return problems


# ---- who is in which split

# hashes of `question_key`: MATH train near MATH-500, and Omni-MATH problems that are in MATH, too
LEFT_OUT = {
    'math500': '29881c88 397d1c25 6b23c844',
    'omnimath': """
    010f6b03 054fe2ea 0865780f 08db4437 0c56be0e 10242ed2 16d8e31c 251c8ebf 258fd06b 29686ba9
    2b0704e2 2cfef772 2e72724e 356c2734 3799ae48 399c7e62 412506d0 686f3bdf 87f2cce1 8b09e837
    8c17fe7d 9091898a 9b755a38 a9232f3b accac0e5 ae2126a3 b178cd78 b2a5e7d6 ba3a5a77 c2ef7bdb
    c3667f57 d2ac7bc9 d5788c93 d587d580 d68d228e d6932a04 dacf1547 e3ecb941 f448cf4d f65b9f86""",
}


def question_key(question: str) -> str:
    "A question reduced to letters and digits: what a reformatted copy shares with the original."
    text = unicodedata.normalize('NFKC', question).lower()
    return re.sub(r'[\W_]', '', text) or question


def distinct_problems(
    problems,
    left_out: str = '',  # hashes of questions, with blanks between them
) -> list:
    "Problems with an answer, each question once, in the order of their ids, which is a random one."
    hashes = set(left_out.split())
    first = {}
    for problem in sorted(problems, key=lambda p: (p.id, len(p.answer), p.answer)):
        key = question_key(problem.question)
        if problem.answer and digest(key, size=4) not in hashes:
            first.setdefault(key, problem)
    return list(first.values())


def carve(problems, split: str) -> list:
    "Train (4 in 5) or calibration (1 in 5) of a training set, by the hash of the question."
    chosen = []
    for problem in problems:
        is_calibration = int(digest('split', problem.id), 16) % 5 == 0
        if is_calibration == (split == 'calibration'):
            chosen.append(problem)
    return chosen


def stratify(problems, split: str) -> list:
    "40/20/40 train/calibration/test along the difficulty."
    turns = 'train', 'test', 'calibration', 'test', 'train'
    by_difficulty = sorted(problems, key=lambda p: (p.difficulty, p.id))
    return [problem for i, problem in enumerate(by_difficulty) if turns[i % 5] == split]


def public_problems(name: str, split: str, data_dir) -> list:
    "Every problem of a split of a public benchmark."
    if data_dir and not Path(data_dir).is_dir():
        raise FileNotFoundError(f'data_dir={str(data_dir)!r} is not a folder')
    benchmark = SOURCES[name]
    left_out = LEFT_OUT.get(name, '')
    if benchmark.train == benchmark.test:
        problems = source_problems(benchmark, benchmark.test, data_dir)
        return stratify(distinct_problems(problems, left_out), split)
    if split == 'test':
        return distinct_problems(source_problems(benchmark, benchmark.test, data_dir))
    train = distinct_problems(source_problems(benchmark, benchmark.train, data_dir), left_out)
    test = source_problems(benchmark, benchmark.test, data_dir)
    test_keys = {question_key(problem.question) for problem in test}
    fresh = [problem for problem in train if question_key(problem.question) not in test_keys]
    return carve(fresh, split)


@lru_cache
def shipped_problems(benchmark: str) -> dict:  # split -> `Problem`s, in the order of the generator
    "The shipped problems of a micro benchmark."
    path = PACKAGE / 'micro_problems' / f'{benchmark}.jsonl.xz'
    problems = {split: [] for split in SPLITS}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        problem = Problem(
            benchmark, row['id'], row['question'], row['answer'], row['level'], row['solution']
        )
        problems[row['split']].append(problem)
    return problems


# ---- loading


def of_benchmark(
    value,  # one for all benchmarks, or a dict by benchmark and "default"
    benchmark: str,
    parameter: str,  # its name, for error lines
):
    "A parameter's value for a benchmark. ValueError if there is none."
    values = value if isinstance(value, dict) else dict(default=value)
    for name in values:
        one_of(f'benchmark in {parameter}', name, (*SOURCES, *MICRO, 'default'))
    if benchmark in values:
        return values[benchmark]
    if 'default' in values:
        return values['default']
    raise ValueError(f'{parameter} has no value for {benchmark}, and no "default"')


def step_limit(max_steps: int | dict, benchmark: str) -> int:
    "How many steps a chain of a benchmark may have."
    return of_benchmark(max_steps, benchmark, 'max_steps')


def load_problems(
    benchmark: str,  # "gsm8k", "math500", "omnimath", "micro-gsm", "micro-math" or "micro-omni"
    split: str,  # "train", "calibration" or "test"
    n: int | dict | None = None,  # how many problems, also {benchmark: number}; None: all
    data_dir=None,  # folder of copies of the public sets, named as in `SOURCES`; None: the Hub
) -> list:  # `Problem`s in a fixed random order, so that the first n are a random subset
    "Problems of one split; splits share no question. ValueError, FileNotFoundError, ImportError."
    one_of('benchmark', benchmark, (*SOURCES, *MICRO))
    one_of('split', split, SPLITS)
    n = of_benchmark(n, benchmark, 'n')
    if n is not None and n < 1:
        raise ValueError(f'n must be at least 1, got {n}')
    if benchmark in MICRO:
        problems = shipped_problems(benchmark)[split]
    else:
        problems = sorted(public_problems(benchmark, split, data_dir), key=lambda p: p.id)
    if n is None or n <= len(problems):
        return problems[:n]
    raise ValueError(f'{benchmark} {split} has {len(problems)} problems, n={n} were asked for')
