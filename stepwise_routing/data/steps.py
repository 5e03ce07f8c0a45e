"""Finds the right steps of a chain, and its first wrong step, by a program.

Here belongs the label of a step, right or wrong. The program compares the step's text with the
solution of a micro problem, which lists what each step must state. Models that estimate the label
belong in `models.reward`.
"""

import ast
import re
from fractions import Fraction

from ..records import Problem, step_texts

# ---- equations

CHAIN = re.compile(r'[\d()+\-*/%]+(?:=[\d()+\-*/%]+)+')  # such as 2*3=6 or 4+5=3*3=9
ARITHMETIC = (
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
LONGEST = 2000  # characters of a step whose equations are read


def exact_value(side: str):  # int or Fraction
    "The exact value of an expression with whole numbers. SyntaxError for other expressions."
    tree = ast.parse(side, mode='eval')
    if not all(isinstance(node, ARITHMETIC) for node in ast.walk(tree)):
        raise SyntaxError('not arithmetic')
    return eval(re.sub(r'(\d+)', r'Fraction(\1)', side), dict(Fraction=Fraction))


def equations_hold(step: str) -> bool:
    "Is every equation in the step true, in exact arithmetic? False if one cannot be read."
    text = re.sub(r'floor\((\d+)/(\d+)\)', r'(\1//\2)', step).replace(' mod ', '%')
    if len(text) > LONGEST:
        return False
    for chain in CHAIN.findall(text):
        try:
            first, *others = [exact_value(side) for side in chain.split('=')]
        except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
            return False
        if any(value != first for value in others):
            return False
    return True


# ---- checks of earlier lines

CHECK = 'Check: '  # begins a line that computes the last equations again before it goes on
WRITTEN = re.compile(
    r'(?:\d+ mod \d+: \d+\*\d+=\d+, )?(?:floor\(\d+/\d+\)|[\d()+*/-]+)=\(?-?\d+\)?'
)


def written_equations(line: str) -> str:
    "The equations of a line, in the form in which a check repeats them."
    return ', '.join(WRITTEN.findall(line))


def check_line(
    lines: list,  # of a solution
    index: int,  # of the next line of the solution
    back: int,  # number of lines before it that are checked
) -> str:
    "The step of a model that takes over: it checks the equations of the last lines, then adds a line."
    checked = lines[max(0, index - back) : index]
    if not checked:
        return lines[index]
    return CHECK + '; '.join([*map(written_equations, checked), lines[index]])


# ---- labels

NUMBERS = re.compile(r'\d+|\b[xy]\b')
RESULTS = re.compile(r'=\(?(-?\d+)\b(?![*/+=-])')


def statement(line: str) -> tuple:
    "The content of a line without its wording: its numbers in any order, and its results."
    return sorted(NUMBERS.findall(line)), RESULTS.findall(line)


def lines_reached(
    lines: list,  # of the solution
    step: str,
    done: int,  # number of lines that the chain has stated so far
    is_sound: bool,  # True: the chain has no mistake that is not repaired
) -> int | None:  # lines that the chain has stated after the step; None: the step is wrong
    "Does a step state the next line, perhaps after a check of the lines before it?"
    *checked, last = step.removeprefix(CHECK).split('; ') if step.startswith(CHECK) else [step]
    earliest = max(0, done - len(checked))
    for start in range(done, earliest - 1, -1):  # of the lines that it may be checking
        index = start + len(checked)
        if index >= len(lines) or statement(lines[index]) != statement(last):
            continue
        if [written_equations(line) for line in lines[start:index]] != checked:
            continue
        covers_mistake = bool(checked) and index >= done
        return max(done, index + 1) if is_sound or covers_mistake else None
    is_repeated = not checked and is_sound and last.rstrip('.') in lines[:done]
    return done if is_repeated else None


def right_steps(problem: Problem, steps) -> list:  # bool per step
    """Which steps of a chain are right.

    A step is right if it states the next line of the solution, or repeats an earlier line word for
    word. After a wrong step all steps are wrong, until a check repeats the lines from the mistake on.
    """
    lines = problem.solution.split('\n\n')
    done = 0
    marks = []
    for text in step_texts(steps):
        is_sound = not marks or marks[-1]
        reached = lines_reached(lines, text, done, is_sound) if equations_hold(text) else None
        if reached is not None:
            done = reached
        marks.append(reached is not None)
    return marks


def first_wrong(problem: Problem, steps) -> int:
    "Index of a chain's first wrong step (see `right_steps`). -1 if all steps are right."
    marks = right_steps(problem, steps)
    return -1 if all(marks) else marks.index(False)
