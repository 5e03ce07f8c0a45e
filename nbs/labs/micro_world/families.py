"""Generators of small word problems whose every step can be checked by a program"""

from .programs import Draft, evaluate

_NAMES = (
    'Ada Ben Cleo Dan Eva Finn Gia Hugo Ivy Jack Kim Leo Mia Noah Olga Paul Rosa Sam Tara Umar Vera Will '
    'Yara Zoe'
).split()

_ITEMS = 'apples books cards coins cups eggs keys lamps maps nuts pears pens rings shells stamps toys'.split()

_TOP = (None, 15, 30, 60, 150, 400, 3000)  # largest operand by level

_TIMES = (None, 5, 9, 9, 12, 25, 99)  # largest factor by level

_LONG = (None, 1, 2, 3, 4, 5, 2)  # how long a chain of micro-omni is, by level


def _change(r, kind, v, i, top, names):
    "One event of a story: (number in it, value after it, what is told, the step)."
    who, it = names
    if kind == 'get':
        a = r.randint(2, top)
        told = f'Then {who} finds {a} more.', f'{who} buys {a} {it}.', f'A friend brings {a} {it}.'
        return a, v + a, r.choice(told), f'{who} has [v{i} = v{i - 1} + a{i}] {it}'
    if kind == 'lose':
        a = r.randint(1, max(1, min(v - 1, top)))
        told = f'{who} loses {a} of them.', f'{who} gives away {a} {it}.', f'Then {a} {it} break.'
        return a, v - a, r.choice(told), f'Left: [v{i} = v{i - 1} - a{i}]'
    a = r.randint(2, 3)
    return (
        a,
        v * a,
        f'Then the number of {it} becomes {a} times as large.',
        f'{a} times as many: [v{i} = v{i - 1} * a{i}]',
    )


def _story(r, level):
    who = r.choice(_NAMES)
    it = r.choice(_ITEMS)
    top = _TOP[level]
    v = r.randint(top // 2, top)
    env = dict(v0=v)
    steps = []
    text = [f'{who} has {v} {it}.']
    for i in range(1, r.randint(2, 3) + level // 2 + 1):
        kind = r.choice('get get lose lose times'.split())
        if kind == 'times' and v > top:
            kind = 'lose'
        env[f'a{i}'], v, told, step = _change(r, kind, v, i, top, (who, it))
        text.append(told)
        steps.append(step)
    ask = r.choice((f'How many {it} does {who} have now?', f'How many {it} are there in the end?'))
    return Draft('story', level, ' '.join(text + [ask]), env, tuple(steps), f'{{v{i}}}')


def _shop(r, level):
    who = r.choice(_NAMES)
    kinds = r.randint(2, 2 + level // 2)
    env = {}
    steps = []
    bought = []
    for i, it in enumerate(r.sample(_ITEMS, kinds)):
        n = r.randint(2, _TIMES[level])
        p = r.randint(2, max(9, _TOP[level] // 3))
        env |= {f'n{i}': n, f'p{i}': p}
        bought.append(f'{n} {it} at {p} dollars each')
        steps.append(f'The {it} cost [c{i} = n{i} * p{i}] dollars')
    steps += [f'Together [t{i} = {f"t{i - 1}" if i > 1 else "c0"} + c{i}]' for i in range(1, kinds)]
    total = sum(env[f'n{i}'] * env[f'p{i}'] for i in range(kinds))
    text = f'{who} buys {", ".join(bought[:-1])} and {bought[-1]}.'
    last = f't{kinds - 1}'
    ask = 'How much is that in dollars?'
    if r.random() < 0.6:
        m = env['m'] = total + r.randint(1, _TOP[level])
        text += r.choice((f' {who} pays with {m} dollars.', f' {who} had {m} dollars.'))
        steps.append(f'Left over: [z = m - {last}]')
        last = 'z'
        ask = r.choice((f'How many dollars does {who} have left?', 'How much change is there?'))
    return Draft('shop', level, f'{text} {ask}', env, tuple(steps), f'{{{last}}}')


def _work(r, level):
    it = r.choice(_ITEMS)
    days = r.randint(2, _TIMES[level])
    a = r.randint(3, _TOP[level] // 3 + 4)
    h = r.randint(2, 9)
    env = dict(a=a, h=h, d=days)
    text = r.choice(
        (
            f'A machine makes {a} {it} an hour and runs {h} hours a day.',
            f'A team packs {a} {it} every hour, {h} hours a day.',
        )
    )
    steps = ['In a day it makes [m = a * h]']
    if level >= 2 and r.random() < 0.6:
        b = env['b'] = r.randint(3, _TOP[level])
        text += f' A second one makes {b} {it} a day.'
        steps.append('Both make [s = m + b] a day')
    text += f' They work for {days} days.'
    steps.append(f'In all days: [w = {"s" if "b" in env else "m"} * d]')
    total = days * (a * h + env.get('b', 0))
    last = 'w'
    if level >= 2 or r.random() < 0.5:
        bad = env['k'] = r.randint(1, min(total - 1, _TOP[level]))
        text += r.choice((f' But {bad} of the {it} are broken.', f' Then {bad} of them are sold.'))
        steps.append(f'There remain [g = w - k] {it}')
        last = 'g'
    if level >= 4 and r.random() < 0.5:
        p = env['p'] = r.randint(2, 9)
        text += f' Each of the others is worth {p} dollars. How many dollars are they worth?'
        steps.append('Their worth: [q = g * p]')
        last = 'q'
    else:
        text += r.choice((f' How many {it} are there?', f' How many {it} remain?'))
    return Draft('work', level, text, env, tuple(steps), f'{{{last}}}')


def _share(r, level):
    who = r.choice(_NAMES)
    it = r.choice(_ITEMS)
    m = r.randint(2, min(9, _TIMES[level]))
    q = r.randint(3, _TOP[level] // 2 + 3)
    bags = r.randint(2, _TIMES[level])
    each = m * q // bags + r.randint(1, 4)
    gone = bags * each - m * q
    env = dict(b=bags, k=each, e=gone, m=m)
    text = (
        f'{who} {r.choice(("has {} bags with {} {} in each.", "fills {} bags with {} {} each."))}'
    )
    text = text.format(bags, each, it)
    text += r.choice(
        (
            f' {who} keeps {gone} and shares the rest equally among {m} friends.',
            f' After {gone} {it} are lost, {m} friends share the others equally.',
        )
    )
    steps = [
        'There are [t = b * k] in the bags',
        'To share: [u = t - e]',
        f'Each friend gets [q = u / m] {it}',
    ]
    last = 'q'
    ask = f'How many {it} does each friend get?'
    if level >= 3 and r.random() < 0.7:
        x = env['x'] = r.randint(2, _TOP[level])
        ask = f'One friend already had {x} {it}. How many does this friend have now?'
        steps.append('This friend has [z = q + x]')
        last = 'z'
    return Draft('share', level, f'{text} {ask}', env, tuple(steps), f'{{{last}}}')


def _trip(r, level):
    who = r.choice(_NAMES)
    legs = r.randint(1, 2) + level // 3
    env = {}
    steps = []
    text = []
    total = 0
    for i in range(legs):
        v = r.randint(4, _TOP[level] // 3 + 10)
        h = r.randint(2, 9)
        env |= {f'v{i}': v, f'h{i}': h}
        total += v * h
        text.append(
            f'{who} {r.choice(("drives", "rides", "travels"))} {h} hours at {v} km per hour.'
        )
        steps.append(f'Part {i + 1}: [d{i} = v{i} * h{i}] km')
    steps += [f'So far [s{i} = {f"s{i - 1}" if i > 1 else "d0"} + d{i}] km' for i in range(1, legs)]
    done = f's{legs - 1}' if legs > 1 else 'd0'
    v = r.randint(3, 9 if level < 4 else 20)
    h = r.randint(2, _TOP[level] // 6 + 4)
    env |= dict(n=total + v * h, v=v)
    steps.append(f'The rest is [e = n - {done}] km')
    text.insert(0, r.choice((f'A trip is {env["n"]} km long.', f'{who} has to go {env["n"]} km.')))
    hours = r.random() >= 0.5
    if hours:
        steps.append('Hours: [q = e / v]')
    text.append(
        f'How many hours does the rest take at {v} km per hour?'
        if hours
        else 'How many km are left?'
    )
    return Draft('trip', level, ' '.join(text), env, tuple(steps), '{q}' if hours else '{e}')


def _linear(r, level):
    x = r.randint(2, _TOP[level] // 3 + 5)
    c = r.randint(1, 9)
    b = r.randint(1, _TOP[level])
    a = c + r.randint(2, _TIMES[level])
    if level <= 2 and r.random() < 0.5:
        env = dict(a=a, b=b, c=a * x + b)
        text = f'{a}x + {b} = {a * x + b}'
        steps = ['Subtract {b}: {a}x=[p = c - b]', 'Divide: x=[x = p / a]']
    elif r.random() < 0.5:
        d = (a - c) * x + b
        env = dict(a=a, b=b, c=c, d=d)
        text = f'{a}x + {b} = {c}x + {d}'
        steps = [
            'Collect x: [p = a - c]',
            'Collect numbers: [q = d - b]',
            'Then {p}x={q} and x=[x = q / p]',
        ]
    else:
        k = r.randint(2, 9)
        env = dict(a=a, b=b, k=k, d=k * (a * x + b))
        text = f'{k}({a}x + {b}) = {env["d"]}'
        steps = [
            'Divide by {k}: {a}x + {b} is [p = d / k]',
            'Subtract: {a}x=[q = p - b]',
            'So x=[x = q / a]',
        ]
    ask = r.choice(('Solve {} for x.', 'What is x if {}?', 'Find x such that {}.')).format(text)
    return Draft('linear', level, ask, env, tuple(steps), '{x}')


def _fraction(r, level):
    top = (None, 6, 9, 12, 20, 40, 200)[level]
    b = r.randint(2, top)
    d = r.randint(2, min(top, 12))
    a = r.randint(1, b - 1)
    c = r.randint(1, d - 1)
    sign = '-' if a * d > c * b and r.random() < 0.5 else '+'
    env = dict(a=a, b=b, c=c, d=d)
    text = f'{a}/{b} {sign} {c}/{d}'
    steps = [
        'Common denominator [m = b * d]',
        'First numerator [p = a * d]',
        'Second numerator [q = c * b]',
        f'Numerator [s = p {sign} q]',
    ]
    ask = r.choice(
        ('Compute {} as one fraction.', 'What is {} as a fraction?', 'Write {} as one fraction.')
    )
    return Draft('fraction', level, ask.format(text), env, tuple(steps), '{s}/{m}')


def _divisors(r, level):
    g = r.randint(2, (None, 5, 9, 12, 20, 30, 150)[level])
    top = (None, 8, 12, 20, 30, 40, 200)[level]
    a, b = sorted((g * r.randint(2, top), g * r.randint(2, top + 3)))
    if a == b:
        b += g
    env = dict(r0=b, r1=a)
    steps = []
    hi = b
    lo = a
    i = 1
    while lo:
        hi, lo = lo, hi % lo
        steps.append(f'[r{i + 1} = r{i - 1} % r{i}]')
        i += 1
    steps[-1] = f'[r{i} = r{i - 2} % r{i - 1}], so the gcd is {{r{i - 1}}}'
    ask = ('What is the gcd of {} and {}?', 'Find the greatest common divisor of {} and {}.')
    last = f'r{i - 1}'
    if r.random() >= 0.5:
        ask = ('What is the lcm of {} and {}?', 'Find the least common multiple of {} and {}.')
        last = 'l'
        steps += [f'Divide: [u = r1 / r{i - 1}]', 'The lcm is [l = u * r0]']
    return Draft('divisors', level, r.choice(ask).format(b, a), env, tuple(steps), f'{{{last}}}')


def _modular(r, level):
    m = r.randint(3, (None, 7, 9, 12, 17, 29, 145)[level])
    top = (None, 20, 40, 99, 200, 500, 2500)[level]
    a, b, c = (r.randint(m, top) for _ in range(3))
    env = dict(a=a, b=b, c=c, m=m)
    steps = ['First [p = a % m]', 'Next [q = b % m]', 'Product [s = p * q]']
    more = r.random() < 0.7
    text = f'{a} * {b} + {c}' if more else f'{a} * {b}'
    steps += (
        ['[t = s % m]', 'Add: [u = t + c]', 'Remainder [v = u % m]']
        if more
        else ['Remainder [v = s % m]']
    )
    ask = r.choice(
        ('What is the remainder of {} divided by {}?', 'Compute ({}) mod {}.', 'Find {} modulo {}.')
    )
    return Draft('modular', level, ask.format(text, m), env, tuple(steps), '{v}')


def _percent(r, level):
    p = r.choice((10, 20, 50) if level < 2 else range(5, 100, 5))
    n = 20 * r.randint(2, (None, 10, 20, 40, 90, 200, 1000)[level])
    env = dict(n=n, p=p, h=100)
    thing = r.choice(('price', 'salary', 'population', 'weight', 'score'))
    steps = ['Multiply: [u = n * p]', '{p} percent is [v = u / h]']
    kind = r.choice(('of', 'up', 'down', 'twice') if level > 2 else ('of', 'up', 'down'))
    if kind == 'of':
        ask = r.choice((f'What is {p}% of {n}?', f'Find {p} percent of {n}.'))
        return Draft('percent', level, ask, env, tuple(steps), '{v}')
    text = f'A {thing} of {n} {"falls" if kind == "down" else "grows"} by {p}%'
    answer = '{w}'
    steps.append(f'New value [w = n {"-" if kind == "down" else "+"} v]')
    if kind == 'twice':
        k = env['k'] = r.randint(2, _TOP[level])
        text = f'{text} and then by {k} more'
        answer = '{z}'
        steps.append('Then [z = w + k]')
    return Draft('percent', level, f'{text}. What is the new {thing}?', env, tuple(steps), answer)


def _sequence(r, level):
    a = r.randint(1, _TOP[level] // 2)
    d = r.randint(2, _TIMES[level] + 3)
    n = r.randint(5, (None, 10, 15, 25, 40, 60, 300)[level])
    env = dict(a=a, b=a + d, n=n, one=1, two=2)
    terms = f'{a}, {a + d}, {a + 2 * d}'
    steps = [
        'Difference [d = b - a]',
        'Steps from the first term: [k = n - one]',
        'Their size: [u = k * d]',
        'Last term [l = a + u]',
    ]
    if level < 3 or r.random() < 0.5:
        ask = r.choice(
            (
                f'What is term number {n} of {terms}, ...?',
                f'A sequence starts {terms}, ... Find term {n}.',
            )
        )
        return Draft('sequence', level, ask, env, tuple(steps), '{l}')
    steps += [
        'First plus last: [f = a + l]',
        'Times the count: [g = f * n]',
        'Half of it: [s = g / two]',
    ]
    ask = r.choice(
        (
            f'What is the sum of the first {n} terms of {terms}, ...?',
            f'Add the first {n} terms of {terms}, ... What is the sum?',
        )
    )
    return Draft('sequence', level, ask, env, tuple(steps), '{s}')


def _polynomial(r, level):
    x = r.randint(2, (None, 5, 9, 12, 15, 25, 125)[level])
    a = r.randint(1, 9)
    b = r.randint(1, _TIMES[level])
    c = r.randint(1, _TOP[level])
    sign = '-' if r.random() < 0.4 else '+'
    env = dict(x=x, a=a, b=b, c=c)
    text = f'{a if a > 1 else ""}x^2 {sign} {b}x + {c}'
    steps = ['Square: [s = x * x]', 'First term [u = a * s]', 'Second term [v = b * x]']
    if level >= 3 and r.random() < 0.4:
        k = env['k'] = r.randint(1, 5)
        text = f'{k if k > 1 else ""}x^3 + {text}'
        steps += ['Cube: [t = s * x]', 'Leading term [w = k * t]', 'Add: [u2 = w + u]']
    steps += [f'[y = {"u2" if "k" in env else "u"} {sign} v]', 'Total [z = y + c]']
    ask = r.choice((f'Let f(x) = {text}. What is f({x})?', f'Evaluate {text} at x = {x}.'))
    return Draft('polynomial', level, ask, env, tuple(steps), '{z}')


def _system(r, level):
    top = _TOP[level] // 4 + 6
    x = r.randint(2, top)
    y = r.randint(1, top)
    if level < 3 or r.random() < 0.4:
        x, y = max(x, y) + 1, min(x, y)
        env = dict(e=x + y, f=x - y, two=2)
        text = f'x + y = {x + y} and x - y = {x - y}'
        steps = ['Add both: 2x=[p = e + f]', 'x=[x = p / two]', 'y=[y = e - x]']
    else:
        b = r.randint(2, 6)
        c = r.randint(2, 6)
        a = b * c - min(r.randint(1, 5), b * c - 1)
        env = dict(a=a, b=b, c=c, e=a * x + b * y, f=c * x + y)
        text = f'{a}x + {b}y = {env["e"]} and {c}x + y = {env["f"]}'
        steps = [
            'Second times {b}: [g = b * f]',
            'Its x part: [h = b * c]',
            'Difference in x: [p = h - a]',
            'Difference in numbers: [q = g - e]',
            'x=[x = q / p]',
            'Then [u = c * x]',
            'y=[y = f - u]',
        ]
    ask, last = ('find y.', []) if level < 3 else ('find x + y.', ['[z = x + y]'])
    if r.random() < 0.5:
        ask, last = 'find x * y.', ['[z = x * y]']
    return Draft(
        'system', level, f'If {text}: {ask}', env, tuple(steps + last), '{z}' if last else '{y}'
    )


_OPERATIONS = dict(
    plus=('Add {}.', 'Add', '+'),
    minus=('Subtract {}.', 'Subtract', '-'),
    times=('Multiply by {}.', 'Multiply by', '*'),
    mod=('Take the remainder modulo {}.', 'Modulo', '%'),
)


def _chain(r, level):
    v = r.randint(5, 99)
    m = r.randint(11, (None, 30, 50, 99, 150, 300, 1500)[level])
    env = dict(v0=v, m=m)
    steps = []
    text = [f'Start with {v}.']
    for i in range(1, r.randint(3, 4) + _LONG[level] + 1):
        kind = 'mod' if v > 3 * m else r.choice('plus plus minus times times mod'.split())
        a = r.randint(2, min(9, _TIMES[level])) if kind == 'times' else r.randint(2, _TOP[level])
        if kind == 'minus' and a >= v or kind == 'mod' and v < m:
            kind = 'plus'
        word, name, op = _OPERATIONS[kind]
        a = env[f'a{i}'] = m if kind == 'mod' else a
        text.append(word.format(a))
        steps.append(f'{name} {{a{i}}}: [v{i} = v{i - 1} {op} a{i}]')
        v = evaluate(f'v {op} a', dict(v=v, a=a))
    return Draft(
        'chain', level, ' '.join(text + ['What is the result?']), env, tuple(steps), f'{{v{i}}}'
    )


def _power(r, level):
    m = r.randint(5, (None, 13, 19, 29, 43, 73, 365)[level])
    a = r.randint(2, m + 9)
    n = r.randint(3, 3 + (_LONG[level] + 1) // 2)
    env = dict(a=a, m=m)
    steps = ['Base [p1 = a % m]']
    for i in range(2, n + 1):
        steps += [f'Power {i}: [q{i} = p{i - 1} * p1]', f'Then [p{i} = q{i} % m]']
    text = f'{a}^{n} mod {m}'
    last = f'p{n}'
    if r.random() < 0.2 + 0.1 * _LONG[level]:
        k = r.randint(4, m)
        c = r.randint(2, _TOP[level])
        env |= dict(k=k, c=c)
        text = f'(({text}) * {c}) mod {k}'
        steps += [f'Times {c}: [y = {last} * c]', 'Remainder [z = y % k]']
        last = 'z'
    ask = r.choice(('Compute {}.', 'What is {}?', 'Find the value of {}.')).format(text)
    return Draft('power', level, ask, env, tuple(steps), f'{{{last}}}')


def _recurrence(r, level):
    m = r.randint(7, (None, 15, 25, 40, 70, 120, 600)[level])
    n = r.randint(2, 2 + (_LONG[level] + 1) // 2)
    p = r.randint(2, min(m - 1, _TIMES[level]))
    q = r.randint(1, m)
    x = r.randint(1, m)
    if r.random() < 0.6:
        env = dict(p=p, q=q, m=m, x0=x)
        steps = [
            step
            for i in range(1, n + 1)
            for step in (
                f'Times {p}: [u{i} = p * x{i - 1}]',
                f'Plus {q}: [w{i} = u{i} + q]',
                f'x_{i} is [x{i} = w{i} % m]',
            )
        ]
        ask = r.choice(
            (
                f'Let x_0 = {x} and x_(k+1) = ({p} x_k + {q}) mod {m}. Find x_{n}.',
                f'A sequence has x_0 = {x}; each next term is {p} times the last plus {q}, modulo {m}. '
                f'What is x_{n}?',
            )
        )
    else:
        y = r.randint(1, m)
        n = n + 1
        env = dict(m=m, x0=x, x1=y)
        steps = [
            step
            for i in range(2, n + 1)
            for step in (f'Sum [w{i} = x{i - 1} + x{i - 2}]', f'x_{i} is [x{i} = w{i} % m]')
        ]
        ask = f'Let x_0 = {x}, x_1 = {y} and x_(k+2) = (x_(k+1) + x_k) mod {m}. Find x_{n}.'
    return Draft('recurrence', level, ask, env, tuple(steps), f'{{x{n}}}')


def _digits(r, level):
    a = r.randint(11, (None, 20, 50, 99, 300, 900, 4500)[level])
    t = 10 * r.randint(1, 9)
    o = r.randint(1, 9)
    env = dict(a=a, t=t, o=o, b=t + o)
    steps = ['[u = a * t]', '[v = a * o]', 'N=[n = u + v]', 'Digit sum [s1 = dsum(n)]']
    text = f'Let N = {a} * {env["b"]}.'
    last = 's1'
    for i in range(2, r.randint(1, 1 + _LONG[level] // 2) + 2):
        k = env[f'k{i}'] = r.randint(3, _TOP[level] // 2 + 9)
        first = (
            'Take the digit sum, multiply it' if i == 2 else 'Again take the digit sum and multiply'
        )
        text += f' {first} by {k}.'
        steps += [f'[w{i} = {last} * k{i}]', f'Digit sum [s{i} = dsum(w{i})]']
        last = f's{i}'
    ask = 'What is the digit sum of N?' if last == 's1' else 'What is the digit sum of the result?'
    return Draft('digits', level, f'{text} {ask}', env, tuple(steps), f'{{{last}}}')


def _count(r, level):
    n = r.randint(20, (None, 60, 99, 200, 500, 999, 4995)[level])
    primes = (2, 3, 5, 7, 11, 13)[: 3 + _LONG[level] // 2]
    k = 2 if _LONG[level] < 3 or r.random() < 0.5 else 3
    ds = sorted(r.sample(primes, k))
    env = dict(n=n) | {f'd{i}': d for i, d in enumerate(ds)}
    pairs = [(i, j) for i in range(k) for j in range(i)]
    steps = [f'Multiples of {d}: [c{i} = n // d{i}]' for i, d in enumerate(ds)]
    steps.append('Sum [s = ' + ' + '.join(f'c{i}' for i in range(k)) + ']')
    for i, j in pairs:
        steps += [
            f'Both {ds[j]} and {ds[i]}: [e{i}{j} = d{j} * d{i}]',
            f'Their multiples: [b{i}{j} = n // e{i}{j}]',
        ]
    steps.append('Minus: [z = s - ' + ' - '.join(f'b{i}{j}' for i, j in pairs) + ']')
    last = 'z'
    names = ' or '.join(map(str, ds))
    if k == 3:
        steps += ['All three: [f = e10 * d2]', 'Their multiples: [g = n // f]', 'Plus: [y = z + g]']
        last = 'y'
        names = f'{ds[0]}, {ds[1]} or {ds[2]}'
    if r.random() < 0.4:
        steps.append(f'The others: [x = n - {last}]')
        last = 'x'
        ask = f'How many integers from 1 to {n} are not divisible by {names}?'
    else:
        ask = r.choice(
            (
                f'How many integers from 1 to {n} are divisible by {names}?',
                f'Count the numbers up to {n} divisible by {names}.',
            )
        )
    return Draft('count', level, ask, env, tuple(steps), f'{{{last}}}')


FAMILIES = {
    'micro-gsm': (_story, _shop, _work, _share, _trip),
    'micro-math': (
        _linear,
        _fraction,
        _divisors,
        _modular,
        _percent,
        _sequence,
        _polynomial,
        _system,
    ),
    'micro-omni': (_chain, _power, _recurrence, _digits, _count),
}

LEVELS = {  # how often each level 1..6 occurs in a benchmark's train, calibration and test splits
    'micro-gsm': (2, 1, 0, 0, 0, 0),
    'micro-math': (1, 1, 1, 0, 0, 0),
    'micro-omni': (2, 1, 0, 0, 0, 3),
}
