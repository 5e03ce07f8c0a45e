"""Walks: against a second implementation, and by hand."""
import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from toy import ToyBackend, toy_problems
from walking import Coin, Script, edge, edges, make_tree

from stepwise_routing.base.records import Call, Step, extract_boxed, generation_flops
from stepwise_routing.method.outcomes import walk_outcome, walk_outcomes
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.method.walks import (
    LargeOnly,
    SmallOnly,
    State,
    bill_call,
    walk,
    walk_family,
    walk_one,
    walk_together,
)


def reference_walk(problem, router, tree):
    "The semantics again, in another form: a list of (who, step, kept) events, then a bill by definition."
    chain, events = [], []
    draw = lambda m: asyncio.run(edge(tree, problem, ''.join(str(s.model) for s in chain), m))
    over = lambda: bool(chain) and (chain[-1].final or len(chain) == tree.max_steps)
    state = lambda y: State(problem, tree.sample, (*chain, y), ''.join(str(s.model) for s in (*chain, y)),
                            tree.n_models)
    top, writer = tree.n_models - 1, router.start
    def goes_on(y):
        if router.escalates([state(y)])[0]: return min(y.model + 1, top)
        return y.model if router.mode == 'absorbing' else router.start
    while not over():
        y = draw(writer)
        redone = False
        while True:
            last = y.final or len(chain) == tree.max_steps - 1
            above = y.model < top
            silent = not above and (last or router.mode == 'absorbing') or router.start == top
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
@given(k=st.integers(2, 4), mode=st.sampled_from(['absorbing', 'per_step']),
       on_escalate=st.sampled_from(['append', 'regenerate']),
       threshold=st.sampled_from([0., .2, .5, .8, 1.1]), salt=st.integers(0, 99), cut=st.sampled_from([0, .3]),
       end=st.sampled_from([.1, .5, 1.]),
       empty=st.sampled_from([0, .5]), max_steps=st.sampled_from([1, 2, 5, 30]), data=st.data())
def test_walks_of_any_kind(tmp_path, k, mode, on_escalate, threshold, salt, cut, end, empty, max_steps, data):
    start = data.draw(st.integers(0, k - 1))
    path = tmp_path/'s.db'
    path.unlink(missing_ok=True)
    tree = make_tree(path, k, max_steps=max_steps, cut=cut, end=end, empty=empty)
    router, problems = Coin(mode, on_escalate, start, salt, threshold=threshold), toy_problems(6, salt)
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
            return Step(text, self.index, 'step', (0,), (len(text),), (.5,), (1.,), 10, 100 + 10*n)
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

def test_per_step_regenerate(tmp_path):
    path, calls, asked = scripted(tmp_path, (0, 1, 0), mode='per_step', on_escalate='regenerate')
    assert (path, asked) == ('010', ['0', '00', '010'])
    assert calls == [(0, 'step', 100, 10), (0, 'draft', 0, 10), (1, 'step', 110, 10), (0, 'step', 10, 10)]

def test_routers_walk_together_as_they_walk_alone(tmp_path, monkeypatch):
    "The same walks and the same edges, each drawn once; a problem's routers may differ, and few may be under way."
    import stepwise_routing.method.walks as rollouts
    problems = toy_problems(12)
    routers = [Coin(mode, e, salt=salt, threshold=x) for mode in ('absorbing', 'per_step')
               for e in ('append', 'regenerate') for salt in (0, 1) for x in (0., .3, .6)]
    wanted = [(r, problems[i % 3:]) for i, r in enumerate(routers)]
    alone, together = make_tree(tmp_path/'a.db'), make_tree(tmp_path/'b.db')
    walks = [walk(ps, r, alone) for r, ps in wanted]
    outcomes = walk_outcomes(wanted, together)
    for ws, o in zip(walks, outcomes):
        want = walk_outcome(ws, alone.specs)
        assert all((o[k] == want[k]).all() for k in want) and list(o) == list(want)
    assert edges(alone.store) == edges(together.store) and not together.pending
    assert together.drawn == len(together.store)
    monkeypatch.setattr(rollouts, '_MAX_WALKS', 30)
    few = make_tree(tmp_path/'c.db')
    rows = walk_together(wanted, few, lambda router, w: w.path)
    assert [[(w.path, w.answer, w.correct) for w in ws] for ws in walks] == rows

def test_a_router_can_be_asynchronous_and_bill_its_own_calls(tmp_path):
    class Judge(Coin):
        async def escalates(self, states):
            await asyncio.sleep(0)
            return np.zeros(len(states), bool), [Call(-1, 1, 50, 0, 'judge')]
    (w,) = walk(toy_problems(1), Judge(), make_tree(tmp_path/'s.db'))
    assert [c.kind for c in w.calls] == ['step', 'judge']*len(w.steps)

def test_each_model_alone(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db', k=3), toy_problems(8)
    for router, model in ((SmallOnly(), '0'), (LargeOnly(), '1'), (LargeOnly(start=2), '2')):
        for p, w in zip(problems, walk(problems, router, tree)):
            if model != '1': assert set(w.path) == {model} and w.steps == asyncio.run(tree.run(p, '', int(model)))
            assert w.path[0] == model and router.at(.3) is router

@pytest.mark.parametrize('mode', ['absorbing', 'per_step'])
@pytest.mark.parametrize('on_escalate', ['append', 'regenerate'])
def test_a_family_walks_as_its_members_walk_alone(tmp_path, mode, on_escalate):
    tree, thresholds = make_tree(tmp_path/'s.db', end=.1), [.9, .1, .5, .3, 0., .7, .5]
    family = [Coin(mode, on_escalate, threshold=x) for x in thresholds]
    for p in toy_problems(8):
        walks = asyncio.run(walk_family(p, family, tree))
        assert sorted(i for _, positions in walks for i in positions) == list(range(len(family)))
        for w, positions in walks:
            for i in positions:
                alone = asyncio.run(walk_one(p, family[i], tree))
                assert (w.steps, w.calls) == (alone.steps, alone.calls)
        assert len(walks) == len({w.path + str(w.calls) for w, _ in walks}), 'no walk twice'

def test_a_bill_after_regenerate_has_no_more_in_the_cache_than_its_prompt():
    "A model that has read a longer path, since written anew, finds its whole prompt in the cache."
    step, seen = Step('x', 1, 'step', (1, 2), (1, 1), (.5, .5), None, prompt=10, generated=2), {1: 50, 0: 4}
    assert bill_call([step, step], seen) == Call(1, 4, 10, 10) and seen == {1: 14, 0: 4}
    assert bill_call([replace(step, model=0)], seen) == Call(0, 2, 10, 4)
