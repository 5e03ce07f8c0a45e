"One's own pair of toy models: collected, trained and calibrated; a router whose threshold nobody calibrated."

import time
from pathlib import Path

import pytest
from toy_models import ToyModel, toy_models, toy_problems

from stepwise_routing.live import OwnRouter, Promise
from stepwise_routing.method import rollouts
from stepwise_routing.own import CLASSES, Own, calibrate, collect, min_prob, train
from stepwise_routing.store import Store


class Loud(ToyModel):
    "It says when it is asked."

    def write(self, requests):
        print('asked')
        return super().write(requests)


class Interrupted(ToyModel):
    "Somebody presses Ctrl-C when it has written so many steps."

    most = 200

    def step(self, *args):
        if len(self.written) > self.most:
            raise KeyboardInterrupt
        return super().step(*args)


class Slow(ToyModel):
    "It takes its time."

    def write(self, requests):
        time.sleep(0.05)
        return super().write(requests)


class Dying(ToyModel):
    "It answers so many lists of requests, then there is an error."

    lives, error = 0, None

    def write(self, requests):
        Dying.lives -= 1
        if Dying.lives < 0:
            raise Dying.error
        return super().write(requests)


def rows(n=120, seed=0):
    "Questions and answers, no two alike."
    return [dict(question=p.question, answer=p.answer) for p in toy_problems(n, seed)]


def ready(folder, n=120, alpha=0.1):
    "A folder with a router that promises nothing for new questions."
    collect(folder, rows(n), toy_models())
    train(folder, alpha, steps=10, seeds=1)
    return calibrate(folder, alpha, guarantee=False)


def put(folder, outcomes):
    "A folder in which these are collected."
    collect(folder, rows(5), toy_models())
    rollouts.save(outcomes, folder / 'outcomes.npz')


def content(folder) -> dict:
    "All steps that are kept."
    with Store(Path(folder) / 'draws.db') as store:
        return {key: store.get(*key) for key in store.keys()}


def files(folder) -> dict:
    "What `collect` writes in the end."
    return {name: (folder / name).read_bytes() for name in ('outcomes.npz', 'problems.jsonl')}


def refused(said, call, *args, **options):
    "The error is one line that says what is wrong."
    with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
        call(*args, **options)
    assert '\n' not in str(error.value)


def with_threshold(models, kappa, router=min_prob, reading='continue', name='own', **promised):
    "An `OwnRouter` whose threshold nobody calibrated."
    facts = dict(router=CLASSES[0], kappa=kappa, reading=reading, unit='flops', alpha=0.1)
    facts |= dict(guarantee=False, agreement=False, n=1, right=0.0, large_right=0.0)
    facts |= dict(handed_over=1.0, costs={}, large_cost=0.0)
    own = Own(models=[model.spec.name for model in models], draws='', name=name)
    return OwnRouter(models, router, Promise(**facts | promised), own)
