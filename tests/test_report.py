"What sweeps win, comparisons and claims: closed forms, by hand, and against the frontiers."
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from claims import run_claims_notebook
from hypothesis import given, settings, strategies as st
from scipy.integrate import trapezoid
from scipy.stats import norm
from toy_runs import (  # fixtures
    cents,
    flops,
    frame,
    line,
    loaded,
    means_of,
    run,
    settled,
    with_ours,
)

from stepwise_routing.base.statistics import resamples
from stepwise_routing.method.bounds import oracle_frontier, random_frontier, random_outcome
from stepwise_routing.method.outcomes import take_rows, toy_table
from stepwise_routing.method.results import ablation_table, at_point, with_intervals
from stepwise_routing.report.gains import (
    METRICS,
    Curve,
    Sweep,
    Winnable,
    compare,
    comparison_markdown,
    comparisons,
    holm,
    judged,
    levels_markdown,
    measures,
    metrics,
    metrics_markdown,
    p_value,
    shares_by_level,
    winnable,
)
from stepwise_routing.report.routed import Routed
from stepwise_routing.report.tables import ablation_markdown
from stepwise_routing.report.transcripts import Line, Transcript
from stepwise_routing.run.notebooks import notebook_cells

ROOT = Path(__file__).resolve().parents[1]


# ---- what a sweep wins ----------------------------------------------------------------------------------------------
def oracle_points(table, e):
    "(cost, correct) [point, problem] of hindsight: problems are made right one by one, the cheapest extra cost first."
    grid = table.grid(e)
    price = np.where(table.reach, grid['paper_flops'], np.inf)
    right = np.where(grid['correct'] == 1, price, np.inf)
    order = np.argsort(right.min(1) - price.min(1), kind='stable')
    rows, t = np.arange(len(table)), price.argmin(1)
    out = [[grid[k][rows, t] for k in ('paper_flops', 'correct')]]
    for i in (i for i in order if np.isfinite(right[i].min())):
        t = t.copy(); t[i] = right[i].argmin()
        out.append([grid[k][rows, t] for k in ('paper_flops', 'correct')])
    return [np.stack(v) for v in zip(*out)]

def measured(area, calibration, points):
    sweep = Sweep('a method', 'append', *map(np.asarray, calibration), *points)
    return with_intervals(measures(area, sweep.curve(area)))

@pytest.mark.parametrize('e', ['append', 'regenerate'])
def test_hindsight_recovers_everything_and_chance_nothing(e):
    table, hazards = toy_table(150), np.linspace(0, 1, 201)
    best, area = oracle_points(table, e), winnable(table, resamples(150, 50), e)
    got = measured(area, [v.mean(1) for v in best], best)
    assert np.isclose(got['share'], 1, atol=1e-9) and .9 < got['share_low'] <= got['share_high'] < 1 + 1e-6
    chance = random_outcome(table, hazards, e)
    got = measured(area, (hazards, hazards), [chance[k] for k in ('paper_flops', 'correct')])
    assert np.allclose([got['share'], got['share_low'], got['share_high']], 0, atol=1e-9)

@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=8), st.floats(-1, 20))
@settings(max_examples=200, deadline=None)
def test_an_integral_is_the_one_over_all_knots(points, end):
    x, y = np.cumsum([p[0] for p in points]).astype(float), np.array([p[1] for p in points])
    first, last = sorted((x[0], end))
    at = np.unique(np.r_[first, x[(x > first) & (x < last)], last]) # trapezoids are exact between knots
    want = np.sign(end - x[0])*trapezoid(np.interp(at, x, y), at)
    curve, start = Curve(x[None], y[None]), x[:1]
    assert np.isclose(curve.area(start, np.array([end]))[0], want, atol=1e-9)

def test_a_step_upwards_takes_no_room():
    x, y = np.array([[0., 1, 1, 2]]), np.array([[0., 0, 1, 1]])
    assert np.isclose(Curve(x, y).area(np.array([0.]), np.array([2.])), 1)

def points_of(table, times):
    outcomes = [table.outcome(np.minimum(t, table.n_steps), 'append') for t in times]
    return [np.stack([o[k] for o in outcomes]) for k in ('paper_flops', 'correct')]

def test_the_share_and_apgr_are_areas_between_straight_lines():
    "Against the frontiers of chapter 04a and integrals over a fine grid."
    table = toy_table(120)
    points = points_of(table, (0, 1, 3))
    cal = (np.array([3., 2., 1.]), np.array([.9, .8, .85])) # the second is beaten on calibration
    chance, best = random_frontier(table, p=np.linspace(0, 1, 201)), oracle_frontier(table)
    small, large = table.outcome(table.n_steps, 'append'), table.large_only()
    start, full = (o['paper_flops'].mean() for o in (small, large))
    end = max(chance['cost'][-1], full)
    knots = sorted([(start, small['correct'].mean())] + [(points[0][i].mean(), points[1][i].mean()) for i in (0, 2)])
    def area(x, y, end):
        at = np.linspace(start, end, 100_001)
        return trapezoid(np.interp(at, x, y), at)
    low = area(np.maximum.accumulate(chance['cost']), chance['accuracy'], end)
    got = measured(winnable(table, resamples(120, 20)), cal, points)
    share = (area(*zip(*knots), end) - low)/(area(best['cost'], best['accuracy'], end) - low)
    alone_, all_ = small['correct'].mean(), large['correct'].mean()
    apgr = (area(*zip(*knots), full)/(full - start) - alone_)/(all_ - alone_)
    assert np.isclose(got['share'], share, rtol=1e-5) and np.isclose(got['apgr'], apgr, rtol=1e-5)

def test_measures_know_no_order_of_problems():
    table, order = toy_table(80), np.random.default_rng(0).permutation(80)
    points, cal = points_of(table, (0, 2)), ([2, 1], [2, 1])
    counts = resamples(80, 40)
    a = measured(winnable(table, counts), cal, points)
    b = measured(winnable(take_rows(table, order), counts[:, order]), cal, [v[:, order] for v in points])
    assert all(np.isclose(a[k], b[k], equal_nan=True) for k in a)

def test_least_costs_by_hand():
    "From (1, .5) over (3, .7) to (5, .6): a curve may fall; what it never reaches is infinite."
    cost, right = np.array([[1., 3, 5]]), np.array([[.5, .7, .6]])
    least = lambda target: Curve(cost, right).least_cost(np.array([target]))[0]
    assert np.allclose([least(.4), least(.5), least(.6), least(.7)], [1, 1, 2, 3]) and least(.71) == np.inf

def test_pgr_by_hand():
    "Small: cost 1, accuracy 0; large: 9, .8; one point: 3, .6; level from there on."
    numbers = dict(small_cost=1., small_accuracy=0., large_cost=9., large_accuracy=.8, end=9., chance=0., hindsight=8.)
    area = Winnable(weights=np.ones((1, 1)), **{name: np.array([x]) for name, x in numbers.items()})
    got = measures(area, Curve(np.array([[1., 3]]), np.array([[0., .6]])))
    want = dict(share=4.2/8, apgr=4.2/8/.8, cpt50=(1 + 4/3)/9, cpt80=np.inf, cpt95=np.inf, qnc=np.inf)
    assert got.keys() == METRICS.keys() and all(np.isclose(got[k][0], want[k]) for k in want)

def test_metrics_read_the_rows(with_ours):
    part = with_ours.parts['toy']
    table = metrics(part)
    rows = table[['method', 'on_escalate']].values.tolist()
    assert ['STEER (rest)', 'append'] in rows and ['Ours', 'append'] in rows and ['Ours (full)', 'regenerate'] in rows
    assert not {m for m, _ in rows} & {'Small only', 'Large only', 'Oracle', 'Random', 'Ours (bound)'}
    shuffled = replace(part, rows=part.rows.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(table, metrics(shuffled))
    md = metrics_markdown(table)
    assert '| toy | STEER (rest), regenerate' in md and 'not reached' in md and '∞' not in md

def test_shares_by_level_are_metrics_of_the_problems_of_a_level(with_ours):
    part = with_ours.parts['toy']
    assert shares_by_level(part).empty
    ids = list(part.table.problem_id)
    alike = shares_by_level(replace(part, levels=dict.fromkeys(ids, 2.)))
    numbers = ['share', 'share_low', 'share_high', 'n']
    assert np.allclose(alike[numbers], metrics(part)[numbers]) and set(alike['level']) == {2}
    two = shares_by_level(replace(part, levels={p: float(i < 20) for i, p in enumerate(ids)}))
    assert set(zip(two['level'], two['n'])) == {(1, 20), (0, 40)} and len(two) == 2*len(alike)
    assert '| level 0 (n = 40) Share | level 1 (n = 20) Share |' in levels_markdown(two)

def test_metrics_in_cents_have_their_own_frontiers(cents, flops):
    in_cents, in_flops = (metrics(p).set_index(['method', 'on_escalate'])['share'] for p in (cents, flops))
    assert (in_cents != in_flops).any() and in_cents.between(-1, 1).all()

# ---- ours against the others ----------------------------------------------------------------------------------------
OURS, STEER = ('Ours', 'append'), ('STEER (rest)', 'append')

def two(ours, flops, **others):
    "Two problems; STEER goes from (cost 1, accuracy 0) over (4, .5), its choice, to (6, 1); the large model costs 10."
    return pd.concat([
        line('Small only', [0, 0], [1, 1]), line('Large only', [1, 1], [10, 10]),
        line('STEER (rest)', [0, 0], [1, 1], 0., 0), line('STEER (rest)', [.5, .5], [4, 4], .5),
        line('STEER (rest)', [1, 1], [6, 6], 1., 0), line('Ours', ours, flops),
        *(line(m, *of) for m, of in others.items())])

def compared(rows, cost='paper_flops', ours=OURS, other=STEER):
    means = means_of(rows, 20, cost=cost)
    return compare(means, at_point(means, {}, 'accuracy'), ours, other)

@pytest.mark.parametrize('ours, flops, equal', [
    ([.75, .75], [2, 2], 2/5), # at .75 STEER costs 5
    ([.5, .5], [4, 4], 1.),    # a point of STEER's own
    ([1, 1], [8, 8], 8/6),     # no dearer point helps it
    ([0, 0], [1, 1], 1.)])
def test_comparisons_by_hand(ours, flops, equal):
    got = compared(two(ours, flops))
    for k in ('', '_low', '_high'): # both problems are the same: every resample is
        assert np.isclose(got[f'cost_ratio{k}'], flops[0]/4) and np.isclose(got[f'equal_ratio{k}'], equal)
        assert np.isclose(got[f'accuracy_difference{k}'], ours[0] - .5)
    assert got['n'] == 2 and got['p_cost'] == float(flops[0] == 4), 'no doubt, or no difference'

def test_comparisons_are_paired():
    "Ours costs half of STEER on every problem, however much problems differ: the ratio is known exactly."
    r = np.random.default_rng(0)
    flops, right = np.exp(r.normal(0, 2, 50)), (r.random(50) < .7).astype(int)
    of = lambda m, c, f: frame(c, [1]*50, 1e6*f, method=m)
    got = compared(pd.concat([of('Small only', [0]*50, .01*flops), of('Large only', [1]*50, 9*flops),
                              of('STEER (rest)', right, flops), of('Ours', right, .5*flops)]))
    assert np.isclose(got['cost_ratio_low'], .5) and np.isclose(got['cost_ratio_high'], .5)
    assert got['accuracy_difference_low'] == got['accuracy_difference_high'] == 0

def test_an_accuracy_out_of_reach():
    rows = two([1, 1], [3, 3])
    rows.loc[rows['method'].isin(['Large only', 'STEER (rest)']) & (rows['correct'] == 1), 'correct'] = .9
    assert np.isclose(compared(rows)['equal_ratio'], .5), 'its most accurate spot stands in'
    with pytest.raises(ValueError, match=r'no rows of Ours \(full\)'): compared(rows, ours=('Ours (full)', 'append'))
    with pytest.raises(ValueError, match=r'no rows of STEER \(next\)'): compared(rows, other=('STEER (next)', 'append'))

def test_nothing_for_nothing_is_a_tie_and_something_for_nothing_is_not():
    rows = two([0, 0], [1, 1])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: 0., 6e6: .5})
    got = compared(rows, cost='cents')
    assert (got['cost_ratio'], got['equal_ratio'], got['p_cost']) == (1, 1, 1)
    rows.loc[rows['method'] == 'Ours', 'cents'] = .3
    got = compared(rows, cost='cents')
    assert got['cost_ratio'] == got['cost_ratio_low'] == np.inf and got['p_cost'] == 0

def test_p_values_are_uniform_where_nothing_differs():
    r, W = np.random.default_rng(0), resamples(80, 300)
    p = np.array([p_value(W @ r.normal(0, 1, 80)/80) for _ in range(400)])
    assert .02 <= (p < .05).mean() <= .09 and .4 <= (p < .5).mean() <= .6
    assert np.isclose(p_value(np.r_[1.96, norm.ppf(np.linspace(1e-6, 1 - 1e-6, 10**5))]), .05, atol=1e-3)

@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(.001, .999))
@settings(max_examples=200, deadline=None)
def test_holm_rejects_step_by_step(p, level):
    "By its definition: go up from the smallest, stop at the first above level/(tests left)."
    rejected, left = set(), len(p)
    for i in np.argsort(p, kind='stable'):
        if p[i]*left > level: break
        rejected.add(i)
        left -= 1
    got = holm(p)
    assert {i for i, x in enumerate(got) if x <= level} == rejected and (got >= p).all() and (got <= 1).all()

def many(n=100, **costs):
    "Rows of methods with these costs and a right answer in nine of ten, noise in both."
    r = np.random.default_rng(0)
    def of(m, cost, right): return frame(right, [1]*n, 1e6*cost*r.uniform(.8, 1.2, n), method=m)
    rows = [of('Small only', 1, r.random(n) < .6), of('Large only', 10, np.ones(n))]
    return pd.concat(rows + [of(m, cost, r.random(n) < .9) for m, cost in costs.items()])

def test_comparisons_are_corrected_for_all_of_them():
    r = settled(many(**{'Ours': 4, 'Ours (nested)': 3, 'STEER (rest)': 5, 'RSD': 3.02, 'short': 1}), n_boot=500)
    pairs = comparisons(r)
    assert pairs[['ours', 'other']].values.tolist() == [
        ['Ours', 'RSD'], ['Ours', 'STEER (rest)'], ['Ours (nested)', 'RSD'], ['Ours (nested)', 'STEER (rest)']]
    raw = [compare(p.means, p.at_points['accuracy'], (o, 'append'), (m, 'append')) for p in r.parts.values()
           for o, m in pairs[['ours', 'other']].values]
    assert np.allclose(pairs['p_cost'], holm([row['p_cost'] for row in raw])) and pairs['counted'].all()
    assert pairs['cheaper'].tolist() == [False, True, False, True]
    md = comparison_markdown(pairs)
    assert ', 4 cost tests' in md and md.count('**0.') == pairs['win'].sum()
    assert '- against STEER (rest): 2 comparisons; ours wins ' in md

def pair(other, ratio, p, low, alone=False):
    return dict(benchmark='toy', ours='Ours', on_escalate='append', other=other, other_on_escalate='append', n=9,
                ours_alone=False, large_alone=alone, p_cost=p, accuracy_difference_low=low, accuracy_difference_high=.1,
                accuracy_difference=low,
                **{f'{k}{e}': ratio for k in ('cost_ratio', 'equal_ratio') for e in ('', '_low', '_high')})

def test_a_win_is_cheaper_and_keeps_the_accuracy():
    "An interval that reaches below -alpha is no proof that the accuracy is kept, however wide it is."
    rows = [pair('a', .5, 0, -.02), pair('b', .5, 0, -.021), pair('c', .5, .2, .01), pair('d', 1.5, 0, .01)]
    got = judged(pd.DataFrame(rows), .02)
    assert got['win'].tolist() == [True, False, False, False] and got['keeps'].tolist() == [True, False, True, True]
    assert got['cheaper'].tolist() == [True, True, False, False] and got['dearer'].tolist() == [False]*3 + [True]

def test_the_large_model_is_counted_once_however_many_it_stands_in_for():
    rows = [pair('a', .5, .015, 0, alone=True), pair('b', .6, .03, 0), pair('c', .5, .015, 0, alone=True)]
    got = judged(pd.DataFrame(rows), .02).assign(target='accuracy')
    assert got['counted'].tolist() == [True, True, False]
    assert np.allclose(got['p_cost'], [.03, .03, .03]), 'two tests, not three'
    md = comparison_markdown(got)
    assert 'Large alone (a; c)' in md and 'against the large model alone: 1 comparisons; ours wins 1' in md
    assert ', 2 cost tests' in md

def test_no_comparisons_without_ours(): assert comparisons(settled(many(**{'STEER (rest)': 5}))).empty

# ---- claims ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def claims():
    "The names of nbs/claims.ipynb, without the metrics of sweeps, which need an outcome table."
    notebook = run_claims_notebook()
    notebook.metrics = lambda part: pd.DataFrame()
    return notebook

def facts_of(claims, rows): return claims.collect_facts(dict(open=settled(rows, n_boot=300)))

def test_verdicts_follow_the_results(claims):
    "The same claim holds, does not hold, or cannot be tested, as planted costs say."
    rows = {'SpecReason (greedy)': 8, 'STEER (rest)': 6, 'Ours': 9, 'Ours (nested)': 3}
    as_right = many(**rows).assign(benchmark='micro-gsm')
    as_right.loc[as_right['method'] != 'Small only', 'correct'] = 1  # so every method keeps the accuracy
    facts = facts_of(claims, as_right)
    check = claims.against(['STEER', 'SpecReason'])
    assert [claims.verdict(check, facts[k])[1] for k in ('ours', 'best')] == ['does not hold', 'holds']
    assert claims.verdict(check, facts['ours'])[0].count('✗') == 2
    assert '✗' not in claims.verdict(check, facts['best'])[0]
    against, alone = claims.against, claims.alone
    for nothing in (against(['RSD']), alone(bool, word='omni'), against(['STEER'], setting='api'), None):
        assert claims.verdict(nothing, facts['ours']) == ('', 'cannot be tested here')

def test_every_claim_is_tested_or_says_why_not(claims):
    rows = many(**{'STEER (rest)': 6, 'Ours': 4, 'Ours (nested)': 3, 'Ours (online kappa)': 4})
    table = claims.claims_table(facts_of(claims, rows.assign(benchmark='micro-gsm')))
    assert len(table) == len(claims.CLAIMS) and table['claim'].is_unique and (table['rule'].str.len() > 5).all()
    by = table.set_index('claim')['verdict']
    assert by['recovers the large model\'s reasoning ability at materially lower cost'] == 'does not hold' # .9 of 1
    errata = table[table['source'].str.startswith('Erratum') & (table['source'] != 'Erratum, eq. 5')]
    assert len(errata) == 3 and (errata['verdict'] == 'does not hold').all(), 'they need no run'
    method = table[table['about'] == 'method']
    text = claims.claims_markdown(table, .02)
    assert f'Verdicts on {len(method)} claims about the method: ' in text and len(table) - len(method) == 6
    assert text.count('- verdict: **') == 6, 'claims about no row of ours have one verdict'

def test_the_sign_of_kappas_update(claims):
    "Misses rise with kappa, as fewer chains escalate: a kappa that rises after a miss runs away."
    rows = [many(**{'Ours': 4})]
    for i, (cost, right) in enumerate(((2, .6), (9, 1.)), 1):
        sweep = many(**{'Ours': cost}).query('method == "Ours"').assign(threshold=float(i), chosen=0)
        rows.append(sweep.assign(correct=(np.random.default_rng(i).random(len(sweep)) < right).astype(int)))
    facts = facts_of(claims, pd.concat(rows).assign(benchmark='micro-gsm'))
    check, = (check for _, source, _, _, check in claims.CLAIMS if source == 'Erratum, eq. 5')
    numbers, said = claims.verdict(check, facts['ours'])
    assert said == 'does not hold' and numbers.startswith('micro-gsm: 0.0 % at the least kappa, ')

def test_the_verdict_of_chapter_05_is_that_of_the_tables():
    "It is typed: costs of certain settings, and how many claims hold."
    text = next(c['source'] for c in notebook_cells(ROOT/'nbs'/'05_results.ipynb') if c['id'] == 'title')
    every = pd.read_csv(ROOT/'tables'/'certain.csv')
    certain = every[every['shown']]
    def costs(method, n):
        own = certain[certain['method'] == method].sort_values('benchmark')['cost_share']
        return ' / '.join(f'{100*cost:.1f}' for cost in own[:n])
    assert f'it costs {costs("Ours (nested)", 3)} % of the large model' in text
    assert f'is certain at {costs("Bare threshold (probability)", 2)} %' in text
    assert 'On micro-omni only rows of ours are certain below the cost of the large model' in text
    cheaper = every[(every['benchmark'] == 'micro-omni') & (every['cost_share'] < .9999)]
    assert len(cheaper) and cheaper['method'].str.startswith('Ours').all()
    lost = certain[certain['method'] == 'Ours (nested)']['accuracy_vs_large']
    assert f'no certain setting of our best row loses more than {-100*lost.min():.1f} points' in text
    table = pd.read_csv(ROOT/'tables'/'claims.csv').query('about == "method"')
    ours, best = table['verdict'].value_counts(), table['best_verdict'].value_counts()
    tested = len(table) - ours['cannot be tested here']
    turned = f'We turned {len(table)} sentences of the paper about its method into [claims](../tables/claims.md). '
    assert f'{turned}{tested} of them' in text
    assert f'{ours["holds"]} hold for *Ours*, {ours["does not hold"]} are not confirmed' in text
    assert f'{best["holds"]} claims hold for it' in text

# ---- ablations ------------------------------------------------------------------------------------------------------
def test_ablations_show_intervals_and_seeds(with_ours):
    md = ablation_markdown(with_ours.whole(ablation_table))
    assert '| toy | Ours (full), regenerate | 60 | 1 | ' in md and '| toy | short | ' in md
    assert md.count('–') == 2*3

# ---- transcripts -----------------------------------------------------------------------------------------------------
HOSTILE = '</p><script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{7*7}}{% raw %}'

def tags(html):
    "The tags of a page, and the attributes that run or load something."
    class Page(HTMLParser):
        names, bad = set(), []
        def handle_starttag(self, tag, attributes):
            self.names.add(tag)
            self.bad += [k for k, _ in attributes if k != 'style']
    page = Page()
    page.feed(html)
    return page.names, page.bad

def test_what_models_and_askers_write_stays_text_in_a_notebook():
    "Questions, steps, answers and names of models are shown as they are and never become part of the page."
    routed = Routed(HOSTILE, HOSTILE, (HOSTILE, HOSTILE), '01', (HOSTILE, 'b'), (1, 1), .5, 'cents')
    transcript = Transcript(HOSTILE, [Line('small', HOSTILE, HOSTILE, True)], HOSTILE)
    for page, places in ((routed, 5), (transcript, 4)):
        html = page._repr_html_()
        assert tags(html) == ({'div', 'p', 'b', 's', 'small', 'br'} & tags(html)[0], [])
        assert unescape(html).count(HOSTILE) == places and '49' not in html
        assert 'small' in html

def test_a_routed_answer_says_who_wrote_what_and_what_it_cost():
    html = Routed('2+2?', None, ('one', 'two'), '01', ('tiny', 'huge'), (3, 4), 2.5e9, 'paper_flops')._repr_html_()
    assert re.findall(r'<b>(small|large)</b> <small>(\w+)</small>', html) == [('small', 'tiny'), ('large', 'huge')]
    assert 'Answer: None; 2.5e+09 FLOPs' in html

FORGED = 'a\x1b]0;title\x07\x1b[2J\rb\nlarge  2 + 2 = 5\x9b31m\u202e'

def test_what_models_write_stays_in_its_lines_on_a_terminal():
    "No escape code of theirs arrives, and no line of theirs can pass for one of ours."
    transcript = Transcript(FORGED, [Line('small', FORGED, FORGED, True), Line('large', 'ours', '', False)], FORGED)
    for text in (str(transcript), re.sub(r'\x1b\[[\d;]*m', '', transcript.coloured())):
        assert all(line.isprintable() for line in text.split('\n'))
        assert [line.split()[:2] for line in text.split('\n') if line.startswith('large')] == [['large', 'ours']]
