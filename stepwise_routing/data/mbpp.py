"""MBPP: a question asks for a Python function, and tests decide whether the function is right.

Here belong reading a row, the prompt, finding the program in a reply, and the split of each problem.
Running programs belongs in `data.programs`.
"""

import json
from dataclasses import dataclass

from ..base.records import Problem
from .programs import code_of, defined_names, run_tests
from .sources import (
    Source,
    check_folder,
    distinct_problems,
    fifth_of,
    make_problem,
    source_problems,
)

# Austin et al. 2021, CC BY 4.0
MBPP = 'google-research-datasets/mbpp', '4bb6404fdc6cacfda99d4ac4205087b89d32030c'
SPLITS_OF_THE_HUB = ('train', 'validation', 'test', 'prompt')
FIELDS = ('text', 'code', 'task_id', 'test_list')
SYSTEM = 'You are an expert Python programmer.'
REQUEST = (
    'Reply with one Python code block and nothing else: no tests, no examples. Begin it with a plan of two to four '
    'numbered comments, one a line, such as "# 1. ...". Then write the code, one statement a line.'
)


def read_mbpp(row: dict) -> Problem:
    "A row as a `Problem`: the question shows the tests, the answer holds the tests as JSON. ValueError for a bad row."
    tests = row['test_list']
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("field 'test_list' is not a list of texts")
    code = row['code'].replace('\r\n', '\n')
    question = f'{row["text"].strip()}\n\nThe code must pass these tests:\n' + '\n'.join(tests)
    try:
        defined = defined_names(code)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"field 'code' is not Python ({error})") from None
    functions = [name for name in defined if any(name in test for test in tests)]
    if not functions:
        raise ValueError("no test in 'test_list' uses what 'code' defines")
    job = dict(tests=tests, setup=row.get('test_setup_code') or '', functions=functions)
    return make_problem('mbpp', question, json.dumps(job), float(row['task_id']), code)


def can_be_graded(problem: Problem) -> bool:
    """Can plain values test the program?

    Tasks 367 and 927 cannot be graded: their tests build a tree from a class of the program, and such objects
    cannot leave the confined process. The reference programs of the other 972 tasks pass."""
    return not json.loads(problem.answer)['setup']


def official_split(problem: Problem) -> str:
    "Task ids 11 to 510 are test problems, 511 to 600 validate, 601 to 974 train; the first ten were shown in prompts."
    task = problem.difficulty
    if task < 11:
        return 'prompt'
    return 'test' if task <= 510 else 'validation' if task <= 600 else 'train'


def split_of(problem: Problem) -> str:
    """The split of a problem here. Four in five of the official training and test problems keep their split.

    Calibration needs more than the 90 problems of the official validation set, so it also gets the other fifths.
    """
    official = official_split(problem)
    if official == 'validation' or fifth_of(problem) == 0:
        return 'calibration'
    return official


@dataclass(frozen=True)
class MbppSet:
    "MBPP, on the Hub or as the file mbpp.jsonl."

    licence: str = 'CC BY 4.0'
    is_public = True

    def problems(self, split: str, data_dir=None) -> list:
        "Every problem of a split."
        check_folder(data_dir)
        sources = [Source(*MBPP, 'all', 'mbpp.jsonl', ('full',))]
        if not data_dir:
            sources = [Source(*MBPP, part, 'mbpp.jsonl', ('full',)) for part in SPLITS_OF_THE_HUB]
        problems = []
        for source in sources:
            problems += source_problems(source, FIELDS, read_mbpp, data_dir)
        known = [p for p in distinct_problems(problems) if official_split(p) != 'prompt']
        return [p for p in known if split_of(p) == split and can_be_graded(p)]


def code_prompt(question: str) -> list:
    "Chat messages that ask for a plan in comments, followed by the code."
    text = f'{question}\n\n{REQUEST}'
    return [dict(role='system', content=SYSTEM), dict(role='user', content=text)]


def program_of(texts) -> str | None:
    "The program in the texts of a chain's steps. None if they hold no line of code."
    lines = [text for text in texts if not is_test(text)]
    code = code_of('\n'.join(lines))
    return code if code.strip() else None


def is_test(line: str) -> bool:
    "Does the model repeat the tests in this line? Tests are not part of the program."
    return line.startswith('assert ')


def closes_the_block(line: str) -> bool:
    "Does the program end here? It ends with its code block, or before the first test behind it."
    return line.strip() == '```' or is_test(line)


def passes_tests(problem: Problem, program: str) -> bool:
    "Does a program pass the problem's tests? The program runs in a confined process."
    job = json.loads(problem.answer)
    return run_tests(program, job['tests'], job['functions'], job['setup']).right
