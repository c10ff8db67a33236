"""Verdicts on limits: whether the share of requests that miss a latency limit is small enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from batchtune.measure.quantiles import QUANTILES, binomial_cdf

Verdict = Literal["PASS", "FAIL", "UNSURE", "INVALID", "NOISY"]
"""On an SLO: met, missed, too few requests to decide; INVALID: the client was the limit; NOISY: the host was
disturbed."""

Decision = Literal["PASS", "FAIL", "UNSURE"]

ALPHA = 0.05

LONGEST_TIMES = 100.0
"""How many times as long a run is at most advised: one a hundred times as long is no advice."""


class Slo(Protocol):
    """The limits on an answer: `error_ratio` is the share of requests that may fail, 0 to 1; `limits()` gives
    the latency limits by name (`p95`, `ttft_p99`) in seconds, and under `goodput` the share of requests that
    may miss any of them."""

    @property
    def error_ratio(self) -> float: ...

    def limits(self) -> Mapping[str, float]: ...


Figure = Literal["e2e", "ttft", "itl", "goodput"]
"""What a limit is on: whole answers, times to the first token, gaps between tokens, or the share of requests
that keep all limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One latency limit: at least a share `quantile` of the requests (itl: of the gaps between tokens) within
    `seconds`.

    For goodput a request's value is its largest ratio to any of the other limits, and `seconds` is 1.
    """

    name: str
    quantile: float
    seconds: float
    figure: Figure = "e2e"

    @property
    def allowed_miss_ratio(self) -> float:
        """Share of the requests that may be slower, 1 - quantile."""
        return 1.0 - self.quantile


def limits_of(slo: Slo) -> tuple[Limit, ...]:
    """List the latency limits of `slo`: on whole answers by rising quantile, then on first tokens, on gaps,
    and on goodput."""
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
    """Return the limit that a search watches: p95 if there is one, else p99, p90, p99.9, p50, then those on
    first tokens, on gaps, on goodput; None: no latency limit."""
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
    """Decide by a binomial test, at ALPHA on both sides, whether the true miss ratio is below the allowed one
    (PASS) or above it (FAIL); UNSURE: neither is shown.

    `requests`, `misses`: how many counted, and how many of them missed the limit. Both are divided by
    `design_effect` and rounded against the verdict (measurement.md 2.4).
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
    """Estimate how many times as long a run like this must last for a PASS or a FAIL, in steps of 25 %; None:
    beyond LONGEST_TIMES.

    Assumes that misses go on at this ratio and come together as before (`design_effect`).
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
