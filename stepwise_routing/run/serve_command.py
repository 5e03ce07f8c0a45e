"""`stepwise-routing serve FOLDER ...`: serves routers in the OpenAI protocol until it is stopped.

Here belong the words of this command. It calls `own.serve`.
"""

from ..models.pair import Access
from .parser import Parser


def serve_parser() -> Parser:
    "The words after `stepwise-routing serve`."
    parser = Parser(
        'stepwise-routing serve',
        description='Serve routers to programs that speak the OpenAI protocol. If the environment '
        'variable STEPWISE_ROUTING_KEY is set, requests must send its value as their API key.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('folders', nargs='+', metavar='FOLDER', help='folder of a calibrated router')
    add('--models', nargs=2, required=True, metavar=('SMALL', 'LARGE'), help='names of the models')
    add('--port', type=int, default=8000, help='port to listen on; 0: any free one (default 8000)')
    add(
        '--host', default='127.0.0.1', help='address to listen on; others than 127.0.0.1 need a key'
    )
    add('--max-cents', type=float, metavar='N', help='most US cents to spend, all routers together')
    add('--max-cents-each', type=float, metavar='N', help='most US cents to spend for each router')
    add('--fall-back', action='store_true', help='small goes on if the large model fails')
    add('--record', metavar='FILE', help='append questions and answers to a file, for drift')
    add('--base-url', metavar='URL', help='address of the server of a paid model')
    add('--key-env', metavar='NAME', help='environment variable with the key of that server')
    add('--price', metavar='ROW', help='row of PRICES that the paid model is billed by, or "free"')
    return parser


def serve(argv) -> None:  # the words after `stepwise-routing serve`
    "Serve until Ctrl-C or SIGTERM. Errors as of `own.serve`."
    words = vars(serve_parser().parse_args(argv))
    access = Access(**{name: words.pop(name) for name in ('base_url', 'key_env', 'price')})
    from ..own import serve

    serve(words.pop('folders'), words.pop('models'), access, **words)
