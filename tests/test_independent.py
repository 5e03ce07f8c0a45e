"The tables of toy outcomes are what tests/independent.py finds by other code, and a changed number is noticed."

import json
import shutil

import pandas as pd
import pytest
from independent import check_tables
from toy import quick_methods, toy_benchmark

from stepwise_routing.gain import gain_frame
from stepwise_routing.method.results import compare
from stepwise_routing.method.rollouts import save
from stepwise_routing.report.tables import write_tables


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "Outcomes and tables of a toy benchmark: 320 problems a split, so the normal bound decides."
    folder = tmp_path_factory.mktemp('run')
    splits = toy_benchmark(320)
    for name, table in splits.items():
        stem = name if isinstance(name, str) else '-'.join(reversed(name))
        save(table, folder / 'outcomes' / f'toy-{stem}.npz')
    how = dict(alpha=0.05, n_boot=60)
    results = compare(dict(toy=splits), quick_methods((0, 1)), processes=1, **how)
    write_tables(results, gain_frame(dict(toy=splits)), folder / 'tables', [])
    settings = dict(policy=how, results=how)
    (folder / 'tables' / 'provenance.json').write_text(json.dumps(dict(settings=settings)))
    return folder


def test_other_code_finds_the_same(finished):
    checks = check_tables(finished / 'tables', finished / 'outcomes')
    assert checks.wrong == []
    wanted = {'accuracy, tuned', 'cost interval, guaranteed', 'table1', 'table2', 'line', 'seeds'}
    assert wanted | {'verdict', 'chosen features', 'gain', 'AUROC'} <= {*checks.counts}


def test_a_changed_number_is_noticed_wherever_it_stands(finished, tmp_path):
    "One number in each place, all at once, and each of them is named."
    shutil.copytree(finished / 'tables', tmp_path / 'tables')
    changes = [
        ('table1', 'accuracy', 'table1'),
        ('table2', 'per_cost', 'table2'),
        ('methods', 'cost', 'cost, tuned'),
        ('methods', 'share_high', 'share interval, tuned'),
        ('curves', 'share', 'line'),
        ('seeds', 'accuracy', 'seeds'),
        ('comparison', 'ratio', 'ratio'),
        ('comparison', 'verdict', 'verdict'),
        ('gain', 'gain by S^os', 'AUROC'),
    ]
    for file, column, _ in changes:
        path = tmp_path / 'tables' / f'{file}.csv'
        table = pd.read_csv(path)
        row = 0 if file == 'gain' else 3
        table.loc[row, column] = 'sure' if column == 'verdict' else 1.001 * table.loc[row, column]
        table.to_csv(path, index=False)
    wrong = check_tables(tmp_path / 'tables', finished / 'outcomes').wrong
    assert {line.split(': ')[0] for line in wrong} == {kind for _, _, kind in changes}
