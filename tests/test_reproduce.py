"The runner: what it refuses, what it runs, what it survives, and what it leaves behind."
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
from stepwise_routing.run.manifest import Manifest
from stepwise_routing.run.runner import Options
from toy_project import COUNT, OPEN, TOY, toy_project

from stepwise_routing.run import cli, config, notebooks, publish, runner
from stepwise_routing.util import Project

N, PAUSE = 20, .1 # the toy's first notebook takes about N * PAUSE seconds
MAIN = ('import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'from stepwise_routing.run.cli import main; main()')

@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv('TOY_PAUSE', str(PAUSE))
    return toy_project(tmp_path/'toy', toy=profile(), fast=profile(3))

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A project with one uninterrupted run."
    project = toy_project(tmp_path_factory.mktemp('whole')/'toy', toy=profile())
    runner.run_plan(planned(project, run_id='whole'))
    return project

@pytest.fixture
def ran(whole, tmp_path):
    "A copy of it, nothing published."
    root = Path(shutil.copytree(whole.root, tmp_path/'ran', symlinks=True))
    shutil.rmtree(root/'tables', ignore_errors=True)
    return Project(root)

def profile(n=N): return dict(data=dict(n_test=n), results=dict(n_boot=1))

def command(project, *args): return [sys.executable, '-c', MAIN, 'reproduce', '--project', str(project.root), *args]

def run(project, *args): return subprocess.run(command(project, *args), capture_output=True, text=True, timeout=120)

def start(project, *args):
    return subprocess.Popen(command(project, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def planned(project, profile='toy', **options):
    return runner.plan(Options(profile, project=str(project.root), **options))

def bytes_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}

def artefacts(folder):
    "What the stages wrote, without executed copies, log and receipt."
    return {name: data for name, data in bytes_of(folder).items()
            if not re.fullmatch(r'(.*\.ipynb|manifest\.json|log\.txt)(\.\w+\.part)?', name)}

def kernels_of(pids):
    "Kernels that one of these processes has started."
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get('JPY_PARENT_PID') in map(str, pids): alive.append(process.pid)
    return alive

# ---- what is refused

def test_refused_in_one_line_before_anything_is_written(toy, capsys):
    before = bytes_of(toy.root)
    for args, message in [
        ('reprodcue', r"'reprodcue' is not known to stepwise-routing \(did you mean 'reproduce'\?\)"),
        ('reproduce --profile fats', r"unknown profile 'fats' \(did you mean 'fast'\?\); choose one of: fast, toy"),
        ('reproduce --parm x=1', r"'--parm' is not known to .* \(did you mean '--parameter'\?\)"),
        ('reproduce --profile fast -p data.n_tset=1', r"'data.n_tset' \(did you mean 'data.n_test'\?\)"),
        ('reproduce --profile fast -p policy.alpha=2', r'-p: policy.alpha is 2: it should be less than 1$'),
        ('reproduce --profile fast -p data.n_test', r'write NAME=VALUE'),
        ('reproduce --profile fast -p data.n_test=[1', r'cannot be read as a value'),
        ('reproduce --profile fast --only 05_tabel', r"no notebook '05_tabel' \(did you mean '05_table'\?\)"),
        ('reproduce --profile fast --only 05', r'needs the results of 01_count, .* --run-id, .* --resume'),
        ('reproduce --profile fast --run-id ../x', r"'../x' cannot name a run"),
        ('reproduce --profile x\x1b]0;t\x07', r"unknown profile")]:
        where = ['--project', str(toy.root)] if args.startswith('reproduce ') else []
        with pytest.raises(SystemExit) as e: cli.main([*args.split(), *where])
        out, err = capsys.readouterr()
        assert e.value.code == 2 and out == '' and err.count('\n') == 1 and err[:-1].isprintable(), err
        assert re.search(message, err), err
    assert bytes_of(toy.root) == before

def test_a_bad_profile_is_refused_by_name(toy, tmp_path, capsys):
    for yaml, message in [('data: [1', 'bad.yaml is not valid YAML'), ('# nothing', 'bad.yaml is empty'),
                          ('data: {n_tset: 3}', "unknown setting 'data.n_tset'"), ('data: 1', 'section data must hold'),
                          ('policy: {delta: 0}', 'bad.yaml: policy.delta is 0: it should be greater than 0')]:
        (tmp_path/'bad.yaml').write_text(yaml)
        with pytest.raises(SystemExit): cli.main(['reproduce', '--profile', str(tmp_path/'bad.yaml')])
        err = capsys.readouterr().err
        assert message in err and err.count('\n') == 1

def test_a_run_keeps_its_settings_and_its_tables(ran):
    before = bytes_of(ran.runs/'whole')
    line = ('^run whole was made with policy.alpha=0.02, not 0.2 and 1 more: '
            'go on with -p policy.alpha=0.02 -p seed=0, or make a new run ')
    for options in (dict(only=('05',)), dict(resume=True)):
        with pytest.raises(ValueError, match=line):
            planned(ran, run_id='whole', changes={'policy.alpha': .2, 'seed': 3}, **options)
    assert bytes_of(ran.runs/'whole') == before

def test_a_notebook_with_other_settings_than_its_run_stops_with_one_line(ran, tmp_path, monkeypatch):
    monkeypatch.chdir(ran.nbs)
    line = '^runs/whole was made with policy.alpha=0.02, this notebook has policy.alpha=0.2: '
    with pytest.raises(ValueError, match=line) as e: config.open_run('toy', '../runs/whole', {'policy.alpha': .2})
    assert 'stepwise-routing reproduce --profile toy -p policy.alpha=0.2)' in str(e.value)
    assert config.open_run('toy', str(tmp_path/'new'), {'policy.alpha': .2}).config.policy.alpha == .2
    given = dict(profile='toy', run_dir='../runs/whole', changes={'results.n_boot': 3})
    with pytest.raises(notebooks.NotebookFailed, match='results.n_boot=1, this notebook has results.n_boot=3'):
        notebooks.execute(ran.nbs/'05_table.ipynb', ran.root/'mine.ipynb', ran.nbs, given)

def test_a_foreign_profile_file_never_passes_for_the_committed_one(toy, tmp_path):
    (tmp_path/'toy.yaml').write_text('data: {n_test: 2}')
    assert planned(toy, str(tmp_path/'toy.yaml')).run.profile != 'toy'
    assert planned(toy, str(toy.params/'toy.yaml')).run.profile == 'toy'

# ---- what runs

def test_a_finished_stage_is_not_run_again(ran, capsys):
    copies = {p: p.stat().st_mtime_ns for p in (ran.runs/'whole').glob('*.ipynb')}
    arguments = ['reproduce', '--project', str(ran.root), '--profile', 'toy', '--run-id', 'whole']
    cli.main([*arguments, '--resume'])
    assert {p: p.stat().st_mtime_ns for p in copies} == copies
    with pytest.raises(SystemExit): cli.main(arguments)
    assert 'exists: continue it with --resume' in capsys.readouterr().err
    new = planned(ran, resume=True)
    assert new.todo == tuple(TOY) and new.run.folder != ran.runs/'whole' and 'no unfinished run' in new.note
    assert planned(ran, run_id='whole', only=('05',)).todo == ('05_table',)

def test_resume_leaves_an_unfinished_run_of_other_settings_alone(toy):
    runner.begin(planned(toy, run_id='r', changes={'policy.alpha': .1}))
    for changes, goes_on in (({}, False), ({'policy.alpha': .1}, True),
                             ({'policy.alpha': .1, 'api.max_cents': 5}, True), ({'policy.alpha': .2}, False)):
        plan = planned(toy, resume=True, changes=changes)
        assert (plan.run.folder.name == 'r') == goes_on
        assert plan.note == ('continued' if goes_on else 'new; r, which is unfinished, has another policy.alpha')

def test_kernels_compute_alike_everywhere_and_end_at_once(tmp_path, monkeypatch):
    "With one thread, on private sockets; a kernel whose cells have run does not wait for deaf children."
    monkeypatch.setenv('MKL_NUM_THREADS', '3')
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    cell = ('import json, os, subprocess, sys\nfrom ipykernel.kernelapp import IPKernelApp as K\n'
            'deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(200)"\n'
            'pid = subprocess.Popen([sys.executable, "-c", deaf]).pid\n'
            'json.dump([pid, K.instance().transport, dict(os.environ)], open("../facts", "w"))')
    project = toy_project(tmp_path/'p', {'01_facts': (cell,)})
    begin = time.monotonic()
    runner.run_plan(planned(project))
    pid, transport, env = json.loads((project.root/'facts').read_text())
    with contextlib.suppress(psutil.NoSuchProcess): psutil.Process(pid).wait(20)
    assert time.monotonic() - begin < 25 and transport == ('tcp' if os.name == 'nt' else 'ipc')
    assert (env['OMP_NUM_THREADS'], env['MKL_NUM_THREADS'], env['PYTHONHASHSEED']) == ('1', '3', '0')
    for avx2 in (True, False):
        monkeypatch.setattr(notebooks, 'has_avx2', lambda: avx2)
        assert (notebooks.KERNEL_SETTINGS.items() <= notebooks.kernel_environment().items()) == avx2

def test_jupyterlab_starts_kernels_that_round_like_a_run(whole, monkeypatch):
    started = []
    monkeypatch.setattr(os, 'execve', lambda program, words, environment: started.append((words, environment)))
    monkeypatch.chdir(whole.root)
    cli.main(['lab', '--no-browser'])
    (words, environment), = started
    assert words[1:] == ['-m', 'jupyterlab', str(whole.nbs), '--no-browser']
    assert environment == notebooks.kernel_environment()

def test_the_manifest_tells_what_was_run_and_nothing_private(ran):
    manifest, text = Manifest(ran.runs/'whole'), (ran.runs/'whole/manifest.json').read_text()
    assert (manifest['profile'], manifest['status'], manifest['settings']['data.n_test']) == ('toy', 'finished', N)
    assert manifest.stage('05_table').keys() == {'status', 'seconds'}
    assert {'python', 'numpy'} <= manifest['packages'].keys()
    secrets = [v for k, v in os.environ.items() if len(v) > 5 and re.search('KEY|TOKEN|SECRET', k)]
    private = [str(ran.root), str(Path.home()), sys.prefix, *secrets]
    assert [p for p in private if p != '/' and p in text] == []
    runner.begin(planned(ran, run_id='mine', changes={'data.data_dir': str(Path.home()/'data')}))
    assert Manifest(ran.runs/'mine')['settings']['data.data_dir'] == '~/data'

# ---- what is published

def test_only_the_published_profile_reaches_the_top_level(ran, monkeypatch, capsys):
    options = dict(project=str(ran.root), run_id='whole', resume=True)
    def verdict(**more):
        cli.reproduce(Options('toy', **options, **more))
        return re.findall('^identical to the committed tables: (.*)', capsys.readouterr().out, re.M)
    verdict()
    assert not (ran.root/'tables').exists()
    assert verdict(publish=True) == ['no committed tables to compare with']
    first = bytes_of(ran.root/'tables')
    assert set(first) == {'mean.md', 'provenance.json'}
    assert json.loads(first['provenance.json'])['parameters']['data.n_test'] == N
    (ran.root/'tables'/'mine.csv').write_text('a\n1\n')
    assert verdict(publish=True) == ['no, differs by mine.csv, row 1, a: nothing here, 1 committed']
    (ran.root/'tables'/'mine.csv').unlink()
    (ran.runs/'whole'/'tables'/'mean.md').rename(ran.runs/'whole'/'tables'/'other.md')
    verdict(publish=True)
    assert set(bytes_of(ran.root/'tables')) == {'other.md', 'provenance.json'}, 'what an earlier run published goes'
    monkeypatch.setitem(publish.PUBLISHED, 'toy', 'ablations')
    assert verdict() == ['no committed tables to compare with']
    assert set(bytes_of(ran.root/'tables'/'ablations')) == {'other.md', 'provenance.json'}

def table(folder, rows, name='t.csv'):
    folder.mkdir(exist_ok=True)
    (folder/name).write_text(''.join(','.join(map(str, row)) + '\n' for row in rows))

@pytest.mark.parametrize('made, committed, lines', [
    ([('a', 'b'), (1, 'x')], [('a', 'b'), (1, 'x')], []),
    ([('a',), (1.002,), (0,)], [('a',), (1,), ('.0011',)], ['row 1, a: 1.002 here, 1 committed',
                                                            'row 2, a: 0 here, .0011 committed']),
    ([('a',), ('nan',), ('True',)], [('a',), (1,), ('False',)], ['row 1, a: nan here, 1 committed',
                                                               'row 2, a: True here, False committed']),
    ([('a',), (1,)], [('a', 'b'), (1, 2)], ['row 1, b: nothing here, 2 committed']),
    ([('a',), (1,), (2,)], [('a',), (1,)], ['row 2, a: 2 here, nothing committed'])])
def test_tables_are_compared_number_by_number(tmp_path, made, committed, lines):
    mine, theirs = tmp_path/'made', tmp_path/'committed'
    table(mine, made)
    table(theirs, committed)
    assert publish.table_differences(mine, theirs) == [f't.csv, {line}' for line in lines]
    words = publish.compared(mine, theirs)
    assert words.startswith('different from' if lines else 'identical')
    assert all(f't.csv, {line}' in words for line in lines)

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

def test_write_back_copies_outputs_and_refuses_another_source(ran):
    executed, source = ran.runs/'whole/05_table.ipynb', ran.nbs/'05_table.ipynb'
    noisy = json.loads(executed.read_text())
    noisy['cells'][-1]['outputs'] += [dict(output_type='stream', name='stderr', text='noise'),
                                      dict(output_type='stream', name='stdout', text='\r 50%')]
    executed.write_text(json.dumps(noisy))
    publish.write_back(executed, source)
    cells = notebooks.notebook_cells(source)
    assert [c['id'] for c in cells] == ['cell-0', 'cell-1', 'cell-2']
    assert [o['output_type'] for o in cells[2]['outputs']] == ['execute_result']
    assert all(c['execution_count'] is None for c in cells) and 'injected' not in source.read_text()
    changed = source.read_text().replace('decimals', 'digits')
    source.write_text(changed)
    with pytest.raises(ValueError, match='05_table.ipynb, cell cell-2 has changed since it was executed'):
        publish.write_back(executed, source)
    assert source.read_text() == changed

@pytest.mark.slow
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

# ---- interruptions

def test_interrupted_at_any_stage_it_goes_on(toy, monkeypatch):
    "By Ctrl-C, a failing notebook or a full disk, in process; what is done is not done again."
    executed = []
    def stops(source, *rest):
        if len(executed) == at: raise error
        executed.append(source.stem)
        shutil.copy(source, rest[0])
    monkeypatch.setattr(runner, 'execute', stops)
    for at, error in ((0, KeyboardInterrupt()), (1, notebooks.NotebookFailed('05_table: ValueError: no')),
                      (1, OSError(28, 'No space left on device'))):
        executed.clear()
        run_id = f'r{at}{type(error).__name__}'
        with pytest.raises(type(error), match='continue with: .*--resume --run-id') as e:
            runner.run_plan(planned(toy, 'fast', run_id=run_id))
        assert '\n' not in str(e.value) and Manifest(toy.runs/run_id)['status'] in ('interrupted', 'failed')
        at = None
        again = planned(toy, 'fast', resume=True)
        assert (again.run.folder.name, again.todo) == (run_id, tuple(TOY)[len(executed):])
        runner.run_plan(again)
        assert executed == [*TOY] and Manifest(toy.runs/run_id)['status'] == 'finished'

def test_a_failing_notebook_ends_with_one_line(tmp_path):
    project = toy_project(tmp_path/'p', {'06_fails': (OPEN, 'raise ValueError("no such\\nthing")')}, fast=profile(2))
    line = (r'^06_fails, cell 2 \(cell-2\): ValueError: no such thing '
            r'\(executed copy and log.txt in runs/r\); continue with: ')
    with pytest.raises(notebooks.NotebookFailed, match=line): runner.run_plan(planned(project, 'fast', run_id='r'))
    assert 'no such\\nthing' in (project.runs/'r/06_fails.ipynb').read_text()
    states = Manifest(project.runs/'r')['status'], Manifest(project.runs/'r').stage('06_fails')['status']
    assert states == ('failed', 'failed')

@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.sampled_from(['policy.delta', 'policy.delta']), st.floats(1e-300, 1e300), max_size=2),
       st.lists(st.floats(1e-9, .99), min_size=2, max_size=2), st.text('ab \'"$&;`\\', min_size=1))
def test_the_command_that_continues_has_the_same_settings(changes, alphas, name):
    asked = Options(f'{name}.yaml', ('04', '05'), publish=True, project=name,
                    changes=changes | {'policy.temp': alphas, 'data.n_test': dict(default=3), 'seed': 2})
    plan = SimpleNamespace(options=asked, run=SimpleNamespace(folder=Path('runs/r')))
    first, *args = shlex.split(runner.how_to_continue(plan, KeyboardInterrupt()).partition('continue with: ')[2])
    got = vars(cli.build_parser().parse_args(args))
    assert Path(first).name == 'stepwise-routing' and got.pop('command') == 'reproduce'
    read = config.changed(config.Config(), dict(got.pop('changes'))) # as the settings are read
    assert read == config.changed(config.Config(), asked.changes)
    assert Options(**got) == replace(asked, changes={}, run_id='r', resume=True)

def still_there(processes, seconds=1):
    "Those that go on; one that has ended may wait for somebody to take note of it."
    def is_running(p):
        try: return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess: return False
    return [p for p in psutil.wait_procs(processes, seconds)[1] if is_running(p)]

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for name in ('SIGINT', 'SIGTERM', 'SIGHUP'): signal.signal(getattr(signal, name), signal.SIG_IGN)
pathlib.Path(os.environ['BEGUN']).write_text(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))
while True:
    try: time.sleep(600)
    except BaseException: pass"""

@pytest.mark.parametrize('cell, number, status', [
    (COUNT, signal.SIGTERM, 130), pytest.param(COUNT, signal.SIGINT, 130, marks=pytest.mark.slow),
    pytest.param(STUBBORN, signal.SIGTERM, None, marks=pytest.mark.slow)])
def test_no_process_is_left_after_a_signal_and_the_draws_stay(tmp_path, monkeypatch, cell, number, status):
    "The runner says how to continue; what does not want to end is ended, its children too."
    monkeypatch.setenv('TOY_PAUSE', '1')
    monkeypatch.setenv('BEGUN', str(tmp_path/'begun'))
    toy = toy_project(tmp_path/'toy', {'01_count': (OPEN, cell)}, toy=profile())
    process, store = start(toy, '--run-id', 'r', '--profile', 'toy'), toy.runs/'store'/'toy'/'numbers.jsonl'
    while not (store.is_file() and store.stat().st_size) and not (tmp_path/'begun').is_file(): time.sleep(.05)
    below = psutil.Process(process.pid).children(recursive=True)
    begin = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert len(below) >= 1 and still_there(below) == [] and time.monotonic() - begin < 25
    assert status in (None, process.returncode) and 'Traceback' not in err
    line = err.strip().splitlines()[-1]
    again = f'stepwise-routing reproduce --profile toy --resume --run-id r --project {shlex.quote(str(toy.root))}'
    assert 'run r interrupted; continue with: ' in line and line.endswith(again)
    assert cell == STUBBORN or store.read_text().startswith('0\n')

@pytest.mark.slow
def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(toy, whole):
    at, args, pids = random.Random(0), ('--profile', 'toy', '--run-id', 'r', '--resume'), []
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

# ---- what everybody imports

def test_what_everybody_imports_is_light():
    for code in ('import stepwise_routing; dir(stepwise_routing)',
                 'import sys; sys.argv[1:] = ["--help"]; from stepwise_routing.run.cli import main; main()'):
        told = subprocess.run([sys.executable, '-X', 'importtime', '-c', code], capture_output=True, text=True).stderr
        heavy = re.findall(r'\| +(torch|pandas|numpy|papermill|nbformat|yaml|matplotlib|openai|transformers)\n', told)
        assert 'stepwise_routing' in told and heavy == []
    code = ('import sys, stepwise_routing.own\n'
            'heavy = "torch numba sklearn scipy pandas matplotlib transformers openai"\n'
            'print([name for name in heavy.split() if name in sys.modules])')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'

def test_the_package_shows_what_there_is_and_help_keeps_the_comments_of_parameters():
    import pydoc

    import stepwise_routing
    for name in stepwise_routing.ENTRY_POINTS:
        thing = getattr(stepwise_routing, name)
        assert thing is getattr(stepwise_routing, name) and thing.__name__ == name
    told = pydoc.plain(pydoc.render_doc(stepwise_routing.load_problems))
    assert 'Problems of one split' in told and 'split: "train", "calibration" or "test"' in told
    with pytest.raises(AttributeError, match="has no attribute 'trian'"): stepwise_routing.trian
