"""A book of what calls cost, without what was asked or answered.

Here belongs the book of a router that answers live questions. The book that keeps every reply, so
that none is paid for twice, is in `models.ledger`.
"""

import asyncio
import threading
from fractions import Fraction

from .ledger import CENT, Ledger

PAUSE = 0.02  # seconds between two looks at a purse


class Purse:
    "What several books may spend together; each of them may be in a thread of its own."

    def __init__(
        self,
        cents: float,  # US cents, from now on
    ):
        self.left = int(Fraction(str(cents)) * CENT)  # units that are neither spent nor reserved
        self.cap = self.left
        self.reserved = 0
        self.turn = threading.Lock()

    def reserve(self, units: int) -> bool:
        "Is there room now? RuntimeError: there is none, and no call under way can give any back."
        with self.turn:
            if units <= self.left:
                self.left -= units
                self.reserved += units
                return True
            if self.reserved:
                return False
        raise RuntimeError(
            f'cap reached: {(self.cap - self.left) / CENT:.4f} of {self.cap / CENT:.4f} cents are '
            f'spent and the next call could cost {units / CENT:.4f}; start with a larger max_cents'
        )

    async def take(self, units: int) -> None:
        "Reserve, as soon as there is room. RuntimeError: the cap is reached."
        while not self.reserve(units):
            await asyncio.sleep(PAUSE)

    def settle(self, reserved: int, spent: int) -> None:
        "A call has ended."
        with self.turn:
            self.reserved -= reserved
            self.left += reserved - spent


class Bills(Ledger):
    "A `Ledger` that keeps amounts alone: equal questions are asked and paid each time."

    purse = None  # `Purse` that other books take from, too

    def __init__(
        self,
        path=None,  # file, made where there is none; also that of a `Ledger`
        max_cents: float | None = None,  # never spend more, what the file says included
    ):
        try:
            super().__init__(path, max_cents)
        except BlockingIOError:
            raise BlockingIOError(
                f'{path}: somebody else books paid calls there, so one cap would not hold for both; '
                'ask that server, or give each process an export of the router (own.export)'
            ) from None
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
        if self.purse is None:
            return await super().reserve(key, max_units)
        await self.purse.take(max_units)
        try:
            return await super().reserve(key, max_units)
        except BaseException:
            self.purse.settle(max_units, 0)
            raise

    async def settle(self, call, units, reply=None, **notes):
        "As that of `Ledger`."
        _, max_units = self.reserved[call]
        try:
            await super().settle(call, units, reply, **notes)
        finally:
            if self.purse is not None:
                self.purse.settle(max_units, units)

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


def set_caps(
    books,  # `Bills` of several routers
    together: float | None,  # US cents from now on; None: no cap
    each: float | None,
) -> None:
    "What several books may spend."
    purse = None if together is None else Purse(together)
    for book in books:
        book.purse = purse
        if each is not None:
            book.allow(each)
