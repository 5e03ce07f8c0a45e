"""The work of each stage of a run, from its settings: problems, models, draws, outcome tables, methods, results.

Here belong the plain functions that a numbered notebook calls for a whole run. Only this module and `run.sweep` know
both a `Run` and the method. The computations of a method belong in `method/`.
"""

import json
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace

import numpy as np

from ..base.statistics import resamples
from ..store import RolloutStore, tree_settings
from ..util import find_project, gather_progress, run_async, save_rows, write_file
from ..data.agreement import agreement
from ..data.benchmarks import find_benchmark, load_problems, step_limit
from ..data.grading import is_right
from ..data.recorded import SUFFIX, read_recorded
from ..data.sources import SPLITS
from ..method.comparison import (
    CERTAIN_COLUMNS,
    COLUMNS,
    GRID_COLUMNS,
    KAPPA_COLUMNS,
    ONLINE,
    RECEIPT_COLUMNS,
    SEED_COLUMNS,
    WALKED,
    Case,
    Walker,
    add_trim,
    asked_scores,
    at_thresholds,
    grid_rows,
    walk_methods,
)
from ..method.outcomes import OutcomeTable, check_problems, outcome_table, take_rows
from ..method.results import (
    RERUN,
    BenchmarkResults,
    RunResults,
    at_point,
    cost_unit,
    evaluate_all,
    read_csv,
    read_rows,
    resampled,
    with_calibration,
    with_kappas,
)
from ..method.routers import (
    POLICY_METHODS,
    RSD,
    SavedPolicy,
    SpecReason,
    asking_settings,
    chain_thresholds,
)
from ..method.tree import RoutingTree
from ..method.uncertainty import CHOICES, draw_samples, read_points, save_points
from ..models.model_name import ModelName
from ..models.names import open_models
from ..models.xverify import open_grader
from .config import Run
from .workers import side_by_side


def read_problems(
    run: Run,
    benchmark: str,
    split: str,  # "train", "calibration" or "test"
    n: int | None = None,  # number of problems; None: the number in the run's settings
) -> list:  # `Problem`s
    "The problems of one split of a run. Errors as of `load_problems`."
    folder = run.config.data.data_dir
    if n is None:
        n = run.n(split)
    return load_problems(
        benchmark, split, n, data_dir=find_project().nbs / folder if folder else None
    )


def model_options(run: Run) -> dict:
    "The options of `open_models`: the limits in the profile."
    limits = run.config.models
    options = {}
    for name in ('max_tokens', 'context', 'memory_shares'):
        if getattr(limits, name):
            options[name] = getattr(limits, name)
    if run.is_paid:
        api = run.config.api
        limits_of_calls = dict(
            max_cents=api.max_cents, max_reply=api.max_reply, concurrency=api.concurrency
        )
        return options | limits_of_calls | dict(price=run.price, ledger=run.files.ledger())
    if limits.ray_workers:
        options |= dict(engine='ray', workers=limits.ray_workers, num_gpus=limits.ray_gpus)
    return options


def open_backends(run: Run):  # list of backends, index 0 up; None if all steps are recorded
    "Open the models of a run, small to large, for a `with` block."
    if run.is_recorded:
        return nullcontext()
    return open_models(run.models, **model_options(run))


def open_run_grader(run: Run):  # grade(problem, answer) -> bool
    "Open the grader of a run, for a `with` block. Errors as of `open_grader`."
    data = run.config.data
    return open_grader(
        data.grader,
        data.grader_memory,
        ledger=run.store / 'verdicts.db',
    )


def check_recorded_models(run: Run, benchmark: str, wrote: tuple) -> None:
    "ValueError if other models wrote a recorded benchmark than those that the profile names."
    wanted = tuple(ModelName.parse(name).name for name in run.models)
    if wanted != wrote:
        raise ValueError(
            f'{benchmark} was written by {" and ".join(wrote)}, not by {" and ".join(wanted)}: '
            f'set models.names to [{", ".join(f"recorded:{name}" for name in wrote)}]'
        )


@contextmanager
def open_tree(
    run: Run,
    benchmark: str,
    backends=None,  # models of `open_backends`; None: replay the steps in the store
    grade=is_right,  # (`Problem`, parsed answer) -> bool
    lent: bool = False,  # True: several processes write to the store, see `RolloutStore`
):  # `RoutingTree`
    "Open the routing trees of a benchmark on the run's store, for a `with` block."
    settings = None
    if backends:
        settings = tree_settings(benchmark, backends, find_benchmark(benchmark).draws)
    if run.is_recorded:
        recorded = read_recorded(benchmark.removesuffix(SUFFIX))
        check_recorded_models(run, benchmark, recorded.models)
        recorded.fill(run.files.rollouts(benchmark))
    limit = step_limit(run.config.data.max_steps, benchmark)
    path = run.files.rollouts(benchmark)
    with RolloutStore(path, settings, readonly=not backends, lent=lent) as store:
        tree = RoutingTree(backends, store, max_steps=limit, grade=grade)
        if run.price and not run.is_paid:  # a price list on the outcomes of open models
            tree.specs[-1] = replace(tree.specs[-1], price=run.price)
        yield tree


def small_chains(
    run: Run,  # its store keeps the chains
    benchmark: str,  # whose training problems are solved
    backends,  # the open models; the first one writes
) -> list:  # (problem, steps) pairs
    "The small model's chains. Chains that the store lacks are drawn."
    problems = read_problems(run, benchmark, 'train')
    with open_tree(run, benchmark, backends) as tree:
        chains = run_async(gather_progress((tree.run(p, '', 0) for p in problems), benchmark))
    return list(zip(problems, chains))


def count_problems(run: Run, benchmark: str) -> int:
    "The number of problems that a benchmark has in a run, over all splits."
    return sum(len(read_problems(run, benchmark, split)) for split in SPLITS)


def read_table(run: Run, benchmark: str, split: str) -> OutcomeTable:
    "Read the outcome table that a run saved. FileNotFoundError in one line if it has none yet."
    path = run.files.outcomes(benchmark, split)
    if not path.is_file():
        raise FileNotFoundError(
            f'run {run.folder.name} has no outcomes of {benchmark} yet: run all stages '
            f'(stepwise-routing reproduce --profile {run.profile}), or the notebooks 02 and 02b, first'
        )
    return OutcomeTable.load(path)


def read_tables(run: Run, benchmark: str, grade) -> tuple:  # `grade`: of `open_run_grader`
    "Make and save a benchmark's outcome tables: ({split: table}, `Agreement` of grader and Math-Verify, or None)."
    problems = {split: read_problems(run, benchmark, split) for split in SPLITS}
    tables = {}
    with open_tree(run, benchmark, grade=grade) as tree:
        tables['train'] = outcome_table(problems['train'], tree, 'train', run.config.data.samples)
        for split in SPLITS[1:]:
            tables[split] = outcome_table(
                problems[split], tree, split, redraws=run.config.data.redraws
            )
    for split, table in tables.items():
        table.save(run.files.outcomes(benchmark, split))
    if run.config.data.grader == 'math-verify':
        return tables, None
    by_id = {p.id: p for part in problems.values() for p in part}
    graded_problems = [by_id[problem_id] for problem_id, _ in tree.grades]
    answers = [answer for _, answer in tree.grades]
    return tables, agreement(graded_problems, answers, grade, is_right)


def read_all(run: Run) -> dict:  # benchmark -> what `read_tables` returns
    "Make and save all outcome tables of a run."

    def work(run, benchmarks):
        with open_run_grader(run) as grade:
            return [read_tables(run, b, grade) for b in benchmarks]

    return dict(zip(run.benchmarks, side_by_side(run, work, 'outcome tables', count_problems)))


def save_agreement(run: Run, agreements: dict):  # benchmark -> `Agreement` or None; the saved table
    "Write grading/agreement.csv and disagreements.csv, if there is a second grader."
    import pandas as pd

    second = {key: each for key, each in agreements.items() if each}
    if not second:
        return pd.DataFrame()

    def saved(name, frames):
        rows = pd.concat(frames, names=['benchmark']).droplevel(-1)
        write_file(run.folder / 'grading' / f'{name}.csv', rows.to_csv())
        return rows

    saved('disagreements', {key: each.disagreements() for key, each in second.items()})
    return saved('agreement', {key: each.frame() for key, each in second.items()})


def _saved_policy(folder, benchmark, models):
    "Load the policy of one folder. Errors name the folder's whole path."
    from ..method.policy import PolicyRouter, load_policy

    policy = load_policy(folder, models=models)
    variant = folder.parent.name
    config = policy.config
    if (config['benchmark'], config['variant']) != (benchmark, variant):
        raise ValueError(f'{folder} is of {config["benchmark"]}, {config["variant"]}')
    return SavedPolicy(
        variant=variant,
        seed=config['seed'],
        router=PolicyRouter(policy, policy.kappa, config['on_escalate'], POLICY_METHODS[variant]),
        online=config['online'],
        sweep=tuple(config['sweep']),
        calibration=config['calibration'],
    )


def _calibrated_in(saved: SavedPolicy, table: OutcomeTable, alpha, unit) -> SavedPolicy:
    "A policy with its threshold chosen again, in another unit of cost than it was trained in."
    from ..method.cpo import TableEnv
    from ..method.training import calibrate

    router = saved.router
    policy = router.policy
    env = TableEnv(table, policy.features, router.on_escalate, unit, policy.scaler)
    calibration = calibrate(policy, env, 'accuracy', alpha)
    return replace(saved, router=router.at(calibration.kappa), calibration=asdict(calibration))


def load_policies(run: Run, benchmark: str, unit: str) -> list:
    "The `SavedPolicy`s of a run, by variant and seed. ValueError names a policy that cannot be used."
    folders = sorted(p for p in run.files.policies(benchmark).glob('*/*') if p.is_dir())
    models = read_table(run, benchmark, 'test').models if folders else ()
    policies = []
    for folder in folders:
        try:
            policies.append(_saved_policy(folder, benchmark, models))
        except (OSError, ValueError, KeyError) as e:
            reason = (
                f'{folder} has no {e} in its config.json' if isinstance(e, KeyError) else str(e)
            )
            name = '/'.join(folder.parts[-4:])
            raise ValueError(
                f'{reason.replace(str(folder), name)}: run nbs/03b_training.ipynb again'
            ) from e
    if policies and unit != run.units[0]:
        table = read_table(run, benchmark, 'calibration')
        alpha = run.config.policy.alpha
        policies = [_calibrated_in(policy, table, alpha, unit) for policy in policies]
    return sorted(policies, key=lambda p: (p.variant, p.seed))


def open_case(run: Run, benchmark: str, unit: str) -> Case:
    "Open a comparison on a benchmark: its outcome tables, our policies, and the rule that chooses settings."
    tables = {split: read_table(run, benchmark, split) for split in SPLITS}
    config = run.config
    samples = draw_samples(
        tables['calibration'], tables['test'], config.results.n_boot, config.seed
    )
    return Case(
        benchmark,
        tables,
        load_policies(run, benchmark, unit),
        alpha=config.policy.alpha,
        unit=unit,
        seed=config.seed,
        samples=samples,
    )


def open_cases(run: Run, benchmark: str) -> list:  # a `Case` for each unit of cost
    return [open_case(run, benchmark, unit) for unit in run.units]


@contextmanager
def reward_model(run: Run):
    "Open the reward model of RSD and TRIM, for a `with` block. None if the run has none."
    from ..models.reward import load_prm

    name = run.config.baselines.reward_model
    prm = load_prm(name) if name else None
    try:
        yield prm
    finally:
        if prm:
            run_async(prm.close())


def walking_routers(run: Run) -> list:
    "The baselines that walk, RSD last. They get store and model from `with_answers`."
    baselines = run.config.baselines
    routers = []
    if baselines.specreason:
        routers.append(SpecReason(None))
    if baselines.reward_model:
        routers.append(RSD(None))
    return routers


def answer_stores(run: Run, benchmark: str, backends, prm) -> list:
    "(Kind, model, path, settings, record) of each store of verdicts: the judge's, and the reward model's (`prm`)."
    models = [(SpecReason, backends[1])] if run.config.baselines.specreason else []
    models += [(RSD, prm)] if prm else []
    stores = []
    for router, model in models:
        path = run.files.replies(benchmark, f'{router.kind}s')
        settings = asking_settings(benchmark, model)
        stores.append((router.kind, model, path, settings, router.record))
    return stores


@contextmanager
def open_answers(
    run: Run,
    benchmark: str,
    backends,  # the open models
    prm,  # of `reward_model`
    lent: bool = False,  # as of `open_tree`
):  # kind of an `AskingRouter` -> its (store, model)
    "Open the stores of verdicts of judge and reward model, for a `with` block."
    answers = {}
    with ExitStack() as stack:
        for kind, model, path, settings, record in answer_stores(run, benchmark, backends, prm):
            store = stack.enter_context(RolloutStore(path, settings, record=record, lent=lent))
            answers[kind] = store, model
        yield answers


def with_answers(router, answers):  # of `open_answers`
    "Give a router that asks its store and its model."
    store, model = answers[router.kind]
    return replace(router, store=store, model=model)


def walking_methods(
    routers: list,  # of `walking_routers`
    asked: list,  # of each router, of `asked_scores`
) -> list:
    "All methods that walk. Their thresholds are 41 quantiles of their scores of small calibration steps."
    return [
        at_thresholds(router, chain_thresholds(chains, WALKED, router.mode))
        for router, chains in zip(routers, asked)
    ]


def shows_curves(run: Run) -> bool:
    "Are methods that walk also run at all their thresholds on test problems?"
    return run.config.baselines.walk_thresholds == 'curve'


def read_walked(run: Run, case: Case) -> dict:  # split -> `Problem`s
    "The problems of all splits. ValueError if the outcome tables hold other problems."
    problems = {split: read_problems(run, case.benchmark, split) for split in SPLITS}
    for split in SPLITS[1:]:
        check_problems(case.tables[split], problems[split])
    return problems


def compare_walks(
    run: Run,
    case: Case,  # of `replay_case`
    methods: list,  # of `walking_methods`
    walker: Walker,
    rsd=None,  # the router RSD, which has the rewards or asks for them; None: leave TRIM out
) -> None:
    "Add all methods that walk to a case, on all calibration and test problems."
    if rsd:
        add_trim(case, walker.problems, walker.tree, rsd)
    walk_methods(case, methods, walker, shows_curves(run))


def walk_cases(
    run: Run,
    cases: list,  # of `replay_case`, one benchmark in all units of cost
    backends,  # the open models
    grade,  # of `open_run_grader`
    prm=None,  # of `reward_model`
) -> None:
    "Add all methods that walk to the cases of a benchmark. The walks are the same in all units."
    benchmark = cases[0].benchmark
    problems = read_walked(run, cases[0])
    with (
        open_tree(run, benchmark, backends, grade) as tree,
        open_answers(run, benchmark, backends, prm) as answers,
    ):
        routers = [with_answers(router, answers) for router in walking_routers(run)]
        asked = [asked_scores(router, problems['calibration'], tree) for router in routers]
        methods = walking_methods(routers, asked)
        walker = Walker(problems, tree)
        for case in cases:
            compare_walks(run, case, methods, walker, routers[-1] if prm else None)


HIDDEN = (
    'Ours (logit)'  # one of the classes that *Ours (nested)* is chosen from, and no row of its own
)


def save_case(run: Run, case: Case) -> None:
    "Write methods/: results, calibration grids, single seeds and receipts."
    receipts = []
    for p in case.policies:
        facts = [p.calibration[k] for k in RECEIPT_COLUMNS[6:]]
        receipts.append(
            (
                case.benchmark,
                p.variant,
                p.router.name,
                p.router.on_escalate,
                p.calibration['alpha'],
                p.seed,
                *facts,
            )
        )

    def save(part, rows, columns):
        rows = [row for row in rows if row[1] != HIDDEN]
        save_rows(run.files.methods(case.benchmark, case.unit, part), rows, columns)

    save('', case.rows, COLUMNS)
    save('-grid', grid_rows(case.grids), GRID_COLUMNS)
    save('-seeds', case.singles, SEED_COLUMNS)
    save('-policies', receipts, RECEIPT_COLUMNS)
    save('-kappas', case.kappas, KAPPA_COLUMNS)
    certain = [grid.certain_row() for grid in case.grids if grid.method != ONLINE]
    save('-certain', certain, CERTAIN_COLUMNS)
    points = [point for point in case.points if point.method != HIDDEN]
    save_points(run.files.points(case.benchmark, case.unit), points)


def kept_given_up(run: Run) -> set:
    "The (problem, answer) pairs that grading gave up on, in all stages of a run so far."
    files = (run.folder / 'grading').glob('given-up-*.json')
    return {tuple(pair) for file in files for pair in json.loads(file.read_text('utf-8'))}


def with_own(read, columns, path, own_path):
    "The rows of chapter 04b, followed by those of `run.own_routers`, if there are any."
    import pandas as pd

    frame = read(path, columns)
    own = read(own_path, columns)
    return pd.concat([frame, own], ignore_index=True) if len(own) else frame


def load_benchmark(run: Run, benchmark: str, unit: str) -> BenchmarkResults:
    "Load all results on a benchmark in a unit of cost. One-line error if a file is missing or files do not fit together."
    table = read_table(run, benchmark, 'test')
    table = take_rows(table, np.argsort(table.problem_id, kind='stable'))

    def file(part):
        return run.files.methods(benchmark, unit, part)

    rows = with_own(read_rows, COLUMNS, file(''), file('-own'))
    singles = read_rows(file('-seeds'), SEED_COLUMNS)
    grid = with_own(read_csv, GRID_COLUMNS, file('-grid'), file('-own-grid'))
    for part, frame in {'': rows, '-grid': grid}.items():
        if frame.empty:
            raise FileNotFoundError(
                f'no results at {file(part)}: run nbs/04b_comparison.ipynb first'
            )
    for frame in (rows, singles):
        if len(frame) and set(frame['problem']) != set(table.problem_id):
            raise ValueError(
                f'methods/ and outcomes/ hold different problems of {benchmark}: {RERUN}'
            )
    config = run.config
    counts = resamples(len(table), config.results.n_boot, config.seed)
    means = resampled(rows, counts, cost_unit(table), unit)
    points = read_points(run.files.points(benchmark, unit), config.results.n_boot)
    points |= read_points(run.files.points(benchmark, unit, '-own'), config.results.n_boot)
    at_points = {target: at_point(means, points, target) for target in CHOICES}
    calibration = read_table(run, benchmark, 'calibration')
    large_cost = calibration.large_only()[unit].mean()
    kappas = read_csv(file('-kappas'), KAPPA_COLUMNS)
    results = evaluate_all(means, at_points['accuracy'])
    results = with_kappas(with_calibration(results, grid, large_cost), kappas)
    return BenchmarkResults(
        table=table,
        rows=rows,
        grid=grid,
        singles=singles,
        means=means,
        at_points=at_points,
        results=results,
        certain=with_own(read_csv, CERTAIN_COLUMNS, file('-certain'), file('-own-certain')),
    )


def load_results(run: Run, unit: str) -> RunResults:
    "Load the results of a run in one unit of cost, from its files alone."
    return RunResults(
        profile=run.profile,
        unit=unit,
        alpha=run.config.policy.alpha,
        tables=run.tables,
        figures=run.figures,
        given_up=len(kept_given_up(run)),
        is_recorded=run.is_recorded,
        price=run.price,
        parts={b: load_benchmark(run, b, unit) for b in run.benchmarks},
    )


def load_run(run: Run) -> dict:  # unit of cost -> `RunResults`
    "Load all results of a run, from its files alone. One-line error if a file is missing."
    return {unit: load_results(run, unit) for unit in run.units}
