"A language model as grader: every reply is a verdict or counted, nothing is asked twice."
import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from faulty import Faulty, schedule, words
from hypothesis import given, settings, strategies as st
from judging import JUDGE_TEMPLATE

from stepwise_routing.data.grading import grade_pairs, is_right
from stepwise_routing.models import xverify as models_xverify
from stepwise_routing.models.xverify import XVerify, _xverify_template, open_grader, read_verdict
from stepwise_routing.records import Problem

PARTS = re.compile(r'Question: (.*?)\n\nGiven answer: (.*?)\n\nReference answer: (.*?)\n\nReply with', re.S)

def by_length(question, given, reference): return 'Correct' if len(given) == len(reference) else 'Incorrect'

class Judge(Faulty):
    "The faulty server, with verdicts for replies."
    def __init__(self, say=by_length, **kwargs):
        super().__init__(**{**dict(models=('judge',)), **kwargs})
        self.say = say
    def _reply(self, fault, body, shown):
        reply = super()._reply(fault, {**body, 'max_tokens': 99}, shown)
        verdict = self.say(*PARTS.search(body['messages'][0]['content']).groups())
        if fault == 'echo': verdict = f'{shown} {verdict}'
        reply['choices'][0]['message']['content'] = ''.join(words(verdict)[:body['max_tokens']])
        return reply

def judge(server, **kwargs):
    usual = dict(template=JUDGE_TEMPLATE, identity=dict(toy=1), pause=0, timeout=5)
    return XVerify('judge', base_url=server.url, **usual | kwargs)

def many(n): return [(Problem('toy', f'toy-{i}', f'What is {i}?', 'x'*(i % 5 + 1)), 'y'*(i % 3 + 1)) for i in range(n)]
def truth(pairs): return {(p.id, a): len(a) == len(p.answer) for p, a in pairs}
P, PAIRS = many(1)[0][0], many(40)

def fails(call, *parts, error=RuntimeError):
    "The one line of an error."
    with pytest.raises(error) as e: call()
    line = str(e.value)
    assert '\n' not in line and len(line) < 400 and all(p in line for p in parts), line
    return line

# ---- what a reply says
@given(st.lists(st.sampled_from(['Correct', 'correct', 'INCORRECT', 'incorrect', 'Judgement', 'judgment', 'not',
                                 'incorrectly', 'correctness', '1', 'The answer']),
                max_size=4), st.sampled_from(['{}', '[{}]', '**{}**', '"{}".', ' {}\n']),
       st.sampled_from([' ', ': ', '. ', ' or ', '\n']))
def test_a_verdict_is_read_by_its_words(pieces, form, between):
    reply = between.join(form.format(p) for p in pieces)
    said = re.findall('[a-z0-9]+', reply.lower())
    if said[:1] in (['judgement'], ['judgment']): said = said[1:]
    expected = False if 'incorrect' in said else True if said[:1] == ['correct'] else None
    assert read_verdict(reply) is expected

# ---- the prompt
@settings(deadline=None)
@given(*[st.text(st.characters(exclude_categories=()), max_size=30)]*3)
def test_a_prompt_holds_what_was_filled_in_and_nothing_else(question, answer, given_answer):
    prompt = models_xverify._fill('Q\n{question}\nO\n{output}\nA\n{answer}\nEnd', Problem('t', '1', question, answer),
                                  given_answer)
    clean = lambda s: s.encode('utf-8', 'replace').decode()
    assert prompt == f'Q\n{clean(question)}\nO\n{clean(given_answer)}\nA\n{clean(answer)}\nEnd'

# ---- xVerify's own prompt is fetched
FAKE = 'Judge this.\n\nQuestion: {question}\n\nOutput sentence: {output}\n\nCorrect answer: {answer}\n\nJudgement:\n'
FILE = f"raise SystemExit('run!')\nBASE = {{'judge': '<user>\\\\n{{query}}\\\\n'}}\nPROMPT = '''{FAKE}'''\n"

class Files(BaseHTTPRequestHandler):
    "A web server with one file."
    body, asked = FILE, 0
    def log_message(self, *args): pass
    def do_GET(self):
        type(self).asked += 1
        data = self.body.encode()
        self.send_response(200 if data else 404)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

@pytest.fixture
def web(monkeypatch, tmp_path):
    handler = type('Handler', (Files,), {})
    server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    handler.url = f'http://127.0.0.1:{server.server_port}/judge_prompt.py'
    monkeypatch.setattr(models_xverify, '_PROMPT_URL', handler.url)
    monkeypatch.setattr(models_xverify, '_PROMPT_DIGEST', models_xverify._words(FAKE))
    yield handler
    server.shutdown(); server.server_close()

def test_the_prompt_is_fetched_once_and_never_run(web, tmp_path):
    assert [_xverify_template() for _ in range(3)] == [FAKE]*3 and web.asked == 1
    assert models_xverify._template(None) == FAKE
    (tmp_path/'copy.py').write_text(FILE); (tmp_path/'prompt.txt').write_text(FAKE)
    assert [models_xverify._template(tmp_path/f) for f in ('copy.py', 'prompt.txt')] == [FAKE]*2 and web.asked == 1

def test_another_prompt_than_the_known_one_is_refused_and_not_kept(web, tmp_path):
    web.body = FILE.replace('Judge this', 'Judge that')
    fails(_xverify_template, web.url, "does not hold the prompt of xVerify's weights")
    assert not list((tmp_path/'cache').rglob('*.py'))
    web.body = ''
    fails(_xverify_template, 'does not come from GitHub', 'judge_prompt.py', 'give a template')
    (tmp_path/'cache'/'stepwise-routing').mkdir(parents=True)
    (tmp_path/'cache'/'stepwise-routing'/'xverify_judge_prompt.py').write_text('PROMPT = 1')
    fails(_xverify_template, 'xverify_judge_prompt.py does not hold', 'remove it')

# ---- asking
def test_what_was_asked_once_is_never_asked_again(tmp_path):
    with Judge() as server:
        for _ in range(2):
            with judge(server, ledger=tmp_path/'verdicts.db') as grade:
                assert dict(grade_pairs(grade, PAIRS + PAIRS[:9])) == truth(PAIRS)
            assert len(server.seen) == len(PAIRS)
    with judge(server, ledger=tmp_path/'verdicts.db') as grade: # the server is gone
        assert dict(grade_pairs(grade, PAIRS)) == truth(PAIRS)
        fails(lambda: grade(P, 'never asked'), 'no connection to 127.0.0.1')

def test_faults_change_no_verdict(tmp_path):
    with Judge(faults=schedule(0, .4, ('429', '500', '503', 'reset', 'closed', 'malformed',
                                          'no-choices'))) as server:
        with judge(server, ledger=tmp_path/'verdicts.db', retries=40) as grade:
            assert dict(grade_pairs(grade, PAIRS)) == truth(PAIRS)
        asked = len(server.seen)
        assert asked > len(PAIRS)
        with judge(server, ledger=tmp_path/'verdicts.db') as grade:
            assert dict(grade_pairs(grade, PAIRS)) == truth(PAIRS)
        assert len(server.seen) == asked

def test_a_reply_that_is_no_verdict_is_wrong_and_counted(tmp_path):
    say = lambda q, given, ref: by_length(q, given, ref) if len(given) > 1 else 'I think that'
    expected = {k: v and len(k[1]) > 1 for k, v in truth(PAIRS).items()}
    with Judge(say) as server:
        for _ in range(2): # counted again where the reply comes from the ledger
            with pytest.warns(UserWarning, match=r"no verdict in 14 replies, e\.g\. 'I think that'") as w:
                with open_grader(f'xverify:{server.url}#judge', template=JUDGE_TEMPLATE,
                                 ledger=tmp_path/'v.db') as grade:
                    assert dict(grade_pairs(grade, PAIRS)) == expected
            assert sum('no verdict' in str(x.message) for x in w) == 1 # beside what a garbage collection may say
            assert len(grade.unread) == 14 and len(server.seen) == len(PAIRS)
            assert {k for k in grade.unread} == {k for k in expected if len(k[1]) == 1}

@pytest.mark.parametrize('change, said', [
    (dict(base_url='http://judge.invalid/v1'), 'over https'), (dict(price='free'), 'price='),
    (dict(max_cents=None), 'max_cents=')])
def test_a_judge_elsewhere_gets_no_key_in_the_open_and_has_a_cap(monkeypatch, change, said):
    monkeypatch.setenv('XVERIFY_API_KEY', 'sk-judge-0123456789')
    there = dict(base_url='https://judge.invalid/v1', max_cents=5, price='gpt-4.1-mini') | change
    fails(lambda: XVerify('judge', template=JUDGE_TEMPLATE, **there), said, 'another machine', error=ValueError)
    if said == 'over https': # a default price is none
        url = there['base_url']
        fails(lambda: open_grader(f'xverify:{url}#judge', template=JUDGE_TEMPLATE).__enter__(), said, error=ValueError)

def test_the_key_is_sent_and_never_written(monkeypatch, tmp_path):
    key = 'sk-judge-0123456789'
    monkeypatch.setenv('XVERIFY_API_KEY', key)
    with Judge(key=key, faults=['echo']) as server, judge(server, ledger=tmp_path/'v.db') as grade:
        grade(P, 'y')
        assert len(server.seen) == 1 and key not in str(grade.unread)
    assert all(key.encode() not in f.read_bytes() for f in tmp_path.iterdir())
    monkeypatch.setenv('XVERIFY_API_KEY', 'another')
    with Judge(key=key) as server, judge(server) as grade:
        assert 'another' not in fails(lambda: grade(P, 'y'), 'XVERIFY_API_KEY')

# ---- by name
def test_a_judge_of_our_own_server_is_known_by_its_weights(tmp_path, monkeypatch):
    from stepwise_routing.models.hub import micro_path
    calls = []
    @contextlib.contextmanager
    def serve_vllm(model, **kwargs):
        calls.append((model, kwargs))
        with Judge(models=(kwargs['name'],)) as server: calls.append(server); yield server.url
    monkeypatch.setattr(models_xverify, 'serve_vllm', serve_vllm)
    small, large = (str(micro_path(m)) for m in ('small', 'large'))
    for name in (small, small, large):
        with open_grader(f'xverify:{name}', template=JUDGE_TEMPLATE, ledger=tmp_path/'v.db', memory=.1) as grade:
            assert dict(grade_pairs(grade, PAIRS)) == truth(PAIRS)
    assert [(m, k['memory'], k['context']) for m, k in calls[::2]] == [(m, .1, 4096) for m in (small, small, large)]
    # another port, same weights: nothing is asked; other weights: all is
    assert [len(s.seen) for s in calls[1::2]] == [40, 0, 40]

def test_the_rules_by_name_are_the_default_grader():
    problems = [Problem('toy', str(i), '?', a) for i, a in enumerate(('1/2', '3', 'x+1'))]
    with open_grader() as grade, open_grader('math-verify', ledger='unused', memory=.5) as again:
        assert grade is again is is_right
        assert [grade(p, a) for p, a in zip(problems, ('0.5', None, '1+x'))] == [True, False, True]

# ---- in a tree
