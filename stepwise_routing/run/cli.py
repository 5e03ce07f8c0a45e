"""The command line `stepwise-routing`: its words, their help, and mistakes in one line.

The work of a command is in the modules that it calls; they are imported when it runs.
"""

import contextlib
import signal
import sys
from typing import Annotated

import typer

from .. import __version__
from ..util import one_line, own_lines

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help='Route the steps of a problem between a small and a large language model.',
)

FOLDER = typer.Argument(help='folder of your router', metavar='FOLDER')
QUESTIONS = typer.Argument(help='JSONL, JSON or CSV file, with "question" and, if known, "answer"')
MODELS = typer.Argument(
    help='names, small to large; or a YAML file: a list with "name" and what else help(stepwise_routing.ModelOptions) shows'
)
CENTS = typer.Option(help='most US cents for paid models, all calls with this folder together')
FIELD = typer.Option('--field', help='a field has another name: question=problem; answer= for none')
STEPS = typer.Option(help='of a chain')
SHARE = typer.Option(help='share of the questions that is set aside for calibration')
ALPHA = typer.Option(help='accuracy that may be lost')
GUARANTEE = typer.Option(help='for new questions, with 90 %; or for these alone')


@contextlib.contextmanager
def told_to_stop():
    "Ctrl-C, or SIGTERM, in a command that goes on when it is called again."
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print('interrupted; the same command goes on: what was drawn is kept', file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


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

    with told_to_stop():
        chapters.reproduce(profile, as_changes(parameter), draw, keep_outputs)


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


def own_models(words: list):
    "Names, or the path of a file."
    return words[0] if len(words) == 1 else words


def own_fields(pairs: list) -> dict:
    "--field question=problem as a dict. ValueError for a bad pair."
    fields = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition('=')
        if not equals or ours not in ('question', 'answer'):
            raise ValueError(f'--field {pair}: write --field question=NAME or --field answer=NAME')
        fields[ours] = theirs or None
    return fields


def show(frame) -> None:
    print(frame.round(3).to_string(index=False))


@app.command()
def probe(
    folder: Annotated[str, FOLDER],
    questions: Annotated[str, QUESTIONS],
    models: Annotated[list[str], MODELS],
    n: Annotated[int, typer.Option('-n', help='questions, chosen at random')] = 40,
    max_cents: Annotated[float, CENTS] = 100.0,
    max_steps: Annotated[int, STEPS] = 50,
    calibration: Annotated[float, SHARE] = 0.4,
    field: Annotated[list[str], FIELD] = [],
):
    "Can a router between these models pay? Each answers a few questions alone; `collect` goes on from there."
    from .. import own

    given = dict(max_cents=max_cents, max_steps=max_steps, calibration=calibration)
    with told_to_stop():
        own.probe(folder, questions, own_models(models), n, fields=own_fields(field), **given)


@app.command()
def collect(
    folder: Annotated[str, FOLDER],
    questions: Annotated[str, QUESTIONS],
    models: Annotated[list[str], MODELS],
    max_cents: Annotated[float, CENTS] = 100.0,
    max_steps: Annotated[int, STEPS] = 50,
    calibration: Annotated[float, SHARE] = 0.4,
    field: Annotated[list[str], FIELD] = [],
):
    "Draw and grade what a router learns from. An interrupted call goes on; further questions are added."
    from .. import own

    given = dict(max_cents=max_cents, max_steps=max_steps, calibration=calibration)
    with told_to_stop():
        own.collect(folder, questions, own_models(models), fields=own_fields(field), **given)


@app.command()
def train(
    folder: Annotated[str, FOLDER],
    alpha: Annotated[float, ALPHA] = 0.05,
    reading: Annotated[str, typer.Option(help='or rewrite')] = 'continue',
):
    "Train the routers among which `calibrate` chooses."
    from .. import own

    show(own.train(folder, alpha, reading))


@app.command()
def curve(folder: Annotated[str, FOLDER], guarantee: Annotated[bool, GUARANTEE] = True):
    "What `calibrate` would choose at each alpha."
    from .. import own

    show(own.curve(folder, guarantee=guarantee))


@app.command()
def calibrate(
    folder: Annotated[str, FOLDER],
    alpha: Annotated[float, ALPHA] = 0.05,
    guarantee: Annotated[bool, GUARANTEE] = True,
):
    "Choose a router and its threshold, and deploy them with a promise."
    from .. import own

    own.calibrate(folder, alpha, guarantee)


@app.command()
def route(
    folder: Annotated[str, FOLDER],
    question: str,
    models: Annotated[list[str], MODELS],
    max_cents: Annotated[float, CENTS] = 100.0,
):
    "Answer a question, and say who wrote what."
    from .. import own

    answer = own.route(folder, question, own_models(models), max_cents=max_cents)
    for name, step in zip(answer.models, answer.steps):
        print(f'{one_line(name)}: {own_lines(step, "  ")}')
    print(f'{answer.cost:.3g} {answer.unit}; tokens: {", ".join(map(str, answer.tokens))}')


@app.command()
def serve(
    folder: Annotated[str, FOLDER],
    models: Annotated[list[str], MODELS],
    port: int = 8000,
    host: Annotated[str, typer.Option(help='any other one needs a key')] = '127.0.0.1',
    max_cents: Annotated[float, CENTS] = 100.0,
):
    """Serve a router to programs that speak the OpenAI protocol. They ask for the name of the folder, "small" or "large".

    If the environment variable STEPWISE_ROUTING_KEY is set, requests must send its value as their API key.
    """
    from .. import own

    own.serve(folder, own_models(models), port=port, host=host, max_cents=max_cents)


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
