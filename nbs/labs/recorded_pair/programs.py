"""MBPP, recorded with the same pair by version 0.3: a step is a line, and the answer is a program.

Nothing is drawn or run here: steps and verdicts are recorded.
"""

import re
from pathlib import Path

import numpy as np

from stepwise_routing.data.benchmarks import Benchmark, register
from stepwise_routing.data.recorded import RecordedVerdict

FOLDER = Path(__file__).parent
MAX_STEPS = 40  # of a chain, the limit when it was drawn


def code_of(text: str) -> str:
    "The Python code in a reply: all its fenced blocks in order, or the whole reply if it has none."
    begin = r'```(?:[Pp]ython(?:3(?:\.\d+)?)?|py)?[ \t]*\r?\n'
    end = r'(?:\r?\n[ \t]*```|\Z)'
    blocks = re.findall(f'{begin}(.*?){end}', text, re.S)
    return '\n'.join(blocks) if blocks else text


def program_of(problem, steps) -> str | None:
    "The program in the steps of a chain, without tests. None if they hold no line of code."
    lines = [step.text for step in steps if not step.text.startswith('assert ')]
    code = code_of('\n'.join(lines))
    return code if code.strip() else None


def every_character(text: str) -> np.ndarray:  # bool [character]
    return np.ones(len(text), bool)


register(
    Benchmark(
        'mbpp-recorded',
        answer=program_of,
        right=RecordedVerdict('mbpp', FOLDER),
        scored=every_character,
    )
)
