"""Every sentence of the paper that can be tested, our number, and a verdict that is computed"""

from dataclasses import dataclass

from ..method.comparison import LARGE
from ..method.results import headline, style_of
from .gains import comparisons, metrics
from .tables import paper_rows
from .writer import Report, interval_table, markdown, save_table


@dataclass(frozen=True)
class Facts:
    "What claims are tested on, for one row of ours."

    results: object  # DataFrame of `evaluate`, column `setting`
    pairs: object  # of `comparisons`, columns `setting` and `family` of the other
    sweeps: object  # of `metrics`, column `setting`
    rows: dict  # setting -> (method, on_escalate) of ours

    def pick(self, frame, setting, word='', **columns) -> list:
        "The rows of a frame in a setting, on the benchmarks whose names hold `word`, with these values, as dicts."
        if frame.empty:
            return []
        keep = (frame['setting'] == setting) & frame['benchmark'].str.contains(word)
        for name, value in columns.items():
            keep &= frame[name] == value
        return frame[keep].to_dict('records')

    def own(self, setting, word='', **columns):
        "Of ours, at its chosen setting where nothing else is asked for."
        if setting not in self.rows:
            return []
        method, on_escalate = self.rows[setting]
        columns = dict(chosen=1, method=method, on_escalate=on_escalate) | columns
        return self.pick(self.results, setting, word, **columns)

    def against(self, setting, family, word=''):
        if setting not in self.rows:
            return []
        method, on_escalate = self.rows[setting]
        return self.pick(
            self.pairs, setting, word, family=family, ours=method, on_escalate=on_escalate
        )

    def stood_in(self, pair):  # is the other of `pairs` the large model alone?
        key = dict(chosen=1, method=pair['other'], on_escalate=pair['other_on_escalate'])
        return any(
            r['threshold'] == LARGE
            for r in self.pick(self.results, pair['setting'], pair['benchmark'], **key)
        )


def collect_facts(
    results,
) -> dict:  # of `load_run`; "ours", "best" -> `Facts` of the paper's own row, of our best one
    "All that claims are tested on."
    import pandas as pd

    def every(make):
        return pd.concat(
            [make(r).assign(setting=name) for name, r in results.items()], ignore_index=True
        )

    pairs = every(comparisons)
    families = {name: headline(r.results) for name, r in results.items()}
    pairs['family'] = [style_of(m)['family'] for m in pairs.get('other', ())]
    frames = every(lambda r: r.results), pairs, every(lambda r: r.whole(metrics))
    own = {name: f['Ours'] for name, f in families.items() if 'Ours' in f}
    best = {name: families[name].get('Ours, best', row) for name, row in own.items()}
    return dict(ours=Facts(*frames, own), best=Facts(*frames, best))


def cheaper(pair):
    return pair['cheaper'] and not pair['worse']


def comparable(pair):
    return not pair['worse'] and not (pair['cost_ratio'] > 1 and pair['p_cost'] < 0.05)


def against(families, holds=cheaper, setting='open', word=''):
    "A check of ours against other families: cost ratio (accuracy difference in points)."

    def text(f, p):
        return f'{p["cost_ratio"]:.2f}{"†" * f.stood_in(p)} ({100 * p["accuracy_difference"]:+.1f})'

    def name(p):
        return p['benchmark'] + f', {p["family"]}' * (len(families) > 1)

    return lambda f: [
        (name(p), text(f, p), holds(p))
        for family in families
        for p in f.against(setting, family, word)
    ]


def alone(holds, setting='open', word='', **columns):
    "A check of ours: cost in % of the large model's (accuracy against it in points)."

    def text(r):
        return f'{100 * r["cost_share"]:.1f} % ({100 * r["accuracy_vs_large"]:+.1f})'

    return lambda f: [(r['benchmark'], text(r), holds(r)) for r in f.own(setting, word, **columns)]


def saves(row):
    return row['cost_share_high'] < 1


def keeps(row):
    return row['accuracy_vs_large'] >= -0.02


def best_share(f, setting, benchmark, method):
    return max(
        (r['share'] for r in f.pick(f.sweeps, setting, benchmark, method=method)), default=None
    )


def beats_chance(f):
    for own in f.own('open'):
        for r in f.pick(
            f.sweeps, 'open', own['benchmark'], method=own['method'], on_escalate=own['on_escalate']
        ):
            yield r['benchmark'], f'{100 * r["share"]:.0f} %', r['share_low'] > 0


def better_score(first, second):
    "A check of two bare thresholds: shares of the random-to-oracle area, the better reading of each."

    def check(f):
        for benchmark in f.results['benchmark'].unique():
            a, b = (
                best_share(f, 'open', benchmark, f'Bare threshold ({score})')
                for score in (first, second)
            )
            if a is not None and b is not None:
                yield benchmark, f'{100 * a:.0f} / {100 * b:.0f} %', a > b

    return check


def informative(f):
    for benchmark in f.results['benchmark'].unique():
        share = best_share(f, 'open', benchmark, 'Bare threshold (probability)')
        if share is not None:
            yield benchmark, f'{100 * share:.0f} %', share > 0


def most_per_cost(f):
    for r in f.pick(f.results, 'open', method='Small only'):
        rows = f.pick(f.results, 'open', r['benchmark'], chosen=1)
        best = max(
            (row['ac_percent'] for row in rows if style_of(row['method'])['family']), default=0
        )
        yield r['benchmark'], f'{r["ac_percent"]:.3g} / {best:.3g}', r['ac_percent'] >= best


def reads_most(f):
    "All FLOPs by FLOPs of generated tokens: SpecReason reads more than ours."
    for own in f.own('open'):
        for pair in (
            p for p in f.against('open', 'SpecReason', own['benchmark']) if not f.stood_in(p)
        ):
            (theirs,) = f.pick(f.results, 'open', own['benchmark'], chosen=1, method=pair['other'])
            both = [r['full_flops'] / r['cost'] for r in (theirs, own)]
            yield own['benchmark'], f'{both[0]:.1f} / {both[1]:.1f}', both[0] > both[1]


def odd_ratios(_):
    "Printed accuracy per cost, and what the two numbers beside it give."
    for cost, factor in (('paper_flops', 1), ('cents', 100)):
        for r in paper_rows(cost).dropna(subset='ac').to_dict('records'):
            right = r['accuracy'] / factor / r['cost']
            if abs(right - r['ac']) >= 0.02 * r['ac']:
                yield f'{r["method"]}, {r["benchmark"]}', f'{right:.2f}', False


def printed_steer(_):
    table = paper_rows('cents').query('benchmark == "OmniMath"').set_index('method')['cost']
    yield (
        'Table 2 as printed',
        f'{table["Ours"]:g} against {table["STEER"]:g} cents',
        table['Ours'] < table['STEER'],
    )


def union_binds(f):
    "Does the small model alone violate Pr[R = 1] + Pr[R_M = 0] >= 1 - alpha?"
    printed = (
        paper_rows('paper_flops').pivot(index='benchmark', columns='method', values='accuracy')
        / 100
    )
    pairs = [(f'{b}, printed', r['1.5B Only'], r['7B Only']) for b, r in printed.iterrows()]
    for r in f.pick(f.results, 'open', method='Small only'):
        pairs.append((r['benchmark'], r['accuracy'], r['accuracy'] - r['accuracy_vs_large']))
    return [
        (name, f'{small + 1 - large:.3f}', small + 1 - large < 0.98) for name, small, large in pairs
    ]


def misses_fall_with_kappa(f):
    for own in f.own('open'):
        sweep = sorted(
            f.own('open', own['benchmark'], chosen=0), key=lambda r: r['cost']
        )  # least kappa: dearest
        if not sweep:
            continue
        high, low = (100 * r['miss'] for r in (sweep[0], sweep[-1]))
        yield (
            own['benchmark'],
            f'{low:.1f} % at the least kappa, {high:.1f} % at the largest',
            high < low,
        )


CLAIMS = (  # where, what, how it is tested (or why not), check
    (
        'Abstract',
        'consistently improves the accuracy-cost tradeoff compared to handcrafted approaches',
        'cheaper than STEER and SpecReason, open',
        against(['STEER', 'SpecReason']),
    ),
    (
        'Abstract',
        'the same in the open-to-closed setting',
        'cheaper in US cents',
        against(['STEER', 'SpecReason'], setting='api'),
    ),
    (
        'Abstract',
        'a comparable tradeoff to methods that require training large process reward models',
        'comparable with RSD',
        against(['RSD'], comparable),
    ),
    (
        'Abstract',
        'handcrafted strategies limit performance',
        'cheaper than a bare threshold on a confidence',
        against(['Bare threshold (probability)']),
    ),
    (
        'Setup',
        'noisy correctness labels lead to overly conservative policies',
        'answers of the micro models are graded without noise',
        None,
    ),
    (
        'Setup',
        'accuracy per cost is only meaningful at similar accuracy levels',
        'the small model alone, the least accurate, has more of it than the best method of Table 1',
        most_per_cost,
    ),
    (
        'Results',
        'a strong tradeoff on all three benchmarks',
        'share of the random-to-oracle area above 0',
        beats_chance,
    ),
    (
        'Results',
        'GSM8K: essentially the large model at less than half of its computation',
        'cost below 50 %, at most 2 points lost',
        alone(lambda r: r['cost_share'] < 0.5 and keeps(r), word='gsm'),
    ),
    (
        'Results',
        'MATH500: the highest accuracy of all compared methods',
        'no less accurate than SpecReason, RSD and STEER',
        against(
            ['SpecReason', 'RSD', 'STEER'], lambda p: p['accuracy_difference'] >= 0, word='math'
        ),
    ),
    (
        'Results',
        'MATH500: substantially cheaper than the large model',
        'cost below 75 %',
        alone(lambda r: r['cost_share_high'] < 0.75, word='math'),
    ),
    (
        'Results',
        'OmniMath: competitive with RSD',
        'comparable',
        against(['RSD'], comparable, word='omni'),
    ),
    (
        'Results',
        "recovers the large model's reasoning ability at materially lower cost",
        'at most 2 points lost, cost significantly below 100 %',
        alone(lambda r: saves(r) and keeps(r)),
    ),
)

CLAIMS += (
    (
        'Results',
        'API: cheaper than the large model on GSM8K and MATH500 at comparable accuracy',
        'at most 2 points lost, cost significantly below 100 %',
        alone(lambda r: saves(r) and keeps(r), 'api', 'gsm|math'),
    ),
    (
        'Results',
        'API: improves markedly over SpecReason',
        'cheaper',
        against(['SpecReason'], setting='api'),
    ),
    (
        'Results',
        'API: more favourable than STEER on GSM8K and MATH500',
        'cheaper',
        against(['STEER'], setting='api', word='gsm|math'),
    ),
    (
        'Results',
        'API, OmniMath: more accurate than STEER at lower cost',
        'accuracy higher, cost ratio below 1',
        against(
            ['STEER'], lambda p: p['accuracy_difference'] > 0 and p['cost_ratio'] < 1, 'api', 'omni'
        ),
    ),
    (
        'Results',
        'API, GSM8K: slightly more accurate than RSD',
        'accuracy higher',
        against(['RSD'], lambda p: p['accuracy_difference'] > 0, 'api', 'gsm'),
    ),
    (
        'Results',
        'API: RSD remains stronger on MATH500 and OmniMath',
        'ours is not cheaper',
        against(['RSD'], lambda p: not cheaper(p), 'api', 'math|omni'),
    ),
    (
        'Results',
        'API: held back by top-5 log-probabilities and by formats that differ',
        'the micro models write one format, and their local server gives what the paper uses',
        None,
    ),
)

CLAIMS += (
    (
        'Discussion',
        'captures stepwise dependency, which one threshold a step cannot',
        'cheaper than a threshold on the same score and than STEER, which look at one step',
        against(['Bare threshold (logit)', 'STEER']),
    ),
    (
        'Discussion',
        'SpecReason incurs substantial input-side overhead',
        'all FLOPs by FLOPs of generated tokens, SpecReason / ours, where it is not the large model alone',
        reads_most,
    ),
    (
        'Discussion',
        'this holds particularly in API settings',
        'every row may choose the large model alone, and so costs no more than it',
        None,
    ),
    (
        'Discussion',
        'removes the need for a threshold search after training',
        'the threshold of training loses at most 2 points and saves cost',
        alone(lambda r: saves(r) and keeps(r), method='Ours (online kappa)'),
    ),
    (
        'Discussion',
        'grid search restricts the granularity of the threshold',
        'all rows choose from grids here, to be compared',
        None,
    ),
    (
        'Discussion',
        'judge and reward model introduce latency, confidences do not',
        'a run keeps no clock; measured apart: tables/latency/latency.md',
        None,
    ),
    (
        'Discussion',
        "the model's own confidence is informative",
        'bare threshold on the probability, the better of append and regenerate: share above 0',
        informative,
    ),
    (
        'Discussion',
        'log-probabilities are less informative than logits',
        'share of a bare threshold on the mean top logit / the least probability',
        better_score('logit', 'probability'),
    ),
)

CLAIMS += (  # what the paper prints, and should not
    (
        'Erratum, eq. 5',
        'kappa rises after a miss',
        'a larger kappa means fewer misses',
        misses_fall_with_kappa,
    ),
    (
        'Erratum, sec. 4.1',
        'Pr[R = 1] + Pr[R_M = 0] >= 1 - alpha stands in for the constraint',
        'below .98 for the small model alone; else it asks for nothing',
        union_binds,
    ),
    (
        'Erratum, Table 2',
        'accuracy per cost follows from the columns beside it',
        'within 2 %',
        odd_ratios,
    ),
    ('Erratum, sec. 5.2', 'OmniMath: lower cost than STEER', 'the printed costs', printed_steer),
)


def verdict(
    check, f
) -> (
    tuple
):  # a check, `Facts` -> (our numbers, those that speak against it marked, and the verdict)
    "What a check comes to."
    lines = list(check(f)) if check else []
    if not lines:
        return '', 'cannot be tested here'
    numbers = '; '.join(f'{name}: {number}' + ' ✗' * (not holds) for name, number, holds in lines)
    return numbers, 'holds' if all(holds for *_, holds in lines) else 'does not hold'


def claims_table(facts):  # of `collect_facts`; DataFrame, one row per claim
    "Every claim with our numbers and a verdict, of the paper's own row and of our best one."
    import pandas as pd

    columns = 'source', 'claim', 'rule', 'numbers', 'verdict', 'best_numbers', 'best_verdict'
    rows = [
        (*claim, *verdict(check, facts['ours']), *verdict(check, facts['best']))
        for *claim, check in CLAIMS
    ]
    return pd.DataFrame(rows, columns=columns)


_NOTES = """
*Ours* has the paper's features and appends; *our best row* is the other one of Table 1, where it says something else.
✗ marks the numbers that speak against a claim. Cost ratios stand before accuracy differences in points (in brackets),
each at the settings chosen on calibration. *Cheaper*: significantly, and not significantly less accurate. † The other
one is the large model alone: none of its settings was both accurate enough and cheaper on calibration.
"""


def claims_markdown(table) -> str:
    "The rows of `claims_table`, and how many hold."

    def cell(kind):
        return lambda row: ': '.join(
            filter(None, [f'**{row[kind + "verdict"]}**', row[kind + 'numbers']])
        )

    def best(row):
        return '–' if row['best_numbers'] == row['numbers'] else cell('best_')(row)

    rows = {
        'Where': 'source',
        'The paper says': 'claim',
        'Test, or why none': 'rule',
        'Ours': cell(''),
        'Our best row': best,
    }
    counts = [
        ', '.join(f'*{v}* {n}' for v, n in table[k].value_counts().items())
        for k in ('verdict', 'best_verdict')
    ]
    lines = f'\nVerdicts on {len(table)} claims: ours {counts[0]}; our best row {counts[1]}.\n'
    about = 'Verdicts are about the models of this run, not about those of the paper.\n\n'
    return about + markdown(interval_table(table, rows, {})) + _NOTES + lines


def report_claims(results) -> Report:  # of `load_run`
    "Write the claims of a run, and show them."
    folder = next(iter(results.values())).tables
    table = claims_table(collect_facts(results))
    md = claims_markdown(table)
    save_table(folder / 'claims', table, md=md)
    return Report(md)
