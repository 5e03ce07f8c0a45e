"The confidences S^os and S^API by hand, which tokens they count, the columns that routers see, and the AUROC."

import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sklearn.metrics import roc_auc_score

from stepwise_routing.method import confidence
from stepwise_routing.records import Step


def ends_of(text):
    "Where its tokens end, as a tokenizer with single digits would cut it."
    return tuple(m.end() for m in re.finditer(r'\\[A-Za-z]+|[A-Za-z]+|\d|\s+|.', text, re.S))


MATHS = [
    ('Natalia sold 48/2 = 24 clips in May.', '48/2=24'),
    (r'First, we use $r = \sqrt{x^2 + y^2}$ here.', r'$r=\sqrt{x^2+y^2}$'),
    (r'Thus \(\theta = \frac{\pi}{2}\) as wanted', r'\(\theta=\frac{\pi}{2}\)'),
    (r'So \[a^n - b^n\] divides it', r'\[a^n-b^n\]'),
    ('We get $$\nx + y $$ now', '$$x+y$$'),
    (r'\begin{array} x &= y \end{array} done', r'\begin{array}x&=y\end{array}'),
    (r'The answer is \boxed{\text{even}}.', r'\boxed{\text{even}}'),
    (r'cut off \(x + y', r'\(x+y'),
    ('It costs $5 or $6-$7 more.', '56-7'),
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
        ends = ends_of(text)
        counted = zip([0, *ends], ends, confidence.math_token_mask(text, ends))
        assert ''.join(text[a:b] for a, b, counts in counted if counts).replace(' ', '') == math


@given(st.text(st.characters(exclude_categories=['Cs']), max_size=60), st.data())
def test_mask_on_any_text_and_any_cut(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    mask = confidence.math_token_mask(text, tuple(cuts))
    assert mask.dtype == bool and mask.shape == (len(cuts),) and (mask.any() or not cuts)


TEXTS = r'Let $x=3$, so \(2x+1=7\).', 'So 12 apples and 30 pears: 42', r'By \frac{1}{2} and $$y$$'


@given(st.sampled_from(TEXTS), st.data())
def test_mask_does_not_depend_on_how_tokens_are_cut(text, data):
    "A coarse token is in the mask exactly where one of its characters is."
    fine = confidence.math_token_mask(text, tuple(range(1, len(text) + 1)))
    ends = sorted({*data.draw(st.lists(st.integers(1, len(text)), max_size=10)), len(text)})
    coarse = confidence.math_token_mask(text, tuple(ends))
    assert coarse.tolist() == [bool(fine[a:b].any()) for a, b in zip([0, *ends], ends)]


def step_of(text, prob, logit, **more):
    ends = ends_of(text)
    known = dict(ids=ends, ends=ends, prob=tuple(prob), max_logit=tuple(logit), finish='step')
    return Step(text, 0, generated=len(ends), **known | more)


def test_scores_on_a_latex_step_by_hand():
    prob = [0.9, 0.1, 0.8, 0.7, 0.6, 0.95, 0.85, 0.2, 0.3]
    step = step_of(r'So $x=7$ holds', prob, [20, 99, 10, 11, 12, 13, 14, 99, 99])
    assert confidence.logit_confidence(step) == pytest.approx((10 + 11 + 12 + 13 + 14) / 5)
    assert confidence.logprob_confidence(step) == 0.6


def test_scores_of_steps_that_lack_something():
    def both(step):
        return confidence.logit_confidence(step), confidence.logprob_confidence(step)

    assert both(Step('', 0, 'step', (5,), (0,), (0.25,), (8.0,), 1)) == (8.0, 0.25)
    hidden = replace(step_of('7', [0.5], [3.0]), max_logit=None)
    np.testing.assert_equal(both(hidden), (np.nan, 0.5))
    assert np.isnan(both(Step('7', 1, 'stop'))).all()


def test_the_columns_of_a_chain_by_hand():
    first = step_of('so 7', [0.9, 0.9, 0.5], [1, 2, 3], entropy=0.3)
    second = step_of('so 9', [0.9, 0.9, 1.0], [1, 2, 5], entropy=0.7)
    last = step_of(r'\boxed{7}', [0.9, 0.8, 0.7, 0.75], [4] * 4, entropy=0.2, finish='stop')
    columns = confidence.chain_features([first, second, last])
    assert tuple(columns) == confidence.FEATURES
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
        assert (columns[name] == columns[name].astype(np.float32)).all(), 'as files keep them'


def test_a_step_that_did_not_fit_keeps_the_scores_of_the_step_before():
    first = step_of('3+4=7', [0.9, 0.8, 0.7, 0.95, 0.6], [10.0, 11, 12, 13, 14])
    full = Step('', 0, 'length', prompt=99)
    columns = confidence.chain_features([first, full])
    for name in ('mean_logit', 'min_prob', 'min_odds'):
        assert columns[name][0] == columns[name][1]
    assert [columns[name][1] for name in ('step', 'length', 'final')] == [1, 0, 1]
    hidden = replace(first, prob=(), max_logit=None)  # by a server: no score there
    assert np.isnan(confidence.chain_features([first, hidden])['min_prob'][1])
    assert np.isnan(confidence.chain_features([full])['min_prob'][0])


items = st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=2, max_size=40)


@given(items.filter(lambda x: len({label for _, label in x}) == 2))
def test_auroc_is_that_of_scikit_learn_also_with_ties(items):
    score, label = zip(*items)
    area, low, high = confidence.auroc(label, score, n_boot=20)
    assert area == pytest.approx(roc_auc_score(label, score)) and 0 <= low <= high <= 1
    assert confidence.auroc(label, [-x for x in score], n_boot=20)[0] == pytest.approx(1 - area)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    "Two unit normals, one apart."
    truth, rng, hits = NormalDist().cdf(0.5**0.5), np.random.default_rng(0), 0
    for _ in range(200):
        label = rng.random(120) < 0.5
        _, low, high = confidence.auroc(label, rng.normal(size=120) + label, n_boot=300)
        hits += low <= truth <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_auroc_of_one_label_is_unknown():
    assert np.isnan(confidence.auroc([True, True], [1, 2])).all()
    assert confidence.auroc([True, False, True], [1, 1, 1], n_boot=10) == (0.5, 0.5, 0.5)
