"A router that is asked from many threads and tasks at once, step by step."
import asyncio
import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from test_own import PAIR, Adder, content_of_files, pair_module, ready
from toy import toy_problems

from stepwise_routing.base.background import LoopThread
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.conversations import asked_problem, read_conversation
from stepwise_routing.method.live import Wish, live_steps
from stepwise_routing.method.walks import LargeOnly, SmallOnly
from stepwise_routing.own import open_router
from stepwise_routing.report.own_router import Unanswered

QUESTIONS = [p.question for p in toy_problems(40, seed=9)]

@pytest.fixture(scope='module')
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp('routers')/'mine'
    @contextlib.contextmanager
    def open_toys(names, ledger=None, max_cents=None, **options): yield [Adder(i) for i in range(len(names))]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(pair_module, 'open_models', open_toys)
        ready(folder)
        with open_router(folder, PAIR) as router: yield router, folder

@pytest.fixture
def router(opened):
    router, before = opened[0], opened[0].backends
    yield router
    router.backends, router.fall_back = before, False

async def streamed(router, question, **wish): return [step async for step in router.stream(question, **wish)]

def answer(router, question, steps): return router.routed(router.problem(question), steps)

def test_a_stream_is_what_route_answers(router):
    for question, whole in zip(QUESTIONS, router.route(QUESTIONS)):
        steps = run_async(streamed(router, question))
        assert answer(router, question, steps) == whole and whole.text == '\n\n'.join(filter(None, whole.steps))
        assert len(steps) - len(whole.steps) == sum(not live.kept for live in steps)
        assert [live.decision for live in steps if not live.kept] == ['reject'] * (len(steps) - len(whole.steps))
        for live in steps:
            assert (live.score is None) == (live.decision == 'not_asked') and live.seconds >= 0
            if live.decision in ('reject', 'keep'):
                assert (live.score >= live.threshold) == (live.decision == 'reject')

def test_threads_and_tasks_do_not_mix(router):
    "Two samples at once are what they are one after the other, in any number of threads and tasks."
    alone = {(q, s): router.route(q, sample=s) for q in QUESTIONS[:8] for s in range(4)}
    assert len({a.steps for a in alone.values()}) > 16
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda key: router.route(key[0], sample=key[1]), alone)) == [*alone.values()]
    async def all_at_once():
        return await asyncio.gather(*(streamed(router, q, sample=s) for q, s in alone))
    for (q, s), steps in zip(alone, run_async(all_at_once())): assert answer(router, q, steps) == alone[q, s]

def test_nothing_of_a_question_is_stored(router, opened):
    before = content_of_files(opened[1])
    router.route(QUESTIONS)
    assert content_of_files(opened[1]) == before and not (opened[1]/'live.db').exists()

def test_two_may_open_one_folder(router, opened):
    with open_router(opened[1], PAIR) as other: assert other.route(QUESTIONS) == router.route(QUESTIONS)

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

def test_the_small_model_goes_on_where_the_large_one_is_away(router):
    class Away(Adder):
        async def write(self, request): raise RuntimeError('the server is away')
    whole = router.route(QUESTIONS)
    router.backends = [router.backends[0], Away(1)]
    with pytest.raises(RuntimeError, match='is away'): router.route(QUESTIONS)
    router.fall_back = True
    n = 0
    for question, before in zip(QUESTIONS, whole):
        steps = run_async(streamed(router, question))
        got = answer(router, question, steps)
        assert set(got.path) == {'0'} and got.tokens[1] == 0 and got.tokens[0] >= before.tokens[0]
        if '1' not in before.path: assert got == before
        n += any(live.decision == 'fall_back' for live in steps)
        assert not [call for call in steps[-1].calls if call.kind == 'draft']
    assert n == sum('1' in a.path for a in whole) > 0

# --- limits

def asked(question, router, wish, **how):
    backends = [Adder(i, **how) for i in range(2)]
    async def all_steps(): return [s async for s in live_steps(asked_problem('own', question), router, backends, wish)]
    return run_async(all_steps())

def test_a_cap_on_tokens_is_kept_by_whole_steps(router):
    "A toy writes no fewer tokens than it likes, so only what begins is limited: nothing starts behind the limit."
    for limit in (0, 1, 30, 100):
        for question in QUESTIONS[:10]:
            steps = asked(question, SmallOnly(), Wish(max_tokens=limit))
            written = [s for s in steps if s.step.generated]
            assert sum(s.step.generated for s in written[:-1]) < max(limit, 1)
            if limit == 0: assert [(s.step.text, s.step.finish) for s in steps] == [('', 'length')]

def test_a_cap_on_cents_keeps_to_the_small_model(router):
    prices = [None, 'gpt-4.1-mini']
    free = [asked(q, router.router, Wish(), prices=prices) for q in QUESTIONS]
    capped = [asked(q, router.router, Wish(max_cents=0), prices=prices) for q in QUESTIONS]
    assert any(s.step.model for steps in free for s in steps)
    assert not any(s.step.model for steps in capped for s in steps)
    limits = [s for steps in capped for s in steps if s.decision == 'limit']
    assert len(limits) > 3 and all(s.kept and s.score >= s.threshold for s in limits)

def test_a_wish_reaches_the_model():
    seen = []
    class Noting(Adder):
        async def write(self, request):
            seen.append(request)
            return await super().write(request)
    wish = Wish(sample=3, temperature=.2, top_p=.5, max_tokens=1000)
    problem = asked_problem('own', 'What is 3 + 4?')
    async def all_steps(): return [s async for s in live_steps(problem, LargeOnly(), [Noting(0), Noting(1)], wish)]
    run_async(all_steps())
    assert [(r.temperature, r.top_p, r.max_new, r.to_end) for r in seen] == [(.2, .5, 1000, True)]

# --- conversations

TURNS = [dict(role='user', content='What is 1 + 1?'), dict(role='assistant', content=r'\boxed{2}'),
         dict(role='user', content='And one more?')]

def test_a_conversation_is_the_whole_prompt():
    plain = asked_problem('own', 'What is 3 + 4?')
    assert asked_problem('own', [dict(role='user', content='What is 3 + 4?')]) == plain
    asked = asked_problem('own', TURNS)
    system, *turns = read_conversation(asked.question)
    assert system['role'] == 'system' and turns == TURNS and asked.benchmark != 'own'
    own = [dict(role='system', content='Answer in French.'), *TURNS]
    assert read_conversation(asked_problem('own', own).question) == own
    assert len({asked.id, plain.id, asked_problem('own', own).id}) == 3

@pytest.mark.parametrize('bad', [[], TURNS[:2], [dict(role='tool', content='x')], [dict(role='user', content=3)], [3],
                                 [dict(role='user', content=' ')], None, 3, '', ' '])
def test_what_is_no_question(router, bad):
    with pytest.raises(ValueError, match='a question should be text|a message needs a role|the last message') as e:
        router.problem(bad)
    assert '\n' not in str(e.value)

def test_a_conversation_is_answered(router):
    got = router.route(TURNS)
    assert got == router.route(TURNS) == router.route([TURNS])[0] and got.steps
    assert router.route([TURNS, QUESTIONS[0]]) == [got, router.route(QUESTIONS[0])]

@pytest.mark.parametrize('kind', [RuntimeError, ValueError])
def test_one_question_that_fails_leaves_the_other_answers(router, monkeypatch, kind):
    "They may be paid for."
    steps = router.steps
    def failing(problem, *more):
        if problem.question == QUESTIONS[1]: raise kind('filtered')
        return steps(problem, *more)
    wanted = router.route(QUESTIONS[:1])[0]
    monkeypatch.setattr(router, 'steps', failing)
    with pytest.raises(Unanswered, match='1 of 2 questions have no answer.*filtered.*the field `answers`') as e:
        router.route(QUESTIONS[:2])
    assert e.value.answers == [wanted, None]
    with pytest.raises(kind, match='^filtered$'): router.route(QUESTIONS[1])

def test_a_router_that_was_opened_before_a_fork_says_so(router):
    "Without its thread, the child would wait for ever."
    def ask(queue):
        try: queue.put(router.route(QUESTIONS[0]).text)
        except RuntimeError as error: queue.put(str(error))
        router.loop.close()
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    child = context.Process(target=ask, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == 'the router was opened in another process: open it in this one'
    child.join(60)
    assert child.exitcode == 0 and router.route(QUESTIONS[0]).steps

def test_a_loop_that_is_closed_twice():
    loop = LoopThread()
    loop.close(); loop.close()
    assert not loop.thread.is_alive()
