"""The entries of a calibrated router's config.json: which are allowed, and which are given away.

Here belong the checks of a folder that may come from anybody. Saving and reading a policy belong in
`method.policy`. `own.calibrate` writes the entries. `own.export` gives them away.
"""

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..base.records import READINGS, UNITS
from ..base.settings import Count, Policy, checked
from ..base.tools import check_links, check_new_folder, write_file
from ..method.certain import TARGETS, Calibration
from ..models.pair import MOST_MODELS
from .card import CLASSES, LARGE_ALONE

PUBLIC = 'model_class', 'costs', 'on_escalate', 'unit', 'n_train', 'seed', 'calibration'

SHARE = Annotated[float, Field(ge=0, le=1)]
CALIBRATION = dict(  # the kinds of its entries
    kappa=Annotated[float, Field(ge=-1, le=1)],
    target=Literal[TARGETS],
    alpha=Annotated[float, Field(gt=0, lt=1)],
    met=bool,
    n=Count,
    accuracy=SHARE,
    large=SHARE,
    miss=SHARE,
    bound=SHARE,
    cost=Annotated[float, Field(ge=0)],
)


def _are_names(values, kinds, n) -> bool:
    "Is this a list of n values of these kinds?"
    are_n = isinstance(values, list) and len(values) == n
    return are_n and all(isinstance(value, kinds) for value in values)


def _check_calibration(folder, entries) -> None:
    "ValueError naming the first of the fields of a `Calibration` that is missing or out of its range."
    for name, kind in CALIBRATION.items():
        try:
            checked(f'calibration.{name} in {folder}/policy/config.json', entries.get(name), kind)
        except ValueError as error:
            raise ValueError(f'{error}: call calibrate again, or take another router') from None


def check_entries(
    folder,  # for the message
    config: dict,  # of a policy that `load_policy` has read
) -> None:
    "ValueError naming an entry that `calibrate` does not write."
    n = config['n_models']
    weights = config.get('model_weights', [None] * n)
    fits = dict(
        on_escalate=config.get('on_escalate') in READINGS,
        unit=config.get('unit') in UNITS,
        mode=config['mode'] == 'absorbing' and 2 <= n <= MOST_MODELS,
        model_class=config.get('model_class') in [*CLASSES, LARGE_ALONE],
        models=_are_names(config.get('models'), str, n),
        model_weights=_are_names(weights, (str, type(None)), n),
        costs=isinstance(config.get('costs'), dict),
        n_train=type(config.get('n_train')) is int,
        calibration=isinstance(config.get('calibration'), dict),
        draws=isinstance(config.get('draws', {}), dict),
    )
    for name, fit in fits.items():
        if not fit:
            raise ValueError(
                f'{folder}: {name} in policy/config.json is not what calibrate writes; '
                'call calibrate again, or take another router'
            )
    _check_calibration(folder, config['calibration'])


def check_draws(
    folder,  # for the message
    config: dict,  # that `check_entries` accepts
    name: str,  # of the benchmark
    draws: dict,  # what it says here, see `Benchmark.draws`
) -> None:
    "ValueError if questions would be asked, or steps cut or scored, in another way than for the policy."
    if config.get('draws', draws) != draws:  # a router of an earlier version has no such entry
        raise ValueError(
            f'{folder}: the policy was trained with another prompt, other steps or other scored '
            f'tokens: register the benchmark {name!r} here as it was for collect'
        )


def check_not_exported(folder) -> None:
    "ValueError for a folder of `own.export`: it has no problems and no draws."
    folder = Path(folder)
    made_by_collect = (folder / 'problems.jsonl', folder / 'draws.db')
    if (folder / 'policy').exists() and not any(file.exists() for file in made_by_collect):
        raise ValueError(
            f'{folder} is a router that was exported, without problems and draws: ask it (route, '
            'open_router, serve), or name the folder of collect'
        )


def calibrated_policy(folder):
    "The deployed policy of a folder. ValueError if none is deployed yet, or if it may not be used."
    from ..method.policy import load_policy

    folder = Path(folder)
    is_trained = (folder / 'candidates.json').is_file()
    if is_trained and not (folder / 'policy').is_dir():
        raise ValueError(f'{folder}: no router is deployed yet; call calibrate')
    is_collected = (folder / 'draws.db').is_file()
    if is_trained and not is_collected:
        raise ValueError(
            f'{folder}: draws.db is missing; call collect again, with the same questions'
        )
    if is_collected:  # one from a hub's cache may be links
        check_links(folder)
    policy = load_policy(folder / 'policy')
    if 'model_class' not in policy.config:
        raise ValueError(f'{folder}: the router is of another version; train and calibrate again')
    check_entries(folder, policy.config)
    return policy


def public_entries(
    config: dict,  # that `check_entries` accepts
) -> dict:
    "The entries that a stranger needs. Unknown entries are left out, as they may hold anything."
    names = [*PUBLIC, *(field.name for field in fields(Policy))]
    entries = {name: config[name] for name in names if name in config}
    points = entries['calibration']
    entries['calibration'] = {field.name: points[field.name] for field in fields(Calibration)}
    costs = entries['costs']
    entries['costs'] = {name: costs[name] for name in CLASSES if name in costs}
    return entries


def write_exported(
    out: Path,  # new or empty folder
    policy,
    entries: dict,  # of its config.json
    texts: dict,  # name of a file -> text
) -> list:  # names of the files
    "Write a policy and texts into a folder, all or nothing. ValueError if the folder is not empty."
    from ..method.policy import save_policy

    check_new_folder(out)
    try:
        save_policy(out / 'policy', policy, **entries | dict(kappa=policy.kappa))
        for name, text in texts.items():
            write_file(out / name, text)
    except OSError:  # a full disk leaves no half router
        shutil.rmtree(out, ignore_errors=True)
        raise
    return sorted(path.relative_to(out).as_posix() for path in out.rglob('*') if path.is_file())
