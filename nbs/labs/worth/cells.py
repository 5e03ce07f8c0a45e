"""One cell: its problems, the noise, the methods, and what they reach on test problems.

Here belongs what is computed of a cell and kept in its two files. Tables and figures of all cells belong in `report`.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd

from stepwise_routing import __version__
from stepwise_routing.base.records import READINGS
from stepwise_routing.base.statistics import resamples
from stepwise_routing.base.tools import digest, write_file
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.comparison import (
    COLUMNS,
    LARGE,
    Case,
    at_thresholds,
)
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import take_rows
from stepwise_routing.method.policy import PolicyRouter, load_policy
from stepwise_routing.method.results import with_intervals
from stepwise_routing.method.routers import (
    POLICY_METHODS,
    SavedPolicy,
    ScoreRouter,
    fit_steer,
    score_thresholds,
)
from stepwise_routing.method.training import fit, training_key
from stepwise_routing.report.gains import Sweep, measures, p_value, winnable
from stepwise_routing.run.sweep import VARIANTS
from stepwise_routing.run.workers import in_processes

from .noise import find_chance, step_auroc, with_noise
from .plan import BENCHMARK, Cell, Folders, Plan
from .pools import read_pools

UNIT = 'paper_flops'
METHODS = (
    'Ours (nested)',
    'Ours (full)',
    'Ours',
    'Ours (logit)',
    'Ours (probability)',
    'Bare threshold (probability)',
    'STEER (rest)',
)
RULES = METHODS[-2:]  # nothing is trained on outcomes
PARTS = ('rows', 'curves')  # files of a finished cell
POLICIES = ('Ours (nested)', 'Ours (full)')  # what is compared with the rules

# ---- problems


@dataclass(frozen=True)
class CellData:
    "The outcome tables of a cell, with its noise."

    tables: dict  # split -> `OutcomeTable`
    chance: float  # of noise
    clean: float  # AUROC on the training problems without noise
    aurocs: dict  # split -> AUROC with noise


def cell_rows(plan: Plan, cell: Cell, split: str) -> np.ndarray:
    "Which problems of the pools a cell has."
    n_hopeless = plan.hopeless(split, cell.share)
    n_solvable = plan.size(split) - n_hopeless
    first_solvable, _ = plan.pool_sizes(split)
    return np.r_[np.arange(n_hopeless), first_solvable + np.arange(n_solvable)]


def clean_tables(
    plan: Plan, folders: Folders, cell: Cell
) -> dict:  # split -> (table, first wrong steps)
    "The problems of a cell in the order of their ids, without noise."
    clean = {}
    for split in SPLITS:
        pools = read_pools(folders, split)
        rows = cell_rows(plan, cell, split)
        rows = rows[np.argsort(pools.table.problem_id[rows], kind='stable')]
        clean[split] = take_rows(pools.table, rows), pools.first_wrong[rows]
    return clean


def cell_data(plan: Plan, folders: Folders, cell: Cell) -> CellData:
    "The problems of a cell with the noise that meets its AUROC on the training problems."
    clean = clean_tables(plan, folders, cell)
    table, first_wrong = clean['train']
    chance = find_chance(table, first_wrong, cell.auroc, plan.noise_seed, plan.noise_draws)
    seed = plan.noise_seed, 0
    noisy = {split: with_noise(each, chance, seed) for split, (each, _) in clean.items()}
    aurocs = {split: step_auroc(noisy[split], clean[split][1]) for split in SPLITS}
    return CellData(noisy, chance, step_auroc(table, first_wrong), aurocs)


# ---- methods


def fit_policy(plan: Plan, folder, tables: dict, variant: str, seed: int) -> SavedPolicy:
    "Train one policy as the project does, or find it in its folder."
    on_escalate, features = VARIANTS[variant]
    env = TableEnv(tables['train'], features, on_escalate, UNIT)
    held_out = TableEnv(tables['calibration'], features, on_escalate, UNIT, env.scaler)
    inputs = [
        digest(each.obs.tobytes().hex(), each.problem_id) for each in (env.table, held_out.table)
    ]
    training = plan.training
    config = fit(
        env,
        held_out,
        folder,
        training,
        seed,
        alpha=plan.alpha,
        key=training_key(inputs, variant, seed, asdict(training)),
        variant=variant,
        benchmark=BENCHMARK,
        params=env.table.params,
        unit=UNIT,
        version=__version__,
    )
    policy = load_policy(folder)
    return SavedPolicy(
        variant=variant,
        seed=seed,
        router=PolicyRouter(policy, policy.kappa, on_escalate, POLICY_METHODS[variant]),
        online=config['online'],
        sweep=tuple(config['sweep']),
        calibration=config['calibration'],
    )


def fit_policies(
    plan: Plan, folders: Folders, cell: Cell, tables: dict
) -> list:  # of `SavedPolicy`s
    "All classes of ours, both readings, all seeds."
    policies = []
    for variant in VARIANTS:
        for seed in range(plan.policies):
            folder = folders.policies(cell) / variant / f'seed{seed}'
            policies.append(fit_policy(plan, folder, tables, variant, seed))
    return policies


def rules(tables: dict) -> list:  # of methods
    "The two rules in both readings, at all settings that the project offers them."
    calibration = tables['calibration']
    steer = fit_steer(tables['train'])
    methods = []
    for on_escalate in READINGS:
        for router in (
            ScoreRouter('score_prob', on_escalate),
            replace(steer, on_escalate=on_escalate),
        ):
            methods.append(at_thresholds(router, score_thresholds(router, calibration)))
    return methods


def compared(plan: Plan, tables: dict, policies: list) -> Case:
    "All methods: chosen on calibration problems, replayed on test problems."
    case = Case('open', BENCHMARK, tables, policies, alpha=plan.alpha, unit=UNIT)
    for method in rules(tables):
        grid = case.choose(method)
        case.add(method, grid, shown_thresholds=[grid.threshold, *grid.curve_thresholds()])
    case.add_own()
    return case


# ---- measures


@dataclass(frozen=True)
class Reached:
    "What one method reaches on the test problems of a cell in one reading; arrays [1 + resample]."

    grid: object  # `Grid` on calibration problems
    share: np.ndarray  # of the area between chance and hindsight
    apgr: np.ndarray  # mean share of the gap that is closed, over all costs between both models
    points: dict  # "accuracy", "certain" -> (cost share, accuracy minus the large model's)
    curve: object  # `Curve`
    large_cost: np.ndarray
    large_accuracy: np.ndarray
    seeds: tuple  # cost shares at the accuracy point of single seeds; () for a rule

    @property
    def calibration_cost(self) -> float:
        "Share of the large model's cost at the accuracy point, on calibration problems."
        return self.grid.cost[self.grid.chosen] / self.grid.cost[-1]


@dataclass(frozen=True)
class Measure:
    "Measures what the methods of a case reach."

    case: Case
    counts: np.ndarray  # [1 + resample, problem], of `resamples`

    @cached_property
    def rows(self) -> pd.DataFrame:
        return pd.DataFrame(self.case.rows, columns=COLUMNS)

    @cached_property
    def singles(self) -> pd.DataFrame:
        return pd.DataFrame(self.case.singles, columns=(*COLUMNS, 'seed'))

    @cached_property
    def areas(self) -> dict:  # reading -> `Winnable`
        test = self.case.tables['test']
        return {reading: winnable(test, self.counts, reading, UNIT) for reading in READINGS}

    def by_threshold(self, grid) -> tuple:  # cost and correct, DataFrames [threshold, problem]
        of_method = self.rows['method'] == grid.method
        rows = self.rows[of_method & (self.rows['on_escalate'] == grid.on_escalate)]
        table = rows.pivot(index='threshold', columns='problem', values=[UNIT, 'correct'])
        return table[UNIT].astype(float), table['correct'].astype(float)

    def point(self, grid, threshold: float) -> tuple:
        "Cost share and accuracy minus the large model's, [1 + resample] each."
        area = self.areas[grid.on_escalate]
        if threshold == LARGE:
            return np.ones(len(self.counts)), np.zeros(len(self.counts))
        cost, correct = (each.loc[threshold].to_numpy() for each in self.by_threshold(grid))
        accuracy = area.weights @ correct - area.large_accuracy
        return (area.weights @ cost) / area.large_cost, accuracy

    def seeds(self, grid) -> tuple:
        "Cost shares of the single policies, each at its own threshold."
        of_method = self.singles['method'] == grid.method
        rows = self.singles[of_method & (self.singles['on_escalate'] == grid.on_escalate)]
        large = self.areas[grid.on_escalate].large_cost[0]
        return tuple(rows.groupby('seed')[UNIT].mean() / large)

    def reached(self, grid) -> Reached:
        area = self.areas[grid.on_escalate]
        cost, correct = self.by_threshold(grid)
        is_shown = np.isfinite(cost.index)
        shown = cost.index[is_shown]
        places = [grid.thresholds.index(threshold) for threshold in shown]
        sweep = Sweep(
            grid.method,
            grid.on_escalate,
            np.array(grid.cost)[places],
            np.array(grid.accuracy)[places],
            cost.to_numpy()[is_shown],
            correct.to_numpy()[is_shown],
        )
        curve = sweep.curve(area)
        won = measures(area, curve)
        return Reached(
            grid=grid,
            share=won['share'],
            apgr=won['apgr'],
            points=dict(
                accuracy=self.point(grid, grid.threshold),
                certain=self.point(grid, grid.certain),
            ),
            curve=curve,
            large_cost=area.large_cost,
            large_accuracy=area.large_accuracy,
            seeds=self.seeds(grid),
        )

    def all_reached(self) -> dict:  # (method, reading) -> `Reached`
        return {(grid.method, grid.on_escalate): self.reached(grid) for grid in self.case.grids}


def better_reading(reached: dict, method: str) -> str:
    "The reading in which a method is cheaper on calibration problems; append where both are as cheap."
    return min(READINGS, key=lambda reading: reached[method, reading].calibration_cost)


def against(ours: Reached, ours_there: Reached, rule: Reached, prefix: str) -> dict:
    "Ours minus a rule; `ours_there`: ours in the rule's reading."
    share = ours_there.share - rule.share
    differences = {f'{prefix}_share': share}
    for name in ('accuracy', 'certain'):
        differences[f'{prefix}_cost_{name}'] = ours.points[name][0] - rule.points[name][0]
    return with_intervals(differences) | {f'{prefix}_p': p_value(share)}


def method_row(reached: dict, method: str) -> dict:
    "A row of the table: what a method reaches in its better reading, and ours minus it."
    readings = {name: better_reading(reached, name) for name in (method, *POLICIES)}
    reading = readings[method]
    own = reached[method, reading]
    other = reached[method, next(each for each in READINGS if each != reading)]
    row = dict(
        method=method,
        on_escalate=reading,
        share_of_other_reading=other.share[0],
        calibration_cost=own.calibration_cost,
        certain_is_large_alone=int(own.grid.certain == LARGE),
    )
    numbers = dict(share=own.share, apgr=own.apgr)
    for name, (cost, accuracy) in own.points.items():
        numbers |= {f'cost_{name}': cost, f'lost_{name}': -accuracy}
    row |= with_intervals(numbers)
    if own.seeds:
        row |= dict(
            cost_accuracy_least_seed=min(own.seeds), cost_accuracy_largest_seed=max(own.seeds)
        )
    if method in RULES:
        for name, prefix in zip(POLICIES, ('nested', 'full')):
            pair = reached[name, readings[name]], reached[name, reading]
            row |= against(*pair, own, prefix)
    return row


def cell_facts(plan: Plan, cell: Cell, data: CellData, case: Case) -> dict:
    "What the rows of a cell have in common."
    test = data.tables['test']
    taken = {reading: name for _, reading, name, _, is_taken in case.classes if is_taken}
    return dict(
        hopeless=float(cell.share),
        auroc=cell.auroc,
        chance=data.chance,
        auroc_clean=data.clean,
        **{f'auroc_{split}': area for split, area in data.aurocs.items()},
        **{f'n_{split}': len(data.tables[split]) for split in SPLITS},
        seeds=plan.policies,
        small_accuracy=test.outcome(-1)['correct'].mean(),
        large_accuracy=test.large_only()['correct'].mean(),
        small_cost=test.outcome(-1)[UNIT].mean() / test.large_only()[UNIT].mean(),
        **{f'class_{reading}': taken[reading] for reading in READINGS},
    )


def curve_points(reached: dict, method: str) -> pd.DataFrame:
    "The curve of a method on test problems, and behind it its accuracy point."
    own = reached[method, better_reading(reached, method)]
    cost, accuracy = own.points['accuracy']
    columns = dict(
        method=method,
        on_escalate=own.grid.on_escalate,
        cost=np.r_[own.curve.cost[0] / own.large_cost[0], cost[0]],
        accuracy=np.r_[own.curve.accuracy[0], own.large_accuracy[0] + accuracy[0]],
    )
    points = pd.DataFrame(columns)
    return points.assign(chosen=np.r_[np.zeros(len(points) - 1, int), 1])


def measure_cell(
    plan: Plan, cell: Cell, data: CellData, policies: list
) -> dict:  # part -> DataFrame
    "The rows and the curves of a cell."
    case = compared(plan, data.tables, policies)
    counts = resamples(len(data.tables['test']), plan.n_boot, 0)
    measure = Measure(case, counts)
    reached = measure.all_reached()
    facts = cell_facts(plan, cell, data, case)
    rows = pd.DataFrame([facts | method_row(reached, method) for method in METHODS])
    curves = pd.concat([curve_points(reached, method) for method in METHODS])
    names = {name: facts[name] for name in ('hopeless', 'auroc')}
    return dict(rows=rows, curves=curves.assign(**names))


# ---- all cells


def do_cell(plan: Plan, folders: Folders, cell: Cell) -> None:
    "Train and measure a cell, unless it is finished."
    data = cell_data(plan, folders, cell)
    policies = fit_policies(plan, folders, cell, data.tables)
    parts = measure_cell(plan, cell, data, policies)
    for part, frame in parts.items():
        text = frame.to_csv(index=False, lineterminator='\n', float_format='%.10g')
        write_file(folders.result(cell, part), text)


def do_cells(plan: Plan, folders: Folders, workers: int) -> None:
    "All cells that are not finished, side by side."
    from tqdm.auto import tqdm

    missing = [(cell,) for cell in plan.cells if not folders.result(cell, 'curves').is_file()]
    with tqdm(desc='cells', total=len(missing), disable=None) as bar:
        in_processes(partial(do_cell, plan, folders), missing, workers, ended=bar.update)


def read_cells(plan: Plan, folders: Folders, part: str) -> pd.DataFrame:  # one of `PARTS`
    "What all cells left, in the order of the table."
    frames = [pd.read_csv(folders.result(cell, part)) for cell in plan.cells]
    return pd.concat(frames, ignore_index=True)
