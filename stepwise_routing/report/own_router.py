"""A calibrated router with its models, to be asked from any thread and task.

Here belongs how it is asked, for whole answers and for steps. How it is opened from a folder is in
`own`; how a single question is walked, in `method.live`.
"""

import asyncio
import contextlib

from ..base.background import LoopThread
from ..base.records import walk_cost
from ..base.tools import gather_progress
from ..data.benchmarks import find_benchmark
from ..data.conversations import asked_problem
from ..method.live import Wish, live_steps
from ..method.offers import check_prompt
from .routed import Routed

ROOM = 1 << 12  # questions under way at once


class OwnRouter:
    "A calibrated router with its models, for any thread and task; made by `own.open_router`."

    def __init__(
        self,
        backends,  # the models, small to large
        policy,  # of `load_policy`
        own,  # an `Own`: name of the problems, most steps
        fall_back: bool = False,  # let the small model go on where the large one is away
    ):
        from ..method.policy import PolicyRouter

        self.backends = backends
        self.specs = [backend.spec for backend in backends]
        self.own = own
        self.benchmark = find_benchmark(own.name)
        self.fall_back = fall_back
        self.unit = policy.config['unit']
        self.router = PolicyRouter(policy, policy.kappa, policy.config['on_escalate'])
        self.separator = self.benchmark.separator
        self.loop = LoopThread('router')

    def problem(
        self,
        question,  # a text, or the messages of a conversation
    ):
        "What is asked, as a `Problem`. ValueError: it is neither."
        return asked_problem(self.own.name, question)

    def check(self, question) -> None:
        "ValueError: the prompt of a question is too long for one of the models."
        check_prompt(self.problem(question), self.backends)

    @property
    def bills(self):
        "The book of paid calls; None: no model is paid."
        books = [getattr(backend, 'ledger', None) for backend in self.backends]
        return next((book for book in books if book is not None), None)

    def steps(self, problem, wish, router):
        "An async generator of `LiveStep`s, for the router's own loop."
        limit = self.own.max_steps
        return live_steps(problem, router, self.backends, wish, limit, self.fall_back)

    async def stream(
        self,
        question,  # a text, or the messages of a conversation
        router=None,  # who decides; None: the deployed policy
        **wish,  # fields of a `Wish`, such as sample
    ):  # `LiveStep`s
        "Answer a question: each step as soon as it is decided. Closing it stops the models."
        problem = self.problem(question)
        source = self.steps(problem, Wish(**wish), router or self.router)
        async with contextlib.aclosing(self.loop.items(source)) as steps:
            async for step in steps:
                yield step

    def route(
        self,
        questions,  # one question or a list
        sample: int = 0,  # which of the independent draws
    ):  # `Routed`, or a list
        "Answer questions, all at once."
        asked = [questions] if isinstance(questions, str) else list(questions)
        is_one = isinstance(questions, str) or any(isinstance(part, dict) for part in asked)
        problems = [self.problem(question) for question in ([questions] if is_one else asked)]
        answers = self.loop.result(self._answers(problems, Wish(sample)))
        return answers[0] if is_one else answers

    async def _answers(self, problems, wish):
        room = asyncio.Semaphore(ROOM)

        async def answer(problem):
            async with room:
                steps = [step async for step in self.steps(problem, wish, self.router)]
            return self.routed(problem, steps)

        return await gather_progress(map(answer, problems), f'{self.own.name} answers')

    def routed(
        self,
        problem,  # what was asked
        steps,  # its `LiveStep`s, all of them
    ) -> Routed:
        "A finished answer with its texts, names and bill."
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
        "Stop what is under way."
        self.loop.close()
