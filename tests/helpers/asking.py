"OpenAI's own client, and a bare one, against a server in a thread."

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from stepwise_routing import serve

NAMES = dict(mine='router', small='small', large='large')
QUESTION = 'What is 3 + 4?'


@contextlib.contextmanager
def client_of(router):
    with serve.running(serve.Service(router, NAMES)) as url:
        with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as client:
            yield client


def user(text):
    return [dict(role='user', content=text)]


def body_of(question=QUESTION, **body):
    return dict(model='mine', messages=user(question), seed=0) | body


def ask(client, question=QUESTION, **body):
    return client.chat.completions.create(**body_of(question, **body))


def text_of(reply):
    "The text of an answer, whole or as a stream."
    if hasattr(reply, 'choices'):
        return reply.choices[0].message.content
    return ''.join(c.choices[0].delta.content or '' for c in reply if c.choices)


def ask_at_once(client, bodies):
    "The texts of all answers, or their errors."

    def one(body):
        try:
            return text_of(ask(client, **body))
        except openai.APIError as error:
            return error

    return [*ThreadPoolExecutor(len(bodies)).map(one, bodies)]


def post(client, body, path='chat/completions', **head):
    "Status and body of the answer to a request that is sent as it is; without a body, GET."
    url, head = f'{client.base_url}{path}', {'content-type': 'application/json'} | head
    method = 'GET' if body is None else 'POST'
    reply = httpx.request(method, url, content=body, headers=head, timeout=30)
    return reply.status_code, reply.content


def stats_of(client):
    return json.loads(post(client, None, '../stats')[1])
