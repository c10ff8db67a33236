"""How much do runs differ, and which of two leads?"""

from __future__ import annotations

# Noise between runs.

THROUGHPUT_PRIOR_SD = 0.03
"""Standard deviation of log throughput between runs, assumed before any is seen (a shared two-core machine)."""

LATENCY_PRIOR_SD = 0.06
"""The same for log latency quantiles."""

FRESH_THROUGHPUT_PRIOR_SD = 0.05
"""The same for a run some minutes later and from a cold start, which is what a recommendation promises.

With 0.03 a sweep in a quiet minute promised ±7 %, and a neighbour's busy minute then broke the promise.
"""

FRESH_LATENCY_PRIOR_SD = 0.08
"""The same for log latency quantiles."""

PRIOR_DEGREES = 4
"""Degrees of freedom that a prior standard deviation counts for: as much as five runs seen."""

CAPACITY_STEP = 1.05
"""A capacity that fresh runs refute is tried again at least this factor lower,"""

CAPACITY_GIVEN_UP = 0.7
"""down to this share of what the search had found."""

# Several nodes at once.

NODE_RUNS = 2
"""Runs of the same load on each node, all at once, after a lone request: from two on noise shows beside the nodes."""

NODES_ALIKE = 0.002
"""In logs: speeds that differ by less than this, once noise is taken off, are called alike."""

NODES_UNLIKE = 0.25
"""Nodes that differ by more than this may have different optima: it is said."""

# Which leads.

INDIFFERENCE = 0.05
"""Objectives closer than this may be called equal; whether they are depends on the noise measured."""
