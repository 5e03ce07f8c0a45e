"Trees of toy models, and routers that follow from the chain alone or from a script."
import random
from dataclasses import dataclass

import numpy as np
from toy import toy_backends

from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.method.routers import ThresholdRouter
from stepwise_routing.method.tree import RoutingTree


def make_tree(path, k=2, sample=0, max_steps=30, backends=None, grade=None, **kwargs):
    backends = backends or toy_backends(k, **kwargs)
    store = RolloutStore(path, tree_settings('toy', backends))
    return RoutingTree(backends, store, sample, max_steps, grade or (lambda problem, answer: answer == problem.answer))

async def edge(tree, *node): return (await tree.run(*node, to_end=False))[0]

def edges(store): return {k: store.get(*k) for k in store.keys()}

def uniform(salt, state): return random.Random(f'{salt}-{state.problem.id}-{state.path}').random()

@dataclass
class Coin(ThresholdRouter):
    "A router whose score follows from the chain alone, for any mode."
    mode: str = 'absorbing'
    on_escalate: str = 'append'
    start: int = 0
    salt: int = 0
    name: str = 'coin'
    threshold: float = .5
    def score(self, states): return np.array([uniform(self.salt, s) for s in states])

@dataclass
class Script(Coin):
    "Escalates where the script says so; the n-th question gets the n-th answer, then never again."
    script: tuple = ()
    def __post_init__(self): self.asked = []
    def escalates(self, states):
        self.asked.append(states[0])
        n = len(self.asked) - 1
        return [n < len(self.script) and bool(self.script[n])]
