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
SCALE = r'(?!(?:hundred|thousand|[mb]illion|dozen|percent|mod)\b)'
SET = r'^\\\{\s*[a-z]\s*(?:\\in\s*\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?)?\s*(?:\\mid|\\vert|\||:)(.*)\\\}$'
SPELLINGS = (  # pattern and replacement: what Math-Verify reads wrongly
    (r'(?<!\\)\$|\\\(|\\\)|\\left(?![a-z])|\\right(?![a-z])', ''),
    (SET, r'\1'),  # {x | x > 3} is x > 3
    (r'\\(?:mathrm|operatorname|rm|text)\s*\{\s*e\s*\}', 'e'),
    (r'°|\^\s*\{?\\circ\}?', ''),
    (r'(?<=[\d})])\s*\\[dt]?binom', r'\\cdot\\binom'),
    (rf'^(-?[\d.,/]*\d) +{SCALE}[a-z]{{3,}}[a-z ]*$', r'\1'),  # 10 apples
)
FONT = r'(?:\\(?:text|mathrm|mathbf|mathsf|textbf|textrm|bf|rm|mbox)\b\s*)*'
LETTER = re.compile(rf'\s*{FONT}\{{?\s*\(?\s*([A-Z])\s*(?:$|[).:}}](?!\s*[-+*/^=_<>]))')


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
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def same_choice(reference: str, answer: str) -> bool | None:
    "Are both the same letter of a choice, whose text may follow? None if the reference is no single letter."
    wanted, given = LETTER.match(reference), LETTER.match(answer)
    if not wanted or not given or wanted.end() < len(reference.rstrip()):
        return None
    return wanted[1] == given[1]


def math_verify(reference: str, answer: str) -> bool:
    "Math-Verify's verdict on LaTeX. No text is evaluated as Python."
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr

    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text):
        return parse(rf'\boxed{{{text}}}', latex, parsing_timeout=None)

    gold, given = read(reference), read(answer)
    is_same = verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None)
    exact = [x[0] for x in (gold, given) if x and isinstance(x[0], Expr) and x[0].is_number]
    if is_same and len(exact) == 2 and '%' not in reference + answer:
        a, b = [value.evalf(20) for value in exact]
        is_same = abs(a - b) <= 1e-3 * abs(a)  # Math-Verify takes 1/2004! for 1/2006!
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
    choice = same_choice(reference, answer)
    if choice is not None:
        return choice
    a, b = tidy(reference), tidy(answer)
    if a == b or max(len(a), len(b)) > LONGEST:
        return a == b != ''
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
