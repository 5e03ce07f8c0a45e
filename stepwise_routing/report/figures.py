"""Accuracy against cost, at the width it is printed at"""

import io
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.records import READINGS
from ..base.tools import find_project, one_of, write_file
from ..method.bounds import mixing_line, oracle_frontier, random_frontier
from ..method.results import METHOD_STYLE, REWRITES, headline, method_rank, style_of
from .writer import label, save_table

_STYLE = {
    'font.family': 'STIXGeneral',
    'mathtext.fontset': 'stix',
    'font.size': 8,
    'axes.labelsize': 8,
    'axes.titlesize': 8,
    'xtick.labelsize': 7,
    'ytick.labelsize': 7,
    'axes.linewidth': 0.5,
    'xtick.major.width': 0.5,
    'ytick.major.width': 0.5,
    'xtick.minor.width': 0.3,
    'lines.linewidth': 1,
    'lines.markersize': 4,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'figure.constrained_layout.use': True,
    'savefig.dpi': 220,
    'pdf.fonttype': 42,
}


def paper_style():
    "Matplotlib settings of every figure, for the length of a `with` block."
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(width, height, **subplots):
    "An empty figure of this size in inches and its axes [row, column]; no window and no state of pyplot knows it."
    from matplotlib.figure import Figure

    with paper_style():
        fig = Figure(figsize=(width, height))
        return fig, fig.subplots(squeeze=False, **subplots)


def _drawn(fig, kind, **options):  # the bytes of a file without a date
    buffer = io.BytesIO()
    dates = dict(pdf=('CreationDate', 'Producer', 'Creator'), png=('Software',))
    with paper_style():
        fig.savefig(buffer, format=kind, metadata=dict.fromkeys(dates[kind]), **options)
    return buffer.getvalue()


def save_figure(fig, stem, caption) -> list:
    "Write PDF, PNG and the caption as .md, the same bytes for the same figure; `stem` is their path without ending."
    files = dict(pdf=_drawn(fig, 'pdf'), png=_drawn(fig, 'png'), md=caption + '\n')
    return [write_file(f'{stem}.{ending}', data) for ending, data in files.items()]


def preview(fig, dpi=100):
    "A figure as it will be saved, for a notebook: 64 colours, a quarter of the bytes."
    from IPython.display import Image
    from PIL import Image as Picture

    small = io.BytesIO()
    Picture.open(io.BytesIO(_drawn(fig, 'png', dpi=dpi))).convert('RGB').quantize(64).save(
        small, 'png', optimize=True
    )
    return Image(small.getvalue())


def frontiers(p):  # DataFrame: benchmark, curve, cost_share, accuracy
    "What the methods of `BenchmarkResults` are drawn against: the small-large line, chance and hindsight."
    import pandas as pd

    table = p.table
    cost = p.grid['unit'].iloc[0]
    curves = {
        'small-large line': mixing_line(table, cost),
        'random': random_frontier(table, cost=cost),
        'oracle': oracle_frontier(table, cost=cost),
    }
    large = table.large_only()[cost].mean()
    return pd.concat(
        [
            pd.DataFrame(
                dict(
                    benchmark=table.benchmark,
                    curve=k,
                    cost_share=c['cost'] / large,
                    accuracy=c['accuracy'],
                )
            )
            for k, c in curves.items()
        ],
        ignore_index=True,
    )


def _draw_frontiers(ax, curves):
    dashes = {'small-large line': '-', 'random': ':', 'oracle': '--'}
    for name, c in curves.groupby('curve', sort=False):
        ax.plot(
            100 * c['cost_share'],
            100 * c['accuracy'],
            dashes[name],
            color='#767676',
            lw=0.8,
            zorder=1,
            label=name,
        )


_EDGE = 150  # % of the large model's cost; what costs more stands at the edge


def is_hollow(row):  # of `evaluate`
    "Does the larger model write the step again, where the method could also append?"
    return row['on_escalate'] == 'regenerate' and row['method'] not in REWRITES


def sweep_points(points):
    "The rows of one method that are its sweep: a row of ours at its own threshold, between the sweep's, is none."
    sweep = points[points['chosen'] == 0]
    return sweep if len(sweep) and points['method'].iloc[0].startswith('Ours') else points


def _draw_sweep(ax, points, seeds, style):
    "A method: its sweep, its chosen point with the intervals there, and its single seeds as dots."
    best = points[points['chosen'] == 1].iloc[0]
    sweep = sweep_points(points).sort_values('threshold')
    color = style['color']
    bold = best['method'] == 'Ours (full)'
    hollow = is_hollow(best)
    line = dict(
        color=color, lw=1.8 if bold else 1.0, ls=(0, (4, 1.5)) if hollow else '-', zorder=3 + bold
    )
    ax.plot(100 * sweep['cost_share'], 100 * sweep['accuracy'], **line)
    cost = 100 * best['cost_share']
    accuracy = 100 * best['accuracy']
    wide, high = (
        [100 * best[f'{k}_low'], 100 * best[f'{k}_high']] for k in ('cost_share', 'accuracy')
    )
    for x, y in ((wide, [accuracy] * 2), ([cost] * 2, high)):
        ax.plot(x, y, color=color, lw=1.5, alpha=0.3, zorder=2)
    ax.plot(
        100 * seeds['cost_share'],
        100 * seeds['accuracy'],
        '.',
        color=color,
        ms=3,
        mew=0,
        alpha=0.6,
        zorder=4,
    )
    arrow = dict(arrowstyle='->', color=color)
    if cost > _EDGE:
        ax.annotate('', (_EDGE + 8, accuracy), (_EDGE, accuracy), arrowprops=arrow)
    line |= (
        dict(ls='none') if len(sweep) == 1 else {}
    )  # the legend shows no line where there is none
    ax.plot(
        [min(cost, _EDGE)],
        [accuracy],
        marker=style['marker'],
        mfc='white' if hollow else color,
        ms=6.5 if bold else 4.5,
        mew=0.8,
        label=style['label'] + ', regen.' * hollow,
        **line | dict(zorder=5 + bold),
    )


_NOT_DRAWN = 'Random', 'Oracle'  # they are frontiers


def drawn_methods(points):  # of `evaluate` -> (method, on_escalate) pairs
    "What the main figures show: both models, and of Table 1's families and the bare threshold the chosen variants."
    families = 'Bare threshold (probability)', 'SpecReason', 'RSD', 'STEER', 'Ours', 'Ours, best'
    rows = headline(points)
    return [
        ('Small only', 'append'),
        ('Large only', 'append'),
        *(rows[f] for f in families if f in rows),
    ]


def _draw_panel(ax, points, curves, seeds, style):
    "Accuracy against cost on one benchmark."
    groups = dict(
        iter(points[~points['method'].isin(_NOT_DRAWN)].groupby(['method', 'on_escalate']))
    )
    for row in sorted(groups, key=lambda row: (method_rank(row[0]), row[1])):
        dots = seeds[(seeds['method'] == row[0]) & (seeds['on_escalate'] == row[1])]
        _draw_sweep(ax, groups[row], dots, style.get(row[0]) or style_of(row[0]))
    _draw_frontiers(ax, curves)
    ax.margins(0.04, 0.08)
    ax.locator_params('y', nbins=5)
    ax.set_xlim(right=min(ax.get_xlim()[1], _EDGE + 10))
    ax.set_xlabel("cost, % of the large model's")
    ax.set_title(points['benchmark'].iloc[0])


_SPOTS = sorted(
    ((x, y) for x in range(-90, 91, 3) for y in range(-90, 91, 3)),
    key=lambda s: (s[0] / 2) ** 2 + s[1] ** 2,
)


def place_labels(ax, size):
    "The name of every marker near it in its colour, at the nearest spot where it covers no other name or marker."
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    marks = [m for m in ax.get_lines() if m.get_marker() not in ('None', '.')]
    taken = [
        Bbox.from_extents(*(p - 6), *(p + 6))
        for p in (ax.transData.transform(m.get_xydata()[0]) for m in marks)
    ]
    for mark in sorted(marks, key=lambda m: -m.get_ydata()[0]):
        text = ax.annotate(
            mark.get_label(),
            mark.get_xydata()[0],
            (0, 0),
            textcoords='offset points',
            zorder=9,
            ha='center',
            va='center',
            fontsize=size,
            color=mark.get_color(),
            path_effects=[withStroke(linewidth=2, foreground='white')],
        )
        home = text.get_window_extent()
        pixels = ax.figure.dpi / 72
        for spot in _SPOTS:
            box = home.translated(spot[0] * pixels, spot[1] * pixels)
            inside = (ax.bbox.min <= box.min).all() and (box.max <= ax.bbox.max).all()
            if inside and not any(map(box.overlaps, taken)):
                break
        else:
            raise ValueError(f'no room for {mark.get_label()!r}: draw fewer methods, or a legend')
        text.set_position(spot)
        taken.append(box)


@dataclass(frozen=True)
class Look:
    "How an accuracy-cost figure looks."

    xscale: str = 'linear'  # or "log", which is linear below 1 %, as a cost can be 0
    labels: str | None = (
        'legend'  # names below the panels; "direct": beside the markers; None: nowhere
    )
    size: float = 7  # of the names, points
    width: float = 5.5  # inches: 2.7 for one panel, 5.5 for a row of them
    height: float = 2.9
    style: dict = field(default_factory=lambda: METHOD_STYLE)  # method -> color, marker, label


def _look(
    points, methods, look
):  # `Look` with every method's style; ValueError naming what there is
    for name in look:
        one_of('look', name, [*Look.__dataclass_fields__])
    given = Look(**look)
    there = sorted({*zip(points['method'], points['on_escalate'])})
    one_of('xscale', given.xscale, ('linear', 'log'))
    one_of('labels', given.labels, ('legend', 'direct', None))
    for pair in methods or ():
        one_of('method', pair, there)
    for name, style in given.style.items():
        one_of('method in style', name, [*METHOD_STYLE, *points['method'].unique()])
        for key in style:
            one_of('style', key, style_of(name))
    return replace(
        given,
        style=METHOD_STYLE | {name: style_of(name) | style for name, style in given.style.items()},
    )


def _finish(fig, axes, look):
    "Scale of the costs, and names."
    for ax in axes.flat if look.xscale == 'log' else ():
        ax.set_xscale('symlog', linthresh=1)
        ax.set_xticks(
            [t for t in (0, 1, 2, 5, 10, 20, 50, 100) if t >= ax.get_xlim()[0]], minor=False
        )
        ax.xaxis.set_major_formatter('{x:g}')
        ax.minorticks_off()
    if look.labels == 'direct':
        fig.draw_without_rendering()  # settles where the axes are
        for ax in axes.flat:
            place_labels(ax, look.size)
    if look.labels != 'legend':
        return
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels())}
    fig.legend(
        handles.values(),
        handles,
        loc='outside lower center',
        ncols=4 if look.width > 3 else 2,
        fontsize=look.size,
        handlelength=2.4,
        columnspacing=1.0,
        labelspacing=0.3,
    )


def draw_accuracy_cost(
    points,  # DataFrame of `evaluate`, one or several benchmarks
    frontiers,  # DataFrame of their `frontiers`
    methods=None,  # (method, on_escalate) pairs; None: all, a row of panels for each reading
    seeds=None,  # DataFrame of their `seed_points`: single seeds as dots
    **look,  # fields of `Look`, e.g. width=2.7
):  # matplotlib figure
    "Panels of benchmarks side by side."
    look = _look(points, methods, look)
    groups = list(points.groupby('benchmark', sort=False))
    seeds = points[:0] if seeds is None else seeds
    names = {*zip(points['method'], points['on_escalate'])}
    rows = (
        [methods]
        if methods
        else [[m for m in names if m[1] == e or m[0].endswith('only')] for e in READINGS]
    )
    fig, axes = new_figure(look.width, look.height, ncols=len(groups), nrows=len(rows))
    with paper_style():
        for line, row in zip(axes, rows):
            for ax, (name, part) in zip(line, groups):
                drawn = part[[pair in row for pair in zip(part['method'], part['on_escalate'])]]
                curves, dots = (f[f['benchmark'] == name] for f in (frontiers, seeds))
                _draw_panel(ax, drawn, curves, dots, look.style)
            line[0].set_ylabel('accuracy, %')
        _finish(fig, axes, look)
    return fig


def figure_caption(
    points,  # as drawn, as are methods, seeds and look
    methods=None,
    seeds=None,
    facts=(),  # {"profile": ..., "billing": who was paid}
    **look,
) -> str:
    "What an accuracy-cost figure shows, sentence by sentence as it was drawn."
    facts = dict(facts)
    chosen = points[points['chosen'] == 1]
    rows = [
        r
        for r in chosen.to_dict('records')
        if not methods or (r['method'], r['on_escalate']) in methods
    ]
    counts = points.groupby('benchmark', sort=False)['n'].first()
    cost = '2N FLOPs a token for N parameters'
    if points['cost_in'].iloc[0] == 'cents':
        cost = f'US cents; {facts["billing"]}; the small model costs nothing'
    if _look(points, methods, look).xscale == 'log':
        cost += '; logarithmic axis, linear below 1 %'
    drawn = 'every method; above: append, below: regenerate'
    if methods:
        drawn = '; '.join(dict.fromkeys(map(label, rows)))
    if methods and set(methods) == set(drawn_methods(points)):
        drawn = 'each method in its variant that was cheapest on calibration'
    again = ' and '.join(
        f for f in ('SpecReason', 'RSD') if any(r['method'].startswith(f) for r in rows)
    )
    hollow = any(map(is_hollow, rows))
    filled = f'; so do {again}, filled' if again else ''
    sentences = {
        f"Accuracy against cost (share of the large model's, {cost}), {facts['profile']} profile; {drawn}.": 1,
        f'Test problems: {", ".join(map("{} {}".format, *zip(*counts.items())))}; all methods see the same draws '
        'of both models.': 1,
        'Lines: one score or policy at all its thresholds; markers: the threshold chosen on calibration problems; '
        'light crosses: its paired bootstrap 95% intervals.': 1,
        'Ours is the mean over training seeds; small dots: single seeds.': seeds is not None
        and any(r['method'].startswith('Ours') for r in rows),
        'An arrow: the cost is higher than shown.': any(
            100 * r['cost_share'] > _EDGE for r in rows
        ),
        'Grey, solid: chance picks a model for each problem; dotted: chance escalates after each step; dashed: '
        'hindsight, which knows the answers; in both the large model appends.': 1,
        f'Hollow markers: regenerate, the large model writes the step again{filled}.': hollow,
        f'With {again}, the large model writes the step again.': again and not hollow,
    }
    return ' '.join(s for s, holds in sentences.items() if holds)


def seed_points(p):  # DataFrame: benchmark, method, on_escalate, seed, cost_share, accuracy
    "Where the single policies of `BenchmarkResults` stand, each at its own threshold."
    cost = p.grid['unit'].iloc[0]
    names = {cost: 'cost_share', 'correct': 'accuracy'}
    means = (
        p.singles.groupby(['benchmark', 'method', 'on_escalate', 'seed'])[list(names)]
        .mean()
        .rename(columns=names)
    )
    return means.assign(
        cost_share=means['cost_share'] / p.table.large_only()[cost].mean()
    ).reset_index()


def save_points(r):
    "Write what the figures of a `SettingResults` show beside the points themselves: frontiers and seeds."
    for stem, frame in dict(frontiers=r.whole(frontiers), seeds=r.whole(seed_points)).items():
        if len(frame):
            save_table(r.tables / f'{stem}{r.suffix}', frame)


def read_points(
    tables, suffix=''
) -> dict:  # folder; "_api" in cents -> arguments of `draw_accuracy_cost`, and `facts`
    "The points of a run's figures, from its tables; in cents, too, where there are no others."
    import pandas as pd

    if not (Path(tables) / 'evaluation.csv').is_file():
        suffix = '_api'
    paths = {
        k: Path(tables) / f'{stem}{suffix}.csv'
        for k, stem in dict(points='evaluation', frontiers='frontiers', seeds='seeds').items()
    }
    out = {k: pd.read_csv(path) if path.is_file() else None for k, path in paths.items()}
    table = pd.read_csv(Path(tables) / ('table2.csv' if suffix else 'table1.csv')).iloc[0]
    return out | dict(facts={k: table[k] for k in ('profile', 'billing') if k in table})


_LINES = [('#0173b2', '-'), ('#a85c00', '--'), ('#00735a', '-.'), ('#404040', ':')]

_TRAINED = dict(cost='cost, share of large', lost='accuracy lost', kappa=r'threshold $\kappa$')


def draw_training(curves):  # of `training_curves`
    "Training of the rows Ours: mean and range over the seeds, running mean of 5 steps."
    rows = list(curves.groupby('row', sort=False))
    fig, axes = new_figure(5.5, 3.2, nrows=len(rows), ncols=3, sharex=True)
    with paper_style():
        for (name, own), line in zip(rows, axes):
            for (benchmark, c), (color, dash) in zip(own.groupby('benchmark', sort=False), _LINES):
                for ax, (k, title) in zip(line, _TRAINED.items()):
                    ax.fill_between(
                        c['step'], c[f'{k}_min'], c[f'{k}_max'], color=color, alpha=0.2, lw=0
                    )
                    ax.plot(c['step'], c[k], dash, color=color, label=benchmark)
                    ax.set_ylabel(title)
            line[1].axhline(own['alpha'].iloc[0], color='#555555', lw=0.5, ls=':')
            line[1].set_title(name)
        for ax in axes[-1]:
            ax.set_xlabel('step')
        fig.legend(
            *axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=4, fontsize=7
        )
    return fig


def training_caption(curves):
    first = curves.iloc[0]
    return (
        f'Training of the rows {" and ".join(curves["row"].unique())}; {first["seeds"]} seeds: mean and range over '
        'the seeds, running mean of 5 steps; cost and accuracy lost (the large model\'s minus its own) are those '
        f'of Gamma on the {first["batch"]} training rows of a step. Dotted: alpha.'
    )


def draw_policies(curves):  # of `policy_curves`
    "Where the policies escalate, a panel a benchmark, a line a step index."
    import matplotlib

    groups = list(curves.groupby('benchmark', sort=False))
    fig, axes = new_figure(5.5, 1.9, ncols=len(groups))
    with paper_style():
        for ax, (name, own) in zip(axes[0], groups):
            for t, c in own.groupby('step'):
                shade = matplotlib.colormaps['viridis'](0.16 * t)
                place = int(len(c) * (0.12 + 0.12 * t))
                ax.plot(c['percentile'], c['escalate'], color=shade)
                x, y = c.iloc[place][['percentile', 'escalate']]
                ax.text(
                    x,
                    y,
                    f'{t}',
                    fontsize=6.5,
                    ha='center',
                    va='center',
                    bbox=dict(fc='white', ec=shade, lw=0.5, pad=0.8),
                )
            ax.axhline(own['kappa'].iloc[0], color='#555555', lw=0.5, ls=':')
            ax.text(
                99,
                own['kappa'].iloc[0],
                r'$\kappa$',
                fontsize=7,
                color='#555555',
                ha='right',
                va='bottom',
            )
            ax.set(xlabel='percentile of the probability', ylim=(-0.03, 1.03), title=name)
        axes[0, 0].set_ylabel(r'$\pi$(escalate)')
    return fig


def policies_caption(curves):
    return (
        "Probability of escalating against the percentile of the least sure token's probability, by step index "
        f'(numbers on the lines); other features at their median. Policies: {curves["row"].iloc[0]}, first seed. '
        'Dotted: calibrated kappa.'
    )


def accuracy_figures(
    tables, suffix=''
) -> dict:  # folder; "_api": in cents -> stem: (figure, caption)
    "The main and the full figure of a setting, from its tables; none where it has none."
    if not (Path(tables) / f'frontiers{suffix}.csv').is_file():
        return {}
    data = read_points(tables, suffix)
    name = 'accuracy_cents' if suffix else 'accuracy_cost'

    def made(methods, **look):
        drawn = {k: v for k, v in data.items() if k != 'facts'}
        told = {k: v for k, v in data.items() if k != 'frontiers'}
        return draw_accuracy_cost(methods=methods, **drawn, **look), figure_caption(
            methods=methods, **told, **look
        )

    return {name: made(drawn_methods(data['points'])), f'{name}_full': made(None, height=5.6)}


def policy_figures(tables) -> dict:
    "The same of training and policies."
    import pandas as pd

    out = {}
    kinds = dict(
        training=(draw_training, training_caption), policy=(draw_policies, policies_caption)
    )
    for stem, (draw, caption) in kinds.items():
        if not (path := Path(tables) / f'{stem}.csv').is_file():
            continue
        curves = pd.read_csv(path)
        out[stem] = draw(curves), caption(curves)
    return out


def redraw(tables, figures) -> list:  # folders; paths written
    "All figures, from the tables alone; FileNotFoundError where these hold no points."
    if not list(Path(tables).glob('frontiers*.csv')):
        raise FileNotFoundError(f'{tables} has no frontiers*.csv')
    made = accuracy_figures(tables) | accuracy_figures(tables, '_api') | policy_figures(tables)
    return [
        path
        for stem, (fig, caption) in made.items()
        for path in save_figure(fig, Path(figures) / stem, caption)
    ]


def tables_of(run):
    "The folder of a run's tables, or of the committed ones where it has none yet."
    return run.tables if list(run.tables.glob('frontiers*.csv')) else find_project().root / 'tables'


def save_and_show(made, figures, dpi=100) -> list:  # of `accuracy_figures`; folder
    "Save figures, and show all but those of every method."
    for stem, (fig, caption) in made.items():
        save_figure(fig, figures / stem, caption)
    return [preview(fig, dpi) for stem, (fig, _) in made.items() if not stem.endswith('_full')]


def report_accuracy_cost(r) -> list:
    "Write the points and the figures of a `SettingResults`, and show the main one. After `report_paper`."
    save_points(r)
    return save_and_show(accuracy_figures(r.tables, r.suffix), r.figures, 130)
