"""Intervals of chosen settings: each resample chooses as one would who had drawn its problems."""

import numpy as np
import pandas as pd
import pytest
from toy_runs import POLICIES, coin

from stepwise_routing.method import uncertainty
from stepwise_routing.method.certain import certain_setting, is_safe
from stepwise_routing.method.comparison import (
    CLASSES,
    COLUMNS,
    LARGE,
    Case,
    at_sweep,
    at_thresholds,
    grid_search,
    mean_outcome,
    replay_case,
    table_methods,
)
from stepwise_routing.method.outcomes import take_rows, toy_table
from stepwise_routing.method.results import at_point, evaluate, evaluate_all, resampled
from stepwise_routing.method.uncertainty import (
    draw_samples,
    last_safe,
    points_of,
    read_points,
    safe_in_resamples,
    save_points,
)

ALPHA = .1

def tables_of(n): return {split: toy_table(n, split) for split in ('train', 'calibration', 'test')}

def drawn(table, counts): return take_rows(table, np.repeat(np.arange(len(table)), counts.astype(int)))

def by_hand(grid, router_of, test, counts):
    "Accuracy and cost on test, resampled by the counts, at the setting that a grid chose."
    out = {}
    for target, x in dict(accuracy=grid.threshold, certain=grid.certain).items():
        outcome = test.large_only() if x == LARGE else mean_outcome(router_of(x), test)
        out[target] = [counts @ outcome[k] / len(test) for k in ('correct', 'paper_flops')]
    return out

@pytest.mark.parametrize('n', [60, 310])
def test_a_resample_chooses_as_one_who_had_drawn_its_problems(n):
    "Another way to the same numbers: a table with the problems of the resample, and the grid search of chapter 04b."
    tables = tables_of(n)
    calibration, test = tables['calibration'], tables['test']
    samples = draw_samples(calibration, test, 6, seed=3)
    for method in table_methods(tables['train'], calibration):
        grid = grid_search(method, calibration, ALPHA)
        points = {p.target: p for p in points_of(method, grid, tables, samples)[0]}
        for r, counts in enumerate(samples.calibration):
            own = grid_search(method, drawn(calibration, counts), ALPHA)
            for target, want in by_hand(own, method.get, test, samples.test[r]).items():
                got = [points[target].columns[k][r] for k in ('correct', 'paper_flops')]
                assert np.allclose(got, want, rtol=1e-12), (grid.method, target, r)

def test_every_seed_chooses_for_itself_and_counts_as_often_as_it_is_drawn():
    tables = tables_of(80)
    calibration, test = tables['calibration'], tables['test']
    samples = draw_samples(calibration, test, 8, seed=0)
    policies = [coin(0, .7, sweep=(.9, .5, .3)), coin(1, .6, sweep=(.8, .4, .2))]
    method = at_sweep(policies, ALPHA)
    grid = grid_search(method, calibration, ALPHA, order=sorted({*method} - {ALPHA}, reverse=True))
    grid = grid._replace(chosen=0)
    points = {p.target: p for p in points_of(method, grid, tables, samples, fixed=True)[0]}
    shares = samples.seeds(2)
    assert np.allclose(shares.sum(1), 1) and {0., .5, 1.} == set(shares.ravel())
    for r in range(1, 9):
        want = 0
        for k in range(2):
            own = {x: [routers[k]] for x, routers in method.items()}
            chosen = grid_search(own, drawn(calibration, samples.calibration[r]), ALPHA).threshold
            outcome = test.large_only() if chosen == LARGE else mean_outcome(own[chosen], test)
            want = want + shares[r, k]*(samples.test[r] @ outcome['correct'])/len(test)
        assert np.isclose(points['accuracy'].columns['correct'][r], want, rtol=1e-12)
    own = mean_outcome(method[ALPHA], test)
    assert np.isclose(points['accuracy'].columns['correct'][0], own['correct'].mean(), rtol=1e-12)

@pytest.mark.parametrize('n, alpha', [(40, .4), (350, .1), (350, .016)])
def test_safe_in_a_resample_is_safe_on_its_problems(n, alpha):
    rng = np.random.default_rng(1)
    loss = rng.choice([-1., 0., 0., 0., 0., 0., 1.], (130, n))
    counts = rng.multinomial(n, np.full(n, 1/n), 5).astype(float)
    safe = safe_in_resamples(loss, counts, alpha)
    for r, row in enumerate(counts):
        own = [np.repeat(x, row.astype(int)) for x in loss]
        assert [is_safe(x, alpha) for x in own] == safe[r].tolist()
    assert 0 < safe.mean() < 1
    walk = np.sort(loss, 0)[::-1][:, ::-1] if n < 100 else loss[np.argsort(loss.mean(1))]
    last = last_safe(walk, counts, alpha)
    for r, row in enumerate(counts):
        want = certain_setting([np.repeat(x, row.astype(int)) for x in walk], alpha)
        assert last[r] == (-1 if want is None else want)

def test_a_walk_longer_than_a_block_goes_on(monkeypatch):
    loss = np.zeros((200, 400)); loss[150:] = 1
    counts = np.ones((3, 400))
    assert last_safe(loss, counts, .02).tolist() == [149]*3
    monkeypatch.setattr(uncertainty, 'BLOCK', 7)
    assert last_safe(loss, counts, .02).tolist() == [149]*3

def test_only_what_was_walked_on_test_is_chosen_again():
    tables = tables_of(60)
    method = at_thresholds(table_methods(tables['train'], tables['calibration'])[0])
    grid = grid_search(method, tables['calibration'], ALPHA)
    shown = [grid.threshold, grid.certain, *grid.curve_thresholds(5)]
    asked = []
    def run(router, table):
        from stepwise_routing.method.outcomes import replay
        if table.split == 'test': asked.append(router.threshold)
        return replay(router, table)
    points_of(method, grid, tables, draw_samples(tables['calibration'], tables['test'], 40, 0), run, shown)
    assert asked and set(asked) <= set(shown)

def test_where_nothing_was_walked_on_test_the_large_model_stays():
    tables = tables_of(60)
    method = at_thresholds(table_methods(tables['train'], tables['calibration'])[0])
    grid = grid_search(method, tables['calibration'])
    grid = grid._replace(chosen=len(grid.thresholds) - 1, certain=LARGE)
    samples = draw_samples(tables['calibration'], tables['test'], 9, 0)
    points, _ = points_of(method, grid, tables, samples, shown=[LARGE])
    large = tables['test'].large_only()['correct'].mean()
    assert all(np.isclose(p.columns['correct'][0], large) and p.threshold == LARGE for p in points)

@pytest.fixture(scope='module')
def case():
    tables = tables_of(70)
    samples = draw_samples(tables['calibration'], tables['test'], 30, 0)
    case = Case('toy', tables, POLICIES, alpha=ALPHA, samples=samples)
    return replay_case(case)

def test_the_sample_itself_is_the_row_of_the_tables(case):
    rows = pd.DataFrame(case.rows, columns=COLUMNS)
    means = resampled(rows, case.samples.test)
    points = {(p.method, p.on_escalate, p.target): p for p in case.points}
    chosen = evaluate(at_point(means, points, 'accuracy'))
    fixed = evaluate(means).query('chosen == 1').reset_index(drop=True)
    for column in ('accuracy', 'cost', 'full_flops', 'miss', 'large_share', 'steps'):
        assert np.allclose(chosen[column], fixed[column], rtol=1e-12)
    whole = evaluate_all(means, at_point(means, points, 'accuracy'))
    assert whole['threshold'].tolist() == means.keys['threshold'].tolist()
    certain = evaluate(at_point(means, points, 'certain'))
    for grid in case.grids:
        if grid.method != 'Ours (online kappa)':
            row = certain[(certain['method'] == grid.method) & (certain['on_escalate'] == grid.on_escalate)].iloc[0]
            assert row['threshold'] == grid.certain and 0 <= row['accuracy'] <= 1
    wider = chosen['cost_high'] - chosen['cost_low'] - (fixed['cost_high'] - fixed['cost_low'])
    assert (wider > 0).sum() >= 3 and wider.max() > fixed['cost'].max()/20

def test_nested_takes_the_class_of_each_resample(case):
    names = [name for name in CLASSES if any(p.method == name and p.on_escalate == 'regenerate' for p in case.points)]
    own = {(p.method, p.target): p for p in case.points if p.on_escalate == 'regenerate'}
    nested = own['Ours (nested)', 'accuracy'].columns['correct']
    of_classes = np.array([own[name, 'accuracy'].columns['correct'] for name in names])
    assert len(names) == 2 and all(np.isclose(of_classes[:, r], nested[r]).any() for r in range(len(nested)))

def test_points_are_read_as_they_were_saved(case, tmp_path):
    path = tmp_path/'points.npz'
    save_points(path, case.points)
    first = path.read_bytes()
    back = read_points(path, 30)
    assert len(back) == len(case.points) and read_points(tmp_path/'none.npz', 30) == {}
    for p in case.points:
        other = back[p.method, p.on_escalate, p.target]
        assert other.threshold == p.threshold and all((other.columns[k] == p.columns[k]).all() for k in p.columns)
    save_points(path, back.values())
    assert path.read_bytes() == first
    with pytest.raises(ValueError, match='has 30 resamples, not 31: run nbs/04b'): read_points(path, 31)
    save_points(path, [])
    assert read_points(path, 30) == {}
