"""Compares two Ray workers with one process: the same rollouts of the micro models, with one thread each.
python tests/bench/ray_rollouts.py [--n 200] [--workers 2]"""
import argparse
import os
import tempfile
import time

os.environ.update(OMP_NUM_THREADS='1', RAY_worker_niceness='0') # at Ray's own 15 anything else goes first
from pathlib import Path

import psutil
import torch

from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.models.names import open_models

NAMES = ['micro-small', 'micro-large']

def timed(path, problems, **how):
    "(Number of edges, seconds for drawing, seconds until the models were open)."
    began = time.time()
    with open_models(NAMES, **how) as models, RolloutStore(path, tree_settings('micro-math', models)) as store:
        up = time.time()
        return collect_rollouts(problems, RoutingTree(models, store)), time.time() - up, up - began

def content(path):
    with RolloutStore(path, readonly=True) as store: return {key: store.get(*key) for key in store.keys()}

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--n', type=int, default=200)
    parser.add_argument('--workers', type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    problems = load_problems('micro-math', 'train', args.n)
    with tempfile.TemporaryDirectory() as folder:
        free = psutil.virtual_memory().available >> 30
        print(f'load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {free} GiB free')
        edges, alone, up = timed(Path(folder)/'alone.db', problems)
        print(f'one process: {edges} edges in {alone:.1f} s, {edges/alone:.0f} a second (models open after {up:.1f} s)')
        edges, ray, up = timed(Path(folder)/'ray.db', problems, engine='ray', workers=args.workers)
        print(f'{args.workers} Ray workers: {edges} edges in {ray:.1f} s, {edges/ray:.0f} a second '
              f'(models open after {up:.1f} s)')
        print(f'{alone/ray:.2f} times as fast')
        assert content(Path(folder)/'ray.db') == content(Path(folder)/'alone.db')
        print(f'the stores are equal; load average {os.getloadavg()[0]:.1f}')
