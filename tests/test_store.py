"What was drawn or paid for is kept bit for bit, once, in files that are killed, full, or opened again."

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fake_api import PROBLEMS, WHOLE, FakeAPI, chain_of, open_fake
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwise_routing.records import Step
from stepwise_routing.store import Replies, Store, settings_difference

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
    entropy=st.none() | numbers,
)


def key_of(i):
    return f'p{i}', 0, '0' * (i % 3), i % 2


def step_of(i):
    return Step(f'step {i} \u2260 \n', i % 2, 'step', (i,), (3,), (0.1 * i,), None, 1, 10 + i)


def put_some(store, n, start=0):
    store.put_many((key_of(i), step_of(i)) for i in range(start, start + n))


# ---- drawn steps


@given(steps)
def test_a_row_keeps_a_step_exactly(tmp_path_factory, step):
    with Store(tmp_path_factory.mktemp('s') / 's.db', SETTINGS) as store:
        store.put_many([(('p', 0, '01', 1), step)])
        back = store.get('p', 0, '01', 1)
    assert back == step
    assert repr(back) == repr(step)


def test_the_first_draw_is_kept_and_a_batch_is_kept_whole_or_not_at_all(tmp_path):
    path = tmp_path / 'deep' / 's.db'
    with Store(path, SETTINGS) as store:
        put_some(store, 5)
        old = store.get(*key_of(1))
        store.put_many([(key_of(1), replace(old, text='another draw')), (key_of(5), step_of(5))])
        assert store.get('p1', 1, '0', 1) is None
        with pytest.raises(AttributeError):
            store.put_many([(key_of(6), step_of(6)), (key_of(7), replace(old, ends=(set(),)))])
    for options in (dict(), dict(settings=SETTINGS)):
        with Store(path, **options) as store:
            assert store.get(*key_of(1)) == old
            assert store.settings == SETTINGS
            assert store.keys() == [key_of(i) for i in range(6)]
    with pytest.raises(FileNotFoundError, match='draw steps first'):
        Store(tmp_path / 'none.db')


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
        with pytest.raises(ValueError) as error:
            Store(path, SETTINGS | change)
        line = str(error.value)
        assert field in line
        assert str(path) in line
        assert '\n' not in line
    # equal in Python, not in JSON
    assert settings_difference(dict(a=1), dict(a=True)) == ('settings.a', 1, True)


# ---- a full disk, a kill


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


WRITE = """
import sys; sys.path[:0] = sys.argv[2:]
from test_store import *
store = Store(sys.argv[1], SETTINGS)
print(len(store), flush=True)
for i in range(len(store), 10**6): put_some(store, 1, i); print(i, flush=True)
"""


def test_nothing_that_was_put_is_lost_to_kill_9(tmp_path):
    path, rng = tmp_path / 's.db', random.Random(0)
    command = [sys.executable, '-c', WRITE, path, HERE, HERE / 'helpers']
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # its length
        first = process.stdout.readline()
        time.sleep(rng.uniform(0.005, 0.05))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        *_, last, _ = (first + out).split('\n')
        with Store(path) as store:
            n = len(store)
            assert n > int(last)
            assert store.keys() == [key_of(i) for i in range(n)]
            assert all(store.get(*key_of(i)) == step_of(i) for i in range(n))


# ---- paid replies


class PaidReplies(RuleBasedStateMachine):
    "Whatever is asked, fails, or is opened again: nothing is paid twice, and no call begins at the cap."

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.server = FakeAPI(PROBLEMS[:6]).__enter__()
        self.open(cents=0.03)
        self.model = open_fake(self.server.url, self.replies, concurrency=1, retries=0)

    @rule(cents=st.sampled_from([0.01, 0.03, 0.06, 1]))
    def open(self, cents):
        "A new process, with the same cap or another one."
        self.replies = Replies(Path(self.folder.name) / 'replies.db', cents)

    @rule(places=st.lists(st.integers(0, 5), min_size=1), fault=st.sampled_from(['', '', '500']))
    def ask(self, places, fault):
        self.server.fault, self.model.replies = fault, self.replies
        kept = len(self.replies)
        is_open = self.replies.spent < self.replies.max_cents
        before = len(self.server.bodies)
        try:
            chains = self.model.write([WHOLE[place] for place in places])
        except RuntimeError as error:
            is_at_cap = f'the cap of {self.replies.max_cents:g} cents is reached' in str(error)
            assert is_at_cap or fault
        else:
            for place, chain in zip(places, chains):
                assert [step.text for step in chain] == chain_of(PROBLEMS[place])
        if not is_open:
            assert len(self.server.bodies) == before
        if fault:
            assert len(self.replies) == kept

    @invariant()
    def each_call_is_paid_once_and_counted(self):
        assert self.server.paid == Counter(dict.fromkeys(self.server.paid, 1))
        assert len(self.replies) == len(self.server.paid)
        assert self.replies.spent == pytest.approx(self.server.cents)

    def teardown(self):
        self.server.__exit__()
        self.folder.cleanup()


PaidReplies.TestCase.settings = settings(max_examples=10, stateful_step_count=10)
test_paid_replies = PaidReplies.TestCase
