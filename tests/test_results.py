"All methods on toy tables by one rule: which rows there are, the printed profile, a router of one's own."

from dataclasses import replace

import numpy as np
import pytest
from toy import quick_methods, toy_benchmark

from stepwise_routing.method.curves import at_thresholds, threshold_curves
from stepwise_routing.method.results import (
    CHOSEN,
    OF_CHOSEN,
    Method,
    all_methods,
    compare,
    simplest,
)
from stepwise_routing.report.tables import comparison, frame
from stepwise_routing.settings import Training

UNITS = 'flops', 'cents'
HOW = dict(units=UNITS, alpha=0.05, n_boot=40, processes=1)
METHODS = quick_methods(seeds=(0, 1))


def without(splits, *columns):
    "A benchmark without walks and without some columns."
    return {
        split: replace(o, features={k: v for k, v in o.features.items() if k not in columns})
        for split, o in splits.items()
        if isinstance(split, str)
    }


@pytest.fixture(scope='module')
def splits():
    return toy_benchmark(120)


@pytest.fixture(scope='module')
def results(splits):
    bare = without(toy_benchmark(60, 7), 'mean_logit', 'reward')
    return compare(dict(one=splits, bare=bare), METHODS, **HOW)


def assert_same_rows(found, results, names):
    "Bit for bit; names: of the methods, and what they are called in the results."
    for (unit, benchmark, method), row in found.items():
        other = results[unit, benchmark, names.get(method, method)]
        for rule, choice in row.choices.items():
            for a, b in zip(choice, other.choices[rule]):
                assert np.array_equal(a, b), method


# ---- which rows there are
LACKING = ['SpecReason', 'RSD', 'STEER', 'Ours (S^os)', 'Ours, as printed', 'Ours, all features']
LACKING += ['Stake regression', 'Mean-logit threshold', 'TRIM']
LACKING += ['STEER, rewrite', 'Ours (S^os), rewrite']


def test_every_method_gives_a_row_but_where_a_column_or_a_walk_is_missing(results):
    names = [method.name for method in METHODS]
    assert len(names) == len({*names}) == 23
    for unit in UNITS:
        rows = {'one': [], 'bare': []}
        for u, benchmark, method in results:
            if u == unit:
                rows[benchmark].append(method)
        assert rows['one'] == [*names, CHOSEN]
        assert rows['bare'] == [name for name in names if name not in LACKING]


def test_expected_values_are_not_guaranteed(results):
    tuned, guaranteed = ({*frame(results, rule)['method']} for rule in ('tuned', 'guaranteed'))
    expected = {'Small only', 'Random step', 'Random problem', 'Oracle'}
    assert tuned - guaranteed == expected | {'Ours, as printed'}  # the threshold of training


def test_three_models_need_no_other_code():
    "Every method but the regression on stakes, which knows two models. Nobody is right where the oracle is not."
    methods = [method for method in quick_methods() if method.name != 'Stake regression']
    found = compare(dict(three=toy_benchmark(60, models=3)), methods, n_boot=3, processes=1)
    table = frame(found)
    assert len(table) == 2 * (len(methods) + 1) and np.isfinite(table['share']).all()
    for _, part in table.groupby('unit'):
        best = part.set_index('method')['accuracy']['Oracle']
        is_routed = ~part['method'].isin(['SpecReason', 'RSD']) & (part['share'] != 1)
        assert (part['accuracy'][is_routed] <= best).all()


@pytest.mark.slow
def test_two_processes_find_what_one_finds(splits, results):
    few = [method for method in METHODS if method.name in ('STEER', 'Large only', 'Ours, linear')]
    assert_same_rows(compare(dict(one=splits), few, **HOW | dict(processes=2)), results, {})


def test_the_printed_profile_uses_grids_and_the_thresholds_of_training(splits):
    printed = all_methods(Training(steps=2, batch=20, printed=True), seeds=(0,))
    curves = {method.name: method.curves for method in printed}
    for name in ('STEER', 'SpecReason', 'RSD'):
        curve = curves[name](splits, ('flops',), 'rewrite', 0)['flops']
        np.testing.assert_allclose(curve.kappas[1:], -np.linspace(1, 0, 11), atol=1e-12)
    walks = splits['RSD', 'test']
    assert (curve.test.right[1:] == walks.right[np.isin(walks.kappas, curve.kappas[1:])]).all()
    ours = curves['Ours (S^os)'](splits, ('flops',), 'continue', 0)['flops']
    assert len(ours.kappas) == len(ours.test.cost) == 1 and 0 <= ours.kappas[0] <= 0.5


def test_chosen_features_are_the_simplest_of_three(results):
    assert OF_CHOSEN == ('Min-prob threshold', 'Ours, linear', 'Ours, all features')
    of_rule = {'tuned': 'tuned', 'guaranteed': 'guaranteed, one of three'}
    for unit in UNITS:
        row = results[unit, 'one', CHOSEN]
        assert row.line is None and {*row.choices} == {*of_rule}
        for rule, used in of_rule.items():
            three = [results[unit, 'one', name].choices[used] for name in OF_CHOSEN]
            for got, want in zip(row.choices[rule], simplest(three)):
                assert np.array_equal(got, want)


# ---- a router of one's own
def test_a_router_of_your_own_joins_in_ten_lines(splits, results):
    "A threshold on min-prob, written once more, gets the row of the one that is there. Other rows stay as they are."

    def unsure(features):
        return -features['min_prob']

    mine = Method('Mine', threshold_curves(unsure))
    few = [method for method in METHODS if method.name in ('Large only', 'STEER')]
    found = compare(dict(one=splits), [*few, mine], **HOW)
    assert_same_rows(found, results, dict(Mine='Min-prob threshold'))
    with pytest.raises(ValueError, match='same name'):
        compare(dict(one=splits), [mine, mine], **HOW)
    versus = comparison(found, ('Mine',), ('STEER', 'Large only', 'RSD'))
    assert versus['rival'].tolist() == ['STEER', 'Large only'] * 2


def test_a_router_may_be_fitted_on_training_problems(splits):
    seen = []

    def fit(train, unit, reading, seed):
        seen.append((str(train.split), unit, reading, seed))
        return lambda features: -features['min_odds']

    mine = Method('Fitted', at_thresholds(fit, most=7), seeds=(3, 4), reading='rewrite')
    large = [method for method in METHODS if method.name == 'Large only']
    found = compare(dict(one=splits), [*large, mine], **HOW)
    assert seen == [('train', 'flops', 'rewrite', 3), ('train', 'flops', 'rewrite', 4)]
    assert len(found['cents', 'one', 'Fitted'].choices['tuned'].by_seed) == 2
