"""Draws all steps of a run, in several processes: which problems are drawn together, and who may write to a store.

Here belongs chapter 02 for a whole run. How processes start and end belongs in `run.workers`. What is drawn for a
problem belongs in `method.tree`.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..base.store import RolloutStore, tree_settings
from ..data.benchmarks import find_benchmark
from ..data.sources import SPLITS
from ..method.tree import collect_rollouts
from ..models.model_name import ModelName
from .config import Run, Setting
from .stages import count_problems, open_backends, open_tree, read_problems
from .workers import side_by_side, worker_count

# Problems that a process draws at a time. Small parts end at about the same time; large ones fill the engine's batch.
# Measured on the micro models, with one thread of a busy machine: parts of micro-math with 25 to 190
# problems were drawn at 25 to 30 problems per processor second, with 13 problems at 24. A part of 60
# took 1.4 to 12 seconds, and a process takes 2 to 6 seconds, once, to load models and kernels.
PART = 60


@dataclass(frozen=True)
class Part:
    "A part of a benchmark: every n-th problem of each split, so that all parts take about as long."

    benchmark: str
    first: int = 0  # index of its first problem
    every: int = 1  # distance to its next problem: the number of parts of the benchmark

    @property
    def name(self) -> str:
        "The name of the part in the lines about progress."
        if self.every == 1:
            return ''
        return f', part {self.first + 1} of {self.every}'

    def problems(self, setting: Setting) -> dict:  # split -> `Problem`s
        splits = {split: read_problems(setting, self.benchmark, split) for split in SPLITS}
        return {split: every[self.first :: self.every] for split, every in splits.items()}

    def count(self, setting: Setting) -> int:
        "The number of its problems, over all splits."
        return sum(map(len, self.problems(setting).values()))


def is_shared(setting: Setting) -> bool:
    "May several processes draw one benchmark? Yes if each can hold the models, and no model is paid."
    kinds = [ModelName.parse(name).kind for name in setting.models]
    return setting.name == 'open' and setting.run.config.models.engine == 'local' and not any(kinds)


def draw_parts(setting: Setting, benchmark: str, workers: int) -> list:  # `Part`s
    "The parts of a benchmark: of about `PART` problems if several processes draw it, else one part."
    if workers == 1 or not is_shared(setting):
        return [Part(benchmark)]
    n = math.ceil(count_problems(setting, benchmark) / PART)
    return [Part(benchmark, i, n) for i in range(n)]


def draw_edges(setting: Setting, part: Part, backends) -> dict:
    """Draw all that the outcome tables of a part need.

    Returns the edges and tokens drawn now, all edges in the store, and the US cents spent so far.
    """
    problems = part.problems(setting)
    with open_tree(setting, part.benchmark, backends, lent=part.every > 1) as tree:
        collect_rollouts(problems['train'], tree, setting.part.samples, part=part.name)
        held_out = problems['calibration'] + problems['test']
        collect_rollouts(held_out, tree, redraws=setting.part.redraws, part=part.name)
        return dict(
            setting=setting.name,
            benchmark=part.benchmark,
            problems=sum(map(len, problems.values())),
            drawn_now=tree.drawn,
            tokens_now=tree.tokens,
            in_store=len(tree.store),
            cents=getattr(backends[-1], 'spent', 0.0) if backends else 0.0,
        )


@contextmanager
def lent_stores(
    setting: Setting,
    benchmarks: list,  # those that several processes draw
    opener,  # of `draw_all`
):
    """During a `with` block, hold the right to write to stores and lend it to the processes that draw.

    Each process writes a chain as soon as it is drawn, in one transaction. So an interrupt loses no
    complete chain, and a later run finds all of them, with any number of processes.
    """
    with ExitStack() as stores:
        if benchmarks:
            with opener(setting) as backends:
                for b in benchmarks:
                    settings = tree_settings(b, backends, find_benchmark(b).draws)
                    stores.enter_context(RolloutStore(setting.files.rollouts(b), settings))
        yield


def whole_benchmarks(parts: list) -> list:  # of dicts as of `draw_edges`
    "The sums over the parts of each benchmark."
    sums = {}
    for part in parts:
        key = part['setting'], part['benchmark']
        if key not in sums:
            sums[key] = dict(part)
            continue
        for name in ('problems', 'drawn_now', 'tokens_now'):
            sums[key][name] += part[name]
        # the part that ended last has counted the edges of all parts
        sums[key]['in_store'] = max(sums[key]['in_store'], part['in_store'])
    return list(sums.values())


def draw_all(
    run: Run,
    opener=open_backends,  # setting -> its models, for the time of a `with` block
) -> list:  # a dict as of `draw_edges` per setting and benchmark
    "Draw all that the outcome tables of a run need, in `models.workers` processes."

    def work(setting, parts):
        with opener(setting) as backends:
            return [draw_edges(setting, part, backends) for part in parts]

    def size(setting, part):
        return part.count(setting)

    workers = worker_count(run)
    parts = {}
    with ExitStack() as stack:
        for setting in run.settings:
            for b in setting.benchmarks:
                parts[setting.name, b] = draw_parts(setting, b, workers)
            lent = [b for b in setting.benchmarks if len(parts[setting.name, b]) > 1]
            stack.enter_context(lent_stores(setting, lent, opener))
        done = side_by_side(run, work, 'rollouts', size, parts, workers)
    return whole_benchmarks(done)
