"""Writes what was drawn as a recorded benchmark: `python -m recorded_pair.record STORES --help`, in nbs/labs.

The first turns are recorded whose chains are complete: behind a gap the short chains end first, so the sample would
not be fair. A turn comes whole from one store: from the first one up to its first gap, then from the next one.
"""

import argparse
import json
import lzma
from contextlib import ExitStack
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

from stepwise_routing.data.benchmarks import find_benchmark, grade_by_rules, graded
from stepwise_routing.data.recorded import FOLDER
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.models.base import Request
from stepwise_routing.models.kept import Kept
from stepwise_routing.store import Store
from stepwise_routing.util import write_file

from .draw import ASK, PAIR, of_large, turns_of


def whole_chains(store: Store, split: str, problem) -> list | None:
    "All chains of a problem; None if one was not drawn to its end."
    small, large = (Kept(SimpleNamespace(spec=None, index=k), store) for k in (0, 1))
    alone = Request(problem, **ASK)
    asked = [(small, alone)]
    asked += [(large, request) for request in of_large(split, problem, small.stored(alone))]
    chains = []
    for model, request in asked:
        chains.append(model.stored(request))
        if not model.is_answered(request, chains[-1]):
            return None
    return chains


def whole_problems(stores: list, turns: list) -> list:  # of (store, split, problem, chains)
    "The problems of the first turns that are complete."
    found, stores = [], list(stores)
    for turn in turns:
        while stores:
            rows = [(stores[0], *pair, whole_chains(stores[0], *pair)) for pair in turn]
            if all(chains for *_, chains in rows):
                found += rows
                break
            stores.pop(0)
    return found


def with_names(settings: dict) -> dict:
    "The settings of a store whose models have the names of the tables."
    models = []
    for model, name in zip(settings['models'], PAIR):
        models.append(model | dict(name=name, spec=model['spec'] | dict(name=name)))
    return settings | dict(models=models)


def recorded_fields(step) -> dict:
    "The fields of a step that are not the default. Confidences of the large model are read by nobody."
    if step.model:
        step = replace(step, ids=(), ends=(), prob=(), max_logit=None, entropy=None)
    recorded = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if field.default is MISSING or value != field.default:
            recorded[field.name] = value
    return recorded


def line(*content) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(',', ':')) + '\n'


def recorded_file(stores: list, turns: list, receipt: dict) -> bytes:
    "The same draws give the same bytes."
    whole = whole_problems(stores, turns)
    benchmark = find_benchmark('gsm8k')
    settings, *further = [with_names(store.settings) for store in stores]
    about = dict(
        settings=settings, benchmark='gsm8k', licence=benchmark.source.licence, receipt=receipt
    )
    if further:
        about['further_settings'] = further  # of the later turns
    lines = [line('about', about)]
    for wanted in SPLITS:
        lines += [line('problem', s, asdict(problem)) for _, s, problem, _ in whole if s == wanted]
    pairs = []
    for _, _, problem, chains in whole:
        pairs += [(problem, benchmark.answer(problem, chain)) for chain in chains]
    verdicts = graded(grade_by_rules, pairs)
    for (problem_id, answer), right in sorted(verdicts.items(), key=str):
        lines.append(line('grade', problem_id, answer, right))
    source = {problem.id: store for store, _, problem, _ in whole}
    keys = [(key, store) for store in stores for key in store.keys() if source.get(key[0]) is store]
    for key, store in sorted(keys, key=lambda pair: str(pair[0])):
        lines.append(line('edge', key, recorded_fields(store.get(*key))))
    return lzma.compress(''.join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('stores', nargs='+', help='files of the drawn steps, earlier turns first')
    parser.add_argument('--data', help='folder with a copy of GSM8K; without it, the Hub')
    parser.add_argument('--turns', type=int, default=100, help='at most')
    parser.add_argument('--receipt', required=True, help='JSON file: how it was drawn')
    parser.add_argument('--out', default=FOLDER / 'gsm8k.jsonl.xz', help='the recorded file')
    args = parser.parse_args()
    receipt = json.loads(Path(args.receipt).read_text('utf-8'))
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(file)) for file in args.stores]
        data = recorded_file(stores, turns_of(args.turns, args.data), receipt)
    print(f'{write_file(args.out, data)}: {len(data):,} bytes')


if __name__ == '__main__':
    main()
