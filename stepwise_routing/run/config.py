"""What a run is: a profile, its folders and its settings, checked before anything runs.

Here belong the settings of a run, their allowed values, and the places of its files. The work of a
stage belongs in `run.stages`. The hyper-parameters of training are in `base.settings`.
"""

import json
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..records import undated
from ..settings import (
    FROM_LIST,
    Count,
    Names,
    NotNegative,
    Policy,
    Section,
    Share,
    Whole,
)
from ..util import digest, find_project, nearest, unknown_name
from ..data.benchmarks import MICRO, open_benchmark
from ..models.model_name import ModelName


def a_small_and_a_large(names: tuple) -> tuple:
    if len(names) != 2:
        raise ValueError('a list of a small and a large model')
    return names


def one_or_more_once(names: tuple) -> tuple:
    if not names or len(set(names)) < len(names):
        raise ValueError('a list of one or more benchmarks, each named once')
    return names


def a_grader(name: str) -> str:
    "Check the name of a grader. Another machine is refused: a profile from a stranger could send it a key."
    kind, _, judge = name.partition(':')
    if name != 'math-verify' and not (kind == 'xverify' and judge):
        raise ValueError('"math-verify" or "xverify:..."')
    if '://' in judge:
        from ..models.address import is_loopback

        if not judge.startswith(('http://', 'https://')) or not is_loopback(judge):
            raise ValueError('a judge on this machine; make a tunnel to one elsewhere')
    return name


LARGEST_PROFILE = 10**5  # bytes
FOLDER_NAME = re.compile(
    r'\w[\w.-]{0,79}'
)  # of a run or a profile: it cannot lead to another folder
FOLDER_WORDS = 'up to 80 letters, digits, ".", "-" and "_"'
Pair = Annotated[Names, AfterValidator(a_small_and_a_large)]
Benchmarks = Annotated[Names, AfterValidator(one_or_more_once)]
Grader = Annotated[str, AfterValidator(a_grader)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Problems = Count | dict[str, Count | None] | None  # one number, or one per benchmark; None: all

# ---- the settings


class Data(Section):
    "Which problems, and who says which answers are right."

    benchmarks: Benchmarks = MICRO  # which benchmarks to run
    # folder with copies of the public ones (absolute, or from nbs/); '' asks the Hub
    data_dir: str = ''
    n_train: Problems = 24  # problems per benchmark that routers learn from; None: all
    n_calibration: Problems = 24  # problems per benchmark that thresholds are chosen on
    n_test: Problems = 24  # problems per benchmark that are reported
    samples: Count = 1  # independent draws of every training problem
    redraws: Whole = 0  # further draws of the large model on calibration and test problems
    # steps of a chain at most, also {"default": 30, "omnimath": 100}
    max_steps: Count | dict[str, Count] = 30
    # or "xverify:NAME[@REVISION]" (starts vLLM), "xverify:http://127.0.0.1:PORT/v1#MODEL"
    grader: Grader = 'math-verify'
    grader_memory: Share = 0.15  # share of the GPU's memory for that server

    @property
    def question_files(self) -> list:
        "The JSONL files among the benchmarks."
        return [name for name in self.benchmarks if name.endswith('.jsonl')]


class Models(Section):
    "The small and the large model, their limits and engines."

    names: Pair = ('micro-small', 'micro-large')  # the small and the large one
    # what the large model would cost behind an API, a row of PRICES: Table 2 from the same outcomes
    price: str = ''
    max_tokens: Count = 512  # tokens of a step at most
    context: Count | None = None  # tokens of prompt and chain at most; None: what the models have
    # vLLM: share of the GPU's memory per model; () leaves it to the backend
    memory_shares: Annotated[tuple[Share, ...], FROM_LIST] = ()
    # processes that draw and walk side by side, each with models of its own; "auto": one per core,
    # as far as the memory goes, for the micro models, and 1 for all others
    workers: Count | Literal['auto'] = 1
    ray_workers: Whole = 0  # workers of Ray that the models are opened on; 0: no Ray
    ray_gpus: NotNegative = 0.0  # GPUs of each


class Api(Section):
    "Limits of a large model that is paid in US cents."

    # never spend more, US cents, earlier runs with the same store included
    max_cents: NotNegative = 100.0
    max_reply: Count = 512  # longest rest of a chain, tokens
    concurrency: Count = 32  # calls in flight


class Sweep(Section):
    "Which policies a run trains."

    seeds: Count = 2  # policies a variant
    as_paper: bool = False  # also policies trained as in the paper: sampled trajectories, V-trace
    most_steps: Count = 20  # cap on the steps of training as in the paper
    workers: Count = 2  # processes that train side by side


class Baselines(Section):
    "Which other routers run, and on how much."

    reward_model: str = 'micro-prm'  # of RSD and TRIM; '' leaves both out
    specreason: bool = True  # run SpecReason
    # settings of what walks on test problems: "chosen", or those of its "curve"
    walk_thresholds: Literal['chosen', 'curve'] = 'chosen'


class Results(Section):
    "How results are reported."

    n_boot: Annotated[int, Field(ge=1, le=10**6)] = 2000  # bootstrap resamples


class Config(Section):
    "All settings of a run."

    data: Data = Data()  # which problems
    models: Models = Models()  # which models, and their limits
    api: Api = Api()  # limits of a large model that is paid
    policy: Policy = Policy()  # how a policy is trained
    sweep: Sweep = Sweep()  # which policies are trained
    baselines: Baselines = Baselines()  # which other routers run
    results: Results = Results()  # what is reported
    seed: Seed = 0  # of fits, first policy, coin and bootstrap


SECTIONS = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}


def full_names() -> list:
    "The names of all settings, such as \"policy.alpha\"."
    names = []
    for section, kind in SECTIONS.items():
        names += [f'{section}.{field.name}' for field in fields(kind)]
    return names + [field.name for field in fields(Config) if field.name not in SECTIONS]


KEYS = full_names()

# ---- reading and changing settings


def check_name(name: str, source: str) -> None:
    "ValueError, with the source and the nearest name, if there is no setting of this name."
    if name in KEYS:
        return
    same_field = [key for key in KEYS if key.endswith(f'.{name}')]
    hint = f' (did you mean {same_field[0]!r}?)' if same_field else nearest(name, KEYS)
    raise ValueError(f'{source}: unknown setting {name!r}{hint}')


def changed(
    config: Config,
    changes,  # dict or pairs: full name, such as "policy.alpha", and value
    source: str = '-p',  # of the changes, for error lines
) -> Config:
    "A config with some values replaced. ValueError names source, setting, value and allowed values."
    try:
        pairs = dict(changes).items()
    except (TypeError, ValueError):
        raise ValueError(
            f'{source}: {changes!r:.80} is no dict of changes, such as {{"policy.alpha": 0.05}}'
        ) from None
    for full_name, value in pairs:
        check_name(full_name, source)
        section, dot, name = full_name.rpartition('.')
        part = getattr(config, section) if section else config
        try:
            part = replace(part, **{name: value})
        except ValueError as error:
            raise ValueError(f'{source}: {section}{dot}{error}') from None
        config = replace(config, **{section: part}) if section else part
    return config


def load_yaml(
    text: str,
    source: str,  # of the text, for the error line
):
    "Read plain YAML. ValueError in one line for a bad text, a name that occurs twice, or an alias."
    import yaml

    class PlainLoader(yaml.SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError('write values out: aliases (*name) are not read')
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            twice = [name for name, count in names.items() if count > 1]
            if twice:
                raise yaml.YAMLError(f'{twice[0]!r} occurs twice')
            return super().construct_mapping(node, deep)

        def construct_scalar(self, node):
            text = super().construct_scalar(node)
            text.encode()  # UnicodeEncodeError, a ValueError: half a character
            kind = node.tag.rpartition(':')[2]
            if kind in ('int', 'float') and re.match(r'[-+]?0[0-7_]|.*:', text):
                raise yaml.YAMLError(
                    f'{text:.80}: write a number without ":" and without a 0 before it'
                )
            return text

        def construct_object(self, node, deep=False):
            try:
                return super().construct_object(node, deep)
            except (AttributeError, KeyError):  # a text that is not what its tag says
                kind = node.tag.rpartition(':')[2]
                raise yaml.YAMLError(f'{node.value!r:.80} is no {kind}') from None

    try:
        return yaml.load(text, PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'{source} is not valid YAML: {reason:.300}') from None


def read_yaml(path) -> dict:  # full name, such as "policy.alpha" -> value
    "The values of a profile. ValueError in one line if the file is not a profile."
    from ..data.sources import each_once

    path = Path(path)
    if path.stat().st_size > LARGEST_PROFILE:
        raise ValueError(
            f'{path.name} has more than {LARGEST_PROFILE:,} bytes: it is not a profile'
        )
    try:
        text = path.read_text('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path.name} is not valid YAML: {error}') from None
    sections = load_yaml(text, path.name)
    if sections is None:
        raise ValueError(f'{path.name} is empty: write settings into it, such as `seed: 0`')
    if not isinstance(sections, dict):
        raise ValueError(f'{path.name} must hold sections of `name: value` lines')
    pairs = []
    for section, content in sections.items():
        if section not in SECTIONS:
            pairs.append((str(section), content))
        elif isinstance(content, dict):
            pairs += [(f'{section}.{name}', value) for name, value in content.items()]
        else:
            raise ValueError(f'{path.name}: section {section} must hold `name: value` lines')
    try:
        return each_once(pairs)
    except ValueError as error:
        raise ValueError(f'{path.name}: {error}') from None


# ---- a run and its folders


@dataclass(frozen=True)
class Run:
    "One run of a profile: its settings and its folders."

    profile: str  # name of the profile
    config: Config  # all settings
    folder: Path  # runs/<id>: what this run makes
    store: Path  # runs/store/<profile>: draws, policies and paid replies, kept across runs
    path: Path | None = None  # file of the profile

    @property
    def tables(self) -> Path:
        return self.folder / 'tables'

    @property
    def figures(self) -> Path:
        return self.folder / 'figures'

    @property
    def models(self) -> tuple:
        "The names of the small and the large model."
        return self.config.models.names

    @property
    def benchmarks(self) -> tuple:
        "The names of its benchmarks. A JSONL file is named by its stem."
        names = self.config.data.benchmarks
        return tuple(open_benchmark(n).name if n.endswith('.jsonl') else n for n in names)

    def register_files(self) -> None:
        "Make its JSONL files known as benchmarks in this process."
        for name in self.config.data.question_files:
            open_benchmark(name)

    @property
    def is_recorded(self) -> bool:
        "Are all steps replayed from a recording?"
        return all(ModelName.parse(name).kind == 'recorded' for name in self.models)

    @property
    def is_paid(self) -> bool:
        "Is the large model behind an API that sends a bill?"
        return ModelName.parse(self.models[-1]).is_paid

    @property
    def price(self) -> str:
        "The row of `PRICES` that the large model is billed by. '': it has no price."
        large = ModelName.parse(self.models[-1])
        return self.config.models.price or (undated(large.name) if self.is_paid else '')

    @property
    def units(self) -> tuple:
        "The units of cost that are reported, one or two of `UNITS`. Policies are trained in the first one."
        if self.is_paid:
            return ('cents',)  # nobody knows how many parameters the large model has
        return ('paper_flops', 'cents') if self.price else ('paper_flops',)

    @property
    def files(self) -> 'Files':
        return Files(self)

    def n(self, split: str):
        "The number of problems of a split: an int, a dict by benchmark, or None for all."
        return getattr(self.config.data, f'n_{split}')

    @property
    def has_draws(self) -> bool:
        "Have the models of this run drawn anything yet, or are its steps recorded?"
        drawn = any(self.files.rollouts(benchmark).is_file() for benchmark in self.benchmarks)
        return drawn or self.is_recorded

    @property
    def has_results(self) -> bool:
        "Has chapter 04b compared any methods in this run?"
        return any(self.files.methods(b, self.units[0]).is_file() for b in self.benchmarks)


@dataclass(frozen=True)
class Files:
    "The files of a run."

    run: Run

    def rollouts(self, benchmark: str) -> Path:
        "The store of the routing trees."
        return self.run.store / f'{benchmark}.db'

    def replies(self, benchmark: str, kind: str) -> Path:
        "The store of a model's verdicts on steps. `kind`: \"grades\" or \"rewards\"."
        return self.run.store / f'{benchmark}-{kind}.db'

    def ledger(self) -> Path:
        "The book of paid calls."
        return self.run.store / 'ledger.db'

    def outcomes(self, benchmark: str, split: str) -> Path:
        return self.run.folder / 'outcomes' / f'{benchmark}-{split}.npz'

    def policies(self, benchmark: str) -> Path:
        return self.run.folder / 'policies' / benchmark

    def methods(self, benchmark: str, unit: str, part: str = '') -> Path:
        "Rows of all methods, whose settings were chosen in a unit of cost."
        suffix = '-cents' if unit == 'cents' else ''
        return self.run.folder / 'methods' / f'{benchmark}{part}{suffix}.csv'

    def points(self, benchmark: str, unit: str, part: str = '') -> Path:
        "Costs and accuracies of methods in resamples that choose their settings again."
        return self.methods(benchmark, unit, f'{part}-points').with_suffix('.npz')


# ---- opening a run


def find_profile(profile, project) -> Path:
    "The file of a profile. ValueError, with the known names, if there is none."
    files = {path.stem: path for path in sorted(project.params.glob('*.yaml'))}
    path = files.get(profile, Path(profile).resolve())
    if path.is_file() and path.suffix in ('.yaml', '.yml'):
        return path
    raise ValueError(unknown_name('profile', str(profile), files, ', or give a .yaml file'))


def newest_run(project, name: str) -> Path:  # of a profile
    "The folder of the profile's newest run: folder names end in the time. `runs/<name>` if there is no run."
    return max([project.runs / name, *project.runs.glob(f'{name}-[0-9]*')])


def read_run(
    profile,  # name of a file in nbs/params, or the path of a .yaml file
    run_dir='',  # folder of the run; '' is the newest run of the profile, if any
    changes=(),  # {"policy.alpha": .05}
    project=None,  # the clone; None: the one we are in
) -> Run:
    "A run with checked settings. ValueError names file, setting, value and allowed values."
    project = project or find_project()
    path = find_profile(profile, project)
    config = changed(Config(), read_yaml(path), path.name)
    config = changed(config, changes)
    name = re.sub(r'[^\w.-]+', '-', path.stem).lstrip('.-')[:50] or 'profile'  # it names folders
    if path.parent != project.params or name != path.stem:
        name += f'-{digest(path.read_bytes().hex(), size=3)}'  # no two profiles share a name
    folder = Path(run_dir or newest_run(project, name))
    store = project.runs / 'store' / name
    return Run(name, config, folder, store, path)


def settings_of(config: Config) -> dict:  # full name such as "policy.alpha" -> value
    "All settings of a `Config`."
    return {name: attrgetter(name)(config) for name in KEYS}


def settings_receipt(config: Config) -> dict:
    "All settings for a receipt: values of JSON, without paths of anybody's home folder."
    text = json.dumps(settings_of(config))
    return json.loads(text.replace(f'{Path.home()}/', '~/'))


def recorded_settings(folder: Path) -> dict:
    "The settings that a run folder was made with, from its manifest.json. {} if it has none."
    try:
        return dict(json.loads((folder / 'manifest.json').read_text('utf-8'))['settings'])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def different_settings(run: Run) -> dict:  # full name -> (value there, value in `run`)
    "The settings of a `Run` that differ from those that its folder was made with."
    recorded = recorded_settings(run.folder)
    different = {}
    for name, value in settings_receipt(run.config).items():
        if recorded.get(name, value) != value:
            different[name] = recorded[name], value
    return different


def change_words(name: str, value) -> list:
    "A changed setting as words of a command: -p NAME=VALUE."
    import yaml

    if type(value) is tuple:
        value = list(value)
    text = yaml.safe_dump([value], default_flow_style=True, width=math.inf)
    return ['-p', f'{name}={text.strip()[1:-1]}']


def changes_line(changes: dict) -> str:  # full name -> value
    "Changed settings as options of a shell command."
    words = []
    for name, value in changes.items():
        words += change_words(name, value)
    return shlex.join(words)


def check_run_settings(run: Run) -> None:
    "ValueError in one line if the settings of a `Run` differ from those that its folder was made with."
    different = different_settings(run)
    if not different:
        return
    name, (there, here) = next(iter(different.items()))
    more = f' and {len(different) - 1} more' if len(different) > 1 else ''
    options = changes_line({name: here for name, (_, here) in different.items()})
    raise ValueError(
        f'runs/{run.folder.name} was made with {name}={there}, '
        f'this notebook has {name}={here}{more}: make a run with these settings '
        f'(stepwise-routing reproduce --profile {run.profile} {options}), '
        'or name another run_dir'
    )


def open_run(
    profile,  # name of a file in nbs/params, or the path of a .yaml file
    run_dir='',  # folder of the run; '' is the newest run of the profile, if any
    changes=(),  # {"policy.alpha": .05}
) -> Run:
    """The run that a notebook works in.

    ValueError as of `read_run`, and if the folder was made with other settings.
    """
    run = read_run(profile, run_dir, changes)
    check_run_settings(run)
    return run
