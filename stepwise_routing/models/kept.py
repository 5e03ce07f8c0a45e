"""A model whose steps are kept in a file: nothing is drawn twice, and an interrupted run goes on"""

import time
from dataclasses import replace

from tqdm import tqdm

from .base import Request

BLOCK = 256  # requests that are drawn before their steps are on disk


class Kept:
    "A model whose steps are kept: each is on disk before it is used, and is never drawn again."

    def __init__(self, model, store):
        self.model = model
        self.store = store  # `Store`
        self.spec = model.spec
        self.index = model.index
        self.pending = []  # (key, step) pairs that are not on disk
        self.flushed = time.monotonic()

    def key(self, request: Request) -> tuple:
        "The key of the next step."
        return request.problem.id, request.sample, request.path, self.index

    def stored(self, request: Request) -> tuple:
        "The steps that are kept, up to the first one that is missing."
        steps = ()
        while not self.is_answered(request, steps):
            step = self.store.get(*self.key(after(request, steps)))
            if step is None:
                break
            steps += (step,)
        return steps

    def is_answered(self, request: Request, steps: tuple) -> bool:
        return len(steps) == request.room or bool(steps) and steps[-1].final

    def write(self, requests) -> list:
        "A tuple of `Step`s per request, as of `models.base.Model`."
        found = [self.stored(request) for request in requests]
        rests = [after(request, steps) for request, steps in zip(requests, found)]
        missing = {}  # what is asked twice is drawn once
        for request, steps, rest in zip(requests, found, rests):
            if not self.is_answered(request, steps):
                missing[self.key(rest), rest.room] = rest
        new = {}
        has_bar = hasattr(self.model, 'replies')  # an API shows its own
        bar = dict(total=len(missing), desc=self.spec.name, leave=False, delay=5, disable=has_bar)
        with tqdm(**bar) as bar:
            for first in range(0, len(missing), BLOCK):
                part = list(missing.items())[first : first + BLOCK]
                drawn = self.draw([rest for _, rest in part], bar)
                new |= zip([place for place, _ in part], drawn)
        return [
            steps + new.get((self.key(rest), rest.room), ()) for steps, rest in zip(found, rests)
        ]

    def draw(self, requests, bar) -> list:
        "Draw, and keep. A model that draws step by step tells of each, so that an interrupted call loses a second."

        def on_step(request, steps):
            self.pending.append((self.key(after(request, steps[:-1])), steps[-1]))
            if time.monotonic() - self.flushed > 1:
                self.flush()
            bar.update(self.is_answered(request, steps))

        begun = bar.n
        self.model.on_step = on_step
        try:
            drawn = self.model.write(requests)
        finally:
            self.model.on_step = None
            self.flush()
        for request, steps in zip(requests, drawn):
            keys = [self.key(after(request, steps[:i])) for i in range(len(steps))]
            self.pending += zip(keys, steps)
        self.flush()
        bar.update(begun + len(requests) - bar.n)
        return drawn

    def flush(self) -> None:
        self.store.put_many(self.pending)
        self.pending = []
        self.flushed = time.monotonic()


def after(request: Request, steps: tuple) -> Request:
    "The same request, when these steps are written."
    return replace(request, steps=request.steps + steps)
