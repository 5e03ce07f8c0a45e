"""Results of a toy run are what tests/independent.py computes by other code, and a changed number is noticed."""
import shutil

import pandas as pd
import pytest
from independent import check_run
from toy_runs import save_policies, toy_run

from stepwise_routing.report.tables import report, report_paper
from stepwise_routing.run.stages import load_run


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A toy run with tables: 60 problems, so certain settings are found by a bet, which is not repeated."
    run = save_policies(toy_run(tmp_path_factory.mktemp('run'), 'gpt-4.1-mini'))
    results = load_run(run)
    report_paper(results)
    report(results, 'comparison')
    return run.folder

def test_other_code_finds_the_same(finished):
    checks = check_run(finished, n_boot=100)
    assert not checks.wrong
    assert {'accuracy', 'cost', 'choice', 'interval', 'win', 'ratio'} <= {*checks.counts}
    assert min(checks.counts.values()) > 0

@pytest.mark.parametrize('file, column, change, kind', [
    ('evaluation', 'accuracy', lambda x: float(x)*.9, 'accuracy'),
    ('evaluation', 'cost', lambda x: float(x)*1.001, 'cost'),
    ('comparison', 'cost_ratio_high', lambda x: float(x) + 1e-3, 'ratio'),
    ('comparison', 'win', lambda x: not x, 'win'),
])
def test_a_changed_number_is_noticed(finished, tmp_path, file, column, change, kind):
    folder = tmp_path/'run'
    shutil.copytree(finished, folder)
    path = folder/'tables'/f'{file}.csv'
    table = pd.read_csv(path)
    table[column] = table[column].map(change)
    table.to_csv(path, index=False)
    wrong = check_run(folder, n_boot=100).wrong
    assert wrong and {line.split(':')[0] for line in wrong} <= {kind, 'win'}
