"The store: what was put comes back bit for bit, from a file that is shared, killed or on a full disk."

import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stepwise_routing.records import Step
from stepwise_routing.store import Store, settings_difference

HERE = Path(__file__).parent
MODEL = dict(spec=dict(name='m', params=1, price=None), temperature=0.7)
SETTINGS = dict(benchmark='toy', models=[MODEL])

numbers = st.floats(allow_nan=False, allow_infinity=True)
steps = st.builds(
    Step,
    text=st.text(st.characters(), max_size=40),
    model=st.integers(0, 9),
    finish=st.sampled_from(['step', 'stop', 'length']),
    ids=st.lists(st.integers(0, 2**40)).map(tuple),
    ends=st.lists(st.integers(0, 2**31)).map(tuple),
    prob=st.lists(numbers).map(tuple),
    max_logit=st.none() | st.lists(numbers).map(tuple),
    generated=st.integers(0, 10**6),
    prompt=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
    entropy=st.none() | numbers,
)


def key_of(i):
    return f'p{i}', 0, '0' * (i % 3), i % 2


def step_of(i):
    return Step(f'step {i} \u2260 \n', i % 2, 'step', (i,), (3,), (0.1 * i,), None, 1, 10 + i)


def put_some(store, n, start=0):
    store.put_many((key_of(i), step_of(i)) for i in range(start, start + n))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('store')


@given(steps)
def test_a_row_keeps_a_step_exactly(folder, step):
    with Store(folder / 's.db', SETTINGS) as store:
        store.db.execute('DELETE FROM edge')
        store.put_many([(('p', 0, '01', 1), step)])
        back = store.get('p', 0, '01', 1)
    assert back == step and repr(back) == repr(step)


def test_the_first_draw_is_kept(tmp_path):
    path = tmp_path / 'deep' / 's.db'
    with Store(path, SETTINGS) as store:
        put_some(store, 5)
        old = store.get(*key_of(1))
        store.put_many([(key_of(1), replace(old, text='another draw')), (key_of(5), step_of(5))])
        assert store.get(*key_of(1)) == old and len(store) == 6
        assert store.get('p1', 1, '0', 1) is None
    for options in (dict(), dict(settings=SETTINGS)):
        with Store(path, **options) as store:
            assert store.get(*key_of(1)) == old and store.settings == SETTINGS
            assert store.keys() == [key_of(i) for i in range(6)]
    with pytest.raises(FileNotFoundError, match='draw steps first'):
        Store(tmp_path / 'none.db')


def test_a_batch_is_kept_whole_or_not_at_all(tmp_path):
    with Store(tmp_path / 's.db', SETTINGS) as store:
        put_some(store, 1)
        broken = replace(step_of(2), ends=(set(),))
        with pytest.raises(AttributeError):
            store.put_many([(key_of(1), step_of(1)), (key_of(2), broken)])
        assert store.keys() == [key_of(0)]


def test_other_settings_are_refused_in_one_line_and_an_empty_store_takes_them(tmp_path):
    path = tmp_path / 's.db'
    Store(path, dict(other=1)).close()
    with Store(path, SETTINGS) as store:
        put_some(store, 1)
    for change, field in (
        (dict(benchmark='gsm8k'), 'settings.benchmark is toy there and gsm8k here'),
        (dict(more=1), 'settings.more is missing there'),
        (dict(models=[]), 'settings.models'),
        (dict(models=[MODEL | dict(temperature=1.0)]), '.models[0].temperature is 0.7 there'),
    ):
        with pytest.raises(ValueError) as e:
            Store(path, SETTINGS | change)
        assert field in str(e.value) and str(path) in str(e.value) and '\n' not in str(e.value)
    with Store(path) as store:
        assert store.settings == SETTINGS and len(store) == 1
    # equal in Python, not in JSON
    assert settings_difference(dict(a=1), dict(a=True)) == ('settings.a', 1, True)


@dataclass(frozen=True)
class Mark:
    value: float
    digits: tuple = ()


def test_another_record_is_kept_exactly(tmp_path):
    marks = [Mark(0.1), Mark(float('inf'), (1, 0.3))]
    with Store(tmp_path / 'm.db', SETTINGS, record=Mark) as store:
        store.put_many((key_of(i), mark) for i, mark in enumerate(marks))
        assert [store.get(*key_of(i)) for i in range(2)] == marks


# ---- several processes, a full disk, a kill
CHILD = '''
import sys; sys.path[:0] = [sys.argv[2]]
from test_store import *
store = Store(sys.argv[1], SETTINGS)
'''


def child(code, path, **options):
    command = [sys.executable, '-c', CHILD + code, str(path), str(HERE)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


SIDE_BY_SIDE = '''
print('open', flush=True); start = int(sys.stdin.readline())
for i in range(start, start + 60): put_some(store, 1, i)
'''


def test_processes_write_side_by_side(tmp_path):
    path = tmp_path / 's.db'
    with Store(path, SETTINGS) as store:
        put_some(store, 1, 149)
        writers = [child(SIDE_BY_SIDE, path, stdin=subprocess.PIPE) for _ in range(3)]
        assert [w.stdout.readline() for w in writers] == ['open\n'] * 3
        for writer, start in zip(writers, (0, 30, 90)):  # two write the same
            writer.stdin.write(f'{start}\n')
            writer.stdin.flush()
        for writer in writers:
            writer.communicate()
        assert [w.returncode for w in writers] == [0] * 3
        assert sorted(store.keys()) == sorted(map(key_of, range(150)))
        assert all(store.get(*key_of(i)) == step_of(i) for i in range(150))


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path):
    path = tmp_path / 's.db'
    with Store(path, SETTINGS) as store:
        put_some(store, 5)
        (pages,) = store.db.execute('PRAGMA page_count').fetchone()
        store.db.execute(f'PRAGMA max_page_count={pages}')
        with pytest.raises(sqlite3.OperationalError, match='full'):
            put_some(store, 500, 5)
        assert store.keys() == [key_of(i) for i in range(5)]
        store.db.execute(f'PRAGMA max_page_count={1 << 20}')  # room again
        put_some(store, 2, 5)
    with Store(path) as store:
        assert store.keys() == [key_of(i) for i in range(7)]


WRITE = '''
print(len(store), flush=True)
for i in range(len(store), 10**6): put_some(store, 1, i); print(i, flush=True)
'''


@pytest.mark.skipif(sys.platform == 'win32', reason='no SIGKILL')
def test_nothing_that_was_put_is_lost_to_kill_9(tmp_path):
    path, rng = tmp_path / 's.db', random.Random(0)
    for _ in range(2):
        process = child(WRITE, path)
        for _ in range(2):
            first = process.stdout.readline()  # its length, and a put
        time.sleep(rng.uniform(0.005, 0.05))
        process.send_signal(signal.SIGKILL)
        printed = (first + process.stdout.read()).split('\n')[:-1]
        process.wait()
        process.stdout.close()
        with Store(path) as store:
            n = len(store)
            assert n >= int(printed[-1]) + 1 and store.keys() == [key_of(i) for i in range(n)]
            assert all(store.get(*key_of(i)) == step_of(i) for i in range(n))
