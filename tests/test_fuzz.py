"""A search for inputs that break five areas: replies, grading, settings, stores, requests over HTTP.

`make fuzz` goes on for an hour, `make test` tries a few. What it found stands beside the property, or in
tests/test_attacks.py. Each property damages something good: that goes deeper than noise."""
import copy
import json
import math
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from faulty import Faulty
from hypothesis import HealthCheck, given, settings, strategies as st
from micro_router import micro_policy

from stepwise_routing.base.records import Step, extract_boxed, split_steps
from stepwise_routing.base.store import RolloutStore
from stepwise_routing.base.tools import find_project, run_async
from stepwise_routing.data.answers import plain_verdict, read_number, read_quantity
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import Grader
from stepwise_routing.data.questions import own_problems
from stepwise_routing.data.steps import first_wrong
from stepwise_routing.data.tidy import tidy
from stepwise_routing.method.outcomes import OutcomeTable, toy_table
from stepwise_routing.method.policy import load_policy
from stepwise_routing.models import replies
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import Ledger
from stepwise_routing.models.xverify import read_verdict
from stepwise_routing.run.config import (
    SECTIONS,
    Config,
    full_names,
    load_yaml,
    read_run,
    settings_of,
)

pytestmark = pytest.mark.timeout(3600)

def tried(n): # examples of a property, many more of them in `make fuzz`
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples(n), deadline=None, suppress_health_check=checks)

def is_line(error): return len(str(error)) < 1500 and not re.search('[\x00-\x1f\x7f-\x9f]', str(error))

# ---- damage

HUGE = [10**400, -10**400, 2**63, 2**64, 10**9, -1, 0, 1, 1e308, -1e308, math.inf, -math.inf, math.nan, 5e-324, .5,
        True, False]
TEXTS = ['', ' ', '\n', '\n\n', '\0', '\ud800', '\udfff', '\x1b[2J', '\u202e', '\ufeff', 'é', '🙂', '\r\n', 'x'*3000,
         '\\', '"', '__class__', '9'*5000, '1e999', 'NaN', 'null', '../../x', 'stop', 'length', '\\boxed{',
         '\\boxed{7}', '{}', '$', '%s']
DEEP = [lambda: json.loads('['*300 + ']'*300), lambda: json.loads('{"a":'*300 + '1' + '}'*300)]
fields = st.sampled_from(['token', 'logprob', 'bytes', 'text', 'type', 'content', 'a'])
objects = st.dictionaries(fields, st.sampled_from([*HUGE, *TEXTS]), max_size=3)
junk = st.one_of(st.none(), st.sampled_from(HUGE), st.sampled_from(TEXTS), st.integers(), st.floats(),
                 st.text(max_size=20), st.lists(st.integers(-1, 300), max_size=3), st.just([]), objects,
                 st.sampled_from(DEEP).map(lambda make: make()))

def places(value, path=()):
    "The paths of all values inside a value of JSON."
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items: yield from places(part, (*path, key))

def change(value, path, how, new):
    "A copy of a value of JSON with one place changed: replaced, taken away, there twice, or under another name."
    if not path: return new if how == 'replace' else value
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]: holder = holder[key]
    key = path[-1]
    if how == 'replace': holder[key] = new
    elif how == 'remove': del holder[key]
    elif isinstance(holder, list): holder.insert(key, holder[key])
    else: holder[str(new)] = holder.pop(key)
    return value

@st.composite
def damaged_json(draw, good):
    "A value of JSON with up to four places changed."
    value = draw(good)
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(sorted(places(value), key=repr)))
        value = change(value, path, draw(st.sampled_from(['replace', 'replace', 'remove', 'double'])), draw(junk))
    return value

@st.composite
def damaged_bytes(draw, raw):
    "Bytes with some of them flipped, taken away, put in, moved or doubled."
    data = bytearray(raw)
    for _ in range(draw(st.integers(0, 4))):
        if not data: break
        at, n = draw(st.integers(0, len(data) - 1)), draw(st.sampled_from([1, 1, 2, 4, 16, 300]))
        how = draw(st.sampled_from(['flip', 'cut', 'put', 'double', 'end', 'zero']))
        if how == 'flip': data[at] ^= 1 << draw(st.integers(0, 7))
        if how == 'cut': del data[at:at + n]
        if how == 'put': data[at:at] = draw(st.binary(min_size=1, max_size=8))
        if how == 'double': data[at:at] = data[at:at + n]
        if how == 'end': del data[at:]
        if how == 'zero': data[at:at + n] = bytes(len(data[at:at + n]))
    return bytes(data)

# ---- replies

@lru_cache(None)
def paid():
    "A paid model whose server nobody asks."
    return OpenAIBackend('toy-model', base_url='http://127.0.0.1:1/v1', price='gpt-4.1-mini', key_env='NO_KEY')

BODY = dict(model='toy-model', messages=[dict(role='user', content='How many?')], max_tokens=60, logprobs=True,
            top_logprobs=3)

def good_reply(seed, stop):
    body = BODY | dict(seed=seed) | (dict(stop='\n\n') if stop else {})
    return Faulty()._reply('ok', body, '')

good = st.builds(good_reply, st.integers(0, 30), st.booleans())
def as_bytes(value): return json.dumps(value).encode()

def as_text(raw): return raw.decode('utf-8', 'replace')

raw_replies = st.one_of(damaged_json(good).map(json.dumps), st.text(max_size=200),
                        good.map(as_bytes).flatmap(damaged_bytes).map(as_text))

@given(raw_replies, st.booleans())
@tried(300)
def test_replies_are_read_or_refused_and_their_bill_is_possible(text, stopped):
    outcome = paid()._read(text, BODY)
    if outcome.units is not None: # what was asked for, and the server's own words
        usage = replies.read_usage(json.loads(text))
        assert 0 <= outcome.units <= 10**4 * 16_000 and type(outcome.units) is int and usage is not None
    if outcome.reply is None:
        assert outcome.why
        return
    reply = json.loads(json.dumps(outcome.reply)) # as the ledger keeps it
    assert reply['usage'] == outcome.reply['usage'] and outcome.units is not None
    steps = replies.reply_steps(reply, stopped=stopped, max_steps=4)
    assert steps and sum(step.generated for step in steps) == reply['usage']['generated']
    for step in steps:
        step.text.encode()
        assert step.finish in ('stop', 'step', 'length') and step.generated >= 0 and 0 <= step.cached <= step.prompt
        assert all(0 <= p <= 1.0011 for p in step.prob) and all(0 <= end <= len(step.text) for end in step.ends)
    probs = replies.option_probs(reply['tokens']['first'], ('correct', 'incorrect'))
    assert all(0 <= p <= 1 for p in probs)

@given(st.one_of(st.text(max_size=300), st.sampled_from(TEXTS)))
@tried(100)
def test_replies_of_a_judge_are_a_verdict_or_none(text): assert read_verdict(text) in (True, False, None)

# ---- grading

PIECES = ['1', '2', '0', '-', '+', '.', ',', ' ', '/', '%', '\\%', '$', '\\$', '\\frac', '{', '}', '(', ')', '[', ']',
          '\\frac{1}{2}', '\\dfrac12', '^', '_', '^{2}', '^\\circ', '\\overline{3}', 'e5', 'E-3', '10^{', '\\text{',
          ' cm', ' dollars', 'x', 'y', '=', '\\sqrt', '\\sqrt{2}', '\\pi', '\\infty', '\\cup', '\\in', ':', ';', 'or',
          ' and ', '\\pm', '\\cdot', '\\times', '\\left', '\\right', '\\begin{pmatrix}', '\\end{pmatrix}', '\\\\',
          '\\!', '\\,', '{,}', '−', '½', '٣', '²', '1,000', '1 000', '007', '1e400', '9'*50, '0.' + '3'*12,
          '\\boxed{', '!', '|', '<', '\\le', 'pct', ' percent', 'square feet', 'ft^2', '_8', '_{16}', 'A', '(B)',
          'true', 'None', 'nan', 'inf', '\\mathrm{', '°', '\n', '\t', '\0', '\\']
answers = st.one_of(st.lists(st.sampled_from(PIECES), max_size=9).map(''.join), st.text(max_size=30))

@given(answers, answers)
@tried(1000)
def test_grading_of_plain_answers_says_yes_no_or_ask_algebra(a, b):
    assert plain_verdict(a, b) in (True, False, None)
    assert plain_verdict(a, a) is bool(a.strip())
    extract_boxed(a), extract_boxed(rf'\boxed{{{a}}}'), split_steps(a)
    for text in (a, tidy(a)):
        number, quantity = read_number(text), read_quantity(text)
        if number:
            assert number.value == number.value and quantity
            assert plain_verdict(text, text + ' ') is True

@given(st.integers(-10**9, 10**9), st.integers(1, 10**6), st.integers(2, 9))
@tried(300)
def test_grading_knows_a_number_in_other_spellings(top, bottom, k):
    spelled = [f'{top}/{bottom}', rf'\frac{{{top}}}{{{bottom}}}', rf'$\dfrac{{{top*k}}}{{{bottom*k}}}$',
               f'{top*k}/{bottom*k}.']
    for a in spelled:
        for b in spelled: assert plain_verdict(a, b) is True, (a, b)
        assert plain_verdict(a, f'{top + 1}/{bottom}') is False
        assert plain_verdict(a, rf'\frac{{{top}}}{{{bottom + 1}}}') is (top == 0)

@given(answers, answers)
@tried(15)
def test_grading_by_algebra_ends_with_a_verdict(hasty_grader, a, b):
    assert isinstance(hasty_grader(a, b), bool)
    assert hasty_grader(a, a) is bool(a.strip())

@pytest.fixture(scope='module')
def hasty_grader():
    with Grader(timeout=1) as grader: yield grader

@given(st.lists(answers, max_size=4), st.integers(0, 20))
@tried(100)
def test_grading_of_steps_names_one_of_them_or_none(steps, i):
    problem = load_problems('micro-gsm', 'train', 21)[i]
    assert first_wrong(problem, steps) in range(-1, max(len(steps), 1))

# ---- settings

NAMES = full_names()
VALUES = ['1', '0', '-1', '.5', '1e-3', '1e999', '.nan', '.inf', 'true', 'null', '~', '""', '[]', '{}', '[1, 2]',
          '[.1, .03]', '[a, b]', '{default: 3}', '{default: null}', '9'*400, '0x10', '0o7', '1_000', '2026-01-01',
          '12:30:45', '!!python/object:os.system x', '!!binary aGk=', '!!set {a}', '&a 1', '*a', '|\n  x', '>\n  y',
          "'x'", '"\\x1b[2J"', '"\\ud800"', 'micro-gsm', 'corrected', '[micro-gsm]', '[micro-small, micro-large]',
          'xverify:x', 'xverify:http://127.0.0.1:1/v1#m', 'auto', '../x', '<<', '- 1', '? a', '%TAG', '\x00', '\x07',
          '🙂', '1: 2', '[[[[', '{a: {b: {c: 1}}}', '18446744073709551616', '!!float 1', '!!int "3"']
values = st.one_of(st.sampled_from(VALUES), st.integers().map(str), st.floats().map(str), st.text(max_size=12))

@st.composite
def profiles(draw):
    "The text of a profile: known and unknown names, values of every kind."
    lines = []
    for section in draw(st.lists(st.sampled_from([*SECTIONS, 'seed', 'store', 'x', '?', '- a']), max_size=3)):
        inside = [name.partition('.')[2] for name in NAMES if name.startswith(f'{section}.')]
        if not inside: lines.append(f'{section}: {draw(values)}')
        else:
            lines.append(f'{section}:')
            for name in draw(st.lists(st.sampled_from([*inside, 'x', '<<']), max_size=3)):
                lines.append(f'  {name}: {draw(values)}')
    return '\n'.join(lines)

def same(a, b): return a == b and repr(a) == repr(b)

PROJECT = find_project(Path(__file__).parents[1])

def as_profile(values):
    "The text of a profile with these settings, by full name."
    sections = {name: value for name, value in values.items() if '.' not in name}
    for name, value in values.items():
        section, dot, field = name.rpartition('.')
        if dot: sections.setdefault(section, {})[field] = value
    return json.dumps(sections, ensure_ascii=False)

@given(st.one_of(profiles().map(lambda text: text.encode('utf-8', 'surrogatepass')),
                 profiles().map(lambda text: text.encode('utf-8', 'replace')).flatmap(damaged_bytes)))
@tried(200)
def test_settings_are_read_or_refused_in_one_line(tmp_path, raw):
    file = tmp_path/'mine.yaml'
    file.write_bytes(raw)
    try: run = read_run(file, project=PROJECT)
    except ValueError as e:
        assert is_line(e) and 'mine.yaml' in str(e)
        return
    assert run.store.parent.name == 'store' and run.folder.parent.name == 'runs'
    received = json.loads(json.dumps(settings_of(run.config), allow_nan=False)) # a manifest has them
    file.write_text(as_profile(received), 'utf-8')
    assert same(read_run(file, project=PROJECT).config, run.config)

@given(st.sampled_from(NAMES), values)
@tried(200)
def test_settings_of_the_command_line_are_read_or_refused_in_one_line(name, text):
    from stepwise_routing.run.config import changed
    try: config = changed(Config(), {name: load_yaml(text, f'-p {name}')})
    except ValueError as e: assert is_line(e) and name.rpartition('.')[2] in str(e)
    else: json.dumps(settings_of(config), allow_nan=False)

row = st.just(dict(question='What is 1 + 2?', answer='3', id='a'))

@given(st.one_of(damaged_json(row).map(as_bytes),
                 damaged_bytes(b'{"question": "What?", "answer": 1.5}\n{"question": "Why?", "answer": "x"}\n')))
@tried(200)
def test_settings_of_questions_are_read_or_refused_in_one_line(tmp_path, raw):
    file = tmp_path/'q.jsonl'
    file.write_bytes(raw)
    try: problems = own_problems(file)
    except ValueError as e: assert is_line(e) and 'q.jsonl' in str(e)
    else: assert all(type(p.question) is str and p.question.encode() and type(p.answer) is str for p in problems)

# ---- stores

STEPS = {(f'p{i}', 0, '01'[:i % 3], i % 2): Step(f'step {i}', i % 2, 'step', (i,), (6,), (.5,), None, 3, 20)
         for i in range(12)}
FILES = 'draws.db', 'ledger.db', 'table.npz', 'policy/config.json', 'policy/model.safetensors'

@lru_cache(None)
def whole_files(folder):
    "The bytes of a store, a ledger, a table and a policy."
    folder = Path(folder)
    with RolloutStore(folder/'draws.db', dict(a=1)) as store:
        for key, step in STEPS.items(): store.put(*key, step)
    with Ledger(folder/'ledger.db') as book:
        async def pay():
            for i in range(8): await book.settle(await book.reserve(f'{i:032x}', 9), 5, dict(n=i))
        run_async(pay())
    toy_table(9).save(folder/'table.npz')
    micro_policy(folder/'policy')
    return {name: (folder/name).read_bytes() for name in FILES}

@pytest.fixture(scope='module')
def wholes(tmp_path_factory): return whole_files(tmp_path_factory.mktemp('whole'))

def read_again(name, file):
    "What a file holds, and what it held when it was whole."
    if name == 'draws.db':
        with RolloutStore(file) as store: return {key: store.get(*key) for key in STEPS}, STEPS
    if name == 'ledger.db':
        with Ledger(file) as book: now = [book.units, *(book.reply(f'{i:032x}') for i in range(8))]
        return now, [40, *(dict(n=i) for i in range(8))]
    if name == 'table.npz':
        table, whole = OutcomeTable.load(file), toy_table(9)
        return [repr(np.asarray(t.correct)) + repr(t.problem_id) + repr(t.obs) for t in (table, whole)]
    policy = load_policy(file.parent)
    return policy.kappa, micro_policy(file.parent.parent/'other').kappa

@given(st.sampled_from(FILES), st.data())
@tried(120)
def test_stores_that_are_damaged_hold_what_they_held_or_say_so(wholes, tmp_path, name, data):
    (tmp_path/'policy').mkdir(exist_ok=True)
    for other in FILES[3:]: (tmp_path/other).write_bytes(wholes[other])
    raw = data.draw(damaged_bytes(wholes[name]))
    for beside in tmp_path.glob('*.db-*'): beside.unlink()
    (tmp_path/name).write_bytes(raw)
    try: now, before = read_again(name, tmp_path/name)
    except (ValueError, OSError) as e: assert is_line(e) and str((tmp_path/name).parent.name) in str(e)
    else: assert now == before or raw == b'' and not any(now.values() if isinstance(now, dict) else now)
