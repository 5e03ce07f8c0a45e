"""A question that is asked now: its walk, step by step, drawn afresh and kept for nobody.

Here belongs the tree of a single walk, its limits, and what is told about each step. How a walk goes
belongs in `method.walks`; who asks, and from which thread, in `own`.
"""

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, replace

import numpy as np

from ..base.records import Problem, Step, api_cost, edge_seed, find_price
from ..data.benchmarks import find_benchmark
from ..models.interface import Request
from .walks import Walk, walk_steps

CALLS = 3  # that a backend makes for one step at most: the step, an empty one, a repetition
TEMPLATE = 64, 16  # tokens that a template adds at most: to a prompt, to a message


@dataclass(frozen=True)
class Wish:
    "How a question is to be answered."

    sample: int = 0  # which of the independent draws
    temperature: float | None = None  # None: as the router was trained
    top_p: float | None = None
    max_tokens: int | None = None  # of all that is generated, drafts included
    max_cents: float | None = None  # of all calls
    by_token: bool = False  # tell the text of an API model while it writes the rest of a chain?


@dataclass(frozen=True)
class LiveText:
    "Steps that are being written and will be kept: their text so far."

    model: str  # name of who writes it
    text: str
    step = None  # there is none yet


@dataclass(frozen=True)
class LiveStep:
    "A step whose fate is known, and the bill so far."

    step: Step
    model: str  # name of who wrote it
    kept: bool  # False: it was thrown away, and is written again
    decision: str  # "keep", "hand_over", "reject", "limit", "fall_back" or "not_asked"
    score: float | None  # what the router saw; None: it was not asked, or does not say
    threshold: float | None  # from here on it hands over
    seconds: float  # since the step before
    calls: tuple  # every `Call` so far


def worst_prompt(messages) -> int:
    "Tokens of a prompt at most: no token is shorter than a byte."
    whole, each = TEMPLATE
    return whole + sum(len(m['content'].encode('utf-8', 'replace')) + each for m in messages)


class LiveTree:
    "What the models write in one walk. Nothing is kept when the walk has ended."

    def __init__(
        self,
        backends,  # small to large
        wish: Wish,
        max_steps: int,  # of a chain
    ):
        self.backends = backends
        self.wish = wish
        self.sample = wish.sample
        self.max_steps = max_steps
        self.specs = [backend.spec for backend in backends]
        self.n_models = len(backends)
        self.drawn = {}  # (path, model) -> `Step`
        self.calls = []  # of the walk, which puts them there
        self.asked = None  # model that was asked last
        self.texts = asyncio.Queue()  # what was heard of it; None: its steps are there
        self.has_told = False  # has somebody seen a text?

    def steps(self, path) -> tuple:
        "The steps that lead to a node."
        return tuple(self.drawn[path[:i], int(model)] for i, model in enumerate(path))

    def room(self, problem: Problem, path: str, model: int) -> float:
        "How many tokens a model may write behind a path."
        left = math.inf
        if self.wish.max_tokens is not None:
            left = self.wish.max_tokens - sum(call.generated for call in self.calls)
        price = self.specs[model].price
        if self.wish.max_cents is None or price is None:
            return left
        row = find_price(price)
        chain = ''.join(step.text + '\n\n' for step in self.steps(path))
        messages = find_benchmark(problem.benchmark).messages(problem.question)
        turns = [*messages, dict(content=chain), dict(content='x' * 64)]  # and "go on"
        cents = (self.wish.max_cents - api_cost(self.calls, self.specs)) / CALLS
        tokens = (cents * 1e4 - worst_prompt(turns) * row.input) / row.output
        return min(left, tokens)

    def request(self, problem: Problem, path: str, model: int, to_end: bool) -> Request:
        "What is asked of a model."

        def seed(i):
            node = path + str(model) * i
            return edge_seed(problem.benchmark, problem.id, self.sample, node, model)

        room = self.room(problem, path, model)
        return Request(
            problem,
            self.steps(path),
            seed,
            to_end,
            self.max_steps,
            temperature=self.wish.temperature,
            top_p=self.wish.top_p,
            max_new=None if room == math.inf else int(room),
        )

    async def run(self, problem, path, model, to_end=False) -> tuple:  # one `Step`
        "The next step. An empty one that is cut off where nothing may be written any more."
        key = path, model
        self.asked = model
        if key not in self.drawn:
            request = self.request(problem, path, model, to_end=False)
            if request.max_new is not None and request.max_new < 1:
                self.drawn[key] = Step('', model, 'length')
            else:
                (self.drawn[key],) = await self.backends[model].write(request)
        return (self.drawn[key],)

    async def arriving(self, problem, path, model):
        "Steps up to a last one, in tuples of those that come together."
        backend = self.backends[model]
        if getattr(backend, 'step_by_step', False):
            while True:
                (step,) = await self.run(problem, path, model)
                yield (step,)
                path += str(model)
                if step.final or len(path) >= self.max_steps:
                    return
        self.asked = model
        request = self.request(problem, path, model, to_end=True)
        if request.max_new is not None and request.max_new < 1:
            yield (Step('', model, 'length'),)
            return
        more = {}
        if self.wish.by_token and hasattr(backend, 'streams'):
            more['heard'] = self.ear()
        steps = tuple(await backend.write(request, **more))
        for i, step in enumerate(steps):
            self.drawn[path + str(model) * i, model] = step
        yield steps

    def ear(self):
        "What a model's text is told to, from any thread."
        loop = asyncio.get_running_loop()

        def heard(text):
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self.texts.put_nowait, text)

        return heard

    async def with_texts(self, walked):
        "The (`Step`, is it kept?) pairs of a walk, and before each what was heard of it: (text, None)."
        upcoming = None
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(walked))
                upcoming.add_done_callback(lambda _: self.texts.put_nowait(None))
                while (text := await self.texts.get()) is not None:
                    self.has_told = True
                    yield text, None
                try:
                    pair = upcoming.result()
                except StopAsyncIteration:
                    return
                yield pair
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await walked.aclose()

    async def read(self, problem, path, model) -> Step:
        "The last step of a path with a model's confidences."
        *prefix, step = self.steps(path)
        request = Request(problem, tuple(prefix))
        return await self.backends[model].score(request, step)


class Watched:
    "A router of one walk that notes what it says, and stays where there is no room to hand over."

    def __init__(self, router, tree: LiveTree):
        self.router = router
        self.tree = tree
        self.name = router.name
        self.mode = router.mode
        self.on_escalate = router.on_escalate
        self.start = router.start
        self.rescore = getattr(router, 'rescore', False)
        self.note = None  # (decision, score, threshold) of the step just judged
        if tree.n_models > 2 and hasattr(router, 'choose'):
            self.choose = self.choose_model  # a walk asks whoever has it

    def choose_model(self, states):
        "The model that goes on, of three or more: the largest with room that is not above the chosen one."
        (state,) = states
        current = int(state.path[-1])
        (chosen,) = map(int, self.router.choose(states))
        score, threshold = None, None
        if hasattr(self.router, 'decide'):
            inputs = self.router.inputs(states)
            (pi,) = self.router.decide(inputs, np.array([current]))
            score, threshold = float(pi[current + 1 :].max()), float(self.router.kappa)
        taken = chosen
        while taken > current and self.tree.room(state.problem, state.path, taken) < 1:
            taken -= 1
        decision = 'keep'
        if taken < chosen:
            decision = 'limit'
        if taken > current:
            decision = 'hand_over'
        self.note = decision, score, threshold
        return [taken]

    def escalates(self, states):
        (state,) = states
        (hands_over,) = self.router.escalates(states)
        score, threshold = None, None
        if hasattr(self.router, 'chances'):
            (score,) = map(float, self.router.chances(states))
            threshold = float(self.router.kappa)
        decision = 'hand_over' if hands_over else 'keep'
        larger = min(int(state.path[-1]) + 1, self.tree.n_models - 1)
        if hands_over and self.tree.room(state.problem, state.path, larger) < 1:
            hands_over, decision = False, 'limit'
        self.note = decision, score, threshold
        return [hands_over]

    def taken(self) -> tuple:
        "The note about the step just judged, once."
        note, self.note = self.note, None
        return note or ('not_asked', None, None)


async def live_steps(
    problem: Problem,
    router,  # see `walk`
    backends,  # small to large
    wish: Wish = Wish(),
    max_steps: int = 30,  # of a chain
    fall_back: bool = False,  # let the small model go on where the large one is away?
):  # `LiveStep`s, and `LiveText`s between them
    "The steps of an answer, each as soon as its fate is known. Errors of the models as they are."
    tree = LiveTree(backends, wish, max_steps)
    watched = Watched(router, tree)
    current = Walk(problem, watched, tree)
    tree.calls = current.calls
    last = time.monotonic()

    def told(step, kept, note):
        nonlocal last
        now = time.monotonic()
        decision, score, threshold = note
        if not kept:
            decision = 'reject'
        seconds, last = now - last, now
        name = tree.specs[step.model].name
        calls = tuple(current.calls)
        return LiveStep(step, name, kept, decision, score, threshold, seconds, calls)

    walked = walk_steps(current)
    if wish.by_token:
        walked = tree.with_texts(walked)
    try:
        async with contextlib.aclosing(walked):
            async for step, kept in walked:
                if kept is None:
                    yield LiveText(tree.specs[tree.asked].name, step)
                else:
                    yield told(step, kept, watched.taken())
    except (RuntimeError, OSError):
        if not fall_back or not tree.asked or tree.has_told:
            raise
        async for step in _small_rest(current):
            yield told(step, True, ('fall_back', None, None))


async def _small_rest(current: Walk):
    "The small model's steps up to a last one; a draft that was thrown away is taken back."
    while True:
        draft = current.tree.drawn.get((current.path, 0))
        if draft is not None:
            drafts = [i for i, call in enumerate(current.calls) if call.kind == 'draft']
            current.calls[drafts[-1]] = replace(current.calls[drafts[-1]], kind='step')
        step = draft or await current.write(0)
        current.steps += (step,)
        yield step
        if step.final or len(current.steps) >= current.tree.max_steps:
            return
