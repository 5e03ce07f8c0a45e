"""Where does a policy spend its time? `python tests/bench/policy.py [outcome table.npz]` (default: a synthetic table of
500 problems).

The script prints milliseconds per training step, at the paper's setting and with the exact estimator, the share of each
part of a step, and microseconds per decision. It uses one core. Compare the ratios of one run, not runs on different
days."""
import cProfile
import pstats
import sys
import time

import numpy as np
import torch

from stepwise_routing.base.settings import Policy
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import OutcomeTable, toy_table
from stepwise_routing.method.policy import decider, policy_inputs
from stepwise_routing.method.training import train

PARTS = ('sample', 'exact_estimate', 'sampled_estimate', 'critic_step', 'fisher_blocks', 'fisher_solver',
         'cpo_direction', 'line_search', 'deploy')

def training(env, steps=200):
    "Print, per setting, milliseconds per step and the share of each part."
    for name, settings in dict(paper={}, sampled_50=dict(batch=50), exact_5=dict(estimator='exact'),
                               exact_all=dict(estimator='exact', batch=None)).items():
        n = steps if settings.get('batch', 5) else steps//4
        start = time.perf_counter()
        train(env, Policy(steps=n, **settings), progress=False)
        spent = time.perf_counter() - start
        profile = cProfile.Profile()
        profile.runcall(train, env, Policy(steps=n//4, **settings), progress=False)
        stats = pstats.Stats(profile).stats
        whole = max(s[3] for s in stats.values())
        share = {p: sum(s[3] for (_, _, f), s in stats.items() if f.lstrip('_') == p)/whole for p in PARTS}
        parts = ', '.join(f'{p} {100*x:.0f} %' for p, x in share.items() if x > .005)
        print(f'{name}: {1000*spent/n:.1f} ms a step, that is so many s for 1000 steps (under the profiler: {parts})')

def decisions(env, policy, table):
    "Print microseconds per decision for several batch sizes."
    inputs = policy_inputs(table.obs, table.features, policy.features)[env.inside.numpy()]
    decide = decider(policy)
    for batch in (1, 16, 256):
        rows = inputs[np.arange(batch) % len(inputs)]
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            decide(rows)
            times.append(time.perf_counter() - start)
        middle, high = 1e6*np.median(times)/batch, 1e6*np.quantile(times, .99)/batch
        print(f'batch {batch}: {middle:.1f} us a decision (median of 2000), 99th percentile {high:.1f}')

if __name__ == '__main__':
    torch.set_num_threads(1)
    table = OutcomeTable.load(sys.argv[1]) if len(sys.argv) > 1 else toy_table(500, 'train')
    features = tuple(f for f in table.features if f != 'model')
    env = TableEnv(table, features)
    training(env)
    decisions(env, train(env, Policy(steps=1), progress=False).policy, table)
