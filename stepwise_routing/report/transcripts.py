"""Transcripts: who wrote each step of a chain, how long it is, and what the router thought of it

A transcript is a page for a notebook, and text for a terminal. What models write is shown, never obeyed:
it brings no tag into a page, no escape code into a terminal, and no line that looks like one of ours.
"""

import html
import re
from dataclasses import dataclass

import numpy as np

from ..records import Problem
from ..util import one_line, own_lines

MARGIN = ' ' * 8  # before the second line of a step, and those behind it
COLOURS = '#047ac9', '#c65200', '#00735a'  # of the small model and the larger ones, small to large
CODES = '\x1b[36m', '\x1b[33m', '\x1b[32m'  # the same on a terminal
CROSSED, END = '\x1b[9m', '\x1b[0m'


def as_html(text: str) -> str:
    """Text from elsewhere for a page, as it is.

    A dollar or backslash in a span of its own begins no formula in JupyterLab."""
    return re.sub(r'[$\\]', r'<span>\g<0></span>', html.escape(text)).replace('\n', '<br>')


@dataclass(frozen=True)
class Line:
    "One step of a transcript."

    text: str
    model: int  # who wrote it, 0 = smallest
    name: str  # of this model
    note: str  # tokens, doubt and what the router decided, in words
    is_thrown: bool  # has a larger model written it again?

    def shown(self) -> str:
        text = f'{one_line(self.name):7} {own_lines(self.text, MARGIN)}'
        return f'{text} (thrown away)' if self.is_thrown else text

    def coloured(self) -> str:
        code = CODES[self.model] + CROSSED * self.is_thrown
        return f'{code}{self.shown()}{END}  {one_line(self.note)}'

    def _repr_html_(self) -> str:
        text = f'<s>{as_html(self.text)}</s>' if self.is_thrown else as_html(self.text)
        style = 'margin: .2em 0; padding: .2em .6em; border-left: .4em solid'
        head = f'<b>{as_html(self.name)}</b> <small>{as_html(self.note)}</small>'
        return f'<p style="{style} {COLOURS[self.model]}">{head}<br>{text}</p>'


@dataclass(frozen=True)
class Transcript:
    "A chain, step by step. `print` it, show it in a notebook, or print `coloured()` in a terminal."

    question: str
    lines: list  # of `Line`s
    end: str  # the verdict and the cost, in words; '': nothing is said

    def page(self, lines: list) -> str:
        parts = [own_lines(self.question, MARGIN), *lines, one_line(self.end)]
        return '\n'.join(part for part in parts if part)

    def __str__(self):
        return self.page([f'{line.shown()}  [{one_line(line.note)}]' for line in self.lines])

    def coloured(self) -> str:
        return self.page([line.coloured() for line in self.lines])

    def _repr_html_(self):
        question = f'<p><b>Question.</b> {as_html(self.question)}</p>'
        lines = ''.join(line._repr_html_() for line in self.lines)
        end = f'<p><b>{as_html(self.end)}</b></p>' if self.end else ''
        return f'<div style="font-family: sans-serif">{question}{lines}{end}</div>'


def in_words(n_tokens: int, doubt: float, kappa: float | None) -> str:
    "For example `11 tokens, doubt 0.70: hands over`. A step of the largest model has no doubt (nan)."
    words = f'{n_tokens} tokens'
    if np.isnan(doubt):
        return words
    words += f', doubt {doubt:.2f}'
    if kappa is None:
        return words
    return f'{words}: hands over' if doubt >= kappa else f'{words}, below {kappa:.2f}'


def transcript(
    problem: Problem,
    steps,  # `Step`s in the order in which they were written, those that were thrown away, too
    models,  # names, small to large
    doubt=None,  # [step], of the router; nan where it was not asked. None: not shown
    kappa: float | None = None,  # threshold of the router
    thrown: tuple = (),  # indices of steps that a larger model wrote again
    end: str = '',  # the verdict and the cost, in words
) -> Transcript:
    "Show a chain: who wrote each step, its tokens, and what the router doubted."
    doubts = np.full(len(steps), np.nan) if doubt is None else np.asarray(doubt, float)
    lines = []
    for index, (step, doubted) in enumerate(zip(steps, doubts)):
        note = in_words(step.generated, doubted, kappa)
        lines.append(Line(step.text, step.model, models[step.model], note, index in thrown))
    return Transcript(problem.question, lines, end)
