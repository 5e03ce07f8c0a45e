"`stepwise-routing reproduce`: chapters, receipt, published tables, outputs written back, failures and interruptions."

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from toy_project import CHAPTERS, PARAMETERS, notebook, toy_project

from stepwise_routing.run import cli, reproduce
from stepwise_routing.util import PACKAGE


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "We work in a toy clone."
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
    for name, text in {'table1.md': 'one', 'a.csv': 'a', 'provenance.json': 'old'}.items():
        (toy.root / 'tables' / name).write_text(text)
    assert status_of('reproduce', '--write-back') == 0
    (folder,) = toy.runs.iterdir()
    receipt = read(folder / 'receipt.json')
    assert list(receipt['seconds']) == ['02_rollouts', '01_lesson', '05_results']
    assert 0 < max(receipt['seconds'].values()) <= receipt['total']
    assert receipt['tables'] == 'all 2 tables are identical to the committed ones'
    assert f'results in tables/ and figures/; {receipt["tables"]}' in capfd.readouterr().out
    assert (toy.root / 'figures' / 'b.png').read_text() == 'b'
    expected = dict(profile='micro', changes={}, draw=0, rounding='AVX2')
    assert read(folder / 'asked.json') == expected
    cells = {name: read(toy.nbs / f'{name}.ipynb')['cells'] for name in CHAPTERS}
    (output,) = cells['01_lesson'][0]['outputs']  # neither stderr nor progress
    assert output['data'] == {'text/plain': ['42']} and output['execution_count'] is None
    sources = {name: [cell['source'] for cell in of] for name, of in cells.items()}
    assert sources == CHAPTERS  # no cell of papermill


def test_a_failing_chapter_ends_with_one_line_that_names_it(toy, capfd):
    (toy.nbs / '01_lesson.ipynb').write_text(notebook('raise ValueError("no such\\nthing")'))
    assert status_of('reproduce') == 1
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == 'stepwise-routing: 01_lesson: ValueError: no such thing'
    assert 'Traceback' not in err and not (toy.root / 'figures').exists()


def run_in_process(nbs, name, folder, parameters) -> float:
    "In place of a kernel."
    scope = dict(parameters)
    for cell in read(nbs / f'{name}.ipynb')['cells']:
        if cell['source'] != PARAMETERS:
            exec(cell['source'], scope)
    return 0.5


@pytest.mark.parametrize(
    'words, asked',
    [
        (['--profile', 'printed'], dict(profile='printed')),
        (['-p', 'policy.alpha=.05'], dict(changes={'policy.alpha': 0.05})),
        (['--draw', '3'], dict(draw=3)),
    ],
)
def test_a_run_of_other_settings_publishes_nothing(toy, monkeypatch, words, asked):
    monkeypatch.setattr(reproduce, 'run_chapter', run_in_process)
    (toy.root / 'tables' / 'a.csv').write_text('b')
    assert status_of('reproduce', *words) == 0
    (folder,) = toy.runs.iterdir()
    receipt = read(folder / 'receipt.json')
    assert receipt['tables'] == 'different from the committed tables: a.csv, table1.md'
    assert (toy.root / 'tables' / 'a.csv').read_text() == 'b'
    assert not (toy.root / 'figures').exists()
    expected = dict(profile='micro', changes={}, draw=0) | asked
    for told in (receipt, read(folder / 'asked.json')):
        assert {name: told[name] for name in expected} == expected


def test_jupyterlab_starts_kernels_that_round_like_a_run(toy, monkeypatch):
    started = []
    monkeypatch.setattr(os, 'execve', lambda *process: started.append(process))
    status_of('lab', '--no-browser')
    ((program, words, environment),) = started
    assert words == [program, '-m', 'jupyterlab', str(toy.nbs), '--no-browser']
    assert reproduce.ROUNDING.items() <= environment.items()


# ---- as a process
MAIN = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from stepwise_routing.run import cli, reproduce
reproduce.LESSONS = ()
cli.main()"""
FEW = '--draw 40 -p data.benchmarks=[micro-gsm] -p results.n_boot=20 -p policy.steps=2'


def steps_in(path) -> list:  # (row, key), as they were drawn
    try:
        with sqlite3.connect(f'{path.as_uri()}?mode=ro', uri=True) as db:
            return db.execute('SELECT rowid, key FROM edge').fetchall()
    except sqlite3.OperationalError:  # there is no such file, or no table yet
        return []


@pytest.mark.slow
def test_interrupted_while_drawing_the_same_command_goes_on(tmp_path):
    "With the two stages, without the lessons."
    nbs = PACKAGE.parent / 'nbs'
    shutil.copytree(nbs / 'params', tmp_path / 'nbs' / 'params')
    for name in reproduce.STAGES:
        shutil.copy(nbs / f'{name}.ipynb', tmp_path / 'nbs')
    (tmp_path / 'tables').mkdir()
    command = [sys.executable, '-c', MAIN, 'reproduce', *FEW.split()]
    options = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    store = tmp_path / 'runs' / 'store' / 'micro' / 'micro-gsm.db'
    process = subprocess.Popen(command, **options)
    while not steps_in(store) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    kept = steps_in(store)
    assert process.returncode == 130 and 'Traceback' not in err, err
    assert 'the same command goes on' in err.splitlines()[-1]
    assert kept and not list(tmp_path.glob('runs/*/outcomes'))

    done = subprocess.run(command, timeout=400, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert steps_in(store)[: len(kept)] == kept and len(steps_in(store)) > len(kept)
    (receipt,) = tmp_path.glob('runs/*/receipt.json')
    assert tuple(read(receipt)['seconds']) == reproduce.STAGES
    assert '| RSD |' in (receipt.parent / 'tables' / 'table1.md').read_text()
