"The README says what index and tables say; versions and pins agree. (`.ci/run` compares modules and notebooks.)"
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from stepwise_routing import __version__
from stepwise_routing.base.tools import Project
from stepwise_routing.report.paper_tables import PAPER_TABLES

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location('write_readme', ROOT/'.ci'/'readme.py')
spec.loader.exec_module(writer := importlib.util.module_from_spec(spec))

@pytest.fixture
def clone(tmp_path):
    for name in ('nbs', 'tables', 'figures'): shutil.copytree(ROOT/name, tmp_path/name,
                                                              ignore=shutil.ignore_patterns('.*'))
    return Project(tmp_path)

def index(clone, text):
    "The clone with another index."
    cell = dict(cell_type='markdown', id='text', metadata={}, source=text)
    (clone.nbs/'index.ipynb').write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)),
                                         'utf-8')

def test_the_readme_is_that_of_the_index():
    assert (ROOT/'README.md').read_text('utf-8') == writer.readme(Project(ROOT))

def test_the_picture_of_the_readme_is_that_of_the_notebook():
    assert (ROOT/'docs'/'method.svg').read_text('utf-8') == writer.method_picture(Project(ROOT))

def test_the_verdict_of_the_readme_is_that_of_the_claims():
    verdicts = pd.read_csv(ROOT/'tables'/'claims.csv').query('about == "method"')['verdict'].tolist()
    text, counts = (ROOT/'README.md').read_text('utf-8'), {v: verdicts.count(v) for v in set(verdicts)}
    assert set(counts) == {'holds', 'does not hold', 'cannot be tested here'}
    for words in (f'We turned {len(verdicts)} sentences of the paper about its method into claims',
                  f"{counts['does not hold']} are not confirmed for *Ours*",
                  f"{counts['holds']} hold, {counts['cannot be tested here']} cannot be tested"): assert words in text
    assert text.index('**The verdict.**') < 800 and 'stepwise-routing lab' in text

def test_a_table_is_included_up_to_a_phrase(clone):
    (clone.root/'tables/t.md').write_text('| a | table |\n\n**What it leaves out**\n\nmuch', 'utf-8')
    index(clone, 'See [it](../tables/t.md):\n\n<!-- include: ../tables/t.md up to: **What it leaves out** -->\n'
                 '<!-- include: ../tables/none.md -->')
    assert writer.readme(clone) == 'See [it](tables/t.md):\n\n| a | table |\n*(tables/none.md is not there yet)*\n'

def test_numbers_are_filled_in_by_name(clone, monkeypatch):
    monkeypatch.setattr(writer, 'numbers', lambda folder: dict(accuracy='93.1', folder=folder.name))
    index(clone, 'Right in {{accuracy}} % of {{folder}}; $\\frac{{1}}{2}$ is no name.')
    assert writer.readme(clone) == 'Right in 93.1 % of tables; $\\frac{{1}}{2}$ is no name.\n'
    index(clone, 'Right in {{acuracy}} %.')
    with pytest.raises(ValueError, match="asks for 'acuracy', which is in no table .did you mean 'accuracy'"):
        writer.readme(clone)

def test_the_papers_numbers_in_the_readme_are_those_of_its_table_1():
    "They are typed: accuracy, and cost in % of the large model's."
    rows = {name: [list(map(float, cell.split()[:2])) for cell in cells]
            for name, (_, *cells) in PAPER_TABLES['paper_flops']['rows'].items()}
    names = {'Small only': '1.5B Only', 'Large only': '7B Only', 'SpecReason': 'SpecReason', 'RSD': 'RSD',
             'STEER': 'STEER', 'Ours': 'Ours'}
    text = (ROOT/'README.md').read_text('utf-8')
    labels = list(pd.read_csv(ROOT/'tables'/'table1.csv').query('source == "this run"')['label'].unique())
    found = re.findall(r'^\| (.+?) \| [\d.]+ at ', text, re.M)
    assert [label for label in found if label != 'Bare threshold, regenerate'] == labels # the variants of Table 1
    for label, name in zip(labels, names.values()):
        assert label.startswith(next(k for k, v in names.items() if v == name))
        typed = re.findall(r'([\d.]+) at ([\d.]+)', re.search(rf'^\| {re.escape(label)} \|.*', text, re.M)[0])[3:]
        assert [list(map(float, pair)) for pair in typed] == [
            [accuracy, round(100*cost/large, 1)] for (accuracy, cost), (_, large) in zip(rows[name], rows['7B Only'])]

def test_readme_links_lead_somewhere():
    text = (ROOT/'README.md').read_text('utf-8')
    links = [x.split('#')[0] for m in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text) for x in m]
    inside = [x for x in links if x and not re.match(r'https?:', x)]
    assert inside and [x for x in inside if not (ROOT/x).exists()] == []

def test_the_readme_names_the_two_commands_and_what_stands_behind_them():
    text, make = (ROOT/'README.md').read_text('utf-8'), (ROOT/'Makefile').read_text('utf-8')
    assert 'make reproduce' in text and 'make test' in text
    for command in ("install -e '.[dev]' -c constraints.txt", 'stepwise-routing reproduce --profile micro',
                    'stepwise-routing reproduce --profile smoke', '-m pytest'):
        assert command in make

def test_the_library_examples_of_the_readme_run(tmp_path):
    code = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text('utf-8'), re.S)
    assert code
    run = [sys.executable, '-c', '\n'.join(code)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr

def pins(file='constraints.txt'):
    "Name, version and condition of every line."
    lines = [l for l in (ROOT/file).read_text('utf-8').splitlines() if l and not l.startswith('#')]
    return [re.fullmatch(r'([\w.-]+)==([\w.]+)(?:; (python_version [<>=]+ "3\.11"))?', l) for l in lines]

def test_every_constraint_is_an_exact_pin_and_satisfies_pyproject():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    tomllib = pytest.importorskip('tomllib') # Python 3.11
    assert pins() and None not in pins()
    project = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['project']
    extras = project['optional-dependencies']
    assert all('==' in requirement for extra in ('gpu', 'clients') for requirement in extras[extra])
    common = project['dependencies'] + [r for e in extras if e not in ('gpu', 'clients') for r in extras[e]]
    for file, requirements in (('constraints.txt', common), ('constraints-clients.txt', extras['clients'])):
        for requirement in map(Requirement, requirements):
            versions = [m[2] for m in pins(file) if canonicalize_name(m[1]) == canonicalize_name(requirement.name)]
            assert versions, f'{requirement.name} is not pinned'
            assert all(requirement.specifier.contains(v) for v in versions), requirement

def test_the_licences_are_those_of_what_is_installed():
    pytest.importorskip('tomllib') # Python 3.11
    spec = importlib.util.spec_from_file_location('licences', ROOT/'.ci/licences.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT/'LICENCES.md').read_text('utf-8')
    def lines(text): return [line for line in text.splitlines() if not line.startswith('| torch |')] # one a build
    assert lines(script.page(text)) == lines(text), 'run .ci/licences.py'
    assert 'not installed' not in text and len(script.direct()) > 30

def test_the_gpu_extra_has_the_same_pins_but_for_what_vllm_wants_otherwise():
    common, gpu = ({m[1]: [n[2] for n in pins(f) if n[1] == m[1]] for m in pins(f)}
                   for f in ('constraints.txt', 'constraints-gpu.txt'))
    assert {k for k in common if common[k] != gpu.get(k)} == {'lark', 'llvmlite', 'numba', 'numpy', 'setuptools'}

@pytest.mark.parametrize('extra', ['gpu', 'ray', 'hub'])
def test_the_line_that_installs_an_extra_names_what_there_is(extra):
    from stepwise_routing.base.tools import install_line
    line = install_line(extra)
    name, file = re.fullmatch(r'pip install -e "\.\[(\w+)\]" -c (\S+) \(in the clone\)', line).groups()
    assert name == extra and (ROOT/file).is_file() and f'\n{extra} = [' in (ROOT/'pyproject.toml').read_text('utf-8')

def test_the_version_is_the_same_everywhere():
    assert f'version = {__version__}\n' in (ROOT/'settings.ini').read_text('utf-8')
    assert f'version: {__version__}\n' in (ROOT/'CITATION.cff').read_text('utf-8')
    assert f'## {__version__}' in (ROOT/'CHANGELOG.md').read_text('utf-8')

def test_the_citation_names_the_paper():
    import yaml
    cff = yaml.safe_load((ROOT/'CITATION.cff').read_text('utf-8'))
    assert cff['cff-version'] == '1.2.0' and cff['license'] == 'Apache-2.0'
    assert [a['family-names'] for a in cff['preferred-citation']['authors']] == ['Si', 'Lee', 'Bastani']

def test_both_nbdevs_read_the_same_settings():
    tomllib = pytest.importorskip('tomllib')
    tool = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['tool']['nbdev']
    ini = (ROOT/'settings.ini').read_text('utf-8')
    assert tool['allowed_cell_metadata_keys'] == ['tags', 'jupyter']
    assert 'allowed_cell_metadata_keys = tags jupyter\n' in ini
    assert f'tst_flags = {tool["tst_flags"]}\n' in ini

def test_the_router_of_contributing_is_one():
    from dataclasses import dataclass

    import numpy as np

    from stepwise_routing.method.comparison import grid_search
    from stepwise_routing.method.outcomes import toy_table
    from stepwise_routing.method.routers import ThresholdRouter
    code = re.findall(r'```python\n(.*?)```', (ROOT/'CONTRIBUTING.md').read_text('utf-8'), re.S)
    names = dict(np=np, dataclass=dataclass, ThresholdRouter=ThresholdRouter, grid_search=grid_search,
                 table=toy_table(100, 'calibration'))
    exec(code[0], names)
    grid = grid_search(names['Patience'](), names['table'])
    assert grid.cost[0] < grid.cost[-1] # from the small model alone to handing over at once

def shared_names():
    "The files that `init` copies, by pyproject.toml."
    tomllib = pytest.importorskip('tomllib')
    data_files = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['tool']['setuptools']['data-files']
    assert all(folder.startswith('share/stepwise-routing') for folder in data_files)
    return [p.relative_to(ROOT).as_posix() for names in data_files.values() for n in names for p in ROOT.glob(n)]

def test_a_new_folder_says_what_to_type_next(tmp_path, monkeypatch, capsys):
    "Also for a folder with a space in its name; a wheel whose files pip put elsewhere is one line."
    from importlib import metadata

    from stepwise_routing.run import cli, new_folder
    (tmp_path/'wheel'/'nbs').mkdir(parents=True)
    (tmp_path/'wheel'/'nbs'/'x.ipynb').write_text(json.dumps(dict(cells=[])))
    monkeypatch.setattr(new_folder, 'shared_files', lambda: {'nbs/x.ipynb': tmp_path/'wheel/nbs/x.ipynb'})
    monkeypatch.setattr(cli, 'PACKAGE', tmp_path/'site'/'stepwise_routing')
    cli.main(['init', str(tmp_path/'my folder')])
    assert f"Next: stepwise-routing reproduce '{tmp_path}/my folder' --profile smoke," in capsys.readouterr().out
    monkeypatch.undo()
    gone = metadata.PackagePath(f'../../{new_folder.SHARED}CHANGELOG.md')
    gone.dist = metadata.Distribution.at(tmp_path/'site'/'x.dist-info')
    monkeypatch.setattr(metadata, 'files', lambda name: [gone])
    with pytest.raises(FileNotFoundError, match='CHANGELOG.md, a file of the wheel, is missing: .* without --target'):
        new_folder.shared_files()

def test_every_link_of_a_new_folder_leads_somewhere(tmp_path):
    from stepwise_routing.run.new_folder import make_folder
    names = shared_names()
    assert {'README.md', 'nbs/05_results.ipynb', 'nbs/labs/03_when_worth.ipynb', 'nbs/params/micro.yaml',
            'tables/evaluation.csv', 'tables/recorded/table1.md', 'figures/accuracy_cost.png'} <= set(names)
    make_folder(tmp_path, {name: ROOT/name for name in names})
    kept = 0
    for path in [*tmp_path.rglob('*.md'), *tmp_path.rglob('*.ipynb')]:
        text = path.read_text('utf-8')
        if path.suffix == '.ipynb':
            cells = json.loads(text)['cells']
            old = json.loads((ROOT/path.relative_to(tmp_path)).read_text('utf-8'))['cells']
            assert [c for c in cells if c['cell_type'] == 'code'] == [c for c in old if c['cell_type'] == 'code']
            text = ''.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
        prose = re.sub(r'```.*?```|`[^`\n]*`|\$[^$\n]+\$', '', text, flags=re.S)
        links = re.findall(r'\]\(([^)\s#]+)[^)\s]*\)', prose)
        inside = [link for link in links if not re.match('https?:|mailto:', link)]
        kept += len(inside)
        assert [link for link in inside if not (path.parent/link).exists()] == [], path
    assert kept > 60

def test_the_figure_and_the_table_of_contributing_are_made(tmp_path):
    code = re.findall(r'```py\n(.*?)```', (ROOT/'CONTRIBUTING.md').read_text('utf-8'), re.S)
    shutil.copytree(ROOT/'tables', tmp_path/'tables')
    run = [sys.executable, '-c', code[0] + '\nassert text.count("Large only") == 3 and "RSD" not in text']
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path/'accuracy_cost.pdf').read_bytes()[:4] == b'%PDF'

@pytest.mark.slow
def test_a_wheel_brings_notebooks_and_profiles_to_a_folder_outside_of_a_clone(tmp_path):
    "Built, installed and asked for a plan, as somebody does who has no clone."
    listing = ['git', 'ls-files', '-co', '--exclude-standard', '-z']
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout
    for name in filter(None, files.split('\0')): # a build leaves folders behind
        if (ROOT/name).is_file():
            (tmp_path/'source'/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/name, tmp_path/'source'/name)
    pip = [sys.executable, '-m', 'pip', '-q']
    quick = ['--no-deps', '--no-index']
    subprocess.run([*pip, 'wheel', *quick, '--no-build-isolation', '-w', tmp_path, tmp_path/'source'], check=True)
    wheel, = tmp_path.glob('*.whl')
    beside = ['--ignore-installed', '--prefix', tmp_path/'installed'] # else pip removes the one that runs this test
    subprocess.run([*pip, 'install', *quick, *beside, wheel], check=True)
    site, = (tmp_path/'installed').rglob('site-packages')
    outside = tmp_path/'elsewhere'
    outside.mkdir()
    def command(*args):
        code = 'from stepwise_routing.run.cli import main; main()'
        return subprocess.run([sys.executable, '-c', code, *args], cwd=outside, capture_output=True, text=True,
                              env=os.environ | dict(PYTHONPATH=str(site)))
    assert 'stepwise-routing init DIR' in command('reproduce', '--dry-run').stderr
    assert command('init').stderr == 'stepwise-routing: name the new folder: stepwise-routing init DIR\n'
    made = command('init', 'mine')
    assert made.returncode == 0, made.stderr
    there = {p.relative_to(outside/'mine').as_posix() for p in (outside/'mine').rglob('*') if p.is_file()}
    assert there == set(shared_names())
    drawn = command('figures', 'mine')
    assert drawn.returncode == 0 and len(drawn.stdout.splitlines()) > 10, drawn.stderr
    planned = command('reproduce', 'mine', '--profile', 'smoke', '--dry-run')
    assert planned.returncode == 0 and 'run      05_results' in planned.stdout.splitlines(), planned.stderr
    assert 'exists already' in command('init', 'mine').stderr

def test_in_a_clone_there_is_nothing_to_copy(tmp_path, capsys):
    from stepwise_routing.run.cli import main
    with pytest.raises(SystemExit): main(['init', str(tmp_path/'mine')])
    assert capsys.readouterr().err == f'stepwise-routing: the package is installed from the clone {ROOT}: '\
        'work in the clone, it needs no init\n'
