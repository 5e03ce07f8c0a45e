"A router that is asked from many threads and tasks at once, step by step."

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from micro_router import with_threshold
from toy_models import toy_problems
from toy_own import Adder

from stepwise_routing.models.streams import LiveStep
from stepwise_routing.own import min_prob
from stepwise_routing.util import run_async

QUESTIONS = [p.question for p in toy_problems(40, seed=9)]


class StepByStep(Adder):
    step_by_step = True


async def streamed(router, question, **how):
    "The steps as they came, and the finished chain."
    *steps, chain = [item async for item in router.stream(question, **how)]
    return steps, chain


def toy_router(*backends, reading='continue'):
    return with_threshold(min_prob, list(backends), -0.5, reading=reading)


@pytest.mark.parametrize('reading', ['continue', 'rewrite'])
@pytest.mark.parametrize('kind', [Adder, StepByStep])
def test_a_stream_is_what_route_answers(reading, kind):
    thrown = 0
    with toy_router(kind(0), kind(1), reading=reading) as router:
        for question, whole in zip(QUESTIONS, router.route(QUESTIONS)):
            steps, chain = run_async(streamed(router, question))
            assert router.routed(router.problem(question), chain) == whole
            kept = [live.step for live in steps if live.kept]
            assert kept == list(chain.steps) and whole.text == '\n\n'.join(
                s for s in whole.steps if s
            )
            assert sum(live.step.generated for live in steps) == sum(whole.tokens)
            thrown += len(steps) - len(kept)
    assert thrown > 0  # a doubted last step, or any that is written again


def test_the_rest_of_a_chain_arrives_step_by_step():
    calls = {}
    for kind in (Adder, StepByStep):
        backends = kind(0), kind(1)
        with toy_router(*backends) as router:
            chain = run_async(streamed(router, QUESTIONS[0], who='large'))[1]
        calls[kind] = backends[1].calls, len(chain.steps)
    assert calls[Adder][0] == 1 < calls[StepByStep][0] == calls[StepByStep][1]
    assert calls[Adder][1] == calls[StepByStep][1]


def test_threads_and_tasks_do_not_mix():
    "Samples at once are what they are one after the other, in any number of threads and tasks."
    with toy_router(Adder(0), Adder(1)) as router:
        alone = {(q, s): router.route(q, sample=s) for q in QUESTIONS[:8] for s in range(4)}
        assert len({answer.steps for answer in alone.values()}) > 16
        with ThreadPoolExecutor(8) as pool:
            again = pool.map(lambda key: router.route(key[0], sample=key[1]), alone)
            assert list(again) == list(alone.values())

        async def all_at_once():
            return await asyncio.gather(*(streamed(router, q, sample=s) for q, s in alone))

        for (question, sample), (_, chain) in zip(alone, run_async(all_at_once())):
            assert router.routed(router.problem(question), chain) == alone[question, sample]


def test_an_early_close_stops_the_models():
    async def first_step(router):
        async with aclosing(router.stream(QUESTIONS[0])) as items:
            async for item in items:
                return item

    with toy_router(Adder(0, end=0, cut=0), StepByStep(1)) as router:
        for _ in range(20):
            assert isinstance(run_async(first_step(router)), LiveStep)
        # the second step says whether the first is kept; no third one was begun
        assert sum(backend.steps_written for backend in router.backends) <= 40
        for _ in range(100):
            if asyncio.all_tasks(router.loop.loop):
                time.sleep(0.02)
        assert not asyncio.all_tasks(router.loop.loop)


def test_a_closed_router_answers_nobody_and_hangs_nobody():
    stuck = threading.Event()

    class Stuck(Adder):
        async def write(self, request):
            stuck.set()
            await asyncio.sleep(60)

    with toy_router(Stuck(0), Stuck(1)) as router, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: run_async(streamed(router, 'What is 3 + 4?')))
        assert stuck.wait(20)
        router.close()
        with pytest.raises(RuntimeError, match='was closed before it answered'):
            waiting.result(20)
        with pytest.raises(RuntimeError, match='the router is closed'):
            router.route('What is 3 + 4?')


def test_errors_reach_whoever_asked():
    class Broken(Adder):
        async def write(self, request):
            raise RuntimeError('the server is away')

    with toy_router(Broken(0), Broken(1)) as router:
        with pytest.raises(RuntimeError, match='is away'):
            router.route('What is 3 + 4?')
        with pytest.raises(RuntimeError, match='is away'):
            run_async(streamed(router, 'What is 3 + 4?'))
        for question in (' ', 3):
            with pytest.raises(ValueError, match='a question should be text'):
                router.route([question])
