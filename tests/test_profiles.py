"Settings, profiles and the command line: what they hold, and mistakes in one line that names field, file and nearest name."

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from stepwise_routing import __version__
from stepwise_routing.run import reproduce, stages
from stepwise_routing.run.cli import as_changes, main
from stepwise_routing.settings import (
    SECTIONS,
    Settings,
    Training,
    as_printed,
    changed,
    read_profile,
)
from stepwise_routing.util import Project

ROOT = Path(__file__).resolve().parents[1]
PROFILES = sorted(path.stem for path in Project(ROOT).params.glob('*.yaml'))


# ---- profiles
@pytest.mark.parametrize('profile', PROFILES)
def test_every_profile_reads_and_sets_what_its_file_says(profile):
    settings = read_profile(profile)
    assert settings != Settings() or profile == 'micro'
    path = Project(ROOT).params / f'{profile}.yaml'
    assert read_profile(str(path)) == settings
    assert stages.open_run(profile).units
    for name in settings.models.names + (settings.data.grader,):
        if '/' in name:  # a model of the Hub: by commit
            assert re.search('@[0-9a-f]{40}$', name)


def test_every_setting_is_read_by_the_library():
    files = [path for path in (ROOT / 'stepwise_routing').rglob('*.py')]
    code = ''.join(path.read_text() for path in files if path.name != 'settings.py')
    known = [(section, field.name) for section, kind in SECTIONS.items() for field in fields(kind)]
    never = [f'{section}.{name}' for section, name in known if not re.search(rf'\.{name}\b', code)]
    assert never == [] and len(known) > 30


@pytest.mark.parametrize(
    'changes, units, price',
    [
        ({}, ('flops', 'cents'), 'gpt-4.1-mini'),
        ({'models.price': ''}, ('flops',), ''),
        (
            {'models.names': ['micro-small', 'openai:gpt-4o-mini-2024-07-18']},
            ('cents',),
            'gpt-4o-mini',
        ),
    ],
)
def test_units_follow_from_the_large_model(changes, units, price):
    run = stages.open_run('micro', changes=changes)
    assert (run.units, run.price) == (units, price)


def test_the_papers_settings_have_its_benchmarks_and_pay_for_the_api_alone():
    runs = {profile: stages.open_run(profile) for profile in ('open', 'open-lite', 'api')}
    for run in runs.values():
        assert run.benchmarks == ('gsm8k', 'math500', 'omnimath')
        assert all(run.is_drawn(benchmark) for benchmark in run.benchmarks)
    paid = {profile: (run.is_paid, run.units[0]) for profile, run in runs.items()}
    assert paid == dict(
        [('open', (False, 'flops')), ('open-lite', (False, 'flops')), ('api', (True, 'cents'))]
    )


def test_a_change_of_the_command_line_reaches_training():
    pairs = ['policy.alpha=.05', 'policy.hidden=[8]', 'policy.delta=1e-5', 'data.n_test=7']
    settings = read_profile('micro', as_changes(pairs))
    assert settings.policy == replace(Training(), alpha=0.05, hidden=(8,), delta=1e-5)
    assert settings.data.n_test == 7


@pytest.mark.parametrize('sign', [False, True])
def test_printed_switches_everything_on_that_the_paper_prints_but_the_sign(sign):
    by_profile = read_profile('printed', {'policy.printed_sign': sign}).policy
    changes = {'policy.printed_sign': sign, 'policy.printed': True}
    in_either_order = [
        changed(Settings(), dict(order)) for order in (changes, [*changes.items()][::-1])
    ]
    assert [settings.policy for settings in in_either_order] == [by_profile] * 2
    s = by_profile
    assert (s.estimator, s.steps, s.batch, s.decay, s.verifier) == ('sampled', 1000, 5, 0, True)
    assert s == replace(as_printed(Training()), printed_sign=sign)


@pytest.mark.parametrize(
    'text, said',
    [
        ('policy: {alpah: .1}', r"bad.yaml: unknown setting 'policy.alpah' \(.*'policy.alpha'\?\)"),
        ('policy: {alpha: 2}', 'bad.yaml: policy.alpha is 2: it should be less than 1'),
        (
            'policy: {hidden: [8, x]}',
            "bad.yaml: policy.hidden is .*: 'x' should be a valid integer",
        ),
        ('policy: {estimator: exat}', r"policy.estimator is 'exat' \(did you mean 'exact'\?\)"),
        ('models: {names: [micro-small]}', 'bad.yaml: models.names is .* a list of 2'),
        ('data: 1', "bad.yaml: 'data' must be one of data, models"),
        ('polcy: {alpha: .1}', "bad.yaml: 'polcy' must be one of"),
        ('data: [1', 'bad.yaml is not valid YAML'),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path, text, said):
    (tmp_path / 'bad.yaml').write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_profile(str(tmp_path / 'bad.yaml'))
    assert '\n' not in str(error.value) and len(str(error.value)) < 400


# ---- the command line
@pytest.mark.parametrize(
    'words, said',
    [
        ('reprodcue', 'reprodcue.*reproduce'),
        ('reproduce --parm x=1', 'parm.*parameter'),
        ('reproduce --draw -1', 'draw.*0'),
        (
            'reproduce --profile micr',
            r"^stepwise-routing: no profile 'micr' \(.* 'micro'\?\); .*\n$",
        ),
        (
            'reproduce -p policy.alpha',
            '^stepwise-routing: -p policy.alpha: write -p NAME=VALUE.*\n$',
        ),
        (
            'reproduce -p policy.alpah=1',
            "^stepwise-routing: -p: .*'policy.alpah'.*'policy.alpha'.*\n$",
        ),
        ('reproduce -p alpha=.1', "^stepwise-routing: -p: .*did you mean 'policy.alpha'.*\n$"),
        (
            'reproduce -p policy.alpha=2',
            '^stepwise-routing: -p: policy.alpha is 2: .*less than 1\n$',
        ),
        ('reproduce -p policy.alpha=[1', '^stepwise-routing: policy.alpha is not valid YAML.*\n$'),
        ('figures', '^stepwise-routing: no run has results yet: .*\n$'),
    ],
)
def test_a_mistake_ends_with_status_2_before_anything_is_written(
    tmp_path, monkeypatch, capsys, words, said
):
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    (tmp_path / 'nbs' / 'params' / 'micro.yaml').touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words.split())
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == '' and re.search(said, err), err
    assert [path.name for path in tmp_path.iterdir()] == ['nbs']


def test_version_help_and_an_interruption(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, 'reproduce', interrupted)
    cases = [
        (['--version'], 0, f'^stepwise-routing {re.escape(__version__)}\n$'),
        (['--help'], 0, '(?s)reproduce.*figures.*demo.*lab.*serve'),
        (['reproduce'], 130, 'the same command goes on'),
    ]
    for words, status, said in cases:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == status and re.search(said, ''.join(capsys.readouterr()))


def test_the_demo_shows_a_routed_chain_and_what_the_shipped_outcomes_say(capsys):
    with pytest.raises(SystemExit) as end:
        main(['demo'])
    out = capsys.readouterr().out
    first_twenty = stages.take(stages.shipped_outcomes('micro-gsm')['test'], slice(20))
    never = first_twenty.right[range(20), first_twenty.steps.astype(int), 0].sum()
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    assert end.value.code == 0 and 'micro-small' in out and 'micro-large' in out
    assert int(rows['Small only'][0]) == never
    assert int(rows['Large only'][0]) == first_twenty.right[:, 0, 0].sum()
    assert float(rows['Min-prob threshold'][1]) < float(rows['Large only'][1])
