"The table of prompt caches: cents by hand, hand-overs, which setting is shown, and what was not drawn."
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from toy import ToyBackend, toy_problems
from toy_runs import POLICIES, setting
from walking import Script, make_tree

from stepwise_routing.base.records import Call
from stepwise_routing.base.tools import find_project, run_async
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.comparison import replay_case
from stepwise_routing.method.outcomes import outcome_table
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import LargeOnly, walk
from stepwise_routing.report.caches import (
    BY_STEP,
    CHOSEN,
    ONE_SHOT,
    WALKED,
    cache_columns,
    shown_settings,
    table_tokens,
    walk_tokens,
    walked_setting,
)
from stepwise_routing.run import cache_report, stages
from stepwise_routing.run.cache_report import exact_threshold, report_caches, tokens_of_walk
from stepwise_routing.run.config import changed
from stepwise_routing.run.stages import load_run

TABLES = find_project().root/'tables'
PRICE = '4/1/16' # input, cached input, output: US dollars per million tokens

# Two models. The large one reads 100 tokens, writes 10; after a small step of 20 it reads 130 and writes 5.
APPEND = [Call(0, 30, 70, 0), Call(1, 10, 100, 0), Call(0, 20, 110, 100), Call(1, 5, 130, 110)]
# The same, but both small steps are thrown away; a judge reads 150 tokens and says one word.
REGENERATE = [Call(0, 30, 70, 0, 'draft'), Call(1, 1, 150, 0, 'judge'), Call(1, 10, 70, 0),
              Call(0, 20, 80, 70, 'draft'), Call(-1, 0, 90, 0, 'prm'), Call(1, 5, 80, 80)]

@pytest.mark.parametrize('calls, cold, warm, all_cached', [
    (APPEND, 230*4 + 15*16, 120*4 + 110 + 15*16, 230 + 15*16),
    (REGENERATE, 300*4 + 16*16, 220*4 + 80 + 16*16, 300 + 16*16)])
def test_cents_of_a_walk_by_hand(calls, cold, warm, all_cached):
    columns = cache_columns([walk_tokens(calls), (0, 0, 0, 0)], PRICE) # and a problem without the large model
    assert columns['handovers'] == 1
    cents = [2*columns[name]*1e4 for name in ('cold', 'warm', 'all_cached')]
    assert cents == pytest.approx([cold, warm, all_cached])

@pytest.mark.parametrize('writers, handovers', [('0', 0), ('1', 0), ('011', 1), ('01101', 2), ('10', 0)])
def test_a_hand_over_is_a_large_step_after_a_small_one(writers, handovers):
    calls = [Call(int(writer), 1, 1, 0) for writer in writers]
    read = Call(0, 0, 5, 0, 'score') # the small model reads a step: it writes nothing
    assert walk_tokens(calls)[0] == walk_tokens([c for call in calls for c in (call, read)])[0] == handovers

class After(Script):
    "Hands over after the second step of each chain."
    def escalates(self, states): return [len(s.steps) == 2 for s in states]
    def table_escalates(self, table): return np.broadcast_to(np.arange(table.obs.shape[1]) == 1, table.inside.shape)

@pytest.mark.parametrize('on_escalate', ['append', 'regenerate'])
def test_a_table_and_walks_give_the_same_tokens(tmp_path, on_escalate):
    problems, backends = toy_problems(30), [ToyBackend(i, prices=(None, 'gpt-4.1-mini')) for i in range(2)]
    tree = make_tree(tmp_path/'t.db', backends=backends)
    collect_rollouts(problems, tree)
    table = outcome_table(problems, tree, 'test')
    for router, most in (After(on_escalate=on_escalate), 1), (LargeOnly(), 0), (After(start=1), 0):
        off_table = table_tokens(router, table)
        walked = [walk_tokens(w.calls) for w in walk(problems, router, tree)]
        assert off_table.tolist() == [[*tokens] for tokens in walked]
        assert off_table[:, 0].max() == most and not off_table[:, 2].any() and off_table[:, 1].any()

def test_walks_that_were_not_drawn_give_nothing(tmp_path):
    problems = toy_problems(6)
    tree = make_tree(tmp_path/'t.db')
    walk(problems[:3], After(), tree)
    stored = RoutingTree(None, tree.store)
    def tokens(problem, router): return run_async(tokens_of_walk(problem, router, stored))
    assert tokens(problems[0], After())[0] in (0, 1) and tokens(problems[4], After()) is None
    class Broken(Script):
        def escalates(self, states): return {}['a fault of ours']
    with pytest.raises(KeyError): tokens(problems[0], Broken())

def settings(**columns):
    names = 'method', 'threshold', 'calibration_accuracy', 'calibration_cost_share', 'chosen'
    rows = [('RSD', .1, .80, .5, 0), ('RSD', .2, .89, 2., 0), ('RSD', .3, .90, 3., 0), ('RSD', np.inf, .90, 1., 1),
            ('Large only', .5, np.nan, np.nan, 1), ('GlimpRouter', .4, .9, .3, 1)]
    return pd.DataFrame(rows, columns=names).assign(on_escalate='append', accuracy=.8, benchmark='toy', **columns)

@pytest.mark.parametrize('alpha, threshold', [(.02, .2), (.005, .3), (.2, .1)])
def test_the_second_table_takes_the_cheapest_setting_that_keeps_the_accuracy(alpha, threshold):
    "Neither the test accuracy nor the large model alone has a say."
    rows = settings().query('method == "RSD"')
    assert walked_setting(rows, alpha)['threshold'].tolist() == [threshold]
    weak = rows.assign(calibration_accuracy=[.8, .7, .6, .9])
    assert walked_setting(weak, .02)['threshold'].tolist() == [.1]
    assert len(walked_setting(rows[3:], alpha)) == 0
    assert shown_settings(settings(), alpha)[['part', 'threshold']].values.tolist() == [
        [CHOSEN, np.inf], [WALKED, threshold], [CHOSEN, .5]]

def test_the_last_digit_of_a_threshold_is_kept(tmp_path):
    (tmp_path/'grid.csv').write_text('method,threshold\nRSD,0.30000000000000004\nRSD,0.5\nRSD,inf\n')
    assert exact_threshold(tmp_path/'grid.csv', .3) == .1 + .2 != .3

class Uncached(ToyBackend):
    "The large toy model behind a server that caches nothing: what a run pays is the cold price."
    def _step(self, *node):
        step = super()._step(*node)
        return replace(step, cached=0, entropy=len(step.text)/10)

@pytest.fixture
def toy_run(tmp_path, monkeypatch):
    "A run of the API setting with toy models, from its draws to the files of chapter 04b."
    problems = {split: toy_problems(40, i) for i, split in enumerate(SPLITS)}
    for module in stages, cache_report:
        monkeypatch.setattr(module, 'read_problems', lambda setting, benchmark, split: problems[split])
    s = setting(tmp_path, 'api')
    config = changed(s.run.config, {'open.models': [], 'baselines.reward_model': '',
                                    'baselines.walk_thresholds': 'curve'})
    s = replace(s, run=replace(s.run, config=config))
    backends = [Uncached(i, prices=(None, 'gpt-4.1-mini')) for i in range(2)]
    def right(problem, answer): return answer == problem.answer
    with stages.open_tree(s, 'toy', backends, right) as tree:
        for split, some in problems.items():
            collect_rollouts(some, tree)
            outcome_table(some, tree, split).save(s.files.outcomes('toy', split))
    case = stages.open_case(s, 'toy')
    case.policies = POLICIES
    stages.walk_case(s, replay_case(case), backends, right)
    stages.save_case(s, case)
    monkeypatch.setattr(cache_report, 'open_case', lambda *_: case)
    return s.run

def test_the_cold_price_is_what_a_run_pays_without_a_cache(toy_run):
    "Every row but its hand-overs and warm price is known already: chapter 04b wrote cost and accuracy."
    results = load_run(toy_run)
    text = report_caches(toy_run, results)
    rows = pd.read_csv(toy_run.tables/'cache_api.csv')
    assert set(rows['method']) == {*ONE_SHOT, *BY_STEP} - {'RSD'}
    assert text == (toy_run.tables/'cache_api.md').read_text()
    saved = results['api'].results
    for row in rows.itertuples():
        own = saved[(saved['method'] == row.method) & (saved['on_escalate'] == row.on_escalate)]
        own = own[own['chosen'] == 1] if row.part == CHOSEN else own[np.isclose(own['threshold'], row.threshold)]
        assert own[['cost', 'accuracy']].values.tolist() == [pytest.approx([row.cold, row.accuracy])], row
    once = rows['method'].isin(ONE_SHOT)
    assert (rows['warm'][once] == rows['cold'][once]).all() and (rows['handovers'][once] <= 1).all()
    walked = rows[rows['part'] == WALKED]
    assert len(walked) and (walked['all_cached'] < walked['warm']).all() and (walked['warm'] < walked['cold']).all()
    assert (rows['all_cached'] <= rows['warm']).all()

def test_without_its_stores_a_run_says_what_was_not_drawn(toy_run):
    results = load_run(toy_run)
    drawn = report_caches(toy_run, results)
    for path in toy_run.store.glob('**/*.db'): path.unlink()
    lines = report_caches(toy_run, results).split('\n')
    missing = {line.split(' | ')[0].strip('| ') for line in lines if 'not drawn' in line}
    assert 'not drawn' not in drawn and missing and missing <= {*BY_STEP}
    assert [line for line in drawn.split('\n') if line.startswith('| Ours')] == [
        line for line in lines if line.startswith('| Ours')]

def test_a_run_without_the_api_setting_says_so_and_a_clone_shows_the_committed_table(toy_run):
    assert report_caches(toy_run, dict(open=None)) == 'This run has no api setting.'
    assert report_caches(toy_run, {}) == (TABLES/'cache_api.md').read_text()
    assert not toy_run.tables.exists()

def test_the_committed_table_has_the_costs_of_table_2():
    rows, table = pd.read_csv(TABLES/'cache_api.csv'), pd.read_csv(TABLES/'evaluation_api.csv')
    keys = ['benchmark', 'method', 'on_escalate']
    both = rows[rows['part'] == CHOSEN].merge(table[table['chosen'] == 1], on=keys, suffixes=('', '_paid'))
    assert len(both) == (rows['part'] == CHOSEN).sum() == 13*3 and rows['cold'].notna().all()
    assert both['cold'].tolist() == pytest.approx(both['cost'].tolist())
    assert both['accuracy'].tolist() == pytest.approx(both['accuracy_paid'].tolist())
