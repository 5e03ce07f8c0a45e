"Settings, profiles, the command line: a mistake is one line that names field, file and nearest name."

import re
from dataclasses import replace

import pytest

from stepwise_routing import __version__
from stepwise_routing.run import reproduce, stages
from stepwise_routing.run.cli import as_changes, main
from stepwise_routing.settings import Settings, Training, as_printed, changed, read_profile
from stepwise_routing.util import PACKAGE, Project

PARAMS = Project(PACKAGE.parent).params


@pytest.mark.parametrize('profile', sorted(path.stem for path in PARAMS.glob('*.yaml')))
def test_every_profile_reads_and_names_models_by_their_commit(profile):
    settings = read_profile(profile)
    assert settings != Settings() or profile == 'micro'
    assert read_profile(str(PARAMS / f'{profile}.yaml')) == settings
    expected = ('cents',) if profile == 'api' else ('flops', 'cents')
    assert stages.open_run(profile).units == expected
    on_hub = [name for name in (*settings.models.names, settings.data.grader) if '/' in name]
    assert all(re.search('@[0-9a-f]{40}$', name) for name in on_hub)


def test_a_paid_model_is_billed_by_its_own_row_and_no_price_makes_no_second_table():
    names = ['micro-small', 'openai:gpt-4o-mini-2024-07-18']
    paid = stages.open_run(changes={'models.names': names})
    free = stages.open_run(changes={'models.price': ''})
    assert (paid.price, paid.units) == ('gpt-4o-mini', ('cents',))
    assert (free.price, free.units) == ('', ('flops',))


def test_a_change_of_the_command_line_reaches_training():
    pairs = ['policy.alpha=.05', 'policy.hidden=[8]', 'policy.delta=1e-5', 'data.n_test=7']
    settings = read_profile('micro', as_changes(pairs))
    assert settings.policy == replace(Training(), alpha=0.05, hidden=(8,), delta=1e-5)
    assert settings.data.n_test == 7


@pytest.mark.parametrize('sign', [False, True])
def test_printed_switches_on_all_that_the_paper_prints_but_the_sign(sign):
    s = read_profile('printed', {'policy.printed_sign': sign}).policy
    assert s == replace(as_printed(Training()), printed_sign=sign)
    assert (s.estimator, s.steps, s.batch, s.decay, s.verifier) == ('sampled', 1000, 5, 0, True)
    changes = [('policy.printed_sign', sign), ('policy.printed', True), ('policy.steps', 1000)]
    assert changed(Settings(), dict(changes)).policy == s
    assert changed(Settings(), dict(reversed(changes))).policy == s


@pytest.mark.parametrize(
    'text, said',
    [
        ('policy: {alpah: .1}', "bad.yaml: unknown setting 'policy.alpah'.*'policy.alpha'"),
        ('policy: {alpha: 2}', 'bad.yaml: policy.alpha is 2: it should be less than 1'),
        (
            'policy: {hidden: [8, x]}',
            "bad.yaml: policy.hidden is .*: 'x' should be a valid integer",
        ),
        ('policy: {estimator: exat}', "bad.yaml: policy.estimator is 'exat'.*'exact'"),
        ('models: {names: [micro-small]}', 'bad.yaml: models.names is .* a list of 2'),
        ('data: 1', "bad.yaml: 'data' must be one of data, models"),
        ('data: [1', 'bad.yaml is not valid YAML'),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path, text, said):
    (tmp_path / 'bad.yaml').write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_profile(str(tmp_path / 'bad.yaml'))
    assert '\n' not in str(error.value) and len(str(error.value)) < 400


# ---- the command line
def told(capsys, *words) -> tuple:  # (status, stdout, stderr)
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code, *capsys.readouterr()


OURS = '^stepwise-routing: '  # our own lines; the others are of typer


@pytest.mark.parametrize(
    'words, said',
    [
        ('reprodcue', 'reprodcue.*reproduce'),
        ('reproduce --parm x=1', 'parm.*parameter'),
        ('reproduce --profile micr', OURS + "no profile 'micr'.*'micro'.*\n$"),
        ('reproduce -p policy.alpha', OURS + '-p policy.alpha: write -p NAME=VALUE.*\n$'),
        ('reproduce -p policy.alpah=1', OURS + "-p: .*'policy.alpah'.*'policy.alpha'.*\n$"),
        ('reproduce -p alpha=.1', OURS + "-p: .*did you mean 'policy.alpha'.*\n$"),
        ('reproduce -p policy.alpha=2', OURS + '-p: policy.alpha is 2: .*less than 1\n$'),
        ('reproduce -p policy.alpha=[1', OURS + 'policy.alpha is not valid YAML.*\n$'),
        ('reproduce -p data.benchmarks=[micro-gms]', OURS + ".*'micro-gms'.*'micro-gsm'.*\n$"),
        ('figures', OURS + 'no run has results yet: .*\n$'),
    ],
)
def test_a_mistake_ends_with_status_2_and_writes_nothing(
    tmp_path, monkeypatch, capsys, words, said
):
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    (tmp_path / 'nbs' / 'params' / 'micro.yaml').touch()
    monkeypatch.chdir(tmp_path)
    status, out, err = told(capsys, *words.split())
    assert (status, out) == (2, '') and re.search(said, err), err
    assert [path.name for path in tmp_path.iterdir()] == ['nbs']


def test_version_help_and_an_interruption(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, 'reproduce', interrupted)
    assert told(capsys, '--version') == (0, f'stepwise-routing {__version__}\n', '')
    assert re.search('(?s)reproduce.*figures.*demo.*lab.*serve', told(capsys, '--help')[1])
    status, _, err = told(capsys, 'reproduce')
    assert status == 130 and 'the same command goes on' in err


def test_the_demo_shows_a_routed_chain_and_what_the_shipped_outcomes_say(capsys):
    status, out, _ = told(capsys, 'demo')
    twenty = stages.take(stages.shipped_outcomes('micro-gsm')['test'], slice(20))
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    assert status == 0 and 'micro-small' in out and 'micro-large' in out
    assert int(rows['Small only'][0]) == twenty.right[range(20), twenty.steps.astype(int), 0].sum()
    assert int(rows['Large only'][0]) == twenty.right[:, 0, 0].sum()
    assert float(rows['Min-prob threshold'][1]) < float(rows['Large only'][1])
