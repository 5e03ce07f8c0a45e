"A router on the micro pair that nobody trained: a bare threshold on the least sure token, and a server for it."
import contextlib

from stepwise_routing.method.confidence import Scaler
from stepwise_routing.method.policy import load_policy, save_policy, threshold_policy
from stepwise_routing.method.walks import LargeOnly, SmallOnly
from stepwise_routing.models.answers import RouterService
from stepwise_routing.models.hub import load_micro
from stepwise_routing.models.web import running
from stepwise_routing.own import Own
from stepwise_routing.report.own_router import OwnRouter

KAPPA = .55  # hands over where the least sure token has a probability of 0.4 or less

def micro_policy(folder):
    "A bare threshold, as `own.train` writes one."
    policy = threshold_policy(Scaler(('score_prob',), (.5,), (1.,)))
    save_policy(folder, policy, KAPPA, unit='paper_flops', on_escalate='regenerate')
    return load_policy(folder)

@contextlib.contextmanager
def micro_router(folder, backends=None):
    "An `OwnRouter`; `backends` in the place of the micro pair, which this closes with its loop."
    backends = backends or [load_micro('small'), load_micro('large')]
    router = OwnRouter(backends, micro_policy(folder), Own(models=[b.spec.name for b in backends]))
    with contextlib.closing(router): yield router

@contextlib.contextmanager
def micro_server(router):
    "base_url of a server of a router, with the names `mine`, `small` and `large`."
    routers = dict(mine=router.router, small=SmallOnly(), large=LargeOnly())
    with running(RouterService(router, routers)) as url: yield url
