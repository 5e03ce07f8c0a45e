"The store: what was put comes back bit for bit, from a file that may be killed, damaged, filled up or opened twice."
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.base.records import Step
from stepwise_routing.base.store import Database, RolloutStore, settings_difference

HERE = Path(__file__).parent
SETTINGS = dict(benchmark='toy', models=[dict(spec=dict(name='m', params=1, price=None), temperature=.7)])

numbers = st.floats(allow_nan=False, allow_infinity=True)
steps = st.builds(Step, text=st.text(st.characters(), max_size=40), model=st.integers(0, 9),
                  finish=st.sampled_from(['step', 'stop', 'length']), ids=st.lists(st.integers(0, 2**40)).map(tuple),
                  ends=st.lists(st.integers(0, 2**31)).map(tuple), prob=st.lists(numbers).map(tuple),
                  max_logit=st.none() | st.lists(numbers).map(tuple),
                  generated=st.integers(0, 10**6), prompt=st.integers(0, 10**6), cached=st.integers(0, 10**6))

@pytest.fixture(scope='module')
def memory():
    "A store that is no file, and remembers nothing between two calls."
    store = RolloutStore.__new__(RolloutStore)
    Database.__init__(store, None, {})
    return store

def fresh(store):
    store.recent = {}
    store.read('DELETE FROM edge')
    return store

@given(steps)
def test_a_row_keeps_a_step_exactly(memory, step):
    store = fresh(memory)
    store.put('p', 0, '01', step.model, step)
    for remembered in (store.recent, {}): # the step that was put, and the row
        store.recent = remembered
        back = store.get('p', 0, '01', step.model)
        assert back == step and repr(back) == repr(step)

@given(steps, st.data())
@settings(deadline=None)
def test_any_changed_value_is_noticed(memory, step, data):
    store = fresh(memory)
    store.put('p', 0, '01', 1, step)
    (row,) = store.read('SELECT * FROM edge')
    column = data.draw(st.integers(0, len(row) - 1))
    name = ['key', 'step', 'crc'][column]
    old = row[column]
    if isinstance(old, bytes):
        position, byte = data.draw(st.integers(0, len(old) - 1)), data.draw(st.integers(0, 255))
        new = old[:position] + bytes([byte]) + old[position + 1:]
    else: new = data.draw(st.sampled_from([None, 1, 'x', b'x', old]))
    try: store.read(f'UPDATE edge SET {name} = ?', [new])
    except OSError: return # SQLite refuses it
    if new == old: assert store.get('p', 0, '01', 1) == step
    else:
        with pytest.raises(ValueError, match='row 1 of edge: damaged'): store.rows('edge')

def f32(x): return struct.unpack('<f', struct.pack('<f', x))[0]

def put_some(store, n, start=0):
    for i in range(start, start + n): store.put(*key_of(i), step_of(i))

def key_of(i): return f'p{i}', 0, '0'*(i % 3), i % 2

def step_of(i): return Step(f'step {i} \u2260 \n', i % 2, 'step', (i,), (3,), (f32(.1*i),), None, 1, 10 + i)

def test_put_get_reopen_and_first_draw_wins(tmp_path):
    with RolloutStore(tmp_path/'deep'/'s.db', SETTINGS) as store:
        put_some(store, 5)
        old = store.get('p1', 0, '0', 1)
        store.put('p1', 0, '0', 1, replace(old, text='another draw'))
        assert store.get('p1', 0, '0', 1) == old and len(store) == 5 and ('p1', 0, '0', 1) in store
        assert store.get('p1', 1, '0', 1) is None and ('p1', 1, '0', 1) not in store
    for options in (dict(), dict(settings=SETTINGS), dict(readonly=True)):
        with RolloutStore(tmp_path/'deep'/'s.db', **options) as store:
            assert store.get('p1', 0, '0', 1) == old and len(store) == 5
            assert store.keys() == [key_of(i) for i in range(5)] and store.settings == SETTINGS
    assert sorted(os.listdir(tmp_path/'deep')) == ['s.db', 's.db.lock'] # one plain file, and its lock

def test_a_batch_is_kept_whole_or_not_at_all(tmp_path):
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store:
        put_some(store, 1)
        with pytest.raises(AttributeError): # no number
            store.put_many([(key_of(1), step_of(1)), (key_of(2), replace(step_of(2), ends=(set(),)))])
        assert store.keys() == [key_of(0)]
        store.put_many([(key_of(1), step_of(1)), (key_of(1), step_of(9))])
        assert store.get(*key_of(1)) == step_of(1) and len(store) == 2
        store.recent = {} # what is there already is not put, and not remembered
        store.put(*key_of(1), step_of(9))
        assert store.recent == {} and store.get(*key_of(1)) == step_of(1)

def test_the_memory_of_steps_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr('stepwise_routing.base.store.REMEMBERED', 3)
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store:
        put_some(store, 9)
        assert [store.get(*key_of(i)) for i in range(9)] == [step_of(i) for i in range(9)] and len(store.recent) == 3

def never_another_draw(path, n):
    "A damaged store: each edge is as it was, or an error in one line that names the file. None is missing."
    try:
        with RolloutStore(path, SETTINGS) as store:
            for i in range(n):
                try: assert store.get(*key_of(i)) == step_of(i)
                except (ValueError, OSError) as e: assert '\n' not in str(e) and path.name in str(e)
    except (ValueError, OSError) as e: assert '\n' not in str(e) and path.name in str(e), e

def test_a_damaged_file_never_passes_for_a_draw(tmp_path):
    whole, path, r = tmp_path/'whole.db', tmp_path/'s.db', random.Random(0)
    with RolloutStore(whole, SETTINGS) as store: put_some(store, 40)
    data = whole.read_bytes()
    for _ in range(150):
        at = r.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << r.randrange(8))]) + data[at + 1:])
        never_another_draw(path, 40)
    for _ in range(60):
        path.write_bytes(data[:r.randrange(1, len(data))])
        never_another_draw(path, 40)

def test_damage_names_file_and_row(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store: put_some(store, 4)
    data = path.read_bytes()
    at = data.index(b'["p2", 0, "00", 0]x') # the row itself, not the index of its key
    path.write_bytes(data[:at + 30] + bytes([data[at + 30] ^ 1]) + data[at + 31:])
    with RolloutStore(path, SETTINGS) as store:
        with pytest.raises(ValueError, match=r's\.db, row 3 of edge: damaged') as e: store.get(*key_of(2))
        assert '\n' not in str(e.value) and store.get(*key_of(3)) == step_of(3)

def test_an_empty_file_is_an_empty_store(tmp_path):
    path = tmp_path/'s.db'
    path.touch()
    for options in (dict(), dict(readonly=True)):
        with pytest.raises(ValueError, match='is empty: draw again, with collect or notebook 02'):
            RolloutStore(path, **options)
    with RolloutStore(path, SETTINGS) as store: put_some(store, 1); assert len(store) == 1
    with RolloutStore(path) as store: assert store.settings == SETTINGS and len(store) == 1

def test_a_file_beside_it_that_goes_at_the_same_moment_is_no_error(tmp_path, monkeypatch):
    "The last process that closes the file removes its -shm while another one opens it."
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store: put_some(store, 1)
    seen, lstat = [], os.lstat
    def vanishing(file, **options):
        if str(file).endswith('-journal'):
            seen.append(file)
            return lstat(path) # it was there
        return lstat(file, **options)
    with monkeypatch.context() as patched:
        patched.setattr(os, 'lstat', vanishing)
        patched.setattr(os.path, 'lexists', lambda file: True)
        with RolloutStore(path, readonly=True) as store: assert len(store) == 1
    assert seen

def test_other_settings_are_refused_in_one_line(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store: put_some(store, 1)
    for change, field in ((dict(benchmark='gsm8k'), 'settings.benchmark'), (dict(more=1), 'settings.more'),
                          (dict(models=[]), 'settings.models'),
                          (dict(models=[dict(SETTINGS['models'][0], temperature=1.)]), '.models[0].temperature')):
        with pytest.raises(ValueError) as e: RolloutStore(path, {**SETTINGS, **change})
        line = str(e.value)
        assert field in line and str(path) in line and '\n' not in line and len(line) < 400
    with RolloutStore(path, SETTINGS): pass # a refusal leaves no lock behind
    assert settings_difference(SETTINGS, SETTINGS) is None
    assert settings_difference(dict(a=1), dict(a=True)) == ('settings.a', 1, True) # equal in Python, not in JSON

def test_another_file_is_left_alone(tmp_path):
    path = tmp_path/'notes.txt'
    for text in ('my notes', 'my notes\n', '{"question": "1+1"}\n', 'a\nb\nc\n', 'long\n'*3000):
        path.write_text(text)
        for readonly in (False, True):
            with pytest.raises(ValueError, match='notes.txt is damaged or of another kind'):
                RolloutStore(path, SETTINGS, readonly)
        assert path.read_text() == text
    path.unlink()
    other = sqlite3.connect(path)
    other.execute('CREATE TABLE header (a)'); other.commit(); other.close()
    with pytest.raises(ValueError, match="has format 'unknown'"): RolloutStore(path, SETTINGS)
    class Book(Database): kind = 'ledger'
    Book(tmp_path/'l.db', {}).close()
    with pytest.raises(ValueError, match="has format '.* ledger 3', not '.* rollout store 3'"):
        RolloutStore(tmp_path/'l.db', SETTINGS)
    with pytest.raises(FileNotFoundError, match='run notebook 02'): RolloutStore(tmp_path/'none.db')
    assert not (tmp_path/'none.db').exists()

@dataclass(frozen=True)
class Mark:
    value: float
    digits: tuple = ()

def test_another_record_is_kept_exactly_and_an_older_one_is_one_line(tmp_path):
    marks = [Mark(.1), Mark(float('inf'), (1, .3))]
    with RolloutStore(tmp_path/'m.db', SETTINGS, record=Mark) as store:
        for i, mark in enumerate(marks): store.put(*key_of(i), mark)
    with RolloutStore(tmp_path/'m.db', readonly=True, record=Mark) as store:
        assert [store.get(*key_of(i)) for i in range(2)] == marks and store.settings == SETTINGS
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store: put_some(store, 1)
    with RolloutStore(tmp_path/'s.db', record=Mark) as store: # a step has no value
        with pytest.raises(ValueError, match=r's\.db holds records of another version \(.*value') as e:
            store.get(*key_of(0))
        assert '\n' not in str(e.value)

def test_a_field_that_a_record_had_once_is_left_out(tmp_path):
    @dataclass(frozen=True)
    class Former(Mark): rank: int = 0
    with RolloutStore(tmp_path/'m.db', SETTINGS, record=Former) as store: store.put(*key_of(0), Former(.5, (2,), 7))
    with RolloutStore(tmp_path/'m.db', record=Mark) as store: assert store.get(*key_of(0)) == Mark(.5, (2,))

OPEN = ('import sys; from stepwise_routing.base.store import RolloutStore; '
        's = RolloutStore(sys.argv[1], readonly=len(sys.argv) > 2); print(len(s))')

def opened(*args): return subprocess.run([sys.executable, '-c', OPEN, *map(str, args)], capture_output=True, text=True)

def test_one_writer_many_readers(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 3)
        second, reader = opened(path), opened(path, 'r')
        with RolloutStore(path, readonly=True) as beside:
            put_some(store, 1, 3)
            assert len(beside) == 4 and beside.get(*key_of(3)) == step_of(3)
            with pytest.raises(OSError, match='readonly database'): put_some(beside, 1, 4)
        assert opened(path).returncode == 1 # a reader that left took no lock with it
    line = 'is already open for writing, here or in another process'
    assert second.returncode == 1 and line in second.stderr.splitlines()[-1]
    assert reader.stdout == '3\n' and opened(path).stdout == '4\n'

def test_no_second_writer_in_the_same_process(tmp_path, monkeypatch):
    path, link = tmp_path/'s.db', tmp_path/'link.db'
    monkeypatch.chdir(tmp_path)
    with RolloutStore(path, SETTINGS) as store:
        link.symlink_to(path)
        for other in (path, str(path), 's.db', tmp_path/'.'/'deep'/'..'/'s.db', link):
            with pytest.raises(BlockingIOError, match='is already open for writing, here or in another process'):
                RolloutStore(other, SETTINGS)
        put_some(store, 1)
        assert opened(path).returncode == 1 # the refusals did not drop the lock
    for other in (link, 's.db'):
        with RolloutStore(other, SETTINGS) as store: assert len(store) == 1
    store = RolloutStore(path)
    del store # forgotten without being closed
    with RolloutStore(path) as store: assert len(store) == 1

LENT = '''
import sys; sys.path.insert(0, sys.argv[2])
from test_store import *
store = RolloutStore(sys.argv[1], SETTINGS, lent=True); print('open', flush=True); sys.stdin.readline()
for i in range(int(sys.argv[3]), int(sys.argv[3]) + 60): put_some(store, 1, i)
'''

def test_processes_write_side_by_side_to_a_store_that_was_lent_to_them(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        writers = [subprocess.Popen([sys.executable, '-c', LENT, path, HERE, str(start)], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, text=True) for start in (0, 30, 90)] # two write the same
        assert [w.stdout.readline() for w in writers] == ['open\n']*3
        with pytest.raises(BlockingIOError): RolloutStore(path, SETTINGS)
        for w in writers: w.stdin.write('go\n'); w.stdin.flush()
        for w in writers: w.communicate()
        assert [w.returncode for w in writers] == [0]*3 and sorted(store.keys()) == sorted(map(key_of, range(150)))
        assert all(store.get(*key_of(i)) == step_of(i) for i in range(150))
        with pytest.raises(ValueError, match='other settings'): RolloutStore(path, dict(other=1), lent=True)
    assert {p.name for p in tmp_path.iterdir()} == {'s.db', 's.db.lock'}

def test_an_empty_store_takes_other_settings_and_one_with_draws_does_not(tmp_path):
    path = tmp_path/'s.db'
    RolloutStore(path, SETTINGS).close()
    other = dict(SETTINGS, benchmark='other')
    with pytest.raises(ValueError, match='other settings'): RolloutStore(path, other, readonly=True)
    with RolloutStore(path, other) as store: put_some(store, 1, 0)
    with RolloutStore(path) as store: assert store.settings == other and len(store.rows('header')) == 1
    with pytest.raises(ValueError, match='benchmark is other there'): RolloutStore(path, SETTINGS)

def test_a_reader_that_stays_does_not_stop_a_writer(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store: put_some(store, 1)
    with RolloutStore(path, readonly=True) as reader:
        for i in range(1, 4):
            with RolloutStore(path, SETTINGS) as store: put_some(store, 1, i)
            assert len(reader) == i + 1
    with RolloutStore(path, readonly=True) as reader: assert reader.keys() == [key_of(i) for i in range(4)]

def test_threads_share_a_store(tmp_path, monkeypatch):
    monkeypatch.setattr('stepwise_routing.base.store.REMEMBERED', 3)
    wrong, before = [], sys.getswitchinterval()
    monkeypatch.setattr(threading, 'excepthook', wrong.append)
    def work(store, start):
        put_some(store, 20, start)
        for i in range(5000): store.remember((start, i), i)
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store:
        threads = [threading.Thread(target=work, args=(store, 20*i)) for i in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for t in threads: t.start()
            for t in threads: t.join()
        finally: sys.setswitchinterval(before)
        assert sorted(store.keys()) == sorted(key_of(i) for i in range(80))
    assert wrong == [] and len(store.recent) == 3

def test_a_closed_store_says_so(tmp_path):
    store = RolloutStore(tmp_path/'s.db', SETTINGS)
    store.close(); store.close()
    with pytest.raises(ValueError, match='closed'): len(store)

def test_a_full_disk_loses_nothing_that_was_stored(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 5)
        (pages,), = store.read('PRAGMA page_count')
        store.read(f'PRAGMA max_page_count={pages}')
        with pytest.raises(OSError, match=r's\.db cannot be used \(database or disk is full\)') as e:
            store.put_many((key_of(i), step_of(i)) for i in range(5, 500))
        assert '\n' not in str(e.value) and store.keys() == [key_of(i) for i in range(5)]
        store.read(f'PRAGMA max_page_count={1 << 20}') # room again
        put_some(store, 2, 5)
    with RolloutStore(path) as store: assert store.keys() == [key_of(i) for i in range(7)]

FULL = '''
import resource, sys; sys.path.insert(0, sys.argv[2])
from test_store import *
store = RolloutStore(sys.argv[1], SETTINGS)
put_some(store, 5)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    for i in range(5, 10**5): put_some(store, 1, i); print(i, flush=True)
except OSError as e: print(e, flush=True)
store.close()
'''

@pytest.mark.skipif(sys.platform == 'win32', reason='no resource limits')
def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    path = tmp_path/'s.db'
    child = subprocess.run([sys.executable, '-c', FULL, path, HERE], capture_output=True, text=True)
    *put, line = child.stdout.splitlines()
    assert child.returncode == 0 and 's.db cannot be used' in line and int(put[-1]) > 20, child.stderr
    n = int(put[-1]) + 1
    with RolloutStore(path) as store: assert store.keys()[:n] == [key_of(i) for i in range(n)]

WRITE = '''
import sys; sys.path.insert(0, sys.argv[2])
from test_store import *
store = RolloutStore(sys.argv[1], SETTINGS); print(len(store), flush=True)
for i in range(len(store), 10**6): put_some(store, 1, i); print(i, flush=True)
'''

@pytest.mark.skipif(sys.platform == 'win32', reason='no SIGKILL')
def test_nothing_that_was_put_is_lost_to_kill_9(tmp_path):
    path, r = tmp_path/'s.db', random.Random(0)
    for _ in range(3):
        p = subprocess.Popen([sys.executable, '-c', WRITE, path, HERE], stdout=subprocess.PIPE, text=True)
        for _ in range(2): first = p.stdout.readline() # its length, and a put
        time.sleep(r.uniform(.005, .05)); p.send_signal(signal.SIGKILL)
        printed = (first + p.stdout.read()).split('\n')[:-1]; p.wait(); p.stdout.close()
        with RolloutStore(path, readonly=True) as store:
            n = len(store)
            assert n >= int(printed[-1]) + 1 and store.keys() == [key_of(i) for i in range(n)]
            assert all(store.get(*key_of(i)) == step_of(i) for i in range(n))

@pytest.mark.skipif(sys.platform == 'win32', reason='no SIGKILL')
def test_a_copy_of_a_closed_store_can_be_read_where_nothing_can_be_written(tmp_path):
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store: put_some(store, 3)
    folder = tmp_path/'readonly'
    folder.mkdir()
    shutil.copy(tmp_path/'s.db', folder/'s.db')
    (folder/'s.db').chmod(0o444); folder.chmod(0o555)
    try:
        with RolloutStore(folder/'s.db', readonly=True) as store: assert len(store) == 3
    finally: folder.chmod(0o755)

def test_opening_reads_no_edges(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 1)
        store.read("UPDATE edge SET step = 'damaged'")
    with RolloutStore(path, SETTINGS) as store: assert store.keys() == [key_of(0)]
