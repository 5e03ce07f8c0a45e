"""Routers, frontiers, STEER's mixtures, the threshold grid and trained policies, against brute force, simulation and
independent formulas."""
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from toy_runs import Coin, toy_run

from stepwise_routing.method import comparison
from stepwise_routing.method.bounds import (
    OracleRouter,
    cost_matched,
    oracle_frontier,
    oracle_times,
    random_frontier,
    random_outcome,
)
from stepwise_routing.method.certain import certain_setting
from stepwise_routing.method.comparison import (
    CLASSES,
    COLUMNS,
    GRID_COLUMNS,
    LARGE,
    RECEIPT_COLUMNS,
    THRESHOLDS,
    Case,
    Walker,
    ONLINE,
    at_online,
    at_sweep,
    at_thresholds,
    grid_rows,
    grid_search,
    method_rows,
    replay_case,
    replay_methods,
    seed_rows,
    walk_methods,
)
from stepwise_routing.method.outcomes import (
    cheapest_within,
    check_problems,
    escalation_times,
    replay,
    take_rows,
    toy_table,
    walk_outcome,
)
from stepwise_routing.method.routers import (
    GlimpRouter,
    Mixture,
    RandomRouter,
    SavedPolicy,
    ScoreRouter,
    chain_thresholds,
    fit_mixture,
    fit_steer,
    fit_trim,
    glimpse,
    score_thresholds,
)
from stepwise_routing.method.walks import LargeOnly, SmallOnly
from stepwise_routing.run.config import Config, Run
from stepwise_routing.run.stages import load_policies, open_case, save_case

READINGS, UNITS = ('append', 'regenerate'), ('paper_flops', 'full_flops', 'cents')

# ---- replay ----
def slow_time(scores, T, threshold):
    for t in range(T):
        if scores[t] < threshold: return t
    return T

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('threshold', [0., .1, .5, .95, 1.])
def test_replay_is_the_first_crossing(on_escalate, threshold):
    table, router = toy_table(60), RandomRouter(on_escalate=on_escalate, threshold=threshold)
    scores = router.table_score(table)
    t = np.array([slow_time(s, T, threshold) for s, T in zip(scores, table.n_steps)])
    assert (escalation_times(router, table) == t).all()
    got, want = replay(router, table), table.outcome(t, on_escalate)
    assert all((got[k] == want[k]).all() for k in want)

def test_bare_scores_are_the_observation():
    table, r = toy_table(300, 'calibration'), ScoreRouter('score_logit', 'regenerate')
    assert np.array_equal(r.table_score(table), table.obs[..., 0], equal_nan=True)
    x = score_thresholds(r, table, 10)
    assert len(x) == 11 and (np.diff(x) > 0).all()
    share = [(escalation_times(r.at(t), table) < table.n_steps).mean() for t in x]
    assert np.allclose(share, np.arange(11)/10, atol=1.5/300), 'the grid is even in the chains'
    with pytest.raises(ValueError, match='was handed the test split'): score_thresholds(r, toy_table(20))

def test_a_glimpse_is_of_the_next_step_and_costs_a_token():
    table, r = toy_table(80), np.random.default_rng(0)
    entropy = np.where(table.inside, r.random(table.inside.shape), np.nan)
    ahead = replace(table, obs=np.dstack([table.obs, entropy]), features=(*table.features, 'first_entropy'))
    times = np.array([next((t for t in range(T - 1) if e[t + 1] > .7), T) for e, T in zip(entropy, table.n_steps)])
    got, want = glimpse(GlimpRouter(-.7), ahead), table.outcome(times)
    gone = times < table.n_steps
    assert 0 < gone.mean() < 1
    for k in want:
        extra = {'small_tokens': 1, 'paper_flops': 2*table.params[0], 'full_flops': 2*table.params[0]}.get(k, 0)
        assert (got[k] == want[k] + extra*gone).all(), k

# ---- frontiers ----
def tiny(seed, n=4):
    table = toy_table(n, seed=seed)
    r = np.random.default_rng(seed) # not the usual order of costs
    return replace(table, large_tokens=table.large_tokens*r.integers(1, 4, table.large_tokens.shape)//2)

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('seed', range(6))
def test_oracle_frontier_is_brute_force(on_escalate, seed):
    table = tiny(seed)
    best = {}
    for t in itertools.product(*(range(T + 1) for T in table.n_steps)):
        o = table.outcome(np.array(t), on_escalate)
        k = int(o['correct'].sum())
        best[k] = min(best.get(k, np.inf), o['paper_flops'].mean())
    least = {k: min(v for j, v in best.items() if j >= k) for k in best}
    frontier = oracle_frontier(table, on_escalate)
    assert np.isclose(frontier['cost'][0], min(best.values()))
    for a, c in zip(frontier['accuracy'], frontier['cost']): assert np.isclose(least[round(a*len(table))], c)
    assert round(frontier['accuracy'][-1]*len(table)) == max(best)

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('seed', range(6))
def test_oracle_is_the_cheapest_right_time(on_escalate, seed):
    table = tiny(seed, 12)
    got = replay(OracleRouter(oracle_times(table, on_escalate), on_escalate), table)
    for i, T in enumerate(table.n_steps):
        every = [{k: v[i] for k, v in table.outcome(np.minimum(t, table.n_steps), on_escalate).items()}
                 for t in range(T + 1)]
        right = [o['paper_flops'] for o in every if o['correct'] == 1]
        assert got['correct'][i] == bool(right)
        assert got['paper_flops'][i] == (min(right) if right else every[T]['paper_flops'])

@pytest.mark.parametrize('on_escalate', READINGS)
def test_random_frontier_is_what_coins_come_to(on_escalate):
    table, r, p = toy_table(150), np.random.default_rng(0), np.array([0., .1, .35, .8, 1.])
    exact = random_frontier(table, on_escalate, p)
    for i, hazard in enumerate(p):
        draws = []
        for _ in range(400):
            coin = r.random(table.obs.shape[:2]) < hazard
            coin &= np.arange(coin.shape[1]) < table.n_steps[:, None]
            o = table.outcome(np.where(coin.any(1), coin.argmax(1), table.n_steps), on_escalate)
            draws.append((o['correct'].mean(), o['paper_flops'].mean()))
        mean, error = np.mean(draws, 0), np.std(draws, 0)/np.sqrt(400)
        assert abs(mean[0] - exact['accuracy'][i]) <= 4*error[0] + 1e-12
        assert abs(mean[1] - exact['cost'][i]) <= 4*error[1] + 1.

@pytest.mark.parametrize('on_escalate', READINGS)
def test_frontiers_of_a_resample_are_those_of_its_problems(on_escalate):
    "Weights count problems as often as a table that repeats them."
    table, r = toy_table(40), np.random.default_rng(1)
    rows = r.integers(0, 40, (3, 40))
    weights = np.array([np.bincount(x, minlength=40)/40 for x in rows])
    for frontier in (random_frontier, oracle_frontier):
        got, own = frontier(table, on_escalate, weights=weights), frontier(table, on_escalate)
        even = frontier(table, on_escalate, weights=np.ones((1, 40))/40)
        assert all(np.allclose(even[k], own[k]) for k in ('cost', 'accuracy'))
        for i, x in enumerate(rows):
            want = frontier(take_rows(table, x), on_escalate)
            at = np.linspace(want['cost'][0], want['cost'][-1], 50)
            lines = [np.interp(at, np.maximum.accumulate(f['cost']), f['accuracy'])
                     for f in (want, {k: v[i] for k, v in got.items()})]
            assert np.allclose(*lines, atol=1e-9)

@given(share=st.floats(0, 1), unit=st.sampled_from(UNITS))
@settings(max_examples=50, deadline=None)
def test_cost_matched_costs_what_was_asked(share, unit):
    table = toy_table(60)
    low, high = (random_outcome(table, p)[unit].mean() for p in (0., 1.))
    cost = low + share*(high - low)
    assert np.isclose(random_outcome(table, cost_matched(table, cost, unit=unit))[unit].mean(), cost, rtol=1e-9)

# ---- STEER ----
mixtures = st.builds(lambda w, m, gap, a, b: Mixture((w, 1 - w), (m, m + gap), (a, b)), st.floats(.05, .95),
                     st.floats(-50, 50), st.floats(.01, 30),
                     st.floats(.05, 20), st.floats(.05, 20))

@given(mixtures, st.lists(st.floats(-200, 200), min_size=2, max_size=40))
@settings(max_examples=300, deadline=None)
def test_posterior_is_a_monotone_probability(m, scores):
    p = m.posterior(np.sort(scores))
    assert ((0 <= p) & (p <= 1)).all() and (np.diff(p) >= -1e-12).all()

@given(mixtures, st.floats(-60, 90))
@settings(max_examples=200, deadline=None)
def test_posterior_is_bayes_rule(m, s):
    from scipy.stats import norm
    density = [w*norm.pdf(s, a, b) for w, a, b in zip(m.weight, m.mean, m.std)]
    assume(sum(density) > 1e-250)
    assert np.isclose(m.posterior(s, fold=False), density[1]/sum(density), rtol=1e-6, atol=1e-9)

def em(s, m, steps=3000):
    "Expectation-maximisation for two normals, written out."
    w, sd = np.array([.5, .5]), np.array([s.std(), s.std()])
    for _ in range(steps):
        d = w*np.exp(-((s[:, None] - m)/sd)**2/2)/sd
        r = d/d.sum(1, keepdims=True)
        n = r.sum(0)
        w, m = n/len(s), (r*s[:, None]).sum(0)/n
        sd = np.sqrt((r*(s[:, None] - m)**2).sum(0)/n)
    return w, m, sd

def test_fit_agrees_with_em_written_out():
    r = np.random.default_rng(1)
    s = np.r_[r.normal(12, 1.5, 300), r.normal(19, 2.5, 500)]
    got, (w, m, sd) = fit_mixture(s), em(s, np.array([10., 20.]))
    assert np.allclose(got.mean, m, atol=.02) and np.allclose(got.std, sd, atol=.02)
    assert np.allclose(got.weight, w, atol=.01)

def test_degenerate_fits_fall_back_on_the_pooled_one():
    table = toy_table(300, 'train')
    obs = table.obs.copy()
    index = np.arange(obs.shape[1])
    known = ~np.isnan(obs[:, :, 0])
    obs[:, 1, 0][known[:, 1]] = np.where(np.arange(known[:, 1].sum()) % 4, 20., 15.) # two spikes
    obs[:, 2, 0][known[:, 2]] = 18.                                                   # one value
    steer = fit_steer(replace(table, obs=obs))
    few = (known.sum(0) < 50)
    assert steer.mixtures[1] is None and steer.mixtures[2] is None and steer.mixtures[0] is not None
    assert all(steer.mixtures[j] is None for j in index[few]) and steer.mixture(1) is steer.pooled
    assert steer.mixture(99) is steer.pooled

def test_steer_table_and_states_give_the_same_scores():
    from stepwise_routing.base.records import Step
    table, steer = toy_table(30), fit_steer(toy_table(300, 'train'))
    step = lambda x: Step('1', 0, 'step', ids=(1,), ends=(1,), max_logit=(float(x),), generated=1)
    state_of = lambda steps: SimpleNamespace(steps=steps, problem=SimpleNamespace(benchmark='toy'))
    for i in range(30):
        chain = tuple(step(x) for x in table.obs[i, :table.n_steps[i], 0])
        scores = steer.score([state_of(chain[:t + 1]) for t in range(len(chain))])
        assert np.allclose(scores, steer.table_score(table)[i, :len(chain)], rtol=0, atol=0)
    with pytest.raises(ValueError, match='raw logits'):
        steer.score([state_of((replace(step(1), max_logit=None),))])

# ---- the threshold ----
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=11), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_choice_is_the_cheapest_that_is_good_enough(points, large):
    accuracy, cost, alpha = [a/20 for a, _ in points] + [large/20], [c for _, c in points] + [5], .1
    i = cheapest_within(accuracy, cost, accuracy[-1], alpha)
    good = [j for j, a in enumerate([*(a for a, _ in points), large]) if a >= large - 2]
    assert i in good and cost[i] == min(cost[j] for j in good)

class Poison:
    "A test table: any look at it fails."
    split = 'test'
    benchmark = 'toy'
    def __getattr__(self, name): raise AssertionError(f'the test split was read: {name}')

def test_nothing_is_chosen_or_fitted_on_test():
    steer = fit_steer(toy_table(200, 'train'))
    with pytest.raises(ValueError, match='choosing a threshold on toy was handed the test split'):
        grid_search(steer, Poison())
    with pytest.raises(ValueError, match='fitting STEER on toy was handed the test split'): fit_steer(Poison())

@pytest.mark.parametrize('unit', UNITS)
def test_grid_search_reports_the_whole_grid(unit):
    table, steer = toy_table(200, 'calibration'), fit_steer(toy_table(200, 'train'))
    grid = grid_search(steer, table, cost=unit)
    routers = [steer.at(x) for x in THRESHOLDS] + [LargeOnly()]
    for r, a, c in zip(routers, grid.accuracy, grid.cost):
        o = replay(r, table)
        assert (a, c) == (o['correct'].mean(), o[unit].mean())
    assert grid.thresholds == (*THRESHOLDS, LARGE)
    rows = [dict(zip(GRID_COLUMNS, r)) for r in grid_rows([grid])]
    assert [(r['threshold'], r['accuracy'], r['cost'], r['unit']) for r in rows] == [(x, a, c, unit) for x, a,
        c in zip(grid.thresholds, grid.accuracy, grid.cost)]
    assert [r['chosen'] for r in rows] == [int(i == grid.chosen) for i in range(12)]
    assert GRID_COLUMNS[-4:] == ('accuracy', 'cost', 'chosen', 'unit')
    assert grid.chosen == cheapest_within(grid.accuracy, grid.cost, grid.large_accuracy, .02) and grid.met
    assert grid.large_accuracy == table.correct[:, 0].mean()
    assert (grid.n, grid.benchmark, grid.method) == (200, 'toy', 'STEER (rest)')
    assert grid.order == tuple(sorted(THRESHOLDS, reverse=True)), 'a high threshold hands over early, so it is safe'

# ---- walks ----
@pytest.fixture(scope='module')
def world(tmp_path_factory):
    "Three splits of toy problems, their outcome tables and the tree they came from."
    from toy import toy_backends, toy_problems

    from stepwise_routing.base.store import RolloutStore, tree_settings
    from stepwise_routing.method.outcomes import outcome_table
    from stepwise_routing.method.tree import RoutingTree, collect_rollouts
    problems, backends = {s: toy_problems(40, i) for i, s in enumerate(('train', 'calibration',
        'test'))}, toy_backends(end=.15)
    with RolloutStore(tmp_path_factory.mktemp('store')/'toy.jsonl', tree_settings('toy', backends)) as store:
        tree = RoutingTree(backends, store)
        collect_rollouts([p for ps in problems.values() for p in ps], tree)
        yield problems, {s: outcome_table(p, tree, s) for s, p in problems.items()}, tree

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('threshold', [0., .3, .7, 1.])
def test_walks_and_replays_agree_exactly(world, on_escalate, threshold):
    from stepwise_routing.method.walks import walk
    problems, tables, tree = world
    table = tables['test']
    routers = (SmallOnly(), LargeOnly(), RandomRouter(0, on_escalate).at(threshold),
               fit_steer(tables['train'], on_escalate=on_escalate).at(threshold),
               ScoreRouter('score_prob', on_escalate, threshold))
    for router in routers:
        got = walk_outcome(walk(problems['test'], router, tree), tree.specs)
        want = replay(router, table)
        for k in got: assert (got[k] == want[k]).all(), (router.name, k)

def first_rows(tables, problems): return {s: take_rows(tables[s], slice(len(ps))) for s, ps in problems.items()}

def test_thresholds_are_chosen_on_calibration_and_reported_on_test(world):
    problems, tables, tree = world
    few = dict(problems, calibration=problems['calibration'][:20])
    part, steer, run = first_rows(tables, few), RandomRouter(mode='per_step'), Walker(few, tree)
    grid = grid_search(steer, part['calibration'], run=run)
    rows = method_rows(steer, part['test'], .5, run, ())
    assert (grid.n, grid.method, len(grid.thresholds)) == (20, 'Random', 12)
    assert {r[3] for r in rows} == {.5} and [r[5] for r in rows] == [p.id for p in problems['test']]
    every = method_rows(steer, part['test'], .5, run)
    assert len(every) == 11*40 and [r for r in every if r[4]] == rows
    (large,) = {r[3:5] for r in method_rows(steer, part['test'], LARGE, run, ())}
    assert large == (LARGE, 1) and len(method_rows(steer, part['test'], LARGE, run)) == 12*40

def test_walks_ahead_are_the_walks_that_are_asked_for(world):
    problems, tables, tree = world
    few = {split: ps[:6] for split, ps in problems.items()}
    part, routers = first_rows(tables, few), at_thresholds(RandomRouter(mode='per_step'))
    run, alone = Walker(few, tree), Walker(few, tree)
    run.walk_together((r, split) for split in few for each in routers.values() for r in each)
    assert len(run.done) == 3*len(THRESHOLDS)
    assert grid_search(routers, part['calibration'], run=run) == grid_search(routers, part['calibration'], run=alone)
    assert len(run.done) == 33 and len(alone.done) == 11
    assert method_rows(routers, part['test'], .5, run) == method_rows(routers, part['test'], .5, alone)

@pytest.mark.parametrize('curves', [False, True])
def test_walking_methods_leave_grids_and_rows(world, curves):
    "What is chosen is chosen on calibration; all walks are taken once."
    problems, tables, tree = world
    coin, case, run = RandomRouter(mode='per_step'), Case('toy', tables, []), Walker(problems, tree)
    walk_methods(case, [at_thresholds(coin)], run, curves)
    grid = grid_search(coin, tables['calibration'], run=run)
    shown = grid.curve_thresholds() if curves else ()
    want = method_rows(coin, tables['test'], grid.threshold, run, shown)
    assert case.grids == [grid] and case.rows == want
    assert {row[3] for row in want} == {grid.threshold, *shown} - {LARGE} | ({LARGE} & {grid.threshold})

# ---- trained policies ----
SAID = dict(kappa=.9, alpha=.02, n=40, miss=.01, accuracy=.9, bound=.03, met=False)

def coin(seed, kappa, variant='append', e='append', name='Ours', sweep=()):
    said = SAID | dict(kappa=kappa)
    return SavedPolicy(variant, seed, Coin(seed, e, name, 1 - kappa), .4, sweep, said)

def test_rows_of_a_policy_are_means_over_its_seeds():
    test, cal = toy_table(50), toy_table(40, 'calibration')
    policies = [coin(0, .9, sweep=(.05,)), coin(3, .7, sweep=(.15,))]
    own, singles = at_sweep(policies), seed_rows(policies, test)
    swept = [replay(p.router.at(p.sweep[0]), test) for p in policies]
    rows, grid = method_rows(own, test, .02), grid_search(own, cal)
    extra = range(len(COLUMNS), len(COLUMNS) + 1)
    def by(rows, *key):
        own = [r for r in rows if tuple(r[i] for i in (3, *extra) if i < len(r)) == key]
        return np.array([r[7:len(COLUMNS)] for r in own], float)
    assert COLUMNS[-1] == 'cents'
    alone = [replay(p.router, test) for p in policies]
    for alpha, outcomes in ((.02, alone), (1, swept)):
        known = dict(large_correct=test.correct[:, 0], large_again=test.large_again)
        each = [[(o | known)[k] for k in COLUMNS[7:]] for o in outcomes]
        want = np.mean(each, 0).T
        assert np.allclose(by(rows, alpha), want) and want[:, -1].max() > 0
    for seed, o in ((0, alone[0]), (3, alone[1])): assert (by(singles, .02, seed)[:, 0] == o['correct']).all()
    assert {r[3] for r in singles} == {.02} and {(r[3], r[4]) for r in rows} == {(.02, 1), (1, 0)}
    assert (grid.method, grid.n, grid.thresholds, grid.alpha) == ('Ours', 40, (.02, 1, LARGE), .02)
    assert np.isclose(grid.accuracy[1], np.mean([replay(p.router.at(p.sweep[0]), cal)['correct'] for p in policies]))
    for unit in UNITS:
        grid = grid_search(own, cal, cost=unit)
        mean = np.mean([replay(p.router, cal)[unit].mean() for p in policies[:2]])
        assert grid.unit == unit and np.isclose(grid.cost[0], mean)
    assert method_rows(own, test, .02, shown_thresholds=()) == [r for r in rows if r[4]]
    assert [(r.name, r.threshold) for r in at_online(policies)[.02]] == [(ONLINE, .4)]*2

def setting(folder): return Run('toy', Config(), folder, folder/'store').settings[0]

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run directory with policies as notebook 03 leaves them: untrained ones, with thresholds in the middle of
    their scores."""
    policy = pytest.importorskip('stepwise_routing.method.policy')
    from stepwise_routing.method.confidence import fit_scaler
    folder, train, names = tmp_path_factory.mktemp('run'), toy_table(100, 'train'), ('score_logit', 'index', 'final')
    scaler = fit_scaler(train.obs, names)
    for variant in READINGS:
        for seed in (0, 1):
            p = policy.RoutingPolicy(scaler, p_escalate=.3, seed=seed)
            for q in p.parameters(): q.data *= 3
            pi = p(p.encode(train.obs[train.inside], train.features))[..., 1].exp()
            policy.save_policy(folder/'policies'/'toy'/variant/f'alpha0.02-seed{seed}', p, pi.median().item() + 1e-9,
                                 alpha=.02, seed=seed, benchmark='toy', variant=variant,
                                 models=('toy small', 'toy large'),
                                 on_escalate=variant, calibration=SAID, online=.3, sweep=(1., .2, 0.))
    train.save(toy_run(folder).files.outcomes('toy', 'test'))
    return folder

def test_saved_policies_are_routers(trained):
    "And below nought the large model: without the small model's first step."
    from stepwise_routing.method.cpo import TableEnv
    policies, table = load_policies(toy_run(trained), 'toy', 'paper_flops'), toy_table(80)
    assert [(p.variant, p.seed) for p in policies] == [(e, i) for e in READINGS for i in (0, 1)]
    assert {(p.online, p.sweep, *p.calibration.items()) for p in policies} == {(.3, (1., .2, 0.), *SAID.items())}
    assert all((p.name, p.router.mode, p.router.on_escalate) == ('Ours', 'absorbing', p.variant) for p in policies)
    for p in policies:
        o, policy = replay(p.router, table), p.router.policy
        env = TableEnv(table, policy.features, p.router.on_escalate, scaler=policy.scaler)
        want = env.deploy(policy, p.router.kappa)
        assert (o['correct'] == np.asarray(want['right'])).all() and 0 < (o['large_tokens'] > 0).mean() < 1
        alone = replay(p.router.at(-1.), table)
        assert (alone['correct'] == table.correct[:, 0]).all() and not alone['small_tokens'].any()
    assert load_policies(toy_run(trained), 'other', 'paper_flops') == []

def test_a_damaged_policy_is_one_clear_line(trained, tmp_path):
    import shutil
    shutil.copytree(trained, tmp_path/'run')
    path = tmp_path/'run'/'policies'/'toy'/'append'/'alpha0.02-seed1'/'config.json'
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match='policies/toy/append/alpha0.02-seed1 .*: run nbs/03b_training.ipynb again') as e:
        load_policies(toy_run(tmp_path/'run'), 'toy', 'paper_flops')
    assert '\n' not in str(e.value)

def test_policies_walk_as_they_replay(world):
    problems, tables, tree = world
    few = {s: problems[s][:25] for s in ('calibration', 'test')}
    part, own, run = first_rows(tables, few), at_sweep([coin(i, .8) for i in (0, 1)]), Walker(few, tree)
    def found(**run):
        return method_rows(own, part['test'], .02, **run), grid_search(own, part['calibration'], **run)
    walked = found(run=run)
    assert walked == found() and len(walked[0]) == 25
    with pytest.raises(ValueError, match='holds other problems than these'): check_problems(tables['test'], few['test'])
    check_problems(part['test'], few['test'])

def test_a_case_gathers_its_rows(tmp_path):
    s, tables = toy_run(tmp_path), {split: toy_table(60, split) for split in ('train', 'calibration', 'test')}
    for split, table in tables.items(): table.save(s.files.outcomes('toy', split))
    case = replay_case(open_case(s, 'toy', 'paper_flops'))
    n, grids = len(case.rows), len(case.grids)
    full = coin(0, .9, 'regenerate-full', 'regenerate', 'Ours (full)')
    case.policies = [coin(0, .9), coin(1, .8), full]
    case.add_own()
    assert [(r[1], r[-1]) for r in case.singles[::60]] == [('Ours', 0), ('Ours', 1), ('Ours (full)', 0)]
    assert [g.method for g in case.grids[grids:]] == list(dict.fromkeys(r[1] for r in case.rows[n:])) == [
        'Ours', ONLINE, 'Ours (full)']
    save_case(s, case)
    files = sorted(p.name for p in s.files.methods('toy', 'paper_flops').parent.iterdir())
    parts = 'certain', 'grid', 'kappas', 'policies', 'seeds'
    assert files == sorted([*(f'toy-{part}.csv' for part in parts), 'toy-points.npz', 'toy.csv'])
    columns, *ours = s.files.methods('toy', 'paper_flops', '-policies').read_text().splitlines()
    assert columns == ','.join(RECEIPT_COLUMNS) and len(ours) == 3
    assert ours[0] == 'toy,append,Ours,append,0.02,0,0.9,40,0.01,0.9,0.03,0'

def test_what_a_table_shows_of_tokens_is_a_method(world):
    "The least probability is a bare threshold, the entropy of a first token is GlimpRouter's."
    problems, tables, tree = world
    def with_entropy(table):
        obs = table.obs.copy()
        obs[..., table.features.index('first_entropy')] = -obs[..., table.features.index('score_prob')]
        return replace(table, obs=obs)
    case = replay_case(Case('toy', {split: with_entropy(table) for split, table in tables.items()}, []))
    names = [(grid.method, grid.on_escalate) for grid in case.grids]
    assert names == [*((m, e) for m in ('STEER (rest)', 'Bare threshold (probability)') for e in READINGS),
                     ('GlimpRouter', 'append')]
    assert {row[1] for row in case.rows} >= {method for method, _ in names}

def test_the_simplest_class_that_is_nearly_the_cheapest_is_a_row():
    "Coins at rates .3 to .35 cost nearly the same, so the simplest is taken; where it is much dearer, the next one."
    tables = {split: toy_table(200, split) for split in ('train', 'calibration', 'test')}
    for rates, taken in (((.3, .3, .3, .3), 'Ours (probability)'), ((.99, .3, .3, .3), 'Ours (logit)'),
                         ((.99, .99, .99, .05), 'Ours (full)')):
        case = Case('toy', tables, [], alpha=.9)
        variants = zip(('append-prob', 'append-logit', 'append', 'append-full'), CLASSES, rates)
        case.policies = [coin(s, 1 - r, v, name=name) for v, name, r in variants for s in (0, 1)]
        case.add_own()
        row, same = ([r[2:] for r in case.rows if r[1] == name] for name in ('Ours (nested)', taken))
        assert row == same and len(row) == 200
        grids = {g.method: g for g in case.grids}
        assert grids['Ours (nested)'] == grids[taken]._replace(method='Ours (nested)')

def test_certain_settings_are_rows_on_test():
    tables = {split: toy_table(n, split) for split, n in (('train', 100), ('calibration', 400), ('test', 50))}
    rows, grids = replay_methods(**tables, alpha=.1)
    for grid in grids:
        thresholds = {row[3] for row in rows if row[1:3] == (grid.method, grid.on_escalate)}
        assert grid.certain == LARGE or grid.certain in thresholds
        steer, order = fit_steer(tables['train'], grid.on_escalate), sorted(grid.thresholds[:-1], reverse=True)
        losses = [tables['calibration'].large_share - replay(steer.at(x), tables['calibration'])['correct'] for x in order]
        last = certain_setting(losses, .1)
        assert grid.certain == (LARGE if last is None else order[last])

@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_all_cuts_are_all_that_thresholds_can_do(chains):
    "Every threshold stops the chains where one of the cuts does."
    def stops(x): return tuple(next((t for t, s in enumerate(c) if s < x), None) for c in chains)
    cuts = chain_thresholds(chains)
    assert {stops(x) for x in cuts} == {stops(x) for x in np.arange(-1, 7, .5)}
    assert len({stops(x) for x in cuts}) == len(cuts)

def test_a_router_that_hands_back_may_reject_nearly_all_steps():
    "One bad step a chain says nothing about the others: a list that ends at the chains' lowest scores ends too early."
    chains = np.random.default_rng(0).random((100, 8))
    x = chain_thresholds(chains, 40, 'per_step')
    assert np.allclose([(chains < t).mean() for t in x], np.arange(41) / 40, atol=.002)
    absorbing = chain_thresholds(chains, 40)
    assert np.allclose([(chains < t).any(1).mean() for t in absorbing], np.arange(41) / 40, atol=.011)
    assert (chains < absorbing[-1]).mean() < .6

# ---- files and imports ----
def test_what_is_fitted_sees_training_problems_alone():
    "Thresholds are chosen on others, so a fit on those would make a method look better than it is."
    for fit in (fit_steer, lambda table: fit_trim(table, .1)):
        with pytest.raises(ValueError, match='was handed the calibration split: use train'):
            fit(toy_table(30, 'calibration'))

def test_trim_is_fitted_and_put_in_order_on_training_problems(monkeypatch):
    tables, seen = {split: toy_table(60, split) for split in ('train', 'calibration', 'test')}, []
    case = Case('toy', tables, [])
    def fitted(table, *_): seen.append(table.split); return ScoreRouter('score_logit')
    by_cost = comparison.by_cost
    def watched(method, table, *more): seen.append(table.split); return by_cost(method, table, *more)
    monkeypatch.setattr(comparison, 'reward_table', lambda table, *_: table)
    monkeypatch.setattr(comparison, 'fit_trim', fitted)
    monkeypatch.setattr(comparison, 'by_cost', watched)
    comparison.add_trim(case, dict.fromkeys(tables), None, None)
    assert {*seen} == {'train'} and case.rows

@pytest.mark.parametrize('cost', ['paper_flops', 'full_flops'])
def test_random_spends_what_the_first_row_spends(cost):
    train, calibration, test = (toy_table(150, s) for s in ('train', 'calibration', 'test'))
    rows, grids = replay_methods(train, calibration, test, alpha=.1, cost=cost)
    most = random_outcome(calibration, 1.)[cost].mean()
    chosen = [min(grid.cost[grid.chosen], most) for grid in grids]
    assert chosen[0] not in chosen[1:2], 'another row costs something else'
    p, = {row[3] for row in rows if row[1] == 'Random'}
    assert random_outcome(calibration, p)[cost].mean() == pytest.approx(chosen[0])

def test_test_answers_choose_nothing():
    "Whatever the test problems answer, fits, grids and the hazard of chance stay as they are."
    train, calibration, test = (toy_table(150, s) for s in ('train', 'calibration', 'test'))
    wrong = replace(test, correct=np.where(np.isnan(test.correct), np.nan, 1 - test.correct))
    (rows, grids), (other, same) = replay_methods(train, calibration, test), replay_methods(train, calibration, wrong)
    assert grids == same
    keys = lambda rows: {(r[1], r[2], r[3], r[4]) for r in rows}
    assert keys(rows) == keys(other) and sum(r[4] for r in rows if r[1].startswith('STEER')) == 2*150
