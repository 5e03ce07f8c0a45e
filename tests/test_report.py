"Tables, figures and transcripts: cells by hand, captions that stand alone, and nothing that models write is obeyed."

import itertools
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from toy import quick_methods, toy_benchmark

from stepwise_routing.gain import gain_frame
from stepwise_routing.method.policy import fresh_router
from stepwise_routing.method.results import CHOSEN, compare
from stepwise_routing.records import Problem, Step
from stepwise_routing.report import figures, tables, transcripts

NAMES = (*tables.MODELS, 'SpecReason', 'RSD', 'Min-prob threshold', 'Random problem')
LOGS = dict(toy=[(1.0, 0.2, 0.25), (0.6, 0.03, 0.24), (0.5, 0.02, 0.24)])


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    "Results (SpecReason: the large model alone; ours: a threshold), gains, and a folder of what is written."
    benchmarks = dict(toy=toy_benchmark(60), other=toy_benchmark(60, 7))
    methods = [method for method in quick_methods() if method.name in NAMES]
    found = compare(benchmarks, methods, n_boot=9, processes=1)
    for unit, name in itertools.product(('flops', 'cents'), benchmarks):
        large, walks = (found[unit, name, method] for method in ('Large only', 'SpecReason'))
        found[unit, name, 'SpecReason'] = walks._replace(choices=large.choices)
        for ours in (*tables.POLICIES, CHOSEN):
            found[unit, name, ours] = found[unit, name, 'RSD']
    gain, folder = gain_frame(benchmarks), tmp_path_factory.mktemp('report')
    notes = ['A note.', 'Drawn on a day.']
    tables.write_tables(found, gain, folder, notes)
    figures.write_figures(found, gain, LOGS, folder, notes)
    return found, gain, folder


# ---- tables and figures
def test_captions_stand_alone_and_letters_in_figures_can_be_searched(report):
    folder = report[2]
    pages = [*folder.glob('*[!s].md'), folder / 'methods.md']
    assert len(pages) == 5
    for page in pages:
        assert re.match(r'\*\*.* A note\. Drawn on a day\.\n\n', page.read_text('utf-8'))
    captions = (folder / 'captions.md').read_text('utf-8').strip().split('\n\n')
    drawn = [caption.split('**')[1].strip('.') for caption in captions[:-1]]
    assert drawn == ['accuracy_cost', 'accuracy_cents', 'training', 'gain']
    assert captions[-1] == '**All figures.** A note. Drawn on a day.'
    assert re.search(r'and cheaper\. These are .*SpecReason \(toy, other\)', captions[0])
    for name in drawn:
        pdf = (folder / f'{name}.pdf').read_bytes()
        assert b'CreationDate' not in pdf and b'/FontFile2' in pdf and b'/Type3' not in pdf


def by_hand(unit, *lines):
    names = ['benchmark', 'method', 'accuracy', 'cost', 'large_alone']
    table = pd.DataFrame(lines, columns=names).assign(unit=unit)
    return table.assign(per_cost=table['accuracy'] / table['cost'].replace(0, np.nan))


FLOPS = by_hand(
    'flops',
    ('toy', 'Large only', 90.0, 2e8, False),
    ('toy', 'SpecReason', 90.0, 2e8, True),
    ('toy', 'RSD', 87.0, 5e7, False),
    ('toy', 'Ours (S^os)', 81.04, 1e8, False),
    ('gsm8k', 'Large only', 50.0, 3e12, False),
)


def test_cells_by_hand():
    text = tables.markdown(tables.paper_grid(FLOPS, 1))
    head, _, *lines = [line.strip('| \n').split(' | ') for line in text.splitlines()]
    assert head[:3] == ['Ext.', 'toy Acc ↑', 'toy FLOPs ↓']
    assert lines == [
        ['Large only', '–', '90.0', '200', '0.450', '50.0', '3.00', '16.7'],
        ['SpecReason', '✗', '90.0 §', '200', '0.450', '–', '–', '–'],
        ['RSD', '✓', '87.0', '50.0', '1.74', '–', '–', '–'],
        ['Ours (S^os) †', '✗', '81.0', '100', '0.810', '–', '–', '–'],
    ]
    assert tables.losses(FLOPS[:4]) == '9.0 on toy'
    large, small = ('toy', 'Large only', 90.0, 0.0293, False), ('toy', 'Small only', 80.0, 0, False)
    cents = tables.paper_grid(by_hand('cents', large, small), 2)['toy']
    assert cents.values.tolist() == [['90.0', '0.0293', '30.7'], ['80.0', '0.00', '–']]


def test_latex_has_formulas_and_no_bare_characters():
    text = tables.latex(tables.paper_grid(FLOPS, 1))
    assert r'Ours ($S^{\mathrm{os}}$) $^\dagger$ & $\times$ & 81.0' in text
    assert r'\multicolumn{3}{c}{gsm8k}' in text
    assert text.count('{') == text.count('}')
    assert not re.search('[–✓✗↑↓†§]', text)
    assert tables.tex('50 % of a_b & $5') == r'50 \% of a\_b \& \$5'


@pytest.mark.parametrize('number, factor, misprints', [(1, 1, []), (2, 100, [('RSD', 'OmniMath')])])
def test_the_papers_accuracy_per_cost_follows_from_its_columns(number, factor, misprints):
    "Table 1 is in percent, Table 2 a share."
    table = tables.paper_table(number)
    paid = table[table['cost'] > 0]
    off = paid['accuracy'] / factor / paid['cost'] / paid['per_cost'] - 1
    odd = paid[off.abs() >= 0.02]
    assert len(table) == 18
    assert [*zip(odd['method'], odd['benchmark'])] == misprints


def test_ours_stands_beside_the_paper(report):
    table = tables.beside_paper(report[0], 1)
    assert table.index.tolist() == [*tables.PRINTED]
    assert table.loc['Ours (S^os)', ('paper', 'GSM8K')] == '46 (-0.1)'
    assert table.loc['SpecReason', ('here', 'toy')] == '100 (+0.0)'
    assert table.loc[CHOSEN, ('paper', 'GSM8K')] == '–'


def test_figures_have_the_size_and_letters_of_a_page(report):
    results, gain, _ = report
    features = toy_benchmark(30)['train'].features
    policy = fresh_router(features, ('min_prob', 'step'), 2, (4,), 0)
    for columns, width in {1: 2.7, 2: 5.5}.items():
        look = dict(rule='guaranteed', columns=columns, log=True)
        cost = figures.accuracy_cost(results, 'cents', **look)
        others = figures.gain_figure(gain, columns), figures.training_curves(LOGS, columns=columns)
        for fig in (cost, *others):
            letters = [text.get_fontsize() for text in fig.findobj(Text) if text.get_text()]
            assert fig.get_figwidth() == width and min(letters) >= 6.5
        assert len(cost.legends[0].get_texts()) == len(figures.SHOWN) + 2  # all but STEER
    assert figures.policy_map(policy, 0.1).get_figwidth() == 2.7


# ---- transcripts
HOSTILE = '</p><script>alert(1)</script><img src=x onerror="alert(2)"> pays $5 and then $10 \\(x\\)\nlarge  2 = 3\x1b[2J\x9b31m\u202e'


def test_a_transcript_says_who_wrote_what_and_obeys_nobody():
    texts = [(HOSTILE, 0, 'step'), ('5+5=12', 0, 'step'), ('ours', 1, 'stop')]
    steps = [Step(*text, generated=2) for text in texts]
    problem, doubts = Problem('toy', 'a', HOSTILE, '1'), [0.1, 0.7, np.nan]
    names = 'small', 'large'
    shown = transcripts.transcript(problem, steps, names, doubts, 0.5, thrown=(1,), end='right')
    for text in (str(shown), re.sub(r'\x1b\[\d+m', '', shown.coloured())):
        lines = text.split('\n')
        assert all(line.isprintable() for line in lines)
        assert [line.split()[1] for line in lines if line.startswith('large')] == ['ours']
        assert '2 tokens, doubt 0.10, below 0.50' in text and 'doubt 0.70: hands over' in text
        assert '5+5=12 (thrown away)' in text and lines[-1] == 'right'
    page = shown._repr_html_()
    assert {*re.findall(r'<(\w+)', page)} == {'div', 'p', 'b', 'small', 's', 'br', 'span'}
    assert '<s>5+5=12</s>' in page and '<script>' in unescape(page)
    assert page.count('<span>$</span>5') == 2 and page.count('$') == page.count('<span>$</span>')
