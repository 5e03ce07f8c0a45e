"`stepwise-routing reproduce`: receipt, published tables, outputs written back, failures and interruptions."

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from toy_project import CHAPTERS, PARAMETERS, toy_project, write_chapter

from stepwise_routing.run import cli, reproduce
from stepwise_routing.store import Store
from stepwise_routing.util import PACKAGE


@pytest.fixture
def toy(tmp_path, monkeypatch):
    project = toy_project(tmp_path / 'toy')
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(reproduce, 'LESSONS', ('01_lesson',))
    for name in reproduce.ROUNDING:  # what `reproduce` sets ends with the test
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    return project


def read(path):
    return json.loads(path.read_text())


def status_of(*words) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


def test_the_default_run_publishes_and_writes_outputs_back(toy, capfd):
    for name in ('tables/table1.md', 'tables/a.csv'):
        (toy.root / name).write_text(name)
    assert status_of('reproduce', '--write-back') == 0
    (folder,) = toy.runs.iterdir()
    receipt = read(folder / 'receipt.json')
    assert list(receipt['seconds']) == ['02_rollouts', '01_lesson', '05_results']
    assert 0 < max(receipt['seconds'].values()) <= receipt['total']
    assert receipt['tables'] == 'all 2 tables are identical to the committed ones'
    assert f'results in tables/ and figures/; {receipt["tables"]}' in capfd.readouterr().out
    assert (toy.root / 'figures' / 'b.png').read_text() == 'figures/b.png'
    asked = read(folder / 'asked.json')
    assert asked == dict(profile='micro', changes={}, draw=0, rounding='AVX2')
    cells = {name: read(toy.nbs / f'{name}.ipynb')['cells'] for name in CHAPTERS}
    (output,) = cells['01_lesson'][0]['outputs']  # neither stderr nor progress
    assert output['data'] == {'text/plain': ['42']} and output['execution_count'] is None
    texts = [[''.join(cell['source']) for cell in of] for of in cells.values()]
    assert texts == [*CHAPTERS.values()]  # no cell of papermill


def test_a_failing_chapter_ends_with_one_line_that_names_it(toy, capfd):
    write_chapter(toy.nbs / '01_lesson.ipynb', 'raise ValueError("no such\\nthing")')
    assert status_of('reproduce') == 1
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == 'stepwise-routing: 01_lesson: ValueError: no such thing'
    assert 'Traceback' not in err and not (toy.root / 'figures').exists()


def run_in_process(nbs, name, folder, parameters) -> None:
    for cell in read(nbs / f'{name}.ipynb')['cells']:
        source = ''.join(cell['source'])
        exec('' if source == PARAMETERS else source, dict(parameters))


@pytest.mark.parametrize('option', ['--profile printed', '-p policy.alpha=.05', '--draw 3'])
def test_a_run_of_other_settings_publishes_nothing(toy, monkeypatch, option):
    monkeypatch.setattr(reproduce, 'run_chapter', run_in_process)
    (toy.root / 'tables' / 'a.csv').write_text('b')
    assert status_of('reproduce', *option.split()) == 0
    (folder,) = toy.runs.iterdir()
    receipt, asked = read(folder / 'receipt.json'), read(folder / 'asked.json')
    assert receipt['tables'] == 'other settings than those of the committed tables'
    assert (toy.root / 'tables' / 'a.csv').read_text() == 'b'
    profile = 'printed' if 'printed' in option else 'micro'
    changes = {'policy.alpha': 0.05} if 'alpha' in option else {}
    expected = dict(profile=profile, changes=changes, draw=3 * ('draw' in option))
    assert expected.items() <= receipt.items() and expected.items() <= asked.items()


MAIN = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from stepwise_routing.run import cli, reproduce
reproduce.LESSONS = ()  # the two stages alone
few = 'data.benchmarks=[micro-gsm]', '-p', 'results.n_boot=20', '-p', 'policy.steps=2'
cli.main(['reproduce', '--draw', '40', '-p', *few])"""


@pytest.mark.slow
def test_interrupted_while_drawing_the_same_command_goes_on(tmp_path):
    project = toy_project(tmp_path)
    for name in reproduce.STAGES:
        shutil.copy(PACKAGE.parent / 'nbs' / f'{name}.ipynb', project.nbs)
    options = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    store = project.runs / 'store' / 'micro' / 'micro-gsm.db'
    process = subprocess.Popen([sys.executable, '-c', MAIN], **options)
    while not (store.is_file() and len(Store(store))) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    kept = Store(store).keys()
    assert process.returncode == 130 and 'Traceback' not in err, err
    assert 'the same command goes on' in err.splitlines()[-1]
    assert kept and not list(project.runs.glob('*/outcomes'))

    done = subprocess.run([sys.executable, '-c', MAIN], timeout=400, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Store(store).keys()[: len(kept)] == kept and len(Store(store)) > len(kept)
    assert '| RSD |' in next(project.runs.glob('*/tables/table1.md')).read_text()
