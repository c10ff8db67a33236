"""How is the capacity of one configuration searched, and read from runs at several rates?"""

from __future__ import annotations

# The capacity of one configuration.

CAPACITY_WARM_UP_MAX_S = 0.5
"""Probes follow each other on a warm server."""

CAPACITY_SEARCH_S = (8.0, 45.0)
"""Fewest and most seconds of a search; between them it takes"""

CAPACITY_SHARE = 0.2
"""at most this share of the time that the whole sweep has."""

CAPACITY_SEARCH_RUNS = 6
"""Of a slow server a search takes so many bursts at least, whatever its share: fewer rates bracket nothing."""

CAPACITY_PROBE_MAX_S = 15.0
"""A probe that is lengthened to hold enough requests takes no longer than this, or than a burst."""

BURST_CLIENTS = (8, 256)
"""Fewest and most clients of the first burst."""

MOST_MARGIN = 2.0
"""Margins are cut here: a server that has fallen behind shows no more than that it has."""

CLAIM_BELOW_CROSSING = 0.97
"""At the crossing itself every other run misses; this share of it is what a fresh run is expected to keep."""

RATE_ELASTICITY = 0.25
"""Change of log rate per change of log quantile near the capacity, where nothing else is known; from there to
saturation the quantile grows at least this much faster than the rate."""

CROSSING_LEAST_SD = 0.015
"""Standard deviation, in logs, of a crossing between rates that were held and missed, at least;"""

CROSSING_RUN_SD = 0.035
"""and between runs minutes apart."""

CROSSING_ONE_SIDED_SD = 0.03
"""The same of a crossing beyond all rates tried, to which the distance from them is added;"""

CROSSING_AHEAD_MAX = 0.1
"""in logs, it lies at most this far above what was held: a quantile that is low says little of how far,"""

CROSSING_BELOW_MAX = 0.4
"""and at most this far below what was missed, where a queue without end hides by how much."""

CROSSING_BRACKET_SHARE = 0.25
"""Standard deviation of a crossing as a share of the bracket in logs: of a uniform spread it is 0.29."""

NEAR_MARGIN = 0.3
"""A margin this small, on either side, tells where the crossing is; a larger one only on which side of the rate."""

WEIGHT_HALF_REQUESTS = 20.0
"""Independent requests at which a run weighs half in the fit: its quantile's own error is then that between runs."""

WEIGHT_LEAST = 0.05
"""Of a run of hardly any request: it counts, where nothing else is known."""

PROBE_WEIGHT = 0.5
"""Of one rate of a search for a capacity, whose requests are not counted one by one."""

SPOILT_WEIGHT = 0.5
"""Share of its weight that a run spoilt by the host or the client keeps."""

ERRORS_LEAST_MARGIN = 0.01
"""In logs: failed requests beyond those allowed are a miss, however few."""
