"Comparisons by hand, and pages on which what models write stays text."
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from toy_runs import frame, line, means_of, settled

from stepwise_routing.method.results import at_point
from stepwise_routing.report.comparison import compare, comparison_markdown, comparisons, judged
from stepwise_routing.report.routed import Routed
from stepwise_routing.report.transcripts import Line, Transcript

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
    return compare(at_point(means, {}, 'accuracy'), ours, other)

@pytest.mark.parametrize('ours, flops', [([.75, .75], [2, 2]), ([.5, .5], [4, 4]), ([1, 1], [8, 8]), ([0, 0], [1, 1])])
def test_comparisons_by_hand(ours, flops):
    got = compared(two(ours, flops))
    for k in ('', '_low', '_high'): # both problems are the same: every resample is
        assert np.isclose(got[f'cost_ratio{k}'], flops[0]/4)
        assert np.isclose(got[f'accuracy_difference{k}'], ours[0] - .5)
    assert got['n'] == 2
    with pytest.raises(ValueError, match=r'no rows of Ours \(full\)'):
        compared(two(ours, flops), ours=('Ours (full)', 'append'))

def test_comparisons_are_paired():
    "Ours costs half of STEER on every problem, however much problems differ: the ratio is known exactly."
    r = np.random.default_rng(0)
    flops, right = np.exp(r.normal(0, 2, 50)), (r.random(50) < .7).astype(int)
    of = lambda m, c, f: frame(c, [1]*50, 1e6*f, method=m)
    got = compared(pd.concat([of('Small only', [0]*50, .01*flops), of('Large only', [1]*50, 9*flops),
                              of('STEER (rest)', right, flops), of('Ours', right, .5*flops)]))
    assert np.isclose(got['cost_ratio_low'], .5) and np.isclose(got['cost_ratio_high'], .5)
    assert got['accuracy_difference_low'] == got['accuracy_difference_high'] == 0

def test_nothing_for_nothing_is_a_tie_and_something_for_nothing_is_not():
    rows = two([0, 0], [1, 1])
    rows['cents'] = rows['paper_flops'].map({1e6: 0., 10e6: .9, 4e6: 0., 6e6: .5})
    got = compared(rows, cost='cents')
    assert got['cost_ratio'] == 1
    rows.loc[rows['method'] == 'Ours', 'cents'] = .3
    got = compared(rows, cost='cents')
    assert got['cost_ratio'] == got['cost_ratio_low'] == np.inf

def many(n=100, **costs):
    "Rows of methods with these costs and a right answer in nine of ten, noise in both."
    r = np.random.default_rng(0)
    def of(m, cost, right): return frame(right, [1]*n, 1e6*cost*r.uniform(.8, 1.2, n), method=m)
    rows = [of('Small only', 1, r.random(n) < .6), of('Large only', 10, np.ones(n))]
    return pd.concat(rows + [of(m, cost, r.random(n) < .9) for m, cost in costs.items()])

def test_ours_is_compared_with_each_family():
    r = settled(many(**{'Ours': 4, 'Ours (nested)': 3, 'STEER (rest)': 5, 'RSD': 3.02, 'short': 1}), n_boot=500)
    pairs = comparisons(r)
    assert pairs[['ours', 'other']].values.tolist() == [
        ['Ours', 'RSD'], ['Ours', 'STEER (rest)'], ['Ours (nested)', 'RSD'], ['Ours (nested)', 'STEER (rest)']]
    assert pairs['cheaper'].tolist() == [False, True, False, True] and pairs['counted'].all()
    md = comparison_markdown(pairs)
    assert ', 4 comparisons' in md and md.count('**0.') == pairs['win'].sum()
    assert '- against STEER (rest): 2 comparisons; ours wins ' in md

def pair(other, ratio, spread, low, alone=False):
    return dict(benchmark='toy', ours='Ours', on_escalate='append', other=other, other_on_escalate='append', n=9,
                ours_alone=False, large_alone=alone, accuracy_difference_low=low, accuracy_difference_high=.1,
                accuracy_difference=low, cost_ratio=ratio, cost_ratio_low=ratio - spread, cost_ratio_high=ratio + spread)

def test_a_win_is_cheaper_and_keeps_the_accuracy():
    "An interval that reaches below -alpha is no proof that the accuracy is kept, however wide it is."
    rows = [pair('a', .5, .1, -.02), pair('b', .5, .1, -.021), pair('c', .5, .6, .01), pair('d', 1.5, .1, .01)]
    got = judged(pd.DataFrame(rows), .02)
    assert got['win'].tolist() == [True, False, False, False] and got['keeps'].tolist() == [True, False, True, True]
    assert got['cheaper'].tolist() == [True, True, False, False] and got['dearer'].tolist() == [False]*3 + [True]

def test_the_large_model_is_counted_once_however_many_it_stands_in_for():
    rows = [pair('a', .5, .1, 0, alone=True), pair('b', .6, .1, 0), pair('c', .5, .1, 0, alone=True)]
    got = judged(pd.DataFrame(rows), .02).assign(target='accuracy')
    assert got['counted'].tolist() == [True, True, False]
    md = comparison_markdown(got)
    assert 'Large alone (a; c)' in md and 'against the large model alone: 1 comparisons; ours wins 1' in md

def test_no_comparisons_without_ours(): assert comparisons(settled(many(**{'STEER (rest)': 5}))).empty

# ---- pages
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
