"""Tables: from the results of `compare` to .csv, .md and .tex

A .csv file holds the numbers with six digits. The .md and .tex files show them rounded, as the paper does.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from ..method.results import CHOSEN, Row, interval
from ..method.rollouts import cut_chains
from ..util import write_file

MODELS = 'Small only', 'Large only'
POLICIES = 'Ours (S^os)', 'Ours (S^API)', 'Ours, as printed'
PRINTED = (*MODELS, 'SpecReason', 'RSD', 'STEER', *POLICIES, 'Min-prob threshold', CHOSEN)
OURS = 'Ours (S^os)', 'Ours (S^API)', CHOSEN  # in the table of comparisons
THRESHOLDS = 'Min-prob threshold', 'Mean-logit threshold'
RIVALS = 'SpecReason', 'RSD', 'STEER', *THRESHOLDS, 'Large only'
EXTERNAL = {'Small only': '–', 'Large only': '–', 'RSD': '✓', 'TRIM': '✓'}  # needs a third model?
UNITS = {1: 'flops', 2: 'cents'}  # of cost, for each table of the paper
PAPERS = {1: 'Ours (S^os)', 2: 'Ours (S^API)'}  # its policy: the score of its open and API settings
MISSING = '–'
ENDS = '', '_low', '_high'  # of the columns of a number with its interval

# ---- from results to numbers


def frame(results: dict, rule: str = 'tuned') -> pd.DataFrame:
    "A row per unit, benchmark and method: accuracy (%), cost, share of the large model's cost, accuracy per cost."
    table = []
    for (unit, benchmark, method), row in results.items():
        if rule not in row.choices:
            continue
        choice = row.choices[rule]
        large = results[unit, benchmark, 'Large only'].choices['tuned']
        with np.errstate(divide='ignore'):
            numbers = dict(
                accuracy=100 * choice.accuracy,
                cost=choice.cost,
                share=choice.cost / large.cost,
                per_cost=100 * choice.accuracy / choice.cost,
            )
        line = dict(unit=unit, benchmark=benchmark, method=method)
        for name, values in numbers.items():
            line[name], line[f'{name}_low'], line[f'{name}_high'] = interval(values)
        table.append(line)
    return pd.DataFrame(table)


def comparison(results: dict, ours=OURS, rivals=RIVALS, rule: str = 'tuned') -> pd.DataFrame:
    "Ours against each rival on the same resamples: ratio of costs, and difference in accuracy (points)."
    table = []
    for unit, benchmark in dict.fromkeys(key[:2] for key in results):
        for our_name in ours:
            for rival_name in rivals:
                pair = [results.get((unit, benchmark, name)) for name in (our_name, rival_name)]
                if None in pair:
                    continue
                mine, rival = (row.choices[rule] for row in pair)
                line = dict(unit=unit, benchmark=benchmark, ours=our_name, rival=rival_name)
                ratio = interval(mine.cost / np.maximum(rival.cost, 1e-300))
                points = interval(100 * (mine.accuracy - rival.accuracy))
                line |= dict(zip(('ratio', 'ratio_low', 'ratio_high'), ratio))
                line |= dict(zip(('points', 'points_low', 'points_high'), points))
                table.append(line)
    names = [f'{name}{end}' for name in ('ratio', 'points') for end in ENDS]
    return pd.DataFrame(table, columns=['unit', 'benchmark', 'ours', 'rival', *names])


def seed_frame(results: dict, rule: str = 'tuned') -> pd.DataFrame:
    "Every seed of every trained method: its threshold, accuracy and cost on test problems."
    table = []
    for (unit, benchmark, method), row in results.items():
        if rule not in row.choices or len(row.choices[rule].by_seed) < 2:
            continue
        large = results[unit, benchmark, 'Large only'].choices['tuned'].cost[0]
        for seed, (kappa, accuracy, cost) in enumerate(row.choices[rule].by_seed):
            numbers = dict(kappa=kappa, accuracy=100 * accuracy, share=cost / large)
            table.append(dict(unit=unit, benchmark=benchmark, method=method, seed=seed) | numbers)
    columns = ['unit', 'benchmark', 'method', 'seed', 'kappa', 'accuracy', 'share']
    return pd.DataFrame(table, columns=columns)


# ---- digits


def digits(number: float) -> str:
    "Three significant digits without an exponent, such as 131, 61.4, 0.0205."
    if not np.isfinite(number):
        return MISSING
    exponent = int(f'{number:.2e}'.split('e')[1])
    return f'{number:.{max(0, 2 - exponent)}f}'


def rounded(decimals: int, sign: str = ''):  # -> function: number -> text; sign "+": always with it
    return lambda number: f'{number:{sign}.{decimals}f}' if abs(number) < 1e9 else MISSING


def with_interval(line: dict, name: str, text, factor: float = 1) -> str:
    "A number, and its 95 % interval below it."
    number, low, high = (text(factor * line[name + end]) for end in ENDS)
    return f'{number}<br><sub>[{low}, {high}]</sub>'


def scale(unit: str, large_cost: float) -> float:
    "What a cost is divided by: 10^12 FLOPs as in the paper, or 10^6 for micro models."
    if unit == 'cents':
        return 1
    return 1e12 if large_cost > 1e10 else 1e6


# ---- text


def grid(lines: list, rows=None) -> pd.DataFrame:  # columns (group, heading)
    "Cells in a grid, from (row, group, {heading: text}). What is not there is a dash."
    texts = {}
    for row, group, cells in lines:
        named = {(group, heading): text for heading, text in cells.items()}
        texts.setdefault(row, {}).update(named)
    columns = dict.fromkeys(column for cells in texts.values() for column in cells)
    rows = [row for row in rows or texts if row in texts]
    table = pd.DataFrame([texts[row] for row in rows], index=rows)
    return table.reindex(columns=pd.MultiIndex.from_tuples(columns)).fillna(MISSING)


def markdown(table: pd.DataFrame) -> str:  # of `grid`
    heads = ['', *(' '.join(column).strip() for column in table)]
    lines = [heads, ['---'] + ['--:'] * table.shape[1]]
    lines += [[row, *cells] for row, cells in zip(table.index, table.values)]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


PLAIN = '% & # _ $ – ✓ ✗ ↑ ↓ † §'.split()
IN_TEX = r'\% \& \# \_ \$ -- $\checkmark$ $\times$ $\uparrow$ $\downarrow$ $^\dagger$ $^\S$'.split()
TEX = dict(zip(PLAIN, IN_TEX))


def tex(text: str) -> str:
    "A text for LaTeX: S^os and 10^6 are formulas."
    text = ''.join(TEX.get(character, character) for character in text)
    return re.sub(r'(S|10)\^(\w+)', r'$\1^{\\mathrm{\2}}$', text)


def latex(table: pd.DataFrame) -> str:  # of `grid`
    r"A tabular as wide as the text, to be \input. It needs booktabs, amssymb and graphicx."
    heads = pd.MultiIndex.from_tuples([tuple(map(tex, column)) for column in table])
    texts = table.map(tex).set_axis(heads, axis=1).rename(tex)
    columns = 'l' + 'r' * table.shape[1]
    text = texts.style.to_latex(hrules=True, multicol_align='c', column_format=columns)
    ruled = re.sub(r'(?m)^Large only.*', '\\g<0>\n\\\\midrule', text).strip()
    return f'\\resizebox{{\\linewidth}}{{!}}{{%\n{ruled}}}'


# ---- what all captions say

RECORDED = 'Qwen2.5-Coder'  # the real pair, whose replies the package ships


def describe(benchmarks: dict, alpha: float, *receipts: str) -> list:  # benchmarks as of `compare`
    "Sentences about models, problems and alpha, for every caption."
    names = {}
    for name, splits in benchmarks.items():
        pair = ' and '.join(map(str, splits['test'].models))
        sizes = ' / '.join(f'{len(splits[split]):,}' for split in ('train', 'calibration', 'test'))
        remark = ' (real models, recorded at temperature .2)' if RECORDED in pair else ''
        words = f'{pair}{remark}, {sizes} training, calibration and test problems'
        names.setdefault(words, []).append(name)
    sentences = [f'{", ".join(of)}: {words}.' for words, of in names.items()]
    if not any('Qwen2.5-Math' in words for words in names):
        sentences.append("These are not the paper's models, Qwen2.5-Math and GPT-4.1-mini.")
    tokens = 'prompt, cached and written tokens of the large model'
    prices = dict.fromkeys(' / '.join(map(str, s['test'].dollars[-1])) for s in benchmarks.values())
    sentences += [f'US dollars a million {tokens}: {price}.' for price in prices]
    sentences.append(f'Alpha: {100 * alpha:g} points may be lost against the large model.')
    cut = [cut_chains(splits['test']) for splits in benchmarks.values()]
    return [*sentences, *filter(None, cut), *receipts]


# ---- Tables 1 and 2


def is_large_alone(row: Row) -> bool:
    "Did a router find no threshold that is good enough and cheaper?"
    is_router = row.line is None or len(np.unique(row.line, axis=0)) > 1
    return is_router and all(kappa is None for kappa, _, _ in row.choices['tuned'].by_seed)


def of_large(table: pd.DataFrame, column: str) -> pd.Series:  # [benchmark]
    return table[table['method'] == 'Large only'].set_index('benchmark')[column]


def paper_form(results: dict, number: int, rows: tuple = PRINTED) -> pd.DataFrame:
    "Table 1 or 2, unrounded: the tuned choices with accuracy (%), cost, and accuracy (%) per cost."
    table = frame(results)
    table = table[(table['unit'] == UNITS[number]) & table['method'].isin(rows)]
    table = table.sort_values('method', key=lambda names: names.map(rows.index), kind='stable')
    names = ['unit', 'benchmark', 'method']
    is_alone = [is_large_alone(results[key]) for key in table[names].itertuples(False, None)]
    table = table[[*names, 'accuracy', 'cost', 'per_cost']].replace(np.inf, np.nan)
    return table.assign(large_alone=is_alone).reset_index(drop=True)


def paper_grid(table: pd.DataFrame, number: int) -> pd.DataFrame:  # of `paper_form` -> of `grid`
    "The same in the paper's units, with its columns."
    large_cost = of_large(table, 'cost')
    lines = []
    for line in table.to_dict('records'):
        benchmark, method = line['benchmark'], line['method']
        unit = scale(line['unit'], large_cost[benchmark])
        row = f'{method} †' if method == PAPERS[number] else method
        cells = {
            'Acc ↑': rounded(1)(line['accuracy']) + ' §' * line['large_alone'],
            'Cost ↓' if number == 2 else 'FLOPs ↓': digits(line['cost'] / unit),
            'A/C ↑': digits(line['per_cost'] * (0.01 if number == 2 else unit)),
        }
        lines += [(row, '', {'Ext.': EXTERNAL.get(method, '✗')}), (row, benchmark, cells)]
    return grid(lines)


def losses(table: pd.DataFrame) -> str:  # of `paper_form`
    "How much tuned choices lose on problems that they were not chosen on."
    others = (*MODELS, 'Ours, as printed')  # their thresholds are not tuned
    routers = table[~table['method'].isin(others)].groupby('benchmark', sort=False)
    lost = (of_large(table, 'accuracy') - routers['accuracy'].min()).clip(lower=0)
    return ', '.join(f'{points:.1f} on {benchmark}' for benchmark, points in lost.items())


def paper_caption(table: pd.DataFrame, number: int) -> str:  # of `paper_form`
    exponents = {}
    for name, cost in of_large(table, 'cost').items():
        exponents.setdefault(f'10^{np.log10(scale("flops", cost)):.0f}', []).append(name)
    scales = ', '.join(f'{exponent} ({", ".join(on)})' for exponent, on in exponents.items())
    costs = {
        1: f'FLOPs a problem: 2N for a generated token, in units of {scales}. A/C: accuracy (%) per unit of FLOPs.',
        2: 'Cost: US cents a problem. A/C: accuracy (a share) per US cent.',
    }
    return (
        f'**Table {number}. Accuracy (%) and {"cost" if number == 2 else "FLOPs"} on test problems.** The threshold of '
        'each router is tuned: the cheapest one that loses at most alpha on calibration problems; *Ours, as printed* '
        'keeps that of training. '
        f"{costs[number]} Ext.: does it need a third model? †: the paper's policy in this setting. "
        '§: the large model alone, as no threshold was good enough and cheaper. A tuned choice promises nothing for new '
        f'problems: on these the routers lose up to (points) {losses(table)}.'
    )


def paper_table(number: int) -> pd.DataFrame:  # 1: FLOPs (10^12); 2: US cents
    "The numbers that the paper prints: accuracy (%), cost, and A/C as it stands there."
    return pd.read_csv(Path(__file__).parent / f'paper_table{number}.csv')


def beside_paper(results: dict, number: int, rows: tuple = PRINTED) -> pd.DataFrame:  # of text
    "Cost in % of the large model's, and in brackets points of accuracy above it: the paper's numbers and ours."
    sources = dict(paper=paper_table(number), here=paper_form(results, number, rows))
    lines = []
    for source, table in sources.items():
        costs, accuracies = of_large(table, 'cost'), of_large(table, 'accuracy')
        for line in table.to_dict('records'):
            name = line['benchmark']
            points = line['accuracy'] - accuracies[name]
            text = f'{100 * line["cost"] / costs[name]:.0f} ({points:+.1f})'
            lines.append((line['method'], source, {name: text}))
    return grid(lines, rows)


# ---- the other tables


RULE_NAMES = dict(tuned='tuned', guaranteed='guaranteed (90 %)')
UNIT_NAMES = dict(flops='FLOPs', full_flops='FLOPs, prompts included', cents='US cents')


def sections(table: pd.DataFrame, cells) -> str:  # with columns title and row; cells: line -> texts
    "A Markdown table for each title, a column for each benchmark."
    parts = []
    for title, part in table.groupby('title', sort=False):
        lines = [(line['row'], line['benchmark'], cells(line)) for line in part.to_dict('records')]
        parts.append(f'**{title}**\n\n{markdown(grid(lines))}')
    return '\n'.join(parts)


def methods_form(results: dict) -> pd.DataFrame:
    "Every method, price and rule, with 95 % intervals."
    parts = [frame(results, rule).assign(rule=rule) for rule in RULE_NAMES]
    return pd.concat(parts, ignore_index=True).drop(columns=[f'per_cost{end}' for end in ENDS])


def methods_text(table: pd.DataFrame) -> str:  # of `methods_form`
    def cells(line):
        accuracy = with_interval(line, 'accuracy', rounded(1))
        return {'right, %': accuracy, 'cost, %': with_interval(line, 'share', rounded(0), 100)}

    titles = table['unit'].map(UNIT_NAMES) + ', ' + table['rule'].map(RULE_NAMES)
    return sections(table.assign(title=titles, row=table['method']), cells)


def comparison_form(results: dict) -> pd.DataFrame:
    "Ours against each rival; the verdict is about costs alone."
    table = comparison(results)
    is_decided = [table['ratio_high'] < 1, table['ratio_low'] > 1]
    return table.assign(verdict=np.select(is_decided, ['cheaper', 'costlier'], 'undecided'))


def comparison_text(table: pd.DataFrame) -> str:  # of `comparison_form`
    def cells(line):
        ratio = f'{with_interval(line, "ratio", rounded(2))} {line["verdict"]}'
        return {'cost ratio': ratio, 'points': with_interval(line, 'points', rounded(1, '+'))}

    pairs = table['ours'] + ' / ' + table['rival']
    return sections(table.assign(title=table['unit'].map(UNIT_NAMES), row=pairs), cells)


def curves_form(results: dict) -> pd.DataFrame:
    "The lines of the figures: each method from safe thresholds to cheap ones, mean over seeds."
    parts = []
    for (unit, benchmark, method), row in results.items():
        if row.line is None:
            continue
        share = row.line[:, 0] / results[unit, benchmark, 'Large only'].choices['tuned'].cost[0]
        points = pd.DataFrame(dict(share=share, accuracy=100 * row.line[:, 1])).drop_duplicates()
        parts.append(points.assign(unit=unit, benchmark=benchmark, method=method))
    names = ['unit', 'benchmark', 'method', 'share', 'accuracy']
    return pd.concat(parts, ignore_index=True)[names]


TOLD = dict(wrong='small model wrong', gain='only the large one right')


def gain_text(gain: pd.DataFrame) -> str:  # of `gain_frame`
    lines = []
    for line in gain.to_dict('records'):
        cells = {'problems': f'{line["problems"]:,}'}
        for asked, title in TOLD.items():
            cells[title] = f'{100 * line[asked]:.0f} %'
            for name in (name for name in line if re.fullmatch(f'{asked} [^,]+', name)):
                numbers = {name + end: line[name + end.replace('_', ', ')] for end in ENDS}
                cells[name] = with_interval(numbers, name, rounded(2))
        lines.append((line['benchmark'], '', cells))
    return markdown(grid(lines))


CAPTIONS = dict(
    methods='**All methods on test problems.** For each price (FLOPs: 2N for a generated token; US '
    "cents) and each rule. Tuned: the cheapest threshold that loses at most alpha on calibration "
    'problems. Guaranteed (90 %): with probability .9 the threshold loses at most alpha on new problems. Cost is in % of '
    "the large model's. In brackets: 95 % intervals; problems and seeds are drawn again, and the choice is made again. "
    'Rewrite: the large model writes the doubted step again; else it continues after it.',
    comparison='**Ours against each rival on the same test problems, both tuned.** Cost ratio: ours divided by the '
    "rival's. Points: our accuracy minus the rival's. In brackets: paired 95 % intervals, not corrected for their "
    'number. Cheaper, costlier: the whole interval of the ratio is below 1, above 1; it says nothing about accuracy. '
    'The mean-logit threshold was added to this table after the results were known.',
    gain='**Can routing pay?** How often the small model is wrong, how often only the large model is right (the gain), '
    "and how well numbers of the small model's chain tell it: AUROC with 95 % intervals; .5 is chance, below .5 the "
    'sign is reversed. Min-prob, S^os: the least value in the chain. Learnt: a logistic regression on seven numbers, '
    'ten-fold. All three splits. A hand-over pays where the gain is found, not where wrong answers are found.',
)

# ---- files


def write_tables(
    results: dict,  # of `compare`
    gain: pd.DataFrame,  # of `gain_frame`
    folder,
    notes: list,  # sentences for every caption, see `describe`
    rows: tuple = PRINTED,  # of Tables 1 and 2; add your own methods
) -> None:
    "Write Tables 1 and 2, all methods, comparisons, curves, seeds and gains. The same results give the same bytes."

    def write(name, text):
        write_file(Path(folder) / name, text)

    def write_csv(name, table):
        write(f'{name}.csv', table.to_csv(index=False, float_format='%.6g', lineterminator='\n'))

    units = {unit for unit, _, _ in results}
    for number in (number for number in UNITS if UNITS[number] in units):
        table = paper_form(results, number, rows)
        caption = ' '.join([paper_caption(table, number), *notes])
        write_csv(f'table{number}', table)
        write(f'table{number}.md', f'{caption}\n\n{markdown(paper_grid(table, number))}')
        comment = caption.replace('**', '').replace('. ', '.\n% ')
        write(f'table{number}.tex', f'% {comment}\n{latex(paper_grid(table, number))}\n')
    made = dict(
        methods=(methods_form(results), methods_text),
        comparison=(comparison_form(results), comparison_text),
        gain=(gain, gain_text),
    )
    for name, (table, to_text) in made.items():
        write_csv(name, table)
        write(f'{name}.md', f'{" ".join([CAPTIONS[name], *notes])}\n\n{to_text(table)}')
    write_csv('curves', curves_form(results))
    write_csv('seeds', seed_frame(results))
