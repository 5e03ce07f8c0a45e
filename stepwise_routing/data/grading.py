"""When is an answer right? Plain comparison first, Math-Verify in a guarded process for the rest"""

import atexit
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ..base.records import Problem
from ..base.tools import PACKAGE, write_file

_TIDY = [
    (re.compile(a), b)
    for a, b in (
        (r'\\[dtc]frac(?![a-zA-Z])', r'\\frac'),
        (r'\\[dt]?binom(?![a-zA-Z])', r'\\binom'),
        (r'(?<=[0-9})!])\s*\\binom', r' \\cdot \\binom'),
        (r'\\(?:mathrm|mathbf|textbf|textit|textrm|operatorname|mbox)(?=\s*\{)', r'\\text'),
        (r'(?<=\d)(?:\\,|\{,\}|,\\! ?)(?=\d{3})', ''),
        (r'\\(?:left|right)(?![a-zA-Z])\.?|\\!|\{\}|\\displaystyle(?![a-zA-Z])', ''),
        (r'(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~', ' '),
        (r'\\?[$€£]', ''),
        (r'\\%', '%'),
        (r'[−–]', '-'),
        (r'\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°', ''),
        (r'([\^_])\{(\w)\}', r'\1\2'),
        (r'\s+', ' '),
    )
]


def _tidy(text):
    "An answer without the LaTeX that carries no meaning."
    for pattern, new in _TIDY:
        text = pattern.sub(new, text)
    return text.strip().rstrip('.').strip()


_NUMBER = re.compile(
    r'(?P<sign>[-+]?) ?(?P<whole>[1-9]\d{0,2}(?:[, ]\d{3})+|\d*)'
    r'(?:\.(?P<dec>\d*)|,(?P<comma>\d{3}))?(?:\\overline ?\{?(?P<rep>\d+)\}?)? ?(?P<pct>%?)',
    re.A,
)

_RATIO = re.compile(
    r'(?P<sign>-?) ?(?:(?P<whole>\d+)(?: |(?=\\)))?'
    r'(?:\\frac ?\{ ?(?P<a>-?\d+) ?\} ?\{ ?(?P<b>-?\d+) ?\}'
    r'|(?P<c>-?\d+) ?/ ?(?P<d>\d+))',
    re.A,
)


def _decimal(m):  # of a match of `_NUMBER`
    whole = re.sub('[, ]', '', m['whole'])
    dec = m['dec'] or m['comma'] or ''
    rep = m['rep'] or ''
    if not (whole or dec or rep) or rep and m['dec'] is None or m['comma'] and whole != '0':
        return None
    value = Fraction(int(whole + dec or 0), 10 ** len(dec))
    if rep:
        value += Fraction(int(rep), (10 ** len(rep) - 1) * 10 ** len(dec))
    return -value if m['sign'] == '-' else value, None if rep else len(dec), bool(m['pct'])


def _number(text):
    "(value, decimals or None for an exact fraction, is it a percentage) of a plain number; None for anything else."
    if m := _NUMBER.fullmatch(text):
        return _decimal(m)
    if m := _RATIO.fullmatch(text):
        a = int(m['a'] or m['c'])
        b = int(m['b'] or m['d'])
        whole = int(m['whole'] or 0)
        if b == 0 or m['whole'] and not 0 < a < b:
            return None
        return (whole + Fraction(a, b)) * (-1 if m['sign'] else 1), None, False


def _same_number(a, b):
    "Do two results of `_number` denote the same answer?"
    (x, i, p), (y, j, q) = a, b
    rounds_to = lambda u, v, places: (
        places is not None and places >= 6 and v != 0 and round(u, places) == v
    )
    same = lambda u, v: u == v or rounds_to(u, v, j) or rounds_to(v, u, i)
    return same(x, y) or p != q and (same(x / 100, y) if p else same(x, y / 100))


_ALIKE = {
    name: row.split()[0]
    for row in '''cm centimeter centimetre|km kilometer kilometre|mm millimeter millimetre|
    m meter metre|ft foot feet|in inch|yd yard|mi mile|kg kilogram|g gram|mg milligram|lb pound|oz ounce|egg|
    h hr hour|min minute|s sec second|ml milliliter|l liter litre|dollar usd|mph|kb|mb|gb|
    ^2 square sq squared|^3 cubic cubed'''.split('|')
    for name in row.split()
}

_MEASURED = re.compile(
    r'(?P<number>.*\d) ?(?: |(?P<text>\\text ?\{ ?))(?P<words>[A-Za-z]+(?: [A-Za-z]+)*)'
    r' ?\}?(?P<power>\^[23])?'
)

_FORMULA = re.compile(
    r'(?:pi|sqrt|mod|or|and|to|if|for|where|but|percent|dozen|hundred|thousand|million|billion|sin'
    r'|cos|tan|log|exp|abc|def|xyz)\b'
)

_PLURAL = re.compile(r'(?:(?<=x)|(?<=[cs]h|ss))es$|(?<!s)s$')


def _unit(m):  # of a match of `_MEASURED`
    "The words of a unit, singular; None for letters that are a product."
    words = [_PLURAL.sub('', w) if w not in _ALIKE else w for w in m['words'].lower().split()]
    if not (
        m['text']
        or words[0] in _ALIKE
        or re.fullmatch('[a-z]{4,}|[^aeiou][aeiou][^aeiou]', words[0])
    ):
        return None
    return {_ALIKE.get(w, w) for w in [*words, m['power']] if w} - {'unit'}


def _measured(text):  # -> (`_number`, its unit, where it has one); None for anything else
    if number := _number(text):
        return number, set()
    m = _MEASURED.fullmatch(text)
    if m and not _FORMULA.match(m['words']) and (number := _number(m['number'].strip())):
        return number, _unit(m)


def _same_measured(a, b):
    "Do two results of `_measured` denote the same answer? None where algebra must say."
    (x, u), (y, v) = a, b
    if u is None or v is None:
        return None if u == v else False
    alike = (u <= v or v <= u) and all((word in u) == (word in v) for word in ('^2', '^3', 'per'))
    return _same_number(x, y) and (alike or not u or not v)


MAX_ANSWER = 2000  # characters; longer answers are compared as text

_BASED = re.compile(r'[0-9A-F]+_(?:\d|\{\d+\})', re.A)

_SPACE = re.compile(r'(?<!\d) | (?!\d)')  # not between digits


def _quick(gold, pred):
    "True or False where plain comparison settles it, None where Math-Verify must decide."
    if not isinstance(gold, str) or not isinstance(pred, (str, type(None))):
        raise TypeError(f'answers are text, got {type(gold).__name__} and {type(pred).__name__}')
    if pred is None or not gold.strip() or not pred.strip():
        return False
    if gold == pred:
        return True
    if max(len(gold), len(pred)) > MAX_ANSWER:
        return gold.strip() == pred.strip()
    g = _tidy(gold)
    p = _tidy(pred)
    if not g or not p:
        return False
    if _SPACE.sub('', g) == _SPACE.sub('', p):
        return True
    a = _measured(g)
    b = _measured(p)
    if a is not None and b is not None and (same := _same_measured(a, b)) is not None:
        return same
    return False if _BASED.fullmatch(g) and _BASED.fullmatch(p) else None


def _literal(text, *args, **kwargs):
    "In place of sympy's `parse_expr`, which evaluates text as Python: reads a number or a name, and nothing else."
    from sympy import Float, Integer, Symbol

    if re.fullmatch(r'[-+]?[0-9]+', text):
        return Integer(int(text))
    if re.fullmatch(r'[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)', text):
        return Float(text)
    if re.fullmatch(r'[a-zA-Z]\w*', text):
        return Symbol(text)
    raise SyntaxError('only numbers and names are read')


_HARMLESS = {
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
}

_WRITERS = 'sympy/polys/monomials.py', 'collections/__init__.py', 'dataclasses.py'


def _guard(event, args):
    "Audit hook of the grading process; raises PermissionError."
    if event not in _HARMLESS:
        raise PermissionError(f'refused: {event}')
    if event == 'open' and (
        set(args[1] or 'r') & set('wax+') or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    ):
        raise PermissionError('refused: writing a file')
    if event != 'exec' or os.path.isfile(args[0].co_filename):
        return
    if not sys._getframe(1).f_code.co_filename.endswith(_WRITERS):
        raise PermissionError('refused: code from a string')


def _value(e):
    "A sympy expression to 25 digits; 0 where a thousand digits do not tell it from nought."
    from sympy import S

    x = e.evalf(25, maxn=1000)
    return x if not x.is_finite or abs(x).is_comparable else S.Zero


def _difference(a, b):
    "Largest relative difference of two sympy expressions, at four points; None where that means nothing."
    from sympy import Expr, Rational

    if not (isinstance(a, Expr) and isinstance(b, Expr)) or a.free_symbols != b.free_symbols:
        return None
    worst = 0
    names = sorted(a.free_symbols, key=str)
    for start, stride in (
        (3, 2),
        (8, 3),
        (Rational(17, 10), Rational(13, 9)),
        (Rational(-7, 5), Rational(-4, 3)),
    ):
        x, y = (e.subs({s: start + i * stride for i, s in enumerate(names)}) for e in (a, b))
        size = max(abs(_value(x)), abs(_value(y)))
        if not size.is_finite:
            return None
        if size > 0:
            worst = max(worst, abs(_value(x - y)) / size)
        if not names:
            break
    return worst


def _math_verify(gold, pred):
    "Math-Verify's verdict on two LaTeX answers, with its comparison of numbers and formulas mended."
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]  # no configuration that evaluates text
    g, p = (parse(rf'\boxed{{{_tidy(s)}}}', latex, parsing_timeout=None) for s in (gold, pred))
    if not g or not p:
        return False
    try:
        gap = None if '%' in gold + pred else _difference(g[0], p[0])
    except Exception:
        gap = None  # an expression without a value
    symbols = gap is not None and bool(g[0].free_symbols)
    if symbols and gap < 1e-12:
        return True
    same = verify(g, p, allow_set_relation_comp=True, timeout_seconds=None)
    return same and (gap is None or symbols or gap < 1e-6)


def _judge(gold, pred, seconds):
    "Body of a forked grading process: exit status 11 for equal, 10 for different; any other end means it gave up."
    import resource
    import signal

    for timer, end, limit in (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds / 2),
        (signal.ITIMER_REAL, signal.SIGALRM, seconds),
    ):
        signal.signal(end, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {end})
        signal.setitimer(timer, limit)
    for name, limit in (('RLIMIT_AS', 3 << 29), ('RLIMIT_FSIZE', 0), ('RLIMIT_CORE', 0)):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (limit, limit))
    try:
        sys.addaudithook(_guard)
        os._exit(11 if _math_verify(gold, pred) else 10)
    finally:
        os._exit(9)


def _word(status):  # of a finished process: exit status, or minus the signal that ended it
    import signal

    if status < 0 and -status not in (signal.SIGALRM, signal.SIGPROF):
        return ''
    return {10: 'no', 11: 'yes'}.get(status, 'gave up')


def _serve():
    "Main loop of a grading server: [gold, pred, seconds] as JSON lines in, a `_word` a line out."
    import gc
    import logging

    import sympy.parsing.sympy_parser

    sympy.parsing.sympy_parser.parse_expr = _literal
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    out = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    for pair in ((r'\frac{1}{2}x+1', 'x+1'), ('x>3', r'(3,\infty)')):
        _math_verify(*pair)
    gc.freeze()
    print('ready', file=out)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _judge(*json.loads(line))
        print(_word(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), file=out)


class Grader:
    "Grades answers in a process of its own, each for `timeout` seconds at most; a context manager, for any thread."

    def __init__(self, timeout: float = 4.0):
        self.timeout = timeout
        self.process = None
        self.turn = threading.Lock()
        self.given_up = set()  # (reference, answer) pairs without a verdict

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def start(self):
        found = f'import sys; sys.path.append({str(PACKAGE.parent)!r})'  # wherever it starts
        command = [
            sys.executable,
            '-c',
            f'{found}; from stepwise_routing.data.grading import _serve; _serve()',
        ]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        if self.process.stdout.readline() != 'ready\n':
            raise RuntimeError('grading does not start: it needs math-verify and os.fork')

    def close(self):
        process = self.process
        self.process = None
        if process is None:
            return
        process.kill()
        process.communicate()

    def ask(self, gold, pred):
        "The word on a pair: a server is started where none is alive, and ended where it has none."
        word = ''
        try:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self.start()
            print(json.dumps([gold, pred, self.timeout]), file=self.process.stdin, flush=True)
            word = self.process.stdout.readline().strip()
        except BrokenPipeError:
            pass
        finally:
            if not word:
                self.close()
        return word

    def __call__(self, gold, pred):
        "Is `pred` (None is wrong) equivalent to the reference `gold`? TypeError where an answer is no text."
        quick = _quick(gold, pred)
        if quick is not None:
            return quick
        with self.turn:
            word = self.ask(gold, pred) or self.ask(gold, pred)
        if word not in ('yes', 'no'):
            self.given_up.add((gold, pred))
        return word == 'yes'


@lru_cache(1)
def _default_grader(pid):
    grader = Grader()
    atexit.register(lambda: os.getpid() == pid and grader.close())
    return grader


def is_equiv(gold: str, pred: str | None) -> bool:
    "Is an answer equivalent to the reference? Exact for plain numbers and equal texts, Math-Verify for the rest."
    return _default_grader(os.getpid())(gold, pred)


def given_up() -> set:
    "The (reference, answer) pairs that `is_equiv` has given up in this process: counted as different."
    return _default_grader(os.getpid()).given_up


def is_right(problem: Problem, answer: str | None) -> bool:
    "The reward $r(x, \\hat y, y^*)$: is the answer equivalent to the problem's reference? None is wrong."
    return is_equiv(problem.answer, answer)


def grade_pairs(grade, pairs):
    "Yields ((problem id, answer), verdict) of distinct (problem, answer) pairs, graded `grade.workers` (2) at a time."
    distinct = {(p.id, a): (p, a) for p, a in pairs}
    with ThreadPoolExecutor(getattr(grade, 'workers', 2)) as pool:
        yield from zip(distinct, pool.map(lambda pair: bool(grade(*pair)), distinct.values()))


def graded(work, *job) -> tuple:  # what work(*job) returns; the pairs that grading gave up in it
    "Do a piece of work, and notice what grading gave up."
    given_up().clear()
    return work(*job), sorted(given_up())


def collected(
    stage, jobs, done
) -> list:  # name of a file; (setting, ...) per job; what `graded` returned of each
    "The results of all jobs. The pairs that grading gave up, if any, are kept beside the results of their setting."
    pairs = {}
    for (s, *_), (_, lost) in zip(jobs, done):
        pairs.setdefault(s.folder, set()).update(lost)
    for folder, lost in pairs.items():
        file = folder / 'grading' / f'given-up-{stage}.json'
        if lost:
            write_file(file, json.dumps(sorted(lost)))
        else:
            file.unlink(missing_ok=True)  # of an earlier attempt
    return [x for results, _ in done for x in results]


def cohen_kappa(counts):
    "Cohen's kappa of counts [..., 4]: none says right, the second, the first, both; nan where chance explains it all."
    import numpy as np

    none, second, first, both = np.moveaxis(np.asarray(counts, float), -1, 0)
    by_chance = (none + second) * (second + both) + (none + first) * (first + both)
    with np.errstate(invalid='ignore'):
        return 2 * (none * both - second * first) / by_chance


def _kappa_interval(cells, problems):
    "95 % interval of kappa: problems are drawn anew; nan with fewer than two."
    import numpy as np

    names, problem = np.unique(problems, return_inverse=True)
    if len(names) < 2:
        return math.nan, math.nan
    per = np.zeros((len(names), 4))
    np.add.at(per, (problem, cells), 1)
    drawn = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), 2000
    )
    kappas = cohen_kappa(drawn @ per)
    kappas = kappas[np.isfinite(kappas)]
    return (
        tuple(np.quantile(kappas, (0.025, 0.975)).tolist()) if len(kappas) else (math.nan, math.nan)
    )


@dataclass(frozen=True)
class Agreement:
    "How far two graders agree on distinct (problem, answer) pairs."

    numbers: dict  # pairs `n`, `share` that agrees, Cohen's `kappa`, 95 % intervals; who alone says right; `unanswered`
    rows: list  # the disagreements: problem, question, reference, answer and both verdicts

    def frame(self):
        import pandas as pd

        return pd.DataFrame([self.numbers])

    def disagreements(self):
        import pandas as pd

        return pd.DataFrame(
            self.rows, columns=['problem', 'question', 'reference', 'answer', 'first', 'second']
        )


def agreement(problems, answers, first, second) -> Agreement:
    "Compare two graders on answers to problems; each distinct (problem, answer) counts once, None is left out."
    from scipy.stats import binomtest

    pairs = list(dict.fromkeys(zip(problems, answers, strict=True)))
    answered = [(p, a) for p, a in pairs if a is not None and a.strip()]
    u, v = (dict(grade_pairs(g, answered)) for g in (first, second))
    cells = [2 * u[k] + v[k] for k in u]
    n = len(answered)
    counts = [cells.count(k) for k in range(4)]
    rows = [
        dict(
            problem=p.id,
            question=p.question,
            reference=p.answer,
            answer=a,
            first=u[p.id, a],
            second=v[p.id, a],
        )
        for p, a in answered
        if u[p.id, a] != v[p.id, a]
    ]
    same = n - len(rows)
    low, high = binomtest(same, n).proportion_ci(method='wilson') if n else (math.nan, math.nan)
    kappa_low, kappa_high = _kappa_interval(cells, [p.id for p, _ in answered])
    numbers = dict(
        n=n,
        share=same / n if n else math.nan,
        share_low=low,
        share_high=high,
        kappa=float(cohen_kappa(counts)),
        kappa_low=kappa_low,
        kappa_high=kappa_high,
        only_first=counts[2],
        only_second=counts[1],
        unanswered=len(pairs) - n,
    )
    return Agreement(numbers, rows)
