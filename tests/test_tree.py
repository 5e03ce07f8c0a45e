"""The routing tree: every edge is drawn once, whoever asks, in whatever order."""
import asyncio
import random

import pytest
from toy import ToyBackend, toy_backends, toy_problems
from walking import Coin, edge, edges, make_tree

from stepwise_routing.base.records import edge_seed
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import walk


class Lucky(ToyBackend):
    "A server that ignores seeds: no two draws are the same."
    def _random(self, *key): self.n = getattr(self, 'n', 0) + 1; return random.Random(self.n)

def test_seeds_follow_from_the_edge(tmp_path):
    tree, (p,) = make_tree(tmp_path/'s.db', sample=3, end=.05, cut=0), toy_problems(1)
    seen, write = [], tree.backends[1].write
    async def spy(request):
        out = await write(request)
        seen.append((len(request.steps), request.to_end, [request.seed(i) for i in range(len(out))]))
        return out
    tree.backends[1].write = spy
    async def go(): await edge(tree, p, '', 0); await edge(tree, p, '0', 1); return await tree.run(p, '0', 1)
    chain = asyncio.run(go())
    seeds = [edge_seed('toy', p.id, 3, '0' + '1'*i, 1) for i in range(len(chain))]
    assert seen == [(1, False, seeds[:1]), (2, True, seeds[1:])] and len(set(seeds)) == len(seeds) > 1

@pytest.mark.parametrize('backend', [ToyBackend, Lucky])
def test_an_edge_is_drawn_once_however_many_ask(tmp_path, backend):
    tree = make_tree(tmp_path/'s.db', backends=[backend(0, end=.1), backend(1, end=.1)])
    problems = toy_problems(8)
    async def go():
        wants = [f for p in problems for f in (edge(tree, p, '', 0), tree.run(p, '', 0), edge(tree, p, '', 1),
                                               tree.run(p, '', 1), edge(tree, p, '', 0), tree.run(p, '', 0))]
        return await asyncio.gather(*wants)
    out = asyncio.run(go())
    for i, p in enumerate(problems):
        first0, chain0, first1, chain1, again0, again = out[6*i:6*i + 6]
        assert first0 == chain0[0] == again0 and first1 == chain1[0] and chain0 == again
        assert tree.steps(p, '0'*len(chain0)) == chain0 and all(not s.final for s in chain0[:-1])
    assert tree.drawn == len(tree.store) == sum(b.steps_written for b in tree.backends) and not tree.pending

def test_a_chain_is_the_same_in_one_call_or_step_by_step(tmp_path):
    whole, single = make_tree(tmp_path/'a.db'), make_tree(tmp_path/'b.db')
    async def by_step(p):
        path, out = '', []
        while not out or not out[-1].final: out.append(await edge(single, p, path, 1)); path += '1'
        return tuple(out)
    for p in toy_problems(20): assert asyncio.run(whole.run(p, '', 1)) == asyncio.run(by_step(p))
    assert edges(whole.store) == edges(single.store)

def test_a_failing_model_fails_the_walk_and_the_next_one_goes_on(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(12)
    write, left = tree.backends[1].write, [9]
    async def failing(request):
        left[0] -= 1
        if left[0] < 0: raise ConnectionError('server gone')
        return await write(request)
    tree.backends[1].write = failing
    with pytest.raises(ConnectionError, match='server gone'): collect_rollouts(problems, tree)
    kept = edges(tree.store)
    assert kept
    tree.backends[1].write = write
    collect_rollouts(problems, tree)
    assert kept.items() <= edges(tree.store).items()
    other = make_tree(tmp_path/'t.db')
    collect_rollouts(problems, other)
    assert edges(tree.store) == edges(other.store)

def test_ctrl_c_keeps_what_was_drawn(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db', shy=0), toy_problems(20)
    write, left = tree.backends[0].write, [6]
    async def interrupted(request):
        left[0] -= 1
        if left[0] == 0: raise KeyboardInterrupt
        return await write(request)
    tree.backends[0].write = interrupted
    with pytest.raises(KeyboardInterrupt): walk(problems, Coin(), tree)
    assert len(tree.store)
    tree.backends[0].write = write
    assert walk(problems, Coin(), tree) == walk(problems, Coin(), make_tree(tmp_path/'t.db'))

def test_bad_input_is_one_clear_line(tmp_path):
    tree, problems = make_tree(tmp_path/'s.db'), toy_problems(2)
    for call, message in ((lambda: walk(toy_problems(1, benchmark='gsm8k'), Coin(), tree), 'is the store of toy'),
                          (lambda: RoutingTree(toy_backends(2, params=5), tree.store),
                           'settings.models[0].spec.params is'),
                          (lambda: collect_rollouts(problems, make_tree(tmp_path/'3.db', 3)), 'this tree has 3')):
        with pytest.raises(ValueError) as e: call()
        assert message in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(LookupError, match='does not hold step 0 of toy-0-0 by model 0'):
        asyncio.run(RoutingTree(None, tree.store).run(problems[0], '', 0))
