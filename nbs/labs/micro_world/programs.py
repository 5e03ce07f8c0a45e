"""The steps of a micro problem as a program that writes the right solution and any wrong one"""

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Draft:
    "A problem before its solution is written out: question, given values, and the steps as a program over them."

    family: str  # e.g. "story"
    level: int  # 1 (easiest) to 5
    question: str  # as shown to the models
    env: dict  # given values by name
    steps: tuple  # one template a step; `[c = a * b]` computes c and is written out as "3*4=12"
    answer: str  # template of the final answer, e.g. "{c}" or "{p}/{q}"


EQUATION = re.compile(r'\[(\w+) (:?=) ([^\]]+)\]')

NAME = re.compile(r'[a-z]\w*')

_FUNCTIONS = dict(dsum=lambda n: sum(map(int, str(abs(n)))))


@lru_cache(None)
def _code(expr):
    return compile(expr if '//' in expr else expr.replace('/', '//'), expr, 'eval')


def evaluate(expr: str, env: dict) -> int:
    "Exact value of an expression, e.g. \"a * b\"; a division by zero (possible only after a slip) gives 0."
    try:
        return eval(_code(expr), dict(_FUNCTIONS), env)
    except ZeroDivisionError:
        return 0


def _operand(name, env, first):
    value = env.get(name, name)
    return f'({value})' if not first and name in env and value < 0 else str(value)


def shown_operand(expr: str, env: dict) -> str:
    "An expression as a step writes it: names replaced by their values, e.g. \"3*4\"."
    if expr.startswith('dsum('):
        return '+'.join(str(abs(env[expr[5:-1]])))
    if ' % ' in expr:
        a, m = (env[name] for name in expr.split(' % '))
        part = a // m * m if m else 0
        return f'{a} mod {m}: {a // m if m else 0}*{m}={part}, {a}-{part}'
    if '//' in expr:
        expr = 'floor({}/{})'.format(*expr.split(' // '))
    return NAME.sub(lambda m: _operand(m[0], env, not m.start()), expr).replace(' ', '')


def write_step(template: str, env: dict, slip=None) -> str:
    "A step in words and numbers: `[c = a * b]` puts c into `env` and is written \"3*4=12\", `[c := ...]` \"12\"."

    def equation(m):
        name, sign, expr = m.groups()
        slipped = slip and slip(name, expr, env)  # None or a (wrong value, what to show)
        env[name], shown = slipped or (evaluate(expr, env), shown_operand(expr, env))
        return str(env[name]) if sign == ':=' else f'{shown}={env[name]}'

    return EQUATION.sub(equation, template).format_map(env)


def ending(draft: Draft, env: dict) -> str:
    "The last step, which states the answer."
    return f'Answer: \\boxed{{{draft.answer.format_map(env)}}}'


def solve(draft: Draft) -> list:
    "The worked solution, step by step; the answer stands in a step of its own."
    env = dict(draft.env)
    return [write_step(t, env) for t in draft.steps] + [ending(draft, env)]
