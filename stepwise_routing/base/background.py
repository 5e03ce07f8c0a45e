"""An event loop in a thread of its own, for what belongs to one loop and is asked from anywhere.

Here belongs how a caller of any thread or task waits for work in that loop. What the work is belongs
in the modules that bring it.
"""

import asyncio
import contextlib
import threading

PATIENCE = 10  # seconds that cancelled work has to end
END = object()  # the last thing in a queue


class LoopThread:
    "Runs coroutines and async generators in one loop. RuntimeError once it is closed."

    def __init__(self, name: str = 'background'):
        self.loop = asyncio.new_event_loop()
        self.is_closed = False
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def submit(self, coroutine):
        "The coroutine's future, for any thread."
        if self.is_closed:
            coroutine.close()
            raise RuntimeError('the router is closed')
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def result(self, coroutine):
        "What a coroutine returns. An interrupt of the caller cancels it."
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def items(
        self,
        source,  # an async generator, not begun yet; it runs in this loop
    ):
        """What the generator yields, for the loop of the caller. Closing this one closes the other.

        It goes on when the next item is asked for, so nothing is worked out that nobody wants.
        """
        here = asyncio.get_running_loop()
        queue = asyncio.Queue()
        wanted = asyncio.Semaphore(0)  # items

        def put(item, error=None):
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                here.call_soon_threadsafe(queue.put_nowait, (item, error))

        async def pump():
            error = None
            try:
                await wanted.acquire()
                async for item in source:
                    put(item)
                    await wanted.acquire()
            except BaseException as e:
                error = e
                if not isinstance(e, Exception):
                    raise
            finally:
                with contextlib.suppress(Exception):
                    await source.aclose()
                put(END, error)

        running = self.submit(pump())
        item = None
        try:
            while True:
                self.loop.call_soon_threadsafe(wanted.release)
                item, error = await queue.get()
                if error:
                    raise _as_error(error)
                if item is END:
                    return
                yield item
        finally:
            if item is not END:
                running.cancel()
                await _until_end(queue)

    def close(self) -> None:
        "Cancel what is under way, wait for its end, and stop."
        if self.is_closed:
            return
        self.is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def _as_error(error):
    "An error that the caller may see: it was not the caller who was cancelled."
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError('the router was closed before it answered')
    return error


async def _until_end(queue):
    "Wait until cancelled work has come to its end."

    async def drain():
        while (await queue.get())[0] is not END:
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drain(), PATIENCE)


async def _cancel_all():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=PATIENCE) if tasks else None
    await asyncio.get_running_loop().shutdown_asyncgens()
