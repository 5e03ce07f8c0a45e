"""Every step that a router could ask for is drawn once and kept; a table of outcomes says what each hand-over comes to"""

# %% imports
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from ..data.benchmarks import find_benchmark
from ..data.grading import grade_pairs, is_right
from ..models.base import Request
from ..records import find_price
from ..util import PACKAGE, npz_bytes, write_file
from .confidence import chain_features

# %% kinds
UNITS = ('flops', 'full_flops', 'cents')  # of cost
READINGS = ('continue', 'rewrite')  # the larger model goes on after the step, or writes it again
KINDS = ('written', 'read', 'sent', 'cached')  # of tokens
# generated; prompt that no cache of the walk held; prompt as billed; of it, billed at the lower price


# %% tokens
@dataclass(frozen=True)
class _Table:
    "What all tables have: for which problems, who writes, and what a token costs."

    benchmark: np.ndarray  # []
    split: np.ndarray  # [], "train", "calibration" or "test"
    models: np.ndarray  # [model], names, small to large
    params: np.ndarray  # [model], N
    dollars: np.ndarray  # [model, 3], a million prompt, cached and generated tokens; 0: free
    problem: np.ndarray  # [problem], ids

    def __len__(self):
        return len(self.problem)

    def prices(self, unit: str) -> np.ndarray:  # [model, kind]
        "FLOPs or US cents of a token of each kind."
        flops = 2 * self.params
        free = 0 * flops
        prompt, cached, written = self.dollars.T / 1e4
        of_unit = {
            'flops': (flops, free, free, free),  # the paper's reading
            'full_flops': (flops, flops, free, free),
            'cents': (written, free, prompt, cached - prompt),
        }
        return np.stack(of_unit[unit], -1)


# %% outcomes
@dataclass(frozen=True)
class Outcomes(_Table):
    "Every hand-over of every problem. T: steps of a small chain; S: steps of the longest one."

    features: dict  # name -> [problem, step], what a router may see; nan behind the end
    small: np.ndarray  # [problem, step, kind], tokens of the small model
    large: np.ndarray  # [problem, t, k, kind], tokens of larger model k behind t small steps
    right: np.ndarray  # [problem, t, k], 0 or 1; from t = T on that of the small chain
    steps: np.ndarray  # [problem], T
    cut: np.ndarray  # bool [problem, model], did a limit end the chain that this model writes alone?
    step_right: np.ndarray | None = None  # bool [problem, step], does a verifier accept the step?

    @property
    def inside(self) -> np.ndarray:  # bool [problem, step]
        return np.arange(self.small.shape[1]) < self.steps[:, None]


# %% walks
@dataclass(frozen=True)
class Walks(_Table):
    "Recorded walks of a router that may return to the small model, at each of its thresholds."

    method: np.ndarray  # []
    kappas: np.ndarray  # [setting], from safe to cheap
    tokens: np.ndarray  # [setting, problem, model, kind]; a reward model is the last model
    right: np.ndarray  # [setting, problem], 0 or 1


# %% save
def save(table: Outcomes | Walks, path) -> None:
    "Write an .npz file of plain arrays; features under their own names."
    arrays = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if field.name == 'features':
            columns = {f'feature {name}': values for name, values in value.items()}
            arrays |= {name: values.astype(np.float32) for name, values in columns.items()}
        elif value is not None:
            arrays[field.name] = value
    write_file(path, npz_bytes(arrays))


def load(path) -> Outcomes | Walks:
    "Read a table. FileNotFoundError: there is none."
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    names = [name for name in arrays if name.startswith('feature ')]
    if not names:
        return Walks(**arrays)
    features = {name.removeprefix('feature '): arrays.pop(name).astype(float) for name in names}
    return Outcomes(features=features, **arrays)


def shipped_outcomes(benchmark: str) -> dict:  # split -> `Outcomes`, (method, split) -> `Walks`
    "The tables that the package ships, such as those of micro-gsm."
    splits = {}
    for path in sorted((PACKAGE / 'outcomes').glob(f'{benchmark}-*.npz')):
        split, *method = path.stem.removeprefix(f'{benchmark}-').split('-')
        splits[(method[0], split) if method else split] = load(path)
    return splits


def take(outcomes: Outcomes, rows) -> Outcomes:
    "Some problems of a table, or some of them twice."
    arrays = {}
    for name in ('problem', 'small', 'large', 'right', 'steps', 'cut', 'step_right'):
        values = getattr(outcomes, name)
        arrays[name] = None if values is None else values[rows]
    features = {name: values[rows] for name, values in outcomes.features.items()}
    return replace(outcomes, features=features, **arrays)


# %% exits
class Result(NamedTuple):
    "Right answers and costs, in one shape from here to the tables."

    right: np.ndarray  # [..., problem], 0 or 1
    cost: np.ndarray  # [..., problem]


def large_alone(outcomes: Outcomes, unit: str) -> Result:  # [problem]
    "The largest model writes everything."
    tokens = outcomes.large[:, 0, -1]
    return Result(outcomes.right[:, 0, -1].astype(float), tokens @ outcomes.prices(unit)[-1])


def exits(
    outcomes: Outcomes,
    unit: str,  # one of `UNITS`
    reading: str,  # one of `READINGS`
    thrown: int = 0,  # further small tokens that a hand-over throws away
) -> Result:  # [problem, exit]
    "All ways to leave the small chain: after each step to each larger model, the largest first; at last, never."
    problem = np.arange(len(outcomes))[:, None]
    T = outcomes.steps[:, None].astype(int)
    written = np.minimum(np.arange(outcomes.small.shape[1]) + 1, T)  # [problem, step], small steps
    rewrites = (written == T) | (reading == 'rewrite')  # nothing comes after the last step
    kept = written - rewrites  # [problem, step], the small steps that the larger model goes on from

    small_price, *larger_prices = outcomes.prices(unit)  # [kind] each
    spent = np.pad((outcomes.small @ small_price).cumsum(1), ((0, 0), (1, 0)))  # [problem, t]
    charged = np.einsum('ptkx,kx->ptk', outcomes.large, np.array(larger_prices))
    extra = thrown * small_price[0] * (written < T)  # nothing is begun behind the last step
    cost = (spent[problem, written] + extra)[..., None] + charged[problem, kept]  # [problem, step, k]
    right = outcomes.right[problem, kept].astype(float)

    def in_order(of_step, of_never):
        return np.c_[of_step[..., ::-1].reshape(len(outcomes), -1), of_never]

    never_right, never_cost = outcomes.right[problem, T, -1], spent[problem, T]
    return Result(in_order(right, never_right), in_order(cost, never_cost))


# %% doubt
def highest_so_far(doubt, larger: int = 1) -> np.ndarray:  # [problem, step(, k)] -> [problem, exit]
    "The highest doubt up to each exit. Behind its end a chain doubts nothing."
    if np.ndim(doubt) == 2:  # it asks for the largest model alone
        others = np.full((*doubt.shape, larger - 1), np.nan)
        doubt = np.concatenate([others, doubt[..., None]], 2)
    in_order = doubt[..., ::-1].reshape(len(doubt), -1)  # the largest model is asked for first
    return np.maximum.accumulate(np.where(np.isnan(in_order), -np.inf, in_order), 1)


def thresholds(doubt, most: int | None = None) -> np.ndarray:  # [setting]
    "Kappas that make a difference to these chains, `most` at most: from safe (hand over at once) to cheap (never)."
    doubts = np.unique(highest_so_far(doubt))
    doubts = doubts[np.isfinite(doubts)]
    if most and len(doubts) > most:
        doubts = doubts[np.linspace(0, len(doubts) - 1, most).round().astype(int)]
    return np.r_[doubts[0], np.nextafter(doubts, np.inf)]


# %% replay
def replay(
    outcomes: Outcomes,
    doubt,  # [problem, step(, k)], of a router
    kappas,  # [setting]
    unit: str,  # one of `UNITS`
    reading: str,  # one of `READINGS`
    thrown: int = 0,  # further small tokens that a hand-over throws away
) -> Result:  # [setting, problem]
    "Equation 6, read off the table: each chain is left at the first doubt that reaches kappa."
    highest = highest_so_far(doubt, len(outcomes.models) - 1)
    exit = np.stack([(highest < kappa).sum(1) for kappa in kappas])  # [setting, problem]
    right, cost = exits(outcomes, unit, reading, thrown)
    problem = np.arange(len(outcomes))
    return Result(right[problem, exit], cost[problem, exit])


def replay_walks(walks: Walks, unit: str) -> Result:  # [setting, problem]
    "The same for recorded walks."
    cost = np.einsum('spmx,mx->sp', walks.tokens, walks.prices(unit))
    return Result(walks.right.astype(float), cost)


# %% kept
BLOCK = 256  # requests that are drawn before their steps are on disk


class Kept:
    "A model whose steps are kept: each is on disk before it is used, and is never drawn again."

    def __init__(self, model, store):
        self.model = model
        self.store = store  # `Store`
        self.spec = model.spec
        self.index = model.index

    def keys(self, request: Request, n: int) -> list:
        "The keys of the next n steps of a request."
        start = request.problem.id, request.sample
        paths = [request.path + str(self.index) * i for i in range(n)]
        return [(*start, path, self.index) for path in paths]

    def stored(self, request: Request) -> tuple | None:
        "The steps that answer a request; None if one is missing."
        most = request.max_steps - len(request.steps) if request.to_end else 1
        steps = []
        for key in self.keys(request, most):
            step = self.store.get(*key)
            if step is None:
                return None
            steps.append(step)
            if step.final:
                break
        return tuple(steps)

    def write(self, requests) -> list:
        "A tuple of `Step`s per request, as of `models.base.Model`."
        found = {i: self.stored(request) for i, request in enumerate(requests)}
        missing = [i for i, steps in found.items() if steps is None]
        parts = range(0, len(missing), BLOCK)
        for first in tqdm(parts, self.spec.name, leave=False, disable=len(parts) < 2):
            block = missing[first : first + BLOCK]
            drawn = self.model.write([requests[i] for i in block])
            pairs = []
            for i, steps in zip(block, drawn):
                pairs += zip(self.keys(requests[i], len(steps)), steps)
                found[i] = steps
            self.store.put_many(pairs)
        return [found[i] for i in range(len(requests))]


# %% draw-chains
def draw_chains(problems, models, max_steps: int) -> tuple:
    "(Small chains [problem], rests [k][problem][t]): each larger model goes on from every prefix of the small chain."
    small, *larger = models
    ask = dict(to_end=True, max_steps=max_steps)
    chains = small.write([Request(problem, **ask) for problem in problems])
    rests = []
    for model in larger:
        requests = []
        for problem, chain in zip(problems, chains):
            requests += [Request(problem, chain[:t], **ask) for t in range(len(chain))]
        written = iter(model.write(requests))
        rests.append([[next(written) for _ in chain] for chain in chains])
    return chains, rests


# %% tokens-of
def tokens_of(steps, held: int = 0) -> tuple:  # [kind]
    "The tokens of one call that wrote these steps; `held`: tokens of its prompt in an ideal cache."
    prompt = steps[0].prompt
    written = sum(step.generated for step in steps)
    return written, prompt - min(held, prompt), prompt, steps[0].cached


def small_tokens(chain) -> np.ndarray:  # [step, kind]
    "The tokens of a small chain, one call a step: each finds the steps before it in the cache."
    rows, held = [], 0
    for step in chain:
        rows.append(tokens_of([step], held))
        held = step.prompt + step.generated
    return np.array(rows)


def was_cut(chain) -> bool:
    "Did a limit end this chain, and no answer?"
    return chain[-1].finish == 'length' or not chain[-1].final


# %% outcome-table
def padded(rows, width: int, fill=0) -> np.ndarray:  # [problem, width, ...]
    "Rows of different lengths as one array."
    first = np.asarray(rows[0])
    table = np.full((len(rows), width, *first.shape[1:]), fill, first.dtype)
    for line, row in zip(table, rows):
        line[: len(row)] = row
    return table


def graded_exits(problems, chains, rests, grade) -> np.ndarray:  # uint8 [problem, t, k]
    "Is the answer right if model k goes on behind t small steps? From t = T on: is that of the small chain?"
    read = find_benchmark(problems[0].benchmark).read_answer
    answers = []
    for i, (problem, chain) in enumerate(zip(problems, chains)):
        for of_model in rests:
            answers += [(problem, read(steps)) for steps in (*of_model[i], chain)]
    verdicts = dict(grade_pairs(grade, answers))
    graded = iter([verdicts[problem.id, answer] for problem, answer in answers])
    longest = max(map(len, chains))
    right = np.zeros((len(problems), longest + 1, len(rests)), np.uint8)
    for i, chain in enumerate(chains):
        for k in range(len(rests)):
            of_exits = [next(graded) for _ in range(len(chain) + 1)]
            right[i, : len(chain) + 1, k] = of_exits
            right[i, len(chain) :, k] = of_exits[-1]
    return right


def dollars_of(specs, price: str = '') -> np.ndarray:  # [model, 3]
    "Prices of a million prompt, cached and generated tokens; `price`: what the largest model would cost."
    names = [spec.price for spec in specs]
    names[-1] = names[-1] or price or None
    rows = [(0.0, 0.0, 0.0) if name is None else find_price(name)[:3] for name in names]
    return np.array(rows)


def outcome_table(
    problems,  # of one benchmark
    chains,  # small chains, see `draw_chains`
    rests,
    specs,  # the `ModelSpec`s, small to large
    split: str = '',
    grade=is_right,  # (`Problem`, parsed answer) -> bool
    price: str = '',  # row of `PRICES`: what the largest model would cost behind an API
    step_right=None,  # [problem][step], verdicts of a verifier
) -> Outcomes:
    "The table of what was drawn."
    benchmark = find_benchmark(problems[0].benchmark)
    longest = max(map(len, chains))
    columns = [chain_features(chain, benchmark.scored) for chain in chains]
    features = {
        name: padded([row[name] for row in columns], longest, np.nan) for name in columns[0]
    }
    large = np.zeros((len(problems), longest + 1, len(rests), len(KINDS)), np.uint32)
    for k, of_model in enumerate(rests):
        tokens = [np.array([tokens_of(steps) for steps in row]) for row in of_model]
        large[:, :, k] = padded(tokens, longest + 1)
    alone = [chains, *([row[0] for row in of_model] for of_model in rests)]
    return Outcomes(
        benchmark=np.array(problems[0].benchmark),
        split=np.array(split),
        models=np.array([spec.name for spec in specs]),
        params=np.array([float(spec.params) for spec in specs]),
        dollars=dollars_of(specs, price),
        problem=np.array([problem.id for problem in problems]),
        features=features,
        small=padded([small_tokens(chain) for chain in chains], longest).astype(np.uint32),
        large=large,
        right=graded_exits(problems, chains, rests, grade),
        steps=np.array([len(chain) for chain in chains]),
        cut=np.array([[was_cut(chain) for chain in of_model] for of_model in alone]).T,
        step_right=None if step_right is None else padded(step_right, longest, False),
    )


# %% chain
class Chain(NamedTuple):
    "A finished chain. Its steps say who wrote them; its tokens were paid for, thrown steps included."

    steps: tuple  # of `Step`s that were kept
    tokens: np.ndarray  # [model, kind]; a judge or reward model that writes no steps comes last


# %% walk
def walk(
    problem,
    router,  # features -> doubt
    kappa: float,
    models: int = 2,  # how many there are
    reading: str = 'continue',
    **ask,  # of `Request`: sample, max_steps
):
    "A router at work, as a generator: it yields (model, `Request`), is sent the steps, and returns a `Chain`."
    benchmark = find_benchmark(problem.benchmark)
    steps, held = (), 0
    tokens = np.zeros((models, len(KINDS)), int)
    while True:
        request = Request(problem, steps, **ask)
        (step,) = yield 0, request
        tokens[0] += tokens_of([step], held)
        held = step.prompt + step.generated
        steps += (step,)
        is_last = step.final or len(steps) >= request.max_steps
        columns = chain_features(steps, benchmark.scored)
        doubt = router({name: column[None] for name, column in columns.items()})[0, -1]
        asked_for = np.flatnonzero(np.atleast_1d(doubt) >= kappa)
        if len(asked_for):
            larger = asked_for[-1] + 1 if np.ndim(doubt) else models - 1
            kept = steps[:-1] if is_last or reading == 'rewrite' else steps
            rest = yield int(larger), replace(request, steps=kept, to_end=True)
            tokens[larger] += tokens_of(rest)
            return Chain(kept + rest, tokens)
        if is_last:
            return Chain(steps, tokens)


# %% run-walks
def run_walks(walks, models) -> list:  # what each walk returns
    "Drive many walks in lock-step: one list a model and turn. `models`: each has `write(requests)`."
    walks = list(walks)
    returned = [None] * len(walks)
    asked = {i: next(walk) for i, walk in enumerate(walks)}
    while asked:
        for k, model in enumerate(models):
            mine = [i for i, (who, _) in asked.items() if who == k]
            answers = model.write([asked[i][1] for i in mine]) if mine else []
            for i, answer in zip(mine, answers):
                try:
                    asked[i] = walks[i].send(answer)
                except StopIteration as end:
                    returned[i] = end.value
                    del asked[i]
    return returned
