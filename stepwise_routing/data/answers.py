"""Compares two answers by reading them: tidied text, words, dates, plain numbers, numbers with a unit.

Here belong all comparisons that need no computer algebra. Formulas do need it, and it runs in a
process of its own, see `data.algebra`. `data.grading` asks this module first, then that process. `data.tidy` rewrites
a text before it is read.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from .tidy import PLAIN_TEXT, letters, tidy

MAX_ANSWER = 2000  # characters; longer answers are compared as text

# ---- numbers

DECIMAL = re.compile(
    r'(?P<sign>[-+]?) ?(?P<whole>[1-9]\d{0,2}(?:[, ]\d{3})+|\d*)'
    r'(?:\.(?P<after_point>\d*)|,(?P<after_comma>\d{3}))?'
    r'(?:\\overline ?\{?(?P<repeated>\d+)\}?)?(?:[eE](?P<power>[-+]?\d{1,2}))? ?(?P<percent>%?)',
    re.A,
)
RATIO = re.compile(
    r'(?P<sign>-?) ?(?:(?P<whole>\d+)(?: |(?=\\)))?'
    r'(?:\\frac ?\{ ?(?P<top>-?\d+) ?\} ?\{ ?(?P<bottom>-?\d+) ?\}'
    r'|(?P<left>-?\d+) ?/ ?(?P<right>\d+)) ?(?P<percent>%?)',
    re.A,
)
ROUNDED = 6  # a number with at least so many decimals may be a rounded one


@dataclass(frozen=True)
class Number:
    "A plain number."

    value: Fraction
    decimals: int | None = None  # how many were written; None: an exact fraction
    percent: bool = False  # was it written as a percentage?


def read_decimal(match) -> Number | None:  # match of `DECIMAL`
    r"A number written in digits, such as 1,234.5, 1e3 or 0.\overline{3}. None if it is not a number."
    whole = re.sub('[, ]', '', match['whole'])
    decimals = match['after_point'] or match['after_comma'] or ''
    repeated = match['repeated'] or ''
    if not (whole or decimals or repeated):
        return None
    if repeated and match['after_point'] is None:
        return None
    if match['after_comma'] and whole != '0':  # the comma of a decimal follows 0 alone
        return None
    value = Fraction(int(whole + decimals or 0), 10 ** len(decimals))
    if repeated:
        period = 10 ** len(repeated) - 1
        value += Fraction(int(repeated), period * 10 ** len(decimals))
    power = int(match['power'] or 0)
    value *= Fraction(10) ** power
    if match['sign'] == '-':
        value = -value
    places = None if repeated else max(len(decimals) - power, 0)
    return Number(value, places, bool(match['percent']))


def read_ratio(match) -> Number | None:  # match of `RATIO`
    r"A fraction or a mixed number, such as \frac{3}{4}, 1 1/2 or 1 1/2%. None if it is not a number."
    top = int(match['top'] or match['left'])
    bottom = int(match['bottom'] or match['right'])
    if bottom == 0:
        return None
    if match['whole'] and not 0 < top < bottom:
        return None
    value = int(match['whole'] or 0) + Fraction(top, bottom)
    return Number(-value if match['sign'] else value, percent=bool(match['percent']))


def read_number(text: str) -> Number | None:
    "A plain number. None for any other text."
    if match := DECIMAL.fullmatch(text):
        return read_decimal(match)
    if match := RATIO.fullmatch(text):
        return read_ratio(match)
    return None


def rounds_to(value: Fraction, rounded: Number) -> bool:
    "Is `rounded`, written with at least `ROUNDED` decimals, the rounded form of `value`?"
    if rounded.decimals is None or rounded.decimals < ROUNDED or rounded.value == 0:
        return False
    return round(value, rounded.decimals) == rounded.value


def equal_values(a: Number, b: Number) -> bool:
    "Are two values equal, or is one the rounded form of the other?"
    return a.value == b.value or rounds_to(a.value, b) or rounds_to(b.value, a)


def same_number(a: Number, b: Number) -> bool:
    "Are two numbers the same answer? For example, 50 and 50% are, and 0.5 and 50% are too."
    if equal_values(a, b):
        return True
    if a.percent == b.percent:
        return False
    if a.percent:
        return equal_values(replace(a, value=a.value / 100), b)
    return equal_values(a, replace(b, value=b.value / 100))


# ---- numbers with a unit

SPELLINGS = (  # of units; the first of each row replaces the others
    'cm centimeter centimetre',
    'km kilometer kilometre',
    'mm millimeter millimetre',
    'm meter metre',
    'ft foot feet',
    'in inch',
    'yd yard',
    'mi mile',
    'kg kilogram',
    'g gram',
    'mg milligram',
    'lb pound gbp £',
    'oz ounce',
    'egg',
    'h hr hour',
    'min minute',
    's sec second',
    'ml milliliter',
    'l liter litre',
    'dollar usd $',
    'euro eur €',
    'cent',
    'percent pct %',
    'degree deg ° \\circ \\degree',
    'radian rad',
    'mph',
    'kb',
    'mb',
    'gb',
    '^2 square sq squared',
    '^3 cubic cubed',
)
UNITS = {spelling: row.split()[0] for row in SPELLINGS for spelling in row.split()}
DECISIVE = ('^2', '^3', 'per')  # words that turn a unit into another unit: cm and cm^2
QUANTITY = re.compile(
    r'(?P<number>.*\d) ?(?: |(?P<text>\\text ?\{ ?))(?P<words>[A-Za-z]+(?: [A-Za-z]+)*)'
    r' ?\}?(?P<power>\^[23])?'
)
SCALES = dict(
    dozen=12, hundred=10**2, thousand=10**3, million=10**6, billion=10**9, trillion=10**12
)
FORMULA = re.compile(  # a word that no unit begins with
    r'(?:pi|sqrt|mod|or|and|to|if|for|where|but|percent|dozen|hundred|thousand|million|billion|sin'
    r'|cos|tan|log|exp|abc|def|xyz)\b'
)
BETWEEN_PARTS = re.compile(r'(?<=[a-zA-Z}])(?:,| and)? (?=\d)|(?<=[a-zA-Z] \})(?=\d)')
WORD = re.compile('[a-z]{4,}|[^aeiou][aeiou][^aeiou]')  # probably a word, not a product of letters
PLURAL = re.compile(r'(?:(?<=x)|(?<=[cs]h|ss))es$|(?<!s)s$')


@dataclass(frozen=True)
class Quantity:
    "A number and its unit."

    number: Number
    unit: set | None  # its words, singular; empty: none; None: a product of letters, as in 2xy


def singular(word: str) -> str:
    return word if word in UNITS else PLURAL.sub('', word)


def read_unit(match) -> set | None:  # match of `QUANTITY`
    "The words of a unit. None if the letters are a product, as in 2xy."
    words = [singular(word) for word in match['words'].lower().split()]
    first = words[0]
    if not (match['text'] or first in UNITS or WORD.fullmatch(first)):
        return None
    if match['power']:
        words.append(match['power'])
    return {UNITS.get(word, word) for word in words} - {'unit'}


def read_quantity(text: str) -> Quantity | None:
    "A plain number, with its unit if it has one. None for any other text."
    number = read_number(text)
    if number:
        return Quantity(number, {'percent'} if number.percent else set())
    match = QUANTITY.fullmatch(text)
    if not match:
        return None
    number = read_number(match['number'].strip())
    if not number:
        return None
    first, _, rest = match['words'].partition(' ')
    if first in SCALES and not match['power']:
        scaled = read_quantity(f'{number.value * SCALES[first]} {rest}'.strip())
        return replace(scaled, number=replace(scaled.number, decimals=None)) if scaled else None
    if FORMULA.match(match['words']):
        return None
    return Quantity(number, read_unit(match))


def read_parts(text: str) -> list | None:
    "The quantities of an answer such as 2 hours 30 minutes. None for any other text."
    parts = [read_quantity(part) for part in BETWEEN_PARTS.split(text)]
    is_sum = len(parts) > 1 and all(part and part.unit for part in parts)
    return parts if is_sum else None


def same_parts(a: list, b: list) -> bool:
    "Are these the same quantities, in any order?"
    found = [[same_quantity(x, y) for y in b] for x in a]
    return len(a) == len(b) and all(map(any, found)) and all(map(any, zip(*found)))


def same_quantity(a: Quantity, b: Quantity) -> bool | None:
    "Are two quantities the same answer? None if only algebra can tell."
    if a.unit is None and b.unit is None:
        return None
    if a.unit is None or b.unit is None:
        return False
    if not same_number(a.number, b.number):
        return False
    if not a.unit or not b.unit:
        return True
    if not (a.unit <= b.unit or b.unit <= a.unit):
        return False
    return all((word in a.unit) == (word in b.unit) for word in DECISIVE)


# ---- words, dates, times, ranges and angles, with which algebra would calculate

WORDS = re.compile('(?:[A-Z]?[a-z]+ |[A-Z]+ )+')  # each with a space behind it; not nRT
PRODUCT = re.compile('[abcxyz ]+|[^aeiouA-Z]+')  # letters that are no word: xyz, pqr
DATE = re.compile('([0-9]{1,2})/([0-9]{1,2})/([0-9]{4})')
RANGE = re.compile('([0-9]+)-([0-9]+)')
TIME = re.compile(
    r'(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-5][0-9]))? ?(?:\\text ?\{ ?)?(?P<half>[ap]\.?m)?\.? ?\}?',
    re.I,
)
ANGLE = re.compile(r'\\angle ?([A-Z])([A-Z])([A-Z])')


def is_words(text: str) -> bool:
    "Is a text words, as Monday and no solution are? False for a formula, such as xyz, nRT or A or B."
    words = text.split()
    if max(map(len, words)) < 3 or not WORDS.fullmatch(text + ' '):
        return False
    return not (PRODUCT.fullmatch(text) or any(map(FORMULA.fullmatch, words)))


def same_words(a: str, b: str) -> bool | None:
    "Are two texts the same words, in any case? None if they are no words, or if not even their letters are the same."
    a = PLAIN_TEXT.sub(r'\1', a).strip()
    b = PLAIN_TEXT.sub(r'\1', b).strip()
    if not (is_words(a) and is_words(b)):
        return None
    a = a.casefold().replace(' ', '')
    b = b.casefold().replace(' ', '')
    return a == b if sorted(a) == sorted(b) else None


def read_special(text: str) -> tuple | None:
    r"What 2/4/2024, 2:30, 3 pm, 1990-2000 or \angle ABC say. None for other text, as for 3-1: a score or a difference."
    if match := DATE.fullmatch(text):
        return tuple(map(int, match.groups()))
    if match := ANGLE.fullmatch(text):
        return match[2], {match[1], match[3]}
    match = TIME.fullmatch(text)
    if match and (match['minute'] or match['half']):
        return int(match['hour']), int(match['minute'] or 0)
    match = RANGE.fullmatch(text)
    if match and int(match[1]) <= int(match[2]):
        return int(match[1]), 'to', int(match[2])
    return None


# ---- what tidying or algebra drops

MATH_MODE = re.compile(r'(?<!\\)\$(.*?)(?<!\\)\$')  # its dollar signs are no dollars
NAME = re.compile(  # of a unit, perhaps; mph is also miles per hour
    r'(?<![\\a-z])(?!mph|squ|cub)[a-z]{3,}|\\circ|\\degree|[€£°%]|\$(?= ?[\d.])'
)
HALF = re.compile(r'(?<![\\a-z])([ap])\.?m\b')  # of a day: am, pm


def named(text: str) -> tuple:
    "The units that an answer names, and the halves of a day."
    text = ''.join(MATH_MODE.split(text.lower()))
    units = {UNITS.get(singular(name)) for name in NAME.findall(text)}
    return units - {None}, set(HALF.findall(text))


def others_named(a: str, b: str) -> bool:
    "Do both answers name units, and none of them is the same? Or is one am, the other pm?"
    return any(x and y and x.isdisjoint(y) for x, y in zip(named(a), named(b)))


TEXT = re.compile(r'\\text ?\{([^{}]*)\}(?P<power>\^[23])?')
TOKEN = re.compile(r'[a-z]{2,}|[0-9]+|(?<![a-z])m(?![a-z])')
UNSAID = set(  # words that decide nothing
    'is are an the of and or if for where all any some with integer real number positive to in by'
    ' that be constant when otherwise each every there such as both then let value mph'.split()
)


def words_beside(text: str) -> tuple:  # (set of units, list of other words and numbers)
    r"What the \text parts of a tidy formula say. Empty for an answer in words alone."
    if not re.search('[a-zA-Z0-9]', TEXT.sub('', text)):
        return set(), []
    units = set()
    others = []
    for match in TEXT.finditer(text.lower()):
        for word in TOKEN.findall(match[1]):
            unit = UNITS.get(singular(word))
            if word in UNSAID:
                continue
            if unit:
                units.add(unit)
            else:
                others.append(singular(word))
        if match['power'] and units:
            units.add(match['power'])
    return units, others if any(word.isalpha() for word in others) else []


def other_words(a: str, b: str) -> bool:
    "Do the texts in two tidy formulas say different things, such as n odd and n even, or cm and m?"
    units, words = zip(words_beside(a), words_beside(b))
    if all(words) and words[0] != words[1]:
        return True
    formulas = {letters(TEXT.sub('', text)) for text in (a, b)}
    if any(words) and not all(words) and len(formulas) == 1 and formulas.pop().isalpha():
        return True  # n even and n
    if not all(units):
        return False
    x, y = units
    is_part = x <= y or y <= x
    return not is_part or any((word in x) != (word in y) for word in DECISIVE)


LEFT_SIDE = re.compile(r'(?<![a-zA-Z\\])([a-zA-Z](?:_\w)?) ?(?:=|<|>|\\[lg]eq?(?![a-z]))')
INEQUALITY = re.compile(r'[<>]|\\[lg]eq?(?![a-z])')


def joined(text: str) -> str:
    "How the parts of a tidy answer are joined, where it matters: or, and. '' for one equation, or several values of x."
    words = set(re.findall(r'\b(?:and|or)\b', text))
    has_several = len({*LEFT_SIDE.findall(text)}) > 1
    if has_several and re.search(r'\band\b|\bor\b|,', text):
        return 'or' if 'or' in words else 'and'
    return words.pop() if INEQUALITY.search(text) and len(words) == 1 else ''


def is_tuple(text: str) -> bool:
    "Is a tidy answer a point or an interval?"
    return bool(re.fullmatch(r'[(\[][^()\[\]]*,[^()\[\]]*[)\]]', text))


def is_set(text: str) -> bool:
    "Is a tidy answer a set of values, in braces or as x = 1 or x = 3?"
    return bool(re.fullmatch(r'\\\{[^()\[\]]*\\\}', text) or re.search(r'\bor\b', text))


def joined_otherwise(a: str, b: str) -> bool:
    "Is one answer joined by or, and the other by and?"
    return {joined(a), joined(b)} == {'or', 'and'}


# ---- the verdict

BASED = re.compile(r'[0-9A-F]+_(?:\d|\{\d+\})', re.A)  # a number with its base, such as "101_2"
MISREAD = re.compile(  # a whole number, and what algebra takes for one: 2024-01-02, 2=1
    r'[0-9]+|[0-9]{4}-(?:0[0-9]-[0-9]{2}|[0-9]{2}-0[0-9])|([0-9]+) ?= ?(?!\1$)[0-9]+'
)


def plain_verdict(
    reference: str,
    answer: str | None,  # None: there is none
) -> bool | None:
    "Are two answers the same? None if only algebra can tell. TypeError for an answer that is not text."
    if not isinstance(reference, str) or not isinstance(answer, (str, type(None))):
        kinds = f'{type(reference).__name__} and {type(answer).__name__}'
        raise TypeError(f'answers are text, got {kinds}')
    if answer is None or not reference.strip() or not answer.strip():
        return False
    if reference == answer:
        return True
    if max(len(reference), len(answer)) > MAX_ANSWER:
        return reference.strip() == answer.strip()
    a = tidy(reference)
    b = tidy(answer)
    if not a or not b:
        return False
    if others_named(reference, answer):
        return False
    if letters(a) == letters(b):
        return True
    if r'\ldots' in a + b:  # algebra drops it
        return False
    verdict = same_words(a, b)
    if verdict is not None:
        return verdict
    first = read_special(a)
    second = read_special(b)
    if first and second:
        return first == second
    first = read_quantity(a)
    second = read_quantity(b)
    if first and second:
        verdict = same_quantity(first, second)
        if verdict is not None:
            return verdict
    first = first or read_parts(a)
    second = second or read_parts(b)
    if first and second and list in (type(first), type(second)):
        return type(first) is type(second) and same_parts(first, second)
    if other_words(a, b) or joined_otherwise(a, b):
        return False
    has_set = is_tuple(a) and is_set(b) or is_set(a) and is_tuple(b)
    if has_set and not INEQUALITY.search(a + b):
        return False
    for form in (BASED, MISREAD):
        if form.fullmatch(a) and form.fullmatch(b):
            return False
    return None
