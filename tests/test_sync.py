"README and index say the same; versions and pins agree; the code in CONTRIBUTING runs."
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepwise_routing import __version__
from stepwise_routing.util import Project, install_line

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location('write_readme', ROOT/'.ci'/'readme.py')
spec.loader.exec_module(writer := importlib.util.module_from_spec(spec))

def test_readme_and_its_picture_are_those_of_the_notebooks():
    assert (ROOT/'README.md').read_text('utf-8') == writer.readme(Project(ROOT))
    assert (ROOT/'docs'/'method.svg').read_text('utf-8') == writer.method_picture(Project(ROOT))

def test_every_link_leads_somewhere():
    pages = {p: p.read_text('utf-8') for p in ROOT.glob('*.md')}
    for path in (ROOT/'nbs').rglob('*.ipynb'):
        if not re.search(r'/[._]', path.relative_to(ROOT).as_posix()):
            cells = json.loads(path.read_text('utf-8'))['cells']
            pages[path] = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    dead = []
    for path, text in pages.items():
        prose = re.sub(r'```.*?```|`[^`\n]*`|\$[^$\n]+\$', '', text, flags=re.S)
        links = [m for m in re.findall(r'\]\(([^)\s]+)\)', prose) if not re.match(r'https?:|mailto:|#', m)]
        dead += [(path.name, link) for link in links if not (path.parent/link.split('#')[0]).exists()]
    assert dead == []

@pytest.mark.slow
def test_the_code_of_contributing_runs(tmp_path):
    shutil.copytree(ROOT/'tables', tmp_path/'tables')
    table = 'from stepwise_routing.method.outcomes import toy_table\ntable = toy_table(100, "calibration")\n'
    contributing = (ROOT/'CONTRIBUTING.md').read_text('utf-8')
    code = [table + re.findall(r'```python\n(.*?)```', contributing, re.S)[0],
            re.findall(r'```py\n(.*?)```', contributing, re.S)[0]]
    for text in code:
        run = [sys.executable, '-c', text]
        env = os.environ | dict(PYTHONPATH=str(ROOT))
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert text.strip() and done.returncode == 0, done.stderr

def pins(file='constraints.txt'):
    "Name, version and condition of every line."
    lines = [l for l in (ROOT/file).read_text('utf-8').splitlines() if l and not l.startswith('#')]
    return [re.fullmatch(r'([\w.-]+)==([\w.]+)(?:; (python_version [<>=]+ "3\.11"))?', l) for l in lines]

def test_every_constraint_is_an_exact_pin_and_satisfies_pyproject():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    tomllib = pytest.importorskip('tomllib') # Python 3.11
    project = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['project']
    extras = project['optional-dependencies']
    common = project['dependencies'] + [r for e in extras if e not in ('gpu', 'clients') for r in extras[e]]
    for file, requirements in (('constraints.txt', common), ('constraints-clients.txt', extras['clients'])):
        assert pins(file) and None not in pins(file)
        for requirement in map(Requirement, requirements):
            versions = [m[2] for m in pins(file) if canonicalize_name(m[1]) == canonicalize_name(requirement.name)]
            assert versions and all(requirement.specifier.contains(v) for v in versions), requirement
    for extra in ('gpu', 'ray', 'hub'):
        assert extra in extras and (ROOT/re.search(r'-c (\S+)', install_line(extra))[1]).is_file()

def test_the_version_is_the_same_everywhere():
    assert f'version = {__version__}\n' in (ROOT/'settings.ini').read_text('utf-8')
    assert f'version: {__version__}\n' in (ROOT/'CITATION.cff').read_text('utf-8')
    assert f'## {__version__}' in (ROOT/'CHANGELOG.md').read_text('utf-8')
