"""The problems of one side, training or calibration, as the owner of a router has them.

Here belongs what is drawn for them and how a router does on them. Two models have an outcome table with
every hand-over. With more models there are too many hand-overs to draw them all, so routers walk, and
draw what is not there yet. How routers are trained belongs in `method.training`; which one is taken, in
`own`.
"""

import asyncio
import contextlib
from functools import cached_property
from pathlib import Path

import numpy as np

from ..base.records import READINGS
from ..base.store import RolloutStore, tree_settings
from ..base.tools import digest, gather_progress, one_of, progress_of, run_async
from ..data.benchmarks import find_benchmark
from ..data.grading import is_right
from ..data.questions import own_problems
from ..data.sources import file_rows
from ..models.pair import Access, open_several, places, several_models
from .confidence import FEATURES, fit_scaler, observe
from .outcomes import OutcomeTable, outcome_table
from .tree import RoutingTree, collect_rollouts
from .walks import LargeOnly, SmallOnly, walk_together

EXACT_BATCH = 500  # problems of a policy step at most, where gradients are exact
WALKED_BATCH = 50  # the same on live walks
STEPS = 80  # of a policy


class TableSide:
    "Problems of two models: an outcome table says how every hand-over ends."

    def __init__(self, table: OutcomeTable, folder=None):
        self.table = table
        self.name = table.split
        self.folder = folder  # where the table is, or comes

    def __len__(self):
        return len(self.table)

    @property
    def file(self) -> Path:
        return Path(self.folder) / f'{self.name}.npz'

    @property
    def key(self) -> str:
        "What identifies the problems."
        return digest(self.file.read_bytes().hex())

    def save(self) -> None:
        "Put the table into its folder."
        self.table.save(self.file)

    @property
    def right(self):  # [model, problem]
        "Is each model alone right?"
        return np.stack([self.table.outcome(-1)['correct'], self.table.large_only()['correct']])

    @property
    def features(self) -> tuple:
        "The features that the models' interfaces give."
        return shown_features(self.table.obs[self.table.inside])

    @property
    def unit(self) -> str:
        "The unit of cost."
        return 'cents' if self.table.large_cents.any() else 'paper_flops'

    @property
    def classes(self) -> dict:
        "Class of routers -> its features, the simplest first."
        from .candidates import nested_classes

        return nested_classes(self.features)

    @property
    def training(self) -> dict:
        "Hyper-parameters of a policy, as fields of `Policy`."
        batch = None if len(self) <= EXACT_BATCH else EXACT_BATCH
        return dict(estimator='exact', batch=batch, steps=STEPS)

    def env(self, features, on_escalate: str, unit: str, scaler=None):
        "The problems as training wants them."
        from .cpo import TableEnv

        return TableEnv(self.table, features, on_escalate, unit, scaler)

    def held_out(self, policy):
        "The problems as the calibration of a saved policy wants them."
        from .candidates import HeldOut

        config = policy.config
        options = config['on_escalate'], config['unit'], policy.scaler
        return HeldOut(policy, self.table, policy.features, *options)


class WalkSide:
    "Problems of three or more models: routers walk their trees."

    def __init__(self, problems, tree: RoutingTree, name: str):
        self.problems = list(problems)
        self.tree = tree
        self.name = name

    def __len__(self):
        return len(self.problems)

    def save(self) -> None:
        "The tree has kept everything already."

    @cached_property
    def chains(self) -> list:  # [model][problem]: (steps, answer, is it right?)
        "What each model alone writes."
        n_models = self.tree.n_models
        alone = [SmallOnly(), *(LargeOnly(start=model) for model in range(1, n_models))]
        wanted = [(router, self.problems) for router in alone]
        return walk_together(wanted, self.tree, lambda _, walked: walked.steps)

    @property
    def right(self):  # [model, problem]
        "Is each model alone right?"
        return np.array([[row[2] for row in rows] for rows in self.chains], float)

    @property
    def key(self) -> str:
        "What identifies the problems, the models and the grades."
        facts = [(problem.id, problem.answer) for problem in self.problems]
        return digest(str(facts), str(self.tree.store.settings), str(self.right.tolist()))

    @cached_property
    def obs(self):  # [step, feature]
        "What a router sees of the chains of all models that can hand over."
        scored = find_benchmark(self.tree.benchmark).scored
        rows = [row for chains in self.chains[:-1] for row in chains]
        return np.concatenate([observe(steps, scored) for steps, _, _ in rows])

    @property
    def features(self) -> tuple:
        "The features that the models' interfaces give."
        return shown_features(self.obs)

    @property
    def unit(self) -> str:
        "The unit of cost."
        return 'paper_flops' if self.tree.specs[-1].price is None else 'cents'

    @property
    def classes(self) -> dict:
        "Class of routers -> its features. A bare threshold says when to hand over, but not to whom."
        from .candidates import nested_classes

        classes = nested_classes(self.features)
        return {name: seen for name, seen in classes.items() if name not in self.features}

    @property
    def training(self) -> dict:
        "Hyper-parameters of a policy, as fields of `Policy`."
        return dict(estimator='sampled', batch=min(len(self), WALKED_BATCH), steps=STEPS)

    def env(self, features, on_escalate: str, unit: str, scaler=None):
        "The problems as training wants them. ValueError: nothing can be learned from them."
        from .candidates import WalkedEnv
        from .policy import policy_inputs

        one_of('on_escalate', on_escalate, READINGS)
        if scaler is None:
            scaler = fit_scaler(policy_inputs(self.obs, FEATURES, features), features)
        env = WalkedEnv(self.problems, self.tree, scaler, 'absorbing', on_escalate, unit)
        if not env.large_cost:
            raise ValueError(f'the large model costs nothing in {unit}; give it a price')
        if self.name == 'train':
            self.check()
        return env

    def held_out(self, policy):
        "The problems as the calibration of a saved policy wants them."
        config = policy.config
        return self.env(policy.features, config['on_escalate'], config['unit'], policy.scaler)

    def check(self) -> None:
        "ValueError: there is nothing to route."
        right = self.right
        if not right[-1].any():
            raise ValueError(
                f'the large model solves none of the {len(self)} problems; use easier ones'
            )
        if not (right[-1] > right[0]).any():
            raise ValueError(
                'the small model solves all that the large one solves; there is nothing to route, '
                'use the small model or more problems'
            )


def shown_features(obs) -> tuple:  # [step, feature], the columns of `FEATURES`
    "The features that no step lacks."
    from .policy import FULL_FEATURES

    is_missing = np.isnan(obs).any(0)
    return tuple(name for name in FULL_FEATURES if not is_missing[FEATURES.index(name)])


def draw(
    problems,
    tree: RoutingTree,
) -> int:  # how many steps are new
    "Draw what two models can reach; of more models, each one alone."
    if tree.n_models == 2:
        return collect_rollouts(problems, tree)

    async def alone(problem):  # it returns nothing, since all chains would fill the memory
        models = range(tree.n_models)
        await asyncio.gather(*(tree.run(problem, '', model) for model in models))

    before = tree.drawn
    run_async(gather_progress(map(alone, problems), f'{tree.benchmark} chains'))
    return tree.drawn - before


def drawn_sides(
    parts: dict,  # side -> its `Problem`s
    tree: RoutingTree,  # whose store has what `draw` draws
    folder,  # where tables come
) -> list:
    "The sides that have problems, graded."
    given = [(part, name) for name, part in parts.items() if part]
    if tree.n_models == 2:
        return [TableSide(outcome_table(part, tree, name), folder) for part, name in given]
    sides = [WalkSide(part, tree, name) for part, name in given]
    for side in sides:
        side.chains  # noqa: B018 (they are graded where they are read first)
    return sides


def right_rows(sides) -> dict:
    "How often each model alone is right, in %, by its place."
    right = np.concatenate([side.right for side in sides], 1)
    shares = 100 * right.mean(1)
    return {f'{place} right': round(float(x), 1) for place, x in zip(places(len(right)), shares)}


@contextlib.contextmanager
def walked_sides(
    folder,  # of `own.collect`
    own,  # an `Own`: name of the problems, models, sampling, most steps
    split,  # (problems, share for calibration) -> dict, side -> its `Problem`s
    models=None,  # where they are, see `several_models`; needed
    access: Access = Access(),
    max_cents: float | None = None,  # never spend more, earlier calls included
    grade=is_right,  # as for `own.collect`
):  # name of a side -> `WalkSide`
    "The sides of a folder of three or more models, for the time of a `with` block."
    n = len(own.models)
    if models is None:
        raise ValueError(
            f'{folder} has {n} models, so routers walk here, and may draw: say where the models are, '
            f'with models=[{", ".join(places(n)).upper()}]'
        )
    given = several_models(models, n)
    folder = Path(folder)
    file = folder / 'problems.jsonl'
    if not file.is_file():
        raise ValueError(f'{folder}: collect has not finished; call it again')
    parts = split(own_problems(file_rows(file), own.name), own.calibration)
    with open_several(given, own.sampling, access, folder / 'ledger.db', max_cents) as backends:
        settings = tree_settings(own.name, backends, find_benchmark(own.name).draws)
        with RolloutStore(folder / 'draws.db', settings) as store:
            tree = RoutingTree(backends, store, max_steps=own.max_steps, grade=grade)

            def walked(name):
                if parts[name]:
                    return WalkSide(parts[name], tree, name)
                raise ValueError(f'{folder}: no problem is for {name}; call collect with more')

            with progress_of(f'{own.name} walks'):
                yield walked
