"""What the chapters call for a whole run: its outcomes, the live check, all methods, tables and figures.

Here belong the functions that know both a run's settings and the method. The method itself is in `method/`.
"""

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from .. import __version__
from ..data.benchmarks import MICRO, grade_by_rules, load_problems, open_benchmark, prompt_digest
from ..data.frozen import read_frozen
from ..data.questions import QuestionFile
from ..data.recorded import MAX_STEPS, read_recorded
from ..data.sources import SPLITS
from ..data.steps import first_wrong
from ..method.judges import Grades, Rewards, draw_walks, judged_chains, walk_kappas
from ..method.results import API, OS, all_methods, compare
from ..method.rollouts import (
    Outcomes,
    cut_chains,
    draw_chains,
    outcome_table,
    padded,
    read_outcomes,
    save,
    shipped_outcomes,
    take,
)
from ..method.training import train
from ..models.base import Preference, Reward
from ..models.kept import Kept
from ..models.open import ModelOptions, is_api, open_model, open_models, open_reward
from ..records import find_price, verdict_messages
from ..settings import Settings, read_profile
from ..store import Replies, Store, draw_settings
from ..util import find_project, write_file

LIVE = 40  # problems a benchmark that every run draws live


# ---- a run


@dataclass(frozen=True)
class Run:
    "One run of a profile: its settings and its folders."

    profile: str
    settings: Settings
    folder: Path  # runs/<id>: what this run makes
    store: Path  # runs/store/<profile>: drawn steps and paid replies, kept across runs
    draw: int = 0  # micro problems a split that are drawn again; 0: the shipped ones

    @property
    def benchmarks(self) -> tuple:  # names
        return self.settings.data.benchmarks

    @property
    def tables(self) -> Path:
        return self.folder / 'tables'

    @property
    def figures(self) -> Path:
        return self.folder / 'figures'

    @property
    def is_paid(self) -> bool:
        "Is the large model behind an API that sends a bill?"
        return is_api(self.settings.models.names[-1])

    @property
    def units(self) -> tuple:
        "Of cost. Policies are trained in the first one."
        if self.is_paid:
            return ('cents',)  # nobody knows how many parameters the large model has
        return ('flops', 'cents') if self.settings.models.price else ('flops',)

    def is_drawn(self, benchmark: str) -> bool:
        "Do models draw this benchmark, or is it shipped? A file of questions is always drawn."
        if isinstance(open_benchmark(benchmark).source, QuestionFile):
            return True
        return not self.settings.data.shipped or bool(self.draw and benchmark in MICRO)

    def problems(self, benchmark: str, split: str) -> list:
        data = self.settings.data
        n = self.draw if self.draw and benchmark in MICRO else getattr(data, f'n_{split}')
        return load_problems(benchmark, split, n, data.data_dir or None)


def open_run(
    profile: str = 'micro',  # a name of nbs/params, or a .yaml file
    folder='',  # of the run; '': runs/notebook
    changes: dict | None = None,  # such as {"policy.alpha": 0.05}
    draw: int = 0,  # problems a split that are drawn again
) -> Run:
    "A run for a chapter. ValueError or FileNotFoundError in one line for a bad profile or change."
    settings = read_profile(profile, changes)
    # an error in one line for an unknown name or file
    names = tuple(open_benchmark(benchmark).name for benchmark in settings.data.benchmarks)
    settings = replace(settings, data=replace(settings.data, benchmarks=names))
    runs = find_project().runs
    name = Path(profile).stem
    folder = Path(folder or runs / 'notebook')
    return checked_run(Run(name, settings, folder, runs / 'store' / name, draw))


FOLLOWED = 'benchmarks', 'shipped', 'price'  # of data and models, by what is shipped


def checked_run(run: Run) -> Run:
    "The run. ValueError for settings of draws if nothing is drawn, and for an unknown price."
    if run.settings.models.price:
        find_price(run.settings.models.price)
    if any(map(run.is_drawn, run.benchmarks)):
        return run
    ignored = []
    for section in ('data', 'models', 'baselines'):
        shipped, asked = (vars(getattr(s, section)) for s in (Settings(), run.settings))
        names = [name for name in asked if name not in FOLLOWED and asked[name] != shipped[name]]
        ignored += [f'{section}.{name}' for name in names]
    if ignored:
        raise ValueError(
            f'{", ".join(ignored)}: what is shipped was drawn with other settings; set data.shipped to '
            'false, and the models draw'
        )
    return run


# ---- models


def model_options(run: Run) -> list:  # of `ModelOptions`, small to large
    "The models of a run."
    s = run.settings
    shared = dict(temperature=s.models.temperature, max_tokens=s.models.max_tokens)
    shared |= dict(max_reply=s.models.max_reply, context=s.models.context)
    return [
        ModelOptions(name=name, **shared | own)
        for name, own in zip(s.models.names, (s.models.small, s.models.large))
    ]


def replies_of(run: Run) -> Replies | None:
    "Where the replies of APIs are kept. None if no model is behind one."
    if not any(map(is_api, run.settings.models.names)):
        return None
    return Replies(run.store / 'replies.db', run.settings.models.max_cents)


def open_pair(run: Run) -> list:  # of models, small to large
    "Open the models of a run."
    return open_models(model_options(run), replies_of(run))


def open_grader(run: Run):  # (`Problem`, answer) pairs -> verdicts
    "Open the grader of a run: rules, or xVerify."
    kind, _, judge = run.settings.data.grader.partition(':')
    if kind != 'xverify':
        return grade_by_rules
    from ..models.xverify import xverify

    memory = run.settings.data.grader_memory
    options = ModelOptions(name=f'vllm:{judge}', temperature=0.0, memory=memory)
    return xverify(open_model(options))


# ---- drawing


def verified(run: Run, problems, chains, models) -> list | None:  # [problem][step]
    "Does a verifier accept each small step? By the program of a micro benchmark, or by the large model."
    if problems[0].benchmark in MICRO:
        wrong = [first_wrong(p, chain) for p, chain in zip(problems, chains)]
        return [np.arange(len(c)) < (w if w >= 0 else len(c)) for c, w in zip(chains, wrong)]
    if run.settings.models.verifier != 'large':
        return None
    prompts = []
    for problem, chain in zip(problems, chains):
        prompts += [verdict_messages(problem, chain[: t + 1]) for t in range(len(chain))]
    choices = iter(models[-1].choose(prompts, ['correct', 'incorrect']))
    verdicts = [[next(choices) for _ in chain] for chain in chains]
    return [[c is not None and c.prob[0] >= c.prob[1] for c in row] for row in verdicts]


def draw_splits(run: Run, benchmark: str, models, grade=grade_by_rules, prm=None) -> dict:
    "Draw all that the methods of a run need of a benchmark: outcomes, rewards, walks. Steps are kept in the store."
    settings = draw_settings(benchmark, models, prompt=prompt_digest(benchmark))
    ask = dict(max_steps=run.settings.data.max_steps)
    drawn, splits = {}, {}
    with ExitStack() as stack:

        def opened(name, depends_on, record):
            path = run.store / f'{benchmark}{name}.db'
            return stack.enter_context(Store(path, depends_on, record))

        steps = stack.enter_context(Store(run.store / f'{benchmark}.db', settings))
        kept = [Kept(model, steps) for model in models]
        judges = {}
        if run.settings.baselines.specreason:
            grading = dict(benchmark=benchmark, **asdict(models[-1].spec)) | models[-1].settings()
            judges['SpecReason'] = Grades(models[-1], opened('-grades', grading, Preference))
        if prm is not None:
            rewarding = dict(benchmark=benchmark, **prm.settings())
            judges['RSD'] = Rewards(prm, opened('-rewards', rewarding, Reward))
        for split in SPLITS:
            problems = run.problems(benchmark, split)
            chains, rests = draw_chains(problems, kept, **ask)
            step_right = verified(run, problems, chains, models) if split == 'train' else None
            specs = [model.spec for model in models]
            table = outcome_table(
                problems, chains, rests, specs, split, grade, run.settings.models.price, step_right
            )
            if prm is not None:
                rewards = judged_chains(judges['RSD'], problems, chains)
                column = padded(rewards, table.small.shape[1], np.nan)
                table = replace(table, features=table.features | dict(reward=column))
            splits[split] = table
            drawn[split] = problems, chains
        for name, judge in judges.items():
            scores = judged_chains(judge, *drawn['calibration'])
            kappas = walk_kappas(np.concatenate(scores))
            spec = prm.spec if name == 'RSD' else None
            for split in SPLITS[1:]:
                problems = drawn[split][0]
                parts = splits[split], problems, (*kept, judge), kappas, spec, grade
                splits[name, split] = draw_walks(name, *parts, **ask)
    return splits


def draw_all(run: Run) -> dict:  # benchmark -> splits
    "Draw the benchmarks of a run that are not shipped, and keep their tables. It goes on where it was interrupted."
    wanted = [benchmark for benchmark in run.benchmarks if run.is_drawn(benchmark)]
    found = {}
    if not wanted:
        return found
    models, grade, prm = open_pair(run), open_grader(run), None
    if run.settings.baselines.reward_model:
        prm = open_reward(run.settings.baselines.reward_model)
    for benchmark in wanted:
        found[benchmark] = draw_splits(run, benchmark, models, grade, prm)
        for name, table in found[benchmark].items():
            save(table, outcome_path(run, benchmark, name))
            if isinstance(table, Outcomes) and table.cut.any():
                print(cut_chains(table), 'Raise data.max_steps or models.max_tokens.')
    return found


def outcome_path(run: Run, benchmark: str, name) -> Path:  # of a split, or (method, split)
    stem = name if isinstance(name, str) else '-'.join(reversed(name))
    return run.folder / 'outcomes' / f'{benchmark}-{stem}.npz'


# ---- outcomes of a run


def drawn_outcomes(run: Run, benchmark: str) -> dict:
    "What `draw_all` kept. FileNotFoundError: nothing was drawn in this run."
    splits = read_outcomes(run.folder / 'outcomes', benchmark)
    if not splits:
        raise FileNotFoundError(
            f'{run.folder} holds no outcomes of {benchmark}: run chapter 02 first'
        )
    return splits


def read_benchmarks(run: Run) -> dict:  # name -> {split: `Outcomes`, (method, split): `Walks`}
    "The outcomes of a run, drawn or shipped."
    found = {}
    for benchmark in run.benchmarks:
        if run.is_drawn(benchmark):
            found[benchmark] = drawn_outcomes(run, benchmark)
            continue
        shipped = shipped_outcomes(benchmark)
        if not shipped:
            raise FileNotFoundError(
                f'no outcomes of {benchmark} are shipped: set data.shipped to false'
            )
        found[benchmark] = {
            name: priced(table, run.settings.models.price) for name, table in shipped.items()
        }
    return found


def priced(table, price: str):  # of `Outcomes` or `Walks`
    "The same for a large model with this price. '': as it is."
    dollars = table.dollars.copy()
    if price:
        dollars[1] = find_price(price)[:3]
    return replace(table, dollars=dollars)


# ---- the live check


def live_table(benchmark: str, models, problems) -> Outcomes:
    "Outcomes of some test problems, drawn now; of the real pair, read off its recorded steps."
    if benchmark in MICRO:
        chains, rests = draw_chains(problems, models, Settings().data.max_steps)
        specs = [model.spec for model in models]
        return outcome_table(problems, chains, rests, specs, 'test')
    recorded = read_recorded(benchmark)
    chains, rests = draw_chains(problems, recorded.models, MAX_STEPS[benchmark])
    specs = [model.spec for model in recorded.models]
    return outcome_table(problems, chains, rests, specs, 'test')


def check_live(run: Run, n: int = LIVE) -> pd.DataFrame:
    "Draw n test problems of each shipped benchmark again, and compare them with what is shipped."
    shipped = [benchmark for benchmark in run.benchmarks if not run.is_drawn(benchmark)]
    if not shipped:
        return pd.DataFrame(columns=['benchmark'])
    rows = []
    models = open_pair(replace(run, settings=Settings()))
    for benchmark in shipped:
        if benchmark in MICRO:
            problems = load_problems(benchmark, 'test', n)
        else:
            problems = read_recorded(benchmark).problems['test'][:n]
        new = live_table(benchmark, models, problems)
        old = take(shipped_outcomes(benchmark)['test'], slice(n))
        rows.append(dict(benchmark=benchmark) | differences(new, old))
    return pd.DataFrame(rows)


def differences(new: Outcomes, old: Outcomes) -> dict:
    "How far two tables of the same problems differ."
    steps, both = new.small.shape[1], range(len(new))
    same_tokens = [
        np.array_equal(new.small[i], old.small[i, :steps])
        and np.array_equal(new.large[i], old.large[i, : steps + 1])
        for i in both
    ]
    same_right = [np.array_equal(new.right[i], old.right[i, : steps + 1]) for i in both]
    line = dict(problems=len(new), same_tokens=sum(same_tokens), same_verdicts=sum(same_right))
    for name in ('min_prob', 'mean_logit'):
        gap = np.abs(new.features[name] - old.features[name][:, :steps])
        line[f'largest gap of {name}'] = float(np.nanmax(gap))
    return line


# ---- results of a run


def compare_all(run: Run, benchmarks: dict, more=()) -> dict:  # see `results.compare`
    "All methods of a run on all its benchmarks; `more`: your own `Method`s."
    s = run.settings
    methods = [*all_methods(s.policy, tuple(range(s.results.seeds))), *more]
    parts = run.units, s.policy.alpha, s.results.n_boot, s.results.processes
    return compare(benchmarks, methods, *parts)


def notes_of(run: Run, benchmarks: dict) -> list:  # of sentences
    "What every caption says: models, problems, alpha, and when the problems were drawn."
    from ..report.tables import describe

    receipts = []
    if any(name in MICRO and not run.is_drawn(name) for name in run.benchmarks):
        receipts.append(read_frozen().sentence)
        if run.settings != Settings():
            receipts.append('This run has other settings than those.')
    return describe(benchmarks, run.settings.policy.alpha, *receipts)


def training_logs(run: Run, benchmarks: dict) -> dict:  # benchmark -> a log
    "How the paper's policy learns on each benchmark, with the first seed."
    from joblib import Parallel, delayed

    s = run.settings
    columns = API if run.is_paid else OS
    work = [
        delayed(train)(splits['train'], columns, s.policy, run.units[0])
        for splits in benchmarks.values()
    ]
    trained = Parallel(s.results.processes)(work)
    return {name: log for name, (_, _, log) in zip(benchmarks, trained)}


def report(
    run: Run,
    benchmarks: dict,  # as of `compare`
    results: dict,  # of `compare`
    gains: pd.DataFrame,  # of `gain_frame`
) -> list:  # names of files
    "Write tables and figures of a run, and keep its results for `redraw`."
    import joblib

    from ..report.figures import write_figures
    from ..report.tables import write_tables

    notes = notes_of(run, benchmarks)
    write_tables(results, gains, run.tables, notes)
    facts = dict(profile=run.profile, draw=run.draw, version=__version__)
    facts |= dict(settings=asdict(run.settings))
    write_file(run.tables / 'provenance.json', json.dumps(facts, indent=1) + '\n')
    parts = dict(results=results, gain=gains, logs=training_logs(run, benchmarks), notes=notes)
    parts |= dict(alpha=run.settings.policy.alpha)
    write_figures(folder=run.figures, **parts)
    joblib.dump(parts, run.folder / 'results.joblib')
    return sorted(path.name for path in [*run.tables.iterdir(), *run.figures.iterdir()])


def redraw() -> list:  # paths
    "Draw the figures of the newest run again. FileNotFoundError: there is no run."
    import joblib

    from ..report.figures import write_figures

    found = sorted(find_project().runs.glob('*/results.joblib'), key=lambda p: p.stat().st_mtime)
    if not found:
        raise FileNotFoundError('no run has results yet: stepwise-routing reproduce')
    folder = found[-1].parent / 'figures'
    write_figures(folder=folder, **joblib.load(found[-1]))
    return sorted(folder.iterdir())
