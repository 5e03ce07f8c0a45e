"Rollouts on Ray: the same store as by one process, whoever dies on the way. With real workers on the micro models."
import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

ray = pytest.importorskip('ray')
psutil = pytest.importorskip('psutil')
from stepwise_routing.method.outcomes import outcome_table
from stepwise_routing.method.tree import RoutingTree, collect_rollouts

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models import ray as models_ray
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models
from stepwise_routing.models.ray import _start_ray, ray_models
from stepwise_routing.store import RolloutStore, tree_settings

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

def draw(models, path, problems, then=lambda edges: None, start=()):
    "Draw into a store: what it then holds, by edge; none is drawn twice. `then` is called after each write."
    edges = dict(start)
    with RolloutStore(path, tree_settings('micro-math', models)) as store:
        put, before = store.put_many, len(store)
        def put_many(rows):
            rows = list(rows)
            assert not any(key in store for key, _ in rows), 'drawn again'
            put(rows)
            edges.update(rows)
            then(edges)
        store.put_many = put_many
        assert collect_rollouts(problems, RoutingTree(models, store)) == len(edges) - before
    with RolloutStore(path, readonly=True) as store:
        assert len(store) == len(edges)
        return {key: store.get(*key) for key in edges}

@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    "Problems, a store of their rollouts made by one process, and its edges."
    path, problems = tmp_path_factory.mktemp('ray')/'alone.db', load_problems('micro-math', 'train', 12)
    with open_models(NAMES) as models: return path, problems, draw(models, path, problems)

def test_same_store_with_one_worker_killed_midway(alone, remote, tmp_path):
    path, problems, expected = alone
    before = pids(remote)
    victims = before[:1]
    assert len({*before, os.getpid()}) == 3
    def kill(edges):
        if victims and len(edges) > len(expected)//3: os.kill(victims.pop(), signal.SIGKILL)
    assert draw(remote, tmp_path/'two.db', problems, kill) == expected
    assert victims == [] and [a == b for a, b in zip(before, pids(remote))] == [False, True]
    with RolloutStore(tmp_path/'two.db', readonly=True) as two, RolloutStore(path, readonly=True) as one:
        tables = [outcome_table(problems, RoutingTree(None, store), 'train') for store in (two, one)]
    for name in ('correct', 'obs', 'large_tokens'): np.testing.assert_array_equal(*(getattr(t, name) for t in tables))

def test_score_and_choose_travel(alone, remote):
    problem, messages = alone[1][0], [dict(role='user', content='1+1=?')]
    async def answers(models):
        step, = await models[0].write(Request(problem, seed=lambda i: 5))
        return await models[1].score(Request(problem), step), await models[1].choose(messages, ('2', '3'))
    there = asyncio.run(answers(remote))
    with open_models(NAMES) as models: assert asyncio.run(answers(models)) == there

DRIVER = '''
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler) # a job in the background is started deaf to it
os.environ['RAY_worker_niceness'] = '0'
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.names import open_models
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.store import RolloutStore, tree_settings
from stepwise_routing.models.ray import _start_ray
for attempt in range(2):
    try: _start_ray(3); break
    except ConnectionError: pass # on a busy machine
with open_models(['micro-small', 'micro-large'], engine='ray', workers=2) as models:
    with RolloutStore(sys.argv[1], tree_settings('micro-math', models)) as store:
        put = store.put_many
        def slowly(edges): put(edges); print(len(store), flush=True); sys.stdin.readline()
        store.put_many = slowly
        collect_rollouts(load_problems('micro-math', 'train', 12), RoutingTree(models, store))
'''

@pytest.mark.parametrize('by', [signal.SIGKILL, signal.SIGINT])
def test_the_process_with_the_store_dies(alone, remote, tmp_path, by):
    _, problems, expected = alone
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, '-c', DRIVER, str(tmp_path/'s.db')], text=True, **pipes)
    try:
        for _ in range(6):
            assert child.stdout.readline(), child.stderr.read()
            child.stdin.write('\n')
            child.stdin.flush()
        started = psutil.Process(child.pid).children(recursive=True)
        workers = [p for p in started if 'ray::Worker' in ' '.join(p.cmdline())]
        assert len(workers) == 2
        child.send_signal(by)
        errors = child.communicate(timeout=60)[1]
    finally: child.kill()
    assert child.returncode == -9 if by == signal.SIGKILL else errors.rstrip().endswith('KeyboardInterrupt')
    assert gone(workers if by == signal.SIGKILL else started, 30) # after a kill Ray's own agents need a minute or so
    for p in started: p.is_running() and p.kill()
    with RolloutStore(tmp_path/'s.db', readonly=True) as store:
        left = {key: store.get(*key) for key in expected if key in store}
        assert 6 <= len(left) == len(store) < len(expected)
    assert draw(remote, tmp_path/'s.db', problems, start=left) == expected # and what it left is continued
