"""Nothing that decides a result may differ from what was fixed before the test problems were drawn."""
import json
import os
import subprocess
import sys

import pytest
from micro_world import freeze
from micro_world.freeze import deciding, tables_digest
from micro_world.drafts import micro_problems
from micro_world.ship import HELD_OUT, TOGETHER, drawn_problems, level_counts

from stepwise_routing.base.tools import PACKAGE
from stepwise_routing.data import frozen as receipts
from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.data.frozen import read_frozen

ROOT = PACKAGE.parent
KEPT = ROOT/'tests'/'data'/'frozen_tables.txt'

def test_what_decides_is_as_it_was_before_the_test_problems_were_drawn():
    frozen, now = read_frozen(), deciding()
    changed = sorted(name for name in {*now, *frozen.decides} if now.get(name) != frozen.decides.get(name))
    same_tables = tables_digest(ROOT/'tables') == KEPT.read_text().strip()
    assert not changed or same_tables, (
        f'these decide the results and differ from commit {frozen.commit[:9]}: {"; ".join(changed)}. The tables '
        'differ, too. Draw new test problems (python -m micro_world.freeze in nbs/labs), or undo the change')

def test_a_changed_rule_is_noticed(monkeypatch):
    before = deciding()
    read = freeze.read_module
    def changed(path, name): return ('other', set()) if name.endswith('.certain') else read(path, name)
    monkeypatch.setattr(freeze, 'read_module', changed)
    after = deciding()
    assert [k for k in after if after[k] != before[k]] == ['rules: stepwise_routing.method.certain']

def test_the_receipt_stands_under_the_tables():
    frozen = read_frozen()
    assert json.loads((ROOT/'tables'/'frozen.json').read_text())['commit'] == frozen.commit
    for name in ('table1', 'table2', 'full', 'full_api'):
        assert frozen.sentence in (ROOT/'tables'/f'{name}.md').read_text()

def test_held_out_problems_are_new():
    "None of them was in the calibration or test set of an earlier seed, or is in another split."
    assert read_frozen().test_seed >= TOGETHER
    for b in MICRO:
        held_out = {p.id for split in HELD_OUT for p in load_problems(b, split, 1000)}
        assert len(held_out) == 2000 and not held_out & {p.id for p in load_problems(b, 'train', 1000)}
        earlier = {p.id for i in range(TOGETHER) for p in freeze_problems(b, i)}
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

def freeze_problems(benchmark, seed):
    return micro_problems(benchmark, 'test', 1000, seed)

def test_the_first_draw_needs_no_receipt(monkeypatch, tmp_path):
    monkeypatch.setattr(receipts, 'RECEIPT', tmp_path/'none.json')
    assert read_frozen() is None
    assert drawn_problems('micro-gsm', 'test') == freeze_problems('micro-gsm', 0)

@pytest.mark.slow
def test_the_commit_itself_has_these_digests(tmp_path):
    frozen = read_frozen()
    known = subprocess.run(['git', '-C', str(ROOT), 'cat-file', '-e', f'{frozen.commit}^{{commit}}'])
    if known.returncode: pytest.skip('this clone does not have the commit')
    archive = subprocess.run(['git', '-C', str(ROOT), 'archive', frozen.commit], capture_output=True, check=True)
    subprocess.run(['tar', '-x', '-C', str(tmp_path)], input=archive.stdout, check=True)
    code = 'import json; from micro_world.freeze import deciding; print(json.dumps(deciding()))'
    env = os.environ | dict(PYTHONPATH=f'{tmp_path}:{tmp_path}/nbs/labs')
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    assert json.loads(out.stdout.splitlines()[-1]) == frozen.decides
