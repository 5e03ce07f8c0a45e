"""Keeps what is drawn so far in one small file: `python -m recorded_pair.pieces save STORE FILE`, or `load FILE STORE`.

The drawing takes many hours and may move from machine to machine. A piece holds all edges of a store whole, finished
problems or not; loaded into a new store, the drawing goes on where it stopped.
"""

import argparse
import json
import lzma

from stepwise_routing.base.store import RolloutStore
from stepwise_routing.base.tools import write_file
from stepwise_routing.data.recorded import line, read_edge, recorded_fields


def save_piece(store_path, file) -> int:  # edges
    "Write a store as a piece; the same store gives the same bytes."
    with RolloutStore(store_path, readonly=True) as store:
        lines = [line('settings', store.settings)]
        for key in sorted(store.keys(), key=str):
            lines.append(line('edge', key, recorded_fields(store.get(*key), keep_tokens=True)))
    data = ''.join(lines).encode()
    write_file(file, lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return len(lines) - 1


def load_piece(file, store_path) -> int:  # edges
    "Put the edges of a piece into a store, made if there is none; edges that it holds stay as they are."
    with open(file, 'rb') as f:
        rows = [json.loads(row) for row in lzma.decompress(f.read()).decode().splitlines()]
    (_, settings), *edges = rows
    steps = [read_edge(key, fields) for _, key, fields in edges]
    with RolloutStore(store_path, settings) as store:
        store.put_many(steps)
    return len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('action', choices=('save', 'load'))
    parser.add_argument('source')
    parser.add_argument('target')
    args = parser.parse_args()
    work = save_piece if args.action == 'save' else load_piece
    print(f'{args.target}: {work(args.source, args.target)} edges')


if __name__ == '__main__':
    main()
