"""How long are the turns of a duet of two variants, and what does it say of the CPU time of a request?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from batchtune.load.duet import DuetPlan
from batchtune.measure.statistics.paired import balanced_orders, hodges_lehmann, log_ratios
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

TURN_S: Final = 0.008
"""Of turns of 4 to 200 ms a pair's ratio varies as much, so that many short ones tell most
(tests/benchmarks/check/duet.py),"""

TURN_LATENCIES: Final = 1.25
"""but in a turn each client sends twice: of one volley a request costs up to a quarter more than in a run, which hides
as much of a change;"""

TURN_REQUESTS: Final = 8.0
"""and of an open loop so many requests."""

GAP_LATENCIES: Final = 1.25
"""So many 95th percentiles are waited for the last answers of a turn, or for a batch that nobody fills any more,"""

GAP_REST_S: Final = 0.002
"""and so much, for what the server does behind its last answer, and to read the clocks. Later answers cost the pair."""

PAIRS_MIN: Final = 8
"""Fewer pairs tell less than two runs one after another."""

DUET_S: Final = 3.5
"""A duet of so long has a standard deviation of about 2 %."""

_TIMEOUT: Final = "batch_timeout_micros"


def duet_plan(variants: Sequence[Variant], trials: Sequence[Trial], *, block: int) -> DuetPlan | None:
    """The duet of a block, by what the runs of both variants showed of their latencies; None: turns that are long
    enough are so long that too few of them fit in the time of two runs."""
    both_s = sum(variant.scenario.load.duration_s for variant in variants)
    typical_s, late_s = (_latency_s(variants, trials, name) for name in ("p50", "p95"))
    if any(variant.scenario.objective == "capacity" for variant in variants) or not math.isfinite(late_s):
        return None
    turn_s = max(TURN_S, TURN_LATENCIES * typical_s, *(_filled_s(variant.scenario) for variant in variants))
    gap_s = GAP_REST_S + max(GAP_LATENCIES * late_s, typical_s + max(map(_open_s, variants)))
    pair_s = 2.0 * (turn_s + gap_s)
    if both_s < PAIRS_MIN * pair_s:
        return None
    pairs = max(PAIRS_MIN, int(DUET_S / pair_s))
    orders = balanced_orders((0, 1), blocks=pairs, seed=variants[0].scenario.load.seed + block)
    return DuetPlan(
        turn_ns=round(turn_s * 1e9),
        gap_ns=round(gap_s * 1e9),
        order=tuple(server for order in orders for server in order),
    )


def request_cost(pairs: Sequence[tuple[float, float]], *, planned: int) -> tuple[float, float] | None:
    """CPU seconds a request of both servers, whose ratio is typical of the pairs; None: most could not be told."""
    ratios = log_ratios(pairs)
    if 2 * len(ratios) < planned:
        return None
    before_s = statistics.median(before for before, _ in pairs)
    return before_s, before_s * math.exp(hodges_lehmann(ratios).value)


def _latency_s(variants: Sequence[Variant], trials: Sequence[Trial], quantile: str) -> float:
    """Of the slower variant, the median over its runs; infinite without any."""
    by_variant = [
        [
            trial.measurement.latency_s[quantile].value
            for trial in trials
            if trial.reason == variant.name and trial.measurement is not None
        ]
        for variant in variants
    ]
    return max(statistics.median(values) if values else math.inf for values in by_variant)


def _filled_s(scenario: Scenario) -> float:
    """What TURN_REQUESTS take at the rate of an open loop."""
    rate_rps = scenario.load.rate_rps
    return TURN_REQUESTS / rate_rps if scenario.load.open_loop and rate_rps else 0.0


def _open_s(variant: Variant) -> float:
    """How long a batch waits for more requests, once nobody sends any."""
    configuration = variant.configuration
    return 0.0 if configuration.batching is None else (in_force(configuration, _TIMEOUT) or 0.0) / 1e6
