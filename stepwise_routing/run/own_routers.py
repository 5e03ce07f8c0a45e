"""Adds your own router to the tables and figures of a finished run.

Here belongs the one call that does it. Choosing the router's threshold and counting its cost belong in
`method.comparison`, as for all methods. Writing tables belongs in `report`.
"""

from ..base.tools import save_rows
from ..method.comparison import (
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
from .config import Run, Setting
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
    setting: Setting, benchmark: str, router
) -> tuple:  # rows on test problems, `Grid`, `Point`s
    "The rows of a router at all its thresholds. The chosen threshold is chosen on calibration problems."
    tables = {split: read_table(setting, benchmark, split) for split in ('calibration', 'test')}
    calibration, test = tables.values()
    method = at_thresholds(router, score_thresholds(router, calibration))
    config = setting.run.config
    grid = grid_search(method, calibration, config.policy.alpha, setting.unit)
    samples = draw_samples(calibration, test, config.results.n_boot, config.seed)
    points, _ = points_of(method, grid, tables, samples)
    return method_rows(method, test, grid.threshold), grid, points


def without(frame, router) -> list:  # of tuples
    "The rows of other routers."
    is_same = (frame['method'] == router.name) & (frame['on_escalate'] == router.on_escalate)
    return list(frame[~is_same].itertuples(index=False, name=None))


def add_router(
    run: Run,  # finished up to chapter 04b, as of `open_run`
    router,  # a `Router` with a `name` of its own and `table_score`, such as a `ThresholdRouter`
) -> dict:  # "open", "api" -> `SettingResults`, with the new rows
    """Put a router of yours into the tables and figures of a run, by the rule that chose all others.

    The same name replaces its earlier rows. The main figure shows six methods; for yours, draw
    `draw_accuracy_cost(**points, methods=[...])`. ValueError for a router that cannot be replayed.
    """
    for setting in run.settings:
        for benchmark in setting.benchmarks:
            files = setting.files
            own = read_rows(files.methods(benchmark))
            check_router(router, set(zip(own['method'], own['on_escalate'])))
            rows, grid, points = rows_of(setting, benchmark, router)
            earlier = without(read_rows(files.methods(benchmark, '-own')), router)
            earlier_grids = without(
                read_csv(files.methods(benchmark, '-own-grid'), GRID_COLUMNS), router
            )
            save_rows(files.methods(benchmark, '-own'), [*earlier, *rows], COLUMNS)
            grids = [*earlier_grids, *grid_rows([grid])]
            save_rows(files.methods(benchmark, '-own-grid'), grids, GRID_COLUMNS)
            own_points = read_points(
                files.points(benchmark, '-own'), setting.run.config.results.n_boot
            )
            own_points |= {(p.method, p.on_escalate, p.target): p for p in points}
            save_points(files.points(benchmark, '-own'), own_points.values())
    results = load_run(run)
    report_paper(results)
    report(results, 'metrics')
    for r in results.values():
        report_accuracy_cost(r)
    return results
