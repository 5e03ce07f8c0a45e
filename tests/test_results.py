"Rows, intervals, metrics and loading: closed forms, and clear lines for bad input."
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.baselines import COLUMNS, REUSE_COLUMNS, SEED_COLUMNS, outcome_rows, save_rows
from stepwise_routing.outcomes import replay, toy_table
from stepwise_routing.results import (ablation_table, bootstrap_ci, load_benchmark, load_results, load_run,
    method_label, pareto_frontier, read_rows, resamples)
from stepwise_routing.routers import RECEIPT_COLUMNS, SmallOnly
from stepwise_routing.run.config import changed
from toy_runs import evaluated, frame, line, save_methods, save_policies, setting

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    s = setting(tmp_path_factory.mktemp('run'))
    save_methods(s)
    save_methods(setting(s.run.folder, 'api'), 'cents')
    return s

@pytest.fixture(scope='module')
def with_ours(tmp_path_factory): return save_policies(setting(tmp_path_factory.mktemp('ours')))

# ---- intervals ------------------------------------------------------------------------------------------------------
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
    with pytest.raises(ValueError, match=r"unknown cost 'cent' \(did you mean 'cents'\?\)"): evaluated(rows, cost='cent')
    with pytest.raises(ValueError, match="no column 'cents': run nbs/04_baselines.ipynb again"):
        evaluated(rows.drop(columns='cents'), cost='cents')
    with pytest.raises(ValueError, match='the large model alone costs nothing in cents'):
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
    rows = read_rows(run.files.methods('toy'))
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
def test_pareto_frontier_is_what_nothing_beats(points):
    cost, accuracy = zip(*points)
    best = pareto_frontier(cost, accuracy)
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b
    assert {points[i] for i in best} == {p for p in points if not any(beats(q, p) for q in points)}
    assert [cost[i] for i in best] == sorted({cost[i] for i in best})

# ---- ablations ------------------------------------------------------------------------------------------------------
def test_ablations_by_hand():
    large = line('Large only', [1, 1], [10, 10])
    seeds = enumerate((([1, 1], [2, 4]), ([1, 0], [5, 5])))
    single = pd.concat([line('short', c, f, .02).assign(seed=i) for i, (c, f) in seeds])
    rows = pd.concat([large, single.drop(columns='seed').assign(method='Ours')])
    r = ablation_table(rows, single, n_boot=200).iloc[0]
    assert (r['method'], r['alpha'], r['n'], r['seeds']) == ('short', .02, 2, 2)
    assert (r['accuracy'], r['accuracy_min'], r['accuracy_max']) == (.75, .5, 1.)
    assert np.isclose(r['cost_share'], .4) and np.allclose([r['cost_share_min'], r['cost_share_max']], [.3, .5])
    assert r['miss'] == .25 and (r['miss_low'], r['miss_high'], r['miss_min'], r['miss_max']) == (0., .5, 0., .5)
    assert (r['accuracy_low'], r['accuracy_high']) == (.5, 1.), 'resamples of the mean over seeds: 1 and .5 a problem'
    money = ablation_table(large.assign(cents=.1), single.assign(cents=.03), n_boot=20, cost='cents').iloc[0]
    assert np.isclose(money['cost_share'], .3)
    with pytest.raises(ValueError, match='single seeds have other problems than the rest'):
        ablation_table(large, single.assign(problem='x'))

def test_ablations_come_from_their_file(with_ours, run):
    part = load_benchmark(with_ours, 'toy')
    table = ablation_table(part.rows, part.singles, 50)
    assert table[['method', 'seeds']].values.tolist() == [['Ours', 2], ['Ours (full)', 1], ['short', 2]]
    assert len(part.receipts) == 6 and load_benchmark(run, 'toy').singles is None
    path = with_ours.files.methods('toy', '-ablations')
    text = path.read_text()
    path.write_text(text.replace(',seed\n', ',sede\n'))
    try:
        with pytest.raises(ValueError, match="has no column 'seed': run nbs/04_baselines.ipynb again"):
            load_benchmark(with_ours, 'toy')
    finally: path.write_text(text)

# ---- loading --------------------------------------------------------------------------------------------------------
def test_a_run_has_one_setting_or_two(run):
    results = load_run(run.run)
    assert list(results) == ['open', 'api'] and results['api'].large == 'toy large'
    costs = {name: set(r.results['cost_in']) for name, r in results.items()}
    assert costs == dict(open={'paper_flops'}, api={'cents'})
    first = results['open'].parts['toy']
    assert (first.receipts, first.reuse, first.singles, results['open'].whole('reuse')) == (None,)*4
    alone = replace(run.run, config=changed(run.run.config, {'api.models': []}))
    assert list(load_run(alone)) == ['open']

def test_files_without_policies_are_no_policies(tmp_path):
    s = setting(tmp_path)
    save_methods(s)
    for part, columns in (('-ablations', SEED_COLUMNS), ('-policies', RECEIPT_COLUMNS)):
        save_rows(s.files.methods('toy', part), [], columns)
    part = load_benchmark(s, 'toy')
    assert (part.singles, part.receipts) == (None, None)
    save_rows(s.files.methods('toy', '-reuse'), [('toy', 'RSD', 'append', 'test', 1, 1, 1., 1.)], REUSE_COLUMNS[:8])
    with pytest.raises(ValueError, match="toy-reuse.csv has no column 'ratio': run nbs/04_baselines.ipynb again"):
        load_benchmark(s, 'toy')

def test_old_files_need_no_cents_until_they_are_asked_for(run, tmp_path):
    path = run.files.methods('toy')
    pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns='cents').to_csv(tmp_path/'toy.csv', index=False)
    pd.testing.assert_frame_equal(evaluated(read_rows(tmp_path/'toy.csv')), evaluated(read_rows(path)))
    with pytest.raises(ValueError, match="toy.csv has no column 'cents': run nbs/04_baselines.ipynb again") as e:
        read_rows(tmp_path/'toy.csv', cost='cents')
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('change, message', [
    (lambda t: t.replace('large_correct', 'big_correct', 1),
     "has no column 'large_correct': run nbs/04_baselines.ipynb again"),
    (lambda t: '\n'.join(t.split('\n')[:-2]) + '\n', 'has other problems than'),
    (lambda t: t + t.split('\n')[-2] + '\n', 'has other problems than'),
    (lambda t: t.replace(',append,0,', ',append,zero,', 1), "row .*: threshold is 'zero', not a number"),
    (lambda t: t[:t.rindex(',')] + ',\n', "cents is '', not a number"),
    (lambda t: '', 'is not a table of results'),
    (lambda t: t + 'a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q\n', 'is not a table of results')])
def test_bad_rows_get_a_clear_line(run, tmp_path, change, message):
    path = tmp_path/'toy.csv'
    path.write_text(change(run.files.methods('toy').read_text()))
    with pytest.raises(ValueError, match=message) as e: read_rows(path)
    assert '\n' not in str(e.value)

def test_missing_artefacts_name_the_notebook(run, tmp_path):
    s = setting(tmp_path)
    def refused(kind, message):
        with pytest.raises(kind, match=message) as e: load_results(s)
        assert '\n' not in str(e.value)
    refused(FileNotFoundError, '02')
    toy_table(60).save(s.files.outcomes('toy', 'test'))
    refused(FileNotFoundError, 'run nbs/04_baselines.ipynb first')
    path, grid = s.files.methods('toy'), s.files.methods('toy', '-grid')
    path.parent.mkdir()
    path.write_bytes(run.files.methods('toy').read_bytes())
    refused(FileNotFoundError, 'no calibration grid')
    whole = run.files.methods('toy', '-grid').read_text()
    for column, name in (('unit', 'unitt'), ('cost', 'paper_flops')):
        grid.write_text(whole.replace(column, name, 1))
        refused(ValueError, f"toy-grid.csv has no column '{column}': run nbs/04_baselines.ipynb again")
    grid.write_text(whole)
    toy_table(50).save(s.files.outcomes('toy', 'test'))
    refused(ValueError, 'hold different problems')

def test_unknown_methods_get_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown method 'STEER rest' \(did you mean 'STEER \(rest\)'\?\)"):
        method_label('STEER rest', 'append')
    table = toy_table(20)
    rows = outcome_rows(SmallOnly(), table, replay(SmallOnly(), table), 0.)
    with pytest.raises(ValueError, match='no method "Large only"'): evaluated(pd.DataFrame(rows, columns=COLUMNS))
