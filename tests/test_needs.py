"What a run would take, and what this machine lacks: for the committed profiles, without calling anybody."
import csv
import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from stepwise_routing.base.records import Step
from stepwise_routing.base.store import RolloutStore
from stepwise_routing.base.tools import Project
from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.run import needs as run_needs
from stepwise_routing.run.config import read_run
from stepwise_routing.run.needs import LOADS, estimate, needs, report

ROOT = Path(__file__).resolve().parents[1]
PROFILES = sorted(p.stem for p in (ROOT/'nbs/params').glob('*.yaml'))
KEY = 'sk-' + 'not-a-real-key'*2

def run_of(profile, **changes):
    return read_run(profile, changes={k.replace('__', '.'): v for k, v in changes.items()}, project=Project(ROOT))

def disk(monkeypatch, free):
    usage = namedtuple('usage', 'total used free')(free, 0, free)
    monkeypatch.setattr(run_needs.shutil, 'disk_usage', lambda path: usage)

@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A machine with one GPU of 80 GB, every package, a key and a terabyte of disk; the test may take things away."
    smi = tmp_path/'bin'/'nvidia-smi'
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\necho 81559\n')
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', str(smi.parent), prepend=':')
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path/'cache'))
    monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    monkeypatch.setattr(run_needs, 'has_package', lambda package: True)
    monkeypatch.setattr(run_needs, 'vllm_on_cpu', lambda: False)
    disk(monkeypatch, 10**12)
    return smi

@pytest.mark.parametrize('profile', PROFILES)
def test_nothing_is_missing_and_nobody_is_called(offline, machine, profile):
    run = run_of(profile)
    if profile == 'micro-many':  # a program writes its problems
        missing = [f'needs {b}-many: ../runs/many/{b}-many.jsonl is not a file' for b in MICRO]
        assert all(any(line.startswith(need) for line in needs(run)) for need in missing)
        return
    assert needs(run) == []
    lines = report(run)
    rows = [line.split() for line in lines[2:len(estimate(run)) + 2]]
    assert lines[0].startswith('estimate ') and lines[1].split()[:4] == ['problems', 'stored', 'calls', 'M']
    assert [row[:2] for row in rows] == [[w.setting, w.benchmark] for w in estimate(run)]
    assert all(number.replace(',', '').replace('.', '').isdigit() for row in rows for number in row[3:])
    assert not any(KEY in line for line in lines)

@pytest.mark.parametrize('profile', ('open', 'open-lite', 'api'))
def test_what_a_bare_machine_lacks_is_told_in_one_line_each(offline, machine, monkeypatch, profile):
    machine.write_text('#!/bin/sh\nexit 9\n')
    monkeypatch.delenv('OPENAI_API_KEY')
    monkeypatch.setattr(run_needs, 'has_package', lambda package: False)
    expected, lines = ('vLLM', 'the Hub', 'a GPU') + ('an API key',)*(profile == 'api'), needs(run_of(profile))
    for name in expected: assert sum(line.startswith(f'needs {name}') for line in lines) == 1, lines
    assert len(lines) == len(expected) and not any('\n' in line for line in lines)

@pytest.mark.parametrize('changes, line', [
    (dict(models__memory_shares=[.6, .5]), 'memory_shares'),
    (dict(models__memory_shares=[.1, .1]), 'needs more memory for Qwen2.5-Math-7B-Instruct'),
    (dict(models__memory_shares=[.9]), 'give shares above 0'),
    (dict(models__memory_shares=[.45, .45]), 'needs more memory for Skywork'),
    (dict(data__data_dir='nowhere'), "data_dir='nowhere' is not a folder"),
    (dict(baselines__reward_model='nowhere'), "needs the model 'nowhere'"),
    (dict(open__models=['vllm:Qwen/Qwen2.5-Math-1.5B-Instruct@abc', 'micro-large']), '40 hexadecimal digits'),
    (dict(data__benchmarks=['gsm8k', 'aime']), "aime: unknown benchmark 'aime'"),
    (dict(data__benchmarks=['mbpp']), 'needs your leave to grade mbpp: it runs programs that a language model wrote'),
    (dict(data__benchmarks=['none.jsonl']), 'needs none: none.jsonl is not a file'),
    (dict(data__benchmarks=['micro-gsm'], open__n_test=1001), 'micro-gsm test has 1000 problems: n=1001 is too many')])
def test_settings_that_cannot_work_are_needs(offline, machine, changes, line):
    lines = needs(run_of('open', **changes))
    assert any(line in x for x in lines), lines

def test_a_small_gpu_a_full_disk_and_a_low_cap_are_needs(offline, machine, monkeypatch):
    machine.write_text('#!/bin/sh\necho 15360\n')
    disk(monkeypatch, 10**10)
    lines = needs(run_of('open'))
    assert any('needs more memory for' in x for x in lines) and sum('GB of disk' in x for x in lines) == 1
    line, = [x for x in needs(run_of('api', api__max_cents=5)) if 'cents' in x]
    assert line.startswith('needs ') and line.endswith('api.max_cents is 5')

def test_models_that_are_not_loaded_here_need_no_gpu(offline, machine):
    machine.write_text('#!/bin/sh\nexit 9\n')
    there = ['vllm-server:http://10.0.0.7:8000/v1', 'vllm-server:http://10.0.0.8:8000/v1#Qwen/Qwen2.5-Math-7B-Instruct']
    assert needs(run_of('open', open__models=there, data__grader='math-verify', models__memory_shares=[])) == []

# ---------------------------------------------------------------- the estimate

def test_the_micro_chains_are_those_of_the_committed_tables():
    with open(ROOT/'tables/evaluation.csv') as f: rows = list(csv.DictReader(f))
    for b in MICRO:
        methods = ('Small only', 'Large only')
        small, large = (next(r for r in rows if r['benchmark'] == b and r['method'] == m) for m in methods)
        x = LOADS[b]
        assert x.steps == pytest.approx(float(small['steps']), rel=.03)
        assert x.small == pytest.approx(float(small['small_tokens']), rel=.03)
        assert x.large == pytest.approx(float(large['large_tokens']), rel=.03)

def test_of_all_micro_problems_as_many_are_counted_as_are_shipped():
    counts = {b: tuple(len(load_problems(b, split)) for split in SPLITS) for b in MICRO}
    assert counts == {b: LOADS[b].counts for b in MICRO}
    every = dict(open__n_train=None, open__n_calibration=None, open__n_test=None)
    assert {w.problems for w in estimate(run_of('smoke', **every)) if w.setting == 'open'} == {3000}

def bill(run): return sum(w.cents for w in estimate(run))

def test_more_problems_cost_more_and_paid_models_cost_money():
    few, more = run_of('api', api__n_train=100), run_of('api', api__n_train=200)
    assert bill(more) > bill(few) > 0
    assert sum(w.calls for w in estimate(more)) > sum(w.calls for w in estimate(few))
    assert bill(run_of('api', api__models=['vllm:a/B-7B', 'vllm:a/B-70B'])) == bill(run_of('open')) == 0

def test_the_formula_by_hand():
    tables = dict(baselines__specreason=False, baselines__steer_next=False, baselines__reward_model='')
    rows = estimate(run_of('api', api__n_train=100, **tables))
    small, large = [w for w in rows if w.benchmark == 'gsm8k']
    n, T = 100 + 500 + 1319, 324/53 # a call per prefix, half of the chain left on average
    assert (small.calls, small.tokens, small.cents) == (n, pytest.approx(n*324), 0)
    assert large.calls == pytest.approx(n*T) and large.tokens == pytest.approx(n*316*(T + 1)/2)
    assert large.cents == pytest.approx((large.tokens*1.6 + large.calls*(89 + 20 + 324/2)*.4)/1e4)
    assert json.loads(json.dumps(rows))[0][:3] == ['api', 'gsm8k', small.model]

def test_walks_come_on_top():
    plain = dict(baselines__steer_next=False, baselines__reward_model='', sweep__per_step=False)
    none, one = (estimate(run_of('smoke', baselines__specreason=on, **plain)) for on in (False, True))
    assert all(a.calls < b.calls and a.tokens < b.tokens for a, b in zip(none, one))

def test_what_the_store_holds_is_not_counted_again(tmp_path):
    "Problems that the large model has answered alone; those whose chain was only begun are still to do."
    run = replace(run_of('smoke'), store=tmp_path)
    open_setting, api = run.settings
    n = sum(open_setting.n(split) for split in SPLITS)
    def row(): return report(run)[2].split()[3:]
    before = row()
    with RolloutStore(open_setting.files.rollouts('micro-gsm'), {}) as store:
        step = Step('', 0, 'step')
        store.put_many(((f'p{i}', 0, '', 1), step) for i in range(n//4))
        store.put_many(((f'q{i}', 0, '', 0), step) for i in range(n))
        store.put_many(((f'p{i}', 1, '', 1), step) for i in range(n//4))
    after = row()
    assert before[:2] == [str(n), '0'] and after[:2] == [str(n), str(n//4)]
    calls = [float(r[2].replace(',', '')) for r in (before, after)]
    assert calls[1] == pytest.approx(calls[0]*(1 - n//4/n), abs=1)
    open_setting.files.rollouts('micro-gsm').write_bytes(b'damaged') # the run itself says so
    assert row() == before
