"Environments, the loop, calibration and routers, against slow walks, simulation and a linear program."
import warnings
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import tabular
import torch
from hypothesis import given, settings, strategies as st
from policies import (
    READINGS,
    bits,
    f64,
    first,
    fitted_policy,
    one_line,
    pi_escalate,
    quick,
    toy_env,
)
from toy import toy_backends, toy_problems

from stepwise_routing.base.settings import Policy
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.method.confidence import fit_scaler
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import (
    escalation_times,
    outcome_table,
    replay,
    toy_table,
    walk_outcome,
)
from stepwise_routing.method.policy import *
from stepwise_routing.method.training import *
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import State, walk

torch.set_num_threads(1)

# --- environments
@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('unit', ['paper_flops', 'full_flops'])
def test_deploying_is_escalating_step_by_step(on_escalate, unit):
    table = toy_table(80, 'train')
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate, unit)
    policy = fitted_policy(env)
    pi, share = pi_escalate(policy, table), table.large_only()[unit].mean()
    assert len(env) == 80 and env.models == table.models
    for kappa in (0., .1, .25, .5, .9, 1.):
        stop = first([[escalate([1 - p, p], kappa) == 1 for p in row] for row in np.nan_to_num(pi)], table.n_steps)
        want, got = table.outcome(stop, on_escalate), env.deploy(policy, kappa)
        assert np.allclose(got['cost'], want[unit]/share, rtol=1e-12) and (got['right'] == want['correct']).all()
        assert np.allclose(got['miss'], (want['correct'] == 0)*table.large_again)
        rows = np.array([5, 5, 70, 0])
        some = env.deploy(policy, kappa, rows)
        assert all((some[k] == got[k][rows]).all() for k in ('cost', 'right', 'miss'))

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('unit', ['paper_flops', 'full_flops'])
def test_rollouts_are_walks_whose_costs_add_up(on_escalate, unit):
    table = toy_table(80, 'train')
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate, unit)
    policy, rows = fitted_policy(env), np.random.default_rng(0).integers(0, 80, 3000)
    r, pi = env.sample(policy, rows, np.random.default_rng(1)), pi_escalate(policy, table)[rows]
    T, inside, act = table.n_steps[rows], r.inside.numpy(), r.act.numpy()
    stop = first(act == 1, T)
    assert (inside == (np.arange(inside.shape[1]) <= np.minimum(stop, T - 1)[:, None])).all() and not act[~inside].any()
    assert np.allclose(r.mu.numpy()[inside], np.where(act == 1, pi, 1 - pi)[inside])
    outcomes = [{k: v[i] for k, v in table.outcome(np.minimum(t, table.n_steps), on_escalate).items()}
                for i, t in zip(rows, stop)]
    share = table.large_only()[unit].mean()
    assert np.allclose((env.small_cost[rows, 0] + r.cost.sum(1)).numpy(), [o[unit]/share for o in outcomes])
    assert not r.cost.numpy()[~inside].any() and (r.cost.numpy()[inside] >= 0).all()
    right, large = np.array([o['correct'] for o in outcomes]), table.correct[rows, 0]
    assert (r.right.numpy() == right).all() and (r.large_right.numpy() == large).all()
    known = r.x.numpy()[inside]
    assert np.allclose(known, policy.encode(table.obs[rows], table.features).numpy()[inside])

def test_actions_are_drawn_from_pi():
    table = toy_table(6, 'train', seed=3)
    env = TableEnv(table, ('score_logit', 'index', 'final'))
    policy = fitted_policy(env)
    pi, rows = np.nan_to_num(pi_escalate(policy, table)), np.repeat(np.arange(6), 20_000)
    r = env.sample(policy, rows, np.random.default_rng(0))
    stop = first(r.act.numpy() == 1, table.n_steps[rows])
    for i, T in enumerate(table.n_steps):
        want = np.array([pi[i, t]*np.prod(1 - pi[i, :t]) for t in range(T)] + [np.prod(1 - pi[i, :T])])
        seen = np.bincount(stop[rows == i], minlength=T + 1)/20_000
        assert (np.abs(seen - want) < 5*np.sqrt(want*(1 - want)/20_000) + 1e-9).all()

# --- the chain whose optimum is known
@pytest.mark.parametrize('on_escalate', READINGS)
def test_the_table_is_the_chain(on_escalate):
    "Any router that only looks at states costs and misses the same in the rows as in the chain."
    table, r = tabular.chain_table(), np.random.default_rng(0)
    for chances in (r.random(len(tabular.STATES)), np.zeros(len(tabular.STATES)), np.ones(len(tabular.STATES)),
                    tabular.optimum(.1, on_escalate)[2]):
        assert np.allclose(tabular.replay_hazard(table, tabular.state_hazard(table, chances), on_escalate),
                           tabular.evaluate(chances, on_escalate), rtol=1e-12)

@pytest.mark.parametrize('seeds', [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_training_finds_the_optimum(seeds):
    """Median of the seeds with exact gradients: as deployed, and as S, within 3 % of the least cost, and misses within
    a standard error of alpha."""
    alpha, n = .11, len(tabular.chain_table())
    # [seed, reading, number]
    ends = np.array([tabular.train(seed, alpha, **tabular.RUNS['exact, all rows']) for seed in range(seeds)])
    cost, miss, own = np.median(ends, 0).T
    assert (cost <= .03).all() and (miss <= alpha + np.sqrt(alpha*(1 - alpha)/n)).all(), ends
    assert (own <= .01).all(), 'nor is there a better router with as many misses'

# --- calibration
def chain_env(rows=None, on_escalate='regenerate'):
    table = tabular.chain_table('calibration')
    return TableEnv(table if rows is None else tabular.take(table, rows), tabular.FEATURES, on_escalate,
                    scaler=CHAIN_SCALER)

CHAIN_SCALER = fit_scaler(tabular.chain_table().obs, tabular.FEATURES)

def chain_policy(seed=0, spread=.7):
    policy = RoutingPolicy(CHAIN_SCALER, hidden=(6,), p_escalate=.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def true_miss(policy, kappas):
    "Miss rates of Gamma on the chain itself."
    with torch.no_grad(): pi = policy(policy.encode(tabular.observations(), tabular.FEATURES))[:, 1].exp().numpy()
    return tabular.evaluate(pi >= np.reshape(kappas, (-1, 1)), 'regenerate')[1]

@pytest.mark.slow
@pytest.mark.parametrize('alpha, n, seed', [(.1, 60, 0), (.05, 120, 1)])
@pytest.mark.parametrize('learnt', [False, True])
def test_calibrated_misses_stay_below_alpha_on_average(alpha, n, seed, learnt):
    """Conformal risk control: over calibration sets and problems, the next problem is missed with probability at
    most alpha."""
    r, policy = np.random.default_rng(seed), chain_policy(seed)
    path = threshold_path(policy, chain_env()) if learnt else None
    found = [calibrate(policy, chain_env(r.integers(0, len(tabular.chain_table()), n)), 'miss', alpha, path)
             for _ in range(1000)]
    miss = true_miss(policy, [c.kappa for c in found])
    assert all((c.met, c.n, c.target, c.alpha) == (True, n, 'miss', alpha) for c in found)
    assert alpha/4 < miss.mean() <= alpha + 3*miss.std()/np.sqrt(1000), 'nor by escalating everything'

def test_a_higher_accuracy_is_a_lower_threshold():
    env, policy = chain_env(), chain_policy(2)
    ends = env.deploy(policy, 1.)['right'].mean(), env.deploy(policy, 0.)['right'].mean()
    wanted = np.linspace(ends[0], ends[1] - .01, 12)
    found = [calibrate(policy, env, alpha=env.table.correct[:, 0].mean() - a) for a in wanted]
    assert all(c.met and c.accuracy >= a - 1e-12 for c, a in zip(found, wanted))
    kappas, cost = [c.kappa for c in found], [c.cost for c in found]
    assert kappas == sorted(kappas, reverse=True) and len(set(kappas)) > 3 and cost == sorted(cost)
    with pytest.raises(ValueError, match="did you mean 'accuracy'") as e: calibrate(policy, env, 'acuracy')
    one_line(e)

@pytest.mark.parametrize('target', ['certain', 'accuracy'])
def test_a_single_calibration_problem_promises_nothing(target):
    env = TableEnv(toy_table(1, 'calibration'), ('score_logit', 'index', 'final'), 'regenerate')
    c = calibrate(fitted_policy(env), env, target, .02)
    assert np.isfinite([*asdict(c).values()][3:]).all() and (target == 'accuracy' or c.kappa == LARGE_ONLY)

def test_calibration_takes_the_largest_threshold_with_only_safe_ones_below():
    for seed in range(2):
        policy, env = chain_policy(seed, 1.5), chain_env(np.random.default_rng(seed).integers(0, 200, 90))
        c = calibrate(policy, env, 'miss', .08)
        grid = np.linspace(0, 1, 2001)
        bound = np.array([(90*env.deploy(policy, k)['miss'].mean() + 1)/91 for k in grid])
        unsafe = grid[bound > .08]
        assert c.met and c.bound <= .08 and np.isclose(c.bound, (90*c.miss + 1)/91)
        assert not len(unsafe) or c.kappa < unsafe[0] + 1e-12, 'no smaller threshold is unsafe'
        mine = {k: v.mean() for k, v in env.deploy(policy, c.kappa).items()  if k != 'stop'}
        assert np.isclose(mine['miss'], c.miss) and np.isclose(mine['right'], c.accuracy)
        assert np.isclose(mine['cost'], c.cost)
        safe = grid[grid < (unsafe[0] if len(unsafe) else 2.)]
        assert np.isclose(env.deploy(policy, safe[-1])['miss'].mean(), c.miss), 'nor is there a larger one'

def test_nobody_pays_more_than_the_large_model():
    "Whose escalations all go wrong falls back on it."
    table = toy_table(60, 'calibration')
    correct = np.where(np.arange(table.correct.shape[1]) == 0, 1., 0.)*np.ones((60, 1))
    env = TableEnv(replace(table, correct=correct), ('score_logit', 'index', 'final'))
    c = calibrate(fitted_policy(env), env)
    assert (c.kappa, c.accuracy, c.cost, c.miss) == (LARGE_ONLY, 1., 1., 0.)

def test_what_is_out_of_reach_is_said_once():
    from stepwise_routing.run.sweep import out_of_reach
    config = dict(benchmark='toy', on_escalate='append', alpha=.02, least=.05, n_train=9)
    lines = out_of_reach([config | dict(seed=0), config | dict(seed=1), config | dict(least=.02)])
    assert lines == ['toy, append: alpha=0.02 is out of reach on the 9 training problems; '
                     'the best fixed time of escalating comes to 5.0 points']

def test_a_path_goes_from_safe_to_cheap():
    env, policy = chain_env(), chain_policy(1)
    path = threshold_path(policy, env)
    curve = env.risk_curve(policy, path)
    assert len(path) > 3 and set(path) <= {*candidate_thresholds(policy, env)}
    assert (np.diff(curve['miss']) > 0).all() and (np.diff(curve['cost']) < 0).all()
    at = calibrate(policy, env, 'miss', curve['miss'][2] + 2/len(env), path).kappa
    assert at in path and at != calibrate(policy, env, 'miss', .999).kappa

@given(st.integers(1, 40), st.floats(.05, 3.), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_one_sort_is_deploying_at_every_threshold(n, spread, seed):
    "Also exactly at a value of pi, where the state escalates."
    env = TableEnv(toy_table(n, seed=seed), ('score_logit', 'index', 'final'))
    policy, r = fitted_policy(env, seed % 100, spread), np.random.default_rng(seed)
    pi = policy(env.x[env.inside])[:, 1].exp().detach().numpy()
    kappas = np.r_[0., 1., r.random(5), r.choice(pi, 5)]
    curve = env.risk_curve(policy, kappas)
    want = [env.deploy(policy, kappa) for kappa in kappas]
    for k in curve: assert np.allclose(curve[k], [w[k].mean() for w in want], rtol=1e-12, atol=1e-12)

def best_by_hand(policy, env, alpha):
    "The least cost that keeps the accuracy: every threshold that matters, one by one, and the large model alone."
    large, costs = env.table.correct[:, 0].mean(), [1.]
    with torch.no_grad(): pi = policy(env.x[env.inside])[:, 1].exp().numpy()
    for kappa in (0., 1.1, *pi):
        for near in (kappa, kappa*(1 - 1e-9)):
            o = env.deploy(policy, near)
            if o['right'].mean() >= large - alpha - 1e-12: costs.append(o['cost'].mean())
    return min(costs)

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('alpha', [.001, .02, .1])
def test_the_criterion_is_the_cheapest_that_keeps_the_accuracy(on_escalate, alpha):
    for seed in range(4):
        env = toy_env(90, 'calibration', seed, on_escalate=on_escalate)
        policy = fitted_policy(env, seed, 1.5)
        c, large = calibrate(policy, env, alpha=alpha), env.table.correct[:, 0].mean()
        assert c.met and c.accuracy >= large - alpha - 1e-12 and c.large == large and c.target == 'accuracy'
        assert np.isclose(c.cost, best_by_hand(policy, env, alpha)) and c.cost <= 1
        o = replay(PolicyRouter(policy, c.kappa, on_escalate), env.table) # the large model alone, too
        assert np.isclose(o['correct'].mean(), c.accuracy)
        assert np.isclose(o['paper_flops'].mean()/env.table.large_only()['paper_flops'].mean(), c.cost)

@pytest.mark.parametrize('n', [30, 200])
def test_a_sweep_spreads_over_the_chains_that_escalate(n):
    env = toy_env(n, 'calibration')
    policy = fitted_policy(env, 3, 1.5)
    kappas = sweep_thresholds(policy, env, 10)
    share = [(env.deploy(policy, k)['stop'].numpy() < env.table.n_steps).mean() for k in kappas]
    assert len(kappas) == 12 and kappas[-1] == 0 and (env.deploy(policy, 0.)['stop'] == 0).all()
    assert np.allclose(share, [*np.linspace(0, 1, 11), 1.], atol=.5/n + 1e-12) and share == sorted(share)

def test_a_policy_is_saved_once_with_its_operating_points(tmp_path):
    env, held_out = toy_env(100), toy_env(200, 'calibration')
    s = Policy(alpha=.1, steps=3, hidden=(4,), estimator='exact', batch=None)
    config = fit(env, held_out, tmp_path, s, 0, alpha=.05, key='x')
    policy, trained = load_policy(tmp_path), train(env, s, 0)
    own = calibrate(policy, held_out, alpha=.05)
    assert config['calibration'] == asdict(own)
    assert [config[k] for k in ('kappa', 'online', 'least')] == [own.kappa, trained.kappa, trained.least]
    assert config['sweep'] == sweep_thresholds(policy, held_out).tolist() and len(config['sweep']) == 42
    assert (config['seed'], config['key'], config['on_escalate'], config['n_train']) == (0, 'x', env.on_escalate, 100)
    assert pd.read_csv(tmp_path/'log.csv')['step'].tolist() == [1, 2, 3]
    assert fit(env, held_out, tmp_path, s, 0, alpha=.05, key='x') == config
    assert fit(env, held_out, tmp_path, replace(s, steps=4), 0, alpha=.05, key='x') == config, 'the key decides'
    assert fit(env, held_out, tmp_path, replace(s, steps=4), 0, alpha=.05, key='y') != config
    keys = [training_key('a', 1), training_key('a', 1), training_key('a', 2)]
    assert keys[0] == keys[1] != keys[2]

# --- what cannot be kept
def test_an_alpha_out_of_reach_is_said():
    "The best fixed time of escalating, by replays, decides; a hair above it there is nothing to say."
    env = toy_env(150)
    table, large = env.table, env.table.correct[:, 0]
    times = [np.minimum(t, table.n_steps) for t in range(table.obs.shape[1] + 1)]
    env.right[:] -= .05 # on the toys some time is better than the large model
    least = float(min((large - table.outcome(t)['correct']).mean() for t in times) + .05)
    with pytest.warns(UserWarning, match=f'out of reach on these 150 problems.*{least:.4g}') as seen:
        assert np.isclose(quick(env, alpha=least - .001, steps=1).least, least)
    assert len(seen) == 1 and one_line(seen[0])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        quick(env, alpha=least + .001, steps=1)

def test_calibration_does_not_jump_over_unsafecandidate_thresholds():
    """Here escalating after the second step goes wrong, after the first or the third one it does not: safe,
    unsafe, safe. Only the first stretch counts."""
    table = tabular.chain_table('calibration')
    table = tabular.take(table, np.flatnonzero((table.n_steps == 3) & (table.correct[:, 0] == 1))[:120])
    env = TableEnv(replace(table, correct=np.tile([1., 0., 1., 0.], (120, 1))), ('index',), 'regenerate')
    policy = fitted_policy(env, hidden=())
    # pi(escalate) rises with the index: .19, .5, .81
    policy.net[0].weight.data, policy.net[0].bias.data = f64([[0.], [1.2]]), f64([0., 0.])
    miss = [env.deploy(policy, kappa)['miss'].mean() for kappa in (.1, .3, .7, .9)]
    c = calibrate(policy, env, 'miss', .1)
    assert miss == [0, 1, 0, 1] and c.met and c.kappa < .19 and c.miss == 0

@pytest.mark.parametrize('n, alpha', [(60, .2), (400, .05), (400, .02)])
def test_certain_is_the_last_threshold_of_a_walk_from_safe_to_cheap(n, alpha):
    "Walked by hand, threshold by threshold; the large model alone where nothing passes or nothing is saved."
    from stepwise_routing.method.certain import is_safe
    env = TableEnv(toy_table(n, 'calibration'), ('score_logit', 'index', 'final'), 'regenerate')
    policy, table = fitted_policy(env), env.table
    share = (table.correct[:, 0] + table.large_redraws_right.sum(1))/(1 + table.large_redraws_right.shape[1])
    want, cost = LARGE_ONLY, 1.
    for kappa in candidate_thresholds(policy, env):
        stop = first(np.nan_to_num(pi_escalate(policy, table)) >= kappa, table.n_steps)
        outcome = table.outcome(stop, 'regenerate')
        if not is_safe(share - outcome['correct'], alpha): break
        want, cost = kappa, outcome['paper_flops'].mean()/table.large_only()['paper_flops'].mean()
    c = calibrate(policy, env, 'certain', alpha)
    assert (c.kappa, c.cost) == ((want, pytest.approx(cost)) if cost < 1 else (LARGE_ONLY, 1.))

def test_a_bare_threshold_is_a_policy():
    "Handing over where a score is low, or where the policy of this score wants to: the same steps for any threshold."
    from stepwise_routing.method.routers import ScoreRouter, score_thresholds
    table = toy_table(150, 'train')
    env = TableEnv(table, ('score_logit',), 'regenerate')
    policy = threshold_policy(env.scaler)
    scores, pi = table.obs[..., 0][table.inside], pi_escalate(policy, table)[table.inside]
    assert (np.diff(pi[scores.argsort()]) <= 0).all()
    for threshold in score_thresholds(ScoreRouter(on_escalate='regenerate'), table, 10):
        kappa = pi[scores < threshold].min() if (scores < threshold).any() else 1.
        want = replay(ScoreRouter(on_escalate='regenerate', threshold=threshold), table)
        assert (env.deploy(policy, kappa)['right'] == want['correct']).all()

def test_too_few_problems_to_calibrate():
    with pytest.warns(UserWarning, match='no threshold keeps the bound within 0.02 on 40 problems') as seen:
        c = calibrate(chain_policy(), chain_env(np.arange(0, 280, 7)), 'miss', .02)
    assert len(seen) == 1 and not c.met and c.miss == 0 and c.bound > .02, 'the safest, and not a promise'

@pytest.mark.parametrize('seed, n',
                         [(0, 77), (0, 101), (0, 280), *((s, n) for s in range(1, 6) for n in (40, 43, 100, 157))])
def test_thresholds_fall_between_states(seed, n):
    "And never between two roundings of the same state, where the last bit of a sum would decide who escalates."
    policy, rows = RoutingPolicy(CHAIN_SCALER, p_escalate=.3, seed=seed), np.random.default_rng(n).integers(0, 280, n)
    with torch.no_grad(): pi = policy(policy.encode(tabular.observations(), tabular.FEATURES))[:, 1].exp().numpy()
    kappas, env = candidate_thresholds(policy, chain_env(rows)), chain_env(rows)
    assert len(kappas) <= len(tabular.STATES) + 1 and np.abs(kappas[:, None] - pi).min() > 1e-12
    for kappa in kappas:
        times = escalation_times(PolicyRouter(policy, kappa, 'regenerate'), env.table)
        assert (times == stopped(env, policy, kappa)).all()

def stopped(env, policy, kappa): return np.minimum(env.deploy(policy, kappa)['stop'].numpy(), env.table.n_steps)

# --- at work
@pytest.fixture(scope='module')
def world(tmp_path_factory):
    "Toy problems, their outcome table and the tree they came from."
    problems, backends = toy_problems(40), toy_backends(end=.15)
    with RolloutStore(tmp_path_factory.mktemp('store')/'toy.db', tree_settings('toy', backends)) as store:
        tree = RoutingTree(backends, store)
        collect_rollouts(problems, tree)
        yield problems, outcome_table(problems, tree, 'train'), tree

def chain_states(problem, tree):
    "What a router sees of a problem's small chain, step by step."
    steps = []
    while not steps or not (steps[-1].final or len(steps) >= tree.max_steps):
        steps.append(tree.stored(problem, '0'*len(steps), 0))
        yield State(problem, 0, tuple(steps), '0'*len(steps), 2)

@pytest.mark.parametrize('features', [PAPER_FEATURES, ('final', 'model', 'score_prob')])
def test_router_scores_states_and_tables_alike(world, features):
    problems, table, tree = world
    env = TableEnv(table, features)
    policy = fitted_policy(env, spread=.4)
    router, pi = PolicyRouter(policy, .3), pi_escalate(policy, table)
    by_table = router.table_escalates(table)
    assert by_table.shape == table.obs.shape[:2] and not by_table[~table.inside].any()
    assert (by_table == (pi >= .3))[table.inside].all() and 0 < by_table.sum() < table.inside.sum()
    assert (router.name, router.mode, router.start) == ('Ours', 'absorbing', 0)
    for i, problem in enumerate(problems):
        states = list(chain_states(problem, tree))
        assert np.abs(router.decide(router.inputs(states))[:, 1] - pi[i, :len(states)]).max() < 1e-12
        assert len(states) == table.n_steps[i]
        assert router.escalates(states).tolist() == by_table[i, :len(states)].tolist()
        assert [router.escalates([s])[0] for s in states[:2]] == by_table[i, :min(2, len(states))].tolist()

@pytest.mark.parametrize('on_escalate', READINGS)
def test_replayed_times_are_gamma_step_by_step(world, on_escalate):
    problems, table, tree = world
    env = TableEnv(table, on_escalate=on_escalate)
    policy = fitted_policy(env, spread=.4)
    pi = np.nan_to_num(pi_escalate(policy, table))
    for kappa in (0., .1, .2, .3, .5, .7, 1.):
        router = PolicyRouter(policy, kappa, on_escalate)
        want = first([[escalate([1 - p, p], kappa) == 1 for p in row] for row in pi], table.n_steps)
        assert (escalation_times(router, table) == want).all()
        got, walked = replay(router, table), walk_outcome(walk(problems, router, tree), tree.specs)
        assert all((got[k] == walked[k]).all() for k in walked)
        assert np.allclose(got['paper_flops']/table.large_only()['paper_flops'].mean(),
                           env.deploy(policy, kappa)['cost'])

# --- training
@pytest.mark.parametrize('options',
                         [dict(), dict(estimator='exact', batch=None), dict(estimator='exact', batch=20)])
def test_same_seed_same_bits(options):
    # more states than the Fisher matrix takes: some are drawn
    env = toy_env(400 if options.get('batch', 5) is None else 60)
    once = bits(quick(env, seed=3, **options))
    torch.manual_seed(99); np.random.seed(99)
    assert bits(quick(env, seed=3, **options)) == once, 'whatever the state of the global generators'
    assert len({str(bits(quick(env, seed=s, **options))) for s in range(5)}) == 5

def test_the_temperature_falls_over_half_the_steps():
    temps = train(toy_env(), Policy(estimator='exact', steps=8, temp=(.4, .1)), 0).log['temp']
    np.testing.assert_allclose(temps, [.4*.25**min(1, k/4) for k in range(1, 9)])

def test_the_threshold_stays_below_one_action_in_two():
    "Everybody loses less than half, so that it rises; pi of the likelier of two actions is .5 at least."
    trained = train(toy_env(), Policy(estimator='exact', steps=4, alpha=.9, kappa_step=5., batch=None), 0)
    assert trained.kappa == .5 == max(trained.log['kappa'])

def test_training_is_not_changed_by_the_number_of_threads():
    env, before = toy_env(200), torch.get_num_threads()
    once = bits(quick(env, estimator='exact', batch=None))
    try:
        torch.set_num_threads(2)
        assert bits(quick(env, estimator='exact', batch=None)) == once and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)

@pytest.mark.filterwarnings('ignore:alpha=')
@pytest.mark.parametrize('estimator', ['sampled', 'exact'])
@pytest.mark.parametrize('judged', [False, True])
def test_every_estimator_runs(estimator, judged):
    env = toy_env(on_escalate='regenerate', unit='full_flops')
    verdicts = np.random.default_rng(0).random(env.inside.shape) < .7 if judged else None
    trained = quick(env, estimator=estimator, verdicts=verdicts, batch=10)
    assert 0 <= trained.kappa <= .5
    assert all(len(v) == 10 and np.isfinite(np.asarray(v, float)).all() for v in trained.log.values())
    assert (trained.log['kl'] <= .01 + 1e-12).all() and set(trained.log['optim_case']) <= set(range(5))

def test_verdicts_only_excuse_what_is_lost():
    "All verified: nothing counts as lost, so kappa only rises. Without a verifier, all that is lost counts."
    env = toy_env()
    free = quick(env, verdicts=np.ones(env.inside.shape, bool), batch=20, alpha=.2)
    plain = quick(env, batch=None, alpha=.2)
    assert (free.log['lost'] == 0).all() and free.kappa > .25
    assert np.allclose(plain.log['lost'], float(env.large_right.mean()) - plain.log['accuracy'])

def test_more_problems_a_step_than_there_are():
    with pytest.raises(ValueError, match='batch is 61.*1 to 60'): quick(toy_env(), batch=61)

def table_where(**change):
    table = toy_table(60, 'train')
    return replace(table, **{k: f(getattr(table, k).copy(), table) for k, f in change.items()})

def put(index, value):
    def change(x, table): x[index] = value; return x
    return change

def always(x, table, value=1.):
    x[np.arange(len(x)), table.n_steps] = value
    return x

@pytest.mark.parametrize('table, error', [
    (lambda: table_where(obs=put((3, 0, 0), np.nan)), "'score_logit' is nan at some steps"),
    (lambda: table_where(correct=put((slice(None), 0), 0.)), 'large model solves none of the 60'),
    (lambda: table_where(correct=always), 'small model solves all')])
def test_a_table_that_teaches_nothing_is_refused(table, error):
    with pytest.raises(ValueError, match=error): TableEnv(table(), ('score_logit', 'index', 'final'))

def test_a_feature_that_nobody_looks_at_may_be_nan():
    quick(TableEnv(table_where(obs=put((slice(None), slice(None), 0), np.nan)), ('index', 'final')))
