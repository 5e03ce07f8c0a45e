"""Real clients of the OpenAI protocol against a server of the micro pair: what they get is what `route` answers.

litellm and lm-eval are in the extra [clients]. They want other versions than constraints.txt has, so they run in an
environment of their own: .clients in the clone (`make weekly`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_own import with_threshold

from stepwise_routing import serve
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.open import open_models

pytestmark = pytest.mark.slow
OWN = Path(__file__).resolve().parents[1] / '.clients' / 'bin' / 'python'
PYTHON = str(OWN) if OWN.exists() else sys.executable
PROBLEMS = load_problems('micro-gsm', 'test', n=10)
QUESTIONS = [problem.question for problem in PROBLEMS]


@pytest.fixture(scope='module')
def router():
    "It hands over where the least sure token has a probability of 0.75 or less: in some answers, not in all."
    router = with_threshold(open_models(['micro-small', 'micro-large']), -0.75, name='micro-gsm')
    handed_over = [len(set(answer.models)) > 1 for answer in router.route(QUESTIONS)]
    assert 0 < sum(handed_over) < len(handed_over)
    return router


@pytest.fixture(scope='module')
def url(router):
    with serve.running(serve.Service(router, dict(mine='router'))) as url:
        yield url


def run(*words, **env):
    "What another Python prints."
    options = dict(capture_output=True, text=True, timeout=280, env=os.environ | env)
    done = subprocess.run([PYTHON, *map(str, words)], **options)
    assert done.returncode == 0, f'{done.stderr[-2000:]}(make weekly installs the clients)'
    return done.stdout


LITELLM = """
import asyncio, json, sys
import litellm
litellm.telemetry = False
url, questions = sys.argv[1], json.loads(sys.argv[2])
options = dict(model='openai/mine', api_base=url, api_key='x', seed=0, num_retries=0)
asked = [options | dict(messages=[dict(role='user', content=q)]) for q in questions]

def text(chunks):
    return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)

async def at_once():
    return await asyncio.gather(*(litellm.acompletion(**ask) for ask in asked))

replies = asyncio.run(at_once())
texts = [reply.choices[0].message.content for reply in replies]
streamed = [text(litellm.completion(**ask, stream=True)) for ask in asked]
print(json.dumps([texts, streamed, [reply.usage.completion_tokens for reply in replies]]))
"""


def test_litellm_streamed_and_at_once(url, router):
    answers = router.route(QUESTIONS)
    texts, tokens = [a.text for a in answers], [sum(a.tokens) for a in answers]
    out = run('-c', LITELLM, url, json.dumps(QUESTIONS))
    assert json.loads(out.splitlines()[-1]) == [texts, texts, tokens]


TASK = r"""
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], do_sample: false}
filter_list:
  - name: box
    filter:
      - {function: regex, regex_pattern: '\\boxed\{(.*?)\}'}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def test_lm_eval_reports_what_route_answers(url, router, tmp_path):
    rows = [json.dumps(dict(question=p.question, answer=p.answer)) for p in PROBLEMS]
    (tmp_path / 'questions.jsonl').write_text('\n'.join(rows))
    task = TASK.replace('QUESTIONS', str(tmp_path / 'questions.jsonl'))
    (tmp_path / 'tiny.yaml').write_text(task)
    model = f'model=mine,base_url={url}/chat/completions,num_concurrent=4,max_retries=1'
    words = '-m', 'lm_eval', '--model', 'local-chat-completions', '--model_args', model
    words += '--tasks', 'tiny', '--include_path', tmp_path, '--apply_chat_template'
    words += '--output_path', tmp_path / 'out', '--log_samples'
    offline = dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1')
    run(*words, **offline, OPENAI_API_KEY='x')
    want = router.route(QUESTIONS, sample=1234)  # the seed that lm-eval sends
    (samples,) = (tmp_path / 'out').rglob('samples_tiny_*.jsonl')
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found = {row['doc']['question']: row['resps'][0][0] for row in found}
    assert found == {answer.question: answer.text for answer in want}
    (report,) = (tmp_path / 'out').rglob('results_*.json')
    right = [answer.answer == problem.answer for answer, problem in zip(want, PROBLEMS)]
    score = json.loads(report.read_text())['results']['tiny']['exact_match,box']
    assert 0 < score == sum(right) / len(right)
