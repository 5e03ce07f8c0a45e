"""`stepwise-routing serve FOLDER ...`: serves a router in the OpenAI protocol until it is stopped.

Here belong the words of this command. It calls `own.serve`.
"""

from ..models.pair import Access, Model
from .parser import Parser


def serve_parser() -> Parser:
    "The words after `stepwise-routing serve`."
    parser = Parser(
        'stepwise-routing serve',
        description='Serve a router to programs that speak the OpenAI protocol. A request names the folder, '
        'or "small" or "large" for one of the models alone. Its answer says who wrote each step (stepwise) '
        'and what it cost (usage.cost, US dollars). If the environment variable STEPWISE_ROUTING_KEY is '
        'set, requests must send its value as their API key.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        'folder',
        metavar='FOLDER',
        help='a router: a folder of collect, train and calibrate',
    )
    add(
        '--models',
        nargs=2,
        required=True,
        metavar=('SMALL', 'LARGE'),
        help='names of the models',
    )
    add('--port', type=int, default=8000, help='default: 8000')
    add(
        '--host',
        default='127.0.0.1',
        help='address to listen on; default: 127.0.0.1, any other one needs a key',
    )
    add(
        '--max-cents',
        type=float,
        metavar='N',
        help='most US cents for paid models, all calls with this folder together',
    )
    each = 'one for both models, or one for each'
    add('--base-url', nargs='+', metavar='URL', help=f'address of the server: {each}')
    add(
        '--key-env',
        nargs='+',
        metavar='NAME',
        help=f'environment variable with the key of that server: {each}',
    )
    add(
        '--price',
        nargs='+',
        metavar='ROW',
        help='price: a row of PRICES, "INPUT/CACHED/OUTPUT" in US dollars per million tokens, or "free"; '
        f'{each}',
    )
    return parser


def with_options(
    names: list,  # of the models
    given: dict,  # option -> its values, one for all models or one per model; None: not given
) -> tuple:  # list of `Model`, and the `Access` of all
    "The models with their options. ValueError for another number of values."
    shared = {}
    each = [{} for _ in names]
    for option, values in given.items():
        if values and len(values) == 1:
            shared[option] = values[0]
        elif values and len(values) == len(names):
            for options, value in zip(each, values):
                options[option] = value
        elif values:
            word = option.replace('_', '-')
            raise ValueError(f'--{word} takes one value, or one for each model')
    return [Model(name, **options) for name, options in zip(names, each)], Access(**shared)


def serve(argv) -> None:  # the words after `stepwise-routing serve`
    "Serve until Ctrl-C or a signal to terminate. Errors as of `own.serve`."
    words = vars(serve_parser().parse_args(argv))
    names = 'base_url', 'key_env', 'price'
    given = {name: words.pop(name) for name in names}
    models, access = with_options(words.pop('models'), given)
    from ..data.benchmarks import register_own
    from ..own import serve

    register_own()
    serve(words.pop('folder'), models, access, **words)
