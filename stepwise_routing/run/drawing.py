"""Draws all steps of a run, in several processes: which problems are drawn together, and who may write to a store.

Here belongs chapter 02 for a whole run. How processes start and end belongs in `run.workers`. What is drawn for a
problem belongs in `method.tree`.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..store import RolloutStore, tree_settings
from ..data.benchmarks import find_benchmark
from ..data.sources import SPLITS
from ..method.tree import collect_rollouts
from ..models.model_name import ModelName
from .config import Run
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

    def problems(self, run: Run) -> dict:  # split -> `Problem`s
        splits = {split: read_problems(run, self.benchmark, split) for split in SPLITS}
        return {split: every[self.first :: self.every] for split, every in splits.items()}

    def count(self, run: Run) -> int:
        "The number of its problems, over all splits."
        return sum(map(len, self.problems(run).values()))


def is_shared(run: Run) -> bool:
    "May several processes draw one benchmark? Yes if each can hold the models, and no model is paid."
    kinds = [ModelName.parse(name).kind for name in run.models]
    return not run.config.models.ray_workers and not any(kinds)


def draw_parts(run: Run, benchmark: str, workers: int) -> list:  # `Part`s
    "The parts of a benchmark: of about `PART` problems if several processes draw it, else one part."
    if workers == 1 or not is_shared(run):
        return [Part(benchmark)]
    n = math.ceil(count_problems(run, benchmark) / PART)
    return [Part(benchmark, i, n) for i in range(n)]


def draw_edges(run: Run, part: Part, backends) -> dict:
    """Draw all that the outcome tables of a part need.

    Returns the edges and tokens drawn now, all edges in the store, and the US cents spent so far.
    """
    problems = part.problems(run)
    with open_tree(run, part.benchmark, backends, lent=part.every > 1) as tree:
        collect_rollouts(problems['train'], tree, run.config.data.samples, part=part.name)
        held_out = problems['calibration'] + problems['test']
        collect_rollouts(held_out, tree, redraws=run.config.data.redraws, part=part.name)
        return dict(
            benchmark=part.benchmark,
            problems=sum(map(len, problems.values())),
            drawn_now=tree.drawn,
            tokens_now=tree.tokens,
            in_store=len(tree.store),
            cents=getattr(backends[-1], 'spent', 0.0) if backends else 0.0,
        )


@contextmanager
def lent_stores(
    run: Run,
    benchmarks: list,  # those that several processes draw
    opener,  # of `draw_all`
):
    """During a `with` block, hold the right to write to stores and lend it to the processes that draw.

    Each process writes a chain as soon as it is drawn, in one transaction. So an interrupt loses no
    complete chain, and a later run finds all of them, with any number of processes.
    """
    with ExitStack() as stores:
        if benchmarks:
            with opener(run) as backends:
                for b in benchmarks:
                    settings = tree_settings(b, backends, find_benchmark(b).draws)
                    stores.enter_context(RolloutStore(run.files.rollouts(b), settings))
        yield


def whole_benchmarks(parts: list) -> list:  # of dicts as of `draw_edges`
    "The sums over the parts of each benchmark."
    sums = {}
    for part in parts:
        key = part['benchmark']
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
    opener=open_backends,  # run -> its models, for the time of a `with` block
) -> list:  # a dict as of `draw_edges` per benchmark
    "Draw all that the outcome tables of a run need, in `models.workers` processes."

    def work(run, parts):
        with opener(run) as backends:
            return [draw_edges(run, part, backends) for part in parts]

    def size(run, part):
        return part.count(run)

    workers = worker_count(run)
    parts = {b: draw_parts(run, b, workers) for b in run.benchmarks}
    lent = [b for b in run.benchmarks if len(parts[b]) > 1]
    with lent_stores(run, lent, opener):
        done = side_by_side(run, work, 'rollouts', size, parts, workers)
    return whole_benchmarks(done)
