"""Benchmarks side by side in processes: the same results, the same errors, and nobody stays behind."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy import ToyBackend, toy_backends
from walking import edges

from stepwise_routing.base.store import RolloutStore
from stepwise_routing.base.tools import write_file
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.method.routers import Grade
from stepwise_routing.models.interface import Reward
from stepwise_routing.run import drawing, walking
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.run.drawing import Part, draw_all, draw_parts
from stepwise_routing.run.stages import kept_given_up, open_case, read_all
from stepwise_routing.run.walking import ask_part, walk_all, walk_courses, walk_parts, walk_whole
from stepwise_routing.run.workers import in_rounds, side_by_side, worker_count


def toy_run(folder, workers, n=2):
    sizes = {f'data.n_{split}': n for split in ('train', 'calibration', 'test')}
    return Run('toy', changed(Config(), sizes | {'models.workers': workers}), folder/'run', folder/'store')

def paid(run): return replace(run, config=changed(run.config, {'models.names': ['micro-small', 'openai:gpt-4.1-mini']}))

def jobs_of(run, benchmarks): return [(b, os.getpid(), len(benchmarks)) for b in benchmarks]

def test_benchmarks_are_done_side_by_side(tmp_path):
    here, there = (side_by_side(toy_run(tmp_path, n), jobs_of, 'jobs') for n in (1, 2))
    assert [x[0] for x in here] == [x[0] for x in there] and {x[1] for x in here} == {os.getpid()}
    assert os.getpid() not in {x[1] for x in there} and [x[2] for x in there] == [1, 1, 1]
    calls = side_by_side(paid(toy_run(tmp_path, 2)), jobs_of, 'jobs')
    assert [x[2] for x in calls] == [3, 3, 3], 'paid calls share a ledger'
    graded = replace(toy_run(tmp_path, 2), config=changed(toy_run(tmp_path, 2).config, {'data.grader': 'xverify:x'}))
    assert {x[1] for x in side_by_side(graded, jobs_of, 'jobs')} == {os.getpid()}, 'one server grades'

def counted_problems(s, benchmarks): return [(b, len(load_problems(b, 'train')), os.getpid()) for b in benchmarks]

def test_worker_processes_know_the_benchmarks_of_question_files(tmp_path):
    rows = ''.join(json.dumps(dict(question=f'{i}?', answer=i)) + '\n' for i in range(40))
    files = [tmp_path/f'{name}.jsonl' for name in ('some', 'others')]
    for file in files: file.write_text(rows)
    run = toy_run(tmp_path, 2)
    run = replace(run, config=changed(run.config, {'data.benchmarks': [str(file) for file in files]}))
    found = side_by_side(run, counted_problems, 'jobs')
    assert [name for name, *_ in found] == ['some', 'others'] and all(n for _, n, _ in found)
    assert os.getpid() not in {number for *_, number in found}

def double(x): return 2*x, os.getpid()

def climb(start, heights, log):
    "A course: as many rounds as heights, each of that many jobs, which depend on the sum of the round before."
    top = start
    for n in heights:
        answers = yield [(top + i,) for i in range(n)]
        log.append((start, answers))
        top = sum(x for x, _ in answers)

def test_rounds_follow_each_other_and_no_course_waits_for_another():
    for workers in (1, 2):
        log, ended = [], []
        courses = [climb(1, (3, 2), log), climb(5, (1,), log), climb(2, (0, 1, 1, 4), log), climb(9, (), log)]
        results = in_rounds(double, courses, workers, lambda x: x, lambda: ended.append(1))
        values = [each and [x for x, _ in each] for each in results]
        assert values == [[24, 26], [10], [0, 2, 4, 6], None] and len(ended) == 3 + 2 + 1 + 1 + 1 + 4
        assert [[x for x, _ in answers] for start, answers in log if start == 1] == [[2, 4, 6], [24, 26]]
        assert (os.getpid() in {pid for _, answers in log for _, pid in answers}) == (workers == 1)

def stumble(run, benchmarks):
    if benchmarks == ['micro-math']: raise PermissionError('micro-math: no way in')
    return benchmarks

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
        assert kept_given_up(run) == {('3', '10^{10^{10^{10}}}')}
        assert [f.name for f in (run.folder/'grading').iterdir()] == ['given-up-outcome tables.json']
        side_by_side(run, jobs_of, 'outcome tables') # again, and nothing is given up
        assert kept_given_up(run) == set()

def drawing_run(folder, workers, n=5):
    "A run on the benchmarks whose answers the toy models can write."
    run = toy_run(folder, workers, n)
    return replace(run, config=changed(run.config, {'data.benchmarks': ['micro-gsm', 'micro-omni']}))

def toy_models(run): return nullcontext(toy_backends())

def stored(run):
    "(Settings, edges) of all stores; another writer would be refused here."
    out = []
    for b in filter(lambda b: run.files.rollouts(b).exists(), run.benchmarks):
        try:
            with RolloutStore(run.files.rollouts(b)) as store: out.append((store.settings, edges(store)))
        except ValueError as e: # a process that was killed before it had written the settings
            assert 'is empty' in str(e)
    return out

def test_draws_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, 'PART', 4)
    runs = [drawing_run(tmp_path/str(n), n) for n in (1, 2)]
    drawn, *others = [draw_all(run, toy_models) for run in runs]
    assert all(d['drawn_now'] == d['in_store'] for d in drawn) and [d['problems'] for d in drawn] == [15]*2
    assert others == [drawn] and stored(runs[1]) == stored(runs[0])
    again = draw_all(runs[1], toy_models)
    assert again == [d | dict(drawn_now=0, tokens_now=0) for d in drawn], 'nothing is drawn twice'

def test_the_parts_of_a_benchmark_are_all_of_it_and_alike(tmp_path, monkeypatch):
    n = 4
    monkeypatch.setattr(drawing, 'PART', n)
    run = drawing_run(tmp_path, 2)
    parts = draw_parts(run, 'micro-gsm', 2)
    ids = [[p.id for every in part.problems(run).values() for p in every] for part in parts]
    whole = [p.id for every in Part('micro-gsm').problems(run).values() for p in every]
    assert sorted(sum(ids, [])) == sorted(whole) and len(parts) == -(-15//n)
    assert all({0, 1} >= {len(x) - len(y) for x, y in zip(each, each[1:])} for each in zip(*(
        part.problems(run).values() for part in parts)))
    assert draw_parts(paid(run), 'micro-gsm', 2) == draw_parts(run, 'micro-gsm', 1) == [Part('micro-gsm')]

@pytest.mark.parametrize('cores, gib, workers', [(16, 5.3, 3), (16, .2, 1)])
def test_auto_is_a_worker_per_core_as_far_as_the_memory_goes(tmp_path, monkeypatch, cores, gib, workers):
    import joblib
    monkeypatch.setattr(joblib, 'cpu_count', lambda: cores)
    monkeypatch.setattr('stepwise_routing.run.workers.free_gib', lambda: gib)
    def count(**changes):
        run = toy_run(tmp_path, 'auto')
        names = {k.replace("__", "."): v for k, v in changes.items()}
        return worker_count(replace(run, config=changed(run.config, names)))
    assert count() == count(models__names=['recorded:a', 'recorded:b']) == workers
    assert count(models__workers=7) == 7
    big = dict(models__names=['org/small', 'org/large']), dict(models__ray_workers=2), dict(data__grader='xverify:x')
    assert [count(**changes) for changes in big] == [1, 1, 1]

class Mortal(ToyBackend):
    "The large model, whose process dies at its ninth call as long as a file says so."
    async def write(self, request):
        if self.calls == 9 and self.sentence.exists(): os.kill(os.getpid(), signal.SIGKILL)
        return await super().write(request)

def mortal_models(run):
    large = Mortal(1)
    large.sentence = run.folder/'die'
    return nullcontext([ToyBackend(0), large])

@pytest.mark.slow
def test_a_killed_worker_loses_no_chain_and_none_is_drawn_twice(tmp_path, monkeypatch, first=2, then=1):
    monkeypatch.setattr(drawing, 'PART', 4)
    whole, run = drawing_run(tmp_path/'whole', 1, 6), drawing_run(tmp_path, first, 6)
    n_edges = sum(d['in_store'] for d in draw_all(whole, toy_models))
    sentence = write_file(run.folder/'die', '')
    with pytest.raises(RuntimeError): draw_all(run, mortal_models)
    sentence.unlink()
    kept = sum(len(s) for _, s in stored(run))
    drawn = draw_all(drawing_run(tmp_path, then, 6), mortal_models)
    assert 0 < kept < n_edges and sum(d['drawn_now'] for d in drawn) == n_edges - kept
    assert stored(run) == stored(whole)

# ---- walks

class Glimpsed(ToyBackend):
    "Shows the entropy of a step's first token."
    async def write(self, request):
        return tuple(replace(step, entropy=1 - step.prob[0]) for step in await super().write(request))

def glimpsed_models(run): return nullcontext([Glimpsed(i) for i in (0, 1)])

def walking_run(folder, workers, n=4):
    run = drawing_run(folder, workers, n)
    changes = {'baselines.walk_thresholds': 'curve', 'models.price': 'gpt-4.1-mini'}
    return replace(run, config=changed(run.config, changes))

def with_workers(run, n): return replace(run, config=changed(run.config, {'models.workers': n}))

@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    "A run as chapter 02b leaves it."
    run = walking_run(tmp_path_factory.mktemp('drawn'), 1)
    draw_all(run, glimpsed_models)
    read_all(run)
    return run

def copied(run, folder, workers):
    shutil.copytree(run.folder.parent, folder)
    return replace(with_workers(run, workers), folder=folder/'run', store=folder/'store')

def answers(run):
    "What judges and reward models said, by store and edge; another writer would be refused here."
    out = {}
    for path in sorted(run.store.glob('*-*-*.db')):
        record = Grade if 'grades' in path.name else Reward
        with RolloutStore(path, record=record) as store: out[path.name] = edges(store)
    return out

def methods(run): return {p.relative_to(run.folder): p.read_bytes() for p in sorted(run.folder.rglob('methods/*.csv'))}

@pytest.mark.slow
def test_walks_do_not_depend_on_the_number_of_workers(tmp_path, drawn, one_thread, monkeypatch):
    monkeypatch.setattr(walking, 'PART', 3)
    runs = [copied(drawn, tmp_path/str(n), n) for n in (1, 2)]
    cases, *others = [walk_all(run, glimpsed_models) for run in runs]
    assert [(c.benchmark, c.unit) for c in cases] == [(b, unit) for b in ('micro-gsm', 'micro-omni') for unit in ('paper_flops', 'cents')]
    names = {grid.method for grid in cases[0].grids}
    assert {'SpecReason (expected)', 'RSD', 'TRIM-Agg'} <= names
    assert others == [cases]
    assert methods(runs[1]) == methods(runs[0]) and len(methods(runs[0])) == 2*2*6
    assert stored(runs[1]) == stored(runs[0])
    assert answers(runs[1]) == answers(runs[0]) and len(answers(runs[0])) == 2*2

@pytest.fixture
def one_thread():
    "For many small fits beside other processes."
    import torch
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

def test_who_pays_walks_in_one_job_and_others_benchmark_by_benchmark(drawn, monkeypatch):
    monkeypatch.setattr(walking, 'PART', 5)
    def tasks(run, workers): return [next(course) for course in walk_courses(run, workers)]
    for run, workers in ((drawn, 1), (paid(drawn), 3)): assert tasks(run, workers) == [[(run, walk_whole, run.benchmarks)]]
    assert all(len(jobs) > 1 and {task for _, task, *_ in jobs} == {ask_part} for jobs in tasks(drawn, 2))
    big = replace(drawn, config=changed(drawn.config, {'models.ray_workers': 2}))
    assert tasks(big, 2) == [[(big, walk_whole, [b])] for b in big.benchmarks]

def test_outcomes_of_parts_are_put_together_in_the_order_of_the_problems(drawn, monkeypatch, n=3):
    monkeypatch.setattr(walking, 'PART', n)
    case = open_case(drawn, 'micro-gsm', 'paper_flops')
    parts = walk_parts(drawn, case, 'test')
    ids = [[p.id for p in part.problems(drawn)['test']] for part in parts]
    outcomes = [dict(name=np.array(each), size=np.array([len(x) for x in each])) for each in ids]
    whole = walking.whole_outcome(outcomes)
    assert whole['name'].tolist() == case.tables['test'].problem_id.tolist() and len(parts) == -(-4//n)
    assert whole['size'].dtype == int and len(walk_parts(drawn, case)) == -(-12//n)

SLEEPERS = '''
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts what runs in its background without one
sys.path[:0] = sys.argv[2:]
from test_workers import sleeper, toy_run
from stepwise_routing.run.workers import side_by_side
if __name__ == '__main__': side_by_side(toy_run(Path(sys.argv[1]), 2), sleeper, 'jobs')
'''

def sleeper(run, benchmarks):
    mark = run.folder.parent/f'{os.getpid()}.pid'
    mark.write_text('')
    try: time.sleep(600)
    finally:
        time.sleep(float(os.environ.get('PAID', 1))) # a paid call under way
        mark.with_suffix('.paid').write_text('')

@pytest.mark.parametrize('end, seconds', [(signal.SIGINT, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 50)])
@pytest.mark.slow
def test_no_worker_outlives_its_parent_by_much_more_than_the_calls_under_way(tmp_path, monkeypatch, end, seconds):
    import psutil
    monkeypatch.setenv('PAID', str(seconds))
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
    assert psutil.wait_procs(workers, 10)[1] == []
    assert {p.stem for p in tmp_path.glob('*.paid')} == ({str(w.pid) for w in workers} if seconds == 1 else set())
