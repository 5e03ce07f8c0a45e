"A router between two real servers: vLLM serves the micro pair on a CPU, and counts what it is asked for."

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import STDOUT, Popen

import httpx
import pytest
from asking import ask, text_of
from openai import OpenAI

from stepwise_routing import own, store, util
from stepwise_routing.data.benchmarks import load_problems

# vLLM wants other versions than constraints.txt has, so it is in an environment of its own (`make weekly`)
PYTHON = Path(__file__).resolve().parents[1] / '.vllm' / 'bin' / 'python'
ENV = 'OMP_NUM_THREADS=1', 'VLLM_CPU_KVCACHE_SPACE=1', 'VLLM_NO_USAGE_STATS=1'
VLLM = """-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --dtype float32 --enforce-eager
--max-model-len 2048 --generation-config vllm --max-num-batched-tokens 16384"""  # cut no prompt
MODELS = """[{name: "openai:small", base_url: "SMALL/v1", can_continue: true, price: free},
{name: "openai:large", base_url: "LARGE/v1", can_continue: true, price: 0.4/0.1/1.6}]"""


@pytest.fixture
def urls(tmp_path):
    "Of a server for the small model, and of one for the large model."
    if not PYTHON.exists():
        pytest.fail('.vllm/bin/python is missing: make weekly', pytrace=False)
    servers, urls, log = [], [], tmp_path / 'log'
    for size in ('small', 'large'):
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        words = ['env', *ENV, PYTHON, *VLLM.split(), '--port', str(port)]
        words += ['--served-model-name', size, '--model', util.PACKAGE / 'micro_models' / size]
        servers.append(Popen(words, stdout=log.open('a'), stderr=STDOUT))
        urls.append(f'http://127.0.0.1:{port}')
    try:
        while log.read_text().count('Application startup complete') < 2:
            assert {server.poll() for server in servers} == {None}, log.read_text()[-2000:]
            time.sleep(1)
        yield urls
    finally:
        [server.terminate() or server.wait(60) for server in servers]


def counted(url: str) -> list:
    "Answers, tokens read, tokens written, as a server has counted them."
    lines = re.findall(r'\nvllm:(\w+)_total{.*} (\S+)', httpx.get(f'{url}/metrics').text)
    wanted = 'request_success', 'prompt_tokens', 'generation_tokens'
    return [sum(float(n) for name, n in lines if name == counter) for counter in wanted]


@pytest.mark.slow
def test_servers_are_asked_once_and_paid_as_they_count(urls, tmp_path):
    "From the probe to the router, which answers behind our server what `route` answers."
    folder, models = tmp_path / 'mine', tmp_path / 'models.yaml'
    models.write_text(MODELS.replace('SMALL', urls[0]).replace('LARGE', urls[1]))
    problems = load_problems('micro-gsm', 'train', 80)
    later = [(name, p.question) for name in ('mine', 'small', 'large') for p in problems[60:]]
    own.probe(folder, problems[:60], models, 20)
    own.collect(folder, problems[:60], models)
    before = [*map(counted, urls)]
    assert own.collect(folder, problems[:60], models)['new_steps'] == 0
    own.train(folder)
    assert 0 < own.calibrate(folder, alpha=0.2).handed_over < 1

    def both_ways(asked):
        model, question = asked
        body = dict(model=model, stream_options=dict(include_usage=True))
        *parts, last = ask(client, question, **body, stream=True)
        whole = ask(client, question, **body)
        assert (text_of(parts), last.usage) == (text_of(whole), whole.usage)
        return text_of(whole), whole.usage

    with own.serving(folder, models) as url, OpenAI(base_url=url, api_key='x') as client:
        answers = [*ThreadPoolExecutor(8).map(both_ways, later)]
    routed = own.route(folder, [question for _, question in later[:20]], models)
    same = [(answer.text, pytest.approx(answer.cost / 100)) for answer in routed]
    assert [(text, usage.cost) for text, usage in answers[:20]] == same
    after, replies = [*map(counted, urls)], store.Replies(folder / 'replies.db')
    assert replies.run('SELECT count(*) FROM reply')[0] == after[0][0] + after[1][0]
    assert replies.spent == pytest.approx((0.4 * after[1][1] + 1.6 * after[1][2]) / 1e4)
    for size, new, old in zip(('small', 'large'), after, before):
        for place, kind in enumerate(('prompt_tokens', 'completion_tokens'), 1):
            billed = sum(usage.by_model[size][kind] for _, usage in answers)
            assert billed == new[place] - old[place]
