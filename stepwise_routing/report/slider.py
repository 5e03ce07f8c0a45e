"""What happens to accuracy and cost when kappa moves

Here belongs the figure with a slider, for a notebook and as a page. Figures that stand still belong
in `report.figures`.
"""

from pathlib import Path

from ..base.tools import write_file
from ..method.results import style_of
from .figures import draw_accuracy_cost
from .points import drawn_methods, read_points, sweep_points
from .style import preview
from .writer import PERCENT

GREY = '#767676'
FRONTIER_DASHES = {'small-large line': 'solid', 'random': 'dot', 'oracle': 'dash'}


def _percent_of(points):
    return (100 * points).round(3).tolist()


def _add_curve(fig, panel, points, name, **look):
    "Accuracy against cost of some points, in one panel."
    fig.add_scatter(
        x=_percent_of(points['cost_share']),
        y=_percent_of(points['accuracy']),
        showlegend=False,
        row=1,
        col=panel,
        name=name,
        **look,
    )


def _stop(sweeps, threshold):
    "Where the markers stand at a threshold, and the title that says so."
    xs = []
    ys = []
    numbers = []
    for benchmark, sweep in sweeps.items():
        nearest = sweep.iloc[(sweep['threshold'] - threshold).abs().argmin()]
        cost = 100 * nearest['cost_share']
        accuracy = 100 * nearest['accuracy']
        xs.append([round(cost, 3)])
        ys.append([round(accuracy, 3)])
        numbers.append(f'{benchmark}: {PERCENT(accuracy)} % at {PERCENT(cost)} %')
    return dict(x=xs, y=ys), '; '.join(numbers)


def _stops(sweeps, markers):  # benchmark -> sweep; indices of the markers
    "All places of the slider. They are numbered, as the seeds of ours have kappas of their own."
    thresholds = sorted(set().union(*(sweep['threshold'] for sweep in sweeps.values())))
    stops = []
    for number, threshold in enumerate(thresholds, 1):
        moved, title = _stop(sweeps, threshold)
        arguments = [moved, {'title.text': title}, markers]
        label = f'{number} of {len(thresholds)}'
        stops.append(dict(label=label, method='update', args=arguments))
    return stops


def slider(
    points,  # of `read_points`
    frontiers,  # of `read_points`
    row: tuple,  # (method, on_escalate)
):  # plotly figure
    """Accuracy against cost of a sweep, a panel a benchmark, with a marker in each.

    A slider moves the markers along the thresholds of the sweep.
    """
    from plotly.subplots import make_subplots

    own = points[(points['method'] == row[0]) & (points['on_escalate'] == row[1])]
    sweeps = {}
    for benchmark, of_benchmark in own.groupby('benchmark', sort=False):
        sweeps[benchmark] = sweep_points(of_benchmark).sort_values('threshold')
    fig = make_subplots(1, len(sweeps), subplot_titles=list(sweeps))
    color = style_of(row[0])['color']
    markers = []
    for panel, (benchmark, sweep) in enumerate(sweeps.items(), 1):
        curves = frontiers[frontiers['benchmark'] == benchmark]
        for name, curve in curves.groupby('curve', sort=False):
            line = dict(color=GREY, dash=FRONTIER_DASHES[name], width=1)
            _add_curve(fig, panel, curve, name, mode='lines', line=line)
        _add_curve(fig, panel, sweep, 'all kappas', mode='lines', line=dict(color=color))
        markers.append(len(fig.data))
        star = dict(color=color, size=13, symbol='star')
        _add_curve(fig, panel, sweep[:1], 'this kappa', mode='markers', marker=star)
    middle = (len(sweeps) + 1) // 2
    fig.update_xaxes(zeroline=False)
    fig.update_xaxes(title="cost, % of the large model's", col=middle)
    fig.update_yaxes(title='accuracy, %', col=1)
    stops = _stops(sweeps, markers)
    bar = dict(steps=stops, pad=dict(t=70), currentvalue=dict(prefix='kappa number '))
    first_title = stops[0]['args'][1]['title.text']
    title = dict(text=first_title, font=dict(size=13))
    return fig.update_layout(sliders=[bar], template='none', title=title)


def slider_page(
    tables,  # folder
    path,  # of the page; plotly's script is written beside it
) -> Path:
    "The slider as a page of its own, the same bytes for the same tables."
    data = read_points(tables)
    fig = slider(data['points'], data['frontiers'], drawn_methods(data['points'])[-1])
    config = dict(displaylogo=False)
    fig.write_html(path, include_plotlyjs='directory', div_id='slider', config=config)
    page = Path(path).read_text('utf-8')  # in a frame, margins would make it scroll
    return write_file(path, page.replace('body {height: 100%;}', 'body {height: 100%; margin: 0;}'))


def show_slider(
    tables,  # folder, of `tables_of`
) -> None:
    """Display the slider of the row that the main figure shows last.

    It is a picture if plotly is not there.
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
