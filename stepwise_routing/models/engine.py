"""Writes many chains at once with one model. The draws of a chain do not depend on the other chains.

Here belongs which row is computed next and which keys and values are kept. How a model computes belongs in
`models.kernels`, how it is opened in `models.hub`.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..data.benchmarks import find_benchmark
from ..records import Step
from .interface import Request, check_finite, five_digits, uniforms


class Forward(Protocol):
    "The forward pass of one model over many rows. A row has a slot, which holds its keys and values."

    def feed(self, slot, tokens, start):
        "Take a list of tokens, from position `start` on. They are computed when they are needed."

    def logits(self, slots, tokens, starts):
        "Compute the tokens of several slots now: logits [all tokens, vocabulary]."

    def confidences(self, logits, tokens):
        "Largest logit, probability and entropy (nats) of each token: [3, token]."

    def decode(self, tokens, positions, u, temperature, top_p):
        "Draw one token in each of the slots 0, 1, ...: ([slot, token and its confidences], logits)."

    def keep(self, slot, n):
        "Keep the first n positions of a slot. Returns a handle with `nbytes`."

    def load(self, slot, handle, n):
        "Copy the first n positions of a handle into a slot."

    def drop(self, handle):
        "Free a handle."

    def move(self, slot, to, n):
        "Move all n positions of a slot to another slot."

    def clear(self, slot):
        "Empty a slot."


def block_keys(ids, block=16):
    "One key per whole block of token ids. It depends on all tokens up to the end of the block."
    code = np.asarray(ids, np.int32).tobytes()
    return [code[: 4 * n] for n in range(block, len(ids) + 1, block)]


@dataclass(frozen=True)
class Prefix:
    "Keys and values of a finished row."

    handle: object  # handle of the `Forward`
    ids: np.ndarray  # the tokens whose keys and values it holds
    keys: list  # of `block_keys`


class PrefixCache:
    "Handles of finished rows, found by their first tokens. The least recently used are dropped first."

    def __init__(
        self,
        budget: int,  # bytes
        forget,  # called with each handle that is dropped
    ):
        self.budget = budget
        self.forget = forget
        self.used = 0  # bytes
        self.count = 0  # prefixes so far; the number of the next one
        self.entries = OrderedDict()  # number -> `Prefix`
        self.index = {}  # key -> number of the prefix that it leads to

    def find(self, ids):
        "(Handle, positions) of the longest prefix of `ids` in the cache. (None, 0) if there is none."
        number = next((self.index[k] for k in reversed(block_keys(ids)) if k in self.index), None)
        if number is None:
            return None, 0
        self.entries.move_to_end(number)
        prefix = self.entries[number]
        n = min(len(ids), len(prefix.ids))
        equal = np.equal(ids[:n], prefix.ids[:n])
        return prefix.handle, n if equal.all() else int(equal.argmin())

    def put(self, ids, handle):
        "Keep the handle of the tokens `ids`. Prefixes that no key leads to are dropped."
        keys = block_keys(ids)
        if not keys or self._covers(keys[-1], len(ids)):
            self.forget(handle)
            return
        shadowed = {self.index[k] for k in keys if k in self.index}
        self.count += 1
        self.used += handle.nbytes
        self.entries[self.count] = Prefix(handle, np.array(ids), keys)
        self.index |= dict.fromkeys(keys, self.count)
        for number in shadowed:
            if all(self.index[k] != number for k in self.entries[number].keys):
                self.remove(number)
        while self.used > self.budget:
            self.remove(next(iter(self.entries)))

    def _covers(self, key, n):
        "Is there a prefix of at least n tokens behind this key?"
        return key in self.index and len(self.entries[self.index[key]].ids) >= n

    def remove(self, number):
        prefix = self.entries.pop(number)
        self.used -= prefix.handle.nbytes
        self.forget(prefix.handle)
        for k in prefix.keys:
            if self.index.get(k) == number:
                del self.index[k]


@dataclass(eq=False)
class Row:
    "A chain that is being written: its tokens so far, and the request of its caller."

    ids: list  # prompt, prefix, then the tokens that are written
    future: object  # gets the answer
    request: Request = None  # steps to write,
    answers: tuple = ()  # or tokens to be scored as the continuation
    top: int = 0  # with log-probabilities of that many likeliest tokens each
    steps: list = field(default_factory=list)


class Engine:
    "Rows of one model, waiting and in flight, and how to sample."

    def __init__(
        self,
        name: str,  # of the model, for errors
        forward,  # a `Forward`
        text,  # its `StepTokenizer`
        options,  # `LocalOptions`, with `context`
        index: int = 0,  # of the model in a tree
    ):
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
        self.rows = []  # the row in slot i is rows[i]
        self.stats = dict(passes=0, generated=0, prompt=0, cached=0)
        self.task = None
        size = self.size
        self.last = np.zeros(size, int)  # last token [slot]
        self.length = np.zeros(size, int)  # tokens there are
        self.count = np.zeros(size, int)  # tokens of this step
        self.limit = np.zeros(size, int)  # tokens that this step may have
        self.slot_sampling = np.zeros((2, size))  # temperature and top_p
        longest = min(self.max_tokens, self.context)
        self.u = np.zeros((size, longest))  # random numbers
        self.drawn = np.zeros((size, longest, 4))  # token, logit, prob, entropy

    def begin(self, slot):
        "Start the next step of a row; False if there is no room for it."
        row = self.rows[slot]
        room = min(self.max_tokens, self.context - len(row.ids))
        if room <= 0:
            row.steps.append(Step('', self.index, 'length', prompt=len(row.ids)))
            return False
        self.last[slot] = row.ids[-1]
        self.length[slot] = len(row.ids)
        self.count[slot] = 0
        self.limit[slot] = room
        self.slot_sampling[:, slot] = self.sampling
        self.u[slot, :room] = uniforms(row.request.seed(len(row.steps)), room)
        return True

    def remember(self, slot, ids):
        "Keep keys and values of all tokens but the last, for later rows."
        if len(ids) > 1:
            self.prefixes.put(ids[:-1], self.forward.keep(slot, len(ids) - 1))

    def leave(self, slot):
        "Take a row out of its slot and answer its caller."
        row = self.rows[slot]
        end = len(self.rows) - 1
        self.remember(slot, row.ids)
        self.forward.clear(slot)
        if slot < end:  # the last row moves to the slot that is free now
            columns = (self.last, self.length, self.count, self.limit, self.u, self.drawn)
            for column in (*columns, self.slot_sampling.T):
                column[slot] = column[end]
            self.forward.move(end, slot, self.length[slot])
            self.rows[slot] = self.rows[end]
        self.rows.pop()
        if not row.future.done():
            row.future.set_result(tuple(row.steps))

    def settle(self, slot):
        "If a row's step has ended, make a `Step` of its tokens; then begin the next step, or leave."
        row = self.rows[slot]
        request = row.request
        n = self.count[slot]
        step = new_step(self, row, self.drawn[slot, :n], full=n == self.limit[slot])
        if step is None:
            return
        row.steps.append(step)
        row.ids += step.ids
        written = len(request.steps) + len(row.steps)
        goes_on = request.to_end and not step.final and written < request.max_steps
        if not goes_on or not self.begin(slot):
            self.leave(slot)

    def check_finite(self, numbers):
        if np.isfinite(numbers).all():
            return
        raise FloatingPointError(
            f'{self.name}: some logits are not finite; try dtype="float32", or check the weights'
        )

    def score_rows(self, rows, first):
        "Give each row's future the confidences [4, token] of its answer. Rows have the slots from `first` on."
        slots = range(first, first + len(rows))
        starts = [len(row.ids) - 1 for row in rows]
        tokens = [[row.ids[-1], *row.answers[:-1]] for row in rows]
        logits = self.forward.logits(slots, tokens, starts)
        answers = np.concatenate([row.answers for row in rows])
        scores = self.forward.confidences(logits, answers)
        self.check_finite(scores[0])
        ends = np.cumsum([len(row.answers) for row in rows])
        for slot, row, end in zip(slots, rows, ends):
            own = slice(end - len(row.answers), end)
            self.remember(slot, [*row.ids, *row.answers[1:]])
            self.forward.clear(slot)
            answer = scores[:, own]
            if row.top:
                answer = (answer, *log_probs(logits[own], row.top))
            row.future.set_result(answer)

    def enter(self, wave, keep=False):
        "Put rows into slots. `keep`: keep their prompts, which other rows may continue."
        writers = [row for row in wave if row.request]
        readers = [row for row in wave if not row.request]
        first = len(self.rows)
        for slot, row in enumerate(writers + readers, first):
            handle, n = self.prefixes.find(row.ids[:-1])
            if n:
                self.forward.load(slot, handle, n)
            self.forward.feed(slot, row.ids[n:-1], n)
            if keep:
                self.remember(slot, row.ids)
            self.stats['prompt'] += len(row.ids)
            self.stats['cached'] += n
        if readers:
            self.score_rows(readers, first + len(writers))
        self.rows += writers
        for slot in range(first, len(self.rows)):
            self.begin(slot)

    def admit(self):
        "Drop rows whose callers have gone, then let waiting rows in."
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].future.done():
                self.leave(slot)
        while self.waiting and len(self.rows) + len(self.new) < self.size:
            row = self.waiting.popleft()
            if not row.future.done():
                self.new.append(row)
        first, second = _waves(self.new)
        self.enter(first, keep=bool(second))
        self.enter(second)
        self.new.clear()

    def turn(self):
        "One turn: admit rows, write one token in each row, settle the rows whose step may have ended."
        self.admit()
        n = len(self.rows)
        if not n:
            return
        cells = np.arange(n), self.count[:n]
        positions = self.length[:n] - 1
        drawn, _ = self.forward.decode(
            self.last[:n], positions, self.u[cells], *self.slot_sampling[:, :n]
        )
        self.check_finite(drawn[:, 1])
        self.drawn[cells] = drawn
        self.last[:n] = drawn[:, 0]
        self.length[:n] += 1
        self.count[:n] += 1
        may_end = self.text.closing[self.last[:n]] | (self.count[:n] == self.limit[:n])
        for slot in np.flatnonzero(may_end)[::-1].tolist():
            self.settle(slot)
        self.stats['passes'] += 1
        self.stats['generated'] += n

    def fail(self, error):
        "Give an error to all callers that wait."
        rows = [*self.rows, *self.new, *self.waiting]
        for queue in (self.rows, self.new, self.waiting):
            queue.clear()
        for slot in range(self.size):
            self.forward.clear(slot)
        for row in rows:
            if row.future.done() or row.future.get_loop().is_closed():
                continue
            if isinstance(error, asyncio.CancelledError):
                row.future.cancel()
            else:
                row.future.set_exception(error)

    async def drive(self):
        "Take turns until no caller waits."
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
    "The `Step` of the drawn tokens [token, 4] after `row.ids`. None if it goes on and there is room."
    ids = tuple(drawn[:, 0].astype(int).tolist())
    benchmark = find_benchmark(row.request.problem.benchmark)
    text, ended, ends = model.text.parse(ids, benchmark.separator)
    finish = 'step' if ended else 'length' if full else None
    if ids[-1] in model.text.eos or ended and benchmark.ends_with(text):
        finish = 'stop'
    if finish is None:
        return None
    check_finite(f'model {model.index}', drawn)
    logit, prob, entropy = five_digits(drawn[:, 1:].T).tolist()
    return Step(
        text,
        model.index,
        finish,
        ids,
        ends,
        prob=tuple(prob),
        max_logit=tuple(logit),
        generated=len(ids),
        prompt=len(row.ids),
        entropy=entropy[0],
    )


def log_probs(logits, top):  # [token, vocabulary]
    "Ids and log-probabilities [token, top] of the likeliest tokens, as numpy arrays."
    z = logits.double()
    logs, ids = (z - z.logsumexp(-1, keepdim=True)).topk(min(top, z.shape[-1]), -1)
    return ids.cpu().numpy(), logs.cpu().numpy()


def _waves(rows):
    "Two waves of rows, the longest first. Rows of the second share most tokens with rows of the first."
    first = []
    second = []
    keys_of_first = set()
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        keys = block_keys(row.ids)
        if keys and keys[3 * len(keys) // 4] in keys_of_first:
            second.append(row)
        else:
            first.append(row)
            keys_of_first |= set(keys)
    return first, second


async def answer_request(backend, ids, **row):
    """Give a `Row` to the backend's engine and wait for the answer.

    RuntimeError if the engine is closed, or at work in another event loop.
    """
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
