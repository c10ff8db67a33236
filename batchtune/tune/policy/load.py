"""How long is a load, a probe, a run at one rate, and how long is a server waited for?"""

from __future__ import annotations

# Any trial.

WORST_VIOLATION = 10.0
"""Relative violations are cut here, so that an undefined or infinite quantile stays a finite number."""

ENUMERABLE = 20_000
"""Grids up to this many points are listed when a sampler repeats itself."""

PATIENCE = 10.0
"""Answers later than so many times the SLO's largest limit are not waited for when a run has ended."""

SETTLE_LIMIT_S = 10.0
"""A server that was overwhelmed is given this long to come to rest,"""

SETTLE_STEP_S = 0.1
"""looked at so often."""

SETTLE_BATCHES = 1.5
"""A step lasts as many batches at least: a server within a batch counts nothing and looks at rest."""

SETTLE_STEPS_MIN = 20
"""Steps that a slow server is given at least: clients of a probe fill fewer batches than that."""

PROBE_WARM_UP_S = 0.3
"""Warm-up of the rule's short probes, when the scenario's is longer."""

HOPELESS_RATIO = 0.25
"""An open loop is ended when this share of its time is over and this share of all its requests is far beyond the
SLO."""

# The pace of a load, by what a batch takes. A rate read between the ends of n batches of one size is exact; n of 4 or 5
# leave room for one that was slow (twins of emulated devices of 250 ms a row, tests/tune/sweep/test_speed.py).

WARM_UP_BATCHES = 1.5
"""A closed loop starts with a batch of its first request alone; the next one is full."""

PROBE_BATCHES = 4
"""Batches in the measured part of a probe or of a run at one rate, at least."""

RUN_BATCHES = 5
"""Batches in the measured part of a trial, at least."""

RUN_BATCHES_MIN = 2
"""The same where the budget of time leaves no room for more."""

FRESH_BATCHES = 100
"""Batches in a fresh run at the capacity claimed: some per cent above what the server sustains its queue grows so
slowly that a short run keeps the limit (tests/benchmarks/twin/capacity_coverage.py: of 8 + 0.6·b ms 1 % too much was
established with 40 batches, of 40 + 2·b ms 5 % with 12)."""

RUN_SHARE = 1 / 12
"""A load that is longer than the scenario's takes at most this share of the budget: a race of a few and its
confirmation are a dozen runs."""

RUN_REQUESTS = 100
"""Requests of a trial of an open loop, at least: 72 independent ones bound p95."""

TIMEOUT_TURNS = 3.0
"""Where the scenario says nothing, a request may take as many times as long as the last in the queue should,"""

TIMEOUT_MAX_S = 600.0
"""but no longer than this: a server that hangs is to be found out."""

LONE_TIMEOUT_S = 60.0
"""The first request, of a server of unknown speed, is waited for this long where the scenario says nothing."""

LONE_ANSWERS = 5
"""A probe of one client goes on until so many answers, where that takes no longer than"""

LONE_MAX_S = 8.0
"""this. One answer is a measurement too."""

# Probes and references.

RULE_PROBE_S = 1.0
"""Length of each of the rule's two probes."""

SATURATING_CLIENTS = 16
"""Closed-loop clients of the probe for the throughput without batching, where the scenario's loop is open;"""

SATURATING_TURN_S = 4.0
"""fewer where they would wait for each other longer than this,"""

SATURATING_CLIENTS_MIN = 2
"""but two at least: the device is then never idle."""

CALIBRATION_S = 1.0
"""Measured part of a probe."""

CALIBRATION_CLIENTS = (4, 256)
"""Fewest and most clients of a probe."""

CALIBRATION_SHARE = 0.2
"""Calibration ends when it has taken this share of what was left of the time, and at least CALIBRATIONS_MIN probes."""

CALIBRATIONS_MIN = 2
"""Probes: two sizes tell what a row adds to a batch."""

RISING_FACTOR = 4
"""From one size to the next, where batches of the largest would take too long to begin with."""
