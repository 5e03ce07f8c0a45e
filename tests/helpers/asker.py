"Asks a toy server for n chains in a process of its own; the arguments of `main` are JSON on the command line."
import asyncio
import json
import resource
import sys

from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.interface import Request
from stepwise_routing.records import Problem
from stepwise_routing.util import run_async

P = Problem('toy', '1', 'How many?', '7')
OPTIONS = dict(price='gpt-4.1-mini', key_env='TOY_KEY', pause=0, timeout=5, identity=dict(toy=1))

def ask(k=0, steps=(), **kwargs): return Request(P, tuple(steps), lambda i: 1000*k + i, **kwargs)
def request(k): return ask(k, to_end=k % 2 == 0) # every other one to its end

def main(url, ledger, n, room=None, **options): # the most that a file may hold, in bytes
    "Print the texts of each chain, or its error; exit status 1 and a last line where there was one."
    if room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try: backend, error = OpenAIBackend('toy-model', base_url=url, ledger=ledger, **OPTIONS | options), None
    except OSError as e: sys.exit(f'{type(e).__name__}: {e}') # the disk is full
    async def every():
        return await asyncio.gather(*(backend.write(request(k)) for k in range(n)), return_exceptions=True)
    print('begun', flush=True)
    chains = run_async(every())
    try: run_async(backend.close())
    except OSError as e: error = e
    print(json.dumps([None if isinstance(c, Exception) else [s.text for s in c] for c in chains]), flush=True)
    error = error or next((c for c in chains if isinstance(c, Exception)), None)
    if error: sys.exit(f'{type(error).__name__}: {error}')

if __name__ == '__main__': main(**json.loads(sys.argv[1]))
