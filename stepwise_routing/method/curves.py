"""From a router to a `Curve`: right answers and costs of every problem at every threshold

A curve is what a `Method` gives (chapter 05). Its first setting is the large model alone. `at_thresholds` and the others
give a function (split -> `Outcomes` or `Walks`, units, reading, seed) -> {unit: `Curve`}.
"""

from collections.abc import Callable

import numpy as np

from .policy import Curve
from .rollouts import Outcomes, Result, large_alone, replay, replay_walks, thresholds

MOST = 500  # thresholds of a curve; with all of them, tuned costs move by .002 at most
GRID = -np.linspace(1, 0, 11)  # of the paper's baselines: scores 1, .9, ..., 0 as doubts


def with_large(outcomes: Outcomes, unit: str, result: Result) -> Result:
    "The first setting, the safest of all, is the large model alone."
    large = large_alone(outcomes, unit)
    return Result(*(np.vstack([first, others]) for first, others in zip(large, result)))


def priced(kappas: list, units, result: Callable) -> dict:  # result: (split, unit) -> `Result`
    "One router at several prices: it is fitted in the first unit, and its threshold is chosen in each."
    return {
        unit: Curve(kappas, result('calibration', unit), result('test', unit)) for unit in units
    }


def at_thresholds(
    fit: Callable,  # (train, unit, reading, seed) -> router
    thrown: int = 0,  # further small tokens that a hand-over throws away
    most: int = MOST,  # thresholds
) -> Callable:
    "A router at the thresholds that make a difference on calibration."

    def curves(splits, units, reading, seed):
        router = fit(splits['train'], units[0], reading, seed)
        doubts = {split: router(splits[split].features) for split in ('calibration', 'test')}
        kappas = thresholds(doubts['calibration'], most)

        def result(split, unit):
            routed = replay(splits[split], doubts[split], kappas, unit, reading, thrown)
            return with_large(splits[split], unit, routed)

        return priced([None, *kappas], units, result)

    return curves


def threshold_curves(router: Callable, thrown: int = 0) -> Callable:
    "The same for a router that learns nothing: features -> doubt."
    return at_thresholds(lambda *case: router, thrown)


def at_grid(fit: Callable) -> Callable:
    "A router whose doubt is minus a score in [0, 1], at the thresholds 1, .9, ..., 0, as the paper prints it."

    def curves(splits, units, reading, seed):
        router = fit(splits['train'], units[0], reading, seed)

        def result(split, unit):
            outcomes = splits[split]
            routed = replay(outcomes, router(outcomes.features), GRID, unit, reading)
            return with_large(outcomes, unit, routed)

        return priced([None, *GRID], units, result)

    return curves


def at_its_own(fit: Callable) -> Callable:
    "A policy that comes with its threshold: nothing is left to choose. fit: ... -> (policy, kappa, log)."

    def curves(splits, units, reading, seed):
        policy, kappa, _ = fit(splits['train'], units[0], reading, seed)

        def result(split, unit):
            outcomes = splits[split]
            return replay(outcomes, policy(outcomes.features), [kappa], unit, reading)

        return priced([kappa], units, result)

    return curves


def at_chances(expected: Callable) -> Callable:
    "Handing over by chance, with probability 1 to 0: expected results."
    chances = np.linspace(1, 0, 41)

    def curves(splits, units, reading, seed):
        def result(split, unit):
            results = [expected(splits[split], p, unit) for p in chances]
            return with_large(splits[split], unit, Result(*np.swapaxes(results, 0, 1)))

        return priced([None, *chances], units, result)

    return curves


def of_walks(
    name: str,  # of the method
    on_grid: bool = False,  # at the thresholds 1, .9, ..., 0 alone
) -> Callable:
    "Recorded walks, `splits[name, split]`, at all their thresholds."

    def curves(splits, units, reading, seed):
        kappas = splits[name, 'test'].kappas
        is_used = np.full(len(kappas), True)
        if on_grid:
            is_used = np.isin(kappas.round(9), GRID.round(9))

        def result(split, unit):
            walked = replay_walks(splits[name, split], unit)
            used = Result(*(values[is_used] for values in walked))
            return with_large(splits[split], unit, used)

        return priced([None, *kappas[is_used]], units, result)

    return curves


def as_it_is(results: Callable) -> Callable:
    "Nothing but one result a problem."

    def curves(splits, units, reading, seed):
        def result(split, unit):
            return Result(*(values[None] for values in results(splits[split], unit)))

        return priced([None], units, result)

    return curves


def points(curve: Curve, n: int = 40) -> np.ndarray:  # [n, 2]
    "Cost and accuracy on test problems, evenly from safe to cheap."
    settings = np.linspace(0, len(curve.kappas) - 1, n).round().astype(int)
    return np.stack([curve.test.cost[settings].mean(1), curve.test.right[settings].mean(1)], 1)
