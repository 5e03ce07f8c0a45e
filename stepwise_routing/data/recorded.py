"""Recorded outcomes: the steps of a real pair of language models, replayed without the models.

Here belong the files that the package ships: writing them, and reading problems, verdicts and steps from them.
nbs/labs tells how the steps were drawn. The paper's method does not know that its steps were recorded.
"""

import json
import lzma
import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from ..records import Problem, Step
from ..store import RolloutStore
from ..util import PACKAGE, write_file
from .sources import SPLITS, unpacked_lines

FOLDER = PACKAGE / 'recorded'
MAX_STEPS = {'gsm8k': 16, 'mbpp': 40}  # most steps of a chain, the limit when it was drawn
SUFFIX = '-recorded'  # end of the name of a recorded benchmark
PUT_AT_ONCE = 500  # edges per transaction


def recorded_file(name: str, folder: Path = FOLDER) -> Path:
    "The file of a recorded benchmark, such as \"gsm8k\"."
    return folder / f'{name}.jsonl.xz'


def recorded_names() -> list:
    "The benchmarks that are recorded, such as \"gsm8k\"."
    return sorted(path.name.removesuffix('.jsonl.xz') for path in FOLDER.glob('*.jsonl.xz'))


@dataclass(frozen=True)
class Recorded:
    "One recorded benchmark."

    about: dict  # benchmark, licence, settings of the store, receipt of the drawing (models, date, seeds)
    problems: dict  # split -> `Problem`s
    verdicts: dict  # (problem id, answer) -> bool
    edges: tuple  # ((problem id, sample, path, model), `Step`) pairs

    @property
    def settings(self) -> dict:
        "The settings of a store with these edges."
        return self.about['settings'] | dict(benchmark=self.about['benchmark'] + SUFFIX)

    @property
    def models(self) -> tuple:
        "The names of the models that wrote the steps, small to large."
        return tuple(model['spec']['name'] for model in self.about['settings']['models'])

    def fill(self, path) -> None:
        "Put the edges into a store, if they are not there yet."
        if Path(path).exists():
            with RolloutStore(path, readonly=True) as store:
                if len(store) == len(self.edges) and store.settings == self.settings:
                    return
            Path(path).unlink()
        with RolloutStore(path, self.settings) as store:
            for first in range(0, len(self.edges), PUT_AT_ONCE):
                store.put_many(self.edges[first : first + PUT_AT_ONCE])


def read_edge(key: list, values: dict, record=Step) -> tuple:
    "The key of an edge and its `Step`, read from a recorded line; or another record under such a key."
    fields_of_record = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return tuple(key), record(**fields_of_record)


def take_line(
    line: str,
    found,  # the `Recorded` that it is put into
    benchmark: str,  # of the problems
) -> None:
    "Take up a line of a recorded file."
    kind, *content = json.loads(line)
    if kind == 'about':
        found.about.update(*content)
    elif kind == 'problem':
        split, row = content
        found.problems[split].append(Problem(**row | dict(benchmark=benchmark)))
    elif kind == 'grade':
        problem_id, answer, is_right = content
        found.verdicts[problem_id, answer] = is_right
    else:
        found.edges.append(read_edge(*content))


@lru_cache(4)
def read_recorded(
    name: str,  # of the benchmark, such as "gsm8k"
    folder: Path = FOLDER,
) -> Recorded:
    "Read a recorded benchmark. FileNotFoundError if there is no such file."
    path = recorded_file(name, folder)
    if not path.is_file():
        there = ', '.join(recorded_names()) or 'none'
        raise FileNotFoundError(f'{name} is not recorded; recorded benchmarks: {there}')
    found = Recorded({}, {split: [] for split in SPLITS}, {}, [])
    for line in unpacked_lines(path):
        take_line(line, found, name + SUFFIX)
    return replace(found, edges=tuple(found.edges))


@dataclass(frozen=True)
class RecordedSet:
    "The problems of a recorded benchmark, in the order in which they were drawn."

    name: str  # such as "gsm8k"
    is_public = False

    @property
    def licence(self) -> str:
        return read_recorded(self.name).about['licence']

    def problems(self, split: str, data_dir=None) -> list:
        "Every recorded problem of a split."
        return read_recorded(self.name).problems[split]


@dataclass(frozen=True)
class RecordedVerdict:
    "Looks up the recorded verdict on an answer. It grades nothing."

    name: str  # such as "gsm8k"

    def __call__(self, problem: Problem, answer: str) -> bool:
        verdicts = read_recorded(self.name).verdicts
        if (problem.id, answer) not in verdicts:
            raise LookupError(
                f'the answer {answer!r:.60} of problem {problem.id} was not graded when '
                f'{self.name} was recorded'
            )
        return verdicts[problem.id, answer]


# ---- the chains of MBPP: a step is a line, and the answer is a program


def code_of(text: str) -> str:
    "The Python code in a reply: all its fenced blocks in order, or the whole reply if it has none."
    begin = r'```(?:[Pp]ython(?:3(?:\.\d+)?)?|py)?[ \t]*\r?\n'
    end = r'(?:\r?\n[ \t]*```|\Z)'
    blocks = re.findall(f'{begin}(.*?){end}', text, re.S)
    return '\n'.join(blocks) if blocks else text


def program_of(texts) -> str | None:
    "The program in the texts of a chain's steps, without tests. None if they hold no line of code."
    code = code_of('\n'.join(text for text in texts if not text.startswith('assert ')))
    return code if code.strip() else None


def closes_the_block(line: str) -> bool:
    "Does the program end here? It ends with its code block, or before the first test behind it."
    return line.strip() == '```' or line.startswith('assert ')


# ---- writing


def recorded_fields(step: Step, keep_tokens: bool) -> dict:
    """The fields of a step that are recorded: those that are not the default.

    Confidences of tokens are kept for the small model only, as no router reads the others.
    """
    if not keep_tokens:
        step = replace(step, ids=(), ends=(), prob=(), max_logit=None, entropy=None)
    recorded = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if field.default is MISSING or value != field.default:
            recorded[field.name] = value
    return recorded


def line(*content) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(',', ':')) + '\n'


def write_recorded(
    path,  # NAME.jsonl.xz
    about: dict,  # benchmark, licence, receipt; also settings, if they differ from the store's
    problems: dict,  # split -> `Problem`s
    store: RolloutStore,  # holds all edges of these problems; it may hold others
    verdicts: dict,  # (problem id, answer) -> bool
) -> Path:
    "Write a recorded benchmark: the edges of some problems. The same content gives the same bytes."
    wanted = {problem.id for part in problems.values() for problem in part}
    lines = [line('about', dict(settings=store.settings) | about)]
    for split, part in problems.items():
        lines += [line('problem', split, asdict(problem)) for problem in part]
    for (problem_id, answer), is_right in sorted(verdicts.items(), key=str):
        if problem_id in wanted:
            lines.append(line('grade', problem_id, answer, bool(is_right)))
    for key in sorted(store.keys(), key=str):
        if key[0] in wanted:
            step = store.get(*key)
            lines.append(line('edge', key, recorded_fields(step, keep_tokens=key[3] == 0)))
    data = ''.join(lines).encode()
    return write_file(path, lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
