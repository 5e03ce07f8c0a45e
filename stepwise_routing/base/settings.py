"""A section of settings: a frozen record whose values are checked"""

import contextlib
from dataclasses import dataclass, fields

from .tools import nearest


class Section:
    "Fields of one section, a frozen dataclass; in a notebook a table of name, value and meaning."

    def __init_subclass__(cls):
        dataclass(frozen=True)(cls)

    def _repr_markdown_(self):
        from fastcore.docments import docments

        meaning = docments(type(self))
        rows = [
            f'| {f.name} | `{getattr(self, f.name)!r}` | {meaning.get(f.name) or ""} |'
            for f in fields(self)
        ]
        return '\n'.join(['| name | value | meaning |', '|---|---|---|', *rows])


RANGES = dict(  # of numbers and their tuples; whole numbers without an entry start at 1
    kappa='[0, .5]',
    gamma='[0, 1]',
    grader_memory='(0, 1]',
    memory_shares='(0, 1]',
    hidden='[1, inf)',
    **dict.fromkeys('alpha p_escalate'.split(), '(0, 1)'),
    **dict.fromkeys('kappa_step rho_bar v_rho_bar c_bar delta damping lr temp'.split(), '(0, inf)'),
    **dict.fromkeys('kappa_decay max_cents ray_gpus redraws seed slack'.split(), '[0, inf)'),
)

CHOICES = dict(
    engine=('local', 'ray'),
    sign=('corrected', 'printed'),
    estimator=('sampled', 'exact'),
    constraint=('gap', 'joint'),
    walk_thresholds=('chosen', 'all'),
)


def _in_range(x, span):
    "Is x a number within an interval such as (0, 1]?"
    low, high = map(float, span[1:-1].split(','))
    if type(x) not in (int, float):
        return False
    return (low < x or span[0] == '[' and x == low) and (x < high or span[-1] == ']' and x == high)


def checked(name: str, value, kind: type):
    "The value as a field of this name and annotated type wants it. ValueError in one line for a wrong type or range."
    short = name.rpartition('.')[2]
    kinds = getattr(kind, '__args__', (kind,))
    span = RANGES.get(short, '[1, inf)' if int in kinds else None)
    options = CHOICES.get(short)
    if tuple in kinds and type(value) is list:
        value = tuple(value)
    if float in kinds and type(value) in (int, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-5 as text
    if type(value) not in kinds:
        names = ' or '.join('None' if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f'{name} must be {names}, not {value!r}')
    parts = value if type(value) is tuple else [value]
    if type(value) is dict:
        parts = value.values()
    if type(value) is tuple and not span and not all(type(x) is str for x in value):
        raise ValueError(f'{name} is {value!r}: give names')
    if short == 'models' and len(value) not in (0, 2):
        raise ValueError(f'{name} is {value!r}: give a small and a large model, or none')
    if span and not all(x is None or _in_range(x, span) for x in parts):
        raise ValueError(f'{name} is {value!r}: choose within {span}')
    if options and value not in options:
        raise ValueError(
            f'{name} is {value!r}{nearest(value, options)}; choose one of: {", ".join(options)}'
        )
    return value


class Policy(Section):
    "How a routing policy is trained."

    alpha: float = (
        0.02  # accuracy that may be lost against the large model, or misses: see constraint
    )
    kappa: float = 0.25  # threshold at the start
    kappa_step: float = 0.1  # of the online update (eq. 5), times k^-kappa_decay
    kappa_decay: float = 0.6  # 0: a constant step
    sign: str = 'corrected'  # of that update; "printed" is the paper's formula
    rho_bar: float = 2.0  # clip of the importance ratios
    v_rho_bar: float = 1.0  # clips of V-trace
    c_bar: float = 1.0
    gamma: float = 1.0  # discount
    delta: float = 0.01  # trust region (eq. 4)
    damping: float = 0.1  # of the Fisher matrix
    slack: float = 0.1  # share of alpha that a step may end above it; 0: CPO's line search
    steps: int = 1000  # policy steps
    batch: int | None = 5  # problems a step; None: all
    estimator: str = 'sampled'  # "sampled": rollouts, V-trace, clipped ratios (paper); "exact": the outcome table
    constraint: str = (
        'gap'  # "gap": accuracy lost (the paper's bound); "joint": P(router wrong, large right)
    )
    temp: tuple = (
        0.1,
        0.03,
    )  # temperature of the soft mask: from the first to the floor over half the steps
    lr: float = 1e-3  # of the critics (Adam)
    hidden: tuple = (64, 64)  # units of policy and critics: three linear layers
    p_escalate: float = 0.1  # of a fresh policy
