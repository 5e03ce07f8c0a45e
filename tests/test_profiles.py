"The committed profiles: what they say, and that open.yaml and api.yaml run as they are written."
import ast
import csv
import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from stepwise_routing.base.settings import Policy
from stepwise_routing.base.tools import Project
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.run import cli, needs
from stepwise_routing.run.config import FOLDER_NAME, Api, Data, read_run, read_yaml, settings_of
from stepwise_routing.run.manifest import Manifest
from stepwise_routing.run.stages import setting_options
from stepwise_routing.run.sweep import planned

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
PROFILES = sorted(p.stem for p in PROJECT.params.glob('*.yaml'))

@pytest.fixture
def clone(tmp_path):
    "The notebooks and profiles of this clone, without its runs."
    for name in ('nbs', 'tests/data'):
        shutil.copytree(ROOT/name, tmp_path/'clone'/name, ignore=shutil.ignore_patterns('.*'))
    return Project(tmp_path/'clone')

def everything(folder):
    "Folders and files with their bytes."
    paths = sorted(folder.rglob('*'))
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in paths}

def dry(project, capsys, *args):
    "(exit status, lines) of a dry run."
    try: cli.main(['--project', str(project.root), 'reproduce', '--dry-run', *args]); status = 0
    except SystemExit as e: status = e.code
    out, err = capsys.readouterr()
    return status, (out + err).splitlines()

def test_the_profiles_are_there():
    assert {'smoke', 'micro', 'micro-ablations', 'recorded', 'open', 'open-lite', 'api'} <= set(PROFILES)

@pytest.mark.parametrize('profile', PROFILES)
@pytest.mark.parametrize('missing', ([], ['needs a GPU', 'needs a key']))
def test_a_dry_run_writes_nothing_and_tells_what_is_missing(clone, capsys, offline, monkeypatch, profile, missing):
    monkeypatch.setattr(needs, 'report', lambda run: [f'estimate {run.profile}'], raising=False)
    monkeypatch.setattr(needs, 'needs', lambda run: missing)
    before = everything(clone.root)
    status, lines = dry(clone, capsys, '--profile', profile)
    assert everything(clone.root) == before
    assert status == int(bool(missing)) and lines[-len(missing) - 1:] == [f'estimate {profile}', *missing]
    store = 'micro' if profile == 'micro-ablations' else profile
    assert 'run      02_rollouts' in lines and f'store    runs/store/{store}: 0.0 MB' in lines

@pytest.mark.parametrize('change, message', [
    ('open.n_tran=3', "unknown setting 'open.n_tran' (did you mean 'open.n_train'?)"),
    ('n_train=3', "unknown setting 'n_train' (did you mean 'open.n_train'?)"),
    ('open.n_train=many', "open.n_train is 'many': it should be a valid integer or a valid dictionary or None"),
    ('data.max_steps=[30]', 'data.max_steps is [30]: it should be a valid integer or a valid dictionary')])
def test_unknown_settings_and_types_are_refused(clone, capsys, change, message):
    status, lines = dry(clone, capsys, '--profile', 'open', '-p', change)
    assert status == 2 and len(lines) == 1 and message in lines[0]

def test_a_section_takes_what_yaml_reads_and_is_frozen():
    policy = Policy(lr='1e-5', temp=[1, .5], hidden=[8], batch=None)
    assert (policy.lr, policy.temp, policy.hidden, policy.batch) == (1e-5, (1., .5), (8,), None)
    assert type(policy.temp[0]) is float and policy == Policy(lr=1e-5, temp=(1., .5), hidden=(8,), batch=None)
    assert Api(models=[]).models == () and Data(max_steps=dict(default=30)).max_steps == dict(default=30)
    with pytest.raises(FrozenInstanceError): policy.lr = 1.

@pytest.mark.parametrize('make, message', [
    (lambda: Policy(alpa=.1), "unknown setting 'alpa' (did you mean 'alpha'?)"),
    (lambda: Policy(temp=(.1, 0)), 'temp is (0.1, 0): 0 should be greater than 0'),
    (lambda: Policy(temp=[.5]), 'temp is [0.5]: it should be a list of 2'),
    (lambda: Policy(lr='fast'), "lr is 'fast': it should be a valid number"),
    (lambda: Policy(alpha=True), 'alpha is True: it should be a valid number'),
    (lambda: Policy(batch='all'), "batch is 'all': it should be a valid integer or None"),
    (lambda: Policy(sign='corected'),
     "sign is 'corected' (did you mean 'corrected'?): it should be 'corrected' or 'printed'"),
    (lambda: Data(max_steps=dict(default=0)),
     "max_steps is {'default': 0}: 0 should be greater than or equal to 1"),
    (lambda: Api(models=('micro-small',)),
     "models is ('micro-small',): it should be a list of a small and a large model, or []")])
def test_a_section_refuses_a_wrong_value_in_one_line(make, message):
    with pytest.raises(ValueError) as e: make()
    assert str(e.value) == message

def test_a_section_is_a_table_in_a_notebook():
    rows = Api()._repr_markdown_().split('\n')
    assert len(rows) == 12 and rows[0] == '| name | value | meaning |'
    assert '| n_test | `24` | problems per benchmark that are reported |' in rows # an inherited field

@pytest.mark.parametrize('profile', ('open', 'open-lite', 'api'))
def test_the_papers_settings(profile):
    c = read_run(profile, project=PROJECT).config
    assert c.data.benchmarks == ('gsm8k', 'math500', 'omnimath') and c.policy.alpha == .02
    assert (c.models.context, c.data.max_steps) == (4096, dict(default=30, omnimath=100))
    names = [m for m in (*c.open.models, *c.api.models, c.data.grader) if not m.startswith('openai:')]
    assert names and all(re.search('@([0-9a-f]{40})$', m) for m in names)
    if profile != 'open-lite': assert (c.policy.steps, c.policy.batch) == (1000, 50)
    assert bool(c.open.models) != bool(c.api.models)

def test_the_small_variant_is_the_open_profile_with_fewer_problems_and_policies():
    whole, lite = (settings_of(read_run(p, project=PROJECT).config) for p in ('open', 'open-lite'))
    sections = dict(open=('n_train', 'n_calibration', 'n_test'), policy=('batch', 'steps'),
                    baselines=('walk_thresholds',),
                    sweep=('ablations', 'most_steps', 'per_step', 'per_step_steps', 'per_step_batch',
                           'per_step_problems'))
    fewer = {f'{section}.{name}' for section, names in sections.items() for name in names}
    assert {k for k in whole if whole[k] != lite[k]} <= fewer and lite['open.n_train'] == lite['open.n_test'] == 200

def test_the_ablations_have_the_problems_draws_and_policies_of_micro_and_more():
    runs = [read_run(p, project=PROJECT) for p in ('micro', 'micro-ablations')]
    micro, more = (settings_of(run.config) for run in runs)
    names = 'seeds ablations per_step ablation_seeds per_step_steps per_step_batch per_step_problems'.split()
    assert {k for k in micro if micro[k] != more[k]} == {'store', *(f'sweep.{k}' for k in names)}
    assert more['sweep.ablations'] and more['sweep.per_step'] and not micro['sweep.ablations']
    jobs = [[(setting.name, job) for setting in run.settings for job in planned(setting)] for run in runs]
    assert set(jobs[0]) < set(jobs[1]) and runs[0].store == runs[1].store == PROJECT.runs/'store'/'micro'
    assert runs[0].folder != runs[1].folder

def test_every_profile_differs_from_the_defaults_where_it_says_so():
    for profile in PROFILES:
        config, default = (settings_of(read_run(p, project=PROJECT).config) for p in (profile, 'smoke'))
        assert set(read_yaml(PROJECT.params/f'{profile}.yaml')) <= set(config)
        assert profile == 'smoke' or config != default

def test_a_real_model_is_billed_by_its_own_row_or_refused():
    def run(large): return read_run('api', changes={'api.models': ['micro-small', large]}, project=PROJECT)
    def price(large): return setting_options(run(large).settings[-1])['price']
    assert (price('openai:gpt-4o-mini-2024-07-18'), price('served:x')) == ('gpt-4o-mini', 'gpt-4.1-mini')
    assert 'needs a price: gpt-4.1 is none of gpt-4.1-mini, gpt-4o-mini' in needs.needs(run('openai:gpt-4.1'))

# ---- as written, with other models (slow: a minute or two each)

def defines(node): return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))

def slim(notebook):
    "A notebook without its examples: what is exported, imported or defined stays, and so does all of 'Run it'."
    data, running = json.loads(notebook.read_text('utf-8')), False
    for c in data['cells']:
        source = ''.join(c['source'])
        running = running or c['cell_type'] == 'markdown' and source.startswith('## Run it')
        needed = running or source.startswith('#| export') or 'open_run(' in source or c['metadata'].get('tags')
        if c['cell_type'] == 'markdown' or needed: continue
        nodes = [textwrap.indent(ast.unparse(n), ' ') for n in ast.parse(source).body if defines(n)]
        c['source'] = '\n'.join(f'try:\n{n}\nexcept NameError: pass # built on an example' for n in nodes)
    notebook.write_text(json.dumps(data), 'utf-8')

@pytest.fixture
def ready(clone, tmp_path):
    "The clone with slim notebooks, and a folder of benchmark files with problems that the micro models can solve."
    for path in clone.nbs.glob('0[1-5]*_*.ipynb'): slim(path)
    data = tmp_path/'data'
    data.mkdir()
    def put(name, rows): (data/f'{name}.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    def gsm(p): return dict(question=p.question, answer=p.solution.replace('\n\n', '\n') + f'\n#### {p.answer}')
    def math(p): return dict(problem=p.question, solution=p.solution, answer=p.answer)
    for name, split, n in (('gsm8k_train', 'train', 60), ('gsm8k_test', 'test', 8)):
        put(name, [gsm(p) for p in load_problems('micro-gsm', split, n)])
    for name, split, n in (('math_train', 'train', 60), ('math500', 'test', 8)):
        put(name, [dict(math(p), level='Level 3') for p in load_problems('micro-math', split, n)])
    omni = load_problems('micro-omni', 'train', 30)
    put('omni_math', [dict(math(p), difficulty=1 + i % 5) for i, p in enumerate(omni)])
    return clone, data

def reproduced(project, profile, changes):
    "A run of a profile in a process of its own; only the changes differ from its file."
    flags = [x for k, v in changes.items() for x in ('-p', f'{k}={json.dumps(v)}')]
    code = 'from stepwise_routing.run.cli import main; main()'
    command = [sys.executable, '-c', code, '--project', str(project.root), 'reproduce', '--profile', profile,
               '--run-id', 'as-written', *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Manifest(project.runs/'as-written')['profile'] == profile
    return project.runs/'as-written'/'tables'

# Models and what hangs on them; problem counts; fewer policies, policy steps and resamples: nothing else.
FEW = {'baselines.reward_model': 'micro-prm', 'data.grader': 'math-verify', 'models.context': 2048,
       'policy.steps': 3, 'sweep.most_steps': 3, 'policy.batch': 5, 'results.n_boot': 50}

@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_open_profile_runs_as_written(ready, profile='open'):
    project, data = ready
    cut = {'open.n_train': 8, 'open.n_calibration': 5, 'open.n_test': 4, 'sweep.seeds': 1, 'sweep.per_step_steps': 1,
           'sweep.per_step_problems': 3}
    cut |= {'data.data_dir': str(data), 'open.models': ['micro-small', 'micro-large']}
    tables = reproduced(project, profile, FEW | cut)
    with open(tables/'table1.csv') as f: rows = [r for r in csv.DictReader(f) if r['source'] == 'this run']
    assert {r['profile'] for r in rows} == {profile}
    assert {r['benchmark'] for r in rows} == {'gsm8k', 'math500', 'omnimath'}
    methods = {r['method'].split(' (')[0] for r in rows}
    assert {'Small only', 'Large only', 'STEER', 'SpecReason', 'RSD'} <= methods
    caption = f'(4 gsm8k, 4 math500, 4 omnimath test problems'
    assert caption in (tables/'table1.md').read_text()
    assert not (tables/'table2.md').exists()

@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_api_profile_runs_as_written(ready):
    project, data = ready
    cut = {'api.n_train': 8, 'api.n_calibration': 5, 'api.n_test': 4, 'sweep.api_seeds': 1}
    cut |= {'data.data_dir': str(data), 'api.models': ['micro-small', 'served:micro-large']}
    tables = reproduced(project, 'api', FEW | cut)
    with open(tables/'table2.csv') as f: rows = [r for r in csv.DictReader(f) if r['source'] == 'this run']
    assert {r['profile'] for r in rows} == {'api'}
    assert {r['benchmark'] for r in rows} == {'gsm8k', 'math500', 'omnimath'}
    assert 'This run, api profile' in (tables/'table2.md').read_text() and not (tables/'table1.md').exists()
    assert any(float(r['cost']) > 0 for r in rows)

# ---- what would fail later, or lead elsewhere, is refused before anything is drawn

@pytest.mark.parametrize('change', [
    'policy.temp=[1]', 'policy.temp=[]', 'policy.temp=[1,2,3]', 'policy.hidden=[3.5]', 'policy.hidden=[1000000000]',
    'seed=18446744073709551616', 'seed=-1', 'data.benchmarks=[]', 'data.benchmarks=[micro-gsm,micro-gsm]',
    'results.n_boot=100000000000', 'data.grader=xverify:file:///etc/passwd', 'data.grader=math-verfy',
    'data.grader=xverify:http://judge.example/v1#m', 'data.grader=xverify:http://127.0.0.1@judge.example/v1#m',
    'store=../../x', 'store=/tmp/x', 'store=.', 'policy.alpha=&a [*a]'])
def test_a_setting_that_cannot_work_is_refused_by_a_dry_run(capsys, change):
    status, lines = dry(PROJECT, capsys, '--profile', 'smoke', '-p', change)
    assert status == 2 and change.partition('=')[0] in lines[-1] or 'cannot be read as a value' in lines[-1]

BOMB = 'policy:\n  alpha: [&a0 [x,x,x,x,x,x,x,x,x,x]' + ''.join(
    f', &a{i} [{",".join([f"*a{i - 1}"]*10)}]' for i in range(1, 9)) + ']\n'

@pytest.mark.parametrize('text, said', [
    (BOMB, r'aliases \(\*name\) are not read'), ('policy: &p\n  alpha: *p\n', 'aliases'),
    ('policy:\n  alpha: .1\npolicy:\n  steps: 2\n', "'policy' occurs twice"),
    ('policy: {alpha: .1, alpha: .2}', "'alpha' occurs twice"), ('? [1]\n: 1\n', 'unhashable'),
    ('policy:\n  alpha: ' + '['*5000 + ']'*5000, 'recursion'), ('policy:\n  alpha: 2026-99-99', 'month'),
    ('store: "\\ud800"', 'surrogates'), ('policy:\n  alpha: !!timestamp "zz"', "'zz' is no timestamp"),
    ('data:\n  run_code: !!bool "maybe"', "'maybe' is no bool"),
    ('policy.alpha: .3\npolicy: {alpha: .1}\n', "'policy.alpha' stands there twice"),
    ('policy: {steps: 010}', '010: write a number without'), ('policy: {steps: 1:30}', '1:30: write a number without'),
    ('policy: {steps: 1' + '0'*30 + '}', 'steps is .* or equal to 1000000000'),
    ('policy: {batch: 1' + '0'*20 + '}', 'batch is .* or equal to 1000000000'),
    ('#' * 10**6, 'bytes: it is not a profile'), ('policy:\n  alpha: ' + 'x'*50_000, 'alpha is .* should be')])
def test_yaml_of_somebody_else_is_one_short_line(tmp_path, text, said):
    (tmp_path/'bad.yaml').write_text(text)
    with pytest.raises(ValueError, match=said) as e: read_run(tmp_path/'bad.yaml', project=PROJECT)
    assert 'bad.yaml' in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 400

@pytest.mark.parametrize('name, start', [
    ('my profile', 'my-profile-'), ("a; 'b'", 'a-b--'), ('.-x', 'x-'), ('-', 'prof'), ('x'*240, 'x'*50)])
def test_a_profile_of_any_name_has_runs_that_can_be_named(tmp_path, name, start):
    (tmp_path/f'{name}.yaml').write_text('open:\n  n_test: 4\n')
    run = read_run(tmp_path/f'{name}.yaml', project=PROJECT)
    assert run.profile.startswith(start) and FOLDER_NAME.fullmatch(run.profile) and run.folder.name == run.profile
