"""The results of a finished run, computed once more by other code: python tests/independent.py RUNFOLDER

It reads the files of the run alone, with numpy and csv, and imports nothing of the library. It follows
the definitions in the text: the cheapest setting within alpha of the large model; certain = the last
setting, from safe to cheap, whose upper bound on the loss is at most alpha; a win = the whole intervals of the
cost ratio and of the accuracy difference lie below 1 and above -alpha.

"""
import csv
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist

import numpy as np

SCORES = {'Bare threshold (probability)': 'score_prob'}
FEW, FEW_LOSSES = 300, 6 # below, the certain settings are found by a bet, which is not repeated here
SEED = 0


def rows_of(path):
    with open(path, newline='', encoding='utf-8') as file: return list(csv.DictReader(file))

def near(a, b, digits=1e-8): return abs(a - b) <= digits*max(1, abs(a), abs(b))

class Checks:
    "What was compared, and what differs."
    def __init__(self):
        self.counts = defaultdict(int)
        self.wrong = []

    def same(self, kind, where, here, there, digits=1e-8):
        self.counts[kind] += 1
        if not near(float(here), float(there), digits):
            self.wrong.append(f'{kind}: {where}: {here} here, {there} there')


# ---- what a threshold on a score comes to, off the outcome table
class Table:
    "A split of a benchmark."
    def __init__(self, path, unit):
        with np.load(path) as file: self.of = {name: file[name] for name in file}
        self.unit, self.n = unit, len(self.of['n_steps'])
        draws = np.c_[self.of['correct'][:, 0], self.of['again']]
        self.large_share = draws.mean(1)
        self.large = self.of['correct'][:, 0], np.array([self.cost(i, 0, 0) for i in range(self.n)])

    def cost(self, i, kept, written):
        "Of problem i: the large model goes on after `kept` small steps, of which more may have been written."
        small, large = self.of['params']
        if self.unit == 'cents':
            return self.of['small_cents'][i, :written].sum() + self.of['large_cents'][i, kept]
        return 2*small*self.of['small_tokens'][i, :written].sum() + 2*large*self.of['large_tokens'][i, kept]

    def escalated(self, i, step, regenerate):
        "(right, cost) of problem i if it is handed over after a step; None: never."
        n = int(self.of['n_steps'][i])
        if step is None: kept = written = n
        else:
            written = step + 1
            kept = step if regenerate or written == n else written
        return self.of['correct'][i, kept], self.cost(i, kept, written)

    def at(self, threshold, score, regenerate):
        "(right, cost) [problem] if a chain is handed over at its first score below a threshold."
        out = []
        for i in range(self.n):
            scores = score[i, :int(self.of['n_steps'][i])]
            below = np.flatnonzero(scores < threshold)
            out.append(self.escalated(i, int(below[0]) if len(below) else None, regenerate))
        return np.array(out).T

    def score(self, feature): return self.of['obs'][:, :, list(self.of['features']).index(feature)]


def cheapest(accuracy, cost, large_accuracy, large_cost, alpha):
    "Index of the cheapest setting that loses at most alpha; -1: the large model alone."
    best, least = -1, large_cost if len(cost) else math.inf
    for i, (a, c) in enumerate(zip(accuracy, cost)):
        if a >= large_accuracy - alpha - 1e-12 and c <= least and (c < least or best == -1):
            best, least = i, c
    return best

def certain(losses, costs, large_cost, alpha):
    "Index of the last safe setting, from safe to cheap, if it is cheaper than the large model; else -1."
    last, z = -1, NormalDist().inv_cdf(.9)
    for i, loss in enumerate(losses):
        if loss.mean() + z*loss.std(ddof=1)/math.sqrt(len(loss)) > alpha: break
        last = i
    return last if last >= 0 and costs[last] < large_cost else -1


# ---- the checks
def check_means(checks, where, rows, table, unit):
    "Means on test of every method at its chosen setting, against the table."
    groups = defaultdict(list)
    for row in rows:
        if row['chosen'] == '1': groups[row['method'], row['on_escalate']].append(row)
    large = groups['Large only', 'append']
    scale = float(table[0]['unit']) if unit != 'cents' else 1
    def mean(rows, column): return np.mean([float(r[column]) for r in rows])
    for row in table:
        own = groups.get((row['method'], row['on_escalate']))
        if row['chosen'] != '1' or own is None: continue
        name = f'{where}, {row["method"]}, {row["on_escalate"]}'
        checks.same('accuracy', name, mean(own, 'correct'), row['accuracy'])
        checks.same('cost', name, mean(own, unit)/scale, row['cost'])
        checks.same('cost share', name, mean(own, unit)/mean(large, unit), row['cost_share'])
        checks.same('large share', name, mean(own, 'large_steps')/mean(own, 'steps'), row['large_share'])
        wrong = np.array([1 - float(r['correct']) for r in own])
        missed = np.mean(wrong*[float(r['large_again']) for r in own])
        covered = 1 - np.mean(wrong*[float(r['large_correct']) for r in own])
        checks.same('misses', name, missed, row['miss'])
        checks.same('coverage', name, covered, row['coverage'])

def check_choices(checks, where, grid):
    "The chosen setting of every method whose row is chosen by the rule."
    groups = defaultdict(list)
    for row in grid: groups[row['method'], row['on_escalate']].append(row)
    for (method, on_escalate), rows in groups.items():
        if method.startswith('Ours'): continue # their kappas are chosen in training, policy by policy
        *settings, alone = rows
        best = cheapest([float(r['accuracy']) for r in settings], [float(r['cost']) for r in settings],
                        float(alone['accuracy']), float(alone['cost']), float(alone['alpha']))
        chosen = next(r for r in rows if r['chosen'] == '1')
        checks.same('choice', f'{where}, {method}, {on_escalate}', rows[best]['cost'], chosen['cost'])

def check_bare(checks, where, folder, benchmark, unit, suffix, alpha):
    "Bare thresholds from the outcome tables: choice, certain setting, and what they come to on test."
    calibration, test = (Table(folder/'outcomes'/f'{benchmark}-{split}.npz', unit) for split in ('calibration', 'test'))
    listed = {(r['method'], r['on_escalate']): float(r['threshold'])
              for r in rows_of(folder/'methods'/f'{benchmark}-certain{suffix}.csv')}
    rows = rows_of(folder/'methods'/f'{benchmark}{suffix}.csv')
    for method, feature in SCORES.items():
        if feature not in list(calibration.of['features']): continue
        for on_escalate in ('append', 'regenerate'):
            name, again = f'{where}, {method}, {on_escalate}', on_escalate == 'regenerate'
            score = calibration.score(feature)
            lowest = [np.minimum.accumulate(s[np.isfinite(s)]) for s in score]
            cuts = np.unique(np.concatenate(lowest))
            cuts = np.append(cuts, np.nextafter(cuts[-1], np.inf))
            outcomes = [calibration.at(x, score, again) for x in cuts]
            right, cost = np.array(outcomes).swapaxes(0, 1)
            large_cost = calibration.large[1].mean()
            best = cheapest(right.mean(1), cost.mean(1), calibration.large[0].mean(), large_cost, alpha)
            own = [r for r in rows if (r['method'], r['on_escalate'], r['chosen']) == (method, on_escalate, '1')]
            threshold = float(own[0]['threshold'])
            checks.same('bare choice', name, 1e300 if best < 0 else cuts[best], min(threshold, 1e300), 1e-12)
            got = test.large if best < 0 else test.at(cuts[best], test.score(feature), again)
            checks.same('bare accuracy', name, got[0].mean(), np.mean([float(r['correct']) for r in own]))
            checks.same('bare cost', name, got[1].mean(), np.mean([float(r[unit]) for r in own]))
            if calibration.n >= FEW and calibration.n*alpha >= FEW_LOSSES:
                order = range(len(cuts))[::-1]
                last = certain([calibration.large_share - right[i] for i in order], [cost[i].mean() for i in order],
                               large_cost, alpha)
                found = 1e300 if last < 0 else cuts[order[last]]
                checks.same('bare certain', name, found, min(listed[method, on_escalate], 1e300), 1e-12)

def check_intervals(checks, where, rows, table, n_boot):
    "The interval of the large model's accuracy, which rests on the test problems alone."
    rows = [r for r in rows if r['method'] == 'Large only']
    right = np.array([float(r['correct']) for r in sorted(rows, key=lambda r: r['problem'])])
    n = len(right)
    counts = np.random.default_rng(SEED).multinomial(n, np.full(n, 1/n), n_boot)
    low, high = np.quantile(counts @ right/n, [.025, .975])
    row = next(r for r in table if r['method'] == 'Large only')
    checks.same('interval', where, low, row['accuracy_low'])
    checks.same('interval', where, high, row['accuracy_high'])

def check_verdicts(checks, where, folder, rows):
    "Intervals of the cost ratios of ours against others from the resampled costs, and what is a win."
    for row in rows:
        if row['counted'] != 'True': continue
        name = f'{where}, {row["target"]}, {row["benchmark"]}, {row["other"]}'
        with np.load(folder/'methods'/f'{row["benchmark"]}-points.npz') as file:
            names = [tuple(x) for x in file['names']]
            ours, other = (file['paper_flops'][names.index((m, e, row['target']))] for m, e in
                           ((row['ours'], row['on_escalate']), (row['other'], row['other_on_escalate'])))
        low, high = np.quantile(ours[1:]/other[1:], [.025, .975])
        checks.same('ratio', name, low, row['cost_ratio_low'], 1e-6)
        checks.same('ratio', name, high, row['cost_ratio_high'], 1e-6)
        win = high < 1 and float(row['accuracy_difference_low']) >= -float(row['alpha']) - 1e-9
        checks.same('win', name, win, row['win'] == 'True')

def check_run(run, n_boot=2000):
    "All checks of a run folder; returns `Checks`."
    checks, run = Checks(), Path(run)
    for unit, ending, suffix in (('paper_flops', '', ''), ('cents', '_cents', '-cents')):
        path = run/'tables'/f'evaluation{ending}.csv'
        if not path.is_file(): continue
        evaluation = rows_of(path)
        for benchmark in dict.fromkeys(r['benchmark'] for r in evaluation):
            where, table = f'{unit}, {benchmark}', [r for r in evaluation if r['benchmark'] == benchmark]
            rows = rows_of(run/'methods'/f'{benchmark}{suffix}.csv')
            grid = rows_of(run/'methods'/f'{benchmark}-grid{suffix}.csv')
            check_means(checks, where, rows, table, unit)
            check_choices(checks, where, grid)
            check_bare(checks, where, run, benchmark, unit, suffix, float(grid[0]['alpha']))
            check_intervals(checks, where, rows, table, n_boot)
    path = run/'tables'/'comparison.csv'
    if path.is_file(): check_verdicts(checks, 'comparison', run, rows_of(path)) # without rows of ours there is none
    return checks


if __name__ == '__main__':
    done = check_run(sys.argv[1])
    print(', '.join(f'{n} {kind}' for kind, n in done.counts.items()))
    print(f'{len(done.wrong)} differ')
    for line in done.wrong[:20]: print(line)
    sys.exit(bool(done.wrong or not done.counts))
