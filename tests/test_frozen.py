"The held-out micro problems are new, alike in both splits, and drawn after everything else was fixed."
import json

import pytest
from micro_world.drafts import micro_problems
from micro_world.ship import HELD_OUT, TOGETHER, drawn_problems, level_counts

from stepwise_routing.base.tools import PACKAGE
from stepwise_routing.data import frozen as receipts
from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.data.frozen import read_frozen

ROOT = PACKAGE.parent

def test_the_receipt_stands_under_the_tables():
    frozen = read_frozen()
    assert json.loads((ROOT/'tables'/'frozen.json').read_text())['commit'] == frozen.commit
    for name in ('table1', 'table2', 'full'):
        assert frozen.sentence in (ROOT/'tables'/f'{name}.md').read_text()

def test_held_out_problems_are_new():
    "None of them was in the calibration or test set of an earlier seed, or is in another split."
    assert read_frozen().test_seed >= TOGETHER
    for b in MICRO:
        held_out = {p.id for split in HELD_OUT for p in load_problems(b, split, 1000)}
        assert len(held_out) == 2000 and not held_out & {p.id for p in load_problems(b, 'train', 1000)}
        earlier = {p.id for i in range(TOGETHER) for p in micro_problems(b, 'test', 1000, i)}
        earlier |= {p.id for p in micro_problems(b, 'calibration', 1000)}
        assert not held_out & earlier

def test_calibration_and_test_problems_are_alike():
    "A promise is about problems of the same kind: they are drawn together, and a coin decides where each goes."
    for b in MICRO:
        shares = {}
        for split in HELD_OUT:
            levels = [p.difficulty for p in load_problems(b, split, 1000)]
            shares[split] = {level: levels.count(level)/1000 for level in level_counts(b, 1000)}
        assert max(abs(share - shares['test'][level]) for level, share in shares['calibration'].items()) < .05
        both = {level: sum(shares[split][level]*1000 for split in HELD_OUT) for level in shares['test']}
        assert both == pytest.approx(level_counts(b, 2000))

def test_the_first_draw_needs_no_receipt(monkeypatch, tmp_path):
    monkeypatch.setattr(receipts, 'RECEIPT', tmp_path/'none.json')
    assert read_frozen() is None
    assert drawn_problems('micro-gsm', 'test') == micro_problems('micro-gsm', 'test', 1000, 0)
