"""Does a judge on vLLM grade answers? Run it where vLLM is installed, on a GPU or on a CPU:

    python tests/gpu/vllm_xverify.py IAAR-Shanghai/xVerify-0.5B-I --prompt xverify
    python tests/gpu/vllm_xverify.py FOLDER --rows ROWS.jsonl -n 60

ROWS hold question, gold, pred and label (1: the same answer). Without them, answers of the micro problems are judged, half
of them those of other problems. Any instruction model can stand in for xVerify: then the numbers say that the path works,
and nothing about xVerify. It prints how often the judge, Math-Verify and the labels agree.
"""

import argparse
import json
import time
from pathlib import Path

from stepwise_routing.data.benchmarks import grade_by_rules, load_problems
from stepwise_routing.models.open import ModelOptions, open_model
from stepwise_routing.models.xverify import xverify
from stepwise_routing.records import Problem

OWN_PROMPT = """Does the given answer say the same as the reference answer?

Question: {question}

Given answer: {output}

Reference answer: {answer}

Reply with a single word, Correct or Incorrect."""


def labelled_pairs(rows: str | None, n: int) -> tuple:  # ((`Problem`, answer) pairs, labels)
    if rows is None:
        problems = load_problems('micro-math', 'test', n)
        answers = [problems[i - i % 2].answer for i in range(n)]
        labels = [problem.answer == answer for problem, answer in zip(problems, answers)]
        return [*zip(problems, answers)], labels
    pairs, labels = [], []
    for i, line in enumerate(Path(rows).read_text('utf-8').splitlines()[:n]):
        row = json.loads(line)
        pairs.append((Problem('rows', str(i), row['question'], row['gold']), row['pred']))
        labels.append(bool(row['label']))
    return pairs, labels


def main(model: str, rows: str | None, n: int, prompt: str):
    judge = open_model(ModelOptions(name=f'vllm:{model}'))
    grade = xverify(judge, OWN_PROMPT if prompt == 'own' else None)
    pairs, labels = labelled_pairs(rows, n)
    start = time.perf_counter()
    verdicts = dict(judge=grade(pairs), rules=grade_by_rules(pairs), label=labels)
    print(f'{len(pairs)} answers in {time.perf_counter() - start:.1f} s')
    for one, other in (('judge', 'label'), ('rules', 'label'), ('judge', 'rules')):
        same = sum(x == y for x, y in zip(verdicts[one], verdicts[other]))
        print(f'{one} and {other} agree: {same} of {len(pairs)}')
    assert grade(pairs) == verdicts['judge'], 'a second run gives other verdicts'
    assert grade([(pairs[0][0], None)]) == [False], 'no answer must be wrong'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('model', help='folder, or name on the Hub')
    parser.add_argument('--rows', help='JSONL file')
    parser.add_argument('-n', type=int, default=60, help='answers')
    parser.add_argument('--prompt', choices=('own', 'xverify'), default='own')
    args = parser.parse_args()
    main(args.model, args.rows, args.n, args.prompt)
