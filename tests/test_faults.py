"The table of faults, on real processes: nothing is lost, nothing is paid twice, nothing hangs. Then each one closely."
import asyncio
import gc
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import asker
import pytest
from areas import AREAS, count
from asker import ask, request
from faults import FAULTS, ROOT, SIGNALS, STAGES, note, soak, try_fault, try_stage
from faulty import Faulty

from stepwise_routing.base.tools import run_async
from stepwise_routing.models.address import read_key
from stepwise_routing.models.bills import Bills
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT, Ledger
from stepwise_routing.models.vllm import VLLMBackend
from stepwise_routing.models.xverify import open_grader
from stepwise_routing.run import cli

pytestmark = pytest.mark.timeout(120)

@pytest.mark.parametrize('fault', FAULTS)
@pytest.mark.slow
def test_a_fault(fault, tmp_path):
    row = try_fault(fault, tmp_path)
    lines = row.pop('lines')
    note(row)
    assert row['hit'] or fault in SIGNALS
    due = dict(fault=fault, tried=12, survived=12, lost=0, twice=0, hung=0, over=0, believed=0)
    assert {k: row[k] for k in due} == due, lines
    assert all(re.search(FAULTS[fault] or 'nothing', line) for line in lines) and bool(lines) == bool(FAULTS[fault])

@pytest.mark.slow
@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('fault', SIGNALS)
@pytest.mark.timeout(300)
def test_a_stage_that_calls_nobody(fault, stage, tmp_path):
    row = try_stage(fault, stage, tmp_path)
    note(row)
    assert row == dict(row, survived=row['tried'], lost=0, hung=0) and row['hit'], row

@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('honest', [True, False])
def test_a_soak(honest, tmp_path):
    "The full one, of 2,000 calls: python tests/helpers/faults.py --soak 2000 10"
    row = soak(tmp_path, 60, 2, honest=honest)
    assert row['survived'] == row['tried'] == 60 and row['hit'] and row['kills'] and row['full'], row
    assert row['lost'] == row['twice'] == row['hung'] == row['believed'] == 0, row
    assert row['over'] <= 0, row

def test_too_little_memory_is_one_line(monkeypatch, capsys):
    def greedy(): raise MemoryError('Unable to allocate 9 GiB')
    monkeypatch.setattr(cli, 'demo', greedy)
    with pytest.raises(SystemExit) as e: cli.main(['demo'])
    assert e.value.code == 1 and capsys.readouterr().err == (
        'stepwise-routing: this process may not have more memory: Unable to allocate 9 GiB\n')

def test_a_demo_without_output_ends(monkeypatch):
    import sys

    import pandas as pd

    from stepwise_routing.report import transcripts
    monkeypatch.setattr(transcripts, 'demo', lambda: (['text'], pd.DataFrame()))
    monkeypatch.setattr(sys, 'stdout', None) # as after `>&-`
    transcripts.show_demo()

def test_a_demo_with_nothing_to_show_says_so(monkeypatch):
    from stepwise_routing.report import transcripts
    monkeypatch.setattr(transcripts, 'demo', lambda: ([], None)) # with weights or problems of somebody else
    with pytest.raises(ValueError, match='no problem was handed over.*install the package again'):
        transcripts.show_demo()

def api(server, **kwargs): return OpenAIBackend('toy-model', **asker.OPTIONS | dict(base_url=server.url) | kwargs)

def closing(backend, *requests):
    "What comes of some requests at once, errors among them; the backend is closed at the end."
    async def every():
        out = await asyncio.gather(*(backend.write(r) for r in requests), return_exceptions=True)
        await backend.close()
        return out
    return run_async(every())

# ---- money

def test_no_cap_without_a_price(tmp_path, monkeypatch):
    monkeypatch.setenv('TOY_KEY', 'sk-0123456789')
    with Faulty() as server:
        for more in (dict(max_cents=1), dict(base_url='https://llm.invalid/v1')):
            with pytest.raises(ValueError, match="no price is known for 'gpt-4.1'.*price=\"free\""):
                OpenAIBackend('gpt-4.1', **dict(base_url=server.url, key_env='TOY_KEY', ledger=tmp_path/'l') | more)
        with Ledger(max_cents=1) as book, pytest.raises(ValueError, match='no price'):
            api(server, price=None, ledger=book)
        assert not server.seen and not (tmp_path/'l').exists()
        dated = OpenAIBackend('gpt-4.1-mini-2025-04-14', base_url=server.url, max_cents=.001)
        assert dated.spec.price == 'gpt-4.1-mini'
        assert all('cap reached' in str(e) for e in closing(dated, ask(1), ask(2))) and not server.seen
    free = OpenAIBackend('gpt-4.1', base_url='https://llm.invalid/v1', key_env='TOY_KEY', price='free')
    assert free.spec.price is None

def test_a_server_that_bills_too_much_stops_the_run():
    with Faulty(lambda body: 'overbilled', delay=.2) as server:
        backend = api(server, concurrency=128, max_cents=50)
        out = closing(backend, *map(request, range(400)))
        assert {type(e) for e in out} == {RuntimeError}
        assert all('more tokens than it was asked for' in str(e) for e in out)
        assert len(server.seen) <= 128 and not backend.ledger.reserved
        assert 0 < backend.ledger.units <= backend.ledger.cap

def test_a_reservation_counts():
    async def second(book):
        await book.reserve('a', 6*CENT)
        with pytest.raises(asyncio.TimeoutError): await asyncio.wait_for(book.reserve('b', 6*CENT), .1)
    with Ledger(max_cents=10) as book: run_async(second(book))

def test_a_call_that_never_left_costs_nothing(tmp_path):
    "Killed while the connection is being made: the server never says hello."
    with socket.create_server(('127.0.0.1', 0)) as server:
        url = f'https://127.0.0.1:{server.getsockname()[1]}/v1'
        code = json.dumps(dict(url=url, ledger=str(tmp_path/'l'), n=3, max_cents=50))
        child = subprocess.Popen([sys.executable, asker.__file__, code], stdout=subprocess.PIPE)
        server.accept()[0].recv(1)
        child.kill()
        child.communicate()
    with Ledger(tmp_path/'l') as book: assert (book.units, book.rows('call')) == (0, [])

def test_one_request_has_one_spelling(tmp_path):
    with Faulty() as server:
        host = f'127.0.0.1:{server.port}'
        for url, temperature in ((host, 1), (host, 1.), (f'localhost:{server.port}', 1.), (f'{host}/v1/', 1)):
            url = f'http://{url}' if '/v1' in url else f'http://{url}/v1'
            backend = api(server, base_url=url, identity=None, temperature=temperature, ledger=tmp_path/'l')
            steps, = closing(backend, ask())
        assert len(server.seen) == 1 and steps[0].text

def test_a_server_is_waited_for_a_minute_at_most():
    with Faulty() as server: backend = api(server)
    def wait(after):
        response = SimpleNamespace(headers={'retry-after': after})
        return run_async(backend._refusal(SimpleNamespace(status_code=429, body='', code='', response=response))).wait
    assert [wait(a) for a in ('3', '1.5', '600', '1e9', '-1', 'soon', '')] == [3, 1.5, 60, 0, 0, 0, 0]

# ---- the book

def test_a_closed_ledger_takes_no_call(tmp_path):
    book = Ledger(tmp_path/'l')
    book.close()
    with pytest.raises(RuntimeError, match='the ledger of this model is closed'): book.run(book.once('a', None))

def test_what_is_closed_is_one_durable_file(tmp_path):
    with Ledger(tmp_path/'l') as book:
        assert book.read('PRAGMA synchronous') == [(2,)] # FULL: each commit reaches the disk
        run_async(book.settle(run_async(book.reserve('a', 7)), 5, reply=dict(text='x')))
    assert [f.name for f in tmp_path.iterdir() if 'wal' in f.name or 'journal' in f.name] == []
    (tmp_path/'copy').write_bytes((tmp_path/'l').read_bytes())
    with Ledger(tmp_path/'copy') as book: assert (book.reply('a'), book.units) == (dict(text='x'), 5)

# ---- keys and addresses

def test_a_key_is_read_without_its_line_end(monkeypatch):
    monkeypatch.setenv('TOY_KEY', ' sk-0123456789\n')
    with Faulty(key='sk-0123456789') as server: assert closing(api(server), ask())[0][0].text
    for key in ('sk-01 23', 'sk-01\n23', 'sk-ü'):
        monkeypatch.setenv('TOY_KEY', key)
        with pytest.raises(ValueError, match='TOY_KEY holds no API key') as e: read_key('TOY_KEY', 'http://127.0.0.1')
        assert key not in str(e.value)

SECRET = 'http://user:PASSW0RD@llm.invalid/v1', 'http://llm.invalid/v1?api-key=PASSW0RD', 'user:PASSW0RD@llm.invalid'

@pytest.mark.parametrize('url', SECRET)
def test_an_address_holds_no_secret(url):
    calls = [lambda: OpenAIBackend('m', base_url=url, price='free'), lambda: VLLMBackend(None, url)]
    grader = open_grader(f'xverify:{url}', template='{question}{output}{answer}')
    if url.startswith('http'): calls.append(grader.__enter__)
    for call in calls:
        with pytest.raises(ValueError, match='leave out user, password and query') as e: call()
        assert 'PASSW0RD' not in str(e.value)

def test_a_name_is_no_loopback_address(monkeypatch):
    monkeypatch.delenv('OPENAI_API_KEY', raising=False)
    for host in ('127.evil.example', '127.0.0.1.evil.example', 'localhost.evil.example', '[::2]'):
        with pytest.raises(ValueError, match='no API key'): read_key('OPENAI_API_KEY', f'http://{host}/v1')
    here = '127.0.0.1', '127.3.2.1:80', '[::1]:80', 'LOCALHOST'
    assert [read_key('NO_KEY', f'http://{host}/v1') for host in here] == [''] * 4

# ---- what a server says

def test_a_message_of_a_server_has_no_escape_codes():
    with Faulty(['escape']) as server: error, = closing(api(server), ask())
    assert str(error).isprintable() and 'red' in str(error)

def test_an_endless_reply_is_not_read(tmp_path):
    with Faulty(['gzip']*2) as server: error, = closing(api(server, retries=2), ask())
    assert 'a reply of more than 67108864 bytes' in str(error)

# ---- sizes and ranges of what a server says

def hostile(change, *headers, status=200):
    "A server whose replies are changed before they are sent."
    class Hostile(Faulty):
        async def _send(self, writer, code, body, *more, **how):
            if isinstance(body, dict) and 'choices' in body: change(body)
            return await super()._send(writer, status, body, *more, *headers, **how)
    return Hostile()

def first_token(**values): return lambda reply: reply['choices'][0]['logprobs']['content'][0].update(values)

def used(**values): return lambda reply: reply['usage'].update(values)

@pytest.mark.parametrize('values', [dict(bytes=2 * 10**9), dict(bytes=10**12), dict(bytes='abc'), dict(bytes=[300]),
                                    dict(bytes={'a': 1}), dict(logprob=-10**400), dict(token=7, bytes=None)])
def test_a_token_is_checked_before_it_is_built(values, tmp_path):
    with hostile(first_token(**values)) as server:
        backend = api(server, ledger=tmp_path/'l', retries=2)
        error, = closing(backend, ask())
        assert 'no reply after 2 attempts; the last one: the reply has no choices' in str(error)
        assert backend.ledger.units == server.cents*CENT # booked by its usage

def test_a_reply_of_more_tokens_than_were_asked_for_is_none(tmp_path):
    "They are matched with its text, which takes long for many."
    many = lambda reply: reply['choices'][0]['logprobs'].update(content=[dict(token='x', logprob=-1.)] * 20_000)
    with hostile(many) as server: error, = closing(api(server, retries=1), ask())
    assert 'the reply has no choices' in str(error)

COUNTS = dict(completion_tokens=10**400), dict(prompt_tokens=10**9), dict(completion_tokens=5 * 10**12)

@pytest.mark.parametrize('counts', COUNTS)
@pytest.mark.parametrize('price', ['free', 'gpt-4.1-mini'])
def test_more_tokens_than_were_asked_for_are_the_servers_error(counts, price, tmp_path):
    with hostile(used(**counts)) as server:
        backend = api(server, ledger=tmp_path/'l', price=price)
        error, = closing(backend, ask())
        line = 'are the most there can be' if price == 'free' else 'booked at the most it can cost'
        assert 'counts more tokens than it was asked for' in str(error) and line in str(error)
        assert '\n' not in str(error) and len(str(error)) < 500 and len(server.seen) == 1
    with Ledger(tmp_path/'l') as book:
        (_, _, most, units, notes), = book.rows('call')
        assert units == most == book.units and 'counts more tokens' in json.loads(notes)['why']
        assert book.rows('reply') == [] and json.loads(notes)['answer']
        claimed = json.loads(notes)['claimed'] # nothing of what it says vanishes
        names = dict(completion_tokens='generated', prompt_tokens='prompt')
        assert all(claimed[names[name]] == count for name, count in counts.items())
        assert claimed['units'] > most if price != 'free' else claimed['units'] == 0

def test_a_little_more_than_was_asked_for_is_booked_as_billed(tmp_path):
    "A server may add words of its own: that is a bill. It is above what was reserved, so no call follows."
    with hostile(used(completion_tokens=4000)) as server:
        error, = closing(api(server, ledger=tmp_path/'l'), ask())
        assert 'for a call that could cost no more' in str(error)
    with Ledger(tmp_path/'l') as book:
        (_, _, most, units, _), = book.rows('call')
        assert units == book.units > most

def test_a_live_router_keeps_claims_without_words(tmp_path):
    with hostile(used(completion_tokens=10**9)) as server, Bills(tmp_path/'l') as book:
        error, = closing(api(server, ledger=book), ask())
        assert 'counts more tokens' in str(error)
        (_, _, most, units, notes), = book.rows('call')
        assert units == most and list(json.loads(notes)) == ['uncertain', 'claimed']

def test_good_replies_beside_an_impossible_one_are_kept(tmp_path):
    asked = []
    def sixth(reply):
        asked.append(1)
        if len(asked) == 6: reply['usage']['completion_tokens'] = 10**16
    with hostile(sixth) as server:
        server.delay = .1
        out = closing(api(server, ledger=tmp_path/'l', max_cents=50), *(ask(k) for k in range(8)))
        assert sorted(type(o).__name__ for o in out) == ['RuntimeError'] + ['tuple'] * 7
    with Ledger(tmp_path/'l') as book: assert len(book.rows('reply')) == 7 and len(book.rows('call')) == 8

def test_a_row_that_cannot_be_written_blocks_no_other(tmp_path):
    with Ledger(tmp_path/'l') as book:
        async def both():
            calls = [await book.reserve(key, 7) for key in 'abc']
            for call in calls: await book.send(call)
            await asyncio.gather(*(book.settle(c, 2**70 if i == 1 else 5, dict(text=i)) for i, c in enumerate(calls)))
            with pytest.raises(RuntimeError, match='a call cannot be put down'): await book.reserve('d', 7)
        run_async(both())
    with Ledger(tmp_path/'l') as book:
        assert [book.reply(key) for key in 'abc'] == [dict(text=0), None, dict(text=2)] and book.units == 5 + 7 + 5

@pytest.mark.parametrize('header', ['X-Server: café', 'Content-Type: text/html; charset=rot13', 'X-A: \x80\xff',
                                    'Retry-After: \xb2', 'Content-Type: text/plain; charset=no-such'])
def test_no_header_decides_whether_a_reply_is_read(header):
    with hostile(lambda reply: None, header) as server: assert closing(api(server, retries=1), ask())[0][0].text


@pytest.mark.parametrize('status', [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status):
    with Faulty() as other, hostile(lambda reply: None, f'Location: {other.url}/chat/completions',
                                    status=status) as server:
        error, = closing(api(server), ask())
        assert f'sends requests to another address ({status}): give that as base_url' in str(error)
        assert (len(server.seen), other.seen) == (1, [])

def test_an_error_is_told_once(caplog):
    "Whoever waits gets it; callers that went away with the first one leave no traceback behind."
    with Faulty(models=('toy-model-2',), delay=.05) as server:
        backend = api(server)
        async def every():
            calls = [asyncio.ensure_future(backend.write(ask(k))) for k in range(40)]
            await asyncio.sleep(.01)
            for call in calls[1:]: call.cancel()
            with pytest.raises(RuntimeError, match="did you mean 'toy-model-2'"): await calls[0]
            await asyncio.sleep(.2)
        run_async(every())
        run_async(backend.close())
    gc.collect()
    assert caplog.records == []

def test_a_damaged_ledger_is_refused_before_it_pays(tmp_path):
    "Flipped bits, in keys and indexes too: what was paid is there, or one line says that the file is damaged."
    whole, path, r = tmp_path/'whole', tmp_path/'l', random.Random(0)
    with Ledger(whole) as book:
        async def pay():
            for i in range(30): await book.settle(await book.reserve(f'{i:032x}', 9), 5, dict(n=i))
        run_async(pay())
    data = whole.read_bytes()
    for _ in range(120):
        at = r.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << r.randrange(8))]) + data[at + 1:])
        try:
            with Ledger(path) as book:
                assert book.units == 150 and all(book.reply(f"{i:032x}") == dict(n=i) for i in range(30))
        except (ValueError, OSError) as e: assert '\n' not in str(e) and str(path) in str(e)
    at = data.rindex(b'%032x' % 7) # in the index of keys: nobody would find this reply
    path.write_bytes(data[:at] + b'f' + data[at + 1:])
    with pytest.raises(ValueError, match='l is damaged .*restore a copy'): Ledger(path)

# ---- the table of areas

TRIALS = """
import time, pytest
def test_a(): pass
def test_b(): assert 1 == 2
def test_c():
    units = 5
    assert units == 7
@pytest.mark.timeout(1)
def test_d(): time.sleep(60)
@pytest.mark.skip
def test_e(): pass
@pytest.fixture
def broken(): raise OSError
def test_f(broken): pass
"""

def test_what_came_of_a_trial_is_counted(tmp_path):
    (tmp_path/'test_trials.py').write_text(TRIALS)
    report = tmp_path/'report.xml'
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--junitxml={report}', 'test_trials.py']
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert count('x', report) == dict(area='x', trials=5, mended=1, crashed=2, hung=1, bill=1)

def test_every_area_names_tests_that_are_there():
    for words in AREAS.values():
        for file, some in words.items():
            text = (ROOT/'tests'/f'{file}.py').read_text('utf-8')
            missing = [w for w in some.removeprefix('not ').split(' or ') if w not in file + text]
            assert missing == [], file

# ---- an end from outside

COLLECT = '''
import signal
signal.signal(signal.SIGINT, {ctrl_c}) # whatever the tests were started with
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from stepwise_routing.own import Access, collect
rows = [dict(question=f'What is {{i}} + {{i}}?', answer=str(2*i)) for i in range(20)]
access = Access(base_url={url!r}, key_env='', price='gpt-4.1-mini')
print(collect({folder!r}, rows, ['openai:a', 'openai:b'], access=access)['new steps'] > 0)
'''

HEARD, DEAF = 'signal.default_int_handler', 'signal.SIG_IGN' # a script's background is deaf to Ctrl-C
ENDS = [('SIGINT', HEARD), ('SIGTERM', HEARD), ('SIGHUP', HEARD), ('SIGTERM', DEAF)]

@pytest.mark.parametrize(('kind', 'ctrl_c'), ENDS)
def test_a_collection_that_is_told_to_end_keeps_the_replies_under_way(tmp_path, kind, ctrl_c):
    with Faulty(models=('a', 'b'), delay=.5) as server:
        code = COLLECT.format(url=server.url, folder=str(tmp_path/'mine'), ctrl_c=ctrl_c)
        command = [sys.executable, '-c', code]
        def start(): return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with start() as process:
            while len(server.seen) < 8: time.sleep(.02)
            process.send_signal(getattr(signal, kind))
            _, err = process.communicate(timeout=60)
        assert 'KeyboardInterrupt' in err and process.returncode
        with start() as process: assert process.communicate(timeout=120)[0] == 'True\n'
        bodies = [json.dumps(body, sort_keys=True) for body in server.seen]
        assert len(bodies) == len(set(bodies)) # nothing is asked twice
        with Bills(tmp_path/'mine'/'ledger.db') as book: assert book.units == server.cents*CENT > 0
