"Tables, figures and transcripts of toy results: cells by hand, the same bytes twice, sizes, nothing that models write is obeyed."

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from toy import toy_benchmark

from stepwise_routing.method.policy import RULES, fresh_router
from stepwise_routing.method.results import CHOSEN, Choice, Row
from stepwise_routing.records import Problem, Step
from stepwise_routing.report import figures, tables
from stepwise_routing.report.style import our_look
from stepwise_routing.report.transcripts import transcript

NAMES = (*tables.PRINTED, 'Random problem', 'Oracle')
LARGE_COST = dict(flops=2e8, cents=0.0293)


def toy_row(name, unit, i):
    "Method number i costs 1 / i of the large model and has 90 - i % right; SpecReason is the large model alone."
    is_alone = name in ('Large only', 'SpecReason')
    share = 1 if is_alone else 0 if (name, unit) == ('Small only', 'cents') else 1 / (i + 1)
    accuracy, n = 0.9 if is_alone else 0.9 - i / 100, 1 if name in tables.MODELS else 2
    spread = np.r_[1, np.linspace(0.9, 1.1, 40)]
    choice = Choice(
        accuracy * spread,
        LARGE_COST[unit] * share * spread,
        share * spread,
        [(None if is_alone else 0.5, accuracy, LARGE_COST[unit] * share)] * n,
    )
    points = np.linspace([LARGE_COST[unit], 0.9], [0.2 * LARGE_COST[unit], 0.5], 40)
    if name in (*tables.MODELS, 'Oracle'):
        points = np.tile(points[:1], (40, 1))
    return Row(dict.fromkeys(RULES[:2], choice), None if name == CHOSEN else points)


@pytest.fixture(scope='module')
def results():
    "Two benchmarks; the second one has no SpecReason."
    return {
        (unit, benchmark, name): toy_row(name, unit, i)
        for unit in LARGE_COST
        for benchmark in ('toy', 'gsm8k')
        for i, name in enumerate(NAMES)
        if (benchmark, name) != ('gsm8k', 'SpecReason')
    }


@pytest.fixture(scope='module')
def gain():
    line = dict(benchmark='toy', problems=1500, wrong=0.151, gain=0.144)
    for name in (
        'wrong by min-prob',
        'wrong by S^os',
        'gain by min-prob',
        'gain by S^os',
        'gain learnt',
    ):
        line |= {name: 0.9, f'{name}, low': 0.85, f'{name}, high': 0.95}
    return pd.DataFrame([line])


LOGS = dict(toy=[(1.0, 0.2, 0.25), (0.6, 0.03, 0.24), (0.5, 0.02, 0.24)])
NOTES = ['A note.', 'Drawn on a day with seed 4.']


def written(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- tables and figures
def test_the_same_results_give_the_same_bytes(results, gain, tmp_path):
    for name in 'ab':
        tables.write_tables(results, gain, tmp_path / name / 'tables', NOTES)
        figures.write_figures(results, gain, LOGS, tmp_path / name / 'figures', NOTES)
    for kind in ('tables', 'figures'):
        assert written(tmp_path / 'a' / kind) == written(tmp_path / 'b' / kind)
    stems = (
        [stem for stem in ('table1', 'table2') for _ in range(3)]
        + ['methods', 'comparison', 'gain'] * 2
        + ['curves', 'seeds']
    )
    assert sorted(name.split('.')[0] for name in written(tmp_path / 'a' / 'tables')) == sorted(
        stems
    )
    drawn = written(tmp_path / 'a' / 'figures')
    stems = 'accuracy_cost', 'accuracy_cents', 'training', 'gain'
    assert set(drawn) == {f'{stem}.{kind}' for stem in stems for kind in ('pdf', 'png')} | {
        'captions.md'
    }
    for pdf in (drawn[f'{stem}.pdf'] for stem in stems):  # letters that can be searched, no date
        assert b'CreationDate' not in pdf and b'/FontFile2' in pdf and b'/Type3' not in pdf
    captions = drawn['captions.md'].decode().strip().split('\n\n')
    assert [c.split('**')[1] for c in captions] == [*(f'{stem}.' for stem in stems), 'All figures.']
    assert captions[-1].endswith('A note. Drawn on a day with seed 4.')
    assert (
        'no threshold was both good enough and cheaper. These are SpecReason (toy).' in captions[0]
    )
    for page in (tmp_path / 'a' / 'tables').glob('*.md'):
        assert re.match(r'\*\*.* A note. Drawn on a day', page.read_text('utf-8'))


def test_cells_by_hand(results):
    table = tables.paper_form(results, 1)
    text = tables.markdown(tables.paper_grid(table, 1))
    rows = {
        line.split(' | ')[0].strip('| '): line.strip('| \n').split(' | ')[1:]
        for line in text.splitlines()
    }
    assert rows['Large only'] == ['–', '90.0', '200', '0.450', '90.0', '200', '0.450']
    assert rows['SpecReason'] == ['✗', '90.0 §', '200', '0.450', '–', '–', '–']
    assert (
        rows['RSD'][:4] == ['✓', '87.0', '50.0', '1.74']
        and 'Ours (S^os) †' in rows
        and 'Oracle' not in rows
    )
    assert table.loc[
        (table['method'] == 'RSD') & (table['benchmark'] == 'toy'), 'per_cost'
    ].item() == pytest.approx(87 / 5e7)
    cents = tables.paper_grid(tables.paper_form(results, 2), 2)
    assert (
        cents.loc['Small only', 'toy'].tolist() == ['90.0', '0.00', '–']
        and 'Ours (S^API) †' in cents.index
    )
    assert cents.loc['Large only', 'toy'].tolist() == ['90.0', '0.0293', '30.7']
    assert tables.losses(table) == '9.0 on toy, 9.0 on gsm8k'
    verdicts = tables.comparison_form(results)  # need the whole interval
    assert (verdicts['verdict'] == 'costlier').equals(verdicts['ratio_low'] > 1)
    assert (verdicts['verdict'] == 'cheaper').equals(verdicts['ratio_high'] < 1) and (
        verdicts['ratio_high'] < 1
    ).any()
    numbers = 131.4, 61.42, 0.0205, 1234.0, 0.0, np.nan, np.inf
    assert [*map(tables.digits, numbers)] == ['131', '61.4', '0.0205', '1234', '0.00', '–', '–']
    assert tables.rounded(1, '+')(0.26) == '+0.3' and tables.rounded(2)(1e290) == '–'


def test_latex_has_formulas_and_no_bare_characters(results):
    text = tables.latex(tables.paper_grid(tables.paper_form(results, 1), 1))
    assert (
        r'Ours ($S^{\mathrm{os}}$) $^\dagger$ & $\times$ & 85.0' in text
        and r'\multicolumn{3}{c}{gsm8k}' in text
    )
    assert re.search(r'Large only[^\n]*\\\\\n\\midrule\nSpecReason', text) and text.count(
        '{'
    ) == text.count('}')
    assert tables.tex('50 % of a_b & $5') == r'50 \% of a\_b \& \$5' and not re.search(
        '[–✓✗↑↓†§]', text
    )


@pytest.mark.parametrize('number, factor', [(1, 1), (2, 100)])
def test_the_papers_accuracy_per_cost_follows_from_its_columns(number, factor):
    "Every printed A/C but the one misprint; Table 1 is in percent, Table 2 a share."
    table = tables.paper_table(number)
    paid = table[table['cost'] > 0]
    odd = paid[
        (paid['accuracy'] / factor / paid['cost'] - paid['per_cost']).abs()
        >= 0.02 * paid['per_cost']
    ]
    assert len(table) == 18 and len(paid) == (18 if number == 1 else 15)
    assert odd[['method', 'benchmark']].values.tolist() == (
        [['RSD', 'OmniMath']] if number == 2 else []
    )


def test_ours_stands_beside_the_paper(results):
    table = tables.beside_paper(results, 1)
    assert (
        table.loc['Ours (S^os)', ('paper', 'GSM8K')] == '46 (-0.1)'
        and table.loc['RSD', ('here', 'toy')] == '25 (-3.0)'
    )
    assert table.loc[CHOSEN, ('paper', 'GSM8K')] == '–' and table.index.tolist() == list(
        tables.PRINTED
    )


def test_captions_say_whose_models_these_are_and_what_was_cut():
    def benchmark(model):
        parts = dict(models=np.array([model, 'l']), dollars=np.array([[0, 0, 0], [0.4, 0.1, 1.6]]))
        return {
            name: replace(table, **parts)
            for name, table in toy_benchmark(1000).items()
            if isinstance(name, str)
        }

    one = benchmark('s')
    said = tables.describe(dict(a=one, b=one), 0.02, 'Receipt.')
    assert (
        said[0] == 'a, b: s and l, 1,000 / 1,000 / 1,000 training, calibration and test problems.'
    )
    assert (
        "not the paper's models" in said[1]
        and '0.4 / 0.1 / 1.6' in said[2]
        and 'Alpha: 2 points' in said[3]
    )
    assert (
        f'a limit cut {one["test"].cut[:, 0].sum()} of s alone' in said[4]
        and said[-1] == 'Receipt.'
    )
    assert not any(
        'not the paper' in s for s in tables.describe(dict(a=benchmark('Qwen2.5-Math-1.5B')), 0.02)
    )


@pytest.mark.parametrize('columns, width', [(1, 2.7), (2, 5.5)])
@pytest.mark.parametrize('log', [False, True])
def test_figures_have_their_size_and_no_text_overlaps(results, gain, columns, width, log):
    drawn = [
        figures.accuracy_cost(results, 'cents', columns=columns, log=log),
        figures.gain_figure(gain, columns),
        figures.training_curves(LOGS, columns=columns),
    ]
    for fig in drawn:
        with our_look():
            fig.draw_without_rendering()
        assert fig.get_figwidth() == width
        assert min(text.get_fontsize() for text in fig.findobj(Text) if text.get_text()) >= 6.5
        boxes = [text.get_window_extent() for text in fig.legends[0].get_texts()]
        lowest = min(ax.get_tightbbox().y0 for ax in fig.axes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(
            fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1 and box.y1 <= lowest for box in boxes
        )
        for ax in fig.axes:
            ticks = [tick.get_window_extent() for tick in ax.get_xticklabels() if tick.get_text()]
            assert not any(a.overlaps(b) for a, b in zip(ticks, ticks[1:]))
    assert len(drawn[0].legends[0].get_texts()) == 3 + len(figures.SHOWN)
    assert not log or len(drawn[0].axes[0].get_xticks()) > 3
    x = np.random.default_rng(0).random((30, 4))
    policy = fresh_router(
        dict(min_prob=x, step=x, length=x), ('min_prob', 'step', 'length'), 2, (4,), 0
    )
    assert figures.policy_map(policy, 0.1, length=0.5).get_figwidth() == 2.7


HOSTILE = '</p><script>alert(1)</script><img src=x onerror="alert(2)"> pays $5 and then $10 \\(x\\)\nlarge  2 = 3\x1b[2J\x9b31m\u202e'


def test_a_transcript_says_who_wrote_what_and_obeys_nobody():
    steps = [
        Step(HOSTILE, 0, 'step', generated=9),
        Step('5+5=12', 0, 'step', generated=4),
        Step('ours', 1, 'stop', generated=2),
    ]
    shown = transcript(
        Problem('toy', 'a', HOSTILE, '1'),
        steps,
        ['small', 'large'],
        [0.1, 0.7, np.nan],
        0.5,
        (1,),
        'right',
    )
    for text in (str(shown), re.sub(r'\x1b\[\d+m', '', shown.coloured())):
        assert all(line.isprintable() for line in text.split('\n'))
        assert [line.split()[1] for line in text.split('\n') if line.startswith('large')] == [
            'ours'
        ]
        assert (
            'doubt 0.10, below 0.50' in text
            and '5+5=12 (thrown away)' in text
            and 'doubt 0.70: hands over' in text
        )
        assert text.endswith('right') and '2 tokens' in text
    page = shown._repr_html_()
    assert (
        set(re.findall(r'<(\w+)', page)) == {'div', 'p', 'b', 'small', 's', 'br', 'span'}
        and '<s>5+5=12</s>' in page
    )
    assert page.count('<span>$</span>5') == 2 and page.count('$') == page.count('<span>$</span>')
    assert '<script>' in unescape(page)
