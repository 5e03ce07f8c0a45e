"Your own questions and answers as problems. The public benchmarks are in `data.sources`."

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from ..records import Problem
from ..util import bad_row
from .sources import fifth_of, file_rows, make_problem

# what JSON makes of \frac, \binom, \text and \right behind a single backslash
LOST_BACKSLASH = re.compile(r'[\f\x08]|\t(?=ext|imes|heta|frac)|\r(?=ight)')


def own_text(name: str, value) -> str:
    "A question or an answer as text. ValueError for what nobody means."
    is_value = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    text = str(value).strip()
    if not is_value or text in ('', 'nan', 'inf', '-inf'):  # json reads NaN and 1e999
        raise ValueError(f'field {name!r} is {value!r:.60}: give text or a number')
    if LOST_BACKSLASH.search(str(value)):
        raise ValueError(
            f'field {name!r} holds LaTeX that has lost a backslash, {text!r:.60}: JSON takes two'
        )
    return text


def own_problem(
    row,  # a dict, or a `Problem`
    name: str,  # of the benchmark
    fields: dict,  # see `own_problems`
) -> Problem:
    "One row as a `Problem`. ValueError says what is wrong with the row."
    if isinstance(row, Problem):
        row = vars(row)
        fields = {}
    if not isinstance(row, dict):
        raise ValueError('not a JSON object')
    texts = {}
    for ours in ('question', 'answer'):
        theirs = fields.get(ours, ours)
        if theirs not in row:
            found = ', '.join(map(str, row))
            raise ValueError(
                f'no field {theirs!r} among {found}: say which one it is, '
                f'for example fields={{{ours!r}: {next(iter(row), "text")!r}}}'
            )
        texts[ours] = own_text(theirs, row[theirs])
    if '####' in texts['answer']:
        raise ValueError('the answer is a whole solution: give only what stands behind ####')
    question = row[fields.get('question', 'question')]  # with its white space
    return make_problem(name, question, texts['answer'])


def own_problems(
    source,  # JSONL, JSON or CSV file, or rows: dicts or `Problem`s
    name: str = 'own',  # of the benchmark; it is part of all seeds
    fields: dict | None = None,  # our names of fields -> yours, such as {"question": "problem"}
) -> list:  # `Problem`s
    """Your questions as problems. A question that comes twice with the same answer is kept once.

    ValueError, in one line with file and row, for a bad row.
    """
    is_file = isinstance(source, (str, Path))
    where = source if is_file else 'problems'
    problems = {}
    for number, row in enumerate(file_rows(source) if is_file else source, 1):
        try:
            problem = own_problem(row, name, fields or {})
            first = problems.setdefault(problem.id, problem)
            if first.answer != problem.answer:
                raise ValueError(
                    f'{shorten(problem.question, 60)!r} has the answer {problem.answer!r:.60} here '
                    f'and {first.answer!r:.60} in an earlier row'
                )
        except ValueError as error:
            raise bad_row(where, number, error) from None
    if not problems:
        raise ValueError(f'{where} holds no problems')
    return list(problems.values())


def with_earlier(
    folder,  # of `own.collect`
    new,  # `Problem`s
    name: str,  # of the benchmark
) -> list:  # `Problem`s
    "The problems of earlier calls, and new ones. ValueError if an answer contradicts an earlier one."
    file = Path(folder) / 'problems.jsonl'
    return own_problems([*own_problems(file, name), *new], name) if file.is_file() else new


@dataclass(frozen=True)
class QuestionFile:
    "Your own file, with `question` and `answer` in each row."

    path: str
    name: str  # of the benchmark

    def problems(self, split: str, data_dir=None) -> list:
        "Hashes put 2/5 of the problems into train, 1/5 into calibration and 2/5 into test."
        turns = 'train', 'train', 'calibration', 'test', 'test'
        return [p for p in own_problems(self.path, self.name) if turns[fifth_of(p)] == split]
