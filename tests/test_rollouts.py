"""The routing tree, walks and outcome tables: against a second implementation, by hand, and against each other to the
last bit."""
import asyncio, os, random, signal, subprocess, sys, time, zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from toy import ToyBackend, toy_backends, toy_problems
from stepwise_routing.base.records import Call, Step, api_cost, edge_seed, extract_boxed, generation_flops
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.run.stages import kept_given_up
from stepwise_routing.method.outcomes import OutcomeTable, escalation_times, outcome_table, replay, walk_outcome, walk_outcomes
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import State, bill_call, walk, walk_together
from stepwise_routing.run.stages import draw_edges
from stepwise_routing.run.workers import side_by_side
from stepwise_routing.method.routers import ThresholdRouter
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.base.store import RolloutStore, tree_settings

def make_tree(path, k=2, sample=0, max_steps=30, backends=None, grade=None, **kwargs):
    backends = backends or toy_backends(k, **kwargs)
    store = RolloutStore(path, tree_settings('toy', backends))
    return RoutingTree(backends, store, sample, max_steps, grade or (lambda problem, answer: answer == problem.answer))

async def edge(tree, *node): return (await tree.run(*node, to_end=False))[0]

def edges(store): return {k: store.get(*k) for k in store.keys()}

def uniform(salt, state): return random.Random(f'{salt}-{state.problem.id}-{state.path}').random()

@dataclass
class Coin(ThresholdRouter):
    "A router whose score follows from the chain alone, for any mode."
    mode: str = 'absorbing'
    on_escalate: str = 'append'
    start: int = 0
    salt: int = 0
    name: str = 'coin'
    threshold: float = .5
    def score(self, states): return np.array([uniform(self.salt, s) for s in states])

@dataclass
class Script(Coin):
    "Escalates where the script says so; the n-th question gets the n-th answer, then never again."
    script: tuple = ()
    rescore: bool = False
    def __post_init__(self): self.asked = []
    def escalates(self, states):
        self.asked.append(states[0])
        n = len(self.asked) - 1
        return [n < len(self.script) and bool(self.script[n])]

@dataclass
class Leap(Coin):
    "A router that chooses any model it may, which with two models its score says as well."
    def choose(self, states):
        def one(s):
            r, m = random.Random(f'{self.salt}-{s.problem.id}-{s.path}'), int(s.path[-1])
            low = r.random() < self.threshold
            return r.choice(range(m if self.mode == 'absorbing' else 0, s.n_models)) if low else m
        return [one(s) for s in states]

@dataclass
class Named(Script):
    "Chooses the models of the script, one a question, then stays (absorbing) or goes back to the first."
    def choose(self, states):
        self.asked.append(states[0])
        n, stay = len(self.asked) - 1, int(states[0].path[-1]) if self.mode == 'absorbing' else self.start
        return [self.script[n] if n < len(self.script) else stay]

# ---- drawing edges
class Lucky(ToyBackend):
    "A server that ignores seeds: no two draws are the same."
    def _random(self, *key): self.n = getattr(self, 'n', 0) + 1; return random.Random(self.n)

def test_seeds_follow_from_the_edge(tmp_path):
    tree, (p,) = make_tree(tmp_path/'s.db', sample=3, end=.05, cut=0), toy_problems(1)
    seen, write = [], tree.backends[1].write
    async def spy(request):
        out = await write(request)
        seen.append((len(request.steps), request.to_end, [request.seed(i) for i in range(len(out))]))
        return out
    tree.backends[1].write = spy
    async def go(): await edge(tree, p, '', 0); await edge(tree, p, '0', 1); return await tree.run(p, '0', 1)
    chain = asyncio.run(go())
    seeds = [edge_seed('toy', p.id, 3, '0' + '1'*i, 1) for i in range(len(chain))]
    assert seen == [(1, False, seeds[:1]), (2, True, seeds[1:])] and len(set(seeds)) == len(seeds) > 1

@pytest.mark.parametrize('backend', [ToyBackend, Lucky])
def test_an_edge_is_drawn_once_however_many_ask(tmp_path, backend):
    tree = make_tree(tmp_path/'s.db', backends=[backend(0, end=.1), backend(1, end=.1)])
    problems = toy_problems(8)
    async def go():
        wants = [f for p in problems for f in (edge(tree, p, '', 0), tree.run(p, '', 0), edge(tree, p, '', 1),
                                               tree.run(p, '', 1), edge(tree, p, '', 0), tree.run(p, '', 0))]
        return await asyncio.gather(*wants)
    out = asyncio.run(go())
    for i, p in enumerate(problems):
        first0, chain0, first1, chain1, again0, again = out[6*i:6*i + 6]
        assert first0 == chain0[0] == again0 and first1 == chain1[0] and chain0 == again
        assert tree.steps(p, '0'*len(chain0)) == chain0 and all(not s.final for s in chain0[:-1])
    assert tree.drawn == len(tree.store) == sum(b.steps_written for b in tree.backends) and not tree.pending

def test_a_chain_is_the_same_in_one_call_or_step_by_step(tmp_path):
    whole, single = make_tree(tmp_path/'a.db'), make_tree(tmp_path/'b.db')
    async def by_step(p):
        path, out = '', []
        while not out or not out[-1].final: out.append(await edge(single, p, path, 1)); path += '1'
        return tuple(out)
    for p in toy_problems(20): assert asyncio.run(whole.run(p, '', 1)) == asyncio.run(by_step(p))
    assert edges(whole.store) == edges(single.store)

def test_a_failing_model_fails_the_walk_and_the_next_one_goes_on(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(12)
    write, left = tree.backends[1].write, [9]
    async def failing(request):
        left[0] -= 1
        if left[0] < 0: raise ConnectionError('server gone')
        return await write(request)
    tree.backends[1].write = failing
    with pytest.raises(ConnectionError, match='server gone'): collect_rollouts(problems, tree)
    kept = edges(tree.store)
    assert kept
    tree.backends[1].write = write
    collect_rollouts(problems, tree)
    assert kept.items() <= edges(tree.store).items()
    other = make_tree(tmp_path/'t.db')
    collect_rollouts(problems, other)
    assert edges(tree.store) == edges(other.store)

def test_ctrl_c_keeps_what_was_drawn(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db', shy=0), toy_problems(20)
    write, left = tree.backends[0].write, [6]
    async def interrupted(request):
        left[0] -= 1
        if left[0] == 0: raise KeyboardInterrupt
        return await write(request)
    tree.backends[0].write = interrupted
    with pytest.raises(KeyboardInterrupt): walk(problems, Coin(), tree)
    assert len(tree.store)
    tree.backends[0].write = write
    assert walk(problems, Coin(), tree) == walk(problems, Coin(), make_tree(tmp_path/'t.db'))

def test_walks_run_inside_a_running_loop(tmp_path):
    tree = make_tree(tmp_path/'s.db')
    async def notebook(): return walk(toy_problems(5), Coin(), tree)
    assert len(asyncio.run(notebook())) == 5

# ---- walks
def reference_walk(problem, router, tree):
    "The semantics again, in another form: a list of (who, step, kept) events, then a bill by definition."
    chain, events = [], []
    draw = lambda m: asyncio.run(edge(tree, problem, ''.join(str(s.model) for s in chain), m))
    over = lambda: bool(chain) and (chain[-1].final or len(chain) == tree.max_steps)
    state = lambda y: State(problem, tree.sample, (*chain, y), ''.join(str(s.model) for s in (*chain, y)),
                            tree.n_models)
    chooses, top, writer = tree.n_models > 2 and hasattr(router, 'choose'), tree.n_models - 1, router.start
    def goes_on(y):
        if chooses: return router.choose([state(y)])[0]
        if router.escalates([state(y)])[0]: return min(y.model + 1, top)
        return y.model if router.mode == 'absorbing' else router.start
    while not over():
        y = draw(writer)
        redone = False
        while True:
            last = y.final or len(chain) == tree.max_steps - 1
            above = y.model < top
            silent = not above and (last or router.mode == 'absorbing') or router.start == top and not chooses
            if redone and (last or router.mode == 'per_step' and router.on_escalate == 'regenerate'): silent = True
            to = None if silent else goes_on(y)
            if not silent and to > y.model and (last or router.on_escalate == 'regenerate'):
                events.append((y, tuple(chain), False))
                y, redone = draw(to), True
                continue
            break
        events.append((y, tuple(chain), True))
        chain.append(y)
        if not silent: writer = to
        else: writer = y.model if router.mode == 'absorbing' else router.start
    full = paper = 0
    for i, (y, prefix, kept) in enumerate(events):
        n = tree.specs[y.model].params
        mine = [(q.prompt + (q.generated if k else 0)) for q, _, k in events[:i] if q.model == y.model]
        paper += 2*n*y.generated
        full += 2*n*(y.generated + y.prompt - min(mine[-1], y.prompt) if mine else y.generated + y.prompt)
    return tuple(chain), paper, full

@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([Coin, Leap]), k=st.integers(2, 4), mode=st.sampled_from(['absorbing', 'per_step']),
       on_escalate=st.sampled_from(['append', 'regenerate']),
       threshold=st.sampled_from([0., .2, .5, .8, 1.1]), salt=st.integers(0, 99), cut=st.sampled_from([0, .3]),
       end=st.sampled_from([.1, .5, 1.]),
       empty=st.sampled_from([0, .5]), max_steps=st.sampled_from([1, 2, 5, 30]), data=st.data())
def test_walks_of_any_kind(tmp_path, kind, k, mode, on_escalate, threshold, salt, cut, end, empty, max_steps, data):
    start = data.draw(st.integers(0, k - 1))
    path = tmp_path/'s.db'
    path.unlink(missing_ok=True)
    tree = make_tree(path, k, max_steps=max_steps, cut=cut, end=end, empty=empty)
    router, problems = kind(mode, on_escalate, start, salt, threshold=threshold), toy_problems(6, salt)
    walks = walk(problems, router, tree)
    drawn = tree.drawn
    for p, w in zip(problems, walks):
        chain, paper, full = reference_walk(p, router, tree)
        assert w.steps == chain and w.path == ''.join(str(s.model) for s in chain)
        assert generation_flops(w.calls, tree.specs) == paper and generation_flops(w.calls, tree.specs, 'full') == full
        assert w.answer == extract_boxed(chain[-1].text) and w.correct == (w.answer == p.answer)
        assert all(not s.final for s in chain[:-1]) and (chain[-1].final or len(chain) == max_steps)
        assert all(0 <= c.cached <= c.prompt for c in w.calls)
        if mode == 'absorbing': assert list(w.path) == sorted(w.path)
        if threshold == 0: assert set(w.path) == {str(start)}
        # two models: the score says it all
        if k == 2: assert w == walk([p], Coin(mode, on_escalate, start, salt, threshold=threshold), tree)[0]
    assert tree.drawn == drawn
    assert walk(problems, router, RoutingTree(None, tree.store, max_steps=max_steps, grade=tree.grade)) == walks
    tree.store.close()

def scripted(tmp_path, script, k=2, kind=Script, **kwargs):
    """The walk of a three-step chain under a script; returns its path, the kinds of its calls and what the router was
    asked."""
    class Three(ToyBackend):
        "Writes `a0`, `b0`, and an answer as the third step (`a1` if model 1 wrote it, and so on)."
        def _step(self, problem, prefix, seed, last):
            n = len(prefix)
            text = f'{"abc"[n]}{self.index}' + (rf' \boxed{{{self.index}}}' if n == 2 else '')
            return Step(text, self.index, 'step', (0,), (len(text),), (.5,), (1,), (1.,), 10, 100 + 10*n)
    tree = make_tree(tmp_path/f'{abs(hash((script, kind.__name__, str(kwargs))))}.db',
                     backends=[Three(i) for i in range(k)])
    router = kind(script=script, **kwargs)
    (w,) = walk(toy_problems(1), router, tree)
    return w.path, [(c.model, c.kind, c.prompt - c.cached, c.generated) for c in w.calls], [s.path
        for s in router.asked]

def test_absorbing_append(tmp_path):
    assert scripted(tmp_path, (0, 1)) == ('001', [(0, 'step', 100, 10), (0, 'step', 0, 10), (1, 'step', 120, 10)],
                                          ['0', '00'])
    assert scripted(tmp_path, (1,)) == ('011', [(0, 'step', 100, 10), (1, 'step', 110, 20)], ['0'])
    assert scripted(tmp_path, (0, 0, 1)) == ('001', [(0, 'step', 100, 10), (0, 'step', 0, 10), (0, 'draft', 0, 10),
                                                     (1, 'step', 120, 10)], ['0', '00', '000'])
    assert scripted(tmp_path, ())[0] == '000'
    assert scripted(tmp_path, (1,), start=1) == ('111', [(1, 'step', 100, 30)], [])

def test_absorbing_regenerate(tmp_path):
    assert scripted(tmp_path, (0, 1), on_escalate='regenerate') == ('011',
        [(0, 'step', 100, 10), (0, 'draft', 0, 10), (1, 'step', 110, 20)], ['0', '00'])
    assert scripted(tmp_path, (1,), on_escalate='regenerate') == ('111',
        [(0, 'draft', 100, 10), (1, 'step', 100, 30)], ['0'])

def test_per_step_append(tmp_path):
    path, calls, asked = scripted(tmp_path, (1, 0, 1), mode='per_step')
    assert (path, asked) == ('011', ['0', '01', '010'])
    assert calls == [(0, 'step', 100, 10), (1, 'step', 110, 10), (0, 'draft', 10, 10), (1, 'step', 0, 10)]
    assert scripted(tmp_path, (1, 1), mode='per_step')[::2] == ('011', ['0', '01'])

def test_per_step_regenerate(tmp_path):
    path, calls, asked = scripted(tmp_path, (0, 1, 0), mode='per_step', on_escalate='regenerate')
    assert (path, asked) == ('010', ['0', '00', '010'])
    assert calls == [(0, 'step', 100, 10), (0, 'draft', 0, 10), (1, 'step', 110, 10), (0, 'step', 10, 10)]

def test_three_models(tmp_path):
    assert scripted(tmp_path, (1, 1), k=3)[::2] == ('012', ['0', '01'])
    assert scripted(tmp_path, (1, 1), k=3, on_escalate='regenerate')[::2] == ('222', ['0', '1'])
    # a last step is regenerated once, and ends the walk
    assert scripted(tmp_path, (0, 0, 1, 1), k=3)[::2] == ('001', ['0', '00', '000'])
    assert scripted(tmp_path, (1, 1, 1), k=3, mode='per_step')[::2] == ('012', ['0', '01'])

def leaps(tmp_path, *script, **kwargs): return scripted(tmp_path, script, 3, Named, **kwargs)

def test_a_choice_jumps_over_a_model(tmp_path):
    path, calls, asked = leaps(tmp_path, 2)
    assert (path, asked) == ('022', ['0']) and calls == [(0, 'step', 100, 10), (2, 'step', 110, 20)]
    path, calls, asked = leaps(tmp_path, 1, 2)                            # up by one, and asked again there
    assert (path, asked) == ('012', ['0', '01'])
    assert calls == [(0, 'step', 100, 10), (1, 'step', 110, 10), (2, 'step', 120, 10)]
    # a last step is written again, by the one chosen
    path, calls, asked = leaps(tmp_path, 0, 0, 2)
    assert (path, asked) == ('002', ['0', '00', '000'])
    assert [c[:2] for c in calls] == [(0, 'step'), (0, 'step'), (0, 'draft'), (2, 'step')]
    assert leaps(tmp_path)[0] == '000' and leaps(tmp_path, 1)[::2] == ('011', ['0', '01', '011'])

def test_a_choice_writes_the_step_again(tmp_path):
    path, calls, asked = leaps(tmp_path, 2, on_escalate='regenerate')
    assert (path, asked) == ('222', ['0']) and calls == [(0, 'draft', 100, 10), (2, 'step', 100, 30)]
    path, calls, asked = leaps(tmp_path, 0, 1, 2, on_escalate='regenerate')
    assert (path, asked) == ('022', ['0', '00', '01'])
    assert calls == [(0, 'step', 100, 10), (0, 'draft', 0, 10), (1, 'draft', 110, 10), (2, 'step', 110, 20)]
    assert leaps(tmp_path, 0, 0, 1, on_escalate='regenerate')[::2] == ('001', ['0', '00', '000'])

def test_a_choice_per_step_is_any_model(tmp_path):
    path, calls, asked = leaps(tmp_path, 2, 1, mode='per_step')
    assert (path, asked) == ('021', ['0', '02', '021'])
    assert calls == [(0, 'step', 100, 10), (2, 'step', 110, 10), (1, 'step', 120, 10)]
    # down again, and the last step once more by the largest
    path, calls, asked = leaps(tmp_path, 2, 0, 2, mode='per_step')
    assert (path, asked) == ('022', ['0', '02', '020'])
    assert calls == [(0, 'step', 100, 10), (2, 'step', 110, 10), (0, 'draft', 10, 10), (2, 'step', 0, 10)]
    # a step written again is not asked about
    path, calls, asked = leaps(tmp_path, 2, 1, mode='per_step', on_escalate='regenerate')
    assert (path, asked) == ('210', ['0', '20', '210'])
    assert [c[:2] for c in calls] == [(0, 'draft'), (2, 'step'), (0, 'draft'), (1, 'step'), (0, 'step')]
    # who starts at the top may come down
    assert leaps(tmp_path, 0, 1, 1, mode='per_step', start=2)[::2] == ('201', ['2', '20', '201'])
    assert leaps(tmp_path, 0, 2, mode='per_step', on_escalate='regenerate', start=1)[::2] == ('121', ['1', '10', '121'])

def test_a_choice_out_of_reach_is_one_clear_line(tmp_path):
    for script, kwargs, what in (((1, 0), {}, 'router coin: chose model 0; absorbing, it can go on with 1 to 2'),
                                 ((3,), {}, 'chose model 3'),
                                 ((-1,), dict(mode='per_step'), 'per_step, it can go on with 0 to 2')):
        with pytest.raises(ValueError) as e: leaps(tmp_path, *script, **kwargs)
        assert what in str(e.value) and '\n' not in str(e.value)

def test_a_choice_can_be_asynchronous_and_bill_its_own_calls(tmp_path):
    class Judge(Named):
        async def choose(self, states): return Named.choose(self, states), [Call(-1, 1, 50, 0, 'judge')]
    assert scripted(tmp_path, (1, 2), 3, Judge)[1] == [(0, 'step', 100, 10), (-1, 'judge', 50, 1),
                                                       (1, 'step', 110, 10), (-1, 'judge', 50, 1), (2, 'step', 120, 10)]

def test_rescoring_reads_the_step_with_the_start_model_once(tmp_path):
    path, calls, asked = scripted(tmp_path, (1, 0), mode='per_step', rescore=True)
    assert path == '010' and [c[:2] for c in calls] == [(0, 'step'), (1, 'step'), (0, 'score'), (0, 'step')]
    assert calls[2][3] == 0
    tree, problems = make_tree(tmp_path/'s.db', end=.1), toy_problems(6)
    router = Coin(mode='per_step', threshold=.6)
    router.rescore = True
    walks = walk(problems, router, tree)
    assert any(c.kind == 'score' for w in walks for c in w.calls)
    assert walk(problems, router, RoutingTree(None, tree.store, grade=tree.grade)) == walks
    seen = Script(script=(1,), mode='per_step', rescore=True)
    (w,) = walk(problems[:1], seen, tree)
    if len(seen.asked) > 1:                                               # another opinion of the same step
        read, step = seen.asked[1].steps[1], w.steps[1]
        assert read.prob != step.prob and (read.model, read.text, read.generated) == (1, step.text, step.generated)

def test_routers_walk_together_as_they_walk_alone(tmp_path, monkeypatch):
    "The same walks and the same edges, each drawn once; a problem's routers may differ, and few may be under way."
    import stepwise_routing.method.walks as rollouts
    class Reading(Coin): rescore = True
    problems = toy_problems(12)
    routers = [Reading(mode, e, salt=salt, threshold=x) for mode in ('absorbing', 'per_step')
               for e in ('append', 'regenerate') for salt in (0, 1) for x in (0., .3, .6)]
    wanted = [(r, problems[i % 3:]) for i, r in enumerate(routers)]
    alone, together = make_tree(tmp_path/'a.db'), make_tree(tmp_path/'b.db')
    walks = [walk(ps, r, alone) for r, ps in wanted]
    outcomes = walk_outcomes(wanted, together)
    for ws, o in zip(walks, outcomes):
        want = walk_outcome(ws, alone.specs)
        assert all((o[k] == want[k]).all() for k in want) and list(o) == list(want)
    assert edges(alone.store) == edges(together.store) and not together.pending
    assert together.drawn == len(together.store) > sum(b.steps_written for b in together.backends) # the rest: readings
    monkeypatch.setattr(rollouts, '_WALKS', 30)
    few = make_tree(tmp_path/'c.db')
    paths = walk_together([(p, routers) for p in problems], few, lambda router, w: w.path)
    assert [[ws[j].path for ws, (_, ps) in zip(walks, wanted) if len(ps) == 12] for j in range(12)] == [
        [path for (path, *_), (_, ps) in zip(row, wanted) if len(ps) == 12] for row in paths]

def test_a_router_can_be_asynchronous_and_bill_its_own_calls(tmp_path):
    class Judge(Coin):
        async def escalates(self, states):
            await asyncio.sleep(0)
            return np.zeros(len(states), bool), [Call(-1, 1, 50, 0, 'judge')]
    (w,) = walk(toy_problems(1), Judge(), make_tree(tmp_path/'s.db'))
    assert [c.kind for c in w.calls] == ['step', 'judge']*len(w.steps)

def test_bad_input_is_one_clear_line(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(2)
    for call, what in ((lambda: walk(problems, Coin(mode='absorb'), tree),
                        "unknown mode 'absorb' (did you mean 'absorbing'?)"),
                       (lambda: walk(problems, Coin(on_escalate='redo'), tree), "unknown on_escalate 'redo'"),
                       (lambda: walk(problems, Coin(start=2), tree), 'start 2 is none of the 2 models'),
                       (lambda: walk(toy_problems(1, benchmark='gsm8k'), Coin(), tree), 'is the store of toy'),
                       (lambda: RoutingTree(toy_backends(2, params=5), tree.store),
                        'settings.models[0].spec.params is'),
                       (lambda: outcome_table([], tree, 'test'), 'at least one problem'),
                       (lambda: collect_rollouts(problems, make_tree(tmp_path/'3.db', 3)), 'this tree has 3')):
        with pytest.raises(ValueError) as e: call()
        assert what in str(e.value) and '\n' not in str(e.value)
    for replay in (lambda t: outcome_table(problems, t, 'test'), lambda t: walk(problems, Coin(), t)):
        with pytest.raises(LookupError, match='does not hold step 0 of toy-0-0 by model 0'):
            replay(RoutingTree(None, tree.store))
    with pytest.raises(FileNotFoundError, match='run notebook 02a first'): OutcomeTable.load(tmp_path/'none.npz')

# ---- the outcome table
def first_escalation(router, table, problems):
    "Per problem, the first small step after which the router escalates, -1 where there is none."
    states = lambda p, T: [State(p, 0, (), '0'*(t + 1)) for t in range(T)]
    first = lambda p, T: next((t for t, s in enumerate(states(p, T)) if router.escalates([s])[0]), -1)
    return np.array([first(p, T) for p, T in zip(problems, table.n_steps)])

def agree(outcome, walks, specs):
    "Every Trajectory equals its row of an outcome, to the last bit."
    made = lambda w, m: sum(c.generated for c in w.calls if c.model == m)
    read = lambda w, m: sum(c.prompt - c.cached for c in w.calls if c.model == m)
    truth = dict(correct=[w.correct for w in walks], paper_flops=[generation_flops(w.calls, specs) for w in walks],
                 full_flops=[generation_flops(w.calls, specs, 'full') for w in walks],
                 steps=[len(w.steps) for w in walks],
                 large_steps=[w.path.count('1') for w in walks], small_tokens=[made(w, 0) for w in walks],
                 large_tokens=[made(w, 1) for w in walks],
                 small_prompt=[read(w, 0) for w in walks], large_prompt=[read(w, 1) for w in walks],
                 cents=[api_cost(w.calls, specs) for w in walks])
    for k, v in truth.items(): np.testing.assert_array_equal(outcome[k], v, k)
    np.testing.assert_allclose(outcome['small_cents'] + outcome['large_cents'], truth['cents'], rtol=1e-12)
    return {*truth, 'small_cents', 'large_cents'} == set(outcome)

@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(on_escalate=st.sampled_from(['append', 'regenerate']), threshold=st.floats(0, 1.1), salt=st.integers(0, 10**6),
       cut=st.sampled_from([0, .1, .5]),
       end=st.sampled_from([.05, .3, 1.]), empty=st.sampled_from([0, .5]), max_steps=st.sampled_from([1, 3, 30]),
       params=st.sampled_from([None, 1_543_714_304]),
       prices=st.sampled_from([(), (None, 'gpt-4.1-mini'), ('gpt-4o-mini', 'gpt-4.1-mini')]))
def test_table_and_walk_agree_exactly(tmp_path, on_escalate, threshold, salt, cut, end, empty, max_steps, params,
                                      prices):
    path, problems = tmp_path/'s.db', toy_problems(8, salt)
    path.unlink(missing_ok=True)
    tree = make_tree(path, max_steps=max_steps, cut=cut, end=end, empty=empty, params=params, prices=prices)
    router = Coin(on_escalate=on_escalate, salt=salt, threshold=threshold)
    live = walk(problems, router, tree)                        # draws what it needs itself
    collect_rollouts(problems, tree)                                      # and this the rest
    table = outcome_table(problems, RoutingTree(None, tree.store, max_steps=max_steps, grade=tree.grade), 'test')
    assert agree(table.outcome(first_escalation(router, table, problems), on_escalate), live, tree.specs)
    assert agree(table.large_only(), walk(problems, Coin(start=1), tree), tree.specs)
    assert agree(table.outcome(-1, on_escalate), walk(problems, router.at(0.), tree), tree.specs)
    for t in range(table.n_steps.max()):                                  # every column of every row
        at = np.minimum(t, table.n_steps)
        stop = Coin(on_escalate=on_escalate)
        stop.escalates = lambda states: [len(states[0].path) == t + 1]
        stop.table_escalates = lambda table: np.arange(table.obs.shape[1]) == t + np.zeros((len(table), 1))
        assert (escalation_times(stop, table) == at).all()
        assert agree(replay(stop, table), walk(problems, stop, tree), tree.specs)
        assert agree(table.outcome(at, on_escalate), walk(problems, stop, tree), tree.specs)
    tree.store.close()

def test_table_shapes_and_fill(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(30)
    new = collect_rollouts(problems, tree)
    assert new == len(tree.store) == tree.drawn and collect_rollouts(problems, tree) == 0
    table = outcome_table(problems, tree, 'train')
    n, S = len(problems), table.n_steps.max()
    beyond = np.arange(S + 1) > table.n_steps[:, None]
    assert table.obs.shape == (n, S, len(table.features)) and len(table) == n and table.split == 'train'
    assert table.benchmark == 'toy'
    assert (np.isnan(table.correct) == beyond).all() and np.isin(table.correct[~beyond], (0, 1)).all()
    for k in ('large_tokens', 'large_prompt', 'large_steps'):
        x = getattr(table, k)
        assert x.shape == (n, S + 1) and x.dtype.kind == 'i'
        assert ((x > 0) == (np.arange(S + 1) < table.n_steps[:, None])).all()
    for k in ('small_tokens', 'small_prompt'):
        assert (getattr(table, k)[beyond[:, 1:]] == 0).all() and getattr(table, k).shape == (n, S)
    assert (table.small_prompt[:, 0] > 0).all() and (table.small_prompt[:, 1:] == 0).all()
    assert (np.isnan(table.obs[..., 0]) == beyond[:, 1:]).all()
    for bad in (-2, S + 1):
        with pytest.raises(ValueError, match='-1 or T for never'): table.outcome(bad)
    with pytest.raises(ValueError, match='choose one of: append, regenerate'): table.outcome(0, 'redo')

def test_table_is_the_same_after_any_history(tmp_path):
    problems = toy_problems(15)
    def saved(name, draw):
        tree = make_tree(tmp_path/f'{name}.db')
        draw(tree)
        outcome_table(problems, tree, 'test').save(tmp_path/'out'/f'{name}.npz')
        return (tmp_path/'out'/f'{name}.npz').read_bytes()
    def in_pieces(tree):
        walk(problems[::-1], Coin(mode='per_step'), tree)
        for p in problems[:7]: asyncio.run(tree.run(p, '', 0))
        for p in problems[::-1]: collect_rollouts([p], tree)
    whole = saved('whole', lambda tree: collect_rollouts(problems, tree))
    assert whole == saved('pieces', in_pieces) and not list((tmp_path/'out').glob('*.part'))
    table = OutcomeTable.load(tmp_path/'out'/'whole.npz')
    table.save(tmp_path/'again.npz')
    assert (tmp_path/'again.npz').read_bytes() == whole
    with zipfile.ZipFile(tmp_path/'again.npz') as z:
        assert {i.date_time for i in z.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert (type(table.split), type(table.models), type(table.params[0])) == (str, tuple, float)
    assert table.features[0] == 'score_logit'

PRICED = (None, 'gpt-4.1-mini')
def test_cents_of_a_table_are_bills(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db', prices=('gpt-4o-mini', 'gpt-4.1-mini')), toy_problems(25)
    collect_rollouts(problems, tree)
    table = outcome_table(problems, tree, 'test')
    price = lambda prompt, hit, made, new, old, out: ((prompt - hit)*new + hit*old + made*out)/1e4
    for i, (p, T) in enumerate(zip(problems, table.n_steps)):
        small = tree.steps(p, '0'*T)
        want = [price(s.prompt, s.prompt//3, s.generated, .15, .075, .60) for s in small]   # a request a step
        np.testing.assert_allclose(table.small_cents[i], want + [0.]*(table.obs.shape[1] - T), rtol=1e-12)
        # one request for all it writes
        for t in range(T):
            rest = tree.steps(p, '0'*t + '1'*table.large_steps[i, t])[t:]
            assert table.large_cents[i, t] == pytest.approx(price(rest[0].prompt, rest[0].prompt//3,
                sum(s.generated for s in rest), .40, .10, 1.60), rel=1e-12)
        assert (table.large_cents[i, T:] == 0).all()
    np.testing.assert_allclose(table.large_only()['cents'], table.large_cents[:, 0])
    never, first = table.outcome(-1), table.outcome(0, 'regenerate')
    np.testing.assert_allclose(never['cents'], table.small_cents.sum(1))
    np.testing.assert_allclose(first['cents'], table.small_cents[:, 0] + table.large_cents[:, 0])
    assert (never['cents'] == never['small_cents']).all() and (never['large_cents'] == 0).all()

def test_cents_are_nothing_for_open_models_and_are_kept_in_the_file(tmp_path):
    for name, prices in (('open', ()), ('priced', PRICED)):
        tree, problems = make_tree(tmp_path/f'{name}.db', prices=prices), toy_problems(12)
        collect_rollouts(problems, tree)
        table = outcome_table(problems, tree, 'test')
        assert table.small_cents.shape == table.small_tokens.shape
        assert table.large_cents.shape == table.large_tokens.shape
        assert table.small_cents.dtype == table.large_cents.dtype == float and (table.small_cents == 0).all()
        assert ((table.large_cents > 0) == (table.large_tokens > 0)*bool(prices)).all()
        table.save(tmp_path/f'{name}.npz')
        back = OutcomeTable.load(tmp_path/f'{name}.npz')
        assert (back.small_cents == table.small_cents).all() and (back.large_cents == table.large_cents).all()
        for t in (-1, 0): np.testing.assert_array_equal(back.outcome(t)['cents'], table.outcome(t)['cents'])

def test_a_table_without_cents_is_one_clear_line(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(3)
    collect_rollouts(problems, tree)
    outcome_table(problems, tree, 'test').save(tmp_path/'new.npz')
    for lacking in ('small_cents', 'large_cents'):
        with zipfile.ZipFile(tmp_path/'new.npz') as new, zipfile.ZipFile(tmp_path/'old.npz', 'w') as old:
            for i in new.infolist():
                if i.filename != f'{lacking}.npy': old.writestr(i, new.read(i))
        with pytest.raises(ValueError,
                           match=rf'old.npz has no {lacking}: another version wrote it; run notebook 02a again') as e:
            OutcomeTable.load(tmp_path/'old.npz')
        assert '\n' not in str(e.value)

def test_a_bill_after_regenerate_has_no_more_in_the_cache_than_its_prompt():
    "A model that has read a longer path, since written anew, finds its whole prompt in the cache."
    step, seen = Step('x', 1, 'step', (1, 2), (1, 1), (.5, .5), (1, 1), None, prompt=10, generated=2), {1: 50, 0: 4}
    assert bill_call([step, step], seen) == Call(1, 4, 10, 10) and seen == {1: 14, 0: 4}
    assert bill_call([replace(step, model=0)], seen) == Call(0, 2, 10, 4)

# ---- side by side
def toy_run(folder, workers, **n):
    sizes = {f'{s}.n_{split}': n.get(s, 2) for s in ('open', 'api') for split in ('train', 'calibration', 'test')}
    models = {'api.models': ['micro-small', 'micro-large'], 'models.workers': workers}
    return Run('toy', changed(Config(), sizes | models), folder/'run', folder/'store')

def jobs_of(s, benchmarks): return [(s.name, b, os.getpid(), len(benchmarks)) for b in benchmarks]

def stumble(s, benchmarks):
    if benchmarks == ['micro-math']: raise PermissionError('micro-math: no way in')
    return benchmarks

def test_benchmarks_are_done_side_by_side(tmp_path):
    here, there = (side_by_side(toy_run(tmp_path, n), jobs_of, 'jobs') for n in (1, 2))
    assert [x[:2] for x in here] == [x[:2] for x in there] and {x[2] for x in here} == {os.getpid()}
    assert os.getpid() not in {x[2] for x in there}
    assert [x[3] for x in there] == [1, 1, 1, 3, 3, 3], 'the calls of the API setting share a ledger'
    graded = replace(toy_run(tmp_path, 2), config=changed(toy_run(tmp_path, 2).config, {'data.grader': 'xverify:x'}))
    assert {x[2] for x in side_by_side(graded, jobs_of, 'jobs')} == {os.getpid()}, 'one server grades'

def test_an_error_in_a_worker_is_the_same_line_here(tmp_path):
    for n in (2, 1):
        run = toy_run(tmp_path, n)
        if n == 1: run = replace(run, config=changed(run.config, {'data.benchmarks': ['micro-math']}))
        with pytest.raises(PermissionError) as e: side_by_side(run, stumble, 'jobs')
        assert str(e.value) == 'micro-math: no way in'

def doubtful(s, benchmarks): return [b == 'micro-math' and is_equiv('3', '10^{10^{10^{10}}}') for b in benchmarks]

@pytest.mark.slow
def test_what_grading_gave_up_comes_back_from_every_process(tmp_path):
    for n in (1, 2):
        run = toy_run(tmp_path/str(n), n)
        assert not any(side_by_side(run, doubtful, 'outcome tables'))
        side_by_side(run, jobs_of, 'walks') # gives up nothing
        assert [kept_given_up(s) for s in run.settings] == [{('3', '10^{10^{10^{10}}}')}]*2
        assert [f.name for f in (run.folder/'grading').iterdir()] == ['given-up-outcome tables.json']
        side_by_side(run, jobs_of, 'outcome tables') # again, and nothing is given up
        assert [kept_given_up(s) for s in run.settings] == [set()]*2

def toy_draw(s, benchmarks): return [draw_edges(s, b, toy_backends()) for b in benchmarks]

def test_draws_do_not_depend_on_the_number_of_workers(tmp_path):
    one, two = (toy_run(tmp_path/str(n), n) for n in (1, 2))
    drawn = side_by_side(one, toy_draw, 'draws')
    assert drawn == side_by_side(two, toy_draw, 'draws') and all(d['drawn_now'] for d in drawn)
    for s, t in zip(one.settings, two.settings):
        for b in s.benchmarks:
            with RolloutStore(s.files.rollouts(b)) as a, RolloutStore(t.files.rollouts(b)) as c:
                assert len(a) and edges(a) == edges(c) and a.settings == c.settings

SLEEPERS = '''
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts what runs in its background without one
sys.path[:0] = sys.argv[2:]
from test_rollouts import sleeper, toy_run
from stepwise_routing.rollouts import side_by_side
if __name__ == '__main__': side_by_side(toy_run(Path(sys.argv[1]), 2), sleeper, 'jobs')
'''

def sleeper(s, benchmarks):
    mark = s.run.folder.parent/f'{os.getpid()}.pid'
    mark.write_text('')
    try: time.sleep(600)
    finally:
        time.sleep(1) # a paid call under way
        mark.with_suffix('.paid').write_text('')

@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_no_worker_outlives_its_parent_by_more_than_the_calls_under_way(tmp_path, end):
    import psutil
    (tmp_path/'go.py').write_text(SLEEPERS)
    process = subprocess.Popen([sys.executable, tmp_path/'go.py', tmp_path, Path(__file__).parent, *sys.path],
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    def pids(): return [int(p.stem) for p in tmp_path.glob('*.pid')]
    while len(pids()) < 2 and process.poll() is None: time.sleep(.1)
    workers = [psutil.Process(pid) for pid in pids()]
    time.sleep(2) # until it waits for them: Python may lose an interrupt in a callback
    (os.killpg if end == signal.SIGINT else os.kill)(process.pid, end) # Jupyter interrupts the group
    errors = process.communicate(timeout=60)[1]
    assert len(workers) == 2 and ('KeyboardInterrupt' in errors or end == signal.SIGKILL)
    assert psutil.wait_procs(workers, 60)[1] == []
    assert {p.stem for p in tmp_path.glob('*.paid')} == {str(w.pid) for w in workers}

def test_no_torch_is_needed():
    code = ('import sys; import stepwise_routing.rollouts; '
            'print(sorted({"torch", "transformers", "pandas", "matplotlib", "sklearn"} & set(sys.modules)))')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'

def test_table_and_walk_agree_on_the_micro_models(tmp_path):
    from stepwise_routing.data.benchmarks import load_problems
    from stepwise_routing.base.tools import run_async
    from stepwise_routing.models.hub import load_micro, micro_path
    backends, problems = [load_micro('small'), load_micro('large')], load_problems('micro-math', 'test', 6)
    trees = [RoutingTree(backends, RolloutStore(tmp_path/f'{i}.db', tree_settings('micro-math', backends)))
             for i in range(2)]
    routers = [Coin(on_escalate=e, threshold=x) for e in ('append', 'regenerate') for x in (.3, .7)]
    lives = [walk(problems, router, trees[0]) for router in routers]
    collect_rollouts(problems[::-1], trees[1])             # the same draws, in other batches, into another store
    table = outcome_table(problems, RoutingTree(None, trees[1].store), 'test')
    for router, live in zip(routers, lives):
        outcome = table.outcome(first_escalation(router, table, problems), router.on_escalate)
        agree(outcome, live, trees[0].specs)
        assert walk(problems, router, RoutingTree(None, trees[1].store)) == live
    for p in problems[:3]:                                                # one call, or step by step
        chain = trees[1].steps(p, '1'*int(table.large_steps[problems.index(p), 0]))
        assert tuple(run_async(edge(trees[0], p, '1'*i, 1)) for i in range(len(chain))) == chain
