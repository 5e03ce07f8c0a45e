"The committed profiles: what a dry run says of them, and that open.yaml, open-lite.yaml and api.yaml run as they are written."
import ast, csv, json, os, re, shutil, socket, subprocess, sys, textwrap
from collections import namedtuple
from pathlib import Path

import pytest

from stepwise_routing.run import config as run_config
from stepwise_routing.run import needs as run_needs
from stepwise_routing.run import reproduce as run_reproduce
from stepwise_routing.data.benchmarks import MICRO, load_problems

ROOT = Path(__file__).resolve().parents[1]
PROFILES = sorted(p.stem for p in (ROOT/'nbs/params').glob('*.yaml'))
KEY = 'sk-' + 'not-a-real-key'*2

@pytest.fixture
def clone(tmp_path):
    "The notebooks and profiles of this clone, without its runs."
    for folder in ('nbs', 'tests/data'): shutil.copytree(ROOT/folder, tmp_path/'clone'/folder, ignore=shutil.ignore_patterns('.*'))
    return run_config.Project(tmp_path/'clone')

def everything(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob('*'))}

def dry(project, capsys, *args):
    "(exit status, lines) of a dry run."
    try: run_reproduce.main(['--project', str(project.root), 'reproduce', '--dry-run', *args]); status = 0
    except SystemExit as e: status = e.code
    out, err = capsys.readouterr()
    return status, (out + err).splitlines()

def wanted(lines): return [line for line in lines if line.startswith('needs ')]

@pytest.fixture
def offline(monkeypatch):
    "Whoever opens a connection or asks for an address fails."
    def refused(*args, **kwargs): raise AssertionError('a dry run called somebody')
    for what in ('create_connection', 'getaddrinfo'): monkeypatch.setattr(socket, what, refused)
    for what in ('connect', 'connect_ex', 'sendto'): monkeypatch.setattr(socket.socket, what, refused)

@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A machine with one GPU of 80 GB, every package, a key and a terabyte of disk; the test may take things away."
    smi = tmp_path/'bin'/'nvidia-smi'
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 81559"\n'); smi.chmod(0o755)
    monkeypatch.setenv('PATH', f'{smi.parent}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path/'cache'))
    for name in ('HF_HUB_OFFLINE',): monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_needs, 'has', lambda package: True)
    monkeypatch.setattr(run_needs, '_on_cpu', lambda: False)
    monkeypatch.setattr(run_reproduce.shutil, 'disk_usage', lambda path: namedtuple('usage', 'total used free')(10**12, 0, 10**12))
    return smi

def test_the_profiles_are_there(): assert {'smoke', 'micro', 'open', 'open-lite', 'api'} <= set(PROFILES)

@pytest.mark.parametrize('profile', PROFILES)
def test_a_dry_run_writes_nothing_and_calls_nobody(clone, capsys, offline, machine, profile):
    before = everything(clone.root)
    status, lines = dry(clone, capsys, '--profile', profile)
    assert everything(clone.root) == before
    assert (status, wanted(lines)) == (0, []), lines
    assert any(line.startswith('estimate ') for line in lines) and any('02_rollouts' in line and ' calls; ' in line for line in lines)
    assert not any(KEY in line for line in lines)

@pytest.mark.parametrize('profile', ('open', 'open-lite', 'api'))
def test_what_a_bare_machine_lacks_is_said_in_one_line_each(clone, capsys, offline, machine, monkeypatch, profile):
    machine.write_text('#!/bin/sh\nexit 9\n')
    monkeypatch.delenv('OPENAI_API_KEY')
    monkeypatch.setattr(run_needs, 'has', lambda package: False)
    status, lines = dry(clone, capsys, '--profile', profile)
    found = wanted(lines)
    assert status == 1
    for said in ('vLLM', 'the Hub', 'a GPU') + ('an API key',)*(profile == 'api'): assert sum(line.startswith(f'needs {said}') for line in found) == 1, found
    assert len(found) == 3 + (profile == 'api')

@pytest.mark.parametrize('given, said', [
    (['-p', 'memory_shares=[0.6, 0.5]'], 'memory_shares'), (['-p', 'memory_shares=[0.1, 0.1]'], 'needs more memory for Qwen2.5-Math-7B-Instruct'),
    (['-p', 'memory_shares=[0.9]'], 'give one per model'), (['-p', 'memory_shares=[0.45, 0.45]'], 'outside of vLLM'),
    (['-p', 'data_dir=nowhere'], "data_dir='nowhere' is not a folder"), (['-p', 'reward_model=nowhere'], "needs the model 'nowhere'"),
    (['-p', 'models=["vllm:Qwen/Qwen2.5-Math-1.5B-Instruct@abc", "micro-large"]'], '40 hexadecimal digits'),
    (['-p', 'benchmarks=["gsm8k", "aime"]'], "another benchmark than 'aime'"), (['-p', 'benchmarks=["micro-gsm"]'], 'a number of problems')])
def test_parameters_that_cannot_work_are_needs(clone, capsys, offline, machine, given, said):
    status, lines = dry(clone, capsys, '--profile', 'open', *given)
    assert status == 1 and any(said in line for line in wanted(lines)), lines

def test_a_small_gpu_and_a_full_disk_are_needs(clone, capsys, offline, machine, monkeypatch):
    machine.write_text('#!/bin/sh\necho "NVIDIA T4, 15360"\n')
    monkeypatch.setattr(run_reproduce.shutil, 'disk_usage', lambda path: namedtuple('usage', 'total used free')(10**10, 0, 10**10))
    status, lines = dry(clone, capsys, '--profile', 'open')
    assert status == 1
    assert sum('needs more memory for' in x for x in wanted(lines)) >= 1 and sum('GB of disk' in x for x in wanted(lines)) == 1

@pytest.mark.parametrize('name, said', [('n_tran=3', "unknown parameter 'n_tran' (did you mean 'n_train'?)"), ('n_train=many', 'n_train must be int | dict | None'),
                                        ('max_steps=[30]', 'max_steps must be int | dict')])
def test_unknown_keys_and_types_are_refused(clone, capsys, name, said):
    status, lines = dry(clone, capsys, '--profile', 'open', '-p', name)
    assert status == 2 and len(lines) == 1 and said in lines[0]

@pytest.mark.parametrize('profile', ('open', 'open-lite', 'api'))
def test_the_papers_settings(profile):
    p = run_config.resolve(run_config.load_profile(profile, run_config.Project(ROOT)), run_config.experiments(run_config.Project(ROOT)), dict(run_dir='', store_dir='', profile=''))
    merged = {k: v for values in p.values() for k, v in values.items()}
    assert merged['benchmarks'] == ['gsm8k', 'math500', 'omnimath'] and merged['alpha'] == .02
    assert (merged['context'], merged['max_steps']) == (4096, dict(default=30, omnimath=100))
    revisions = [re.search('@([0-9a-f]{40})$', m) for m in [*merged['models'], *merged['api_models'], merged['grader']] if not m.startswith('openai:')]
    assert revisions and all(revisions)
    if profile != 'open-lite': assert (merged['steps'], merged['batch']) == (1000, 5)
    assert bool(merged['models']) != bool(merged['api_models'])

def test_the_small_variant_is_the_open_profile_with_fewer_problems_and_policies():
    whole, lite = (run_config.load_profile(p, run_config.Project(ROOT)).shared for p in ('open', 'open-lite'))
    fewer = {'n_train', 'n_calibration', 'n_test', 'alphas', 'batch', 'steps', 'ablations', 'most_steps', 'per_step', 'per_step_steps', 'per_step_batch',
             'per_step_problems', 'n_walk_calibration', 'walk_thresholds'}
    assert {k for k in {*whole, *lite} if whole.get(k) != lite.get(k)} <= fewer and lite['n_train'] == lite['n_test'] == 200

# ------------------------------------------------------------------ the estimate

def test_the_micro_chains_are_those_of_the_committed_tables():
    with open(ROOT/'tables/evaluation.csv') as f: rows = list(csv.DictReader(f))
    for b in MICRO:
        small, large = (next(r for r in rows if r['benchmark'] == b and r['method'] == m) for m in ('Small only', 'Large only'))
        x = run_needs.LOADS[b]
        assert x.steps == pytest.approx(float(small['steps']), rel=.03)
        assert x.small == pytest.approx(float(small['small_tokens']), rel=.03) and x.large == pytest.approx(float(large['large_tokens']), rel=.03)

def test_more_problems_cost_more_and_paid_models_cost_money():
    def run(**changes):
        project = run_config.Project(ROOT)
        given = run_config.resolve(run_config.load_profile('api', project).edit(**changes), run_config.experiments(project), dict(run_dir='', store_dir='', profile=''))
        return run_needs.estimate(given)
    some, more = run(api_train=100), run(api_train=200)
    assert run_needs.cents(more, 'gpt-4.1-mini') > run_needs.cents(some, 'gpt-4.1-mini') > 0 and run_needs.hours(more) > run_needs.hours(some)
    assert run_needs.cents(run(api_models=['vllm:a/B-7B', 'vllm:a/B-70B']), 'gpt-4.1-mini') == 0
    gsm = [w for w in some if (w.notebook, w.benchmark, w.kind) == ('02_rollouts', 'gsm8k', 'continuations')]
    n, T = 100 + 500 + 1319, 324/53 # by hand: a call per prefix, half of the chain left on average
    assert [w.calls for w in gsm] == [pytest.approx(n*T)] and gsm[0].generated == pytest.approx(n*316*(T + 1)/2)

# ------------------------------------------------------------------ as written, with other models (slow: a minute or two each)

def slim(notebook):
    "A notebook without its lessons' examples: what is exported, imported or defined stays, and so does all of 'Run it'."
    cells, running = [], False
    for c in json.loads(notebook.read_text('utf-8'))['cells']:
        source = ''.join(c['source'])
        running = running or c['id'] == 'run-why'
        if c['cell_type'] == 'code' and not running and not source.startswith('#| export') and 'parameters' not in c['metadata'].get('tags', []):
            kept = [n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))]
            source = '\n'.join(f'try:\n{textwrap.indent(ast.unparse(n), " ")}\nexcept NameError: pass # built on an example' for n in kept)
        cells.append(dict(c, source=source))
    notebook.write_text(json.dumps(json.loads(notebook.read_text('utf-8')) | dict(cells=cells)), 'utf-8')

@pytest.fixture
def ready(clone, tmp_path):
    "The clone with slim notebooks, and a folder of benchmark files with problems that the micro models can solve."
    for path in clone.nbs.glob('0[1-5]_*.ipynb'): slim(path)
    data = tmp_path/'data'
    data.mkdir()
    def put(name, rows): (data/f'{name}.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    def problems(b, split, n): return enumerate(load_problems(b, split, n))
    for name, split, n in (('gsm8k_train', 'train', 60), ('gsm8k_test', 'test', 8)):
        put(name, [dict(question=p.question, answer=p.solution.replace('\n\n', '\n') + f'\n#### {p.answer}') for _, p in problems('micro-gsm', split, n)])
    for name, split, n in (('math_train', 'train', 60), ('math500', 'test', 8)):
        put(name, [dict(problem=p.question, solution=p.solution, answer=p.answer, level='Level 3') for _, p in problems('micro-math', split, n)])
    put('omni_math', [dict(problem=p.question, solution=p.solution, answer=p.answer, difficulty=1 + i % 5) for i, p in problems('micro-omni', 'train', 30)])
    return clone, data

def reproduced(project, profile, **changes):
    "A run of a profile in a process of its own; only what is said here differs from its file."
    flags = [x for k, v in changes.items() for x in ('-p', f'{k}={json.dumps(v)}')]
    code = 'from stepwise_routing.run.reproduce import main; main()'
    command = [sys.executable, '-c', code, '--project', str(project.root), 'reproduce', '--profile', profile, '--run-id', 'as-written', *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run_reproduce.Manifest.load(project.runs/'as-written')['profile'] == profile
    return project.runs/'as-written'/'tables'

# Models and what hangs on them; problem counts; fewer policies, policy steps and resamples: nothing else.
MODELS = dict(reward_model='micro-prm', grader='math-verify', context=2048)
FEW = dict(alphas=[.1], steps=3, most_steps=3, batch=5, n_walk_calibration=3, n_boot=50)

@pytest.mark.slow
def test_the_open_profile_runs_as_written(ready, profile='open'):
    project, data = ready
    cut = FEW | dict(n_train=8, n_calibration=5, n_test=4, n_seeds=1, per_step_steps=1, per_step_problems=3)
    tables = reproduced(project, profile, data_dir=str(data), models=['micro-small', 'micro-large'], **MODELS, **cut)
    with open(tables/'table1.csv') as f: rows = [r for r in csv.DictReader(f) if r['source'] == 'this run']
    assert {r['profile'] for r in rows} == {profile} and {r['benchmark'] for r in rows} == {'gsm8k', 'math500', 'omnimath'}
    assert {'Small only', 'Large only', 'STEER (rest)', 'SpecReason (expected)', 'RSD'} <= {r['method'] for r in rows}
    assert f'This run, {profile} profile (4 gsm8k, 4 math500, 4 omnimath test problems' in (tables/'table1.md').read_text()
    assert not (tables/'table2.md').exists()

@pytest.mark.slow
def test_the_api_profile_runs_as_written(ready):
    project, data = ready
    cut = FEW | dict(api_train=8, api_calibration=5, api_test=4, api_seeds=1)
    tables = reproduced(project, 'api', data_dir=str(data), api_models=['micro-small', 'served:micro-large'], **MODELS, **cut)
    with open(tables/'table2.csv') as f: rows = [r for r in csv.DictReader(f) if r['source'] == 'this run']
    assert {r['profile'] for r in rows} == {'api'} and {r['benchmark'] for r in rows} == {'gsm8k', 'math500', 'omnimath'}
    assert 'This run, api profile' in (tables/'table2.md').read_text() and not (tables/'table1.md').exists()
    assert any(float(r['cost']) > 0 for r in rows)
