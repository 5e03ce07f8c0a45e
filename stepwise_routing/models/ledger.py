"""The book of paid calls: it keeps every paid reply, and spending never exceeds the cap.

Here belongs what was reserved, spent and received. How a call is made belongs in `models.chat`.
"""

import asyncio
import contextlib
import json
import math
import threading
from fractions import Fraction

from .database import Database

CENT = 10**10  # units in a US cent; amounts are whole units


def note_error(future) -> None:
    "Read the error of a future whose caller may have gone, so that asyncio does not print it."
    if not future.cancelled():
        future.exception()


class Ledger(Database):
    "The book of one or several paid models, in memory only if `path` is None. Errors as of `Database`."

    kind = 'ledger'
    sync = 'FULL'
    at_cap = 'raise max_cents: the ledger keeps every reply'  # what to do at the cap
    loop = None  # event loop of all that touches money, in a thread of its own
    tables = dict(
        call='call INTEGER PRIMARY KEY, key, most, units, notes',
        reply='call INTEGER PRIMARY KEY, key, reply',
    )
    indexes = dict(by_key='reply (key)')

    def __init__(
        self,
        path=None,  # file, made if missing; None: in memory
        max_cents: float | None = None,  # most US cents, those in the file included; None: no cap
    ):
        if not 0 <= (max_cents or 0) < math.inf:
            raise ValueError(f'max_cents={max_cents}: give a number of US cents from 0 up')
        self.cap = math.inf if max_cents is None else int(Fraction(str(max_cents)) * CENT)
        self.reserved = {}
        self.pending = {}
        self.clients = []  # call -> (key, units); key -> task
        self.unsaved = {}
        self.broken = None  # calls that are not on file yet; the error that ends the run
        self.closing = asyncio.Event()
        self.changed = asyncio.Event()
        self.saving = asyncio.Lock()
        super().__init__(path, {})
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    @property
    def spent(self):
        return self.units / CENT  # US cents, earlier runs and unknown bills included

    @property
    def taken(self):
        return self.units + sum(max_units for _, max_units in self.reserved.values())

    def begin(self, settings):  # called where the file is opened
        Database.begin(self, settings)
        calls = self.rows('call')
        self.units = sum(
            max_units if units is None else units for _, _, max_units, units, _ in calls
        )
        self.calls = max((call for call, *_ in calls), default=0)

    def reply(self, key):  # the last one to a request, None where there is none
        rows = [row for _, row in self.unsaved.values() if row and row[1] == key]
        rows = rows or self.rows('reply', 'WHERE key = ? ORDER BY call DESC LIMIT 1', [key])
        if not rows:
            return None
        return json.loads(rows[-1][-1])

    async def reserve(self, key, max_units):
        "Reserve `max_units` for a call; returns its number. RuntimeError if the cap does not allow it."
        while not self.broken and self.taken + max_units > self.cap:
            if not self.reserved:
                raise RuntimeError(
                    f'cap reached: {self.taken / CENT:.4f} of {self.cap / CENT:.4f} cents are spent and the '
                    f'next call could cost {max_units / CENT:.4f}; {self.at_cap}'
                )
            await self.changed.wait()
        if self.broken:
            raise self.broken
        self.calls += 1
        self.reserved[self.calls] = key, max_units
        return self.calls

    async def record(self, call, key, max_units, units, notes, reply=None):
        """Write a call to the file, in one transaction with all calls that wait for that.

        OSError if the disk is full: the call stays in memory.
        """
        row = (
            (call, key, max_units, units, json.dumps(notes)),
            reply and (call, key, json.dumps(reply)),
        )
        self.unsaved[call] = row
        async with self.saving:
            if self.unsaved.get(call) is not row:
                return  # whoever came before has taken it along
            rows = dict(self.unsaved)
            try:
                await asyncio.to_thread(self.save, rows)
            except OSError as e:
                self.broken = e
                raise
            self.unsaved = {k: row for k, row in self.unsaved.items() if rows.get(k) is not row}

    def save(self, rows):
        "Write rows in one transaction."
        calls, replies = zip(*rows.values())
        self.write('REPLACE', dict(call=calls, reply=filter(None, replies)))

    async def send(self, call):  # its request leaves now
        key, max_units = self.reserved[call]
        if max_units:
            await self.record(call, key, max_units, None, {})

    async def settle(self, call, units, reply=None, **notes):
        """Book the cost of a call, in units, and its reply.

        On a full disk both stay in memory, and no new call is made.
        """
        key, max_units = self.reserved.pop(call)
        self.units += units
        self.changed.set()
        self.changed = asyncio.Event()
        notes = {k: v for k, v in notes.items() if v}
        with contextlib.suppress(OSError):
            await self.record(call, key, max_units, units, notes, reply)

    def stop(self, error):
        "Make no new call. Calls in flight end, and their replies are kept."
        self.broken = error

    def run(self, coro):
        "Run a coroutine in the ledger's loop; returns a future. An interrupt of the caller does not stop it."
        if self.closing.is_set():
            coro.close()
            raise RuntimeError('the ledger of this model is closed')
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self.loop))
        future.add_done_callback(note_error)
        return asyncio.shield(future)

    def close(self):
        "Wait for the calls in flight, then close the file. OSError if a paid reply finds no room on the disk."

        async def end():
            self.closing.set()
            await asyncio.gather(*self.pending.values(), return_exceptions=True)
            for client in self.clients:
                await client.close()

        if self.loop and not self.closing.is_set():
            asyncio.run_coroutine_threadsafe(end(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
        try:
            if self.unsaved:
                self.save(self.unsaved)
        except OSError as e:
            n = sum(reply is not None for _, reply in self.unsaved.values())
            raise OSError(f'{n} paid replies could not be written to the file: {e}') from None
        finally:
            self.unsaved.clear()
            Database.close(self)

    async def once(self, key, draw):
        "The reply to a request: from the book, from a call in flight, or drawn now by the function `draw`."
        if (reply := self.reply(key)) is not None:
            return reply
        if key not in self.pending:
            self.pending[key] = asyncio.ensure_future(draw())
            self.pending[key].add_done_callback(lambda _: self.pending.pop(key))
            self.pending[key].add_done_callback(note_error)
        try:
            return await asyncio.shield(self.pending[key])
        except asyncio.CancelledError:
            raise self.broken or asyncio.CancelledError from None
