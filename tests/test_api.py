"""A paid model behind an API: no reply is paid twice, the cap holds, faults end in one line, steps are read right."""

import contextlib
import json
import subprocess
import sys
import time

import fake_api
import numpy as np
import pytest
from fake_api import IN_FLIGHT, ODD_USAGE, PRICE, PROBLEMS, WHOLE, FakeAPI, chain_of, open_fake

from stepwise_routing.models.api import CONTINUE, ApiModel
from stepwise_routing.models.base import Request
from stepwise_routing.models.kept import Kept
from stepwise_routing.models.open import ModelOptions, open_model
from stepwise_routing.records import SEPARATOR
from stepwise_routing.store import Replies, Store, draw_settings

KEY = 'sk-not-a-key-0123456789'
CHAINS = [chain_of(problem) for problem in PROBLEMS]


def texts(steps) -> list:
    return [step.text for step in steps]


def step_by_step(model, problem) -> tuple:
    steps = ()
    while not steps or not steps[-1].final:
        ((step,),) = model.write([Request(problem, steps)])
        steps += (step,)
    return steps


@contextlib.contextmanager
def one_line(kind, said):
    "An error whose text is one line, without the key."
    with pytest.raises(kind, match=said) as error:
        yield error
    line = str(error.value)
    assert '\n' not in line and KEY not in line and len(line) < 500


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', KEY)


@pytest.fixture
def replies(tmp_path):
    return Replies(tmp_path / 'replies.db')


@pytest.fixture
def server():
    with FakeAPI(PROBLEMS) as server:
        yield server


# ---- money


def test_a_killed_run_pays_again_for_calls_in_flight_alone(replies, tmp_path):
    with FakeAPI(PROBLEMS, delay=0.05) as server:
        run = subprocess.Popen([sys.executable, fake_api.__file__, replies.path, server.url])
        while server.paid.total() < 40:
            assert run.poll() is None
            time.sleep(0.002)
        run.kill()
        run.wait()
        assert 40 - IN_FLIGHT <= len(replies) < 100
        for _ in range(2):  # the second time, nothing is paid
            chains = open_fake(server.url, Replies(replies.path)).write(WHOLE)
            assert [texts(chain) for chain in chains] == CHAINS
        assert len(server.paid) == 100 and server.paid.total() <= 100 + IN_FLIGHT
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_no_call_begins_when_the_cap_is_reached(tmp_path):
    replies = Replies(tmp_path / 'replies.db', 0.2)
    with FakeAPI(PROBLEMS, delay=0.01) as server:
        with one_line(RuntimeError, 'cap of 0.2 cents is reached.*raise max_cents'):
            open_fake(server.url, replies).write(WHOLE)
        calls = server.paid.total()
        with one_line(RuntimeError, 'cap of 0.2 cents is reached'):
            open_fake(server.url, replies, name='another model').write(WHOLE)
        assert server.paid.total() == calls and replies.spent == pytest.approx(server.cents)
        assert 0.2 <= server.cents < 0.2 + IN_FLIGHT * server.cents / calls * 2
        chains = open_fake(server.url, Replies(replies.path, 50)).write(WHOLE)
        assert [texts(chain) for chain in chains] == CHAINS
        assert server.paid.total() == 100


def test_a_price_is_known_by_name_given_or_free(server, replies):
    known = 'gpt-4.1-mini'
    for name, price, expected in (
        (known, None, known),
        ('gpt-4.1-mini-2025-04-14', None, known),
        (known, PRICE, PRICE),
        (known, 'free', None),
    ):
        assert ApiModel(name, replies, price=price).spec.price == expected
    assert ApiModel('mine', replies, base_url=server.url).spec.price is None
    for name, price in ((known, '0.4/1.6'), (known, 'cheap'), ('no-name', None)):
        with one_line(ValueError, price or name):
            ApiModel(name, replies, price=price)


def test_nothing_is_asked_twice(server, replies, tmp_path):
    "Equal requests of a list, and the steps of a chain that was drawn whole."
    model = open_fake(server.url, replies, index=0)
    with Store(tmp_path / 'steps.db', draw_settings('own', [model])) as store:
        kept = Kept(model, store)
        chains = kept.write(WHOLE[:9])
        assert model.write(WHOLE[:9] * 2) == chains * 2
        assert [step_by_step(kept, problem) for problem in PROBLEMS[:9]] == chains
    assert model.write(WHOLE[9:12] * 2)[3:] == model.write(WHOLE[9:12])
    assert server.paid.total() == 12


# ---- the key


def test_a_server_elsewhere_needs_a_key_and_one_here_none(server, replies, monkeypatch):
    for value in ('', ' '):
        monkeypatch.setenv('MY_KEY', value)
        with one_line(ValueError, 'MY_KEY'):
            ApiModel('gpt-4.1-mini', replies, key_env='MY_KEY')
    (steps,) = open_fake(server.url, replies, key_env='MY_KEY').write(WHOLE[:1])
    assert texts(steps) == CHAINS[0]


def test_settings_hold_neither_key_nor_port(server, replies):
    settings = json.dumps(open_fake(server.url, replies).settings())
    assert KEY not in settings and str(server.server.server_port) not in settings
    for option in (dict(can_continue=True), dict(logprobs=True), dict(top_p=0.9)):
        assert json.dumps(open_fake(server.url, replies, **option).settings()) != settings


# ---- faults


@pytest.mark.parametrize('fault', ['429 first', '500 first', 'hang first', 'torn first'])
def test_a_fault_that_passes_ends_no_run(fault, replies):
    with FakeAPI(PROBLEMS, fault) as server:
        chains = open_fake(server.url, replies, timeout=0.5).write(WHOLE[:9])
        assert [texts(chain) for chain in chains] == CHAINS[:9]
        assert len(server.bodies) == 18


LASTING = ['429', '500', '401', '404', 'cut', 'torn', 'html', 'no usage', 'no choices', 'down']
ABOUT_TOKENS = ['no log-probabilities', 'thoughts', 'thoughts alone']


@pytest.mark.parametrize('fault', [*LASTING, *ODD_USAGE, *ABOUT_TOKENS])
def test_a_fault_that_stays_is_one_line_and_nothing_is_kept(fault, replies):
    with FakeAPI(PROBLEMS, fault) as server:
        model = open_fake(server.url, replies, logprobs=True, retries=1)
        if fault == 'down':
            server.server.server_close()
        with one_line(RuntimeError, f'no reply of fake at {server.url}') as error:
            model.write(WHOLE[:2])
        assert ('***' in str(error.value)) == fault.isdigit() and len(replies) == 0
        assert ('NAME in openai:NAME' in str(error.value)) == (fault == '404')
        if fault != 'down':
            server.fault = ''
            assert texts(model.write(WHOLE[:1])[0]) == CHAINS[0]


def test_a_reply_that_a_limit_cut_is_a_cut_chain(replies):
    with FakeAPI(PROBLEMS, 'limit') as server:
        server.chains = {PROBLEMS[0].question: ['One.', 'Tw']}
        (chain,) = open_fake(server.url, replies).write(WHOLE[:1])
    assert [(step.text, step.finish) for step in chain] == [('One.', 'step'), ('Tw', 'length')]


def test_no_call_begins_after_a_fault(replies):
    with FakeAPI(PROBLEMS, 'no usage', delay=0.05) as server:
        with pytest.raises(RuntimeError):
            open_fake(server.url, replies).write(WHOLE)
        assert len(server.bodies) <= 5 * IN_FLIGHT


# ---- steps


@pytest.mark.parametrize('kind', ['openai', 'vllm', 'llama.cpp'])
@pytest.mark.parametrize('logprobs', [True, False])
def test_a_chain_step_by_step_is_the_whole_one(kind, logprobs, replies):
    with FakeAPI(PROBLEMS, kind=kind) as server:
        model = open_fake(server.url, replies, logprobs=logprobs)
        for problem, chain in zip(PROBLEMS, model.write(WHOLE[:8])):
            steps = step_by_step(model, problem)
            assert texts(steps) == texts(chain) == chain_of(problem)
            finishes = [step.finish for step in steps]
            assert finishes == [step.finish for step in chain]
            assert finishes == ['step'] * (len(chain) - 1) + ['stop']


def test_tokens_of_a_reply_are_those_of_its_steps(server, replies):
    "A character of two tokens belongs to the second; a blank line belongs to the step before it."
    model = open_fake(server.url, replies, logprobs=True)
    for expected, chain in zip(CHAINS, model.write(WHOLE[:8])):
        tokens = fake_api.tokens_of(SEPARATOR.join(expected))
        probs = [fake_api.PROBABILITIES[i % 4] for i in range(len(tokens))]
        assert [prob for step in chain for prob in step.prob] == pytest.approx(probs)
        begun = [b''.join(tokens[: i + 1]) for i in range(len(tokens))]
        ends = np.array([len(part.decode(errors='ignore')) for part in begun])
        start = 0
        for step in chain:
            mine, ends = np.split(ends, [len(step.ends)])
            assert [*step.ends] == np.clip(mine - start, 0, len(step.text)).tolist()
            start += len(step.text + SEPARATOR)
        assert sum(step.generated for step in chain) == len(tokens) + 1
        for step, following in zip(chain, chain[1:]):
            assert following.prompt == step.prompt + step.generated


def test_what_is_no_character_is_no_part_of_a_step(replies):
    "vLLM writes a sign for bytes that are no character; their tokens are empty."
    model = open_fake('http://127.0.0.1:9/v1', replies, logprobs=True)
    shown = [('So', b'So'), ('', b''), ('\ufffd', b'\xe2'), ('\ufffd', None), (' 7', b' 7')]
    content = [dict(token=token, bytes=raw and list(raw), logprob=0.0) for token, raw in shown]
    choice = dict(message=dict(content='So\ufffd\ufffd 7'), finish_reason='stop')
    choice['logprobs'] = dict(content=content)
    usage = dict(prompt_tokens=9, completion_tokens=5)
    text, _, _, probs = model.read(dict(choices=[choice], usage=usage))
    assert text == ''.join(piece for piece, _ in probs) == 'So 7'


@pytest.mark.parametrize('kind', ['openai', 'vllm'])
def test_a_blank_line_before_a_step_is_not_its_end(kind, replies):
    with FakeAPI(PROBLEMS, 'blank', kind=kind) as server:
        model = open_fake(server.url, replies, logprobs=True)
        ((step,),) = model.write([Request(PROBLEMS[3])])
    assert (step.text, step.finish) == (CHAINS[3][0], 'step')
    assert ['stop' in body for body in server.bodies] == [True, False]


@pytest.mark.parametrize('kind, finish', [('vllm', 'stop'), ('openai', 'step')])
def test_a_step_that_vllm_says_the_model_ended_is_the_last_one(kind, finish, replies):
    "OpenAI does not tell: there, the model is asked what comes next."
    with FakeAPI(PROBLEMS[:1], kind=kind) as server:
        server.chains = dict.fromkeys(server.chains, ['I give up.'])
        requests = Request(PROBLEMS[0]), WHOLE[0]
        (step,), (whole,) = open_fake(server.url, replies).write(requests)
    assert step.text == whole.text == 'I give up.'
    assert (step.finish, whole.finish) == (finish, 'stop')


# ---- what is sent


def test_a_server_that_can_continue_is_sent_the_chain_with_its_blank_line(replies):
    with FakeAPI(PROBLEMS, kind='vllm') as server:
        for can_continue in (True, False):
            step_by_step(open_fake(server.url, replies, can_continue=can_continue), PROBLEMS[0])
    first, continued, asked = server.bodies
    assert 'continue_final_message' not in first | asked
    assert continued['continue_final_message'] and not continued['add_generation_prompt']
    begun = dict(role='assistant', content=CHAINS[0][0] + SEPARATOR)
    assert continued['messages'][-1] == asked['messages'][-2] == begun
    assert asked['messages'][-1] == dict(role='user', content=CONTINUE)


def test_a_chat_template_that_cuts_the_blank_line_is_refused(replies):
    with FakeAPI(PROBLEMS, 'trim', kind='vllm') as server:
        with one_line(RuntimeError, '--chat-template'):
            step_by_step(open_fake(server.url, replies, can_continue=True), PROBLEMS[0])


def test_options_of_a_model_arrive_in_the_request(server, replies):
    sent = dict(top_p=0.8, temperature=0.2, chat_template_kwargs=dict(enable_thinking=False))
    options = dict(base_url=server.url, max_tokens=7, max_reply=70, can_continue=True)
    model = open_model(ModelOptions(name='openai:fake', **sent, **options), replies=replies)
    model.write(WHOLE[:1])
    step_by_step(model, PROBLEMS[0])
    sent |= dict(model='fake', logprobs=True)  # model 0 is the smallest
    assert all(sent.items() <= body.items() for body in server.bodies)
    assert [body['max_tokens'] for body in server.bodies] == [70, 7, 7]


def test_an_api_chooses_by_the_likeliest_first_tokens(server, replies):
    "A token that begins no option, or several, is left out."
    model = open_fake(server.url, replies)
    conversations = [[dict(role='user', content=text)] for text in ('2+2=4', '2+2=5')]
    first, second = model.choose(conversations, ('Correct', 'Incorrect'))
    right, wrong = 0.3 + 0.2 + 0.1, 0.1  # " Correct", "correct" and "c"; "in"
    assert first.prob == pytest.approx((right / (right + wrong), wrong / (right + wrong)))
    assert first == second and first.prompt == len('2+2=4')
    body = server.bodies[0]
    assert (body['max_tokens'], body['temperature'], body['top_logprobs']) == (1, 0, 20)
    (alone,) = model.choose(conversations[:1], ('care', 'correct'))
    assert alone.prob[0] == pytest.approx(0)  # "c" begins both
