"Tables of outcomes: prices, exits, thresholds; files keep every bit; what the package ships belongs together."

import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from toy import toy, toy_walks

from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.method.rollouts import (
    UNITS,
    exits,
    highest_so_far,
    load,
    save,
    shipped_outcomes,
    take,
    thresholds,
)

# Replay against a walk: test_walks.py (any number of models, all routers) and independent.py (by other code).


def test_prices_by_hand():
    "GPT-4.1-mini at .40, .10 and 1.60 dollars a million tokens; the small model, 1M parameters, is free."
    flops, full, cents = (toy(3).prices(unit) for unit in UNITS)
    assert flops.tolist() == [[2e6, 0, 0, 0], [1e7, 0, 0, 0]]
    assert full.tolist() == [[2e6, 2e6, 0, 0], [1e7, 1e7, 0, 0]]
    np.testing.assert_allclose(1e6 * cents, [[0, 0, 0, 0], [160, 0, 40, -30]])


def test_a_thrown_token_is_paid_where_a_next_step_was_begun():
    "GlimpRouter has seen the first token of the next step: it is paid, unless there is no next step."
    o = toy(60)
    plain, glimpsed = (exits(o, 'flops', 'continue', thrown) for thrown in (0, 1))
    assert (glimpsed.right == plain.right).all()
    extra = (glimpsed.cost - plain.cost) / (2 * o.params[0])
    for row, T in zip(extra, o.steps):
        assert row.tolist() == [1] * (T - 1) + [0] * (len(row) - T + 1)


# ---- doubts and thresholds


def test_behind_its_end_a_chain_doubts_nothing():
    doubt = np.array([[0.5, np.nan, np.nan], [0.1, 0.7, 0.3], [np.nan, 0.2, np.nan]])
    highest = [[0.5, 0.5, 0.5], [0.1, 0.7, 0.7], [-np.inf, 0.2, 0.2]]
    assert highest_so_far(doubt).tolist() == highest


def test_a_doubt_without_a_model_axis_asks_for_the_largest_model():
    doubt = np.array([[0.4, 0.6]])
    for_the_largest = np.stack([np.full((1, 2), np.nan), doubt], -1)
    for highest in (highest_so_far(doubt, 2), highest_so_far(for_the_largest)):
        assert highest.tolist() == [[0.4, 0.4, 0.6, 0.6]]


doubts = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6)


@given(doubts, st.integers(0, 2**32))
def test_thresholds_are_those_that_make_a_difference(rows, seed):
    "Neighbours differ, and no other kappa gives anything else. No more are taken than asked for."
    o = toy(200, seed=seed % 7)
    o = take(o, np.flatnonzero(o.steps == 3)[: len(rows)])
    doubt = np.full(o.inside.shape, np.nan)
    doubt[:, :3] = np.array(rows, float)[: len(o)]
    highest = highest_so_far(doubt)

    def exit_at(kappa):
        return tuple((highest < kappa).sum(1))

    kappas = thresholds(doubt)
    seen = [exit_at(kappa) for kappa in kappas]
    assert (np.diff(kappas) > 0).all()
    assert len({*seen}) == len(seen)
    assert {exit_at(kappa) for kappa in np.linspace(-1, 6, 71)} <= {*seen}
    assert set(seen[0]) == {0}
    assert set(seen[-1]) == {highest.shape[1]}
    some = thresholds(doubt, 2)
    assert len(some) <= 3
    assert {*some} <= {*kappas}
    assert (some[0], some[-1]) == (kappas[0], kappas[-1])


def test_a_threshold_lies_one_float_above_a_doubt():
    "A new chain between two doubts of calibration hands over at the lower one's threshold."
    kappas = thresholds(np.array([[0.2], [0.6]]))
    assert kappas.tolist() == [0.2, np.nextafter(0.2, 1), np.nextafter(0.6, 1)]
    assert [0.3 >= kappa for kappa in kappas] == [True, True, False]


# ---- rows and files


def content(table) -> list:
    "The name, kind and bytes of each array of a table."
    arrays = {field.name: getattr(table, field.name) for field in fields(table)}
    arrays |= arrays.pop('features', {})
    return [(name, x is not None and (x.dtype, x.tobytes())) for name, x in arrays.items()]


@pytest.mark.parametrize('models', [2, 3])
def test_what_is_saved_is_what_is_read(models, tmp_path):
    whole = toy(10, models)
    for table in (whole, replace(whole, step_right=None), toy_walks(whole, 'RSD')):
        first, again = tmp_path / 'a.npz', tmp_path / 'b.npz'
        save(table, first)
        read = load(first)
        assert type(read) is type(table)
        assert content(read) == content(table)
        save(read, again)
        assert first.read_bytes() == again.read_bytes()
        with zipfile.ZipFile(first) as file:
            assert {info.date_time[:3] for info in file.infolist()} == {(1980, 1, 1)}


def test_a_table_with_a_pickle_is_refused(tmp_path):
    path = tmp_path / 'bad.npz'
    np.savez(path, steps=np.array([dict(a=1)], object))
    with pytest.raises(ValueError, match='allow_pickle=False'):
        load(path)


@pytest.mark.parametrize('benchmark', MICRO)
def test_shipped_outcomes_are_of_the_shipped_problems(benchmark):
    "Row by row, with finite features inside of each chain and none behind it; walks are of the same problems."
    splits = shipped_outcomes(benchmark)
    names = ['train', 'calibration', 'test']
    walks = [(method, name) for method in ('SpecReason', 'RSD') for name in names[1:]]
    assert {*splits} == {*names, *walks}
    for name in names:
        o = splits[name]
        assert o.problem.tolist() == [p.id for p in load_problems(benchmark, name)]
        assert all((np.isfinite(values) == o.inside).all() for values in o.features.values())
        assert ((o.small[..., 0] > 0) <= o.inside).all()
        assert not o.large[np.arange(o.right.shape[1]) >= o.steps[:, None]].any()
        assert set(np.unique(o.right)) == {0, 1}
        assert (o.step_right is None) == (name != 'train')
    for method, name in walks:
        w = splits[method, name]
        assert str(w.method) == method
        assert (w.problem == splits[name].problem).all()
        assert (np.diff(w.kappas) > 0).all()
        assert w.tokens.shape == (*w.right.shape, 3, 4)
