"The stages of a run: outcomes are drawn as they are shipped, and once; a small run has its numbers and the same bytes twice."

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepwise_routing.method import results
from stepwise_routing.method.rollouts import Outcomes, take
from stepwise_routing.run import stages
from stepwise_routing.settings import as_printed
from stepwise_routing.store import Store

SPLITS = 'train', 'calibration', 'test'
WALKS = {(method, split) for method in ('SpecReason', 'RSD') for split in SPLITS[1:]}


class Watched:
    "A model that notes what it draws. After `left` answers it stops the run."

    def __init__(self, model, notes: list, left: float):
        self.model, self.notes, self.left = model, notes, left
        self.spec, self.index, self.settings = model.spec, model.index, model.settings

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def write(self, requests):
        self.count()
        written = self.model.write(requests)
        for request, steps in zip(requests, written):
            paths = [request.path + str(self.index) * i for i in range(len(steps))]
            self.notes += [(request.problem.id, path, self.index) for path in paths]
        return written

    def choose(self, conversations, options):
        if conversations:
            self.count()
        self.notes += [(str(conversation), '', 'grade') for conversation in conversations]
        return self.model.choose(conversations, options)


@pytest.fixture(scope='module')
def pair():
    with stages.open_pair(stages.open_run()) as models:
        yield models


def draw(folder: Path, pair, left: float = np.inf) -> tuple:  # (tables, notes)
    "Draw three problems a split of micro-gsm. Interrupted: (None, notes)."
    notes = []
    watched = [Watched(model, notes, left) for model in pair]
    run = stages.open_run('micro', folder, {'data.benchmarks': ['micro-gsm']}, 3)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(stages, 'open_pair', lambda run: nullcontext(watched))
        try:
            stages.draw_all(replace(run, store=folder / 'store'))
        except KeyboardInterrupt:
            return None, notes
    return stages.read_benchmarks(run)['micro-gsm'], notes


def kept(folder: Path) -> dict:  # store -> its records
    return {path.name: len(Store(path)) for path in sorted((folder / 'store').glob('*.db'))}


def files(folder: Path) -> dict:  # name -> bytes
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope='module')
def drawn(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp('drawn')
    return folder, *draw(folder, pair)


# ---- outcomes
def test_a_run_reads_what_is_shipped_or_says_what_is_missing(tmp_path):
    found = stages.read_benchmarks(stages.open_run())
    assert tuple(found) == ('micro-gsm', 'micro-math', 'micro-omni', 'gsm8k')
    for name, splits in found.items():
        assert set(splits) >= {*SPLITS} | (WALKS if name in ('micro-gsm', 'micro-math') else set())
        assert {str(table.benchmark) for table in splits.values()} == {name}
    for name, n, said in (('micro-gsm', 3, 'run chapter 02 first'), ('math500', 0, 'are shipped')):
        run = stages.open_run('micro', tmp_path, {'data.benchmarks': [name]}, n)
        with pytest.raises(FileNotFoundError, match=f'no outcomes of {name}.*{said}'):
            stages.read_benchmarks(run)


def test_problems_that_are_drawn_live_are_those_that_are_shipped(pair, monkeypatch):
    monkeypatch.setattr(stages, 'open_pair', lambda run: nullcontext(pair))
    run = stages.open_run(changes={'data.benchmarks': ['micro-gsm', 'gsm8k']})
    checked = stages.check_live(run, 2).set_index('benchmark')
    assert (checked[['problems', 'same_tokens', 'same_verdicts']].to_numpy() == 2).all()
    assert (checked.filter(like='gap').to_numpy() < 1e-4).all()
    assert list(stages.check_live(replace(run, draw=3), 2)['benchmark']) == ['gsm8k']
    all_drawn = stages.open_run(changes={'data.shipped': False})
    assert list(stages.check_live(all_drawn).set_index('benchmark').index) == []


def test_a_difference_to_what_is_shipped_is_seen():
    old = take(stages.shipped_outcomes('micro-gsm')['test'], slice(4))
    large, right = old.large.copy(), old.right.copy()
    large[1, 0, 0, 0] += 1
    right[[2, 3], 0] ^= 1
    features = old.features | dict(min_prob=old.features['min_prob'] + 0.25)
    seen = stages.differences(replace(old, large=large, right=right, features=features), old)
    assert (seen['same_tokens'], seen['same_verdicts']) == (3, 2)
    gaps = [seen[f'largest gap of {name}'] for name in ('min_prob', 'mean_logit')]
    assert gaps == pytest.approx([0.25, 0])


def test_a_draw_gives_what_is_shipped_and_draws_nothing_twice(drawn, pair):
    folder, tables, notes = drawn
    assert set(tables) == {*SPLITS, *WALKS} and len(notes) == len(set(notes))
    for split in SPLITS:
        shipped = take(stages.shipped_outcomes('micro-gsm')[split], slice(3))
        seen = stages.differences(tables[split], shipped)
        assert (seen['same_tokens'], seen['same_verdicts']) == (3, 3)
        assert 'reward' in tables[split].features and tables[split].dollars[-1].min() > 0
        assert (tables[split].step_right is not None) == (split == 'train')
    assert all(tables[key].right.shape == (len(tables[key].kappas), 3) for key in WALKS)
    before, records = files(folder / 'outcomes'), kept(folder)
    assert len(records) == 3 and min(records.values()) > 0  # steps, grades, rewards
    assert draw(folder, pair)[1] == []
    assert (files(folder / 'outcomes'), kept(folder)) == (before, records)


def test_an_interrupted_draw_goes_on_and_draws_no_step_twice(drawn, pair, tmp_path):
    folder, _, notes = drawn
    tables, parts = None, []
    while tables is None:
        tables, part = draw(tmp_path, pair, left=3)
        parts += part
    assert sorted(map(str, parts)) == sorted(map(str, notes))
    assert (files(tmp_path / 'outcomes'), kept(tmp_path)) == (
        files(folder / 'outcomes'),
        kept(folder),
    )


# ---- from outcomes to tables and figures
PIPELINE = Path(__file__).parent / 'data' / 'pipeline.csv'  # some rows of table1.csv of this run
FEW = {'policy.steps': 3, 'policy.alpha': 0.05, 'results.seeds': 1, 'results.n_boot': 20}
FEW |= {'results.processes': 1, 'data.benchmarks': ['micro-gsm', 'gsm8k']}


def first_sixty(table):
    if isinstance(table, Outcomes):
        return take(table, slice(60))
    parts = dict(tokens=table.tokens[:, :60], right=table.right[:, :60])
    return replace(table, problem=table.problem[:60], **parts)


def test_a_small_run_has_the_same_bytes_twice_and_the_committed_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(results, 'as_printed', lambda s: replace(as_printed(s), steps=5))
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    made, benchmarks = [], {}
    for folder in (tmp_path / 'runs' / 'a', tmp_path / 'runs' / 'b'):
        run = stages.open_run('micro', folder, FEW)
        for benchmark, splits in stages.read_benchmarks(run).items():
            benchmarks[benchmark] = {key: first_sixty(table) for key, table in splits.items()}
        names = stages.report(run, benchmarks, stages.compare_all(run, benchmarks))
        made.append(files(run.tables) | files(run.figures))
        assert sorted(made[-1]) == names
    assert made[0] == made[1]
    assert {'table1.md', 'table2.tex', 'methods.csv', 'accuracy_cost.pdf'} <= set(made[0])
    assert json.loads(made[0]['provenance.json'])['settings']['policy']['steps'] == 3

    monkeypatch.chdir(tmp_path)  # the clone whose newest run is drawn again
    again = {path.name: path.read_bytes() for path in stages.redraw()}
    assert again.items() <= made[0].items() and 'gain.png' in again

    keys, numbers = ['benchmark', 'method'], ['accuracy', 'cost']
    table = pd.read_csv(run.tables / 'table1.csv').set_index(keys)[numbers]
    committed = pd.read_csv(PIPELINE).set_index(keys)
    trained = committed.index.get_level_values('method').str.startswith('Ours')
    for rows, tolerance in ((committed[~trained], 1e-5), (committed[trained], 0.02)):
        assert len(rows) and np.allclose(table.loc[rows.index], rows, rtol=tolerance, atol=0)
