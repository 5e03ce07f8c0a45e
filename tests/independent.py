"""The tables of a run, computed once more by other code: python tests/independent.py TABLES OUTCOMES

It reads outcomes (.npz) and tables (.csv) with numpy and pandas, and imports nothing of the library. It follows
the definitions in the text. Tuned: the cheapest setting that loses at most alpha on calibration problems. Guaranteed:
the last setting, from safe to cheap, before the first whose upper bound on the loss is above alpha. In each resample the
choice is made again. Trained policies are not trained again: their rows are the means of their seeds in seeds.csv."""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd

DIGITS = 1e-5  # the tables have six digits
RISK = 0.1
MOST = 500  # thresholds a curve
KEYS = ['unit', 'benchmark', 'method']
WALKERS = 'SpecReason', 'RSD'
EXPECTED = 'Small only', 'Random step', 'Random problem', 'Oracle'  # not guaranteed
THREE = 'Min-prob threshold', 'Ours, linear', 'Ours, all features'


class Checks:
    "What was compared, and what differs."

    def __init__(self):
        self.counts = defaultdict(int)
        self.wrong = []

    def same(self, kind, where, here, there, digits=DIGITS):
        self.counts[kind] += 1
        here, there = float(here), float(there)
        both_unknown = not np.isfinite(here) and not np.isfinite(there)
        if not both_unknown and not abs(here - there) <= digits * max(1e-3, abs(here), abs(there)):
            self.wrong.append(f'{kind}: {where}: {here} here, {there} there')


# ---- a walk off the table
def price(of, tokens, model, unit):  # tokens [..., kind]
    "Of tokens (written, read anew, sent, of these cached)."
    written, _, sent, cached = np.moveaxis(np.asarray(tokens, float), -1, 0)
    if unit == 'flops':
        return 2 * of['params'][model] * written
    of_prompt, of_cached, of_written = of['dollars'][model]
    return 100e-6 * ((sent - cached) * of_prompt + cached * of_cached + written * of_written)


def read(path):
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


class Table:
    "The outcomes of a split at a price. K = 2."

    def __init__(self, of, unit):
        self.of, self.unit, self.n = of, unit, len(of['problem'])
        self.steps = [int(T) for T in of['steps']]
        self.small, self.rest = (
            price(of, of['small'], 0, unit),
            price(of, of['large'][:, :, 0], 1, unit),
        )
        self.large = of['right'][:, 0, 0].astype(float), self.rest[:, 0]
        self.found = {}

    def column(self, name):
        return self.of[f'feature {name}'].astype(float)

    def ways(self, reading='continue', thrown=0):
        "Per problem [(right, cost)]: handed over after step 0, 1, ...; at last, never."
        case = reading, thrown
        if case not in self.found:
            extra = thrown * price(self.of, (1, 0, 0, 0), 0, self.unit)
            self.found[case] = [self.ways_of(i, reading, extra) for i in range(self.n)]
        return self.found[case]

    def ways_of(self, i, reading, extra):
        T, right = self.steps[i], self.of['right'][i, :, 0]
        found, spent = [], 0.0
        for t in range(T):
            spent += self.small[i, t]
            is_last = t == T - 1
            kept = t if is_last or reading == 'rewrite' else t + 1
            found.append((right[kept], spent + (0 if is_last else extra) + self.rest[i, kept]))
        return np.array([*found, (right[T], spent)], float)


def running(doubt, T):
    return np.maximum.accumulate(np.where(np.isnan(doubt[:T]), -np.inf, doubt[:T]))


def settings_of(table, doubt):
    "Thresholds that make a difference, one float above each doubt; the first one hands over at once."
    seen = np.unique(np.concatenate([running(x, T) for x, T in zip(doubt, table.steps)]))
    if len(seen) > MOST:
        seen = seen[np.round(np.linspace(0, len(seen) - 1, MOST)).astype(int)]
    return [seen[0], *np.nextafter(seen, np.inf)]


def with_large(table, columns):  # of (right, cost) [setting] per problem
    "The same [setting, problem], below the large model alone."
    return [np.vstack([large, values]) for large, values in zip(table.large, np.stack(columns, 2))]


def at_thresholds(table, doubt, kappas, reading, thrown):
    columns = []
    for x, T, ways in zip(doubt, table.steps, table.ways(reading, thrown)):
        columns.append(ways[np.searchsorted(running(x, T), kappas)].T)
    return with_large(table, columns)


# ---- STEER
def mixture(scores):
    "(weights, means, deviations), the unsure component first; None: degenerate."
    from sklearn.mixture import GaussianMixture

    options = dict(n_init=5, random_state=0, tol=1e-5, max_iter=1000, init_params='k-means++')
    centre, scale = scores.mean(), scores.std()
    em = GaussianMixture(2, **options).fit(((scores - centre) / scale)[:, None])
    order = np.argsort(em.means_.ravel())
    weights = em.weights_[order]
    means = em.means_.ravel()[order] * scale + centre
    deviations = np.sqrt(em.covariances_.ravel()[order]) * scale
    too_close = means[1] - means[0] < 0.1 * scale
    is_degenerate = min(weights) < 0.05 or min(deviations) < 0.01 * scale or too_close
    return (weights, means, deviations), is_degenerate


def sure(fitted, x):
    "P(sure component | x), kept at its turn where it would fall again."
    weights, means, deviations = fitted
    a, b = 1 / deviations**2
    if not np.isclose(a, b):
        turn = (means[0] * a - means[1] * b) / (a - b)
        x = max(x, turn) if deviations[1] > deviations[0] else min(x, turn)
    unsure, certain = np.log(weights / deviations) - ((x - means) / deviations) ** 2 / 2
    return 1 / (1 + math.exp(min(unsure - certain, 700)))


def steer_doubts(train, tables):
    inside = [row[:T] for row, T in zip(train.column('mean_logit'), train.steps)]
    pooled, _ = mixture(np.concatenate(inside))
    fitted = []
    for j in range(max(T for table in tables for T in table.steps)):
        scores = np.array([row[j] for row in inside if len(row) > j])
        own, is_degenerate = mixture(scores) if len(scores) >= 50 else (None, True)
        fitted.append(pooled if is_degenerate else own)
    doubts = []
    for table in tables:
        doubt = np.full(table.small.shape, np.nan)
        for row, logits, T in zip(doubt, table.column('mean_logit'), table.steps):
            row[:T] = [-sure(fitted[j], logits[j]) for j in range(T)]
        doubts.append(doubt)
    return doubts


# ---- all settings of the methods that are not trained
def stepwise(ways, large, p):
    "Expected result of handing over after each step with probability p."
    total, left = 0.0, 1.0
    for way in ways[:-1]:
        total, left = total + left * p * way, left * (1 - p)
    return total + left * ways[-1]


def whole(ways, large, p):
    return p * large + (1 - p) * ways[-1]


def best(ways):
    return min((way for way in ways if way[0]), key=lambda way: way[1], default=ways[-1])


def curves_of(files, benchmark, unit):
    "{method: (kappas, calibration, test)}, results [setting, problem] of (right, cost)."
    splits = 'train', 'calibration', 'test'
    train, *pair = (Table(files[f'{benchmark}-{split}'], unit) for split in splits)

    def threshold(doubts, reading='continue', thrown=0):
        kappas = settings_of(pair[0], doubts[0])
        cases = zip(pair, doubts)
        return [None, *kappas], *[at_thresholds(*case, kappas, reading, thrown) for case in cases]

    def low(name, **more):
        return threshold([-table.column(name) for table in pair], **more)

    def one(of_ways):
        return [None], *[np.array([of_ways(w) for w in t.ways()]).T[:, None] for t in pair]

    def chance(expected):
        chances, results = np.linspace(1, 0, 41), []
        for table in pair:
            cases = zip(table.ways(), np.array(table.large).T)
            rows = [[expected(ways, large, p) for p in chances] for ways, large in cases]
            results.append(with_large(table, [np.transpose(row) for row in rows]))
        return [None, *chances], *results

    def walked(name):
        results = []
        for table, split in zip(pair, splits[1:]):
            of = files[f'{benchmark}-{split}-{name}']
            cost = sum(price(of, of['tokens'][:, :, m], m, unit) for m in range(3))
            both = np.stack([of['right'], cost])
            results.append(with_large(table, list(np.moveaxis(both, 2, 0))))
        return [None, *of['kappas']], *results

    found = {'Small only': one(lambda ways: ways[-1]), 'Oracle': one(best)}
    found['Large only'] = [None], *[[x[None] for x in table.large] for table in pair]
    found['Random step'], found['Random problem'] = chance(stepwise), chance(whole)
    found |= {name: walked(name) for name in WALKERS if f'{benchmark}-test-{name}' in files}
    columns = {'Min-prob threshold': 'min_prob', 'Mean-logit threshold': 'mean_logit'}
    found |= {name: low(column) for name, column in columns.items()}
    found['Min-prob threshold, rewrite'] = low('min_prob', reading='rewrite')
    found['GlimpRouter'] = threshold([table.column('next_entropy') for table in pair], thrown=1)
    if 'feature reward' in pair[0].of:
        found['TRIM'] = low('reward', reading='rewrite')
    doubts = steer_doubts(train, pair)
    found |= {'STEER': threshold(doubts), 'STEER, rewrite': threshold(doubts, 'rewrite')}
    return found


# ---- the choice, in the sample itself and in each resample
def draws(n, n_boot, seed):
    counts = np.random.default_rng(seed).multinomial(n, [1 / n] * n, n_boot)
    return np.vstack([np.ones(n), counts])


def tuned(right, cost, counts, alpha):
    accuracy, price = counts @ right.T / len(right[0]), counts @ cost.T / len(right[0])
    chosen = []
    for a, c in zip(accuracy, price):
        good = np.flatnonzero(a >= a[0] - alpha - 1e-12)
        chosen.append(good[np.argmin(c[good])])
    return np.array(chosen)


def guaranteed(right, cost, counts, alpha, delta=RISK):
    "By the normal bound."
    n, loss = len(right[0]), right[0] - right
    mean, square = counts @ loss.T / n, counts @ (loss**2).T / n
    bound = mean + NormalDist().inv_cdf(1 - delta) * np.sqrt((square - mean**2).clip(0) / (n - 1))
    price, chosen = counts @ cost.T / n, []
    for r in range(len(counts)):
        unsafe = np.flatnonzero(bound[r, 1:] > alpha)
        last = unsafe[0] if len(unsafe) else len(loss) - 1
        chosen.append(last if price[r, last] < price[r, 0] else 0)
    return np.array(chosen)


def on_test(result, counts, chosen):  # -> accuracy, cost [1 + resample]
    return [np.array([counts[r] @ x[s] for r, s in enumerate(chosen)]) / len(x[0]) for x in result]


def ends(values):
    ordered = np.sort(values[1:])
    at = [round(q * (len(ordered) - 1)) for q in (0.025, 0.975)]
    return values[0], *ordered[at]


# ---- the checks
def check_rows(checks, curves, unit, benchmark, tables, alpha, n_boot):
    "Choices, points and intervals of methods.csv, the cells of Tables 1 and 2, and the lines of curves.csv."
    n, n_test = (len(curves['Large only'][i][0][0]) for i in (1, 2))
    of_calibration, of_test = draws(n, n_boot, 1), draws(n_test, n_boot, 0)
    rules = dict(tuned=tuned)
    if n >= 300 and n * alpha >= 6:  # below, an exact test decides, which is not repeated here
        rules['guaranteed'] = guaranteed
    large_cost = of_test @ curves['Large only'][2][1][0] / n_test
    methods = tables['methods'].set_index([*KEYS, 'rule'])
    printed = {'flops': 'table1', 'cents': 'table2'}[unit]
    cells, lines = tables[printed].set_index(KEYS), tables['curves'].groupby(KEYS)
    for name, (kappas, calibration, test) in curves.items():
        key, where = (unit, benchmark, name), f'{unit}, {benchmark}, {name}'
        for rule, choose in rules.items():
            if rule == 'guaranteed' and name in EXPECTED:
                continue
            chosen = choose(*calibration, of_calibration, alpha)
            accuracy, cost = on_test(test, of_test, chosen)
            mine = dict(accuracy=100 * accuracy, cost=cost, share=cost / large_cost)
            for column, values in mine.items():
                for end, number in zip(('', '_low', '_high'), ends(values)):
                    kind = f'{column}{" interval" * bool(end)}, {rule}'
                    checks.same(kind, where, number, methods.loc[(*key, rule), column + end])
            if rule == 'tuned' and key in cells.index:
                mine = dict(accuracy=100 * accuracy[0], cost=cost[0])
                mine['per_cost'] = mine['accuracy'] / cost[0] if cost[0] else math.inf
                mine['large_alone'] = len(kappas) > 1 and chosen[0] == 0
                for column, number in mine.items():
                    checks.same(printed, f'{where}, {column}', number, cells.loc[key, column])
        even = np.round(np.linspace(0, len(kappas) - 1, 40)).astype(int)
        right, cost = (values.mean(1)[even] for values in test)
        points = pd.DataFrame(
            dict(share=cost / large_cost[0], accuracy=100 * right)
        ).drop_duplicates()
        drawn = lines.get_group(key)[['share', 'accuracy']]
        checks.same('points of a line', where, len(points), len(drawn))
        for here, there in zip(points.values.ravel(), drawn.values.ravel()):
            checks.same('line', where, here, there)


def check_seeds(checks, tables, large):  # large: (unit, benchmark) -> cost of the large model
    "A row of a trained method is the mean of its seeds, in methods.csv and in Tables 1 and 2."
    rows = tables['methods'].query('rule == "tuned"').set_index(KEYS)
    printed = pd.concat([tables['table1'], tables['table2']]).set_index(KEYS)
    for key, part in tables['seeds'].groupby(KEYS):
        where = ', '.join(key)
        accuracy, share = part['accuracy'].mean(), part['share'].mean()
        checks.same('seeds', f'{where}, accuracy', accuracy, rows.loc[key, 'accuracy'])
        checks.same('seeds', f'{where}, share', share, rows.loc[key, 'share'])
        cost = share * large[key[:2]]
        checks.same('seeds', f'{where}, cost', cost, rows.loc[key, 'cost'])
        if key in printed.index:
            checks.same('seeds', f'{where}, accuracy', accuracy, printed.loc[key, 'accuracy'])
            checks.same('seeds', f'{where}, cost', cost, printed.loc[key, 'cost'])
            checks.same('seeds', f'{where}, A/C', accuracy / cost, printed.loc[key, 'per_cost'])


def check_chosen(checks, tables):
    "Chosen features are one of three rows."
    rows = tables['methods'].query('rule == "tuned"').set_index(KEYS)[['accuracy', 'cost']]
    for case in {key[:2] for key in rows.index if key[2] == 'Ours, chosen features'}:
        chosen = rows.loc[(*case, 'Ours, chosen features')]
        three = [np.allclose(rows.loc[(*case, name)], chosen, rtol=1e-4) for name in THREE]
        checks.same('chosen features', ', '.join(case), any(three), True)


def check_comparison(checks, tables):
    "Ratios and points from the rows of both, and verdicts from the intervals of the ratios."
    rows = tables['methods'].query('rule == "tuned"').set_index(KEYS)
    for line in tables['comparison'].to_dict('records'):
        case = line['unit'], line['benchmark']
        where = ', '.join([*case, line['ours'], line['rival']])
        ours, rival = rows.loc[(*case, line['ours'])], rows.loc[(*case, line['rival'])]
        checks.same('ratio', where, ours['cost'] / rival['cost'], line['ratio'], 3 * DIGITS)
        points = ours['accuracy'] - rival['accuracy']
        checks.same('points', where, points / 100, line['points'] / 100, 0.02)
        verdict = 'undecided'
        if line['ratio_high'] < 1:
            verdict = 'cheaper'
        elif line['ratio_low'] > 1:
            verdict = 'costlier'
        checks.same('verdict', where, verdict == line['verdict'], True)


def check_gain(checks, splits, benchmark, row):
    "Who fails, and how well the least score of a chain tells it: by ranks."
    chains = []
    for of in splits:
        for i, T in enumerate(of['steps']):
            wrong = of['right'][i, T, 0] == 0
            gain = wrong and of['right'][i, 0, 0] == 1
            scores = [-of[f'feature {name}'][i, :T].min() for name in ('min_odds', 'mean_logit')]
            chains.append((wrong, gain, *scores))
    frame = pd.DataFrame(chains, columns=['wrong', 'gain', 'min-prob', 'S^os'])
    checks.same('gain', f'{benchmark}, problems', len(frame), row['problems'])
    for asked in ('wrong', 'gain'):
        checks.same('gain', f'{benchmark}, {asked}', frame[asked].mean(), row[asked])
        for score in ('min-prob', 'S^os'):
            ranks, hits = frame[score].rank(), frame[asked].sum()
            over = ranks[frame[asked]].sum() - hits * (hits + 1) / 2
            area = over / (hits * (len(frame) - hits))
            checks.same('AUROC', f'{benchmark}, {asked}', area, row[f'{asked} by {score}'])


def check_tables(tables, outcomes, alpha=0.02, n_boot=1000):
    "All checks of a folder of tables against a folder of outcomes; returns `Checks`."
    checks, large = Checks(), {}
    tables = {path.stem: pd.read_csv(path) for path in sorted(Path(tables).glob('*.csv'))}
    for benchmark in tables['methods']['benchmark'].unique():
        files = {path.stem: read(path) for path in Path(outcomes).glob(f'{benchmark}-*.npz')}
        for unit in tables['methods']['unit'].unique():
            curves = curves_of(files, benchmark, unit)
            large[unit, benchmark] = curves['Large only'][2][1][0].mean()
            check_rows(checks, curves, unit, benchmark, tables, alpha, n_boot)
        splits = [files[f'{benchmark}-{split}'] for split in ('train', 'calibration', 'test')]
        check_gain(checks, splits, benchmark, tables['gain'].set_index('benchmark').loc[benchmark])
    check_seeds(checks, tables, large)
    check_chosen(checks, tables)
    check_comparison(checks, tables)
    return checks


def main(tables, outcomes):
    path = Path(tables) / 'provenance.json'
    settings = json.loads(path.read_text())['settings'] if path.exists() else {}
    alpha = settings.get('policy', {}).get('alpha', 0.02)
    n_boot = settings.get('results', {}).get('n_boot', 1000)
    checks = check_tables(tables, outcomes, alpha, n_boot)
    print(', '.join(f'{n} {kind}' for kind, n in checks.counts.items()))
    print(f'{len(checks.wrong)} differ')
    for line in checks.wrong[:20]:
        print(line)
    return bool(checks.wrong or not checks.counts)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:3]))
