"The runner: what it refuses, what it skips, what it survives, and what it leaves behind."
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings, strategies as st
from toy_project import COUNT, OPEN, TOY, toy_project

from stepwise_routing.base import code
from stepwise_routing.base.tools import PACKAGE, Project
from stepwise_routing.run import cli, config, fingerprints, notebooks, publish, runner
from stepwise_routing.run.manifest import Manifest, file_sha256
from stepwise_routing.run.runner import Options

N, PAUSE = 20, .1 # the toy's first notebook takes about N * PAUSE seconds

@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv('TOY_PAUSE', str(PAUSE))
    return toy_project(tmp_path/'toy', toy=profile(), fast=profile(3))

def profile(n=N): return dict(open=dict(n_test=n), results=dict(n_boot=1))

MAIN = ('import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'from stepwise_routing.run.cli import main; main()')

def command(project, *args): return [sys.executable, '-c', MAIN, '--project', str(project.root), *args]

def run(project, *args): return subprocess.run(command(project, *args), capture_output=True, text=True, timeout=120)

def start(project, *args):
    return subprocess.Popen(command(project, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def planned(project, profile='toy', **options):
    return runner.plan(Options(profile, project=str(project.root), **options))

def bytes_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}

def artefacts(folder): return {name: path.read_bytes() for name, path in runner.stage_files(folder).items()}

def kernels_of(pids):
    "Kernels that one of these processes has started."
    import psutil
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get('JPY_PARENT_PID') in map(str, pids): alive.append(process.pid)
    return alive

@pytest.mark.parametrize('args, message', [
    ('reprodcue', r"'reprodcue' is not known to stepwise-routing \(did you mean 'reproduce'\?\)"),
    ('reproduce --profile fats', r"unknown profile 'fats' \(did you mean 'fast'\?\); choose one of: fast, toy"),
    ('reproduce --profile none/there.yaml',
     r"unknown profile 'none/there.yaml'; choose one of: fast, toy, or give a .yaml file"),
    ('reproduce --profile fast --parm x=1', r"'--parm' is not known to .* \(did you mean '--parameter'\?\)"),
    ('reproduce --profile fast -p open.n_tset=1', r"unknown setting 'open.n_tset' \(did you mean 'open.n_test'\?\)"),
    ('reproduce --profile fast -p alpha=.05', r"unknown setting 'alpha' \(did you mean 'policy.alpha'\?\)"),
    ('reproduce --profile fast -p policy.alpha=2', r'-p: policy.alpha is 2: it should be less than 1$'),
    ('reproduce --profile fast -p policy.sign=correct', r"policy.sign is 'correct' \(did you mean 'corrected'\?\)"),
    ('reproduce --profile fast -p policy.alpha=1', r'policy.alpha is 1: it should be less than 1'),
    ('reproduce --profile fast -p open.n_test=many',
     r"open.n_test is 'many': it should be a valid integer or a valid dictionary or None"),
    ('reproduce --profile fast -p open.n_test=true',
     r'open.n_test is True: it should be a valid integer or a valid dictionary or None'),
    ('reproduce --profile fast -p run_dir=x', r"unknown setting 'run_dir'"),
    ('reproduce --profile fast -p open.n_test', r'write NAME=VALUE'),
    ('reproduce --profile fast -p models=[micro-small]', r"unknown setting 'models' \(did you mean 'open.models'\?\)"),
    ('reproduce --profile fast -p open.models=[micro-small]',
     r'it should be a list of a small and a large model, or \[\]'),
    ('reproduce --profile fast -p open.models=[1,2]', r'open.models is \[1, 2\]: 1 should be a valid string'),
    ('reproduce --profile fast --dry-run -p open.n_test=-3',
     r'open.n_test is -3: it should be greater than or equal to 1'),
    ('reproduce --profile fast --dry-run -p policy.batch=0',
     r'policy.batch is 0: it should be greater than or equal to 1 or None'),
    ('reproduce --profile fast --dry-run -p policy.steps=-1',
     r'policy.steps is -1: it should be greater than or equal to 1'),
    ('reproduce --profile fast --dry-run -p data.max_steps=0',
     r'data.max_steps is 0: it should be greater than or equal to 1'),
    ('reproduce --profile fast --dry-run -p data.max_steps={"foo":3}', "unknown benchmark in max_steps 'foo'"),
    ('demo', 'demo takes no folder'),
    ('reproduce --profile fast --dry-run -p policy.kappa=.nan', r'policy.kappa is nan: it should be a finite number'),
    ('reproduce --profile fast -p open.n_test=[1', r'cannot be read as a value'),
    ('reproduce --profile fast --only 05_tabel', r"no notebook '05_tabel' \(did you mean '05_table'\?\)"),
    ('reproduce --profile fast --only 05', r'needs the results of 01_count, .* --run-id, .* --resume'),
    ('reproduce --profile fast --run-id ../x', r"'../x' cannot name a run"),
    ('reproduce --profile fast --run-id=-x', r"'-x' cannot name a run"),
    (f'reproduce --profile fast --run-id {"x"*300}', r"'x+ cannot name a run: use up to 80 letters"),
    ('reproduce --profile fast --only ,', r"--only: ',' names no notebook"),
    ('reproduce --profile fa\0st', r"'fa.x00st' holds a character that no name can have"),
    ('reproduce --profile fast --project x\0', r"'x.x00' holds a character that no name can have"),
])
def test_refused_in_one_line_before_anything_is_written(toy, capsys, args, message):
    before = bytes_of(toy.root)
    with pytest.raises(SystemExit) as e: cli.main(['--project', str(toy.root), *args.split()])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == '' and err.count('\n') == 1, err
    assert re.search(message, err), err
    assert bytes_of(toy.root) == before

def test_a_project_without_a_stage_is_one_line(tmp_path):
    empty = toy_project(tmp_path/'toy', {})
    with pytest.raises(ValueError, match='toy/nbs has no notebook with a number and parameters') as e: planned(empty)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('yaml, message', [
    ('open: [1', 'bad.yaml is not valid YAML'), ('- 1', 'bad.yaml must hold'), ('# nothing', 'bad.yaml is empty'),
    ('open: {n_tset: 3}', "unknown setting 'open.n_tset'"),
    ('opne: {n_test: 1}', "unknown setting 'opne'"), ('open: 1', 'section open must hold'),
    ('seed: 1.5', 'bad.yaml: seed is 1.5: it should be a valid integer'),
    ('1: 2', "unknown setting '1'"), ('expect_seconds: [1,2]', "unknown setting 'expect_seconds'"),
    ('policy: {lr: 0}', 'bad.yaml: policy.lr is 0: it should be greater than 0')])
def test_a_bad_profile_is_refused_by_name(toy, tmp_path, capsys, yaml, message):
    (tmp_path/'bad.yaml').write_text(yaml)
    with pytest.raises(SystemExit):
        cli.main(['--project', str(toy.root), 'reproduce', '--profile', str(tmp_path/'bad.yaml')])
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1

def test_a_full_disk_is_told_with_the_way_on(toy, monkeypatch):
    "It cuts off the executed notebook and leaves no room for the manifest."
    plan = planned(toy, 'fast')
    def cut_off(source, executed, *_):
        executed.write_text(source.read_text()[:200])
        monkeypatch.setattr(Manifest, 'update', no_room)
        error = OSError(28, 'No space left on device')
        raise notebooks.NotebookFailed(notebooks.failure_line(source, executed, error))
    def no_room(*_, **__): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(runner, 'execute', cut_off)
    with pytest.raises(notebooks.NotebookFailed, match='01_count: OSError: .*No space left.*continue with: '):
        runner.run_plan(plan)
    with pytest.raises(OSError, match='No space left.*continue with: ') as e:
        monkeypatch.setattr(runner, 'begin', lambda plan: Manifest(plan.run.folder))
        runner.run_plan(plan)
    assert '\n' not in str(e.value)

def test_a_run_of_the_future_is_not_the_newest(toy):
    for name, started in (('toy-1', '2020-01-01'), ('toy-2', '2099-01-01'), ('toy-3', 'zzzz')):
        (toy.runs/name).mkdir(parents=True)
        Manifest(toy.runs/name).update(profile='toy', started=started, status='failed', notebooks={})
    assert [m.folder.name for m in runner.past_runs(toy, 'toy')][0] == 'toy-1'
    assert planned(toy, resume=True).run.folder.name == 'toy-1'

def test_resume_leaves_an_unfinished_run_of_other_settings_alone(toy):
    runner.begin(planned(toy, run_id='r', changes={'policy.alpha': .1}))
    for changes, goes_on in (({}, False), ({'policy.alpha': .1}, True),
                             ({'policy.alpha': .1, 'api.max_cents': 5}, True), ({'policy.alpha': .2}, False)):
        plan = planned(toy, resume=True, changes=changes)
        assert (plan.run.folder.name == 'r') == goes_on
        note = 'continued' if goes_on else 'new; r, which is unfinished, has another policy.alpha'
        assert plan.note == note

def test_braces_in_the_name_of_a_folder_are_no_parameters(tmp_path):
    done = run(toy_project(tmp_path/'my {clone}', fast=profile(2)), 'reproduce', '--profile', 'fast')
    assert done.returncode == 0, done.stderr

@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(['policy.lr', 'policy.delta']), st.floats(1e-300, 1e300), max_size=2),
       st.lists(st.floats(1e-9, .99), min_size=2, max_size=2), st.text('ab \'"$&;`\\', min_size=1))
@pytest.mark.slow
def test_the_command_that_continues_has_the_same_settings(changes, alphas, name):
    asked = Options(f'{name}.yaml', ('04', '05'), publish=True, project=name,
                    changes=changes | {'policy.temp': alphas, 'open.n_test': dict(default=3), 'seed': 2})
    plan = SimpleNamespace(options=asked, run=SimpleNamespace(folder=Path('runs/r')))
    first, *args = shlex.split(runner.how_to_continue(plan, KeyboardInterrupt()).partition('continue with: ')[2])
    got = vars(cli.build_parser().parse_args(args))
    assert Path(first).name == 'stepwise-routing' and got.pop('command') == 'reproduce' and not got.pop('dry_run')
    assert not got.pop('faults')
    read = config.changed(config.Config(), dict(got.pop('changes'))) # as the settings are read
    assert read == config.changed(config.Config(), asked.changes)
    assert Options(**got) == replace(asked, changes={}, run_id='r', resume=True)

# ---- settings of a notebook and of its run folder

@pytest.mark.parametrize('run_dir', ['', '../runs/whole'])
def test_a_notebook_with_other_settings_than_its_run_stops_with_one_line(whole, tmp_path, monkeypatch, run_dir):
    "Interactively, with the newest run or one that is named; the same settings go on."
    monkeypatch.chdir(whole.nbs)
    shutil.copytree(whole.runs/'whole', whole.runs/'toy-2026', dirs_exist_ok=True)
    folder = run_dir or whole.runs/'toy-2026'
    assert config.open_run('toy', run_dir).folder == Path(folder)
    line = rf"^runs/{Path(folder).name} was made with policy.alpha=0.02, this notebook has policy.alpha=0.2: "
    with pytest.raises(ValueError, match=line) as e: config.open_run('toy', run_dir, {'policy.alpha': .2})
    assert '\n' not in str(e.value) and 'stepwise-routing reproduce --profile toy -p policy.alpha=0.2)' in str(e.value)
    with pytest.raises(ValueError, match='policy.alpha=0.2 and 1 more: '):
        config.open_run('toy', run_dir, {'policy.alpha': .2, 'seed': 3})
    assert config.open_run('toy', str(tmp_path), {'policy.alpha': .2}).config.policy.alpha == .2 # a new folder
    assert config.read_run('toy', run_dir, {'policy.alpha': .2}).config.policy.alpha == .2
    shutil.rmtree(whole.runs/'toy-2026')

def test_papermill_with_other_settings_than_the_run_stops_and_leaves_its_files(ran):
    before = bytes_of(ran.runs/'whole')
    given = dict(profile='toy', run_dir='../runs/whole', changes={'results.n_boot': 3})
    with pytest.raises(notebooks.NotebookFailed, match='results.n_boot=1, this notebook has results.n_boot=3'):
        notebooks.execute(ran.nbs/'05_table.ipynb', ran.root/'mine.ipynb', ran.nbs, given)
    assert bytes_of(ran.runs/'whole') == before

@pytest.mark.slow
def test_results_of_a_named_run_that_does_not_exist_are_not_those_of_the_committed_one(tmp_path):
    nbs, given = PACKAGE.parent/'nbs', dict(profile='smoke', run_dir=str(tmp_path/'none'))
    with pytest.raises(notebooks.NotebookFailed, match='none has no outcomes of micro-gsm yet: run all stages'):
        notebooks.execute(nbs/'05_results.ipynb', tmp_path/'mine.ipynb', nbs, given)

def test_the_runner_may_run_one_stage_of_a_run_with_other_settings(ran):
    runner.run_plan(planned(ran, only=('05',), run_id='whole', changes={'results.n_boot': 3}))
    assert (ran.runs/'whole/tables/mean.md').read_text().endswith('.500') # three decimals
    assert Manifest(ran.runs/'whole')['settings']['results.n_boot'] == 3

def test_a_run_keeps_its_settings_and_its_tables(ran):
    before = bytes_of(ran.runs/'whole')
    line = ('^run whole was made with policy.alpha=0.02, not 0.2 and 1 more: '
            'go on with -p policy.alpha=0.02 -p seed=0, or make a new run ')
    changes = {'policy.alpha': .2, 'seed': 3}
    for options in (dict(only=('05',)), dict(only=('01',)), dict(resume=True)):
        with pytest.raises(ValueError) as e: planned(ran, run_id='whole', changes=changes, **options)
        assert re.search(line, str(e.value)), str(e.value)
    with pytest.raises(ValueError, match='results.n_boot=1, not 3: '):
        planned(ran, run_id='whole', resume=True, changes={'results.n_boot': 3})
    assert bytes_of(ran.runs/'whole') == before

def test_a_foreign_profile_file_never_passes_for_the_committed_one(toy, tmp_path):
    (tmp_path/'toy.yaml').write_text('open: {n_test: 2}')
    assert planned(toy, str(tmp_path/'toy.yaml')).run.profile != 'toy'
    assert planned(toy, str(toy.params/'toy.yaml')).run.profile == 'toy'

@pytest.mark.slow
def test_a_failing_notebook_ends_with_one_line_and_status_1_and_can_be_mended(tmp_path):
    broken = {**TOY, '06_fails': (OPEN, 'raise ValueError("no such\\nthing")')}
    project = toy_project(tmp_path/'p', broken, fast=profile(2))
    done = run(project, 'reproduce', '--profile', 'fast', '--run-id', 'r')
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert line.startswith('stepwise-routing: 06_fails, cell 2 (cell-2): ValueError: no such thing '
                           '(executed copy and log.txt in runs/r); continue with: ')
    assert 'Traceback' not in done.stderr
    assert 'no such\\nthing' in (project.runs/'r/06_fails.ipynb').read_text()
    manifest = Manifest(project.runs/'r')
    states = manifest['status'], manifest.stage('06_fails')['status'], manifest.stage('05_table')['status']
    assert states == ('failed', 'failed', 'done')
    toy_project(tmp_path/'mended', {'06_fails': (OPEN, '1')})
    (tmp_path/'mended/nbs/06_fails.ipynb').replace(project.nbs/'06_fails.ipynb')
    assert planned(project, 'fast', resume=True).todo == ('06_fails',)
    done = run(project, 'reproduce', '--profile', 'fast', '--resume')
    assert done.returncode == 0, done.stderr
    assert Manifest(project.runs/'r')['status'] == 'finished'

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A project with one uninterrupted run."
    project = toy_project(tmp_path_factory.mktemp('whole')/'toy', toy=profile())
    runner.run_plan(planned(project, run_id='whole'))
    return project

def test_kernels_talk_through_private_socket_files_and_compute_with_one_thread(tmp_path, monkeypatch):
    "Two kernels that start at the same moment cannot take each other's TCP port."
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setenv('MKL_NUM_THREADS', '3')
    cell = ('import os; from ipykernel.kernelapp import IPKernelApp as K; k = K.instance(); e = os.environ.get\n'
            'print(k.transport, k.ip, e("OMP_NUM_THREADS"), e("MKL_NUM_THREADS"), file=open("../facts", "w"))')
    project = toy_project(tmp_path/'p', {'01_facts': (cell,)})
    runner.run_plan(planned(project))
    transport, folder, *threads = (project.root/'facts').read_text().split()
    assert threads == ['1', '3']
    assert transport == ('tcp' if os.name == 'nt' else 'ipc')
    assert os.name == 'nt' or not Path(folder).parent.exists() # gone with the kernel

def test_a_kernel_whose_cells_have_run_ends_at_once_with_its_children(tmp_path):
    "Asked to end, it would wait half a minute for the helpers of worker processes, which ignore the signal."
    cell = ('import atexit, subprocess, sys; atexit.register(lambda: open("../asked", "w"))\n'
            'deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(200)"\n'
            'print(subprocess.Popen([sys.executable, "-c", deaf]).pid, file=open("../pid", "w"))')
    project = toy_project(tmp_path/'p', {'01_deaf': (cell,)})
    runner.run_plan(planned(project))
    with contextlib.suppress(psutil.NoSuchProcess): psutil.Process(int((project.root/'pid').read_text())).wait(20)
    assert not (project.root/'asked').exists()

@pytest.mark.parametrize('avx2', [True, False])
def test_kernels_choose_the_same_instructions_everywhere(tmp_path, monkeypatch, avx2):
    for name in notebooks.KERNEL_SETTINGS: monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('ATEN_CPU_CAPABILITY', 'default')
    monkeypatch.setattr(notebooks, 'has_avx2', lambda: avx2)
    cell = (f'import json, os; names = {[*notebooks.KERNEL_SETTINGS]!r}\n'
            'json.dump({n: os.environ.get(n) for n in names}, open("../facts", "w"))')
    project = toy_project(tmp_path/'p', {'01_facts': (cell,)})
    runner.run_plan(planned(project))
    due = notebooks.KERNEL_SETTINGS if avx2 else dict.fromkeys(notebooks.KERNEL_SETTINGS)
    assert json.loads((project.root/'facts').read_text()) == due | dict(ATEN_CPU_CAPABILITY='default')

def test_jupyterlab_starts_kernels_that_round_like_a_run(whole, monkeypatch):
    started = []
    monkeypatch.setattr(os, 'execve', lambda program, words, environment: started.append((words, environment)))
    monkeypatch.chdir(whole.root)
    monkeypatch.setattr(notebooks, 'has_avx2', lambda: True)
    monkeypatch.delenv('MKL_CBWR', raising=False)
    cli.main(['lab', '--no-browser'])
    (words, environment), = started
    assert words[1:] == ['-m', 'jupyterlab', str(whole.nbs), '--no-browser']
    assert notebooks.KERNEL_SETTINGS.items() <= environment.items() and environment['PATH'] == os.environ['PATH']

def test_a_finished_run_is_not_run_again(whole, capsys):
    copies = {p: p.stat().st_mtime_ns for p in (whole.runs/'whole').glob('*.ipynb')}
    cli.main(['--project', str(whole.root), 'reproduce', '--profile', 'toy', '--run-id', 'whole', '--resume'])
    assert {p: p.stat().st_mtime_ns for p in copies} == copies
    with pytest.raises(SystemExit):
        cli.main(['--project', str(whole.root), 'reproduce', '--profile', 'toy', '--run-id', 'whole'])
    assert 'exists: continue it with --resume' in capsys.readouterr().err
    new = planned(whole, resume=True)
    assert new.todo == () and new.run.folder != whole.runs/'whole' and 'no unfinished run' in new.note

def test_what_runs_again_is_what_could_come_out_different(whole, monkeypatch):
    def todo(**changes): return planned(whole, changes=changes).todo
    assert todo() == () and planned(whole, run_id='whole', resume=True, changes={'api.max_cents': 1}).run
    for change in ({'results.n_boot': 2}, {'policy.alpha': .5}, {'open.n_test': 7}, dict(seed=1)):
        assert todo(**change) == ('01_count', '05_table'), change
    monkeypatch.setattr(fingerprints, 'code_fingerprint', lambda *names: 'other code')
    assert todo() == ('01_count', '05_table')
    monkeypatch.undo()
    monkeypatch.setattr(fingerprints, 'direct_packages', lambda: dict(numpy='0'))
    assert todo() == ('01_count', '05_table')
    monkeypatch.undo()
    monkeypatch.setattr(fingerprints, 'shipped_files', lambda: {'micro_models/x': '0'})
    assert todo() == ('01_count', '05_table')
    monkeypatch.undo()
    assert todo() == ()

def test_a_changed_cell_runs_its_stage_and_those_after_it(whole):
    first, last = (fingerprints.stage_cells(whole, name)[-1] for name in ('01_count', '05_table'))
    for stage, cell, due in (('01_count', first, ('01_count', '05_table')), ('05_table', last, ('05_table',))):
        path = whole.nbs/f'{stage}.ipynb'
        before = path.read_text()
        path.write_text(before.replace(json.dumps(cell)[1:-1], json.dumps(cell + '\n0')[1:-1]))
        assert path.read_text() != before
        todo = planned(whole, run_id='whole', resume=True).todo
        path.write_text(before)
        assert todo == due

# ---- fingerprints of code

@pytest.fixture
def package(tmp_path):
    "A package of three modules: `low` is imported by `high`, inside of a function; `alone` by nobody."
    folder = tmp_path/'lib'
    (folder/'sub').mkdir(parents=True)
    texts = {'__init__.py': '__version__ = "1"', 'sub/__init__.py': '', '_modidx.py': 'd = 1',
             'sub/low.py': '"About."\nX = 1\ndef f(x):\n    "Doc."\n    return x # a comment',
             'high.py': 'from . import __version__\ndef g():\n    from .sub.low import f\n    return f(1)',
             'alone.py': 'Y = 2'}
    for name, text in texts.items(): (folder/name).write_text(text)
    return folder

def code_of(package, *names):
    for function in (code.module_files, code.read_module, code.code_fingerprint): function.cache_clear()
    return code.code_fingerprint(*(f'lib.{name}' for name in names), package=package)

def test_a_module_reaches_what_it_imports_and_nothing_else(package):
    files = code.module_files(package)
    assert set(files) == {'lib.alone', 'lib.high', 'lib.sub', 'lib.sub.low'}
    assert code.reachable_modules(['lib.high', 'numpy'], files) == ['lib.high', 'lib.sub.low']
    assert code.reachable_modules(['lib'], files) == sorted(files) # whoever imports the package may reach all

@pytest.mark.parametrize('file, old, new, changes', [
    ('sub/low.py', ' # a comment', '   # another one', False), ('sub/low.py', '"Doc."', '"Another."', False),
    ('sub/low.py', '"About."', '"Else."\n\n\n', False), ('sub/low.py', '    "Doc."\n', '', False),
    ('sub/low.py', 'return x', 'return x + 0', True), ('sub/low.py', 'X = 1', 'X = 2', True),
    ('high.py', 'f(1)', 'f( 1 )', False), ('high.py', 'f(1)', 'f("1")', True),
    ('alone.py', 'Y = 2', 'Y = 3', False), ('__init__.py', '"1"', '"2"', False), ('_modidx.py', '1', '2', False)])
def test_a_fingerprint_is_that_of_what_the_code_does(package, file, old, new, changes):
    before = code_of(package, 'high')
    text = (package/file).read_text()
    assert old in text
    (package/file).write_text(text.replace(old, new))
    assert (code_of(package, 'high') != before) == changes

def test_a_policy_in_the_store_is_trained_again_when_the_code_of_training_has_changed(monkeypatch):
    from stepwise_routing.method import training
    names = {m.partition('.')[2] for m in code.reachable_modules(['stepwise_routing.method.training'],
                                                                 code.module_files())}
    assert {'method.cpo', 'method.policy', 'method.outcomes', 'base.records'} <= names
    assert not any(name.startswith(('run.', 'report.')) for name in names)
    key = training.training_key('inputs', dict(alpha=.02))
    assert key == training.training_key('inputs', dict(alpha=.02)) != training.training_key('inputs', dict(alpha=.03))
    monkeypatch.setattr(training, 'code_fingerprint', lambda *names: 'other code')
    assert training.training_key('inputs', dict(alpha=.02)) != key

def test_every_stage_reaches_the_code_that_it_is_about():
    "Also of modules that are imported inside of functions; of `report` the first stage has its pictures alone."
    project = Project(PACKAGE.parent)
    def reached(name):
        names = fingerprints.imported_by(fingerprints.stage_cells(project, name))
        return {m.partition('.')[2] for m in code.reachable_modules(names, code.module_files())}
    first, last = reached('01_confidence'), reached('05_results')
    assert {'run.stages', 'method.tree', 'models.engine', 'data.grading', 'base.store'} <= first
    pictures = {'report.example', 'report.pictures', 'report.style'}
    assert {name for name in first if name.startswith(('report.', 'run.cli', 'run.runner'))} == pictures
    assert {'report.tables', 'report.figures', 'run.training_report', 'run.stages'} <= last
    assert {'method.training', 'run.sweep', 'method.cpo'} <= reached('03b_training')
    cells = fingerprints.stage_cells(project, '05_results')
    assert any('def report_claims' in cell for cell in cells), 'the notebook that it runs is a part of it'

# ---- stages that a new run takes over

@pytest.fixture
def ran(whole, tmp_path):
    "A copy of the project with its run, nothing published."
    root = Path(shutil.copytree(whole.root, tmp_path/'ran', symlinks=True))
    shutil.rmtree(root/'tables', ignore_errors=True)
    return Project(root)

def no_notebook_runs(monkeypatch):
    def refused(source, *args, **kwargs): raise AssertionError(f'{source} was run')
    monkeypatch.setattr(runner, 'execute', refused)

def test_a_changed_stage_that_ran_alone_runs_the_later_ones_again(ran):
    path = ran.nbs/'01_count.ipynb'
    cell = fingerprints.stage_cells(ran, '01_count')[-1]
    path.write_text(path.read_text().replace(json.dumps(cell)[1:-1], json.dumps(cell + '\n0')[1:-1]))
    runner.run_plan(planned(ran, run_id='whole', resume=True, only=('01',)))
    assert planned(ran, run_id='whole', resume=True).todo == ('05_table',)

def test_a_new_run_takes_over_what_is_unchanged(ran, monkeypatch, capsys):
    no_notebook_runs(monkeypatch)
    cli.main(['--project', str(ran.root), 'reproduce', '--profile', 'toy', '--run-id', 'warm', '--publish'])
    out, old, new = capsys.readouterr().out, ran.runs/'whole', ran.runs/'warm'
    told = [f'[{i}/2] {name}: unchanged, taken over from whole' for i, name in enumerate(TOY, 1)]
    assert out.splitlines()[:2] == told and (ran.root/'tables'/'mean.md').is_file()
    assert artefacts(new) == artefacts(old)
    manifest, past = Manifest(new), Manifest(old)
    assert manifest['status'] == 'finished' and planned(ran, run_id='warm', resume=True).todo == ()
    for name in TOY:
        assert manifest.stage(name) == past.stage(name) | dict(taken_from='whole')
        assert (new/f'{name}.ipynb').read_bytes() == (old/f'{name}.ipynb').read_bytes()
    before = bytes_of(old)
    for path in artefacts(new): # in place, as pandas writes
        with (new/path).open('a') as f: f.write('more')
    assert bytes_of(old) == before

# ---- run folders that were received

FILE_LINK = lambda path, victim: path.symlink_to(victim/'precious')
FOLDER_LINK = lambda path, victim: path.symlink_to(victim)
FIFO = lambda path, victim: os.mkfifo(path)

@pytest.mark.parametrize('name, make', [
    ('runs/r1/log.txt', FILE_LINK), ('runs/r1/log.txt', FIFO), ('runs/r1/05_table.ipynb', FILE_LINK),
    ('runs/r1/tables', FOLDER_LINK), ('runs/r1/tables/deep/none', FILE_LINK), ('runs/store/toy/x.db', FOLDER_LINK),
    ('runs/store/toy/policies', FOLDER_LINK), ('runs/store/toy/x', FIFO), ('runs/old/01_count.ipynb', FILE_LINK)])
def test_a_run_that_would_write_elsewhere_or_wait_is_refused(toy, tmp_path, monkeypatch, name, make):
    "Also where it would take over files from an earlier run."
    no_notebook_runs(monkeypatch)
    victim, there = tmp_path/'victim', toy.root/name
    for folder in (victim, there.parent): folder.mkdir(parents=True)
    (victim/'precious').write_text('precious')
    make(there, victim)
    plan = replace(planned(toy, run_id='r1'), taken={'01_count': toy.runs/'old'}, todo=('05_table',))
    said = 'is neither a file nor a folder: remove it' if make is FIFO else 'is a link: put the file itself there'
    with pytest.raises(ValueError, match=f'{name} {said}') as e: runner.run_plan(plan)
    assert '\n' not in str(e.value) and bytes_of(victim) == dict(precious=b'precious')
    assert not (toy.runs/'r1'/'manifest.json').exists()

def test_runs_and_stores_may_be_on_another_disk(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, 'execute', lambda source, executed, *_: shutil.copy(source, executed))
    for name in ('runs', 'runs/store', 'runs/store/toy', 'runs/r1'):
        disk = tmp_path/name.replace('/', '-')
        disk.mkdir()
        (toy.root/name).symlink_to(disk)
    for resume in (False, True):
        assert runner.run_plan(planned(toy, run_id='r1', resume=resume))['status'] == 'finished'
    assert (tmp_path/'runs-r1'/'manifest.json').is_file()

def test_only_the_stages_before_a_changed_one_are_taken_over(ran, capsys):
    path = ran.nbs/'05_table.ipynb'
    path.write_text(path.read_text().replace('.{decimals}f', '.3f'))
    plan = planned(ran, run_id='finer')
    assert plan.todo == ('05_table',) and set(plan.taken) == {'01_count'}
    runner.run_plan(plan)
    *lines, took = capsys.readouterr().out.splitlines()
    assert lines == ['[1/2] 01_count: unchanged, taken over from whole', '[2/2] 05_table']
    assert re.fullmatch(r' {6}\d+ s', took)
    assert 'taken_from' not in Manifest(plan.run.folder).stage('05_table')
    assert (plan.run.tables/'mean.md').read_text().endswith('.500') # three decimals
    assert set(planned(ran, changes=dict(seed=1)).taken) == set()

def test_other_data_files_run_every_stage_anew(ran, tmp_path):
    data = tmp_path/'copies'
    data.mkdir()
    def plan(**options): return planned(ran, changes={'data.data_dir': str(data)}, **options)
    (data/'problems.jsonl').write_text('one')
    runner.run_plan(plan(run_id='copies'))
    assert set(plan().taken) == set(TOY)
    (data/'other').mkdir() # what else lies there is not read
    (data/'other'/'problems.jsonl').write_text('three')
    assert set(plan().taken) == set(TOY)
    (data/'problems.jsonl').write_text('two')
    assert plan().todo == tuple(TOY) and plan().taken == {}

def test_other_questions_benchmarks_or_prompts_run_every_stage_anew(ran, tmp_path, monkeypatch):
    "A stage runs in nbs/, so relative paths begin there, wherever the command starts."
    monkeypatch.chdir(tmp_path)
    questions, own, prompt = (ran.nbs/name for name in ('mine.jsonl', 'own_benchmarks.py', 'judge.txt'))
    questions.write_text('{"question": "How many?", "answer": "7"}\n'*40)
    prompt.write_text('{question} {output} {correct}')
    changes = {'data.benchmarks': ['mine.jsonl'], 'data.grader_template': 'judge.txt'}
    def plan(**options): return planned(ran, changes=changes, **options)
    own.write_text('x = 1')
    for n, path in enumerate((questions, own, prompt)):
        runner.run_plan(plan(run_id=f'before-{n}'))
        assert set(plan().taken) == set(TOY)
        path.write_text(path.read_text().replace('7', '8').replace('1', '2').replace('{question}', 'Q: {question}'))
        assert plan().todo == tuple(TOY) and plan().taken == {}

def test_it_is_taken_from_the_newest_run_whose_files_are_untouched(ran):
    for name in ('old', 'new'): runner.run_plan(planned(ran, run_id=name, fresh=name == 'old'))
    def donor(**options): return {n: f.name for n, f in planned(ran, **options).taken.items()}
    def lost(path, data=None):
        "What is taken over while a file is missing or has other bytes."
        before = path.read_bytes()
        path.unlink()
        if data is not None: path.write_bytes(data)
        out = donor()
        path.write_bytes(before)
        return out
    assert donor() == dict.fromkeys(TOY, 'new')
    assert lost(ran.runs/'new/tables/mean.md', b'x') == {'01_count': 'new', '05_table': 'old'}
    assert lost(ran.runs/'new/05_table.ipynb') == {'01_count': 'new', '05_table': 'old'}
    assert lost(ran.runs/'new/numbers.json') == dict.fromkeys(TOY, 'old')
    assert lost(ran.runs/'new/manifest.json', b'{') == dict.fromkeys(TOY, 'old')
    assert donor(fresh=True) == donor(only=['01']) == {}
    assert planned(ran, fresh=True).todo == tuple(TOY)
    shutil.rmtree(ran.runs/'store'/'toy')
    assert donor() == {}

def test_another_profile_with_the_same_settings_is_no_source(ran):
    shutil.copy(ran.params/'toy.yaml', ran.params/'other.yaml')
    (ran.runs/'store'/'other').mkdir()
    assert planned(ran, 'other').taken == {}

def test_interrupted_while_it_takes_over_it_goes_on(ran, monkeypatch):
    copied, copy = [], runner.shutil.copyfile
    def once(source, target):
        copied.append(target)
        Path(target).write_text('half')
        raise KeyboardInterrupt
    monkeypatch.setattr(runner.shutil, 'copyfile', once)
    with pytest.raises(KeyboardInterrupt, match='continue with: '): runner.run_plan(planned(ran, run_id='cut'))
    monkeypatch.setattr(runner.shutil, 'copyfile', copy)
    again = planned(ran, run_id='cut', resume=True)
    assert len(copied) == 1 and set(again.taken) == set(TOY)
    runner.run_plan(again)
    assert artefacts(ran.runs/'cut') == artefacts(ran.runs/'whole')

def test_a_dry_run_tells_what_would_be_taken_over(ran, monkeypatch, capsys):
    from stepwise_routing.run import needs
    monkeypatch.setattr(needs, 'report', lambda run: [])
    monkeypatch.setattr(needs, 'needs', lambda run: [])
    path = ran.nbs/'05_table.ipynb'
    path.write_text(path.read_text().replace('mean of', 'mean over'))
    before = bytes_of(ran.root)
    def told(*args):
        cli.main(['--project', str(ran.root), 'reproduce', '--profile', 'toy', '--dry-run', *args])
        return capsys.readouterr().out.splitlines()
    lines = told()
    assert 'skip     01_count: unchanged, taken over from whole' in lines
    assert any(re.fullmatch(r'run      05_table: took \d+\.\d min in run whole', line) for line in lines)
    assert 'settings open.n_test=20, results.n_boot=5' in told('-p', 'results.n_boot=5')
    assert bytes_of(ran.root) == before

def test_a_profile_that_is_no_text_is_one_line(toy, tmp_path, capsys):
    (tmp_path/'bad.yaml').write_bytes(b'seed: 1 # \xff\n')
    with pytest.raises(SystemExit):
        cli.main(['--project', str(toy.root), 'reproduce', '--profile', str(tmp_path/'bad.yaml')])
    assert re.fullmatch(r'stepwise-routing: bad.yaml is not valid YAML: .*\n', capsys.readouterr().err)

def test_the_manifest_tells_what_was_run_and_nothing_private(whole):
    manifest, text = Manifest(whole.runs/'whole'), (whole.runs/'whole/manifest.json').read_text()
    assert manifest['status'] == 'finished'
    assert (manifest['settings']['seed'], manifest['settings']['open.n_test']) == (0, N)
    made = {'tables/mean.md': file_sha256(whole.runs/'whole/tables/mean.md')}
    assert manifest.stage('05_table')['artefacts'] == made
    assert manifest['inputs']['05_table.ipynb'] == file_sha256(whole.nbs/'05_table.ipynb')
    assert manifest['inputs']['toy.yaml'] == file_sha256(whole.params/'toy.yaml')
    assert {'python', 'packages', 'hardware', 'git', 'started', 'ended'} <= set(manifest.data)
    secrets = [v for k, v in os.environ.items() if len(v) > 5 and re.search('KEY|TOKEN|SECRET', k)]
    private = [str(whole.root), str(Path.home()), sys.prefix, *secrets]
    assert [p for p in private if p != '/' and p in text] == []

def test_a_receipt_names_nobody(ran):
    runner.begin(planned(ran, run_id='mine', changes={'data.data_dir': str(Path.home()/'data')}))
    assert Manifest(ran.runs/'mine')['settings']['data.data_dir'] == '~/data'

def test_only_the_published_profile_reaches_the_top_level(whole):
    options = dict(project=str(whole.root), run_id='whole', resume=True)
    cli.reproduce(Options('toy', **options))
    assert not (whole.root/'tables').exists()
    cli.reproduce(Options('toy', publish=True, **options))
    first = bytes_of(whole.root/'tables')
    assert set(first) == {'mean.md', 'provenance.json'}
    assert json.loads(first['provenance.json'])['parameters']['open.n_test'] == N
    publish.publish(planned(whole, run_id='whole', resume=True))
    assert bytes_of(whole.root/'tables') == first

# ---- the committed tables

def table(folder, rows, name='t.csv'):
    folder.mkdir(exist_ok=True)
    (folder/name).write_text(''.join(','.join(map(str, row)) + '\n' for row in rows))

@pytest.mark.parametrize('made, committed, lines', [
    ([('a', 'b'), (1, 'x')], [('a', 'b'), (1, 'x')], []),
    ([('a',), (1.0009,), (0,)], [('a',), (1,), ('.0009',)], []),
    ([('a',), (1.002,), (0,)], [('a',), (1,), ('.0011',)], ['row 1, a: 1.002 here, 1 committed',
                                                            'row 2, a: 0 here, .0011 committed']),
    ([('cents',), ('.0101',)], [('cents',), ('.0100',)], ['row 1, cents: .0101 here, .0100 committed']),
    ([('a',), ('nan',), ('inf',), ('',)], [('a',), ('nan',), ('inf',), ('',)], []),
    ([('a',), ('nan',), ('True',)], [('a',), (1,), ('False',)], ['row 1, a: nan here, 1 committed',
                                                               'row 2, a: True here, False committed']),
    ([('a',), (1,)], [('a', 'b'), (1, 2)], ['row 1, b: nothing here, 2 committed']),
    ([('b', 'a'), (2, 1)], [('a', 'b'), (1, 2)], []),
    ([('a',), (1,), (2,)], [('a',), (1,)], ['row 2, a: 2 here, nothing committed'])])
def test_tables_are_compared_number_by_number(tmp_path, made, committed, lines):
    mine, theirs = tmp_path/'made', tmp_path/'committed'
    table(mine, made)
    table(theirs, committed)
    assert publish.table_differences(mine, theirs) == [f't.csv, {line}' for line in lines]
    (theirs/'faults.md').write_text('of no run')
    same = 'identical' if made == committed else 'equal'
    words = publish.compared(mine, theirs)
    assert words.startswith('different from' if lines else same) and all(f't.csv, {line}' in words for line in lines)
    (theirs/'t.csv').unlink()
    assert len(publish.table_differences(mine, theirs)) == len(made[0])*(len(made) - 1)
    assert publish.compared(mine, theirs) == 'no committed tables to compare with'

@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6)]*3), min_size=1, max_size=8), st.randoms(use_true_random=False),
       st.data())
def test_last_digits_are_forgiven_and_more_is_found(tmp_path_factory, rows, random, data):
    folder = tmp_path_factory.mktemp('tables')
    made, committed = folder/'made', folder/'committed'
    table(committed, ['abc', *rows])
    off = [[x*(1 + random.uniform(-.99e-3, .99e-3)) for x in row] for row in rows]
    table(made, ['abc', *off])
    assert publish.table_differences(made, committed) == []
    i, j = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 2))
    off[i][j] = rows[i][j] + max(1, abs(rows[i][j]))/100
    table(made, ['abc', *off])
    assert publish.table_differences(made, committed) == [
        f't.csv, row {i + 1}, {"abc"[j]}: {off[i][j]} here, {rows[i][j]} committed']

def test_a_reproduction_says_how_its_tables_compare(ran, capsys):
    def verdict():
        cli.reproduce(Options('toy', project=str(ran.root), publish=True))
        return re.findall('^identical to the committed tables: (.*)', capsys.readouterr().out, re.M)
    assert verdict() == ['no committed tables to compare with']
    assert verdict() == ['yes']
    table(ran.root/'tables', [('a',), (1,)])
    assert verdict() == ['no, differs by t.csv, row 1, a: nothing here, 1 committed']

def test_the_tables_of_ablations_have_a_folder_of_their_own(ran, monkeypatch):
    (ran.root/'tables').mkdir()
    (ran.root/'tables/mean.md').write_text('of the other profile')
    folders = {'micro': '', 'micro-ablations': 'ablations', 'micro-many': 'many', 'recorded': 'recorded'}
    assert publish.PUBLISHED == folders
    monkeypatch.setitem(publish.PUBLISHED, 'toy', 'ablations')
    cli.reproduce(Options('toy', project=str(ran.root)))
    assert set(bytes_of(ran.root/'tables')) == {'mean.md', 'ablations/mean.md', 'ablations/provenance.json'}
    assert (ran.root/'tables/mean.md').read_text() == 'of the other profile'

@pytest.mark.parametrize('number, status', [(1.0001, 0), (1.1, 1)])
def test_ci_fails_where_tables_differ(tmp_path, number, status):
    script = Path(__file__).resolve().parents[1]/'.ci'/'tables.py'
    table(tmp_path/'made', [('a',), (number,)])
    table(tmp_path/'committed', [('a',), (1,)])
    done = subprocess.run([sys.executable, script, 'made', 'committed'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and done.stdout.startswith('tables: ')
    line = 't.csv, row 1, a: 1.1 here, 1 committed\nerror: 1 differences in the tables\n'
    assert done.stderr == (line if status else '')

@pytest.mark.parametrize('reproduced, number, status, line', [
    (0, 1.0001, 0, '== all checks passed'), (0, 1.1, 1, 'error: 1 differences in the tables'),
    (124, 1, 124, 'error: the reproduction was stopped after 60 minutes'), (3, 1, 3, '== make reproduce')])
def test_ci_passes_only_after_a_reproduction_in_time_with_the_committed_numbers(tmp_path, reproduced, number, status,
                                                                               line):
    "Of the commands only `.ci/tables.py` is the real one; `make reproduce` writes a table and ends with a status."
    def script(name, text):
        (path := tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\n{text}\n')
        path.chmod(0o755)
    shutil.copytree(Path(__file__).resolve().parents[1]/'.ci', tmp_path/'.ci')
    script('bin/make', f'if [ "$1" = reproduce ]; then printf "a\\n{number}\\n" > tables/t.csv; exit {reproduced}; fi')
    for name in ('nbdev_clean', 'nbdev_export'): script(f'.venv/bin/{name}', '')
    script('.venv/bin/python', f'if [ "$1" = .ci/tables.py ]; then exec {sys.executable} "$@"; else echo "$@"; fi')
    for name in ('nbs', 'stepwise_routing', 'tables', 'figures'): (tmp_path/name).mkdir()
    table(tmp_path/'tables', [('a',), (1,)])
    (tmp_path/'README.md').touch()
    git = 'git', '-c', 'user.name=x', '-c', 'user.email=x@y'
    for words in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'all']): subprocess.run([*git, *words], cwd=tmp_path)
    path = f'{tmp_path/"bin"}{os.pathsep}{os.environ["PATH"]}'
    done = subprocess.run([tmp_path/'.ci'/'run'], env={**os.environ, 'PATH': path}, capture_output=True, text=True)
    assert done.returncode == status and '-m pytest -n 2 -m slow' in done.stdout
    assert (done.stdout + done.stderr).splitlines()[-1] == line

@pytest.mark.parametrize('text', ['', '[1]', 'null', '{"files": 3}', '{"other": {}}', '\udcff'])
def test_a_receipt_that_cannot_be_read_removes_nothing(ran, text):
    (tables := ran.root/'tables').mkdir()
    (tables/'old.md').write_text('mine')
    (tables/'provenance.json').write_text(text, errors='surrogateescape')
    cli.reproduce(Options('toy', project=str(ran.root), publish=True))
    assert set(bytes_of(tables)) == {'mean.md', 'old.md', 'provenance.json'}
    assert set(json.loads((tables/'provenance.json').read_text())['files']) == {'mean.md'}

BAD_MANIFESTS = ['{"profile": "toy"}', '[1]', 'null', '{', '\udcff',
                 '{"profile": "toy", "started": 3, "status": "failed"}',
                 '{"profile": "toy", "started": "2020", "status": "done", "notebooks": {"01_count": '
                 '{"status": "done"}}}',
                 '{"profile": "toy", "started": "3000", "status": "finished", "notebooks": {"01_count": '
                 '{"status": "done", "artefacts": {"../x": "y"}}}}']

@pytest.mark.parametrize('text', BAD_MANIFESTS)
def test_a_manifest_that_cannot_be_read_is_skipped_with_a_line(ran, text, capsys, monkeypatch):
    from stepwise_routing.run import needs
    monkeypatch.setattr(needs, 'report', lambda run: [])
    monkeypatch.setattr(needs, 'needs', lambda run: [])
    bad = ran.runs/'older'/'manifest.json'
    bad.parent.mkdir()
    bad.write_text(text, errors='surrogateescape')
    (bad.parent/'mine.txt').write_text('mine')
    cli.main(['--project', str(ran.root), 'reproduce', '--profile', 'toy', '--dry-run', '--resume'])
    out, err = capsys.readouterr()
    assert err == f'{bad} is damaged or of another version: skipped\n' and 'taken over from whole' in out
    for more in ('--resume', '--fresh'):
        with pytest.raises(SystemExit):
            cli.main(['--project', str(ran.root), 'reproduce', '--profile', 'toy', '--run-id', 'older', more])
        assert 'runs/older/manifest.json cannot be read: choose another --run-id' in capsys.readouterr().err
    assert (bad.parent/'mine.txt').read_text() == 'mine'

def test_publishing_touches_nothing_outside_of_its_folders(whole, tmp_path):
    "Whatever the last receipt says, and whatever the run's own says."
    tables, plan = whole.root/'tables', planned(whole, run_id='whole', resume=True)
    (tables/'kept').mkdir(parents=True, exist_ok=True)
    mine = tables/'kept'/'by-hand.md', tables/'old.md', tmp_path/'mine.txt', whole.root/'mine.txt'
    for path in mine: path.write_text('mine')
    (tables/'link').symlink_to(tmp_path)
    bad = ['../mine.txt', str(tmp_path/'mine.txt'), 'link/mine.txt', '../nbs/01_count.ipynb', '..', '', 'old.md']
    (tables/'provenance.json').write_text(json.dumps(dict(files=dict.fromkeys(bad, 'x'))))
    before = bytes_of(whole.root) | bytes_of(tmp_path)
    publish.publish(plan)
    after = bytes_of(whole.root) | bytes_of(tmp_path)
    assert set(before) - set(after) == {'tables/old.md'}
    assert {k for k in after if before.get(k) != after[k]} <= {'tables/mean.md', 'tables/provenance.json'}

def test_write_back_copies_outputs_and_refuses_another_source(whole):
    executed, source = whole.runs/'whole/05_table.ipynb', whole.nbs/'05_table.ipynb'
    before, noise = source.read_text(), executed.with_name('noisy.ipynb')
    noisy = json.loads(executed.read_text())
    noisy['cells'][-1]['outputs'] += [dict(output_type='stream', name='stderr', text='noise'),
                                      dict(output_type='stream', name='stdout', text='\r 50%')]
    noise.write_text(json.dumps(noisy))
    publish.write_back(noise, source)
    cells = notebooks.notebook_cells(source)
    assert [c['id'] for c in cells] == ['cell-0', 'cell-1', 'cell-2']
    assert [o['output_type'] for o in cells[2]['outputs']] == ['execute_result']
    assert all(c['execution_count'] is None for c in cells) and 'injected' not in source.read_text()
    changed = source.read_text().replace('decimals', 'digits')
    source.write_text(changed)
    with pytest.raises(ValueError, match='05_table.ipynb, cell cell-2 has changed since it was executed'):
        publish.write_back(noise, source)
    assert source.read_text() == changed
    source.write_text(before)
    noise.unlink()

def test_lessons_are_run_and_hold_their_outputs(toy):
    import nbformat.v4 as v4
    lesson, slow = toy.nbs/'data/lesson.ipynb', toy.nbs/'00_slow.ipynb'
    lesson.parent.mkdir()
    for path, source in ((lesson, '6 * 7'), (slow, '#| slow\n1')):
        path.write_text(json.dumps(v4.new_notebook(cells=[v4.new_code_cell(source, id='answer')])))
    script = Path(__file__).resolve().parents[1]/'.ci'/'lessons.py'
    done = subprocess.run([sys.executable, script], cwd=toy.root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ['00_slow is left as it is: it has cells for slow', 'data/lesson ']
    outputs = [notebooks.notebook_cells(p)[0]['outputs'] for p in (lesson, slow, toy.nbs/'01_count.ipynb')]
    assert [''.join(o['data']['text/plain']) for out in outputs for o in out] == ['42']

@pytest.mark.slow
def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(toy, whole):
    at, args, pids = random.Random(), ('reproduce', '--profile', 'toy', '--run-id', 'r', '--resume'), []
    for _ in range(5):
        process = start(toy, *args)
        pids.append(process.pid)
        time.sleep(at.uniform(.3, 3.5))
        process.kill(); process.communicate()
    for _ in range(40): # a kernel looks for its parent every second
        if not kernels_of(pids): break
        time.sleep(.1)
    assert kernels_of(pids) == []
    done = run(toy, *args)
    assert done.returncode == 0, done.stderr
    assert artefacts(toy.runs/'r') == artefacts(whole.runs/'whole')
    assert Manifest(toy.runs/'r')['status'] == 'finished'

def interrupted(toy, *args):
    "The process after Ctrl-C in the midst of the first notebook, and its last line."
    process, store = start(toy, 'reproduce', '--run-id', 'r', *args), toy.runs/'store'
    while not list(store.glob('*/numbers.jsonl')): time.sleep(.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and 'Traceback' not in err
    assert kernels_of([process.pid]) == [] and Manifest(toy.runs/'r')['status'] == 'interrupted'
    return err.strip().splitlines()[-1]

def test_ctrl_c_says_how_to_continue(toy):
    again = f'stepwise-routing reproduce --profile toy --resume --run-id r --project {shlex.quote(str(toy.root))}'
    line = interrupted(toy, '--profile', 'toy')
    assert line.startswith('stepwise-routing: run r interrupted; continue with: ') and line.endswith(again)

def still_there(processes, seconds=1):
    "Those that go on; one that has ended may wait for somebody to take note of it."
    left = psutil.wait_procs(processes, seconds)[1]
    return [p for p in left if is_running(p)]

def is_running(child):
    "A zombie does not run; a child may end while it is asked."
    try: return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess: return False

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for name in ('SIGINT', 'SIGTERM', 'SIGHUP'): signal.signal(getattr(signal, name), signal.SIG_IGN)
pathlib.Path(os.environ['BEGUN']).write_text(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))
while True:
    try: time.sleep(600)
    except BaseException: pass"""

@pytest.fixture
def hangs_up():
    "These tests may themselves run under nohup, which children inherit."
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)

@pytest.mark.usefixtures('hangs_up')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize('cell, status', [(COUNT, 130), (STUBBORN, None)])
def test_no_process_holds_the_terminal_for_long_after_a_signal_to_end(tmp_path, monkeypatch, number, cell, status):
    "The runner says how to continue; what does not want to end is ended, its children too."
    monkeypatch.setenv('TOY_PAUSE', '1')
    monkeypatch.setenv('BEGUN', str(tmp_path/'begun'))
    toy = toy_project(tmp_path/'toy', {'01_count': (OPEN, cell)}, toy=profile())
    process, wanted = start(toy, 'reproduce', '--run-id', 'r', '--profile', 'toy'), '*/numbers.jsonl'
    while not list((toy.runs/'store').glob(wanted)) and not (tmp_path/'begun').is_file(): time.sleep(.05)
    below = psutil.Process(process.pid).children(recursive=True)
    begin = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert len(below) >= 1 and still_there(below) == [] and time.monotonic() - begin < 25
    assert status in (None, process.returncode) and 'Traceback' not in err
    assert 'run r interrupted; continue with: ' in err.strip().splitlines()[-1]

def is_kernel(child):
    "A child may have ended before it is asked."
    try: return 'ipykernel_launcher' in child.cmdline()
    except psutil.NoSuchProcess: return False

@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('wait', [.1, .3])
def test_a_kernel_that_starts_leaves_nothing_behind(toy, number, wait):
    process = start(toy, 'reproduce', '--run-id', 'r', '--profile', 'toy')
    while not (kernels := [p for p in psutil.Process(process.pid).children() if is_kernel(p)]):
        time.sleep(.02)
    time.sleep(wait)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert 'Traceback' not in err and still_there(kernels) == []

def test_nohup_is_heeded(toy):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try: process = start(toy, 'reproduce', '--run-id', 'r', '--profile', 'fast')
    finally: signal.signal(signal.SIGHUP, before)
    while not list((toy.runs/'store').glob('*/numbers.jsonl')): time.sleep(.05)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0

EARLY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class CtrlC:
    def find_spec(name, path, target=None):
        if name == sys.argv[1]: signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, CtrlC)
from stepwise_routing.run.cli import main; main(['reproduce', '--profile', 'smoke', '--dry-run'])
"""

@pytest.mark.parametrize('module', ['argparse', 'stepwise_routing.base.tools', 'stepwise_routing.run.runner', 'yaml',
                                    'stepwise_routing.run.needs'])
def test_ctrl_c_while_it_starts_is_one_line(module):
    done = subprocess.run([sys.executable, '-c', EARLY, module], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, '', 'stepwise-routing: interrupted\n')

@pytest.mark.slow
def test_what_it_says_continues_the_same_run_with_the_same_settings(toy, tmp_path):
    mine = tmp_path/"my own; 'profile'.yaml"
    mine.write_text('open: {n_test: 30}')
    changes = '-p', 'results.n_boot=2', '-p', 'policy.lr=1e-5', '-p', 'policy.temp=[.1, .2]'
    line = interrupted(toy, '--profile', str(mine), *changes, '--publish')
    stepwise = tmp_path/'bin'/'stepwise-routing'
    stepwise.parent.mkdir()
    stepwise.write_text(f'#!{sys.executable}\n{MAIN}\n')
    stepwise.chmod(0o755)
    path = f'{stepwise.parent}{os.pathsep}{os.environ["PATH"]}'
    done = subprocess.run(line.partition('continue with: ')[2], shell=True, capture_output=True, text=True, timeout=120,
                          env={**os.environ, 'PATH': path})
    assert done.returncode == 0, done.stderr
    manifest = Manifest(toy.runs/'r')
    assert manifest['status'] == 'finished' and [p.name for p in toy.runs.glob('*/manifest.json')] == ['manifest.json']
    values = [manifest['settings'][k] for k in ('open.n_test', 'results.n_boot', 'policy.lr', 'policy.temp')]
    assert values == [30, 2, 1e-5, [.1, .2]]
    assert (toy.root/'tables/mean.md').read_text() == f'mean of 30 numbers: {sum(i*i for i in range(30))/30:.2f}'

def test_leftovers_of_an_interrupted_notebook_are_not_published(whole):
    plan = planned(whole, run_id='half')
    (plan.run.folder/'tables').mkdir(parents=True)
    for name in ('tables/old.md', 'numbers.json', 'notes.txt'): (plan.run.folder/name).write_text('half done')
    runner.run_plan(plan)
    assert set(runner.stage_files(plan.run.folder)) == {'numbers.json', 'tables/mean.md', 'notes.txt'}
    artefacts = [set(Manifest(plan.run.folder).stage(name)['artefacts']) for name in TOY]
    assert artefacts == [{'numbers.json'}, {'tables/mean.md'}], 'notes of the user are nobody else\'s'

@pytest.mark.parametrize('command', cli.COMMAND_MEANINGS)
def test_every_command_has_a_help_page_of_its_own(command, capsys):
    "What it does, and the options that it takes; a word of the general page for each."
    with contextlib.suppress(SystemExit): cli.main([command, '--help'])
    page = capsys.readouterr().out
    assert page.startswith(f'usage: stepwise-routing {command}')
    assert ('--only' in page) == (command == 'reproduce') and ('--faults' in page) == (command == 'test')
    assert f'  {command} ' in cli.build_parser().format_help()

def test_a_run_says_how_much_of_it_is_done_and_how_long_the_rest_takes():
    stages = {name: '' for name in runner.COLD_SHARES}
    plan = runner.Plan(None, Options(), None, '', stages, tuple(stages), {})
    shares = [plan.share_done([*stages][:i]) for i in range(7)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[6] == pytest.approx(1)
    assert plan.share_done(['02_rollouts']) == pytest.approx(.27)
    assert runner.progress_words(.25, 100) == 'about 25 % of the run done, about 5 min left'
    assert runner.progress_words(.5, 60) == 'about 50 % of the run done, about 60 s left'
    assert runner.progress_words(0, 1) == runner.progress_words(1, 9) == ''
    last = replace(plan, todo=('05_results', 'own'))
    assert 0 < last.share_done(['05_results']) < .5 and last.share_done(['05_results', 'own']) == pytest.approx(1)
    assert replace(plan, todo=('05_results',)).share_done(['05_results']) == 1 == replace(plan, todo=()).share_done([])

def test_an_error_line_is_one_line_without_escape_codes(tmp_path, capsys):
    "Names of files, and what a model wrote, may hold any character."
    name = 'x\x1b]0;t\x07\nstepwise-routing: all is well\x9b2J'
    with pytest.raises(SystemExit): cli.main(['reproduce', '--profile', name])
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and err[:-1].isprintable() and 'all is well' in err

def test_version(capsys):
    with pytest.raises(SystemExit) as e: cli.main(['--version'])
    assert e.value.code == 0 and re.fullmatch(r'stepwise-routing \d+\.\d+\.\d+\n', capsys.readouterr().out)

@pytest.mark.parametrize('code', [
    'import stepwise_routing; dir(stepwise_routing)',
    'import sys; sys.argv[1:] = ["--help"]; from stepwise_routing.run.cli import main; main()'])
def test_what_everybody_imports_is_light(code):
    modules = subprocess.run([sys.executable, '-X', 'importtime', '-c', code], capture_output=True, text=True).stderr
    heavy = re.findall(r'\| +(torch|pandas|numpy|papermill|nbformat|yaml|matplotlib|openai|transformers)\n', modules)
    assert 'stepwise_routing' in modules and heavy == []

def test_a_router_for_your_own_models_is_imported_without_torch():
    code = ('import sys, stepwise_routing.own\n'
            'heavy = "torch numba sklearn scipy pandas matplotlib transformers openai"\n'
            'print([name for name in heavy.split() if name in sys.modules])')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'

def test_the_package_shows_what_there_is_and_help_keeps_the_comments_of_parameters():
    import pydoc

    import stepwise_routing
    assert set(stepwise_routing.ENTRY_POINTS) < set(dir(stepwise_routing))
    for name in stepwise_routing.ENTRY_POINTS:
        thing = getattr(stepwise_routing, name)
        assert thing is getattr(stepwise_routing, name) and thing.__name__ == name
        assert thing.__doc__.count('Parameters') <= 1
    told = pydoc.plain(pydoc.render_doc(stepwise_routing.load_problems))
    assert 'Problems of one split' in told and 'split: "train", "calibration" or "test"' in told
    line = "module 'stepwise_routing' has no attribute 'trian'"
    with pytest.raises(AttributeError, match=line): stepwise_routing.trian
    assert not hasattr(stepwise_routing, '__path')
