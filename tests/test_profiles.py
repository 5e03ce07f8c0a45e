"The committed profiles: what they say, and that open.yaml runs as it is written."
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
from stepwise_routing.run.config import FOLDER_NAME, Data, Models, read_run

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.settings import Policy
from stepwise_routing.util import Project

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
PROFILES = sorted(p.stem for p in PROJECT.params.glob('*.yaml'))

def test_a_section_takes_what_yaml_reads_and_is_frozen():
    policy = Policy(delta='1e-5', temp=[1, .5], hidden=[8], batch=None)
    assert (policy.delta, policy.temp, policy.hidden, policy.batch) == (1e-5, (1., .5), (8,), None)
    assert Data(max_steps=dict(default=30)).max_steps == dict(default=30)
    with pytest.raises(FrozenInstanceError): policy.delta = 1.
    assert '| n_test | `24` | problems per benchmark that are reported |' in Data()._repr_markdown_()

@pytest.mark.parametrize('make, message', [
    (lambda: Policy(alpa=.1), "unknown setting 'alpa' (did you mean 'alpha'?)"),
    (lambda: Policy(temp=(.1, 0)), 'temp is (0.1, 0): 0 should be greater than 0'),
    (lambda: Policy(sign='corected'),
     "sign is 'corected' (did you mean 'corrected'?): it should be 'corrected' or 'printed'"),
    (lambda: Models(names=('micro-small',)),
     "names is ('micro-small',): it should be a list of a small and a large model")])
def test_a_section_refuses_a_wrong_value_in_one_line(make, message):
    with pytest.raises(ValueError) as e: make()
    assert str(e.value) == message

def test_every_profile_can_be_read():
    for profile in PROFILES: assert read_run(profile, project=PROJECT).units

@pytest.mark.parametrize('profile', ('open', 'open-lite', 'api'))
def test_the_papers_settings(profile):
    c = read_run(profile, project=PROJECT).config
    assert c.data.benchmarks == ('gsm8k', 'math500', 'omnimath') and c.policy.alpha == .02
    assert (c.models.context, c.data.max_steps) == (4096, dict(default=30, omnimath=100))
    names = [m for m in (*c.models.names, c.data.grader) if not m.startswith('openai:')]
    assert names and all(re.search('@([0-9a-f]{40})$', m) for m in names)
    if profile != 'open-lite': assert (c.policy.steps, c.policy.batch) == (1000, 50)

def test_units_of_cost_follow_from_the_models():
    "A paid model is billed by its own row; a price list on local models makes a second table."
    def of(**names): return read_run('smoke', changes={f'models.{k}': v for k, v in names.items()}, project=PROJECT)
    paid = of(names=['micro-small', 'openai:gpt-4o-mini-2024-07-18'], price='')
    assert (paid.price, paid.units) == ('gpt-4o-mini', ('cents',))
    assert of().units == ('paper_flops', 'cents') and of(price='').units == ('paper_flops',)

@pytest.mark.parametrize('text, said', [
    ('policy:\n  alpha: .1\npolicy:\n  steps: 2\n', "'policy' occurs twice"),
    ('policy.alpha: .3\npolicy: {alpha: .1}\n', "'policy.alpha' stands there twice"),
    ('policy: {steps: 010}', '010: write a number without'),
    ('data: {grader: "xverify:http://judge.example/v1#m"}', 'data.grader is'),
    ('data: {benchmarks: [micro-gsm, micro-gsm]}', 'benchmarks is')])
def test_a_profile_that_cannot_work_is_one_short_line(tmp_path, text, said):
    (tmp_path/'bad.yaml').write_text(text)
    with pytest.raises(ValueError, match=said) as e: read_run(tmp_path/'bad.yaml', project=PROJECT)
    assert 'bad.yaml' in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 400

def test_a_profile_of_any_name_has_runs_that_can_be_named(tmp_path):
    for name in ('my profile', "a; 'b'", '.-x', '-', 'x'*240):
        (tmp_path/f'{name}.yaml').write_text('data:\n  n_test: 4\n')
        run = read_run(tmp_path/f'{name}.yaml', project=PROJECT)
        assert FOLDER_NAME.fullmatch(run.profile) and run.folder.name == run.profile

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

def benchmark_files(data):
    "A folder of benchmark files with problems that the micro models can solve."
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

# Models and what hangs on them; problem counts; fewer policies, policy steps and resamples: nothing else.
FEW = {'baselines.reward_model': 'micro-prm', 'data.grader': 'math-verify', 'models.context': 2048,
       'policy.steps': 3, 'sweep.most_steps': 3, 'policy.batch': 5, 'results.n_boot': 50}
@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_profile_open_runs_as_written(tmp_path, profile='open', table='table1'):
    for name in ('nbs', 'tests/data'):
        shutil.copytree(ROOT/name, tmp_path/'clone'/name, ignore=shutil.ignore_patterns('.*'))
    for path in (tmp_path/'clone'/'nbs').glob('0[1-5]*_*.ipynb'): slim(path)
    benchmark_files(tmp_path/'data')
    changes = FEW | {'data.data_dir': str(tmp_path/'data'), 'models.names': ['micro-small', 'micro-large']}
    changes |= {'sweep.seeds': 1, 'data.n_train': 8, 'data.n_calibration': 5, 'data.n_test': 4}
    flags = [x for k, v in changes.items() for x in ('-p', f'{k}={json.dumps(v)}')]
    code = 'from stepwise_routing.run.cli import main; main()'
    command = [sys.executable, '-c', code, 'reproduce', '--project', str(tmp_path/'clone'), '--profile', profile,
               '--run-id', 'as-written', *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    tables = tmp_path/'clone'/'runs'/'as-written'/'tables'
    with open(tables/f'{table}.csv') as f: rows = [r for r in csv.DictReader(f) if r['source'] == 'this run']
    assert {r['profile'] for r in rows} == {profile}
    assert {r['benchmark'] for r in rows} == {'gsm8k', 'math500', 'omnimath'}
    assert {'Small only', 'Large only', 'STEER', 'SpecReason', 'RSD'} <= {r['method'].split(' (')[0] for r in rows}
    assert sorted(path.stem for path in tables.glob('table?.md')) == [table]
    assert any(float(r['cost']) > 0 for r in rows)
