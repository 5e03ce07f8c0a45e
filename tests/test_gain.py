"Can a router pay? The verdict on outcomes that we know; the price of `collect` before it is paid."

import re
from dataclasses import replace

import numpy as np
import pytest
from toy_models import toy_models, toy_problems

from stepwise_routing import gain
from stepwise_routing.method.rollouts import draw_chains, outcome_table, shipped_outcomes, take

THRESHOLD, POLICY = 'a threshold on it may be enough', 'A threshold will fail'
FORESEEN = [('micro-gsm', THRESHOLD), ('micro-math', THRESHOLD), ('micro-omni', POLICY)]


def look(table, n=None, seed=0, agreement=False):
    "At n problems at random."
    if n:
        table = take(table, np.random.default_rng(seed).choice(len(table), n, replace=False))
    return gain.look(table, agreement, {}, enough=333)


def asked_for(probe):
    return [int(n) for n in re.findall(r'Probe about (\d+) questions', probe.reason)]


# ---- the verdict
@pytest.mark.parametrize('name, reason', FORESEEN)
def test_on_the_micro_models_the_probe_foresees_what_pays(name, reason):
    "A threshold on two benchmarks, and only a policy on the third: with 2,000, with 300 and mostly with 40 questions."
    splits = shipped_outcomes(name)
    assert reason in look(splits['test']).reason
    for seed in range(5):
        assert reason in look(splits['train'], 300, seed).reason
    found = [look(splits['calibration'], 40, seed) for seed in range(20)]
    assert sum(probe.verdict == gain.GO for probe in found) >= 17
    assert sum(reason in probe.reason for probe in found) >= 10
    wrong = 'no better', 'use it alone', *{THRESHOLD, POLICY} - {reason}
    assert not any(word in probe.reason for probe in found for word in wrong)


def test_on_the_real_pair_where_nothing_saves_the_probe_says_stop():
    "With 200 questions and more. With 40 it asks for more, but 2 of 20 samples deceive it."
    splits = shipped_outcomes('gsm8k')
    probes = [look(splits[name], 200, i) for name in ('calibration', 'test') for i in range(4)]
    for probe in (*map(look, splits.values()), *probes):
        assert probe.verdict == gain.STOP and 'no better than chance' in probe.reason
    needed = [n for seed in range(20) for n in asked_for(look(splits['test'], 40, seed))]
    assert len(needed) >= 18
    for n in needed:  # that are enough, or nearly so
        areas = look(splits['test'], n, seed=n).areas['gain']
        assert 0.7 * gain.WIDE < max(high - low for _, low, high in areas) / 2 <= gain.WIDE


def test_what_is_wrong_with_a_pair_is_said():
    table = shipped_outcomes('micro-gsm')['test']
    own = table.right[np.arange(len(table)), table.steps.astype(int)][:, None]
    cases = {
        'use it alone': dict(right=np.broadcast_to(own, table.right.shape)),
        'nothing to save': dict(params=table.params[[1, 1]], dollars=0 * table.dollars),
        gain.UNMATCHED: dict(right=0 * table.right),
    }
    for reason, changes in cases.items():
        probe = look(replace(table, **changes), 300)
        assert probe.verdict == gain.STOP and reason in probe.reason
        assert reason not in look(table, 300).reason
    assert look(take(table, table.right[:, 0, 0].nonzero()[0][:1])).n == 1


@pytest.mark.parametrize('n', [40, 300])
def test_a_model_that_shows_less_is_judged_by_what_it_shows(n):
    "An API without logits; one without any log-probabilities."
    table = shipped_outcomes('micro-gsm')['test']
    probes = []
    for hidden in (['mean_logit'], ['mean_logit', 'min_prob', 'min_odds']):
        none = {name: np.full_like(table.features[name], np.nan) for name in hidden}
        shown = replace(table, features=table.features | none)
        probes.append(look(shown, n, agreement=True))
    probe, bare = probes
    assert THRESHOLD in probe.reason and 'mean logit' not in probe.areas.index
    assert 'questions, the same answer as micro-large: micro-small' in str(probe)
    assert THRESHOLD not in bare.reason and set(bare.areas.index) <= {gain.LEARNT}
    assert bare.right == probe.right and bare.reason in str(bare)


def test_one_chain_that_shows_nothing_hides_no_confidence():
    "Such as that of a question longer than the context."
    table = take(shipped_outcomes('micro-gsm')['test'], slice(300))
    features = {name: values.copy() for name, values in table.features.items()}
    for name in ('min_odds', 'min_prob', 'mean_logit'):
        features[name][0] = np.nan
    probe, whole = look(replace(table, features=features)), look(table)
    assert THRESHOLD in whole.reason
    assert (probe.verdict, probe.reason) == (whole.verdict, whole.reason)
    assert list(probe.areas.index) == list(whole.areas.index)


# ---- the price
@pytest.mark.parametrize('k', [2, 3])
def test_what_collect_pays_lies_at_its_price(k):
    "At the lower end if rests are as short as they can be; near the upper one if each is as long as a whole chain."
    prices = dict(prices=('0.4/0.4/1.6',) * k)
    fixed = toy_models(k, slip=0, cut=0, end=0, empty=0, **prices)
    for models, max_steps, end, near in (fixed, 6, 0, 0.02), (toy_models(k, **prices), 50, 1, 0.1):
        problems, specs = toy_problems(200), [model.spec for model in models]
        table = outcome_table(problems, *draw_chains(problems, models, max_steps), specs)
        small, *larger = table.prices('cents')
        paid = (gain.alone_tokens(table)[:, 0] @ small).sum()
        paid += sum((table.large[:, :, i] @ price).sum() for i, price in enumerate(larger))
        cents, unknown = gain.price_of(table, specs, {specs[0].name: 50})
        assert cents[0] < cents[1] and 200 * cents[end] == pytest.approx(paid, rel=near)
        _, seconds = gain.price_of(table, specs, {spec.name: 50 for spec in specs})
        assert np.isnan(unknown).all() and 0 < seconds[0] < seconds[1]
