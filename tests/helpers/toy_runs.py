"Runs as chapters 02b and 04b leave them, on the toy pair, and rows written by hand."
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepwise_routing.util import resamples
from stepwise_routing.method.comparison import COLUMNS, Case, replay_methods, table_methods
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.results import (
    BenchmarkResults,
    RunResults,
    at_point,
    evaluate,
    resampled,
    with_calibration,
)
from stepwise_routing.method.routers import RandomRouter, SavedPolicy
from stepwise_routing.method.uncertainty import CHOICES, draw_samples
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.run.stages import load_run, save_case


def means_of(rows, n_boot=50, **kw): return resampled(rows, resamples(rows['problem'].nunique(), n_boot), **kw)

def evaluated(rows, n_boot=50, **kw): return evaluate(means_of(rows, n_boot, **kw))

def toy_run(folder, price='', n_boot=100):
    config = changed(Config(), {'data.benchmarks': ['toy'], 'results.n_boot': n_boot, 'models.price': price})
    return Run('toy', config, folder, folder)

def splits(n=60): return {s: toy_table(n, s) for s in ('train', 'calibration', 'test')}

def save_methods(run):
    "A run as chapters 02b and 04b leave it, without policies; returns the case of its first unit."
    tables = splits()
    for split in ('calibration', 'test'): tables[split].save(run.files.outcomes('toy', split))
    cases = []
    for unit in run.units:
        samples = draw_samples(tables['calibration'], tables['test'], run.config.results.n_boot, run.config.seed)
        case = Case('toy', tables, [], unit=unit, samples=samples)
        case.rows, case.grids = replay_methods(**tables, cost=unit)
        for method, grid in zip(table_methods(tables['train'], tables['calibration']), case.grids):
            case.add_points(method, grid)
        save_case(run, case)
        cases.append(case)
    return cases[0]

class Coin(RandomRouter):
    "A policy that tosses coins: its threshold is called kappa."
    @property
    def kappa(self): return self.threshold

def coin(seed, kappa, variant='append', e='append', name='Ours', met=True, sweep=()):
    "A stand-in for a trained policy."
    receipt = dict(kappa=kappa, alpha=.02, n=60, miss=.01, accuracy=.9, bound=.015 if met else .04, met=met)
    return SavedPolicy(variant, seed, Coin(seed, e, name, threshold=kappa), .6, sweep, receipt)

POLICIES = [coin(0, .7, sweep=(.9,)), coin(1, .6, met=False, sweep=(.9,)),
            coin(0, .5, 'regenerate', 'regenerate'), coin(0, .5, 'regenerate-full', 'regenerate', 'Ours (full)')]

def save_policies(run):
    "The same with policies: two of Ours, one of each other variant."
    case = save_methods(run)
    case.policies = POLICIES
    case.add_own()
    save_case(run, case)
    return run

def frame(correct, large, flops, threshold=0., method='X', cents=None, **columns): # others, as `large_again`
    cents = np.asarray(flops)/1e9 if cents is None else cents
    columns = dict(cents=cents, large_again=large) | columns
    def row(i):
        names, others = ('b', method, 'append', threshold, 1, f'p{i}', 0), {k: v[i] for k, v in columns.items()}
        return dict(zip(COLUMNS, (*names, correct[i], large[i], 0, flops[i], 2*flops[i], 3, 4, 5, 2, 0))) | others
    return pd.DataFrame([row(i) for i in range(len(correct))])

def line(method, correct, flops, threshold=0., chosen=1):
    return frame(correct, [1]*len(correct), [1e6*f for f in flops], threshold, method).assign(chosen=chosen)

def settled(rows, n_boot=50, cost='paper_flops'):
    "`RunResults` of rows written by hand, in which calibration looks like the test."
    means = means_of(rows, n_boot, cost=cost)
    results = evaluate(means)
    sweeps = results[~results['method'].isin(('Small only', 'Large only'))]
    grid = sweeps[['benchmark', 'method', 'on_escalate', 'n', 'threshold', 'accuracy', 'cost_share', 'chosen']]
    grid = grid.rename(columns=dict(cost_share='cost')).assign(alpha=.02, large_accuracy=1., unit=cost)
    singles = rows[:0].assign(seed=0)
    results = with_calibration(results, grid, 1.)
    at_points = {target: at_point(means, {}, target) for target in CHOICES}
    part = BenchmarkResults(toy_table(2), rows, grid, singles, means, at_points, results, pd.DataFrame())
    return RunResults('toy', cost, alpha=.02, tables=Path('nowhere/tables'), figures=Path('nowhere/figures'),
                      given_up=0, parts={rows['benchmark'].iloc[0]: part})

# ---- fixtures of the tests of reports and tables
@pytest.fixture(scope='module')
def run(tmp_path_factory):
    run = toy_run(tmp_path_factory.mktemp('run'), 'gpt-4.1-mini')
    save_methods(run)
    return run

@pytest.fixture(scope='module')
def loaded(run): return load_run(run)

@pytest.fixture(scope='module')
def flops(loaded): return loaded['paper_flops'].parts['toy']

@pytest.fixture(scope='module')
def cents(loaded): return loaded['cents'].parts['toy']

@pytest.fixture(scope='module')
def with_ours(tmp_path_factory): return load_run(save_policies(toy_run(tmp_path_factory.mktemp('ours'))))['paper_flops']
