"Can a router pay? The verdict on outcomes that we know; the price of `collect` before it is paid."

import re
from dataclasses import replace

import numpy as np
import pytest
from toy_models import toy_models, toy_problems

from stepwise_routing import gain
from stepwise_routing.gain import GO, MORE, STOP
from stepwise_routing.method.rollouts import draw_chains, outcome_table, shipped_outcomes, take

THRESHOLD, POLICY = 'a threshold on it may be enough', 'A threshold will fail'


def look(table, agreement=False):
    return gain.look(table, agreement, {}, enough=333)


def some(table, n: int, seed: int):
    "n problems at random."
    return take(table, np.random.default_rng(seed).choice(len(table), n, replace=False))


def hidden(table, *names):
    "The same, from a model that does not show these columns."
    none = {name: np.full_like(table.features[name], np.nan) for name in names}
    return replace(table, features=table.features | none)


# ---- the verdict


FORESEEN = [('micro-gsm', THRESHOLD), ('micro-math', THRESHOLD), ('micro-omni', POLICY)]


@pytest.mark.parametrize('name, reason', FORESEEN)
def test_on_the_micro_models_the_probe_foresees_what_pays(name, reason):
    "A threshold on two benchmarks, and only a policy on the third: with 2,000, with 300 and mostly with 40 questions."
    splits = shipped_outcomes(name)
    assert reason in look(splits['test']).reason
    for seed in range(5):
        assert reason in look(some(splits['train'], 300, seed)).reason
    found = [look(some(splits['calibration'], 40, seed)) for seed in range(20)]
    assert sum(probe.verdict == GO for probe in found) >= 17
    assert sum(reason in probe.reason for probe in found) >= 10
    wrong = 'no better', 'use it alone', *{THRESHOLD, POLICY} - {reason}
    assert not any(word in probe.reason for probe in found for word in wrong)


def test_on_the_real_pair_where_nothing_saves_the_probe_says_stop():
    "With 200 questions and more. With 40 it asks for more, but 2 of 20 samples deceive it."
    splits = shipped_outcomes('gsm8k')
    samples = [some(splits[name], 200, i) for name in ('calibration', 'test') for i in range(4)]
    for table in (*splits.values(), *samples):
        probe = look(table)
        assert probe.verdict == STOP and 'no better than chance' in probe.reason
    found = [look(some(splits['test'], 40, seed)) for seed in range(20)]
    asked = [re.findall(r'Probe about (\d+) questions', probe.reason) for probe in found]
    needed = [int(n) for (n,) in filter(None, asked)]
    assert len(needed) >= 18
    for n in needed:  # that are enough, or nearly so
        areas = look(some(splits['test'], n, seed=n)).areas['gain']
        assert 0.7 * gain.WIDE < max(high - low for _, low, high in areas) / 2 <= gain.WIDE


def test_a_small_model_as_good_as_the_large_one_is_used_alone():
    table = shipped_outcomes('micro-math')['test']
    rows = np.arange(len(table))
    alike = table.right[rows, table.steps.astype(int)][:, None]
    alike = replace(table, right=np.broadcast_to(alike, table.right.shape))
    probe = look(some(alike, 300, 0))
    assert probe.verdict == STOP and 'use it alone' in probe.reason and probe.gain == 0
    assert 'use it alone' not in look(some(table, 300, 0)).reason


def test_a_small_model_as_costly_as_the_large_one_saves_nothing():
    table = shipped_outcomes('micro-gsm')['test']
    probe = look(replace(table, params=table.params[[1, 1]], dollars=0 * table.dollars))
    assert probe.verdict == STOP and 'nothing to save' in probe.reason


def test_known_answers_in_another_form_stop_the_probe_and_one_question_asks_for_more():
    table = shipped_outcomes('micro-gsm')['test']
    unmatched = replace(table, right=0 * table.right)
    probe = look(some(unmatched, 40, 0))
    assert (probe.verdict, probe.reason) == (gain.STOP, gain.UNMATCHED)
    one = take(table, table.right[:, 0, 0].nonzero()[0][:1])
    assert look(one).n == 1


def test_hardly_any_gains_say_nothing():
    "Unless chance saves enough, a larger probe is asked for: the rarer the gain, the larger."
    table = some(shipped_outcomes('micro-math')['test'], 40, 0)
    table = replace(table, params=np.array([0.85, 1]), dollars=0 * table.dollars)
    asked = []
    for gains in (4, 2, 1):
        right = np.ones_like(table.right)
        right[np.arange(40), table.steps.astype(int)] = np.arange(40)[:, None] >= gains
        probe = look(replace(table, right=right))
        assert probe.verdict == MORE and f'{gains} of 40 questions gain' in probe.reason
        asked += map(int, re.findall(r'Probe about (\d+) questions', probe.reason))
    assert 40 < asked[0] < asked[1] < asked[2] < 2000


@pytest.mark.parametrize('n', [40, 300])
def test_a_model_that_shows_less_is_judged_by_what_it_shows(n):
    "An API without logits; one without any log-probabilities."
    table = some(shipped_outcomes('micro-gsm')['test'], n, 0)
    probe = look(hidden(table, 'mean_logit'), agreement=True)
    assert THRESHOLD in probe.reason and 'mean logit' not in probe.areas.index
    assert 'questions, the same answer as micro-large: micro-small' in str(probe)
    bare = look(hidden(table, 'mean_logit', 'min_prob', 'min_odds'))
    assert THRESHOLD not in bare.reason and set(bare.areas.index) <= {gain.LEARNT}
    assert bare.right == probe.right and bare.reason in str(bare)


def test_the_numbers_of_a_probe_belong_together():
    table = some(shipped_outcomes('micro-omni')['calibration'], 100, 0)
    probe = look(table)
    small, large = probe.right.values()
    assert (probe.n, large) == (100, table.right[:, 0, 0].mean()) and small < large
    assert large - small == pytest.approx(probe.gain - probe.loss)


# ---- the price


@pytest.mark.parametrize('k', [2, 3])
def test_what_collect_pays_lies_at_its_price(k):
    "At the lower end if rests are as short as they can be; near the upper one if each is as long as a whole chain."
    for seed in range(3):
        problems, options = toy_problems(200, seed), dict(prices=('0.4/0.4/1.6',) * k)
        fixed = toy_models(k, slip=0, cut=0, end=0, empty=0, **options)
        for models, max_steps, end in ((fixed, 6, 0), (toy_models(k, **options), 50, 1)):
            specs = [model.spec for model in models]
            table = outcome_table(problems, *draw_chains(problems, models, max_steps), specs)
            small, *larger = table.prices('cents')
            paid = (gain.alone_tokens(table)[:, 0] @ small).sum()
            paid += sum((table.large[:, :, i] @ price).sum() for i, price in enumerate(larger))
            ends, unknown = len(table) * gain.price_of(table, specs, {specs[0].name: 50})
            assert ends[0] < ends[1] and ends[end] == pytest.approx(paid, rel=(0.02, 0.1)[end])
            _, seconds = gain.price_of(table, specs, {spec.name: 50 for spec in specs})
            assert np.isnan(unknown).all() and 0 < seconds[0] < seconds[1]
