"""Resampling: how sure we are of a mean over problems.

The library's only bootstrap belongs here. It knows nothing of routers or tables.
All intervals use the counts drawn here, so all methods share the same resamples.
"""

import numpy as np


def resamples(
    n: int,  # problems
    n_boot: int = 2000,  # resamples
    seed: int = 0,  # of the draw
) -> np.ndarray:  # float [1 + resample, problem]; the first row is the sample itself
    """Bootstrap counts: how often each problem counts in each resample.

    The counts are the same for every method with the same problems, so differences are paired.
    The mean of `x` in each resample is `resamples(len(x)) @ x / len(x)`.
    """
    sample_itself = np.ones((1, n))
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), n_boot)
    return np.r_[sample_itself, draws]
