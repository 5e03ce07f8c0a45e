"Notebooks, modules and README are in step; links lead somewhere; outputs name no machine."

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import papermill
import pytest

from stepwise_routing.run.reproduce import STAGES, parameters_of
from stepwise_routing.run.stages import open_run

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(path.relative_to(ROOT) for path in ROOT.glob('nbs/**/[!.]*.ipynb'))
CELLS = {path: json.loads((ROOT / path).read_text('utf-8'))['cells'] for path in NOTEBOOKS}
PRIVATE = r'/(home|root|Users|tmp|var|private|work|mnt)/\w|[A-Z]:\\\\|site-packages'


def test_modules_and_readme_are_those_of_the_notebooks(tmp_path, monkeypatch):
    shutil.copytree(ROOT / 'nbs', tmp_path / 'nbs')
    (tmp_path / 'stepwise_routing').mkdir()
    for name in ('pyproject.toml', 'settings.ini', 'stepwise_routing/__init__.py'):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    subprocess.run([Path(sys.executable).with_name('nbdev_export')], check=True)
    runpy.run_path(str(ROOT / '.ci' / 'readme.py'))
    made = [*Path('stepwise_routing').rglob('*.py'), Path('README.md')]
    assert len(made) > 8
    assert [path for path in made if path.read_bytes() != (ROOT / path).read_bytes()] == []


def test_every_link_leads_somewhere():
    pages = {path: path.read_text('utf-8') for path in ROOT.glob('*.md')}
    for path, cells in CELLS.items():
        texts = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
        pages[ROOT / path] = '\n'.join(texts)
    dead = []
    for path, text in pages.items():
        prose = re.sub(r'```.*?```|`[^`\n]*`|\$[^$\n]+\$', '', text, flags=re.S)
        links = re.findall(r'\]\(([^)\s#]+)|src="([^"]+)"', prose)
        local = [link for pair in links for link in pair if link and ':' not in link]
        dead += [(path.name, link) for link in local if not (path.parent / link).exists()]
    assert dead == [] and (ROOT / 'docs' / 'method.svg').is_file()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=str)
def test_a_notebook_is_small_names_no_machine_and_takes_parameters(path):
    outputs = [output for cell in CELLS[path] for output in cell.get('outputs', ())]
    assert (ROOT / path).stat().st_size < 3e6
    assert not [o for o in outputs if o['output_type'] == 'error' or o.get('name') == 'stderr']
    for output in outputs:
        data = {kind: x for kind, x in output.get('data', {}).items() if 'image' not in kind}
        assert not re.search(PRIVATE, json.dumps([output.get('text', ''), data]))
    if path.stem in STAGES:
        parameters = papermill.inspect_notebook(str(ROOT / path))
        assert set(parameters) == set(parameters_of(open_run(), 'micro', {}))
