"""An event loop in a thread of its own, for objects that belong to one loop and have many callers.

Here belongs how a caller in any thread or task waits for work in that loop. The work itself belongs
in the modules that submit it.
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

    @property
    def is_elsewhere(self) -> bool:
        "Is this a fork of the process with the loop? No thread comes along."
        return not self.thread.is_alive()

    def submit(self, coroutine):
        "Start a coroutine in the loop, from any thread. Returns its `concurrent.futures.Future`."
        reason = ''
        if self.is_closed:
            reason = 'the router is closed'
        elif self.is_elsewhere:
            reason = 'the router was opened in another process: open it in this one'
        if reason:
            coroutine.close()
            raise RuntimeError(reason)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def result(self, coroutine):
        "Wait for a coroutine and return its result. Ctrl-C in the caller cancels the coroutine."
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
        """Yields the generator's items in the caller's loop. Closing this generator closes the other.

        The generator runs on only when the next item is asked for, so no item is made in vain.
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
        "Cancel all running work, wait for its end, and stop the loop."
        if self.is_closed or self.is_elsewhere:
            return
        self.is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def _as_error(error):
    "The error for the caller: our own cancellation becomes a RuntimeError, as the caller was not cancelled."
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError('the router was closed before it answered')
    return error


async def _until_end(queue):
    "Read the queue until its last item, which cancelled work puts there when it has ended."

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
