"""The model card of a router that is given away.

Here belongs its text. What an exported folder holds besides is in `own`.
"""

CARD = """# A router: {small} hands over to {large}

| model | weights |
|---|---|
{weights}

**Data.** {n_train} training and {n} calibration problems; none of them is in here. Chains have
at most {max_steps} steps.

**Promise.** {promise}, alpha = {alpha:g}. On the {n} calibration problems, kappa = {kappa:.4g}:
accuracy {accuracy:.1%} (the large model alone: {large_accuracy:.1%}), misses {miss:.1%} (bound for
new ones: {bound:.1%}), cost {cost:.1%} of the large model's. Target met: {met}.

**Licence.** Of the router: {licence}. The models have licences of their own.

**Limits.** The promise is about problems like those of the data and about these models, sampled as
`own.json` says; for others, collect, train and calibrate anew. The router sees confidences, not
content: it does not make an answer safe.

```python
from stepwise_routing.own import route
route('this-folder', 'What is 7 times 8?', models=['SMALL', 'LARGE'])
```
"""
PROMISES = dict(
    accuracy='At most alpha less accuracy than the large model, '
    'measured on the calibration problems',
    miss='The large model right and the router wrong on at most a share alpha of new problems',
)


def router_card(
    models,  # public names of the small and the large one
    weights,  # hash of the weights of each; None: not known
    n_train: int,  # training problems
    max_steps: int,  # steps of a chain at most
    calibration: dict,  # fields of a `Calibration`
    licence: str,  # of the router
) -> str:
    "The card, in Markdown."
    small, large = models
    rows = [f'| {name} | {fact or "not known"} |' for name, fact in zip(models, weights)]
    numbers = dict(calibration)
    large_accuracy = numbers.pop('large')
    return CARD.format(
        small=small,
        large=large,
        weights='\n'.join(rows),
        n_train=n_train,
        max_steps=max_steps,
        promise=PROMISES[calibration['target']],
        licence=licence,
        large_accuracy=large_accuracy,
        **numbers,
    )
