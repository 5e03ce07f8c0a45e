"""What falls short in a run: facts that a reader needs and that the numbers do not show

Here belong the sentences under the tables about what a run lacks. Notes that explain the columns of a
table belong in the module of the table.
"""

import numpy as np

from ..data.recorded import SUFFIX
from ..method.outcomes import keeps_accuracy
from ..method.results import METHOD_STYLE, method_label
from .writer import in_points


def _labels(rows) -> str:
    "The names of some rows of `evaluate`, each once."
    labels = map(method_label, rows['method'], rows['on_escalate'])
    return '; '.join(dict.fromkeys(labels))


def benchmark_shortfalls(
    part,  # `BenchmarkResults`
) -> list:  # sentences
    "What falls short on one benchmark."
    chosen = part.results[part.results['chosen'] == 1]
    alpha = part.grid['alpha'].iloc[0]
    n = chosen['n'].iloc[0]
    has_rows = set(chosen['method'])
    missing = [m for m in METHOD_STYLE if m not in has_rows]
    judged = chosen.dropna(subset='calibration_accuracy')
    large_alone = judged[np.isinf(judged['threshold'])]
    inaccurate = judged[~keeps_accuracy(judged['accuracy_vs_large_high'], 0, alpha)]
    sentences = []
    if n < 300:
        sentences.append(f'{n} test problems, fewer than 300; the intervals are wide')
    if not part.table.large_redraws_right.shape[1]:
        sentences.append(
            'the large model was not drawn again, '
            'so misses are counted against the draw that methods share'
        )
    if missing:
        is_recorded = part.table.benchmark.endswith(SUFFIX)
        reason = 'not recorded' if is_recorded else 'not run, or switched off'
        sentences.append(f'no rows for {"; ".join(missing)}: {reason}')
    if len(large_alone):
        sentences.append(
            f'on calibration no setting of {_labels(large_alone)} was accurate enough '
            'and cheaper than the large model alone, which stands in'
        )
    if len(inaccurate):
        sentences.append(
            f'{_labels(inaccurate)}: clearly more than {in_points(alpha)} '
            'below the large model on test'
        )
    return sentences


def shortfalls(
    r,  # `RunResults`
) -> list:  # sentences
    "What falls short in a run, each sentence once."
    benchmarks = {}
    for benchmark, part in r.parts.items():
        for sentence in benchmark_shortfalls(part):
            benchmarks.setdefault(sentence, []).append(benchmark)
    sentences = [f'{", ".join(names)}: {sentence}.' for sentence, names in benchmarks.items()]
    if r.given_up:
        sentences.append(
            f'{", ".join(r.parts)}: grading gave up on answers, which count as wrong: {r.given_up}.'
        )
    return sentences


def listed(sentences) -> str:
    "The sentences as a folded list in Markdown."
    items = ''.join(f'- {sentence}\n' for sentence in sentences)
    return f'<details><summary>What falls short in this run</summary>\n\n{items}\n</details>\n'
