"""Where does a policy spend its time? `python bench/policy.py [outcome table.npz]` (default: 500 synthetic problems).

Prints milliseconds a training step, at the paper's setting and with the exact estimator, and microseconds a decision.
It uses one core. Compare the ratios of one run, not runs on different days."""

import sys
import time

import numpy as np
import torch

from stepwise_routing.settings import Policy
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import OutcomeTable, toy_table
from stepwise_routing.method.policy import decider, policy_inputs
from stepwise_routing.method.training import train

SETTINGS = dict(
    paper={},
    sampled_50=dict(batch=50),
    exact_5=dict(estimator='exact'),
    exact_all=dict(estimator='exact', batch=None),
)


def training(env, steps=200):
    for name, settings in SETTINGS.items():
        n = steps if settings.get('batch', 5) else steps // 4
        start = time.perf_counter()
        train(env, Policy(steps=n, **settings), progress=False)
        print(
            f'{name}: {1000 * (time.perf_counter() - start) / n:.1f} ms a step, that is so many s for 1000 steps'
        )


def decisions(env, policy, table):
    inputs = policy_inputs(table.obs, table.features, policy.features)[env.inside.numpy()]
    decide = decider(policy)
    for batch in (1, 16, 256):
        rows, times = inputs[np.arange(batch) % len(inputs)], []
        for _ in range(2000):
            start = time.perf_counter()
            decide(rows)
            times.append(time.perf_counter() - start)
        print(f'batch {batch}: {1e6 * np.median(times) / batch:.1f} us a decision (median of 2000)')


if __name__ == '__main__':
    torch.set_num_threads(1)
    table = OutcomeTable.load(sys.argv[1]) if len(sys.argv) > 1 else toy_table(500, 'train')
    env = TableEnv(table, tuple(f for f in table.features if f != 'model'))
    training(env)
    decisions(env, train(env, Policy(steps=1), progress=False).policy, table)
