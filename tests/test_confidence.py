"The confidences S^os and S^API by hand, which tokens they count, and how well they tell right steps from wrong ones."
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from toy import toy_backends, toy_problems

from stepwise_routing.base.records import Problem, Step
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import *
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.run.stages import open_tree, small_chains


def tokens(text, pattern=r'\\[A-Za-z]+|[A-Za-z]+|\d|\s+|.'):
    "Tokens and their ends, as a tokenizer with single digits would cut them."
    ends = [m.end() for m in re.finditer(pattern, text, re.S)]
    return [text[a:b] for a, b in zip([0] + ends, ends)], ends

def masked(text, **kw):
    words, ends = tokens(text, **kw)
    return ''.join(w for w, m in zip(words, math_token_mask(text, tuple(ends))) if m)

# ---------------------------------------------------------------- the mask
MATHS = [
    ('Natalia sold 48/2 = 24 clips in May.', '48/2=24'),
    (r'First, we use $r = \sqrt{x^2 + y^2}$ here.', r'$r=\sqrt{x^2+y^2}$'),
    (r'Thus \(\theta = \frac{\pi}{2}\) as wanted', r'\(\theta=\frac{\pi}{2}\)'),
    (r'So \[a^n - b^n\] divides it', r'\[a^n-b^n\]'),
    ('We get $$\nx + y\n$$ now', '$$x+y$$'),
    (r'\begin{align*} x &= y \\ z &= w \end{align*} done', r'\begin{align*}x&=y\\z&=w\end{align*}'),
    (r'The answer is \boxed{\text{even}}.', r'\boxed{\text{even}}'),
    (r'cut off \(x + y', r'\(x+y'),
    ('It costs $5 and $6 more.', '56'),
    ('A well-known and/or trick - **Step 1**: go', '-1'),
    ('3*4=12, 2**3=8 and 5! = 120', '3*4=122**3=85!=120'),
    ('Wow! No maths.', 'Wow!Nomaths.'),                  # falls back to all tokens
    ('1,234.50 dollars', '1,234.50'), ('-3 < x', '-3<'), ('50% of it', '50%'), ('x ≤ 7 × 8', '≤7×8'),
]

def test_what_counts_as_mathematics():
    for text, math in MATHS: assert re.sub(r'\s', '', masked(text)) == math

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
    assert coarse.tolist() == [bool(fine[a:b].any()) for a, b in zip([0] + ends, ends)]

def test_tokens_without_width_carry_no_mathematics():
    assert math_token_mask('7', (1, 1, 1)).tolist() == [True, False, False]
    assert math_token_mask('', (0,)).tolist() == [True] and math_token_mask('', ()).tolist() == []

def test_mask_is_quick_on_any_text():
    for text in ('$'*20_000, r'\begin{a}'*2000, r'\('*10_000, '1'*100_000, r'\a{b{c}'*5000, '$$ a $'*5000):
        math_token_mask(text, (len(text),))

# ---------------------------------------------------------------- the scores
def step_of(text, prob, logit, finish='step'):
    ends = tokens(text)[1]
    assert len(ends) == len(prob) == len(logit)
    return Step(text, 0, finish, tuple(ends), tuple(ends), tuple(prob), tuple(logit), generated=len(ends))

def test_scores_on_a_latex_step_by_hand():
    step = step_of(r'So $x=7$ holds', [.9, .1, .8, .7, .6, .95, .85, .2, .3], [20, 99, 10, 11, 12, 13, 14, 99, 99],
                   [1, 1, 1, 6, 9, 1, 1, 1, 1])
    assert logit_confidence(step) == pytest.approx((10 + 11 + 12 + 13 + 14)/5)
    assert logprob_confidence(step) == .6

def test_scores_of_steps_that_lack_something():
    step = step_of('7', [.5], [3.])
    hidden = replace(step, max_logit=None)
    assert np.isnan(logit_confidence(hidden)) and logprob_confidence(hidden) == .5
    bare = Step('7', 1, 'stop')
    assert np.isnan(logit_confidence(bare)) and np.isnan(logprob_confidence(bare))
    empty = Step('', 0, 'step', (5,), (0,), (.25,), (8.,), 1)
    assert (logit_confidence(empty), logprob_confidence(empty)) == (8., .25)

def test_observe():
    steps = [step_of('so 7', [.9, .9, .5], [1, 2, 3]), step_of(r'\boxed{7}', [.9, .8, .7, .6], [4, 4, 4, 4])]
    obs = observe([steps[0], replace(steps[1], model=1)])
    assert FEATURES == ('score_logit', 'score_prob', 'index', 'length', 'final', 'model', 'first_entropy')
    np.testing.assert_allclose(obs, [[3, .5, 0, 3, 0, 0, np.nan], [4, .6, 1, 4, 1, 1, np.nan]])
    assert observe([]).shape == (0, 7)

# ---------------------------------------------------------------- standardising
@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)]*3), min_size=1, max_size=30))
def test_scaler_standardises(rows):
    obs = np.array(rows)
    scaler = fit_scaler(obs, ('a', 'b', 'c'))
    z = scaler(obs)
    assert np.isfinite(z).all() and np.abs(z.mean(0)).max() < 1e-6
    varies = obs.std(0) > 1e-9
    np.testing.assert_allclose(z.std(0)[varies], 1, rtol=1e-3)

def test_scaler_ignores_padding_and_missing_scores():
    obs = np.full((2, 3, 2), np.nan)
    obs[0, :2], obs[1, :1] = [[1, np.nan], [3, np.nan]], [[5, np.nan]]
    scaler = fit_scaler(obs, ('a', 'b'))
    assert scaler.mean == (3., 0.) and scaler.std == (pytest.approx(np.std([1, 3, 5])), 1.)
    assert fit_scaler([[7.], [7.]], ('a',)).std == (1.,)

# ---------------------------------------------------------------- AUROC
def brute(scores, labels):
    wins = [(p > q) + .5*(p == q) for p, a in zip(scores, labels) if a for q, b in zip(scores, labels) if not b]
    return np.mean(wins)

@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=2, max_size=40)
       .filter(lambda x: len({b for _, b in x}) == 2))
def test_auroc_is_the_share_of_pairs_in_order(items):
    scores, labels = zip(*items)
    at, lo, hi = auroc(scores, labels, n_boot=20)
    assert at == pytest.approx(brute(scores, labels)) and 0 <= lo <= hi <= 1
    assert auroc([-s for s in scores], labels, n_boot=20)[0] == pytest.approx(1 - at)

def test_auroc_interval_covers_the_truth_about_as_often_as_it_says():
    from math import erf
    truth, r, hit = .5*(1 + erf(1/2)), np.random.default_rng(0), 0       # two unit normals, one apart
    for i in range(200):
        labels = r.random(120) < .5
        _, lo, hi = auroc(r.normal(size=120) + labels, labels, n_boot=300, seed=i)
        hit += lo <= truth <= hi
    assert .88 <= hit/200 <= .99

def test_auroc_edges():
    assert auroc([1, 2, np.nan], [False, True, False], n_boot=10)[0] == 1
    assert all(np.isnan(auroc([1, 2], [True, True])))
    assert auroc([1, 1, 1], [True, False, True], n_boot=10) == (.5, .5, .5)

def test_scores_tell_right_toy_steps_from_wrong_ones_by_problem(tmp_path):
    backends, problems = toy_backends(1), toy_problems(100)
    tree = RoutingTree(backends, RolloutStore(tmp_path/'s.db', tree_settings('toy', backends)))
    steps = [(p.id, s) for p in problems for s in run_async(tree.run(p, '', 0)) if s.text]
    right, groups = ['slip' not in s.text for _, s in steps], [p for p, _ in steps]
    for score in (logit_confidence, logprob_confidence): assert auroc([score(s) for _, s in steps], right, groups)[1] > .6

# ---------------------------------------------------------------- chains, labels, table
def test_the_chains_lie_where_the_tree_finds_them(tmp_path):
    from stepwise_routing.models.hub import load_micro
    pair = [load_micro('small'), load_micro('large')]
    s = Run('toy', changed(Config(), {'data.n_train': 4}), tmp_path/'run', tmp_path/'store')
    chains = small_chains(s, 'micro-gsm', pair)
    assert [p.id for p, _ in chains] == [p.id for p in load_problems('micro-gsm', 'train', 4)]
    with open_tree(s, 'micro-gsm') as tree: # without models: 02 draws nothing again
        assert [(p, run_async(tree.run(p, '', 0))) for p, _ in chains] == chains
    pair[0].write = None # nor does 01
    assert small_chains(s, 'micro-gsm', pair) == chains

def test_micro_steps_are_labelled_by_program_and_others_by_their_answer():
    problem = next(p for p in load_problems('micro-gsm', 'train', 9) if p.solution.count('\n\n') > 1)
    lines = problem.solution.split('\n\n')
    chain = lambda *texts: [step_of(t, [.5]*len(tokens(t)[1]), [1.]*len(tokens(t)[1])) for t in texts]
    rows = label_steps('micro-gsm', [(problem, chain(*lines)), (problem, chain(lines[0], '1+1=3', *lines[1:]))])
    assert rows.right.tolist() == [True]*len(lines) + [True, False] # nothing behind the first wrong one
    public = Problem('gsm8k', 'x', '3+4?', '7')
    chains = [(public, chain('3+4=7', r'So \boxed{7}')), (replace(public, id='y'), chain(r'So \boxed{8}'))]
    rows = label_steps('gsm8k', chains)
    assert rows.problem.tolist() == ['x', 'x', 'y'] and rows.right.tolist() == [True, True, False]
    table = confidence_table({'gsm8k': rows, 'none': rows[:2]})
    assert table.label.tolist() == ['the answer of its chain']*2 and table.wrong.tolist() == [1, 0]
    assert table['AUROC of S^os'][1] == '–' and table['AUROC of S^API'][0].startswith('0.500 [')

def test_the_figure_has_a_panel_per_score_that_is_shown():
    import pandas as pd
    rows = pd.DataFrame(dict(problem=list('aabb'), score_logit=np.nan, score_prob=[.9, .2, .8, .7],
                             right=[True, False, True, True]))
    fig = draw_confidence({'one': rows, 'two': rows.assign(score_logit=[3., 1., 2., 2.])})
    assert ['logit' in ax.get_title() for ax in fig.axes] == [True, False]
    assert len(draw_confidence({'one': rows}).axes) == 1

# ---------------------------------------------------------------- steps without tokens
def test_a_step_with_no_tokens_keeps_the_scores_of_the_step_before_for_tables_policies_and_steer():
    from stepwise_routing.method.policy import FULL_FEATURES, policy_inputs, state_inputs
    from stepwise_routing.method.routers import STEER, Mixture
    from stepwise_routing.method.walks import State
    first = Step('3+4=7', 0, 'step', ends=(1, 2, 3, 4, 5), ids=(1,)*5, prob=(.9, .8, .7, .95, .6),
                 max_logit=(10., 11., 12., 13., 14.), generated=5)
    full = Step('', 0, 'length', prompt=99) # nothing fitted into the context
    raw = observe((first, full))
    assert (raw[1, :2] == raw[0, :2]).all() and raw[1, 2:6].tolist() == [1, 0, 1, 0]
    state = State(Problem('toy', '1', '3+4?', '7'), 0, (first, full), '00')
    assert (state_inputs(state, FULL_FEATURES) == policy_inputs(raw, FEATURES, FULL_FEATURES)[1]).all()
    steer = STEER((), Mixture((.5, .5), (10., 14.), (1., 1.)))
    assert steer.score([state]) == steer.score([replace(state, steps=(first,))])
    hidden = replace(first, prob=(), max_logit=None) # a server that hides its tokens is something else: no score there
    assert np.isnan(observe((first, hidden))[1, :2]).all() and np.isnan(observe((full,))[0, :2]).all()
