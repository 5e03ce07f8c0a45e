"""The tables of a run, computed once more by other code: python tests/independent.py TABLES OUTCOMES

It reads outcomes (.npz) and tables (.csv) with numpy and pandas, and imports nothing of the library. It follows
the definitions in the text. Tuned: the cheapest setting that loses at most alpha on calibration problems. Guaranteed:
the last setting, from safe to cheap, before the first whose upper bound on the loss is above alpha. In each resample the
choice is made again. Trained policies are not trained again: their rows are the means of their seeds in seeds.csv."""

import json
import math
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd

DIGITS = 1e-5  # the tables have six digits
RISK = 0.1
MOST = 500  # thresholds a curve
KEYS = ['unit', 'benchmark', 'method']
SPLITS = 'train', 'calibration', 'test'
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
        if not math.isclose(here, there, rel_tol=digits, abs_tol=1e-3 * digits):
            self.wrong.append(f'{kind}: {where}: {here} here, {there} there')


# ---- a walk off the table
def price(of, tokens, model, unit):  # tokens [..., kind]
    "Of tokens (written, read anew, sent, of these cached)."
    written, _, sent, cached = np.moveaxis(np.asarray(tokens, float), -1, 0)
    if unit == 'flops':
        return 2 * of['params'][model] * written
    of_prompt, of_cached, of_written = of['dollars'][model]
    return 100e-6 * ((sent - cached) * of_prompt + cached * of_cached + written * of_written)


class Table:
    "The outcomes of a split at a price. K = 2."

    def __init__(self, of, unit):
        self.of, self.unit, self.steps = of, unit, of['steps'].astype(int)
        self.right = of['right'][:, :, 0].astype(float)
        self.small = price(of, of['small'], 0, unit)
        self.rest = price(of, of['large'][:, :, 0], 1, unit)
        self.large = self.right[:, 0], self.rest[:, 0]

    def column(self, name):
        return self.of[f'feature {name}'].astype(float)

    @cache
    def ways(self, reading='continue', thrown=0):
        "Per problem [(right, cost)]: handed over after step 0, 1, ...; at last, never."
        extra = thrown * price(self.of, (1, 0, 0, 0), 0, self.unit)
        found = []
        for T, right, small, rest in zip(self.steps, self.right, self.small, self.rest):
            t, spent = np.arange(T), small[:T].cumsum()
            is_last = t == T - 1
            kept = np.where(is_last | (reading == 'rewrite'), t, t + 1)
            handed_over = np.c_[right[kept], spent + extra * ~is_last + rest[kept]]
            found.append(np.vstack([handed_over, (right[T], spent[-1])]))
        return found


def with_large(table, of_problems):  # [problem, setting, (right, cost)]
    "(right, cost) [setting, problem], below the large model alone."
    values = np.transpose(of_problems, (2, 1, 0))
    return [np.vstack([large, others]) for large, others in zip(table.large, values)]


def at_thresholds(pair, doubts, reading='continue', thrown=0):
    "Thresholds: one float above each doubt on calibration; the first one hands over at once."
    highest = []  # so far; a step without a score doubts nothing
    for table, doubt in zip(pair, doubts):
        rows = [np.r_[-np.inf, x[:T]] for x, T in zip(doubt, table.steps)]
        highest.append([np.fmax.accumulate(row)[1:] for row in rows])
    seen = np.unique(np.concatenate(highest[0]))
    if len(seen) > MOST:
        seen = seen[np.round(np.linspace(0, len(seen) - 1, MOST)).astype(int)]
    kappas = [seen[0], *np.nextafter(seen, np.inf)]
    cases = [zip(table.ways(reading, thrown), rows) for table, rows in zip(pair, highest)]
    found = [[ways[np.searchsorted(row, kappas)] for ways, row in of] for of in cases]
    return [*map(with_large, pair, found)]


# ---- STEER
def mixture(scores):
    "(weights, means, deviations), the unsure component first; and is it degenerate?"
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
        x = (np.maximum if deviations[1] > deviations[0] else np.minimum)(x, turn)
    each = np.log(weights / deviations) - ((x[:, None] - means) / deviations) ** 2 / 2
    return 1 / (1 + np.exp((each[:, 0] - each[:, 1]).clip(max=700)))


def steer_doubts(train, tables):
    "Minus P(sure component) of each step, by the mixture of its index."
    logits = train.column('mean_logit')
    inside = np.arange(logits.shape[1]) < train.steps[:, None]
    pooled, _ = mixture(logits[inside])
    fitted = []
    for j in range(max(table.steps.max() for table in tables)):
        scores = logits[train.steps > j, j] if j < logits.shape[1] else []
        own, is_degenerate = mixture(scores) if len(scores) >= 50 else (None, True)
        fitted.append(pooled if is_degenerate else own)
    logits = [zip(fitted, table.column('mean_logit').T) for table in tables]
    return [-np.transpose([sure(*case) for case in cases]) for cases in logits]


# ---- all settings of the methods that are not trained
def stepwise(ways, large, p):
    "Expected result of handing over after each step with probability p."
    total, left = 0.0, 1.0
    for way in ways[:-1]:
        total, left = total + left * p * way, left * (1 - p)
    return total + left * ways[-1]


def best(ways):
    return min((way for way in ways if way[0]), key=lambda way: way[1], default=ways[-1])


def curves_of(files, benchmark, unit):
    "{method: (calibration, test)}, each (right, cost) [setting, problem]."
    train, *pair = (Table(files[f'{benchmark}-{split}'], unit) for split in SPLITS)

    def low(name, reading='continue'):
        return at_thresholds(pair, [-table.column(name) for table in pair], reading)

    def one(of_ways):
        return [np.transpose([of_ways(ways) for ways in table.ways()])[:, None] for table in pair]

    def chance(expected):
        p = np.linspace(1, 0, 41)[:, None]
        cases = [zip(table.ways(), np.transpose(table.large)) for table in pair]
        found = [[expected(*case, p) for case in of_table] for of_table in cases]
        return [*map(with_large, pair, found)]

    def walked(name):
        walks = [files[f'{benchmark}-{split}-{name}'] for split in SPLITS[1:]]
        parts = [[price(of, of['tokens'][:, :, m], m, unit) for m in range(3)] for of in walks]
        found = [np.transpose([of['right'], sum(cost)]) for of, cost in zip(walks, parts)]
        return [*map(with_large, pair, found)]

    steer = steer_doubts(train, pair)
    entropy = [table.column('next_entropy') for table in pair]
    found = {
        'Small only': one(lambda ways: ways[-1]),
        'Large only': [np.array(table.large)[:, None] for table in pair],
        'Oracle': one(best),
        'Random step': chance(stepwise),
        'Random problem': chance(lambda ways, large, p: p * large + (1 - p) * ways[-1]),
        'Min-prob threshold': low('min_prob'),
        'Min-prob threshold, rewrite': low('min_prob', 'rewrite'),
        'Mean-logit threshold': low('mean_logit'),
        'GlimpRouter': at_thresholds(pair, entropy, thrown=1),
        'STEER': at_thresholds(pair, steer),
        'STEER, rewrite': at_thresholds(pair, steer, 'rewrite'),
    }
    found |= {name: walked(name) for name in WALKERS if f'{benchmark}-test-{name}' in files}
    if 'feature reward' in pair[0].of:
        found['TRIM'] = low('reward', 'rewrite')
    return found


# ---- the choice, in the sample itself and in each resample
def draws(n, n_boot, seed):
    counts = np.random.default_rng(seed).multinomial(n, [1 / n] * n, n_boot)
    return np.vstack([np.ones(n), counts])


def tuned(right, cost, counts, alpha):
    accuracy, mean_cost = (counts @ values.T / len(values[0]) for values in (right, cost))
    is_good = accuracy >= accuracy[:, :1] - alpha - 1e-12
    return np.where(is_good, mean_cost, np.inf).argmin(1)


def guaranteed(right, cost, counts, alpha):
    "By the normal bound."
    n, loss = len(right[0]), right[0] - right
    mean, square, mean_cost = (counts @ values.T / n for values in (loss, loss**2, cost))
    error = np.sqrt((square - mean**2).clip(0) / (n - 1))
    is_unsafe = mean + NormalDist().inv_cdf(1 - RISK) * error > alpha
    is_unsafe = np.c_[is_unsafe[:, 1:], np.full(len(counts), True)]
    last = is_unsafe.argmax(1)  # before the first unsafe one
    is_cheaper = mean_cost[np.arange(len(counts)), last] < mean_cost[:, 0]
    return np.where(is_cheaper, last, 0)


def ends(values):
    "The sample's, and the ends of its 95 % interval."
    ordered = np.sort(values[1:])
    low, high = (round(q * (len(ordered) - 1)) for q in (0.025, 0.975))
    return {'': values[0], '_low': ordered[low], '_high': ordered[high]}


# ---- the checks
def check_rows(checks, curves, unit, benchmark, tables, alpha, n_boot):
    "Choices, points and intervals of methods.csv, the cells of Tables 1 and 2, and the lines of curves.csv."
    n, n_test = (right.shape[1] for right, _ in curves['Large only'])
    of_calibration, of_test = draws(n, n_boot, 1), draws(n_test, n_boot, 0)
    rules = dict(tuned=tuned)
    if n >= 300 and n * alpha >= 6:  # below, an exact test decides, which is not repeated here
        rules['guaranteed'] = guaranteed
    large_cost = of_test @ curves['Large only'][1][1][0] / n_test
    methods = tables['methods'].set_index([*KEYS, 'rule'])
    printed = {'flops': 'table1', 'cents': 'table2'}[unit]
    cells, lines = tables[printed].fillna(np.inf).set_index(KEYS), tables['curves'].groupby(KEYS)
    for name, (calibration, test) in curves.items():
        key, where = (unit, benchmark, name), f'{unit}, {benchmark}, {name}'
        n_settings = len(test[0])
        for rule, choose in rules.items():
            if rule == 'guaranteed' and name in EXPECTED:
                continue
            chosen = choose(*calibration, of_calibration, alpha)
            accuracy, cost = ((of_test * values[chosen]).sum(1) / n_test for values in test)
            mine = dict(accuracy=100 * accuracy, cost=cost, share=cost / large_cost)
            for column, values in mine.items():
                for end, number in ends(values).items():
                    kind = f'{column}{" interval" * bool(end)}, {rule}'
                    checks.same(kind, where, number, methods.loc[(*key, rule), column + end])
            if rule == 'tuned' and key in cells.index:
                mine = dict(accuracy=100 * accuracy[0], cost=cost[0])
                mine['per_cost'] = mine['accuracy'] / cost[0] if cost[0] else np.inf
                mine['large_alone'] = n_settings > 1 and chosen[0] == 0
                for column, number in mine.items():
                    checks.same(printed, f'{where}, {column}', number, cells.loc[key, column])
        even = np.round(np.linspace(0, n_settings - 1, 40)).astype(int)
        accuracy, cost = (values.mean(1)[even] for values in test)
        points = pd.DataFrame(dict(share=cost / large_cost[0], accuracy=100 * accuracy))
        points = points.drop_duplicates().values
        drawn = lines.get_group(key)[['share', 'accuracy']].values
        checks.same('points of a line', where, len(points), len(drawn))
        for here, there in zip(points.ravel(), drawn.ravel()):
            checks.same('line', where, here, there)


def check_seeds(checks, tables, rows):
    "A row of a trained method is the mean of its seeds, in methods.csv and in Tables 1 and 2."
    printed = pd.concat([tables['table1'], tables['table2']]).set_index(KEYS)
    for key, part in tables['seeds'].groupby(KEYS):
        accuracy, share = part['accuracy'].mean(), part['share'].mean()
        cost = share * rows.loc[(*key[:2], 'Large only'), 'cost']
        mine = dict(accuracy=accuracy, cost=cost, share=share, per_cost=accuracy / cost)
        for table in (rows, printed) if key in printed.index else (rows,):
            for column in set(mine) & set(table):
                where = ', '.join([*key, column])
                checks.same('seeds', where, mine[column], table.loc[key, column])


def check_chosen(checks, rows):
    "Chosen features are one of three rows."
    for (*case, name), row in rows[['accuracy', 'cost']].iterrows():
        if name == 'Ours, chosen features':
            three = [rows.loc[(*case, of), row.index].astype(float) for of in THREE]
            is_one = any(np.allclose(of, row, rtol=1e-4) for of in three)
            checks.same('chosen features', ', '.join(case), is_one, True)


def check_comparison(checks, comparison, rows):
    "Ratios and points from the rows of both, and verdicts from the intervals of the ratios."
    for line in comparison.to_dict('records'):
        case = line['unit'], line['benchmark']
        where = ', '.join([*case, line['ours'], line['rival']])
        ours, rival = rows.loc[(*case, line['ours'])], rows.loc[(*case, line['rival'])]
        checks.same('ratio', where, ours['cost'] / rival['cost'], line['ratio'], 3 * DIGITS)
        points = ours['accuracy'] - rival['accuracy']
        checks.same('points', where, points / 100, line['points'] / 100, 0.02)
        is_decided = line['ratio_high'] < 1, line['ratio_low'] > 1
        verdict = np.select(is_decided, ['cheaper', 'costlier'], 'undecided')
        checks.same('verdict', where, verdict == line['verdict'], True)


def check_gain(checks, splits, row):
    "Who fails, and how well the least score of a chain tells it: by ranks."
    chains = []
    for of in splits:
        for i, T in enumerate(of['steps']):
            wrong = of['right'][i, T, 0] == 0
            gain = wrong and of['right'][i, 0, 0] == 1
            odds, logits = (of[f'feature {name}'][i, :T] for name in ('min_odds', 'mean_logit'))
            scores = {'min-prob': -odds.min(), 'S^os': -logits.min()}
            chains.append(dict(wrong=wrong, gain=gain) | scores)
    frame, benchmark = pd.DataFrame(chains), row['benchmark']
    checks.same('gain', f'{benchmark}, problems', len(frame), row['problems'])
    for asked in ('wrong', 'gain'):
        checks.same('gain', f'{benchmark}, {asked}', frame[asked].mean(), row[asked])
        for score in ('min-prob', 'S^os'):
            ranks, hits = frame[score].rank(), frame[asked].sum()
            over = ranks[frame[asked]].sum() - hits * (hits + 1) / 2
            area = over / (hits * (len(frame) - hits))
            checks.same('AUROC', f'{benchmark}, {asked}', area, row[f'{asked} by {score}'])


def check_tables(tables, outcomes):
    "All checks of a folder of tables against a folder of outcomes."
    settings = json.loads((Path(tables) / 'provenance.json').read_text())['settings']
    alpha, n_boot = settings['policy']['alpha'], settings['results']['n_boot']
    tables = {path.stem: pd.read_csv(path) for path in Path(tables).glob('*.csv')}
    rows = tables['methods'].query('rule == "tuned"').set_index(KEYS)
    checks, files = Checks(), {}
    for path in Path(outcomes).glob('*.npz'):
        with np.load(path) as file:
            files[path.stem] = dict(file)
    for unit, benchmark in dict.fromkeys(key[:2] for key in rows.index):
        curves = curves_of(files, benchmark, unit)
        check_rows(checks, curves, unit, benchmark, tables, alpha, n_boot)
    for row in tables['gain'].to_dict('records'):
        check_gain(checks, [files[f'{row["benchmark"]}-{split}'] for split in SPLITS], row)
    check_seeds(checks, tables, rows)
    check_chosen(checks, rows)
    check_comparison(checks, tables['comparison'], rows)
    return checks


def main(tables, outcomes):
    checks = check_tables(tables, outcomes)
    print(', '.join(f'{n} {kind}' for kind, n in checks.counts.items()))
    print(f'{len(checks.wrong)} differ', *checks.wrong[:20], sep='\n')
    return bool(checks.wrong or not checks.counts)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:3]))
