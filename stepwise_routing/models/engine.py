"""Many chains at once on one model, each with draws that do not depend on the other chains"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..base.records import Step
from .interface import Request, five_digits, uniforms


class Forward(Protocol):
    "Keys and values of the rows of one model, each at a place, and its forward pass over them."

    def feed(
        self, place, tokens, start
    ): ...  # a list of tokens from position `start` on; computed when needed
    def logits(
        self, places, tokens, starts
    ): ...  # the same for several places, now: [all tokens, vocabulary]
    def confidences(
        self, logits, tokens
    ): ...  # largest logit, probability, rank, entropy: [4, token]
    def decode(
        self, tokens, at, u, temperature, top_p
    ): ...  # draw for places 0, 1, ...: ([row, 5], logits)
    def keep(self, place, n): ...  # a handle, with `nbytes`, to the first n positions of a place
    def load(self, place, kept, n): ...  # take n positions of it over
    def drop(self, kept): ...  # it is not needed any more
    def move(self, place, to, n): ...  # its first n positions, which are all, go to another place
    def clear(self, place): ...


def block_keys(ids, block=16):  # one per whole block of token ids: all tokens up to its end
    code = np.asarray(ids, np.int32).tobytes()
    return [code[: 4 * n] for n in range(block, len(ids) + 1, block)]


class PrefixCache:
    "Handles of finished rows, found by the tokens they begin with; the least recently used go first."

    def __init__(self, budget, drop):  # bytes; what is called with a handle that goes
        self.budget = budget
        self.forget = drop
        self.used = 0
        self.made = 0
        self.entries = OrderedDict()
        self.index = {}  # number -> (handle, token ids, keys); key -> number

    def find(self, ids):
        "(Handle, positions) of the longest beginning there is; (None, 0) without one."
        number = next((self.index[k] for k in reversed(block_keys(ids)) if k in self.index), None)
        if number is None:
            return None, 0
        self.entries.move_to_end(number)
        kept, there, _ = self.entries[number]
        n = min(len(ids), len(there))
        same = np.equal(ids[:n], there[:n])
        return kept, n if same.all() else int(same.argmin())

    def put(self, ids, kept):
        "Keep a handle of what stands for `ids`; entries that nothing leads to any more go."
        keys = block_keys(ids)
        if (
            not keys
            or keys[-1] in self.index
            and len(self.entries[self.index[keys[-1]]][1]) >= len(ids)
        ):
            return self.forget(kept)
        older = {self.index.get(k) for k in keys} - {None}
        self.made = self.made + 1
        self.used = self.used + kept.nbytes
        self.entries[self.made] = kept, np.array(ids), keys
        self.index |= dict.fromkeys(keys, self.made)
        for n in older:
            if all(self.index[k] != n for k in self.entries[n][2]):
                self.remove(n)
        while self.used > self.budget:
            self.remove(next(iter(self.entries)))

    def remove(self, number):
        kept, _, keys = self.entries.pop(number)
        self.used -= kept.nbytes
        self.forget(kept)
        for k in keys:
            if self.index.get(k) == number:
                del self.index[k]


@dataclass(eq=False)
class Row:
    "A chain in flight: its tokens so far, and what is to be done with it."

    ids: list  # prompt, prefix, then what is written
    future: object  # gets the answer
    request: Request = None  # what to write,
    answers: tuple = ()  # or tokens to be scored as the continuation
    top: int = 0  # with log-probabilities of that many likeliest tokens each
    most: int = (
        0  # tokens that the whole reply may have; it then goes on to the end token, past an answer
    )
    sampling: tuple = ()  # temperature and top_p, where they are not the engine's
    steps: list = field(default_factory=list)
    beside: list = field(default_factory=list)  # of `top`, a pair of arrays per written token


class Engine:
    "Rows of one model, waiting and in flight, and how to sample."

    def __init__(
        self, name, forward, text, options, index=0
    ):  # a `Forward`, its `StepTokenizer`, `LocalOptions`
        self.name = name
        self.forward = forward
        self.text = text
        self.index = index
        self.sampling = (options.temperature, options.top_p)
        self.context = options.context
        self.max_tokens = options.max_tokens
        self.size = options.batch_size
        self.prefixes = PrefixCache(options.prefix_mib << 20, forward.drop)
        self.waiting = deque()
        self.new = []
        self.rows = []
        self.stats = dict(passes=0, generated=0, prompt=0, cached=0)
        self.task = None
        self.last, self.length = np.zeros((2, self.size), int)  # last token, tokens there are
        self.count, self.limit = np.zeros(
            (2, self.size), int
        )  # tokens of this step, and how many it may have
        self.how = np.zeros((2, self.size))  # temperature and top_p
        self.u = np.zeros((self.size, self.max_tokens))  # random numbers
        self.drawn = np.zeros((*self.u.shape, 5))  # token, logit, prob, rank, entropy

    def begin(self, place):
        "Start the next step of a row; False where there is no room for it."
        row = self.rows[place]
        room = min(self.max_tokens, self.context - len(row.ids))
        if row.most:
            room = min(room, row.most - sum(s.generated for s in row.steps))
        if room > 0:
            self.last[place], self.length[place] = row.ids[-1], len(row.ids)
            self.count[place], self.limit[place] = 0, room
            self.how[:, place] = row.sampling or self.sampling
            self.u[place, :room] = uniforms(row.request.seed(len(row.steps)), room)
        else:
            row.steps.append(Step('', self.index, 'length', prompt=len(row.ids)))
        return room > 0

    def remember(
        self, place, ids
    ):  # leave keys and values of all tokens but the last to later rows
        if len(ids) > 1:
            self.prefixes.put(ids[:-1], self.forward.keep(place, len(ids) - 1))

    def leave(self, place):
        "Take a row out and answer its caller."
        row = self.rows[place]
        end = len(self.rows) - 1
        self.remember(place, row.ids)
        self.forward.clear(place)
        if place < end:
            for a in (
                self.last,
                self.length,
                self.count,
                self.limit,
                self.how.T,
                self.u,
                self.drawn,
            ):
                a[place] = a[end]
            self.forward.move(end, place, self.length[place])
            self.rows[place] = self.rows[end]
        self.rows.pop()
        if not row.future.done():
            row.future.set_result((tuple(row.steps), row.beside) if row.most else tuple(row.steps))

    def settle(self, place):
        "Make a Step of a row's tokens if it has ended, and go on to the next one or leave."
        row = self.rows[place]
        n = self.count[place]
        step = new_step(self, row, self.drawn[place, :n], full=n == self.limit[place])
        if step is None:
            return
        row.steps.append(step)
        row.ids += step.ids
        ended = step.finish != 'step' if row.most else step.final
        more = (
            row.request.to_end
            and not ended
            and len(row.request.steps) + len(row.steps) < row.request.max_steps
        )
        if not (more and self.begin(place)):
            self.leave(place)

    def check_finite(self, numbers):
        if np.isfinite(numbers).all():
            return
        raise FloatingPointError(
            f'{self.name}: logits that are not finite; try dtype="float32", or check the weights'
        )

    def score_rows(self, rows, first):
        "Confidences [4, token] of the answers of rows, which stand from place `first` on, each to its future."
        places = range(first, first + len(rows))
        starts = [len(row.ids) - 1 for row in rows]
        logits = self.forward.logits(
            places, [[row.ids[-1], *row.answers[:-1]] for row in rows], starts
        )
        scores = self.forward.confidences(logits, np.concatenate([row.answers for row in rows]))
        self.check_finite(scores[0])
        ends = np.cumsum([len(row.answers) for row in rows])
        for place, row, end in zip(places, rows, ends):
            own = slice(end - len(row.answers), end)
            self.remember(place, [*row.ids, *row.answers[1:]])
            self.forward.clear(place)
            row.future.set_result(
                (scores[:, own], *log_probs(logits[own], row.top)) if row.top else scores[:, own]
            )

    def enter(self, wave, keep=False):
        "Put rows in their places; `keep` what others may continue."
        writers = [r for r in wave if r.request]
        readers = [r for r in wave if not r.request]
        first = len(self.rows)
        for place, row in enumerate(writers + readers, first):
            kept, n = self.prefixes.find(row.ids[:-1])
            if n:
                self.forward.load(place, kept, n)
            self.forward.feed(place, row.ids[n:-1], n)
            if keep:
                self.remember(place, row.ids)
            self.stats['prompt'] += len(row.ids)
            self.stats['cached'] += n
        if readers:
            self.score_rows(readers, first + len(writers))
        self.rows += writers
        for place in range(first, len(self.rows)):
            self.begin(place)

    def admit(self):
        "Drop rows that nobody waits for any more, then let waiting ones in."
        for place in reversed([i for i, row in enumerate(self.rows) if row.future.done()]):
            self.leave(place)
        while self.waiting and len(self.rows) + len(self.new) < self.size:
            if not (row := self.waiting.popleft()).future.done():
                self.new.append(row)
        first, second = _waves(self.new)
        self.enter(first, keep=bool(second))
        self.enter(second)
        self.new.clear()

    def show(self, logits):
        "Note the likeliest tokens beside the drawn ones, of the rows that want to know."
        curious = [i for i, row in enumerate(self.rows) if row.top]
        if not curious:
            return
        ids, logs = log_probs(logits[curious], max(self.rows[i].top for i in curious))
        for i, *shown in zip(curious, ids, logs):
            self.rows[i].beside.append([x[: self.rows[i].top] for x in shown])

    def turn(self):
        "Admit, write one token in every row, settle the rows whose step may have ended."
        self.admit()
        if not (n := len(self.rows)):
            return
        here = np.arange(n), self.count[:n]
        drawn, logits = self.forward.decode(
            self.last[:n], self.length[:n] - 1, self.u[here], *self.how[:, :n]
        )
        self.check_finite(drawn[:, 1])
        self.show(logits)
        self.drawn[here], self.last[:n] = drawn, drawn[:, 0]
        self.length[:n] += 1
        self.count[:n] += 1
        over = self.text.closing[self.last[:n]] | (self.count[:n] == self.limit[:n])
        for place in np.flatnonzero(over)[::-1].tolist():
            self.settle(place)
        self.stats['passes'] += 1
        self.stats['generated'] += n

    def fail(self, error):
        "Hand an error to everybody who waits."
        rows = [*self.rows, *self.new, *self.waiting]
        for queue in (self.rows, self.new, self.waiting):
            queue.clear()
        for place in range(self.size):
            self.forward.clear(place)
        for row in rows:
            if row.future.done() or row.future.get_loop().is_closed():
                continue
            if isinstance(error, asyncio.CancelledError):
                row.future.cancel()
            else:
                row.future.set_exception(error)

    async def drive(self):  # turn until nobody waits
        import torch

        try:
            while self.rows or self.waiting:
                with torch.inference_mode():
                    self.turn()
                for _ in range(6):
                    await asyncio.sleep(0)  # from an answer to the next question of a walk
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise


def new_step(model, row, drawn, full):
    "The Step that the drawn tokens [token, 5] make behind `row.ids`; None if it has not ended, and room is left."
    ids = tuple(drawn[:, 0].astype(int).tolist())
    text, ended, ends = model.text.parse(ids)
    finish = 'step' if ended else 'length' if full else None
    if ids[-1] in model.text.eos:
        finish = 'stop'
    if finish is None:
        return None
    logit, prob, entropy = map(tuple, five_digits(drawn[:, [1, 2, 4]].T).tolist())
    rank = tuple(drawn[:, 3].astype(int).tolist())
    return Step(
        text,
        model.index,
        finish,
        ids,
        ends,
        prob,
        rank,
        logit,
        len(ids),
        len(row.ids),
        entropy=entropy[0],
    )


def log_probs(logits, top):  # [token, vocabulary]
    "Ids and log-probabilities [token, top] of the likeliest tokens, as numpy arrays."
    z = logits.double()
    logs, ids = (z - z.logsumexp(-1, keepdim=True)).topk(min(top, z.shape[-1]), -1)
    return ids.cpu().numpy(), logs.cpu().numpy()


def _waves(rows):
    "Rows in two waves, the longest first: in the second those that share most of their tokens with one of the first."
    first = []
    second = []
    begun = set()
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        keys = block_keys(row.ids)
        known = bool(keys) and keys[3 * len(keys) // 4] in begun
        (second if known else first).append(row)
        if not known:
            begun |= set(keys)
    return first, second


async def answer_request(backend, ids, **row):
    "Queue a `Row` with the backend's engine and wait for its answer; RuntimeError where it is closed or elsewhere."
    loop = asyncio.get_running_loop()
    engine = backend.engine
    if engine is None:
        raise RuntimeError(f'{backend.spec.name} is closed')
    task = engine.task
    if task is None or task.done() or task.get_loop() is not loop:
        if task and not task.done() and task.get_loop().is_running():
            raise RuntimeError(f'{engine.name} is at work in another event loop')
        engine.fail(asyncio.CancelledError())  # what a loop that is gone has left behind
        engine.task = loop.create_task(engine.drive())
    engine.waiting.append(row := Row(list(ids), loop.create_future(), **row))
    return await row.future
