"""How does cost grow with the number of problems? `python bench/growth.py [--problems 250 500 1000 2000 4000]`

Draws all rollouts of micro-gsm problems and reads their outcome table, with a new store for each number. Prints
processor seconds, bytes of the store and peak memory. If growth is linear, a column per problem is constant."""

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from stepwise_routing.store import RolloutStore, tree_settings
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.outcomes import outcome_table
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.models.names import open_models


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def grown(n, pair, folder):
    problems, path = load_problems('micro-gsm', 'train', n), Path(folder) / f'{n}.db'
    with RolloutStore(path, tree_settings('micro-gsm', pair)) as store:
        tree = RoutingTree(pair, store)
        draw = seconds(lambda: collect_rollouts(problems, tree))
    with RolloutStore(path, readonly=True) as store:
        read = seconds(lambda: outcome_table(problems, RoutingTree(None, store), 'train'))
    row = dict(
        problems=n, edges=tree.drawn, draw_s=draw, read_s=read, store_mb=path.stat().st_size / 1e6
    )
    per = {f'{k} per 1000': 1e3 * row[k] / n for k in ('draw_s', 'read_s', 'store_mb')}
    return row | per | dict(peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--problems', type=int, nargs='*', default=[250, 500, 1000, 2000, 4000])
    args = parser.parse_args()
    with TemporaryDirectory() as folder, open_models(['micro-small', 'micro-large']) as pair:
        grown(20, pair, folder)  # compiles
        print(
            pd.DataFrame([grown(n, pair, folder) for n in args.problems])
            .round(3)
            .to_string(index=False)
        )
