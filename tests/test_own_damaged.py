"""A router's folder that is damaged or received, and wrong arguments of the calls: one line that says what is wrong and
what to do, before anything is drawn, built or deleted."""
import json
import math
import os
import shutil
import socket
from dataclasses import replace

import pytest
from test_own import PAIR, Adder, rows, toys  # noqa: F401

from stepwise_routing.base.settings import Policy
from stepwise_routing.base.tools import check_links, write_file
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method.policy import config_checksum, load_policy
from stepwise_routing.models.bills import set_caps
from stepwise_routing.models.pair import Access, Model
from stepwise_routing.own import *
from stepwise_routing.report.entries import CALIBRATION

BAD = r'candidates\.json is damaged: call train again'

def says(call, words, error=ValueError):
    with pytest.raises(error, match=words) as e: call()
    assert str(e.value).isprintable() and len(str(e.value)) < 700

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A whole folder; a test takes a copy."
    folder = tmp_path_factory.mktemp('made')/'mine'
    pair = [Adder(0), Adder(1)]
    collect(folder, rows(60), pair)
    train(folder, .1, steps=3, seeds=1)
    calibrate(folder, 'accuracy', .1)
    return folder

@pytest.fixture
def mine(made, tmp_path): return shutil.copytree(made, tmp_path/'mine')

def huge(file):
    with open(file, 'wb') as f: f.truncate(1 << 40)  # it takes no room on the disk

def files(folder): return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}

# --- candidates.json, and what it names

@pytest.mark.parametrize('text', [
    '', '[', '\0', '[]', '5', '"x"', 'null', '{}', '{"score_prob": 0}', '["score_prob"]', '[["score_prob"]]',
    '[["score_prob", 1e999]]', '[["score_prob", "0"]]', '[["score_prob", null]]', '[["score_prob", 0.9]]',
    '[["score_prob", true]]', '[["score_prob", -1]]', '[["score_prob", "0"], ["score_prob", 0]]',
    '[["score_prob", 0], ["score_prob", 0]]', '[[["score_prob"], 0]]', '[["other", 0]]', '[["score_prob", 0, 0]]',
    pytest.param('['*10**5, id='deep'), pytest.param('\udcff', id='no UTF-8')])
def test_a_list_of_candidates_that_train_did_not_write(mine, toys, text):
    (mine/'candidates.json').write_bytes(os.fsencode(text))
    for call in (curve, calibrate, lambda f: serving(f, PAIR).__enter__()): says(lambda: call(mine), BAD)

def test_a_candidate_in_the_place_of_another(mine):
    for name, other in (('paper', 'score_prob'), ('full', 'paper')):
        shutil.rmtree(mine/'candidates'/name)
        shutil.copytree(mine/'candidates'/other, mine/'candidates'/name)
        says(lambda: curve(mine), f'{name}.seed0 is not what train saves there: call train again')
        train(mine, .1, steps=3, seeds=1)
        curve(mine)
    for damage in ({'on_escalate': 'x'}, {'unit': None}, {'seed': 3}):
        file = mine/'candidates'/'full'/'seed0'/'config.json'
        config = json.loads(file.read_text())
        changed = config | damage
        file.write_text(json.dumps(changed | dict(checksum=config_checksum(changed))))
        says(lambda: curve(mine), 'full.seed0 is not what train saves there')
        file.write_text(json.dumps(config))

@pytest.mark.parametrize('name', ['score_prob', 'full'])
@pytest.mark.parametrize('text', ['{', '[]', '{"key": 5}'])
def test_train_makes_a_damaged_candidate_anew(made, mine, name, text):
    (mine/'candidates'/name/'seed0'/'config.json').write_text(text)
    says(lambda: curve(mine), 'seed0 is no readable policy')
    train(mine, .1, steps=3, seeds=1)
    assert load_policy(mine/'candidates'/name/'seed0').config == load_policy(made/'candidates'/name/'seed0').config

# --- files without end

@pytest.mark.parametrize('name, call, said', [
    ('policy/model.safetensors', lambda f: route(f, 'What?', PAIR), 'policy is no readable policy .*model.safetensors'),
    ('policy/config.json', lambda f: route(f, 'What?', PAIR), 'policy is no readable policy .*config.json'),
    ('own.json', lambda f: route(f, 'What?', PAIR), r'own\.json is damaged'), ('candidates.json', curve, BAD),
    ('problems.jsonl', lambda f: collect(f, rows(60), PAIR), 'problems.jsonl has 1,099,511,627,776 bytes')])
def test_a_file_without_end_is_not_read(mine, toys, monkeypatch, name, call, said):
    huge(mine/name)
    monkeypatch.setattr('pathlib.Path.read_text', None)  # whoever reads it whole needs a terabyte of memory
    says(lambda: call(mine), said)

def test_an_error_without_a_text_has_a_line(mine, monkeypatch):
    def full(*_): raise MemoryError
    monkeypatch.setattr('safetensors.torch.load', full)
    says(lambda: load_policy(mine/'policy'), r'is no readable policy \(MemoryError: \)')

@pytest.mark.parametrize('change', [
    dict(hidden=[60_000, 60_000]), dict(hidden=[10**9]), dict(n_models=10**9), dict(hidden=[4]*3000), dict(hidden=[-1]),
    dict(hidden=[10**9, -6]), dict(hidden='abc'), dict(hidden=[True]), dict(n_models=2.), dict(hidden=7)])
def test_layers_are_compared_with_the_weights_before_they_are_built(mine, monkeypatch, change):
    def built(*_): raise AssertionError('memory is taken')
    monkeypatch.setattr('stepwise_routing.method.policy.RoutingPolicy', built)
    file = mine/'policy'/'config.json'
    config = json.loads(file.read_text()) | change
    file.write_text(json.dumps(config | dict(checksum=config_checksum(config))))
    with pytest.raises(ValueError, match=r'is no readable policy \((ValueError|TypeError)'): load_policy(mine/'policy')

# --- tables and problems

def test_a_table_of_the_other_side(mine):
    shutil.copy(mine/'train.npz', mine/'calibration.npz')
    for call in (calibrate, curve): says(lambda: call(mine), r"calibration\.npz holds the problems of 'train': call")

@pytest.mark.parametrize('is_folder', [False, True])
def test_earlier_questions_are_not_forgotten(mine, tmp_path, toys, is_folder):
    (mine/'problems.jsonl').rename(tmp_path/'kept')
    if is_folder: (mine/'problems.jsonl').mkdir()
    before = files(mine)
    said = r'problems\.jsonl, with the questions of earlier calls, is missing or no file: .*another folder'
    says(lambda: collect(mine, rows(61)[60:], PAIR), said)
    assert files(mine) == before
    (tmp_path/'other').mkdir()
    shutil.copy(mine/'draws.db', tmp_path/'other')
    assert collect(tmp_path/'other', rows(60), PAIR)['new steps'] == 0
    assert (tmp_path/'other'/'train.npz').read_bytes() == (mine/'train.npz').read_bytes()

def test_questions_are_kept_where_the_settings_are_lost(mine, toys):
    before = (mine/'problems.jsonl').read_text()
    (mine/'own.json').unlink()
    assert collect(mine, rows(60)[:3], PAIR)['new steps'] == 0
    assert (mine/'problems.jsonl').read_text() == before and (mine/'own.json').is_file()

def test_an_answer_that_was_put_right(mine, toys):
    first, *others = rows(60)
    right = dict(first, answer='-7')
    says(lambda: collect(mine, [*others, right], PAIR),
         f"the question '.*' has the answer '-7' now, and {first['answer']!r} in .*problems.jsonl: .*put it there too")
    lines = [json.dumps(row) for row in [right, *others]]
    (mine/'problems.jsonl').write_text('\n'.join(lines) + '\n')
    assert collect(mine, [*others, right], PAIR)['new steps'] == 0
    assert [p.answer for p in own_problems(mine/'problems.jsonl')][0] == '-7'

@pytest.mark.parametrize('answer', [r'\frac{', r'\frac{1}{2', '{', 'f(x) = {x', '}'])
def test_an_answer_that_no_box_can_hold_is_named(tmp_path, toys, answer):
    some = [*rows(3), dict(question='How much is a half?', answer=answer)]
    says(lambda: collect(tmp_path/'mine', some, PAIR), "right for the question 'How much is a half.': the braces")
    assert not (tmp_path/'mine'/'own.json').exists()
    assert 'new steps' in collect(tmp_path/'mine', some, PAIR, grade=lambda problem, answer: True)

@pytest.mark.parametrize('answer', [r'\frac{1}{2}', 'f(x) = {x}', r'\{1, 2\}', 'Paris', r'\boxed{5}', r'\text{a}}', .5])
def test_an_answer_that_a_box_can_hold_is_taken(tmp_path, toys, answer):
    assert 'new steps' in collect(tmp_path/'mine', [dict(question='How much?', answer=answer), *rows(3)], PAIR)

# --- what a calibration says

@pytest.mark.parametrize('name, value', [
    ('alpha', 10**400), ('alpha', math.nan), ('alpha', -1), ('alpha', 1), ('alpha', '.1'), ('kappa', math.inf),
    ('kappa', -2), ('met', 5), ('n', 0), ('n', 2.5), ('accuracy', 1.1), ('large', -.1), ('miss', None), ('bound', True),
    ('cost', math.inf), ('cost', -1), ('cost', 10**400), ('target', 'x'), ('target', ['certain'])])
def test_a_number_that_calibrate_cannot_write_is_named(mine, toys, name, value):
    file = mine/'policy'/'config.json'
    config = json.loads(file.read_text())
    assert [*config['calibration']] == [*CALIBRATION]
    config['calibration'][name] = value
    file.write_text(json.dumps(config | dict(checksum=config_checksum(config))))
    for call in (lambda: route(mine, 'What?', PAIR), lambda: export(mine, mine.parent/'out')):
        says(call, rf'calibration\.{name} in .*policy/config.json is .*: call calibrate again, or take another router')

# --- names and folders

def test_a_policy_of_somebody_else_is_not_given_away(mine, tmp_path, toys):
    (mine/'policy').rename(tmp_path/'theirs')
    (mine/'policy').symlink_to(tmp_path/'theirs')
    for call in (lambda: export(mine, tmp_path/'out'), lambda: report(mine, tmp_path/'out'), lambda: calibrate(mine)):
        says(call, 'mine/policy is a link: put the file itself there')
    assert not (tmp_path/'out').exists()

@pytest.mark.parametrize('make', [os.mkfifo, lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))])
def test_what_is_no_file_is_not_in_a_folder(mine, monkeypatch, make):
    monkeypatch.chdir(mine)  # the path of a socket is short
    make(mine/'policy'/'x')
    said = 'policy/x is neither a file nor a folder: remove it'
    for call in (train, calibrate, curve): says(lambda: call(mine), said)

def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch):
    def refused(path): raise PermissionError(13, 'Permission denied', str(path))
    monkeypatch.setattr(os, 'scandir', refused)  # root may list all
    says(lambda: check_links(tmp_path), 'cannot be searched for links .Permission denied.: take out', OSError)

def test_no_error_line_moves_the_cursor(mine, toys):
    evil = 'a\nb\x1b[2J'
    os.symlink('/etc/passwd', mine/evil)
    says(lambda: collect(mine, rows(60), PAIR), 'is a link: put the file itself there')
    (mine/evil).unlink()
    for change in (dict(name=evil), dict(models=[evil, 'toy-1'])):
        values = json.loads((mine/'own.json').read_text())
        (mine/'own.json').write_text(json.dumps(values | change))
        says(lambda: collect(mine, rows(60), PAIR), r'own\.json is damaged')
        (mine/'own.json').write_text(json.dumps(values))
    says(lambda: collect(mine.parent/'new', rows(3), PAIR, name=evil), 'name is')
    says(lambda: load_policy(mine/'policy', ['a', 'b']), 'not for a and b')

def test_folders_in_folders_are_a_short_line(tmp_path):
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(40):
        os.mkdir('d'*200, dir_fd=at)
        below = os.open('d'*200, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    says(lambda: check_links(tmp_path), 'cannot be searched for links .*: take out what does not belong', OSError)
    os.system(f'rm -r {tmp_path}/d*')  # Python's own functions cannot

@pytest.mark.parametrize('name', ['own.json', 'problems.jsonl'])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, toys, name):
    (tmp_path/'mine'/name).mkdir(parents=True)
    says(lambda: collect(tmp_path/'mine', rows(3), PAIR), f'mine/{name} is a folder where a file of ours', OSError)
    assert not list(tmp_path.rglob('*.part'))
    says(lambda: write_file(tmp_path/'mine', 'x'), 'mine is a folder', OSError)

# --- arguments

CENTS = ['5', True, [], -1, math.nan, math.inf]

@pytest.mark.parametrize('cents', CENTS)
def test_a_cap_is_a_number_of_cents(mine, tmp_path, toys, cents):
    for call in (lambda: collect(tmp_path/'new', rows(3), PAIR, max_cents=cents),
                 lambda: route(mine, 'What?', PAIR, max_cents=cents), lambda: set_caps([], cents, None)):
        says(call, 'max_cents is .*: it should be .* or None')
    says(lambda: set_caps([], None, cents), 'max_cents_each is')

@pytest.mark.parametrize('alphas, said', [
    ([], 'alphas is .*: give 1 or more'), ((), 'give 1 or more'), (None, 'alphas is None: it should be a valid list'),
    (.1, 'alphas is 0.1: it'), ([None], 'alphas is .None.'), (['x'], "'x' should be a valid number"),
    ([2], 'less than 1'), ([math.nan], 'finite'), ('x', 'valid number'), ([0], 'greater than 0')])
def test_alphas_are_shares(mine, alphas, said):
    says(lambda: curve(mine, alphas=alphas), said)
    if alphas not in ([], ()): says(lambda: serving(mine, PAIR, alphas=alphas).__enter__(), said)

@pytest.mark.parametrize('alpha', ['x', None, [.1], True, 0, 1, math.nan, {}])
def test_alpha_is_a_share(mine, alpha):
    before = files(mine)
    says(lambda: calibrate(mine, 'accuracy', alpha), 'alpha is .*: it should be')
    assert files(mine) == before

@pytest.mark.parametrize('how, said', [
    (dict(on_escalate='regenrate'), "unknown on_escalate 'regenrate' .did you mean 'regenerate'"),
    (dict(on_escalate=None), 'unknown on_escalate'), (dict(policy={}), r'policy is \{\}: it should be Policy'),
    (dict(policy='x'), 'policy is'), (dict(policy=Policy), 'policy is'), (dict(seeds=0), 'seeds'),
    (dict(steps='3'), 'steps'), (dict(alpha=2), 'alpha')])
def test_a_wrong_call_of_train_takes_nothing_away(mine, how, said):
    before = files(mine)
    says(lambda: train(mine, **how), said)
    assert files(mine) == before

def test_problems_from_which_nothing_is_learned_take_no_candidates_away(mine, toys):
    toys.change(slip=0., repair=1.)
    before = (mine/'candidates.json').read_bytes()
    table = own_table(mine, 'train')
    replace(table, correct=table.correct*0 + 1).save(mine/'train.npz')
    says(lambda: train(mine), 'there is nothing to route')
    assert (mine/'candidates.json').read_bytes() == before

@pytest.mark.parametrize('how, said', [
    (dict(problems=None), 'problems is None: it should be a JSONL file'), (dict(problems=5), 'problems is 5'),
    (dict(models=None), 'models is None: it should be a list'), (dict(models=5), 'models is 5'),
    (dict(grade='x'), "grade is 'x': it should be a function"), (dict(grade=None), 'grade is None')])
def test_a_wrong_argument_of_collect_draws_nothing(tmp_path, toys, how, said):
    says(lambda: collect(tmp_path/'mine', **dict(problems=rows(3), models=PAIR) | how), said)
    assert sum(backend.steps_written for backend in toys.made) == 0

@pytest.mark.parametrize('question', [None, 5, {}, dict(role='user', content='What?')])
def test_a_question_is_a_text_or_messages(mine, toys, question):
    says(lambda: route(mine, question, PAIR), 'a question should be text, or a list of messages')

@pytest.mark.parametrize('alpha', [1e-7, 1e-20, 5e-324])
def test_a_tiny_alpha_has_a_line(mine, capsys, alpha):
    assert calibrate(mine, 'certain', alpha).model_class == 'large alone'
    for target in ('certain', 'miss'): curve(mine, target, [alpha])
    says(lambda: calibrate(mine, 'miss', alpha), 'calibration problems are too few')

@pytest.mark.parametrize('call', [
    lambda folder, out: route(folder, 'What is 1 + 1?', PAIR), lambda folder, out: export(folder, out)])
def test_emptied_draws_check_no_models(mine, tmp_path, toys, call):
    "Without its draws a folder cannot tell of which models it is. Collect draws them again."
    (mine/'draws.db').write_bytes(b'')
    says(lambda: call(mine, tmp_path/'out'), r'draws\.db is empty: draw again, with collect or notebook 02')
    assert collect(mine, rows(60), PAIR)['new steps'] > 0
    assert call(mine, tmp_path/'out')

@pytest.mark.parametrize('licence', [None, '', 'MIT\n# Other', 5])
def test_a_licence_is_one_line(mine, tmp_path, licence):
    says(lambda: export(mine, tmp_path/'out', licence), '^licence is .*: give its name in one line, such as "MIT"')
    assert not (tmp_path/'out').exists()

# --- an exported folder, a file in a folder's place, a full disk

def test_a_call_that_needs_problems_says_that_a_folder_was_exported(mine, tmp_path, toys):
    export(mine, tmp_path/'out')
    calls = [train, calibrate, curve, lambda f: report(f, tmp_path/'r'), lambda f: export(f, tmp_path/'e'),
             lambda f: drift(f, tmp_path/'asked', PAIR), lambda f: collect(f, rows(60), PAIR)]
    before = files(tmp_path/'out')
    for call in calls:
        says(lambda: call(tmp_path/'out'), r'out is a router that was exported, .* or name the folder of collect')
    assert files(tmp_path/'out') == before and not (tmp_path/'r').exists() and not (tmp_path/'e').exists()

def test_a_file_in_the_place_of_a_folder(mine, tmp_path, toys):
    (tmp_path/'q.jsonl').write_text('{}')
    says(lambda: collect(tmp_path/'q.jsonl', rows(60), PAIR), r'q.jsonl is a file where a folder belongs')
    for call in (export, report): says(lambda: call(mine, tmp_path/'q.jsonl'), r'q.jsonl is a file: name a new or')

@pytest.mark.parametrize('name', ['policy/config.json', 'own.json', 'README.md'])
def test_a_full_disk_leaves_no_half_router(mine, tmp_path, monkeypatch, name):
    out, sync = tmp_path/'out', os.fsync
    def full(fd):
        if str(out/name) in os.readlink(f'/proc/self/fd/{fd}'): raise OSError(28, 'No space left on device')
        sync(fd)
    with monkeypatch.context() as patched:
        patched.setattr(os, 'fsync', full)
        with pytest.raises(OSError, match=rf"No space left on device: '.*/{name}'"): export(mine, out)
    assert not out.exists()
    assert export(mine, out)

def test_a_damaged_table_says_to_collect_again(mine):
    (mine/'calibration.npz').write_bytes((mine/'calibration.npz').read_bytes()[:500])
    says(lambda: calibrate(mine), r'calibration.npz is damaged \(.*\): collect again, or run notebook 02b')

@pytest.mark.parametrize('options', [dict(price='1/1/1'), dict(key_env='A_KEY'), dict(base_url='http://x/v1')])
def test_an_option_that_a_model_does_not_use_is_refused(tmp_path, options):
    given = [Model('micro-small', **options), 'micro-large']
    says(lambda: collect(tmp_path/'m', rows(20), given), f'^micro-small does not use {next(iter(options))}: leave')

def test_a_price_that_is_none_is_refused_for_every_model(tmp_path):
    says(lambda: collect(tmp_path/'m', rows(20), ['micro-small', 'micro-large'], access=Access(price='1/1')),
         "unknown price '1/1'; choose one of: .*, or \"INPUT/CACHED/OUTPUT\" in US dollars per million tokens")
