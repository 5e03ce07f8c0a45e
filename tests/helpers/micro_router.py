"A router on the micro pair that nobody trained: a threshold on the least sure token, and a server for it."

import contextlib

from stepwise_routing.live import OwnRouter, Promise
from stepwise_routing.models.answers import RouterService
from stepwise_routing.models.hub import load_micro
from stepwise_routing.models.web import running
from stepwise_routing.own import CLASSES, Own, min_prob

KAPPA = -0.4  # hands over where the least sure token has a probability of 0.4 or less
FACTS = dict(alpha=0.1, guarantee=False, n=1, right=0.0, large_right=0.0, costs={})


def with_threshold(router, backends, kappa, name=CLASSES[0], reading='continue'):
    "An `OwnRouter` whose threshold nobody calibrated."
    promise = Promise(router=name, kappa=kappa, reading=reading, unit='flops', **FACTS)
    own = Own(models=[backend.spec.name for backend in backends], draws='')
    return contextlib.closing(OwnRouter(backends, router, promise, own))


def micro_router():
    "An `OwnRouter`, for a `with` block."
    return with_threshold(min_prob, [load_micro('small'), load_micro('large')], KAPPA)


@contextlib.contextmanager
def micro_server(router):
    "base_url of a server of a router, with the names `mine`, `small` and `large`."
    names = dict(mine='router', small='small', large='large')
    with running(RouterService(router, names)) as url:
        yield url
