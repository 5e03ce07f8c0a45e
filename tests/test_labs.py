"The labs run from a fresh clone; training the micro models with a tiny setting."

from pathlib import Path

import nbformat
import papermill
import pytest

ROOT = Path(__file__).parents[1]
TINY = dict(steps=20, documents_at_once=512, pool_problems=60, chain_files=1, chain_problems=250)
TINY |= dict(test_problems=4, context=512)
pytestmark = pytest.mark.slow


def run_lab(name: str, folder: Path, **parameters) -> str:
    "The text of all outputs of the executed lab."
    labs, made = ROOT / 'nbs' / 'labs', folder / f'{name}.ipynb'
    papermill.execute_notebook(labs / made.name, made, parameters, cwd=labs, progress_bar=False)
    cells = nbformat.read(made, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    texts = [x.get('text') or x.get('data', {}).get('text/plain', '') for x in outputs]
    return '\n'.join(texts)


@pytest.mark.timeout(1200)
def test_the_micro_models_can_be_trained(tmp_path):
    run_lab('01_micro_models', tmp_path, out=str(tmp_path), **TINY)
    for name in ('small', 'base', 'large', 'prm'):
        assert (tmp_path / name / 'model.safetensors').exists()
    assert (tmp_path / 'report.json').exists()
    assert (tmp_path / 'prm' / 'report.json').exists()


def test_the_page_of_the_real_pair_reads_what_is_shipped(tmp_path):
    text = run_lab('02_recorded', tmp_path, transcripts=2)
    assert text.count('QUESTION') == 2
    assert '94 of 768 further draws' in text
    assert 'cheapest of all settings: 1.16' in text


def test_the_policy_of_micro_omni_hands_over_after_sure_steps(tmp_path):
    text = run_lab('03_when_worth', tmp_path)
    rows = [line.split() for line in text.splitlines() if line.startswith('micro-')]
    weights = {name: float(of_odds) for name, of_odds, *_ in rows}
    assert weights['micro-omni'] > 0 > max(weights['micro-gsm'], weights['micro-math'])


def test_the_committed_pictures_are_what_the_lab_draws(tmp_path):
    before = {path: path.read_bytes() for path in (ROOT / 'docs').glob('*.svg')}
    run_lab('04_pictures', tmp_path)
    assert before == {path: path.read_bytes() for path in (ROOT / 'docs').glob('*.svg')}
