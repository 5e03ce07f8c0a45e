"""A figure with a slider: accuracy and cost while kappa moves

Here belongs this figure, for a notebook. Figures without a slider belong in
`report.figures`.
"""

import math

from ..method.results import method_label, style_of
from .figures import draw_accuracy_cost
from .points import drawn_methods, read_points, sweep_points
from .style import preview
from .writer import PERCENT

GREY = '#7a7a7a'  # of text and lines, legible on white and on black
CLEAR = 'rgba(0,0,0,0)'
CHOSEN = 'the chosen setting'  # label of the setting that was chosen on calibration
DASHES = {'small-large line': 'solid', 'random': 'dot', 'oracle': 'dash'}
CURVE_NAMES = {  # curve of `frontiers` -> its name in the legend
    'small-large line': 'chance, per problem',
    'random': 'chance, per step',
    'oracle': 'hindsight',
}


def _percent_of(points):
    return (100 * points).round(3).tolist()


def _add_curve(fig, panel, points, name, **look):
    "Draw points in one panel, accuracy against cost. The legend names them once for all panels."
    fig.add_scatter(
        x=_percent_of(points['cost_share']),
        y=_percent_of(points['accuracy']),
        showlegend=panel == 1,
        legendgroup=name,
        row=1,
        col=panel,
        name=name,
        **look,
    )


def _stop(label, rows):  # rows: benchmark -> row of `evaluate`
    "One stop of the slider: its cost, its name, the places of the markers, the numbers above the panels."
    xs = []
    ys = []
    titles = {}
    for number, (benchmark, row) in enumerate(rows.items()):
        cost = 100 * row['cost_share']
        accuracy = 100 * row['accuracy']
        xs.append([round(cost, 3)])
        ys.append([round(accuracy, 3)])
        numbers = f'{PERCENT(accuracy)} % at {PERCENT(cost)} %'
        titles[f'annotations[{number}].text'] = f'<b>{benchmark}</b><br>{numbers}'
    cost = sum(row['cost_share'] for row in rows.values())
    return cost, label, dict(x=xs, y=ys), titles


def _chosen_label(rows):
    "The label of the stop with the chosen settings: their kappas, if they have some."
    kappas = [row.get('kappa', float('nan')) for row in rows.values()]
    if any(math.isnan(kappa) for kappa in kappas):
        return CHOSEN
    return f'{CHOSEN}: kappa {" / ".join(f"{kappa:.4g}" for kappa in kappas)}'


def _nearest(sweep, threshold):
    return sweep.iloc[(sweep['threshold'] - threshold).abs().argmin()]


def _stops(sweeps, chosen):  # benchmark -> sweep; benchmark -> chosen row
    """All stops of the slider by cost, the chosen settings among them.

    The other stops have numbers as names, because each training seed has its own kappa there.
    """
    thresholds = sorted(set().union(*(sweep['threshold'] for sweep in sweeps.values())))
    stops = []
    for number, threshold in enumerate(thresholds, 1):
        rows = {benchmark: _nearest(sweep, threshold) for benchmark, sweep in sweeps.items()}
        stops.append(_stop(f'kappa number {number} of {len(thresholds)}', rows))
    own = _stop(_chosen_label(chosen), chosen)
    cheaper = [stop for stop in stops if stop[0] < own[0]]
    stops.insert(len(cheaper), own)
    return stops


def _bar(stops, markers):
    "The slider, which starts at the chosen settings."
    steps = []
    for _, label, moved, titles in stops:
        steps.append(dict(label=label, method='update', args=[moved, titles, markers]))
    active = [label.startswith(CHOSEN) for _, label, _, _ in stops].index(True)
    value = dict(font=dict(color=GREY, size=12))
    # plotly always draws labels below the bar; we make them invisible and without height
    look = dict(font=dict(color=CLEAR, size=1), ticklen=0, minorticklen=0)
    return dict(steps=steps, active=active, pad=dict(t=60), currentvalue=value, **look)


def _draw_panel(fig, panel, benchmark, sweep, frontiers, color):
    curves = frontiers[frontiers['benchmark'] == benchmark]
    for name, curve in curves.groupby('curve', sort=False):
        line = dict(color=GREY, dash=DASHES[name], width=1)
        _add_curve(fig, panel, curve, CURVE_NAMES[name], mode='lines', line=line)
    _add_curve(fig, panel, sweep, 'the router at every kappa', mode='lines', line=dict(color=color))


def _lay_out(fig, row, bar):
    "Set grey text without background, for light and dark pages, and margins for a narrow screen."
    fig.update_xaxes(zeroline=False, automargin=True)
    fig.update_xaxes(
        title="cost, % of the large model's", col=(len(bar['steps'][0]['args'][1]) + 1) // 2
    )
    fig.update_yaxes(title='accuracy, %', col=1)
    fig.update_annotations(font=dict(size=11))
    return fig.update_layout(
        template='none',
        title=dict(text=f'{method_label(*row)}: drag kappa', font=dict(size=14), x=0.02),
        font=dict(color=GREY, size=11),
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        legend=dict(orientation='h', yref='container', y=0, yanchor='bottom'),
        margin=dict(l=45, r=12, t=90, b=160),
        sliders=[bar],
    )


def slider(
    points,  # of `read_points`
    frontiers,  # of `read_points`
    row: tuple,  # (method, on_escalate)
):  # plotly figure
    """Accuracy against cost of a sweep, with a panel per benchmark and a marker in each panel.

    A slider moves the markers along the thresholds of the sweep. It starts at the chosen setting.
    """
    from plotly.subplots import make_subplots

    own = points[(points['method'] == row[0]) & (points['on_escalate'] == row[1])]
    sweeps = {}
    chosen = {}
    for benchmark, of_benchmark in own.groupby('benchmark', sort=False):
        sweeps[benchmark] = sweep_points(of_benchmark).sort_values('threshold')
        chosen[benchmark] = of_benchmark[of_benchmark['chosen'] == 1].iloc[0]
    fig = make_subplots(1, len(sweeps), subplot_titles=list(sweeps), horizontal_spacing=0.09)
    color = style_of(row[0])['color']
    markers = []
    for panel, (benchmark, sweep) in enumerate(sweeps.items(), 1):
        _draw_panel(fig, panel, benchmark, sweep, frontiers, color)
        markers.append(len(fig.data))
        star = dict(color=color, size=13, symbol='star')
        here = sweep[:0]
        _add_curve(fig, panel, here, 'the router at this kappa', mode='markers', marker=star)
    bar = _bar(_stops(sweeps, chosen), markers)
    moved, titles, _ = bar['steps'][bar['active']]['args']
    for marker, x, y in zip(markers, moved['x'], moved['y']):
        fig.data[marker].update(x=x, y=y)
    for annotation, text in zip(fig.layout.annotations, titles.values()):
        annotation.update(text=text)
    return _lay_out(fig, row, bar)


def show_slider(
    tables,  # folder, of `tables_of`
) -> None:
    """Display the slider of the row that the main figure shows last.

    Without plotly it shows a picture instead.
    """
    from IPython.display import display

    data = read_points(tables)
    points = data['points']
    curves = data['frontiers']
    row = drawn_methods(points)[-1]
    pairs = [('Small only', 'append'), ('Large only', 'append'), row]
    picture = preview(draw_accuracy_cost(points, curves, pairs, height=2.4), dpi=90)
    bundle = {
        'image/png': picture.data,
        'text/plain': f'{row[0]}, {row[1]}: accuracy against cost at every threshold',
    }
    try:
        bundle['application/vnd.plotly.v1+json'] = slider(points, curves, row).to_plotly_json()
    except ImportError:
        pass
    display(bundle, raw=True)
