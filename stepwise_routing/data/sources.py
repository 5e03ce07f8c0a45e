"""Where problems come from: public sets (from the Hub or from copies), and problems that the package ships.

Here belong reading files of rows, how rows become problems, and the split of each problem. What a model and
a grader must know about a benchmark belongs in `data.benchmarks`.
"""

import csv
import io
import json
import lzma
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..records import Problem, boxed
from ..util import PACKAGE, bad_row, digest, install_line, require_fields

SPLITS = ('train', 'calibration', 'test')


def make_problem(
    benchmark: str,
    question: str,
    answer: str,
    difficulty: float | None = None,
    solution: str | None = None,  # steps, separated by blank lines
) -> Problem:
    "A `Problem`. Its id is the hash of its question without white space. ValueError for half a character."
    if not isinstance(question, str):
        raise ValueError(f'the question is {question!r:.60}, which is no text')
    (question + answer).encode()  # raises for a lone surrogate, which no model can read
    name = f'{benchmark}-{digest(" ".join(question.split()), size=6)}'
    return Problem(benchmark, name, question, answer, difficulty, solution)


# ---- the rows of the public benchmarks


def read_gsm8k(row: dict) -> Problem:
    "A row of GSM8K: lines are steps, the answer follows `####`, notes in << >> are dropped."
    solution, mark, answer = row['answer'].rpartition('####')
    if not mark:
        raise ValueError('field \'answer\' has no "#### number" at its end')
    lines = re.sub(r'<<[^<>\n]*>>', '', solution).strip().split('\n')
    number = answer.strip().replace(',', '')
    return make_problem('gsm8k', row['question'], number, solution='\n\n'.join(lines))


def read_math(row: dict) -> Problem:
    "A row of MATH. Its answer is a field (MATH-500) or the solution's last box. Difficulty is 1 to 5."
    answer = row.get('answer') or boxed(row['solution']) or ''
    digit = re.search(r'\d', str(row.get('level')))
    level = float(digit[0]) if digit else None
    return make_problem('math500', row['problem'], answer.strip(), level, row['solution'])


def read_omnimath(row: dict) -> Problem:
    "A row of Omni-MATH. Difficulty is 1 to 10."
    answer = str(row['answer'] or '').strip()
    difficulty = float(row['difficulty'])
    return make_problem('omnimath', row['problem'], answer, difficulty, row.get('solution'))


# ---- files and the Hub


@dataclass(frozen=True)
class Source:
    "One set of rows, on the Hub or in a folder of copies."

    dataset: str  # on the Hub
    revision: str  # pinned
    split: str  # on the Hub
    file: str  # its name in a folder of copies
    configurations: tuple = (None,)  # names on the Hub, in the order of reading


def hub_rows(source: Source) -> list:
    "Rows of a dataset on the Hub. ImportError if the extra `hub` is not installed."
    try:
        from datasets import load_dataset
    except ImportError as error:
        hint = f'{install_line("hub")}, or give a folder of copies as data_dir'
        raise ImportError(f'{source.dataset} comes from the Hugging Face Hub: {hint}') from error
    rows = []
    for name in source.configurations:
        rows += load_dataset(source.dataset, name, split=source.split, revision=source.revision)
    return rows


def file_rows(path) -> list:
    "Rows of a JSONL file, a JSON list (.json) or a table (.csv). ValueError, with file and row, for bad text."
    path = Path(path)
    data = path.read_bytes()
    try:
        text = data.decode('utf-8-sig')  # Windows puts a mark first
    except UnicodeDecodeError as error:
        row = data.count(b'\n', 0, error.start) + 1
        raise bad_row(
            path, row, 'not UTF-8: the file is damaged, or saved in another way'
        ) from None
    kind = path.suffix.lower()
    if kind == '.csv':
        return table_rows(path, text)
    rows = []
    for number, part in enumerate([text] if kind == '.json' else text.split('\n'), 1):
        try:
            rows += [json.loads(part)] if part.strip() else []
        except (ValueError, RecursionError) as error:
            raise bad_row(path, number, f'not JSON ({error}); is the file cut off?') from None
    if kind != '.json' or not rows:
        return rows
    if not isinstance(rows[0], list):
        raise ValueError(f'{path} is JSON, but no list of rows: [{{"question": ...}}, ...]')
    return rows[0]


def table_rows(path, text: str) -> list:
    "Rows of a table, whose columns are separated by what its first line has most of: commas, semicolons or tabs."
    separator = max(',;\t', key=text.split('\n', 1)[0].count)
    options = dict(delimiter=separator, skipinitialspace=True, strict=True)
    rows = []
    try:
        for row in csv.DictReader(io.StringIO(text, newline=''), **options):
            if None in row:
                reason = f'more cells than names: put text with {separator!r} into quotes'
                raise bad_row(path, len(rows) + 1, reason)
            rows.append(row)
    except csv.Error as error:
        raise bad_row(path, len(rows) + 1, f'{error}; is a quote left open?') from None
    return rows


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
    "A question's letters and digits alone. A reformatted copy has the same key as the original."
    text = unicodedata.normalize('NFKC', question).lower()
    return re.sub(r'[\W_]', '', text) or question


def distinct_problems(
    problems,
    left_out: str = '',  # hashes of questions, separated by blanks
) -> list:
    "Problems that have an answer, each question once, sorted by id. Ids are hashes: a random order."
    hashes = set(left_out.split())
    first = {}
    for problem in sorted(problems, key=lambda p: (p.id, len(p.answer), p.answer)):
        key = question_key(problem.question)
        if problem.answer and digest(key, size=4) not in hashes:
            first.setdefault(key, problem)
    return list(first.values())


def fifth_of(problem: Problem) -> int:  # 0 to 4
    "The fifth of a set that a problem is in, by the hash of its question. Other problems do not matter."
    return int(digest('split', problem.id), 16) % 5


def stratify(problems, split: str) -> list:
    "Split 40 % / 20 % / 40 % into train / calibration / test, with similar difficulties in each, sorted by id."
    turns = 'train', 'test', 'calibration', 'test', 'train'
    by_difficulty = sorted(problems, key=lambda p: (p.difficulty, p.id))
    chosen = [problem for i, problem in enumerate(by_difficulty) if turns[i % 5] == split]
    return sorted(chosen, key=lambda p: p.id)


@dataclass(frozen=True)
class PublicSet:
    """A public benchmark with one question per row.

    Its test problems are those of `test`. Hashes divide `train`: 4/5 train, 1/5 calibration.
    """

    test: Source
    # equal to `test` if there is no training set: then `stratify` splits the problems
    train: Source
    fields: tuple  # that a row needs; the first is the question
    read: Callable  # a row -> `Problem`; ValueError
    licence: str = 'MIT'
    left_out: str = ''  # hashes of questions that are not used

    def rows(self, source: Source, data_dir) -> list:
        "All problems of one source. ValueError, with file, row and field, for a bad row."
        name = Path(data_dir) / source.file if data_dir else source.dataset
        problems = []
        for number, row in enumerate(file_rows(name) if data_dir else hub_rows(source), 1):
            try:
                require_fields(row, self.fields)
                problems.append(self.read(row))
            except (ValueError, TypeError, AttributeError) as error:
                raise bad_row(name, number, error) from None
        if not problems:
            raise ValueError(f'{name} holds no rows')
        return problems

    def problems(self, split: str, data_dir=None) -> list:
        "Every problem of a split, sorted by id."
        test = self.rows(self.test, data_dir)
        if self.train == self.test:
            return stratify(distinct_problems(test, self.left_out), split)
        if split == 'test':
            return distinct_problems(test)
        test_keys = {question_key(p.question) for p in test}
        train = distinct_problems(self.rows(self.train, data_dir), self.left_out)
        fresh = [p for p in train if question_key(p.question) not in test_keys]
        return [p for p in fresh if (fifth_of(p) == 0) == (split == 'calibration')]


GSM8K = 'openai/gsm8k', '740312add88f781978c0658806c59bc2815b9866'
MATH_500 = 'HuggingFaceH4/MATH-500', '6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be'
MATH = 'EleutherAI/hendrycks_math', '21a5633873b6a120296cce3e2df9d5550074f4a3'
OMNI_MATH = 'KbsdJames/Omni-MATH', '40ba231d8f16e29ecd40e6407e2c8640145a8f62'
SUBJECTS = (  # configurations of MATH
    'algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus'
)
OMNIMATH = Source(*OMNI_MATH, 'test', 'omni_math.jsonl')  # it has no training set
PUBLIC = {
    'gsm8k': PublicSet(
        test=Source(*GSM8K, 'test', 'gsm8k_test.jsonl', ('main',)),
        train=Source(*GSM8K, 'train', 'gsm8k_train.jsonl', ('main',)),
        fields=('question', 'answer'),
        read=read_gsm8k,
    ),
    'math500': PublicSet(
        test=Source(*MATH_500, 'test', 'math500.jsonl'),
        train=Source(*MATH, 'train', 'math_train.jsonl', (*SUBJECTS.split(),)),
        fields=('problem', 'solution'),
        read=read_math,
        left_out=LEFT_OUT['math500'],
    ),
    'omnimath': PublicSet(
        test=OMNIMATH,
        train=OMNIMATH,
        fields=('problem', 'answer', 'difficulty'),
        read=read_omnimath,
        left_out=LEFT_OUT['omnimath'],
    ),
}


# ---- shipped problems


def unpacked_lines(path: Path) -> list:
    "The lines of a file that the package ships packed."
    return lzma.decompress(path.read_bytes()).decode().removesuffix('\n').split('\n')


@lru_cache
def shipped_problems(benchmark: str) -> dict:  # split -> `Problem`s, in the order of the generator
    "The shipped problems of a micro benchmark."
    problems = {split: [] for split in SPLITS}
    for line in unpacked_lines(PACKAGE / 'micro_problems' / f'{benchmark}.jsonl.xz'):
        row = json.loads(line)
        texts = row['id'], row['question'], row['answer'], row['level'], row['solution']
        problems[row['split']].append(Problem(benchmark, *texts))
    return problems


@dataclass(frozen=True)
class ShippedSet:
    "A set of problems that the package ships."

    name: str  # of the benchmark

    def problems(self, split: str, data_dir=None) -> list:
        "Every problem of a split, in the order of the generator."
        return shipped_problems(self.name)[split]
