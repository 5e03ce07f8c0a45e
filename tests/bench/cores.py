"""How much do more cores help? `python tests/bench/cores.py [--profile micro] [--no-api]`

The script does all draws and walks of a profile in one process, one job after the other, with a fresh store. It
measures the processor seconds of each job. From these it computes when the last of 1, 2, 4, 8 and 16 workers would
end. Workers take jobs in the order of `in_rounds`. A job is a whole benchmark, or a part of one. A worker loads torch,
models and kernels once. Work between the rounds of walks is added in full, as if all workers waited for it. The calls
of the API setting are one job. Its seconds are those of this process plus those of its server. In a run the two
overlap, so this is an upper bound. No policy walks here: the profile micro has none that does."""
import argparse
import heapq
import resource
import time
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from stepwise_routing.run.config import Run, read_run
from stepwise_routing.run.drawing import Part, draw_edges, draw_parts, lent_stores
from stepwise_routing.run.stages import open_backends, read_all
from stepwise_routing.run.walking import job_size, lent_to_walk, walk_courses
from stepwise_routing.run.workers import in_rounds

WORKERS = 1, 2, 4, 8, 16

def seconds(): # of the processor, servers that have ended included
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

def timed(work):
    start = seconds()
    work()
    return seconds() - start

def largest_first(jobs): # (size, seconds); of equal ones the last
    return [jobs[i] for i in sorted(range(len(jobs)), key=lambda i: (-jobs[i][0], -i))]

def makespan(courses, workers, start):
    "The time when the last worker ends. A course is a list of rounds, a round is a list of (size, seconds)."
    courses = [deque(rounds) for rounds in courses]
    firsts = [(size, (took, i)) for i, rounds in enumerate(courses) for size, took in rounds[0]]
    left = [len(rounds.popleft()) for rounds in courses]
    waiting, under_way, now = deque(job for _, job in largest_first(firsts)), [], start
    while True:
        while waiting and len(under_way) < workers:
            took, i = waiting.popleft()
            heapq.heappush(under_way, (now + took, i))
        if not under_way: return now
        now, i = heapq.heappop(under_way)
        left[i] -= 1
        if not left[i] and courses[i]:
            jobs = courses[i].popleft()
            left[i] = len(jobs)
            waiting.extend((took, i) for _, took in largest_first(jobs))

# ---- drawing

def load_all(setting):
    with TemporaryDirectory() as folder, open_backends(setting) as models:
        few = Run('few', setting.run.config, Path(folder), Path(folder))
        draw_edges(type(setting)(few, setting.name), Part(setting.benchmarks[0], 0, 200), models)

def draw_jobs(setting):
    "Benchmark -> a course of one round, whose jobs are its parts."
    courses = {}
    with open_backends(setting) as models:
        for b in setting.benchmarks:
            with lent_stores(setting, [b], open_backends):
                courses[b] = [[(part.count(setting), timed(lambda: draw_edges(setting, part, models)))
                               for part in draw_parts(setting, b, workers=2)]]
    return courses

def draw_api(setting):
    def work():
        with open_backends(setting) as models:
            for b in setting.benchmarks: draw_edges(setting, Part(b), models)
    return [[(sum(Part(b).count(setting) for b in setting.benchmarks), timed(work))]]

# ---- walks

def noted(course, rounds, between):
    "The same course. Each round is appended to `rounds`, the seconds before it to `between`."
    results = None
    while True:
        start = seconds()
        try: jobs = course.send(results)
        except StopIteration: return
        between.append(seconds() - start)
        rounds.append([])
        results = yield jobs

def walk_jobs(setting, workers):
    "Do the walks of a setting. Returns (courses, seconds between rounds)."
    courses, between = [], []
    def work(setting, task, *details):
        results = []
        took = timed(lambda: results.extend(task(setting, open_backends, *details)))
        courses[-1][-1].append((job_size(setting, task, *details), took))
        return results
    for course in walk_courses(setting, workers):
        courses.append([])
        in_rounds(work, [noted(course, courses[-1], between)], 1)
    return courses, sum(between)

# ---- results

def whole(courses): # each as a single job
    jobs = [[job for jobs in rounds for job in jobs] for rounds in courses]
    return [[[(sum(size for size, _ in each), sum(took for _, took in each))]] for each in jobs]

def show(name, benchmarks, courses, api, start, between=0.):
    rows = {b: dict(zip(('rounds', 'jobs', 'seconds', 'shortest', 'longest'),
                        (len(rounds), len(each), sum(each), min(each), max(each))))
            for b, rounds in zip(benchmarks, courses) for each in [[took for jobs in rounds for _, took in jobs]]}
    print(f'\n{name}: a worker loads for {start:.1f} s; {between:.1f} s between rounds; the API setting takes '
          f'{sum(took for rounds in api for jobs in rounds for _, took in jobs):.1f} s')
    print(pd.DataFrame(rows).T.round(1), end='\n\n')
    columns = {'by benchmark': (whole(courses), start), 'by problem': (courses, start + between)}
    if api: columns |= {f'{how}, with API': (each + api, begin) for how, (each, begin) in columns.items()}
    spans = {n: {how: makespan(each, n, begin) for how, (each, begin) in columns.items()} for n in WORKERS}
    print(pd.DataFrame(spans).T.rename_axis('workers').round(1))

def show_walks(open_setting, api, start):
    with lent_to_walk(open_setting, open_backends): courses, between = walk_jobs(open_setting, 2)
    show('walking', open_setting.benchmarks, courses, [c for s in api for c in walk_jobs(s, 1)[0]], start, between)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--profile', default='micro')
    parser.add_argument('--no-api', action='store_true')
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        changes = {'api.models': []} if args.no_api else {}
        config = read_run(args.profile, changes=changes).config
        run = Run(args.profile, config, Path(folder)/'run', Path(folder)/'store')
        open_setting, *api = run.settings
        start = timed(lambda: load_all(open_setting))
        drawn = draw_jobs(open_setting)
        show('drawing', drawn, [*drawn.values()], [draw_api(setting) for setting in api], start)
        read_all(run)
        show_walks(open_setting, api, start)
