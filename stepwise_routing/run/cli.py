"""The command line `stepwise-routing`: its words, their help, and mistakes in one line.

The work of a command is in the modules that it calls; they are imported when it runs.
"""

import sys
from typing import Annotated

import typer

from .. import __version__
from ..util import one_line

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help='Route the steps of a problem between a small and a large language model.',
)

FOLDER = typer.Argument(help='folder of your router', metavar='FOLDER')
MODELS = typer.Option('--models', help='the small and the large model', metavar='SMALL LARGE')
CENTS = typer.Option(help='most US cents for paid models, all calls with this folder together')
URL = typer.Option('--base-url', help='address of the server: one for both models, or one for each')
KEY = typer.Option('--key-env', help='environment variable with the key of a server, as --base-url')
PRICE = typer.Option(
    help='row of PRICES, "free", or INPUT/CACHED/OUTPUT in dollars a million tokens'
)


# ---- results


def as_changes(pairs: list) -> dict:
    "-p policy.alpha=.05 as a dict. ValueError for a bad pair."
    from ..settings import read_yaml

    changes = {}
    for pair in pairs:
        name, equals, value = pair.partition('=')
        if not equals:
            raise ValueError(f'-p {pair}: write -p NAME=VALUE, such as -p policy.alpha=.05')
        changes[name] = read_yaml(value, name)
    return changes


@app.command()
def reproduce(
    profile: Annotated[str, typer.Option(help='a name of nbs/params, or a .yaml file')] = 'micro',
    parameter: Annotated[
        list[str], typer.Option('-p', '--parameter', help='change a setting: policy.alpha=.05')
    ] = [],
    draw: Annotated[
        int, typer.Option(help='draw so many problems a split again, 20 or more', min=0)
    ] = 0,
    keep_outputs: Annotated[
        bool, typer.Option('--write-back', help='store the outputs in the chapters')
    ] = False,
):
    "Run the chapters: tables, figures and a receipt. Drawn steps and paid replies are kept."
    from . import reproduce as chapters

    try:
        chapters.reproduce(profile, as_changes(parameter), draw, keep_outputs)
    except KeyboardInterrupt:
        print('interrupted; the same command goes on: what was drawn is kept', file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def figures():
    "Draw the figures of the newest run again, from its outcomes."
    from . import stages

    for name in stages.redraw():
        print(name)


@app.command()
def demo():
    "Route a few problems between the shipped models, and show who wrote which step."
    from .demo import show_demo

    show_demo()


@app.command(context_settings=dict(allow_extra_args=True, ignore_unknown_options=True))
def lab(context: typer.Context):
    "Open the chapters in JupyterLab. Further words are options of `jupyter lab`."
    from .reproduce import open_lab

    open_lab(context.args)


# ---- your own models


def own_models(names, base_url, key_env, price) -> list:  # of `ModelOptions`
    "The two models of a command. An option that is given once is for both."
    from ..models.open import ModelOptions

    models = []
    for i, name in enumerate(names):
        given = {}
        for option, values in (('base_url', base_url), ('key_env', key_env), ('price', price)):
            if values:
                given[option] = values[min(i, len(values) - 1)]
        models.append(ModelOptions(name=name, **given))
    return models


@app.command()
def serve(
    folder: Annotated[str, FOLDER],
    models: Annotated[tuple[str, str], MODELS],
    port: int = 8000,
    host: Annotated[str, typer.Option(help='any other one needs a key')] = '127.0.0.1',
    max_cents: Annotated[float, CENTS] = 100.0,
    base_url: Annotated[list[str], URL] = [],
    key_env: Annotated[list[str], KEY] = [],
    price: Annotated[list[str], PRICE] = [],
):
    """Serve a router to programs that speak the OpenAI protocol.

    If the environment variable STEPWISE_ROUTING_KEY is set, requests must send its value as their API key.
    """
    from .. import own

    given = own_models(models, base_url, key_env, price)
    own.serve(folder, given, port=port, host=host, max_cents=max_cents)


# ---- errors in one line


def main(argv=None) -> None:  # words of the command line; None: those of this process
    "The console command. It ends the process with a non-zero status after an error."
    try:
        app(args=argv, prog_name='stepwise-routing')
    except (ValueError, FileNotFoundError) as error:
        line, status = str(error), 2
    except (RuntimeError, ImportError, OSError) as error:
        line, status = str(error), 1
    print(f'stepwise-routing: {one_line(line)}', file=sys.stderr)
    raise SystemExit(status)


@app.callback(invoke_without_command=True)
def version_option(version: Annotated[bool, typer.Option('--version')] = False):
    if version:
        print(f'stepwise-routing {__version__}')
        raise typer.Exit
