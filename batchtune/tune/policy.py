"""Numbers that several rooms still read here; each goes to its use."""

from __future__ import annotations

FAILURES_MAX = 3
"""So many failed trials, and none that worked, mean that it is not the configurations that are at fault."""

SEED_STRIDE = 1_000_003
"""Seeds of two blocks are this far apart: a prime, so that no block plays the schedule of another."""

ALL_FAIL_RATIO = 0.9
"""From this share of failed requests on a trial shows nothing but the failure."""

CONFIRMATIONS = 3
"""Fresh runs of what is recommended, at least."""

HARDLY = 0.05
"""A gain below this, sure as it may be, is called hardly any."""
