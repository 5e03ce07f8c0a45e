"OpenAI's own client, and a bare one, against a server in a thread."

import asyncio
import contextlib
import json
import urllib.error
import urllib.request

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


def ask_at_once(client, bodies):
    "The texts of all answers, or their errors."

    async def all_of_them():
        url = str(client.base_url)
        async with openai.AsyncOpenAI(base_url=url, api_key='x', max_retries=0) as many:

            async def one(body):
                reply = await many.chat.completions.create(**body)
                if body.get('stream'):
                    return text([chunk async for chunk in reply])
                return reply.choices[0].message.content

            return await asyncio.gather(*map(one, bodies), return_exceptions=True)

    return asyncio.run(all_of_them())


def text(chunks):
    return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)


def stats_of(client):
    return json.loads(post(client, None, '../stats')[1])


def post(client, body, path='chat/completions', **head):
    "Status and body of the answer to a request that is sent as it is; without a body, GET."
    head = {'content-type': 'application/json'} | head
    asked = urllib.request.Request(f'{client.base_url}{path}'.replace('v1/../', ''), body, head)
    try:
        reply = urllib.request.urlopen(asked, timeout=30)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        return reply.status, reply.read()
