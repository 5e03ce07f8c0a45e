"""Figures of accuracy against cost, in the width in which they are printed

Here belong the drawing of the main figures, their captions, and their files. The points that are
drawn belong in `report.points`, fonts and formats in `report.style`, figures of training in
`report.training`.
"""

from pathlib import Path

from ..util import find_project, one_of
from ..method.comparison import NESTED
from ..method.results import REWRITES, method_rank, style_of
from .points import drawn_methods, read_points, save_points, sweep_points
from .style import new_figure, paper_style, preview, save_figure
from .training import policy_figures
from .writer import label

# ---- one panel

COST_LABEL = "cost, % of the large model's"
EDGE = 150  # % of the large model's cost; a dearer method stands at the edge
NOT_DRAWN = ('Random', 'Oracle')  # they are drawn as frontiers instead
FRONTIER_DASHES = {'small-large line': '-', 'random': ':', 'oracle': '--'}


def is_hollow(
    row,  # of `evaluate`
) -> bool:
    "Is the marker hollow? Yes if the method regenerates the step, though it could also append."
    return row['on_escalate'] == 'regenerate' and row['method'] not in REWRITES


def _draw_frontiers(ax, curves):
    for name, curve in curves.groupby('curve', sort=False):
        ax.plot(
            100 * curve['cost_share'],
            100 * curve['accuracy'],
            FRONTIER_DASHES[name],
            color='#767676',
            lw=0.8,
            zorder=1,
            label=name,
        )


def _draw_intervals(ax, row, color):
    "Draw the intervals of a chosen point as a light cross."
    cost = 100 * row['cost_share']
    accuracy = 100 * row['accuracy']
    costs = [100 * row['cost_share_low'], 100 * row['cost_share_high']]
    accuracies = [100 * row['accuracy_low'], 100 * row['accuracy_high']]
    ax.plot(costs, [accuracy, accuracy], color=color, lw=1.5, alpha=0.3, zorder=2)
    ax.plot([cost, cost], accuracies, color=color, lw=1.5, alpha=0.3, zorder=2)


def _draw_seeds(ax, seeds, color):
    cost = 100 * seeds['cost_share']
    accuracy = 100 * seeds['accuracy']
    ax.plot(cost, accuracy, '.', color=color, ms=3, mew=0, alpha=0.6, zorder=4)


def _draw_arrow(ax, accuracy, color):
    "Draw an arrow at the right edge: the cost of a point is higher than shown."
    arrow = dict(arrowstyle='->', color=color)
    ax.annotate('', (EDGE + 8, accuracy), (EDGE, accuracy), arrowprops=arrow)


def _draw_curve(ax, points, style):
    "Draw only the line of a method without a chosen point, such as one of `add_curve`."
    sweep = points.sort_values('threshold')
    costs = 100 * sweep['cost_share']
    accuracies = 100 * sweep['accuracy']
    for accuracy in accuracies[costs > EDGE]:
        _draw_arrow(ax, accuracy, style['color'])
    ax.plot(
        costs,
        accuracies,
        color=style['color'],
        marker=style['marker'],
        ms=3,
        mew=0.8,
        label=style['label'],
        zorder=3,
    )


def _draw_method(ax, points, seeds, style):
    "Draw a method: its sweep, its chosen point with intervals, and its single seeds as dots."
    if not points['chosen'].any():
        _draw_curve(ax, points, style)
        return
    chosen = points[points['chosen'] == 1].iloc[0]
    sweep = sweep_points(points).sort_values('threshold')
    color = style['color']
    is_main = chosen['method'] == NESTED
    hollow = is_hollow(chosen)
    width = 1.8 if is_main else 1.0
    dash = (0, (4, 1.5)) if hollow else '-'
    costs = 100 * sweep['cost_share']
    ax.plot(costs, 100 * sweep['accuracy'], color=color, lw=width, ls=dash, zorder=3 + is_main)
    _draw_intervals(ax, chosen, color)
    _draw_seeds(ax, seeds, color)
    cost = 100 * chosen['cost_share']
    accuracy = 100 * chosen['accuracy']
    if cost > EDGE:
        _draw_arrow(ax, accuracy, color)
    ax.plot(
        [min(cost, EDGE)],
        [accuracy],
        color=color,
        lw=width,
        ls='none' if len(sweep) == 1 else dash,  # the legend shows a line if there is one
        marker=style['marker'],
        mfc='white' if hollow else color,
        ms=6.5 if is_main else 4.5,
        mew=0.8,
        label=style['label'] + (', regen.' if hollow else ''),
        zorder=5 + is_main,
    )


def _draw_panel(ax, points, curves, seeds, styles):
    "Draw accuracy against cost on one benchmark."
    drawn = points[~points['method'].isin(NOT_DRAWN)]
    groups = dict(iter(drawn.groupby(['method', 'on_escalate'])))
    for method, on_escalate in sorted(groups, key=lambda row: (method_rank(row[0]), row[1])):
        own_seeds = seeds[(seeds['method'] == method) & (seeds['on_escalate'] == on_escalate)]
        _draw_method(ax, groups[method, on_escalate], own_seeds, styles[method])
    _draw_frontiers(ax, curves)
    ax.margins(0.04, 0.08)
    ax.locator_params('y', nbins=5)
    ax.set_xlim(right=min(ax.get_xlim()[1], EDGE + 10))
    ax.set_xlabel(COST_LABEL)
    ax.set_title(points['benchmark'].iloc[0])


# ---- whole figures

LEGEND_COLUMN = 1.3  # inches for a column of names
COST_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)  # of a logarithmic axis


def _scale_costs(ax):
    "Make the axis logarithmic, but linear below 1 %, because a cost can be 0."
    ax.set_xscale('symlog', linthresh=1)
    left = ax.get_xlim()[0]
    ax.set_xticks([tick for tick in COST_TICKS if tick >= left], minor=False)
    ax.xaxis.set_major_formatter('{x:g}')
    ax.minorticks_off()


def _draw_legend(fig, axes, size, ncols):
    handles = {}
    for ax in axes.flat:
        for handle, name in zip(*ax.get_legend_handles_labels()):
            handles[name] = handle
    fig.legend(
        handles.values(),
        handles,
        loc='outside lower center',
        ncols=ncols,
        fontsize=size,
        handlelength=2.4,
        columnspacing=1.0,
        labelspacing=0.3,
    )


def _share_cost_labels(fig, axes):
    "If the label of costs is too wide to be below each panel, write it below the middle one only."
    n_columns = axes.shape[1]
    room = 0.85 * fig.bbox.width / n_columns
    if axes[-1, 0].xaxis.label.get_window_extent().width <= room:
        return
    for ax in axes.flat:
        ax.set_xlabel('')
    axes[-1, n_columns // 2].set_xlabel(COST_LABEL)


def _draw_panels(axes, methods, parts, frontiers, styles):
    "Draw a panel per benchmark. `axes` are [benchmark]."
    for ax, (benchmark, part, dots) in zip(axes, parts):
        pairs = zip(part['method'], part['on_escalate'])
        drawn = part[[pair in methods for pair in pairs]]
        curves = frontiers[frontiers['benchmark'] == benchmark]
        _draw_panel(ax, drawn, curves, dots, styles)


def draw_accuracy_cost(
    points,  # DataFrame of `evaluate`, one or several benchmarks
    frontiers,  # DataFrame of their `frontiers`
    methods=None,  # (method, on_escalate) pairs; None: those of `drawn_methods`
    seeds=None,  # DataFrame of their `seed_points`: single seeds as dots
    facts=None,  # of `read_points`; not drawn: `figure_caption` uses them
    xscale: str = 'linear',  # or "log", which is linear below 1 %
    legend: bool = True,  # names below the panels
    size: float = 7,  # of the names, points
    width: float = 5.5,  # inches: 2.7 for one panel, 5.5 for a row of them
    height: float = 2.9,  # inches
    style=None,  # method -> its color, marker and label, if they differ from the usual ones
    stacked: bool = False,  # benchmarks one below the other, for a narrow column
    font: str = '',  # family, such as "serif" or "Times New Roman"; '': STIX
    rc=None,  # name -> value: settings of matplotlib that replace ours; your rcParams are not used
):  # matplotlib figure
    """Draw accuracy against cost, a panel per benchmark. ValueError for an unknown method lists the known ones.

    `draw_accuracy_cost(**read_points(folder))` draws the tables of a folder.
    """
    one_of('xscale', xscale, ('linear', 'log'))
    rows = sorted({*zip(points['method'], points['on_escalate'])})
    methods = methods or drawn_methods(points)
    for row in methods:
        one_of('method', row, rows)
    style = style or {}
    styles = {name: style_of(name) | style.get(name, {}) for name in points['method'].unique()}
    seeds = points[:0] if seeds is None else seeds
    parts = []
    for benchmark, part in points.groupby('benchmark', sort=False):
        parts.append((benchmark, part, seeds[seeds['benchmark'] == benchmark]))
    shape = (len(parts), 1) if stacked else (1, len(parts))
    fig, axes = new_figure(width, height, *shape, font=font, rc=rc)
    with paper_style(font, rc):
        _draw_panels(axes.flat, methods, parts, frontiers, styles)
        for ax in axes[:, 0]:
            ax.set_ylabel('accuracy, %')
        if stacked:
            for ax in axes[:-1].flat:
                ax.set_xlabel('')
        _share_cost_labels(fig, axes)
        if xscale == 'log':
            for ax in axes.flat:
                _scale_costs(ax)
        if legend:
            _draw_legend(fig, axes, size, ncols=max(1, int(width / LEGEND_COLUMN)))
    return fig


# ---- captions


def _drawn_in_words(points, methods, rows):
    if set(methods) == set(drawn_methods(points)):
        words = 'Each method is drawn in the variant that was cheapest on calibration problems'
        has_ours = any(row['method'] == 'Ours' for row in rows)
        return f'{words}; Ours appends, as in the paper.' if has_ours else f'{words}.'
    names = dict.fromkeys(map(label, rows))
    return f'Drawn: {", ".join(names)}.'


def _cost_in_words(points, facts, xscale):
    cost = 'in FLOPs: 2N a token for a model of N parameters.'
    if points['cost_in'].iloc[0] == 'cents':
        cost = f'in US cents: {facts["billing"]}. The small model costs nothing.'
    words = f"Cost is a share of the large model's cost, {cost}"
    if xscale == 'log':
        words += ' Cost has a logarithmic axis, which is linear below 1 %.'
    return words


def _rewriting_in_words(rows):
    "A sentence about the drawn methods that write a step again. '' if none does."
    families = []
    for family in ('SpecReason', 'RSD'):
        if any(row['method'].startswith(family) for row in rows):
            families.append(family)
    rewriting = ' and '.join(families)
    if any(map(is_hollow, rows)):
        filled = f' So do {rewriting}, with filled markers.' if rewriting else ''
        return f'Hollow markers: regenerate; the large model writes the last step again.{filled}'
    return f'With {rewriting}, the large model writes the last step again.' if rewriting else ''


def figure_caption(
    points,  # as drawn, as are methods, seeds and xscale
    methods=None,
    seeds=None,
    facts=(),  # {"profile": ..., "billing": who was paid}
    xscale: str = 'linear',
) -> str:
    "The caption of an accuracy-cost figure: what was drawn, sentence by sentence."
    facts = dict(facts)
    methods = methods or drawn_methods(points)
    names = ['benchmark', 'method', 'on_escalate']
    chosen = points.sort_values('chosen', ascending=False, kind='stable').drop_duplicates(names)
    chosen = chosen.sort_index(kind='stable').to_dict('records')
    rows = [row for row in chosen if (row['method'], row['on_escalate']) in methods]
    cost = _cost_in_words(points, facts, xscale)
    drawn = _drawn_in_words(points, methods, rows)
    sizes = points.groupby('benchmark', sort=False)['n'].first()
    counts = ', '.join(f'{benchmark} {n}' for benchmark, n in sizes.items())
    sentences = [
        f'Accuracy and cost of routers on the test problems of the profile {facts["profile"]} ({counts}).',
        cost,
        drawn,
        'All methods see the same draws of both models.',
        'A line shows one score or policy at all its thresholds.',
        'A marker shows the threshold that was chosen on calibration problems.',
        'Light crosses are 95% intervals: test problems, calibration problems and seeds are drawn again.',
    ]
    has_seeds = seeds is not None and len(seeds)
    if has_seeds and any(row['method'].startswith('Ours') for row in rows):
        sentences.append('Ours is the mean over training seeds; small dots are single seeds.')
    if any(100 * row['cost_share'] > EDGE for row in rows):
        sentences.append('An arrow says that the cost is higher than shown.')
    sentences.append(
        'Grey lines: chance picks a model for each problem (solid); chance hands over after a step (dotted); '
        'hindsight knows the answers (dashed). In the last two the large model appends.'
    )
    rewriting = _rewriting_in_words(rows)
    if rewriting:
        sentences.append(rewriting)
    return ' '.join(sentences)


# ---- files


def accuracy_figures(
    tables,  # folder
    suffix: str = '',  # '_cents': in cents
) -> dict:  # stem -> (figure, caption)
    "The figure of one unit of cost, from its tables. {} if the tables hold no points."
    names = f'evaluation{suffix}.csv', f'frontiers{suffix}.csv'
    if not any((Path(tables) / name).is_file() for name in names):
        return {}
    data = read_points(tables, suffix)
    points = data['points']
    seeds = data['seeds']
    name = 'accuracy_cents' if suffix else 'accuracy_cost'
    fig = draw_accuracy_cost(points, data['frontiers'], seeds=seeds)
    return {name: (fig, figure_caption(points, seeds=seeds, facts=data['facts']))}


def redraw(
    tables,  # folder to read
    figures,  # folder to write
) -> list:  # paths written
    "Draw all figures, from the tables alone. FileNotFoundError if the tables hold no points."
    if not list(Path(tables).glob('frontiers*.csv')):
        raise FileNotFoundError(
            f'{tables} has no frontiers*.csv: give the folder tables of a finished run'
        )
    drawn = accuracy_figures(tables) | accuracy_figures(tables, '_cents') | policy_figures(tables)
    paths = []
    for stem, (fig, caption) in drawn.items():
        paths += save_figure(fig, Path(figures) / stem, caption)
    return list(dict.fromkeys(paths))


def tables_of(
    run,  # `Run`
) -> Path:
    "The folder of a run's tables. If the run has none yet: the folder of the committed tables."
    return run.tables if list(run.tables.glob('frontiers*.csv')) else find_project().root / 'tables'


def previews(
    drawn: dict,  # of `accuracy_figures` or `policy_figures`
    dpi: float = 100,  # dots per inch
) -> list:  # IPython Images
    "Show figures."
    return [preview(fig, dpi) for fig, _ in drawn.values()]


def save_and_show(
    drawn: dict,  # of `accuracy_figures` or `policy_figures`
    figures: Path,  # folder
    dpi: float = 100,  # dots per inch of the pictures shown
) -> list:  # IPython Images
    "Save figures, and show them."
    for stem, (fig, caption) in drawn.items():
        save_figure(fig, figures / stem, caption)
    return previews(drawn, dpi)


def committed_figures() -> list:  # IPython Images
    "The main figures, drawn from the committed tables; nothing is written."
    tables = find_project().root / 'tables'
    return previews(accuracy_figures(tables) | accuracy_figures(tables, '_cents'), 130)


def report_accuracy_cost(
    r,  # `RunResults`
) -> list:  # IPython Images
    "Write the points and the figures, and show the main figure. Call `report_paper` first."
    save_points(r)
    return save_and_show(accuracy_figures(r.tables, r.suffix), r.figures, 130)
