"""A calibrated router with its models. Any thread and task may ask it.

Here belongs asking it, for whole answers and for single steps. Opening it from a folder belongs in
`own`. Walking a single question belongs in `method.live`.
"""

import asyncio
import contextlib

from .background import LoopThread
from ..records import walk_cost
from ..util import count_steps, gather_progress
from ..data.benchmarks import find_benchmark
from ..data.sources import make_problem
from ..method.live import live_steps
from ..models.pair import check_questions
from .routed import Routed

ROOM = 1 << 12  # most questions under way at once


class OwnRouter:
    "A calibrated router with its models, for any thread and task. `own.open_router` makes it."

    def __init__(
        self,
        backends,  # the models, small to large
        policy,  # of `load_policy`
        own,  # an `Own`: name of the problems, most steps
    ):
        from ..method.policy import PolicyRouter

        self.backends = backends
        self.specs = [backend.spec for backend in backends]
        self.own = own
        self.benchmark = find_benchmark(own.name)
        self.unit = policy.config['unit']
        self.router = PolicyRouter(policy, policy.kappa, policy.config['on_escalate'])
        self.separator = self.benchmark.separator
        self.loop = LoopThread('router')

    def problem(self, question: str):
        "The question as a `Problem`. ValueError if it is no text."
        if isinstance(question, str) and question.strip():
            return make_problem(self.own.name, question, '')
        raise ValueError(f'a question should be text, got {str(question)[:60]!r}')

    def check(self, question: str) -> None:
        "ValueError if the question is no text, or too long for one of the models."
        check_questions([self.problem(question)], self.backends)

    def steps(self, problem, sample, router):
        "An async generator of `LiveStep`s. It runs in the router's own loop."
        return live_steps(problem, router, self.backends, sample, self.own.max_steps)

    async def stream(
        self,
        question: str,
        router=None,  # the router that decides; None: the deployed policy
        sample: int = 0,  # number of the independent draw
    ):  # `LiveStep`s
        "Answer a question. Yields each step as soon as it is decided. Closing the generator stops the models."
        source = self.steps(self.problem(question), sample, router or self.router)
        async with contextlib.aclosing(self.loop.items(source)) as steps:
            async for step in steps:
                yield step

    def route(
        self,
        questions,  # one question or a list
        sample: int = 0,  # number of the independent draw
    ):  # `Routed`, or a list
        "Answer questions, all at the same time."
        if isinstance(questions, str) or not hasattr(questions, '__iter__'):
            return self.route([questions], sample)[0]
        problems = [self.problem(question) for question in questions]
        return self.loop.result(self._answers(problems, sample))

    async def _answers(self, problems, sample):
        room = asyncio.Semaphore(ROOM)

        async def answer(problem):
            steps = []
            async with room:
                async for step in self.steps(problem, sample, self.router):
                    steps.append(step)
                    count_steps(1)
            return self.routed(problem, steps)

        return await gather_progress(map(answer, problems), f'{self.own.name} answers')

    def routed(
        self,
        problem,  # the question
        steps,  # all its `LiveStep`s
    ) -> Routed:
        "The record of a finished answer: texts, names of the models, bill."
        calls = steps[-1].calls
        kept = [live for live in steps if live.kept]
        tokens = [0] * len(self.specs)
        for call in calls:
            tokens[call.model] += call.generated
        return Routed(
            question=problem.question,
            answer=self.benchmark.read_answer([live.step for live in kept]),
            steps=tuple(live.step.text for live in kept),
            path=''.join(str(live.step.model) for live in kept),
            models=tuple(live.model for live in kept),
            tokens=tuple(tokens),
            cost=walk_cost(calls, self.specs, self.unit),
            unit=self.unit,
            separator=self.separator,
        )

    def close(self) -> None:
        "Stop all answers under way, and the router's loop."
        self.loop.close()
