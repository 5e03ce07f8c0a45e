"""Pictures of the ideas, drawn from real outcomes. They are vectors, legible on light and on dark pages.

Here belong the drawing of each idea and its alternative text for readers who cannot see it. The content of the
pictures belongs in `report.example`. Figures of results belong in `report.figures`.
"""

import base64
import html
import io
import re
import textwrap
from dataclasses import dataclass

import numpy as np

from ..records import extract_boxed
from .example import THRESHOLD, Example, Watched
from .style import new_figure

WIDTH = 5.5  # inches, as wide as a page of the paper
FONT = 7  # points
DPI = 140  # dots per inch of the pixels beside the vectors
# every colour has a contrast of at least 4 with white and with black
INK = '#767676'  # of text and thin lines
SMALL = '#047ac9'  # the small model
LARGE = '#c65200'  # the large model
RIGHT = '#00876a'
WRONG = '#c8448a'
ON_COLOUR = '#ffffff'  # text in a filled box
LOOK = {
    'font.family': 'DejaVu Sans',
    'mathtext.fontset': 'dejavusans',
    'font.size': FONT,
    'svg.hashsalt': 'stepwise-routing',  # the same names inside the file every time
    'svg.fonttype': 'path',
}


def compact_path(path: str) -> str:
    "A path on one line, rounded to a hundredth of a point."
    return re.sub(r'\s*\n', ' ', re.sub(r'(\.\d\d)\d+', r'\1', path))


def compact(svg: str) -> str:
    "The same drawing with shorter text: names of letters, spaces and line ends. It saves a third of the bytes."
    svg = re.sub(r'\n +', '\n', svg).replace('DejaVuSans-', 'D')
    svg = svg.replace('/>\n<use', '/><use')
    svg = re.sub(r'(translate\(\d+\.\d\d)\d+', r'\1', svg)
    return re.sub(r' d="[^"]*"', lambda path: compact_path(path[0]), svg)


NO_METADATA = dict.fromkeys(('Date', 'Creator', 'Format', 'Type'))  # the same bytes every time


@dataclass(frozen=True)
class Picture:
    "A picture and its alternative text. A notebook shows the picture."

    figure: object  # of matplotlib
    alt: str

    @property
    def svg(self) -> bytes:
        "The picture as an SVG file, without background and date: the same bytes every time."
        import matplotlib

        buffer = io.BytesIO()
        with matplotlib.rc_context(LOOK):
            self.figure.savefig(buffer, format='svg', transparent=True, metadata=NO_METADATA)
        text = compact(buffer.getvalue().decode())
        label = f'<svg role="img" aria-label="{html.escape(self.alt)}" '
        text = text.replace('<svg ', label, 1)
        return text.encode()

    @property
    def png(self) -> bytes:
        "The picture as a PNG file. JupyterLab shows no SVG of a notebook that it does not trust yet."
        import matplotlib

        buffer = io.BytesIO()
        with matplotlib.rc_context(LOOK):
            metadata = {'Software': None}  # the same bytes every time
            self.figure.savefig(buffer, format='png', dpi=DPI, transparent=True, metadata=metadata)
        return buffer.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        pixels = base64.b64encode(self.png).decode()
        return {'image/svg+xml': self.svg.decode(), 'image/png': pixels, 'text/plain': self.alt}


def percent(share) -> str:
    "A share as text in percent."
    return f'{100 * share:.0f} %'


def short(step: str) -> str:
    "A short label for a step: its answer, or its last calculation."
    answer = extract_boxed(step)
    if answer is not None:
        return f'answer {answer}'
    calculations = re.findall(r'[\d+*/-]+=\d+', step)
    return calculations[-1] if calculations else step[:8]


# ---- pieces


def canvas(height: float):  # inches; figure and axes whose unit is an inch
    "(Figure, axes) of an empty drawing. The unit of the axes is an inch."
    import matplotlib

    with matplotlib.rc_context(LOOK):
        figure, axes = new_figure(WIDTH, height)
    axes = axes[0, 0]
    figure.set_layout_engine('none')
    axes.set_position([0, 0, 1, 1])
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis('off')
    return figure, axes


def write(axes, x: float, y: float, text: str, color=INK, **style):
    "Write text, centred unless `style` says otherwise."
    style = dict(ha='center', va='center', fontsize=FONT, family='DejaVu Sans') | style
    axes.text(x, y, text, color=color, **style)


def box(axes, x: float, y: float, width: float, height: float, color: str, text='', **style):
    "Draw a filled box with text in it. x and y are its lower left corner, in inches."
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, fc=color, ec=color, lw=0.5, clip_on=False))
    if text:
        write(axes, x + width / 2, y + height / 2, text, ON_COLOUR, **style)


def frame(axes, x: float, y: float, width: float, height: float, **style):
    "Draw an empty box."
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (x, y), width, height, **(dict(fill=False, ec=INK, lw=0.8, clip_on=False) | style)
        )
    )


def arrow(axes, start: tuple, end: tuple, color=INK, width: float = 1):
    "Draw an arrow between two points."
    style = dict(arrowstyle='-|>', color=color, lw=width, shrinkA=0, shrinkB=0, mutation_scale=7)
    axes.annotate('', end, start, arrowprops=style)


def judged(example: Example, t: int) -> tuple:  # (word, colour)
    "The verdict on the answer after hand-over t, as a word and a colour."
    return ('right', RIGHT) if example.right[t] else ('wrong', WRONG)


# ---- a: the method on one page


def draw_looks(axes, doubts, left: float, bottom: float, pitch: float, height: float):
    "Draw a bar for each small step, as high as its doubt, and the threshold as a line."
    for t, doubt in enumerate(doubts):
        color = LARGE if doubt >= THRESHOLD else SMALL
        x = left + t * pitch + 0.2 * pitch
        box(axes, x, bottom, 0.5 * pitch, max(doubt * height, 0.015), color)
    right = left + len(doubts) * pitch
    level = bottom + THRESHOLD * height
    axes.plot([left, right], [level, level], color=INK, lw=0.8, ls='--')
    write(axes, right + 0.04, level, r'threshold $\kappa$', ha='left')


def draw_method(example: Example) -> Picture:
    "Picture of the method on one page: question, small steps, a look at each, hand-over, bill."
    figure, axes = canvas(3.0)
    t = example.hand_over
    never = t == len(example.steps)
    rest = [] if never else example.rests[t]
    looks = example.doubts[: t + 1]
    left, pitch = 0.08, (WIDTH - 0.16) / (t + 1 + len(rest))
    question = textwrap.fill(example.question, 95)
    write(axes, left, 2.9, '1  A question', ha='left', weight='bold')
    write(axes, left, 2.67, question, ha='left')
    write(
        axes, left, 2.38, '2  The small model writes step by step', SMALL, ha='left', weight='bold'
    )
    for i, step in enumerate(example.steps[:t]):
        box(axes, left + i * pitch, 2.04, 0.94 * pitch, 0.22, SMALL, short(step), fontsize=6.5)
    last = left + t * pitch
    if not never:
        frame(axes, last, 2.04, 0.94 * pitch, 0.22, ec=SMALL, ls='--')
        write(axes, last + 0.47 * pitch, 2.15, short(example.steps[t]), SMALL, fontsize=6.5)
        write(axes, last + pitch, 2.15, 'thrown away', ha='left')
    write(
        axes,
        left,
        1.87,
        '3  The router looks at each step: how doubtful is it?',
        ha='left',
        weight='bold',
    )
    draw_looks(axes, looks, left, 1.1, pitch, 0.62)
    what, color = '4  Over the threshold: the large model takes over', LARGE
    if never:
        what, color = '4  Never over the threshold: never handed over', SMALL
    write(axes, left, 0.87, what, color, ha='left', weight='bold')
    if rest:
        arrow(axes, (last + 0.45 * pitch, 1.06), (last + 0.45 * pitch, 0.75), LARGE, 1.5)
    for i, step in enumerate(rest):
        x = last + i * pitch
        box(axes, x, 0.52, 0.94 * pitch, 0.22, LARGE, short(step), fontsize=6.5)
    verdict, color = judged(example, t)
    end = left if never else last + len(rest) * pitch
    write(axes, end + 0.05, 0.63, verdict, color, ha='left', weight='bold')
    write(axes, left, 0.36, '5  The bill', ha='left', weight='bold')
    draw_bill(axes, example, t, left, 0.08)
    doubted = f'No doubt reaches the threshold {THRESHOLD}: the problem is never handed over.'
    if not never:
        doubted = (
            f'It doubts step {t + 1} ({example.steps[t]}): {looks[t]:.2f} is above the threshold {THRESHOLD}. '
            'The large model writes this step again and the rest.'
        )
    alt = (
        f'The method on the question "{example.question}" The small model writes {len(looks)} steps. The router looks '
        f'at each. {doubted} The answer is {verdict}. The bill is {percent(example.cost[t])} of the large model alone.'
    )
    return Picture(figure, alt)


def draw_bill(axes, example: Example, t: int, left: float, bottom: float):
    "Draw the cost of both models beside the cost of the large model alone."
    whole = 2.4  # inches: the large model alone
    small = whole * example.small_cost[t]
    large = whole * example.large_cost[t]
    box(axes, left, bottom, small, 0.16, SMALL)
    box(axes, left + small, bottom, large, 0.16, LARGE)
    frame(axes, left, bottom, whole, 0.16)
    text = f'{percent(example.cost[t])} of what the large model alone costs'
    write(axes, left + max(whole, small + large) + 0.06, bottom + 0.08, text, ha='left')


# ---- b: the routing tree


def draw_tree(example: Example) -> Picture:
    "Picture of the routing tree: the small chain, and the large model's rest from each of its steps."
    n = len(example.steps)
    row, left, pitch = 0.24, 0.4, 0.56
    figure, axes = canvas(row * (n + 1) + 0.42)
    top = row * (n + 0.5) + 0.1
    write(axes, left, top + 0.33, 'the small model writes:', SMALL, ha='left')
    draw_chain(axes, [left + pitch * t for t in range(n)], top, SMALL, 1.5)
    for t, step in enumerate(example.steps):
        write(axes, left + pitch * t, top + 0.15, short(step), fontsize=6.5)
    draw_ending(axes, example, n, left + pitch * (n - 0.5), top)
    for t, rest in enumerate(example.rests):
        y = top - row * (t + 1)
        places = [left + pitch * (t + i) for i in range(len(rest))]
        chosen = t == example.hand_over
        width = 2.5 if chosen else 0.8
        bend = places[0] - 0.5 * pitch
        axes.plot([bend, bend, places[0]], [top, y, y], color=LARGE, lw=width)
        draw_chain(axes, places, y, LARGE, width)
        draw_ending(axes, example, t, left + pitch * (n - 0.5), y)
    taken = example.hand_over
    alt = (
        f'A tree. The small model writes {n} steps. Before each of them a branch goes off, on which the large model '
        f'writes the rest. {sum(example.right)} of {len(example.right)} endings are right. The router '
        + ('never hands over.' if taken == n else f'takes the branch at step {taken + 1}.')
    )
    return Picture(figure, alt)


def draw_chain(axes, places: list, y: float, color: str, width: float):
    "Draw a chain as a line with a dot per step."
    axes.plot(places, [y] * len(places), 'o-', color=color, lw=width, ms=6, mew=0, clip_on=False)


def draw_ending(axes, example: Example, t: int, x: float, y: float):
    "Write the verdict and the cost at the end of a branch."
    word, color = judged(example, t)
    box(axes, x, y - 0.085, 0.5, 0.17, color, word, fontsize=6.5)
    write(axes, x + 0.56, y, f'at {percent(example.cost[t])}', ha='left')


# ---- c: the row of outcomes


LONGEST = 40  # a step with more characters is labelled by its number


def step_label(example: Example, t: int) -> str:
    "The label above an outcome: the equation of step t, or its number if the step is long, or \"never\"."
    if t == len(example.steps):
        return 'never'
    step = example.steps[t]
    return short(step) if len(step) <= LONGEST else f'step {t + 1}'


def draw_outcomes(example: Example) -> Picture:
    "Picture of one row of an outcome table: the verdict and the cost of each possible hand-over."
    figure, axes = canvas(1.12)
    n = len(example.right)
    pitch = (WIDTH - 0.16) / n
    write(axes, 0.08, 1.03, 'Hand over after this step of the small model:', ha='left')
    words = []
    for t, cost in enumerate(example.cost):
        x = 0.08 + t * pitch
        label = step_label(example, t)
        word, color = judged(example, t)
        write(axes, x + pitch / 2, 0.83, label, fontsize=6.5)
        box(axes, x, 0.28, 0.94 * pitch, 0.42, color, f'{word}\n{percent(cost)}')
        words.append(f'{label}: {word} at {percent(cost)}')
    x = 0.08 + example.hand_over * pitch
    frame(axes, x - 0.03, 0.24, 0.94 * pitch + 0.06, 0.5, lw=1.5)
    meaning = 'the router hands over here'
    if example.hand_over == n - 1:
        meaning = 'the router never hands over'
        write(axes, WIDTH - 0.08, 0.1, meaning, ha='right')
    else:
        write(axes, x + 0.47 * pitch, 0.1, meaning)
    alt = (
        f'A row of {n} cells, one for each hand-over, with the cost as a share of the large model alone. '
        + '; '.join(words)
    )
    return Picture(figure, f'{alt}. In the frame: {meaning}.')


# ---- d: kappa moves through pi


def draw_threshold(watched: Watched) -> Picture:
    "Picture of a training: the threshold moves through the probabilities of handing over."
    import matplotlib

    with matplotlib.rc_context(LOOK):
        figure, axes = new_figure(WIDTH, 2.3)
    axes = axes[0, 0]
    kappas = np.array(watched.kappas)
    rounds = np.arange(1, len(kappas) + 1)
    levels = np.linspace(0, 1, 6)
    fifths = np.array([np.quantile(chances, levels) for chances in watched.chances]).T
    lowest, *_, highest = fifths
    border = np.clip(kappas, lowest, highest)
    axes.fill_between(rounds, lowest, border, color=SMALL, alpha=0.35, lw=0)
    axes.fill_between(rounds, border, highest, color=LARGE, alpha=0.35, lw=0)
    axes.plot(rounds, fifths.T, color=INK, lw=0.4)
    axes.plot(rounds, kappas, color=INK, lw=2)
    style_axes(axes, 'round of training', r'$\pi$(escalate) of the small steps')
    axes.set(xlim=(1, len(kappas)), ylim=(0, 1))
    shares = [float((chances >= kappa).mean()) for chances, kappa in zip(watched.chances, kappas)]
    meaning = r'orange: handed over; blue: the small model goes on; thick: $\kappa$; thin: fifths of the steps'
    figure.text(0.99, 0.93, meaning, color=INK, ha='right', fontsize=FONT, family='DejaVu Sans')
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.9))
    alt = (
        f'Training on {watched.benchmark} over {len(kappas)} rounds. Thin lines divide into fifths the probability of '
        f'handing over of {len(watched.chances[0])} small steps. The threshold kappa starts at {kappas[0]:.2f} and '
        f'ends at {kappas[-1]:.2f}. The share of steps above it is {percent(shares[0])} in the first round and '
        f'{percent(shares[-1])} in the last.'
    )
    return Picture(figure, alt)


def style_axes(axes, xlabel: str, ylabel: str):
    "Make axes legible on every background."
    for side in axes.spines.values():
        side.set_color(INK)
    axes.tick_params(colors=INK, labelsize=6.5, labelfontfamily='DejaVu Sans')
    look = dict(color=INK, fontsize=FONT, family='DejaVu Sans')
    axes.set_xlabel(xlabel, look)
    axes.set_ylabel(ylabel, look)


# ---- e: the tokens of a wrong step


MOST_TOKENS = 12  # of a longer step, only those around the least sure token are drawn


def draw_unsure_step(example: Example) -> Picture:
    """Picture of the tokens of the step that the router doubts, with their probabilities.

    If the problem is never handed over, it shows the step that the router doubts most.
    """
    figure, axes = canvas(1.05)
    t, word, note = example.hand_over, 'wrong', ''
    if t == len(example.steps):
        t, word, note = (
            np.argmax(example.doubts),
            'most doubted',
            ', below the threshold: never handed over',
        )
    tokens = example.tokens[t]
    counted = [token for token in tokens if token.is_math] or tokens
    least = min(counted, key=lambda token: token.prob)
    first = max(0, tokens.index(least) - MOST_TOKENS + 2)
    tokens = tokens[first : first + MOST_TOKENS]
    pitch = (WIDTH - 0.16) / len(tokens)
    write(
        axes,
        0.08,
        0.96,
        'Filled: mathematics, which counts. Below: the probability of the token.',
        ha='left',
    )
    for i, token in enumerate(tokens):
        x = 0.08 + i * pitch
        text = token.text.strip() or '␣'
        if token.is_math:
            color = LARGE if token is least else SMALL
            box(axes, x, 0.5, 0.92 * pitch, 0.32, color, text, fontsize=9)
        else:
            frame(axes, x, 0.5, 0.92 * pitch, 0.32)
            write(axes, x + 0.46 * pitch, 0.66, text, fontsize=9)
        write(axes, x + 0.46 * pitch, 0.38, f'{token.prob:.2f}')
        if token is least:
            write(
                axes,
                x + 0.46 * pitch,
                0.14,
                f'least sure: the doubt is {example.doubts[t]:.2f}{note}',
                LARGE,
                ha='right' if x > WIDTH / 2 else 'left',
            )
    alt = (
        f'The tokens of the {word} step "{example.steps[t]}" with their probabilities: '
        + ', '.join(f'{token.text.strip() or "blank"} {token.prob:.2f}' for token in tokens)
        + f'. The least sure one is {least.text.strip()}{note}.'
    )
    return Picture(figure, alt)


# ---- f: one step of CPO


MISSES = (-1.0, 0.3)  # gradient of the misses
CASES = {  # what the plane does -> how far the misses are above the limit
    'all of the ball is allowed': -1.4,
    'the plane cuts the ball': 0.5,
    'nothing in the ball is allowed': 1.3,
}


def draw_cpo() -> Picture:
    "Picture of the step of equation 4 with two parameters, in three cases."
    import torch
    from matplotlib.patches import Circle, Polygon

    from ..method.cpo import cpo_direction

    figure, axes = canvas(2.15)
    cost, delta, scale = torch.tensor([1.0, 0.4]).double(), 0.5, 0.52
    b = torch.tensor(MISSES).double()
    for i, (title, above) in enumerate(CASES.items()):
        step = cpo_direction(cost, b, above, lambda v: v, delta).y.numpy() * scale
        x, y = 0.95 + 1.8 * i, 1.0
        frame(axes, x - 0.85, y - 0.8, 1.7, 1.6)
        corners = [(-0.85, -0.8), (0.85, -0.8), (0.85, 0.8), (-0.85, 0.8)]
        allowed = cut(corners, MISSES, above * scale)
        axes.add_patch(Polygon([(x + u, y + v) for u, v in allowed], fc=RIGHT, alpha=0.3, lw=0))
        axes.add_patch(Circle((x, y), scale, fill=False, ec=INK, lw=1))
        arrow(axes, (x, y), (x + step[0], y + step[1]), LARGE, 2)
        axes.plot([x], [y], 'o', color=INK, ms=3)
        write(axes, x, 2.0, title)
    write(axes, 0.14, 1.68, 'cheaper', ha='left', fontsize=6.5)
    arrow(axes, (0.55, 1.6), (0.25, 1.48))
    write(
        axes,
        WIDTH / 2,
        0.09,
        'ball: small changes of the policy; shaded: few enough misses; arrow: the step',
    )
    alt = (
        'Three panels: the ball of small changes around the current policy, and the shaded half-plane with few enough '
        'misses. All of the ball is allowed: the step goes where cost falls most. The plane cuts the ball: the step '
        'ends inside both. Nothing in the ball is allowed: the step goes straight towards the half-plane.'
    )
    return Picture(figure, alt)


def cut(corners: list, normal: tuple, offset: float) -> list:
    "Cut a polygon: the corners of its part with normal . point + offset <= 0."
    kept = []
    for start, end in zip(corners, corners[1:] + corners[:1]):
        low = np.dot(normal, start) + offset
        high = np.dot(normal, end) + offset
        if low <= 0:
            kept.append(start)
        if (low <= 0) != (high <= 0):
            share = low / (low - high)
            kept.append(tuple(np.array(start) + share * (np.array(end) - np.array(start))))
    return kept
