"""A book of amounts: what calls cost, without their questions and answers.

Here belongs the book of a router that answers live questions. `models.ledger` has the book that
also keeps every reply, so that no reply is paid for twice.
"""

import asyncio
import threading
from fractions import Fraction

from ..base.settings import Cents, checked
from .ledger import CENT, Ledger

PAUSE = 0.02  # seconds between two looks at a purse


class Purse:
    "An amount that several books may spend together. Each book may be in a thread of its own."

    def __init__(
        self,
        cents: float,  # US cents, from now on
    ):
        self.left = int(Fraction(str(cents)) * CENT)  # units that are neither spent nor reserved
        self.cap = self.left
        self.reserved = 0
        self.turn = threading.Lock()

    def reserve(self, units: int) -> bool:
        "Reserve an amount. False: wait for calls under way. RuntimeError: no call can give any back."
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
        "Reserve an amount as soon as there is room. RuntimeError if the cap is reached."
        while not self.reserve(units):
            await asyncio.sleep(PAUSE)

    def settle(self, reserved: int, spent: int) -> None:
        "Note that a call has ended: give back the part that it did not spend."
        with self.turn:
            self.reserved -= reserved
            self.left += reserved - spent


class Bills(Ledger):
    "A `Ledger` that keeps amounts only. An equal question is asked and paid again."

    at_cap = 'start with a larger max_cents'
    purse = None  # `Purse` that other books take from, too

    def __init__(
        self,
        path=None,  # file, made if missing; it may be the file of a `Ledger`; None: in memory
        max_cents: float | None = None,  # never spend more US cents, those in the file included
    ):
        try:
            super().__init__(path, max_cents)
        except BlockingIOError:
            raise BlockingIOError(
                f'{path}: a router that is open here or in another process books paid calls there, '
                'so one cap would not hold for both; '
                'ask that router or its server, or give each process an export of the router (own.export)'
            ) from None
        self.units_before = self.units
        self.unwanted = set()  # tasks whose caller has gone

    @property
    def spent_now(self) -> float:
        "US cents spent since the book was opened. Calls with an unknown bill count at their most."
        return (self.units - self.units_before) / CENT

    def allow(
        self,
        cents: float,  # US cents that may be spent from now on
    ) -> None:
        "Set the cap."
        self.cap = self.units + int(Fraction(str(cents)) * CENT)

    async def reserve(self, key, max_units):
        "As in `Ledger`. RuntimeError if the caller has gone, also while it waited: then the call is not made."
        self.check_wanted()
        if self.purse is not None:
            await self.purse.take(max_units)
        try:
            call = await super().reserve(key, max_units)
        except BaseException:
            if self.purse is not None:
                self.purse.settle(max_units, 0)
            raise
        try:
            self.check_wanted()
        except RuntimeError:
            await self.settle(call, 0)
            raise
        return call

    def check_wanted(self) -> None:
        "RuntimeError if the caller of this task has gone."
        if asyncio.current_task() in self.unwanted:
            raise RuntimeError('the caller has gone, so the call was not made')

    async def settle(self, call, units, reply=None, **notes):
        "As in `Ledger`."
        _, max_units = self.reserved[call]
        try:
            await super().settle(call, units, reply, **notes)
        finally:
            if self.purse is not None:
                self.purse.settle(max_units, units)

    def reply(self, key):
        "None: this book keeps no replies."

    async def record(self, call, key, max_units, units, notes, reply=None):
        "Write a call's amount to the file, without request and reply."
        plain = {name: value for name, value in notes.items() if name in ('uncertain', 'claimed')}
        await super().record(call, '', max_units, units, plain)

    async def once(self, key, draw):
        "Draw the reply to a request now, with the coroutine function `draw`."
        task = asyncio.ensure_future(draw())
        self.pending[task] = task
        task.add_done_callback(self.forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self.unwanted.add(task)
            raise self.broken or asyncio.CancelledError from None

    def forget(self, task) -> None:
        "Forget a call that has ended."
        del self.pending[task]
        self.unwanted.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to look at it

    async def run(self, coro):
        "Run a coroutine. If the caller cancels, a request that was sent still ends and is booked."
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
    "Set how much several books may spend. ValueError in one line if that is no amount."
    checked('max_cents', together, Cents | None)
    checked('max_cents_each', each, Cents | None)
    purse = None if together is None else Purse(together)
    for book in books:
        book.purse = purse
        if each is not None:
            book.allow(each)
