"""Toy outcome tables and walks of any number of models: random numbers, no language models."""

from dataclasses import replace

import numpy as np

from stepwise_routing.method.results import OS, all_methods, policy_curves
from stepwise_routing.method.rollouts import Outcomes, Walks
from stepwise_routing.settings import Training, as_printed

CENTS = 0.4, 0.1, 1.6  # dollars a million prompt, cached, generated tokens of the largest model


def toy(n: int = 200, models: int = 2, split: str = 'test', seed: int = 0) -> Outcomes:
    "A small chain slips now and then, and its score drops; larger models repair more, for more."
    rng = np.random.default_rng(seed)
    steps = rng.integers(2, 7, n)
    S, larger = steps.max(), models - 1
    t = np.arange(S + 1)
    inside = t[:-1] < steps[:, None]
    slips = inside & (rng.random((n, S)) < rng.beta(1, 6, (n, 1)))
    wrong = np.c_[np.zeros(n, bool), np.logical_or.accumulate(slips, 1)]  # [problem, t]
    repairs = 0.75 + 0.2 * np.arange(1, models) / larger  # [k]
    chance = np.where(wrong[..., None], repairs, 0.96)
    right = rng.random((n, S + 1, larger)) < chance
    last = ~wrong[np.arange(n), steps]
    right = np.where(t[:, None] < steps[:, None, None], right, last[:, None, None])

    small = rng.integers(5, 15, (n, S)) * inside
    large = np.maximum(steps[:, None] - t, 0)[..., None] * rng.integers(8, 12, (n, 1, larger))
    before = np.pad(small.cumsum(1), ((0, 0), (1, 0)))  # [problem, t]
    prompt = (40 + before[..., None]) * (large > 0)
    sent = (40 + before[:, :-1]) * inside
    odds = np.where(slips, rng.normal(0, 1, (n, S)), rng.normal(2.5, 1, (n, S)))
    features = dict(
        min_odds=odds,
        min_prob=1 / (1 + np.exp(-odds)),
        mean_logit=odds + rng.normal(18, 2, (n, S)),
        step=t[:-1] + 0.0 * odds,
        length=small + 0.0,
        final=t[1:] == steps[:, None],
        next_entropy=rng.random((n, S)),
        reward=np.where(slips, rng.random((n, S)), rng.beta(6, 1, (n, S))),
    )
    return Outcomes(
        benchmark=np.array('toy'),
        split=np.array(split),
        models=np.array([f'toy-{k}' for k in range(models)]),
        params=1e6 * 5.0 ** np.arange(models),
        dollars=np.outer(np.arange(models) / larger, CENTS),
        problem=np.array([f'{split}-{i}' for i in range(n)]),
        features={
            name: np.where(inside, x, np.nan).astype(np.float32).astype(float)
            for name, x in features.items()
        },
        small=np.stack([small, 40 * (t[:-1] == 0) * inside, sent, sent // 3], -1),
        large=np.stack([large, prompt, prompt, prompt // 4], -1),
        right=right.astype(np.uint8),
        steps=steps,
        cut=rng.random((n, models)) < 0.1,
        step_right=~np.logical_or.accumulate(slips, 1),
    )


def toy_walks(o: Outcomes, method: str, seed: int = 0) -> Walks:
    "Recorded walks of a router that asks a reward model about every step: the safer, the more it costs."
    rng = np.random.default_rng(seed)
    kappas = -np.unique(np.r_[np.linspace(1, 0, 11), 0.33])[::-1]
    tokens = rng.integers(1, 60, (len(kappas), len(o), len(o.models) + 1, 4))
    tokens[:, :, 1] += np.linspace(60, 0, len(kappas)).astype(int)[:, None, None]
    tokens[..., 3] = tokens[..., 2] // 2
    chance = np.linspace(0.95, 0.7, len(kappas))[:, None]
    return Walks(
        benchmark=o.benchmark,
        split=o.split,
        models=np.append(o.models, 'toy-reward'),
        params=np.append(o.params, 2e6),
        dollars=np.vstack([o.dollars, np.zeros(3)]),
        problem=o.problem,
        method=np.array(method),
        kappas=kappas,
        tokens=tokens,
        right=(rng.random((len(kappas), len(o))) < chance).astype(np.uint8),
    )


def toy_benchmark(n: int = 150, seed: int = 0, models: int = 2) -> dict:
    "Three splits and the walks of two methods, as `compare` takes them."
    names = 'train', 'calibration', 'test'
    splits = {name: toy(n, models, name, seed + i) for i, name in enumerate(names)}
    for i, method in enumerate(('SpecReason', 'RSD')):
        for j, name in enumerate(names[1:]):
            splits[method, name] = toy_walks(splits[name], method, seed + 2 * i + j)
    return splits


def quick_methods(seeds: tuple = (0,)) -> list:
    "All methods with short trainings."
    s = Training(steps=4, batch=50)
    printed = policy_curves(OS, replace(as_printed(s), steps=10))
    return [
        replace(method, curves=printed) if method.name == 'Ours, as printed' else method
        for method in all_methods(s, seeds)
    ]
