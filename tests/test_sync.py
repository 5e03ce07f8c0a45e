"Notebooks, modules and README say the same; and the check notices when they do not."
import json, re, shutil, subprocess, sys
from pathlib import Path

import pytest

from stepwise_routing.run import config as run_config
from stepwise_routing.run import reproduce as run_reproduce

ROOT = Path(__file__).resolve().parents[1]
PROJECT = run_config.Project(ROOT)

def copy(to):
    for name in ('nbs', 'stepwise_routing', 'tables', 'figures'):
        if (ROOT/name).is_dir(): shutil.copytree(ROOT/name, to/name, ignore=shutil.ignore_patterns('__pycache__', '.*', 'micro_models'))
    for name in ('settings.ini', 'pyproject.toml', 'README.md'): shutil.copy(ROOT/name, to/name)
    return run_config.Project(to)

def test_the_clone_is_in_step(): assert run_reproduce.check_sync(PROJECT) == []

def test_each_way_of_falling_out_of_step_is_named(tmp_path):
    clone = copy(tmp_path)
    edited = json.loads((clone.nbs/'00_core.ipynb').read_text('utf-8'))
    next(c for c in edited['cells'] if c.get('id') == 'problem')['source'] += ['\n    note: str = ""']
    (clone.nbs/'00_core.ipynb').write_text(json.dumps(edited), 'utf-8') # not as nbdev_clean writes it, and not exported
    (clone.root/'README.md').write_text('edited by hand', 'utf-8')
    assert {'README.md', 'nbs/00_core.ipynb', 'stepwise_routing/core.py'} <= set(run_reproduce.check_sync(clone))

def test_the_readme_is_the_index_with_the_published_table(tmp_path):
    clone = copy(tmp_path)
    (clone.root/'tables').mkdir(exist_ok=True)
    (clone.root/'tables/table1.md').write_text('| some | other | table |\n\n**What Table 1 leaves out**\n\nmuch', 'utf-8')
    text = run_reproduce.readme(clone)
    assert '| some | other | table |' in text and 'leaves out' not in text and 'include:' not in text and '](../' not in text
    assert run_reproduce.readme(clone) == text

def test_readme_links_lead_somewhere():
    text = (ROOT/'README.md').read_text('utf-8')
    links = [l.split('#')[0] for l in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text) for l in l if l and not re.match(r'https?:|#', l)]
    assert links and [l for l in links if not (ROOT/l).exists()] == []

def test_the_readme_names_the_two_commands_and_what_stands_behind_them():
    text, make = (ROOT/'README.md').read_text('utf-8'), (ROOT/'Makefile').read_text('utf-8')
    assert 'make reproduce' in text and 'make test' in text
    for command in ("install -e '.[dev]' -c constraints.txt", 'stepwise-routing reproduce --profile micro', 'stepwise-routing test'):
        assert command in text and command in make

def test_the_library_example_of_the_readme_runs(tmp_path):
    code = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text('utf-8'), re.S)
    assert len(code) == 1
    *body, last = code[0].strip().splitlines()
    done = subprocess.run([sys.executable, '-c', '\n'.join([*body, f'print({last.split(" #")[0]})'])], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[(\('[01]+', (True|False)\)(, )?){4}\]", done.stdout.strip())

def requirement_lines():
    "name -> the pinned versions, by Python version"
    lines = [l for l in (ROOT/'constraints.txt').read_text('utf-8').splitlines() if l and not l.startswith('#')]
    return [re.fullmatch(r'([\w.-]+)==([\w.]+)(?:; (python_version [<>=]+ "3\.11"))?', l) for l in lines]

def test_every_constraint_is_an_exact_pin_and_satisfies_pyproject():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    tomllib = pytest.importorskip('tomllib') # Python 3.11
    pins = requirement_lines()
    assert pins and None not in pins
    project = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['project']
    wanted = [Requirement(r) for r in project['dependencies'] + project['optional-dependencies']['dev']]
    for requirement in wanted:
        versions = [m[2] for m in pins if canonicalize_name(m[1]) == canonicalize_name(requirement.name)]
        assert versions, f'{requirement.name} is not pinned'
        assert all(requirement.specifier.contains(v) for v in versions), requirement

def test_the_version_is_the_same_everywhere():
    from stepwise_routing import __version__
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
    tool, ini = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['tool']['nbdev'], (ROOT/'settings.ini').read_text('utf-8')
    assert tool['allowed_cell_metadata_keys'] == ['tags'] and 'allowed_cell_metadata_keys = tags\n' in ini
    assert f'tst_flags = {tool["tst_flags"]}\n' in ini
