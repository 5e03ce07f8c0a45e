"""What prompt caches are worth: the large model's cents with a cold and with a warm cache, and its hand-overs

Here belong the table of caches, its notes, and the rule for its second part. Replaying the walks of a run belongs
in `run.cache_report`.
"""

import numpy as np

from ..base.records import find_price, token_cents
from ..method.comparison import NESTED
from ..method.outcomes import escalation_times, keeps_accuracy, replay
from .paper_tables import billed_as, ranked
from .writer import HUNDREDTHS, PERCENT, interval, interval_table, label, markdown, three_digits

ONE_SHOT = 'Large only', 'Bare threshold (probability)', 'STEER (rest)', 'Ours', NESTED
BY_STEP = 'SpecReason (greedy)', 'SpecReason (expected)', 'RSD', 'STEER (next)'

CHOSEN = 'chosen'  # part of the table: the settings of Table 2 without a promise
WALKED = 'walked'  # part of the table: see `walked_setting`
HEADINGS = {
    CHOSEN: 'At the setting that is cheapest on calibration',
    WALKED: 'Where the large model alone stands in: what the method itself costs',
}

NOTES = """
Cents are US cents per 1,000 problems (in the CSV file per problem), at the prices of `{price}`: US dollars per
million tokens, {dollars.input:g} for input, {dollars.cached:g} for input from a cache, {dollars.output:g} for output.

- *Cold*: nothing is in a cache. *Warm*: all that the large model has read and written before in the same walk is.
  *All cached*: all that it reads is, the first prompt too; that is a bound.
- A hand-over is a step of the large model after one of the small model. A method that hands over once sends one
  prompt, so its cost is the same cold and warm. All others send one for every step of the large model.
- SpecReason also asks the large model about every step of the small one. The server does not say how much of such a
  question it has read before, so *warm* counts all of it as new: the true cost is lower, but not below *all cached*.
- The second table takes, of the settings that were walked on test problems, the cheapest one that keeps the accuracy
  on calibration problems. If none keeps it, it takes the one that is most accurate there.
- OpenAI, for one, caches no prompt below 1,024 tokens. All prompts of the micro problems are shorter, so there each row
  would cost what it costs cold.
- Large model: {billed}. All other models cost nothing.
"""


def table_tokens(
    router,  # hands over once, or starts with the large model
    table,  # `OutcomeTable`
):  # array [problem, 4], as of `walk_tokens`
    "What the large model reads and writes, read off an outcome table. It has read nothing before."
    outcome = replay(router, table)
    prompt = outcome['large_prompt']
    handed = (escalation_times(router, table) < table.n_steps) & (router.start == 0)
    return np.stack([handed, prompt, 0 * prompt, outcome['large_tokens']], 1)


def walk_tokens(
    calls,  # the `Call`s of a walk of two models
) -> tuple:  # (hand-overs; tokens that the large model read, read before in this walk, wrote)
    "What the large model reads and writes in a walk, questions of a judge included."
    own = [call for call in calls if call.model == 1]
    writers = [call.model for call in calls if call.kind in ('step', 'draft')]
    handovers = sum(now < then for now, then in zip(writers, writers[1:]))
    prompt = sum(call.prompt for call in own)
    cached = sum(call.cached for call in own)
    return handovers, prompt, cached, sum(call.generated for call in own)


def cache_columns(
    tokens,  # array [problem, 4], as of `walk_tokens`
    price: str,  # see `find_price`
) -> dict:
    "The columns of a row: means over problems; cost in US cents."
    handovers, prompt, cached, written = np.mean(tokens, 0)
    return dict(
        handovers=handovers,
        cold=token_cents(price, prompt, 0, written),
        warm=token_cents(price, prompt, cached, written),
        all_cached=token_cents(price, prompt, prompt, written),
    )


def walked_setting(
    rows,  # of `evaluate`, with calibration: one method on one benchmark, all settings that are shown
    alpha: float,  # accuracy that may be lost
):  # the row in a DataFrame; no row if no setting but the large model alone is shown
    """The cheapest setting that keeps the accuracy of the large model, which is not a candidate. The most accurate one
    if none keeps it. Both are judged on calibration problems."""
    alone = np.isinf(rows['threshold'])
    walked = rows[~alone].sort_values(['calibration_cost_share', 'threshold'])
    accuracy = walked['calibration_accuracy']
    keeps = keeps_accuracy(accuracy, rows[alone]['calibration_accuracy'].max(), alpha)
    return walked[keeps if keeps.any() else accuracy == accuracy.max()][:1]


def shown_settings(
    results,  # of `evaluate`, with calibration, on one benchmark
    alpha: float,  # accuracy that may be lost
):  # DataFrame, with the column `part`
    "The settings of the table: those that were chosen, and `walked_setting` where that is the large model alone."
    import pandas as pd

    parts = []
    for (method, _), rows in results.groupby(['method', 'on_escalate'], sort=False):
        chosen = rows[rows['chosen'] == 1]
        if method in ONE_SHOT + BY_STEP:
            parts.append(chosen.assign(part=CHOSEN))
        if method in BY_STEP and np.isinf(chosen['threshold']).all():
            parts.append(walked_setting(rows, alpha).assign(part=WALKED))
    return pd.concat(parts)


def _handover_cell(row):
    if row['method'] == 'Large only':
        return '–'
    if np.isinf(row['threshold']):
        return 'large alone'
    return 'not drawn' if np.isnan(row['handovers']) else HUNDREDTHS(row['handovers'])


def cache_markdown(
    rows,  # DataFrame of `run.cache_report.cache_rows`
    price: str,  # see `find_price`
    large: str,  # the large model's name in the outcome tables
) -> str:
    "The table of caches in its two parts, with notes."
    cells = {
        'hand-overs': _handover_cell,
        'cold, cents': interval('cold', three_digits, 1000),
        'warm': interval('warm', three_digits, 1000),
        'all cached': interval('all_cached', three_digits, 1000),
        'right, %': interval('accuracy', PERCENT, 100),
    }
    parts = []
    for part, heading in HEADINGS.items():
        own = rows[rows['part'] == part]
        if len(own):
            ordered = ranked(own.assign(chosen=1))
            table = interval_table(ordered, dict(Method=label), cells, 'benchmark')
            parts.append(f'**{heading}**\n\n{markdown(table)}\n')
    notes = NOTES.format(price=price, dollars=find_price(price), billed=billed_as(large, price))
    return '\n'.join(parts) + notes
