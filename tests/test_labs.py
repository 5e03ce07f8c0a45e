"The labs run from a fresh clone; here with a tiny setting, which takes a minute or two."
from ast import literal_eval
from pathlib import Path

import nbformat
import pytest

LABS = Path(__file__).parents[1]/'nbs'/'labs'
TINY = {'01_micro_models': dict(steps=20, documents_at_once=512, pool_problems=60, chain_files=1, chain_problems=250,
                                test_problems=4, context=512),
        '02_recorded': dict(micro_problems=8, transcripts=2),
        '03_when_worth': {}}

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

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_of_the_real_pair_reads_what_is_shipped(tmp_path):
    lab = run_lab('02_recorded', tmp_path)
    (read,) = [c.outputs[0].text for c in lab.cells if c.source.endswith("join(to_read))")]
    assert read.count('QUESTION') == 2 and 'handed over here' in read
    (walked,) = [c.outputs[0].data['text/plain'] for c in lab.cells if c.source.endswith('problems=len(grades))')]
    assert literal_eval(walked)['turns'] == 100  # the pieces of SpecReason's walks are whole

@pytest.mark.slow
def test_the_page_of_what_a_policy_is_worth_reads_the_tables(tmp_path):
    lab = run_lab('03_when_worth', tmp_path)
    assert 'Ours (nested) minus bare probability' in ''.join(str(c.get('outputs')) for c in lab.cells)
