import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm import Model, SamplingParams, __version__, knob


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass

    def send(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        for head in (('Content-Type', 'application/json'), ('Content-Length', str(len(raw)))): self.send_header(*head)
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        length = {} if knob('other') else dict(max_model_len=self.server.args.max_model_len)
        first = dict(id=self.server.args.served_model_name, root=self.server.args.model, **length)
        pages = {'/v1/models': dict(data=[first]), '/version': dict(version=__version__),
                 '/served': dict(served=self.server.model.served)}
        self.send(200 if self.path in pages else 404, pages.get(self.path, {}))

    def choice(self, body, tokens, finish, reason):
        name = lambda i: f'token_id:{i}'
        top = [{name(i): max(z, -9999.) for i, z in shown.items()} for _, shown in tokens]
        shown = dict(tokens=[name(t) for t, _ in tokens], top_logprobs=top,
                     token_logprobs=[l[name(t)] for l, (t, _) in zip(top, tokens)])
        ids = dict(token_ids=[t for t, _ in tokens]) if body.get('return_token_ids') and not knob('old') else {}
        return dict(choices=[dict(index=0, text='', finish_reason=finish, stop_reason=reason, logprobs=shown, **ids)])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        if self.path == '/knobs': os.environ.update(body); return self.send(200, {})
        p = SamplingParams(**{k: v for k, v in body.items() if k in SamplingParams.__dataclass_fields__})
        if knob('dead') and not body.get('allowed_token_ids'): os._exit(9)
        reply = self.server.model.reply(body['prompt'], p)
        try: rows = [*reply]
        except ValueError as e:
            return self.send(400, dict(error=dict(message=str(e), type='BadRequestError', code=400)))
        out = self.choice(body, [r[:2] for r in rows], *rows[-1][2:])
        if p.prompt_logprobs:
            rows = self.server.model.prompt(body['prompt'], p.prompt_logprobs)
            out['choices'][0]['prompt_logprobs'] = [r and {str(i): dict(logprob=z) for i, z in r.items()} for r in rows]
        self.send(200, out)

def main():
    parser = argparse.ArgumentParser()
    for flag in ('model', 'served-model-name', 'host', 'logprobs-mode', 'dtype', 'generation-config'):
        parser.add_argument('--' + flag)
    for flag in ('port', 'max-model-len', 'max-num-seqs', 'max-logprobs', 'max-num-batched-tokens',
                 'kv-cache-memory-bytes'):
        parser.add_argument('--' + flag, type=int)
    parser.add_argument('--gpu-memory-utilization', type=float)
    for flag in ('--enable-prefix-caching', '--enforce-eager', '--no-enable-chunked-prefill'):
        parser.add_argument(flag, action='store_true')
    args = parser.parse_args()
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.args, server.model = args, Model(args.model, args.max_model_len, args.max_logprobs, args.logprobs_mode)
    server.serve_forever()

if __name__ == '__main__': main()
