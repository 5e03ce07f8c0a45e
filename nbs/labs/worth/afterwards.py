"""A check that was not planned: the rule with two numbers at all pairs of its numbers.

The library offers the rule no pair whose threshold is at or below the number that tells hopeless problems. We saw that
after the results; here it gets those pairs, too, and ours is what it was. All that was planned is in `cells`.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from stepwise_routing.base.records import READINGS
from stepwise_routing.base.statistics import resamples
from stepwise_routing.base.tools import write_file
from stepwise_routing.method.comparison import Case, by_cost, two_number_methods
from stepwise_routing.method.routers import TwoNumbers, score_thresholds
from stepwise_routing.run.workers import in_processes

from .cells import UNIT, Measure, cell_data, cell_facts, fit_policies, method_row
from .plan import BENCHMARK, Cell, Folders, Plan

TWO = 'Two numbers (probability)'


def all_pairs(calibration, on_escalate: str) -> dict:  # a method, see `at_thresholds`
    "Every pair of 41 thresholds and ten shares of chains that are given up, from none to nine tenths."
    rule = TwoNumbers(on_escalate=on_escalate)
    thresholds = score_thresholds(rule, calibration, 40)
    first = rule.table_score(calibration)[:, 0]
    hopeless = [-np.inf, *np.unique(np.quantile(first, np.arange(1, 10) / 10))]
    pairs = product(hopeless, thresholds)
    return {
        float(i): [replace(rule, hopeless=float(low), threshold=float(threshold))]
        for i, (low, threshold) in enumerate(pairs, 1)
    }


def do_pairs(plan: Plan, folders: Folders, cell: Cell) -> None:
    "Ours against the rule at all its pairs, in a finished cell."
    data = cell_data(plan, folders, cell)
    tables = data.tables
    policies = fit_policies(plan, folders, cell, tables)
    case = Case('open', BENCHMARK, tables, policies, alpha=plan.alpha, unit=UNIT)
    for on_escalate in READINGS:
        method = all_pairs(tables['calibration'], on_escalate)
        grid = case.choose(method, order=by_cost(method, tables['train'], UNIT))
        case.add(method, grid, shown_thresholds=[grid.threshold, *grid.curve_thresholds()])
    case.add_own()
    measure = Measure(case, resamples(len(tables['test']), plan.n_boot, 0))
    offered = two_number_methods(tables['calibration'])[0]
    row = cell_facts(plan, cell, data, case) | method_row(measure.all_reached(), TWO)
    row |= dict(pairs=len(method), pairs_offered=len(offered))
    text = pd.DataFrame([row]).to_csv(index=False, lineterminator='\n', float_format='%.10g')
    write_file(folders.result(cell, 'pairs'), text)


def do_all_pairs(plan: Plan, folders: Folders, workers: int) -> None:
    "The check in all cells where it is not done."
    missing = [(cell,) for cell in plan.cells if not folders.result(cell, 'pairs').is_file()]
    in_processes(partial(do_pairs, plan, folders), missing, workers)
