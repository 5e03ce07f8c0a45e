"""How sure was the model of this step? Two scores, and the named columns that a router decides on"""

# %% imports
import re
from functools import lru_cache

import numpy as np

from ..records import Step
from ..util import resamples

# %% math-pattern
_MATH_PATTERNS = (
    r'\$\$.+?\$\$',  # $$...$$
    r'\$(?![\s$])[^$\n]*?(?<![\s\\])\$(?!\d)',  # $...$, not the prices of "$5 and $6"
    r'\\\(.*?(?:\\\)|\Z)',  # \(...\), cut off or not
    r'\\\[.*?(?:\\\]|\Z)',  # \[...\], cut off or not
    r'\\begin\{(\w+\*?)\}.*?(?:\\end\{\1\}|\Z)',  # environments
    r'\\[A-Za-z]+(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})*',  # commands, with their arguments
    r'\d+(?:[.,]\d+)*',  # numbers
    r'[+=<>^%±×÷·√∑∏∫∞≈≠≤≥−π°]',  # operators
    r'(?<=[\d)}])!',  # factorials
    r'(?<!\*)\*(?!\*)|(?<=\d)\*\*(?=\d)',  # products and powers, not **bold**
    r'(?<![A-Za-z])[-/]|[-/](?![A-Za-z])',  # minus and slash, not "well-known" or "and/or"
)
_MATH = re.compile('|'.join(_MATH_PATTERNS), re.S)


def _math_chars(text) -> np.ndarray:  # bool [character]
    "Which characters of a text are mathematics? Blanks never are."
    math = np.zeros(len(text), bool)
    for m in _MATH.finditer(text):
        math[m.start() : m.end()] = True
    blank = np.array([c.isspace() for c in text], bool)
    return math & ~blank

# %% math-token-mask
@lru_cache(1 << 13)  # walks see the same steps again and again
def math_token_mask(
    text: str,  # of a step
    ends: tuple,  # per token, the offset in `text` at which it ends
    scored=None,  # text -> bool per character, of a `Benchmark`; None: mathematics
) -> np.ndarray:  # bool [token], read only
    "$M_i$: the tokens that overlap mathematics (or the text that a benchmark scores); all tokens if there is none."
    chars = np.asarray((scored or _math_chars)(text), bool)
    if chars.shape != (len(text),):
        raise ValueError(
            f'scored(text) gives {chars.size} values for a step of {len(text)} characters: '
            'return True or False for each'
        )
    math_chars_before = np.r_[0, chars.cumsum()]  # [offset]
    token_ends = np.minimum(np.asarray(ends, int), len(text))
    math_chars_up_to = math_chars_before[token_ends]  # [token]
    mask = math_chars_up_to > np.r_[0, math_chars_up_to][:-1]
    return mask if mask.any() else ~mask

# %% logit-confidence
def logit_confidence(
    step: Step, scored=None
) -> float:  # $S^{os}$; nan if the model shows no logits
    "Mean over the math tokens of the largest raw logit (the paper's score for open models)."
    if step.max_logit is None or len(step.max_logit) == 0:
        return float('nan')
    mask = math_token_mask(step.text, step.ends, scored)
    return float(np.mean(np.asarray(step.max_logit)[mask]))

# %% logprob-confidence
# Read literally, the paper's $M_i^{(5)}$ leaves out tokens that the API does not list among its five likeliest, the
# least certain of all. Here they count, with their own probability.
def logprob_confidence(
    step: Step, scored=None
) -> float:  # $S^{API}$; nan if there are no probabilities
    "The probability of the least sure math token (the paper's score for API models)."
    if len(step.prob) == 0:
        return float('nan')
    mask = math_token_mask(step.text, step.ends, scored)
    return float(np.asarray(step.prob)[mask].min())

# %% features
FEATURES = ('mean_logit', 'min_prob', 'min_odds', 'step', 'length', 'final', 'next_entropy')
CLIP = 1e-4  # of a probability, before its log-odds


def last_scored(steps) -> Step:
    "The last step that has tokens: one that did not fit into the context keeps the scores of the step before."
    for step in reversed(steps):
        if len(step.prob) or step.generated:
            return step
    return steps[-1]


def prob_odds(prob):
    "Log-odds of a probability."
    prob = np.clip(prob, CLIP, 1 - CLIP)
    return np.log(prob / (1 - prob))


def chain_features(
    steps,  # of a chain so far
    scored=None,  # which characters count, of a `Benchmark`; None: mathematics
) -> dict:  # name -> [step]
    """What a router may see of a chain: a column per feature, with the digits of float32, as files keep them.

    `next_entropy` is known when the next step has begun."""
    sources = [last_scored(steps[: index + 1]) for index in range(len(steps))]
    min_prob = np.array([logprob_confidence(step, scored) for step in sources])
    entropy = [np.nan if step.entropy is None else step.entropy for step in steps]
    columns = dict(
        mean_logit=np.array([logit_confidence(step, scored) for step in sources]),
        min_prob=min_prob,
        min_odds=prob_odds(min_prob),
        step=np.arange(len(steps), dtype=float),
        length=np.array([step.generated for step in steps], float),
        final=np.array([step.final for step in steps], float),
        next_entropy=np.array([*entropy[1:], 0.0]),
    )
    return {name: column.astype(np.float32).astype(float) for name, column in columns.items()}


# %% auroc
def auroc(
    label,  # bool [item]
    score,  # [item], high where the label is expected
    groups=None,  # [item], what the bootstrap draws, such as the problem of a step; None: each item
    n_boot: int = 1000,  # resamples
) -> tuple:  # (AUROC, low, high); nan if only one label occurs
    "How often an item with the label has the higher score (ties count half), with its 95 % interval."
    label, score = np.asarray(label, bool), np.asarray(score, float)
    if label.all() or not label.any():
        return (float('nan'),) * 3
    group = np.arange(len(label)) if groups is None else np.unique(groups, return_inverse=True)[1]
    order = np.argsort(score, kind='stable')
    label, score, group = label[order], score[order], group[order]
    first = np.flatnonzero(np.diff(score, prepend=-np.inf))  # where each score begins
    areas = []
    for counts in resamples(group.max() + 1, n_boot):  # one at a time: all would fill the memory
        times = counts[group]
        with_label = np.add.reduceat(times * label, first)
        without = np.add.reduceat(times * ~label, first)
        below = without.cumsum() - without / 2
        pairs = with_label.sum() * without.sum()
        areas.append((with_label * below).sum() / pairs if pairs else np.nan)
    low, high = np.nanquantile(areas[1:], (0.025, 0.975), method='nearest')
    return float(areas[0]), float(low), float(high)
