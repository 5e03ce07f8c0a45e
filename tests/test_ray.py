"""Rollouts on Ray: the same store as by one process, whoever dies on the way. The scheduling is tested on workers in plain Python,
the whole way on the micro models with two worker processes."""
import asyncio, os, signal, subprocess, sys

import numpy as np
import pytest

ray = pytest.importorskip('ray')
psutil = pytest.importorskip('psutil')
from stepwise_routing.models import ray as models_ray
from stepwise_routing.models.names import open_models
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.base import Request
from stepwise_routing.models.ray import RayModel, _Pool, _all_up, _check_resources, _travels, ray_models
from stepwise_routing.run.store import RolloutStore, tree_settings
from stepwise_routing.rollouts import RoutingTree, collect_rollouts
from stepwise_routing.outcomes import outcome_table
from toy import ToyBackend, toy_problems

pytestmark = pytest.mark.skipif(sys.platform == 'win32', reason='kills processes by signal')
NAMES = ['micro-small', 'micro-large']
quiet = pytest.mark.filterwarnings('ignore:worker .* died')

# ---------------------------------------------------------------- the pool, on workers in plain Python
class Died(ray.exceptions.RayError): pass

class Remote:
    "`actor.method.remote(...)` of a worker in this process, which dies when its script says so."
    def __init__(self, models, dies=lambda n, problem: False, loads=True, gate=None):
        self.models, self.dies, self.loads, self.gate, self.calls, self.dead = models, dies, loads, gate, [], False
    @property
    def open(self): return self._method(self._open)
    @property
    def call(self): return self._method(self._call)
    class _Method:
        def __init__(self, f): self.remote = f
    def _method(self, f): return self._Method(f)

    def _open(self): # what Ray returns can be awaited in any loop, and more than once
        outer = self
        class Ref:
            def __await__(self):
                async def opened():
                    await asyncio.sleep(0)
                    if not outer.loads: raise Died('while loading')
                    if outer.loads != True: raise outer.loads
                    return 7, [dict(spec=b.spec, has_logits=True, settings=b.settings()) for b in outer.models]
                return opened().__await__()
        return Ref()

    async def _call(self, model, what, *given):
        problem = given[0].problem.id if isinstance(given[0], Request) else None
        self.calls.append(problem)
        if self.gate: await self.gate.wait()
        if self.dead or self.dies(len(self.calls), problem): self.dead = True; raise Died('was killed')
        written = await getattr(self.models[model], what)(*(models_ray._arrived(x) if isinstance(x, Request) else x for x in given))
        await asyncio.sleep(0)
        if self.dead: raise Died('was killed')
        return written

def pair(): return [ToyBackend(0), ToyBackend(1)]

def toy_pool(scripts, room=8):
    "A pool whose successive workers follow the scripts (options of `Remote`), the last one for all that come later."
    made, killed = [], []
    def spawn(i):
        made.append(Remote(pair(), **(scripts.pop(0) if len(scripts) > 1 else scripts[0])))
        return made[-1]
    pool = _Pool(spawn, killed.append, 2, room)
    pool.made, pool.killed = made, killed
    return pool

def collected(models, path, problems, **kwargs):
    with RolloutStore(path, tree_settings(problems[0].benchmark, models)) as store:
        return collect_rollouts(problems, RoutingTree(models, store), **kwargs)

def content(path):
    "What a store holds by edge, and that it holds nothing twice."
    with RolloutStore(path, readonly=True) as store: edges = {key: store.get(*key) for key in store.index}
    assert len(path.read_bytes().splitlines()) == 1 + len(edges)
    return edges

def on_pool(pool, path, problems):
    async def up(): await _all_up(pool)
    asyncio.run(up())
    return collected([RayModel(pool, i) for i in range(2)], path, problems)

def test_a_pool_draws_what_one_process_draws(tmp_path):
    problems, pool = toy_problems(30), toy_pool([{}])
    n = collected(pair(), tmp_path/'one', problems)
    assert on_pool(pool, tmp_path/'two', problems) == n
    assert content(tmp_path/'two') == content(tmp_path/'one')
    assert len(pool.made) == 2 and all(len(w.calls) > 10 for w in pool.made) and pool.deaths == 0 and pool.killed == []
    assert all(seat.busy == 0 for seat in pool.seats) and pool.waiting == []

@quiet
@pytest.mark.parametrize('at', [1, 2, 9, 40])
def test_a_death_costs_nothing_but_time(tmp_path, at):
    problems, pool = toy_problems(30), toy_pool([dict(dies=lambda n, _: n == at), {}])
    collected(pair(), tmp_path/'one', problems)
    on_pool(pool, tmp_path/'two', problems)
    assert content(tmp_path/'two') == content(tmp_path/'one')
    assert pool.deaths == 1 and pool.killed == [pool.made[0]] and len(pool.made) == 3
    assert all(seat.busy == 0 for seat in pool.seats)

@quiet
def test_workers_that_die_again_and_again_still_get_on(tmp_path):
    problems, pool = toy_problems(20), toy_pool([dict(dies=lambda n, _: n == 20)], room=3) # each draws 19 calls, most of them return
    collected(pair(), tmp_path/'one', problems)
    on_pool(pool, tmp_path/'two', problems)
    assert content(tmp_path/'two') == content(tmp_path/'one') and pool.deaths >= 3

@quiet
def test_a_problem_that_kills_its_workers_ends_the_run(tmp_path):
    problems = toy_problems(12)
    pool = toy_pool([dict(dies=lambda n, problem: problem == problems[5].id)], room=1) # nobody shares its fate
    with pytest.raises(RuntimeError, match=rf"^3 workers died while they drew problem '{problems[5].id}'.*batch_size") as e:
        on_pool(pool, tmp_path/'two', problems)
    assert '\n' not in str(e.value) and pool.deaths <= 6 # two of its calls are under way at first

@quiet
def test_no_worker_comes_up():
    pool = toy_pool([dict(loads=False)])
    with pytest.raises(RuntimeError, match='^every worker died 3 times in a row; most often memory is too small'):
        asyncio.run(_all_up(pool))
    assert len(pool.made) == 6
    with pytest.raises(RuntimeError, match='every worker died'): # and it is told again, not waited for
        asyncio.run(asyncio.wait_for(pool.call('p', 0, 'choose', [], []), 5))

def test_one_seat_is_given_up_and_the_other_goes_on(tmp_path):
    problems, pool = toy_problems(10), toy_pool([dict(dies=lambda n, _: n == 3), {}, dict(loads=False)])
    collected(pair(), tmp_path/'one', problems)
    with pytest.warns(UserWarning) as notes: on_pool(pool, tmp_path/'two', problems)
    assert content(tmp_path/'two') == content(tmp_path/'one')
    assert [str(n.message) for n in notes if 'worker' in str(n.message)][-1] == 'worker 1 of 2 died 3 times in a row and is given up'

def task_error(cause): return ray.exceptions.RayTaskError('open', 'its traceback', cause)

@quiet
def test_a_load_that_fails_is_an_error_at_the_start_and_a_death_later(tmp_path):
    pool = toy_pool([dict(loads=task_error(ValueError('no such model')))])
    with pytest.raises(ValueError, match='^no such model$'): asyncio.run(_all_up(pool))
    assert len(pool.made) == 2
    problems = toy_problems(10)
    pool = toy_pool([dict(dies=lambda n, _: n == 3), {}, dict(loads=task_error(RuntimeError('GPU memory is in\nuse'))), {}])
    collected(pair(), tmp_path/'one', problems)
    with pytest.warns(UserWarning, match=r'^worker 1 of 2 died \(GPU memory is in use\); what it'): on_pool(pool, tmp_path/'two', problems)
    assert content(tmp_path/'two') == content(tmp_path/'one') and len(pool.made) == 4

def test_other_models_on_another_machine_are_refused():
    made = iter([pair(), [ToyBackend(0), ToyBackend(1, slip=.3)]])
    pool = _Pool(lambda i: Remote(next(made)), lambda worker: None, 2, 8)
    line = r'^the workers hold different models: models\[1\].weights is toy:.* on one and toy:.* on another$'
    with pytest.raises(ValueError, match=line):
        asyncio.run(_all_up(pool))

def test_earlier_problems_first_and_each_where_it_was():
    problems = toy_problems(3)
    pool = toy_pool([{}], room=1)
    write = lambda p: pool.call(p.id, 0, 'write', _travels(Request(p)))
    async def run():
        await _all_up(pool)
        gate = pool.made[0].gate = pool.made[1].gate = asyncio.Event()
        first = [asyncio.ensure_future(write(p)) for p in problems]         # two are at work, the third waits
        await asyncio.sleep(0)
        again = [asyncio.ensure_future(write(p)) for p in problems[1::-1]]  # more of the first two
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*first, *again)
    asyncio.run(run())
    assert [w.calls[:2] for w in pool.made] == [[problems[0].id]*2, [problems[1].id]*2]
    assert sum(w.calls.count(problems[2].id) for w in pool.made) == 1

def test_a_full_worker_is_helped_out():
    problem, pool = toy_problems(1)[0], toy_pool([{}], room=3)
    async def run():
        await _all_up(pool)
        await asyncio.gather(*(pool.call(problem.id, 0, 'write', _travels(Request(problem))) for _ in range(6)))
    asyncio.run(run())
    assert [len(w.calls) for w in pool.made] == [3, 3]

def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    problems, pool = toy_problems(30), toy_pool([{}], room=2)
    async def interrupted():
        await _all_up(pool)
        for w in pool.made: w.gate = asyncio.Event() # never opens
        models = [RayModel(pool, i) for i in range(2)]
        with RolloutStore(tmp_path/'two', tree_settings('toy', models)) as store:
            tree = RoutingTree(models, store)
            await asyncio.wait_for(asyncio.gather(*(tree.run(p, '', 0) for p in problems)), .1)
    with pytest.raises(asyncio.TimeoutError): asyncio.run(interrupted())
    for w in pool.made: w.gate = None
    collected(pair(), tmp_path/'one', problems)
    on_pool(pool, tmp_path/'two', problems)
    assert content(tmp_path/'two') == content(tmp_path/'one')

# ---------------------------------------------------------------- bad input
def test_what_cannot_be_drawn_is_told_before_ray_starts(monkeypatch):
    monkeypatch.setattr(models_ray, '_start', lambda *args: pytest.fail('started'))
    for names, options, line in (([], {}, 'give their names'), (['openai:gpt-4.1-mini'], {}, 'paid models are not drawn on Ray'),
            (['micro-small', 'served:micro-large'], dict(price='gpt-4.1-mini'), 'paid models'), (NAMES, dict(max_cents=1.), 'paid models'),
            (NAMES, dict(workers=0), 'workers=0: give a whole number'), (NAMES, dict(workers=1.5), 'workers=1.5'),
            (NAMES, dict(num_gpus=-1), 'num_gpus=-1: give'), (NAMES, dict(num_gpus=1.5), 'num_gpus=1.5'),
            (NAMES, dict(num_gpus=float('nan')), 'num_gpus=nan'), (NAMES, dict(num_cpus=-.5), 'num_cpus=-0.5')):
        with pytest.raises(ValueError, match=line) as e: ray_models(names, **options).__enter__()
        assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match='paid models'): open_models(NAMES, engine='ray', ledger='x.jsonl').__enter__()
    with pytest.raises(ValueError, match="unknown engine 'rya' .*'ray'"): open_models(NAMES, engine='rya').__enter__()

def test_options_of_ray_without_ray_are_refused(tmp_path):
    models = pair()
    with RolloutStore(tmp_path/'s', tree_settings('toy', models)) as store:
        with pytest.raises(ValueError, match='^models, workers: only for engine="ray"$'):
            collect_rollouts(toy_problems(1), RoutingTree(models, store), models=NAMES, workers=2)

def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ImportError, match=r'pip install "stepwise-routing\[ray\]"'): ray_models(NAMES).__enter__()

def test_a_cluster_that_is_not_there_is_told_at_once():
    class Elsewhere:
        is_initialized = staticmethod(lambda: False)
    with pytest.raises(ConnectionError, match="^no Ray cluster at '127.0.0.1:1': .*refused"): models_ray._start(Elsewhere, '127.0.0.1:1', 2)
    with pytest.raises(ValueError, match='"auto" or HOST:PORT$'): models_ray._start(Elsewhere, 'ray://127.0.0.1:1', 2)

def test_room_is_counted():
    _check_resources(dict(CPU=4, GPU=1), 2, dict(CPU=2, GPU=.5))
    with pytest.raises(ValueError, match='3 workers with 0.5 GPU each need 1.5 GPUs, Ray sees 1: lower workers or num_gpus'):
        _check_resources(dict(CPU=4, GPU=1), 3, dict(GPU=.5))

# ---------------------------------------------------------------- two worker processes
def family():
    "This process's Ray."
    names = 'raylet', 'gcs_server', 'ray::'
    return [p for p in psutil.Process().children(recursive=True) if any(w in ' '.join(p.cmdline()) for w in names)]

def gone(processes, seconds=20): return not psutil.wait_procs(processes, seconds)[1]

@pytest.fixture(scope='module')
def running():
    "A Ray that is there already."
    models_ray._ray()
    os.environ['RAY_worker_niceness'] = '0' # next to other work, Ray's own 15 would starve them
    assert models_ray._start(ray, 'local', 4)
    mine = family()
    yield
    assert ray.is_initialized() # the tests have used it, not ended it
    ray.shutdown()
    assert mine and gone(mine)

@pytest.fixture(scope='module')
def remote(running):
    with ray_models(NAMES, workers=2) as models: yield models
    assert gone([psutil.Process(s.pid) for s in models[0].pool.seats if psutil.pid_exists(s.pid)])

@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    "Problems, and a store of their rollouts made by one process."
    path, problems = tmp_path_factory.mktemp('ray')/'alone', load_problems('micro-math', 'train', 12)
    with open_models(NAMES) as models: collected(models, path, problems)
    return path, problems

def watched(store, then):
    "A store that calls `then(number of edges)` after each write, and never sees an edge twice."
    put = store.put_many
    def put_many(edges):
        edges = list(edges)
        assert not any(key in store for key, _ in edges), 'drawn again'
        put(edges)
        then(len(store))
    store.put_many = put_many

@quiet
def test_same_store_with_one_worker_killed_midway(alone, remote, tmp_path):
    path, problems = alone
    expected, pool = content(path), remote[0].pool
    victims, before = [pool.seats[0].pid], pool.deaths
    assert len({s.pid for s in pool.seats} | {os.getpid()}) == 3
    def kill(n):
        if victims and n > len(expected)//3: os.kill(victims.pop(), signal.SIGKILL)
    with RolloutStore(tmp_path/'two', tree_settings('micro-math', remote)) as store:
        watched(store, kill)
        assert collect_rollouts(problems, RoutingTree(remote, store)) == len(expected)
        tables = [outcome_table(problems, RoutingTree(None, s), 'train') for s in (store, RolloutStore(path, readonly=True))]
    assert victims == [] and pool.deaths == before + 1
    assert content(tmp_path/'two') == expected
    for name in ('correct', 'obs', 'large_tokens'): np.testing.assert_array_equal(*(getattr(table, name) for table in tables))

def test_the_store_of_one_process_is_continued(alone, remote, tmp_path):
    path, problems = alone
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path/'half').write_bytes(b''.join(lines[:len(lines)//2]))
    with RolloutStore(tmp_path/'half', tree_settings('micro-math', remote)) as store:
        watched(store, lambda n: None)
        assert collect_rollouts(problems, RoutingTree(remote, store)) == len(lines) - len(lines)//2
    assert content(tmp_path/'half') == content(path)

def test_score_and_choose_travel(alone, remote):
    _, problems = alone
    ask, say = Request(problems[0]), [dict(role='user', content='1+1=?')]
    async def answers(models):
        step, = await models[0].write(Request(problems[0], seed=lambda i: 5))
        return await models[1].score(ask, step), await models[1].choose(say, ('2', '3'))
    there = asyncio.run(answers(remote))
    with open_models(NAMES) as models: assert asyncio.run(answers(models)) == there

def test_errors_of_a_worker_arrive_as_they_were(remote):
    ask = lambda model: asyncio.run(model.choose([dict(role='user', content='?')], ('1', '12')))
    with open_models(NAMES) as models, pytest.raises(ValueError) as here: ask(models[0])
    with pytest.raises(ValueError) as there: ask(remote[0])
    assert str(there.value) == str(here.value) and type(there.value) is type(here.value)

def test_models_that_do_not_load(running):
    with pytest.raises(ValueError, match=r"^unknown model 'micro-smal' \(did you mean 'micro-small'\?\)$"):
        ray_models(['micro-smal'], workers=1).__enter__()
    with pytest.raises(ValueError, match='^2 workers with 64 GPU each need 128 GPUs, Ray sees'):
        ray_models(NAMES, num_gpus=64).__enter__()

def test_other_settings_than_the_store_s(running, alone):
    path, problems = alone
    with RolloutStore(path) as store, pytest.raises(ValueError, match=r'settings.models\[0\].temperature is 0.7 there and 1.0 here'):
        collect_rollouts(problems, RoutingTree(None, store), engine='ray', models=NAMES, workers=1, temperature=1.)

def test_no_room_is_told_in_time(running, remote):
    with pytest.raises(RuntimeError, match='^no room for 3 workers with 1 CPU each in 1 s'):
        ray_models(NAMES, workers=3, timeout=1).__enter__()

DRIVER = '''
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler) # a job in the background is started deaf to it
os.environ['RAY_worker_niceness'] = '0'
from stepwise_routing.api import open_models
from stepwise_routing.core import load_problems
from stepwise_routing.rollouts import RolloutStore, RoutingTree, collect_rollouts, tree_settings
with open_models(['micro-small', 'micro-large'], engine='ray', workers=2) as models:
    with RolloutStore(sys.argv[1], tree_settings('micro-math', models)) as store:
        put = store.put_many
        def slowly(edges): put(edges); print(len(store), flush=True); sys.stdin.readline()
        store.put_many = slowly
        collect_rollouts(load_problems('micro-math', 'train', 12), RoutingTree(models, store))
'''

@pytest.mark.parametrize('by', [signal.SIGKILL, signal.SIGINT])
def test_the_process_with_the_store_dies(alone, remote, tmp_path, by):
    path, problems = alone
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, '-c', DRIVER, str(tmp_path/'s')], text=True, **pipes)
    try:
        for _ in range(6): assert child.stdout.readline(), child.stderr.read(); child.stdin.write('\n'); child.stdin.flush()
        started = psutil.Process(child.pid).children(recursive=True)
        workers = [p for p in started if '_Worker' in ' '.join(p.cmdline())]
        assert len(workers) == 2
        child.send_signal(by)
        errors = child.communicate(timeout=60)[1]
    finally: child.kill()
    assert child.returncode == -9 if by == signal.SIGKILL else errors.rstrip().endswith('KeyboardInterrupt')
    assert gone(workers if by == signal.SIGKILL else started, 30) # after a kill Ray's own agents need a minute or so to notice
    for p in started: p.is_running() and p.kill()
    kept = len(content(tmp_path/'s'))
    assert 6 <= kept < len(content(path))
    with RolloutStore(tmp_path/'s', tree_settings('micro-math', remote)) as store: # and what it left is continued
        watched(store, lambda n: None)
        assert collect_rollouts(problems, RoutingTree(remote, store)) == len(content(path)) - kept
    assert content(tmp_path/'s') == content(path)
