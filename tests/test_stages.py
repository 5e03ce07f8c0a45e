"The stages of a run: outcomes are drawn as they are shipped, and once; a small run's numbers, and its bytes twice."

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepwise_routing.gain import gain_frame
from stepwise_routing.method import results
from stepwise_routing.method.rollouts import Outcomes, take
from stepwise_routing.run import stages
from stepwise_routing.run.reproduce import with_whole_paths
from stepwise_routing.settings import as_printed
from stepwise_routing.store import Store

SPLITS = 'train', 'calibration', 'test'
WALKS = {(method, split) for method in ('SpecReason', 'RSD') for split in SPLITS[1:]}


class Watched:
    "A model that notes what it draws. After `left` answers it stops the run."

    def __init__(self, model, notes: list, left: float):
        self.model, self.notes, self.left = model, notes, left

    def __getattr__(self, name):  # spec, index, settings
        return getattr(self.model, name)

    def count(self, asked):
        self.left -= len(asked) > 0
        if self.left < 0:
            raise KeyboardInterrupt

    def write(self, requests):
        self.count(requests)
        written = self.model.write(requests)
        for request, steps in zip(requests, written):
            paths = [request.path + str(self.index) * i for i in range(len(steps))]
            self.notes += [f'{request.problem.id} {path}, {self.index}' for path in paths]
        return written

    def choose(self, conversations, options):
        self.count(conversations)
        self.notes += map(str, conversations)
        return self.model.choose(conversations, options)


@pytest.fixture(scope='module')
def pair():
    return stages.open_pair(stages.open_run())


def draw(folder: Path, pair, left: float = np.inf) -> tuple:  # (is it finished?, notes)
    "Draw two problems a split of micro-gsm."
    notes = []
    watched = [Watched(model, notes, left) for model in pair]
    run = stages.open_run('micro', folder / 'run', {'data.benchmarks': ['micro-gsm']}, 2)
    with pytest.MonkeyPatch.context() as m, suppress(KeyboardInterrupt):
        m.setattr(stages, 'open_pair', lambda run: watched)
        stages.draw_all(replace(run, store=folder / 'store'))
        return True, notes
    return False, notes


def files(folder: Path) -> dict:  # name -> bytes
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(folder: Path) -> tuple:  # outcomes; store -> how many records
    stores = {path.name: len(Store(path)) for path in (folder / 'store').glob('*.db')}
    return files(folder / 'run' / 'outcomes'), stores


def test_what_is_drawn_live_is_what_is_shipped_and_a_difference_is_seen(pair, monkeypatch):
    monkeypatch.setattr(stages, 'open_pair', lambda run: pair)
    run = stages.open_run(changes={'data.benchmarks': ['micro-gsm', 'gsm8k']})
    checked = stages.check_live(run, 2).set_index('benchmark')
    assert (checked[['problems', 'same_tokens', 'same_verdicts']].to_numpy() == 2).all()
    assert (checked.filter(like='gap').to_numpy() < 1e-3).all()
    assert list(stages.check_live(replace(run, draw=3), 2)['benchmark']) == ['gsm8k']
    all_drawn = stages.open_run(changes={'data.shipped': False})
    assert len(stages.check_live(all_drawn)['benchmark']) == 0

    old = take(stages.shipped_outcomes('micro-gsm')['test'], slice(4))
    large, right = old.large.copy(), old.right.copy()
    large[1, 0, 0, 0] += 1
    right[[2, 3], 0] ^= 1
    features = old.features | dict(min_prob=old.features['min_prob'] + 0.25)
    seen = stages.differences(replace(old, large=large, right=right, features=features), old)
    assert list(seen.values()) == [4, 3, 2, pytest.approx(0.25), 0]


def test_a_draw_gives_what_is_shipped_and_draws_no_step_twice(pair, tmp_path):
    is_finished, notes = draw(tmp_path / 'a', pair)
    tables = stages.drawn_outcomes(stages.open_run(folder=tmp_path / 'a' / 'run'), 'micro-gsm')
    assert set(tables) == {*SPLITS, *WALKS} and len(notes) == len(set(notes))
    for split in SPLITS:
        shipped = take(stages.shipped_outcomes('micro-gsm')[split], slice(2))
        assert list(stages.differences(tables[split], shipped).values())[:3] == [2, 2, 2]
        assert 'reward' in tables[split].features and tables[split].dollars[-1].min() > 0
        assert (tables[split].step_right is not None) == (split == 'train')
    before = kept(tmp_path / 'a')
    assert len(before[1]) == 3 and min(before[1].values()) > 0  # steps, grades, rewards
    assert draw(tmp_path / 'a', pair) == (True, []) and kept(tmp_path / 'a') == before

    is_finished, parts = False, []  # interrupted again and again
    while not is_finished:
        is_finished, part = draw(tmp_path / 'b', pair, left=12)
        parts += part
    assert sorted(parts) == sorted(notes) and kept(tmp_path / 'b') == before


FEW = {'policy.steps': 3, 'policy.alpha': 0.05, 'results.seeds': 1, 'results.n_boot': 20}
FEW |= {'results.processes': 1, 'data.benchmarks': ['micro-gsm', 'gsm8k']}


def first_sixty(table):
    if isinstance(table, Outcomes):
        return take(table, slice(60))
    parts = dict(tokens=table.tokens[:, :60], right=table.right[:, :60])
    return replace(table, problem=table.problem[:60], **parts)


def test_a_file_of_questions_is_drawn_beside_what_is_shipped(tmp_path, monkeypatch):
    rows = [f'{{"question": "What is {i} + 1?", "answer": "{i + 1}"}}' for i in range(40)]
    (tmp_path / 'sums-of-mine.jsonl').write_text('\n'.join(rows))
    monkeypatch.chdir(tmp_path)
    changes = {'data.benchmarks': ['micro-gsm', 'sums-of-mine.jsonl']}
    changes = with_whole_paths('micro', changes)
    monkeypatch.chdir('/')  # a chapter runs in another folder
    run = stages.open_run('micro', tmp_path, changes)
    assert run.benchmarks == ('micro-gsm', 'sums-of-mine')
    assert [run.is_drawn(name) for name in run.benchmarks] == [False, True]
    assert sum(len(run.problems('sums-of-mine', split)) for split in SPLITS) == 40


def test_a_small_run_has_the_same_bytes_twice_and_the_committed_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(results, 'as_printed', lambda s: replace(as_printed(s), steps=5))
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    made, benchmarks = [], {}
    for folder in (tmp_path / 'runs' / 'a', tmp_path / 'runs' / 'b'):
        run = stages.open_run('micro', folder, FEW)
        for name, splits in stages.read_benchmarks(run).items():
            assert set(splits) == {*SPLITS} | (WALKS if name == 'micro-gsm' else set())
            benchmarks[name] = {key: first_sixty(table) for key, table in splits.items()}
        compared = stages.compare_all(run, benchmarks)
        names = stages.report(run, benchmarks, compared, gain_frame(benchmarks))
        made.append(files(run.tables) | files(run.figures))
    assert made[0] == made[1] and sorted(made[0]) == names
    monkeypatch.chdir(tmp_path)  # the clone whose newest run is drawn again
    again = {path.name: path.read_bytes() for path in stages.redraw()}
    assert again.items() <= made[0].items() and 'accuracy_cost.pdf' in again

    committed = pd.read_csv(Path(__file__).parent / 'data' / 'pipeline.csv', index_col=[0, 1])
    table = pd.read_csv(run.tables / 'table1.csv').set_index(committed.index.names)
    is_trained = committed.index.get_level_values('method').str.startswith('Ours')
    off = np.abs(table.loc[committed.index, committed.columns] / committed - 1)
    assert (off.max(axis=1) < np.where(is_trained, 0.02, 1e-5)).all()
