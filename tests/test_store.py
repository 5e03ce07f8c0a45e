"The store: what was put comes back bit for bit, from a file that may be killed, filled up or opened twice."
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from toy_models import f32

from stepwise_routing.records import Step
from stepwise_routing.store import Database, RolloutStore, settings_difference

HERE = Path(__file__).parent
SETTINGS = dict(benchmark='toy', models=[dict(spec=dict(name='m', params=1, price=None), temperature=.7)])

numbers = st.floats(allow_nan=False, allow_infinity=True)
steps = st.builds(Step, text=st.text(st.characters(), max_size=40), model=st.integers(0, 9),
                  finish=st.sampled_from(['step', 'stop', 'length']), ids=st.lists(st.integers(0, 2**40)).map(tuple),
                  ends=st.lists(st.integers(0, 2**31)).map(tuple), prob=st.lists(numbers).map(tuple),
                  max_logit=st.none() | st.lists(numbers).map(tuple),
                  generated=st.integers(0, 10**6), prompt=st.integers(0, 10**6), cached=st.integers(0, 10**6))

def put_some(store, n, start=0):
    for i in range(start, start + n): store.put(*key_of(i), step_of(i))

def key_of(i): return f'p{i}', 0, '0'*(i % 3), i % 2

def step_of(i): return Step(f'step {i} \u2260 \n', i % 2, 'step', (i,), (3,), (f32(.1*i),), None, 1, 10 + i)

@pytest.fixture(scope='module')
def memory():
    "A store that is no file."
    store = RolloutStore.__new__(RolloutStore)
    Database.__init__(store, None, {})
    return store

@given(steps)
def test_a_row_keeps_a_step_exactly(memory, step):
    memory.recent = {}
    memory.read('DELETE FROM edge')
    memory.put('p', 0, '01', step.model, step)
    for remembered in (memory.recent, {}): # the step that was put, and the row
        memory.recent = remembered
        back = memory.get('p', 0, '01', step.model)
        assert back == step and repr(back) == repr(step)

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
    store.close()
    with pytest.raises(ValueError, match='closed'): len(store)

def test_a_batch_is_kept_whole_or_not_at_all(tmp_path):
    with RolloutStore(tmp_path/'s.db', SETTINGS) as store:
        put_some(store, 1)
        with pytest.raises(AttributeError): # no number
            store.put_many([(key_of(1), step_of(1)), (key_of(2), replace(step_of(2), ends=(set(),)))])
        assert store.keys() == [key_of(0)]
        store.put_many([(key_of(1), step_of(1)), (key_of(1), step_of(9))])
        store.recent = {} # what is there already is not put, and not remembered
        store.put(*key_of(1), step_of(9))
        assert store.recent == {} and store.get(*key_of(1)) == step_of(1) and len(store) == 2

def test_other_settings_are_refused_in_one_line_and_an_empty_store_takes_them(tmp_path):
    path = tmp_path/'s.db'
    RolloutStore(path, dict(other=1)).close()
    with pytest.raises(ValueError, match='other settings'): RolloutStore(path, SETTINGS, readonly=True)
    with RolloutStore(path, SETTINGS) as store: put_some(store, 1)
    for change, field in ((dict(benchmark='gsm8k'), 'settings.benchmark is toy there'),
                          (dict(more=1), 'settings.more'), (dict(models=[]), 'settings.models'),
                          (dict(models=[dict(SETTINGS['models'][0], temperature=1.)]), '.models[0].temperature')):
        with pytest.raises(ValueError) as e: RolloutStore(path, {**SETTINGS, **change})
        assert field in str(e.value) and str(path) in str(e.value) and '\n' not in str(e.value)
    with RolloutStore(path) as store: assert store.settings == SETTINGS and len(store.rows('header')) == 1
    assert settings_difference(dict(a=1), dict(a=True)) == ('settings.a', 1, True) # equal in Python, not in JSON

def test_another_file_is_left_alone(tmp_path):
    path = tmp_path/'notes.txt'
    for text in ('my notes', 'long\n'*3000):
        path.write_text(text)
        with pytest.raises(ValueError, match='notes.txt is damaged or of another kind'): RolloutStore(path, SETTINGS)
        assert path.read_text() == text
    path.write_text('')
    with pytest.raises(ValueError, match='is empty: draw again'): RolloutStore(path)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute('CREATE TABLE header (a)'); other.commit(); other.close()
    with pytest.raises(ValueError, match="has format 'unknown'"): RolloutStore(path, SETTINGS)
    class Book(Database): kind = 'ledger'
    Book(tmp_path/'l.db', {}).close()
    with pytest.raises(ValueError, match="has format '.* ledger 3', not '.* rollout store 3'"):
        RolloutStore(tmp_path/'l.db', SETTINGS)
    with pytest.raises(FileNotFoundError, match='run notebook 02'): RolloutStore(tmp_path/'none.db')

@dataclass(frozen=True)
class Mark:
    value: float
    digits: tuple = ()

@dataclass(frozen=True)
class Former(Mark): rank: int = 0

def test_another_record_is_kept_exactly_also_one_that_lost_a_field(tmp_path):
    marks = [Mark(.1), Mark(float('inf'), (1, .3))]
    with RolloutStore(tmp_path/'m.db', SETTINGS, record=Former) as store:
        for i, mark in enumerate(marks): store.put(*key_of(i), Former(mark.value, mark.digits, 7))
    with RolloutStore(tmp_path/'m.db', readonly=True, record=Mark) as store:
        assert [store.get(*key_of(i)) for i in range(2)] == marks
    with RolloutStore(tmp_path/'m.db') as store: # a step has a text
        with pytest.raises(ValueError, match=r'm\.db holds records of another version \(.*text'): store.get(*key_of(0))

def test_files_with_checksums_of_version_0_3_are_read_and_written(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 2)
        for table in ('edge', 'header'): store.read(f'ALTER TABLE {table} ADD COLUMN crc')
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 2, 1)
        assert store.settings == SETTINGS and [store.get(*key_of(i)) for i in range(3)] == list(map(step_of, range(3)))

# ---- writers and readers

OPEN = ('import sys; from stepwise_routing.store import RolloutStore; '
        's = RolloutStore(sys.argv[1], readonly=len(sys.argv) > 2); print(len(s))')

def opened(*args): return subprocess.run([sys.executable, '-c', OPEN, *map(str, args)], capture_output=True, text=True)

def test_one_writer_many_readers(tmp_path):
    path, link, line = tmp_path/'s.db', tmp_path/'link.db', 'is already open for writing, here or in another process'
    with RolloutStore(path, SETTINGS) as store:
        put_some(store, 3)
        second, reader = opened(path), opened(path, 'r')
        link.symlink_to(path)
        for same in (path, link):
            with pytest.raises(BlockingIOError, match=line): RolloutStore(same, SETTINGS)
        with RolloutStore(path, readonly=True) as beside:
            put_some(store, 1, 3)
            assert len(beside) == 4 and beside.get(*key_of(3)) == step_of(3)
            with pytest.raises(OSError, match='readonly database'): put_some(beside, 1, 4)
        assert opened(path).returncode == 1 # neither readers nor refusals dropped the lock
    assert second.returncode == 1 and line in second.stderr.splitlines()[-1]
    assert reader.stdout == '3\n' and opened(path).stdout == '4\n'
    store = RolloutStore(path)
    del store # forgotten without being closed
    with RolloutStore(path, readonly=True) as reader: # that stays
        for i in range(4, 6):
            with RolloutStore(path, SETTINGS) as store: put_some(store, 1, i)
            assert len(reader) == i + 1

CHILD = '''
import sys; sys.path[:0] = sys.argv[2:4]
from test_store import *
'''

def child(code, path, **kwargs):
    args = [sys.executable, '-c', CHILD + code, str(path), str(HERE), str(HERE/'helpers')]
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True, **kwargs)

LENT = '''
store = RolloutStore(sys.argv[1], SETTINGS, lent=True); print('open', flush=True); start = int(sys.stdin.readline())
for i in range(start, start + 60): put_some(store, 1, i)
'''

def test_processes_write_side_by_side_to_a_store_that_was_lent_to_them(tmp_path):
    path = tmp_path/'s.db'
    with RolloutStore(path, SETTINGS) as store:
        writers = [child(LENT, path, stdin=subprocess.PIPE) for _ in range(3)]
        assert [w.stdout.readline() for w in writers] == ['open\n']*3
        for w, start in zip(writers, (0, 30, 90)): w.stdin.write(f'{start}\n'); w.stdin.flush() # two write the same
        for w in writers: w.communicate()
        assert [w.returncode for w in writers] == [0]*3 and sorted(store.keys()) == sorted(map(key_of, range(150)))
        assert all(store.get(*key_of(i)) == step_of(i) for i in range(150))

def test_threads_share_a_store_and_its_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr('stepwise_routing.store.REMEMBERED', 3)
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

# ---- a full disk, a kill

def test_a_full_disk_is_one_line_and_loses_nothing_that_was_stored(tmp_path):
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

WRITE = '''
store = RolloutStore(sys.argv[1], SETTINGS); print(len(store), flush=True)
for i in range(len(store), 10**6): put_some(store, 1, i); print(i, flush=True)
'''

@pytest.mark.skipif(sys.platform == 'win32', reason='no SIGKILL')
def test_nothing_that_was_put_is_lost_to_kill_9(tmp_path):
    path, r = tmp_path/'s.db', random.Random(0)
    for _ in range(2):
        p = child(WRITE, path)
        for _ in range(2): first = p.stdout.readline() # its length, and a put
        time.sleep(r.uniform(.005, .05)); p.send_signal(signal.SIGKILL)
        printed = (first + p.stdout.read()).split('\n')[:-1]; p.wait(); p.stdout.close()
        with RolloutStore(path, readonly=True) as store:
            n = len(store)
            assert n >= int(printed[-1]) + 1 and store.keys() == [key_of(i) for i in range(n)]
            assert all(store.get(*key_of(i)) == step_of(i) for i in range(n))
