"A paid model behind an API that fails in every way: a run ends right or with one line, the money is accounted for."
import asyncio
import json
import logging
import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import asker
import numpy as np
import pytest
from asker import ask
from faulty import FREE, RETRIED, Faulty, chain, schedule
from hypothesis import HealthCheck, given, settings, strategies as st

from stepwise_routing.method.confidence import logprob_confidence
from stepwise_routing.models import replies
from stepwise_routing.models.chat import OpenAIBackend, api_client, price_row
from stepwise_routing.models.interface import step_text
from stepwise_routing.models.ledger import CENT, Ledger
from stepwise_routing.models.names import open_models
from stepwise_routing.models.replies import option_probs, read_reply, reply_steps
from stepwise_routing.records import Step, chat_prompt, extract_boxed, split_steps
from stepwise_routing.util import run_async

KEY = 'sk-test-0123456789abcdef'

def api(server, **kwargs): return OpenAIBackend('toy-model', **asker.OPTIONS | dict(base_url=server.url) | kwargs)

def whole(k=0): return ask(k, to_end=True)

def closing(backend, *requests):
    "What a backend writes for some requests at once; it is closed at the end."
    async def every():
        try: return await asyncio.gather(*(backend.write(r) for r in requests))
        finally: await backend.close()
    return run_async(every())

def wanted(request, n=None):
    "What the toy model has to say to a request."
    return chain(dict(messages=replies.step_messages(request), seed=int(request.seed(0))))[:n]

def fails(call, *parts):
    "The one line of an error, without the key."
    with pytest.raises((RuntimeError, ValueError)) as e: call()
    line = str(e.value)
    assert '\n' not in line and KEY not in line and len(line) < 500
    for part in parts: assert part in line, line
    return line

@pytest.fixture(autouse=True)
def key(monkeypatch): monkeypatch.setenv('TOY_KEY', KEY)

# replies and steps

@given(st.text('ab √½中\n', max_size=40), st.sampled_from(['stop', 'length']), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_a_reply_is_split_like_the_tree_splits_it(text, finish, most, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)]) if a < b]
    extra = data.draw(st.integers(0, 3))
    shown = [dict(token='?', bytes=list(b), logprob=-i/9, top_logprobs=[]) for i, b in enumerate(pieces)]
    usage = dict(prompt_tokens=30, completion_tokens=len(pieces) + extra)
    choice = dict(message=dict(content=text), finish_reason=finish, logprobs=dict(content=shown))
    reply = read_reply(dict(choices=[choice], usage=usage))
    reply = json.loads(json.dumps(reply)) # as it comes back from a ledger
    steps = reply_steps(reply, max_steps=most)
    rest, oracle = text, [] # the tree's rule, one step at a time
    while True:
        s, ended = step_text(rest)
        oracle.append((s, 'step' if ended else finish))
        if not ended or extract_boxed(s) is not None or len(oracle) == most: break
        rest = rest.lstrip()
        rest = rest[rest.index('\n\n') + 2:]
    assert [(s.text, s.finish) for s in steps] == oracle
    if len(oracle) < most: assert [s.text for s in steps if s.text] == split_steps(text)
    assert sum(s.generated for s in steps) == len(pieces) + extra
    assert [s.prompt for s in steps] == [30 + sum(s.generated for s in steps[:i]) for i in range(len(steps))]
    for s in steps:
        assert len(s.ends) == len(s.prob) and list(s.ends) == sorted(s.ends)
        assert all(0 <= e <= len(s.text) for e in s.ends)
    upto, ends = np.cumsum([len(b) for b in pieces], dtype=int), replies._token_ends(text, reply['tokens']['bytes'])
    assert ends == [sum(b & 0xC0 != 0x80 for b in raw[:n]) for n in upto]

WORD = st.sampled_from(['x', 'y', 'so'])

@given(st.lists(WORD, min_size=1, max_size=5), st.lists(WORD, max_size=4))
@settings(deadline=None)
def test_dropped_repetitions_stay_on_the_bill(new, old):
    steps = tuple(Step(t, 1, 'step', generated=3, prompt=20 + 3*i) for i, t in enumerate(new))
    kept = replies.drop_repeats(steps, tuple(Step(t, 0, 'step') for t in old))
    k = max(k for k in range(len(new) + 1) if k == 0 or new[:k] == old[-k:] and k <= len(old))
    assert [s.text for s in kept] == new[k:]
    if kept: assert sum(s.generated for s in kept) == 3*len(new) and kept[0].prompt == 20

HALF = dict(message={}, finish_reason='stop', logprobs=dict(content=[{}]))
JUNK = [None, [], {}, dict(choices=None), dict(choices=[None]), dict(choices=[dict(message=None)]),
        dict(choices=[dict(message=dict(content='x'))]), dict(choices=[HALF])]

@pytest.mark.parametrize('junk', JUNK)
def test_junk_is_no_reply(junk):
    with pytest.raises(ValueError, match='the reply has no choices'): read_reply(junk)

BAD_USAGE = [None, 3, {}, dict(prompt_tokens=1), dict(prompt_tokens=-1, completion_tokens=2),
             dict(prompt_tokens=True, completion_tokens=2), dict(prompt_tokens=1., completion_tokens=2),
             dict(prompt_tokens=1, completion_tokens=2, prompt_tokens_details=dict(cached_tokens=2))]

@pytest.mark.parametrize('usage', BAD_USAGE)
def test_a_usage_record_that_cannot_be_is_none(usage): assert replies.read_usage(dict(usage=usage)) is None

def test_cached_tokens_are_paid_once_and_at_their_price():
    long = replace(ask().problem, question='How many? '*800)
    with Faulty() as server:
        backend = api(server)
        (steps,) = closing(backend, replace(ask(), problem=long))
        assert steps[0].cached >= 1024 and backend.ledger.units == server.cents*CENT

# faults

@pytest.mark.parametrize('fault', RETRIED)
def test_a_fault_that_passes_is_tried_again(fault, tmp_path):
    with Faulty([fault, fault], key=KEY) as server:
        backend = api(server, ledger=tmp_path/'ledger', timeout=.4 if fault == 'stall' else 5)
        steps, = closing(backend, whole())
        assert [s.text for s in steps] == wanted(whole()) and len(server.seen) == 3
        units = Fraction(backend.ledger.units, CENT)
        if fault in (*FREE, 'no-choices'): assert units == server.cents # the bill is known
        else: assert units > server.cents and len(server.book) == 3      # two unknown bills count in full
        again = api(server, ledger=tmp_path/'ledger')
        assert closing(again, whole()) == [steps] and len(server.seen) == 3
        assert again.ledger.units == backend.ledger.units

@pytest.mark.parametrize('fault', ['uncounted', 'no-finish'])
def test_an_unreadable_reply_whose_usage_cannot_be_all_counts_in_full(fault, tmp_path):
    "0 tokens are no bill of a reply that was written."
    with Faulty([fault], key=KEY) as server:
        backend = api(server, ledger=tmp_path/'ledger', retries=1)
        fails(lambda: run_async(backend.write(whole())), 'the reply has no choices')
        run_async(backend.close())
        with Ledger(tmp_path/'ledger') as book: (_, _, most, units, notes), = book.rows('call')
        assert units == most > server.cents*CENT and json.loads(notes)['uncertain']

FINAL = dict(quota=('quota', 'TOY_KEY'), bad=('refuses the request (400)', 'seed: not this one, ****'),
             **{'403': ('(403)', 'TOY_KEY'), '301': ('another address (301)',)})

@pytest.mark.parametrize('fault', FINAL)
def test_a_refusal_is_final(fault):
    with Faulty([fault]*3, key=KEY) as server:
        fails(lambda: closing(api(server), ask()), *FINAL[fault])
        assert len(server.seen) == 1 and not server.book

def test_a_stall_is_bounded():
    with Faulty(['stall']*2) as server:
        fails(lambda: closing(api(server, retries=2, timeout=.2), ask()), 'no reply within 0.2 s')

@pytest.mark.parametrize('fault, line', [('no-logprobs', 'pass top_logprobs=0'), ('no-usage', 'no usage record')])
def test_records_that_lack_end_a_run_and_the_next_one_asks_again(fault, line, tmp_path):
    with Faulty([fault]*2) as server:
        for n in (1, 2):
            backend = api(server, ledger=tmp_path/'ledger')
            fails(lambda: closing(backend, ask()), line)
            assert len(server.seen) == n and backend.ledger.units >= server.cents*CENT
        for _ in range(2): # the server is repaired, and the reply paid for once
            backend = api(server, ledger=tmp_path/'ledger')
            assert closing(backend, ask())[0][0].text == wanted(ask())[0] and len(server.seen) == 3
    with Ledger(tmp_path/'ledger') as book:
        evidence = [json.loads(notes).get('answer', '') for *_, notes in book.rows('call')]
        assert [wanted(ask())[0][:5] in e for e in evidence] == [True, True, False] and len(book.rows('reply')) == 1
    with Faulty(['no-logprobs']) as server:
        step, = closing(api(server, top_logprobs=0), ask())[0]
        assert step.prob == () and step.text == wanted(ask())[0] and math.isnan(logprob_confidence(step))

def test_the_model_and_the_key(monkeypatch):
    with Faulty(key=KEY, models=('toy-model-2', 'other')) as server:
        fails(lambda: closing(api(server), ask()), "no model 'toy-model' (did you mean 'toy-model-2'?)", 'other')
        monkeypatch.setenv('TOY_KEY', 'sk-wrong-0123456789')
        assert 'sk-wrong' not in fails(lambda: closing(api(server), ask()), 'refuses the key (401)', 'TOY_KEY')
    monkeypatch.delenv('TOY_KEY')
    fails(lambda: OpenAIBackend('gpt-4.1-mini', key_env='TOY_KEY'), 'set the environment variable TOY_KEY')
    with Faulty() as server: assert closing(api(server), ask())[0][0].text # a server on this machine needs no key

# guards

def test_an_empty_step_is_asked_for_without_the_stop_string():
    with Faulty(['blank', 'blank']) as server:
        backend = api(server)
        step, = closing(backend, ask())[0]
        assert [b.get('stop') for b in server.seen] == ['\n\n', None]
        assert step.text == wanted(ask())[0] and step.finish == 'step'
        assert step.generated == sum(u['completion_tokens'] for u in usages(server, ['blank', 'blank']))
        assert Fraction(backend.ledger.units, CENT) == server.cents

def test_the_token_with_the_stop_string_may_be_hidden():
    "llama.cpp shows no log-probability of '.\\n\\n', which holds the end of a step."
    with Faulty(['hidden']) as server:
        backend = api(server)
        step, = closing(backend, ask())[0]
        text = wanted(ask())[0]
        assert step.text == text and len(server.seen) == 1
        assert step.ends[-1] == text.rindex(' ') and len(step.prob) == len(step.ends) == len(text.split()) - 1
        assert step.generated == usages(server, ['hidden'])[0]['completion_tokens']
        assert 0 < logprob_confidence(step) < 1 and Fraction(backend.ledger.units, CENT) == server.cents

def test_a_step_whose_only_token_is_hidden_is_asked_for_again():
    with Faulty(['one-token', 'one-token']) as server: # llama.cpp sends no field for no log-probabilities
        backend = api(server)
        step, = closing(backend, ask())[0]
        assert [b.get('stop') for b in server.seen] == ['\n\n', None]
        assert step.text == wanted(ask())[0] and step.ends[-1] == len(step.text) and len(step.prob) == len(step.ends)
        assert Fraction(backend.ledger.units, CENT) == server.cents

@pytest.mark.parametrize('finish, generated', [('length', 3), ('stop', 2), ('stop', 7)])
def test_tokens_are_hidden_before_a_stop_alone(finish, generated):
    shown = [dict(token=t, bytes=None, logprob=-.5, top_logprobs=[]) for t in ('It', ' is')]
    choice = dict(message=dict(content='It is 7.'), finish_reason=finish, logprobs=dict(content=shown))
    def reply(): return dict(choices=[choice], usage=dict(prompt_tokens=30, completion_tokens=generated))
    with pytest.raises(ValueError, match="do not spell the reply .from ' 7.' on"): read_reply(reply(), stopped=True)
    choice['finish_reason'], generated = 'stop', 3
    assert read_reply(reply(), stopped=True)['text'] == 'It is 7.'
    with pytest.raises(ValueError, match='do not spell'): read_reply(reply()) # without a stop string, none is hidden
    choice['message']['content'] += ' It is 7 since 3 and 4 are seven.'
    with pytest.raises(ValueError, match='do not spell'): read_reply(reply(), stopped=True) # too long for one token

STRANGE = dict(byte_level=['So', 'Ġ3', '+', '4', '=', '7', 'Ċ'], ids=[f'token_id:{n}' for n in range(7)],
               first=['So', ' 3'], thoughts=['The', ' user', ' asks', '.'])

@pytest.mark.parametrize('tokens', STRANGE.values(), ids=STRANGE)
def test_tokens_that_do_not_spell_the_text_are_refused(tokens):
    "Their probabilities would count for other words."
    shown = [dict(token=t, bytes=None, logprob=-.5, top_logprobs=[]) for t in tokens]
    choice = dict(message=dict(content='So 3+4=7\n'), finish_reason='stop', logprobs=dict(content=shown))
    usage = dict(prompt_tokens=30, completion_tokens=len(tokens) + 1)
    with pytest.raises(ValueError, match='do not spell the reply'): read_reply(dict(choices=[choice], usage=usage))

def test_a_blank_before_the_first_word_may_be_cut_off():
    tokens = ['\n', ' So', ' 3', '=', '3']
    shown = [dict(token=t, bytes=None, logprob=-.5, top_logprobs=[]) for t in tokens]
    choice = dict(message=dict(content='So 3=3'), finish_reason='stop', logprobs=dict(content=shown))
    reply = read_reply(dict(choices=[choice], usage=dict(prompt_tokens=30, completion_tokens=6)))
    assert replies._token_ends(reply['text'], reply['tokens']['bytes']) == [0, 2, 4, 5, 6]

def usages(server, faults): return [server._reply(f, b, None)['usage'] for f, b in zip(faults, server.seen)]

def test_a_step_that_stays_empty_ends_the_chain():
    with Faulty(['empty']*2) as server:
        step, = closing(api(server), ask())[0]
        assert (step.text, step.finish, step.final, len(server.seen)) == ('', 'stop', True, 2)

def test_a_repeated_step_is_dropped_or_asked_for_again():
    first = Step('Three and four are seven.', 0, 'step')
    with Faulty(['repeat']*2) as server:
        steps, = closing(backend := api(server), ask(steps=[first], to_end=True))
        assert [s.text for s in steps] == wanted(ask(steps=[first], to_end=True)) and len(server.seen) == 1
        assert sum(s.generated for s in steps) == usages(server, ['repeat'])[0]['completion_tokens']
        step, = closing(backend := api(server), ask(steps=[first]))[0] # the old step: asked again with another seed
        assert len(server.seen) == 3 and server.seen[1]['seed'] != server.seen[2]['seed']
        assert step.text == chain(server.seen[2])[0]
        assert step.generated == sum(u['completion_tokens'] for u in usages(server, ['repeat', 'repeat', 'ok'])[1:])
        assert Fraction(backend.ledger.units, CENT) == server.book[1][1] + server.book[2][1]

def test_a_cut_reply_is_no_end():
    with Faulty(['length']*2) as server:
        for request in (ask(), whole()): assert closing(api(server), request)[0][-1].finish == 'length'
    with Faulty() as server:
        step, = closing(api(server, max_tokens=3), ask())[0]
        assert step.finish == 'length' and step.generated == 3 == server.seen[0]['max_tokens']
        assert extract_boxed(step.text) is None

def test_the_usage_of_a_chain_is_the_usage_of_its_call():
    with Faulty() as server:
        for k in range(20):
            backend = api(server)
            steps, = closing(backend, whole(k))
            usage = server._reply('ok', server.seen[-1], None)['usage']
            assert sum(s.generated for s in steps) == usage['completion_tokens']
            assert steps[0].prompt == usage['prompt_tokens']
            assert Fraction(backend.ledger.units, CENT) == server.book[-1][1]
        many = ask(steps=[Step('x'*5000, 0, 'step')])
        step, = closing(backend := api(server), many)[0]
        assert step.cached == 1664 # cached input at its own price
        assert Fraction(backend.ledger.units, CENT) == server.book[-1][1]

# money

@given(st.integers(0, 10**6), st.floats(.1, 3), st.floats(0, .5))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_cap_holds_with_32_calls_in_flight(seed, cap, share):
    with Faulty(schedule(seed, share, [k for k in RETRIED if k != 'stall']), delay=.002) as server:
        backend = api(server, max_cents=cap, max_tokens=200, max_reply=500, retries=3)
        async def every():
            calls = (backend.write(ask(k, to_end=k % 2 == 0)) for k in range(120))
            out = await asyncio.gather(*calls, return_exceptions=True)
            await backend.close()
            return out
        out = run_async(every())
        units, limit = backend.ledger.units, Fraction(str(cap))*CENT
        assert server.cents*CENT <= units <= limit and not backend.ledger.reserved and server.busiest <= 32
        ended = [e for e in out if isinstance(e, Exception)]
        assert all('raise max_cents' in str(e) or 'no reply after 3 attempts' in str(e) for e in ended)
        for k, steps in enumerate(out):
            if isinstance(steps, Exception): continue
            assert [s.text for s in steps] == wanted(ask(k), None if k % 2 == 0 else 1)

def test_a_cap_of_nothing_sends_nothing():
    with Faulty() as server:
        backend = api(server, max_cents=0)
        fails(lambda: closing(backend, ask()), 'cap reached: 0.0000 of 0.0000 cents', 'raise max_cents')
        assert not server.seen

def test_the_cap_spans_runs(tmp_path):
    with Faulty() as server:
        done, runs = set(), []
        for run in range(3): # each run goes on where the cap, which covers all of them, stopped the last one
            backend = api(server, ledger=tmp_path/'ledger', max_cents=.3*(run + 1), max_tokens=300, concurrency=4)
            try: closing(backend, *(ask(k) for k in range(100)))
            except RuntimeError as e: assert 'the ledger keeps every reply' in str(e)
            runs.append(len(server.seen))
            assert backend.ledger.units == server.cents*CENT <= Fraction('0.3')*(run + 1)*CENT
        assert 0 < runs[0] < runs[1] and len({json.dumps(b) for b in server.seen}) == len(server.seen)

def test_one_request_is_sent_once():
    with Faulty(delay=.05) as server:
        written = closing(api(server), *[ask()]*40)
        assert len({json.dumps([s.text for s in w]) for w in written}) == 1 and len(server.seen) == 1
        judge = api(server, concurrency=3)
        closing(judge, *(ask(k) for k in range(12)))
        assert server.busiest == 3

def test_a_reply_that_nobody_waits_for_is_kept(tmp_path):
    with Faulty(delay=.2) as server:
        backend = api(server, ledger=tmp_path/'ledger')
        async def impatient():
            with pytest.raises(asyncio.TimeoutError): await asyncio.wait_for(backend.write(ask()), .05)
        run_async(impatient())
        run_async(backend.close())
        assert len(server.book) == 1 and backend.ledger.units == server.cents*CENT
        step, = closing(api(server, ledger=tmp_path/'ledger'), ask())[0]
        assert step.text == wanted(ask())[0] and len(server.seen) == 1

@pytest.mark.parametrize('seed', [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_lost_or_paid_twice_across_a_kill(seed, tmp_path):
    n, r, ledger = 80, random.Random(seed), str(tmp_path/'ledger')
    with Faulty(schedule(seed, .2, ('429', '500', 'no-choices')), delay=.02, key=KEY) as server:
        options = dict(url=server.url, ledger=ledger, n=n, max_cents=50, concurrency=8, retries=20)
        command = [sys.executable, asker.__file__, json.dumps(options)]
        for _ in range(3): # killed at some moment of its work, three times
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            child.stdout.readline()
            start, more = len(server.seen), r.randint(2, 20)
            while len(server.seen) < start + more and child.poll() is None: time.sleep(.001)
            child.kill()
            child.communicate()
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        chains = json.loads(done.stdout.splitlines()[-1])
        assert chains == [wanted(ask(k), None if k % 2 == 0 else 1) for k in range(n)]
        book = Ledger(ledger)
        assert server.cents*CENT <= book.units <= 50*CENT
        calls = [(most, units, json.loads(notes)) for _, _, most, units, notes in book.rows('call')]
        open_calls = [most for most, units, _ in calls if units is None] # in flight when a client was killed
        waste = sum('why' in notes and bool(units) for _, units, notes in calls) # replies without choices, billed
        lost, paid = len(open_calls), sum(units or 0 for _, units, _ in calls)
        assert len(keys(book)) == n and n <= len(server.book) <= n + lost + waste and lost <= 3*8
        assert paid <= server.cents*CENT <= paid + sum(open_calls) and book.units == paid + sum(open_calls)
        book.close()
    assert KEY.encode() not in Path(ledger).read_bytes()

# the ledger's file

def keys(book): return [key for key, in book.read('SELECT DISTINCT key FROM reply')]

def test_every_reply_is_kept_and_the_last_one_counts(tmp_path):
    with Ledger(tmp_path/'ledger') as book:
        for text in ('first', 'second \ud800 √'):
            run_async(book.settle(run_async(book.reserve('a', 7)), 5, reply=dict(text=text)))
        assert book.reply('a') == dict(text=text) and book.reply('b') is None and keys(book) == ['a']
    with Ledger(tmp_path/'ledger') as book:
        assert book.reply('a') == dict(text=text) and len(book.rows('reply')) == 2 # the other one stays as evidence
        assert (book.units, book.calls, book.reserved) == (10, 2, {})

def test_a_full_disk_ends_the_run_in_one_line_and_loses_nothing_that_was_stored(tmp_path):
    path = tmp_path/'ledger'
    with Faulty() as server:
        backend = api(server, ledger=path, max_cents=50)
        steps = run_async(backend.write(ask(1)))
        (pages,), = backend.ledger.read('PRAGMA page_count')
        backend.ledger.read(f'PRAGMA max_page_count={pages}')
        async def every():
            return await asyncio.gather(*(backend.write(ask(k)) for k in range(2, 60)), return_exceptions=True)
        out = run_async(asyncio.wait_for(every(), 20))
        failed = [e for e in out if isinstance(e, Exception)]
        assert failed and all(isinstance(e, OSError) for e in failed)
        assert len(out) - len(failed) == len(server.seen) - 1 > 0 # what was paid for is returned, and no more asked
        assert all('disk is full' in str(e) and '\n' not in str(e) for e in failed)
        assert not backend.ledger.reserved # nobody waits for ever
        with pytest.raises(OSError, match='paid replies could not be written to the file: .* disk is full'):
            run_async(backend.close())
        again = api(server, ledger=path, max_cents=50)
        assert closing(again, ask(1)) == [steps] and again.ledger.units <= 50*CENT

def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path/'ledger'
    code = ('from stepwise_routing.models.ledger import Ledger\n'
            f'try: Ledger({str(path)!r})\nexcept BlockingIOError as e: print(e)')
    with Ledger(path):
        out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout
        with pytest.raises(BlockingIOError, match='is already open for writing, here or in another process'):
            Ledger(path.parent/'.'/path.name)
        with pytest.raises(BlockingIOError, match='is already open'), Faulty() as server: api(server, ledger=path)
    assert 'is already open for writing, here or in another process' in out

# secrets

def test_the_key_is_nowhere(tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    faults = ['echo', '500', 'malformed', 'bad', 'reset', 'echo', '429', 'echo']
    with Faulty(faults, key=KEY) as server:
        backend, lines = api(server, ledger=tmp_path/'ledger', retries=2), []
        for k in range(5):
            try: lines.append(str(run_async(backend.write(ask(k)))))
            except RuntimeError as e: lines += [str(e), repr(e)]
        lines += [repr(backend), json.dumps(backend.settings()), caplog.text, *capsys.readouterr()]
        run_async(backend.close())
    lines += [f.read_bytes().decode('latin-1') for f in tmp_path.iterdir()]
    assert not any(KEY in l for l in lines) # a server that repeats it is not repeated
    assert any('****' in l for l in lines)

# choosing

def test_an_api_chooses_by_its_first_token():
    options = [' w1', ' w2']
    with Faulty() as server:
        backend = api(server)
        choice = run_async(backend.choose(chat_prompt('2+2?'), options))
        run_async(backend.close())
    assert [body['max_tokens'] for body in server.seen] == [1] and server.seen[0]['top_logprobs'] == 20
    odds = np.exp([-.5 - 1, -.5 - 2])
    np.testing.assert_allclose(choice.prob, odds/odds.sum(), atol=1e-5)

def test_a_bill_above_the_worst_case_ends_all_calls(tmp_path):
    "The reply is kept; nothing more is sent."
    with Faulty() as server:
        reply = server._reply
        def dear(fault, body, shown):
            made = reply(fault, body, shown)
            made['usage'] |= dict(prompt_tokens=10**9, total_tokens=10**9 + made['usage']['completion_tokens'])
            return made
        server._reply = dear
        backend = api(server, ledger=tmp_path/'ledger')
        for k in (0, 1): assert 'bills more than' in fails(lambda: run_async(backend.write(whole(k))))
        run_async(backend.close())
        assert len(server.seen) == 1 and backend.ledger.spent == backend.ledger.units/CENT

def test_options_that_cannot_work_are_one_line(monkeypatch):
    with Faulty() as server:
        for option, part in ((dict(top_logprobs=21), 'from 0 (none) to 20'), (dict(timeout=0), 'seconds above 0'),
                             (dict(price='gpt-5'), 'price')):
            fails(lambda: api(server, **option), part)
    fails(lambda: Ledger(None, -1), 'max_cents=-1')

def test_a_closed_backend_says_so():
    with Faulty() as server:
        backend = api(server)
        run_async(backend.write(ask(0)))
        run_async(backend.close())
        with pytest.raises(RuntimeError, match='closed'): run_async(backend.write(ask(9)))

@given(st.permutations([('correct', .5), (' Incorrect', .2), ('in', .1), ('The', .15), ('', .05)]))
def test_options_by_their_first_token(first):
    logs = [(t, math.log(p)) for t, p in first]
    np.testing.assert_allclose(option_probs(logs, ['correct', 'incorrect']), [.5/.8, .3/.8], rtol=1e-5)
    assert option_probs(logs, ['7', '8']) == (0, 0)

# by name

def test_models_by_name(tmp_path):
    for names, options, line in (('micro-smal', {}, "did you mean 'micro-small'?"),
                                 ('micro-small', dict(temprature=1), "did you mean 'temperature'?"),
                                 ('openai:gpt-4.1-mini', dict(key_env='NO_SUCH_KEY'), 'NO_SUCH_KEY')):
        fails(lambda: open_models([names], **options).__enter__(), line)
    names, price = ['micro-small', 'openai:toy-model'], 'gpt-4.1-mini'
    with Faulty() as server, open_models(names, base_url=server.url, price=price) as (small, large):
        assert (small.index, large.index, large.spec.price) == (0, 1, price)
        assert run_async(large.write(ask()))[0].text == wanted(ask())[0]


def test_a_model_without_a_known_price_is_named():
    with pytest.raises(ValueError, match=r"no price is known for 'org/new'.*gpt-4.1-mini"):
        price_row('org/new', None, must=True)
    assert price_row('org/new', None, must=False) is None and price_row('org/new', 'free', must=True) is None


def test_a_proxy_password_stays_out_of_the_error(monkeypatch):
    monkeypatch.setenv('HTTPS_PROXY', 'gopher://user:secret@example.org')
    with pytest.raises(ValueError, match='check HTTP_PROXY') as error: api_client('', 'https://example.org/v1', 5)
    assert 'secret' not in str(error.value) and error.value.__suppress_context__
