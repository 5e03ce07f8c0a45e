"What every notebook in nbs/ promises its readers and the runner."
import ast, json, re, sys
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parents[1]/'nbs'
NOTEBOOKS = sorted(NBS.glob('*.ipynb'))
EXPERIMENTS = [p for p in NOTEBOOKS if re.match(r'0[1-5]_', p.name)]

def cells(path, kind=None):
    found = json.loads(path.read_text('utf-8'))['cells']
    return [dict(c, source=''.join(c['source'])) for c in found if kind in (None, c['cell_type'])]

def directives(cell): return re.findall(r'^#\|\s*(\S+)', cell['source'], re.M)

def shown(cell):
    "All text that a cell has put out."
    for output in cell['outputs']:
        for part in (output.get('text', ''), *(v for k, v in output.get('data', {}).items() if not k.startswith('image/'))):
            yield part if isinstance(part, str) else ''.join(part) if isinstance(part, list) else json.dumps(part)

each = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)

def test_there_are_notebooks(): assert {'00_core', 'index'} <= {p.stem for p in NOTEBOOKS} and EXPERIMENTS

@pytest.mark.parametrize('path', EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_has_one_cell_of_typed_commented_parameters(path):
    tagged = [c for c in cells(path) if 'parameters' in c['metadata'].get('tags', [])]
    assert len(tagged) == 1
    body = ast.parse(tagged[0]['source']).body
    assert body and all(isinstance(n, ast.AnnAssign) for n in body)
    ast.literal_eval(body[-1].value)
    assert 'run_dir' in [n.target.id for n in body]
    assert not directives(tagged[0]), 'papermill would overlook nbdev directives, and nbdev would export the defaults'

@each
def test_cell_ids_are_unique_and_readable(path):
    ids = [c['id'] for c in cells(path)]
    assert len(ids) == len(set(ids))
    assert [i for i in ids if not re.fullmatch(r'[a-z][a-z0-9-]{1,40}', i)] == []

@each
def test_exported_cells_fit_on_a_screen(path):
    long = {c['id']: len(c['source'].splitlines()) for c in cells(path, 'code') if {'export', 'exports', 'exporti'} & set(directives(c))}
    assert {k: n for k, n in long.items() if n > 40} == {}

@each
def test_every_cell_can_run(path):
    "papermill ignores nbdev's directives: it runs such cells all the same."
    assert [c['id'] for c in cells(path, 'code') if re.search(r'^#\|\s*eval:\s*false', c['source'], re.M)] == []

@each
def test_outputs_are_fit_to_read(path):
    code = cells(path, 'code')
    assert [c['id'] for c in code if any(o['output_type'] == 'error' for o in c['outputs'])] == []
    assert [c['id'] for c in code if any(o.get('name') == 'stderr' for o in c['outputs'])] == []
    assert len(json.dumps([c['outputs'] for c in code])) < 200_000

@each
def test_outputs_name_no_machine(path):
    private = re.compile('|'.join([r'/(home|root|Users|tmp|var|private|work|mnt)/\w', r'[A-Z]:\\\\', r'site-packages', re.escape(str(NBS.parent))]))
    found = {c['id']: private.search(text)[0] for c in cells(path, 'code') for text in shown(c) if private.search(text)}
    assert found == {}

@each
def test_a_lesson_starts_with_a_title_and_a_claim_or_question(path):
    first = next(c for c in cells(path, 'markdown'))['source']
    assert re.match(r'# \S[^\n]*\n\n> \S', first)
