"Grading: labelled pairs, numbers by value, and what a model may write without harm."

import csv
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from hypothesis import given, strategies as st

from stepwise_routing.data import grading
from stepwise_routing.data.grading import is_equivalent
from stepwise_routing.records import boxed

PAIRS = list(csv.DictReader(open(Path(__file__).parent / 'data' / 'answers.csv', encoding='utf-8')))


def test_labelled_pairs():
    "What is different is so in both directions."
    for row in PAIRS:
        pair = row['reference'], row['answer']
        is_same = is_equivalent(*pair) or row['same'] == '0' and is_equivalent(*pair[::-1])
        assert is_same == int(row['same']), pair


@given(st.integers(-(10**6), 10**6), st.integers(1, 1000), st.integers(1, 50))
def test_numbers_are_graded_by_value(a, b, k):
    assert is_equivalent(rf'\frac{{{a}}}{{{b}}}', f'{k * a}/{k * b}')
    assert not is_equivalent(rf'\dfrac{{{a}}}{{{b}}}', f'{k * a + 1}/{k * b}')
    assert is_equivalent(f'{a:,}', str(a)) and not is_equivalent(f'{a:,}', str(a + b))


IMPATIENT = '''
import sys
sys.path.insert(0, sys.argv[1])
import grading
grading.math_verify('x+1', '1+x')  # loads everything
grading.SECONDS = 1
grading.serve()
'''


@lru_cache(1)
def judge():
    "A process that gives a pair one second, not five."
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    command = [sys.executable, '-c', IMPATIENT, Path(grading.__file__).parent]
    return subprocess.Popen(command, text=True, **pipes)


def test_what_takes_minutes_or_kills_the_process_is_wrong_and_grading_goes_on(monkeypatch):
    monkeypatch.setattr(grading, 'judge', judge)
    assert is_equivalent('2x', 'x+x')
    process = judge()
    assert not is_equivalent('1', '10^{10^{10}}')
    assert process.returncode and is_equivalent('3x', 'x+2x')
    judge().kill()
    judge().wait()
    assert not is_equivalent('x+3', '3+x') and is_equivalent('x+2', '2+x')
    judge().kill()


CODE = (
    "__import__('os').system('touch CANARY')",
    "exec(\"open('CANARY','w')\")",
    r"\text{__import__('os').system('touch CANARY')}",
    r'\{x \mid x > __import__("pathlib").Path("CANARY").touch()\}',
    r'\write18{touch CANARY}',
    '1;import os;os.abort()',
)


def test_nothing_that_a_model_wrote_is_executed(tmp_path):
    for code in CODE:
        text = code.replace('CANARY', str(tmp_path / 'canary'))
        assert not is_equivalent(r'\frac{x}{2}', text) and not is_equivalent(text, '3')
    assert is_equivalent('y+1', '1+y') and not list(tmp_path.iterdir())


PARTS = r'{ } \{x| \boxed{1} \phantom{ \ your_ \text{ 1,'.split()
TEXTS = [part * (200_000 // len(part)) for part in PARTS] + [r'\boxed{' * 150_000, ' ' * 10**6]
TEXTS += ['\x00\x1b[31m', '\ud800 x', '\n\\\n' * 600, '🙂' * 1999, '٣' * 900, '1e999999999']


def test_odd_and_endless_answers_are_graded_at_once():
    for text in TEXTS:
        assert not is_equivalent('x', text) and not is_equivalent(text, 'x')
        boxed(rf'\boxed{{{text}}}', question=text), boxed(rf'\boxed{{1}}{text}\boxed{{2}}')
