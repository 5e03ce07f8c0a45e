"""A question that is asked now: its walk, step by step, drawn afresh and kept for nobody.

Here belongs the tree of a single walk. How a walk goes belongs in `method.walks`; who asks, and from
which thread, in `own`.
"""

import contextlib
from dataclasses import dataclass

from ..base.records import Problem, Step, edge_seed
from ..models.interface import Request
from .walks import Walk, walk_steps


@dataclass(frozen=True)
class LiveStep:
    "A step whose fate is known, and the bill so far."

    step: Step
    model: str  # name of who wrote it
    kept: bool  # False: it was thrown away, and is written again
    calls: tuple  # every `Call` so far


class LiveTree:
    "What the models write in one walk. Nothing is kept when the walk has ended."

    def __init__(
        self,
        backends,  # small to large
        sample: int,  # which of the independent draws
        max_steps: int,  # of a chain
    ):
        self.backends = backends
        self.sample = sample
        self.max_steps = max_steps
        self.specs = [backend.spec for backend in backends]
        self.n_models = len(backends)
        self.drawn = {}  # (path, model) -> `Step`

    def request(self, problem: Problem, path: str, model: int, to_end: bool) -> Request:
        "What is asked of a model."

        def seed(i):
            node = path + str(model) * i
            return edge_seed(problem.benchmark, problem.id, self.sample, node, model)

        steps = tuple(self.drawn[path[:i], int(writer)] for i, writer in enumerate(path))
        return Request(problem, steps, seed, to_end, self.max_steps)

    async def run(self, problem, path, model, to_end=False) -> tuple:  # one `Step`
        "The next step."
        key = path, model
        if key not in self.drawn:
            request = self.request(problem, path, model, to_end=False)
            (self.drawn[key],) = await self.backends[model].write(request)
        return (self.drawn[key],)

    async def arriving(self, problem, path, model):
        "Steps up to a last one, in tuples of those that come together."
        backend = self.backends[model]
        if not getattr(backend, 'step_by_step', False):
            yield tuple(await backend.write(self.request(problem, path, model, to_end=True)))
            return
        while True:
            (step,) = await self.run(problem, path, model)
            yield (step,)
            path += str(model)
            if step.final or len(path) >= self.max_steps:
                return


async def live_steps(
    problem: Problem,
    router,  # see `walk`
    backends,  # small to large
    sample: int = 0,  # which of the independent draws
    max_steps: int = 30,  # of a chain
):  # `LiveStep`s
    "The steps of an answer, each as soon as its fate is known. Errors of the models as they are."
    current = Walk(problem, router, LiveTree(backends, sample, max_steps))
    async with contextlib.aclosing(walk_steps(current)) as walked:
        async for step, kept in walked:
            yield LiveStep(step, backends[step.model].spec.name, kept, tuple(current.calls))
