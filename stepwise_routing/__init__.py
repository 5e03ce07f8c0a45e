"""Policy-guided stepwise model routing: the names that most programs need

They are imported when they are first used, so that `import stepwise_routing` takes no time. Everything else is in the
modules of the package: `data`, `models`, `method`, `own`, `report` and `run`.
"""

__version__ = "1.0.0.dev0"

ENTRY_POINTS = {  # name -> the module that it is in
    'probe': 'own',
    'collect': 'own',
    'train': 'own',
    'calibrate': 'own',
    'curve': 'own',
    'route': 'own',
    'open_router': 'own',
    'load_problems': 'data.benchmarks',
    'ModelOptions': 'models.open',
    'open_models': 'models.open',
    'Store': 'store',
    'Outcomes': 'method.rollouts',
    'shipped_outcomes': 'method.rollouts',
    'replay': 'method.rollouts',
    'walk': 'method.rollouts',
    'Method': 'method.results',
    'compare': 'method.results',
    'open_run': 'run.stages',
}

__all__ = ['__version__', *ENTRY_POINTS]


def __getattr__(name):
    "Import an entry point when it is first asked for; its docstring gets a line per parameter, for `help`."
    if name not in ENTRY_POINTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from importlib import import_module

    from .util import explain_parameters

    thing = getattr(import_module(f'{__name__}.{ENTRY_POINTS[name]}'), name)
    globals()[name] = explain_parameters(thing)
    return thing


def __dir__():
    return sorted(__all__)
