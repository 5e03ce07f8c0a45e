"""The contract of all models on one page: what they are asked, and what they give.

Every method takes a list, so that a model can work on many at once. Not here: how a model computes.
"""

from dataclasses import dataclass
from typing import Protocol

from ..records import ModelSpec, Problem, edge_seed


@dataclass(frozen=True)
class Request:
    "Write the next step of a chain, or all steps up to its end. Plain data: it travels to other processes."

    problem: Problem  # $x$
    steps: tuple = ()  # the prefix $y_{<t}$, by whichever models
    sample: int = 0  # which of the independent draws
    to_end: bool = False  # False: one step
    max_steps: int = 30  # longest chain, the prefix included

    @property
    def path(self) -> str:
        "Who wrote the prefix, a digit a step."
        return ''.join(str(step.model) for step in self.steps)

    def seed(self, written: int, model: int) -> int:
        "The seed of the next step of `model`, which has written so many in this call."
        path = self.path + str(model) * written
        return edge_seed(self.problem.benchmark, self.problem.id, self.sample, path, model)


class Model(Protocol):
    "A language model $M_k$."

    spec: ModelSpec  # name, size, price
    index: int  # k, 0 = smallest

    def settings(self) -> dict:
        "What its draws depend on, as JSON. A store refuses draws with other settings."

    def write(self, requests) -> list:
        "A tuple of `Step`s per request: one, or several if the request is `to_end`."

    def choose(self, conversations, options) -> list:
        "A `Choice` per conversation: how likely each option is as the reply."
