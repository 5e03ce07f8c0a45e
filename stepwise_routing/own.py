"""A router for your own models: `probe`, `collect`, `train`, `curve`, `calibrate`, `route`, `serve`

Chapter 06 shows how they are used. A folder holds all that is known: questions, drawn steps, outcomes, the router.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from . import gain, live, settings, store, util
from .data import benchmarks, questions
from .method import baselines, curves, policy, results, rollouts, training
from .models.base import Request
from .models.kept import Kept
from .models.open import is_api, open_models, read_models

# ---- the folder


def own_split(
    ids,  # of problems
    share: float,  # of the problems that is set aside for calibration, 0 to 1
) -> dict:  # side -> places in `ids`
    "Split problems into training and calibration. The hash of a question decides its side."
    aside = np.array([int(util.digest('own', name), 16) < share * 2**64 for name in ids])
    return dict(train=np.flatnonzero(~aside), calibration=np.flatnonzero(aside))


FORMAT = 'stepwise-routing own 7'


class Own(settings.Section):
    "The settings of a folder. They hold no path, server or key."

    models: settings.Names  # public names, small to large
    draws: settings.Text  # digest of `draw_settings`
    name: settings.Text = 'own'  # of the problems; part of the seeds
    max_steps: settings.Count = 50  # of a chain
    calibration: settings.Probability = 0.4  # share of the problems that is set aside
    agreement: bool = False  # no answers are known: those of the largest model are the references


def read_own(folder) -> Own:
    "Read own.json. FileNotFoundError or ValueError, in one line."
    file = Path(folder) / 'own.json'
    if not file.is_file():
        raise FileNotFoundError(f'{folder} holds no router; make one with collect')
    values = json.loads(file.read_text())
    if values.pop('format', None) != FORMAT:
        raise ValueError(f'{file} is of another version: collect into another folder')
    return Own(**values)


def draw_settings(name: str, models) -> tuple:  # (dict, its digest)
    "What the steps of these models depend on."
    if name not in benchmarks.REGISTERED:
        benchmarks.register_own()
    found = store.draw_settings(name, models, prompt=benchmarks.prompt_digest(name))
    return found, util.digest(json.dumps(found))


# ---- its models and questions


def opened(models, folder, max_cents: float, options: dict) -> list:
    "The models, small to large; those that are open already as they are."
    if isinstance(models, (str, Path)):
        models = read_models(models)
    if len(models) < 2:
        raise ValueError(f'a small and a large model are needed, got {len(models)}')
    if options and not any(isinstance(model, str) for model in models):
        raise ValueError(f'{", ".join(options)}: options are for models that are given by name')
    if hasattr(models[0], 'write'):
        return list(models)
    is_paid = any(map(is_api, models))
    replies = store.Replies(Path(folder) / 'replies.db', max_cents) if is_paid else None
    return open_models(models, replies, **options)


def check_cost(specs) -> None:
    "ValueError unless the costs of all models can be compared."
    for spec in specs:
        if specs[-1].price is None and not spec.params:
            raise ValueError(
                f'nothing says what {spec.name} costs: give it a price, or its number of parameters (params)'
            )


class Collection(NamedTuple):
    "The questions and models of a folder, while its store is open."

    folder: Path
    own: Own
    problems: list  # `Problem`s, those of earlier calls included
    models: list  # `Kept`, small to large
    grade: Callable  # (`Problem`, parsed answer) pairs -> verdicts
    steps: store.Store

    @property
    def specs(self) -> list:
        return [model.spec for model in self.models]

    def table(self, problems, chains, rests) -> rollouts.Outcomes:
        "The outcomes of what was drawn. Without known answers, those of the largest model are the references."
        if self.own.agreement:
            read = benchmarks.find_benchmark(self.own.name).answer
            answers = [read(p, row[0]) or '' for p, row in zip(problems, rests[-1])]
            problems = [replace(p, answer=answer) for p, answer in zip(problems, answers)]
        return rollouts.outcome_table(problems, chains, rests, self.specs, grade=self.grade)


@contextlib.contextmanager
def open_collection(
    folder,  # these are the parameters of `collect`
    problems,
    models,
    grade=benchmarks.grade_by_rules,
    max_cents: float = 100.0,
    name: str = 'own',
    max_steps: int = 50,
    calibration: float = 0.4,
    fields: dict | None = None,
    **options,
):  # `Collection`
    "Open what `collect` works with, and close it."
    folder = Path(folder)
    problems = questions.own_problems(problems, name, fields)
    problems = questions.with_earlier(folder, problems, name)
    models = opened(models, folder, max_cents, options)
    check_cost([model.spec for model in models])
    fixed = dict(max_steps=max_steps, calibration=calibration, agreement=not problems[0].answer)
    draws, digest = draw_settings(name, models)
    names = [model.spec.name for model in models]
    own = Own(models=names, draws=digest, name=name, **fixed)
    with store.Store(folder / 'draws.db', draws | fixed) as steps:
        values = dict(format=FORMAT) | asdict(own)
        util.write_file(folder / 'own.json', json.dumps(values, indent=1) + '\n')
        kept = [Kept(model, steps) for model in models]
        yield Collection(folder, own, problems, kept, grade, steps)


# ---- probe and collect


PROBED = 40  # questions of a probe


def read_speeds(folder) -> dict:  # model -> tokens a second
    "What a probe has measured."
    file = Path(folder) / 'speeds.json'
    return json.loads(file.read_text()) if file.is_file() else {}


def draw_alone(c: Collection, n: int = PROBED) -> rollouts.Outcomes:
    "Each model answers n random questions alone. Hand-overs behind a step are not drawn: the table repeats the first one."
    problems = sorted(c.problems, key=lambda problem: util.digest('probe', problem.id))[:n]
    requests = [Request(p, to_end=True, max_steps=c.own.max_steps) for p in problems]
    written = []
    speeds = read_speeds(c.folder)
    for model in c.models:
        replies = getattr(model.model, 'replies', ())  # of an API
        begun = len(c.steps), len(replies)
        start = time.monotonic()
        answers = model.write(requests)
        seconds = time.monotonic() - start
        steps = [step for chain in answers for step in chain]
        is_new = len(c.steps) - begun[0] == len(steps)
        is_paid_now = len(replies) - begun[1] == len(requests)
        if is_new and (replies == () or is_paid_now):
            speeds[model.spec.name] = sum(step.generated for step in steps) / seconds
            util.write_file(c.folder / 'speeds.json', json.dumps(speeds, indent=1) + '\n')
        if any('<think>' in step.text for step in steps):
            print(f'{model.spec.name} thinks aloud: {THINKING}')
        written.append(answers)
    chains, *larger = written
    rests = [[[rest] * len(chain) for rest, chain in zip(of_model, chains)] for of_model in larger]
    return c.table(problems, chains, rests)


THINKING = (
    'each blank line ends a step, and a limit cuts most chains. Switch it off, such as with '
    'chat_template_kwargs={"enable_thinking": false} for Qwen3, in a new folder.'
)


def seen_by(c: Collection, table: rollouts.Outcomes) -> gain.Probe:
    "What the models do alone, by this table."
    enough = round(gain.LEARNABLE / (1 - c.own.calibration))
    return gain.look(table, c.own.agreement, read_speeds(c.folder), enough)


def paid_replies(models) -> store.Replies | None:
    "Where the replies of paid models are; None if no model is paid."
    found = [model.replies for model in models if hasattr(model, 'replies')]
    return found[0] if found else None


def undrawn(c: Collection) -> int:
    "Questions of which not every hand-over is drawn."
    small, *larger = c.models
    count = 0
    for problem in c.problems:
        request = Request(problem, to_end=True, max_steps=c.own.max_steps)
        chain = small.stored(request)
        last = replace(request, steps=chain[:-1])
        is_drawn = small.is_answered(request, chain)
        is_drawn = is_drawn and all(m.is_answered(last, m.stored(last)) for m in larger)
        count += not is_drawn
    return count


def show_price(
    c: Collection,
    table: rollouts.Outcomes,  # of a probe
) -> str:  # a sentence if the cap is too low
    "Print what `collect` will cost and take."
    left = undrawn(c)
    if not left:
        return ''
    cents, seconds = gain.price_of(table, c.specs, read_speeds(c.folder))
    replies = paid_replies(kept.model for kept in c.models)
    spent = replies.spent if replies is not None else 0.0
    cents = (len(c.problems) * cents - spent).clip(0)  # replies are kept that no question has yet
    seconds = left * seconds
    needs = [f'{cents[0]:.2g} to {cents[1]:.2g} US cents'] if cents.any() else []
    minutes = seconds / 60
    needs += [] if np.isnan(minutes[0]) else [f'{minutes[0]:.1f} to {minutes[1]:.1f} minutes']
    needed = f'; they need about {" and ".join(needs)}' if needs else ''
    print(f'collect: {left} questions are left{needed}')
    if replies is not None and spent + cents[0] > replies.max_cents:
        return (
            f'{spent:.2g} cents are spent, {cents[0]:.2g} or more are needed, and max_cents is '
            f'{replies.max_cents:g}: raise it, or give fewer questions'
        )
    return ''


def probe(
    folder,  # of `collect`, which goes on where the probe ends
    problems,  # as for `collect`
    models,  # as for `collect`
    n: int = PROBED,  # questions, chosen at random
    **options,  # of `collect`, such as max_cents or fields
) -> gain.Probe:
    """Can a router between these models pay, on questions like these? Each model answers n questions alone.

    It prints the answer, and what `collect` would cost and take. Errors as of `collect`."""
    settings.checked('n', n, settings.Count)
    with open_collection(folder, problems, models, **options) as c:
        table = draw_alone(c, n)
        found = seen_by(c, table)
        print(found)
        too_low = show_price(c, table)
        if too_low:
            print(too_low)
    return found


def show_cut(outcomes: rollouts.Outcomes, own: Own) -> None:
    "Print how many chains a limit cut, and what to do."
    sentence = rollouts.cut_chains(outcomes)
    if sentence:
        limits = f'max_steps ({own.max_steps}), max_tokens or max_reply'
        print(f'{sentence} Raise {limits}, in a new folder.')


def summary(outcomes: rollouts.Outcomes, own: Own) -> dict:
    "Problems of each side, and how often each model alone is right."
    sides = own_split(outcomes.problem, own.calibration)
    right = np.c_[outcomes.right[:, -1, 0], outcomes.right[:, 0]].mean(0).round(3)
    of_models = dict(zip(outcomes.models.tolist(), right.tolist()))
    return {side: len(rows) for side, rows in sides.items()} | of_models


def collect(
    folder,  # keeps everything; made if missing
    problems,  # JSONL, JSON or CSV file with "question" and, if they are known, "answer"; or rows
    models,  # small to large: names, `ModelOptions` or open models; or a YAML file of `ModelOptions`
    grade=benchmarks.grade_by_rules,  # (`Problem`, parsed answer) pairs -> verdicts
    max_cents: float = 100.0,  # most US cents for paid models, earlier calls included
    name: str = 'own',  # of the benchmark, part of all seeds; a registered one has its prompt and grading
    max_steps: int = 50,  # of a chain
    calibration: float = 0.4,  # share of the problems that is set aside for calibration
    # our names of fields -> yours, such as {"question": "problem"}; {"answer": None}: no answers are known
    fields: dict | None = None,
    **options,  # of `ModelOptions`, for models that are given by name
) -> dict:  # see `summary`; also the steps drawn now
    """Draw and grade the outcomes that a router learns from. Call it again to continue, or to add problems.

    It says first what it will cost and take, and in the end what `probe` says, for all problems. ValueError in one line
    for a bad problem, model or option, or if max_cents is too low. RuntimeError in one line if a server gives no reply."""
    given = dict(max_cents=max_cents, name=name, max_steps=max_steps, calibration=calibration)
    with open_collection(folder, problems, models, grade, **given, fields=fields, **options) as c:
        before = len(c.steps)
        table = draw_alone(c)
        if len(c.steps) > before:  # nobody has probed
            print(seen_by(c, table), end='\n\n')
        too_low = show_price(c, table)
        if too_low:
            raise ValueError(too_low)
        chains, rests = rollouts.draw_chains(c.problems, c.models, max_steps)
        outcomes = c.table(c.problems, chains, rests)
        drawn = dict(new_steps=len(c.steps) - before)
        replies = paid_replies(kept.model for kept in c.models)
        if replies is not None:
            print(f'collect: {replies.spent:.3g} US cents are paid in this folder')

    rows = [json.dumps(dict(question=p.question, answer=p.answer)) for p in c.problems]
    util.write_file(c.folder / 'problems.jsonl', '\n'.join(rows) + '\n')
    rollouts.save(outcomes, c.folder / 'outcomes.npz')
    show_cut(outcomes, c.own)
    print(seen_by(c, outcomes))
    return summary(outcomes, c.own) | drawn


# ---- routers and training


def own_table(
    folder,  # of `collect`
    side: str = '',  # all; or "train" or "calibration"
) -> rollouts.Outcomes:
    "The outcomes of a folder. ValueError: there are none yet, or none on this side."
    own = read_own(folder)
    file = Path(folder) / 'outcomes.npz'
    if not file.is_file():
        raise ValueError(f'{folder}: collect has not finished; call it again')
    outcomes = rollouts.load(file)
    rows = own_split(outcomes.problem, own.calibration).get(side, np.arange(len(outcomes)))
    if not len(rows):
        raise ValueError(f'{folder}: there are too few problems; call collect with more')
    return replace(rollouts.take(outcomes, rows), split=np.array(side))


CLASSES = ('min-prob threshold', 'linear', 'all features')  # of routers, the simplest first
min_prob = baselines.low('min_prob')


def seen(outcomes: rollouts.Outcomes, columns) -> tuple:
    "The columns that the models' interfaces give: an API shows no logits."
    return tuple(name for name in columns if not np.isnan(outcomes.features[name]).all())


def all_settings(outcomes, router, reading: str) -> policy.Curve:
    "A router at its thresholds, the large model alone first. What is chosen is shown on the same problems."
    doubt = router(outcomes.features)
    kappas = rollouts.thresholds(doubt, curves.MOST)
    unit = gain.unit_of(outcomes)
    routed = rollouts.replay(outcomes, doubt, kappas, unit, reading)
    routed = curves.with_large(outcomes, unit, routed)
    return policy.Curve([None, *kappas], routed, routed)


def choices(outcomes, router, reading: str, alpha: float) -> dict:
    "What each rule of `policy.RULES` chooses, as `results.Choice`s."
    counts = np.ones((1, len(outcomes)))
    return results.choose([all_settings(outcomes, router, reading)], (counts, counts), alpha)


def save_policy(trained: policy.Policy, folder, **facts) -> None:
    "Write policy.json and theta.safetensors. `facts`: what else is known, such as kappa."
    from safetensors.torch import save

    shape = dict(columns=trained.columns, hidden=trained.net.hidden, n_models=trained.net.n_out)
    scale = dict(mean=trained.mean.tolist(), std=trained.std.tolist())
    util.write_file(Path(folder) / 'theta.safetensors', save(dict(theta=trained.theta)))
    util.write_file(
        Path(folder) / 'policy.json', json.dumps(shape | scale | facts, indent=1) + '\n'
    )


def load_policy(folder) -> tuple:  # (`policy.Policy`, facts)
    "Read what `save_policy` wrote. FileNotFoundError: there is none."
    from safetensors.torch import load

    facts = json.loads((Path(folder) / 'policy.json').read_text())
    columns, hidden = tuple(facts.pop('columns')), tuple(facts.pop('hidden'))
    mean, std = (np.array(facts.pop(name)) for name in ('mean', 'std'))
    net = policy.Network(len(columns), facts.pop('n_models'), hidden)
    theta = load((Path(folder) / 'theta.safetensors').read_bytes())['theta']
    return policy.Policy(columns, mean, std, net, theta), facts


def train(
    folder,  # of `collect`
    alpha: float = gain.ALPHA,  # accuracy that may be lost, as for `calibrate`
    reading: str = 'continue',  # the large model goes on after the unsure step; "rewrite": it writes it again
    steps: int | None = None,  # of the policy; None: those of `s`
    seeds: int = 3,  # networks, of which one is taken
    s: settings.Training = settings.Training(),  # the other hyper-parameters
) -> pd.DataFrame:  # right answers and cost of each router and seed on the training problems
    """Train the routers among which `calibrate` chooses. Nothing is deployed yet.

    With fewer than 200 training problems there is one, a threshold. ValueError: `collect` has not finished, or a bad
    argument."""
    outcomes = own_table(folder, 'train')
    show_cut(own_table(folder), read_own(folder))
    util.one_of('reading', reading, rollouts.READINGS)
    settings.checked('seeds', seeds, settings.Count)
    s = replace(s, alpha=alpha, steps=steps or s.steps)

    def fit(columns, s, seed=0):
        columns = seen(outcomes, columns)
        return training.train(outcomes, columns, s, gain.unit_of(outcomes), reading, seed)[0]

    routers = [(CLASSES[0], min_prob)] if seen(outcomes, ['min_prob']) else []
    trained = {}
    if len(outcomes) >= gain.LEARNABLE or not routers:
        networks = [fit(results.FULL, s, seed) for seed in range(seeds)]
        trained[CLASSES[1]] = fit(results.LINE, replace(s, hidden=()))
        routers += [(CLASSES[1], trained[CLASSES[1]]), *[(CLASSES[2], net) for net in networks]]
    rows = []
    for name, router in routers:
        choice = choices(outcomes, router, reading, s.alpha)['tuned']
        rows.append(dict(router=name, right=choice.accuracy[0], cost=choice.calibration_cost[0]))
    if trained:
        costs = [row['cost'] for row in rows[-seeds:]]
        median = np.argsort(costs, kind='stable')[seeds // 2]
        trained[CLASSES[2]] = networks[median]
    place = Path(folder) / 'trained'
    for name, router in trained.items():
        save_policy(router, place / name)
    facts = dict(reading=reading, routers=list(dict(routers)))
    util.write_file(place / 'routers.json', json.dumps(facts, indent=1) + '\n')
    return pd.DataFrame(rows)


# ---- the promise


def load_trained(folder) -> tuple:  # (name -> router, the simplest first; reading)
    "What `train` made. FileNotFoundError: it did not."
    read_own(folder)
    place = Path(folder) / 'trained'
    if not (place / 'routers.json').is_file():
        raise FileNotFoundError(f'{folder}: nothing is trained yet; call train')
    facts = json.loads((place / 'routers.json').read_text())
    routers = {}
    for name in facts['routers']:
        routers[name] = min_prob if name == CLASSES[0] else load_policy(place / name)[0]
    return routers, facts['reading']


def set_aside(folder, routers) -> dict:  # name -> `rollouts.Outcomes`
    "The problems from which a router has not learnt. The threshold learns from none."
    sides = {name: '' if name == CLASSES[0] else 'calibration' for name in routers}
    tables = {side: own_table(folder, side) for side in set(sides.values())}
    return {name: tables[side] for name, side in sides.items()}


def rule_of(guarantee: bool, compared: int) -> str:
    "A guarantee for one of three routers gives each a third of the 10 %."
    guaranteed = policy.RULES[1] if compared == 1 else policy.RULES[2]
    return guaranteed if guarantee else policy.RULES[0]


def choose(folder, alpha: float, guarantee: bool) -> tuple:  # (router, `live.Promise`)
    "The simplest router whose cost is at most 5 % above the cheapest, on the calibration problems."
    alpha = settings.checked('alpha', alpha, settings.Probability)
    routers, reading = load_trained(folder)
    tables = set_aside(folder, routers)
    rule = rule_of(guarantee, len(routers))
    chosen = {}
    for name, router in routers.items():
        chosen[name] = choices(tables[name], router, reading, alpha)[rule]
    best = results.simplest(list(chosen.values()))
    (name,) = [name for name in chosen if chosen[name].by_seed is best.by_seed]
    ((kappa, right, _),) = best.by_seed
    router, outcomes = routers[name], tables[name]
    unit = gain.unit_of(outcomes)
    highest = rollouts.highest_so_far(router(outcomes.features), len(outcomes.models) - 1)
    handed_over = 1.0 if kappa is None else float((highest[:, -1] >= kappa).mean())
    return router, live.Promise(
        router=live.LARGE if kappa is None else name,
        kappa=None if kappa is None else float(kappa),
        reading=reading,
        unit=unit,
        alpha=alpha,
        guarantee=guarantee,
        agreement=read_own(folder).agreement,
        n=len(outcomes),
        right=right,
        large_right=float(outcomes.right[:, 0, -1].mean()),
        handed_over=handed_over,
        costs={name: float(choice.calibration_cost[0]) for name, choice in chosen.items()},
        large_cost=float(rollouts.large_alone(outcomes, unit).cost.mean()),
    )


TIMES = 1, 2, 3, 4, 6, 8, 12, 16  # as many calibration problems


def questions_for(folder, alpha: float) -> int | None:
    """About how many questions in all a guarantee of alpha needs if it is to save 5 %; None: more than 16 times yours.

    The calibration problems stand for new ones: each is counted several times."""
    routers, reading = load_trained(folder)
    tables = set_aside(folder, routers)
    rule = rule_of(True, len(routers))
    for times in TIMES:
        for name, router in routers.items():
            rows = np.tile(np.arange(len(tables[name])), times)
            larger = rollouts.take(tables[name], rows)
            choice = choices(larger, router, reading, alpha)[rule]
            if choice.calibration_cost[0] <= live.HARDLY:
                return times * len(own_table(folder))
    return None


def calibrate(
    folder,  # of `collect` and `train`
    alpha: float = gain.ALPHA,  # accuracy that may be lost against the large model
    guarantee: bool = True,  # for new questions, with 90 %; False: on the calibration problems alone
) -> live.Promise:
    """Choose router and threshold on the problems set aside, deploy them, and print the promise.

    If none saves and keeps alpha, the large model alone is deployed, and the promise says how many questions would do.
    FileNotFoundError or ValueError: nothing is collected or trained yet, or alpha is no share."""
    router, promise = choose(folder, alpha, guarantee)
    place, facts = Path(folder) / 'router', asdict(promise)
    if isinstance(router, policy.Policy):
        save_policy(router, place, **facts)
    else:
        (place / 'theta.safetensors').unlink(missing_ok=True)
        util.write_file(place / 'policy.json', json.dumps(facts, indent=1) + '\n')
    print(promise)
    if guarantee:
        wanted = alpha / 2 if promise.kappa is not None else alpha
        needed = questions_for(folder, wanted)
        number = 'more than 16 times as many' if needed is None else f'about {needed:,}'
        print(
            f'A promise of {100 * wanted:g} of 100 needs {number} questions in all if it is to save 5 %.'
        )
    return promise


def curve(
    folder,  # of `collect` and `train`
    alphas=(0.01, 0.02, 0.03, 0.05, 0.1, 0.2),  # accuracy that may be lost
    guarantee: bool = True,  # as for `calibrate`
) -> pd.DataFrame:  # a row per alpha
    """What `calibrate` would choose at each alpha. Nothing is deployed or changed.

    `cost`: of the large model's. `questions`: in all, about as many as a guarantee of alpha needs to save 5 %."""
    rows = []
    for alpha in alphas:
        found = choose(folder, alpha, guarantee)[1]
        row = dict(alpha=alpha, router=found.router, cost=found.cost)
        row |= dict(right=found.right, large_right=found.large_right)
        rows.append(row | dict(questions=questions_for(folder, alpha)))
    return pd.DataFrame(rows).astype(dict(questions='Int64'))


# ---- at work


def load_router(folder) -> tuple:  # (router, `live.Promise`)
    "The router that `calibrate` deployed. FileNotFoundError: there is none."
    place = Path(folder) / 'router'
    if not (place / 'policy.json').is_file():
        raise FileNotFoundError(f'{folder}: no router is deployed yet; call train and calibrate')
    facts = json.loads((place / 'policy.json').read_text())
    router = min_prob
    if 'columns' in facts:
        router, facts = load_policy(place)
    return router, live.Promise(**facts)


def open_router(
    folder,  # of `collect`, `train` and `calibrate`
    models,  # small to large: names, `ModelOptions`, or open models
    max_cents: float = 100.0,  # never spend more on paid models, `collect` included
    **options,  # of `ModelOptions`, for models that are given by name
) -> live.OwnRouter:
    "Open the router and its models. ValueError if they do not fit together."
    own = read_own(folder)
    router, promise = load_router(folder)
    models = opened(models, folder, max_cents, options)
    if draw_settings(own.name, models)[1] != own.draws:
        raise ValueError(
            f'{folder}: the router was made with {", ".join(own.models)}; it does not fit other '
            'models, or the same ones with another price, size, server or sampling'
        )
    return live.OwnRouter(models, router, promise, own)


def route(
    folder,  # with a router that `calibrate` deployed
    questions,  # a question, or a list
    models,  # small to large: names, `ModelOptions` or open models; or a YAML file of `ModelOptions`
    **options,  # of `open_router`, such as max_cents (100); and of `ModelOptions`
):
    "Answer a question (as a `live.Routed`) or a list. To ask often, use `open_router`."
    return open_router(folder, models, **options).route(questions)


def service(folder, models, **options):  # of `open_router`
    "The router of a folder under its name, and its models as `small` and `large`."
    from stepwise_routing.serve import Service

    names = dict(small='small', large='large') | {Path(folder).resolve().name: 'router'}
    router = open_router(folder, models, **options)
    replies = paid_replies(router.models)
    if replies is not None:
        replies.check_cap()  # or each request would fail
    return Service(router, names)


@contextlib.contextmanager
def serving(
    folder,  # of `collect`, `train` and `calibrate`
    models,  # as for `open_router`
    port: int = 0,  # 0: any free one
    host: str = '127.0.0.1',  # address to listen on; any other than 127.0.0.1 needs a key
    **options,  # of `open_router`
):  # base_url
    """An OpenAI-compatible server, for a `with` block.

    If the environment variable STEPWISE_ROUTING_KEY is set, requests must send its value as their key.
    ValueError as of `open_router`, or if other machines could connect without a key."""
    from stepwise_routing import serve as server

    with server.running(service(folder, models, **options), port, host) as url:
        yield url


def serve(
    folder,  # with a router that `calibrate` deployed
    models,  # small to large: names, `ModelOptions` or open models; or a YAML file of `ModelOptions`
    port: int = 8000,
    host: str = '127.0.0.1',  # address to listen on; any other than 127.0.0.1 needs a key
    **options,  # of `open_router`, such as max_cents (100, `collect` included); and of `ModelOptions`
) -> None:
    "Serve as `serving` does, until Ctrl-C or SIGTERM. Calls under way may still end."
    from stepwise_routing import serve as server

    server.serve(service(folder, models, **options), port, host)


for call in (probe, collect, train, curve, calibrate, open_router, route, serving, serve):
    util.explain_parameters(call)
