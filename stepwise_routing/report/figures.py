"""Figures: accuracy against cost, training, what a policy thinks, and who gains

A figure has the size in which it is printed. Its caption stands in captions.md and can stand alone.
"""

from pathlib import Path

import numpy as np

from ..method.results import Row, all_methods, interval
from ..util import write_file
from .style import GREY, LINES, legend_below, our_look, panels, save_figure
from .tables import MODELS

# ---- accuracy against cost

SHOWN = ('SpecReason', 'RSD', 'STEER', 'Min-prob threshold', 'Ours (S^os)', 'Ours (S^API)')
RIGHT_END = 135  # % of the large model's cost; what costs more lies outside
COARSE = (0, 1, 2, 5, 10, 20, 50, 100)  # ticks of a logarithmic axis that begins near 0
FINE = (10, 20, 30, 40, 50, 60, 80, 100, 130)  # of one that does not


def in_figures(name: str) -> str:
    "The name of a method as matplotlib sets it: S^os becomes a formula."
    return name.replace('S^os', r'$S^{\mathrm{os}}$').replace('S^API', r'$S^{\mathrm{API}}$')


def line_of(row: Row, large_cost: float) -> np.ndarray:  # [point, 2]
    """Cost (% of the large model's) and accuracy (%) of a method at all its thresholds, from safe to cheap.

    The large model alone comes first. It is left out if the safest threshold costs more."""
    line = 100 * row.line / [large_cost, 1]
    return line[1:] if line[1, 0] > line[0, 0] else line


def draw_method(ax, method, row: Row, rule: str, large) -> None:  # large: `Choice`
    "A line for all thresholds, and a marker with 95 % bars for the threshold that was chosen."
    has_line = len(np.unique(row.line, axis=0)) > 1
    if has_line:
        ax.plot(*line_of(row, large.cost[0]).T, color=method.colour, lw=0.9, alpha=0.8)
    choice = row.choices.get(rule, row.choices['tuned'])  # models alone and chance have no other
    cost, *cost_ends = interval(100 * choice.cost / large.cost)
    accuracy, *accuracy_ends = interval(100 * choice.accuracy)
    ax.plot(cost_ends, [accuracy, accuracy], color=method.colour, lw=1.5, alpha=0.35)
    ax.plot([cost, cost], accuracy_ends, color=method.colour, lw=1.5, alpha=0.35)
    look = dict(color=method.colour, marker=method.marker, ls='-' if has_line else '')
    edge = dict(mec='white', mew=0.4, ms=8 if method.marker == '*' else 6)
    ax.plot(cost, accuracy, label=in_figures(method.name), zorder=5, **look, **edge)


def with_log_axis(ax) -> None:
    "Costs on a logarithmic axis, which is linear below 1 %: the small model may be free."
    ax.set_xscale('symlog', linthresh=1)
    left, right = ax.get_xlim()
    ticks = COARSE if left < 5 else FINE
    left, right = max(left, -0.2), 1.08 * right
    ax.set_xlim(left, right)
    ax.set_xticks([tick for tick in ticks if left <= tick <= right])
    ax.xaxis.set_major_formatter('{x:g}')
    ax.minorticks_off()


def accuracy_cost(
    results: dict,  # of `compare`
    unit: str = 'flops',  # of cost
    shown: tuple = SHOWN,  # names of methods; with the two models alone
    methods: list | None = None,  # of `Method`s, with your own; None: `all_methods()`
    rule: str = 'tuned',  # which choice has the marker
    columns: int = 2,  # of the page: 1 is 2.7 inches wide, 2 are 5.5
    log: bool = False,  # logarithmic costs
):  # matplotlib figure
    "A panel per benchmark. The grey line: chance picks the model for each problem."
    names = (*MODELS, *shown)
    methods = [method for method in methods or all_methods() if method.name in names]
    benchmarks = benchmarks_of(results, unit)
    with our_look():
        fig, axes = panels(len(benchmarks), columns, height=1.9)
        for ax, benchmark in zip(axes, benchmarks):
            large = results[unit, benchmark, 'Large only'].choices['tuned']
            chance = results[unit, benchmark, 'Random problem']
            ax.plot(
                *line_of(chance, large.cost[0]).T, color='#b0b0b0', label='Random problem', zorder=0
            )
            for method in methods:
                row = results.get((unit, benchmark, method.name))
                if row:
                    draw_method(ax, method, row, rule, large)
            ax.set_title(benchmark)
            left, right = ax.get_xlim()
            ax.set_xlim(max(left, -4), min(right, RIGHT_END))
            if log:
                with_log_axis(ax)
        for ax in axes[-columns:]:
            ax.set_xlabel("cost, % of the large model's")
        for ax in axes[::columns]:
            ax.set_ylabel('right, %')
        legend_below(fig, ncols=5 if columns == 2 else 2)
    return fig


def benchmarks_of(results: dict, unit: str) -> list:
    return list(dict.fromkeys(benchmark for u, benchmark, _ in results if u == unit))


# ---- training


def training_curves(
    logs: dict,  # benchmark -> a log of `train`
    alpha: float = 0.02,  # accuracy that may be lost
    columns: int = 2,  # of the page
):  # matplotlib figure
    "Cost, accuracy lost and kappa in each round of training."
    titles = "cost, % of the large model's", 'accuracy lost, points', r'threshold $\kappa$'
    with our_look():
        fig, axes = panels(3, columns, height=1.8, in_a_row=3 if columns == 2 else 1)
        for (benchmark, log), (colour, dash) in zip(logs.items(), LINES):
            numbers = np.array(log) * [100, 100, 1]  # [round, quantity]
            rounds = np.arange(len(numbers)) + 1
            for ax, values in zip(axes, numbers.T):
                ax.plot(rounds, values, dash, color=colour, label=benchmark)
        axes[1].axhline(100 * alpha, color=GREY, lw=0.6)
        for ax, title in zip(axes, titles):
            ax.set_title(title)
            ax.set_xlabel('round')
        legend_below(fig, ncols=2 * columns)
    return fig


# ---- what a policy thinks

SCORES = dict(min_prob='min-prob', min_odds='log-odds of min-prob', mean_logit=r'$S^{\mathrm{os}}$')


def doubts_of(policy, scores, steps, others: dict) -> np.ndarray:  # [step, score]
    "What a policy doubts at each score (its first column) and step."
    score, step = np.meshgrid(scores, steps)
    values = dict(zip(policy.columns, policy.mean)) | dict(final=0) | others
    features = {name: np.full(score.shape, float(value)) for name, value in values.items()}
    features |= {policy.columns[0]: score, 'step': step.astype(float)}
    return policy(features)[..., -1]


def policy_map(
    policy,  # a `Policy`; its first column is a score
    kappa: float,
    n_steps: int = 6,
    **others: float,  # values of other features, such as length=20; else their means, and "not final"
):  # matplotlib figure
    "The doubt of a policy over score and step. White lines: here doubt is kappa, and it begins to hand over."
    name = policy.columns[0]
    spread = 2.5 * policy.std[0]
    scores = np.linspace(policy.mean[0] - spread, policy.mean[0] + spread, 200)
    if name == 'min_prob':
        scores = np.linspace(0, 1, 200)
    steps = np.arange(n_steps)
    doubts = doubts_of(policy, scores, steps, others)
    with our_look():
        fig, (ax,) = panels(1, 1, height=2)
        look = dict(cmap='viridis', vmin=0, vmax=1, rasterized=True)
        image = ax.pcolormesh(scores, steps + 1, doubts, **look)
        for row, step in zip(doubts >= kappa, steps + 1):
            edges = np.flatnonzero(np.diff(row))
            ax.vlines(scores[edges], step - 0.5, step + 0.5, color='white', lw=1.5)
        ax.set(xlabel=SCORES.get(name, name), ylabel='step', yticks=steps + 1)
        bar = fig.colorbar(image, label='doubt')
        bar.ax.axhline(kappa, color='white', lw=1.5)
    return fig


# ---- who gains

ASKED = dict(wrong='Is the small model wrong?', gain='Is only the large model right?')
ANSWERS = {  # column of `gain_frame` -> its name, and the method that has its colour
    'by min-prob': ('min-prob', 'Min-prob threshold'),
    'by S^os': ('S^os', 'Ours (S^os)'),
    'learnt': ('learnt from seven numbers', 'Small only'),
}


def gain_figure(gain, columns: int = 2):  # of `gain_frame` -> matplotlib figure
    "How well the small model's numbers tell that it is wrong, and that the large model would be right instead."
    looks = {method.name: method for method in all_methods()}
    places = np.arange(len(gain))
    with our_look():
        fig, axes = panels(2, columns, height=1.9)
        for ax, (asked, question) in zip(axes, ASKED.items()):
            ax.axhline(0.5, color=GREY, lw=0.6)
            for shift, (answer, (name, of)) in zip((-0.15, 0, 0.15), ANSWERS.items()):
                column = f'{asked} {answer}'
                if column not in gain:
                    continue
                ends = gain[f'{column}, low'], gain[f'{column}, high']
                look = dict(color=looks[of].colour, label=in_figures(name))
                ax.vlines(places + shift, *ends, color=looks[of].colour, lw=1)
                ax.plot(places + shift, gain[column], looks[of].marker, **look)
            ax.set_xticks(places, gain['benchmark'])
            ax.set(title=question, ylim=(0.2, 1.02), xlim=(-0.5, len(gain) - 0.5))
        for ax in axes[::columns]:
            ax.set_ylabel('AUROC')
        legend_below(fig, ncols=3 if columns == 2 else 2)
    return fig


# ---- captions and files

PRICES = dict(
    flops='FLOPs (2N for each generated token of a model with N parameters)',
    full_flops='FLOPs (2N for each token that a model with N parameters reads or writes)',
    cents='US cents',
)


def where(cases: list) -> str:  # of (benchmark, method)
    "In words, such as `RSD (micro-gsm, micro-math); STEER (micro-omni)`."
    benchmarks = {}
    for benchmark, method in cases:
        benchmarks.setdefault(method, []).append(benchmark)
    return '; '.join(f'{method} ({", ".join(names)})' for method, names in benchmarks.items())


def flat_for(line: np.ndarray, little: float) -> float:  # of `line_of`; accuracy
    "How much cost the cheap end of a line spends for less than a little accuracy."
    is_low = np.append(line[::-1, 1] < little, False)
    cost = line[::-1, 0][: is_low.argmin()].clip(max=RIGHT_END)
    return np.ptp(cost) if len(cost) else 0.0


def remarkable(results: dict, unit: str, shown: tuple) -> list:  # of sentences
    "What a reader of the figure will ask about."
    alone, outside, flat = [], [], []
    for benchmark in benchmarks_of(results, unit):
        rows = {name: results.get((unit, benchmark, name)) for name in shown}
        small, large = (results[unit, benchmark, name].choices['tuned'] for name in MODELS)
        little = 100 * (0.85 * small.accuracy[0] + 0.15 * large.accuracy[0])
        for name, row in rows.items():
            if row is None:
                continue
            line = line_of(row, large.cost[0])
            if all(kappa is None for kappa, _, _ in row.choices['tuned'].by_seed):
                alone.append((benchmark, name))
            if line[:, 0].min() > RIGHT_END:
                outside.append((benchmark, name))
            elif flat_for(line, little) > 30:
                flat.append((benchmark, name))
    sentences = []
    if alone:
        words = 'A marker on that of the large model: no threshold was both good enough and cheaper'
        sentences.append(f'{words}. These are {where(alone)}.')
    if outside:
        words = f'Not in view, as every threshold costs more than {RIGHT_END} %'
        sentences.append(f'{words}: {where(outside)}.')
    if flat:
        words = 'hand-overs there hardly mend a wrong answer, so they cost and gain little'
        sentences.append(f'Lines that are flat on the left: {words}. These are {where(flat)}.')
    return sentences


def cost_caption(results: dict, unit: str, shown: tuple = SHOWN) -> str:
    sentences = [
        f'Accuracy and cost on the test problems of {", ".join(benchmarks_of(results, unit))}.',
        f'Cost is in {PRICES[unit]}, as a share of what the large model alone costs.',
        'A line shows a method at all its thresholds, from safe (right) to cheap (left).',
        'It turns back where a safer threshold is worse.',
        'A line that is flat at the top has the accuracy of the large model, so more hand-overs only cost more.',
        'A marker shows the tuned threshold, which was chosen on calibration problems.',
        'Its bars are 95 % intervals: problems and seeds are drawn again, and the choice is made again.',
        'The grey line: chance picks one of the two models for each problem.',
        *remarkable(results, unit, shown),
    ]
    return ' '.join(sentences)


TRAINING_CAPTION = (
    'Training of {} with the first seed, round by round. '
    'Left and middle: cost, and accuracy lost against the large model, of the router at work (equation 6) on the '
    'training problems of the round. The grey line is alpha, which may be lost. '
    'Right: the threshold kappa (equation 5). It falls after a loss above alpha, and rises after a smaller one. '
    'Its steps get smaller, so its line becomes flat.'
)

GAIN_CAPTION = (
    "How well numbers of the small model's chain tell that its answer is wrong (left), and that only the large model's "
    'answer is right (right). AUROC: 1 tells all, .5 (grey line) is chance, and below .5 the sign is reversed. '
    "Bars: 95 % intervals over problems. Min-prob and S^os: the least value in the chain. Learnt: a logistic regression "
    'on seven numbers of the chain, ten-fold. A router can only choose well where the right side is far from .5.'
)


def write_figures(
    results: dict,  # of `compare`
    gain,  # of `gain_frame`
    logs: dict,  # of `training_curves`
    folder,
    notes: list,  # sentences about models and problems, such as those of `tables.describe`
    alpha: float = 0.02,  # accuracy that may be lost
) -> None:
    "Write accuracy_cost, accuracy_cents, training and gain as .pdf and .png, and captions.md."
    units = {unit for unit, _, _ in results}
    drawn = {}
    for name, unit in dict(accuracy_cost='flops', accuracy_cents='cents').items():
        if unit in units:
            drawn[name] = accuracy_cost(results, unit), cost_caption(results, unit)
    trained = 'Ours (S^os)' if 'flops' in units else 'Ours (S^API)'
    drawn['training'] = training_curves(logs, alpha), TRAINING_CAPTION.format(trained)
    drawn['gain'] = gain_figure(gain), GAIN_CAPTION
    captions = []
    for name, (fig, caption) in drawn.items():
        save_figure(fig, folder, name)
        captions.append(f'**{name}.** {caption}')
    captions.append(f'**All figures.** {" ".join(notes)}')
    write_file(Path(folder) / 'captions.md', '\n\n'.join(captions) + '\n')
