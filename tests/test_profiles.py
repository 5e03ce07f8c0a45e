"Settings, profiles, the command line: a mistake is one line that names field, file and nearest name."

import re
from dataclasses import replace

import pytest

from stepwise_routing import __version__
from stepwise_routing.method import baselines, rollouts
from stepwise_routing.run import stages
from stepwise_routing.run.cli import as_changes, main
from stepwise_routing.settings import Settings, Training, as_printed, changed, read_profile
from stepwise_routing.util import PACKAGE, Project

PARAMS = Project(PACKAGE.parent).params


@pytest.mark.parametrize('profile', sorted(path.stem for path in PARAMS.glob('*.yaml')))
def test_every_profile_reads_and_names_models_by_their_commit(profile):
    run = stages.open_run(profile)
    assert read_profile(str(PARAMS / f'{profile}.yaml')) == run.settings
    assert run.units == (('cents',) if profile == 'api' else ('flops', 'cents'))
    unpriced = stages.open_run(profile, changes={'models.price': ''})
    assert unpriced.units == run.units[:1]
    for name in (*run.settings.models.names, run.settings.data.grader):
        assert '/' not in name or re.search('@[0-9a-f]{40}$', name)


def test_another_price_bills_what_is_shipped():
    run = stages.open_run(changes={'models.price': '1/2/3', 'data.benchmarks': ['micro-gsm']})
    for table in stages.read_benchmarks(run)['micro-gsm'].values():
        assert table.dollars[:2].tolist() == [[0, 0, 0], [1, 2, 3]]


def test_a_change_of_the_command_line_reaches_training():
    changes = as_changes(['policy.alpha=.05', 'policy.hidden=[8]', 'policy.delta=1e-5'])
    trained = replace(Training(), alpha=0.05, hidden=(8,), delta=1e-5)
    assert read_profile('micro', changes) == Settings(policy=trained)


@pytest.mark.parametrize('sign', [False, True])
def test_printed_switches_on_all_that_the_paper_prints_but_the_sign(sign):
    s = read_profile('printed', {'policy.printed_sign': sign}).policy
    assert s == replace(as_printed(Training()), printed_sign=sign)
    assert (s.estimator, s.steps, s.batch, s.decay, s.verifier) == ('sampled', 1000, 5, 0, True)
    changes = [('policy.printed_sign', sign), ('policy.printed', True)]
    for order in (changes, changes[::-1]):
        assert changed(Settings(), dict(order)).policy == s


def told(capsys, *words) -> tuple:  # (status, stdout, stderr)
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code, *capsys.readouterr()


MISTAKES = {  # words of the command line, or the text of the profile `bad`
    'reprodcue': 'reprodcue.*reproduce',
    'reproduce --parm x=1': 'parm.*parameter',
    'reproduce --profile micr': "^stepwise-routing: no profile 'micr'.*'micro'.*\n$",
    'reproduce -p policy.alpha': '^stepwise-routing: -p policy.alpha: write -p NAME=VALUE.*\n$',
    'reproduce -p data.benchmarks=[micro-gms]': "^stepwise-routing: .*'micro-gsm'.*\n$",
    'reproduce -p alpha=.1': "^stepwise-routing: -p: .*did you mean 'policy.alpha'.*\n$",
    'reproduce -p data.n_test=9 -p models.temperature=0': (
        '^stepwise-routing: data.n_test, models.temperature: what is shipped was drawn .*\n$'
    ),
    'reproduce -p data.grader=regex': '^stepwise-routing: -p: data.grader is .*regex.*\n$',
    'reproduce -p models.price=gpt-4.1-minni': "^stepwise-routing: .*'gpt-4.1-mini'.*\n$",
    'figures': '^stepwise-routing: no run has results yet: .*\n$',
    'policy: {alpha: 2}': '^stepwise-routing: bad.yaml: policy.alpha is 2: .*less than 1\n$',
    'policy: {alpah: .1}': "^stepwise-routing: bad.yaml: .*'policy.alpah'.*'policy.alpha'.*\n$",
    'policy: {hidden: [8, x]}': "bad.yaml: policy.hidden is .*: 'x' should be a valid integer.*\n$",
    'policy: {estimator: exat}': "bad.yaml: policy.estimator is 'exat'.*'exact'.*\n$",
    'models: {names: [micro-small]}': 'bad.yaml: models.names is .* a list of 2\n$',
    'data: 1': "^stepwise-routing: bad.yaml: 'data' must be one of data, models.*\n$",
    'data: [1': '^stepwise-routing: bad.yaml is not valid YAML.*\n$',
}


@pytest.mark.parametrize('case', MISTAKES)
def test_a_mistake_ends_with_status_2_and_writes_nothing(tmp_path, monkeypatch, capsys, case):
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    (tmp_path / 'nbs' / 'params' / 'micro.yaml').touch()
    (tmp_path / 'nbs' / 'params' / 'bad.yaml').write_text(case)
    monkeypatch.chdir(tmp_path)
    words = 'reproduce --profile bad' if ': ' in case else case
    status, out, err = told(capsys, *words.split())
    assert (status, out) == (2, '') and re.search(MISTAKES[case], err), err
    assert [path.name for path in tmp_path.iterdir()] == ['nbs']


def test_version_help_and_a_demo_that_says_what_the_shipped_outcomes_say(capsys):
    assert told(capsys, '--version') == (0, f'stepwise-routing {__version__}\n', '')
    assert re.search('(?s)reproduce.*figures.*demo.*lab.*serve', told(capsys, '--help')[1])
    status, out, _ = told(capsys, 'demo')
    twenty = rollouts.take(rollouts.shipped_outcomes('micro-gsm')['test'], slice(20))
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    assert status == 0 and 'micro-small' in out and 'micro-large' in out
    for size, alone in (('Small', baselines.small_alone), ('Large', rollouts.large_alone)):
        right, cost = alone(twenty, 'flops')
        assert rows[f'{size} only'] == [f'{right.sum():.0f}', f'{cost.sum():.2g}']
    assert float(rows['Min-prob threshold'][1]) < float(rows['Large only'][1])
