"""The things this project computes with: a problem, a reasoning step, a model and its price"""

import re
from collections import namedtuple
from dataclasses import dataclass

from .util import digest, unknown_name

# ---- prompt, steps and answer of a text

_SYSTEM_PROMPT = r'Please reason step by step, and put your final answer within \boxed{}.'


def chat_prompt(question: str) -> list:
    "The paper's generation prompt as chat messages: the system line, then the problem."
    return [dict(role='system', content=_SYSTEM_PROMPT), dict(role='user', content=question)]


SEPARATOR = '\n\n'  # steps are "segments between blank lines" (the paper's experimental set-up)

BRACE = re.compile(
    r'(?P<box>\\(?:boxed|fbox)\s*\{)'
    r'|(?P<bare>\\(?:boxed|fbox)\s*(?P<token>\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])))'
    r'|\\.|[{}]',
    re.S,
)
GAP = r'(?:[\s$~*]|\\[ ,;:()\[\]\\]|\\q?quad\b)*'
JOINED = re.compile(  # what stands between the boxes of one answer, such as "and"
    rf'{GAP}(?:[,;]|(?:[,;]{GAP})?(?:\\\w+\s*\{{)?\s*\b(?:and|or)\b\s*\}}?){GAP}'
    rf'(?:[a-z](?:_\{{?\d\}}?)?\s*=)?{GAP}',
    re.I,
)
BLANK = re.compile(  # what a box may hold that is no answer
    r'\\[hv]?phantom\s*(?:\{.*\}|\w)|\\(?:[hv]space|rule|kern)\b\*?(?:\{[^{}]*\}|[\d.]+\s*[a-z]{2})*'
    r'|\\(?:text|math|underline|mbox|square|Box|q?quad|[lc]?dots|strut|hfill)[a-z]*'
    r'|\\[\s,;:!_$]|[\s?_~.,{}$…]'
    r'|[\[<]?\b(?:(?:insert|your|the|my|final)(?:\s|\\?_)+){0,3}answer(?:(?:\s|\\?_)+here)?(?:\b|(?=_))[\]>]?',
    re.S | re.I,
)


def boxes(text: str) -> list:  # (content, where it begins, where it ends)
    "All complete `\\boxed{}` of a text (or `\\fbox{}`, or bare `\\boxed 5`). Of nested boxes, the inner ones."
    found = []
    open_braces = []  # (start of the box, or -1; start of its content)
    for match in BRACE.finditer(text):
        if match['bare']:
            found.append((match['token'], match.start(), match.end()))
        elif match['box'] or match[0] == '{':
            open_braces.append((match.start() if match['box'] else -1, match.end()))
        elif match[0] == '}' and open_braces:
            start, content = open_braces.pop()
            holds_a_box = found and found[-1][1] > start
            if start >= 0 and not holds_a_box:
                found.append((text[content : match.start()], start, match.end()))
    return found


def boxed(
    text: str,  # of a step
    question: str = '',  # whose boxes are no answers
) -> str | None:
    """The parsed answer $\\hat y$: the last box of a text, joined with those next to it, as in \\boxed{3}, \\boxed{5}.

    None if no box has a content of its own: a blank box is no answer, nor is a box that repeats the question."""
    asked = {content.strip() for content, *_ in boxes(question)}
    answers = []
    end = -1
    for content, start, stop in boxes(text):
        if not BLANK.sub('', content) or content.strip() in asked:
            continue
        if start - end > 60 or not JOINED.fullmatch(text, end, start):
            answers = []  # a new answer, such as a correction
        answers.append(content.strip())
        end = stop
    return ', '.join(dict.fromkeys(answers)) or None


# ---- records


@dataclass(frozen=True)
class Problem:
    "One benchmark problem $(x, y^*)$."

    benchmark: str  # e.g. "gsm8k", "micro-math"
    id: str  # unique within the benchmark
    question: str  # $x$, as shown to the models
    answer: str  # $y^*$, the reference answer
    difficulty: float | None = None  # as annotated; no router sees it by default
    solution: str | None = None  # reference solution, steps joined by a blank line


@dataclass(frozen=True)
class Step:
    "One reasoning step $y_t$, as one model wrote it."

    text: str  # without the blank line that ends it
    model: int  # index of the model that wrote it, 0 = smallest
    finish: str  # "step" (more may follow), "stop" (an answer, or the model said so) or "length" (cut off)
    ids: tuple = ()  # generated token ids, separator or end token included; empty if a server hides them
    ends: tuple = ()  # per token, the offset in `text` at which it ends (clipped to its length)
    prob: tuple = ()  # per token, probability of the sampled token at temperature 1
    max_logit: tuple | None = None  # per token, $\max_v z_v$; None: the server shows none
    generated: int = 0  # generated tokens, as billed
    prompt: int = 0  # prompt tokens of the call: template, problem and all steps before
    cached: int = 0  # of these, tokens that the server read from its cache, by its own account
    entropy: float | None = None  # of its first token's distribution, nats; None if not known

    @property
    def final(self) -> bool:
        return self.finish != 'step'


@dataclass(frozen=True)
class ModelSpec:
    "The facts about a model that the bill needs."

    name: str  # Hugging Face name, path or API name
    params: float  # number of parameters $N$, for $2N$ FLOPs per token
    price: str | None = None  # row of `PRICES`; None for an open model


def edge_seed(benchmark: str, problem_id: str, sample: int, path: str, model: int) -> int:
    "63-bit seed of an edge of a problem's routing tree: `model` writes the step after `path`, for example \"001\"."
    return int(digest(benchmark, problem_id, sample, path, model), 16) >> 1


# ---- prices

# prices of prompt tokens, cached ones, generated ones; the month
Price = namedtuple('Price', 'input cached output as_of')

# The first row is the paper's own statement and OpenAI's price at release; the second one is OpenAI's price list.
PRICES = {
    'gpt-4.1-mini': Price(0.40, 0.10, 1.60, '2025-04'),
    'gpt-4o-mini': Price(0.15, 0.075, 0.60, '2024-10'),
}


def undated(model: str) -> str:
    "The name of a model without the date of its version, as price lists have it."
    return re.sub(r'-\d{4}-\d\d-\d\d$', '', model)


def find_price(
    price: str,  # row of `PRICES`, or "INPUT/CACHED/OUTPUT" in US dollars per million tokens
) -> Price:
    "The price of tokens. ValueError: no such price."
    number = r'\d+(?:\.\d{1,6})?'
    own = re.fullmatch(rf'({number})/({number})/({number})', str(price))
    if own:
        return Price(*map(float, own.groups()), 'own')
    form = ', or "INPUT/CACHED/OUTPUT" in US dollars per million tokens, such as "0.4/0.1/1.6"'
    if price not in PRICES:
        raise ValueError(unknown_name('price', price, PRICES, form))
    return PRICES[price]


# "Cached" are the tokens that the server charged as such, not those that an ideal cache would hold. OpenAI, for one,
# caches no prompt below 1,024 tokens.
def token_cents(
    price: str,  # see `find_price`
    prompt,  # prompt tokens; numbers or arrays, as all that follow
    cached,  # of these, tokens that the server charged at its lower price for cached input
    generated,  # generated tokens
):
    "The cost of tokens in US cents. ValueError: no such price."
    p = find_price(price)
    return ((prompt - cached) * p.input + cached * p.cached + generated * p.output) / 1e4


# ---- questions to a judge

VERIFY_PROMPT = '''Task: Determine whether the final step is correct for the given problem.

Instructions:
- Reply with exactly one verdict: correct or incorrect.
- Do not explain, justify, or provide any reasoning.

Question:
{question}

Previous steps:
{prefix}

Last step:
{answer}

Verdict:
correct | incorrect'''


def step_texts(steps):
    return [getattr(s, 'text', s) for s in steps]


def verdict_messages(problem: Problem, steps) -> list:
    "The paper's appendix prompt as chat messages: is the last step (str or `Step`) correct or incorrect?"
    *prefix, last = step_texts(steps)
    text = VERIFY_PROMPT.format(
        question=problem.question, prefix=SEPARATOR.join(prefix), answer=last
    )
    return [dict(role='user', content=text)]


_SCORE_PROMPT = 'Rate the last step from 0 (wrong) to 9 (right). Reply with one digit.'


def score_messages(problem: Problem, steps, prompt=chat_prompt) -> list:
    "SpecReason's question in our words as chat messages, after the chain; the reply is one digit."
    chain = dict(role='assistant', content=SEPARATOR.join(step_texts(steps)))
    return prompt(problem.question) + [chain, dict(role='user', content=_SCORE_PROMPT)]
