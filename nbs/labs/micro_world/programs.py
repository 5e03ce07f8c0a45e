"""The steps of a micro problem as a program that writes the right solution and any wrong one."""

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Draft:
    "A problem before its solution is written out."

    family: str  # e.g. "story"
    level: int  # 1 (easiest) to 6
    question: str  # as the models read it
    env: dict  # given values by name
    steps: tuple  # one template a step; `[c = a * b]` computes c and is written out as "3*4=12"
    answer: str  # template of the final answer, e.g. "{c}" or "{p}/{q}"


EQUATION = re.compile(r'\[(\w+) (:?=) ([^\]]+)\]')
NAME = re.compile(r'[a-z]\w*')


def digit_sum(n: int) -> int:
    return sum(int(digit) for digit in str(abs(n)))


@lru_cache(None)
def compiled(expr: str):
    "The code of an expression; divisions are exact, so that whole numbers stay whole."
    return compile(expr if '//' in expr else expr.replace('/', '//'), expr, 'eval')


def evaluate(
    expr: str,  # e.g. "a * b"
    env: dict,  # values by name
) -> int:
    "Exact value of an expression; a division by zero, possible only after a slip, gives 0."
    try:
        return eval(compiled(expr), dict(dsum=digit_sum), env)
    except ZeroDivisionError:
        return 0


def shown_remainder(dividend: int, divisor: int) -> str:
    "A remainder as it is worked out, e.g. \"17 mod 5: 3*5=15, 17-15\"."
    quotient = dividend // divisor if divisor else 0
    product = quotient * divisor
    return f'{dividend} mod {divisor}: {quotient}*{divisor}={product}, {dividend}-{product}'


def shown_operand(expr: str, env: dict) -> str:
    "An expression as a step writes it: names replaced by their values, e.g. \"3*4\"."
    if expr.startswith('dsum('):
        name = expr.removeprefix('dsum(').removesuffix(')')
        return '+'.join(str(abs(env[name])))
    if ' % ' in expr:
        dividend, divisor = (env[name] for name in expr.split(' % '))
        return shown_remainder(dividend, divisor)
    if '//' in expr:
        expr = 'floor({}/{})'.format(*expr.split(' // '))

    def value(match):
        name = match[0]
        number = env.get(name, name)  # "floor" is no value
        is_first = match.start() == 0
        if name in env and number < 0 and not is_first:
            return f'({number})'
        return str(number)

    return NAME.sub(value, expr).replace(' ', '')


def write_step(
    template: str,  # `[c = a * b]` puts c into `env` and is written "3*4=12", `[c := ...]` "12"
    env: dict,  # values by name; grows
    slip=None,  # function of (name, expr, env): None, or (wrong value, what to write before it)
) -> str:
    "A step in words and numbers."

    def written(match):
        name, sign, expr = match.groups()
        slipped = slip and slip(name, expr, env)
        if slipped:
            env[name], shown = slipped
        else:
            shown = shown_operand(expr, env)
            env[name] = evaluate(expr, env)
        return str(env[name]) if sign == ':=' else f'{shown}={env[name]}'

    return EQUATION.sub(written, template).format_map(env)


def ending(draft: Draft, env: dict) -> str:
    "The last step, which states the answer."
    return f'Answer: \\boxed{{{draft.answer.format_map(env)}}}'


def solve(draft: Draft) -> list:
    "The worked solution, step by step; the answer stands in a step of its own."
    env = dict(draft.env)
    steps = [write_step(template, env) for template in draft.steps]
    return [*steps, ending(draft, env)]
