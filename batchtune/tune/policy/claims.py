"""What does a comparison repeat, and what may a recommendation claim?"""

from __future__ import annotations

# Comparisons.

COMPARE_REPEATS_SHARE = 0.5
"""Repeats end when so many, per trial planned, were made: that host is always noisy, and repeating buys nothing."""

PACE_PROBE_S = 0.3
"""Length of the probe that tells `compare` and `load` how slow the server is; a slower one is waited for."""

COMPARE_RETRIES = 1
"""A variant that fails is tried again so often in its block: a server may die of what has nothing to do with it."""

HARDLY = 0.05
"""A gain below this, sure as it may be, is called hardly any."""

# The recommendation.

ALTERNATIVE_GAIN = 0.05
"""An alternative has this much more throughput, or this much less p95."""

SAME_RATIO = 0.005
"""Ratios closer to 1 than this round to the same per cent."""

UNCONFIRMED_SHARE = 0.9
"""Share of a capacity that only the search found which is claimed: the best of many such is often too good."""

ESTABLISHED_RUNS = 3
"""Fresh runs that must have kept the SLO before a recommendation is called established."""

WORTH_GAIN = 0.05
"""Batching that gains less than this is not worth its parameters."""

FEW_POINTS = 3
"""Configurations with batching; where fewer were tried and miss the SLO it is not said that none meets it. A search
that is not cut short begins with as many: the defaults, the rule's answer, the guide's."""
