"""Counts what a server does, in the format of Prometheus.

Here belong the counters and the text format. `models.web` and `models.answers` do the counting.
"""

import math
from bisect import bisect_left

PREFIX = 'stepwise_routing_'
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, math.inf)  # seconds, of the histogram
MEANINGS = dict(
    requests='Requests for an answer.',
    errors='Errors by reason.',
    steps='Steps that were kept, by model.',
    handovers='Answers that were handed over to the large model.',
    tokens='Tokens by kind: prompt, cached, completion, rejected.',
    cents='US cents spent on paid models since the start.',
)


def label_text(labels) -> str:
    "Labels in Prometheus' format."
    pairs = []
    for name, value in labels:
        escaped = str(value).replace('\\', '\\\\').replace('"', '\\"').replace('\n', ' ')
        pairs.append(f'{name}="{escaped}"')
    return '{' + ','.join(pairs) + '}' if pairs else ''


class Metrics:
    "Counters, and a histogram of the time to the first step of a stream."

    def __init__(self, cents=None):
        self.counts = {(name, ()): 0 for name in ('requests', 'handovers')}
        self.cents = cents  # () -> US cents spent so far; None: nothing is paid
        self.waits = [0] * len(BOUNDS)
        self.waited = 0.0  # seconds in total

    def count(self, name: str, n=1, **labels) -> None:
        key = name, tuple(sorted(labels.items()))
        self.counts[key] = self.counts.get(key, 0) + n

    def error(self, reason: str) -> None:
        self.count('errors', reason=reason)

    def first_step(self, seconds: float) -> None:
        self.waits[bisect_left(BOUNDS, seconds)] += 1
        self.waited += seconds

    def text(self) -> str:
        "All counters in Prometheus' format."
        counts = dict(self.counts)
        counts['cents', ()] = self.cents() if self.cents else 0
        lines = []
        for name, meaning in MEANINGS.items():
            metric = f'{PREFIX}{name}_total'
            lines += [f'# HELP {metric} {meaning}', f'# TYPE {metric} counter']
            for (counted, labels), n in sorted(counts.items()):
                if counted == name:
                    lines.append(f'{metric}{label_text(labels)} {n}')
        metric = f'{PREFIX}first_step_seconds'
        lines += [f'# HELP {metric} Time to the first step.', f'# TYPE {metric} histogram']
        total = 0
        for bound, n in zip(BOUNDS, self.waits):
            total += n
            name = '+Inf' if bound == math.inf else bound
            lines.append(f'{metric}_bucket{{le="{name}"}} {total}')
        lines += [f'{metric}_sum {self.waited}', f'{metric}_count {total}']
        return '\n'.join(lines) + '\n'
