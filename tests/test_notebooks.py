"What every notebook in nbs/ promises the runner."
import json
import re
from pathlib import Path

import papermill
import pytest
from stepwise_routing.run.notebooks import notebook_cells, stage_names

from stepwise_routing.util import Project

NBS = Path(__file__).resolve().parents[1]/'nbs'
NOTEBOOKS = sorted(p for p in NBS.rglob('*.ipynb')
                   if not any(x.startswith(('.', '_')) for x in p.relative_to(NBS).parts))
each = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.relative_to(NBS).with_suffix('').as_posix())

def code_cells(path): return [c for c in notebook_cells(path) if c['cell_type'] == 'code']

def texts(cell):
    "All text that a cell has put out."
    for output in cell['outputs']:
        data = {k: v for k, v in output.get('data', {}).items() if not k.startswith('image/')}
        yield json.dumps([output.get('text', ''), *data.values()])

@pytest.mark.parametrize('name', stage_names(Project(NBS.parent)))
def test_papermill_lists_every_parameter_of_a_stage(name):
    told = papermill.inspect_notebook(str(NBS/f'{name}.ipynb'))
    kinds = {k: (p['inferred_type_name'], p['default'], bool(p['help'])) for k, p in told.items()}
    assert kinds == dict(profile=('str', '"micro"', True), run_dir=('str', '""', True), changes=('dict', '{}', True))

def test_make_test_runs_every_notebook_once():
    "The smoke run executes the stages, so nbdev_test leaves these out."
    listed = re.search(r'^STAGES := (.*)$', (NBS.parent/'Makefile').read_text('utf-8'), re.M)[1]
    assert listed.split('|') == stage_names(Project(NBS.parent))

@each
def test_cell_ids_are_unique_and_readable(path):
    ids = [c['id'] for c in notebook_cells(path)]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r'[a-z][a-z0-9-]{1,40}', i) for i in ids)

@each
def test_outputs_hold_no_errors_and_name_no_machine(path):
    outputs = [o for c in code_cells(path) for o in c['outputs']]
    assert not any(o['output_type'] == 'error' or o.get('name') == 'stderr' for o in outputs)
    folders = r'/(home|root|Users|tmp|var|private|work|mnt)/\w', r'[A-Z]:\\\\', r'site-packages'
    private = re.compile('|'.join((*folders, re.escape(str(NBS.parent)))))
    assert [c['id'] for c in code_cells(path) if any(map(private.search, texts(c)))] == []
