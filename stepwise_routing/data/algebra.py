"""The process that compares formulas with Math-Verify. It forks for each pair of formulas.

Here belongs all that runs inside that process. A model wrote the answers, so we do not trust them:
no text is evaluated as Python, a fork has little time and memory, and an audit hook refuses every
action that a comparison does not need. `data.grading` starts the process and asks it.
"""

import contextlib
import json
import os
import re
import sys
import zlib

from .answers import ANGLE
from .tidy import letters, tidy

SAME, DIFFERENT, FAILED = 11, 10, 9  # exit statuses of the process of one pair
YES, NO, GAVE_UP = 'yes', 'no', 'gave up'  # replies about a pair; '' if its process was killed
MEMORY = 3 << 29  # bytes of address space
EQUAL_FORMULAS = 1e-12  # two formulas up to this relative difference are equal
EQUAL_NUMBERS = 1e-6  # two numbers beyond this relative difference differ
POINTS = (  # start and stride of the values of the variables
    ((3, 1), (2, 1)),
    ((8, 1), (3, 1)),
    ((17, 10), (13, 9)),
    ((-7, 5), (-4, 3)),
    ((2, 5), (1, 7)),
    ((116, 5), (-91, 3)),
    ((-123, 10), (50, 7)),
)
COUNTING_POINTS = (  # of formulas with factorials
    ((3, 1), (2, 1)),
    ((8, 1), (3, 1)),
    ((23, 1), (5, 1)),
    ((9, 1), (-2, 1)),
    ((30, 1), (-7, 1)),
)
WHOLE_POINTS = (  # where a formula rounds
    ((3, 1), (2, 1)),
    ((8, 1), (3, 1)),
    ((46, 1), (-101, 1)),
    ((-13, 1), (6, 1)),
    ((1009, 1), (17, 1)),
    ((12345678, 1), (1000, 1)),
)

# ---- what a fork may do

HARMLESS_EVENTS = {
    'import',
    'exec',
    'compile',
    'open',
    'marshal.loads',
    'os.listdir',
    'os.scandir',
    'object.__getattr__',
    'sys._getframe',
    'builtins.id',
    'array.__new__',  # memory of this process alone, which is limited; the primes of a factorial need it
}
CODE_WRITERS = 'sympy/polys/monomials.py', 'collections/__init__.py', 'dataclasses.py'
REFUSED = []  # what the guard refused in this process, as a library may hide the error


def refuse(action: str) -> None:
    "PermissionError, always. Keeps what was refused in `REFUSED`."
    REFUSED.append(action)
    raise PermissionError(f'refused: {action}')


def guard(event: str, args) -> None:
    "Audit hook. PermissionError for writing a file, starting a process, and running code from a string."
    if event not in HARMLESS_EVENTS:
        refuse(event)
    if event == 'open':
        _, mode, flags = args
        may_write = set(mode or 'r') & set('wax+') or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        if may_write:
            refuse('writing a file')
    if event != 'exec' or os.path.isfile(args[0].co_filename):
        return
    if not sys._getframe(1).f_code.co_filename.endswith(CODE_WRITERS):
        refuse('code from a string')


def limit_resources(seconds: float) -> None:
    "Limit this process: `seconds` by the clock, half of them on a processor, memory, no files."
    import resource
    import signal

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds / 2),
        (signal.ITIMER_REAL, signal.SIGALRM, seconds),
    )
    for timer, signal_number, limit in timers:
        signal.signal(signal_number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number})
        signal.setitimer(timer, limit)
    for name, limit in (('RLIMIT_AS', MEMORY), ('RLIMIT_FSIZE', 0), ('RLIMIT_CORE', 0)):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def read_literal(text: str, *args, **kwargs):
    "Replaces sympy's `parse_expr`, which evaluates Python. Reads a number or a name, else SyntaxError."
    from sympy import Float, Integer, Symbol

    if re.fullmatch(r'[-+]?[0-9]+', text):
        return Integer(int(text))
    if re.fullmatch(r'[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)', text):
        return Float(text)
    if re.fullmatch(r'[a-zA-Z]\w*', text):
        return Symbol(text)
    raise SyntaxError('only numbers and names are read')


# ---- comparing two formulas

E_NOTATION = re.compile('^([-+]?[0-9.]+)[eE]([-+]?[0-9]{1,3})$')
VALUE = re.compile(r'([a-zA-Z]) ?= ?([^=,()]+?)(?= ?(?:,|\\text|$))')  # x=3 in x=3, y=2
VALUES = re.compile(rf'{VALUE.pattern}(?:(?:, ?| ?\\text ?{{ ?and ?}} ?)(?:{VALUE.pattern}))*')
FUNCTION = re.compile(r'\\(?:sin|cos|tan)|\bcis\b')
TWO_VALUES = re.compile(
    r'(?P<start>\\\{)?(?P<body>[^,]*(?<!\\)[({][^,]*\\pm(?![a-zA-Z])[^,]*?)(?P<end>\\\})?'
)
SIGNS = re.compile(r'\\([pm])[pm](?![a-zA-Z])')
CIS = re.compile(r'\\text ?\{ ?cis ?\} ?(.+?)(?=,|\\\}|$)')
LONG_RATIO = re.compile(r'(?:(?P<names>[^=]+)=)? ?(?P<terms>[^=:,<>]+(?::[^=:,<>]+){2,})')
CALL = re.compile(  # f(2) before an equals sign or at the end, which Math-Verify may take for a product
    r'(?<![\w\\])(?P<name>[a-zA-Z])(?:[\^_](?:\w|\{[^{}]*\}))*\((?:[^()=a-zA-Z]|\\[a-zA-Z]+)+\)(?= ?=|$)'
)
CONNECTIVE = re.compile(r'\b(?:and|or)\b')
DEGREES = re.compile(r'(?<![0-9.])([0-9.]+)(?:\^\\circ|\^\{\\circ\}|°)')


def formula_of(text: str) -> str:
    r"An answer as LaTeX for Math-Verify, which takes 3e5 for a product and the angle in \sin 30^\circ for radians."
    if FUNCTION.search(text):
        text = DEGREES.sub(r'\\frac{\1\\pi}{180}', text)
    text = tidy(text)
    text = E_NOTATION.sub(r'\1\\cdot 10^{\2}', text)
    text = ANGLE.sub(angle_symbol, text)
    if '=' in text:
        text = CALL.sub(symbol_of, text)
    text = CIS.sub(r'e^{i(\1)}', text)
    return both_values(text)


def angle_symbol(match) -> str:  # match of `ANGLE`
    "A symbol for an angle: the same for ABC and CBA."
    first, last = sorted((match[1], match[3]))
    number = zlib.crc32((first + match[2] + last).encode())
    return f' t_{{{number}}}'


def symbol_of(call) -> str:  # match of `CALL`
    "A symbol for the value of a function at a point: another one for each function and each point."
    text = re.sub(r'\\frac\{(\d+)\}\{(\d+)\}', r'\1/\2', letters(call[0]))
    number = zlib.crc32(text.encode())
    return f'{call["name"]}_{{{number}}}'


def both_values(text: str) -> str:
    r"A tidy answer; if it has one \pm inside a fraction or brackets, the two values that it stands for."
    match = TWO_VALUES.fullmatch(text)
    if not match or text.count(r'\pm') > 1:
        return text
    body = match['body']
    upper = SIGNS.sub(lambda sign: '+' if sign[1] == 'p' else '-', body)
    lower = SIGNS.sub(lambda sign: '-' if sign[1] == 'p' else '+', body)
    return f'{match["start"] or ""}{upper},{lower}{match["end"] or ""}'


def with_points(a: str, b: str) -> tuple:
    "Both answers; where one says x=3, y=2 and the other is a point, the first becomes the point (3, 2)."
    tuples = [re.fullmatch(r'\(.*,.*\)', text) for text in (a, b)]
    both = []
    for text, other_is_tuple in zip((a, b), tuples[::-1]):
        values = dict(VALUE.findall(text))
        if other_is_tuple and len(values) > 1 and VALUES.fullmatch(text):
            text = f'({",".join(values[name] for name in sorted(values))})'
        both.append(text)
    return tuple(both)


def with_ratios(a: str, b: str) -> tuple:
    """Both answers; a ratio of three or more, such as 1:2:3, becomes the tuple (1, 2/1, 3/1).

    Two empty texts, which are not equal, if only one is such a ratio, or if their names differ, as in
    a:b:c=1:2:3 and a:c:b=1:2:3."""
    ratios = [LONG_RATIO.fullmatch(text) for text in (a, b)]
    found = [ratio for ratio in ratios if ratio]
    if not found:
        return a, b
    names = {ratio['names'].replace(' ', '') for ratio in found if ratio['names']}
    if len(found) == 1 or len(names) > 1:
        return '', ''
    both = []
    for ratio in found:
        first, *others = ratio['terms'].split(':')
        shares = [rf'\frac{{{term}}}{{{first}}}' for term in others]
        both.append(f'(1,{",".join(shares)})')
    return tuple(both)


def numerical_value(expression):
    "The value of a sympy expression, to 25 digits. 0 if a thousand digits cannot tell it from 0."
    from sympy import S

    value = expression.evalf(25, maxn=1000)
    if not value.is_finite or abs(value).is_comparable:
        return value
    return S.Zero


def points_for(a, b) -> tuple:
    "The points at which two sympy expressions are compared. Rounding and counting formulas are about whole numbers."
    from sympy import binomial, ceiling, factorial, factorial2, floor

    counting = factorial, factorial2, binomial
    rounding = floor, ceiling
    if a.has(*counting) or b.has(*counting):
        return COUNTING_POINTS
    return WHOLE_POINTS if a.has(*rounding) or b.has(*rounding) else POINTS


def largest_difference(a, b):
    "Largest relative difference of two sympy expressions at some points; None if it is undefined or takes long."
    from sympy import Expr, Rational, Sum

    if not (isinstance(a, Expr) and isinstance(b, Expr)) or a.free_symbols != b.free_symbols:
        return None
    symbols = sorted(a.free_symbols, key=str)
    if a.has(Sum) or b.has(Sum):
        return None  # sympy takes minutes for the value of a long sum; Math-Verify first finds a closed form
    largest = 0
    n_compared = 0
    points = points_for(a, b)
    for start, stride in points:
        point = {}
        for i, symbol in enumerate(symbols):
            point[symbol] = Rational(*start) + i * Rational(*stride)
        x = a.subs(point)
        y = b.subs(point)
        size = max(abs(numerical_value(x)), abs(numerical_value(y)))
        if not size.is_finite:
            if points is COUNTING_POINTS and symbols:
                continue
            return None
        if size > 0:
            n_compared += 1
            largest = max(largest, abs(numerical_value(x - y)) / size)
        if not symbols:
            return largest
    return largest if n_compared > 1 else None


def tolerance(a, b) -> float:
    "The largest difference of two equal formulas: 0, unless one has decimals."
    from sympy import Float

    return EQUAL_FORMULAS if a.has(Float) or b.has(Float) else 0


def with_imaginary_unit(expression):
    "A sympy expression in which the letter i is the imaginary unit. All other objects as they are."
    from sympy import Expr, I

    if not isinstance(expression, Expr):
        return expression
    return expression.subs({s: I for s in expression.free_symbols if s.name == 'i'})


def without_calls(expression):
    "A sympy object in which f(2) is a symbol, and of an equation of two numbers the second alone."
    from sympy import Basic, Eq, Symbol
    from sympy.core.function import AppliedUndef

    if not isinstance(expression, Basic):
        return expression
    calls = [call for call in expression.atoms(AppliedUndef) if not call.free_symbols]
    expression = expression.xreplace({call: Symbol(str(call)) for call in calls})
    if isinstance(expression, Eq) and not expression.free_symbols:
        return expression.rhs
    return expression


def as_one_set(expression, text: str):
    "The set of numbers that `x<1 or x>3` or `x>1 and x<3` describes, as a sympy set. All other objects as they are."
    from sympy import Eq, FiniteSet, Intersection, Union

    words = set(CONNECTIVE.findall(text))
    if len(words) != 1 or not isinstance(expression, FiniteSet):
        return expression
    if len(expression.free_symbols) != 1 or all(isinstance(part, Eq) for part in expression):
        return expression
    combine = Union if words == {'or'} else Intersection
    with contextlib.suppress(Exception):  # a part that describes no set of numbers
        return combine(*(part.as_set() for part in expression))
    return expression


def parsed(text: str) -> list:
    "What Math-Verify reads in a formula: a sympy object, and a text to compare if that fails; [] for nothing."
    from math_verify import LatexExtractionConfig, parse

    latex = [LatexExtractionConfig(boxed_match_priority=0)]  # no configuration that evaluates text
    found = parse(rf'\boxed{{{text}}}', latex, parsing_timeout=None)
    if not found:
        return []
    form = without_calls(with_imaginary_unit(found[0]))
    one_set = as_one_set(form, text)
    if one_set is not form:
        return [one_set]  # the text has lost its "or"
    return [form, *found[1:]]


def math_verify(reference: str, answer: str) -> bool:
    "Are two LaTeX answers equal? Math-Verify's verdict, then a comparison by numerical value."
    from math_verify import verify

    both = with_points(formula_of(reference), formula_of(answer))
    a, b = map(parsed, with_ratios(*both))
    if not a or not b:
        return False
    difference = None
    if '%' not in reference + answer:
        with contextlib.suppress(Exception):  # an expression without a value
            difference = largest_difference(a[0], b[0])
    is_formula = difference is not None and bool(a[0].free_symbols)
    if is_formula and difference <= tolerance(a[0], b[0]):
        return True
    same = verify(a, b, allow_set_relation_comp=True, timeout_seconds=None)
    if difference is None or is_formula:
        return same
    return same and difference < EQUAL_NUMBERS


# ---- the process


def judge_pair(reference: str, answer: str, seconds: float):
    "Runs in the fork of one pair. Its status: `SAME`, `DIFFERENT`, or `FAILED`, also if the guard refused an action."
    limit_resources(seconds)
    try:
        sys.addaudithook(guard)
        if math_verify(reference, answer):
            os._exit(SAME)
        os._exit(FAILED if REFUSED else DIFFERENT)
    finally:
        os._exit(FAILED)


def word_of(status: int) -> str:  # exit status, or minus the signal that ended the process
    "The reply about a pair, from the exit status of its process."
    import signal

    out_of_time = (-signal.SIGALRM, -signal.SIGPROF)
    if status < 0 and status not in out_of_time:
        return ''
    return {DIFFERENT: NO, SAME: YES}.get(status, GAVE_UP)


def serve() -> None:
    "Reads lines of JSON, [reference, answer, seconds], and replies with one word a line, until the end."
    import gc
    import logging

    import sympy.parsing.sympy_parser

    sympy.parsing.sympy_parser.parse_expr = read_literal
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    out = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)  # so that no print of a library is read as a reply
    for reference, answer in ((r'\frac{1}{2}x+1', 'x+1'), ('x>3', r'(3,\infty)')):
        math_verify(reference, answer)  # so that every fork finds its modules loaded
    gc.freeze()
    print('ready', file=out)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            judge_pair(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(word_of(os.waitstatus_to_exitcode(status)), file=out)
