"""The exercises of micro-math: equations, fractions, divisors, remainders, percent, sequences.

A generator takes a random.Random and a level, 1 (easiest) to 6, and returns a `Draft`. The order in
which it draws is part of the benchmark: another order makes other problems.
"""

from .programs import Draft
from .sizes import LARGEST_FACTOR, LARGEST_OPERAND


def linear(rng, level) -> Draft:
    "Solve 4x + 7 = 31 for x."
    x = rng.randint(2, LARGEST_OPERAND[level] // 3 + 5)
    c = rng.randint(1, 9)
    b = rng.randint(1, LARGEST_OPERAND[level])
    a = c + rng.randint(2, LARGEST_FACTOR[level])
    if level <= 2 and rng.random() < 0.5:
        right = a * x + b
        values = dict(a=a, b=b, c=right)
        equation = f'{a}x + {b} = {right}'
        steps = ['Subtract {b}: {a}x=[p = c - b]', 'Divide: x=[x = p / a]']
    elif rng.random() < 0.5:
        d = (a - c) * x + b
        values = dict(a=a, b=b, c=c, d=d)
        equation = f'{a}x + {b} = {c}x + {d}'
        steps = [
            'Collect x: [p = a - c]',
            'Collect numbers: [q = d - b]',
            'Then {p}x={q} and x=[x = q / p]',
        ]
    else:
        k = rng.randint(2, 9)
        right = k * (a * x + b)
        values = dict(a=a, b=b, k=k, d=right)
        equation = f'{k}({a}x + {b}) = {right}'
        steps = [
            'Divide by {k}: {a}x + {b} is [p = d / k]',
            'Subtract: {a}x=[q = p - b]',
            'So x=[x = q / a]',
        ]
    ask = rng.choice(('Solve {} for x.', 'What is x if {}?', 'Find x such that {}.'))
    return Draft('linear', level, ask.format(equation), values, tuple(steps), '{x}')


def fraction(rng, level) -> Draft:
    "What is 9/16 + 3/7 as a fraction?"
    largest = (None, 6, 9, 12, 20, 40, 200)[level]
    b = rng.randint(2, largest)
    d = rng.randint(2, min(largest, 12))
    a = rng.randint(1, b - 1)
    c = rng.randint(1, d - 1)
    sign = '-' if a * d > c * b and rng.random() < 0.5 else '+'
    values = dict(a=a, b=b, c=c, d=d)
    steps = [
        'Common denominator [m = b * d]',
        'First numerator [p = a * d]',
        'Second numerator [q = c * b]',
        f'Numerator [s = p {sign} q]',
    ]
    asks = (
        'Compute {} as one fraction.',
        'What is {} as a fraction?',
        'Write {} as one fraction.',
    )
    question = rng.choice(asks).format(f'{a}/{b} {sign} {c}/{d}')
    return Draft('fraction', level, question, values, tuple(steps), '{s}/{m}')


def divisors(rng, level) -> Draft:
    "What is the gcd of 84 and 36?"
    common = rng.randint(2, (None, 5, 9, 12, 20, 30, 150)[level])
    largest = (None, 8, 12, 20, 30, 40, 200)[level]
    first = common * rng.randint(2, largest)
    second = common * rng.randint(2, largest + 3)
    small, large = sorted((first, second))
    if small == large:
        large += common
    values = dict(r0=large, r1=small)
    steps = []
    dividend = large
    divisor = small
    i = 1
    while divisor:
        dividend, divisor = divisor, dividend % divisor
        steps.append(f'[r{i + 1} = r{i - 1} % r{i}]')
        i += 1
    gcd = f'r{i - 1}'
    steps[-1] = f'[r{i} = r{i - 2} % {gcd}], so the gcd is {{{gcd}}}'
    result = gcd
    asks = ('What is the gcd of {} and {}?', 'Find the greatest common divisor of {} and {}.')
    if rng.random() >= 0.5:
        asks = ('What is the lcm of {} and {}?', 'Find the least common multiple of {} and {}.')
        result = 'l'
        steps += [f'Divide: [u = r1 / {gcd}]', 'The lcm is [l = u * r0]']
    question = rng.choice(asks).format(large, small)
    return Draft('divisors', level, question, values, tuple(steps), f'{{{result}}}')


def modular(rng, level) -> Draft:
    "Compute (17 * 23 + 9) mod 7."
    m = rng.randint(3, (None, 7, 9, 12, 17, 29, 145)[level])
    largest = (None, 20, 40, 99, 200, 500, 2500)[level]
    a = rng.randint(m, largest)
    b = rng.randint(m, largest)
    c = rng.randint(m, largest)
    values = dict(a=a, b=b, c=c, m=m)
    steps = ['First [p = a % m]', 'Next [q = b % m]', 'Product [s = p * q]']
    if rng.random() < 0.7:
        expression = f'{a} * {b} + {c}'
        steps += ['[t = s % m]', 'Add: [u = t + c]', 'Remainder [v = u % m]']
    else:
        expression = f'{a} * {b}'
        steps.append('Remainder [v = s % m]')
    asks = (
        'What is the remainder of {} divided by {}?',
        'Compute ({}) mod {}.',
        'Find {} modulo {}.',
    )
    question = rng.choice(asks).format(expression, m)
    return Draft('modular', level, question, values, tuple(steps), '{v}')


def percent(rng, level) -> Draft:
    "A price of 240 falls by 15%. What is the new price?"
    p = rng.choice((10, 20, 50) if level < 2 else range(5, 100, 5))
    n = 20 * rng.randint(2, (None, 10, 20, 40, 90, 200, 1000)[level])
    values = dict(n=n, p=p, h=100)
    thing = rng.choice(('price', 'salary', 'population', 'weight', 'score'))
    steps = ['Multiply: [u = n * p]', '{p} percent is [v = u / h]']
    kind = rng.choice(('of', 'up', 'down', 'twice') if level > 2 else ('of', 'up', 'down'))
    if kind == 'of':
        question = rng.choice((f'What is {p}% of {n}?', f'Find {p} percent of {n}.'))
        return Draft('percent', level, question, values, tuple(steps), '{v}')
    verb = 'falls' if kind == 'down' else 'grows'
    sign = '-' if kind == 'down' else '+'
    text = f'A {thing} of {n} {verb} by {p}%'
    result = '{w}'
    steps.append(f'New value [w = n {sign} v]')
    if kind == 'twice':
        more = rng.randint(2, LARGEST_OPERAND[level])
        values['k'] = more
        text += f' and then by {more} more'
        result = '{z}'
        steps.append('Then [z = w + k]')
    question = f'{text}. What is the new {thing}?'
    return Draft('percent', level, question, values, tuple(steps), result)


def sequence(rng, level) -> Draft:
    "What is term number 12 of 5, 8, 11, ...?"
    first = rng.randint(1, LARGEST_OPERAND[level] // 2)
    difference = rng.randint(2, LARGEST_FACTOR[level] + 3)
    n = rng.randint(5, (None, 10, 15, 25, 40, 60, 300)[level])
    values = dict(a=first, b=first + difference, n=n, one=1, two=2)
    terms = f'{first}, {first + difference}, {first + 2 * difference}'
    steps = [
        'Difference [d = b - a]',
        'Steps from the first term: [k = n - one]',
        'Their size: [u = k * d]',
        'Last term [l = a + u]',
    ]
    if level < 3 or rng.random() < 0.5:
        asks = (
            f'What is term number {n} of {terms}, ...?',
            f'A sequence starts {terms}, ... Find term {n}.',
        )
        return Draft('sequence', level, rng.choice(asks), values, tuple(steps), '{l}')
    steps += [
        'First plus last: [f = a + l]',
        'Times the count: [g = f * n]',
        'Half of it: [s = g / two]',
    ]
    asks = (
        f'What is the sum of the first {n} terms of {terms}, ...?',
        f'Add the first {n} terms of {terms}, ... What is the sum?',
    )
    return Draft('sequence', level, rng.choice(asks), values, tuple(steps), '{s}')


def polynomial(rng, level) -> Draft:
    "Let f(x) = 3x^2 - 4x + 7. What is f(5)?"
    x = rng.randint(2, (None, 5, 9, 12, 15, 25, 125)[level])
    a = rng.randint(1, 9)
    b = rng.randint(1, LARGEST_FACTOR[level])
    c = rng.randint(1, LARGEST_OPERAND[level])
    sign = '-' if rng.random() < 0.4 else '+'
    values = dict(x=x, a=a, b=b, c=c)
    text = f'{a if a > 1 else ""}x^2 {sign} {b}x + {c}'
    steps = ['Square: [s = x * x]', 'First term [u = a * s]', 'Second term [v = b * x]']
    leading = 'u'
    if level >= 3 and rng.random() < 0.4:
        k = rng.randint(1, 5)
        values['k'] = k
        text = f'{k if k > 1 else ""}x^3 + {text}'
        steps += ['Cube: [t = s * x]', 'Leading term [w = k * t]', 'Add: [u2 = w + u]']
        leading = 'u2'
    steps += [f'[y = {leading} {sign} v]', 'Total [z = y + c]']
    asks = (f'Let f(x) = {text}. What is f({x})?', f'Evaluate {text} at x = {x}.')
    return Draft('polynomial', level, rng.choice(asks), values, tuple(steps), '{z}')


def system(rng, level) -> Draft:
    "If x + y = 14 and x - y = 4: find x * y."
    largest = LARGEST_OPERAND[level] // 4 + 6
    x = rng.randint(2, largest)
    y = rng.randint(1, largest)
    if level < 3 or rng.random() < 0.4:
        x, y = max(x, y) + 1, min(x, y)
        values = dict(e=x + y, f=x - y, two=2)
        equations = f'x + y = {x + y} and x - y = {x - y}'
        steps = ['Add both: 2x=[p = e + f]', 'x=[x = p / two]', 'y=[y = e - x]']
    else:
        b = rng.randint(2, 6)
        c = rng.randint(2, 6)
        a = b * c - min(rng.randint(1, 5), b * c - 1)
        e = a * x + b * y
        f = c * x + y
        values = dict(a=a, b=b, c=c, e=e, f=f)
        equations = f'{a}x + {b}y = {e} and {c}x + y = {f}'
        steps = [
            'Second times {b}: [g = b * f]',
            'Its x part: [h = b * c]',
            'Difference in x: [p = h - a]',
            'Difference in numbers: [q = g - e]',
            'x=[x = q / p]',
            'Then [u = c * x]',
            'y=[y = f - u]',
        ]
    if rng.random() < 0.5:
        ask = 'find x * y.'
        result = '{z}'
        steps.append('[z = x * y]')
    elif level < 3:
        ask = 'find y.'
        result = '{y}'
    else:
        ask = 'find x + y.'
        result = '{z}'
        steps.append('[z = x + y]')
    return Draft('system', level, f'If {equations}: {ask}', values, tuple(steps), result)
