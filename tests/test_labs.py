"The labs run from a fresh clone; training the micro models with a tiny setting."

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
LABS = ROOT / 'nbs' / 'labs'
TINY = dict(
    steps=20,
    documents_at_once=512,
    pool_problems=60,
    chain_files=1,
    chain_problems=250,
    test_problems=4,
    context=512,
)


def run_lab(name: str, folder: Path, **parameters) -> str:
    "The text of all outputs of the executed lab."
    import papermill

    source, made = LABS / f'{name}.ipynb', folder / f'{name}.ipynb'
    papermill.execute_notebook(source, made, parameters, cwd=LABS, progress_bar=False)
    texts = []
    for cell in nbformat.read(made, as_version=4).cells:
        for output in cell.get('outputs', []):
            data = output.get('data', {})
            texts.append(output.get('text', '') or data.get('text/plain', ''))
    return '\n'.join(texts)


def test_labs_export_nothing():
    names = sorted(path.stem for path in LABS.glob('*.ipynb'))
    assert names == ['01_micro_models', '02_recorded', '03_when_worth', '04_pictures']
    for name in names:
        cells = nbformat.read(LABS / f'{name}.ipynb', as_version=4).cells
        assert not any('#| export' in cell.source for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_micro_models_can_be_trained(tmp_path):
    run_lab('01_micro_models', tmp_path, out=str(tmp_path), **TINY)
    for name in ('small', 'base', 'large', 'prm'):
        assert (tmp_path / name / 'model.safetensors').exists()
    assert (tmp_path / 'report.json').exists() and (tmp_path / 'prm' / 'report.json').exists()


@pytest.mark.slow
def test_the_page_of_the_real_pair_reads_what_is_shipped(tmp_path):
    text = run_lab('02_recorded', tmp_path, transcripts=2)
    assert text.count('QUESTION') == 2 and 'handed over here' in text
    assert '94 of 768 further draws' in text and 'cheapest of all settings: 1.16' in text


@pytest.mark.slow
def test_the_policy_of_micro_omni_hands_over_after_sure_steps(tmp_path):
    text = run_lab('03_when_worth', tmp_path)
    weights = {}
    for line in text.splitlines():
        if line.startswith('micro-'):
            name, of_odds, *_ = line.split()
            weights[name] = float(of_odds)
    assert weights['micro-omni'] > 0 > max(weights['micro-gsm'], weights['micro-math'])


@pytest.mark.slow
def test_the_committed_pictures_are_what_the_lab_draws(tmp_path):
    before = {path.name: path.read_bytes() for path in (ROOT / 'docs').glob('*.svg')}
    run_lab('04_pictures', tmp_path)
    assert before == {path.name: path.read_bytes() for path in (ROOT / 'docs').glob('*.svg')}
    for text in before.values():
        assert b'role="img" aria-label=' in text and b'date' not in text
