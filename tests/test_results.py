"Intervals, tables and figures: closed forms, golden text, the same bytes twice, clear lines for bad input."
import subprocess, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing import outcomes as outcomes_module
from stepwise_routing.report import tables as report_tables
from stepwise_routing.baselines import (COLUMNS, GRID_COLUMNS, RECEIPT_COLUMNS, REUSE_COLUMNS, SEED_COLUMNS,
    LargeOnly, RandomRouter, SavedPolicy, SmallOnly, grid_rows, grid_search, fit_steer, outcome_rows, policy_rows,
    receipt_rows, replay_methods, save_rows)
from stepwise_routing.bounds import oracle_frontier, random_frontier, random_outcome
from stepwise_routing.outcomes import outcome_grid, replay, toy_table
from stepwise_routing.results import (METHOD_STYLE, ablation_table, api_benchmarks, bootstrap_ci,
    compare_at_equal_accuracy, compare_with, evaluate, load_results, load_reuse, load_seeds, load_setting,
    method_label, pareto_frontier, read_rows, resamples)
from stepwise_routing.report.tables import (PAPER_TABLE_1, PAPER_TABLE_2, ablation_markdown, billed_as,
    comparison_markdown, cost_share_markdown, cost_share_table, details_markdown, gain_markdown, printed,
    reuse_markdown, save_table, shortfalls, table_api, table_flops, to_markdown, to_tex)
from stepwise_routing.report.figures import draw_accuracy_cost, figure_caption, paper_style, save_figure
from stepwise_routing.report.gains import frontier_share, headroom, routing_area, routing_gain

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A run directory as notebooks 02 and 04 leave it."
    folder = tmp_path_factory.mktemp('run')
    tables = {s: toy_table(60, s) for s in ('train', 'calibration', 'test')}
    rows, grids = replay_methods(**tables)
    tables['test'].save(folder/'outcomes'/'toy-test.npz')
    save_rows(folder/'methods'/'toy.csv', rows)
    save_rows(folder/'methods'/'toy-grid.csv', grid_rows(grids), GRID_COLUMNS)
    return folder

@pytest.fixture(scope='module')
def api(run):
    "The API setting of the same run: thresholds are chosen to save cents."
    tables = {s: toy_table(60, s) for s in ('train', 'calibration', 'test')}
    rows, grids = replay_methods(**tables, cost='cents')
    tables['test'].save(run/'api'/'outcomes'/'toy-test.npz')
    save_rows(run/'api'/'methods'/'toy.csv', rows)
    save_rows(run/'api'/'methods'/'toy-grid.csv', grid_rows(grids), GRID_COLUMNS)
    return run/'api'

@pytest.fixture(scope='module')
def loaded(run): return load_results(run, 'toy', n_boot=300)

@pytest.fixture(scope='module')
def priced(api): return load_results(api, 'toy', n_boot=300, cost='cents')

def coin(alpha, seed, kappa, variant='append', e='append', name='Ours', met=True):
    "A stand-in for a trained policy."
    return SavedPolicy(variant, alpha, seed, RandomRouter(seed, e, name), kappa, dict(n=60, miss=.01, accuracy=.9, bound=.015 if met else .04, met=met))

@pytest.fixture(scope='module')
def with_ours(run, tmp_path_factory):
    "The same with policies: four of Ours, one of its variant, two of an ablation."
    import shutil
    folder = tmp_path_factory.mktemp('ours')/'run'
    shutil.copytree(run, folder)
    test, cal = (toy_table(60, s) for s in ('test', 'calibration'))
    sets = [[coin(.02, 0, .7), coin(.02, 1, .6, met=False), coin(.2, 0, .9)], [coin(.02, 0, .5, 'regenerate-full', 'regenerate', 'Ours (full)')],
            [coin(.02, i, .9, 'ablation-short', name='short') for i in (0, 1)]]
    rows, grids = replay_methods(*(toy_table(60, s) for s in ('train', 'calibration', 'test')))
    single = []
    for some in sets:
        more, seeds, grid = policy_rows(some, cal, test)
        single += seeds
        if not some[0].is_ablation: rows += more; grids.append(grid)
    for name, r, columns in (('', rows, COLUMNS), ('-grid', grid_rows(grids), GRID_COLUMNS), ('-ablations', single, SEED_COLUMNS),
                             ('-policies', receipt_rows('toy', [p for some in sets for p in some]), RECEIPT_COLUMNS)):
        save_rows(folder/'methods'/f'toy{name}.csv', r, columns)
    return folder

# ---- intervals ----------------------------------------------------------------------------------------------------------------------
def test_interval_of_a_mean_is_the_normal_one():
    x = np.random.default_rng(0).random(400) < .8
    low, high = bootstrap_ci(resamples(400, 20_000) @ x / 400)
    half = 1.96*x.std()/20
    assert np.isclose(high - low, 2*half, rtol=.04) and np.isclose((low + high)/2, x.mean(), atol=.003)

def test_intervals_cover_95_percent():
    r, W, hits = np.random.default_rng(1), resamples(150, 1000), 0
    for _ in range(400):
        low, high = bootstrap_ci(W @ r.normal(0, 1, 150) / 150)
        hits += low <= 0 <= high
    assert .915 <= hits/400 <= .975

def test_resamples_are_a_multinomial_of_the_problems():
    W = resamples(7, 20_000)
    assert (W.sum(1) == 7).all() and np.allclose(W.mean(0), 1, atol=.02) and np.allclose(W.var(0), 6/7, atol=.03)
    assert (W == resamples(7, 20_000)).all() and (W != resamples(7, 20_000, seed=1)).any()

def test_undefined_and_infinite_draws():
    assert np.isnan(bootstrap_ci([1., np.nan])).all()
    assert bootstrap_ci([1.]*50 + [np.inf]*50).tolist() == [1., np.inf]

# ---- evaluate -----------------------------------------------------------------------------------------------------------------------
def frame(correct, large, flops, threshold=0., method='X', cents=None):
    cents = np.asarray(flops)/1e9 if cents is None else cents
    row = lambda i: dict(zip(COLUMNS, ('b', method, 'append', threshold, 1, f'p{i}', 0, correct[i], large[i], flops[i], 2*flops[i], 3, 4, 5, 2, cents[i])))
    return pd.DataFrame([row(i) for i in range(len(correct))])

def test_every_metric_by_hand():
    rows = pd.concat([frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only'), frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6, 1e6, 2e6, 2e6])])
    r = evaluate(rows, n_boot=50).iloc[1]
    assert (r['accuracy'], r['coverage'], r['cost'], r['full_flops']) == (.5, .5, 1.5, 3.)
    assert np.isclose(r['ac_percent'], 50/1.5) and np.isclose(r['ac_fraction'], .5/1.5) and np.isclose(r['large_share'], .4)
    assert (r['steps'], r['small_tokens'], r['large_tokens'], r['n']) == (5, 3, 4, 4)
    assert r['accuracy_vs_large'] == -.25 and r['cost_vs_large'] == -2.5
    assert (r['cost_in'], r['unit'], r['cost_share']) == ('paper_flops', 1e6, 1.5/4)

def test_cost_is_a_choice():
    "Every metric that knows a cost follows it; the others stay. Cents are never divided by the unit of FLOPs."
    rows = pd.concat([frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only', cents=[.02, .02, .01, .03]),
                      frame([0]*4, [1, 1, 0, 1], [5e5]*4, method='Small only', cents=[0.]*4), frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6]*4, cents=[.01, 0., 0., .01])])
    flops, full, cents = (evaluate(rows, 50, cost=c).set_index('method') for c in ('paper_flops', 'full_flops', 'cents'))
    c = cents.loc['X']
    assert np.allclose([c['cost'], c['cost_share'], c['cost_vs_large'], c['ac_fraction'], c['ac_percent']], [.005, .25, -.015, 100, 10_000])
    assert full.loc['X', 'cost'] == full.loc['X', 'full_flops'] == 2*flops.loc['X', 'cost'] == c['full_flops'] == 2.
    same = ['accuracy', 'coverage', 'full_flops', 'steps', 'large_share', 'accuracy_vs_large_low', 'coverage_high']
    pd.testing.assert_frame_equal(flops[same], cents[same])
    free = cents.loc['Small only']
    assert (free['cost'], free['cost_low'], free['cost_high'], free['cost_share']) == (0, 0, 0, 0)
    assert np.isnan(free[['ac_percent', 'ac_fraction', 'ac_percent_low', 'ac_fraction_high']].astype(float)).all()

def test_costs_that_cannot_be_had_are_refused():
    rows = pd.concat([frame([1], [1], [4e6], method='Large only'), frame([1], [1], [1e6])])
    with pytest.raises(ValueError, match=r"unknown cost 'cent' \(did you mean 'cents'\?\)"): evaluate(rows, 2, cost='cent')
    with pytest.raises(ValueError, match="no column 'cents': run nbs/04_baselines.ipynb again"): evaluate(rows.drop(columns='cents'), 2, cost='cents')
    with pytest.raises(ValueError, match="no column 'cents'"): compare_at_equal_accuracy(rows.drop(columns='cents'), n_boot=2, cost='cents')
    with pytest.raises(ValueError, match='the large model alone costs nothing in cents'): evaluate(rows.assign(cents=0.), 2, cost='cents')

def test_differences_are_paired():
    "Two methods that differ on one problem in a hundred: the difference is known far better than either."
    rng = np.random.default_rng(0)
    large = (rng.random(100) < .5).astype(int); other = large.copy(); other[np.flatnonzero(large)[0]] = 0
    rows = pd.concat([frame(large, large, np.full(100, 2e6), method='Large only'), frame(other, large, np.full(100, 1e6))])
    r = evaluate(rows).iloc[1]
    assert r['accuracy_high'] - r['accuracy_low'] > .15 and r['accuracy_vs_large_low'] >= -.035 and r['accuracy_vs_large_high'] == 0
    assert r['cost_vs_large_low'] == r['cost_vs_large_high'] == -1

def test_row_order_changes_nothing(run):
    rows = read_rows(run/'methods'/'toy.csv')
    a, b = evaluate(rows, 100), evaluate(rows.sample(frac=1, random_state=0), 100)
    keys = ['method', 'on_escalate', 'threshold']
    pd.testing.assert_frame_equal(a.sort_values(keys, ignore_index=True), b.sort_values(keys, ignore_index=True))

def test_several_samples_of_a_problem_are_one_problem():
    rows = pd.concat([frame([1, 0, 1, 0], [1, 0, 1, 0], [1e6]*4, method='Large only'), frame([1, 1, 0, 0], [1, 0, 1, 0], [1e6]*4)])
    rows['problem'], rows['sample'] = ['p0', 'p0', 'p1', 'p1']*2, [0, 1]*4
    r = evaluate(rows, 500)
    assert r['n'].tolist() == [2, 2] and r['accuracy_low'].tolist() == [.5, 0.] and r['accuracy_high'].tolist() == [.5, 1.]

@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_pareto_frontier_is_what_nothing_beats(points):
    cost, accuracy = zip(*points)
    kept = pareto_frontier(cost, accuracy)
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b
    assert {points[i] for i in kept} == {p for p in points if not any(beats(q, p) for q in points)}
    assert [cost[i] for i in kept] == sorted({cost[i] for i in kept})

# ---- headroom -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('on_escalate', ['append', 'regenerate'])
def test_headroom_agrees_with_the_frontiers(on_escalate):
    table = toy_table(120)
    room, chance, best = headroom(table, on_escalate, 200), random_frontier(table, on_escalate, np.linspace(0, 1, 2001)), oracle_frontier(table, on_escalate)
    assert np.isclose(room['oracle_accuracy'], best['accuracy'][-1])
    assert np.isclose(room['random_accuracy'], np.interp(room['oracle_cost']*1e6, chance['cost'], chance['accuracy']), atol=2e-3)
    enough = best['accuracy'] >= room['large_accuracy'] - 1e-9
    assert np.isclose(room['cost_share_to_match_large'], best['cost'][enough][0]/(room['large_cost']*1e6))
    assert np.isclose(room['gain'], room['oracle_accuracy'] - room['random_accuracy']) and room['gain_low'] <= room['gain'] <= room['gain_high']

@pytest.mark.parametrize('cost', ['full_flops', 'cents'])
def test_headroom_in_another_cost(cost):
    table, per = toy_table(120), 1 if cost == 'cents' else 1e6
    room, best = headroom(table, 'append', 50, cost=cost), oracle_frontier(table, cost=cost)
    assert np.isclose(room['oracle_accuracy'], best['accuracy'][-1]) and np.isclose(room['oracle_cost']*per, best['cost'][-1])
    assert np.isclose(room['large_cost']*per, table.large_only()[cost].mean())
    assert ('at US cents' in report_tables.headroom_markdown([room], cost=cost)) == (cost == 'cents')

def test_headroom_says_when_the_large_model_is_out_of_reach():
    table = toy_table(30)
    correct = np.where(np.isnan(table.correct), np.nan, 0.); correct[:, 0] = 1
    room = headroom(replace(table, correct=correct), 'append', 50)
    assert room['cost_share_to_match_large'] == np.inf and 'not reached' in report_tables.headroom_markdown([room])

# ---- the recovered share ------------------------------------------------------------------------------------------------------------
def oracle_points(table, e):
    "(cost, correct) [point, problem] of hindsight: problems are made right one by one, the cheapest extra cost first."
    grid, reach = outcome_grid(table, e), np.arange(table.obs.shape[1] + 1) <= table.n_steps[:, None]
    price = np.where(reach, grid['paper_flops'], np.inf)
    right = np.where(grid['correct'] == 1, price, np.inf)
    order = [i for i in np.argsort(right.min(1) - price.min(1), kind='stable') if np.isfinite(right[i].min())]
    rows, t = np.arange(len(table)), price.argmin(1)
    out = [[grid[k][rows, t] for k in ('paper_flops', 'correct')]]
    for i in order:
        t = t.copy(); t[i] = right[i].argmin()
        out.append([grid[k][rows, t] for k in ('paper_flops', 'correct')])
    return [np.stack(v) for v in zip(*out)]

@pytest.mark.parametrize('e', ['append', 'regenerate'])
def test_hindsight_recovers_everything_and_chance_nothing(e):
    table, hazards = toy_table(150), np.linspace(0, 1, 201)
    best = oracle_points(table, e)
    got = frontier_share(table, [v.mean(1) for v in best], best, e, n_boot=50)
    assert np.isclose(got['share'], 1, atol=1e-6) and .9 < got['share_low'] <= got['share_high'] < 1 + 1e-6
    o = random_outcome(table, hazards, e)
    chance = [o[k].T if o[k].shape[0] == 150 else o[k] for k in ('paper_flops', 'correct')]
    got = frontier_share(table, (hazards, hazards), chance, e, n_boot=50)
    assert np.isclose(got['share'], 0, atol=1e-9) and got['points'] == 201
    assert np.isclose(got['share_low'], 0, atol=1e-9) and np.isclose(got['share_high'], 0, atol=1e-9)

def test_the_share_is_the_area_between_straight_lines():
    "Against the frontiers of notebook 04 and an integral written out."
    table = toy_table(120)
    flat = [table.outcome(np.minimum(t, table.n_steps), 'append') for t in (0, 1, 3)]
    points = [np.stack([o[k] for o in flat]) for k in ('paper_flops', 'correct')]
    cal = (np.array([3., 2., 1.]), np.array([.9, .8, .85])) # the second is beaten on calibration
    chance, best = random_frontier(table, p=np.linspace(0, 1, 201)), oracle_frontier(table)
    small = table.outcome(table.n_steps, 'append')
    x = np.linspace(small['paper_flops'].mean(), max(chance['cost'][-1], table.large_only()['paper_flops'].mean()), 401)
    knots = sorted([(small['paper_flops'].mean(), small['correct'].mean())] + [(points[0][i].mean(), points[1][i].mean()) for i in (0, 2)])
    area = lambda y: ((y[1:] + y[:-1])/2).sum()
    low, high, mine = (np.interp(x, *z) for z in ((np.maximum.accumulate(chance['cost']), chance['accuracy']), (best['cost'], best['accuracy']), zip(*knots)))
    got = frontier_share(table, cal, points, n_boot=20)
    assert np.isclose(got['share'], area(mine - low)/area(high - low), rtol=1e-9) and got['points'] == 2
    assert got == frontier_share(table, cal, points, n_boot=20, area=routing_area(table, n_boot=20))

def test_the_share_knows_no_order_of_problems():
    table = toy_table(80)
    points = [np.stack([o[k] for o in (table.outcome(np.minimum(t, table.n_steps), 'append') for t in (0, 2))]) for k in ('paper_flops', 'correct')]
    order = np.random.default_rng(0).permutation(80)
    a = frontier_share(table, ([2, 1], [2, 1]), points, n_boot=40)
    b = frontier_share(outcomes_module.take_rows(table, order), ([2, 1], [2, 1]), [v[:, order] for v in points], n_boot=40)
    assert all(np.isclose(a[k], b[k]) for k in a)

def test_routing_gain_reads_the_rows(with_ours):
    test, cal = toy_table(60), toy_table(60, 'calibration')
    rows, grid = read_rows(with_ours/'methods'/'toy.csv'), pd.read_csv(with_ours/'methods'/'toy-grid.csv')
    gain = routing_gain(test, cal, rows, grid, n_boot=40)
    assert gain[['method', 'on_escalate']].values.tolist() == [
        ['STEER (rest)', 'append'], ['STEER (rest)', 'regenerate'], ['Ours', 'append'], ['Ours (full)', 'regenerate'],
        ['Bare score_logit', 'append'], ['Bare score_logit', 'regenerate']]
    steer = fit_steer(toy_table(60, 'train'))
    found, outcomes = grid_search(steer, cal), [replay(steer, test, x) for x in grid_search(steer, cal).thresholds]
    want = frontier_share(test, (found.cost, found.accuracy), [np.stack([o[k] for o in outcomes]) for k in ('paper_flops', 'correct')], n_boot=40)
    assert all(np.isclose(gain.iloc[0][k], want[k]) for k in want)
    pd.testing.assert_frame_equal(gain, routing_gain(test, cal, rows.sample(frac=1, random_state=0), grid, n_boot=40))
    md = gain_markdown(gain)
    assert '| Bare threshold on score_logit, regenerate | ' in md and f'{100*gain["share"][0]:.1f}<br><sub>[' in md and '</sub> (1) |' in md

def test_routing_gain_in_cents(api):
    test, cal = toy_table(60), toy_table(60, 'calibration')
    rows, grid = read_rows(api/'methods'/'toy.csv', cost='cents'), pd.read_csv(api/'methods'/'toy-grid.csv')
    gain = routing_gain(test, cal, rows, grid, n_boot=40, cost='cents')
    steer = fit_steer(toy_table(60, 'train'))
    found = grid_search(steer, cal, cost='cents')
    outcomes = [replay(steer, test, x) for x in found.thresholds]
    want = frontier_share(test, (found.cost, found.accuracy), [np.stack([o[k] for o in outcomes]) for k in ('cents', 'correct')], cost='cents', n_boot=40)
    assert all(np.isclose(gain.iloc[0][k], want[k]) for k in want)
    with pytest.raises(ValueError, match='toy: the calibration grid is in cents, not in paper_flops'): routing_gain(test, cal, rows, grid, n_boot=2)

# ---- equal accuracy -----------------------------------------------------------------------------------------------------------------
def line(method, correct, flops, threshold=0., chosen=1):
    return frame(correct, [1, 1], [1e6*f for f in flops], threshold, method).assign(chosen=chosen)

def two(ours, flops):
    "Two problems; STEER goes from (cost 1, accuracy 0) over (4, .5) to (6, 1); the large model costs 10."
    return pd.concat([line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [10, 10]), line('STEER (rest)', [0, 0], [1, 1], 0., 0),
                      line('STEER (rest)', [.5, .5], [4, 4], .5), line('STEER (rest)', [1, 1], [6, 6], 1., 0), line('Ours', ours, flops)])

@pytest.mark.parametrize('ours, flops, ratio, difference', [
    ([.75, .75], [2, 2], 2/5, .75 - 1/6), # at .75 STEER costs 5; for 2 it reaches a third of the way to .5
    ([.5, .5], [4, 4], 1., 0.),           # a point of STEER's own
    ([1, 1], [8, 8], 8/6, 0.),            # no dearer point helps it
    ([0, 0], [1, 1], 1., 0.)])
def test_equal_accuracy_by_hand(ours, flops, ratio, difference):
    got = compare_at_equal_accuracy(two(ours, flops), n_boot=20)
    for k in ('', '_low', '_high'): # both problems are the same: every resample is
        assert np.isclose(got[f'cost_ratio{k}'], ratio) and np.isclose(got[f'accuracy_difference{k}'], difference)
        assert np.isclose(got[f'cost_difference{k}'], flops[0] - flops[0]/ratio)
    assert (got['n'], got['points'], got['wins']) == (2, 3, ratio < 1)

def test_comparisons_are_paired():
    "Ours costs half of STEER on every problem, however much problems differ: the ratio is known exactly."
    r = np.random.default_rng(0)
    flops, right = np.exp(r.normal(0, 2, 50)), (r.random(50) < .7).astype(int)
    of = lambda m, c, f, **kw: frame(c, [1]*50, 1e6*f, method=m, **kw)
    rows = pd.concat([of('Small only', [0]*50, .01*flops), of('Large only', [1]*50, 9*flops), of('STEER (rest)', right, flops), of('Ours', right, .5*flops)])
    got = compare_at_equal_accuracy(rows, n_boot=100)
    assert np.isclose(got['cost_ratio_low'], .5) and np.isclose(got['cost_ratio_high'], .5) and got['cost_high'] > 1.5*got['cost_low'] and got['wins']

def test_an_accuracy_out_of_reach():
    rows = two([1, 1], [3, 3])
    rows.loc[rows['method'].isin(['Large only', 'STEER (rest)']) & (rows['correct'] == 1), 'correct'] = .9
    got = compare_at_equal_accuracy(rows, n_boot=20)
    assert np.allclose([got['other_cost'], got['cost_ratio'], got['cost_difference']], [6, .5, -3]) and not got['reached'] and got['wins']
    assert '**0.50†** <sub>[0.50, 0.50]' in comparison_markdown(pd.DataFrame([got]))
    got = compare_at_equal_accuracy(rows.assign(paper_flops=rows['paper_flops'].mask(rows['method'] == 'Ours', .5e6)), n_boot=20)
    assert np.isclose(got['accuracy_difference'], 1.), 'nothing is that cheap: the cheapest spot stands in'
    with pytest.raises(ValueError, match=r'no chosen row of Ours \(full\)'): compare_at_equal_accuracy(rows, ('Ours (full)', 'append'), n_boot=2)
    with pytest.raises(ValueError, match=r'no rows of STEER \(next\)'): compare_at_equal_accuracy(rows, other=('STEER (next)', 'append'), n_boot=2)

def test_comparisons_in_cents_by_hand():
    "The same two problems, priced apart from their FLOPs: the small model is free."
    rows = two([.75, .75], [2, 2])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: .3, 6e6: .5, 2e6: .1})
    got = compare_at_equal_accuracy(rows, n_boot=20, cost='cents')
    assert np.allclose([got['cost'], got['other_cost'], got['cost_ratio'], got['accuracy_difference']], [.1, .4, .25, .75 - 1/6]) and got['wins']

def test_nothing_for_nothing_is_a_tie_and_something_for_nothing_is_not():
    rows = two([0, 0], [1, 1])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: .3, 6e6: .5})
    got = compare_at_equal_accuracy(rows, n_boot=20, cost='cents')
    assert (got['cost_ratio'], got['cost_ratio_low'], got['cost_ratio_high'], got['wins'], got['loses']) == (1, 1, 1, False, False)
    rows.loc[rows['method'] == 'Ours', 'cents'] = .3 # as accurate as the small model, which is free
    got = compare_at_equal_accuracy(rows, n_boot=20, cost='cents')
    assert got['cost_ratio'] == got['cost_ratio_low'] == np.inf and got['loses']
    assert '∞ <sub>[∞, ∞]' in comparison_markdown(pd.DataFrame([got]))

def everyone(ours, flops, **others):
    "`two` with more methods, each (correct, flops) at one threshold."
    return pd.concat([two(ours, flops), *(line(m, *of) for m, of in others.items())])

def test_comparisons_are_with_everyone_there():
    others = {'RSD': ([1, 1], [2, 2]), 'SpecReason (greedy)': ([.5, .5], [5, 5]), 'Ours (full)': ([1, 1], [3, 3]), 'Ours (per step)': ([0, 0], [3, 3]),
              'Random': ([1, 1], [1, 1]), 'Oracle': ([1, 1], [1, 1])}
    pairs = compare_with(everyone([.75, .75], [2, 2], **others), n_boot=20)
    assert pairs[['ours', 'other']].values.tolist() == [[o, m] for o in ('Ours', 'Ours (full)', 'Ours (per step)')
                                                        for m in ('SpecReason (greedy)', 'RSD', 'STEER (rest)')]
    assert compare_with(everyone([.75, .75], [2, 2], **others), ('RSD',), n_boot=20)['other'].unique().tolist() == ['RSD']
    md = comparison_markdown(pairs)
    head = md.splitlines()[0]
    assert head == '| Benchmark | Method | against SpecReason (greedy) (chosen threshold only) | against STEER (rest) | against RSD (chosen threshold only) |'
    assert '| b | Ours | ' in md and '| b | Ours (full) | ' in md and '| b | Ours (per step)' not in md
    assert '**Against methods with no external model (SpecReason, STEER).** Ours wins 4 of 4 comparisons.' in md
    assert '**Against methods with an external model (RSD).** Ours wins 0 of 2 comparisons, and is clearly behind in 1. It does not win' in md
    assert '- b: Ours against RSD (clearly behind).\n- b: Ours (full) against RSD.' in md
    rest = pairs[pairs['ours'] == 'Ours (per step)']
    assert f'they win 0 of 3 comparisons, and are clearly behind in {rest["loses"].sum()}.' in md

def test_comparisons_say_where_ours_does_not_win():
    pairs = compare_with(two([.75, .75], [2, 2]), n_boot=20)
    assert 'Ours wins 1 of 1 comparisons.\n' in comparison_markdown(pairs) and '**0.40** <sub>[0.40, 0.40]' in comparison_markdown(pairs)
    pairs = pd.concat([pairs, compare_with(two([1, 1], [8, 8]), n_boot=20).assign(benchmark='c')])
    md = comparison_markdown(pairs)
    assert 'Ours wins 1 of 2 comparisons. It does not win (intervals not clear of 1 and 0):\n\n- c: Ours against STEER (rest).' in md
    behind = comparison_markdown(compare_with(two([.5, .5], [5, 5]), n_boot=20))
    assert 'Ours wins 0 of 1 comparisons, and is clearly behind in 1. It does not win' in behind and 'STEER (rest) (clearly behind).' in behind
    assert '| c | Ours | 1.33 <sub>' in md and 'external model (RSD)' not in md
    assert compare_with(pd.concat([line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [9, 9])]), n_boot=2).empty

# ---- cost shares and ablations ------------------------------------------------------------------------------------------------------
def test_cost_shares_of_the_run_and_the_paper(loaded):
    results, table, _ = loaded
    shares = cost_share_table(results, 'toy')
    small = shares.query('method == "Small only"').iloc[0]
    want = table.outcome(table.n_steps, 'append')['paper_flops'].mean()/table.large_only()['paper_flops'].mean()
    assert np.isclose(small['cost_share'], want) and small['cost_share_low'] < want < small['cost_share_high']
    paper = shares.query('source == "paper" and method == "Ours"')['cost_share'].round(3).tolist()
    assert paper == [.459, .587, .608]
    md = cost_share_markdown(shares)
    assert '| Ours | 45.9 | -0.1 | 58.7 | +3.2 | 60.8 | +0.9 |' in md and 'Large only' not in md and md.index('toy profile') < md.index('The paper')

def test_cost_shares_in_cents(priced):
    results, table, _ = priced
    shares = cost_share_table(results, 'toy')
    large = table.large_only()['cents'].mean()
    steer = shares.query('method == "STEER (rest)" and source == "this run"')['cost_share']
    assert np.allclose(steer, results.query('method == "STEER (rest)" and chosen == 1')['cost']/large)
    assert shares.query('method == "Small only"')['cost_share'].tolist() == [0.]
    md = cost_share_markdown(shares)
    assert 'computed from its Table 2; GPT-4.1-mini is the large model' in md and '| 7B Only | 0.0 | -10.0 | 0.0 | -5.2 | 0.0 | -14.8 |' in md
    assert '| Ours | 70.0 | -0.7 | 37.5 | +0.2 | 84.9 | -4.4 |' in md and 'GPT-4.1-mini |' not in md
    with pytest.raises(ValueError, match='unknown cost of a table of the paper'): cost_share_table(results.assign(cost_in='full_flops'), 'toy')

def test_ablations_by_hand():
    large = line('Large only', [1, 1], [10, 10])
    single = pd.concat([line('short', c, f, .02).assign(seed=i) for i, (c, f) in enumerate((([1, 1], [2, 4]), ([1, 0], [5, 5])))])
    r = ablation_table(pd.concat([large, single.drop(columns='seed').assign(method='Ours')]), single, n_boot=200).iloc[0]
    assert (r['method'], r['alpha'], r['n'], r['seeds'], r['accuracy'], r['accuracy_min'], r['accuracy_max']) == ('short', .02, 2, 2, .75, .5, 1.)
    assert np.isclose(r['cost_share'], .4) and np.allclose([r['cost_share_min'], r['cost_share_max']], [.3, .5])
    assert r['miss'] == .25 and (r['miss_low'], r['miss_high'], r['miss_min'], r['miss_max']) == (0., .5, 0., .5)
    assert (r['accuracy_low'], r['accuracy_high']) == (.5, 1.), 'resamples of the mean over seeds: 1 and .5 a problem'
    money = ablation_table(large.assign(cents=.1), single.assign(cents=.03), n_boot=20, cost='cents').iloc[0]
    assert np.isclose(money['cost_share'], .3)
    with pytest.raises(ValueError, match='single seeds have other problems than the rest'): ablation_table(large, single.assign(problem='x'))

def test_ablations_come_from_their_file(with_ours, run):
    single, receipts = load_seeds(with_ours, 'toy')
    table = ablation_table(read_rows(with_ours/'methods'/'toy.csv'), single, 50)
    assert table[['method', 'seeds']].values.tolist() == [['Ours', 2], ['Ours (full)', 1], ['short', 2]]
    md = ablation_markdown(table)
    assert '| toy | Ours (full), regenerate | 0.02 | 60 | 1 | ' in md and '| toy | short | ' in md and md.count('–') == 2*3 + 1
    assert len(receipts) == 6 and load_seeds(run, 'toy') == (None, None)
    text = (with_ours/'methods'/'toy-ablations.csv').read_text()
    (with_ours/'methods'/'bad-ablations.csv').write_text(text.replace(',seed\n', ',sede\n'))
    with pytest.raises(ValueError, match="has no column 'seed': run nbs/04_baselines.ipynb again"): load_seeds(with_ours, 'bad')

# ---- tables -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('paper, factor', [(PAPER_TABLE_1, 1), (PAPER_TABLE_2, 100)], ids=['Table 1', 'Table 2'])
def test_the_papers_accuracy_per_cost_follows_from_its_columns(paper, factor):
    "Every printed A/C but the one misprint; Table 1 is in percent, Table 2 a fraction."
    odd = []
    for method in paper['rows']:
        for benchmark, ((_, accuracy), (_, spent), (text, ac)) in zip(paper['benchmarks'], printed(paper, method)):
            if text == '--': assert spent == 0 and np.isnan(ac)
            elif abs(accuracy/factor/spent - ac) >= .02*ac: odd.append((method, benchmark, text))
    assert odd == ([('RSD', 'OmniMath', '1.52‡')] if paper is PAPER_TABLE_2 else [])

def test_the_papers_tables_are_complete():
    for i, paper in enumerate((PAPER_TABLE_1, PAPER_TABLE_2)):
        assert {s['paper'][i] for s in METHOD_STYLE.values() if s['paper']} == set(paper['rows'])
        assert {paper['small'], paper['large']} == set(list(paper['rows'])[:2]) and all(len(r) == 4 for r in paper['rows'].values())
        assert [r[0] for r in paper['rows'].values()] == ['--', '--', 'no', 'yes', 'no', 'no']
    marks = {t[-1] for m in PAPER_TABLE_2['rows'] for cell in printed(PAPER_TABLE_2, m) for t, _ in cell if t[-1] in '†‡'}
    assert marks == {n[0] for n in PAPER_TABLE_2['notes']} and round(.402/.2932, 2) == 1.37

GOLDEN = r'''% generated by nbs/05_results.ipynb, golden profile; needs booktabs, amssymb and graphicx
\resizebox{\linewidth}{!}{%
\begin{tabular}{lcrrrrrrrrr}
\toprule
\multicolumn{11}{l}{\emph{This run, golden profile (4 b test problems; $10^{6}$ FLOPs; [paired bootstrap 95\% interval])}} \\
 & Ext. & \multicolumn{3}{c}{b} \\
\cmidrule(lr){3-5}
Method & models & Acc$\uparrow$ & FLOPs$\downarrow$ & A/C$\uparrow$ \\
\midrule
Large only & -- & 75.0 & 4.00 & 18.8 \\
 & & {\tiny [75.0, 75.0]} & {\tiny [4.00, 4.00]} & {\tiny [18.8, 18.8]} \\
STEER (rest), regenerate & $\times$ & 50.0 & 1.50 & 33.3 \\
 & & {\tiny [50.0, 50.0]} & {\tiny [1.50, 1.50]} & {\tiny [33.3, 33.3]} \\
\midrule
'''

def test_golden_tex():
    rows = pd.concat([frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6, 1e6, 2e6, 2e6], .3, 'STEER (rest)').assign(on_escalate='regenerate'),
                      frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only')])
    results = evaluate(rows, n_boot=1)
    for c in ('accuracy', 'cost', 'ac_percent'): results[f'{c}_low'] = results[f'{c}_high'] = results[c]
    tex = to_tex(table_flops(results, 'golden'))
    head, paper = tex.split(r'\multicolumn{11}{l}{\emph{Table 1 of the paper')
    assert head == GOLDEN
    assert r'Ours & $\times$ & 94.5 & 2.03 & 46.55 & 82.8 & 5.34 & 15.5 & 29.1 & 8.24 & 3.53 \\' in paper
    assert r'RSD & $\checkmark$ & 94.4 & 2.27 & 41.59' in paper and paper.endswith('\\bottomrule\n\\end{tabular}}\n')
    assert tex.count('{') == tex.count('}')

GOLDEN_API = r'''% generated by nbs/05_results.ipynb, golden profile; needs booktabs, amssymb and graphicx
\resizebox{\linewidth}{!}{%
\begin{tabular}{lcrrrrrrrrr}
\toprule
\multicolumn{11}{l}{\emph{This run, golden profile (4 b test problems; US cents; [paired bootstrap 95\% interval])}} \\
 & Ext. & \multicolumn{3}{c}{b} \\
\cmidrule(lr){3-5}
Method & models & Acc$\uparrow$ & Cost$\downarrow$ & A/C$\uparrow$ \\
\midrule
Small only & -- & 25.0 & 0 & -- \\
 & & {\tiny [25.0, 25.0]} & {\tiny [0, 0]} &  \\
Large only & -- & 75.0 & 0.0125 & 60.0 \\
 & & {\tiny [75.0, 75.0]} & {\tiny [0.0125, 0.0125]} & {\tiny [60.0, 60.0]} \\
RSD & $\checkmark$ & 50.0 & 0.00400 & 125 \\
 & & {\tiny [50.0, 50.0]} & {\tiny [0.00400, 0.00400]} & {\tiny [125, 125]} \\
\midrule
'''

def golden_api():
    rows = pd.concat([frame([1, 0, 0, 0], [1, 1, 0, 1], [1e6]*4, method='Small only', cents=[0.]*4),
                      frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only', cents=[.01, .02, .01, .01]),
                      frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6]*4, .3, 'RSD', [.016, 0., 0., 0.]).assign(on_escalate='regenerate')])
    results = evaluate(rows, n_boot=1, cost='cents')
    for c in ('accuracy', 'cost', 'ac_fraction', 'ac_percent'): results[f'{c}_low'] = results[f'{c}_high'] = results[c]
    return results

def test_golden_tex_of_table_2():
    tex = to_tex(table_api(golden_api(), 'golden'))
    head, paper = tex.split(r'\multicolumn{11}{l}{\emph{Table 2 of the paper')
    assert head == GOLDEN_API
    assert r'7B Only & -- & 85.2$^\dagger$ & 0.0 & -- & 79.6 & 0.0 & -- & 28.2 & 0.0 & -- \\' in paper
    assert r'Ours & $\times$ & 94.5 & 0.0205 & 46.09 & 85.0 & 0.0493 & 17.24 & 38.6 & 0.285 & 1.35 \\' in paper and r'1.52$^\ddagger$ \\' in paper
    assert tex.count('{') == tex.count('}') and not set('†‡∞') & set(tex) and tex.count(r'\begin{tabular}') == tex.count(r'\end{tabular}') == 1
    after = paper.split('\\end{tabular}}\n')[1].splitlines()
    assert len(after) == 3 and "micro-large behind a local server, billed at GPT-4.1-mini's prices. The small model costs nothing." in after[0]

def test_table_2_by_hand():
    table = table_api(golden_api(), 'golden')
    mine = table[table['source'] == 'this run'].set_index('method')
    assert mine['cost'].tolist() == [0, .0125, .004] and mine['ac'].tolist()[1:] == [60, 125] and np.allclose(mine['ac_percent'][1:], [6000, 12500])
    assert mine.loc['Small only', 'ac_text'] == '--' and np.isnan(mine.loc['Small only', 'ac']) and mine.loc['RSD', 'label'] == 'RSD'
    paper = table[table['source'] == 'paper'].set_index(['method', 'benchmark'])
    assert paper.loc[('Ours', 'GSM8K'), ['accuracy', 'cost', 'ac', 'ac_percent']].tolist() == [94.5, .0205, 46.09, 4609]
    assert paper.loc[('RSD', 'OmniMath'), 'ac'] == 1.52 and paper.loc[('RSD', 'OmniMath'), 'ac_text'] == '1.52‡'
    assert len(paper) == 18 and paper['accuracy_low'].isna().all()

def test_table_2_says_whose_money_it_is(priced, tmp_path):
    results, table, _ = priced
    made = table_api(results, 'toy', table.models[-1])
    md, tex = to_markdown(made), to_tex(made)
    for text in (md, tex): assert "toy large behind a local server, billed at GPT-4.1-mini's prices" in text
    assert md.count('| Small only | – | ') == 1 and '0<br><sub>[0, 0]</sub> | -- |' in md and '85.2†' in md and '\n† On GSM8K' in md and '\n‡ Printed so' in md
    assert 'billed at' in figure_caption(results, 'toy', table.models[-1]) and 'log scale' not in figure_caption(results, 'toy')
    csv = pd.read_csv(save_table(tmp_path/'table2', made, tex=tex, md=md)[0])
    assert {'cost_low', 'ac', 'ac_percent', 'billing'} <= set(csv) and csv['ac_percent'].iloc[1] == pytest.approx(100*csv['ac'].iloc[1])
    assert billed_as('gpt-4.1-mini-2025-04-14') == 'gpt-4.1-mini at its published prices' and billed_as('served:micro-large').startswith('micro-large behind')

def test_tables_take_results_in_their_own_cost(loaded, priced):
    with pytest.raises(ValueError, match="the results are in cents: evaluate them with cost='paper_flops' for this table"): table_flops(priced[0], 'toy')
    with pytest.raises(ValueError, match="the results are in paper_flops: evaluate them with cost='cents' for this table"): table_api(loaded[0], 'toy')

def test_details_show_the_other_unit(loaded, priced):
    flops, cents = details_markdown(loaded[0]), details_markdown(priced[0])
    assert 'Full FLOPs, 10^6 | A/C, fraction per 10^6 FLOPs' in flops and 'Cost, % of large | A/C, % per cent' in cents
    small, large = cents.splitlines()[2:4]
    assert ' | 0.0<br><sub>[0.0, 0.0]</sub> | -- | ' in small and ' | 100.0<br><sub>[100.0, 100.0]</sub> | ' in large and 'nan' not in cents + flops

@pytest.mark.parametrize('x, text', [(0, '0'), (101.2, '101'), (99.96, '100'), (12.34, '12.3'), (9.996, '10.0'), (1.234, '1.23'), (.5, '0.500'), (.0293, '0.0293'),
                                     (.00934, '0.00934'), (.000123, '0.000123'), (-.0293, '-0.0293'), (np.nan, '--'), (np.inf, '∞')])
def test_three_digits(x, text): assert report_tables._digits(x) == text

def test_tables_hold_this_run_and_the_paper_apart(loaded):
    results, _, _ = loaded
    table = table_flops(results, 'toy')
    assert table.loc[table['source'] == 'paper', 'accuracy_low'].isna().all() and table.loc[table['source'] == 'this run', 'accuracy_low'].notna().all()
    md = to_markdown(table)
    ours, paper = md.split('**Table 1 of the paper')
    assert 'toy profile' in ours and 'GSM8K' not in ours and 'GSM8K' in paper and 'toy' not in paper
    order = [l.split(' | ')[0][2:] for l in ours.splitlines()[4:] if l.startswith('| ')]
    assert order == ['Small only', 'Large only', 'Random, at the cost of STEER (rest)', 'STEER (rest)', 'STEER (rest), regenerate', 'Oracle, in hindsight',
                     'Oracle, in hindsight, regenerate']

def test_same_results_same_bytes(loaded, tmp_path):
    results, table, _ = loaded
    written = []
    for name in 'ab':
        frame = table_flops(results, 'toy')
        paths = save_table(tmp_path/name/'table1', frame, tex=to_tex(frame), md=to_markdown(frame))
        paths += save_figure(draw_accuracy_cost(results, dict(toy=table)), tmp_path/name/'figure', figure_caption(results, 'toy'))
        written.append({p.name: p.read_bytes() for p in paths})
    assert written[0] == written[1] and set(written[0]) == {'table1.csv', 'table1.tex', 'table1.md', 'figure.pdf', 'figure.png', 'figure.md'}
    assert 'cost' in pd.read_csv(tmp_path/'a'/'table1.csv') and b'CreationDate' not in written[0]['figure.pdf'] and sorted(p.name for p in (tmp_path/'a').iterdir()) == sorted(written[0])

def test_the_cents_figure_is_the_same_bytes_twice(priced, tmp_path):
    results, table, _ = priced
    made = [[p.read_bytes() for p in save_figure(draw_accuracy_cost(results, dict(toy=table)), tmp_path/n, figure_caption(results, 'toy'))] for n in 'ab']
    assert made[0] == made[1] and len(made[0]) == 3

def test_csv_keeps_ten_digits(loaded, tmp_path):
    results, _, _ = loaded
    back = pd.read_csv(save_table(tmp_path/'t', table_flops(results, 'toy'))[0])
    mine = back[back['source'] == 'this run'].iloc[0]
    assert np.isclose(mine['accuracy'], 100*results.query('method == "Small only"')['accuracy'].item(), rtol=1e-9)
    assert not any(c.endswith(('_text', '_interval')) for c in back)

# ---- figures ------------------------------------------------------------------------------------------------------------------------
def boxes(fig):
    renderer = fig.canvas.get_renderer()
    return [(t.get_text(), t.get_window_extent(renderer)) for ax in fig.axes for t in ax.texts]

def judged(results):
    "With rows of the methods that ask another model, standing in: their sweeps lie elsewhere."
    some = results[(results['method'] == 'STEER (rest)') & (results['on_escalate'] == 'regenerate')]
    moved = lambda m, by, more: some.assign(method=m, accuracy=(some['accuracy'] + more).clip(upper=1), **{f'cost{k}': some[f'cost{k}']*by for k in ('', '_low', '_high')})
    return pd.concat([results, moved('SpecReason (greedy)', 1.3, 0), moved('SpecReason (expected)', 1.4, 0), moved('RSD', .8, .03)])

@pytest.mark.parametrize('width, panels, source, labels', [(2.7, 1, 'loaded', 7), (5.5, 3, 'loaded', 7), (2.7, 1, 'with_ours', 9), (5.5, 3, 'with_ours', 9),
                                                           (2.7, 1, 'priced', 7), (5.5, 3, 'priced', 7)])
@pytest.mark.parametrize('more', [0, 2], ids=['', 'judged'])
def test_labels_do_not_overlap_and_stay_inside(request, width, panels, source, labels, more):
    found = request.getfixturevalue(source)
    results, table, _ = load_results(found, 'toy', n_boot=100) if source == 'with_ours' else found
    variant = results[results['method'] == 'Ours']
    results = pd.concat([results, variant.assign(method='Ours (per step)'), variant.assign(method='Ours (full)')]) # not drawn
    if more: results = judged(results) # two of the three are drawn
    names = [f'toy{i}' for i in range(panels)]
    many = pd.concat([results.assign(benchmark=b) for b in names])
    fig = draw_accuracy_cost(many, {b: table for b in names}, width, 2.5)
    with paper_style(): fig.draw_without_rendering()
    assert fig.get_size_inches().tolist() == [width, 2.5]
    found = boxes(fig)
    assert len(found) == panels*(labels + more)
    for i, (_, a) in enumerate(found):
        assert fig.bbox.x0 <= a.x0 and a.x1 <= fig.bbox.x1 and fig.bbox.y0 <= a.y0 and a.y1 <= fig.bbox.y1
        for name, b in found[:i]: assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1), (found[i][0], name)

def test_cents_start_at_nothing_on_a_linear_axis(loaded, priced):
    for (results, table, _), scale in ((loaded, 'log'), (priced, 'linear')):
        ax = draw_accuracy_cost(results, dict(toy=table)).axes[0]
        assert ax.get_xscale() == scale and ('US cents' in ax.get_xlabel()) == (scale == 'linear')
        if scale == 'linear': assert ax.get_xlim()[0] < 0 and 0 in ax.get_xticks() and all(np.isfinite(l.get_xdata()).all() for l in ax.get_lines())

def test_captions_say_how_the_judged_are_drawn(loaded, priced):
    plain = figure_caption(loaded[0], 'toy')
    said = figure_caption(judged(loaded[0]), 'toy')
    assert 'SpecReason' not in plain and said.startswith(plain) and 'SpecReason is drawn with its expected grade.' in said

def test_style_is_not_left_behind():
    import matplotlib
    before = matplotlib.rcParams['font.size']
    with paper_style(): assert matplotlib.rcParams['font.size'] == 8 and matplotlib.rcParams['pdf.fonttype'] == 42
    assert matplotlib.rcParams['font.size'] == before

def test_redrawing_needs_no_torch_and_is_quick(run, tmp_path):
    code = f'''
import sys, time; start = time.process_time()
from stepwise_routing.results import *
r, t, g = load_results({str(run)!r}, 'toy')
frame = table_flops(r, 'toy')
save_table({str(tmp_path/"t")!r}, frame, tex=to_tex(frame), md=to_markdown(frame) + details_markdown(r))
headroom(t, 'append')
save_figure(draw_accuracy_cost(r, dict(toy=t)), {str(tmp_path/"f")!r})
assert not [m for m in ("torch", "transformers", "sklearn") if m in sys.modules]
print(time.process_time() - start)'''
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 10

# ---- what falls short, and bad input ------------------------------------------------------------------------------------------------
def test_shortfalls_are_named(loaded):
    results, _, grid = loaded
    said = '\n'.join(shortfalls(results, grid))
    assert 'toy: 60 test problems, fewer than 300' in said and 'No row for Ours: the policy of nbs/03_policy.ipynb' in said and 'No row for STEER (next)' in said
    for method in ('SpecReason (greedy)', 'SpecReason (expected)', 'RSD'): assert f'No row for {method}: its walks were switched off' in said
    fewer = pd.concat([grid, grid.assign(method='RSD', on_escalate='regenerate', n=20)], ignore_index=True)
    assert 'They walk, so the thresholds of RSD were chosen on 20 calibration problems, those of the others on 60.' in shortfalls(results, fewer)
    assert 'They walk' not in said
    bad = grid.assign(accuracy=0.)
    assert 'STEER (rest) on toy: no threshold came within 2 points of the large model' in '\n'.join(shortfalls(results, bad))
    assert 'STEER (rest) on toy' not in '\n'.join(shortfalls(results, grid.assign(accuracy=grid['large_accuracy'])))

def test_shortfalls_of_ours_are_named(with_ours):
    results, _, grid = load_results(with_ours, 'toy', n_boot=200)
    _, receipts = load_seeds(with_ours, 'toy')
    said = '\n'.join(shortfalls(results, grid, receipts, ['toy']))
    line = 'toy: no threshold had a calibrated bound on the miss rate of at most alpha = 0.02 for Ours (1 of 2 seeds, bound up to 0.040).'
    assert line in said.splitlines()
    assert 'No row for Ours (per step): nbs/03_policy.ipynb left no such policy, or ours_next was off.' in said and 'No row for Ours:' not in said
    assert said.endswith('No ablations of the policy on toy.') and 'Ours on toy: no threshold came' not in said
    ours = results['method'] == 'Ours'
    low = results.assign(coverage_low=.9, coverage=.95, coverage_high=np.where(ours, .979, .981))
    said = shortfalls(low, grid)
    assert [s for s in said if 'coverage' in s] == ['toy: the coverage on test lies below 1 - alpha = 98% for Ours (95.0% [90.0, 97.9]).']

def test_shortfalls_of_the_api_setting_are_one_sentence_on_rows(priced):
    results, _, grid = priced
    said = shortfalls(results, grid.assign(accuracy=0.))
    assert all(s.startswith('API setting: ') for s in said)
    rows = [s for s in said if 'no rows for' in s]
    assert len(rows) == 1 and 'SpecReason (greedy); SpecReason (expected); RSD; STEER (next); Ours; Ours (full); Ours (per step)' in rows[0]
    assert any('STEER (rest) on toy: no threshold came within 2 points' in s for s in said)
    two = pd.concat([results, results[results['method'] != 'Random'].assign(benchmark='b')])
    assert [s for s in shortfalls(two, grid) if 'no rows for' in s][0].startswith('API setting: no rows for Random on b; SpecReason (greedy);')

# ---- reuse and settings -------------------------------------------------------------------------------------------------------------
def test_reuse_by_hand(tmp_path):
    rows = [('toy', 'STEER (rest)', 'append', 'test', 60, 11, 120., 100., 1.2, 90.), ('toy', 'RSD', 'regenerate', 'calibration', 60, 11, 250., 100., 2.5, 90.)]
    assert load_reuse(tmp_path, 'toy') is None
    save_rows(tmp_path/'methods'/'toy-reuse.csv', rows, REUSE_COLUMNS)
    md = reuse_markdown(load_reuse(tmp_path, 'toy').assign(setting='open'))
    assert '| open | STEER (rest) | test | 11 | 60 | 1.20<br><sub>120 / 100</sub> |' in md
    assert '1 of 2 grids needed more than 2 times as many: RSD (open, calibration): toy 2.50.' in md
    assert 'No grid needed more than 3 times' in reuse_markdown(load_reuse(tmp_path, 'toy').assign(setting='open'), most=3)
    save_rows(tmp_path/'methods'/'toy-reuse.csv', [r[:8] for r in rows], REUSE_COLUMNS[:8])
    with pytest.raises(ValueError, match="toy-reuse.csv has no column 'ratio': run nbs/04_baselines.ipynb again"): load_reuse(tmp_path, 'toy')

def test_a_run_has_one_setting_or_two(run, api, with_ours):
    assert api_benchmarks(run, ['toy', 'other']) == ['toy'] and api_benchmarks(with_ours.parent/'none', ['toy']) == []
    open_, priced = load_setting(run, ['toy'], 50), load_setting(api, ['toy'], 50, cost='cents')
    assert set(open_.results['cost_in']) == {'paper_flops'} and set(priced.results['cost_in']) == {'cents'} and priced.large == 'toy large'
    assert open_.receipts is None and open_.reuse is None and open_.singles == {}
    assert len(load_setting(with_ours, ['toy'], 50).receipts) == 6

def test_files_without_policies_are_no_policies(run, tmp_path):
    for name, columns in (('ablations', SEED_COLUMNS), ('policies', RECEIPT_COLUMNS)): save_rows(tmp_path/'methods'/f'toy-{name}.csv', [], columns)
    assert load_seeds(tmp_path, 'toy') == (None, None)

def test_old_files_need_no_cents_until_they_are_asked_for(run, tmp_path):
    old = pd.read_csv(run/'methods'/'toy.csv', dtype=str, keep_default_na=False).drop(columns='cents')
    old.to_csv(tmp_path/'toy.csv', index=False)
    pd.testing.assert_frame_equal(evaluate(read_rows(tmp_path/'toy.csv'), 50), evaluate(read_rows(run/'methods'/'toy.csv'), 50))
    with pytest.raises(ValueError, match="toy.csv has no column 'cents': run nbs/04_baselines.ipynb again") as e: read_rows(tmp_path/'toy.csv', cost='cents')
    assert '\n' not in str(e.value)

def broken(run, tmp_path, change):
    text = (run/'methods'/'toy.csv').read_text()
    path = tmp_path/'toy.csv'
    path.write_text(change(text))
    return path

@pytest.mark.parametrize('change, line', [
    (lambda t: t.replace('large_correct', 'big_correct', 1), "has no column 'large_correct': run nbs/04_baselines.ipynb again"),
    (lambda t: '\n'.join(t.split('\n')[:-2]) + '\n', 'has other problems than'),
    (lambda t: t + t.split('\n')[-2] + '\n', 'has other problems than'),
    (lambda t: t.replace(',append,0,', ',append,zero,', 1), "row .*: threshold is 'zero', not a number"),
    (lambda t: t[:t.rindex(',')] + ',\n', "cents is '', not a number"),
    (lambda t: '', 'is not a table of results'),
    (lambda t: t + 'a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q\n', 'is not a table of results')])
def test_bad_rows_get_a_clear_line(run, tmp_path, change, line):
    with pytest.raises(ValueError, match=line) as e: read_rows(broken(run, tmp_path, change))
    assert '\n' not in str(e.value)

def test_missing_artefacts_name_the_notebook(run, tmp_path):
    with pytest.raises(FileNotFoundError, match='notebook 02|02_rollouts'): load_results(tmp_path, 'toy')
    toy_table(60).save(tmp_path/'outcomes'/'toy-test.npz')
    with pytest.raises(FileNotFoundError, match='run nbs/04_baselines.ipynb first'): load_results(tmp_path, 'toy')
    (tmp_path/'methods').mkdir(); (tmp_path/'methods'/'toy.csv').write_bytes((run/'methods'/'toy.csv').read_bytes())
    with pytest.raises(FileNotFoundError, match='no calibration grid'): load_results(tmp_path, 'toy')
    (tmp_path/'methods'/'toy-grid.csv').write_bytes((run/'methods'/'toy-grid.csv').read_bytes())
    grid = tmp_path/'methods'/'toy-grid.csv'
    for there, name in (('unit', 'unitt'), ('cost', 'paper_flops')):
        grid.write_text((run/'methods'/'toy-grid.csv').read_text().replace(there, name, 1))
        with pytest.raises(ValueError, match=f"toy-grid.csv has no column '{there}': run nbs/04_baselines.ipynb again"): load_results(tmp_path, 'toy')
    toy_table(50).save(tmp_path/'outcomes'/'toy-test.npz')
    with pytest.raises(ValueError, match='hold different problems'): load_results(tmp_path, 'toy')

def test_unknown_methods_get_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown method 'STEER rest' \(did you mean 'STEER \(rest\)'\?\)"): method_label('STEER rest', 'append')
    table = toy_table(20)
    with pytest.raises(ValueError, match='no method "Large only"'):
        rows = outcome_rows(SmallOnly(), table, replay(SmallOnly(), table, 0.), 0.)
        evaluate(pd.DataFrame(rows, columns=COLUMNS))
