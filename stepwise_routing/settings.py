"""Settings: frozen records whose values are checked when they are made, and the profiles that hold them.

A profile is a YAML file of nbs/params with sections of `name: value` lines. What it leaves out has the default below.
"""

import contextlib
import inspect
from dataclasses import MISSING, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from .util import find_project, nearest

# ---- kinds of values


def number_from_text(value):
    "A number for a text such as \"1e-5\", which YAML does not read as a number."
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


Number = Annotated[float, BeforeValidator(number_from_text)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(gt=0, le=1)]
Probability = Annotated[Number, Field(gt=0, lt=1)]  # neither impossible nor certain
MOST = 10**9  # a larger count is a slip, and not all that counts could hold it
Whole = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Units = Annotated[int, Field(ge=1, le=4096)]  # of a layer
FROM_LIST = Strict(False)  # a tuple may be given as a list, as YAML does
Names = Annotated[tuple[str, ...], FROM_LIST, Field(min_length=1)]
Text = Annotated[str, Field(pattern=r'^\P{C}*$')]  # without line ends and escape codes
Grader = Annotated[str, Field(pattern='^(math-verify|xverify:.+)$')]
Models = Annotated[tuple[Text, Text], FROM_LIST]  # small and large
CHECKS = ConfigDict(strict=True, extra='forbid', allow_inf_nan=False)

# ---- errors in one line


def error_line(
    name: str,
    value,  # as it was given
    kind,  # its annotated type
    details: list,  # pydantic's errors on it, as dicts
) -> str:
    "One line: name, value, and the values allowed. For a tuple or dict it names the wrong part."
    if details[0]['type'] in ('missing', 'too_long'):  # of Annotated[tuple[A, B], ...]
        (annotated, *_) = get_args(kind)
        return f'{name} is {value!r:.80}: it should be a list of {len(get_args(annotated))}'
    depth = max(len(detail['loc']) for detail in details)
    details = [detail for detail in details if len(detail['loc']) == depth]
    part = details[0]['input']
    allowed = []
    for detail in details:
        text = detail['msg'].removeprefix('Value error, ').removeprefix('Input should be ')
        text = text.replace('a valid tuple', 'a list, such as [a, b]')
        if detail['input'] is part and text not in allowed:
            allowed.append(text)
    if type(None) in get_args(kind):
        allowed.append('None')
    hint = nearest(value, get_args(kind)) if get_origin(kind) is Literal else ''
    subject = 'it' if part is value else f'{part!r:.80}'
    return f'{name} is {value!r:.80}{hint}: {subject} should be {" or ".join(allowed)}'


@lru_cache
def adapter(kind) -> TypeAdapter:
    "What checks values of an annotated type."
    return TypeAdapter(kind, config=CHECKS)


def checked(
    name: str,  # of the value
    value,
    kind,  # its annotated type
):
    "The value, converted to its type. ValueError in one line if that is not possible."
    try:
        return adapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(error_line(name, value, kind, error.errors())) from None


# ---- sections


def plain_signature(section: type) -> inspect.Signature:
    "The signature that `help` shows: fields, plain types without the checks, and defaults."
    kinds = get_type_hints(section)
    parameters = []
    for one in fields(section):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        parameter = inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=kinds[one.name],
        )
        parameters.append(parameter)
    return inspect.Signature(parameters)


class Section:
    """A frozen record of settings: a subclass becomes a pydantic dataclass.

    Give fields by name. ValueError in one line for a wrong value or an unknown name. A notebook shows
    a section as a table of name, value and meaning. The meaning is the comment on the field.
    """

    def __init_subclass__(cls):
        dataclass(cls, frozen=True, config=CHECKS)
        check_and_set = cls.__init__
        kinds = {field.name: field.type for field in fields(cls)}

        def __init__(self, **values):
            try:
                check_and_set(self, **values)
            except ValidationError as error:
                details = error.errors()
                name = details[0]['loc'][0]
                if name not in kinds:
                    raise ValueError(f'unknown setting {name!r}{nearest(name, kinds)}') from None
                if name not in values:
                    raise ValueError(f'{name} is missing: give it a value') from None
                details = [detail for detail in details if detail['loc'][0] == name]
                line = error_line(name, values[name], kinds[name], details)
                raise ValueError(line) from None

        __init__.__qualname__ = f'{cls.__qualname__}.__init__'  # for Python's own errors
        cls.__init__ = __init__
        cls.__signature__ = plain_signature(cls)

    def _repr_markdown_(self):
        from fastcore.docments import docments

        meanings = {}
        for kind in reversed(type(self).__mro__):  # of inherited fields, too
            if is_dataclass(kind):
                meanings |= {name: text for name, text in docments(kind).items() if text}
        rows = ['| name | value | meaning |', '|---|---|---|']
        for field in fields(self):
            value = getattr(self, field.name)
            rows.append(f'| {field.name} | `{value!r}` | {meanings.get(field.name, "")} |')
        return '\n'.join(rows)


class Data(Section):
    "Which problems, and who says which answers are right."

    benchmarks: Names = ('micro-gsm', 'micro-math', 'micro-omni', 'gsm8k')
    shipped: bool = True  # read the outcomes that the package ships; false: the models draw
    data_dir: str = ''  # folder with copies of the public benchmarks; '' asks the Hub
    # problems of a benchmark that is drawn; None: all. What is shipped is always taken whole
    n_train: Count | None = None  # that routers learn from
    n_calibration: Count | None = None  # that thresholds are chosen on
    n_test: Count | None = None  # that are reported
    max_steps: Count = 50  # of a chain
    grader: Grader = 'math-verify'  # or "xverify:NAME@COMMIT", which opens vLLM
    grader_memory: Share = 0.15  # xVerify: share of the GPU's memory


class Pair(Section):
    "The small and the large model, and how they write."

    names: Models = ('micro-small', 'micro-large')
    price: str = 'gpt-4.1-mini'  # what the large model would cost behind an API; '': no Table 2
    temperature: NotNegative = 0.7  # of sampling; 0: greedy
    max_tokens: Count = 512  # of a step
    max_reply: Count = 2048  # vLLM and API: of all steps up to the end
    context: Count | None = None  # tokens of prompt and chain; None: what the models have
    small: dict = field(default_factory=dict)  # further `ModelOptions` of the small model alone
    large: dict = field(default_factory=dict)  # and of the large one, such as {memory: 0.45}
    # who checks single steps with the paper's prompt: "large"; '': a program, or nobody
    verifier: str = ''
    max_cents: NotNegative = (
        100.0  # API: never spend more, earlier runs with the same store included
    )


class Training(Section):
    "How a policy is trained."

    alpha: Probability = 0.02  # accuracy that may be lost against the large model
    estimator: Literal['exact', 'sampled'] = (
        'exact'  # every exit of a problem, or the paper's rollouts
    )
    steps: Count = 40
    batch: Count = 500  # problems a step, or all if there are fewer
    # units of the policy's layers; with the output three layers, as in the paper; (): a line
    hidden: Annotated[tuple[Units, ...], FROM_LIST] = (64, 64)
    kappa: Annotated[Number, Field(ge=0, le=0.5)] = 0.25  # threshold at the start
    eta: Positive = 0.1  # step of kappa (equation 5), times k^-decay
    decay: NotNegative = 0.6  # 0: a constant step; the theory wants a finite sum of squares
    printed_sign: bool = False  # of equation 5: a loss raises kappa
    verifier: bool = False  # in equation 5, a miss counts if a kept step is wrong (end of 4.2)
    printed: bool = False  # everything that the paper prints, see `as_printed`
    delta: Positive = 0.01  # trust region (equation 4)
    damping: Positive = 0.1  # of the Fisher matrix
    slack: NotNegative = 0.1  # share of alpha by which a step may exceed it
    # temperature of the soft choice: from, to after half of the steps
    temperature: Annotated[tuple[Positive, Positive], FROM_LIST] = (0.1, 0.03)
    rho_bar: Positive = 2.0  # clip of the importance ratios
    lr: Positive = 1e-3  # of the critics; the policy has its trust region instead


def as_printed(s: Training) -> Training:
    "Section 5.1 of the paper: rollouts, five problems a step, a constant step of kappa, the verifier."
    changes = dict(estimator='sampled', steps=1000, batch=5, decay=0.0, verifier=True, printed=True)
    return replace(s, **changes)


class Baselines(Section):
    "Which other routers are drawn."

    reward_model: str = 'micro-prm'  # of RSD and TRIM; '' leaves both out
    specreason: bool = True


class Results(Section):
    "How results are reported."

    seeds: Count = 3  # policies of each kind
    n_boot: Count = 1000  # bootstrap resamples
    processes: Count = 2  # that train and compare side by side


class Settings(Section):
    "All settings of a run."

    data: Data = Data()
    models: Pair = Pair()
    policy: Training = Training()
    baselines: Baselines = Baselines()
    results: Results = Results()


# ---- profiles

SECTIONS = {field.name: field.type for field in fields(Settings)}


def read_yaml(text: str, source: str):
    "Plain YAML. ValueError in one line for a bad text."
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'{source} is not valid YAML: {reason:.300}') from None


def changed(
    settings: Settings,
    changes: dict,  # full name, such as "policy.alpha" -> value
    source: str = '-p',  # of the changes, for error lines
) -> Settings:
    "Settings with some values replaced. ValueError names source, setting, value and allowed values."
    for full_name, value in changes.items():
        section, _, name = full_name.partition('.')
        known = {f'{key}.{field.name}' for key, kind in SECTIONS.items() for field in fields(kind)}
        if full_name not in known:
            same_field = [key for key in sorted(known) if key.endswith(f'.{full_name}')]
            hint = (
                f' (did you mean {same_field[0]!r}?)' if same_field else nearest(full_name, known)
            )
            raise ValueError(f'{source}: unknown setting {full_name!r}{hint}')
        try:
            part = replace(getattr(settings, section), **{name: value})
        except ValueError as error:
            raise ValueError(f'{source}: {section}.{error}') from None
        settings = replace(settings, **{section: part})
    if settings.policy.printed and settings.policy != as_printed(settings.policy):
        settings = replace(settings, policy=as_printed(settings.policy))
    return settings


def profile_path(profile: str) -> Path:
    "The file of a profile: a path, or the name of one of nbs/params. FileNotFoundError, with the nearest name."
    if profile.endswith('.yaml'):
        return Path(profile)
    folder = find_project().params
    path = folder / f'{profile}.yaml'
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob('*.yaml'))
        raise FileNotFoundError(
            f'no profile {profile!r}{nearest(profile, names)}; there are: {", ".join(names)}'
        )
    return path


def read_profile(profile: str, changes: dict | None = None) -> Settings:
    "The settings of a profile, with changes. ValueError in one line."
    path = profile_path(profile)
    sections = read_yaml(path.read_text('utf-8'), path.name) or {}
    if not isinstance(sections, dict):
        raise ValueError(f'{path.name} must hold sections of `name: value` lines')
    values = {}
    for section, content in sections.items():
        if section not in SECTIONS or not isinstance(content, dict):
            raise ValueError(
                f'{path.name}: {section!r} must be one of {", ".join(SECTIONS)}, with `name: value` lines'
            )
        values |= {f'{section}.{name}': value for name, value in content.items()}
    settings = changed(Settings(), values, path.name)
    return changed(settings, changes or {})
