"""Verdicts on limits: whether the share of requests that miss a latency limit is small enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from batchtune.measure.quantiles import QUANTILES, binomial_cdf

Verdict = Literal["PASS", "FAIL", "UNSURE", "INVALID", "NOISY"]
"""Kept, broken, too few requests to tell; the client was the limit, the host was noisy (so nothing is told)."""

Decision = Literal["PASS", "FAIL", "UNSURE"]

ALPHA = 0.05

LONGEST_TIMES = 100.0
"""How finely, and how far, a longer run is looked for; one a hundred times as long is no advice."""


class Slo(Protocol):
    """The promise: quantile name -> most seconds, and the share of requests that may fail."""

    @property
    def error_ratio(self) -> float: ...

    def limits(self) -> Mapping[str, float]: ...


Figure = Literal["e2e", "ttft", "itl", "goodput"]
"""What is limited: whole answers, first tokens, gaps between tokens, or the share of requests that keep all limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One latency limit: at least `quantile` of the requests, or gaps between tokens, within `seconds`.

    Of goodput what is compared is the largest share of a limit that a request takes, and `seconds` is 1.
    """

    name: str
    quantile: float
    seconds: float
    figure: Figure = "e2e"

    @property
    def allowed_miss_ratio(self) -> float:
        return 1.0 - self.quantile


def limits_of(slo: Slo) -> tuple[Limit, ...]:
    """The latency limits in the order of their quantiles, then those of streamed answers."""
    promised = slo.limits()
    whole = tuple(
        Limit(name=name, quantile=quantile, seconds=promised[name])
        for name, quantile in QUANTILES.items()
        if name in promised
    )
    figures: tuple[Figure, ...] = ("ttft", "itl")
    streamed = tuple(
        Limit(name=name, quantile=quantile, seconds=promised[name], figure=figure)
        for figure in figures
        for quantile_name, quantile in QUANTILES.items()
        if (name := f"{figure}_{quantile_name}") in promised
    )
    if "goodput" not in promised:
        return whole + streamed
    good = Limit(name="goodput", quantile=1.0 - promised["goodput"], seconds=1.0, figure="goodput")
    return (*whole, *streamed, good)


def primary_limit(slo: Slo) -> Limit | None:
    """The limit that a search watches: p95 if it is promised, else p99, p90, p99.9, p50, then those of first tokens,
    then of gaps; None: no latency limit."""
    by_name = {limit.name: limit for limit in limits_of(slo)}
    whole = ("p95", "p99", "p90", "p99.9", "p50")
    return next((by_name[name] for name in (*whole, *by_name) if name in by_name), None)


def strict_decision(
    requests: float,
    misses: float,
    allowed_miss_ratio: float,
    *,
    design_effect: float = 1.0,
) -> Decision:
    """Binomial test, both sides at ALPHA: is the true miss ratio below, or above, the allowed one?

    Both counts are divided by the design effect and rounded against the verdict (measurement.md 2.4).
    """
    effective, missed = requests / design_effect, misses / design_effect
    if binomial_cdf(math.ceil(missed - 1e-9), math.floor(effective + 1e-9), allowed_miss_ratio) <= ALPHA:
        return "PASS"
    at_least = 1.0 - binomial_cdf(
        math.floor(missed + 1e-9) - 1, math.ceil(effective - 1e-9), allowed_miss_ratio
    )
    return "FAIL" if at_least <= ALPHA else "UNSURE"


def times_longer(
    requests: int, misses: int, allowed_miss_ratio: float, *, design_effect: float
) -> float | None:
    """Estimate how many times as long a run like this must last for a PASS or a FAIL; None: beyond LONGEST_TIMES.

    A guess: that misses go on at this ratio and come together as they did.
    """
    times = 1.0
    while times < LONGEST_TIMES:
        times *= 1.25
        decision = strict_decision(
            times * requests, times * misses, allowed_miss_ratio, design_effect=design_effect
        )
        if decision != "UNSURE":
            return times
    return None
