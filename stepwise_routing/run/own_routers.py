"""Adds your own router to the tables and figures of a finished run.

Here belongs the one call that does it. Choosing the router's threshold and counting its cost belong in
`method.comparison`, as for all methods. Writing tables belongs in `report`.
"""

from ..util import save_rows
from ..method.comparison import (
    CERTAIN_COLUMNS,
    COLUMNS,
    GRID_COLUMNS,
    at_thresholds,
    grid_rows,
    grid_search,
    method_rows,
)
from ..method.results import read_csv, read_rows
from ..method.routers import score_thresholds
from ..method.uncertainty import draw_samples, points_of, read_points, save_points
from ..report.figures import report_accuracy_cost
from ..report.tables import report, report_paper
from .config import Run
from .stages import load_run, read_table


def check_router(router, taken) -> None:  # (name, reading) pairs of the run's own methods
    "ValueError in one line if a router cannot have a row in the tables."
    name = getattr(router, 'name', '')
    if not isinstance(name, str) or not name:
        raise ValueError(f'{router!r} has no name: give its class a `name` for its rows')
    if (name, router.on_escalate) in taken:
        raise ValueError(f'this run has a method {name!r} already: give your router another name')
    if not hasattr(router, 'table_score'):
        raise ValueError(
            f'{name} has no table_score(table), so outcome tables cannot replay it: '
            'derive it from ThresholdRouter and add one'
        )


def rows_of(
    run: Run, benchmark: str, unit: str, router
) -> tuple:  # rows on test problems, `Grid`, `Point`s
    "The rows of a router at all its thresholds. The chosen threshold is chosen on calibration problems."
    tables = {split: read_table(run, benchmark, split) for split in ('calibration', 'test')}
    calibration, test = tables.values()
    method = at_thresholds(router, score_thresholds(router, calibration))
    config = run.config
    grid = grid_search(method, calibration, config.policy.alpha, unit)
    samples = draw_samples(calibration, test, config.results.n_boot, config.seed)
    points, _ = points_of(method, grid, tables, samples)
    return method_rows(method, test, grid.threshold), grid, points


def replace_rows(path, read, columns, router, rows) -> None:
    "Write a router's rows into a file, behind those of other routers; its earlier rows go."
    frame = read(path, columns)
    is_same = (frame['method'] == router.name) & (frame['on_escalate'] == router.on_escalate)
    others = frame[~is_same].itertuples(index=False, name=None)
    save_rows(path, [*others, *rows], columns)


def add_to_benchmark(run: Run, benchmark: str, unit: str, router) -> None:  # as of `add_router`
    "A router's rows, calibration grid, certain setting and points, in the files of a benchmark."
    files = run.files
    own = read_rows(files.methods(benchmark, unit))
    check_router(router, set(zip(own['method'], own['on_escalate'])))
    rows, grid, points = rows_of(run, benchmark, unit, router)
    replace_rows(files.methods(benchmark, unit, '-own'), read_rows, COLUMNS, router, rows)
    parts = (
        ('-own-grid', GRID_COLUMNS, grid_rows([grid])),
        ('-own-certain', CERTAIN_COLUMNS, [grid.certain_row()]),
    )
    for part, columns, part_rows in parts:
        replace_rows(files.methods(benchmark, unit, part), read_csv, columns, router, part_rows)
    path = files.points(benchmark, unit, '-own')
    own_points = read_points(path, run.config.results.n_boot)
    own_points |= {(p.method, p.on_escalate, p.target): p for p in points}
    save_points(path, own_points.values())


def add_router(
    run: Run,  # finished up to chapter 04b, as of `open_run`
    router,  # a `Router` with a `name` of its own and `table_score`, or a function of a training table that makes one
) -> dict:  # unit of cost -> `RunResults`, with the new rows
    """Put your router into the tables and figures of a run. Its setting is chosen by the same rules as all others.

    A function is called for every benchmark with its `OutcomeTable` of training problems, so a router can
    be fitted to each. A router of the same name replaces its earlier rows. The main figure shows six methods. To draw
    yours, call `draw_accuracy_cost(**points, methods=[...])`. ValueError if outcome tables cannot replay it.
    """
    for benchmark in run.benchmarks:
        own = router(read_table(run, benchmark, 'train')) if callable(router) else router
        for unit in run.units:
            add_to_benchmark(run, benchmark, unit, own)
    results = load_run(run)
    report_paper(results)
    for name in ('certain', 'comparison'):
        report(results, name)
    for r in results.values():
        report_accuracy_cost(r)
    return results
