"""Endless problems of the three micro benchmarks, and the pool that each question belongs to."""

import random

from stepwise_routing.records import Problem, boxed
from stepwise_routing.util import digest, one_of

from .families import FAMILIES, LEVELS
from .programs import Draft, solve

POOLS = ('test', 'calibration', 'train', 'lm')  # three for routers, one for the language models
LM_POOL_LEVELS = (
    1,
    1,
    1,
    1,
    1,
    0,
)  # weights of the levels 1 to 6 in the pool of the language models


def micro_split(question: str) -> str:
    "The pool of a question: a tenth each to test, calibration and train, the rest to \"lm\"."
    tenth = int(digest(question), 16) % 10
    return POOLS[min(tenth, 3)]


def micro_drafts(
    benchmark: str,
    split: str,  # one of the `POOLS`
    rng,  # random.Random
    levels=None,  # weights of the levels 1 to 6; None: those of the benchmark
):  # yields `Draft`s
    "Endless drafts of one pool; questions may be repeated. ValueError."
    one_of('benchmark', benchmark, FAMILIES)
    one_of('split', split, POOLS)
    if not levels:
        levels = LM_POOL_LEVELS if split == 'lm' else LEVELS[benchmark]
    while True:
        family = rng.choice(FAMILIES[benchmark])
        (level,) = rng.choices(range(1, 7), levels)
        draft = family(rng, level)
        if micro_split(draft.question) == split:
            yield draft


def as_problem(benchmark: str, draft: Draft) -> Problem:
    "A draft with its solution, as the library knows problems; difficulty = level."
    steps = solve(draft)
    name = f'{draft.family}-{draft.level}-{digest(draft.question, size=5)}'
    answer = boxed(steps[-1])
    return Problem(benchmark, name, draft.question, answer, draft.level, '\n\n'.join(steps))


def micro_problems(
    benchmark: str,
    split: str,  # one of the `POOLS`; no two pools share a question
    n: int,
    seed: int = 0,
) -> list:
    "The first `n` problems of a pool, no question twice. ValueError."
    problems = {}
    for draft in micro_drafts(benchmark, split, random.Random(f'{benchmark}/{split}/{seed}')):
        if len(problems) >= n:
            return list(problems.values())
        if draft.question not in problems:
            problems[draft.question] = as_problem(benchmark, draft)
