"""The running example of the chapters: Sam's apples, as the micro models wrote about them. Needs no model."""

import json
from typing import NamedTuple

from ..records import ModelSpec, Problem, Step
from ..util import PACKAGE


class Example(NamedTuple):
    "A problem with everything that two models can write about it."

    problem: Problem
    specs: tuple  # `ModelSpec`s, small and large
    chain: tuple  # `Step`s of the small model
    rests: tuple  # [t], `Step`s of the large model, which goes on behind t small steps


def read_step(values: dict) -> Step:
    return Step(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def read_example() -> Example:
    "Sam's apples. The tokens of the large model are counted, but not kept."
    facts = json.loads((PACKAGE / 'outcomes' / 'example.json').read_text('utf-8'))
    specs = tuple(ModelSpec(**spec) for spec in facts['specs'])
    chain = tuple(map(read_step, facts['chain']))
    rests = tuple(tuple(map(read_step, rest)) for rest in facts['rests'])
    return Example(Problem(**facts['problem']), specs, chain, rests)
