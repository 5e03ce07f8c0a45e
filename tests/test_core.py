"""Records, steps and boxes, seeds, benchmarks on the 20-row samples, costs."""
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.base import records as core_module
from stepwise_routing.base.records import (
    PRICES,
    UNITS,
    Call,
    ModelSpec,
    Step,
    api_cost,
    chat_prompt,
    edge_seed,
    extract_boxed,
    find_price,
    generation_flops,
    split_steps,
    token_cents,
    token_flops,
    undated,
    walk_cost,
)
from stepwise_routing.base.tools import nearest, run_async, write_file
from stepwise_routing.data import benchmarks as data_benchmarks, sources as data_sources
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.sources import SPLITS

DATA = Path(__file__).parent/'data'
SAMPLES = dict(gsm8k=DATA/'gsm8k.jsonl', math500=DATA/'math500.jsonl', omnimath=DATA/'omnimath.jsonl')

# ---- steps and boxes
@pytest.mark.parametrize('text,boxed', [
    (r'\boxed{5}', '5'), (r'\boxed{ 5 }', '5'), (r'\boxed {5}', '5'), (r'\fbox{5}', '5'),
    (r'\boxed{\frac{1}{\sqrt{2}}}', r'\frac{1}{\sqrt{2}}'),
    (r'\boxed{1} then \boxed{2}', '2'), (r'\boxed{1} then \boxed{2', '1'), (r'\boxed{\boxed{3}}', '3'),
    (r'\boxed{1', None), ('no box', None), ('', None),
    (r'\boxed{\{1,2\}}', r'\{1,2\}'), (r'\boxed{\left\{ x \right.}', r'\left\{ x \right.'), (r'{ \boxed{4} ', '4'),
    (r'} \boxed{4}', '4'), (r'\boxed', None), (r'\boxed 2$.', '2'),
    (r'\boxed{}', ''), (r'\boxed{a}{b}', 'a'), (r'x\\{\boxed{6}}', '6'), (r'\unboxed{5}', None)])
def test_extract_boxed(text, boxed): assert extract_boxed(text) == boxed

braced = lambda s: st.tuples(s, s, s).map(lambda t: t[0] + '{' + t[1] + '}' + t[2])
balanced = st.recursive(st.text('ab01+ ', max_size=5), braced, max_leaves=12)

@settings(deadline=None)
@given(st.text(max_size=30).filter(lambda s: '\\' not in s), balanced, st.text('ab{}$ .', max_size=20))
def test_a_complete_box_is_found_whatever_surrounds_it(before, content, after):
    assert extract_boxed(before + r'\boxed{' + content + '}' + after) == content.strip()

@pytest.mark.timeout(30)
@pytest.mark.parametrize('text', [r'\boxed{'*150_000, r'\boxed '*150_000, '{'*10**6, '}'*10**6, r'\boxed{1}'*100_000,
                                  r'\boxed' + ' '*10**6, '\\'*10**6])
def test_boxes_take_linear_time(text):
    extract_boxed(text)

@given(st.lists(st.text('ab c.\n').map(lambda s: ' '.join(s.split())).filter(bool), max_size=6), st.integers(1, 3))
def test_steps_survive_joining(steps, breaks):
    assert split_steps('\n\n'*breaks + ('\n\n'*breaks).join(steps) + '\n') == steps

def test_windows_line_ends_separate_steps(): assert split_steps('a\r\n\r\nb') == ['a', 'b']

def test_a_step_is_final_when_it_ends_or_holds_a_box():
    assert not Step('a', 0, 'step').final
    assert Step('a', 0, 'stop').final and Step('a', 0, 'length').final and Step(r'\boxed{1}', 0, 'step').final
    assert not Step(r'\boxed{1', 0, 'step').final

# ---- names, seeds, prompts
def test_edge_seeds_depend_on_every_part_and_on_nothing_else():
    base = ('gsm8k', 'p1', 0, '00', 1)
    others = [('math500', 'p1', 0, '00', 1), ('gsm8k', 'p2', 0, '00', 1), ('gsm8k', 'p1', 1, '00', 1),
              ('gsm8k', 'p1', 0, '000', 1), ('gsm8k', 'p1', 0, '00', 0), ('gsm8k', 'p10', 0, '0', 1)]
    seeds = [edge_seed(*a) for a in [base, *others]]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)
    code = f'from stepwise_routing.base.records import edge_seed; print(edge_seed(*{base!r}))'
    run = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': '7'}, capture_output=True,
                         text=True)
    assert int(run.stdout) == seeds[0]

def test_nearest():
    assert nearest('calibratoin', SPLITS) == " (did you mean 'calibration'?)"
    assert nearest('zzz', SPLITS) == ''

def test_a_file_is_written_in_the_place_of_a_link_and_never_through_one(tmp_path, monkeypatch):
    victim, there = tmp_path/'precious', tmp_path/'out'/'a.txt'
    victim.write_text('precious')
    there.parent.mkdir()
    for link in (there, there.with_name('a.txt.part')): link.symlink_to(victim)
    write_file(there, 'new')
    assert (victim.read_text(), there.read_text(), there.is_symlink()) == ('precious', 'new', False)
    there.with_name('a.txt.part').unlink()
    def full(*_): raise OSError('disk full')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError): write_file(there, 'newer')
    assert there.read_text() == 'new' and [*there.parent.iterdir()] == [there]

def test_run_async_inside_and_outside_a_loop():
    async def answer(): await asyncio.sleep(0); return 42
    async def fail(): raise KeyError('inside')
    async def main(): return run_async(answer())
    assert run_async(answer()) == 42 and asyncio.run(main()) == 42
    with pytest.raises(KeyError, match='inside'): run_async(fail())

def test_prompts_hold_the_paper_template():
    system, user = chat_prompt('What is 2+2?')
    assert system == dict(role='system',
                          content=r'Please reason step by step, and put your final answer within \boxed{}.')
    assert user == dict(role='user', content='What is 2+2?')
    text = core_module.VERIFY_PROMPT.format(question=r'\frac{1}{2}?', prefix='{a}', answer='b')
    assert r'\frac{1}{2}?' in text and text.endswith('Verdict:\ncorrect | incorrect')

# ---- benchmarks
def write(path, rows): path.write_text(''.join(json.dumps(r) + '\n' for r in rows)); return path
def rows(name): return [json.loads(line) for line in SAMPLES[name].read_text(encoding='utf-8').splitlines()]

FILES = dict(gsm8k=('gsm8k_train', 'gsm8k_test'), math500=('math_train', 'math500'), omnimath=('omni_math',))
OTHER = [dict(question='Another?', problem='Another?', answer='#### 1', solution=r'\boxed{1}')]

def load(folder, name, split, raw, test=OTHER, n=None):
    "Problems of a split from a folder of copies; `raw` are the rows of its own file, `test` those of the test set."
    files = [folder/f'{f}.jsonl' for f in FILES[name]]
    write(files[-1], test)
    write(files[-1 if split == 'test' else 0], raw)
    return load_problems(name, split, n, data_dir=folder)

def whole_test_set(name, folder):
    public = data_sources.PUBLIC[name]
    return public.rows(public.test, folder)

@pytest.mark.parametrize('name', SAMPLES)
def test_samples_hold_twenty_problems(name, tmp_path):
    raw = rows(name)
    assert len(raw) == 20
    load(tmp_path, name, 'test', raw)
    problems = whole_test_set(name, tmp_path)
    assert len({p.id for p in problems}) == 20
    assert all(p.benchmark == name and p.answer and p.question for p in problems)
    assert not any('\\boxed' in p.answer or '####' in p.answer for p in problems)

@pytest.mark.parametrize('name', SAMPLES)
def test_splits_are_disjoint_and_do_not_depend_on_the_order_of_the_file(name, tmp_path):
    raw = rows(name)
    split = {s: load(tmp_path, name, s, raw) for s in SPLITS}
    assert split == {s: load(tmp_path, name, s, raw[::-1]) for s in SPLITS}
    assert not {p.id for p in split['train']} & {p.id for p in split['calibration']}
    if name == 'omnimath':
        assert [len(split[s]) for s in SPLITS] == [8, 4, 8]
        every = whole_test_set(name, tmp_path)
        assert sorted(p.id for s in SPLITS for p in split[s]) == sorted(p.id for p in every)
    else:
        assert len(split['train']) + len(split['calibration']) == len(split['test']) == 20
    assert load(tmp_path, name, 'test', raw, n=3) == split['test'][:3]

@pytest.mark.parametrize('name', ['gsm8k', 'math500'])
def test_a_test_question_never_appears_in_train_or_calibration(name, tmp_path):
    field = data_sources.PUBLIC[name].fields[0]
    raw = rows(name)
    test = [{**r, field: '  ' + r[field].upper().replace(' ', '\n')} for r in raw[:10]]
    kept = [p for s in ('train', 'calibration') for p in load(tmp_path, name, s, raw, test)]
    assert len(kept) == 10
    keys = [{data_sources.question_key(p.question) for p in ps} for ps in (kept, load(tmp_path, name, 'test', test))]
    assert not keys[0] & keys[1]

def test_from_the_hub_the_test_questions_are_left_out_too(monkeypatch):
    asked = []
    def hub(source):
        asked.append(source.revision)
        return rows('gsm8k')[:20 if source.split == 'train' else 5]
    monkeypatch.setattr(data_sources, 'hub_rows', hub)
    parts = {s: load_problems('gsm8k', s) for s in SPLITS}
    assert len(parts['test']) == 5 and len(parts['train']) + len(parts['calibration']) == 15
    assert set(asked) == {'740312add88f781978c0658806c59bc2815b9866'}

def test_the_hub_is_asked_for_every_configuration_at_the_pinned_revision(monkeypatch):
    asked = []
    def load_dataset(name, config, split, revision):
        asked.append((name, config, split, revision))
        return [dict(problem=f'Question of {name} {config}', solution=r'\boxed{1}', level='Level 3')]
    monkeypatch.setitem(sys.modules, 'datasets', type('datasets', (), dict(load_dataset=staticmethod(load_dataset))))
    problems = load_problems('math500', 'train') + load_problems('math500', 'calibration')
    assert len(problems) == 7 and {p.difficulty for p in problems} == {3.}
    sources = {('HuggingFaceH4/MATH-500', 'test'), ('EleutherAI/hendrycks_math', 'train')}
    assert {(n, s) for n, c, s, r in asked} == sources and all(len(r) == 40 for n, c, s, r in asked)
    assert len({c for n, c, s, r in asked if n.startswith('Eleuther')}) == 7

def test_twins_and_empty_answers_are_left_out(tmp_path):
    raw = rows('omnimath')
    twin, empty = {**raw[0], 'problem': raw[0]['problem'].replace(' ', '  ').upper()}, {**raw[1], 'answer': ''}
    more = [*raw, twin, {**raw[2], 'answer': '\\[ ' + raw[2]['answer'] + ' \\]'}]
    found = [p for s in SPLITS for p in load(tmp_path, 'omnimath', s, more)]
    assert len(found) == 20
    assert next(p for p in found if p.question == raw[2]['problem']).answer == raw[2]['answer']
    assert len([p for s in SPLITS for p in load(tmp_path, 'omnimath', s, [raw[0], empty, *raw[2:]])]) == 19

def test_known_near_duplicates_are_left_out_of_training_sets_and_never_of_math500(tmp_path):
    # MATH train; a MATH-500 problem divides by 9
    question = 'What is the remainder when $1 + 2 + 3 + 4 + \\dots + 9 + 10$ is  divided by 8?'
    raw = [*rows('math500'), dict(problem=question, solution=r'\boxed{7}')]
    assert len([p for s in ('train', 'calibration') for p in load(tmp_path, 'math500', s, raw)]) == 20
    assert len(load(tmp_path, 'math500', 'test', raw)) == 21

def test_gsm8k_rows():
    p = data_sources.read_gsm8k(dict(question='Q?', answer='Half is 48/2=<<48/2=24>>24.\nTotal 1,000.\n#### 1,000'))
    assert p.answer == '1000' and p.solution == 'Half is 48/2=24.\n\nTotal 1,000.'

def test_math_rows_take_the_last_box_where_no_answer_is_given():
    row = dict(problem='P', solution=r'So \boxed{1}, no, $\boxed{\frac{1}{2}}$.', level='Level 5')
    p = data_sources.read_math(row)
    assert p.answer == r'\frac{1}{2}' and p.difficulty == 5.
    assert data_sources.read_math(dict(problem='P', solution=r'\boxed{1}', level='Level ?')).difficulty is None

# ---- a folder of local copies
@pytest.fixture
def local(tmp_path):
    for name, files in FILES.items():
        for f in files: write(tmp_path/f'{f}.jsonl', rows(name)[:20 if f != 'gsm8k_test' and f != 'math500' else 5])
    return tmp_path

@pytest.mark.parametrize('name', FILES)
def test_a_folder_gives_what_the_hub_gives_and_the_hub_is_not_asked(name, local, monkeypatch):
    def read(source): return data_sources.file_rows(local/source.file)
    for split in SPLITS:
        monkeypatch.setattr(data_sources, 'hub_rows', read)
        expected = load_problems(name, split)
        monkeypatch.setattr(data_sources, 'hub_rows', lambda source: pytest.fail('the Hub was asked'))
        assert load_problems(name, split, data_dir=local) == load_problems(name, split, data_dir=str(local)) == expected
    every = [load_problems(name, s, data_dir=local) for s in SPLITS]
    questions = [{data_sources.question_key(p.question) for p in problems} for problems in every]
    assert not questions[0] & questions[2] and not questions[1] & questions[2] and sum(map(len, questions)) == 20

def test_a_bad_folder_is_one_line(local):
    for change, said in ((lambda: (local/'math500.jsonl').unlink(), r'math500.jsonl is not a file'),
                         (lambda: write(local/'math500.jsonl', [{}]), "row 1: no field 'problem'"),
                         (lambda: (local/'math500.jsonl').write_text('{"problem"'), 'row 1: not a JSON object')):
        change()
        with pytest.raises((ValueError, FileNotFoundError), match=said) as e:
            load_problems('math500', 'train', data_dir=local)
        assert '\n' not in str(e.value)
    with pytest.raises(FileNotFoundError, match='is not a folder'):
        load_problems('gsm8k', 'test', data_dir=local/'none')
    # one folder serves a run with both kinds
    assert load_problems('micro-gsm', 'test', 2, data_dir='nowhere') == load_problems('micro-gsm', 'test', 2)

def test_step_limits():
    assert [data_benchmarks.step_limit(30, b) for b in ('gsm8k', 'micro-omni')] == [30, 30]
    assert [data_benchmarks.step_limit(dict(default=30, omnimath=100), b) for b in ('gsm8k', 'omnimath')] == [30, 100]
    for limits, said in ((dict(omnimath=100), 'max_steps has no value for gsm8k'),
                         (dict(defualt=3), "did you mean 'default'")):
        with pytest.raises(ValueError, match=said): data_benchmarks.step_limit(limits, 'gsm8k')

GOOD = '{"question": "2+2?", "answer": "#### 4"}\n'
@pytest.mark.parametrize('text,message', [
    ('', 'holds no rows'), ('\n\n', 'holds no rows'),
    (GOOD + '{"question": "3+', r'row 2: not a JSON object \(.*cut off'),
    (GOOD + '\xff\xfe\n', 'row 2: the text is not UTF-8: the file is damaged, or'),
    (GOOD + '[1]\n', 'row 2: not a JSON object'), (GOOD + '{"question": "3?"}\n', "row 2: no field 'answer'"),
    ('{"qestion": "3?", "answer": "#### 3"}', r"row 1: no field 'question' \(did you mean 'qestion'\?\)"),
    (GOOD + '{"question": 3, "answer": "#### 3"}', "row 2: field 'question' is not text"),
    (GOOD + '{"question": "3?", "answer": "3"}', "row 2: field 'answer' has no \"#### number\""),
    (GOOD + '{"question": "3?", "answer": null}', 'row 2: '), ('['*100_000, 'row 1: not a JSON object')])
def test_bad_files_are_named_with_their_row(tmp_path, text, message):
    (tmp_path/'gsm8k_test.jsonl').write_bytes(text.encode('latin-1'))
    with pytest.raises(ValueError, match=message) as e: load_problems('gsm8k', 'test', data_dir=tmp_path)
    assert 'gsm8k_test.jsonl' in str(e.value) and '\n' not in str(e.value)

def test_bad_names_and_numbers(tmp_path):
    line = r"unknown benchmark 'gms8k' \(did you mean 'gsm8k'\?\); choose one of: micro-gsm"
    with pytest.raises(ValueError, match=line):
        load_problems('gms8k', 'test')
    with pytest.raises(ValueError, match=r"unknown benchmark 'micro-gsn' \(did you mean 'micro-gsm'\?\)"):
        load_problems('micro-gsn', 'test', n=3)
    with pytest.raises(ValueError, match=r"unknown split 'cal'"): load_problems('gsm8k', 'cal')
    with pytest.raises(ValueError, match='gsm8k test has 20 problems: n=21'):
        load(tmp_path, 'gsm8k', 'test', rows('gsm8k'), n=21)
    with pytest.raises(ValueError, match='at least 1'): load_problems('gsm8k', 'test', n=0)
    with pytest.raises(FileNotFoundError, match=r"gsm8k.json is not a file \(did you mean 'gsm8k.jsonl'\?\)"):
        data_sources.file_rows(DATA/'gsm8k.json')
    with pytest.raises(ValueError, match='micro-gsm test has .* problems: n=1000000 is too many'):
        load_problems('micro-gsm', 'test', 10**6)

def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[hub\]" -c constraints\.txt'):
        load_problems('gsm8k', 'test')

# ---- costs
tokens = st.integers(0, 5000)
call = st.builds(lambda m, g, p, c: Call(m, g, p, min(c, p)), st.integers(-1, 1), tokens, tokens, tokens)
PAIR = [ModelSpec('small', 1.5e9), ModelSpec('large', 7e9, price='gpt-4.1-mini')]
JUDGE = ModelSpec('judge', 3e9, price='gpt-4o-mini')

@given(st.lists(call, max_size=8))
def test_costs_add_up_over_calls_and_full_is_never_below_paper(calls):
    for f in (lambda c: generation_flops(c, PAIR, external=JUDGE), lambda c: api_cost(c, PAIR, external=JUDGE),
              lambda c: generation_flops(c, PAIR, 'full', external=JUDGE)):
        assert f(calls) == pytest.approx(sum(f([c]) for c in calls))
    assert generation_flops(calls, PAIR, 'full', JUDGE) >= generation_flops(calls, PAIR, 'paper', JUDGE)

def test_the_paper_prices():
    million = lambda **k: api_cost([Call(1, **{**dict(generated=0, prompt=0, cached=0), **k})], PAIR)
    assert million(prompt=10**6) == pytest.approx(40) and million(generated=10**6) == pytest.approx(160)
    assert million(prompt=10**6, cached=0, billed=10**6) == pytest.approx(10)
    assert million(prompt=10**6, cached=10**6) == million(prompt=10**6) # what an ideal cache holds is no discount
    assert generation_flops([Call(0, 324, 100, 0)], PAIR) == 0.972e12 # the paper's Table 1: 1.5B only, GSM8K
    assert set(PRICES) == {'gpt-4.1-mini', 'gpt-4o-mini'} and all(p.as_of for p in PRICES.values())
    assert find_price('0.4/0.1/1.6')[:3] == PRICES[undated('gpt-4.1-mini-2025-04-14')][:3] # a price of one's own

def test_a_walk_costs_in_three_units():
    small, large = ModelSpec('small', 1.5e9), ModelSpec('large', 7e9, price='gpt-4.1-mini')
    calls = [Call(0, 10, 100, 0), Call(-1, 1, 120, 40, 'judge', 20), Call(0, 8, 110, 110, 'draft'),
             Call(1, 30, 110, 64, billed=32)]
    cost = {unit: walk_cost(calls, [small, large], unit, JUDGE) for unit in UNITS}
    assert cost['paper_flops'] == 3e9*18 + 14e9*30 + 6e9*1
    assert cost['full_flops'] == cost['paper_flops'] + 3e9*100 + 14e9*46 + 6e9*80
    assert cost['cents'] == pytest.approx((78*.40 + 32*.10 + 30*1.60 + 100*.15 + 20*.075 + 1*.60) / 1e4, rel=1e-12)
    assert walk_cost(calls, [small, large], external=JUDGE) == cost['paper_flops']
    assert UNITS == ('paper_flops', 'full_flops', 'cents') and walk_cost([], [small], 'full_flops') == 0
    assert walk_cost(calls, [small, replace(large, price=None)], 'cents', replace(JUDGE, price=None)) == 0
    hint = r"unknown unit 'cent' \(did you mean 'cents'\?\); choose one of: paper_flops, full_flops, cents"
    with pytest.raises(ValueError, match=hint): walk_cost(calls, PAIR, 'cent')
    for unit in UNITS:
        with pytest.raises(ValueError, match='pass external=') as e: walk_cost(calls, [small, large], unit)
        assert '\n' not in str(e.value)

@given(st.lists(call, max_size=8), st.sampled_from(['paper_flops', 'full_flops', 'cents']))
def test_a_walk_cost_is_the_sum_of_its_calls(calls, unit):
    assert walk_cost(calls, PAIR, unit, JUDGE) == pytest.approx(sum(walk_cost([c], PAIR, unit, JUDGE) for c in calls))

@given(st.lists(call, min_size=1, max_size=8))
def test_tokens_cost_the_same_in_an_array(calls):
    import numpy as np
    own = [replace(c, model=1, billed=c.cached) for c in calls]
    generated, prompt, billed = (np.array([getattr(c, k) for c in own]) for k in ('generated', 'prompt', 'billed'))
    assert token_flops(PAIR[1].params, generated).tolist() == [generation_flops([c], PAIR) for c in own]
    assert token_cents('gpt-4.1-mini', prompt, billed, generated).tolist() == [api_cost([c], PAIR) for c in own]

def test_costs_name_what_is_missing():
    with pytest.raises(ValueError, match='external'): generation_flops([Call(-1, 3, 5, 0, 'judge')], PAIR)
    with pytest.raises(ValueError, match=r"did you mean 'paper'"): generation_flops([], PAIR, 'papr')
    with pytest.raises(ValueError, match=r"did you mean 'gpt-4.1-mini'"):
        api_cost([Call(0, 1, 1, 0)], [ModelSpec('x', 0, price='gpt-4.1-mni')])
    with pytest.raises(ValueError, match='model 2'): generation_flops([Call(2, 1, 1, 0)], PAIR)

def test_import_is_light():
    heavy = 'torch', 'numpy', 'pandas', 'sympy', 'transformers', 'datasets', 'fastcore'
    code = f'import sys; import stepwise_routing.base.records; print([m for m in {heavy} if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'


def test_an_interrupt_in_a_running_loop_ends_the_work():
    code = '''
import asyncio, os, signal, threading, time
from stepwise_routing.base.tools import run_async
ended = []
async def long():
    try: await asyncio.sleep(60)
    finally: ended.append(True)
async def cell(): return run_async(long())
threading.Timer(.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
try: asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt: print('interrupted', ended)
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=40)
    assert done.stdout.strip() == 'interrupted [True]', done.stderr[-300:]

def test_a_number_of_problems_per_benchmark():
    counts = dict(default=3, omnimath=2)
    assert [len(load_problems(b, 'test', counts)) for b in data_benchmarks.MICRO] == [3]*3
    with pytest.raises(ValueError, match="did you mean 'micro-gsm'"):
        load_problems('micro-gsm', 'test', {'micro-gms': 3})
    with pytest.raises(ValueError, match='n has no value for micro-gsm'):
        load_problems('micro-gsm', 'test', {'micro-math': 3})
