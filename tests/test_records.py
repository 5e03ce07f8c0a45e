"Boxes, seeds and prices; files that are written whole."

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stepwise_routing.records import PRICES, boxed, edge_seed, find_price, token_cents, undated
from stepwise_routing.util import write_file

BOXES = list(csv.DictReader(open(Path(__file__).parent / 'data' / 'boxes.csv', encoding='utf-8')))


def test_the_answer_of_a_step():
    "The last box that is neither blank nor the question's, with those that belong to it."
    wrong = [row for row in BOXES if (boxed(row['text'], row['question']) or '') != row['answer']]
    assert wrong == []


@given(st.text(), st.text('ab01+ '), st.integers(0, 5), st.text('ab{}$ .'))
def test_a_complete_box_is_found_whatever_surrounds_it(before, content, depth, after):
    content = '{' * depth + content + '1' + '}' * depth
    assert boxed(before.replace('\\', '') + rf'\boxed{{{content}}}' + after) == content.strip()


def test_edge_seeds_depend_on_every_part_and_on_nothing_else():
    base = 'gsm8k', 'p1', 0, '00', 1
    changes = enumerate(('math500', 'p2', 1, '000', 0))
    others = [(*base[:i], value, *base[i + 1 :]) for i, value in changes]
    seeds = [edge_seed(*parts) for parts in [base, *others, ('gsm8k', 'p10', 0, '0', 1)]]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    code = f'import sys; from stepwise_routing.records import *; print(edge_seed(*{base!r}), *sys.modules)'
    elsewhere = os.environ | dict(PYTHONHASHSEED='7')
    seed, *modules = subprocess.check_output([sys.executable, '-c', code], env=elsewhere).split()
    assert int(seed) == seeds[0]
    assert not {b'torch', b'numpy', b'pandas', b'sympy', b'transformers', b'fastcore'} & {*modules}


def test_the_paper_s_prices():
    "GPT-4.1-mini: .40, .10 and 1.60 dollars a million tokens, in cents."
    million = 10**6
    assert token_cents('gpt-4.1-mini', million, 0, 0) == pytest.approx(40)
    assert token_cents('gpt-4.1-mini', million, million, 0) == pytest.approx(10)
    assert token_cents('gpt-4.1-mini', 0, 0, million) == pytest.approx(160)
    assert find_price('0.4/0.1/1.6')[:3] == PRICES[undated('gpt-4.1-mini-2025-04-14')][:3]
    with pytest.raises(ValueError, match=r"did you mean 'gpt-4.1-mini'"):
        find_price('gpt-4.1-mni')


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    there = tmp_path / 'out' / 'a.txt'
    write_file(there, 'new')
    monkeypatch.setattr(os, 'fsync', lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_file(there, 'newer')
    assert there.read_text() == 'new' and [*there.parent.iterdir()] == [there]
