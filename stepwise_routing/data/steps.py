"""The program that finds the first wrong step of a solution"""

import ast
import re
from fractions import Fraction

from ..base.records import Problem, step_texts

_CHAIN = re.compile(r'[\d()+\-*/%]+(?:=[\d()+\-*/%]+)+')

_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.UnaryOp,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
)


def _exact(side):
    "Value of an expression of whole numbers; SyntaxError for anything else."
    if all(isinstance(node, _ARITHMETIC) for node in ast.walk(ast.parse(side, mode='eval'))):
        return eval(re.sub(r'(\d+)', r'Fraction(\1)', side), dict(Fraction=Fraction))
    raise SyntaxError('not arithmetic')


def equations_hold(step: str) -> bool:
    "Is every equation between numbers in a step true, in exact arithmetic? False where one cannot be read."
    text = re.sub(r'floor\((\d+)/(\d+)\)', r'(\1//\2)', step).replace(' mod ', '%')
    if len(text) > 2000:
        return False
    for chain in _CHAIN.findall(text):
        try:
            first, *others = map(_exact, chain.split('='))
        except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
            return False
        if any(value != first for value in others):
            return False
    return True


CHECK = 'Check: '  # how a line begins that works out the last equations again before it goes on

_NUMBERS = re.compile(r'\d+|\b[xy]\b')

_WRITTEN = re.compile(
    r'(?:\d+ mod \d+: \d+\*\d+=\d+, )?(?:floor\(\d+/\d+\)|[\d()+*/-]+)=\(?-?\d+\)?'
)


def check_line(lines: list, at: int, back: int) -> str:
    "Line `at` of a solution behind the equations of the `back` lines before it, as whoever takes over writes it."
    again = [', '.join(_WRITTEN.findall(line)) for line in lines[max(0, at - back) : at]]
    return CHECK + '; '.join(again + [lines[at]]) if again else lines[at]


def _statement(text):
    return sorted(_NUMBERS.findall(text)), re.findall(r'=\(?(-?\d+)\b(?![*/+=-])', text)


def _reached(lines, text, due, sound):
    "How many lines of the solution stand after one more step; None where it is wrong."
    *again, last = text.removeprefix(CHECK).split('; ') if text.startswith(CHECK) else [text]
    for start in range(due, max(-1, due - len(again) - 1), -1):
        at = start + len(again)
        if at >= len(lines) or _statement(lines[at]) != _statement(last):
            continue
        if all(
            check_line(lines, k + 1, 1).startswith(CHECK + e + '; ')
            for k, e in enumerate(again, start)
        ):
            return max(due, at + 1) if sound or again and at >= due else None
    repeated = not again and sound and last.rstrip('.') in lines[:due]
    return due if repeated else None


def right_steps(problem: Problem, steps) -> list:  # bool per step
    "Which steps of a chain leave it sound: the one due, an earlier one word for word, a check that covers a mistake?"
    lines = problem.solution.split('\n\n')
    due = 0
    sound = True
    marks = []
    for text in step_texts(steps):
        reached = _reached(lines, text, due, sound) if equations_hold(text) else None
        sound = reached is not None
        due = due if reached is None else reached
        marks.append(sound)
    return marks


def first_wrong(problem: Problem, steps) -> int:
    "Index of a chain's first wrong step (`right_steps`); -1 without one."
    marks = right_steps(problem, steps)
    return -1 if all(marks) else marks.index(False)
