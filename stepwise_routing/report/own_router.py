"""A calibrated router with its models. Any thread and task may ask it.

Here belongs asking it, for whole answers and for single steps. Opening it from a folder belongs in
`own`. Walking a single question belongs in `method.live`.
"""

import asyncio
import contextlib
from textwrap import shorten

from ..base.background import LoopThread
from ..base.records import walk_cost
from ..base.tools import count_steps, gather_progress
from ..data.benchmarks import find_benchmark
from ..data.conversations import asked_problem
from ..method.live import Wish, live_steps
from ..method.offers import check_prompt
from .routed import Routed

ROOM = 1 << 12  # most questions under way at once


class Unanswered(RuntimeError):
    "Some of several questions have no answer. Its field `answers` has the others, which may be paid for."

    def __init__(
        self,
        problems,  # all that were asked
        results,  # of each question: `Routed`, or the error
    ):
        failed = [pair for pair in zip(problems, results) if isinstance(pair[1], Exception)]
        problem, error = failed[0]
        super().__init__(
            f'{len(failed)} of {len(results)} questions have no answer, such as '
            f'{shorten(problem.question, 60)!r}: {error}; the others are in the field `answers` of this error'
        )
        self.answers = [None if isinstance(r, Exception) else r for r in results]


class OwnRouter:
    "A calibrated router with its models, for any thread and task. `own.open_router` makes it."

    def __init__(
        self,
        backends,  # the models, small to large
        policy,  # of `load_policy`
        own,  # an `Own`: name of the problems, most steps
        fall_back: bool = False,  # True: the small model goes on if the large one does not answer
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
        "The question as a `Problem`. ValueError if it is neither a text nor messages."
        return asked_problem(self.own.name, question)

    def check(self, question) -> None:
        "ValueError if the prompt of a question is too long for one of the models."
        check_prompt(self.problem(question), self.backends)

    @property
    def bills(self):
        "The book of paid calls. None if no model is paid."
        books = [getattr(backend, 'ledger', None) for backend in self.backends]
        return next((book for book in books if book is not None), None)

    def steps(self, problem, wish, router):
        "An async generator of `LiveStep`s. It runs in the router's own loop."
        limit = self.own.max_steps
        return live_steps(problem, router, self.backends, wish, limit, self.fall_back)

    async def stream(
        self,
        question,  # a text, or the messages of a conversation
        router=None,  # the router that decides; None: the deployed policy
        **wish,  # fields of a `Wish`, such as sample
    ):  # `LiveStep`s
        "Answer a question. Yields each step as soon as it is decided. Closing the generator stops the models."
        problem = self.problem(question)
        source = self.steps(problem, Wish(**wish), router or self.router)
        async with contextlib.aclosing(self.loop.items(source)) as steps:
            async for step in steps:
                yield step

    def route(
        self,
        questions,  # one question or a list
        sample: int = 0,  # number of the independent draw
    ):  # `Routed`, or a list
        "Answer questions, all at the same time. `Unanswered`, with all other answers, if some of a list fail."
        is_list = hasattr(questions, '__iter__') and not isinstance(questions, (str, dict))
        asked = list(questions) if is_list else [questions]
        is_one = not is_list or any(isinstance(part, dict) for part in asked)
        problems = [self.problem(question) for question in ([questions] if is_one else asked)]
        answers = self.loop.result(self._answers(problems, Wish(sample)))
        return answers[0] if is_one else answers

    async def _answers(self, problems, wish):
        room = asyncio.Semaphore(ROOM)

        async def answer(problem):
            steps = []
            async with room:
                async for step in self.steps(problem, wish, self.router):
                    steps.append(step)
                    count_steps(1)
            return self.routed(problem, steps)

        async def answer_or_error(problem):
            try:
                return await answer(problem)
            except (RuntimeError, ValueError) as error:
                return error

        ask = answer if len(problems) == 1 else answer_or_error
        results = await gather_progress(map(ask, problems), f'{self.own.name} answers')
        if any(isinstance(result, Exception) for result in results):
            raise Unanswered(problems, results)
        return results

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
