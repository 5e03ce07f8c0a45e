"""`stepwise-routing demo`: twenty problems between the shipped models, in seconds."""

import sys

import numpy as np
import pandas as pd

from ..data.benchmarks import find_benchmark, is_right, load_problems
from ..method.baselines import low
from ..method.curves import with_large
from ..method.policy import Curve, settings_of
from ..method.rollouts import (
    KINDS,
    Chain,
    replay,
    run_walks,
    shipped_outcomes,
    thresholds,
    tokens_of,
    walk,
)
from ..models.base import Request
from ..report.transcripts import transcript
from ..settings import Training
from ..util import resamples
from .stages import open_pair, open_run

BENCHMARK = 'micro-gsm'
READING = 'continue'


def tuned_kappa(router) -> float:
    "The cheapest threshold that lost at most alpha on the shipped calibration problems."
    outcomes = shipped_outcomes(BENCHMARK)['calibration']
    doubt = router(outcomes.features)
    kappas = thresholds(doubt)
    replayed = with_large(outcomes, 'flops', replay(outcomes, doubt, kappas, 'flops', READING))
    counts = resamples(len(outcomes), 0)
    setting = settings_of(Curve(kappas, replayed, None), counts, Training().alpha)['tuned'][0]
    return kappas[setting - 1]  # setting 0 is the large model alone


def alone(model, problems) -> list:  # of `Chain`s
    "One model writes everything."
    chains = []
    for steps in model.write([Request(problem, to_end=True) for problem in problems]):
        tokens = np.zeros((2, len(KINDS)), int)
        tokens[model.index] = tokens_of(steps)
        chains.append(Chain(steps, tokens))
    return chains


def show_demo(n: int = 20) -> None:  # test problems
    "Print a transcript, and what the small model, the large one and a min-prob threshold come to."
    problems = load_problems(BENCHMARK, 'test', n)
    prices = shipped_outcomes(BENCHMARK)['test'].prices('flops')
    read = find_benchmark(BENCHMARK).answer
    router = low('min_prob')
    kappa = tuned_kappa(router)
    models = open_pair(open_run())
    walks = [walk(problem, router, kappa, reading=READING) for problem in problems]
    chains = {
        'Small only': alone(models[0], problems),
        'Large only': alone(models[1], problems),
        'Min-prob threshold': run_walks(walks, models),
    }
    rows = {}
    for name, of_name in chains.items():
        right = sum(is_right(p, read(p, c.steps)) for p, c in zip(problems, of_name))
        cost = sum((chain.tokens * prices).sum() for chain in of_name)
        rows[name] = {f'right of {n}': right, 'FLOPs': f'{cost:.2g}'}
    routed = chains['Min-prob threshold']
    both_wrote = [i for i, c in enumerate(routed) if len({step.model for step in c.steps}) == 2]
    names = [model.spec.name for model in models]
    for i in both_wrote[:1]:
        text = transcript(problems[i], routed[i].steps, names)
        print(text.coloured() if sys.stdout.isatty() else text, end='\n\n')
    print(pd.DataFrame(rows).T.to_string(), end='\n\n')
    print('Next: stepwise-routing reproduce')
