"""Estimates before a run: its calls and costs, and what this machine lacks

Here belongs all that can be told about a run before it starts, without a call to a server. The money
that was spent belongs in `models.ledger`.
"""

import os
import re
import shutil
import subprocess
from collections import namedtuple
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..base.records import PRICES
from ..base.store import RolloutStore
from ..base.tools import install_line
from ..data.benchmarks import find_benchmark, load_problems, of_benchmark, step_limit
from ..data.sources import SPLITS
from ..models.model_name import ModelName
from ..models.names import check_shares
from ..models.vllm import vllm_on_cpu

# of a benchmark: steps and tokens of a small chain, tokens of a large chain, tokens of the prompt,
# numbers of problems in train, calibration and test
Load = namedtuple('Load', 'steps small large prompt counts')

SHIPPED_PROBLEMS = (1000, 1000, 1000)

LOADS = {
    'micro-gsm': Load(4.28, 51, 50, 68, SHIPPED_PROBLEMS),
    'micro-math': Load(5.57, 78, 77, 48, SHIPPED_PROBLEMS),
    'micro-omni': Load(7.4, 126, 124, 62, SHIPPED_PROBLEMS),
    'gsm8k': Load(324 / 53, 324, 316, 89, (5967, 1506, 1319)),
    'math500': Load(607 / 53, 607, 650, 99, (5986, 1500, 500)),
    'omnimath': Load(907 / 53, 907, 969, 114, (1736, 868, 1736)),
}

QUESTION_TOKENS = 20  # tokens that ask a model to go on, or to give a score
STORED_BYTES = 45  # bytes of a token in a store: text, id, log-probabilities, logits
MICRO_BYTES = 3e6  # of a micro model

# of one model: its calls, the tokens that it writes, and US cents for both
Work = namedtuple('Work', 'setting benchmark model problems calls tokens cents')


def _walks(setting, n_calibration, n_test) -> int:
    "The number of chains that routers draw on walks, besides those of the outcome tables."
    baselines = setting.run.config.baselines
    walkers = baselines.steer_next + baselines.specreason + bool(baselines.reward_model)
    walks_of_test = 2 if baselines.walk_thresholds == 'curve' else 1
    return walkers * (2 * n_calibration + n_test * walks_of_test)


def _problem_counts(setting, benchmark) -> list:  # of train, calibration and test
    "The number of problems that a setting asks for, per split."
    counts = []
    for split, available in zip(SPLITS, LOADS[benchmark].counts):
        n = of_benchmark(setting.n(split), benchmark, f'n_{split}')
        counts.append(available if n is None else n)
    return counts


def _model_loads(setting, benchmark):
    "(Number of problems, (calls, tokens written) of the small model, the same of the large model)."
    load = LOADS[benchmark]
    counts = _problem_counts(setting, benchmark)
    n = sum(counts)
    walks = _walks(setting, *counts[1:])
    small = (n + walks * load.steps, (n + walks) * load.small)
    # the large model answers every prefix of a small chain; half of the chain is left on average
    large_tokens = (n * (load.steps + 1) / 2 + walks) * load.large
    large = ((n + walks) * load.steps, large_tokens)
    return n, (small, large)


def _cents(setting, benchmark, model, calls, tokens) -> float:
    "The cost of a model's calls, in US cents. 0 if the model is not paid."
    api = setting.run.config.api
    price = PRICES.get(api.billed) if api.models else None
    is_paid = setting.name == 'api' and ModelName.parse(model).is_paid
    if price is None or not is_paid:
        return 0.0
    load = LOADS[benchmark]
    tokens_read = calls * (load.prompt + QUESTION_TOKENS + load.small / 2)
    return (tokens * price.output + tokens_read * price.input) / 1e4


def estimate(run) -> list:
    "The `Work` of each setting, benchmark and model of a run, in their order."
    works = []
    for setting in run.settings:
        for benchmark in setting.benchmarks:
            step_limit(run.config.data.max_steps, benchmark)  # ValueError for an unknown benchmark
            if benchmark not in LOADS:
                continue
            n, loads = _model_loads(setting, benchmark)
            for model, (calls, tokens) in zip(setting.models, loads):
                cents = _cents(setting, benchmark, model, calls, tokens)
                works.append(Work(setting.name, benchmark, model, n, calls, tokens, cents))
    return works


def _short(name) -> str:
    "A model's name without its source, owner and revision."
    return name.split('@')[0].split('/')[-1].split(':')[-1]


def _weights(name) -> tuple:  # (bytes, are they on this machine?)
    """The size of a model. For a model on the Hub it is read from the name, at two bytes per parameter.
    ValueError if there is no such model."""
    from huggingface_hub import try_to_load_from_cache

    plain, _, revision = name.partition('@')
    if plain.startswith('micro-'):
        return MICRO_BYTES, True
    if Path(plain).is_dir():
        return sum(path.stat().st_size for path in Path(plain).glob('*.safetensors')), True
    if not re.fullmatch(r'\w[\w.-]*/[\w.-]+', plain):
        raise ValueError(f'the model {plain!r} is neither a folder nor a name on the Hub')
    cache = os.environ.get('HF_HUB_CACHE')
    cached = try_to_load_from_cache(plain, 'config.json', cache, revision or None)
    billions = re.search(r'(?<![\w.])(\d+(?:\.\d+)?)B(?!\w)', plain)
    size = 2e9 * float(billions[1]) if billions else 0.0
    return size, isinstance(cached, str)


def _local_models(run) -> dict:  # name -> share of the GPU's memory in vLLM; 0: not in vLLM
    "All models that a run loads on this machine."
    config = run.config
    local = {}
    for setting in run.settings:
        shares = check_shares(setting.models, config.models.memory_shares)
        for name, share in zip(setting.models, shares):
            model = ModelName.parse(name)
            if model.is_here:
                local[str(replace(model, kind=''))] = share or 0
    judge = config.data.grader.removeprefix('xverify:')
    if judge != 'math-verify' and '://' not in judge:
        local[judge] = config.data.grader_memory
    if config.baselines.reward_model:
        local[config.baselines.reward_model] = 0
    return local


def has_package(package: str) -> bool:
    "Can this package be imported?"
    return find_spec(package) is not None


def _is_public(benchmark: str) -> bool:
    "Do its problems come from a public set on the Hub?"
    source = find_benchmark(benchmark).source
    return source is not None and source.is_public


def _package_needs(run, served) -> list:
    "Lines about missing packages and keys. `served`: the models that vLLM runs here."
    config = run.config
    lines = []
    if served and not has_package('vllm'):
        lines.append(f"vLLM for {served[0]} (Linux): {install_line('gpu')}")
    if config.models.engine == 'ray' and not has_package('ray'):
        lines.append(f"Ray for engine=ray: {install_line('ray')}")
    public = [b for b in config.data.benchmarks if _is_public(b)]
    if public and not config.data.data_dir and not has_package('datasets'):
        lines.append(f"the Hub for {public[0]}: {install_line('hub')}, or data_dir=FOLDER")
    kinds = [ModelName.parse(name).kind for setting in run.settings for name in setting.models]
    if 'openai' in kinds and not os.environ.get('OPENAI_API_KEY'):
        lines.append('an API key in the environment variable OPENAI_API_KEY')
    return lines


def _money_needs(run, works) -> list:
    "Lines about a missing price or too low a cap. `works`: the estimate."
    api = run.config.api
    lines = []
    if api.models and api.billed not in PRICES:
        lines.append(f'a price: {api.billed} is none of {", ".join(PRICES)}')
    cents = sum(work.cents for work in works)
    if cents > api.max_cents:
        lines.append(f'{cents:,.0f} cents by this estimate: api.max_cents is {api.max_cents:g}')
    return lines


def _data_needs(run) -> list:
    "Lines about missing problems. Those on the Hub are not checked, as nothing is downloaded."
    data_dir = run.config.data.data_dir
    lines = []
    for setting in run.settings:
        for benchmark in setting.benchmarks:
            is_public = _is_public(benchmark)
            if is_public and not data_dir:
                continue
            folder = data_dir if is_public else None
            try:
                for split in SPLITS:
                    load_problems(benchmark, split, setting.n(split), data_dir=folder)
            except (OSError, ValueError) as e:
                lines.append(f'{benchmark}: {e}')
    return lines


def _disk_needs(run, works) -> list:
    "Lines about missing space on the disk, for the models and for the store."
    wanted = STORED_BYTES * sum(work.tokens for work in works)
    for name in _local_models(run):
        size, is_here = _weights(name)
        if not is_here:
            wanted += size
    folder = run.store
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if wanted > free:
        return [f'{wanted / 1e9:.0f} GB of disk, and {free / 1e9:.0f} GB are free']
    return []


def _gpu_gib() -> float | None:
    "Memory of the first GPU in GiB; None if nvidia-smi finds none."
    command = ('nvidia-smi', '--query-gpu=memory.total', '--format=csv,noheader,nounits')
    try:
        reported = subprocess.check_output(
            command, text=True, timeout=20, stderr=subprocess.DEVNULL
        )
        return float(reported.split()[0]) / 1024
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def _gpu_needs(shares, served) -> list:  # `shares`: of `_local_models`
    "Lines about a GPU that is missing or too small."
    gib = _gpu_gib()
    if gib is None:
        return [f'a GPU for {served[0]}: nvidia-smi finds none']
    unshared = 1 - sum(shares.values())
    lines = []
    for name, share in shares.items():
        room = gib * (share or unshared)
        weights = _weights(name)[0] / 2**30
        if room < weights + 1:
            lines.append(
                f'more memory for {_short(name)}: memory_shares leave it {room:.0f} of {gib:.0f} '
                f'GiB, less than its {weights:.0f} GiB of weights and 1 GiB for its chains'
            )
    return lines


def _needs(run) -> list:
    shares = _local_models(run)
    works = estimate(run)
    served = [_short(name) for name, share in shares.items() if share]
    lines = _package_needs(run, served) + _money_needs(run, works)
    lines += _data_needs(run) + _disk_needs(run, works)
    on_cpu = has_package('vllm') and vllm_on_cpu()
    if served and run.config.models.engine != 'ray' and not on_cpu:
        lines += _gpu_needs(shares, served)
    return lines


def needs(run) -> list:
    "All that keeps a run from starting, a line each."
    try:
        lines = _needs(run)
    except ValueError as e:
        lines = [str(e)]
    return [f'needs {line}' for line in dict.fromkeys(lines)]


def _stored(setting, benchmark) -> int:
    "The number of problems that the large model alone has answered in the store. 0 without a store."
    try:
        with RolloutStore(setting.files.rollouts(benchmark), readonly=True) as store:
            keys = store.keys()
    except (OSError, ValueError):
        return 0
    alone = [1 for _, sample, path, model in keys if (sample, path, model) == (0, '', 1)]
    return len(alone)


def report(run) -> list:  # of lines
    "The estimate as a table: a row for each setting, benchmark and model, and the totals."
    import pandas as pd

    stored = {(s.name, b): _stored(s, b) for s in run.settings for b in s.benchmarks}
    rows = {}
    for work in estimate(run):
        done = min(stored[work.setting, work.benchmark], work.problems)
        to_do = 1 - done / work.problems
        name = f'{work.setting} {work.benchmark} {_short(work.model)}'
        new = (to_do * work.calls, to_do * work.tokens / 1e6, to_do * work.cents)
        rows[name] = (work.problems, done, *new)
    table = pd.DataFrame(rows, ['problems', 'stored', 'calls', 'M tokens', 'cents']).T
    table.loc['all'] = table.sum() / [2, 2, 1, 1, 1]  # both models see the same problems
    has_bill = table['cents'].any()
    if not has_bill:
        del table['cents']
    formats = dict.fromkeys(table, '{:,.0f}'.format) | {'M tokens': '{:,.1f}'.format}
    lines = ['estimate for what is not stored (stepwise_routing/run/needs.py)']
    lines += table.to_string(formatters=formats).split('\n')
    if has_bill:
        cap = run.config.api.max_cents
        lines.append(f'never more than max_cents = {cap:g}; a local server is free')
    return lines
