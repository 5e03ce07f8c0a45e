"""Recorded questions of a router, and a test whether they resemble the calibration problems.

Here belong the file of recorded answers and the comparison. Opening the router belongs in `own`.
"""

import contextlib
import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.sources import file_rows

FEW = 30  # with fewer questions, there is no verdict
SURE = 0.01  # a p-value below this means that the questions differ


class Recorder:
    "Writes answers to a JSONL file, a row per answer. Several threads may use it at once."

    def __init__(self, path):
        "OSError in one line if the file cannot be written."
        self.path = Path(path)
        self.turn = threading.Lock()
        try:
            open(self.path, 'ab').close()
        except OSError as error:
            raise OSError(
                f'{path} cannot be written ({error.strerror}): record answers in another file'
            ) from None

    def __call__(self, served, messages, steps) -> None:
        """Keep a finished answer. OSError if it cannot be written; then no part of its row stays.

        The field `answer` is left out, because `collect` expects the right answer there.
        """
        kept = [live for live in steps if live.kept]
        routed = served.owner.benchmark.read_answer([live.step for live in kept])
        row = dict(
            question=messages[-1]['content'],
            messages=messages,
            model=served.name,
            fingerprint=served.fingerprint,
            routed_answer=routed,
            steps=[dict(model=live.model, text=live.step.text) for live in kept],
            scores=[live.score for live in steps if live.score is not None],
        )
        line = json.dumps(row) + '\n'
        with self.turn:
            self.append(line.encode())

    def append(self, line: bytes) -> None:
        "Write a row at the end of the file, whole or not at all: half a row would spoil the next one."
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, 'ab') as f:
                f.write(line)
        except OSError:
            with contextlib.suppress(OSError):  # a device has no length
                os.truncate(self.path, before)
            raise


def first_scores(path, fingerprint: str) -> np.ndarray:
    "The score after the first step of each recorded answer of a router. ValueError for a damaged row."
    scores = []
    for number, row in enumerate(file_rows(path), 1):
        if not isinstance(row, dict) or not isinstance(row.get('scores'), list):
            raise ValueError(f'{path}, row {number}: not a row of a recorder')
        if row.get('fingerprint') == fingerprint and row['scores']:
            score = row['scores'][0]
            if type(score) not in (int, float) or not math.isfinite(score):
                raise ValueError(f'{path}, row {number}: its first score is no number')
            scores.append(float(score))
    return np.array(scores)


@dataclass(frozen=True)
class Drift:
    "Do recorded questions resemble the calibration problems? `print` gives the verdict in words."

    recorded: int  # questions
    calibration: int  # problems
    mean_recorded: float  # score after the first step
    mean_calibration: float
    distance: float  # Kolmogorov-Smirnov: the largest gap between the two distributions, 0 to 1
    p: float  # probability of such a gap if both are of one kind

    @property
    def stands(self) -> bool | None:
        "Does the promise still hold? None if there are too few questions for a verdict."
        if self.recorded < FEW:
            return None
        return self.p >= SURE

    def __str__(self):
        facts = (
            f"{self.recorded} recorded questions, {self.calibration} calibration problems. Router's "
            f'score after the first step, mean: {self.mean_recorded:.3f} and '
            f'{self.mean_calibration:.3f}; largest gap {self.distance:.3f}, p = {self.p:.2g}.'
        )
        verdicts = {
            None: f'Too few questions to say anything: record at least {FEW}.',
            True: 'No difference is seen, so nothing speaks against the promise.',
            False: 'The questions are of another kind, so the promise does not stand: add some of '
            'them with their answers, then collect, train and calibrate.',
        }
        return f'{facts}\n{verdicts[self.stands]}'


def compare(
    recorded: np.ndarray,  # scores after the first step
    calibration: np.ndarray,
) -> Drift:
    "Compare first scores by a two-sample test. Later scores are not used: they exist only if nothing was handed over."
    from scipy.stats import ks_2samp

    if not len(recorded):
        raise ValueError(
            'no recorded answer comes from the router as it is deployed now: record new ones'
        )
    result = ks_2samp(recorded, calibration)
    return Drift(
        len(recorded),
        len(calibration),
        float(recorded.mean()),
        float(calibration.mean()),
        float(result.statistic),
        float(result.pvalue),
    )
