"""Your own questions and answers as problems.

Here belong reading a row that somebody else wrote and saying what is wrong with it. The public
benchmarks are in `data.sources`.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from textwrap import shorten

from ..records import Problem
from ..util import bad_row, require_fields
from .sources import fifth_of, file_rows, make_problem

# what JSON makes of \frac, \binom, \text and \right behind a single backslash
LOST_BACKSLASH = re.compile(
    r'\f(?=rac)|\x08(?=inom|oxed|egin|eta)|\t(?=ext\{|imes|heta|frac[\d{])|\r(?=ight)'
)


def check_backslashes(name: str, text: str) -> None:
    "ValueError if LaTeX was written into JSON with single backslashes."
    found = LOST_BACKSLASH.search(text)
    if found:
        damaged = text[found.start() :][:20]
        raise ValueError(
            f'field {name!r} holds {damaged!r}, LaTeX that has lost its backslash: JSON takes two, '
            r'such as "\\frac{1}{2}"'
        )


def answer_text(answer) -> str:
    "An answer as text. ValueError if it is neither text nor a finite number."
    is_value = isinstance(answer, (str, Real)) and not isinstance(answer, bool)
    if isinstance(answer, float) and not math.isfinite(answer):  # json reads NaN and 1e999
        raise ValueError(f"field 'answer' is {answer}, which is no number")
    if not is_value or not str(answer).strip():
        raise ValueError("field 'answer' is neither text nor a number")
    if '####' in str(answer):
        raise ValueError("field 'answer' is a whole solution: give only what stands behind ####")
    check_backslashes('answer', str(answer))
    return str(answer).strip()


def own_problem(
    row,  # dict with "question" and "answer", or a `Problem`
    name: str,  # of the benchmark
) -> Problem:
    "One row as a `Problem`. ValueError says what is wrong with the row."
    if isinstance(row, Problem):
        row = vars(row)
    require_fields(row, ('question', 'answer'))
    question = row['question']
    if not isinstance(question, str) or not question.strip():
        raise ValueError("field 'question' is not text")
    check_backslashes('question', question)
    return make_problem(name, question, answer_text(row['answer']))


def own_problems(
    source,  # JSONL file, or rows with "question" and "answer"
    name: str = 'own',  # of the benchmark; it is part of all seeds
) -> list:  # `Problem`s
    """Your questions as problems. A question that comes twice with the same answer is kept once.

    ValueError or FileNotFoundError in one line, with file and row.
    """
    is_file = isinstance(source, (str, Path))
    rows = file_rows(source) if is_file else source
    if not hasattr(rows, '__iter__'):
        raise ValueError(
            f'problems is {rows!r:.80}: it should be a JSONL file, or rows with "question" and "answer"'
        )
    source_name = source if is_file else 'problems'
    problems = {}
    for number, row in enumerate(rows, 1):
        try:
            problem = own_problem(row, name)
        except ValueError as error:
            raise bad_row(source_name, number, error) from None
        first = problems.setdefault(problem.id, problem)
        if first.answer != problem.answer:
            reason = 'an earlier row has the same question and another answer'
            raise bad_row(source_name, number, reason)
    if not problems:
        raise ValueError(f'{source_name} holds no problems')
    return list(problems.values())


def check_answers(
    file,  # where the earlier problems are
    earlier,  # `Problem`s
    new,  # `Problem`s
) -> None:
    "ValueError, with the question, if it had another answer in an earlier call."
    answers = {problem.id: problem.answer for problem in earlier}
    for problem in new:
        before = answers.get(problem.id, problem.answer)
        if before != problem.answer:
            raise ValueError(
                f'the question {shorten(problem.question, 60)!r} has the answer {problem.answer!r:.60} '
                f'now, and {before!r:.60} in {file}: if the new answer is right, put it there too'
            )


def with_earlier(
    folder,  # of `own.collect`
    new,  # `Problem`s
    name: str,  # of the benchmark
) -> list:  # `Problem`s
    "The problems of earlier calls, and new ones. ValueError: an answer contradicts an earlier one."
    file = Path(folder) / 'problems.jsonl'
    if file.is_file():
        earlier = own_problems(file, name)
        check_answers(file, earlier, new)
        return own_problems([*earlier, *new], name)
    return new


@lru_cache(maxsize=8)
def problems_of_file(
    path: str,
    folder: Path,  # where a relative path begins
    name: str,  # of the benchmark
    changed: int,  # time of the file's last change: a changed file is read again
) -> list:  # `Problem`s
    "The problems of a file. It is read once, since each part of a run asks for them."
    return own_problems(path, name)


@dataclass(frozen=True)
class QuestionFile:
    "Your own JSONL file, with `question` and `answer` in each row."

    path: str
    name: str  # of the benchmark
    licence: str = 'yours'
    is_public = False

    @staticmethod
    def split_of(problem: Problem) -> str:
        "The split of a problem. Hashes put 2/5 into train, 1/5 into calibration and 2/5 into test."
        turns = 'train', 'train', 'calibration', 'test', 'test'
        return turns[fifth_of(problem)]

    def problems(self, split: str, data_dir=None) -> list:
        "All problems of a split, as `split_of` says."
        path = Path(self.path)
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        problems = problems_of_file(self.path, Path.cwd(), self.name, changed)
        return [problem for problem in problems if self.split_of(problem) == split]
