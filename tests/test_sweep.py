"The policies of a run: which ones are planned, and what each is trained on."
from dataclasses import replace

import pytest

from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.run import sweep
from stepwise_routing.run.config import Config, Run, changed
from stepwise_routing.run.sweep import VARIANTS, fit_job, planned


def run_in(folder, **changes):
    names = {name.replace('__', '.'): value for name, value in changes.items()}
    return Run('toy', changed(Config(), names), folder/'run', folder/'store')

def test_planned_seeds_follow_each_other(tmp_path):
    jobs = planned(run_in(tmp_path, seed=7, sweep__seeds=3))
    names = [(job.variant, job.seed) for job in jobs]
    assert len(names) == len(set(names))
    assert all({seed for variant, seed in names if variant == v} == {7, 8, 9} for v in VARIANTS)

def test_planned_steps_of_the_paper_are_capped(tmp_path):
    jobs = planned(run_in(tmp_path, sweep__as_paper=True, sweep__most_steps=5))
    steps = {job.variant: job.training.steps for job in jobs}
    assert steps['as_paper'] == 5 < steps['append'] == Config().policy.steps

@pytest.fixture
def fits(tmp_path, monkeypatch):
    "What `fit` is called with: (environment to train in, environment to calibrate on, further arguments)."
    calls = []
    def fit(env, held_out, folder, *_, **more):
        folder.mkdir(parents=True, exist_ok=True)
        calls.append((env, held_out, more))
        return more
    monkeypatch.setattr(sweep, 'fit', fit)
    for split in ('train', 'calibration'):
        file = run_in(tmp_path).files.outcomes('toy', split)
        file.parent.mkdir(parents=True, exist_ok=True)
        toy_table(30, split).save(file)
    return calls

def job_of(folder, **changes):
    features = toy_table(3, 'train').features
    return replace(planned(run_in(folder))[0], features=features, **changes)

def test_a_job_scales_calibration_problems_like_training_problems(tmp_path, fits):
    "A policy sees new problems on the scale that it was trained with."
    fit_job(run_in(tmp_path), 'toy', job_of(tmp_path))
    (env, held_out, _), = fits
    assert (env.table.split, held_out.table.split) == ('train', 'calibration')
    assert held_out.scaler == env.scaler

def test_a_job_with_other_training_has_another_key(tmp_path, fits):
    "The key decides whether a policy in the store is taken for this one."
    job = job_of(tmp_path)
    others = [job, replace(job, training=replace(job.training, steps=job.training.steps + 1)),
              replace(job, on_escalate='regenerate'), replace(job, alpha=.5), replace(job, seed=99)]
    for each in (job, *others): fit_job(run_in(tmp_path), 'toy', each)
    first, again, *keys = [more['key'] for _, _, more in fits]
    assert first == again and len({first, *keys}) == len(others)
