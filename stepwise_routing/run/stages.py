"""The work of each stage of a run, from its settings: problems, models, draws, outcome tables, methods, results.

Here belong the plain functions that a numbered notebook calls for a whole run. Only this module and `run.sweep` know
both a `Setting` and the method. The computations of a method belong in `method/`.
"""

import json
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import numpy as np

from ..base.records import READINGS
from ..base.statistics import resamples
from ..base.store import RolloutStore, tree_settings
from ..base.tools import find_project, gather_progress, run_async, save_rows, write_file
from ..data.agreement import agreement
from ..data.benchmarks import MICRO, find_benchmark, load_problems, step_limit
from ..data.grading import is_right
from ..data.recorded import SUFFIX, read_recorded
from ..data.sources import SPLITS
from ..method.bounds import knows_steps
from ..method.comparison import (
    CERTAIN_COLUMNS,
    CLASS_COLUMNS,
    COLUMNS,
    GRID_COLUMNS,
    KAPPA_COLUMNS,
    KAPPAS,
    RECEIPT_COLUMNS,
    SEED_COLUMNS,
    WALKED,
    Case,
    Walker,
    add_trim,
    asked_scores,
    at_sweep,
    at_thresholds,
    grid_rows,
    outcome_rows,
    seed_rows,
    walk_methods,
)
from ..method.outcomes import OutcomeTable, check_problems, outcome_table, replay, take_rows
from ..method.results import (
    RERUN,
    BenchmarkResults,
    SettingResults,
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
    AskingRouter,
    SavedPolicy,
    SpecReason,
    asking_settings,
    chain_thresholds,
    fit_steer,
    score_thresholds,
)
from ..method.tree import RoutingTree
from ..method.uncertainty import CHOICES, draw_samples, read_points, save_points
from ..models.model_name import ModelName
from ..models.names import open_models
from ..models.xverify import open_grader
from .config import Run, Setting
from .workers import side_by_side


def read_problems(
    setting: Setting,
    benchmark: str,
    split: str,  # "train", "calibration" or "test"
    n: int | None = None,  # number of problems; None: the number in the run's settings
) -> list:  # `Problem`s
    "The problems of one split of a run. Errors as of `load_problems`."
    folder = setting.run.config.data.data_dir
    if n is None:
        n = setting.n(split)
    return load_problems(
        benchmark, split, n, data_dir=find_project().nbs / folder if folder else None
    )


def setting_options(setting: Setting) -> dict:
    "The options of `open_models` for a setting: the limits in its profile."
    limits = setting.run.config.models
    options = {}
    for name in ('max_tokens', 'context', 'memory_shares'):
        if getattr(limits, name):
            options[name] = getattr(limits, name)
    if setting.name == 'api':
        api = setting.part
        limits_of_calls = dict(
            max_cents=api.max_cents, max_reply=api.max_reply, concurrency=api.concurrency
        )
        return options | limits_of_calls | dict(price=api.billed, ledger=setting.files.ledger())
    if limits.engine == 'ray':
        options |= dict(engine='ray', workers=limits.ray_workers, num_gpus=limits.ray_gpus)
    return options


def open_backends(setting: Setting):  # list of backends, index 0 up; None if all steps are recorded
    "Open the models of a setting, small to large, for a `with` block."
    if setting.is_recorded:
        return nullcontext()
    return open_models(setting.models, **setting_options(setting))


def open_run_grader(run: Run):  # grade(problem, answer) -> bool
    "Open the grader of a run, for a `with` block. Errors as of `open_grader`."
    data = run.config.data
    return open_grader(
        data.grader,
        data.grader_memory,
        data.grader_template or None,
        ledger=run.store / 'verdicts.db',
    )


def check_recorded_models(setting: Setting, benchmark: str, wrote: tuple) -> None:
    "ValueError if other models wrote a recorded benchmark than those that the profile names."
    wanted = tuple(ModelName.parse(name).name for name in setting.models)
    if wanted != wrote:
        raise ValueError(
            f'{benchmark} was written by {" and ".join(wrote)}, not by {" and ".join(wanted)}: '
            f'set {setting.name}.models to [{", ".join(f"recorded:{name}" for name in wrote)}]'
        )


@contextmanager
def open_tree(
    setting: Setting,
    benchmark: str,
    backends=None,  # models of `open_backends`; None: replay the steps in the store
    grade=is_right,  # (`Problem`, parsed answer) -> bool
    lent: bool = False,  # True: several processes write to the store, see `RolloutStore`
):  # `RoutingTree`
    "Open the routing trees of a benchmark on the setting's store, for a `with` block."
    settings = None
    if backends:
        settings = tree_settings(benchmark, backends, find_benchmark(benchmark).draws)
    if setting.is_recorded:
        recorded = read_recorded(benchmark.removesuffix(SUFFIX))
        check_recorded_models(setting, benchmark, recorded.models)
        recorded.fill(setting.files.rollouts(benchmark))
    limit = step_limit(setting.run.config.data.max_steps, benchmark)
    path = setting.files.rollouts(benchmark)
    with RolloutStore(path, settings, readonly=not backends, lent=lent) as store:
        yield RoutingTree(backends, store, max_steps=limit, grade=grade)


def small_chains(
    setting: Setting,  # its store keeps the chains
    benchmark: str,  # whose training problems are solved
    backends,  # the open models; the first one writes
) -> list:  # (problem, steps) pairs
    "The small model's chains. Chains that the store lacks are drawn."
    problems = read_problems(setting, benchmark, 'train')
    with open_tree(setting, benchmark, backends) as tree:
        chains = run_async(gather_progress((tree.run(p, '', 0) for p in problems), benchmark))
    return list(zip(problems, chains))


def count_problems(setting: Setting, benchmark: str) -> int:
    "The number of problems that a benchmark has in a run, over all splits."
    return sum(len(read_problems(setting, benchmark, split)) for split in SPLITS)


def read_table(setting: Setting, benchmark: str, split: str) -> OutcomeTable:
    "Read the outcome table that a run saved. FileNotFoundError in one line if it has none yet."
    path = setting.files.outcomes(benchmark, split)
    if not path.is_file():
        run = setting.run
        raise FileNotFoundError(
            f'run {run.folder.name} has no outcomes of {benchmark} yet: run all stages '
            f'(stepwise-routing reproduce --profile {run.profile}), or the notebooks 02 and 02b, first'
        )
    return OutcomeTable.load(path)


def read_tables(setting: Setting, benchmark: str, grade) -> tuple:  # `grade`: of `open_run_grader`
    "Make and save a benchmark's outcome tables: ({split: table}, `Agreement` of grader and Math-Verify, or None)."
    problems = {split: read_problems(setting, benchmark, split) for split in SPLITS}
    tables = {}
    with open_tree(setting, benchmark, grade=grade) as tree:
        tables['train'] = outcome_table(problems['train'], tree, 'train', setting.part.samples)
        for split in SPLITS[1:]:
            tables[split] = outcome_table(
                problems[split], tree, split, redraws=setting.part.redraws
            )
    for split, table in tables.items():
        table.save(setting.files.outcomes(benchmark, split))
    if setting.run.config.data.grader == 'math-verify':
        return tables, None
    by_id = {p.id: p for part in problems.values() for p in part}
    graded_problems = [by_id[problem_id] for problem_id, _ in tree.grades]
    answers = [answer for _, answer in tree.grades]
    return tables, agreement(graded_problems, answers, grade, is_right)


def read_all(run: Run) -> dict:  # (setting, benchmark) -> what `read_tables` returns
    "Make and save all outcome tables of a run."

    def work(setting, benchmarks):
        with open_run_grader(setting.run) as grade:
            return [read_tables(setting, b, grade) for b in benchmarks]

    keys = [(setting.name, b) for setting in run.settings for b in setting.benchmarks]
    return dict(zip(keys, side_by_side(run, work, 'outcome tables', count_problems)))


def save_agreement(
    run: Run, agreements: dict
):  # (setting, benchmark) -> `Agreement` or None; the saved table
    "Write grading/agreement.csv and disagreements.csv, if there is a second grader."
    import pandas as pd

    second = {key: each for key, each in agreements.items() if each}
    if not second:
        return pd.DataFrame()

    def saved(name, frames):
        rows = pd.concat(frames, names=['setting', 'benchmark']).droplevel(-1)
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
    method = POLICY_METHODS.get(variant) or variant.removeprefix('ablation-')
    return SavedPolicy(
        variant=variant,
        seed=config['seed'],
        router=PolicyRouter(policy, policy.kappa, config['on_escalate'], method),
        online=config['online'],
        bound=config['bound'],
        sweep=tuple(config['sweep']),
        calibration=config['calibration'],
    )


def load_policies(setting: Setting, benchmark: str) -> list:
    "The `SavedPolicy`s of a run, by variant and seed. ValueError names a policy that cannot be used."
    folders = sorted(p for p in setting.files.policies(benchmark).glob('*/*') if p.is_dir())
    models = read_table(setting, benchmark, 'test').models if folders else ()
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
    return sorted(policies, key=lambda p: (p.variant, p.seed))


def open_case(setting: Setting, benchmark: str) -> Case:
    "Open a comparison on a benchmark: its outcome tables, our policies, and the rule that chooses settings."
    tables = {split: read_table(setting, benchmark, split) for split in SPLITS}
    config = setting.run.config
    samples = draw_samples(
        tables['calibration'], tables['test'], config.results.n_boot, config.seed
    )
    return Case(
        setting.name,
        benchmark,
        tables,
        load_policies(setting, benchmark),
        alpha=config.policy.alpha,
        unit=setting.unit,
        seed=config.seed,
        samples=samples,
    )


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


def walking_routers(setting: Setting, case: Case) -> list:
    "The baselines that walk, RSD last. Those that ask a model get store and model from `with_answers`."
    baselines = setting.run.config.baselines
    routers = []
    if baselines.steer_next:
        routers.append(fit_steer(case.tables['train'], 'next', seed=case.seed))
    if baselines.specreason:
        judge = SpecReason(None, scoring='greedy')
        routers += [judge, replace(judge, scoring='expected')]
    if baselines.reward_model:
        routers.append(RSD(None))
    return routers


def answer_stores(setting: Setting, benchmark: str, backends, prm) -> list:
    "(Kind, model, path, settings, record) of each store of verdicts: the judge's, and the reward model's (`prm`)."
    models = [(SpecReason, backends[1])] if setting.run.config.baselines.specreason else []
    models += [(RSD, prm)] if prm else []
    stores = []
    for router, model in models:
        path = setting.files.replies(benchmark, f'{router.kind}s')
        settings = asking_settings(benchmark, model)
        stores.append((router.kind, model, path, settings, router.record))
    return stores


@contextmanager
def open_answers(
    setting: Setting,
    benchmark: str,
    backends,  # the open models
    prm,  # of `reward_model`
    lent: bool = False,  # as of `open_tree`
):  # kind of an `AskingRouter` -> its (store, model)
    "Open the stores of verdicts of judge and reward model, for a `with` block."
    answers = {}
    with ExitStack() as stack:
        for kind, model, path, settings, record in answer_stores(setting, benchmark, backends, prm):
            store = stack.enter_context(RolloutStore(path, settings, record=record, lent=lent))
            answers[kind] = store, model
        yield answers


def with_answers(router, answers):  # of `open_answers`
    "Give a router that asks its store and its model. Any other router is returned unchanged."
    if not isinstance(router, AskingRouter):
        return router
    store, model = answers[router.kind]
    return replace(router, store=store, model=model)


def walking_methods(
    setting: Setting,
    case: Case,
    routers: list,  # of `walking_routers`
    asked: list,  # of each router, of `asked_scores`
) -> list:  # (method, its fixed threshold or None) pairs
    "All methods that walk. A baseline's thresholds are 41 quantiles of its scores of small calibration steps."
    baselines = setting.run.config.baselines
    calibration = case.tables['calibration']
    methods = []
    for router, chains in zip(routers, asked):
        if chains is None:
            thresholds = score_thresholds(router, calibration, WALKED)
        else:
            thresholds = chain_thresholds(chains, WALKED, router.mode)
        methods.append((at_thresholds(router, thresholds), None))
    points = None if shows_curves(setting) else 0
    for policies in own_walkers(setting, case):
        methods.append((at_sweep(policies, case.alpha, points), case.alpha))
    return methods


def shows_curves(setting: Setting) -> bool:
    "Are methods that walk also run at all their thresholds on test problems?"
    return setting.run.config.baselines.walk_thresholds == 'curve'


def own_walkers(setting: Setting, case: Case) -> list:  # lists of `SavedPolicy`s
    "Our policies that walk, a list per variant."
    if setting.name != 'open' or not setting.run.config.baselines.ours_next:
        return []
    return case.variants(walks=True)


def read_walked(setting: Setting, case: Case) -> dict:  # split -> `Problem`s
    "The problems of all splits. ValueError if the outcome tables hold other problems."
    problems = {split: read_problems(setting, case.benchmark, split) for split in SPLITS}
    for split in SPLITS[1:]:
        check_problems(case.tables[split], problems[split])
    return problems


def compare_walks(
    setting: Setting,
    case: Case,  # of `replay_case`
    methods: list,  # of `walking_methods`
    run: Walker,
    rsd=None,  # the router RSD, which has the rewards or asks for them; None: leave TRIM out
) -> None:
    "Add all methods that walk to a case, on all calibration and test problems."
    test = case.tables['test']
    if rsd and setting.run.config.baselines.trim:
        add_trim(case, run.problems, run.tree, rsd)
    walk_methods(case, methods, run, shows_curves(setting))
    for policies in own_walkers(setting, case):
        case.singles += seed_rows(policies, test, case.alpha, run)
    if setting.name == 'open' and case.benchmark in MICRO:
        for on_escalate in READINGS:
            knowing = knows_steps(run.problems['test'], run.tree, on_escalate)
            case.rows += outcome_rows(knowing, test, replay(knowing, test), 0.5)


def walk_case(
    setting: Setting,
    case: Case,  # of `replay_case`
    backends,  # the open models
    grade,  # of `open_run_grader`
    prm=None,  # of `reward_model`
) -> None:
    "Add all methods that walk to a case, on all calibration and test problems."
    problems = read_walked(setting, case)
    with (
        open_tree(setting, case.benchmark, backends, grade) as tree,
        open_answers(setting, case.benchmark, backends, prm) as answers,
    ):
        routers = [with_answers(router, answers) for router in walking_routers(setting, case)]
        asked = [asked_scores(router, problems['calibration'], tree) for router in routers]
        methods = walking_methods(setting, case, routers, asked)
        compare_walks(setting, case, methods, Walker(problems, tree), routers[-1] if prm else None)


def save_case(setting: Setting, case: Case) -> None:
    "Write methods/: results, calibration grids, single seeds (with the ablations) and receipts."
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
        save_rows(setting.files.methods(case.benchmark, part), rows, columns)

    save('', case.rows, COLUMNS)
    save('-grid', grid_rows(case.grids), GRID_COLUMNS)
    save('-ablations', case.singles, SEED_COLUMNS)
    save('-policies', receipts, RECEIPT_COLUMNS)
    save('-kappas', case.kappas, KAPPA_COLUMNS)
    save('-classes', case.classes, CLASS_COLUMNS)
    certain = [grid.certain_row() for grid in case.grids if grid.method not in KAPPAS.values()]
    save('-certain', certain, CERTAIN_COLUMNS)
    save_points(setting.files.points(case.benchmark), case.points)


def kept_given_up(setting: Setting) -> set:
    "The (problem, answer) pairs that grading gave up on, in all stages of a run so far."
    files = (setting.folder / 'grading').glob('given-up-*.json')
    return {tuple(pair) for file in files for pair in json.loads(file.read_text('utf-8'))}


def with_own(read, columns, path, own_path):
    "The rows of chapter 04b, followed by those of `run.own_routers`, if there are any."
    import pandas as pd

    frame = read(path, columns)
    own = read(own_path, columns)
    return pd.concat([frame, own], ignore_index=True) if len(own) else frame


LEVELLED = ('micro-omni',)  # its levels differ in kind: one is beyond both models


def read_levels(setting: Setting, benchmark: str) -> dict:  # id of a test problem -> its level
    "The levels of a benchmark that is also reported by level. {} for all others."
    if benchmark not in LEVELLED:
        return {}
    return {p.id: p.difficulty for p in read_problems(setting, benchmark, 'test')}


def load_benchmark(setting: Setting, benchmark: str) -> BenchmarkResults:
    "Load all results of a setting on a benchmark. One-line error if a file is missing or files do not fit together."
    table = read_table(setting, benchmark, 'test')
    table = take_rows(table, np.argsort(table.problem_id, kind='stable'))

    def file(part):
        return setting.files.methods(benchmark, part)

    rows = with_own(read_rows, COLUMNS, file(''), file('-own'))
    singles = read_rows(file('-ablations'), SEED_COLUMNS)
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
    config = setting.run.config
    counts = resamples(len(table), config.results.n_boot, config.seed)
    means = resampled(rows, counts, cost_unit(table), setting.unit)
    points = read_points(setting.files.points(benchmark), config.results.n_boot)
    points |= read_points(setting.files.points(benchmark, '-own'), config.results.n_boot)
    at_points = {target: at_point(means, points, target) for target in CHOICES}
    calibration = read_table(setting, benchmark, 'calibration')
    large_cost = calibration.large_only()[setting.unit].mean()
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
        classes=read_csv(file('-classes'), CLASS_COLUMNS),
        certain=with_own(read_csv, CERTAIN_COLUMNS, file('-certain'), file('-own-certain')),
        levels=read_levels(setting, benchmark),
    )


def load_results(setting: Setting) -> SettingResults:
    "Load one setting of a run, from its files alone."
    run = setting.run
    is_paid = setting.unit == 'cents'
    return SettingResults(
        name=setting.name,
        profile=run.profile,
        unit=setting.unit,
        alpha=run.config.policy.alpha,
        tables=run.tables,
        figures=run.figures,
        ablations=run.config.sweep.ablations,
        given_up=len(kept_given_up(setting)),
        is_recorded=setting.is_recorded,
        price=run.config.api.billed if is_paid else '',
        parts={b: load_benchmark(setting, b) for b in setting.benchmarks},
    )


def load_run(run: Run) -> dict:  # "open", "api" -> `SettingResults`
    "Load all settings of a run, from its files alone. One-line error if a file is missing."
    return {setting.name: load_results(setting) for setting in run.settings}
