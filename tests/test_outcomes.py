"""Outcome tables: against walks to the last bit, by hand, and after any history of the store."""
import asyncio
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from toy import toy_problems
from walking import Coin, edge, make_tree

from stepwise_routing.base.records import api_cost, generation_flops
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.base.tools import run_async
from stepwise_routing.method.outcomes import (
    OutcomeTable,
    cheapest_within,
    escalation_times,
    first_escalation,
    keeps_accuracy,
    outcome_table,
    replay,
    summary,
    toy_table,
)
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import State, walk


def escalates_first(router, table, problems):
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
    assert agree(table.outcome(escalates_first(router, table, problems), on_escalate), live, tree.specs)
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

def test_a_problem_has_a_row_a_draw_and_a_column_a_redraw(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(2)
    collect_rollouts(problems, tree, samples=2, redraws=3)
    table = outcome_table(problems, RoutingTree(None, tree.store, grade=tree.grade), 'test', samples=2, redraws=3)
    assert table.problem_id.tolist() == [p.id for p in problems for _ in range(2)] and table.sample.tolist() == [0, 1]*2
    assert table.large_redraws_right.shape == (4, 3)

def test_a_summary_is_of_all_rows_and_says_how_sure_it_is():
    table = toy_table()
    told = summary(table)
    assert told['n'] == 200 and told['small, % right'] == '53.5 [46.6, 60.3]'
    assert told['edges'] == table.n_steps.sum() + table.large_steps.sum()

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

def test_a_table_of_another_version_is_one_clear_line(tmp_path):
    toy_table(3).save(tmp_path/'new.npz')
    with np.load(tmp_path/'new.npz') as new: kept = {name: new[name] for name in new if name != 'large_cents'}
    np.savez(tmp_path/'old.npz', **kept)
    with pytest.raises(ValueError, match='old.npz has no large_cents: another version wrote it; collect again'):
        OutcomeTable.load(tmp_path/'old.npz')

def test_a_missing_table_or_draw_is_one_clear_line(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(2)
    with pytest.raises(ValueError, match='^an outcome table needs at least one problem$'):
        outcome_table([], tree, 'test')
    with pytest.raises(LookupError, match='does not hold step 0 of toy-0-0 by model 0'):
        outcome_table(problems, RoutingTree(None, tree.store), 'test')
    with pytest.raises(FileNotFoundError, match='run notebook 02b first'): OutcomeTable.load(tmp_path/'none.npz')

# ---- the rules of choice
numbers = st.integers(0, 6).map(lambda i: i/4)

@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6), st.data())
def test_the_first_escalation_is_the_first_hit_inside_the_chain(hits, data):
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(hits), max_size=len(hits)))
    inside = [[t < T for t in range(4)] for T in lengths]
    want = [next((t for t in range(T) if row[t]), 4) for row, T in zip(hits, lengths)]
    assert first_escalation(hits, inside).tolist() == want

@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), numbers, st.sampled_from([0, .02, .25]))
def test_the_cheapest_setting_that_keeps_the_accuracy_is_taken(settings, large, alpha):
    accuracy, cost = zip(*settings)
    kept = [i for i, x in enumerate(accuracy) if x > large - alpha - 1e-9]
    assert keeps_accuracy(accuracy, large, alpha).tolist() == [i in kept for i in range(len(settings))]
    if kept: assert cheapest_within(accuracy, cost, large, alpha) == min(kept, key=lambda i: (cost[i], i))

def test_table_and_walk_agree_on_the_micro_models(tmp_path):
    from stepwise_routing.data.benchmarks import load_problems
    from stepwise_routing.models.hub import load_micro
    backends, problems = [load_micro('small'), load_micro('large')], load_problems('micro-math', 'test', 6)
    trees = [RoutingTree(backends, RolloutStore(tmp_path/f'{i}.db', tree_settings('micro-math', backends)))
             for i in range(2)]
    routers = [Coin(on_escalate=e, threshold=x) for e in ('append', 'regenerate') for x in (.3, .7)]
    lives = [walk(problems, router, trees[0]) for router in routers]
    collect_rollouts(problems[::-1], trees[1])             # the same draws, in other batches, into another store
    table = outcome_table(problems, RoutingTree(None, trees[1].store), 'test')
    for router, live in zip(routers, lives):
        outcome = table.outcome(escalates_first(router, table, problems), router.on_escalate)
        agree(outcome, live, trees[0].specs)
        assert walk(problems, router, RoutingTree(None, trees[1].store)) == live
    for p in problems[:3]:                                                # one call, or step by step
        chain = trees[1].steps(p, '1'*int(table.large_steps[problems.index(p), 0]))
        assert tuple(run_async(edge(trees[0], p, '1'*i, 1)) for i in range(len(chain))) == chain
