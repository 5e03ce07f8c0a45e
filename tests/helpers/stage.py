"Does a stage that calls nobody in a process of its own; the arguments of `main` are JSON on the command line."
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

from toy_runs import save_methods, setting

from stepwise_routing.base.settings import Policy
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.training import fit
from stepwise_routing.report.tables import report_paper
from stepwise_routing.run.stages import load_run


def training(folder):
    tables = (toy_table(60, split) for split in ('train', 'calibration'))
    train, held_out = (TableEnv(t, t.features, 'append') for t in tables)
    fit(train, held_out, folder, Policy(steps=40, hidden=(8, 8)), 0, key='toy')

def tables(folder):
    s = setting(Path(folder))
    save_methods(s)
    run = replace(s.run, config=replace(s.run.config, api=replace(s.run.config.api, models=())))
    report_paper(load_run(run))

def main(stage, folder, room=None): # the most that a file may hold, in bytes
    print('begun', flush=True)
    if room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    dict(training=training, tables=tables)[stage](folder)

if __name__ == '__main__': main(**json.loads(sys.argv[1]))
