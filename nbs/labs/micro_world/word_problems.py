"""The word problems of micro-gsm: stories, shopping, work, sharing, trips.

A generator takes a random.Random and a level, 1 (easiest) to 6, and returns a `Draft`. The order in
which it draws is part of the benchmark: another order makes other problems.
"""

from .programs import Draft
from .sizes import LARGEST_FACTOR, LARGEST_OPERAND

NAMES = (
    'Ada Ben Cleo Dan Eva Finn Gia Hugo Ivy Jack Kim Leo Mia Noah Olga Paul Rosa Sam Tara Umar '
    'Vera Will Yara Zoe'
).split()
ITEMS = (
    'apples books cards coins cups eggs keys lamps maps nuts pears pens rings shells stamps toys'
).split()


def event(rng, kind, value, number, largest, who, item) -> tuple:
    "One event of a story: (number in it, value after it, sentence, step)."
    before = f'v{number - 1}'
    after = f'v{number}'
    operand = f'a{number}'
    if kind == 'get':
        change = rng.randint(2, largest)
        sentences = (
            f'Then {who} finds {change} more.',
            f'{who} buys {change} {item}.',
            f'A friend brings {change} {item}.',
        )
        step = f'{who} has [{after} = {before} + {operand}] {item}'
        return change, value + change, rng.choice(sentences), step
    if kind == 'lose':
        change = rng.randint(1, max(1, min(value - 1, largest)))
        sentences = (
            f'{who} loses {change} of them.',
            f'{who} gives away {change} {item}.',
            f'Then {change} {item} break.',
        )
        step = f'Left: [{after} = {before} - {operand}]'
        return change, value - change, rng.choice(sentences), step
    factor = rng.randint(2, 3)
    sentence = f'Then the number of {item} becomes {factor} times as large.'
    step = f'{factor} times as many: [{after} = {before} * {operand}]'
    return factor, value * factor, sentence, step


def story(rng, level) -> Draft:
    "Somebody has 9 coins, finds 3 more, gives away 4. How many are there in the end?"
    who = rng.choice(NAMES)
    item = rng.choice(ITEMS)
    largest = LARGEST_OPERAND[level]
    value = rng.randint(largest // 2, largest)
    values = dict(v0=value)
    steps = []
    sentences = [f'{who} has {value} {item}.']
    events = rng.randint(2, 3) + level // 2
    for number in range(1, events + 1):
        kind = rng.choice(['get', 'get', 'lose', 'lose', 'times'])
        if kind == 'times' and value > largest:
            kind = 'lose'
        operand, value, sentence, step = event(rng, kind, value, number, largest, who, item)
        values[f'a{number}'] = operand
        sentences.append(sentence)
        steps.append(step)
    ask = (f'How many {item} does {who} have now?', f'How many {item} are there in the end?')
    question = ' '.join([*sentences, rng.choice(ask)])
    return Draft('story', level, question, values, tuple(steps), f'{{v{events}}}')


def shop(rng, level) -> Draft:
    "Somebody buys 3 keys at 4 dollars each and 2 maps at 5 dollars each. How much is that?"
    who = rng.choice(NAMES)
    kinds = rng.randint(2, 2 + level // 2)
    values = {}
    steps = []
    bought = []
    total = 0
    for i, item in enumerate(rng.sample(ITEMS, kinds)):
        count = rng.randint(2, LARGEST_FACTOR[level])
        price = rng.randint(2, max(9, LARGEST_OPERAND[level] // 3))
        values[f'n{i}'] = count
        values[f'p{i}'] = price
        total += count * price
        bought.append(f'{count} {item} at {price} dollars each')
        steps.append(f'The {item} cost [c{i} = n{i} * p{i}] dollars')
    for i in range(1, kinds):
        before = f't{i - 1}' if i > 1 else 'c0'
        steps.append(f'Together [t{i} = {before} + c{i}]')
    text = f'{who} buys {", ".join(bought[:-1])} and {bought[-1]}.'
    result = f't{kinds - 1}'
    ask = 'How much is that in dollars?'
    if rng.random() < 0.6:
        money = total + rng.randint(1, LARGEST_OPERAND[level])
        values['m'] = money
        text += rng.choice((f' {who} pays with {money} dollars.', f' {who} had {money} dollars.'))
        steps.append(f'Left over: [z = m - {result}]')
        result = 'z'
        ask = rng.choice((f'How many dollars does {who} have left?', 'How much change is there?'))
    return Draft('shop', level, f'{text} {ask}', values, tuple(steps), f'{{{result}}}')


def work(rng, level) -> Draft:
    "A machine makes 5 pens an hour, 8 hours a day, for 3 days. But 6 are broken. How many remain?"
    item = rng.choice(ITEMS)
    days = rng.randint(2, LARGEST_FACTOR[level])
    an_hour = rng.randint(3, LARGEST_OPERAND[level] // 3 + 4)
    hours = rng.randint(2, 9)
    values = dict(a=an_hour, h=hours, d=days)
    total = an_hour * hours
    texts = (
        f'A machine makes {an_hour} {item} an hour and runs {hours} hours a day.',
        f'A team packs {an_hour} {item} every hour, {hours} hours a day.',
    )
    text = rng.choice(texts)
    steps = ['In a day it makes [m = a * h]']
    a_day = 'm'
    if level >= 2 and rng.random() < 0.6:
        second = rng.randint(3, LARGEST_OPERAND[level])
        values['b'] = second
        total += second
        text += f' A second one makes {second} {item} a day.'
        steps.append('Both make [s = m + b] a day')
        a_day = 's'
    total *= days
    text += f' They work for {days} days.'
    steps.append(f'In all days: [w = {a_day} * d]')
    result = 'w'
    if level >= 2 or rng.random() < 0.5:
        fewer = rng.randint(1, min(total - 1, LARGEST_OPERAND[level]))
        values['k'] = fewer
        text += rng.choice(
            (f' But {fewer} of the {item} are broken.', f' Then {fewer} of them are sold.')
        )
        steps.append(f'There remain [g = w - k] {item}')
        result = 'g'
    if level >= 4 and rng.random() < 0.5:
        price = rng.randint(2, 9)
        values['p'] = price
        text += f' Each of the others is worth {price} dollars. How many dollars are they worth?'
        steps.append('Their worth: [q = g * p]')
        result = 'q'
    else:
        text += rng.choice((f' How many {item} are there?', f' How many {item} remain?'))
    return Draft('work', level, text, values, tuple(steps), f'{{{result}}}')


def share(rng, level) -> Draft:
    "Somebody has 4 bags with 6 nuts in each, keeps 3 and shares the rest equally among 7 friends."
    who = rng.choice(NAMES)
    item = rng.choice(ITEMS)
    friends = rng.randint(2, min(9, LARGEST_FACTOR[level]))
    quotient = rng.randint(3, LARGEST_OPERAND[level] // 2 + 3)
    bags = rng.randint(2, LARGEST_FACTOR[level])
    each = friends * quotient // bags + rng.randint(1, 4)
    kept = bags * each - friends * quotient
    values = dict(b=bags, k=each, e=kept, m=friends)
    beginnings = (
        f'{who} has {bags} bags with {each} {item} in each.',
        f'{who} fills {bags} bags with {each} {item} each.',
    )
    text = rng.choice(beginnings)
    endings = (
        f' {who} keeps {kept} and shares the rest equally among {friends} friends.',
        f' After {kept} {item} are lost, {friends} friends share the others equally.',
    )
    text += rng.choice(endings)
    steps = [
        'There are [t = b * k] in the bags',
        'To share: [u = t - e]',
        f'Each friend gets [q = u / m] {item}',
    ]
    result = 'q'
    ask = f'How many {item} does each friend get?'
    if level >= 3 and rng.random() < 0.7:
        owned = rng.randint(2, LARGEST_OPERAND[level])
        values['x'] = owned
        ask = f'One friend already had {owned} {item}. How many does this friend have now?'
        steps.append('This friend has [z = q + x]')
        result = 'z'
    return Draft('share', level, f'{text} {ask}', values, tuple(steps), f'{{{result}}}')


def trip(rng, level) -> Draft:
    "A trip is 90 km long. Somebody drives 3 hours at 20 km per hour. How many km are left?"
    who = rng.choice(NAMES)
    legs = rng.randint(1, 2) + level // 3
    values = {}
    steps = []
    sentences = []
    driven = 0
    for i in range(legs):
        speed = rng.randint(4, LARGEST_OPERAND[level] // 3 + 10)
        hours = rng.randint(2, 9)
        values[f'v{i}'] = speed
        values[f'h{i}'] = hours
        driven += speed * hours
        verb = rng.choice(('drives', 'rides', 'travels'))
        sentences.append(f'{who} {verb} {hours} hours at {speed} km per hour.')
        steps.append(f'Part {i + 1}: [d{i} = v{i} * h{i}] km')
    for i in range(1, legs):
        before = f's{i - 1}' if i > 1 else 'd0'
        steps.append(f'So far [s{i} = {before} + d{i}] km')
    so_far = f's{legs - 1}' if legs > 1 else 'd0'
    speed = rng.randint(3, 9 if level < 4 else 20)
    rest_hours = rng.randint(2, LARGEST_OPERAND[level] // 6 + 4)
    length = driven + speed * rest_hours
    values['n'] = length
    values['v'] = speed
    steps.append(f'The rest is [e = n - {so_far}] km')
    first = rng.choice((f'A trip is {length} km long.', f'{who} has to go {length} km.'))
    asks_for_hours = rng.random() >= 0.5
    if asks_for_hours:
        steps.append('Hours: [q = e / v]')
        ask = f'How many hours does the rest take at {speed} km per hour?'
    else:
        ask = 'How many km are left?'
    question = ' '.join([first, *sentences, ask])
    return Draft('trip', level, question, values, tuple(steps), '{q}' if asks_for_hours else '{e}')
