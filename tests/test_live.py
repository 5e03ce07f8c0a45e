"A router that is asked from many threads and tasks at once, step by step."
import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from toy_models import toy_problems
from toy_own import PAIR, Adder

from stepwise_routing.util import run_async
from stepwise_routing.own import open_router

QUESTIONS = [p.question for p in toy_problems(40, seed=9)]

@pytest.fixture
def router(opened):
    router, before = opened[0], opened[0].backends
    yield router
    router.backends = before

async def streamed(router, question, **how): return [step async for step in router.stream(question, **how)]

def answer(router, question, steps): return router.routed(router.problem(question), steps)

def test_a_stream_is_what_route_answers(router):
    for question, whole in zip(QUESTIONS, router.route(QUESTIONS)):
        steps = run_async(streamed(router, question))
        assert answer(router, question, steps) == whole and whole.text == '\n\n'.join(filter(None, whole.steps))
        assert len(steps) - len(whole.steps) == sum(not live.kept for live in steps)

def test_threads_and_tasks_do_not_mix(router):
    "Two samples at once are what they are one after the other, in any number of threads and tasks."
    alone = {(q, s): router.route(q, sample=s) for q in QUESTIONS[:8] for s in range(4)}
    assert len({a.steps for a in alone.values()}) > 16
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda key: router.route(key[0], sample=key[1]), alone)) == [*alone.values()]
    async def all_at_once():
        return await asyncio.gather(*(streamed(router, q, sample=s) for q, s in alone))
    for (q, s), steps in zip(alone, run_async(all_at_once())): assert answer(router, q, steps) == alone[q, s]

def test_an_early_close_stops_the_models(router):
    async def first(): # and no more
        async with aclosing(router.stream(QUESTIONS[0])) as steps:
            async for step in steps: return step
    before = sum(b.steps_written for b in router.backends)
    for i in range(20): run_async(first())
    assert sum(b.steps_written for b in router.backends) == before + 20 # one step each, and no other was begun
    for _ in range(100):
        if asyncio.all_tasks(router.loop.loop): time.sleep(.02)
    assert not asyncio.all_tasks(router.loop.loop)

def test_a_closed_router_answers_nobody_and_hangs_nobody(opened):
    stuck = threading.Event()
    class Stuck(Adder):
        async def write(self, request):
            stuck.set()
            await asyncio.sleep(60)
    with open_router(opened[1], PAIR) as router:
        router.backends = [Stuck(0), Stuck(1)]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: run_async(streamed(router, 'What is 3 + 4?')))
            assert stuck.wait(20)
            router.close()
            with pytest.raises(RuntimeError, match='was closed before it answered'): waiting.result(20)
    with pytest.raises(RuntimeError, match='the router is closed'): run_async(streamed(router, 'What is 3 + 4?'))

def test_errors_reach_whoever_asked(router):
    class Broken(Adder):
        async def write(self, request): raise RuntimeError('the server is away')
    router.backends = [Broken(0), Broken(1)]
    with pytest.raises(RuntimeError, match='is away'): router.route('What is 3 + 4?')
    with pytest.raises(RuntimeError, match='is away'): run_async(streamed(router, 'What is 3 + 4?'))
