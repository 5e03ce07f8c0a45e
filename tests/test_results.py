"Rows, intervals, metrics and loading: closed forms, and clear lines for bad input."
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from toy_runs import evaluated, frame, line, means_of, save_methods, save_policies, setting, settled

from stepwise_routing.base.statistics import resamples
from stepwise_routing.method.comparison import COLUMNS, at_thresholds, grid_search, outcome_rows
from stepwise_routing.method.outcomes import replay, toy_table, undominated
from stepwise_routing.method.results import (
    METHOD_STYLE,
    REWRITES,
    ablation_table,
    cost_unit,
    headline,
    method_label,
    method_rank,
    read_rows,
    with_intervals,
)
from stepwise_routing.method.routers import RandomRouter, ThresholdRouter, score_thresholds
from stepwise_routing.method.walks import SmallOnly
from stepwise_routing.run.config import changed
from stepwise_routing.run.own_routers import add_router
from stepwise_routing.run.stages import load_benchmark, load_run, read_table


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    s = setting(tmp_path_factory.mktemp('run'))
    save_methods(s)
    save_methods(setting(s.run.folder, 'api'), 'cents')
    return s

@pytest.fixture(scope='module')
def with_ours(tmp_path_factory): return save_policies(setting(tmp_path_factory.mktemp('ours')))

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
def test_the_frontier_is_what_nothing_beats(points):
    cost, accuracy = zip(*points)
    best = undominated(cost, -np.asarray(accuracy))
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b
    assert {points[i] for i in best} == {p for p in points if not any(beats(q, p) for q in points)}
    assert [cost[i] for i in best] == sorted({cost[i] for i in best})

# ---- ablations ------------------------------------------------------------------------------------------------------
def test_ablations_by_hand():
    large = line('Large only', [1, 1], [10, 10])
    seeds = enumerate((([1, 1], [2, 4]), ([1, 0], [5, 5])))
    single = pd.concat([line('short', c, f, .1*i).assign(seed=i) for i, (c, f) in seeds])
    rows = pd.concat([large, single.drop(columns='seed').assign(method='Ours')])
    def table(rows, single, **kw):
        part = SimpleNamespace(rows=rows, singles=single, means=means_of(rows, 200, **kw))
        return ablation_table(part).iloc[0]
    r = table(rows, single)
    assert (r['method'], r['n'], r['seeds']) == ('short', 2, 2), 'whatever the thresholds of the seeds'
    assert (r['accuracy'], r['accuracy_min'], r['accuracy_max']) == (.75, .5, 1.)
    assert np.isclose(r['cost_share'], .4) and np.allclose([r['cost_share_min'], r['cost_share_max']], [.3, .5])
    assert [r[f'excess{end}'] for end in ('', '_low', '_high', '_min', '_max')] == [.25, 0., .5, 0., .5]
    assert (r['accuracy_low'], r['accuracy_high']) == (.5, 1.), 'resamples of the mean over seeds: 1 and .5 a problem'
    money = table(large.assign(cents=.1), single.assign(cents=.03), cost='cents')
    assert np.isclose(money['cost_share'], .3)

def test_ablations_come_from_their_file(with_ours, run):
    part = load_benchmark(with_ours, 'toy')
    table = ablation_table(part)
    assert table[['method', 'seeds']].values.tolist() == [['Ours', 2], ['Ours', 1], ['Ours (full)', 1], ['short', 2]]
    assert load_benchmark(run, 'toy').singles.empty
    path = with_ours.files.methods('toy', '-ablations')
    text = path.read_text()
    changes = {"has no column 'seed': run nbs/04b_comparison.ipynb again": text.replace(',seed\n', ',sede\n'),
               'hold different problems': text.replace('test-', 'other-')}
    try:
        for message, changed_text in changes.items():
            path.write_text(changed_text)
            with pytest.raises(ValueError, match=message): load_benchmark(with_ours, 'toy')
    finally: path.write_text(text)

# ---- loading --------------------------------------------------------------------------------------------------------
def test_a_run_has_one_setting_or_two(run):
    results = load_run(run.run)
    assert list(results) == ['open', 'api'] and results['api'].large == 'toy large'
    assert [results[name].suffix for name in results] == ['', '_api'] and cost_unit(toy_table(2)) == 1e6
    costs = {name: set(r.results['cost_in']) for name, r in results.items()}
    assert costs == dict(open={'paper_flops'}, api={'cents'})
    first = results['open'].parts['toy']
    assert len(first.singles) == len(results['open'].whole(lambda p: p.singles)) == 0
    assert first.table.problem_id.tolist() == sorted(first.table.problem_id), 'in the order of the resamples'
    alone = replace(run.run, config=changed(run.run.config, {'api.models': []}))
    assert list(load_run(alone)) == ['open']

def test_settings_stand_beside_what_they_were_on_calibration(run):
    part, keys = load_benchmark(run, 'toy'), ['method', 'on_escalate', 'threshold']
    both = part.results.merge(part.grid, on=keys)
    assert len(both) and (both['calibration_accuracy'] == both['accuracy_y']).all()
    large = part.grid.loc[np.isinf(part.grid['threshold']), 'cost'].iloc[0]
    assert np.allclose(both['calibration_cost_share'], both['cost_y']/large)
    assert part.results.query('method == "Small only"')['calibration_accuracy'].isna().all()

def test_an_infinite_threshold_is_one(run, tmp_path):
    path = tmp_path/'toy.csv'
    path.write_text(run.files.methods('toy').read_text().replace('Small only,append,0.5', 'Small only,append,inf'))
    rows = read_rows(path)
    assert np.isinf(rows['threshold']).any() and np.isinf(evaluated(rows, 20)['threshold']).any()

# ---- what Table 1 prints --------------------------------------------------------------------------------------------
def family(*costs): # of (method, reading, cost of its chosen threshold)
    rows = [line('Small only', [0, 1], [1, 1]), line('Large only', [1, 1], [10, 10])]
    rows += [line(m, [1, 1], [cost, cost]).assign(on_escalate=e) for m, e, cost in costs]
    return headline(settled(pd.concat(rows)).results)

def test_the_cheapest_variant_on_calibration_is_printed():
    rows = family(('STEER (rest)', 'append', 5), ('STEER (rest)', 'regenerate', 4), ('STEER (next)', 'append', 6),
                  ('Ours', 'append', 7), ('Ours', 'regenerate', 2), ('Ours (nested)', 'append', 3),
                  ('Ours (full)', 'append', 2), ('Ours (bound)', 'append', 1))
    assert rows == {'STEER': ('STEER (rest)', 'regenerate'), 'Ours': ('Ours', 'append'),
                    'Ours, best': ('Ours (nested)', 'append')}
    assert family(('Ours', 'append', 3), ('Ours (full)', 'append', 4)) == {'Ours': ('Ours', 'append')}
    assert family(('short', 'append', 3)) == {}

def test_rows_have_names_and_an_order():
    assert sorted(['RSD', 'short', 'Random'], key=method_rank) == ['Random', 'RSD', 'short']
    names = [('STEER (rest)', 'append'), ('STEER (rest)', 'regenerate'), ('RSD', 'regenerate')]
    assert [method_label(*name) for name in names] == ['STEER (rest)', 'STEER (rest), regenerate', 'RSD']
    assert [METHOD_STYLE[m]['external'] for m in REWRITES] == ['no', 'no', 'yes']

def test_a_variant_is_the_same_on_all_benchmarks():
    "The mean over benchmarks decides: 4 and 4 against 1 and 8."
    def part(benchmark, a, b):
        r = settled(pd.concat([line('Large only', [1, 1], [10, 10]), line('STEER (rest)', [1, 1], [a, a]),
                               line('STEER (next)', [1, 1], [b, b])]).assign(benchmark=benchmark))
        return r.parts[benchmark]
    r = settled(line('Large only', [1, 1], [10, 10]))
    r.parts.clear()
    r.parts.update(a=part('a', 4, 1), b=part('b', 4, 8))
    assert headline(r.results) == {'STEER': ('STEER (rest)', 'append')}

def test_six_colours_are_told_apart():
    """As colour-blind readers see them (Machado et al., 2009, severity 1), in CIELAB; and from the grey of all others.
    Each is dark enough for a name in its colour (WCAG: 4.5 to 1), and names have markers of their own."""
    colours = {s['color'] for m, s in METHOD_STYLE.items() if not m.endswith('only')}
    assert len(colours) == 7
    linear = np.array([[int(c[i:i + 2], 16)/255 for i in (1, 3, 5)] for c in sorted(colours)])
    linear = np.where(linear <= .04045, linear/12.92, ((linear + .055)/1.055)**2.4)
    assert (1.05/(linear @ [.2126, .7152, .0722] + .05) >= 4.5).all()
    families = {s['family']: (s['color'], s['marker']) for s in METHOD_STYLE.values() if s['family']}
    assert len(set(families.values())) == len(families)
    seen = [np.eye(3),
            np.array([[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]]),
            np.array([[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.01182, .04294, .968881]])]
    xyz = np.array([[.4124, .3576, .1805], [.2126, .7152, .0722], [.0193, .1192, .9505]])/[[.95047], [1], [1.08883]]
    for eye in seen:
        f = np.clip(linear @ eye.T, 0, 1) @ xyz.T
        f = np.where(f > .008856, np.cbrt(f), 7.787*f + 16/116)
        lab = np.c_[116*f[:, 1] - 16, 500*(f[:, 0] - f[:, 1]), 200*(f[:, 1] - f[:, 2])]
        distance = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
        assert distance[~np.eye(7, dtype=bool)].min() >= 15

@pytest.mark.parametrize('change, message', [
    (lambda t: t.replace('large_correct', 'big_correct', 1),
     "has no column 'large_correct': run nbs/04b_comparison.ipynb again"),
    (lambda t: '\n'.join(t.split('\n')[:-2]) + '\n', 'has other problems than'),
    (lambda t: t + t.split('\n')[-2] + '\n', 'has other problems than'),
    (lambda t: t.replace(',append,0.5,', ',append,zero,', 1), "row .*: threshold is 'zero', not a number"),
    (lambda t: t[:t.rindex(',')] + ',\n', "cents is '', not a number")])
def test_bad_rows_get_a_clear_line(run, tmp_path, change, message):
    path = tmp_path/'toy.csv'
    path.write_text(change(run.files.methods('toy').read_text()))
    with pytest.raises(ValueError, match=message) as e: read_rows(path)
    assert '\n' not in str(e.value)

def test_missing_artefacts_name_the_notebook(run, tmp_path):
    s = setting(tmp_path)
    def refused(kind, message):
        with pytest.raises(kind, match=message) as e: load_benchmark(s, 'toy')
        assert '\n' not in str(e.value)
    refused(FileNotFoundError, '02')
    toy_table(60).save(s.files.outcomes('toy', 'test'))
    refused(FileNotFoundError, 'run nbs/04b_comparison.ipynb first')
    path, grid = s.files.methods('toy'), s.files.methods('toy', '-grid')
    path.parent.mkdir()
    path.write_bytes(run.files.methods('toy').read_bytes())
    refused(FileNotFoundError, 'toy-grid.csv: run nbs/04b_comparison.ipynb first')
    whole = run.files.methods('toy', '-grid').read_text()
    for column in ('unit', 'cost'):
        grid.write_text(whole.replace(column, 'other', 1))
        refused(ValueError, f"toy-grid.csv has no column '{column}': run nbs/04b_comparison.ipynb again")
    grid.write_text(whole)
    toy_table(50).save(s.files.outcomes('toy', 'test'))
    refused(ValueError, 'hold different problems')

def test_everything_is_compared_with_the_large_model():
    table = toy_table(20)
    rows = outcome_rows(SmallOnly(), table, replay(SmallOnly(), table), 0.)
    with pytest.raises(ValueError, match='no method "Large only"'): evaluated(pd.DataFrame(rows, columns=COLUMNS))

# ---- a router of one's own ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Patience(ThresholdRouter): # the one of CONTRIBUTING.md
    threshold: float = .5
    name = 'Patience'
    def score(self, states): return np.array([1/len(s.steps) for s in states])
    def table_score(self, table): return 1/(1 + table.obs[..., table.features.index('index')])

def test_a_router_of_ones_own_gets_into_tables_and_figures_by_one_call(tmp_path):
    s = setting(tmp_path)
    save_methods(s)
    save_methods(setting(tmp_path, 'api'), 'cents')
    before = load_benchmark(s, 'toy').results
    for _ in range(2): results = add_router(s.run, Patience()) # the second call replaces the first one's rows
    after = results['open'].results
    assert after[after['method'] != 'Patience'].reset_index(drop=True).equals(before)
    rows = after[after['method'] == 'Patience']
    assert rows['chosen'].sum() == 1 and len(rows) > 1
    calibration = read_table(s, 'toy', 'calibration')
    router = Patience()
    want = grid_search(at_thresholds(router, score_thresholds(router, calibration)), calibration, .02)
    assert rows.query('chosen == 1')['threshold'].tolist() == [want.threshold], 'by the rule that chose all others'
    for file in ('full.md', 'metrics.md', 'certain.md'): assert 'Patience' in (s.run.tables/file).read_text()
    certain = results['open'].parts['toy'].certain
    assert certain.query('method == "Patience"')['threshold'].tolist() == [want.certain]
    assert 'Patience' in (s.run.tables/'evaluation.csv').read_text()
    assert (s.run.figures/'accuracy_cost_full.pdf').is_file()

def test_a_router_may_be_fitted_to_each_benchmark(tmp_path):
    s = setting(tmp_path)
    save_methods(s)
    save_methods(setting(tmp_path, 'api'), 'cents')
    for each in s.run.settings: toy_table(60, 'train').save(each.files.outcomes('toy', 'train'))
    splits = []
    def fitted(table):
        splits.append((table.benchmark, table.split))
        return Patience()
    results = add_router(s.run, fitted)
    assert set(splits) == {('toy', 'train')} and 'Patience' in set(results['open'].results['method'])

def test_a_router_that_cannot_stand_in_a_table_is_refused_in_one_line(tmp_path):
    s = setting(tmp_path)
    save_methods(s)
    @dataclass(frozen=True)
    class Bare(Patience):
        name = 'Bare threshold (logit)'
    @dataclass(frozen=True)
    class Walking:
        name, on_escalate = 'Walking', 'append'
    cases = (Bare(), 'another name'), (Walking(), 'no table_score'), (replace(RandomRouter(), name=''), 'no name')
    for router, words in cases:
        with pytest.raises(ValueError, match=words): add_router(s.run, router)
    assert not s.files.methods('toy', '-own').exists()
