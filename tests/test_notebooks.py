"What every notebook in nbs/ promises its readers and the runner."
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepwise_routing.base.tools import Project
from stepwise_routing.run.notebooks import lesson_sources, notebook_cells, stage_names

NBS = Path(__file__).resolve().parents[1]/'nbs'
NOTEBOOKS = sorted(p for p in NBS.rglob('*.ipynb') if not any(x.startswith(('.', '_'))
                                                              for x in p.relative_to(NBS).parts))
RUN_CELL = '''profile: str = "micro"  # name of a file in nbs/params, or a .yaml file of yours
run_dir: str = ""  # folder of the run; "" is the newest run of the profile
changes: dict = {}  # settings to change, e.g. {"policy.alpha": 0.05}'''

def cells(path, kind=None): return [c for c in notebook_cells(path) if kind in (None, c['cell_type'])]

def directives(cell): return re.findall(r'^#\|\s*(\S+)', cell['source'], re.M)

def texts(cell):
    "All text that a cell has put out."
    for output in cell['outputs']:
        data = {k: v for k, v in output.get('data', {}).items() if not k.startswith('image/')}
        for part in (output.get('text', ''), *data.values()):
            if isinstance(part, list): part = ''.join(part)
            yield part if isinstance(part, str) else json.dumps(part)

each = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.relative_to(NBS).with_suffix('').as_posix())

STAGES = ['01_confidence', '02_rollouts', '02b_outcomes', '03b_training', '04b_comparison', '05_results']
LESSONS = ['00_records', '02a_walks', '02c_certain', '03_policy', '03a_cpo', '04_baselines', '04a_bounds',
           '06_your_own_models']

def test_there_are_six_stages_and_eight_lessons():
    project = Project(NBS.parent)
    lessons = [name for name in lesson_sources(project) if '/' not in name]
    assert stage_names(project) == STAGES and lessons == [*LESSONS, 'claims', 'index', 'method_on_one_page', 'pictures']

@pytest.mark.parametrize('name', STAGES)
def test_a_stage_has_the_one_cell_of_parameters(name):
    assert [c['source'] for c in cells(NBS/f'{name}.ipynb')
            if 'parameters' in c['metadata'].get('tags', [])] == [RUN_CELL]

def test_papermill_lists_every_parameter_of_a_stage_and_takes_it(tmp_path, caplog):
    "`papermill --help-notebook`: name, type, default and meaning; what the runner passes is known to it."
    import papermill as pm
    meant = {m[1]: m.groups() for m in re.finditer(r'^(\w+): (\w+) = (\S+) +# (.+)$', RUN_CELL, re.M)}
    for name in stage_names(Project(NBS.parent)):
        told = pm.inspect_notebook(str(NBS/f'{name}.ipynb'))
        rows = {k: (k, p['inferred_type_name'], p['default'], p['help']) for k, p in told.items()}
        assert rows == meant and len(meant) == 3
        passed = dict(profile='smoke', run_dir='runs/x', changes={'policy.alpha': .05})
        options = dict(prepare_only=True, kernel_name='python3', language='python')
        pm.execute_notebook(str(NBS/f'{name}.ipynb'), str(tmp_path/f'{name}.ipynb'), passed, **options)
    assert 'unknown parameter' not in caplog.text
    pm.execute_notebook(str(NBS/f'{name}.ipynb'), str(tmp_path/'typo.ipynb'), dict(profle='smoke'), **options)
    assert 'unknown parameter: profle' in caplog.text # or the line above would prove nothing

def test_make_test_runs_every_notebook_once():
    "The smoke run executes the stages, so nbdev_test leaves these out."
    listed = re.search(r'^STAGES := (.*)$', (NBS.parent/'Makefile').read_text('utf-8'), re.M)[1]
    assert listed.split('|') == stage_names(Project(NBS.parent))

@each
def test_cell_ids_are_unique_and_readable(path):
    ids = [c['id'] for c in cells(path)]
    assert len(ids) == len(set(ids))
    assert [i for i in ids if not re.fullmatch(r'[a-z][a-z0-9-]{1,40}', i)] == []

@each
def test_every_cell_can_run(path):
    "papermill ignores nbdev's directives: it runs such cells all the same."
    assert [c['id'] for c in cells(path, 'code') if re.search(r'^#\|\s*eval:\s*false', c['source'], re.M)] == []

@each
def test_code_is_python(path):
    for c in cells(path, 'code'): ast.parse(re.sub(r'^\s*[%!].*$', 'pass', c['source'], flags=re.M))

ILLUSTRATED = {'pictures': 460_000, '05_results': 310_000} # with pictures as vectors and as pixels

@each
def test_outputs_are_fit_to_read(path):
    code = cells(path, 'code')
    assert [c['id'] for c in code if any(o['output_type'] == 'error' for o in c['outputs'])] == []
    assert [c['id'] for c in code if any(o.get('name') == 'stderr' for o in c['outputs'])] == []
    assert len(json.dumps([c['outputs'] for c in code])) < ILLUSTRATED.get(path.stem, 280_000)

@each
def test_outputs_name_no_machine(path):
    folders = r'/(home|root|Users|tmp|var|private|work|mnt)/\w', r'[A-Z]:\\\\', r'site-packages'
    private = re.compile('|'.join((*folders, re.escape(str(NBS.parent)))))
    named = {c['id']: private.search(text)[0] for c in cells(path, 'code') for text in texts(c) if private.search(text)}
    assert named == {}

@each
def test_a_notebook_starts_with_a_title_and_a_claim_or_question(path):
    first = next(c for c in cells(path, 'markdown'))['source']
    assert re.match(r'# \S[^\n]*\n\n(> |\*\*Question)\S', first)

def test_the_claims_are_run_in_a_folder_of_any_name(tmp_path):
    "05 runs another notebook, and the path of a clone may hold what a line of IPython would read as a quote."
    nbs = tmp_path/'my "own" {x} $y'/'nbs'
    (nbs/'params').mkdir(parents=True)
    source = next(c['source'] for c in cells(NBS/'05_results.ipynb', 'code') if '%run' in c['source'])
    lines = source.split('\n')[:2]
    notebook = dict(nbformat=4, nbformat_minor=5, metadata={}, cells=[dict(
        cell_type='code', id='a', metadata={}, outputs=[], execution_count=None, source="print('it has run')")])
    (nbs/'claims.ipynb').write_text(json.dumps(notebook))
    code = '\n'.join(['import os', 'from stepwise_routing.base.tools import find_project', *lines])
    command = sys.executable, '-m', 'IPython', '--quick', '-c', code
    done = subprocess.run(command, cwd=nbs, capture_output=True, text=True)
    assert 'it has run' in done.stdout, done.stdout + done.stderr
