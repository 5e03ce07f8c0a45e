"""What happens to accuracy and cost when kappa moves"""

from pathlib import Path

from ..base.tools import write_file
from ..method.results import style_of
from .figures import draw_accuracy_cost, drawn_methods, preview, read_points, sweep_points
from .writer import PERCENT


def slider(
    points,  # of `read_points`, as are the frontiers
    frontiers,
    row,  # method, on_escalate
):  # plotly figure
    "Accuracy against cost of a sweep, a panel a benchmark, with a marker that a slider moves along its thresholds."
    from plotly.subplots import make_subplots

    own = points[(points['method'] == row[0]) & (points['on_escalate'] == row[1])]
    sweeps = {
        b: sweep_points(p).sort_values('threshold') for b, p in own.groupby('benchmark', sort=False)
    }
    fig = make_subplots(1, len(sweeps), subplot_titles=list(sweeps))
    color = style_of(row[0])['color']
    markers = []
    grey = {'small-large line': 'solid', 'random': 'dot', 'oracle': 'dash'}
    for i, (benchmark, sweep) in enumerate(sweeps.items(), 1):

        def draw(x, y, **look):
            x, y = ((100 * v).round(3).tolist() for v in (x, y))
            fig.add_scatter(x=x, y=y, showlegend=False, row=1, col=i, **look)

        for name, c in frontiers[frontiers['benchmark'] == benchmark].groupby('curve', sort=False):
            look = dict(color='#767676', dash=grey[name], width=1)
            draw(c['cost_share'], c['accuracy'], name=name, mode='lines', line=look)
        draw(
            sweep['cost_share'],
            sweep['accuracy'],
            name='all kappas',
            mode='lines',
            line=dict(color=color),
        )
        markers.append(len(fig.data))
        draw(
            sweep['cost_share'][:1],
            sweep['accuracy'][:1],
            name='this kappa',
            mode='markers',
            marker=dict(color=color, size=13, symbol='star'),
        )
    fig.update_xaxes(zeroline=False).update_xaxes(
        title="cost, % of the large model's", col=(len(sweeps) + 1) // 2
    )
    fig.update_yaxes(title='accuracy, %', col=1)
    bar = dict(
        steps=_steps(sweeps, markers), pad=dict(t=70), currentvalue=dict(prefix='kappa number ')
    )
    title = dict(text=bar['steps'][0]['args'][1]['title.text'], font=dict(size=13))
    return fig.update_layout(sliders=[bar], template='none', title=title)


def _steps(sweeps, markers):  # benchmark -> sweep; indices of the markers
    "What the slider does at every threshold. They are numbered, as the seeds of ours have kappas of their own."
    places = sorted(set().union(*(s['threshold'] for s in sweeps.values())))

    def step(i, place):
        rows = [s.iloc[(s['threshold'] - place).abs().argmin()] for s in sweeps.values()]
        numbers = [[PERCENT(100 * r[c]) for c in ('accuracy', 'cost_share')] for r in rows]
        told = [f'{b}: {right} % at {cost} %' for b, (right, cost) in zip(sweeps, numbers)]
        moved = {
            x: [[round(100 * r[c], 3)] for r in rows]
            for x, c in dict(x='cost_share', y='accuracy').items()
        }
        arguments = [moved, {'title.text': '; '.join(told)}, markers]
        return dict(label=f'{i} of {len(places)}', method='update', args=arguments)

    return [step(i, place) for i, place in enumerate(places, 1)]


def slider_page(tables, path) -> Path:  # folder of tables; the page, with plotly's script beside it
    "The slider as a page of its own, the same bytes for the same tables."
    data = read_points(tables)
    fig = slider(data['points'], data['frontiers'], drawn_methods(data['points'])[-1])
    fig.write_html(
        path, include_plotlyjs='directory', div_id='slider', config=dict(displaylogo=False)
    )
    page = Path(path).read_text('utf-8')  # in a frame, margins would make it scroll
    write_file(path, page.replace('body {height: 100%;}', 'body {height: 100%; margin: 0;}'))
    return Path(path)


def show_slider(tables):  # folder, of `tables_of`
    "Display the slider of the row that the main figure shows last; a picture of it where plotly is not there."
    from IPython.display import display

    data = read_points(tables)
    points = data['points']
    curves = data['frontiers']
    row = drawn_methods(data['points'])[-1]
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
