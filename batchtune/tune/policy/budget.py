"""How many fresh runs, failures and repeats, and how much time for all?"""

from __future__ import annotations

from batchtune.scenario.spec.search import DEFAULT_TIME_BUDGET_S

# Confirmation.

CONFIRMATIONS = 3
"""Fresh runs of what is recommended, at least; a spread needs three."""

CONFIRMATIONS_MAX = 5
"""More are added, while there is time, when the interval is `WIDE`."""

CONFIRMATION_BLOCKS_MAX = 9
"""Also when leaders keep failing their confirmation."""

WIDE = 0.1
"""Half of a prediction interval, relative, that is worth more runs."""

GAIN_HALF_WIDTH = 0.15
"""A gain known this well (in logs), and to half of itself, needs no more runs of the reference point."""

# Budget and failures.

TIME_BUDGET_S = DEFAULT_TIME_BUDGET_S
"""For everything, where the scenario gives no budget and the server is quick,"""

TIME_BUDGET_MAX_S = 1800.0
"""and at most this where it is slow."""

SURE_RUNS = 20
"""Runs of a sweep that ends with an answer: references, proposals, a race or what stands for it, and fresh runs."""

SURE_BATCHES = 600
"""Lone requests that a sweep may last, at least, where nobody gives a budget: some forty runs of some batches."""

LIKELY_LOAD = 0.7
"""A capacity as a share of what full batches answer, before any rate was tried: only for how long runs will be."""

OVERRUN_SHARE = 0.1
"""A trial that is expected to end later than this beyond the budget of time is not begun."""

FAILURES_MAX = 3
"""So many failed trials, and none that worked, mean that it is not the configurations that are at fault."""

ALL_FAIL_RATIO = 0.9
"""From this share of failed requests on a trial shows nothing but the failure."""

FAILURES_TO_END = 6
"""The search ends after so many failed trials in a row, and what worked is confirmed: a size that fails may follow
others that do, but the calibration alone tries six that are spread over the whole space."""

RESERVE_SHARE = 0.25
"""Confirmations set aside at most this share of the time: of a small budget the search needs the most."""

REPEATS_MAX = 2
"""A trial that the host or the client spoilt is repeated at most so often,"""

REPEATS_SHARE = 0.15
"""and repeats take at most this share of the trials (and of the budget's time)."""

SEED_STRIDE = 1_000_003
"""Seeds of two blocks are this far apart: a prime, so that no block plays the schedule of another."""
