"""Is an answer right? Equal numbers are; Math-Verify decides the rest, in a process of its own with a time limit.

What a model wrote is parsed there, and never executed. Verdicts of a model that judges: `models.xverify`.
"""

import json
import logging
import re
import signal
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache

SECONDS = 5  # of a processor, for one pair of answers: a busy machine changes no verdict
LONGEST = 2000  # characters; a longer answer is compared as text

FONT = r'\\(?:text|math|operatorname|bold|bf|rm|it|bm|[mh]box)[a-z]*\b\*?\s*'
UPRIGHT = rf'{FONT}(?:\{{\s*([ei])\s*\}}|([ei])(?![a-z]))'  # \mathrm{e}
REALS = r'\\in\s*(?:\\(?:mathbb|mathbf|mathrm|Bbb|bf)\b\s*)?\{?\s*\\?R\s*\}?\s*'
SET = rf'\\\{{\s*\\?[a-zA-Z]+\s*(?:{REALS})?(?:\\mid\b|\\vert\b|\\colon\b|\||:)(.*?)\\\}}'
SCALE = r'(?!(?:hundred|thousand|[mb]illion|dozen|percent|mod)\b)'
SPELLINGS = (  # pattern and replacement: what Math-Verify reads wrongly
    (r'(?<!\\)\$|\\\(|\\\)|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?', ''),
    (r'(?<=\d)\\[,!]\s*(?=\d{3})|(?<!\\)\\!\s*', ''),
    (r'(?<!\\)\\[,;: ]|~|\\q?quad\b', ' '),
    (SET, r'\1'),  # {x | x > 3} is x > 3
    (rf',\s*\\?[a-z]+\s*{REALS}$|^\s*\\?[a-z]+\s*{REALS},', ''),
    (r'^\\?[a-z]+\s*\\in\b\s*(?=[(\[\\])', ''),
    (r'(?<=[)\]])\s*(?:U|\\bigcup)\s*(?=[(\[])', r' \\cup '),
    (UPRIGHT, r'\1\2'),
    (r'°|\^\s*\{?\\circ\}?', ''),
    (r'(?<=[\d})])\s*\\[dt]?binom', r'\\cdot\\binom'),
    (rf'^(-?[\d.,/]*\d) +{SCALE}[a-z]{{3,}}[a-z ]*$', r'\1'),  # 10 apples
)
LETTER = re.compile(  # (B) 12 and the like, but neither B + 1 nor B and C
    r'(?i:[a-z :]*\b(?:ans(?:wer)?|option|choice)\b(?: is)?:?)?\s*[(\[]?\s*([A-Z])\s*'
    r'(?:$|[)\]]+[.:]?(?![-+*/^_=<>])|[.:]|\s[-–—]\s|\s(?=\(?\s*\d))(?!\s*(?:[,(]|and\b|or\b)\s*\(?[A-Z]\b)'
)


def tidy(text: str) -> str:
    "An answer as Math-Verify reads it best."
    text = text.strip().rstrip('.')
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    return text.strip()


def number(text: str) -> Fraction | None:
    "The value of 1,234 or 0.5 or 3/4 or \\frac{3}{4}. None for other text."
    text = re.sub(r'^(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}$', r'\1\2/\3', text)
    text = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', text)
    try:
        return Fraction(text) if re.fullmatch(r'[-+\d./]+(?:[eE]-?\d\d?)?', text) else None
    except (ValueError, ZeroDivisionError):
        return None


def plain(text: str) -> str:
    "A text without fonts, dollars and spaces of LaTeX."
    return re.sub(rf'{FONT}|\\(?:left|right|q?quad)\b|[\\${{}}*~]', ' ', text).strip()


def same_choice(reference: str, answer: str) -> bool | None:
    "Are both the same letter of a choice, whose text may follow? None if the reference is no single letter."
    letter = plain(reference)
    wanted, given = LETTER.match(letter), LETTER.match(plain(answer))
    if not wanted or not given or wanted.end() < len(letter):
        return None
    return wanted[1] == given[1]


def region(found: list, text: str):  # a sympy set
    "The numbers for which inequalities hold. Those of a list hold all at once, or one of them does."
    from sympy import FiniteSet, Intersection, Set, Union

    parts = found[0].args if isinstance(found[0], FiniteSet) else found[:1]
    sets = [part if isinstance(part, Set) else part.as_set() for part in parts]
    both = Intersection(*sets)
    return Union(*sets) if both.is_empty or re.search(r'\bor\b', text) else both


def math_verify(reference: str, answer: str) -> bool:
    "Math-Verify's verdict on LaTeX. No text is evaluated as Python."
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import And, Expr, Interval

    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text):
        return parse(rf'\boxed{{{text}}}', latex, parsing_timeout=None)

    gold, given = read(reference), read(answer)
    both = reference + answer
    is_same = verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None)
    exact = [x[0] for x in (gold, given) if x and isinstance(x[0], Expr) and x[0].is_number]
    if is_same and len(exact) == 2 and '%' not in both:
        a, b = [value.evalf(20) for value in exact]
        is_same = abs(a - b) <= 1e-3 * abs(a)  # Math-Verify takes 1/2004! for 1/2006!
    if is_same and r'\{' in both:  # and {1, 2} for (1, 2)
        is_same = isinstance(gold[0], (And, Interval)) == isinstance(given[0], (And, Interval))
    if not is_same and re.search(r'[<>]|\\[lgn]e|\\infty', both):
        a, b = region(gold, reference), region(given, answer)
        is_same = a.is_subset(b) and b.is_subset(a)
    return bool(is_same)


@lru_cache(1)
def judge() -> subprocess.Popen:
    "A process that writes a verdict for each pair that it reads."
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, '-P', __file__], text=True, **pipes)


def ask_judge(reference: str, answer: str) -> bool:
    "The verdict of the process. A pair that takes too long, or ends the process, is wrong."
    try:
        print(json.dumps([reference, answer]), file=judge().stdin, flush=True)
        verdict = judge().stdout.readline()
    except BrokenPipeError:
        verdict = ''
    if not verdict:
        logging.warning('no verdict on %.60r, %.60r: counted as wrong', reference, answer)
        judge().wait()
        judge.cache_clear()
    return verdict == '1\n'


@lru_cache(1 << 20)
def is_equivalent(reference: str, answer: str) -> bool:
    "Do two answers mean the same? For one thread."
    if max(len(reference), len(answer)) > LONGEST:
        return reference.strip() == answer.strip()
    choice = same_choice(reference, answer)
    if choice is not None:
        return choice
    a, b = tidy(reference), tidy(answer)
    if a == b:
        return a != ''
    x, y = number(a), number(b)
    if None not in (x, y) and (x == y or '.' not in a + b):  # decimals may be rounded
        return x == y
    return ask_judge(a, b)


def serve() -> None:
    "The process: pairs come in as JSON, 0 or 1 goes out."
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # which ends this process
        try:
            verdict = math_verify(*json.loads(line))
        except Exception:  # of sympy, about things that cannot be compared
            verdict = False
        print(int(verdict), flush=True)


if __name__ == '__main__':
    serve()
