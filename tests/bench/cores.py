"""How far do more cores carry? `python tests/bench/cores.py [--profile micro] [--no-api]`

Draws what a profile draws, job after job in one process and into a fresh store, and takes the processor seconds of each
job. From them follows when the last of 1, 2, 4, 8 and 16 workers ends, who take jobs in the order of `in_processes`:
with whole benchmarks as jobs, and with parts of benchmarks. A worker loads torch, models and kernels once. The calls of
the API setting are one job; its seconds are those of this process and of its server together, which overlap in a run,
so they are an upper bound."""
import argparse
import heapq
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from stepwise_routing.run.config import Run, read_run
from stepwise_routing.run.drawing import Part, draw_edges, draw_parts, lent_stores
from stepwise_routing.run.stages import open_backends

WORKERS = 1, 2, 4, 8, 16

def seconds(): # of the processor, servers that have ended included
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

def timed(work):
    start = seconds()
    work()
    return seconds() - start

def makespan(jobs, workers, start):
    "When the last worker ends; jobs are (size, seconds), the largest first, of equal ones the last."
    order = sorted(range(len(jobs)), key=lambda i: (-jobs[i][0], -i))
    free = [start]*min(workers, len(jobs))
    for i in order: heapq.heappush(free, heapq.heappop(free) + jobs[i][1])
    return max(free)

def load_all(setting):
    with TemporaryDirectory() as folder, open_backends(setting) as models:
        few = Run('few', setting.run.config, Path(folder), Path(folder))
        draw_edges(type(setting)(few, setting.name), Part(setting.benchmarks[0], 0, 200), models)

def open_jobs(setting):
    "(Benchmark, problems, seconds) of each part."
    with open_backends(setting) as models:
        for b in setting.benchmarks:
            with lent_stores(setting, [b], open_backends):
                for part in draw_parts(setting, b, workers=2):
                    yield b, part.count(setting), timed(lambda: draw_edges(setting, part, models))

def api_job(setting):
    def work():
        with open_backends(setting) as models:
            for b in setting.benchmarks: draw_edges(setting, Part(b), models)
    return 'API', sum(Part(b).count(setting) for b in setting.benchmarks), timed(work)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--profile', default='micro')
    parser.add_argument('--no-api', action='store_true')
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        run = Run(args.profile, read_run(args.profile).config, Path(folder)/'run', Path(folder)/'store')
        open_setting, *api = run.settings
        start = timed(lambda: load_all(open_setting))
        parts = pd.DataFrame(open_jobs(open_setting), columns=['benchmark', 'problems', 'seconds'])
        paid = [] if args.no_api else [api_job(setting)[1:] for setting in api]
    sums = parts.groupby('benchmark', sort=False).agg(
        parts=('seconds', 'size'), problems=('problems', 'sum'), seconds=('seconds', 'sum'),
        shortest=('seconds', 'min'), longest=('seconds', 'max'))
    print(f'a worker loads for {start:.1f} s; the API setting takes {sum(s for _, s in paid):.1f} s')
    print(sums.round(1), end='\n\n')
    whole = list(sums[['problems', 'seconds']].itertuples(index=False, name=None))
    divided = list(parts[['problems', 'seconds']].itertuples(index=False, name=None))
    columns = {'by benchmark': whole, 'by problem': divided}
    columns |= {f'{name}, with API': jobs + paid for name, jobs in columns.items() if paid}
    rows = {n: {name: makespan(jobs, n, start) for name, jobs in columns.items()} for n in WORKERS}
    print(pd.DataFrame(rows).T.rename_axis('workers').round(1))
