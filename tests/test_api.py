"""A paid model behind an API: no reply is paid twice, the cap holds, faults end in one line, steps are read right."""

import json
import subprocess
import sys
import time

import fake_api
import numpy as np
import pytest
from fake_api import (
    FIRST_TOKENS,
    IN_FLIGHT,
    PRICE,
    PROBABILITIES,
    PROBLEMS,
    WHOLE,
    FakeAPI,
    chain_of,
    open_fake,
    tokens_of,
)

from stepwise_routing.models.api import CONTINUE, ApiModel
from stepwise_routing.models.base import Request
from stepwise_routing.models.kept import Kept
from stepwise_routing.models.open import ModelOptions, open_model
from stepwise_routing.records import SEPARATOR, Problem, token_cents
from stepwise_routing.store import Replies, Store, draw_settings

KEY = 'sk-not-a-key-0123456789'


def start_run(path, url: str, cents: float = 1000) -> subprocess.Popen:
    "Ask for all chains in a process of its own."
    command = [sys.executable, fake_api.__file__, str(path), url, str(cents)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def texts(steps) -> list:
    return [step.text for step in steps]


def step_by_step(model, problem: Problem) -> tuple:
    steps = ()
    while not steps or not steps[-1].final:
        ((step,),) = model.write([Request(problem, steps)])
        steps += (step,)
    return steps


def line_of(error) -> str:
    "The text of an error: one line, without the key."
    line = str(error.value)
    assert '\n' not in line
    assert KEY not in line
    assert len(line) < 500
    return line


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


def test_a_killed_run_pays_again_for_calls_in_flight_alone(tmp_path):
    path = tmp_path / 'replies.db'
    replies = Replies(path)
    with FakeAPI(PROBLEMS, delay=0.05) as server:
        for calls in (1, 15, 30, 55, 80):
            run = start_run(path, server.url)
            lost = server.paid.total() - replies.run('SELECT count(*) FROM reply')[0]
            while server.paid.total() < calls + lost and run.poll() is None:
                time.sleep(0.002)
            run.kill()
            run.communicate()
            time.sleep(0.1)  # calls in flight end
            more = server.paid.total() - replies.run('SELECT count(*) FROM reply')[0]
            assert more - lost <= IN_FLIGHT
        again = {question for question, n in server.paid.items() if n > 1}
        kept = replies.run('SELECT count(*) FROM reply')[0]
        assert 60 < kept < 100
        for _ in range(2):  # the last run, and one more
            chains = open_fake(server.url, Replies(path)).write(WHOLE)
            assert [texts(chain) for chain in chains] == [chain_of(p) for p in PROBLEMS]
            assert len(server.paid) == 100
            assert server.paid.total() == 100 + more
    assert len(again) <= more <= 5 * IN_FLIGHT
    files = [file.read_bytes() for file in tmp_path.iterdir()]
    assert not any(KEY.encode() in data for data in files)


def test_no_call_begins_when_the_cap_is_reached(tmp_path):
    path = tmp_path / 'replies.db'
    with FakeAPI(PROBLEMS, delay=0.01) as server:
        run = start_run(path, server.url, 0.2)
        _, errors = run.communicate()
        assert run.returncode != 0
        assert 'cap of 0.2 cents is reached' in errors.splitlines()[-1]
        replies = Replies(path, 0.2)
        assert replies.spent == pytest.approx(server.cents)
        calls = server.paid.total()
        assert 0.2 <= server.cents < 0.2 + IN_FLIGHT * server.cents / calls * 2

        other = open_fake(server.url, replies, name='another model')
        with pytest.raises(RuntimeError, match='raise max_cents') as error:
            other.write(WHOLE)
        line_of(error)
        assert server.paid.total() == calls
        chains = open_fake(server.url, Replies(path, 50)).write(WHOLE)
        assert [texts(chain) for chain in chains] == [chain_of(problem) for problem in PROBLEMS]
        assert server.paid.total() == 100


def test_what_is_spent_is_the_usage_at_the_price(server, replies, capsys):
    model = open_fake(server.url, replies)
    assert 'at most 100 US cents, 0.00 spent' in capsys.readouterr().out
    chains = model.write(WHOLE)
    parts = []
    for chain in chains:
        generated = sum(step.generated for step in chain)
        parts.append(token_cents(PRICE, chain[0].prompt, chain[0].cached, generated))
    assert replies.spent == pytest.approx(server.cents) == pytest.approx(sum(parts))
    assert any(chain[0].cached for chain in chains)


def test_a_price_is_known_by_name_given_or_free(server, replies, offline):
    prices = {}
    for name, price in (
        ('gpt-4.1-mini', None),
        ('gpt-4.1-mini-2025-04-14', None),
        ('gpt-4.1-mini', PRICE),
        ('gpt-4.1-mini', 'free'),
    ):
        prices[name, price] = ApiModel(name, replies, price=price).spec.price
    assert [*prices.values()] == ['gpt-4.1-mini', 'gpt-4.1-mini', PRICE, None]
    assert ApiModel('mine', replies, base_url=server.url).spec.price is None
    for name, price in (('gpt-4.1-mini', '0.4/1.6'), ('gpt-4.1-mini', 'cheap'), ('no-name', None)):
        with pytest.raises(ValueError, match='cheap|0.4/1.6|no-name') as error:
            ApiModel(name, replies, price=price)
        line_of(error)


def test_equal_requests_are_asked_once(server, replies):
    chains = open_fake(server.url, replies).write([*WHOLE[:3]] * 4)
    assert chains == chains[:3] * 4
    assert server.paid.total() == 3


def test_a_chain_that_was_drawn_whole_is_not_asked_for_again(server, replies, tmp_path):
    model = open_fake(server.url, replies, index=0)
    with Store(tmp_path / 'steps.db', draw_settings('own', [model])) as store:
        kept = Kept(model, store)
        chains = kept.write(WHOLE[:9])
        assert [step_by_step(kept, problem) for problem in PROBLEMS[:9]] == chains
    assert server.paid.total() == 9


# ---- the key


def test_a_server_elsewhere_needs_a_key(replies, offline, monkeypatch):
    for value in ('', ' '):
        monkeypatch.setenv('MY_KEY', value)
        with pytest.raises(ValueError, match='MY_KEY') as error:
            ApiModel('gpt-4.1-mini', replies, key_env='MY_KEY')
        line_of(error)


def test_a_server_here_needs_none(server, replies, monkeypatch):
    monkeypatch.delenv('OPENAI_API_KEY')
    (steps,) = open_fake(server.url, replies).write(WHOLE[:1])
    assert texts(steps) == chain_of(PROBLEMS[0])


def test_settings_hold_neither_key_nor_port(server, replies):
    settings = json.dumps(open_fake(server.url, replies).settings())
    assert KEY not in settings
    assert str(server.server.server_port) not in settings
    for option in (dict(can_continue=True), dict(logprobs=True), dict(top_p=0.9)):
        assert json.dumps(open_fake(server.url, replies, **option).settings()) != settings


# ---- faults


@pytest.mark.parametrize('fault', ['429 first', '500 first', 'hang first', 'torn first'])
def test_a_fault_that_passes_ends_no_run(fault, replies):
    with FakeAPI(PROBLEMS, fault) as server:
        model = open_fake(server.url, replies, timeout=0.5)
        chains = model.write(WHOLE[:9])
        assert [texts(chain) for chain in chains] == [chain_of(p) for p in PROBLEMS[:9]]
        assert len(server.bodies) == 18


LASTING = ['429', '500', '401', 'cut', 'torn', 'html', 'no usage', 'no choices', 'down']
ABOUT_TOKENS = ['no log-probabilities', 'thoughts', 'thoughts alone']


@pytest.mark.parametrize('fault', LASTING + ABOUT_TOKENS)
def test_a_fault_that_stays_is_one_line_and_nothing_is_kept(fault, replies):
    with FakeAPI(PROBLEMS, fault) as server:
        url = server.url
        model = open_fake(url, replies, logprobs=True, retries=1)
        if fault == 'down':
            server.server.server_close()
        with pytest.raises(RuntimeError, match='no reply of fake') as error:
            model.write(WHOLE[:2])
        line = line_of(error)
        assert url in line
        assert ('***' in line) == (fault in ('429', '500', '401'))
        assert replies.run('SELECT count(*) FROM reply')[0] == 0
        if fault != 'down':
            server.fault = ''
            assert texts(model.write(WHOLE[:1])[0]) == chain_of(PROBLEMS[0])


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
        chains = model.write(WHOLE[:8])
        for problem, chain in zip(PROBLEMS, chains):
            steps = step_by_step(model, problem)
            assert texts(steps) == texts(chain) == chain_of(problem)
            finishes = [step.finish for step in steps]
            assert finishes == [step.finish for step in chain]
            assert finishes == ['step'] * (len(chain) - 1) + ['stop']


def test_tokens_of_a_reply_are_those_of_its_steps(server, replies):
    "A character of two tokens belongs to the second; a blank line belongs to the step before it."
    model = open_fake(server.url, replies, logprobs=True)
    for problem, chain in zip(PROBLEMS[:8], model.write(WHOLE[:8])):
        tokens = tokens_of(SEPARATOR.join(chain_of(problem)))
        probs = [PROBABILITIES[i % 4] for i in range(len(tokens))]
        assert [prob for step in chain for prob in step.prob] == pytest.approx(probs)
        start, n = 0, 0
        for step in chain:
            expected = []
            for i in range(n, n + len(step.ends)):
                written = b''.join(tokens[: i + 1]).decode(errors='ignore')
                expected.append(min(max(len(written) - start, 0), len(step.text)))
            assert [*step.ends] == expected
            start += len(step.text + SEPARATOR)
            n += len(step.ends)
        assert sum(step.generated for step in chain) == len(tokens) + 1
        for step, following in zip(chain, chain[1:]):
            assert following.prompt == step.prompt + step.generated


def test_without_log_probabilities_a_step_has_none(server, replies):
    (chain,) = open_fake(server.url, replies).write(WHOLE[3:4])
    assert all(step.prob == step.ends == () for step in chain)
    generated = len(tokens_of(SEPARATOR.join(chain_of(PROBLEMS[3])))) + 1
    assert sum(step.generated for step in chain) == generated


def test_what_is_no_character_is_no_part_of_a_step(replies):
    "vLLM writes a sign for bytes that are no character; their tokens are empty."
    model = open_fake('http://127.0.0.1:9/v1', replies, logprobs=True)
    shown = [('So', b'So'), ('', b''), ('\ufffd', b'\xe2'), ('\ufffd', None), (' 7', b' 7')]
    content = [dict(token=token, bytes=raw and list(raw), logprob=0.0) for token, raw in shown]
    message = dict(content='So\ufffd\ufffd 7')
    choice = dict(message=message, finish_reason='stop', logprobs=dict(content=content))
    usage = dict(prompt_tokens=9, completion_tokens=5)
    text, _, _, probs = model.read(dict(choices=[choice], usage=usage))
    assert text == ''.join(piece for piece, _ in probs) == 'So 7'


@pytest.mark.parametrize('kind', ['openai', 'vllm'])
def test_a_blank_line_before_a_step_is_not_its_end(kind, replies):
    with FakeAPI(PROBLEMS, 'blank', kind=kind) as server:
        model = open_fake(server.url, replies, logprobs=True)
        ((step,),) = model.write([Request(PROBLEMS[3])])
    assert step.text == chain_of(PROBLEMS[3])[0]
    assert step.finish == 'step'
    assert ['stop' in body for body in server.bodies] == [True, False]


def test_a_reply_that_stays_empty_ends_its_chain(replies):
    empty = Problem('own', '1', 'Nothing?', '1')
    with FakeAPI([empty]) as server:
        server.chains = {'Nothing?': ['']}
        (step,) = step_by_step(open_fake(server.url, replies), empty)
    assert (step.text, step.finish) == ('', 'stop')


def test_a_step_that_vllm_says_the_model_ended_is_the_last_one(replies):
    "OpenAI does not tell: there, the model is asked what comes next."
    for kind, finish in (('vllm', 'stop'), ('openai', 'step')):
        with FakeAPI(PROBLEMS, kind=kind) as server:
            server.chains = {PROBLEMS[0].question: ['I give up.']}
            ((step,),) = open_fake(server.url, replies).write([Request(PROBLEMS[0])])
        assert (step.text, step.finish) == ('I give up.', finish)


# ---- what is sent


def test_a_server_that_can_continue_is_sent_the_chain_with_its_blank_line(tmp_path):
    with FakeAPI(PROBLEMS, kind='vllm') as server:
        for can_continue in (True, False):
            kept = Replies(tmp_path / f'{can_continue}.db')
            step_by_step(open_fake(server.url, kept, can_continue=can_continue), PROBLEMS[0])
    first, second, again, asked = server.bodies
    assert 'continue_final_message' not in first | again | asked
    assert (second['continue_final_message'], second['add_generation_prompt']) == (True, False)
    begun = dict(role='assistant', content=chain_of(PROBLEMS[0])[0] + SEPARATOR)
    assert second['messages'][-1] == asked['messages'][-2] == begun
    assert asked['messages'][-1] == dict(role='user', content=CONTINUE)


def test_a_chat_template_that_cuts_the_blank_line_is_refused(replies):
    with FakeAPI(PROBLEMS, 'trim', kind='vllm') as server:
        model = open_fake(server.url, replies, can_continue=True)
        with pytest.raises(RuntimeError, match='--chat-template') as error:
            step_by_step(model, PROBLEMS[0])
        line_of(error)


def test_options_of_a_model_arrive_in_the_request(server, replies):
    thinking = dict(enable_thinking=False)
    options = dict(top_p=0.8, temperature=0.2, chat_template_kwargs=thinking, can_continue=True)
    options |= dict(base_url=server.url, max_tokens=7, max_reply=70)
    model = open_model(ModelOptions(name='openai:fake', **options), replies=replies)
    model.write(WHOLE[:1])
    step_by_step(model, PROBLEMS[0])
    for body in server.bodies:
        assert (body['model'], body['top_p'], body['temperature']) == ('fake', 0.8, 0.2)
        assert body['chat_template_kwargs'] == thinking
        assert body['logprobs'] is True  # model 0 is the smallest
    assert [body['max_tokens'] for body in server.bodies] == [70, 7, 7]


def test_an_api_chooses_by_the_likeliest_first_tokens(server, replies):
    "A token that begins no option, or several, is left out."
    model = open_fake(server.url, replies)
    conversations = [[dict(role='user', content=text)] for text in ('2+2=4', '2+2=5')]
    first, second = model.choose(conversations, ('Correct', 'Incorrect'))
    mass = [
        FIRST_TOKENS[' Correct'] + FIRST_TOKENS['correct'] + FIRST_TOKENS['c'],
        FIRST_TOKENS['in'],
    ]
    np.testing.assert_allclose(first.prob, np.array(mass) / sum(mass), rtol=1e-6)
    assert first == second
    assert first.prompt == len('2+2=4')
    body = server.bodies[0]
    assert (body['max_tokens'], body['temperature'], body['top_logprobs']) == (1, 0, 20)
    (alone,) = model.choose(conversations[:1], ('care', 'correct'))
    assert alone.prob[0] == pytest.approx(0)  # "c" begins both
