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


def own_answer(row: dict, theirs: str | None) -> str:
    "The answer of a row; '' if it has none. ValueError if it may have one under another name."
    is_question_alone = len(row) == 1 and theirs not in row
    if theirs is None or is_question_alone:
        return ''
    value = named(row, 'answer', theirs)
    if value in (None, ''):
        return ''
    answer = own_text(theirs, value)
    if '####' in answer:
        raise ValueError('the answer is a whole solution: give only what stands behind ####')
    return answer


def named(row: dict, ours: str, theirs: str):
    "The value of a field. ValueError, with the fields that there are, if it is missing."
    if theirs in row:
        return row[theirs]
    found = ', '.join(map(str, row))
    names = [name for name in row if name] or ['text']
    example = names[0] if ours == 'question' else names[-1]
    none = ", or fields={'answer': None} if no answers are known" * (ours == 'answer')
    raise ValueError(
        f'no field {theirs!r} among {found}: say which one it is, '
        f'for example fields={{{ours!r}: {example!r}}} (--field {ours}={example}){none}'
    )


def own_problem(
    row,  # a dict, or a `Problem`
    name: str,  # of the benchmark
    fields: dict,  # see `own_problems`
) -> Problem:
    "One row as a `Problem`. ValueError says what is wrong with the row."
    if isinstance(row, Problem):
        row = vars(row)
        fields = {name: None for name in fields if fields[name] is None}
    if not isinstance(row, dict):
        raise ValueError('not a JSON object')
    theirs = fields.get('question', 'question')
    question = named(row, 'question', theirs)  # with its white space
    own_text(theirs, question)
    return make_problem(name, question, own_answer(row, fields.get('answer', 'answer')))


def own_problems(
    source,  # JSONL, JSON or CSV file, or rows: dicts or `Problem`s
    name: str = 'own',  # of the benchmark; it is part of all seeds
    # our names of fields -> yours, such as {"question": "problem"}; {"answer": None}: no answers are known
    fields: dict | None = None,
) -> list:  # `Problem`s; an answer that is not known is ''
    """Your questions as problems. A question that comes twice with the same answer is kept once.

    ValueError, in one line with file and row, for a bad row, or if only some questions have an answer.
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
    bare = [problem for problem in problems.values() if not problem.answer]
    if 0 < len(bare) < len(problems):
        raise ValueError(
            f'{where}: {len(bare)} of {len(problems)} questions have no answer, such as '
            f'{shorten(bare[0].question, 60)!r}: give all of them one, or none'
        )
    return list(problems.values())


def with_earlier(
    folder,  # of `own.collect`
    new,  # `Problem`s
    name: str,  # of the benchmark
) -> list:  # `Problem`s
    "The problems of earlier calls, and new ones. ValueError if an answer contradicts an earlier one."
    file = Path(folder) / 'problems.jsonl'
    if not file.is_file():
        return new
    if not (Path(folder) / 'own.json').is_file():
        raise ValueError(f'{file} would be overwritten: use another folder')
    earlier = own_problems(file, name)
    if bool(earlier[0].answer) != bool(new[0].answer):
        kind = 'with' if earlier[0].answer else 'without'
        raise ValueError(f'{folder} is for questions {kind} answers: use another folder')
    return own_problems([*earlier, *new], name)


@dataclass(frozen=True)
class QuestionFile:
    "Your own file, with `question` and `answer` in each row."

    path: str
    name: str  # of the benchmark

    def problems(self, split: str, data_dir=None) -> list:
        "Hashes put 2/5 of the problems into train, 1/5 into calibration and 2/5 into test."
        turns = 'train', 'train', 'calibration', 'test', 'test'
        problems = own_problems(self.path, self.name)
        if not problems[0].answer:
            raise ValueError(f'{self.path} has no answers, and a run grades them')
        return [problem for problem in problems if turns[fifth_of(problem)] == split]
