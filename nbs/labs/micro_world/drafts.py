"""Endless problems of the three micro benchmarks, and the pool that each question belongs to."""

import random

from stepwise_routing.base.records import Problem, extract_boxed
from stepwise_routing.base.tools import digest, one_of

from .families import FAMILIES, LEVELS
from .programs import Draft, solve

VERSION = 1  # raise it where a benchmark has other problems

POOLS = ('test', 'calibration', 'train', 'lm')  # three for routers, one for the language models


def micro_split(question: str) -> str:
    "The pool of a question, whoever draws it: a tenth each to test, calibration and train, the rest to \"lm\"."
    return POOLS[min(int(digest(question), 16) % 10, 3)]


def micro_drafts(benchmark: str, split: str, rng, levels=None):
    "Endless `Draft`s of one pool, drawn by a random.Random; `levels` weighs 1 to 6 other than the benchmark does."
    one_of('benchmark', benchmark, FAMILIES)
    one_of('split', split, POOLS)
    weights = levels or ((1, 1, 1, 1, 1, 0) if split == 'lm' else LEVELS[benchmark])
    while True:
        draft = rng.choice(FAMILIES[benchmark])(rng, rng.choices((1, 2, 3, 4, 5, 6), weights)[0])
        if micro_split(draft.question) == split:
            yield draft


def as_problem(benchmark: str, draft: Draft) -> Problem:
    "A draft with its solution, as the rest of the library knows problems; difficulty = level."
    steps = solve(draft)
    name = f'{draft.family}-{draft.level}-{digest(draft.question, size=5)}'
    return Problem(
        benchmark, name, draft.question, extract_boxed(steps[-1]), draft.level, '\n\n'.join(steps)
    )


def micro_problems(benchmark: str, split: str, n: int, seed: int = 0) -> list:
    "The first `n` problems of one of the `POOLS`, no question twice; no two pools share a question. ValueError."
    problems = {}
    for draft in micro_drafts(benchmark, split, random.Random(f'{benchmark}/{split}/{seed}')):
        if len(problems) >= n:
            return list(problems.values())
        if draft.question not in problems:
            problems[draft.question] = as_problem(benchmark, draft)
