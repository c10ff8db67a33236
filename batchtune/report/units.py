"""Writes numbers: three significant digits, the unit beside them or in the header, the interval behind them."""

from __future__ import annotations

import math

from batchtune.measure.statistics.quantiles import Estimate


def number(value: float | None) -> str:
    """Three significant digits without an exponent, thousands separated: 3123.4 -> "3,120"."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, min(digits, 9))}f}"


def interval(estimate: Estimate | None, *, scale: float = 1.0) -> str:
    """`value [low, high]`, each times `scale`; a value alone when its interval is undefined."""
    if estimate is None:
        return "–"
    if math.isnan(estimate.low) and math.isnan(estimate.high):
        return number(estimate.value * scale)
    return (
        f"{number(estimate.value * scale)} [{number(estimate.low * scale)}, {number(estimate.high * scale)}]"
    )


def span(estimate: Estimate | None, *, scale: float = 1.0) -> str:
    """The range of some runs, `8.90-9.40`, each end times `scale`; one figure where both ends read alike."""
    if estimate is None or not math.isfinite(estimate.low):
        return "–"
    low = number(estimate.low * scale)
    if not math.isfinite(estimate.high):
        return f"{low} or more"
    high = number(estimate.high * scale)
    return low if low == high else f"{low}-{high}"


def milliseconds(estimate: Estimate | None) -> str:
    """An estimate in seconds, written in milliseconds."""
    return interval(estimate, scale=1e3)


def ratio(estimate: Estimate | None) -> str:
    """A factor: `×1.83 [1.79, 1.88]`, or `at least ×1.83` where it has no upper end."""
    if estimate is None:
        return "–"
    return f"at least ×{number(estimate.value)}" if math.isinf(estimate.high) else f"×{interval(estimate)}"


def latency(estimate: Estimate | None) -> str:
    """An estimate in seconds for a sentence, in the unit that fits its value: `2.10 [1.90, 2.40] s`."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    unit, scale = ("s", 1.0) if abs(estimate.value) >= 0.9995 else ("ms", 1e3)
    return f"{interval(estimate, scale=scale)} {unit}"


def percent(value: float | None) -> str:
    """A fraction as a percentage."""
    return "–" if value is None or math.isnan(value) else f"{number(value * 100)} %"
