"""Benchmarks side by side in processes: the same results, the same errors, and nobody stays behind."""
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from toy import ToyBackend, toy_backends
from walking import edges

from stepwise_routing.base.store import RolloutStore
from stepwise_routing.base.tools import write_file
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.models.names import open_models
from stepwise_routing.run import drawing
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.run.drawing import Part, draw_all, draw_edges, draw_parts, lent_stores
from stepwise_routing.run.stages import kept_given_up
from stepwise_routing.run.workers import free_gib, in_processes, side_by_side, worker_count


def toy_run(folder, workers, **n):
    sizes = {f'{s}.n_{split}': n.get(s, 2) for s in ('open', 'api') for split in ('train', 'calibration', 'test')}
    models = {'api.models': ['micro-small', 'micro-large'], 'models.workers': workers}
    return Run('toy', changed(Config(), sizes | models), folder/'run', folder/'store')

def jobs_of(s, benchmarks): return [(s.name, b, os.getpid(), len(benchmarks)) for b in benchmarks]

def stumble(s, benchmarks):
    if benchmarks == ['micro-math']: raise PermissionError('micro-math: no way in')
    return benchmarks

def test_benchmarks_are_done_side_by_side(tmp_path):
    here, there = (side_by_side(toy_run(tmp_path, n), jobs_of, 'jobs') for n in (1, 2))
    assert [x[:2] for x in here] == [x[:2] for x in there] and {x[2] for x in here} == {os.getpid()}
    assert os.getpid() not in {x[2] for x in there}
    assert [x[3] for x in there] == [1, 1, 1, 3, 3, 3], 'the calls of the API setting share a ledger'
    graded = replace(toy_run(tmp_path, 2), config=changed(toy_run(tmp_path, 2).config, {'data.grader': 'xverify:x'}))
    assert {x[2] for x in side_by_side(graded, jobs_of, 'jobs')} == {os.getpid()}, 'one server grades'

def double(x): return 2*x, os.getpid()

def test_any_jobs_are_done_in_processes_and_each_end_is_told():
    for n in (1, 2):
        ended = []
        results = in_processes(double, [(1,), (3,), (2,)], n, lambda x: x, lambda: ended.append(1))
        assert [x for x, _ in results] == [2, 6, 4] and len(ended) == 3
        assert (os.getpid() in {pid for _, pid in results}) == (n == 1)

def test_an_error_in_a_worker_is_the_same_line_here(tmp_path):
    for n in (2, 1):
        run = toy_run(tmp_path, n)
        if n == 1: run = replace(run, config=changed(run.config, {'data.benchmarks': ['micro-math']}))
        with pytest.raises(PermissionError) as e: side_by_side(run, stumble, 'jobs')
        assert str(e.value) == 'micro-math: no way in'

def doubtful(s, benchmarks): return [b == 'micro-math' and is_equiv('3', '10^{10^{10^{10}}}') for b in benchmarks]

@pytest.mark.slow
def test_what_grading_gave_up_comes_back_from_every_process(tmp_path):
    for n in (1, 2):
        run = toy_run(tmp_path/str(n), n)
        assert not any(side_by_side(run, doubtful, 'outcome tables'))
        side_by_side(run, jobs_of, 'walks') # gives up nothing
        assert [kept_given_up(s) for s in run.settings] == [{('3', '10^{10^{10^{10}}}')}]*2
        assert [f.name for f in (run.folder/'grading').iterdir()] == ['given-up-outcome tables.json']
        side_by_side(run, jobs_of, 'outcome tables') # again, and nothing is given up
        assert [kept_given_up(s) for s in run.settings] == [set()]*2

def drawing_run(folder, workers, n=5):
    "A run on the benchmarks whose answers the toy models can write."
    run = toy_run(folder, workers, open=n)
    return replace(run, config=changed(run.config, {'data.benchmarks': ['micro-gsm', 'micro-omni']}))

def toy_models(setting): return nullcontext(toy_backends())

def stored(run):
    "(Settings, edges) of all stores; another writer would be refused here."
    out = []
    for s in run.settings:
        for b in filter(lambda b: s.files.rollouts(b).exists(), s.benchmarks):
            try:
                with RolloutStore(s.files.rollouts(b)) as store: out.append((store.settings, edges(store)))
            except ValueError as e: # a process that was killed before it had written the settings
                assert 'is empty' in str(e)
    return out

def test_draws_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, 'PART', 4)
    runs = [drawing_run(tmp_path/str(n), n) for n in (1, 2, 3)]
    drawn, *others = [draw_all(run, toy_models) for run in runs]
    assert all(d['drawn_now'] == d['in_store'] for d in drawn) and [d['problems'] for d in drawn] == [15]*2 + [6]*2
    assert others == [drawn]*2 and [stored(run) for run in runs[1:]] == [stored(runs[0])]*2
    again = draw_all(drawing_run(tmp_path/'2', 3), toy_models)
    assert again == [d | dict(drawn_now=0, tokens_now=0) for d in drawn], 'nothing is drawn twice'
    files = {p.name for p in runs[2].settings[0].store.iterdir() if p.is_file()}
    assert files == {f'{b}.db{end}' for b in runs[2].settings[0].benchmarks for end in ('', '.lock')}

@pytest.mark.parametrize('n', [1, 4, 7, 15])
def test_the_parts_of_a_benchmark_are_all_of_it_and_alike(tmp_path, monkeypatch, n):
    monkeypatch.setattr(drawing, 'PART', n)
    open_setting, api = drawing_run(tmp_path, 2).settings
    parts = draw_parts(open_setting, 'micro-gsm', 2)
    ids = [[p.id for every in part.problems(open_setting).values() for p in every] for part in parts]
    whole = [p.id for every in Part('micro-gsm').problems(open_setting).values() for p in every]
    assert sorted(sum(ids, [])) == sorted(whole) and len(parts) == -(-15//n)
    assert all({0, 1} >= {len(x) - len(y) for x, y in zip(each, each[1:])} for each in zip(*(
        part.problems(open_setting).values() for part in parts)))
    assert draw_parts(api, 'micro-gsm', 2) == draw_parts(open_setting, 'micro-gsm', 1) == [Part('micro-gsm')]

def test_the_micro_models_write_the_same_in_parts(tmp_path):
    whole, parted = toy_run(tmp_path/'whole', 1, open=4), toy_run(tmp_path/'parted', 1, open=4)
    with open_models(['micro-small', 'micro-large']) as models:
        draw_edges(whole.settings[0], Part('micro-math'), models)
        for i in range(3): # who owns the store is here, and writes nothing
            with lent_stores(parted.settings[0], ['micro-math'], lambda s: nullcontext(models)):
                draw_edges(parted.settings[0], Part('micro-math', i, 3), models)
    (one,), (other,) = stored(whole), stored(parted)
    assert one == other and len(one[1]) > 100

@pytest.mark.parametrize('cores, gib, workers', [(16, 64., 16), (16, 5.3, 3), (1, 64., 1), (16, .2, 1)])
def test_auto_is_a_worker_per_core_as_far_as_the_memory_goes(tmp_path, monkeypatch, cores, gib, workers):
    import joblib
    monkeypatch.setattr(joblib, 'cpu_count', lambda: cores)
    monkeypatch.setattr('stepwise_routing.run.workers.free_gib', lambda: gib)
    def count(**changes):
        run = toy_run(tmp_path, 'auto')
        names = {k.replace("__", "."): v for k, v in changes.items()}
        return worker_count(replace(run, config=changed(run.config, names)))
    assert count() == count(open__models=['recorded:a', 'recorded:b']) == workers
    assert count(models__workers=7) == 7
    big = dict(open__models=['org/small', 'org/large']), dict(models__engine='ray'), dict(data__grader='xverify:x')
    assert [count(**changes) for changes in big] == [1, 1, 1]

def test_free_memory_is_a_number_and_wrong_workers_are_one_line(tmp_path):
    assert 0 < free_gib() < 2**20
    for wrong in (0, 'all', 1.5):
        with pytest.raises(ValueError, match='^-p: models.workers is .*should be .*auto'): toy_run(tmp_path, wrong)

class Mortal(ToyBackend):
    "The large model, whose process dies at its ninth call as long as a file says so."
    async def write(self, request):
        if self.calls == 9 and self.sentence.exists(): os.kill(os.getpid(), signal.SIGKILL)
        return await super().write(request)

def mortal_models(setting):
    large = Mortal(1)
    large.sentence = setting.folder/'die' # of one setting
    return nullcontext([ToyBackend(0), large])

@pytest.mark.parametrize('first, then', [(2, 3), (3, 1)])
def test_a_killed_worker_loses_no_chain_and_none_is_drawn_twice(tmp_path, monkeypatch, first, then):
    monkeypatch.setattr(drawing, 'PART', 4)
    whole, run = drawing_run(tmp_path/'whole', 1, 9), drawing_run(tmp_path, first, 9)
    n_edges = sum(d['in_store'] for d in draw_all(whole, toy_models))
    sentence = write_file(run.folder/'die', '')
    with pytest.raises(RuntimeError): draw_all(run, mortal_models)
    sentence.unlink()
    kept = sum(len(s) for _, s in stored(run))
    drawn = draw_all(drawing_run(tmp_path, then, 9), mortal_models)
    assert 0 < kept < n_edges and sum(d['drawn_now'] for d in drawn) == n_edges - kept
    assert stored(run) == stored(whole)

SLEEPERS = '''
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts what runs in its background without one
sys.path[:0] = sys.argv[2:]
from test_workers import sleeper, toy_run
from stepwise_routing.run.workers import side_by_side
if __name__ == '__main__': side_by_side(toy_run(Path(sys.argv[1]), 2), sleeper, 'jobs')
'''

def sleeper(s, benchmarks):
    mark = s.run.folder.parent/f'{os.getpid()}.pid'
    mark.write_text('')
    try: time.sleep(600)
    finally:
        time.sleep(1) # a paid call under way
        mark.with_suffix('.paid').write_text('')

@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_no_worker_outlives_its_parent_by_more_than_the_calls_under_way(tmp_path, end):
    import psutil
    (tmp_path/'go.py').write_text(SLEEPERS)
    process = subprocess.Popen([sys.executable, tmp_path/'go.py', tmp_path, Path(__file__).parent, *sys.path],
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    def pids(): return [int(p.stem) for p in tmp_path.glob('*.pid')]
    while len(pids()) < 2 and process.poll() is None: time.sleep(.1)
    workers = [psutil.Process(pid) for pid in pids()]
    time.sleep(2) # until it waits for them: Python may lose an interrupt in a callback
    (os.killpg if end == signal.SIGINT else os.kill)(process.pid, end) # Jupyter interrupts the group
    errors = process.communicate(timeout=60)[1]
    assert len(workers) == 2 and ('KeyboardInterrupt' in errors or end == signal.SIGKILL)
    assert psutil.wait_procs(workers, 60)[1] == []
    assert {p.stem for p in tmp_path.glob('*.paid')} == {str(w.pid) for w in workers}
