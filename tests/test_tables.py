"Tables and figures of a run: golden text, the same bytes twice, nothing that overlaps, what falls short."
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy_runs import (  # fixtures, too
    cents,
    evaluated,
    flops,
    frame,
    loaded,
    run,
    save_methods,
    toy_run,
    with_ours,
)

from stepwise_routing.data.grading import keep_given_up
from stepwise_routing.report.figures import draw_accuracy_cost, figure_caption, redraw
from stepwise_routing.report.paper_tables import (
    billed_as,
    paper_rows,
    paper_table,
    printed_results,
    read_paper_table,
    to_markdown,
    to_tex,
)
from stepwise_routing.report.points import (
    add_curve,
    drawn_methods,
    frontiers,
    read_points,
    seed_points,
    sweep_points,
)
from stepwise_routing.report.shortfalls import benchmark_shortfalls, shortfalls
from stepwise_routing.report.style import paper_style, save_figure
from stepwise_routing.report.tables import REPORTS, details, report, report_paper, summary
from stepwise_routing.report.writer import interval, save_table, tex
from stepwise_routing.run.publish import PUBLISHED
from stepwise_routing.run.stages import load_run

ROOT = Path(__file__).resolve().parents[1]

# ---- the paper's tables ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize('cost, factor', [('paper_flops', 1), ('cents', 100)])
def test_the_papers_accuracy_per_cost_follows_from_its_columns(cost, factor):
    "Every printed A/C but the one misprint; Table 1 is in percent, Table 2 a fraction."
    rows = paper_rows(cost)
    free = rows['ac_text'] == '--'
    assert len(rows) == 18 and (rows['cost'][free] == 0).all() and rows['ac'][free].isna().all()
    odd = rows[~free & ((rows['accuracy']/factor/rows['cost'] - rows['ac']).abs() >= .02*rows['ac'])]
    odd = odd[['method', 'benchmark', 'ac_text']].values.tolist()
    assert odd == ([['RSD', 'OmniMath', '1.52‡']] if cost == 'cents' else [])

GOLDEN = r"""\begin{tabular}{llrrr}
\toprule
\multicolumn{2}{c}{} & \multicolumn{3}{c}{b} \\
Method & Ext. & Acc$\uparrow$ & FLOPs$\downarrow$ & A/C$\uparrow$ \\
\midrule
Large only & -- & 75.0 & 4.00 & 18.8 \\
\midrule
STEER (rest), regenerate & $\times$ & 50.0 & 1.50 & 33.3 \\
\bottomrule
\end{tabular}}"""

def test_golden_tex():
    rows = pd.concat([
        frame([1, 0, 1, 0], [1, 1, 0, 1], [1e6, 1e6, 2e6, 2e6], .3, 'STEER (rest)').assign(on_escalate='regenerate'),
        frame([1, 1, 0, 1], [1, 1, 0, 1], [4e6]*4, method='Large only')])
    tex = to_tex(paper_table(evaluated(rows, 1), 'golden'))
    head, paper = tex.split(r'\noindent\emph{Table 1 of the paper')
    assert GOLDEN in head and '4 b test problems' in head
    assert r'Ours & $\times$ & \textbf{94.5} & 2.03 & 46.55 & \textbf{82.8} & \textbf{5.34} &' in paper
    assert r'RSD & $\checkmark$ & 94.4 & 2.27' in paper and tex.count('{') == tex.count('}')

@pytest.mark.parametrize('text', [*'\\{}$^~%_&#<>', r'\input{/etc/x}', 'a^{b}~$1$'])
def test_no_character_gets_through_to_latex(text):
    made = tex(text)
    made = re.sub(r'\\text(backslash|asciicircum|asciitilde)\{\}|\$[<>]\$', '', made)
    assert not re.search(r'(?<!\\)[{}$%_&#]|\\(?![{}$%_&#])|[\^~<>]', made)

@pytest.mark.parametrize('stem', ['table1', 'table2', 'recorded/table1'])
def test_a_table_is_made_again_from_its_csv_file(stem):
    table = read_paper_table(ROOT/'tables'/f'{stem}.csv')
    assert to_tex(table) == (ROOT/'tables'/f'{stem}.tex').read_text('utf-8')

def test_rows_and_captions_are_the_authors_choice():
    table = read_paper_table(ROOT/'tables'/'table1.csv')
    chosen = dict(rows=['Large only', 'Ours (nested)'], sources=['this run'], notes=False)
    text = to_tex(table, captions={'this run': 'Mine & yours'}, **chosen)
    assert text.count(r'\begin{tabular}') == text.count('Large only') == 1
    assert r'\emph{Mine \& yours}' in text and 'GSM8K' not in text and 'RSD' not in text
    with pytest.raises(ValueError, match="did you mean 'Ours'"): to_tex(table, rows=['Our'])

@pytest.mark.skipif(not shutil.which('pdflatex'), reason='no LaTeX here')
def test_tables_compile(tmp_path):
    "With the packages of the paper's preamble; nothing is wider than its 5.5 inches."
    names = [p.as_posix() for p in sorted((ROOT/'tables').glob('table*.tex'))]
    assert len(names) == 2
    (tmp_path/'odd.tex').write_text(tex(r'\ { } $ ^ ~ % _ & # < > † ‡ ∞ – ✗ ✓ ↑ ↓ 10^6 **x**'))
    body = '\n\n'.join(rf'\input{{{name}}}' for name in [*names, 'odd'])
    (tmp_path/'all.tex').write_text('\\documentclass{article}\n\\usepackage[textwidth=5.5in]{geometry}\n'
        '\\usepackage{booktabs,amsmath,amsfonts,graphicx}\n\\begin{document}\n' + body + '\n\\end{document}\n')
    done = subprocess.run(['pdflatex', '-interaction=nonstopmode', '-halt-on-error', 'all'], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and 'Overfull' not in done.stdout, done.stdout[-2000:]

def test_details_show_what_the_table_leaves_out(flops, cents):
    open_, priced = details(flops.results), details(cents.results)
    assert all(f'| {c} | ' in open_ for c in ('threshold', 'calibration_accuracy', 'excess', 'coverage', 'cost_share'))
    small, large = priced.splitlines()[2:4]
    assert ' | 0<br><sub>[0, 0]</sub> | ' in small and ' | – | – | ' in small
    assert ' | 1.00<br><sub>[1.00, 1.00]</sub> | ' in large
    assert 'nan' not in priced + open_

@pytest.mark.parametrize('x, text', [
    (0, '0'), (101.2, '101'), (99.96, '100'), (12.34, '12.3'), (9.996, '10.0'), (1.234, '1.23'), (.5, '0.500'),
    (.0293, '0.0293'), (.00934, '0.00934'), (.000123, '0.000123'),
    (-.0293, '-0.0293'), (np.nan, '–'), (np.inf, '∞')])
def test_three_digits(x, text): assert interval('x')(dict(x=x)) == text

def test_table_2_says_whose_prices_these_are(cents):
    made = paper_table(cents.results, 'toy', 'toy large')
    md = to_markdown(made)
    assert "toy large, billed at GPT-4.1-mini's prices" in md and '0<br><sub>[0, 0]</sub> | – |' in md
    assert '85.2†' in md and '\n† On GSM8K' in md and '\n‡ Printed so' in md
    caption = figure_caption(cents.results, facts=dict(profile='toy', billing=billed_as('toy large')))
    assert 'billed at' in caption and 'logarithmic' not in caption
    assert made['ac_percent'].iloc[1] == pytest.approx(100*made['ac'].iloc[1])
    assert billed_as('gpt-4.1-mini-2025-04-14') == 'gpt-4.1-mini at its published prices'

def test_tables_hold_this_run_and_the_paper_apart(flops):
    table = paper_table(flops.results, 'toy')
    assert table.loc[table['source'] == 'paper', 'accuracy_low'].isna().all()
    assert table.loc[table['source'] == 'this run', 'accuracy_low'].notna().all()
    mine, paper = to_markdown(table).split('**Table 1 of the paper')
    assert 'toy profile' in mine and 'GSM8K' not in mine and 'GSM8K' in paper and 'toy' not in paper

def test_table_1_prints_a_row_a_family_and_the_full_table_all(with_ours, run):
    def labels(text): return [l.split(' | ')[0][2:] for l in text.splitlines()[4:] if l.startswith('| ')]
    table = paper_table(printed_results(with_ours, with_ours.results), 'toy')
    mine = to_markdown(table).split('**Table 1 of the paper')[0]
    rows = labels(mine)
    assert rows[:2] == ['Small only', 'Large only'] and sum(r.startswith('STEER') for r in rows) == 1
    assert rows[3:] in (['Ours'], ['Ours', 'Ours (nested), regenerate'])
    report_paper(dict(paper_flops=with_ours))
    full = (with_ours.tables/'full.md').read_text()
    for label in ('STEER (rest)', 'STEER (rest), regenerate', 'Random, at the cost of STEER (rest)',
                  'Oracle, in hindsight', 'Oracle, in hindsight, regenerate', 'Ours (full), regenerate'):
        assert f'| toy | {label} | ' in full

def test_csv_keeps_ten_digits(flops, tmp_path):
    back = pd.read_csv(save_table(tmp_path/'t', paper_table(flops.results, 'toy'))[0])
    small = flops.results.query('method == "Small only"')['accuracy'].item()
    assert np.isclose(back['accuracy'][0], 100*small, rtol=1e-9) and not any(c.endswith('_text') for c in back)

def test_the_readme_has_the_numbers_of_the_tables():
    "The rows of its table: accuracy at cost, in percent, on the three micro benchmarks."
    results = pd.read_csv(ROOT/'tables'/'evaluation.csv').query('chosen == 1')
    rows = re.findall(r'^\| ([^|]+) \|' + r' (-?[\d.]+) at ([\d.]+) \|'*3, (ROOT/'README.md').read_text('utf-8'), re.M)
    assert len(rows) >= 6
    for name, *cells in rows:
        method, _, reading = name.strip('* ').partition(', ')
        own = results[(results['method'] == method) & (results['on_escalate'] == (reading or 'append'))]
        if own.empty: own = results[results['method'] == method]
        pairs = zip(own['accuracy'], own['cost_share'])
        assert cells == [f'{100*number:.1f}' for pair in pairs for number in pair], name

# ---- figures --------------------------------------------------------------------------------------------------------
def test_same_results_same_bytes(flops, cents, tmp_path):
    for part in (flops, cents):
        written = []
        for name in 'ab':
            made = paper_table(part.results, 'toy')
            paths = save_table(tmp_path/name/'table1', made, tex=to_tex(made), md=to_markdown(made))
            fig = draw_accuracy_cost(part.results, frontiers(part))
            caption = figure_caption(part.results, facts=dict(profile='toy', billing='paid'))
            paths += save_figure(fig, tmp_path/name/'figure', caption)
            written.append({p.name: p.read_bytes() for p in paths})
        names = {'table1.csv', 'table1.tex', 'table1.md', 'figure.pdf', 'figure.png', 'captions.md'}
        assert written[0] == written[1] and set(written[0]) == names == {p.name for p in (tmp_path/'a').iterdir()}
        assert b'CreationDate' not in written[0]['figure.pdf']

def judged(results):
    "With rows of the methods that ask another model, standing in: their sweeps lie elsewhere."
    rows = results[(results['method'] == 'STEER (rest)') & (results['on_escalate'] == 'regenerate')]
    def moved(method, by, more):
        costs = {f'cost_share{k}': rows[f'cost_share{k}']*by for k in ('', '_low', '_high')}
        return rows.assign(method=method, accuracy=(rows['accuracy'] + more).clip(upper=1), **costs)
    return pd.concat([results, moved('SpecReason (expected)', 1.9, 0), moved('RSD', .8, .03)])

@pytest.mark.parametrize('width, panels', [(2.7, 1), (5.5, 3)])
def test_legends_do_not_overlap_and_stay_inside(with_ours, width, panels):
    part, names = with_ours.parts['toy'], [f'toy{i}' for i in range(panels)]
    results = judged(part.results)
    methods = [*drawn_methods(with_ours.results), ('SpecReason (expected)', 'regenerate'), ('RSD', 'regenerate')]
    many, curves = (pd.concat([f.assign(benchmark=b) for b in names]) for f in (results, frontiers(part)))
    fig = draw_accuracy_cost(many, curves, methods, width=width, height=3)
    with paper_style(): fig.draw_without_rendering()
    texts = fig.legends[0].get_texts()
    boxes = [t.get_window_extent() for t in texts]
    labels = {t.get_text() for t in texts}
    assert fig.get_size_inches()[0] == width and len(fig.axes) == panels
    assert labels >= {'small', 'large', 'SpecReason', 'RSD', 'ours', 'random', 'oracle'}
    assert len(methods) - 2 <= 6, 'at most six colours'
    assert all(t.get_fontsize() >= 6.5 for t in texts)
    bottom = min(ax.get_tightbbox().y0 for ax in fig.axes)
    for i, a in enumerate(boxes):
        assert fig.bbox.x0 <= a.x0 and a.x1 <= fig.bbox.x1 and fig.bbox.y0 <= a.y0 and a.y1 <= bottom
        assert not any(a.overlaps(b) for b in boxes[:i])

def test_costs_are_shares_and_what_is_too_dear_stands_at_the_edge(flops, cents):
    for part in (flops, cents):
        results = judged(part.results)
        dear = results['method'] == 'SpecReason (expected)'
        results.loc[dear, 'cost_share'] += 3
        ax = draw_accuracy_cost(results, frontiers(part), [('Small only', 'append'), ('Large only', 'append'),
                                                           ('SpecReason (expected)', 'regenerate')]).axes[0]
        assert ax.get_xscale() == 'linear' and '% of the large' in ax.get_xlabel() and ax.get_xlim()[1] <= 160
        marked = [line for line in ax.get_lines() if line.get_marker() not in ('None', '.')]
        marks = {line.get_label(): line.get_xdata()[0] for line in marked}
        assert np.isclose(marks['large'], 100) and marks['SpecReason'] == 150 and len(ax.texts) == 1
        assert (marks['small'] == 0) == (part is cents)

def test_marker_and_line_are_one_thing(with_ours):
    "The marker of a baseline is a point of its line; ours stands at its own threshold, and the line is the sweep."
    part = with_ours.parts['toy']
    for (method, _), points in part.results.groupby(['method', 'on_escalate']):
        sweep, own = sweep_points(points), method.startswith('Ours') and (points['chosen'] == 0).any()
        assert len(sweep) == len(points) - own and (sweep['chosen'].sum() == 0) == own
    rows = part.singles.query('method == "Ours" and on_escalate == "append"').groupby('seed')['correct'].mean()
    dots = seed_points(part).query('method == "Ours" and on_escalate == "append"')
    assert np.allclose(dots['accuracy'], rows)
    mean = part.results.query('method == "Ours" and chosen == 1').iloc[0]
    assert np.allclose(dots[['cost_share', 'accuracy']].mean(), mean[['cost_share', 'accuracy']].astype(float))

def test_style_is_not_left_behind():
    import matplotlib
    before = matplotlib.rcParams['font.size']
    with paper_style(): assert matplotlib.rcParams['font.size'] == 8 and matplotlib.rcParams['pdf.fonttype'] == 42
    assert matplotlib.rcParams['font.size'] == before

def test_a_figure_follows_its_arguments(with_ours):
    "Another colour, a method less, no legend, a logarithmic axis."
    points, curves = with_ours.results, with_ours.whole(frontiers)
    few = [m for m in drawn_methods(points) if not m[0].startswith('STEER')]
    look = dict(legend=False, xscale='log', width=4., height=3., style={'Ours': dict(color='#123456')})
    fig = draw_accuracy_cost(points, curves, few, **look)
    assert '#123456' in {line.get_color() for line in fig.axes[0].lines} and not fig.legends
    assert fig.get_size_inches().tolist() == [4, 3] and fig.axes[0].get_xscale() == 'symlog'
    said = figure_caption(points, few, facts=dict(profile='toy'), xscale='log')
    assert 'logarithmic axis' in said and 'STEER' not in said and 'An arrow' not in said and 'small dots' not in said
    for wrong, nearest in ((dict(methods=[('Our', 'append')]), "'Ours'"), (dict(xscale='logg'), "'log'")):
        with pytest.raises(ValueError, match=f'did you mean .*{nearest}'): draw_accuracy_cost(points, curves, **wrong)

def test_a_figure_for_a_narrow_column():
    "3.3 inches: one label of costs below three panels, or panels one below the other; no text is cut off or covered."
    data = read_points(ROOT/'tables')
    few = drawn_methods(data['points'])
    for stacked, size in ((False, (3.3, 2.6)), (True, (3.3, 6.))):
        fig = draw_accuracy_cost(**data, methods=few, stacked=stacked, width=size[0], height=size[1], font='serif')
        with paper_style(): fig.draw_without_rendering()
        spec = fig.axes[0].get_gridspec()
        assert (spec.nrows, spec.ncols) == ((3, 1) if stacked else (1, 3))
        labels = [ax.xaxis.label for ax in fig.axes if ax.get_xlabel()]
        assert len(labels) == 1 and labels[0].get_family() == ['serif']
        boxes = [t.get_window_extent() for t in [*labels, *fig.legends[0].get_texts()]]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert min(b.x0 for b in boxes) >= 0 and max(b.x1 for b in boxes) <= fig.bbox.x1

def test_a_figure_takes_a_curve_of_ones_own():
    data = read_points(ROOT/'tables')
    points = add_curve(data['points'], 'mine', [.3, .5], [.6, .8], 'micro-math')
    own, style = [('Small only', 'append'), ('mine', 'append')], dict(mine=dict(color='#123456', marker='x'))
    look = dict(methods=own, seeds=data['seeds'], style=style, rc={'axes.titlesize': 11})
    fig = draw_accuracy_cost(points, data['frontiers'], **look)
    lines = [line for ax in fig.axes for line in ax.get_lines() if line.get_label() == 'mine']
    assert [line.get_xydata().tolist() for line in lines] == [[[30, 60], [50, 80]]]
    assert lines[0].get_color() == '#123456' and fig.axes[0].title.get_fontsize() == 11
    assert ', mine.' in figure_caption(points, own, facts=data['facts'])

def committed():
    return [(ROOT/'tables'/name, ROOT/'figures'/name) for name in PUBLISHED.values()
            if (ROOT/'tables'/name/'frontiers.csv').is_file()]

@pytest.mark.parametrize('tables, figures', committed())
@pytest.mark.slow
def test_the_committed_figures_come_from_the_committed_tables(tables, figures, tmp_path):
    "In a fresh clone, without a run and without torch; captions and alternative texts, too."
    code = ('import sys; from stepwise_routing.report.figures import redraw\n'
            f'redraw({str(tables)!r}, {str(tmp_path)!r}); assert "torch" not in sys.modules')
    subprocess.run([sys.executable, '-c', code], check=True)
    names = {p.name for p in figures.iterdir() if p.is_file()} - {'provenance.json'}
    assert names == {p.name for p in tmp_path.iterdir()}
    assert [n for n in sorted(names) if (figures/n).read_bytes() != (tmp_path/n).read_bytes()] == []

def test_type_is_embedded_in_pdf_figures():
    for path in sorted((ROOT/'figures').rglob('*.pdf')):
        data = path.read_bytes()
        fonts = len(re.findall(rb'/Type /FontDescriptor', data))
        assert fonts and fonts == len(re.findall(rb'/FontFile2 ', data)) and b'/Type3' not in data, path

def test_figures_without_points_are_refused_in_a_line(tmp_path):
    with pytest.raises(FileNotFoundError, match='has no frontiers'): redraw(tmp_path, tmp_path)

# ---- a whole run ----------------------------------------------------------------------------------------------------
def test_results_without_a_run_say_in_one_line_what_to_run(tmp_path):
    "What Run All of chapter 05 says in a fresh clone."
    line = (rf'^run {tmp_path.name} has no outcomes of toy yet: run all stages .stepwise-routing reproduce --profile '
            r'toy., or the notebooks 02 and 02b, first$')
    with pytest.raises(FileNotFoundError, match=line): load_run(toy_run(tmp_path))

def test_a_run_ends_with_six_lines(with_ours, tmp_path):
    save_table(tmp_path/'evaluation', with_ours.results)
    assert summary(tmp_path, (2., 75.), 'tables/', 'identical to the committed tables')[-1].endswith('tables: yes')
    lines = summary(tmp_path, (2., 75.), 'tables/', 'different from the committed tables: table1.csv, row 1, n: 2 here')
    assert len(lines) == 6 and lines[0] == 'time: 0 min 2 s; all stages 1 min 15 s' and lines[4] == 'written: tables/'
    assert lines[5] == 'identical to the committed tables: no, differs by table1.csv, row 1, n: 2 here'
    large = with_ours.results.query('method == "Large only"')['accuracy'].item()
    assert lines[2] == f'Large only: {100*large:.1f} % right at 100.0 % of the cost, toy'
    assert lines[3].startswith('Ours')
    assert summary(tmp_path/'none', (1., 1.), 'x')[-1].endswith('tables: not compared: other settings or profile')

@pytest.mark.slow
def test_the_command_draws_the_figures_of_a_clone(tmp_path):
    (tmp_path/'nbs'/'params').mkdir(parents=True)
    shutil.copytree(ROOT/'tables', tmp_path/'tables')
    main = ['-c', 'from stepwise_routing.run.cli import main; main()', 'figures', '--project', str(tmp_path)]
    done = subprocess.run([sys.executable, *main], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path/'figures'/'policy.pdf').read_bytes() == (ROOT/'figures'/'policy.pdf').read_bytes()

# ---- what falls short -----------------------------------------------------------------------------------------------
def test_shortfalls_are_named(flops):
    text = '\n'.join(benchmark_shortfalls(flops))
    assert '60 test problems, fewer than 300' in text and 'not drawn again' not in text
    assert 'SpecReason (expected); RSD; TRIM-Agg; GlimpRouter; Ours; Ours (nested); ' in text
    once = replace(flops, table=replace(flops.table, large_redraws_right=flops.table.large_redraws_right[:, :0]))
    assert 'the large model was not drawn again' in '\n'.join(benchmark_shortfalls(once))
    steer = flops.results['method'] == 'STEER (rest)'
    chosen = steer & (flops.results['chosen'] == 1)
    dear = flops.results.assign(threshold=flops.results['threshold'].mask(chosen, np.inf))
    said = 'STEER (rest); STEER (rest), regenerate was accurate enough and cheaper than the large model alone'
    assert said in '\n'.join(benchmark_shortfalls(replace(flops, results=dear)))
    far = flops.results.assign(accuracy_vs_large_high=np.where(steer, -.021, 0))
    said = 'STEER (rest); STEER (rest), regenerate: clearly more than 2 points below the large model on test'
    assert said in benchmark_shortfalls(replace(flops, results=far))

def test_the_same_shortfall_is_said_once(flops, loaded):
    two = replace(loaded['paper_flops'], parts=dict(a=flops, b=flops))
    assert shortfalls(two)[0] == 'a, b: 60 test problems, fewer than 300; the intervals are wide.'

def test_answers_that_grading_gave_up_are_said_under_the_tables(tmp_path):
    run = toy_run(tmp_path)
    save_methods(run)
    def notes():
        report_paper(load_run(run))
        files = [(run.tables/f'{name}.md').read_text() for name in ('table1', 'full')]
        return [line for text in files for line in text.splitlines() if 'gave up' in line]
    assert notes() == []
    keep_given_up('outcome tables', [(run, [('3', '10^{10}')]), (run, [('4', 'x')])])
    keep_given_up('walks', [(run, [('4', 'x'), ('5', 'x')])])
    assert notes() == ['- toy: grading gave up on answers, which count as wrong: 3.']*2

# ---- a fresh clone --------------------------------------------------------------------------------------------------
def test_without_a_run_the_committed_tables_are_shown(tmp_path):
    "Chapter 05 in a fresh clone: nothing is computed, and nothing is written."
    from stepwise_routing.report.figures import committed_figures
    from stepwise_routing.run.config import Config, Run
    from stepwise_routing.run.training_report import report_training
    run = Run('micro', Config(), tmp_path/'micro', tmp_path/'store')
    assert not run.has_results
    for stem in REPORTS: assert report({}, stem) == (ROOT/'tables'/f'{stem}.md').read_text()
    assert (ROOT/'tables'/'table2.md').read_text() in report_paper({})
    assert len(committed_figures()) == 2 and len(report_training(run)) == 2
    assert not list(tmp_path.iterdir())

def test_a_benchmark_without_policies_is_drawn(tmp_path):
    "Where no policy can be trained there are no seeds."
    for name in ('evaluation.csv', 'frontiers.csv', 'table1.csv'): shutil.copy(ROOT/'tables'/name, tmp_path/name)
    assert read_points(tmp_path)['seeds'] is None
    assert redraw(tmp_path, tmp_path/'figures')
