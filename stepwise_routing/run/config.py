"""What a run is: a profile, its folders and its settings, checked before anything runs"""

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

from ..base.records import undated
from ..base.settings import Policy, Section, checked
from ..base.tools import digest, find_project, nearest
from ..data.benchmarks import MICRO


class Data(Section):
    "Which problems, and who says which answers are right."

    benchmarks: tuple = MICRO  # which benchmarks to run
    data_dir: str = (
        ''  # folder with copies of the public ones (absolute, or from nbs/); '' asks the Hub
    )
    max_steps: int | dict = 30  # steps of a chain at most, also {"default": 30, "omnimath": 100}
    grader: str = 'math-verify'  # or "xverify:NAME[@REVISION]" (starts vLLM), "xverify:http://HOST:PORT/v1#MODEL"
    grader_memory: float = 0.15  # share of the GPU's memory for that server
    grader_template: str = ''  # file with its prompt; '' finds xVerify's own


class Models(Section):
    "Limits and engines of the models on this machine."

    max_tokens: int = 512  # tokens of a step at most
    context: int | None = None  # tokens of prompt and chain at most; None: what the models have
    memory_shares: tuple = ()  # vLLM: share of the GPU's memory per model; () leaves it to the backend
    workers: int = 1  # processes that draw and walk side by side, each with models of its own
    engine: str = 'local'  # "ray" opens the models of the open setting on Ray workers
    ray_workers: int = 2  # how many
    ray_gpus: float = 0.0  # GPUs of each


class Open(Section):
    "Two open models, paid in FLOPs (Table 1)."

    models: tuple = (
        'micro-small',
        'micro-large',
    )  # the small and the large one; () leaves this setting out
    n_train: int | dict | None = 24  # problems per benchmark that routers learn from; None: all
    n_calibration: int | dict | None = 24  # problems per benchmark that thresholds are chosen on
    n_test: int | dict | None = 24  # problems per benchmark that are reported
    samples: int = 1  # independent draws of every training problem
    redraws: int = 0  # further draws of the large model on calibration and test problems


class Api(Open):
    "A small model here, a large one that is paid in US cents (Table 2)."

    models: tuple = ('micro-small', 'served:micro-large')  # () leaves this setting out
    price: str = ''  # row of PRICES; '': the model's own, of a local stand-in gpt-4.1-mini's
    max_cents: float = (
        100.0  # never spend more, US cents, earlier runs with the same store included
    )
    max_reply: int = 512  # longest rest of a chain, tokens
    concurrency: int = 32  # calls in flight

    @property
    def billed(self):  # row of PRICES
        if self.price or not self.models[-1].startswith('openai:'):
            return self.price or 'gpt-4.1-mini'
        return undated(self.models[-1].removeprefix('openai:'))


class Sweep(Section):
    "Which policies a run trains."

    seeds: int = 2  # policies a variant, open setting
    api_seeds: int = 1  # the same, API setting
    ablations: bool = True  # also policies with one design choice changed
    ablation_seeds: int = 1  # policies of each
    most_steps: int = 20  # cap on the steps of an ablation
    per_step: bool = True  # also policies that may return to the small model, trained on live walks
    per_step_steps: int = 5  # their policy steps
    per_step_batch: int = 5  # walks a step
    per_step_seeds: int = 1  # policies of this kind
    per_step_problems: int = 12  # training problems they see, and twice as many for calibration
    workers: int = 2  # processes that train side by side


class Baselines(Section):
    "Which other routers run, and on how much."

    reward_model: str = 'micro-prm'  # of RSD and TRIM; '' leaves both out
    specreason: bool = True  # run SpecReason
    trim: bool = True  # run TRIM-Agg
    steer_next: bool = True  # run STEER's per-step reading
    ours_next: bool = True  # run the per-step policies, where there are any
    walk_thresholds: str = (
        'chosen'  # thresholds of what walks on test problems: "chosen", or "all" for curves
    )


class Results(Section):
    "How results are reported."

    n_boot: int = 2000  # bootstrap resamples


class Config(Section):
    "All settings of a run."

    data: Data = Data()  # which problems
    models: Models = Models()  # limits of the models
    open: Open = Open()  # two open models
    api: Api = Api()  # a large model that is paid
    policy: Policy = Policy()  # how a policy is trained
    sweep: Sweep = Sweep()  # which policies are trained
    baselines: Baselines = Baselines()  # which other routers run
    results: Results = Results()  # what is reported
    seed: int = 0  # of fits, first policy, coin and bootstrap
    store: str = ''  # profile whose draws and trained policies it shares; '' has its own


SECTIONS = {f.name: f.type for f in fields(Config) if is_dataclass(f.type)}

KEYS = {f'{name}.{f.name}': f.type for name, section in SECTIONS.items() for f in fields(section)}

KEYS |= {f.name: f.type for f in fields(Config) if f.name not in SECTIONS}


def changed(config: Config, changes: dict, where: str = '-p') -> Config:
    "A config with some values replaced. ValueError names where from, key, value, what is allowed, the nearest key."
    for k, v in dict(changes).items():
        if k not in KEYS:
            full = [key for key in KEYS if key.endswith(f'.{k}')]
            hint = f' (did you mean {full[0]!r}?)' if full else nearest(k, KEYS)
            raise ValueError(f'{where}: unknown setting {k!r}{hint}')
        section, _, name = k.rpartition('.')
        value = {name: checked(f'{where}: {k}', v, KEYS[k])}
        if section:
            value = {section: replace(getattr(config, section), **value)}
        config = replace(config, **value)
    return config


def read_yaml(path):
    "A profile's values by their full names, such as `policy.alpha`. ValueError in one line where it is none."
    import yaml

    path = Path(path)
    out = {}
    try:
        values = yaml.safe_load(path.read_text('utf-8')) or {}
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f'{path.name} is not valid YAML: {" ".join(str(e).split())}') from None
    if not isinstance(values, dict):
        raise ValueError(f'{path.name} must hold sections of `name: value` lines')
    for k, v in values.items():
        if k not in SECTIONS:
            out[str(k)] = v
        elif isinstance(v, dict):
            out |= {f'{k}.{name}': x for name, x in v.items()}
        else:
            raise ValueError(f'{path.name}: section {k} must hold `name: value` lines')
    return out


def _find_profile(profile, project):
    "The file of a profile. ValueError with the names there are."
    names = {p.stem: p for p in sorted(project.params.glob('*.yaml'))}
    path = names.get(profile, Path(profile).resolve())
    if path.is_file() and path.suffix in ('.yaml', '.yml'):
        return path
    hint = f'{nearest(profile, names)}; choose one of: {", ".join(names)}, or give a .yaml file'
    raise ValueError(f'unknown profile {str(profile)!r}{hint}')


@dataclass(frozen=True)
class Run:
    "One run of a profile: its folders, and the `Setting`s that have models, in the order of the paper's tables."

    profile: str  # name of the profile
    config: Config  # all settings
    folder: Path  # runs/<id>: what this run makes
    store: Path  # runs/store/<profile>: what is kept across runs
    path: Path | None = None  # file of the profile
    tables = property(lambda self: self.folder / 'tables')
    figures = property(lambda self: self.folder / 'figures')
    settings = property(
        lambda self: tuple(s for s in (Setting(self, 'open'), Setting(self, 'api')) if s.models)
    )


@dataclass(frozen=True)
class Setting:
    "Two models on the benchmarks of a run, and where their results lie."

    run: Run
    name: str  # "open": paid in FLOPs; "api": paid in US cents
    part = property(lambda self: getattr(self.run.config, self.name))
    models = property(lambda self: self.part.models)
    benchmarks = property(lambda self: self.run.config.data.benchmarks)
    unit = property(lambda self: 'cents' if self.name == 'api' else 'paper_flops')
    folder = property(
        lambda self: self.run.folder / 'api' if self.name == 'api' else self.run.folder
    )
    store = property(lambda self: self.run.store / 'api' if self.name == 'api' else self.run.store)
    files = property(lambda self: Files(self))

    def n(self, split):
        return getattr(self.part, f'n_{split}')


@dataclass(frozen=True)
class Files:
    "The files of a setting."

    setting: Setting

    def rollouts(self, benchmark):
        return self.setting.store / f'{benchmark}.db'  # the routing trees

    def replies(self, benchmark, kind):
        return self.setting.store / f'{benchmark}-{kind}.db'  # "grades", "rewards"

    def ledger(self):
        return self.setting.store / 'ledger.db'  # paid calls

    def verdicts(self):
        return self.setting.run.store / 'verdicts.db'  # of a model that grades

    def outcomes(self, benchmark, split):
        return self.setting.folder / 'outcomes' / f'{benchmark}-{split}.npz'

    def policies(self, benchmark):
        return self.setting.folder / 'policies' / benchmark

    def methods(self, benchmark, part=''):
        return self.setting.folder / 'methods' / f'{benchmark}{part}.csv'


def read_run(
    profile,  # name of a file in nbs/params, or the path of a .yaml file
    run_dir='',  # folder of the run; '' is the newest run of the profile, if any
    changes=(),  # {"policy.alpha": .05}
    project=None,  # the clone; None: the one we are in
) -> Run:
    "A run with checked settings. ValueError names file, key and value, what is allowed and the nearest key."
    project = project or find_project()
    path = _find_profile(profile, project)
    name, config = path.stem, changed(changed(Config(), read_yaml(path), path.name), changes)
    if path.parent != project.params:
        name += f'-{digest(path.read_bytes().hex(), size=3)}'  # passes for no other
    newest = max(
        [project.runs / name, *project.runs.glob(f'{name}-[0-9]*')]
    )  # names end in the time
    return Run(
        name, config, Path(run_dir or newest), project.runs / 'store' / (config.store or name), path
    )


def open_run(
    profile,  # name of a file in nbs/params, or the path of a .yaml file
    run_dir='',  # folder of the run; '' is the newest run of the profile, if any
    changes=(),  # {"policy.alpha": .05}
) -> Run:
    "The run that a notebook works in. ValueError as of `read_run`, and if the folder was made with other settings."
    from .manifest import check_run_settings

    run = read_run(profile, run_dir, changes)
    check_run_settings(run)
    return run
