"""How does cost grow with the number of problems? `python tests/bench/growth.py [--problems 250 500 1000 2000 4000]`

The script draws all rollouts of micro-gsm problems and reads their outcome table, with a fresh store for each number.
It prints processor seconds of this process, bytes of the store and peak memory, in all and per problem. It also prints
walks of a random router over two and three models (the third is the large one again). If growth is linear, a column
per problem is constant."""
import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.outcomes import outcome_table
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import walk
from stepwise_routing.models.hub import TransformersBackend, micro_path


def models(k):
    return [TransformersBackend(micro_path('large' if i else 'small'), index=i, name=f'model {i}') for i in range(k)]

class Coin:
    "A random router: it keeps the model or moves up. The problem's id and the step decide."
    name, mode, on_escalate, start = 'coin', 'absorbing', 'append', 0
    def choose(self, states): # an upward move once in four steps
        state, = states
        up = (sum(map(ord, state.problem.id)) + len(state.path)) % 4 == 0
        return [min(int(state.path[-1]) + up, state.n_models - 1)]
    escalates = choose

def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start

def grown(n, pair, folder):
    problems, path = load_problems('micro-gsm', 'train', n), Path(folder)/f'{n}.db'
    with RolloutStore(path, tree_settings('micro-gsm', pair)) as store:
        tree = RoutingTree(pair, store)
        draw = seconds(lambda: collect_rollouts(problems, tree))
    with RolloutStore(path, readonly=True) as store:
        read = seconds(lambda: outcome_table(problems, RoutingTree(None, store), 'train'))
    row = dict(problems=n, edges=tree.drawn, draw_s=draw, read_s=read, store_mb=path.stat().st_size/1e6)
    per = {f'{k} per 1000': 1e3*row[k]/n for k in ('draw_s', 'read_s', 'store_mb')}
    return row | per | dict(peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1e6)

def walked(k, n, folder):
    own, problems = models(k), load_problems('micro-gsm', 'test', n)
    with RolloutStore(Path(folder)/f'k{k}.db', tree_settings('micro-gsm', own)) as store:
        tree = RoutingTree(own, store)
        s = seconds(lambda: walk(problems, Coin(), tree))
    return dict(models=k, walks=n, seconds=s, ms_a_walk=1e3*s/n, edges=tree.drawn, tokens_per_s=tree.tokens/s)

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--problems', type=int, nargs='*', default=[250, 500, 1000, 2000, 4000])
    args, pair = parser.parse_args(), models(2)
    with TemporaryDirectory() as folder:
        grown(20, pair, folder) # compiles
        print(pd.DataFrame([grown(n, pair, folder) for n in args.problems]).round(3).to_string(index=False))
        print(pd.DataFrame([walked(k, 400, folder) for k in (2, 3)]).round(2).to_string(index=False))
