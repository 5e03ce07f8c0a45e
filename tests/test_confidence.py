"The confidences S^os and S^API by hand, which tokens they count, the columns that routers see, and the AUROC."

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sklearn.metrics import roc_auc_score

from stepwise_routing.method.confidence import (
    FEATURES,
    auroc,
    chain_features,
    logit_confidence,
    logprob_confidence,
    math_token_mask,
)
from stepwise_routing.records import Step


def tokens(text, pattern=r'\\[A-Za-z]+|[A-Za-z]+|\d|\s+|.'):
    "Tokens and their ends, as a tokenizer with single digits would cut them."
    ends = [m.end() for m in re.finditer(pattern, text, re.S)]
    return [text[a:b] for a, b in zip([0, *ends], ends)], ends


def masked(text):
    words, ends = tokens(text)
    counted = math_token_mask(text, tuple(ends))
    return ''.join(word for word, counts in zip(words, counted) if counts)


# ---- the mask
MATHS = [
    ('Natalia sold 48/2 = 24 clips in May.', '48/2=24'),
    (r'First, we use $r = \sqrt{x^2 + y^2}$ here.', r'$r=\sqrt{x^2+y^2}$'),
    (r'Thus \(\theta = \frac{\pi}{2}\) as wanted', r'\(\theta=\frac{\pi}{2}\)'),
    (r'So \[a^n - b^n\] divides it', r'\[a^n-b^n\]'),
    ('We get $$\nx + y\n$$ now', '$$x+y$$'),
    (
        r'\begin{align*} x &= y \\ z &= w \end{align*} done',
        r'\begin{align*}x&=y\\z&=w\end{align*}',
    ),
    (r'The answer is \boxed{\text{even}}.', r'\boxed{\text{even}}'),
    (r'cut off \(x + y', r'\(x+y'),
    ('It costs $5 and $6 more.', '56'),
    ('A well-known and/or trick - **Step 1**: go', '-1'),
    ('3*4=12, 2**3=8 and 5! = 120', '3*4=122**3=85!=120'),
    ('Wow! No maths.', 'Wow!Nomaths.'),  # falls back to all tokens
    ('1,234.50 dollars', '1,234.50'),
    ('-3 < x', '-3<'),
    ('50% of it', '50%'),
    ('x ≤ 7 × 8', '≤7×8'),
]


def test_what_counts_as_mathematics():
    for text, math in MATHS:
        assert re.sub(r'\s', '', masked(text)) == math


@given(st.text(st.characters(exclude_categories=['Cs']), max_size=60), st.data())
def test_mask_on_any_text_and_any_cut(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    mask = math_token_mask(text, tuple(cuts))
    assert mask.dtype == bool and mask.shape == (len(cuts),) and (mask.any() or not cuts)


TEXTS = r'Let $x=3$, so \(2x+1=7\).', 'So 12 apples and 30 pears: 42', r'By \frac{1}{2} and $$y$$'


@given(st.sampled_from(TEXTS), st.data())
def test_mask_does_not_depend_on_how_tokens_are_cut(text, data):
    "A coarse token is in the mask exactly where one of its characters is."
    fine = math_token_mask(text, tuple(range(1, len(text) + 1)))
    ends = sorted({*data.draw(st.lists(st.integers(1, len(text)), max_size=10)), len(text)})
    coarse = math_token_mask(text, tuple(ends))
    assert coarse.tolist() == [bool(fine[a:b].any()) for a, b in zip([0, *ends], ends)]


def test_tokens_without_width_carry_no_mathematics():
    assert math_token_mask('7', (1, 1, 1)).tolist() == [True, False, False]
    assert math_token_mask('', (0,)).tolist() == [True] and math_token_mask('', ()).tolist() == []


def test_mask_is_quick_on_any_text():
    parts = {'$': 20_000, r'\begin{a}': 2000, r'\(': 10_000, '1': 100_000, r'\a{b{c}': 5000}
    for part, times in (parts | {'$$ a $': 5000}).items():
        math_token_mask(part * times, (len(part) * times,))


# ---- the scores
def step_of(text, prob, logit, **more):
    ends = tokens(text)[1]
    assert len(ends) == len(prob) == len(logit)
    known = dict(ids=tuple(ends), ends=tuple(ends), prob=tuple(prob), max_logit=tuple(logit))
    return Step(text, 0, **dict(finish='step', generated=len(ends)) | known | more)


def test_scores_on_a_latex_step_by_hand():
    prob = [0.9, 0.1, 0.8, 0.7, 0.6, 0.95, 0.85, 0.2, 0.3]
    logit = [20, 99, 10, 11, 12, 13, 14, 99, 99]
    step = step_of(r'So $x=7$ holds', prob, logit)
    assert logit_confidence(step) == pytest.approx((10 + 11 + 12 + 13 + 14) / 5)
    assert logprob_confidence(step) == 0.6


def test_scores_of_steps_that_lack_something():
    step = step_of('7', [0.5], [3.0])
    hidden = replace(step, max_logit=None)
    assert np.isnan(logit_confidence(hidden)) and logprob_confidence(hidden) == 0.5
    bare = Step('7', 1, 'stop')
    assert np.isnan(logit_confidence(bare)) and np.isnan(logprob_confidence(bare))
    empty = Step('', 0, 'step', (5,), (0,), (0.25,), (8.0,), 1)
    assert (logit_confidence(empty), logprob_confidence(empty)) == (8.0, 0.25)


# ---- what a router sees
def test_the_columns_of_a_chain_by_hand():
    first = step_of('so 7', [0.9, 0.9, 0.5], [1, 2, 3], entropy=0.3)
    second = step_of('so 9', [0.9, 0.9, 1.0], [1, 2, 5], entropy=0.7)
    last = step_of(r'\boxed{7}', [0.9, 0.8, 0.7, 0.75], [4] * 4, entropy=0.2, finish='stop')
    columns = chain_features([first, second, last])
    assert tuple(columns) == FEATURES
    want = dict(
        mean_logit=[3, 5, 4],
        min_prob=[0.5, 1, 0.7],
        min_odds=np.log([1, 0.9999 / 0.0001, 0.7 / 0.3]),  # clipped at one in ten thousand
        step=[0, 1, 2],
        length=[3, 3, 4],
        final=[0, 0, 1],
        next_entropy=[0.7, 0.2, 0],  # of the step that begins next; behind the last one is none
    )
    for name, values in want.items():
        np.testing.assert_allclose(columns[name], values, rtol=1e-6, err_msg=name)
        assert columns[name].dtype == float
        assert (columns[name] == columns[name].astype(np.float32)).all(), 'as files keep them'


def test_a_benchmark_may_score_other_characters():
    step = step_of('a 1', [0.5, 0.9, 0.9], [1.0, 2.0, 3.0])

    def every(text):
        return np.ones(len(text), bool)

    plain, scored = chain_features([step]), chain_features([step], every)
    assert (plain['mean_logit'][0], scored['mean_logit'][0]) == (3, 2)
    with pytest.raises(ValueError, match='gives 1 values for a step of 3 characters'):
        math_token_mask('a 1', (3,), lambda text: [True])


def test_a_step_that_did_not_fit_keeps_the_scores_of_the_step_before():
    first = step_of('3+4=7', [0.9, 0.8, 0.7, 0.95, 0.6], [10.0, 11, 12, 13, 14])
    full = Step('', 0, 'length', prompt=99)
    columns = chain_features([first, full])
    for name in ('mean_logit', 'min_prob', 'min_odds'):
        assert columns[name][0] == columns[name][1]
    assert [columns[name][1] for name in ('step', 'length', 'final')] == [1, 0, 1]
    hidden = replace(
        first, prob=(), max_logit=None
    )  # a server that hides its tokens: no score there
    assert np.isnan(chain_features([first, hidden])['min_prob'][1])
    assert np.isnan(chain_features([full])['min_prob'][0])


# ---- AUROC
items = st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=2, max_size=40)


@given(items.filter(lambda x: len({label for _, label in x}) == 2))
def test_auroc_is_that_of_scikit_learn_also_with_ties(items):
    score, label = zip(*items)
    area, low, high = auroc(label, score, n_boot=20)
    assert area == pytest.approx(roc_auc_score(label, score)) and 0 <= low <= high <= 1
    assert auroc(label, [-x for x in score], n_boot=20)[0] == pytest.approx(1 - area)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    from scipy.stats import norm

    truth, rng, hits = (
        norm.cdf(0.5**0.5),
        np.random.default_rng(0),
        0,
    )  # two unit normals, one apart
    for _ in range(200):
        label = rng.random(120) < 0.5
        _, low, high = auroc(label, rng.normal(size=120) + label, n_boot=300)
        hits += low <= truth <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_bootstrap_draws_groups():
    "Ten copies of an item in one group say no more than one: the interval stays as wide."
    rng = np.random.default_rng(0)
    label, score = rng.random(80) < 0.5, rng.normal(size=80)
    alone = auroc(label, score + label)
    copies = [np.repeat(x, 10) for x in (label, score + label, np.arange(80))]
    grouped, loose = auroc(*copies), auroc(*copies[:2])
    assert grouped == pytest.approx(alone)
    assert loose[2] - loose[1] < 0.6 * (alone[2] - alone[1])


def test_auroc_of_one_label_is_unknown():
    assert np.isnan(auroc([True, True], [1, 2])).all()
    assert auroc([True, False, True], [1, 1, 1], n_boot=10) == (0.5, 0.5, 0.5)
