"""What a stranger may hand over or break: files, folders, addresses. Each is one line that names what is wrong, before
anything is lost. The kinds were found by trials that the code's authors did not think of."""
import json
import os
import shutil
import socket
import sqlite3
import zipfile
import zlib

import numpy as np
import pytest
from asker import OPTIONS
from test_own import PAIR, ready, rows, toys  # noqa: F401

from stepwise_routing.base.store import RolloutStore, checksum
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method.outcomes import OutcomeTable, toy_table
from stepwise_routing.method.policy import config_checksum
from stepwise_routing.models.address import plain_address
from stepwise_routing.models.chat import OpenAIBackend, api_client
from stepwise_routing.models.ledger import Ledger
from stepwise_routing.own import *


def says(call, words, error=ValueError):
    with pytest.raises(error, match=words) as e: call()
    assert str(e.value).isprintable() and len(str(e.value)) < 700

# ---- rows

@pytest.mark.parametrize('row, said', [
    ('{"question": "a", "answer": NaN}', 'answer.* is nan, which is no number'),
    ('{"question": "a", "answer": 1e999}', 'answer.* is inf'), ('{"question": "a", "answer": -Infinity}', 'is -inf'),
    ('{"question": "a", "answer": "1", "answer": "2"}', "'answer' stands there twice"),
    ('{"question": "\\ud800", "answer": "1"}', 'half a character'), ('{"question": ' + '['*10**5, 'not a JSON object'),
    ('{"question": "a", "answer": ' + '9'*5000 + '}', 'not a JSON object'), ('{"question": "a"}\0', 'not a JSON'),
    ('{"question": "a", "answer": "1"}\r{"question": "b", "answer": "1"}', 'not a JSON object')])
def test_a_row_that_nobody_can_mean_is_named(tmp_path, row, said):
    file = tmp_path/'q.jsonl'
    file.write_text('{"question": "What?", "answer": 1}\r\n' + row + '\n', newline='')
    says(lambda: own_problems(file), f'q.jsonl, row 2: .*{said}')

# ---- files of another kind

FIFO = os.mkfifo
LOOP = lambda path: path.symlink_to(path)
FOLDER = lambda path: path.mkdir()
SOCKET = lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))

@pytest.mark.parametrize('make', [FIFO, LOOP, FOLDER, SOCKET])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path) # the path of a socket is short
    make(tmp_path/'x')
    for call in (own_problems, OutcomeTable.load, Ledger):
        says(lambda: call(tmp_path/'x'), 'x', (ValueError, OSError, RuntimeError))

# ---- tables, stores and ledgers with checksums that fit

CHANGES = dict(n_steps=lambda a: a + 10**6, correct=lambda a: a + 7, large_tokens=np.negative,
               small_cents=lambda a: a - 1, obs=lambda a: np.where(np.isnan(a), a, np.inf),
               large_cents=lambda a: a*np.nan,
               problem_id=lambda a: a[:-1],
               large_steps=lambda a: a[:, :-1], again=lambda a: a[:3], features=lambda a: a[:1], small_tokens=np.ravel)

@pytest.mark.parametrize('name', CHANGES)
def test_a_table_that_no_run_can_make_is_refused(tmp_path, name):
    toy_table(20).save(tmp_path/'t.npz')
    with np.load(tmp_path/'t.npz') as file: arrays = dict(file)
    np.savez(tmp_path/'t.npz', **arrays | {name: CHANGES[name](arrays[name])})
    says(lambda: OutcomeTable.load(tmp_path/'t.npz'), r't\.npz is damaged \(column \w+\): collect again, or run')

@pytest.mark.parametrize('name', ['extra.npy', '../../evil.npy', 'a\nb\x1b[2J', 'obs'])
def test_a_column_that_no_table_has_is_not_unpacked(tmp_path, monkeypatch, name):
    toy_table(20).save(tmp_path/'t.npz')
    with zipfile.ZipFile(tmp_path/'t.npz', 'a', zipfile.ZIP_DEFLATED) as z: z.writestr(name, bytes(1 << 20))
    monkeypatch.setattr(zipfile.ZipExtFile, 'read', None) # nobody reads a member
    said = 't.npz is compressed' if name == 'obs' else r't\.npz holds .*, which no table has'
    says(lambda: OutcomeTable.load(tmp_path/'t.npz'), f'{said}.*: collect again, or run notebook 02b')

def test_a_small_table_does_not_fill_the_memory(tmp_path):
    toy_table(20).save(tmp_path/'t.npz')
    with np.load(tmp_path/'t.npz') as file: arrays = dict(file)
    np.savez_compressed(tmp_path/'t.npz', **arrays | dict(obs=np.zeros((20, 1000, 1000))))
    says(lambda: OutcomeTable.load(tmp_path/'t.npz'), r't\.npz is compressed, and our tables are not: collect again')

@pytest.mark.parametrize('what', ['CREATE TRIGGER t AFTER INSERT ON edge BEGIN DELETE FROM edge; END',
                                  'CREATE VIEW v AS SELECT * FROM edge'])
def test_a_store_that_acts_by_itself_is_refused(tmp_path, what):
    RolloutStore(tmp_path/'d', {}).close()
    with sqlite3.connect(tmp_path/'d') as db: db.execute(what)
    says(lambda: RolloutStore(tmp_path/'d', {}), 'd has a (trigger|view), and our files have none')

def test_words_of_a_damaged_file_reach_no_terminal(tmp_path):
    RolloutStore(tmp_path/'d', {}).close()
    raw = (tmp_path/'d').read_bytes()
    (tmp_path/'d').write_bytes(raw.replace(b'PRIMARY', b"'\x1b[31mX", 1))
    says(lambda: RolloutStore(tmp_path/'d', {}), 'd is damaged or of another kind .*31mX')

def test_the_kind_of_a_thing_in_a_damaged_file_reaches_no_terminal(tmp_path):
    RolloutStore(tmp_path/'d', {}).close()
    raw = (tmp_path/'d').read_bytes()
    (tmp_path/'d').write_bytes(raw.replace(b'indexsqlite', b'\x1bndexsqlite', 1))
    says(lambda: RolloutStore(tmp_path/'d', {}), 'd has a .{1,4}ndex, and our files have none')

STEP = b'{"text": "", "model": 0, "finish": "stop"}'
UNPACKED = zlib.compress(STEP) # it is one; with a hundred million blanks before it, it is none

def test_a_record_with_checksum_is_one(tmp_path):
    with RolloutStore(tmp_path/'d', {}) as store:
        store.write('REPLACE', dict(edge=[(json.dumps(['p', 0, '', 0]), UNPACKED)]))
        assert store.get('p', 0, '', 0).finish == 'stop'

@pytest.mark.parametrize('data', ['[1', '', b'', b'x', '{"text": 1}', zlib.compress(b' '*10**8 + STEP), UNPACKED[:-9]])
def test_a_record_that_is_none_is_one_line(tmp_path, data):
    with RolloutStore(tmp_path/'d', {}) as store:
        store.write('REPLACE', dict(edge=[(json.dumps(['p', 0, '', 0]), data)]))
        says(lambda: store.get('p', 0, '', 0), 'd holds a record that cannot be read')

@pytest.mark.parametrize('kept', [1, 16, 100, 511, 512, 4095])
@pytest.mark.parametrize('readonly', [False, True])
def test_a_file_with_records_that_is_cut_off_is_no_new_one(tmp_path, kept, readonly):
    "All that was paid would be paid again, up to the whole cap."
    with Ledger(tmp_path/'l') as book: run_async(book.settle(run_async(book.reserve('a', 7)), 5, reply=dict(text='x')))
    (tmp_path/'l').write_bytes((tmp_path/'l').read_bytes()[:kept])
    says(lambda: Ledger(tmp_path/'l') if not readonly else RolloutStore(tmp_path/'l', readonly=True), 'l is damaged')
    assert (tmp_path/'l').stat().st_size == kept

@pytest.mark.parametrize('most, units', [(5, -10**12), (-1, None), (5, 'abc'), (5, 1.5), ('5', 1)])
def test_a_ledger_gives_no_money_away(tmp_path, most, units):
    "A negative amount, with a checksum that fits, would raise the cap of whoever uses the folder."
    Ledger(tmp_path/'l').close()
    row = 1, 'k', most, units, '{}'
    with sqlite3.connect(tmp_path/'l') as db: db.execute('INSERT INTO call VALUES (?,?,?,?,?,?)', (*row, checksum(row)))
    says(lambda: Ledger(tmp_path/'l', 1), 'l, row 1 of call: its amount is none')

@pytest.mark.parametrize('name', ['d', 'd.lock'])
def test_a_journal_that_names_another_file_deletes_nothing(tmp_path, name):
    "SQLite takes it for the rest of a crash, and deletes the file whose name stands at its end."
    RolloutStore(tmp_path/'d', {}).close()
    victim = tmp_path/'victim'
    victim.write_text('precious')
    if name == 'd.lock': shutil.copy(tmp_path/'d', tmp_path/name)
    page = int.from_bytes((tmp_path/'d').read_bytes()[16:18], 'big')
    magic = bytes.fromhex('d9d505f920a163d7')
    word, named = lambda n: n.to_bytes(4, 'big'), str(victim).encode()
    head = magic + b''.join(map(word, (0, 1, (tmp_path/'d').stat().st_size//page, 512, page)))
    end = word(2**30//page + 1) + named + word(len(named)) + word(sum(named)) + magic
    (tmp_path/f'{name}-journal').write_bytes(head.ljust(512, b'\0') + end)
    says(lambda: RolloutStore(tmp_path/'d', {}), f'{name}-journal names another file')
    assert victim.read_text() == 'precious'

@pytest.mark.parametrize('name', ['d', 'd-journal', 'd-wal', 'd-shm', 'd.lock', 'd.lock-journal'])
@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir, lambda path: os.symlink('elsewhere', path)])
def test_what_lies_beside_a_store_is_a_plain_file(tmp_path, name, make):
    "A named pipe would be waited for without end, and Ctrl-C would not help."
    make(tmp_path/name)
    if name == 'd' and make not in (os.mkfifo, os.mkdir): return # a link to a store is followed
    says(lambda: RolloutStore(tmp_path/'d', {}), f'{name} is no plain file: remove it')

@pytest.mark.parametrize('what', ['CREATE UNIQUE INDEX u ON reply((1))', 'CREATE UNIQUE INDEX u ON call((1))',
                                  'CREATE TABLE more (a)', 'DROP INDEX by_key', 'DROP TABLE call',
                                  'ALTER TABLE reply ADD COLUMN more'])
def test_a_ledger_with_other_tables_or_indexes_is_refused(tmp_path, what):
    "With one more index, each paid reply would push out the one before it, and be paid again."
    Ledger(tmp_path/'l').close()
    with sqlite3.connect(tmp_path/'l') as db: db.execute(what)
    says(lambda: Ledger(tmp_path/'l'), "l: '.*' is not made as ours|l has no '(by_key|call)'")

@pytest.mark.parametrize('call', [2**63 - 1, 2**53, 0, -1])
def test_a_ledger_whose_numbers_are_used_up_is_refused(tmp_path, call):
    "No number would be left for the next call, whose paid reply would be lost."
    Ledger(tmp_path/'l').close()
    row = call, 'k', 5, 5, '{}'
    with sqlite3.connect(tmp_path/'l') as db: db.execute('INSERT INTO call VALUES (?,?,?,?,?,?)', (*row, checksum(row)))
    says(lambda: Ledger(tmp_path/'l', 1), f'l, row {call} of call: its number is none of ours')

@pytest.mark.parametrize('text', ['', '{', '[]', '{}', 5, None, '['*10**5])
def test_a_reply_in_a_ledger_that_cannot_be_read_is_one_line(tmp_path, text):
    Ledger(tmp_path/'l').close()
    row = 1, 'k', text
    with sqlite3.connect(tmp_path/'l') as db: db.execute('INSERT INTO reply VALUES (?,?,?,?)', (*row, checksum(row)))
    with Ledger(tmp_path/'l') as book: says(lambda: book.reply('k'), 'l, row 1 of reply: it cannot be read')

@pytest.mark.parametrize('text', ['', '{', None, '['*10**5])
def test_a_header_that_cannot_be_read_is_one_line(tmp_path, text):
    RolloutStore(tmp_path/'d', {}).close()
    with sqlite3.connect(tmp_path/'d') as db:
        ((name, _),) = db.execute('SELECT format, settings FROM header')
        db.execute('UPDATE header SET settings = ?, crc = ?', (text, checksum((name, text))))
    says(lambda: RolloutStore(tmp_path/'d', {}), 'd has a header that cannot be read')

# ---- a received router

@pytest.fixture(scope='module')
def made(tmp_path_factory): return tmp_path_factory.mktemp('made')

WRONG = dict(on_escalate='explode', unit='euros', mode='per_step', model_class=['evil'], models=7, model_weights=5,
             costs='x', n_train='many', calibration=None)

@pytest.mark.parametrize('name', WRONG)
def test_an_entry_that_calibrate_never_writes_is_named(made, tmp_path, toys, name): # noqa: F811
    if not (made/'mine').exists(): ready(made/'mine', 60)
    folder = shutil.copytree(made/'mine', tmp_path/'mine')
    file = folder/'policy'/'config.json'
    config = json.loads(file.read_text()) | {name: WRONG[name]}
    file.write_text(json.dumps(config | dict(checksum=config_checksum(config))))
    for call in (lambda: route(folder, 'What is 1 + 2?', PAIR), lambda: export(folder, tmp_path/'out')):
        says(call, f'mine: {name} in policy/config.json is not what calibrate writes')
    assert not (tmp_path/'out').exists()

# ---- addresses and proxies

@pytest.mark.parametrize('url', [
    'http://127.0.0.1:99999/v1', 'http://127.0.0.1:abc/v1', 'http://127.0.0.1:1/v1\r\nX: y', 'http://[::1/v1', '',
    'http://127.0.0.1:1/\0', 'http://127.0.0.1/v 1', 'file:///etc/passwd', 'http://', '//127.0.0.1/v1'])
def test_what_is_no_address_is_one_line(url):
    says(lambda: plain_address(url), 'base_url=.*: give an address like')
    says(lambda: OpenAIBackend('toy-model', **OPTIONS | dict(base_url=url)), 'base_url=.*: give an address like')

@pytest.mark.parametrize('proxy', ['::::', 'socks5://user:PASSW0RD@127.0.0.1:9'])
def test_a_proxy_that_cannot_be_used_is_one_line_without_its_password(monkeypatch, proxy):
    for name in ('HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY'): monkeypatch.setenv(name, proxy)
    with pytest.raises(ValueError, match='the proxy in the environment cannot be used') as e:
        api_client('sk-0123456789', 'https://llm.invalid/v1', 1)
    assert 'PASSW0RD' not in str(e.value)
    api_client('', 'http://127.0.0.1:1/v1', 1) # nobody asks a proxy for this machine
