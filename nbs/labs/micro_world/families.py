"""The families of problems of each micro benchmark, and how often each level occurs in it."""

from .exercises import (
    divisors,
    fraction,
    linear,
    modular,
    percent,
    polynomial,
    sequence,
    system,
)
from .puzzles import chain, count, digits, power, recurrence
from .word_problems import share, shop, story, trip, work

FAMILIES = {  # generators: functions of a random.Random and a level
    'micro-gsm': (story, shop, work, share, trip),
    'micro-math': (
        linear,
        fraction,
        divisors,
        modular,
        percent,
        sequence,
        polynomial,
        system,
    ),
    'micro-omni': (chain, power, recurrence, digits, count),
}

LEVELS = {  # weights of the levels 1 to 6 in a benchmark's train, calibration and test splits
    'micro-gsm': (2, 1, 0, 0, 0, 0),
    'micro-math': (1, 1, 1, 0, 0, 0),
    'micro-omni': (2, 1, 0, 0, 0, 3),
}
