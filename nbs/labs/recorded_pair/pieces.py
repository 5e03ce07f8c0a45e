"""Keeps what is drawn so far in one small file: `python -m recorded_pair.pieces save STORE FILE`, or `load FILE STORE`.

The drawing takes many hours and may move from machine to machine. A piece holds all edges of a store whole, finished
problems or not; loaded into a new store, the drawing goes on where it stopped.
"""

import argparse
import json
import lzma
from pathlib import Path

from stepwise_routing.records import Step
from stepwise_routing.store import RolloutStore
from stepwise_routing.util import write_file
from stepwise_routing.data.recorded import line, read_edge, recorded_fields
from stepwise_routing.method.routers import Grade

FOLDER = Path(__file__).parent / 'pieces'


def read_piece(file, record=Step) -> tuple:  # settings, (key, record) pairs
    "What a piece holds."
    rows = lzma.decompress(Path(file).read_bytes()).decode().splitlines()
    (_, settings), *edges = map(json.loads, rows)
    return settings, [read_edge(key, values, record) for _, key, values in edges]


def save_piece(store_path, file, record=Step, without=()) -> int:  # edges
    "Write a store as a piece, less what the pieces `without` hold; the same store gives the same bytes."
    left_out = {key for piece in without for key, _ in read_piece(piece, record)[1]}
    with RolloutStore(store_path, readonly=True, record=record) as store:
        lines = [line('settings', store.settings)]
        for key in sorted(set(store.keys()) - left_out, key=str):
            lines.append(line('edge', key, recorded_fields(store.get(*key), keep_tokens=True)))
    data = ''.join(lines).encode()
    write_file(file, lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return len(lines) - 1


def load_piece(file, store_path, record=Step) -> int:  # edges
    "Put the edges of a piece into a store, made if there is none; edges that it holds stay as they are."
    settings, edges = read_piece(file, record)
    with RolloutStore(store_path, settings, record=record) as store:
        store.put_many(edges)
    return len(edges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('action', choices=('save', 'load'))
    parser.add_argument('source')
    parser.add_argument('target')
    parser.add_argument('--grades', action='store_true', help='the store holds grades, not steps')
    parser.add_argument(
        '--without', nargs='*', default=[], help='pieces whose content is not saved again'
    )
    args = parser.parse_args()
    record = Grade if args.grades else Step
    if args.action == 'save':
        count = save_piece(args.source, args.target, record, args.without)
    else:
        count = load_piece(args.source, args.target, record)
    print(f'{args.target}: {count} edges')


if __name__ == '__main__':
    main()
