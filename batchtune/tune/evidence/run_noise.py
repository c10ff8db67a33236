"""Tells whether runs of one configuration keep a latency limit on average, by how far they lie apart.

Few runs tell little of that: their variance is averaged with an assumed one, as if that had been seen over some runs
more (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.measure.statistics.distributions import t_quantile

PRIOR_SD, PRIOR_DEGREES = 0.06, 4
"""Standard deviation of log latency between runs (a shared two-core machine), and the weight of five runs."""


def mean_keeps(latencies: Sequence[float], limit: float) -> bool:
    """Whether the mean latency of runs alike lies below a limit, at 95 %; False where one has no bound."""
    if not latencies or not all(0.0 < latency < math.inf for latency in latencies):
        return False
    logs = [math.log(latency) for latency in latencies]
    mean = math.fsum(logs) / len(logs)
    degrees = PRIOR_DEGREES + len(logs) - 1
    squares = PRIOR_DEGREES * PRIOR_SD**2 + math.fsum((log - mean) ** 2 for log in logs)
    error = t_quantile(0.95, degrees) * math.sqrt(squares / degrees / len(logs))
    return math.exp(mean + error) <= limit
