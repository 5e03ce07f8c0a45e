"""Transcripts: who wrote each step, the router's score, and the drafts that were thrown away.

Here belong showing single walks to a person, and the demo. Tables and figures over many problems belong in the other
modules of `report/`.
"""

import os
import sys
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from ..records import walk_cost
from ..store import RolloutStore, tree_settings
from ..util import one_line, own_lines
from ..data.benchmarks import load_problems
from ..method.routers import ScoreRouter
from ..method.tree import RoutingTree
from ..method.walks import LargeOnly, SmallOnly, State, walk
from ..models.names import open_models

WRITERS = 'small', 'large'
MARGIN = ' ' * 7  # before the second and later lines of a step

_CODES = dict(small='\x1b[36m', large='\x1b[33m', draft='\x1b[9;36m')

_PAGE = '''<div style="font-family: sans-serif"><p><b>Question.</b> {{t.question}}</p>{% for s in t.steps %}
<p style="margin: .2em 0; padding: .2em .6em; border-left: .4em solid {{colours[s.writer]}}">
<b>{{s.writer}}</b>{% if s.note %} <small>{{s.note}}</small>{% endif %}<br>
{% if s.draft %}<s>{{s.text}}</s>{% else %}{{s.text}}{% endif %}</p>{% endfor %}
<p><b>{{t.end}}</b></p></div>'''


@dataclass(frozen=True)
class Line:
    "One step of a transcript."

    writer: str  # "small" or "large"
    text: str
    note: str  # the router's score and threshold
    draft: bool  # True: thrown away, the other model wrote the step again

    def shown(self) -> str:
        "The line for a terminal: writer and text."
        return f'{self.writer:6} {own_lines(self.text, MARGIN)}'


@dataclass(frozen=True)
class Transcript:
    "An answer, step by step."

    question: str
    steps: list  # of `Line`s
    end: str  # the verdict and the cost, in words

    def __str__(self):
        lines = []
        for step in self.steps:
            lines.append(step.shown() + ' (thrown away)' * step.draft)
        return self.page(lines)

    def page(self, lines) -> str:
        "The page for a terminal: question, steps and end."
        return '\n'.join([own_lines(self.question, MARGIN), *lines, one_line(self.end)])

    def _repr_html_(self):
        from jinja2 import Template

        colours = dict(small='#047ac9', large='#c65200')
        return Template(_PAGE, autoescape=True).render(t=self, colours=colours)

    def coloured(self) -> str:
        "The page for a terminal, in colours."
        lines = []
        for step in self.steps:
            code = _CODES['draft' if step.draft else step.writer]
            lines.append(f'{code}{step.shown()}\x1b[0m  {one_line(step.note)}')
        return self.page(lines)


def verdict(walk):
    return 'right' if walk.correct else 'wrong'  # of a `Trajectory`


def transcribe(
    walk,  # a `Trajectory`
    tree,  # the `RoutingTree` that it walked
    router,  # the router that decided, such as `ScoreRouter`
) -> Transcript:
    "The transcript of a walk, with its scores and the drafts that were thrown away."
    p = walk.problem
    lines = []

    def line(steps, draft=False):  # the last of them
        step = steps[-1]
        note = ''
        if step.model == 0 and hasattr(router, 'score'):
            state = State(p, tree.sample, steps, ''.join(str(s.model) for s in steps))
            note = f'score {router.score([state])[0]:.2f}, threshold {router.threshold:g}'
        lines.append(Line(WRITERS[min(step.model, 1)], step.text, note, draft))

    for t, step in enumerate(walk.steps):
        taken_over = step.model and (t == 0 or walk.steps[t - 1].model < step.model)
        if taken_over and router.on_escalate == 'regenerate' and router.start == 0:
            line((*walk.steps[:t], tree.stored(p, walk.path[:t], 0)), draft=True)
        line(walk.steps[: t + 1])
    cost = walk_cost(walk.calls, tree.specs)
    return Transcript(p.question, lines, f'{verdict(walk)}, {cost:.3g} FLOPs')


def both_wrote(walks, right) -> list:
    "Walks in which both models wrote a step, in their order: the right ones, or the wrong ones."
    return [w for w in walks if w.correct == right and len(set(w.path)) > 1]


def demo(
    n=20, benchmark='micro-gsm', each=1
):  # n: test problems; each: most transcripts of right answers, and of wrong ones
    "Route problems between the shipped models. Returns (`Transcript`s, right answers first; DataFrame of all routers)."
    import pandas as pd

    problems = load_problems(benchmark, 'test', n=n)
    router = ScoreRouter('score_prob', 'regenerate', 0.5)
    with TemporaryDirectory() as tmp, open_models(['micro-small', 'micro-large']) as models:
        with RolloutStore(f'{tmp}/draws.db', tree_settings(benchmark, models)) as store:
            tree = RoutingTree(models, store)
            walks = {r.name: walk(problems, r, tree) for r in (SmallOnly(), LargeOnly(), router)}
            chosen = [
                w for right in (True, False) for w in both_wrote(walks[router.name], right)[:each]
            ]
            texts = [transcribe(w, tree, router) for w in chosen]
    rows = {
        name: dict(
            right=sum(w.correct for w in own), cost=sum(walk_cost(w.calls, tree.specs) for w in own)
        )
        for name, own in walks.items()
    }
    table = pd.DataFrame(rows).T
    share = 100 * table['cost'] / table.loc['Large only', 'cost']
    return texts, pd.DataFrame(
        {f'right of {n}': table['right'].astype(int), 'cost, % of large': share.round(1)}
    )


def show_demo():
    "The command `stepwise-routing demo`: prints transcripts and a table, in about ten seconds."
    texts, table = demo()
    if not texts:
        raise ValueError(
            'no problem was handed over, so the shipped models or problems are not ours: '
            'install the package again'
        )
    is_terminal = sys.stdout and sys.stdout.isatty()  # None: the output is closed
    plain = 'NO_COLOR' in os.environ or not is_terminal
    text = str(texts[0]) if plain else texts[0].coloured()
    print(text, table.to_string(), 'Next: stepwise-routing reproduce --profile smoke', sep='\n\n')
