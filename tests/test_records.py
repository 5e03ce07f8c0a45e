"Boxes, steps, seeds and prices; and small helpers: files, coroutines."

import asyncio
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.records import (
    PRICES,
    Step,
    edge_seed,
    extract_boxed,
    find_price,
    split_steps,
    token_cents,
    token_flops,
    undated,
)
from stepwise_routing.util import run_async, write_file

# ---- steps and boxes
BOXES = [
    (r'\boxed{ 5 }', '5'),
    (r'\boxed {5}', '5'),
    (r'\fbox{5}', '5'),
    (r'\boxed{\frac{1}{\sqrt{2}}}', r'\frac{1}{\sqrt{2}}'),
    (r'\boxed{1} then \boxed{2}', '2'),
    (r'\boxed{1} then \boxed{2', '1'),
    (r'\boxed{\boxed{3}}', '3'),
    (r'\boxed{1', None),
    ('no box', None),
    (r'\boxed{\{1,2\}}', r'\{1,2\}'),
    (r'\boxed{\left\{ x \right.}', r'\left\{ x \right.'),
    (r'{ \boxed{4} ', '4'),
    (r'} \boxed{4}', '4'),
    (r'\boxed', None),
    (r'\boxed 2$.', '2'),
    (r'\boxed{}', ''),
    (r'\boxed{a}{b}', 'a'),
    (r'x\\{\boxed{6}}', '6'),
    (r'\unboxed{5}', None),
]


def test_the_last_complete_box_is_the_answer():
    for text, boxed in BOXES:
        assert extract_boxed(text) == boxed, text


braced = lambda s: st.tuples(s, s, s).map(lambda t: t[0] + '{' + t[1] + '}' + t[2])
balanced = st.recursive(st.text('ab01+ ', max_size=5), braced, max_leaves=12)


@settings(deadline=None)
@given(
    st.text(max_size=30).filter(lambda s: '\\' not in s), balanced, st.text('ab{}$ .', max_size=20)
)
def test_a_complete_box_is_found_whatever_surrounds_it(before, content, after):
    assert extract_boxed(before + r'\boxed{' + content + '}' + after) == content.strip()


def test_boxes_take_linear_time():
    for text in (r'\boxed{' * 150_000, '{' * 10**6, r'\boxed' + ' ' * 10**6, '\\' * 10**6):
        extract_boxed(text)


@given(
    st.lists(st.text('ab c.\n').map(lambda s: ' '.join(s.split())).filter(bool), max_size=6),
    st.integers(1, 3),
)
def test_steps_survive_joining(steps, breaks):
    assert split_steps('\n\n' * breaks + ('\n\n' * breaks).join(steps) + '\n') == steps
    assert split_steps('a\r\n\r\nb') == ['a', 'b']


def test_a_step_is_final_when_it_ends_or_holds_a_box():
    assert not Step('a', 0, 'step').final
    assert (
        Step('a', 0, 'stop').final
        and Step('a', 0, 'length').final
        and Step(r'\boxed{1}', 0, 'step').final
    )
    assert not Step(r'\boxed{1', 0, 'step').final


# ---- names, seeds, prompts
def test_edge_seeds_depend_on_every_part_and_on_nothing_else():
    base = ('gsm8k', 'p1', 0, '00', 1)
    others = [
        ('math500', 'p1', 0, '00', 1),
        ('gsm8k', 'p2', 0, '00', 1),
        ('gsm8k', 'p1', 1, '00', 1),
        ('gsm8k', 'p1', 0, '000', 1),
        ('gsm8k', 'p1', 0, '00', 0),
        ('gsm8k', 'p10', 0, '0', 1),
    ]
    seeds = [edge_seed(*a) for a in [base, *others]]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)
    code = f'from stepwise_routing.records import edge_seed; print(edge_seed(*{base!r}))'
    run = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONHASHSEED': '7'},
        capture_output=True,
        text=True,
    )
    assert int(run.stdout) == seeds[0]


# ---- prices
def test_the_paper_s_prices():
    "GPT-4.1-mini: .40, .10 and 1.60 dollars a million tokens, in cents."
    million = 10**6
    assert token_cents('gpt-4.1-mini', million, 0, 0) == pytest.approx(40)
    assert token_cents('gpt-4.1-mini', million, million, 0) == pytest.approx(10)
    assert token_cents('gpt-4.1-mini', 0, 0, million) == pytest.approx(160)
    assert token_flops(1.5e9, 324) == 0.972e12  # the paper's Table 1: 1.5B only, GSM8K


def test_a_price_is_a_row_or_three_numbers():
    assert find_price('0.4/0.1/1.6')[:3] == PRICES[undated('gpt-4.1-mini-2025-04-14')][:3]
    with pytest.raises(ValueError, match=r"did you mean 'gpt-4.1-mini'"):
        find_price('gpt-4.1-mni')


def test_import_is_light():
    heavy = 'torch', 'numpy', 'pandas', 'sympy', 'transformers', 'datasets', 'fastcore'
    code = f'import sys; import stepwise_routing.records; print([m for m in {heavy} if m in sys.modules])'
    assert (
        subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()
        == '[]'
    )


# ---- helpers
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    there = tmp_path / 'out' / 'a.txt'
    write_file(there, 'new')

    def full(*_):
        raise OSError('disk full')

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError):
        write_file(there, 'newer')
    assert there.read_text() == 'new' and [*there.parent.iterdir()] == [there]


def test_run_async_inside_and_outside_a_loop():
    async def answer():
        await asyncio.sleep(0)
        return 42

    async def fail():
        raise KeyError('inside')

    async def main():
        return run_async(answer())

    assert run_async(answer()) == 42 and asyncio.run(main()) == 42
    with pytest.raises(KeyError, match='inside'):
        run_async(fail())


def test_an_interrupt_in_a_running_loop_ends_the_work():
    code = '''
import asyncio, os, signal, threading, time
from stepwise_routing.util import run_async
ended = []
async def long():
    try: await asyncio.sleep(60)
    finally: ended.append(True)
async def cell(): return run_async(long())
threading.Timer(.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
try: asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt: print('interrupted', ended)
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=40)
    assert done.stdout.strip() == 'interrupted [True]', done.stderr[-300:]
