"""An answer without the LaTeX that carries no meaning, so that two spellings of it are one text.

Here belong rewriting LaTeX, characters and words. Comparing two tidy answers belongs in `data.answers`.
"""

import re

GLYPHS = str.maketrans('０１２３４５６７８９－', '0123456789-') | str.maketrans(
    {'½': r'\frac{1}{2}', '∞': r'\infty ', '·': r'\cdot ', '∅': r'\emptyset '}
)
EACH = 'for all|for any|for every|for each|for some'
REWRITES = [  # pattern and replacement, applied in this order
    # where it is unclear what a root covers, as in √2x, it stays
    (r'(?<![²³⁴])√ ?([0-9]+)(?![\w.!^{(])', r'\\sqrt{\1}'),
    (r'(?<=[0-9a-zA-Z)}])²(?![0-9³√])', '^2'),
    (r'\\varnothing(?![a-zA-Z])', r'\\emptyset'),
    (r'\\frac ?([0-9])([0-9])(?![0-9])', r'\\frac{\1}{\2}'),
    (r'\\[dtc]frac(?![a-zA-Z])', r'\\frac'),
    (r'\\[dt]?binom(?![a-zA-Z])', r'\\binom'),
    (r'\\binom ?([0-9]|(?<= )[a-z]) ?([0-9a-z])(?![0-9])', r'\\binom{\1}{\2}'),
    (r'\\lg(?![a-zA-Z])', r'\\log_{10}'),
    (r'\\(?:[cl]?dots|dots[bcm])(?![a-zA-Z])|…|(?<=[,+]) ?\.\.\.', r'\\ldots '),
    (r'\\cis(?![a-zA-Z])', r'\\text{cis}'),
    (rf',? ?(?:\\text ?\{{ ?)?(?:{EACH})(?: [a-z]+)* ?\}}? ?[a-z]?$', ''),  # for all x
    (
        r'^\\text ?\{ ?all(?: positive)?(?: integers?| real numbers)? ?\} ?(?=[a-z] ?(?:[<>]|\\[lg]eq?(?![a-z])))',
        '',
    ),
    (r', ?([kmn]) ?\\in ?\\(?:mathbb ?\{?|)Z\}?$', ''),
    (r'^\\\{ ?([a-z]) ?(?:\\in ?\\mathbb ?\{?R\}? ?)?(?:\\mid|\||:) ?(\1?[^:|]+)\\\}$', r'\2'),
    (r'(?<=[0-9})!])\s*\\binom', r' \\cdot \\binom'),
    (r'\\(?:mathrm|mathbf|textbf|textit|textrm|operatorname|mbox)(?=\s*\{)', r'\\text'),
    (r'(?<=\d)(?:\\,|\{,\}|,\\! ?)(?=\d{3})', ''),
    (r'\\(?:left|right)(?![a-zA-Z])\.?|\\!|\{\}|\\displaystyle(?![a-zA-Z])', ''),
    (r'(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~', ' '),
    (r'\\?[$€£]', ''),
    (r'\\%', '%'),
    (r'[−–]', '-'),
    (r'\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°', ''),
    (r'\^ ?-(\d+|[a-z])', r'^{-\1}'),
    (r'(?<=\d) ?(?:\\text ?\{ ?)?\b(?:out of|in)\b ?\}? ?(?=\d)', '/'),
    (r'(?<=\d) ?(?:\\text ?\{ ?)?\bto\b ?\}? ?(?=\d)', ':'),
    (r'([\^_])\{(\w)\}', r'\1\2'),
    (r"''(?<=[a-zA-Z)}]'')\s*(?=\()", r'^{\\prime\\prime}'),
    (r"'(?<=[a-zA-Z)}]')\s*(?=\()", r'^{\\prime}'),
    (r'\s+', ' '),
]
REWRITES = [(re.compile(pattern), new) for pattern, new in REWRITES]
PLAIN_TEXT = re.compile(r'\\text ?\{([\w(),. -]*)\}')
LOOSE_SPACE = re.compile(r'(?<!\d) | (?!\d)')  # a space that is not between two digits


MEANT = {  # letters of an answer in words -> LaTeX
    'allrealnumbers': r'\mathbb{R}',
    'allreals': r'\mathbb{R}',
    'nosolution': r'\emptyset',
    'nosolutions': r'\emptyset',
}


def tidy(text: str) -> str:
    "An answer without the LaTeX that carries no meaning, and with LaTeX instead of characters such as √."
    text = text.translate(GLYPHS)
    for pattern, new in REWRITES:
        if pattern.search(text):  # most are not found, and `sub` first reads `new`
            text = pattern.sub(new, text)
    text = LISTED.sub(listed, text)
    text = text.strip().rstrip('.').strip()
    return MEANT.get(letters(text).lower(), text)


LISTED = re.compile(  # whole numbers with an ellipsis, such as 1, 2, \ldots , 10
    r'(?P<first>-?[0-9]+(?:, ?-?[0-9]+)+), ?\\ldots ?, ?(?P<last>-?[0-9]+)'
)
MOST_LISTED = 1000  # numbers that are spelled out


def listed(match) -> str:  # match of `LISTED`
    "The numbers spelled out; as they are if their steps differ, as in 2, 3, 5, ..., 97."
    numbers = [int(number) for number in match['first'].split(',')]
    step = numbers[1] - numbers[0]
    steps = {second - first for first, second in zip(numbers, numbers[1:])}
    last = int(match['last'])
    if steps != {step} or step == 0 or not 0 <= (last - numbers[0]) / step <= MOST_LISTED:
        return match[0]
    whole = range(numbers[0], last + step // abs(step), step)
    return ', '.join(map(str, whole)) if whole[-1] == last else match[0]


def letters(text: str) -> str:
    r"A tidy answer without loose spaces, and without the \text around words."
    return LOOSE_SPACE.sub('', PLAIN_TEXT.sub(r'\1', text))
