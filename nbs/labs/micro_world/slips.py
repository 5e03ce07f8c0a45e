"""Slips as small models make them: a lost carry, a digit off, a wrong operand."""

from .programs import EQUATION, NAME, Draft, ending, evaluate, shown_operand, solve, write_step

STEPS_OFF = (1, -1, 1, -1, 2, -2, 10, -10)


def wrong_value(rng, value: int) -> int:
    "A number near the right one: a lost carry, a digit off, two digits swapped."
    digits = list(str(abs(value)))
    place = rng.randrange(len(digits))
    kind = rng.random()
    if kind < 0.5:
        wrong = value + rng.choice((*STEPS_OFF, 10**place, -(10**place)))
    else:
        if kind < 0.85:
            digits[place] = rng.choice('0123456789')
        else:
            rng.shuffle(digits)
        wrong = int(''.join(digits))
    is_other = wrong != value and (wrong >= 0 or value < 0)
    return wrong if is_other else abs(value) + rng.randint(1, 3)


def slip_in(rng, template: str):  # the `slip` of `write_step`
    "In one equation of a step a wrong result, or a right one from a wrong operand."
    place = rng.choice([match[1] for match in EQUATION.finditer(template) if match[2] == '='])

    def slip(name, expr, env):
        if name != place:
            return None
        if rng.random() < 0.75 or expr.startswith('dsum('):
            return wrong_value(rng, evaluate(expr, env)), shown_operand(expr, env)
        operand = rng.choice([name for name in NAME.findall(expr) if name in env])
        right = env[operand]
        others = [v for k, v in env.items() if k != operand and isinstance(v, int)]
        near = [v for v in others if v != right and v > 0]
        misread = rng.choice(near) if near and rng.random() < 0.5 else wrong_value(rng, right)
        env = env | {operand: misread}
        return evaluate(expr, env), shown_operand(expr, env)

    return slip


def corrupt(draft: Draft, rng, at: int | None = None) -> tuple:  # (steps, at)
    "A mistake in step `at` (None: drawn), and everything after it computed faithfully from the wrong value."
    at = rng.randrange(len(draft.steps)) if at is None else at
    env, right = dict(draft.env), solve(draft)
    steps = []
    for i, template in enumerate(draft.steps):
        slip = slip_in(rng, template) if i == at else None
        steps.append(write_step(template, env, slip))
    steps.append(ending(draft, env))
    is_slip = steps[at] not in right[: at + 1]
    return (steps, at) if is_slip else corrupt(draft, rng, at)
