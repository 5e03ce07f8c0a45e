"One's own pair of toy models: collected, trained and calibrated; a router whose threshold nobody calibrated."

from pathlib import Path

import pytest
from toy_models import ToyModel, toy_models, toy_problems

from stepwise_routing.live import OwnRouter, Promise
from stepwise_routing.method import rollouts
from stepwise_routing.own import CLASSES, Own, calibrate, collect, min_prob, train
from stepwise_routing.store import Store


class Calling(ToyModel):
    "It calls a function before it writes a list: one that prints, waits or raises an error."

    def __init__(self, index, function, **options):
        super().__init__(index, **options)
        self.function = function

    def write(self, requests):
        self.function()
        return super().write(requests)


def rows(n=120):
    "Questions and answers, no two alike."
    return [dict(question=p.question, answer=p.answer) for p in toy_problems(n)]


def ready(folder, n=120):
    "A folder with a router that promises nothing for new questions."
    collect(folder, rows(n), toy_models())
    train(folder, 0.1, steps=10, seeds=1)
    return calibrate(folder, 0.1, guarantee=False)


def put(folder, outcomes):
    "A folder in which these are collected."
    collect(folder, rows(5), toy_models())
    rollouts.save(outcomes, folder / 'outcomes.npz')


def content(folder) -> dict:
    "All steps that are kept."
    with Store(Path(folder) / 'draws.db') as store:
        return {key: store.get(*key) for key in store.keys()}


def files(folder) -> list:
    "Its settings, and what `collect` writes in the end."
    names = 'own.json', 'outcomes.npz', 'problems.jsonl'
    return [(folder / name).read_bytes() for name in names]


def refused(said, call, *args, **options):
    "The error is one line that says what is wrong."
    with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
        call(*args, **options)
    assert '\n' not in str(error.value)


def with_threshold(models, kappa=-0.7, router=min_prob, reading='continue', name='own', **promised):
    "An `OwnRouter` whose threshold nobody calibrated."
    facts = dict(router=CLASSES[0], kappa=kappa, reading=reading, unit='flops', alpha=0.1)
    facts |= dict(guarantee=False, agreement=False, n=1, right=0.0, large_right=0.0)
    facts |= dict(handed_over=1.0, costs={}, large_cost=0.0)
    own = Own(models=[model.spec.name for model in models], draws='', name=name)
    return OwnRouter(models, router, Promise(**facts | promised), own)
