"""GSM8K, MATH500, OmniMath and the micro benchmarks, each in three splits that share no question.

Here belongs where problems come from and who is in which split. Grading belongs in `data.grading`; the generators of
the micro problems are in nbs/labs.
"""

import json
import lzma
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

from ..base.records import Problem, extract_boxed
from ..base.tools import PACKAGE, digest, install_line, nearest, one_of

MICRO = ('micro-gsm', 'micro-math', 'micro-omni')  # benchmarks that the package ships


def _key(question):
    "A question reduced to its letters and digits: what a reformatted copy still shares with the original."
    return re.sub(r'[\W_]', '', unicodedata.normalize('NFKC', question).lower()) or question


def make_problem(
    benchmark: str, question: str, answer: str, difficulty=None, solution=None
) -> Problem:
    "A Problem whose id is the hash of its question, white space aside."
    name = f"{benchmark}-{digest(' '.join(question.split()), size=6)}"
    return Problem(benchmark, name, question, answer, difficulty, solution)


def _gsm8k(
    row,
):  # lines are steps, the answer follows `####`, calculator notes in << >> are dropped
    steps, mark, answer = row['answer'].rpartition('####')
    if not mark:
        raise ValueError('field \'answer\' has no "#### number" at its end')
    lines = re.sub(r'<<[^<>\n]*>>', '', steps).strip().split('\n')
    return make_problem(
        'gsm8k', row['question'], answer.strip().replace(',', ''), solution='\n\n'.join(lines)
    )


def _math(
    row,
):  # the answer is given (MATH-500), or it is the last box of the solution; levels from 1 to 5
    answer = row.get('answer') or extract_boxed(row['solution']) or ''
    level = re.search(r'\d', str(row.get('level')))
    return make_problem(
        'math500',
        row['problem'],
        answer.strip(),
        float(level[0]) if level else None,
        row['solution'],
    )


def _omni(row):  # difficulties from 1 to 10
    answer = str(row['answer'] or '').strip()
    return make_problem(
        'omnimath', row['problem'], answer, float(row['difficulty']), row.get('solution')
    )


_SUBJECTS = (
    'algebra',
    'counting_and_probability',
    'geometry',
    'intermediate_algebra',
    'number_theory',
    'prealgebra',
    'precalculus',
)

_GSM = 'openai/gsm8k', '740312add88f781978c0658806c59bc2815b9866', ('main',)

_MATH_500 = (
    'HuggingFaceH4/MATH-500',
    '6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be',
    (None,),
    'test',
    'math500.jsonl',
)

_MATH = (
    'EleutherAI/hendrycks_math',
    '21a5633873b6a120296cce3e2df9d5550074f4a3',
    _SUBJECTS,
    'train',
    'math_train.jsonl',
)

_OMNI = (
    'KbsdJames/Omni-MATH',
    '40ba231d8f16e29ecd40e6407e2c8640145a8f62',
    (None,),
    'test',
    'omni_math.jsonl',
)

SOURCES = dict(  # test, train (dataset, revision, configurations, split; file in a folder of copies); fields; reader
    gsm8k=(
        (*_GSM, 'test', 'gsm8k_test.jsonl'),
        (*_GSM, 'train', 'gsm8k_train.jsonl'),
        ('question', 'answer'),
        _gsm8k,
    ),
    math500=(_MATH_500, _MATH, ('problem', 'solution'), _math),
    omnimath=(_OMNI, _OMNI, ('problem', 'answer', 'difficulty'), _omni),
)


def _hub_rows(dataset, revision, configs, split):
    "Rows of a Hub dataset at a pinned revision."
    try:
        from datasets import load_dataset
    except ImportError as e:
        hint = f'{install_line("hub")}, or give a folder of copies as data_dir'
        raise ImportError(f'{dataset} comes from the Hugging Face Hub: {hint}') from e
    return [
        row for c in configs for row in load_dataset(dataset, c, split=split, revision=revision)
    ]


def file_rows(path) -> list:
    "Rows of a local JSONL file, a dict each. FileNotFoundError or ValueError naming file and row."
    path = Path(path)
    rows = []
    beside = [p.name for p in path.parent.glob('*')]
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file{nearest(path.name, beside)}')
    for i, line in enumerate(path.read_bytes().removeprefix(b'\xef\xbb\xbf').split(b'\n'), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as e:
            raise ValueError(
                f'{path}, row {i}: not a JSON object ({e}); is the file cut off?'
            ) from None
    return rows


def _read_row(row, needs, read):
    if not isinstance(row, dict):
        raise ValueError('not a JSON object')
    for f in needs:
        if f not in row:
            raise ValueError(f'no field {f!r}{nearest(f, row)}; needed: {", ".join(needs)}')
    if not isinstance(row[needs[0]], str):
        raise ValueError(f'field {needs[0]!r} is not text')
    return read(row)


def _problems(benchmark, part, data_dir=None):
    "Every problem of a benchmark's test (0) or train (1) set; ValueError naming file, row and field."
    (*place, file), reader = SOURCES[benchmark][part], SOURCES[benchmark][2:]
    name = Path(data_dir) / file if data_dir else place[0]
    rows = file_rows(name) if data_dir else _hub_rows(*place)
    problems = []
    if not rows:
        raise ValueError(f'{name} holds no rows')
    for i, row in enumerate(rows, 1):
        try:
            problems.append(_read_row(row, *reader))
        except (ValueError, TypeError, AttributeError) as e:
            raise ValueError(f'{name}, row {i}: {e}') from None
    return problems


_LEFT_OUT = dict(  # hashes of `_key(question)`: MATH train near MATH-500, and Omni-MATH problems that are also in MATH
    math500='29881c88 397d1c25 6b23c844',
    omnimath="""
    010f6b03 054fe2ea 0865780f 08db4437 0c56be0e 10242ed2 16d8e31c 251c8ebf 258fd06b 29686ba9 2b0704e2 2cfef772
    2e72724e 356c2734 3799ae48 399c7e62 412506d0 686f3bdf 87f2cce1 8b09e837 8c17fe7d 9091898a 9b755a38 a9232f3b
    accac0e5 ae2126a3 b178cd78 b2a5e7d6 ba3a5a77 c2ef7bdb c3667f57 d2ac7bc9 d5788c93 d587d580 d68d228e d6932a04
    dacf1547 e3ecb941 f448cf4d f65b9f86""",
)


def _clean(problems, left_out=''):
    "Problems with an answer, each question once, without near-duplicates; in the order of their ids (a random one)."
    first = {}
    left_out = set(left_out.split())
    for p in sorted(problems, key=lambda p: (p.id, len(p.answer), p.answer)):
        if p.answer and digest(_key(p.question), size=4) not in left_out:
            first.setdefault(_key(p.question), p)
    return list(first.values())


SPLITS = ('train', 'calibration', 'test')


def _carve(problems, split):
    "Train (4 in 5) or calibration (1 in 5) of a training set, by the hash of the question."
    return [
        p for p in problems if (int(digest('split', p.id), 16) % 5 == 0) == (split == 'calibration')
    ]


def _stratify(problems, split):
    "40/20/40 train/calibration/test along the difficulty."
    turns = 'train', 'test', 'calibration', 'test', 'train'
    return [
        p
        for i, p in enumerate(sorted(problems, key=lambda p: (p.difficulty, p.id)))
        if turns[i % 5] == split
    ]


def of_benchmark(value, benchmark: str, what: str):
    "A parameter's value for a benchmark: one for all, or of a dict with \"default\". ValueError where there is none."
    values = value if isinstance(value, dict) else dict(default=value)
    for name in values:
        one_of(f'benchmark in {what}', name, (*SOURCES, *MICRO, 'default'))
    name = benchmark if benchmark in values else 'default'
    if name in values:
        return values[name]
    raise ValueError(f'{what} has no value for {benchmark}, and no "default"')


def step_limit(max_steps, benchmark: str) -> int:
    return of_benchmark(max_steps, benchmark, 'max_steps')


def _public(benchmark, split, data_dir):
    "Every problem of a split of a public benchmark."
    if data_dir and not Path(data_dir).is_dir():
        raise FileNotFoundError(f'data_dir={str(data_dir)!r} is not a folder')
    if benchmark != 'omnimath' and split == 'test':
        return _clean(_problems(benchmark, 0, data_dir))
    train = _clean(_problems(benchmark, 1, data_dir), _LEFT_OUT.get(benchmark, ''))
    if benchmark == 'omnimath':
        return _stratify(train, split)
    taken = {_key(p.question) for p in _problems(benchmark, 0, data_dir)}
    return _carve([p for p in train if _key(p.question) not in taken], split)


@lru_cache
def _micro(benchmark):
    "The shipped problems of a micro benchmark: split -> `Problem`s in the order in which they were drawn."
    path = PACKAGE / 'micro_problems' / f'{benchmark}.jsonl.xz'
    problems = {split: [] for split in SPLITS}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        problem = Problem(
            benchmark, row['id'], row['question'], row['answer'], row['level'], row['solution']
        )
        problems[row['split']].append(problem)
    return problems


def load_problems(
    benchmark: str,  # "gsm8k", "math500", "omnimath", "micro-gsm", "micro-math" or "micro-omni"
    split: str,  # "train", "calibration" or "test"
    n: int | dict | None = None,  # how many problems, also {benchmark: number}; None: all
    data_dir=None,  # a folder with copies of the public sets, files named as in `SOURCES`; None: the Hub
) -> list:  # `Problem`s in the order of a hash, so that the first n are a random subset
    "Problems of one split; the splits share no question. ValueError, FileNotFoundError, ImportError."
    one_of('benchmark', benchmark, (*SOURCES, *MICRO))
    one_of('split', split, SPLITS)
    n = of_benchmark(n, benchmark, 'n')
    if n is not None and n < 1:
        raise ValueError(f'n must be at least 1, got {n}')
    if benchmark in MICRO:
        problems = _micro(benchmark)[split]
    else:
        problems = sorted(_public(benchmark, split, data_dir), key=lambda p: p.id)
    if n is None or n <= len(problems):
        return problems[:n]
    raise ValueError(f'{benchmark} {split} has {len(problems)} problems, n={n} were asked for')
