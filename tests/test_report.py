"Gains, comparisons and what is made of them: closed forms, by hand and against the frontiers."
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from stepwise_routing.baselines import grid_search
from stepwise_routing.bounds import LIMIT_COLUMNS, oracle_frontier, random_frontier, random_outcome
from stepwise_routing.outcomes import replay, take_rows, toy_table
from stepwise_routing.report.gains import (_area, _compare, _share, compare_with, comparison_markdown, gain_markdown,
    limits, routing_gain)
from stepwise_routing.report.tables import ablation_markdown, report
from stepwise_routing.results import ablation_table, load_benchmark, load_run, resamples
from stepwise_routing.routers import fit_steer
from toy_runs import cents, flops, loaded, run, with_ours # fixtures
from toy_runs import frame, line, means_of, save_methods, setting

# ---- the recovered share --------------------------------------------------------------------------------------------
def oracle_points(table, e):
    "(cost, correct) [point, problem] of hindsight: problems are made right one by one, the cheapest extra cost first."
    grid = table.grid(e)
    price = np.where(table.reach, grid['paper_flops'], np.inf)
    right = np.where(grid['correct'] == 1, price, np.inf)
    order = np.argsort(right.min(1) - price.min(1), kind='stable')
    rows, t = np.arange(len(table)), price.argmin(1)
    out = [[grid[k][rows, t] for k in ('paper_flops', 'correct')]]
    for i in (i for i in order if np.isfinite(right[i].min())):
        t = t.copy(); t[i] = right[i].argmin()
        out.append([grid[k][rows, t] for k in ('paper_flops', 'correct')])
    return [np.stack(v) for v in zip(*out)]

@pytest.mark.parametrize('e', ['append', 'regenerate'])
def test_hindsight_recovers_everything_and_chance_nothing(e):
    table, hazards = toy_table(150), np.linspace(0, 1, 201)
    best, area = oracle_points(table, e), _area(table, resamples(150, 50), e)
    got = _share(area, [v.mean(1) for v in best], best)
    assert np.isclose(got['share'], 1, atol=1e-6) and .9 < got['share_low'] <= got['share_high'] < 1 + 1e-6
    chance = random_outcome(table, hazards, e)
    got = _share(area, (hazards, hazards), [chance[k] for k in ('paper_flops', 'correct')])
    assert np.allclose([got['share'], got['share_low'], got['share_high']], 0, atol=1e-9) and got['points'] == 201

def points_of(table, times):
    outcomes = [table.outcome(np.minimum(t, table.n_steps), 'append') for t in times]
    return [np.stack([o[k] for o in outcomes]) for k in ('paper_flops', 'correct')]

def test_the_share_is_the_area_between_straight_lines():
    "Against the frontiers of chapter 04a and an integral written out."
    table = toy_table(120)
    points = points_of(table, (0, 1, 3))
    cal = (np.array([3., 2., 1.]), np.array([.9, .8, .85])) # the second is beaten on calibration
    chance, best = random_frontier(table, p=np.linspace(0, 1, 201)), oracle_frontier(table)
    small, large = table.outcome(table.n_steps, 'append'), table.large_only()
    start, end = small['paper_flops'].mean(), max(chance['cost'][-1], large['paper_flops'].mean())
    x = np.linspace(start, end, 401)
    knots = sorted([(start, small['correct'].mean())] + [(points[0][i].mean(), points[1][i].mean()) for i in (0, 2)])
    area = lambda y: ((y[1:] + y[:-1])/2).sum()
    low = np.interp(x, np.maximum.accumulate(chance['cost']), chance['accuracy'])
    high, mine = np.interp(x, best['cost'], best['accuracy']), np.interp(x, *zip(*knots))
    got = _share(_area(table, resamples(120, 20)), cal, points)
    assert np.isclose(got['share'], area(mine - low)/area(high - low), rtol=1e-9) and got['points'] == 2

def test_the_share_knows_no_order_of_problems():
    table, order = toy_table(80), np.random.default_rng(0).permutation(80)
    points, cal = points_of(table, (0, 2)), ([2, 1], [2, 1])
    counts = resamples(80, 40)
    a = _share(_area(table, counts), cal, points)
    b = _share(_area(take_rows(table, order), counts[:, order]), cal, [v[:, order] for v in points])
    assert all(np.isclose(a[k], b[k]) for k in a)

def test_routing_gain_reads_the_rows(with_ours):
    part = with_ours.parts['toy']
    gain = routing_gain(part)
    assert gain[['method', 'on_escalate']].values.tolist() == [
        ['STEER (rest)', 'append'], ['STEER (rest)', 'regenerate'], ['Ours', 'append'], ['Ours (full)', 'regenerate'],
        ['Bare score_logit', 'append'], ['Bare score_logit', 'regenerate']]
    steer = fit_steer(toy_table(60, 'train'))
    grid = grid_search(steer, part.calibration)
    outcomes = [replay(steer.at(x), part.table) for x in grid.thresholds]
    points = [np.stack([o[k] for o in outcomes]) for k in ('paper_flops', 'correct')]
    want = _share(_area(part.table, part.means.counts), (grid.cost, grid.accuracy), points)
    assert all(np.isclose(gain.iloc[0][k], want[k]) for k in want)
    shuffled = part.rows.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(gain, routing_gain(replace(part, rows=shuffled)))
    md = gain_markdown(gain)
    assert '| Bare threshold on score_logit, regenerate | ' in md and f'{100*gain["share"][0]:.1f}<br><sub>[' in md
    assert '</sub> (1) |' in md

def test_routing_gain_in_cents(cents):
    gain = routing_gain(cents)
    steer = fit_steer(toy_table(60, 'train'))
    grid = grid_search(steer, cents.calibration, cost='cents')
    outcomes = [replay(steer.at(x), cents.table) for x in grid.thresholds]
    points = [np.stack([o[k] for o in outcomes]) for k in ('cents', 'correct')]
    want = _share(_area(cents.table, cents.means.counts, cost='cents'), (grid.cost, grid.accuracy), points)
    assert all(np.isclose(gain.iloc[0][k], want[k]) for k in want)

def test_limits_by_hand(tmp_path):
    "The large model drawn again is the large model; a sweep counts with the points that calibration leaves."
    s = setting(tmp_path)
    save_methods(s)
    save_methods(setting(tmp_path, 'api'), 'cents')
    assert report(load_run(s.run), 'limits').startswith('Nothing to report')
    table, rows = toy_table(60), []
    def add(row, router, split, points):
        for i, (cost, right) in enumerate(zip(*points)):
            rows.extend(('toy', row, router, 'append', split, i, *x) for x in zip(table.problem_id, cost, right))
    large, points = table.large_only(), points_of(table, (0, 1, 3))
    add(0, 'Drawn again', 'test', [large[k][None] for k in ('paper_flops', 'correct')])
    for split in ('calibration', 'test'): add(1, 'Ours (per step)', split, points)
    pd.DataFrame(rows, columns=LIMIT_COLUMNS).to_csv(s.files.methods('toy', '-limits'), index=False)
    part = load_benchmark(s, 'toy')
    first, second = limits(part).to_dict('records')
    assert (first['cost_share'], first['misses'], first['accuracy']) == (1, 0, first['large_accuracy'])
    assert np.isnan(first['share']) and second['accuracy'] == points[1][-1].mean()
    want = _share(_area(table, part.means.counts), [v.mean(1) for v in points], points)
    assert np.isclose(second['share'], want['share']) and np.isclose(second['share_low'], want['share_low'])
    assert '| toy | Ours (per step) | append | ' in report(load_run(s.run), 'limits')
    columns = 'benchmark,router,on_escalate,n,accuracy,large_accuracy,misses,cost_share,share,share_low,share_high'
    assert (s.run.tables/'limits.csv').read_text().startswith(f'{columns}\ntoy,Drawn again,append,60,')

# ---- equal accuracy -------------------------------------------------------------------------------------------------
def compared(rows, n_boot=20, cost='paper_flops', **pair):
    return _compare(means_of(rows, n_boot, cost=cost), **pair)

def everyone(rows): return compare_with(means_of(rows, 20))

def two(ours, flops, **others):
    "Two problems; STEER goes from (cost 1, accuracy 0) over (4, .5) to (6, 1); the large model costs 10."
    return pd.concat([
        line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [10, 10]),
        line('STEER (rest)', [0, 0], [1, 1], 0., 0), line('STEER (rest)', [.5, .5], [4, 4], .5),
        line('STEER (rest)', [1, 1], [6, 6], 1., 0), line('Ours', ours, flops),
        *(line(m, *of) for m, of in others.items())])

@pytest.mark.parametrize('ours, flops, ratio, difference', [
    ([.75, .75], [2, 2], 2/5, .75 - 1/6), # at .75 STEER costs 5; for 2 it reaches a third of the way to .5
    ([.5, .5], [4, 4], 1., 0.),           # a point of STEER's own
    ([1, 1], [8, 8], 8/6, 0.),            # no dearer point helps it
    ([0, 0], [1, 1], 1., 0.)])
def test_equal_accuracy_by_hand(ours, flops, ratio, difference):
    got = compared(two(ours, flops))
    for k in ('', '_low', '_high'): # both problems are the same: every resample is
        assert np.isclose(got[f'cost_ratio{k}'], ratio) and np.isclose(got[f'accuracy_difference{k}'], difference)
        assert np.isclose(got[f'cost_difference{k}'], flops[0] - flops[0]/ratio)
    assert (got['n'], got['points'], got['wins']) == (2, 3, ratio < 1)

def test_comparisons_are_paired():
    "Ours costs half of STEER on every problem, however much problems differ: the ratio is known exactly."
    r = np.random.default_rng(0)
    flops, right = np.exp(r.normal(0, 2, 50)), (r.random(50) < .7).astype(int)
    of = lambda m, c, f: frame(c, [1]*50, 1e6*f, method=m)
    rows = pd.concat([of('Small only', [0]*50, .01*flops), of('Large only', [1]*50, 9*flops),
                      of('STEER (rest)', right, flops), of('Ours', right, .5*flops)])
    got = compared(rows, 100)
    assert np.isclose(got['cost_ratio_low'], .5) and np.isclose(got['cost_ratio_high'], .5)
    assert got['cost_high'] > 1.5*got['cost_low'] and got['wins']

def test_an_accuracy_out_of_reach():
    rows = two([1, 1], [3, 3])
    rows.loc[rows['method'].isin(['Large only', 'STEER (rest)']) & (rows['correct'] == 1), 'correct'] = .9
    got = compared(rows)
    assert np.allclose([got['other_cost'], got['cost_ratio'], got['cost_difference']], [6, .5, -3])
    assert not got['reached'] and got['wins']
    assert '**† 0.50<br><sub>[0.50, 0.50]' in comparison_markdown(pd.DataFrame([got]))
    got = compared(rows.assign(paper_flops=rows['paper_flops'].mask(rows['method'] == 'Ours', .5e6)))
    assert np.isclose(got['accuracy_difference'], 1.), 'nothing is that cheap: the cheapest spot stands in'
    with pytest.raises(ValueError, match=r'no rows of Ours \(full\)'):
        compared(rows, ours=('Ours (full)', 'append'))
    with pytest.raises(ValueError, match=r'no rows of STEER \(next\)'):
        compared(rows, other=('STEER (next)', 'append'))

def test_comparisons_in_cents_by_hand():
    "The same two problems, priced apart from their FLOPs: the small model is free."
    rows = two([.75, .75], [2, 2])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: .3, 6e6: .5, 2e6: .1})
    got = compared(rows, cost='cents')
    numbers = got['cost'], got['other_cost'], got['cost_ratio'], got['accuracy_difference']
    assert np.allclose(numbers, [.1, .4, .25, .75 - 1/6]) and got['wins']

def test_nothing_for_nothing_is_a_tie_and_something_for_nothing_is_not():
    rows = two([0, 0], [1, 1])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: .3, 6e6: .5})
    got = compared(rows, cost='cents')
    assert (got['cost_ratio'], got['cost_ratio_low'], got['cost_ratio_high']) == (1, 1, 1)
    assert not got['wins'] and not got['loses']
    rows.loc[rows['method'] == 'Ours', 'cents'] = .3 # as accurate as the small model, which is free
    got = compared(rows, cost='cents')
    assert got['cost_ratio'] == got['cost_ratio_low'] == np.inf and got['loses']
    assert '∞<br><sub>[∞, ∞]' in comparison_markdown(pd.DataFrame([got]))

def test_comparisons_are_with_everyone_there():
    others = {'RSD': ([1, 1], [2, 2]), 'SpecReason (greedy)': ([.5, .5], [5, 5]), 'Ours (full)': ([1, 1], [3, 3]),
              'Ours (per step)': ([0, 0], [3, 3]), 'Random': ([1, 1], [1, 1]), 'Oracle': ([1, 1], [1, 1])}
    rows = two([.75, .75], [2, 2], **others)
    pairs = everyone(rows)
    assert pairs[['ours', 'other']].values.tolist() == [
        [o, m] for o in ('Ours', 'Ours (full)', 'Ours (per step)')
        for m in ('SpecReason (greedy)', 'RSD', 'STEER (rest)')]
    md = comparison_markdown(pairs)
    assert md.splitlines()[0] == ('| Benchmark | Method | against SpecReason (greedy) (chosen threshold only) | '
                                  'against STEER (rest) | against RSD, an external model (chosen threshold only) |')
    assert '| b | Ours | ' in md and '| b | Ours (full) | ' in md and '| b | Ours (per step)' not in md
    assert '- against STEER (rest): ours wins 2 of 2, is clearly behind in 0.' in md
    assert 'an external model (chosen threshold only): ours wins 0 of 2, is clearly behind in 1.' in md
    rest = pairs[(pairs['ours'] == 'Ours (per step)') & (pairs['other'] == 'STEER (rest)')]
    later = md.split('The .csv also has')[1]
    assert f'- against STEER (rest): ours wins 0 of 1, is clearly behind in {rest["loses"].sum()}.' in later

def test_comparisons_say_where_ours_does_not_win():
    pairs = everyone(two([.75, .75], [2, 2]))
    assert 'ours wins 1 of 1, is clearly behind in 0.\n' in comparison_markdown(pairs)
    assert '**0.40<br><sub>[0.40, 0.40]' in comparison_markdown(pairs)
    pairs = pd.concat([pairs, everyone(two([1, 1], [8, 8])).assign(benchmark='c')], ignore_index=True)
    md = comparison_markdown(pairs)
    assert 'ours wins 1 of 2, is clearly behind in 0.' in md and '| c | Ours | 1.33<br><sub>' in md
    assert 'ours wins 0 of 1, is clearly behind in 1.' in comparison_markdown(everyone(two([.5, .5], [5, 5])))
    assert everyone(pd.concat([line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [9, 9])])).empty

# ---- ablations ---------------------------------------------------------------------------------------------------
def test_ablations_show_intervals_and_seeds(with_ours):
    md = ablation_markdown(with_ours.whole(ablation_table))
    assert '| toy | Ours (full), regenerate | 0.02 | 60 | 1 | ' in md and '| toy | short | ' in md
    assert md.count('–') == 2*3 + 1
