"All methods on toy tables by one rule: rows, intervals, comparisons, gains; a router of one's own joins."

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from toy import quick_methods, toy_benchmark

from stepwise_routing.gain import gain_frame
from stepwise_routing.method.curves import at_thresholds, of_walks, threshold_curves
from stepwise_routing.method.results import (
    CHOSEN,
    OF_CHOSEN,
    Choice,
    Method,
    Row,
    all_methods,
    compare,
    interval,
    simplest,
)
from stepwise_routing.method.rollouts import exits, large_alone, replay, replay_walks, thresholds
from stepwise_routing.report.tables import OURS, RIVALS, comparison, frame, seed_frame
from stepwise_routing.settings import Training
from stepwise_routing.util import resamples

N, BOOT = 120, 40
UNITS = 'flops', 'cents'
METHODS = quick_methods(seeds=(0, 1))


def without(splits, *columns):
    "A benchmark without walks and without some columns."
    return {
        split: replace(o, features={k: v for k, v in o.features.items() if k not in columns})
        for split, o in splits.items()
        if isinstance(split, str)
    }


@pytest.fixture(scope='module')
def benchmarks():
    return dict(one=toy_benchmark(N), bare=without(toy_benchmark(N, 7), 'mean_logit', 'reward'))


@pytest.fixture(scope='module')
def results(benchmarks):
    return compare(benchmarks, METHODS, UNITS, alpha=0.05, n_boot=BOOT, processes=1)


def table_of(results, *args):
    "A frame, and its rows by (unit, benchmark, method)."
    table = frame(results, *args)
    return table.set_index(['unit', 'benchmark', 'method'])


# ---- which rows there are
def test_every_method_gives_a_row_and_chosen_features_one_more(results):
    names = [method.name for method in METHODS]
    assert len({*names}) == len(names) == 23
    for unit in UNITS:
        found = [method for u, benchmark, method in results if (u, benchmark) == (unit, 'one')]
        assert found == [*names, CHOSEN]


def test_a_method_is_left_out_where_a_column_or_a_walk_is_missing(results):
    found = {method for _, benchmark, method in results if benchmark == 'bare'}
    left_out = {method.name for method in METHODS} - found
    wanted = ['SpecReason', 'RSD', 'STEER', 'Ours (S^os)', 'Ours, as printed', 'Ours, all features']
    wanted += [
        'Stake regression',
        'Mean-logit threshold',
        'TRIM',
        'STEER, rewrite',
        'Ours (S^os), rewrite',
    ]
    assert left_out == {*wanted} and CHOSEN not in found


def test_expected_values_are_not_guaranteed(results):
    for rule in ('tuned', 'guaranteed'):
        found = {*frame(results, rule)['method']}
        assert ({'Random step', 'Random problem', 'Oracle'} <= found) == (rule == 'tuned')
        assert {'Large only', 'RSD', 'Ours (S^API)', CHOSEN} <= found


@pytest.mark.slow
def test_two_processes_find_what_one_finds(benchmarks, results):
    few = [method for method in METHODS if method.name in ('STEER', 'Large only', 'Ours, linear')]
    options = dict(alpha=0.05, n_boot=BOOT)
    one = dict(one=benchmarks['one'])
    found = compare(one, few, UNITS, processes=2, **options)
    for key, row in found.items():
        for rule, choice in row.choices.items():
            for a, b in zip(choice, results[key].choices[rule]):
                assert np.array_equal(a, b), key


def test_three_models_need_no_other_code():
    "Every method but the regression on stakes, which knows two models. Nobody is right where the oracle is not."
    methods = [method for method in quick_methods() if method.name != 'Stake regression']
    splits = toy_benchmark(60, models=3)
    found = compare(dict(three=splits), methods, UNITS, alpha=0.1, n_boot=3, processes=1)
    table = frame(found)
    assert len(table) == 2 * (len(methods) + 1) and np.isfinite(table['share']).all()
    for _, part in table.groupby('unit'):
        best = part.set_index('method')['accuracy']['Oracle']
        is_routed = ~part['method'].isin(['SpecReason', 'RSD']) & (part['share'] != 1)
        assert (part['accuracy'][is_routed] <= best).all()


# ---- what a row says
def slow_row(splits, kappas, doubts, unit, alpha, reading='continue'):
    "(kappa, accuracy, cost) on test of the cheapest threshold that keeps the accuracy on calibration."
    calibration, test = splits['calibration'], splits['test']
    large = large_alone(calibration, unit)
    best = None, large.cost.mean()
    for kappa in kappas:
        right, cost = replay(calibration, doubts[0], [kappa], unit, reading)
        if right.mean() >= large.right.mean() - alpha - 1e-12 and cost.mean() < best[1]:
            best = kappa, cost.mean()
    if best[0] is None:
        on_test = large_alone(test, unit)
    else:
        on_test = replay(test, doubts[1], [best[0]], unit, reading)
    return best[0], on_test.right.mean(), on_test.cost.mean()


@pytest.mark.parametrize('unit', UNITS)
@pytest.mark.parametrize('method', ['Min-prob threshold', 'Mean-logit threshold'])
def test_a_row_is_what_a_loop_over_thresholds_finds(benchmarks, results, unit, method):
    splits = benchmarks['one']
    column = dict(zip(('Min-prob threshold', 'Mean-logit threshold'), ('min_prob', 'mean_logit')))
    doubts = [-splits[split].features[column[method]] for split in ('calibration', 'test')]
    kappas = thresholds(doubts[0], 500)
    kappa, accuracy, cost = slow_row(splits, kappas, doubts, unit, 0.05)
    row = table_of(results).loc[unit, 'one', method]
    assert (
        kappa is not None and results[unit, 'one', method].choices['tuned'].by_seed[0][0] == kappa
    )
    np.testing.assert_allclose([row['accuracy'], row['cost']], [100 * accuracy, cost])
    large = large_alone(splits['test'], unit).cost.mean()
    np.testing.assert_allclose(
        [row['share'], row['per_cost']], [cost / large, 100 * accuracy / cost]
    )


def test_both_prices_are_paid_by_the_same_policy(results, benchmarks):
    "A threshold is chosen in each unit, among the same."
    curves = next(m for m in METHODS if m.name == 'Ours (S^API)').curves
    flops, cents = curves(benchmarks['one'], UNITS, 'continue', 0).values()
    assert flops.kappas == cents.kappas and (flops.test.right == cents.test.right).all()
    assert (flops.test.cost != cents.test.cost).any()


def test_a_line_goes_from_the_large_model_to_the_cheapest_setting(benchmarks, results):
    o = benchmarks['one']['test']
    large, small = large_alone(o, 'flops'), exits(o, 'flops', 'continue')
    line = results['flops', 'one', 'Min-prob threshold'].line
    assert line.shape == (40, 2)
    assert line[0].tolist() == [large.cost.mean(), large.right.mean()]
    assert line[-1].tolist() == [small.cost[:, -1].mean(), small.right[:, -1].mean()]


def test_every_other_reading_is_another_row(benchmarks):
    "Only how the larger model takes over differs."
    by_name = {method.name: method for method in METHODS}
    splits = benchmarks['one']
    assert len([name for name in by_name if name.endswith(', rewrite')]) == 5
    for reading, name in (
        ('continue', 'Min-prob threshold'),
        ('rewrite', 'Min-prob threshold, rewrite'),
    ):
        curve = by_name[name].curves(splits, ('flops',), by_name[name].reading, 0)['flops']
        doubt = -splits['test'].features['min_prob']
        want = replay(splits['test'], doubt, curve.kappas[1:], 'flops', reading)
        assert by_name[name].reading == reading and (curve.test.cost[1:] == want.cost).all()


# ---- as the paper prints it
def test_walks_are_rows_at_their_thresholds_or_on_the_grid(benchmarks):
    splits = benchmarks['one']
    walks = splits['RSD', 'test']
    every, grid = (
        of_walks('RSD', on)(splits, ('cents',), 'rewrite', 0)['cents'] for on in (False, True)
    )
    walked, large = replay_walks(walks, 'cents'), large_alone(splits['test'], 'cents')
    assert (
        every.kappas[1:] == [*walks.kappas] and len(every.kappas) == 13 and len(grid.kappas) == 12
    )
    assert (every.test.cost == np.vstack([large.cost, walked.cost])).all()
    used = ~np.isclose(walks.kappas, -0.33)
    assert (grid.test.right[1:] == walks.right[used]).all() and grid.kappas[1:] == [
        *walks.kappas[used]
    ]


def test_the_printed_profile_uses_grids_and_the_thresholds_of_training(benchmarks):
    by_name = {
        m.name: m for m in all_methods(Training(steps=2, batch=20, printed=True), seeds=(0,))
    }
    for name in ('STEER', 'SpecReason', 'RSD', 'Ours (S^os)'):
        curve = by_name[name].curves(benchmarks['one'], ('flops',), 'continue', 0)['flops']
        if name == 'Ours (S^os)':
            assert len(curve.kappas) == len(curve.test.cost) == 1 and 0 <= curve.kappas[0] <= 0.5
        else:
            np.testing.assert_allclose(curve.kappas[1:], -np.linspace(1, 0, 11), atol=1e-12)


# ---- chosen features
def test_chosen_features_are_the_simplest_of_three(results):
    of_rule = {'tuned': 'tuned', 'guaranteed': 'guaranteed, one of three'}
    for unit in UNITS:
        row = results[unit, 'one', CHOSEN]
        assert row.line is None and {*row.choices} == {*of_rule}
        for rule, used in of_rule.items():
            three = [results[unit, 'one', name].choices[used] for name in OF_CHOSEN]
            for got, want in zip(row.choices[rule], simplest(three)):
                assert np.array_equal(got, want)
    assert OF_CHOSEN == ('Min-prob threshold', 'Ours, linear', 'Ours, all features')


# ---- a router of one's own
def test_a_router_of_your_own_joins_in_ten_lines(benchmarks, results):
    def patience(features):
        return features['step']

    mine = Method('Patience', threshold_curves(patience))
    one = dict(one=benchmarks['one'])
    few = [method for method in METHODS if method.name in ('Large only', 'Min-prob threshold')]
    found = compare(one, [*few, mine], UNITS, alpha=0.05, n_boot=BOOT, processes=1)
    table = table_of(found)
    splits = benchmarks['one']
    doubts = [splits[split].features['step'] for split in ('calibration', 'test')]
    for unit in UNITS:
        kappa, accuracy, cost = slow_row(splits, thresholds(doubts[0]), doubts, unit, 0.05)
        assert found[unit, 'one', 'Patience'].choices['tuned'].by_seed == [
            (kappa, pytest.approx(accuracy), pytest.approx(cost))
        ]
    others = table_of(results).loc[table.drop('Patience', level='method').index]
    assert table.drop('Patience', level='method').equals(others), 'other rows stay as they are'
    versus = comparison(found, ('Patience',), ('Min-prob threshold', 'Large only', 'RSD'))
    assert versus['rival'].tolist() == ['Min-prob threshold', 'Large only'] * 2


def test_a_router_may_be_fitted_on_training_problems(benchmarks):
    seen = []

    def fit(train, unit, reading, seed):
        seen.append((str(train.split), unit, reading, seed))
        return lambda features: -features['min_odds']

    mine = Method('Fitted', at_thresholds(fit, most=7), seeds=(3, 4), reading='rewrite')
    found = compare(dict(one=benchmarks['one']), [mine], UNITS, n_boot=3, processes=1)
    assert seen == [('train', 'flops', 'rewrite', 3), ('train', 'flops', 'rewrite', 4)]
    assert len(found['cents', 'one', 'Fitted'].choices['tuned'].by_seed) == 2


# ---- tables by hand
def choice(accuracy, cost, by_seed=((0.5, 0.0, 0.0),)):
    return Choice(np.array(accuracy), np.array(cost), np.array(cost), list(by_seed))


def row(*args, **more):
    return Row(dict(tuned=choice(*args, **more)), None)


SEEDS = (0.25, 0.8, 2.0), (None, 0.6, 6.0)
BY_HAND = {
    ('flops', 'toy', 'Large only'): row([0.9, 0.8, 1.0, 0.9], [8.0, 8.0, 10.0, 8.0]),
    ('flops', 'toy', 'Ours (S^os)'): row([0.7, 0.6, 0.9, 0.8], [4.0, 2.0, 5.0, 8.0], by_seed=SEEDS),
    ('cents', 'toy', 'Large only'): row([0.9, 0.8, 1.0, 0.9], [2.0, 2.0, 2.0, 2.0]),
    ('cents', 'toy', 'Ours (S^os)'): row([0.7, 0.6, 0.9, 0.8], [1.0, 1.0, 3.0, 1.0]),
}


def test_an_interval_leaves_out_the_sample_itself():
    assert interval(np.r_[9.0, np.arange(1000)]) == (9.0, 25.0, 974.0)
    assert interval(np.array([5.0, np.inf, 1.0, 2.0])) == (5.0, 1.0, np.inf)


def test_a_frame_by_hand():
    table = frame(BY_HAND)
    numbers = ['accuracy', 'cost', 'share', 'per_cost']
    columns = [f'{name}{end}' for name in numbers for end in ('', '_low', '_high')]
    assert list(table) == ['unit', 'benchmark', 'method', *columns] and len(table) == 4
    ours = table.iloc[1]
    assert (ours['unit'], ours['method']) == ('flops', 'Ours (S^os)')
    want = dict(
        accuracy=(70, 60, 90), cost=(4, 2, 8), share=(0.5, 0.25, 1), per_cost=(17.5, 10, 30)
    )
    for name, values in want.items():
        np.testing.assert_allclose([ours[name], ours[f'{name}_low'], ours[f'{name}_high']], values)
    assert len(frame(BY_HAND, 'guaranteed')) == 0


def test_a_comparison_is_paired_by_hand():
    "Ratios resample by resample: 2/8, 5/10, 8/8."
    table = comparison(BY_HAND, ('Ours (S^os)',), ('Large only', 'RSD'))
    columns = [f'{name}{end}' for name in ('ratio', 'points') for end in ('', '_low', '_high')]
    assert list(table) == ['unit', 'benchmark', 'ours', 'rival', *columns]
    assert table['unit'].tolist() == ['flops', 'cents'] and {*table['rival']} == {'Large only'}
    np.testing.assert_allclose(table[columns[:3]], [[0.5, 0.25, 1], [0.5, 0.5, 1.5]])
    np.testing.assert_allclose(table[columns[3:]], [[-20, -20, -10]] * 2)
    assert (OURS[-1], len(OURS), len(RIVALS)) == (CHOSEN, 3, 6)


def test_every_seed_is_a_row_by_hand(results):
    table = seed_frame(BY_HAND)
    columns = ['unit', 'benchmark', 'method', 'seed', 'kappa', 'accuracy', 'share']
    assert list(table) == columns and table['seed'].tolist() == [0, 1]
    np.testing.assert_allclose(table['accuracy'], [80, 60])
    np.testing.assert_allclose(table['share'], [0.25, 0.75])
    assert table['kappa'][0] == 0.25 and np.isnan(table['kappa'][1])
    trained = {*seed_frame(results)['method']}
    assert trained == {name for name in trained if 'Ours' in name} and 'Ours (S^API)' in trained
    means = seed_frame(results).groupby(['unit', 'benchmark', 'method'])['accuracy'].mean()
    both = table_of(results)['accuracy'].loc[means.index]
    np.testing.assert_allclose(means, both, rtol=1e-12)


# ---- resamples
def test_resamples_are_a_multinomial_of_the_problems():
    counts = resamples(7, 20_000)
    assert (counts[0] == 1).all(), 'the sample itself stands first'
    assert (counts.sum(1) == 7).all()
    assert np.allclose(counts.mean(0), 1, atol=0.02) and np.allclose(
        counts.var(0), 6 / 7, atol=0.03
    )
    assert (counts == resamples(7, 20_000)).all() and (counts != resamples(7, 20_000, 1)).any()


# ---- gains
def test_gains_are_counted_and_found_as_scikit_learn_finds_them(benchmarks):
    splits = benchmarks['one']
    (line,) = gain_frame(dict(one=splits)).to_dict('records')
    wrong, gain, odds, logit = [], [], [], []
    for split in ('train', 'calibration', 'test'):
        o = splits[split]
        for i, T in enumerate(o.steps):
            wrong.append(not o.right[i, T, 0])
            gain.append(wrong[-1] and o.right[i, 0, 0] == 1)
            odds.append(-o.features['min_odds'][i, :T].min())
            logit.append(-o.features['mean_logit'][i, :T].min())
    assert (line['benchmark'], line['problems']) == ('one', 3 * N)
    np.testing.assert_allclose([line['wrong'], line['gain']], [np.mean(wrong), np.mean(gain)])
    for title, label, score in (
        ('wrong by min-prob', wrong, odds),
        ('wrong by S^os', wrong, logit),
        ('gain by min-prob', gain, odds),
        ('gain by S^os', gain, logit),
    ):
        assert line[title] == pytest.approx(roc_auc_score(label, score))
        assert line[f'{title}, low'] < line[title] < line[f'{title}, high']
    assert 0.5 < line['gain learnt'] < 1
