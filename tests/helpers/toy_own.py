"One's own pair of toy models: collected, trained and calibrated; a router whose threshold nobody calibrated."

from toy_models import toy_models, toy_problems

from stepwise_routing.live import OwnRouter, Promise
from stepwise_routing.own import CLASSES, Own, calibrate, collect, min_prob, train


def rows(n=120, seed=0):
    "Questions and answers, no two alike."
    return [dict(question=p.question, answer=p.answer) for p in toy_problems(n, seed)]


def ready(folder, n=120, alpha=0.1):
    "A folder with a router that promises nothing for new questions."
    collect(folder, rows(n), toy_models())
    train(folder, alpha, steps=10, seeds=1)
    return calibrate(folder, alpha, guarantee=False)


def with_threshold(models, kappa, router=min_prob, reading='continue', name='own'):
    "An `OwnRouter` whose threshold nobody calibrated."
    promise = Promise(
        router=CLASSES[0],
        kappa=kappa,
        reading=reading,
        unit='flops',
        alpha=0.1,
        guarantee=False,
        n=1,
        right=0.0,
        large_right=0.0,
        costs={},
    )
    own = Own(models=[model.spec.name for model in models], draws='', name=name)
    return OwnRouter(models, router, promise, own)
