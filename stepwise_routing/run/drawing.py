"""What a run draws, in as many processes as there are: which problems are drawn together, and who writes to a store.

Here belongs chapter 02 of a whole run. How processes start and end belongs in `run.workers`, what is drawn of a
problem in `method.tree`.
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

# Problems that a process draws at a time. Small parts end together, large ones fill the engine's batch.
# Measured on the micro models, with one thread of a busy machine: parts of micro-math with 25 to 190
# problems were drawn at 25 to 30 problems per processor second, with 13 problems at 24. A part of 60
# took 1.4 to 12 seconds, and a process takes 2 to 6 seconds, once, to load models and kernels.
PART = 60


@dataclass(frozen=True)
class Part:
    "Every so-many-th problem of each split of a benchmark: its parts are much alike."

    benchmark: str
    first: int = 0  # its first problem
    every: int = 1  # the distance to the next one: how many parts the benchmark has

    @property
    def name(self) -> str:
        "For who watches."
        if self.every == 1:
            return ''
        return f', part {self.first + 1} of {self.every}'

    def problems(self, setting: Setting) -> dict:  # split -> `Problem`s
        splits = {split: read_problems(setting, self.benchmark, split) for split in SPLITS}
        return {split: every[self.first :: self.every] for split, every in splits.items()}

    def count(self, setting: Setting) -> int:
        "How many problems it has, over all splits."
        return sum(map(len, self.problems(setting).values()))


def is_shared(setting: Setting) -> bool:
    "May several processes draw one benchmark? If each of them can hold the models, and nobody is paid."
    kinds = [ModelName.parse(name).kind for name in setting.models]
    return setting.name == 'open' and setting.run.config.models.engine == 'local' and not any(kinds)


def draw_parts(setting: Setting, benchmark: str, workers: int) -> list:  # `Part`s
    "A benchmark in parts of about `PART` problems, if several processes draw it."
    if workers == 1 or not is_shared(setting):
        return [Part(benchmark)]
    n = math.ceil(count_problems(setting, benchmark) / PART)
    return [Part(benchmark, i, n) for i in range(n)]


def draw_edges(setting: Setting, part: Part, backends) -> dict:
    """Draw all that the outcome tables of a part need.

    Returns edges and tokens of now, edges in the store, and US cents so far.
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
    """Keep the right to write to stores for the processes that draw, for the time of a `with` block.

    Each process writes a chain when it is drawn, in one transaction. So an interrupt loses no chain
    that is complete, and whoever goes on, in any number of processes, finds all of them.
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
        # the part that ended last has counted the edges of all
        sums[key]['in_store'] = max(sums[key]['in_store'], part['in_store'])
    return list(sums.values())


def draw_all(
    run: Run,
    opener=open_backends,  # setting -> its models, for the time of a `with` block
) -> list:  # a dict as of `draw_edges` per setting and benchmark
    "Draw all that the outcome tables of a run need, in as many processes as `models.workers` says."

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
