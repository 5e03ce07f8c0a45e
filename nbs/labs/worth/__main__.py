"""Does the whole lab, or goes on with it: `python -m worth`, in nbs/labs.

It writes tables/worth and figures/worth. With `--redraw` it reads tables/worth and draws the figure alone.
"""

import argparse

from joblib import cpu_count

from stepwise_routing.base.tools import find_project
from stepwise_routing.run.notebooks import sole_runner

from .cells import PARTS, do_cells, read_cells
from .plan import Plan, folders_of
from .pools import level_facts, make_pools
from .report import write_figure, write_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--redraw', action='store_true', help='draw the figure from tables/worth')
    parser.add_argument('--workers', type=int, default=cpu_count(), help='processes side by side')
    args = parser.parse_args()
    root = find_project().root
    tables = root / 'tables' / 'worth'
    plan = Plan()
    paths = []
    if not args.redraw:
        folders = folders_of()
        with sole_runner(folders.root):
            make_pools(plan, folders, args.workers)
            do_cells(plan, folders, args.workers)
        parts = [read_cells(plan, folders, part) for part in PARTS]
        paths += write_tables(*parts, level_facts(folders), plan.alpha, tables)
    paths += write_figure(tables, root / 'figures' / 'worth', plan.alpha)
    for path in paths:
        print(path.relative_to(root))


if __name__ == '__main__':
    main()
