"Intervals, tables and figures: closed forms, golden text, the same bytes twice, clear lines for bad input."
import subprocess, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing import results as R
from stepwise_routing.baselines import (COLUMNS, GRID_COLUMNS, RECEIPT_COLUMNS, SEED_COLUMNS, LargeOnly, RandomRouter, SavedPolicy, SmallOnly, grid_rows,
                                        grid_search, fit_steer, oracle_frontier, outcome_grid, outcome_rows, policy_rows, random_frontier, random_outcome,
                                        receipt_rows, replay, replay_methods, save_rows, toy_table)
from stepwise_routing.results import (METHOD_STYLE, PAPER_TABLE_1, ablation_markdown, ablation_table, bootstrap_ci, compare_at_equal_accuracy,
                                      compare_with_steer, comparison_markdown, cost_share_markdown, cost_share_table, draw_accuracy_cost, evaluate,
                                      figure_caption, frontier_share, gain_markdown, headroom, load_results, load_seeds, method_label, paper_style,
                                      pareto_frontier, read_rows, resamples, routing_area, routing_gain, save_figure, save_table, shortfalls, table_flops,
                                      to_markdown, to_tex)

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
def loaded(run): return load_results(run, 'toy', n_boot=300)

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
def frame(correct, large, flops, threshold=0., method='X', n_large=None):
    row = lambda i: dict(zip(COLUMNS, ('b', method, 'append', threshold, 1, f'p{i}', 0, correct[i], large[i], flops[i], 2*flops[i], 3, 4, 5, 2)))
    return pd.DataFrame([row(i) for i in range(len(correct))])

def test_every_metric_by_hand():
    rows = pd.concat([frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only'), frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6, 1e6, 2e6, 2e6])])
    r = evaluate(rows, n_boot=50).iloc[1]
    assert (r['accuracy'], r['coverage'], r['paper_flops'], r['full_flops']) == (.5, .5, 1.5, 3.)
    assert np.isclose(r['ac_percent'], 50/1.5) and np.isclose(r['ac_fraction'], .5/1.5) and np.isclose(r['large_share'], .4)
    assert (r['steps'], r['small_tokens'], r['large_tokens'], r['n']) == (5, 3, 4, 4)
    assert r['accuracy_vs_large'] == -.25 and r['paper_flops_vs_large'] == -2.5

def test_differences_are_paired():
    "Two methods that differ on one problem in a hundred: the difference is known far better than either."
    rng = np.random.default_rng(0)
    large = (rng.random(100) < .5).astype(int); other = large.copy(); other[np.flatnonzero(large)[0]] = 0
    rows = pd.concat([frame(large, large, np.full(100, 2e6), method='Large only'), frame(other, large, np.full(100, 1e6))])
    r = evaluate(rows).iloc[1]
    assert r['accuracy_high'] - r['accuracy_low'] > .15 and r['accuracy_vs_large_low'] >= -.035 and r['accuracy_vs_large_high'] == 0
    assert r['paper_flops_vs_large_low'] == r['paper_flops_vs_large_high'] == -1

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

def test_headroom_says_when_the_large_model_is_out_of_reach():
    table = toy_table(30)
    correct = np.where(np.isnan(table.correct), np.nan, 0.); correct[:, 0] = 1
    room = headroom(replace(table, correct=correct), 'append', 50)
    assert room['cost_share_to_match_large'] == np.inf and 'not reached' in R.headroom_markdown([room])

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
    b = frontier_share(R.take_rows(table, order), ([2, 1], [2, 1]), [v[:, order] for v in points], n_boot=40)
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

def test_comparisons_say_where_ours_does_not_win():
    pairs = compare_with_steer(two([.75, .75], [2, 2]), n_boot=20)
    assert 'Ours wins 1 of 1 comparisons.\n' in comparison_markdown(pairs) and '**0.40** <sub>[0.40, 0.40]' in comparison_markdown(pairs)
    pairs = pd.concat([pairs, compare_with_steer(two([1, 1], [8, 8]), n_boot=20).assign(benchmark='c')])
    md = comparison_markdown(pairs)
    assert 'Ours wins 1 of 2 comparisons. It does not win (intervals not clear of 1 and 0):\n\n- c: Ours against STEER (rest).' in md
    behind = comparison_markdown(compare_with_steer(two([.5, .5], [5, 5]), n_boot=20))
    assert 'Ours wins 0 of 1 comparisons, and is clearly behind in 1. It does not win' in behind and 'STEER (rest) (clearly behind).' in behind
    assert '| c | Ours | 1.33 <sub>' in md
    assert compare_with_steer(pd.concat([line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [9, 9])]), 2).empty

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

def test_ablations_by_hand():
    large = line('Large only', [1, 1], [10, 10])
    single = pd.concat([line('short', c, f, .02).assign(seed=i) for i, (c, f) in enumerate((([1, 1], [2, 4]), ([1, 0], [5, 5])))])
    r = ablation_table(pd.concat([large, single.drop(columns='seed').assign(method='Ours')]), single, n_boot=200).iloc[0]
    assert (r['method'], r['alpha'], r['n'], r['seeds'], r['accuracy'], r['accuracy_min'], r['accuracy_max']) == ('short', .02, 2, 2, .75, .5, 1.)
    assert np.isclose(r['cost_share'], .4) and np.allclose([r['cost_share_min'], r['cost_share_max']], [.3, .5])
    assert r['miss'] == .25 and (r['miss_low'], r['miss_high'], r['miss_min'], r['miss_max']) == (0., .5, 0., .5)
    assert (r['accuracy_low'], r['accuracy_high']) == (.5, 1.), 'resamples of the mean over seeds: 1 and .5 a problem'
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
def test_the_papers_accuracy_per_cost_follows_from_its_columns():
    for method, (_, *cells) in PAPER_TABLE_1['rows'].items():
        for cell in cells:
            accuracy, flops, ac = map(float, cell.split())
            assert abs(accuracy/flops - ac) < .02*ac, (method, cell)
    assert {s['paper'] for s in METHOD_STYLE.values() if s['paper']} == set(PAPER_TABLE_1['rows'])

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
    for c in ('accuracy', 'paper_flops', 'ac_percent'): results[f'{c}_low'] = results[f'{c}_high'] = results[c]
    tex = to_tex(table_flops(results, 'golden'))
    head, paper = tex.split(r'\multicolumn{11}{l}{\emph{Table 1 of the paper')
    assert head == GOLDEN
    assert r'Ours & $\times$ & 94.5 & 2.03 & 46.55 & 82.8 & 5.34 & 15.5 & 29.1 & 8.24 & 3.53 \\' in paper
    assert r'RSD & $\checkmark$ & 94.4 & 2.27 & 41.59' in paper and paper.endswith('\\bottomrule\n\\end{tabular}}\n')
    assert tex.count('{') == tex.count('}')

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
    assert b'CreationDate' not in written[0]['figure.pdf'] and sorted(p.name for p in (tmp_path/'a').iterdir()) == sorted(written[0])

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

@pytest.mark.parametrize('width, panels, source, labels', [(2.7, 1, 'loaded', 7), (5.5, 3, 'loaded', 7), (2.7, 1, 'with_ours', 9), (5.5, 3, 'with_ours', 9)])
def test_labels_do_not_overlap_and_stay_inside(request, width, panels, source, labels):
    found = request.getfixturevalue(source)
    results, table, _ = found if source == 'loaded' else load_results(found, 'toy', n_boot=100)
    variant = results[results['method'] == 'Ours']
    results = pd.concat([results, variant.assign(method='Ours (per step)'), variant.assign(method='Ours (full)')]) # not drawn
    names = [f'toy{i}' for i in range(panels)]
    many = pd.concat([results.assign(benchmark=b) for b in names])
    fig = draw_accuracy_cost(many, {b: table for b in names}, width, 2.3)
    with paper_style(): fig.draw_without_rendering()
    assert fig.get_size_inches().tolist() == [width, 2.3]
    found = boxes(fig)
    assert len(found) == panels*labels
    for i, (_, a) in enumerate(found):
        assert fig.bbox.x0 <= a.x0 and a.x1 <= fig.bbox.x1 and fig.bbox.y0 <= a.y0 and a.y1 <= fig.bbox.y1
        for name, b in found[:i]: assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1), (found[i][0], name)

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
    (lambda t: t[:t.rindex(',')] + ',\n', "large_steps is '', not a number"),
    (lambda t: '', 'is not a table of results'),
    (lambda t: t + 'a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p\n', 'is not a table of results')])
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
    toy_table(50).save(tmp_path/'outcomes'/'toy-test.npz')
    with pytest.raises(ValueError, match='hold different problems'): load_results(tmp_path, 'toy')

def test_unknown_methods_get_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown method 'STEER rest' \(did you mean 'STEER \(rest\)'\?\)"): method_label('STEER rest', 'append')
    table = toy_table(20)
    with pytest.raises(ValueError, match='no method "Large only"'):
        rows = outcome_rows(SmallOnly(), table, replay(SmallOnly(), table, 0.), 0.)
        evaluate(pd.DataFrame(rows, columns=COLUMNS))
