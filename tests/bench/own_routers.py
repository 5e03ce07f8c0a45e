"""Is the router that `own` deploys dearer than a bare threshold? `python tests/bench/own_routers.py`

Five owners have 300 questions of micro-gsm each and call `collect`, `train` and `calibrate` with the defaults. Each
deployed router is compared with the bare threshold that the same problems choose by the same promise. Both answer 500
problems that nobody has seen: test problems of the newest run of the profile micro, or of the committed one.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.outcomes import replay, take_rows
from stepwise_routing.own import _candidates, calibrate, collect, train
from stepwise_routing.run.committed import committed_outcomes
from stepwise_routing.run.config import read_run

OWNERS = 5
QUESTIONS = 300
NEW = 500
MODELS = ['micro-small', 'micro-large']
BARE = 'score_prob'  # the class of the bare threshold


def questions() -> list:
    "Shipped problems that the test table does not have."
    problems = load_problems('micro-gsm', 'train') + load_problems('micro-gsm', 'calibration')
    return [dict(question=p.question, answer=p.answer) for p in problems]


def new_problems():
    "The outcome table of problems that nobody has seen."
    tables = committed_outcomes(read_run('micro'))
    splits = tables['open', 'micro-gsm'][0]
    return take_rows(splits['test'], range(NEW))


def judged(router, table) -> dict:
    "Cost in % of the large model's, and accuracy in points above the large model's."
    outcome, large = replay(router, table), table.large_only()
    cost = outcome['paper_flops'].mean() / large['paper_flops'].mean()
    points = outcome['correct'].mean() - large['correct'].mean()
    return dict(cost=100 * cost, points=100 * points)


def routed(policy, kappa):
    from stepwise_routing.method.policy import PolicyRouter

    return PolicyRouter(policy, kappa, policy.config['on_escalate'])


def bare_router(folder, alpha):
    "The bare threshold that the same problems choose."
    from stepwise_routing.method.candidates import calibrated

    (bare,) = [c for c in _candidates(folder) if c.model_class == BARE]
    return routed(bare.policy, calibrated(bare, 'certain', alpha).kappa)


def rows_of(folder, rows, table, alphas):
    "One owner: a row per promise."
    from stepwise_routing.method.policy import load_policy

    collect(folder, rows, MODELS)
    train(folder)
    for alpha in alphas:
        choice = calibrate(folder, alpha=alpha)
        policy = load_policy(folder / 'policy')
        deployed = judged(routed(policy, choice.calibration.kappa), table)
        bare = judged(bare_router(folder, alpha), table)
        row = dict(
            alpha=alpha,
            deployed=choice.model_class,
            **deployed,
            bare=bare['cost'],
            bare_points=bare['points'],
        )
        yield row | dict(ratio=deployed['cost'] / bare['cost'])


def main(alphas) -> None:
    table = new_problems()
    everything = questions()
    found = []
    with TemporaryDirectory() as place:
        for owner in range(OWNERS):
            rows = everything[owner * QUESTIONS : (owner + 1) * QUESTIONS]
            for row in rows_of(Path(place) / f'owner{owner}', rows, table, alphas):
                found.append(dict(owner=owner) | row)
    print(pd.DataFrame(found).round(2).to_string(index=False))


if __name__ == '__main__':
    main([float(alpha) for alpha in sys.argv[1:]] or [0.05, 0.02])
