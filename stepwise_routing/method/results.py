"""Every method on the same problems, by one rule: the paper's Tables 1 and 2, intervals, comparisons, gains"""

# %% imports
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed

from ..settings import Training, as_printed
from ..util import resamples
from .baselines import (
    fit_stakes,
    fit_steer,
    high,
    low,
    oracle,
    random_problem,
    random_step,
    small_alone,
)
from .confidence import auroc
from .policy import RULES, Choice, Curve, choose, simplest
from .rollouts import Outcomes, Result, large_alone, replay, replay_walks, thresholds
from .training import train

# %% columns
OS = ('mean_logit', 'step', 'length', 'final')  # of the paper's policy in the open setting: S^os
API = ('min_prob', 'step', 'length', 'final')  # in the API setting: S^API
LINE = ('min_odds', 'step', 'length')  # of a policy without hidden layers
FULL = ('min_odds', *OS)
SEEDS = (0, 1, 2)
MOST = 500  # thresholds of a curve; with all of them, tuned costs move by .002 at most


# %% method
@dataclass(frozen=True)
class Method:
    "A named family of routers: a row of the tables, a line of the figures."

    name: str
    curves: Callable  # (split -> `Outcomes` or walks, units, reading, seed) -> {unit: `Curve`}
    reading: str = 'continue'
    seeds: tuple = (0,)
    needs: tuple = ()  # columns or walks that a benchmark must have
    rules: tuple = RULES  # expected values cannot be guaranteed
    colour: str = '#9a9a9a'
    marker: str = 'p'

    def rewriting(self):
        "The same in the other reading."
        return replace(self, name=f'{self.name}, rewrite', reading='rewrite')


# %% curves
def with_large(outcomes: Outcomes, unit: str, result: Result) -> Result:
    "The first setting, the safest of all, is the large model alone."
    large = large_alone(outcomes, unit)
    return Result(*(np.vstack([first, others]) for first, others in zip(large, result)))


def priced(kappas: list, units, result: Callable) -> dict:  # result: (split, unit) -> `Result`
    "One router at several prices: it is fitted in the first unit, and its threshold is chosen in each."
    return {unit: Curve(kappas, result('calibration', unit), result('test', unit)) for unit in units}


def at_thresholds(fit: Callable, thrown: int = 0, most: int = MOST) -> Callable:
    "A router at the thresholds that make a difference on calibration. fit: (train, unit, reading, seed) -> router."

    def curves(splits, units, reading, seed):
        router = fit(splits['train'], units[0], reading, seed)
        doubts = {split: router(splits[split].features) for split in ('calibration', 'test')}
        kappas = thresholds(doubts['calibration'], most)

        def result(split, unit):
            routed = replay(splits[split], doubts[split], kappas, unit, reading, thrown)
            return with_large(splits[split], unit, routed)

        return priced([None, *kappas], units, result)

    return curves


def at_grid(fit: Callable) -> Callable:
    "A router whose doubt is minus a score in [0, 1], at the thresholds 1, .9, ..., 0, as the paper prints it."
    kappas = -np.linspace(1, 0, 11)

    def curves(splits, units, reading, seed):
        router = fit(splits['train'], units[0], reading, seed)

        def result(split, unit):
            o = splits[split]
            return with_large(o, unit, replay(o, router(o.features), kappas, unit, reading))

        return priced([None, *kappas], units, result)

    return curves


def at_its_own(fit: Callable) -> Callable:
    "A policy that comes with its threshold: nothing is left to choose. fit: ... -> (policy, kappa, log)."

    def curves(splits, units, reading, seed):
        policy, kappa, _ = fit(splits['train'], units[0], reading, seed)

        def result(split, unit):
            o = splits[split]
            return replay(o, policy(o.features), [kappa], unit, reading)

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


def of_walks(name: str, on_grid: bool = False) -> Callable:
    "Recorded walks, `splits[name, split]`, at all their thresholds, or at 1, .9, ..., 0."

    def curves(splits, units, reading, seed):
        kappas = splits[name, 'test'].kappas
        is_used = np.full(len(kappas), True)
        if on_grid:
            is_used = np.isin(kappas.round(9), -np.linspace(1, 0, 11).round(9))

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


# %% methods
CHOSEN = 'Ours, chosen features'  # the simplest of three that is nearly the cheapest on calibration
OF_CHOSEN = ('Min-prob threshold', 'Ours, linear', 'Ours, all features')  # the simplest first


def fit_policy(columns: tuple, s: Training) -> Callable:
    return lambda outcomes, unit, reading, seed: train(outcomes, columns, s, unit, reading, seed)


def policy_curves(columns: tuple, s: Training) -> Callable:
    "Of a trained policy: at all thresholds, or at its own if everything is as printed."
    fit = fit_policy(columns, s)
    if s.printed:
        return at_its_own(fit)
    return at_thresholds(lambda *case: fit(*case)[0])


def threshold_curves(router: Callable, thrown: int = 0) -> Callable:
    return at_thresholds(lambda *case: router, thrown)


def all_methods(s: Training = Training(), seeds: tuple = SEEDS) -> list:  # of `Method`s
    "The table of methods. A new method is a line here, and a function for its router."
    line = replace(s, hidden=())
    steer = at_grid if s.printed else at_thresholds
    steer = steer(lambda outcomes, unit, reading, seed: fit_steer(outcomes, seed))
    walks = [
        Method(
            name,
            of_walks(name, on_grid=s.printed),
            'rewrite',
            needs=(name,),
            colour=colour,
            marker=marker,
        )
        for name, colour, marker in (('SpecReason', '#009e73', 'v'), ('RSD', '#7a3e9d', '^'))
    ]
    methods = [
        Method('Small only', as_it_is(small_alone), colour='#404040', marker='s'),
        Method('Large only', as_it_is(large_alone), colour='#404040', marker='D'),
        *walks,
        Method('STEER', steer, needs=('mean_logit',), colour='#0072b2', marker='o'),
        Method('Ours (S^os)', policy_curves(OS, s), seeds=seeds, needs=OS, colour='#e69f00', marker='P'),
        Method('Ours (S^API)', policy_curves(API, s), seeds=seeds, needs=API, colour='#d55e00', marker='*'),
        Method('Ours, as printed', policy_curves(OS, as_printed(s)), seeds=seeds, needs=OS),
        Method('Min-prob threshold', threshold_curves(low('min_prob')), colour='#cc79a7', marker='d'),
        Method('Ours, linear', policy_curves(LINE, line), needs=LINE),
        Method('Ours, all features', policy_curves(FULL, s), seeds=seeds, needs=FULL),
        Method('Stake regression', at_thresholds(fit_stakes), needs=FULL),
        Method('Mean-logit threshold', threshold_curves(low('mean_logit')), needs=('mean_logit',)),
        Method('GlimpRouter', threshold_curves(high('next_entropy'), thrown=1), needs=('next_entropy',)),
        Method('TRIM', threshold_curves(low('reward')), 'rewrite', needs=('reward',)),
        Method('Random step', at_chances(random_step), rules=RULES[:1]),
        Method('Random problem', at_chances(random_problem), rules=RULES[:1]),
        Method('Oracle', as_it_is(oracle), rules=RULES[:1], colour='#767676', marker='+'),
    ]
    both = 'STEER', 'Ours (S^os)', 'Ours (S^API)', 'Min-prob threshold', 'Ours, linear'
    return methods + [method.rewriting() for method in methods if method.name in both]


# %% evaluate
class Row(NamedTuple):
    "A method on a benchmark, in one unit of cost."

    choices: dict  # rule -> `Choice`
    line: np.ndarray | None  # [point, 2], cost and accuracy on test problems, mean over seeds


def points(curve: Curve, n: int = 40) -> np.ndarray:  # [n, 2]
    "Cost and accuracy on test problems, evenly from safe to cheap."
    settings = np.linspace(0, len(curve.kappas) - 1, n).round().astype(int)
    return np.stack([curve.test.cost[settings].mean(1), curve.test.right[settings].mean(1)], 1)


def evaluate(method: Method, splits: dict, units: tuple, alpha: float, n_boot: int) -> dict:
    "{unit: `Row`} of a method on a benchmark; none where the benchmark lacks something."
    torch.set_num_threads(1)  # one process a core
    walks = {key[0] for key in splits if isinstance(key, tuple)}
    columns = set(splits['test'].features)
    if not set(method.needs) <= walks | columns:
        return {}
    calibration = resamples(len(splits['calibration']), n_boot, seed=1)
    test = resamples(len(splits['test']), n_boot, seed=0)
    by_seed = [method.curves(splits, units, method.reading, seed) for seed in method.seeds]
    rows = {}
    for unit in units:
        curves = [curves[unit] for curves in by_seed]
        choices = choose(curves, (calibration, test), alpha, seed=2)
        line = np.mean([points(curve) for curve in curves], 0)
        rows[unit] = Row({rule: choices[rule] for rule in method.rules}, line)
    return rows


# %% compare
def chosen_features(rows: list) -> Row:  # of `OF_CHOSEN`
    "Every rule takes the simplest of three; under a guarantee each of these has its share of delta."
    used = dict(tuned='tuned', guaranteed=RULES[2])
    choices = {rule: simplest([row.choices[of] for row in rows]) for rule, of in used.items()}
    return Row(choices, None)


def compare(
    benchmarks: dict,  # name -> {split: `Outcomes`, (method, split): `Walks`}
    methods: list,  # of `Method`s, such as `all_methods() + [mine]`
    units: tuple = ('flops', 'cents'),  # of cost; policies are trained in the first one
    alpha: float = 0.02,  # accuracy that may be lost against the large model
    n_boot: int = 1000,  # resamples, in each of which the choice is made again
    processes: int = 2,
) -> dict:  # (unit, benchmark, method) -> `Row`
    "All methods on all benchmarks, by one rule."
    cases = [(method, name) for method in methods for name in benchmarks]
    cases.sort(key=lambda case: -len(case[0].seeds))  # the longest first
    work = (delayed(evaluate)(m, benchmarks[name], units, alpha, n_boot) for m, name in cases)
    found = dict(zip([(m.name, name) for m, name in cases], Parallel(processes)(work)))
    results = {}
    for unit in units:
        for name in benchmarks:
            for method in methods:
                if unit in found[method.name, name]:
                    results[unit, name, method.name] = found[method.name, name][unit]
            rows = [results.get((unit, name, of)) for of in OF_CHOSEN]
            if all(rows):
                results[unit, name, CHOSEN] = chosen_features(rows)
    return results


# %% interval
def interval(values) -> tuple:  # [1 + resample] -> (the sample's, low, high)
    "A number with its 95 % interval over resamples."
    low_end, high_end = np.quantile(values[1:], (0.025, 0.975), method='nearest')
    return float(values[0]), float(low_end), float(high_end)


# %% frame
def frame(results: dict, rule: str = 'tuned') -> pd.DataFrame:
    "A row per unit, benchmark and method: accuracy (%), cost, share of the large model's cost, accuracy per cost."
    table = []
    for (unit, benchmark, method), row in results.items():
        if rule not in row.choices:
            continue
        choice = row.choices[rule]
        large = results[unit, benchmark, 'Large only'].choices['tuned']
        with np.errstate(divide='ignore'):
            numbers = dict(
                accuracy=100 * choice.accuracy,
                cost=choice.cost,
                share=choice.cost / large.cost,
                per_cost=100 * choice.accuracy / choice.cost,
            )
        line = dict(unit=unit, benchmark=benchmark, method=method)
        for name, values in numbers.items():
            line[name], line[f'{name}_low'], line[f'{name}_high'] = interval(values)
        table.append(line)
    return pd.DataFrame(table)


# %% seeds
def seed_frame(results: dict, rule: str = 'tuned') -> pd.DataFrame:
    "Every seed of every trained method: its threshold, and what it comes to on test problems."
    table = []
    for (unit, benchmark, method), row in results.items():
        if len(row.choices.get(rule, Choice([], [], [], [])).by_seed) < 2:
            continue
        large = results[unit, benchmark, 'Large only'].choices['tuned'].cost[0]
        for seed, (kappa, accuracy, cost) in enumerate(row.choices[rule].by_seed):
            numbers = dict(kappa=kappa, accuracy=100 * accuracy, share=cost / large)
            table.append(dict(unit=unit, benchmark=benchmark, method=method, seed=seed) | numbers)
    return pd.DataFrame(table)


# %% comparison
OURS = ('Ours (S^os)', 'Ours (S^API)', CHOSEN)
RIVALS = ('SpecReason', 'RSD', 'STEER', 'Min-prob threshold', 'Large only')


def comparison(results: dict, ours=OURS, rivals=RIVALS, rule: str = 'tuned') -> pd.DataFrame:
    "Ours against each rival on the same resamples: ratio of costs, and difference in accuracy (points)."
    table = []
    for unit, benchmark in dict.fromkeys(key[:2] for key in results):
        for our_name in ours:
            for rival_name in rivals:
                pair = [results.get((unit, benchmark, name)) for name in (our_name, rival_name)]
                if None in pair:
                    continue
                mine, rival = (row.choices[rule] for row in pair)
                line = dict(unit=unit, benchmark=benchmark, ours=our_name, rival=rival_name)
                ratio = interval(mine.cost / np.maximum(rival.cost, 1e-300))
                points = interval(100 * (mine.accuracy - rival.accuracy))
                line |= dict(zip(('ratio', 'ratio_low', 'ratio_high'), ratio))
                line |= dict(zip(('points', 'points_low', 'points_high'), points))
                table.append(line)
    return pd.DataFrame(table)


# %% gain
SHOWN_SCORES = dict(min_prob='min-prob', mean_logit='S^os')


def gain_inputs(outcomes: Outcomes) -> tuple:  # wrong, gain bool [problem]; scores [problem, number]
    "Is the small chain wrong; is only the large model right; seven numbers about the small chain."
    problem = np.arange(len(outcomes))
    small_right = outcomes.right[problem, outcomes.steps.astype(int), -1] == 1
    large_right = outcomes.right[:, 0, -1] == 1
    logit, length = outcomes.features['mean_logit'], outcomes.features['length']
    numbers = (
        np.nanmin(outcomes.features['min_odds'], 1),
        np.nanmin(logit, 1),
        np.nanmean(logit, 1),
        logit[:, 0],
        np.nansum(length, 1),
        length[:, 0],
        outcomes.steps,
    )
    return ~small_right, large_right & ~small_right, np.stack(numbers, 1)


def learnt(label, inputs) -> np.ndarray:  # [problem]
    "Ten-fold predictions of a logistic regression on the numbers and their products."
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    products = PolynomialFeatures(2, include_bias=False)
    logistic = LogisticRegression(C=0.1, max_iter=2000)
    model = make_pipeline(StandardScaler(), products, StandardScaler(), logistic)
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    return cross_val_predict(model, inputs, label, cv=folds, method='predict_proba')[:, 1]


def gain_frame(benchmarks: dict) -> pd.DataFrame:  # as of `compare`
    "Can routing pay? How often each model alone fails, and how well the small model's numbers tell it, all splits."
    table = []
    for name, splits in benchmarks.items():
        parts = [gain_inputs(splits[split]) for split in ('train', 'calibration', 'test')]
        wrong, gain, inputs = (np.concatenate(part) for part in zip(*parts))
        line = dict(benchmark=name, problems=len(wrong), wrong=wrong.mean(), gain=gain.mean())
        scores = {
            'wrong by min-prob': (wrong, -inputs[:, 0]),
            'wrong by S^os': (wrong, -inputs[:, 1]),
            'gain by min-prob': (gain, -inputs[:, 0]),
            'gain by S^os': (gain, -inputs[:, 1]),
            'gain learnt': (gain, learnt(gain, inputs)),
        }
        for title, (label, score) in scores.items():
            area = auroc(label, score)
            line |= dict(zip((title, f'{title}, low', f'{title}, high'), area))
        table.append(line)
    return pd.DataFrame(table)
