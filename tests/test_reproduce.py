"The runner: what it refuses, what it skips, what it survives, and what it leaves behind."
import json, os, random, re, signal, subprocess, sys, time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.run import config as run_config
from stepwise_routing.run import reproduce as run_reproduce

N, PAUSE = 20, .1 # the toy's first notebook takes about N * PAUSE seconds

@pytest.fixture
def toy(tmp_path): return run_reproduce.toy_project(tmp_path/'toy', toy=dict(n_items=N, pause=PAUSE), fast=dict(n_items=3))

def command(project, *args):
    code = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from stepwise_routing.run.reproduce import main; main()'
    return [sys.executable, '-c', code, '--project', str(project.root), *args]

def run(project, *args): return subprocess.run(command(project, *args), capture_output=True, text=True, timeout=120)

def start(project, *args): return subprocess.Popen(command(project, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def bytes_of(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}

def artefacts(folder): return {name: path.read_bytes() for name, path in run_reproduce._artefacts(folder).items()}

def marked(project):
    "Processes that carry the mark of this project's store."
    import psutil
    found = []
    for process in psutil.process_iter():
        try: found += [process.pid] if process.environ().get(run_reproduce._MARK, '').startswith(str(project.root.resolve())) else []
        except (psutil.Error, OSError): pass
    return found

@pytest.mark.parametrize('args, said', [
    ('reprodcue', r"'reprodcue' is not known to stepwise-routing \(did you mean 'reproduce'\?\)"),
    ('reproduce --profile fats', r"unknown profile 'fats' \(did you mean 'fast'\?\); choose one of: fast, toy"),
    ('reproduce --profile none/there.yaml', r'no such profile file: none/there.yaml'),
    ('reproduce --profile fast --parm x=1', r"'--parm' is not known to .* \(did you mean '--parameter'\?\)"),
    ('reproduce --profile fast -p n_itmes=1', r"unknown parameter 'n_itmes' \(did you mean 'n_items'\?\)"),
    ('reproduce --profile fast -p n_items=many', r"n_items must be int, not 'many'"),
    ('reproduce --profile fast -p n_items=true', r'n_items must be int, not True'),
    ('reproduce --profile fast -p run_dir=x', r'the runner sets run_dir itself'),
    ('reproduce --profile fast -p n_items', r'write NAME=VALUE'),
    ('reproduce --profile fast --only 02_tabel', r"no notebook '02_tabel' \(did you mean '02_table'\?\)"),
    ('reproduce --profile fast --only 02', r'reads what 01_count wrote, .* --run-id, .* --resume'),
    ('reproduce --profile fast --run-id ../x', r"'../x' cannot name a run"),
])
def test_refused_in_one_line_before_anything_is_written(toy, capsys, args, said):
    before = bytes_of(toy.root)
    with pytest.raises(SystemExit) as e: run_reproduce.main(['--project', str(toy.root), *args.split()])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == '' and err.count('\n') == 1, err
    assert re.search(said, err), err
    assert bytes_of(toy.root) == before

@pytest.mark.parametrize('yaml, said', [
    ('n_items: [1', 'bad.yaml is not valid YAML'), ('- 1', 'bad.yaml must hold'), ('n_itms: 3', "unknown parameter 'n_itms'"),
    ('02_tabel: {decimals: 1}', "no notebook '02_tabel'"), ('02_table: {n_items: 1}', "02_table: unknown parameter 'n_items'"),
    ('02_table: 1', 'section 02_table must hold'), ('seed: 1.5', 'seed must be int, not 1.5'), ('1: 2', "unknown parameter '1'")])
def test_a_bad_profile_is_refused_by_name(toy, tmp_path, capsys, yaml, said):
    (tmp_path/'bad.yaml').write_text(yaml)
    with pytest.raises(SystemExit): run_reproduce.main(['--project', str(toy.root), 'reproduce', '--profile', str(tmp_path/'bad.yaml')])
    err = capsys.readouterr().err
    assert said in err and err.count('\n') == 1

@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text('abcn_items', min_size=1, max_size=8), st.integers(), max_size=3))
def test_a_notebook_gets_what_it_declares_or_nothing_runs(changes):
    declarations = {'01_a': dict(n_items=('int', 3), run_dir=('str', 'x')), '02_b': dict(seed=('int', 0))}
    profile = run_config.Profile('p', {}, {}, {}, 'p.yaml').edit(**changes)
    unknown = [k for k in changes if k not in ('n_items', 'seed')]
    if unknown:
        with pytest.raises(ValueError, match=re.escape(repr(unknown[0]))): run_config.resolve(profile, declarations, dict(run_dir='r'))
    else:
        expected = {'01_a': dict(n_items=changes.get('n_items', 3), run_dir='r'), '02_b': dict(seed=changes.get('seed', 0))}
        assert run_config.resolve(profile, declarations, dict(run_dir='r')) == expected

def test_a_foreign_profile_file_never_passes_for_the_committed_one(toy, tmp_path):
    (tmp_path/'toy.yaml').write_text('n_items: 2')
    assert run_config.load_profile(tmp_path/'toy.yaml', toy).name != 'toy'
    assert run_config.load_profile(toy.params/'toy.yaml', toy).name == 'toy'

def test_dry_run_prints_the_plan_and_writes_nothing(toy, capsys):
    before = bytes_of(toy.root)
    run_reproduce.main(['--project', str(toy.root), 'reproduce', '--profile', 'toy', '--dry-run'])
    out = capsys.readouterr().out
    assert 'run      01_count: ' in out and f'n_items={N}' in out and 'runs/store/toy: empty' in out
    assert bytes_of(toy.root) == before

def test_a_failing_notebook_ends_with_one_line_and_status_1_and_can_be_mended(tmp_path):
    project = run_reproduce.toy_project(tmp_path/'p', {**run_reproduce._TOY, '03_fails': ['n_items: int = 1', 'before = 1', 'raise ValueError("no such\\nthing")']},
                            fast=dict(n_items=2))
    done = run(project, 'reproduce', '--profile', 'fast', '--run-id', 'r')
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert line.startswith('stepwise-routing: 03_fails, cell 2 (cell-2): ValueError: no such thing (executed copy and log.txt in runs/r; continue with:')
    assert 'Traceback' not in done.stderr
    assert 'no such\nthing' in (project.runs/'r/log.txt').read_text()
    manifest = run_reproduce.Manifest.load(project.runs/'r')
    assert (manifest['status'], manifest.notebook('03_fails')['status'], manifest.notebook('02_table')['status']) == ('failed', 'failed', 'done')
    run_reproduce.toy_project(tmp_path/'mended', {'03_fails': ['n_items: int = 1', 'before = 1', 'before']})
    (tmp_path/'mended/nbs/03_fails.ipynb').replace(project.nbs/'03_fails.ipynb')
    assert run_reproduce.plan(project, run_config.load_profile('fast', project), resume=True).todo == ('03_fails',)
    done = run(project, 'reproduce', '--profile', 'fast', '--resume')
    assert done.returncode == 0, done.stderr
    assert run_reproduce.Manifest.load(project.runs/"r")["status"] == "finished"

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A project with one uninterrupted run."
    project = run_reproduce.toy_project(tmp_path_factory.mktemp('whole')/'toy', toy=dict(n_items=N, pause=0.))
    run_reproduce.run_plan(run_reproduce.plan(project, run_config.load_profile('toy', project), run_id='whole'), say=lambda line: None)
    return project

def test_kernels_talk_through_private_socket_files(tmp_path):
    "Two kernels that start at the same moment cannot take each other's TCP port."
    cells = ['n: int = 1', 'from ipykernel.kernelapp import IPKernelApp as K; open("../said", "w").write(f"{K.instance().transport} {K.instance().ip}")']
    project = run_reproduce.toy_project(tmp_path/'p', {'01_says': cells})
    run_reproduce._execute(project, run_reproduce.Job('01_says', {}, ''), project.root)
    transport, folder = (project.root/'said').read_text().split()
    assert transport == ('tcp' if os.name == 'nt' else 'ipc')
    assert os.name == 'nt' or not Path(folder).parent.exists() # gone with the kernel

def test_a_finished_run_is_not_run_again(whole, capsys):
    copies = {p: p.stat().st_mtime_ns for p in (whole.runs/'whole').glob('*.ipynb')}
    run_reproduce.main(['--project', str(whole.root), 'reproduce', '--profile', 'toy', '--run-id', 'whole', '--resume'])
    assert {p: p.stat().st_mtime_ns for p in copies} == copies
    with pytest.raises(SystemExit): run_reproduce.main(['--project', str(whole.root), 'reproduce', '--profile', 'toy', '--run-id', 'whole'])
    assert 'exists: continue it with --resume' in capsys.readouterr().err
    new = run_reproduce.plan(whole, run_config.load_profile('toy', whole), resume=True)
    assert new.todo == ('01_count', '02_table') and new.folder != whole.runs/'whole' and 'no unfinished run' in new.note

def test_the_manifest_tells_what_was_run_and_nothing_private(whole):
    manifest, text = run_reproduce.Manifest.load(whole.runs/'whole'), (whole.runs/'whole/manifest.json').read_text()
    assert manifest['status'] == 'finished' and manifest['seeds'] == {'01_count.seed': 0}
    assert manifest.notebook('01_count')['parameters'] == dict(run_dir='../runs/whole', store_dir='../runs/store/toy', n_items=N, seed=0, pause=0.)
    assert manifest.notebook('02_table')['artefacts'] == {'tables/mean.md': run_config.file_sha256(whole.runs/'whole/tables/mean.md')}
    assert manifest['inputs']['nbs/02_table.ipynb'] == run_config.file_sha256(whole.nbs/'02_table.ipynb')
    assert {'python', 'packages', 'hardware', 'git', 'started', 'ended'} <= set(manifest.data)
    private = [str(whole.root), str(Path.home()), sys.prefix, *(v for k, v in os.environ.items() if len(v) > 5 and re.search('KEY|TOKEN|SECRET', k))]
    assert [p for p in private if p != '/' and p in text] == []

def test_only_the_published_profile_reaches_the_top_level(whole):
    plan = run_reproduce.plan(whole, run_config.load_profile('toy', whole), run_id='whole', resume=True)
    run_reproduce.reproduce('toy', whole, run_id='whole', resume=True)
    assert not (whole.root/'tables').exists()
    run_reproduce.reproduce('toy', whole, run_id='whole', resume=True, share=True)
    first = bytes_of(whole.root/'tables')
    assert set(first) == {'mean.md', 'provenance.json'} and json.loads(first['provenance.json'])['parameters']['n_items'] == N
    run_reproduce.publish(plan, run_reproduce.Manifest.load(plan.folder))
    assert bytes_of(whole.root/'tables') == first

def test_write_back_copies_outputs_and_refuses_another_source(whole):
    executed, source = whole.runs/'whole/02_table.ipynb', whole.nbs/'02_table.ipynb'
    before = source.read_text()
    noisy = json.loads(executed.read_text())
    noisy['cells'][-1]['outputs'] += [dict(output_type='stream', name='stderr', text='noise'), dict(output_type='stream', name='stdout', text='\r 50%')]
    executed.with_name('noisy.ipynb').write_text(json.dumps(noisy))
    run_reproduce.write_back(executed.with_name('noisy.ipynb'), source)
    cells = run_config.notebook_cells(source)
    assert [c['id'] for c in cells] == ['cell-0', 'cell-1'] and [o['output_type'] for o in cells[1]['outputs']] == ['execute_result']
    assert all(c['execution_count'] is None for c in cells) and 'injected' not in source.read_text()
    changed = source.read_text().replace('decimals', 'digits')
    source.write_text(changed)
    with pytest.raises(ValueError, match='02_table.ipynb, cell cell-0: changed since noisy.ipynb was executed'): run_reproduce.write_back(executed.with_name('noisy.ipynb'), source)
    assert source.read_text() == changed
    source.write_text(before)
    executed.with_name('noisy.ipynb').unlink()

def test_killed_at_five_random_moments_it_ends_with_the_same_bytes(toy, whole):
    at, args = random.Random(), ('reproduce', '--profile', 'toy', '--run-id', 'r', '--resume')
    for _ in range(5):
        process = start(toy, *args)
        time.sleep(at.uniform(.3, 3.5))
        process.kill(); process.communicate()
    for _ in range(40): # a kernel looks for its parent every second
        if not marked(toy): break
        time.sleep(.1)
    assert marked(toy) == []
    done = run(toy, *args)
    assert done.returncode == 0, done.stderr
    assert artefacts(toy.runs/'r') == artefacts(whole.runs/'whole')
    assert run_reproduce.Manifest.load(toy.runs/'r')['status'] == 'finished'

def test_ctrl_c_says_how_to_continue(toy):
    process = start(toy, 'reproduce', '--profile', 'toy', '--run-id', 'r')
    store = toy.runs/'store/toy/numbers.jsonl'
    while not store.exists(): time.sleep(.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    line = err.strip().splitlines()[-1]
    assert process.returncode == 130 and 'Traceback' not in err
    assert line == 'stepwise-routing: run r interrupted; continue with: stepwise-routing reproduce --profile toy --run-id r --resume'
    assert marked(toy) == [] and run_reproduce.Manifest.load(toy.runs/'r')['status'] == 'interrupted'

def test_leftovers_of_an_interrupted_notebook_are_not_published(whole):
    plan = run_reproduce.plan(whole, run_config.load_profile('toy', whole), run_id='half')
    (plan.folder/'tables').mkdir(parents=True)
    (plan.folder/'tables/old.md').write_text('half done')
    manifest = run_reproduce.run_plan(plan, say=lambda line: None)
    assert set(run_reproduce._artefacts(plan.folder)) == {'numbers.json', 'tables/mean.md'}

def test_version(capsys):
    with pytest.raises(SystemExit) as e: run_reproduce.main(['--version'])
    assert e.value.code == 0 and re.fullmatch(r'stepwise-routing \d+\.\d+\.\d+\n', capsys.readouterr().out)
