"Rollouts on Ray: the same store as by one process, whoever dies on the way. With real workers on the micro models."
import asyncio
import os
import signal
import sys

import pytest

ray = pytest.importorskip('ray')
psutil = pytest.importorskip('psutil')
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method import rollouts
from stepwise_routing.models import ray as models_ray
from stepwise_routing.models.interface import Request
from stepwise_routing.models.lists import Listed
from stepwise_routing.models.names import open_models
from stepwise_routing.models.ray import _start_ray, ray_models
from stepwise_routing.store import Store, draw_settings

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == 'win32', reason='kills processes by signal')]
NAMES = ['micro-small', 'micro-large']

# ---------------------------------------------------------------- bad input
def test_paid_models_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.setattr(models_ray, '_start_ray', lambda *args: pytest.fail('started'))
    for names, options in ((['openai:gpt-4.1-mini'], {}), (NAMES, dict(max_cents=1.))):
        with pytest.raises(ValueError, match='^paid models are not drawn on Ray') as e:
            ray_models(names, open_models, **options).__enter__()
        assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match='paid models'): open_models(NAMES, engine='ray', ledger='x.db').__enter__()
    with pytest.raises(ValueError, match="unknown engine 'rya' .*'ray'"): open_models(NAMES, engine='rya').__enter__()

# ---------------------------------------------------------------- two worker processes
def family():
    "This process's Ray."
    names = 'raylet', 'gcs_server', 'ray::'
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if any(w in ' '.join(p.cmdline()) for w in names)]

def gone(processes, seconds=20): return not psutil.wait_procs(processes, seconds)[1]

@pytest.fixture(scope='module')
def running():
    "A Ray that is there already."
    os.environ['RAY_worker_niceness'] = '0' # next to other work, Ray's own 15 would starve them
    for attempt in range(3): # Ray gives its own agents 15 s, too few on a busy machine
        left = family() # by a failed attempt, until this process ends
        try: assert _start_ray(4); break
        except ConnectionError:
            if attempt == 2: raise
    mine = [p for p in family() if p not in left]
    yield
    assert ray.is_initialized() # the tests have used it, not ended it
    ray.shutdown()
    assert mine and gone(mine)

def pids(models): return ray.get([a.__ray_call__.remote(lambda worker: os.getpid()) for a in models[0].actors])

@pytest.fixture(scope='module')
def remote(running):
    with ray_models(NAMES, open_models, workers=2) as models:
        yield models
        workers = [psutil.Process(pid) for pid in pids(models)]
    assert gone(workers)

def draw(models, path, problems, then=lambda n: None):
    "Draw into a store, and read off what it then holds. `then` is called after each write, with the number of steps."
    listed = [Listed(model) for model in models]
    with Store(path, draw_settings('micro-math', listed)) as store:
        put = store.put_many

        def put_many(records):
            put(records)
            then(len(store))

        store.put_many = put_many
        rollouts.draw_chains(problems, [rollouts.Kept(model, store) for model in listed], 30)
        return {key: store.get(*key) for key in store.keys()}


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    "Problems, and the steps that one process draws."
    problems = load_problems('micro-math', 'train', 12)
    with open_models(NAMES) as models:
        return problems, draw(models, tmp_path_factory.mktemp('ray') / 'alone.db', problems)


def test_same_store_with_one_worker_killed_midway(alone, remote, tmp_path, monkeypatch):
    problems, expected = alone
    monkeypatch.setattr(rollouts, 'BLOCK', 4)
    before = pids(remote)
    victims = before[:1]
    assert len({*before, os.getpid()}) == 3

    def kill(drawn):
        if victims and drawn > len(expected) // 3:
            os.kill(victims.pop(), signal.SIGKILL)

    assert draw(remote, tmp_path / 'two.db', problems, kill) == expected
    assert victims == [] and [a == b for a, b in zip(before, pids(remote))] == [False, True]


def test_score_and_choose_travel(alone, remote):
    problem, messages = alone[0][0], [dict(role='user', content='1+1=?')]
    async def answers(models):
        step, = await models[0].write(Request(problem, seed=lambda i: 5))
        return await models[1].score(Request(problem), step), await models[1].choose(messages, ('2', '3'))
    there = asyncio.run(answers(remote))
    with open_models(NAMES) as models: assert asyncio.run(answers(models)) == there
