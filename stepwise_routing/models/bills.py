"""A book of what calls cost, without what was asked or answered.

Here belongs the book of a router that answers live questions. The book that keeps every reply, so
that none is paid for twice, is in `models.ledger`.
"""

import asyncio
from fractions import Fraction

from .ledger import CENT, Ledger


class Bills(Ledger):
    "A `Ledger` that keeps amounts alone: equal questions are asked and paid each time."

    def __init__(
        self,
        path=None,  # file, made where there is none; also that of a `Ledger`
        max_cents: float | None = None,  # never spend more, what the file says included
    ):
        super().__init__(path, max_cents)
        self.units_before = self.units
        self.unwanted = set()  # tasks whose caller has gone

    @property
    def spent_now(self) -> float:
        "US cents since it was opened, unknown bills included."
        return (self.units - self.units_before) / CENT

    def allow(
        self,
        cents: float,  # to be spent from now on, whatever was spent before
    ) -> None:
        "Set the cap."
        self.cap = self.units + int(Fraction(str(cents)) * CENT)

    async def reserve(self, key, max_units):
        "As that of `Ledger`. RuntimeError where nobody waits: what was not asked yet is not asked any more."
        if asyncio.current_task() in self.unwanted:
            raise RuntimeError('nobody waits for the answer any more')
        return await super().reserve(key, max_units)

    def reply(self, key):
        "No reply is looked up."

    async def record(self, call, key, max_units, units, notes, reply=None):
        "Put a call on file: neither its request, nor its reply, nor what was no reply."
        plain = {name: value for name, value in notes.items() if name in ('uncertain', 'claimed')}
        await super().record(call, '', max_units, units, plain)

    async def once(self, key, draw):
        "The reply to a request, drawn now by the coroutine function `draw`."
        task = asyncio.ensure_future(draw())
        self.pending[task] = task
        task.add_done_callback(self.forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.unwanted.add(task)
            raise self.broken or asyncio.CancelledError from None

    def forget(self, task) -> None:
        "A call has come to its end."
        del self.pending[task]
        self.unwanted.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to look at it

    async def run(self, coro):
        "What a coroutine returns. Cancelled, it lets a request that was sent end, and be booked."
        if self.closing.is_set():
            coro.close()
            raise RuntimeError('the ledger of this model is closed')
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.cancel()
            raise
