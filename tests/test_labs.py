"The labs run from a fresh clone; here with a tiny setting, which takes a minute or two."
from pathlib import Path

import nbformat
import pytest

LABS = Path(__file__).parents[1]/'nbs'/'labs'
TINY = {'01_micro_models': dict(steps=20, documents_at_once=512, pool_problems=60, chain_files=1, chain_problems=250,
                                test_problems=4, context=512)}

def test_every_lab_has_a_tiny_setting_and_exports_nothing():
    assert {p.stem for p in LABS.glob('*.ipynb')} == set(TINY) and (LABS/'.notest').exists()
    for name in TINY:
        cells = nbformat.read(LABS/f'{name}.ipynb', as_version=4).cells
        assert not any('#| export' in c.source or '#| default_exp' in c.source for c in cells)

@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('name', TINY)
def test_a_lab_runs(name, tmp_path):
    import papermill
    out = tmp_path/'models'
    papermill.execute_notebook(LABS/f'{name}.ipynb', tmp_path/'run.ipynb', dict(TINY[name], out=str(out)), cwd=LABS,
                               progress_bar=False)
    assert all((out/w/'model.safetensors').exists() for w in ('small', 'base', 'large', 'prm'))
    assert (out/'report.json').exists() and (out/'prm'/'report.json').exists()
