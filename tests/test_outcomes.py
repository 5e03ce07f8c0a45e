"Tables of outcomes: replaying a router is walking step by step; files keep every bit."

import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from toy import toy, toy_walks

from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.method.baselines import fit_stakes, fit_steer, high, low
from stepwise_routing.method.policy import fresh_router
from stepwise_routing.method.rollouts import (
    READINGS,
    UNITS,
    exits,
    highest_so_far,
    large_alone,
    load,
    replay,
    replay_walks,
    save,
    shipped_outcomes,
    take,
    thresholds,
)

both = pytest.mark.parametrize('models', [2, 3])


# ---- one walk, step by step, with a bill of its own
def price(o, model, tokens, unit):
    "Of tokens (generated, read anew, sent, of these cached)."
    written, read, sent, cached = (float(x) for x in tokens)
    if unit == 'flops':
        return 2 * o.params[model] * written
    if unit == 'full_flops':
        return 2 * o.params[model] * (written + read)
    of_prompt, of_cached, of_written = o.dollars[model]
    dollars = (sent - cached) * of_prompt + cached * of_cached + written * of_written
    return dollars / 1e6 * 100


def walk(o, i, doubt, kappa, unit, reading, thrown=0):
    "(right, cost) of problem i: write a step, ask for the largest model first, hand over at most once."
    T, larger = int(o.steps[i]), len(o.models) - 1
    cost = 0.0
    for t in range(T):
        cost += price(o, 0, o.small[i, t], unit)
        asked = doubt[i, t] if doubt.ndim == 3 else [np.nan] * (larger - 1) + [doubt[i, t]]
        for k in reversed(range(larger)):
            if asked[k] >= kappa:
                is_last = t == T - 1
                kept = t if is_last or reading == 'rewrite' else t + 1
                cost += price(o, k + 1, o.large[i, kept, k], unit)
                if not is_last:
                    cost += price(o, 0, (thrown, 0, 0, 0), unit)
                return o.right[i, kept, k], cost
    return o.right[i, T, 0], cost


def coin(o):
    "A doubt in each larger model, by chance."
    doubt = np.random.default_rng(1).random((*o.inside.shape, len(o.models) - 1)).round(1)
    return np.where(o.inside[..., None], doubt, np.nan)


def untrained(o):
    policy = fresh_router(o.features, ('min_odds', 'step', 'final'), len(o.models), (4,), 3)
    return replace(policy, theta=policy.theta * 3)(o.features)


ROUTERS = dict(
    coin=coin,
    low=lambda o: low('min_prob')(o.features),
    high=lambda o: high('next_entropy')(o.features),
    steer=lambda o: fit_steer(o)(o.features),
    policy=untrained,
)


@both
@pytest.mark.parametrize('router', ROUTERS)
@pytest.mark.parametrize('reading', READINGS)
def test_a_replay_is_a_walk_step_by_step(models, router, reading):
    o = toy(40, models, seed=models)
    doubt = ROUTERS[router](o)
    seen = np.sort(doubt[np.isfinite(doubt)])
    kappas = [seen[0], *seen[[5, len(seen) // 2, -8]], np.nextafter(seen[-8], 9), seen[-1] + 1]
    for unit in UNITS:
        for thrown in (0, 1):
            got = replay(o, doubt, kappas, unit, reading, thrown)
            for s, kappa in enumerate(kappas):
                want = [walk(o, i, doubt, kappa, unit, reading, thrown) for i in range(len(o))]
                right, cost = np.array(want).T
                assert (got.right[s] == right).all(), (unit, kappa)
                if unit == 'cents':
                    np.testing.assert_allclose(got.cost[s], cost, rtol=1e-12, atol=1e-15)
                else:
                    assert (got.cost[s] == cost).all(), (unit, kappa)  # whole numbers: every bit


def test_a_stake_regression_replays_as_it_walks():
    o = toy(300, split='train')
    doubt = fit_stakes(o, 'flops', 'continue')(o.features)
    kappa = np.nanmedian(doubt)
    got = replay(o, doubt, [kappa], 'flops', 'continue')
    want = [walk(o, i, doubt, kappa, 'flops', 'continue') for i in range(len(o))]
    assert (np.array(want).T == np.array([got.right[0], got.cost[0]])).all()


# ---- exits
@both
def test_exits_stand_in_the_order_in_which_they_are_asked_for(models):
    o, larger = toy(30, models), models - 1
    for unit in UNITS:
        right, cost = exits(o, unit, 'continue')
        assert right.shape == cost.shape == (30, o.small.shape[1] * larger + 1)
        for i, T in enumerate(o.steps):
            for t in range(T):
                for place, k in enumerate(reversed(range(larger))):
                    asked = np.full((30, o.small.shape[1], larger), -1.0)
                    asked[i, t, k] = 1.0
                    want = walk(o, i, asked, 1.0, unit, 'continue')
                    got = right[i, t * larger + place], cost[i, t * larger + place]
                    np.testing.assert_allclose(got, want, rtol=1e-12)
            small_cost = sum(price(o, 0, tokens, unit) for tokens in o.small[i, :T])
            np.testing.assert_allclose((right[i, -1], cost[i, -1]), (o.right[i, T, 0], small_cost))


@both
def test_the_large_model_alone(models):
    o = toy(20, models)
    for unit in UNITS:
        right, cost = large_alone(o, unit)
        want = [price(o, models - 1, o.large[i, 0, -1], unit) for i in range(20)]
        assert (right == o.right[:, 0, -1]).all()
        np.testing.assert_allclose(cost, want, rtol=1e-12)


def test_prices_by_hand():
    "GPT-4.1-mini at .40, .10 and 1.60 dollars a million tokens; the small model, 1M parameters, is free."
    o = toy(3)
    flops, full, cents = (o.prices(unit) for unit in UNITS)
    assert flops.tolist() == [[2e6, 0, 0, 0], [1e7, 0, 0, 0]]
    assert full.tolist() == [[2e6, 2e6, 0, 0], [1e7, 1e7, 0, 0]]
    million = 1e6 * cents[1]
    np.testing.assert_allclose(million, [160, 0, 40, -30])
    assert not cents[0].any()


def test_a_thrown_token_is_paid_where_a_next_step_was_begun():
    "GlimpRouter has seen the first token of the next step: it is paid, unless there is no next step."
    o = toy(60)
    plain, glimpsed = (exits(o, 'flops', 'continue', thrown) for thrown in (0, 1))
    extra = glimpsed.cost - plain.cost
    token = 2 * o.params[0]
    for i, T in enumerate(o.steps):
        assert extra[i].tolist() == [token] * (T - 1) + [0] * (o.small.shape[1] + 1 - (T - 1))
    assert (glimpsed.right == plain.right).all()


# ---- doubts and thresholds
def test_behind_its_end_a_chain_doubts_nothing():
    doubt = np.array([[0.5, np.nan, np.nan], [0.1, 0.7, 0.3]])
    assert highest_so_far(doubt).tolist() == [[0.5] * 3, [0.1, 0.7, 0.7]]
    nobody = np.array([[np.nan, 0.2]])
    assert highest_so_far(nobody).tolist() == [[-np.inf, 0.2]]


def test_a_doubt_without_a_model_axis_asks_for_the_largest_model():
    doubt = np.array([[0.4, 0.6]])
    whole = np.stack([np.full((1, 2), np.nan), doubt], -1)
    assert (
        highest_so_far(doubt, 2).tolist()
        == highest_so_far(whole).tolist()
        == [[0.4, 0.4, 0.6, 0.6]]
    )


doubts = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6)


@given(doubts, st.integers(0, 2**32))
def test_thresholds_are_those_that_make_a_difference(rows, seed):
    "Neighbours differ, and no other kappa gives anything else."
    o = toy(200, seed=seed % 7)
    o = take(o, np.flatnonzero(o.steps == 3)[: len(rows)])
    rows = np.array(rows, float)[: len(o)]
    doubt = np.full(o.inside.shape, np.nan)
    doubt[:, :3] = rows
    highest = highest_so_far(doubt)

    def exit_at(kappa):
        return tuple((highest < kappa).sum(1))

    kappas = thresholds(doubt)
    seen = [exit_at(kappa) for kappa in kappas]
    assert (np.diff(kappas) > 0).all() and len({*seen}) == len(seen)
    assert {exit_at(kappa) for kappa in np.linspace(-1, 6, 71)} <= {*seen}
    assert set(seen[0]) == {0} and set(seen[-1]) == {highest.shape[1]}


def test_a_threshold_lies_one_float_above_a_doubt():
    "A new chain between two doubts of calibration hands over at the lower one's threshold."
    kappas = thresholds(np.array([[0.2], [0.6]]))
    assert kappas.tolist() == [0.2, np.nextafter(0.2, 1), np.nextafter(0.6, 1)]
    new = highest_so_far(np.array([[0.3]]))
    assert [bool((new >= kappa).any()) for kappa in kappas] == [True, True, False]


def test_no_more_thresholds_than_asked_for():
    doubt = low('min_prob')(toy(300).features)
    every, some = thresholds(doubt), thresholds(doubt, 50)
    assert len(every) > 400 and len(some) == 51 and {*some} <= {*every}
    assert (some[0], some[1], some[-1]) == (every[0], every[1], every[-1])


# ---- rows and files
@both
def test_some_rows_replay_as_in_the_whole_table(models):
    o, rows = toy(40, models), np.array([7, 3, 3, 39])
    doubt = coin(o)
    whole = replay(o, doubt, [0.3, 0.8], 'cents', 'rewrite')
    some = replay(take(o, rows), doubt[rows], [0.3, 0.8], 'cents', 'rewrite')
    for all_values, values in zip(whole, some):
        assert (values == all_values[:, rows]).all()
    assert take(o, rows).problem.tolist() == [f'test-{i}' for i in rows]
    assert take(replace(o, step_right=None), rows).step_right is None


def same(one, other):
    "Are two tables equal, down to the kinds of their arrays?"
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        pairs = [(a[name], b[name]) for name in a] if field.name == 'features' else [(a, b)]
        if field.name == 'features':
            assert list(a) == list(b)
        for x, y in pairs:
            assert (x is None) == (y is None), field.name
            if x is not None:
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), field.name


@both
def test_what_is_saved_is_what_is_read(models, tmp_path):
    tables = dict(whole=toy(10, models), unlabelled=replace(toy(10, models), step_right=None))
    tables['walks'] = toy_walks(tables['whole'], 'RSD')
    for name, table in tables.items():
        paths = [tmp_path / f'{name}-{i}.npz' for i in (0, 1)]
        save(table, paths[0])
        read = load(paths[0])
        assert type(read) is type(table)
        same(read, table)
        save(read, paths[1])
        assert paths[0].read_bytes() == paths[1].read_bytes()
        with zipfile.ZipFile(paths[0]) as file:
            assert {info.date_time[:3] for info in file.infolist()} == {(1980, 1, 1)}


def test_a_table_with_a_pickle_is_refused(tmp_path):
    path = tmp_path / 'bad.npz'
    np.savez(path, steps=np.array([dict(a=1)], object))
    with pytest.raises(ValueError, match='allow_pickle=False'):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / 'none.npz')


# ---- recorded walks
def test_recorded_walks_cost_what_their_tokens_cost():
    walks = toy_walks(toy(8), 'SpecReason')
    for unit in UNITS:
        right, cost = replay_walks(walks, unit)
        assert (right == walks.right).all()
        for s in range(len(walks.kappas)):
            for i in range(8):
                want = sum(price(walks, m, walks.tokens[s, i, m], unit) for m in range(3))
                assert cost[s, i] == pytest.approx(want, rel=1e-12)


# ---- what the package ships
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
        assert ((o.small[..., 0] > 0) <= o.inside).all() and set(np.unique(o.right)) == {0, 1}
        behind = np.arange(o.right.shape[1]) >= o.steps[:, None]
        assert not o.large[behind].any() and (o.step_right is None) == (name != 'train')
    for method, name in walks:
        w = splits[method, name]
        assert (w.problem == splits[name].problem).all() and str(w.method) == method
        assert (np.diff(w.kappas) > 0).all() and w.tokens.shape == (*w.right.shape, 3, 4)
