"""Which results depend on the last bits? `python tests/bench/perturbed.py RUN [--noise 1e-6] [--times 2]`

Another processor rounds sums differently, so the last digits of confidences differ there. The script adds relative
noise of that size to the observations in a run's outcome tables. Then it trains policies again, lets every method that
tables can replay choose again, and computes its test row again. It prints the rows that changed: how often the chosen
setting changed, and the largest change of the test accuracy (points) and of the cost (% of the large model's)."""
import argparse
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.comparison import COLUMNS, replay_case
from stepwise_routing.run.config import open_run
from stepwise_routing.run.stages import open_case, read_table
from stepwise_routing.run.sweep import fit_tables

KEYS = ['setting', 'benchmark', 'method', 'on_escalate']

def chosen_rows(run):
    "The chosen setting, test accuracy and cost of every method that tables can replay."
    rows = []
    for s, b in ((s, b) for s in run.settings for b in s.benchmarks):
        case = replay_case(open_case(s, b))
        large = case.tables['test'].large_only()[s.unit].mean()
        rows_of = pd.DataFrame(case.rows, columns=COLUMNS).groupby(['method', 'on_escalate', 'threshold'])
        means = rows_of.mean(numeric_only=True)
        for g in case.grids:
            own = means.loc[g.method, g.on_escalate, g.threshold]
            rows.append((s.name, b, g.method, g.on_escalate, g.threshold, 100*own['correct'], 100*own[s.unit]/large))
    return pd.DataFrame(rows, columns=[*KEYS, 'chosen', 'accuracy', 'cost']).set_index(KEYS)

def perturbed(run, folder, noise, seed):
    "A copy of the run in another folder, with noise on the observations and policies trained on them."
    other, rng = replace(run, folder=folder/'run', store=folder/'store'), np.random.default_rng(seed)
    for s, copy in zip(run.settings, other.settings):
        for b, split in ((b, split) for b in s.benchmarks for split in SPLITS):
            table = read_table(s, b, split)
            factor = 1 + noise*rng.standard_normal(table.obs.shape)
            replace(table, obs=(table.obs*factor).astype(table.obs.dtype)).save(copy.files.outcomes(b, split))
    fit_tables(other)
    return other

def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('run', help='folder of a finished run of the micro profile')
    args.add_argument('--noise', type=float, default=1e-6)
    args.add_argument('--times', type=int, default=2)
    args = args.parse_args()
    warnings.simplefilter('ignore')
    run = open_run('micro', args.run)
    before, after = chosen_rows(run), []
    for seed in range(args.times):
        with TemporaryDirectory() as folder: after.append(chosen_rows(perturbed(run, Path(folder), args.noise, seed)))
    apart = pd.concat([(rows - before).abs().fillna(0) for rows in after])
    # a threshold is a score, which has noise itself
    near = 10*args.noise*pd.concat([before['chosen'].abs()]*args.times)
    moved = apart.assign(chosen=apart['chosen'] > near).groupby(level=KEYS, sort=False)
    moved = moved.agg(times_chosen=('chosen', 'sum'), accuracy=('accuracy', 'max'), cost=('cost', 'max'))
    print(f'{len(before)} rows, noise {args.noise:g}, {args.times} times')
    print(moved[(moved > 0).any(axis=1)].round(3).to_string())

if __name__ == '__main__': main()
