"The outcome tables in tables/outcomes: a fresh clone opens them; they are those behind the committed tables."
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from stepwise_routing.base.tools import find_project
from stepwise_routing.run.committed import (
    OUTCOMES, committed_outcomes, fill_outcomes, outcome_files, pack_outcomes)
from stepwise_routing.run.config import changed, read_run

TABLES = find_project().root/'tables'


@pytest.fixture
def fresh(tmp_path):
    "The run of the profile micro in a clone where nothing has run."
    return replace(read_run('micro'), folder=tmp_path/'run', store=tmp_path/'store')

def files(run): return [p for p in run.folder.rglob('*') if p.is_file()]

@pytest.mark.parametrize('setting, suffix', [('open', ''), ('api', '_api')])
def test_committed_outcomes_are_those_of_the_committed_tables(fresh, setting, suffix):
    rows = pd.read_csv(TABLES/f'evaluation{suffix}.csv')
    alone = rows[rows['method'] == 'Small only'].set_index('benchmark')['accuracy']
    read = committed_outcomes(fresh)
    for benchmark, accuracy in alone.items():
        tables, second_grader = read[setting, benchmark]
        assert second_grader is None and set(tables) == {'train', 'calibration', 'test'}
        small_alone = tables['test'].outcome(-1)['correct']
        assert (len(small_alone), small_alone.mean()) == (600, pytest.approx(accuracy, abs=1e-9))

def test_a_fresh_run_gets_the_committed_outcomes_once(fresh):
    assert not fresh.has_draws and fill_outcomes(fresh)
    assert {p.relative_to(fresh.folder).as_posix() for p in files(fresh)} == {*outcome_files(fresh)}
    mine = next(iter(outcome_files(fresh).values()))
    mine.write_bytes(b'mine')
    assert fill_outcomes(fresh) and mine.read_bytes() == b'mine'

@pytest.mark.parametrize('change', [{'open.n_train': 299}, {'api.redraws': 2}, {'data.benchmarks': ['micro-gsm']}])
def test_other_settings_get_no_outcomes(fresh, change):
    other = replace(fresh, config=changed(fresh.config, change))
    assert not fill_outcomes(other) and not other.folder.exists()
    with pytest.raises(FileNotFoundError, match='has no outcomes of micro-gsm yet: run all stages'):
        committed_outcomes(other)

def test_settings_that_draw_nothing_do_not_matter(fresh):
    assert fill_outcomes(replace(fresh, config=changed(fresh.config, {'policy.alpha': .05})))

def test_a_run_with_draws_keeps_to_them(fresh):
    fresh.store.mkdir()
    (fresh.store/'micro-math.db').touch()
    assert fresh.has_draws and not fill_outcomes(fresh) and not fresh.folder.exists()

def test_recorded_steps_are_draws(fresh):
    recorded = replace(read_run('recorded'), folder=fresh.folder, store=fresh.store)
    assert recorded.has_draws and not fill_outcomes(recorded)

def test_what_is_packed_comes_out_again(fresh):
    fill_outcomes(fresh)
    packed = pack_outcomes(fresh)
    assert packed.read_bytes() == pack_outcomes(fresh).read_bytes()
    assert packed.stat().st_size < 1e6
    committed = (TABLES/OUTCOMES).stat().st_size
    assert abs(packed.stat().st_size - committed) < .01*committed
    shutil.rmtree(fresh.folder/'outcomes')
    assert fill_outcomes(fresh) and len(files(fresh)) == len(outcome_files(fresh)) + 1
