"""How fast is it, and how does cost grow? `python bench/run.py [RECEIPT]`

RECEIPT: receipt.json of a run, such as runs/NAME/receipt.json; its seconds are printed, too. Everything else is
measured here, on one core, in about two minutes. Compare the ratios of one run, not runs on different days.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.baselines import low
from stepwise_routing.method.policy import Curve
from stepwise_routing.method.results import API, choose
from stepwise_routing.method.rollouts import (
    draw_chains,
    outcome_table,
    replay,
    shipped_outcomes,
    take,
    thresholds,
)
from stepwise_routing.method.training import train
from stepwise_routing.models.open import open_models
from stepwise_routing.settings import Training, as_printed
from stepwise_routing.util import resamples

BENCHMARK = 'micro-gsm'
SIZES = (1, 2, 4)  # times as many problems, and as many larger models


def seconds(work, *parts, **options) -> float:
    start = time.perf_counter()
    work(*parts, **options)
    return time.perf_counter() - start


# ---- a policy


def policy_steps() -> dict:  # steps a second
    "Of training, start included: exact on 500 problems, and sampled with the paper's batch of 5."
    problems = take(shipped_outcomes(BENCHMARK)['train'], slice(500))
    settings = {
        'policy steps a second, exact, 500 problems': Training(steps=40),
        'policy steps a second, sampled, batch 5': as_printed(Training()),
    }
    return {name: s.steps / seconds(train, problems, API, s) for name, s in settings.items()}


# ---- a model


def tokens_written(chains, rests) -> int:
    every = [*chains, *(rest for of_problem in rests[0] for rest in of_problem)]
    return sum(step.generated for steps in every for step in steps)


def writing(models, n: int = 200) -> dict:  # tokens a second
    "Small chains of micro-math problems, and the large model's rests of all their prefixes."
    problems = load_problems('micro-math', 'test', n)
    start = time.perf_counter()
    drawn = draw_chains(problems, models, max_steps=30)
    took = time.perf_counter() - start
    return {'tokens a second, micro models': tokens_written(*drawn) / took}


# ---- growth


def choice_of_threshold(outcomes) -> None:
    "A threshold router at 500 settings, and its choice in 200 resamples."
    doubt = low('min_prob')(outcomes.features)
    kappas = thresholds(doubt, 500)
    result = replay(outcomes, doubt, kappas, 'flops', 'continue')
    counts = resamples(len(outcomes), 200)
    choose([Curve(list(kappas), result, result)], (counts, counts), alpha=0.02)


def with_larger(o, k: int):
    "The same outcomes for k larger models, all like the large one."
    places = [0, *[1] * k]
    return replace(
        o,
        models=np.array([f'model {i}' for i in range(k + 1)]),
        params=o.params[places],
        dollars=o.dollars[places],
        cut=o.cut[:, places],
        large=np.repeat(o.large, k, 2),
        right=np.repeat(o.right, k, 2),
    )


def growth_with_models() -> pd.DataFrame:
    "Seconds of each part for 1, 2 and 4 larger models."
    o = take(shipped_outcomes(BENCHMARK)['train'], slice(500))
    rows = {}
    for k in SIZES:
        some = with_larger(o, k)
        rows[f'{k}x'] = {
            'train': seconds(train, some, API),
            'replay and choose': seconds(choice_of_threshold, some),
        }
    return with_ratios(rows)


def with_ratios(rows: dict) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    for times in SIZES[1:]:
        table[f'{times}x / 1x'] = table[f'{times}x'] / table['1x']
    return table.round(2)


def growth_with_problems(models) -> pd.DataFrame:
    "Seconds of each part for 1, 2 and 4 times as many problems."
    shipped = shipped_outcomes(BENCHMARK)['train']
    specs = [model.spec for model in models]
    rows = {}
    for size in SIZES:
        problems = load_problems(BENCHMARK, 'train', 100 * size)
        start = time.perf_counter()
        drawn = draw_chains(problems, models, max_steps=30)
        drawing = time.perf_counter() - start
        some = take(shipped, slice(500 * size))
        whole_batch = Training(batch=500 * size)
        rows[f'{size}x'] = {
            'draw 100 problems': drawing,
            'their table': seconds(outcome_table, problems, *drawn, specs),
            'train on 500 problems': seconds(train, some, API),
            'train, all in a batch': seconds(train, some, API, whole_batch),
            'replay and choose, 500 problems': seconds(choice_of_threshold, some),
        }
    return with_ratios(rows)


# ---- all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('receipt', nargs='?', type=Path, help='receipt.json of a run')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.receipt:
        receipt = json.loads(args.receipt.read_text('utf-8'))
        print(pd.Series(receipt['seconds'] | dict(all=receipt['total']), name='seconds').round(0))
    models = open_models(['micro-small', 'micro-large'])
    speeds = policy_steps() | writing(models)
    print(pd.Series(speeds, name='').round(1).to_string())
    print(f'\nmore problems\n{growth_with_problems(models).to_string()}')
    print(f'\nmore larger models\n{growth_with_models().to_string()}')


if __name__ == '__main__':
    main()
