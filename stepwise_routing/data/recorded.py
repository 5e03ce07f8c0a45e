"""Recorded outcomes: the steps of a real pair of language models, replayed without the models.

Here belongs reading the file that the package ships. nbs/labs/recorded_pair tells how it was made.
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..records import ModelSpec, Problem, Step
from ..util import PACKAGE
from .sources import SPLITS, unpacked_lines

FOLDER = PACKAGE / 'recorded'
MAX_STEPS = {'gsm8k': 16}  # what is recorded -> most steps of a chain, the limit when it was drawn
SUFFIX = '-recorded'  # end of the name of a recorded benchmark


@dataclass(frozen=True)
class Replayed:
    "A recorded model behind the contract of `models.base`: it looks up what it wrote."

    spec: ModelSpec
    index: int
    edges: dict  # (problem id, sample, path, model) -> `Step`

    has_step_seeds = True

    def write(self, requests) -> list:
        "A tuple of `Step`s per request. KeyError for a step that nobody drew."
        chains = []
        for request in requests:
            path, steps = request.path, ()
            while len(steps) < request.room and not (steps and steps[-1].final):
                steps += (self.edges[request.problem.id, request.sample, path, self.index],)
                path += str(self.index)
            chains.append(steps)
        return chains


@dataclass(frozen=True)
class Recorded:
    "One recorded benchmark."

    about: dict  # benchmark, licence, settings of the store, receipt of the drawing (models, date, seeds)
    problems: dict  # split -> `Problem`s
    verdicts: dict  # (problem id, answer) -> bool
    edges: tuple  # ((problem id, sample, path, model), `Step`) pairs

    @property
    def settings(self) -> dict:
        "The settings of the store that these edges come from."
        return self.about['settings']

    @cached_property
    def models(self) -> list:
        "The models that wrote the steps, small to large, replayed."
        edges = dict(self.edges)
        return [Replayed(spec, index, edges) for index, spec in enumerate(self.specs)]

    @property
    def specs(self) -> list:  # of `ModelSpec`s
        return [ModelSpec(**model['spec']) for model in self.settings['models']]


def read_edge(key: list, values: dict) -> tuple:
    "The key of an edge and its `Step`, read from a recorded line."
    as_tuples = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return tuple(key), Step(**as_tuples)


@lru_cache(4)
def read_recorded(
    name: str,  # of the benchmark, such as "gsm8k"
    folder: Path = FOLDER,
) -> Recorded:
    "Read a recorded benchmark. FileNotFoundError if there is no such file."
    about, problems, verdicts, edges = {}, {split: [] for split in SPLITS}, {}, []
    for line in unpacked_lines(folder / f'{name}.jsonl.xz'):
        kind, *content = json.loads(line)
        if kind == 'about':
            about.update(*content)
        elif kind == 'problem':
            split, row = content
            problems[split].append(Problem(**row | dict(benchmark=name + SUFFIX)))
        elif kind == 'grade':
            problem_id, answer, is_right = content
            verdicts[problem_id, answer] = is_right
        else:
            edges.append(read_edge(*content))
    return Recorded(about, problems, verdicts, tuple(edges))


@dataclass(frozen=True)
class RecordedSet:
    "The problems of a recorded benchmark, in the order in which they were drawn."

    name: str  # such as "gsm8k"

    def problems(self, split: str, data_dir=None) -> list:
        "Every recorded problem of a split."
        return read_recorded(self.name).problems[split]


@dataclass(frozen=True)
class RecordedVerdict:
    "Looks up the recorded verdict on an answer. It grades nothing."

    name: str  # such as "gsm8k"
    folder: Path = FOLDER

    def __call__(self, problem: Problem, answer: str) -> bool:
        "KeyError for an answer that was not graded when the benchmark was recorded."
        return read_recorded(self.name, self.folder).verdicts[problem.id, answer]
