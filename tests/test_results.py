"Rows, intervals, metrics and loading: closed forms, and clear lines for bad input."
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from toy_runs import evaluated, frame, line, save_methods, settled, toy_run

from stepwise_routing.base.statistics import resamples
from stepwise_routing.method.comparison import COLUMNS, at_thresholds, grid_search, outcome_rows
from stepwise_routing.method.outcomes import replay, toy_table, undominated
from stepwise_routing.method.results import (
    METHOD_STYLE,
    REWRITES,
    cost_unit,
    headline,
    method_label,
    method_rank,
    read_rows,
    with_intervals,
)
from stepwise_routing.method.routers import ThresholdRouter, score_thresholds
from stepwise_routing.method.walks import SmallOnly
from stepwise_routing.run.config import changed
from stepwise_routing.run.own_routers import add_router
from stepwise_routing.run.stages import load_benchmark, load_run, read_table


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    run = toy_run(tmp_path_factory.mktemp('run'), 'gpt-4.1-mini')
    save_methods(run)
    return run

# ---- intervals ------------------------------------------------------------------------------------------------------
def ends(draws): return [with_intervals(dict(x=np.asarray(draws)))[f'x{end}'] for end in ('_low', '_high')]

def test_interval_of_a_mean_is_the_normal_one():
    x = np.random.default_rng(0).random(400) < .8
    low, high = ends(resamples(400, 20_000) @ x / 400)
    half = 1.96*x.std()/20
    assert np.isclose(high - low, 2*half, rtol=.04) and np.isclose((low + high)/2, x.mean(), atol=.003)

def test_intervals_cover_95_percent():
    r, W, hits = np.random.default_rng(1), resamples(150, 1000), 0
    for _ in range(400):
        low, high = ends(W @ r.normal(0, 1, 150) / 150)
        hits += low <= 0 <= high
    assert .915 <= hits/400 <= .975

def test_resamples_are_a_multinomial_of_the_problems():
    W = resamples(7, 20_000)
    assert (W[0] == 1).all(), 'the sample itself stands first'
    assert (W.sum(1) == 7).all() and np.allclose(W.mean(0), 1, atol=.02) and np.allclose(W.var(0), 6/7, atol=.03)
    assert (W == resamples(7, 20_000)).all() and (W != resamples(7, 20_000, seed=1)).any()

def test_undefined_and_infinite_draws():
    assert np.isnan(ends([1., 1., np.nan])).all()
    assert ends([1.]*51 + [np.inf]*50) == [1., np.inf]

# ---- evaluate -------------------------------------------------------------------------------------------------------
def test_every_metric_by_hand():
    rows = pd.concat([frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only'),
                      frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6, 1e6, 2e6, 2e6])])
    r = evaluated(rows).iloc[1]
    assert (r['accuracy'], r['coverage'], r['cost'], r['full_flops']) == (.5, .5, 1.5, 3.)
    assert np.isclose(r['ac_percent'], 50/1.5) and np.isclose(r['ac_fraction'], .5/1.5)
    assert np.isclose(r['large_share'], .4)
    assert (r['steps'], r['small_tokens'], r['large_tokens'], r['n']) == (5, 3, 4, 4)
    assert r['accuracy_vs_large'] == -.25 and r['cost_vs_large'] == -2.5
    assert (r['cost_in'], r['unit'], r['cost_share']) == ('paper_flops', 1e6, 1.5/4)

def test_misses_are_counted_against_other_draws():
    "The large model, half right when drawn again, misses a quarter of that; a router that is right misses nothing."
    large, again = [1, 1, 0, 0], [1., .5, .5, 0.]
    rows = pd.concat([frame(large, large, [4e6]*4, method='Large only', large_again=again),
                      frame([0]*4, large, [1e6]*4, method='Small only', large_again=again),
                      frame([1]*4, large, [1e6]*4, large_again=again)])
    r = evaluated(rows).set_index('method')
    assert r['miss'].to_dict() == {'Large only': .125, 'Small only': .5, 'X': 0.}
    assert r['excess'].to_dict() == {'Large only': 0., 'Small only': .375, 'X': -.125}
    assert r['coverage'].to_dict() == {'Large only': 1., 'Small only': .5, 'X': 1.}
    assert (r.loc['Large only', 'excess_low'], r.loc['Large only', 'excess_high']) == (0, 0), 'paired'

def test_cost_is_a_choice():
    "Every metric that knows a cost follows it; the others stay. Cents are never divided by the unit of FLOPs."
    large = [1, 1, 0, 1]
    rows = pd.concat([frame(large, large, [4e6]*4, method='Large only', cents=[.02, .02, .01, .03]),
                      frame([0]*4, large, [5e5]*4, method='Small only', cents=[0.]*4),
                      frame([1, 0, 1, 0], large, [1e6]*4, cents=[.01, 0., 0., .01])])
    of = {c: evaluated(rows, cost=c).set_index('method') for c in ('paper_flops', 'full_flops', 'cents')}
    c, flops = of['cents'].loc['X'], of['paper_flops']
    numbers = c['cost'], c['cost_share'], c['cost_vs_large'], c['ac_fraction'], c['ac_percent']
    assert np.allclose(numbers, [.005, .25, -.015, 100, 10_000])
    full = of['full_flops'].loc['X']
    assert full['cost'] == full['full_flops'] == 2*flops.loc['X', 'cost'] == c['full_flops'] == 2.
    same = ['accuracy', 'coverage', 'full_flops', 'steps', 'large_share', 'accuracy_vs_large_low', 'coverage_high']
    pd.testing.assert_frame_equal(flops[same], of['cents'][same])
    free = of['cents'].loc['Small only']
    assert (free['cost'], free['cost_low'], free['cost_high'], free['cost_share']) == (0, 0, 0, 0)
    assert np.isnan(free[['ac_percent', 'ac_fraction', 'ac_percent_low', 'ac_fraction_high']].astype(float)).all()

def test_costs_that_cannot_be_had_are_refused():
    rows = pd.concat([frame([1], [1], [4e6], method='Large only'), frame([1], [1], [1e6])])
    with pytest.raises(ValueError, match=r"unknown cost 'cent' \(did you mean 'cents'\?\)"):
        evaluated(rows, cost='cent')
    with pytest.raises(ValueError, match='the large model alone costs nothing'):
        evaluated(rows.assign(cents=0.), cost='cents')

def test_differences_are_paired():
    "Two methods that differ on one problem in a hundred: the difference is known far better than either."
    large = (np.random.default_rng(0).random(100) < .5).astype(int)
    other = large.copy(); other[np.flatnonzero(large)[0]] = 0
    rows = pd.concat([frame(large, large, np.full(100, 2e6), method='Large only'),
                      frame(other, large, np.full(100, 1e6))])
    r = evaluated(rows, 2000).iloc[1]
    assert r['accuracy_high'] - r['accuracy_low'] > .15
    assert r['accuracy_vs_large_low'] >= -.035 and r['accuracy_vs_large_high'] == 0
    assert r['cost_vs_large_low'] == r['cost_vs_large_high'] == -1

def test_row_order_changes_nothing(run):
    rows = read_rows(run.files.methods('toy', 'paper_flops'))
    a, b = evaluated(rows, 100), evaluated(rows.sample(frac=1, random_state=0), 100)
    keys = ['method', 'on_escalate', 'threshold']
    pd.testing.assert_frame_equal(*(x.sort_values(keys, ignore_index=True) for x in (a, b)))

def test_several_samples_of_a_problem_are_one_problem():
    rows = pd.concat([frame([1, 0, 1, 0], [1, 0, 1, 0], [1e6]*4, method='Large only'),
                      frame([1, 1, 0, 0], [1, 0, 1, 0], [1e6]*4)])
    rows['problem'], rows['sample'] = ['p0', 'p0', 'p1', 'p1']*2, [0, 1]*4
    r = evaluated(rows, 500)
    assert r['n'].tolist() == [2, 2]
    assert r['accuracy_low'].tolist() == [.5, 0.] and r['accuracy_high'].tolist() == [.5, 1.]

@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_frontier_is_what_nothing_beats(points):
    cost, accuracy = zip(*points)
    best = undominated(cost, -np.asarray(accuracy))
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b
    assert {points[i] for i in best} == {p for p in points if not any(beats(q, p) for q in points)}
    assert [cost[i] for i in best] == sorted({cost[i] for i in best})

# ---- loading --------------------------------------------------------------------------------------------------------
def test_a_run_has_one_unit_of_cost_or_two(run):
    results = load_run(run)
    assert list(results) == ['paper_flops', 'cents'] and results['cents'].large == 'toy large'
    assert [r.suffix for r in results.values()] == ['', '_cents'] and cost_unit(toy_table(2)) == 1e6
    for unit, r in results.items(): assert set(r.results['cost_in']) == {unit}
    first = results['paper_flops'].parts['toy']
    assert len(first.singles) == 0
    assert first.table.problem_id.tolist() == sorted(first.table.problem_id), 'in the order of the resamples'
    assert list(load_run(replace(run, config=changed(run.config, {'models.price': ''})))) == ['paper_flops']

def test_settings_stand_beside_what_they_were_on_calibration(run):
    part, keys = load_benchmark(run, 'toy', 'paper_flops'), ['method', 'on_escalate', 'threshold']
    both = part.results.merge(part.grid, on=keys)
    assert len(both) and (both['calibration_accuracy'] == both['accuracy_y']).all()
    large = part.grid.loc[np.isinf(part.grid['threshold']), 'cost'].iloc[0]
    assert np.allclose(both['calibration_cost_share'], both['cost_y']/large)
    assert part.results.query('method == "Small only"')['calibration_accuracy'].isna().all()

# ---- what Table 1 prints --------------------------------------------------------------------------------------------
def family(*costs): # of (method, reading, cost of its chosen threshold)
    rows = [line('Small only', [0, 1], [1, 1]), line('Large only', [1, 1], [10, 10])]
    rows += [line(m, [1, 1], [cost, cost]).assign(on_escalate=e) for m, e, cost in costs]
    return headline(settled(pd.concat(rows)).results)

def test_the_cheapest_variant_on_calibration_is_printed():
    rows = family(('STEER (rest)', 'append', 5), ('STEER (rest)', 'regenerate', 4), ('Ours', 'append', 7), ('Ours', 'regenerate', 2), ('Ours (nested)', 'append', 3), ('Ours (full)', 'append', 2))
    assert rows == {'STEER': ('STEER (rest)', 'regenerate'), 'Ours': ('Ours', 'append'),
                    'Ours, best': ('Ours (nested)', 'append')}
    assert family(('Ours', 'append', 3), ('Ours (full)', 'append', 4)) == {'Ours': ('Ours', 'append')}
    assert family(('short', 'append', 3)) == {}

def test_rows_have_names_and_an_order():
    assert sorted(['RSD', 'short', 'Random'], key=method_rank) == ['Random', 'RSD', 'short']
    names = [('STEER (rest)', 'append'), ('STEER (rest)', 'regenerate'), ('RSD', 'regenerate')]
    assert [method_label(*name) for name in names] == ['STEER (rest)', 'STEER (rest), regenerate', 'RSD']
    assert [METHOD_STYLE[m]['external'] for m in REWRITES] == ['no', 'yes']

def test_every_result_is_compared_with_the_large_model(run, tmp_path):
    table = toy_table(20)
    rows = outcome_rows(SmallOnly(), table, replay(SmallOnly(), table), 0.)
    with pytest.raises(ValueError, match='no method "Large only"'): evaluated(pd.DataFrame(rows, columns=COLUMNS))
    bare = toy_run(tmp_path)
    table.save(bare.files.outcomes('toy', 'test'))
    with pytest.raises(FileNotFoundError, match='run nbs/04b_comparison.ipynb first'): load_run(bare)

# ---- a router of one's own ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Patience(ThresholdRouter): # the one of CONTRIBUTING.md
    threshold: float = .5
    name = 'Patience'
    def score(self, states): return np.array([1/len(s.steps) for s in states])
    def table_score(self, table): return 1/(1 + table.obs[..., table.features.index('index')])

def test_a_router_of_ones_own_gets_into_tables_and_figures_by_one_call(tmp_path):
    run = toy_run(tmp_path, 'gpt-4.1-mini')
    save_methods(run)
    before = load_benchmark(run, 'toy', 'paper_flops').results
    for _ in range(2): results = add_router(run, Patience()) # the second call replaces the first one's rows
    after = results['paper_flops'].results
    assert after[after['method'] != 'Patience'].reset_index(drop=True).equals(before)
    rows = after[after['method'] == 'Patience']
    assert rows['chosen'].sum() == 1 and len(rows) > 1
    calibration = read_table(run, 'toy', 'calibration')
    router = Patience()
    want = grid_search(at_thresholds(router, score_thresholds(router, calibration)), calibration, .02)
    assert rows.query('chosen == 1')['threshold'].tolist() == [want.threshold], 'by the rule that chose all others'
    for file in ('full.md', 'certain.md', 'evaluation_cents.csv'): assert 'Patience' in (run.tables/file).read_text()
    assert (run.figures/'accuracy_cents.pdf').is_file()

def test_a_router_may_be_fitted_to_each_benchmark(tmp_path):
    run = toy_run(tmp_path)
    save_methods(run)
    toy_table(60, 'train').save(run.files.outcomes('toy', 'train'))
    splits = []
    def fitted(table):
        splits.append((table.benchmark, table.split))
        return Patience()
    results = add_router(run, fitted)
    assert splits == [('toy', 'train')] and 'Patience' in set(results['paper_flops'].results['method'])
