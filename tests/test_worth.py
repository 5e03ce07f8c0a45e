"The lab on when a policy is worth having: exact shares, a noise that meets its AUROC, and the same bytes every time."
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from worth.cells import METHODS, PARTS, RULES, cell_rows, do_cells, read_cells
from worth.noise import find_chance, mean_auroc, step_auroc, with_noise
from worth.plan import HOPELESS, Cell, Folders, Plan
from worth.pools import level_facts, pools, save_array
from worth.report import caption, with_verdicts, write_figure, write_tables

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.confidence import FEATURES
from stepwise_routing.method.outcomes import toy_table

def labelled(n, split='train', seed=0):
    "A toy table with all features, and first wrong steps that its scores tell rather well."
    table, rng = toy_table(n, split, seed), np.random.default_rng(seed)
    wrong = np.where(rng.random(n) < .6, rng.integers(0, table.n_steps), -1)
    step = np.arange(table.obs.shape[1])
    score = rng.normal(np.where(step == wrong[:, None], 0, 2), 1)
    columns = dict(score_logit=10 + score, score_prob=1/(1 + np.exp(-score)), index=step + 0*score, model=0*score,
                   length=table.small_tokens, final=step == table.n_steps[:, None] - 1, first_entropy=-score)
    obs = np.stack([columns[name] for name in FEATURES], -1).astype(float)
    return replace(table, benchmark='micro-omni', features=FEATURES, obs=np.where(table.inside[..., None], obs, np.nan)
                   ), wrong

def test_a_cell_has_exactly_its_share_of_hopeless_problems():
    plan = Plan(sizes=(8, 12, 4))
    shipped = {p.question for split in SPLITS for p in load_problems('micro-omni', split)}
    seen = Counter()
    for split in SPLITS:
        problems = pools(plan, split)
        assert problems == pools(plan, split) != pools(replace(plan, problem_seed=1), split)
        seen.update(p.question for p in problems)
        for share in plan.shares:
            rows = cell_rows(plan, Cell(share, .75), split)
            levels = [problems[i].difficulty for i in rows]
            assert len({*rows}) == plan.size(split) and levels.count(HOPELESS) == share*plan.size(split)
    assert max(seen.values()) == 1 and not shipped & {*seen}
    with pytest.raises(ValueError, match='no whole number'): Plan(sizes=(10, 10, 10)).hopeless('train', Fraction(1, 4))

def test_the_noise_meets_the_auroc():
    table, wrong = labelled(1500)
    clean = step_auroc(table, wrong)
    assert .9 < clean < .94 and find_chance(table, wrong, .95, 0, 3) == 0
    chances = [find_chance(table, wrong, target, 0, 5) for target in (.75, .85)]
    assert chances[0] > chances[1] > 0
    for target, chance in zip((.75, .85), chances):
        assert abs(mean_auroc(table, wrong, chance, 1, 5) - target) < .01 # other draws of the noise
        assert abs(step_auroc(with_noise(table, chance, (9,)), wrong) - target) < .03

def test_at_full_noise_the_score_is_useless_and_its_distribution_is_the_same():
    table, wrong = labelled(1500)
    noisy = with_noise(table, 1., (0,))
    assert abs(step_auroc(noisy, wrong) - .5) < .03
    names = {name: i for i, name in enumerate(FEATURES)}
    together = [names[name] for name in ('score_prob', 'score_logit', 'first_entropy')]
    shown, own = (each.obs[each.inside][:, together] for each in (noisy, table))
    assert {*map(tuple, shown)} <= {*map(tuple, own)} and (shown != own).any(1).all()
    assert abs(np.quantile(shown[:, 0], (.1, .5, .9)) - np.quantile(own[:, 0], (.1, .5, .9))).max() < .02
    others = [names[name] for name in ('index', 'length', 'final')]
    assert np.array_equal(noisy.obs[..., others], table.obs[..., others], equal_nan=True)
    assert np.array_equal(noisy.obs, with_noise(table, 1., (0,)).obs, equal_nan=True)
    assert np.array_equal(table.obs, with_noise(table, 0., (0,)).obs, equal_nan=True)

@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "Two cells of toy outcomes, done."
    plan = Plan(sizes=(40, 60, 40), shares=(Fraction(0), Fraction(1, 2)), aurocs=(.75,), policies=2, policy_steps=3,
                n_boot=40, noise_draws=2)
    folders = Folders(tmp_path_factory.mktemp('worth'))
    for split in SPLITS:
        table, wrong = labelled(sum(plan.pool_sizes(split)), split)
        save_array(folders.first_wrong(split), wrong)
        ids = [f'toy-{i % 6 + 1}-{i:04d}' for i in range(len(table))]
        replace(table, problem_id=np.array(ids)).save(folders.table(split))
    do_cells(plan, folders, 1)
    return plan, folders

def test_a_cell_has_a_row_per_method_and_is_done_once(finished, monkeypatch):
    plan, folders = finished
    rows = read_cells(plan, folders, 'rows')
    assert [*rows['method']] == 2*[*METHODS] and {*rows['hopeless']} == {0, .5}
    measured = rows[['share', 'cost_accuracy', 'lost_accuracy', 'cost_certain', 'lost_certain']]
    assert np.isfinite(measured).all(axis=None) and (rows['share_low'] <= rows['share_high']).all()
    alone = rows['certain_is_large_alone'] == 1
    assert (rows['cost_certain'][alone] == 1).all() and (rows['lost_certain'][alone] == 0).all()
    bare = rows[rows['method'] == 'Bare threshold (probability)'].iloc[0]
    nested = rows[rows['method'] == 'Ours (nested)'].iloc[0]
    if nested['on_escalate'] == bare['on_escalate']:
        assert np.isclose(bare['nested_share'], nested['share'] - bare['share'])
    monkeypatch.setattr('worth.cells.fit_policies', lambda *args: pytest.fail('done again'))
    do_cells(plan, folders, 1)

def test_a_cell_done_again_has_the_same_bytes(finished):
    plan, folders = finished
    files = [folders.result(plan.cells[0], part) for part in PARTS]
    before = [file.read_bytes() for file in files]
    for file in files: file.unlink()
    do_cells(plan, folders, 1)
    assert [file.read_bytes() for file in files] == before

def test_the_table_and_the_figure_have_the_same_bytes_every_time(finished, tmp_path):
    plan, folders = finished
    parts = [*(read_cells(plan, folders, part) for part in PARTS), level_facts(folders)]
    written = [write_tables(*parts, plan.alpha, tmp_path/name) + write_figure(tmp_path/name, tmp_path/name, plan.alpha)
               for name in 'ab']
    first, again = ([path.read_bytes() for path in paths] for paths in written)
    assert first == again and len(first) == 7
    assert 'the small' in caption(parts[0], plan.alpha)

def test_a_verdict_follows_from_the_interval():
    rows = pd.DataFrame(dict(method=RULES, hopeless=0., auroc=.75))
    for prefix in ('nested', 'full'):
        ends = dict(low=[.1, -.2, -.1], high=[.3, -.1, .2])
        rows = rows.assign(**{f'{prefix}_share_{end}': x for end, x in ends.items()}, **{f'{prefix}_p': [.01, .02, .9]})
    judged = with_verdicts(rows)
    assert [*judged['nested_verdict']] == ['win', 'loss', 'tie'] and [*judged['full_p_holm']] == [.01, .02, .9]
