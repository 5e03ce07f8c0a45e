"The labs run from a fresh clone; here with a tiny setting, which takes a minute or two."
import json
from ast import literal_eval
from pathlib import Path

import nbformat
import pytest

from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.data.questions import QuestionFile
from stepwise_routing.run.config import read_run

LABS = Path(__file__).parents[1]/'nbs'/'labs'
TINY = {'01_micro_models': dict(steps=20, documents_at_once=512, pool_problems=60, chain_files=1, chain_problems=250,
                                test_problems=4, context=512),
        '02_recorded': dict(micro_problems=8, transcripts=2),
        '03_when_worth': dict(worth_again=True, cell_train=20, cell_calibration=20, cell_test=20, training_seeds=1,
                              policy_steps=1),
        '04_many_problems': {}}

def test_every_lab_has_a_tiny_setting_and_exports_nothing():
    assert {p.stem for p in LABS.glob('*.ipynb')} == set(TINY) and (LABS/'.notest').exists()
    for name in TINY:
        cells = nbformat.read(LABS/f'{name}.ipynb', as_version=4).cells
        assert not any('#| export' in c.source or '#| default_exp' in c.source for c in cells)

def run_lab(name, folder, **more):
    "The executed lab."
    import papermill
    out = folder/'run.ipynb'
    papermill.execute_notebook(LABS/f'{name}.ipynb', out, dict(TINY[name], **more), cwd=LABS, progress_bar=False)
    return nbformat.read(out, as_version=4)

@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_micro_models_can_be_trained(tmp_path):
    out = tmp_path/'models'
    run_lab('01_micro_models', tmp_path, out=str(out))
    assert all((out/w/'model.safetensors').exists() for w in ('small', 'base', 'large', 'prm'))
    assert (out/'report.json').exists() and (out/'prm'/'report.json').exists()

def test_many_problems_are_new_and_fill_the_splits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(LABS)
    from micro_world.many import SIZES, question_rows
    sizes = dict(train=3, calibration=20, test=20)
    rows = question_rows('micro-gsm', 'micro-gsm-many', sizes, 150)
    file = tmp_path/'micro-gsm-many.jsonl'
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    made = {split: QuestionFile(str(file), file.stem).problems(split) for split in sizes}
    assert {split: len(problems) for split, problems in made.items()} == sizes
    shipped = {p.question for split in sizes for p in load_problems('micro-gsm', split)}
    questions = {p.question for problems in made.values() for p in problems}
    assert len(questions) == sum(sizes.values()) and not questions & shipped
    profile = read_run('micro-many').config
    assert [Path(f).name for f in profile.data.benchmarks] == [f'{b}-many.jsonl' for b in MICRO]
    assert {split: getattr(profile.open, f'n_{split}') for split in SIZES} == SIZES

@pytest.mark.slow
def test_the_page_of_many_problems_reads_the_tables(tmp_path):
    lab = run_lab('04_many_problems', tmp_path)
    assert 'Ours (nested)' in ''.join(str(c.get('outputs')) for c in lab.cells)

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_of_the_real_pair_reads_what_is_shipped(tmp_path):
    lab = run_lab('02_recorded', tmp_path)
    (read,) = [c.outputs[0].text for c in lab.cells if c.source.endswith("join(to_read))")]
    assert read.count('QUESTION') == 2 and 'handed over here' in read
    (walked,) = [c.outputs[0].data['text/plain'] for c in lab.cells if c.source.endswith('problems=len(grades))')]
    assert literal_eval(walked)['turns'] == 100  # the pieces of SpecReason's walks are whole

@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_of_what_a_policy_is_worth_does_all_cells(tmp_path):
    lab = run_lab('03_when_worth', tmp_path, worth_folder=str(tmp_path))
    (count,) = [c.outputs[-1].data['text/plain'] for c in lab.cells if c.source.endswith('len(rows)')]
    assert count == '96' and len([*(tmp_path/'cells').glob('*-rows.csv')]) == 12
