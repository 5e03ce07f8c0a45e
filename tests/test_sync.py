"Notebooks, modules and README are in step; links lead somewhere; outputs name no machine."

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import papermill
import pytest

from stepwise_routing.run.reproduce import LESSONS, STAGES, parameters_of
from stepwise_routing.run.stages import open_run

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(path.relative_to(ROOT) for path in ROOT.glob('nbs/**/[!.]*.ipynb'))
PRIVATE = r'/(home|root|Users|tmp|var|private|work|mnt)/\w|[A-Z]:\\\\|site-packages'


def cells(path) -> list:
    return json.loads((ROOT / path).read_text('utf-8'))['cells']


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    "A copy of what is committed, without exported modules and README; these are made again."
    root = tmp_path_factory.mktemp('copy')
    shutil.copytree(ROOT / 'nbs', root / 'nbs')
    shutil.copy(ROOT / 'pyproject.toml', root)
    shutil.copy(ROOT / 'settings.ini', root)
    (root / 'stepwise_routing').mkdir()
    shutil.copy(ROOT / 'stepwise_routing' / '__init__.py', root / 'stepwise_routing')
    subprocess.run(['nbdev_export'], cwd=root, check=True)
    with pytest.MonkeyPatch.context() as m:
        m.chdir(root)
        runpy.run_path(str(ROOT / '.ci' / 'readme.py'))
    return root


def test_modules_and_readme_are_those_of_the_notebooks(copy):
    made = {path.relative_to(copy) for path in copy.rglob('*.py')} | {Path('README.md')}
    assert len(made) > 8
    differ = [path for path in made if (copy / path).read_bytes() != (ROOT / path).read_bytes()]
    assert differ == []


def test_every_link_leads_somewhere():
    pages = {path: path.read_text('utf-8') for path in ROOT.glob('*.md')}
    for path in NOTEBOOKS:
        texts = [''.join(cell['source']) for cell in cells(path) if cell['cell_type'] == 'markdown']
        pages[ROOT / path] = '\n'.join(texts)
    dead = []
    for path, text in pages.items():
        prose = re.sub(r'```.*?```|`[^`\n]*`|\$[^$\n]+\$', '', text, flags=re.S)
        links = re.findall(r'\]\(([^)\s#]+)|src="([^"]+)"', prose)
        local = [link for pair in links for link in pair if link and ':' not in link]
        dead += [(path.name, link) for link in local if not (path.parent / link).exists()]
    assert dead == [] and (ROOT / 'docs' / 'method.svg').is_file()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=str)
def test_a_notebook_is_small_and_its_outputs_name_no_machine(path):
    outputs = [output for cell in cells(path) for output in cell.get('outputs', ())]
    assert (ROOT / path).stat().st_size < 3e6
    assert not [o for o in outputs if o['output_type'] == 'error' or o.get('name') == 'stderr']
    texts = [json.dumps(output.get('text', '')) for output in outputs]
    data = [output.get('data', {}) for output in outputs]
    texts += [json.dumps(text) for of in data for kind, text in of.items() if 'image' not in kind]
    assert [text for text in texts if re.search(PRIVATE, text)] == []


def test_every_chapter_is_run_and_stages_have_the_parameters_of_a_run():
    script = (ROOT / '.ci' / 'lessons.py').read_text()
    chapters = [path.stem for path in NOTEBOOKS if path.parent.name == 'nbs']
    run = {*STAGES, *LESSONS}
    assert {name for name in chapters if name not in script} == {*run, 'index'} - set()
    expected = set(parameters_of(open_run(), 'micro', {}))
    for name in STAGES:
        assert set(papermill.inspect_notebook(str(ROOT / 'nbs' / f'{name}.ipynb'))) == expected
