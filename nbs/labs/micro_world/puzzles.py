"""The puzzles of micro-omni: chains of operations, powers, recurrences, digit sums, counting.

A generator takes a random.Random and a level, 1 (easiest) to 6, and returns a `Draft`. The order in
which it draws is part of the benchmark: another order makes other problems.
"""

from .programs import Draft, evaluate
from .sizes import CHAIN_LENGTH, LARGEST_FACTOR, LARGEST_OPERAND

OPERATIONS = dict(  # sentence, how the step begins, operator
    plus=('Add {}.', 'Add', '+'),
    minus=('Subtract {}.', 'Subtract', '-'),
    times=('Multiply by {}.', 'Multiply by', '*'),
    mod=('Take the remainder modulo {}.', 'Modulo', '%'),
)


def chain(rng, level) -> Draft:
    "Start with 37. Multiply by 4. Take the remainder modulo 23. Add 8. What is the result?"
    value = rng.randint(5, 99)
    modulus = rng.randint(11, (None, 30, 50, 99, 150, 300, 1500)[level])
    values = dict(v0=value, m=modulus)
    steps = []
    sentences = [f'Start with {value}.']
    length = rng.randint(3, 4) + CHAIN_LENGTH[level]
    for i in range(1, length + 1):
        if value > 3 * modulus:
            kind = 'mod'
        else:
            kind = rng.choice(['plus', 'plus', 'minus', 'times', 'times', 'mod'])
        if kind == 'times':
            operand = rng.randint(2, min(9, LARGEST_FACTOR[level]))
        else:
            operand = rng.randint(2, LARGEST_OPERAND[level])
        if kind == 'minus' and operand >= value:
            kind = 'plus'
        if kind == 'mod' and value < modulus:
            kind = 'plus'
        if kind == 'mod':
            operand = modulus
        values[f'a{i}'] = operand
        sentence, name, operator = OPERATIONS[kind]
        sentences.append(sentence.format(operand))
        steps.append(f'{name} {{a{i}}}: [v{i} = v{i - 1} {operator} a{i}]')
        value = evaluate(f'v {operator} a', dict(v=value, a=operand))
    question = ' '.join([*sentences, 'What is the result?'])
    return Draft('chain', level, question, values, tuple(steps), f'{{v{length}}}')


def power(rng, level) -> Draft:
    "What is 16^4 mod 12?"
    m = rng.randint(5, (None, 13, 19, 29, 43, 73, 365)[level])
    a = rng.randint(2, m + 9)
    n = rng.randint(3, 3 + (CHAIN_LENGTH[level] + 1) // 2)
    values = dict(a=a, m=m)
    steps = ['Base [p1 = a % m]']
    for i in range(2, n + 1):
        steps.append(f'Power {i}: [q{i} = p{i - 1} * p1]')
        steps.append(f'Then [p{i} = q{i} % m]')
    text = f'{a}^{n} mod {m}'
    result = f'p{n}'
    if rng.random() < 0.2 + 0.1 * CHAIN_LENGTH[level]:
        k = rng.randint(4, m)
        c = rng.randint(2, LARGEST_OPERAND[level])
        values['k'] = k
        values['c'] = c
        text = f'(({text}) * {c}) mod {k}'
        steps += [f'Times {c}: [y = {result} * c]', 'Remainder [z = y % k]']
        result = 'z'
    question = rng.choice(('Compute {}.', 'What is {}?', 'Find the value of {}.')).format(text)
    return Draft('power', level, question, values, tuple(steps), f'{{{result}}}')


def recurrence(rng, level) -> Draft:
    "Let x_0 = 3 and x_(k+1) = (2 x_k + 4) mod 7. Find x_3."
    m = rng.randint(7, (None, 15, 25, 40, 70, 120, 600)[level])
    n = rng.randint(2, 2 + (CHAIN_LENGTH[level] + 1) // 2)
    p = rng.randint(2, min(m - 1, LARGEST_FACTOR[level]))
    q = rng.randint(1, m)
    x = rng.randint(1, m)
    steps = []
    if rng.random() < 0.6:
        values = dict(p=p, q=q, m=m, x0=x)
        for i in range(1, n + 1):
            steps.append(f'Times {p}: [u{i} = p * x{i - 1}]')
            steps.append(f'Plus {q}: [w{i} = u{i} + q]')
            steps.append(f'x_{i} is [x{i} = w{i} % m]')
        asks = (
            f'Let x_0 = {x} and x_(k+1) = ({p} x_k + {q}) mod {m}. Find x_{n}.',
            f'A sequence has x_0 = {x}; each next term is {p} times the last plus {q}, modulo {m}. '
            f'What is x_{n}?',
        )
        question = rng.choice(asks)
    else:
        y = rng.randint(1, m)
        n += 1
        values = dict(m=m, x0=x, x1=y)
        for i in range(2, n + 1):
            steps.append(f'Sum [w{i} = x{i - 1} + x{i - 2}]')
            steps.append(f'x_{i} is [x{i} = w{i} % m]')
        rule = f'x_(k+2) = (x_(k+1) + x_k) mod {m}'
        question = f'Let x_0 = {x}, x_1 = {y} and {rule}. Find x_{n}.'
    return Draft('recurrence', level, question, values, tuple(steps), f'{{x{n}}}')


def digits(rng, level) -> Draft:
    "Let N = 15 * 81. Take the digit sum, multiply it by 26. What is the digit sum of the result?"
    a = rng.randint(11, (None, 20, 50, 99, 300, 900, 4500)[level])
    tens = 10 * rng.randint(1, 9)
    ones = rng.randint(1, 9)
    values = dict(a=a, t=tens, o=ones, b=tens + ones)
    steps = ['[u = a * t]', '[v = a * o]', 'N=[n = u + v]', 'Digit sum [s1 = dsum(n)]']
    text = f'Let N = {a} * {tens + ones}.'
    sums = 1 + rng.randint(1, 1 + CHAIN_LENGTH[level] // 2)
    for i in range(2, sums + 1):
        factor = rng.randint(3, LARGEST_OPERAND[level] // 2 + 9)
        values[f'k{i}'] = factor
        if i == 2:
            text += f' Take the digit sum, multiply it by {factor}.'
        else:
            text += f' Again take the digit sum and multiply by {factor}.'
        steps.append(f'[w{i} = s{i - 1} * k{i}]')
        steps.append(f'Digit sum [s{i} = dsum(w{i})]')
    number = 'N' if sums == 1 else 'the result'
    question = f'{text} What is the digit sum of {number}?'
    return Draft('digits', level, question, values, tuple(steps), f'{{s{sums}}}')


def count(rng, level) -> Draft:
    "How many integers from 1 to 50 are divisible by 3 or 7?"
    n = rng.randint(20, (None, 60, 99, 200, 500, 999, 4995)[level])
    primes = (2, 3, 5, 7, 11, 13)[: 3 + CHAIN_LENGTH[level] // 2]
    k = 2 if CHAIN_LENGTH[level] < 3 or rng.random() < 0.5 else 3
    factors = sorted(rng.sample(primes, k))
    values = dict(n=n)
    steps = []
    for i, factor in enumerate(factors):
        values[f'd{i}'] = factor
        steps.append(f'Multiples of {factor}: [c{i} = n // d{i}]')
    sum_of_counts = ' + '.join(f'c{i}' for i in range(k))
    steps.append(f'Sum [s = {sum_of_counts}]')
    both = []  # names of the counts of what two factors divide
    for i in range(k):
        for j in range(i):
            steps.append(f'Both {factors[j]} and {factors[i]}: [e{i}{j} = d{j} * d{i}]')
            steps.append(f'Their multiples: [b{i}{j} = n // e{i}{j}]')
            both.append(f'b{i}{j}')
    steps.append(f'Minus: [z = s - {" - ".join(both)}]')
    result = 'z'
    names = f'{factors[0]} or {factors[1]}'
    if k == 3:
        steps += ['All three: [f = e10 * d2]', 'Their multiples: [g = n // f]', 'Plus: [y = z + g]']
        result = 'y'
        names = f'{factors[0]}, {factors[1]} or {factors[2]}'
    if rng.random() < 0.4:
        steps.append(f'The others: [x = n - {result}]')
        result = 'x'
        question = f'How many integers from 1 to {n} are not divisible by {names}?'
    else:
        asks = (
            f'How many integers from 1 to {n} are divisible by {names}?',
            f'Count the numbers up to {n} divisible by {names}.',
        )
        question = rng.choice(asks)
    return Draft('count', level, question, values, tuple(steps), f'{{{result}}}')
