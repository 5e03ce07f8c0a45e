"""How often does a target break its promise? `python tests/bench/promises.py RUN`, with the folder of a run.

The calibration and test problems of a benchmark are put together and split again 200 times. In each split, both targets
choose a setting on one part. The other part judges it: does the setting lose more than alpha against the large model?
The large model's answers are averaged over its draws.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from stepwise_routing.method.certain import certain_setting, losses
from stepwise_routing.method.comparison import CLASSES
from stepwise_routing.method.outcomes import cheapest_within, replay
from stepwise_routing.method.routers import ScoreRouter, score_thresholds
from stepwise_routing.run.config import open_run
from stepwise_routing.run.stages import load_policies, read_table

SPLITS = 200
ALPHA = 0.02


def outcomes(routers, tables) -> tuple:  # right [setting, problem], cost [setting, problem]
    "Verdict and cost of each setting on all problems."
    right, cost = [], []
    for router in routers:
        each = [replay(router, table) for table in tables]
        right.append(np.concatenate([o['correct'] for o in each]))
        cost.append(np.concatenate([o['paper_flops'] for o in each]))
    return np.array(right), np.array(cost)


def methods(setting, benchmark, calibration) -> dict:  # name -> routers, from safe to cheap
    bare = ScoreRouter('score_prob')
    cuts = score_thresholds(bare, calibration, 40)[::-1]
    found = {'Bare threshold (probability)': [bare.at(float(x)) for x in cuts]}
    for policy in load_policies(setting, benchmark):
        if policy.seed == 0 and policy.name in CLASSES and policy.router.on_escalate == 'append':
            found[policy.name] = [policy.router.at(kappa) for kappa in reversed(policy.sweep)]
    return found


def resplit(right, cost, large_right, large_cost, n, rng) -> list:  # n: calibration problems; a row per target
    order = rng.permutation(len(large_right))
    chosen_on, judged_on = order[:n], order[n:]
    loss = losses(large_right, right)
    share = cost[:, chosen_on].mean(1) / large_cost[chosen_on].mean()
    last = certain_setting(loss[:, chosen_on], ALPHA)
    accuracy = np.r_[right[:, chosen_on].mean(1), large_right[chosen_on].mean()]
    cheapest = cheapest_within(accuracy, np.r_[share, 1.0], accuracy[-1], ALPHA)
    rows = []
    for target, i in (('certain', last), ('accuracy', cheapest)):
        is_alone = i is None or i == len(right) or share[i] >= 1
        lost = 0.0 if is_alone else float(loss[i, judged_on].mean())
        paid = 1.0 if is_alone else cost[i, judged_on].mean() / large_cost[judged_on].mean()
        rows.append(dict(target=target, broken=lost > ALPHA, cost=paid, alone=is_alone))
    return rows


def main() -> None:
    setting = open_run('micro', sys.argv[1]).settings[0]
    rows = []
    for benchmark in setting.benchmarks:
        tables = [read_table(setting, benchmark, split) for split in ('calibration', 'test')]
        large_right = np.concatenate([table.large_share for table in tables])
        large_cost = np.concatenate([table.large_only()['paper_flops'] for table in tables])
        for name, routers in methods(setting, benchmark, tables[0]).items():
            right, cost = outcomes(routers, tables)
            rng = np.random.default_rng(0)
            for _ in range(SPLITS):
                for row in resplit(right, cost, large_right, large_cost, len(tables[0]), rng):
                    rows.append(dict(benchmark=benchmark, method=name) | row)
    keys = ['benchmark', 'method', 'target']
    print(pd.DataFrame(rows).groupby(keys, sort=False)[['broken', 'cost', 'alone']].mean().round(3))


if __name__ == '__main__':
    main()
