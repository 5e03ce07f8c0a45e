"""Before a GPU is rented or a key charged: expected calls, tokens and cents, and what this machine lacks"""

import os
import re
import shutil
import subprocess
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

from ..base.records import PRICES
from ..base.store import RolloutStore
from ..base.tools import install_line
from ..data.benchmarks import SOURCES, SPLITS, load_problems, of_benchmark
from ..models.names import check_shares, model_kind
from ..models.vllm import vllm_on_cpu

# steps and tokens of a small chain, tokens of a large one and of the prompt, problems in train, calibration and test
Load = namedtuple('Load', 'steps small large prompt counts', defaults=[(0, 0, 0)])

LOADS = {
    'micro-gsm': Load(4.25, 51, 50, 68),
    'micro-math': Load(5.15, 71, 70, 48),
    'micro-omni': Load(7.5, 129, 127, 62),
    'gsm8k': Load(324 / 53, 324, 316, 89, (5967, 1506, 1319)),
    'math500': Load(607 / 53, 607, 650, 99, (5986, 1500, 500)),
    'omnimath': Load(907 / 53, 907, 969, 114, (1736, 868, 1736)),
}

Work = namedtuple(
    'Work', 'setting benchmark model problems calls tokens cents'
)  # of one model: tokens written


def _walks(setting, held_out: int, test: int) -> int:  # problems of calibration and test
    "Chains that walking routers draw besides the outcome tables."
    b = setting.run.config.baselines
    walkers = b.steer_next + b.specreason + bool(b.reward_model)
    return walkers * (2 * held_out + test * (1 + (b.walk_thresholds == 'all')))


def estimate(run) -> list:
    "The `Work` that a run will ask of its models: settings, benchmarks and models in their order."
    out = []
    price = PRICES.get(run.config.api.models and run.config.api.billed)
    for s, b in ((s, b) for s in run.settings for b in s.benchmarks if b in LOADS):
        x = LOADS[b]
        asked = [of_benchmark(s.n(split), b, f'n_{split}') for split in SPLITS]
        counts = [every if n is None else n for n, every in zip(asked, x.counts)]
        n = sum(counts)
        w = _walks(s, *counts[1:])
        calls = (n + w * x.steps, (n + w) * x.steps)
        tokens = ((n + w) * x.small, (n * (x.steps + 1) / 2 + w) * x.large)
        for model, c, t in zip(s.models, calls, tokens):
            paid = price and s.name == 'api' and model.startswith(('openai:', 'served:'))
            read = c * (x.prompt + 20 + x.small / 2)  # 20 tokens ask to go on, or for a score
            out.append(
                Work(
                    s.name,
                    b,
                    model,
                    n,
                    c,
                    t,
                    (t * price.output + read * price.input) / 1e4 if paid else 0.0,
                )
            )
    return out


def _short(name: str) -> str:
    return name.split('@')[0].split('/')[-1].split(':')[-1]  # without source, owner and revision


def _weights(name: str) -> tuple:  # (bytes, are they on this machine?)
    "How large a model is; of one of the Hub by its name, two bytes a parameter. ValueError where it is nowhere."
    from huggingface_hub import try_to_load_from_cache

    plain, _, revision = name.partition('@')
    if plain.startswith('micro-'):
        return 3e6, True
    if Path(plain).is_dir():
        return sum(p.stat().st_size for p in Path(plain).glob('*.safetensors')), True
    if not re.fullmatch(r'\w[\w.-]*/[\w.-]+', plain):
        raise ValueError(f'the model {plain!r}: no such folder, and no name on the Hub')
    here = try_to_load_from_cache(
        plain, 'config.json', os.environ.get('HF_HUB_CACHE'), revision or None
    )
    return 2e9 * float(
        re.findall(r'(?<![\w.])(\d+(?:\.\d+)?)B(?!\w)|$', plain)[0] or 0
    ), isinstance(here, str)


def _local_models(run) -> dict:  # name -> share of the GPU's memory in vLLM; 0: not in vLLM
    "All models that a run loads on this machine."
    c = run.config
    out = {}
    for s in run.settings:
        for name, share in zip(s.models, check_shares(s.models, c.models.memory_shares)):
            kind, rest, revision = model_kind(name)
            if kind not in ('openai', 'vllm-server'):
                out[f'{rest}@{revision}' if revision else rest] = share or 0
    judge = c.data.grader.removeprefix('xverify:')
    if judge != 'math-verify' and '://' not in judge:
        out[judge] = c.data.grader_memory
    if c.baselines.reward_model:
        out[c.baselines.reward_model] = 0
    return out


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _package_needs(run, served):
    "Packages and keys that are not there; `served` is what vLLM runs here."
    c = run.config
    hub = [b for b in run.config.data.benchmarks if b in SOURCES and not run.config.data.data_dir]
    if served and not _has('vllm'):
        yield f"vLLM for {served[0]} (Linux): {install_line('gpu')}"
    if c.models.engine == 'ray' and not _has('ray'):
        yield f"Ray for engine=ray: {install_line('ray')}"
    if hub and not _has('datasets'):
        yield f"the Hub for {hub[0]}: {install_line('hub')}, or data_dir=FOLDER"
    if any(m.startswith('openai:') for s in run.settings for m in s.models) and not os.environ.get(
        'OPENAI_API_KEY'
    ):
        yield 'an API key in the environment variable OPENAI_API_KEY'


def _data_needs(run, work):
    "Prices, money, data and disk that are not there; `work` is the estimate."
    c = run.config
    bill = sum(w.cents for w in work)
    if c.api.models and c.api.billed not in PRICES:
        yield f'a price: {c.api.billed} is none of {", ".join(PRICES)}'
    if bill > c.api.max_cents:
        yield f'{bill:,.0f} cents by this estimate: api.max_cents is {c.api.max_cents:g}'
    for s, b in (
        (s, b) for s in run.settings for b in s.benchmarks if c.data.data_dir or b not in SOURCES
    ):
        try:
            [
                load_problems(b, x, s.n(x) and 1, data_dir=b in SOURCES and c.data.data_dir)
                for x in SPLITS
            ]
        except (OSError, ValueError) as e:
            yield f'{b}: {e}'
    wanted = sum(size for size, here in map(_weights, _local_models(run)) if not here)
    wanted += 45 * sum(
        w.tokens for w in work
    )  # bytes of a store: text, ids, log-probabilities, logits
    free = shutil.disk_usage(next(p for p in (run.store, *run.store.parents) if p.exists())).free
    if wanted > free:
        yield f'{wanted / 1e9:.0f} GB of disk, and {free / 1e9:.0f} GB are free'


def _gpu_needs(shares, served):
    "A GPU that is missing or too small."
    command = 'nvidia-smi', '--query-gpu=memory.total', '--format=csv,noheader,nounits'
    try:
        gib = (
            float(
                subprocess.check_output(
                    command, text=True, timeout=20, stderr=subprocess.DEVNULL
                ).split()[0]
            )
            / 1024
        )
    except (OSError, IndexError, subprocess.SubprocessError):
        return [f'a GPU for {served[0]}: nvidia-smi finds none']
    rooms = {
        name: (gib * (share or 1 - sum(shares.values())), _weights(name)[0] / 2**30)
        for name, share in shares.items()
    }
    return [
        f'more memory for {_short(name)}: memory_shares leave it {room:.0f} of {gib:.0f} GiB, less than its '
        f'{size:.0f} GiB of weights and 1 GiB for its chains'
        for name, (room, size) in rooms.items()
        if room < size + 1
    ]


def needs(run) -> list:
    "What keeps a run from starting, one line each."
    try:
        shares = _local_models(run)
        served = [_short(name) for name, share in shares.items() if share]
        lines = [*_package_needs(run, served), *_data_needs(run, estimate(run))]
        on_gpu = (
            served and run.config.models.engine != 'ray' and not (_has('vllm') and vllm_on_cpu())
        )
        if on_gpu:
            lines += _gpu_needs(shares, served)
    except ValueError as e:
        lines = [str(e)]
    return [f'needs {x}' for x in dict.fromkeys(lines)]


def _stored(setting, benchmark) -> int:  # problems; 0 without a store
    try:
        with RolloutStore(setting.files.rollouts(benchmark), readonly=True) as store:
            edges = store.keys()
    except (OSError, ValueError):
        return 0
    return sum(
        edge[1:] == (0, '', 1) for edge in edges
    )  # (problem, sample, path, model): the large model alone


def report(run) -> list:  # of lines
    "The estimate as a table: a row for every setting, benchmark and model, and the totals."
    import pandas as pd

    rows = {}
    held = {(s.name, b): _stored(s, b) for s in run.settings for b in s.benchmarks}
    for w in estimate(run):
        stored = min(held[w.setting, w.benchmark], w.problems)
        new = 1 - stored / w.problems
        new_work = new * w.calls, new * w.tokens / 1e6, new * w.cents
        rows[f'{w.setting} {w.benchmark} {_short(w.model)}'] = w.problems, stored, *new_work
    table = pd.DataFrame(rows, ['problems', 'stored', 'calls', 'M tokens', 'cents']).T
    table.loc['all'] = table.sum() / [2, 2, 1, 1, 1]  # both models see the same problems
    if not table['cents'].any():
        del table['cents']
    show = {k: '{:,.1f}'.format if k == 'M tokens' else '{:,.0f}'.format for k in table}
    lines = [
        'estimate for what is not stored (nbs/run/needs.ipynb)',
        *table.to_string(formatters=show).split('\n'),
    ]
    cap = f'never more than max_cents = {run.config.api.max_cents:g}; a local server is free'
    return lines + [cap] * ('cents' in table)
