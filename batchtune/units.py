"""Reads and writes durations, rates, ratios and counts: the one way in which a number becomes text, in every room.

`20ms`, `1m30s`; `500/s`, `2k/s`; `1%`, `0.01`. Numbers in scenario files carry their unit, so that `20` is never
taken for seconds by one reader and for milliseconds by the other.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from batchtune.errors import UsageError

_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
}
NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
DURATION = rf"{NUMBER} ?(?:ns|us|µs|μs|ms|s|min|m|h)"


def parse_duration_s(text: str, *, units: tuple[str, str] = ("ms", "s")) -> float:
    """Parse a duration with its unit to seconds: `20ms`, `1.5s`, `3m`, `1m30s`, `500us`; `0` needs none.

    `units` are those that the hint proposes where the text is a bare number.

    Raises:
        UsageError: no number, no unit or an unknown one.
    """
    part = re.compile(rf"({NUMBER}) ?(ns|us|µs|μs|ms|s|min|m|h)(?![a-zµμ])\s*")
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    total, at = Decimal(0), 0
    while match := part.match(stripped, at):
        total += Decimal(match[1]) * _SECONDS[match[2]]
        at = match.end()
    if at == 0 or at != len(stripped):
        bare, sign = re.fullmatch(NUMBER, stripped), "positive " if stripped.startswith("-") else ""
        raise UsageError(
            f"expected a {sign}duration with its unit, such as 20ms, 1.5s or 3m; was {text!r}",
            hint=with_unit(stripped, units) if bare else "units: ns, us, ms, s, m, h",
        )
    return float(total)


def with_unit(number: object, units: tuple[str, str]) -> str:
    """Return a hint for a number without its unit, such as `write 20ms or 20s`."""
    return f"write {number}{units[0]} or {number}{units[1]}"


def format_duration(seconds: float) -> str:
    """Format seconds as the shortest text that `parse_duration_s` reads back as the same float: `20ms`, `1.5s`."""
    exact = Decimal(repr(float(seconds)))
    unit = "s" if exact >= 1 or not exact else "ms" if exact >= _SECONDS["ms"] else "us"
    return f"{_plain(exact / _SECONDS[unit])}{unit}"


def parse_rate_rps(text: str) -> float:
    """Parse a rate to requests per second: `500`, `500/s`, `30/min`, `2k/s` or `500rps`.

    Raises:
        UsageError: anything else.
    """
    match = re.fullmatch(rf"({NUMBER}) ?([kM]?)(?: ?(/s|/min|/m|/h|rps))?", text.strip())
    if match is None:
        raise UsageError(f"expected a rate such as 500/s or 30/min; was {text!r}")
    thousands = {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]
    per_second = {"/s": 1.0, "rps": 1.0, None: 1.0, "/min": 1 / 60, "/m": 1 / 60, "/h": 1 / 3600}
    return float(Decimal(match[1]) * thousands) * per_second[match[3]]


def parse_ratio(text: str) -> float:
    """Parse a ratio: `1%` or `0.01`.

    Raises:
        UsageError: anything else.
    """
    percent = re.fullmatch(rf"({NUMBER}) ?%", text.strip())
    if percent:
        return float(Decimal(percent[1]) / 100)
    if re.fullmatch(NUMBER, text.strip()):
        return float(text)
    raise UsageError(f"expected a percentage such as 1%, or a ratio such as 0.01; was {text!r}")


def rounded(value: float | None) -> str:
    """Format a number with three significant digits, fewer where these are the value: `12,300`, `6.40`, `20`, `0.05`;
    never an exponent.

    `–` for None and nan, `unbounded` for infinity.
    """
    if value is None or not math.isfinite(value):
        return three_digits(value)
    exact = Decimal(f"{value:.2e}")
    is_exact = abs(float(exact) - value) <= 1e-9 * abs(value)
    return _plain(exact) if is_exact and abs(exact) < 1000 else three_digits(value)


def three_digits(value: float | None) -> str:
    """Format a number with three significant digits, trailing zeros included (`6.40`), for the ends of an interval; `–`
    for None and nan, `unbounded` for infinity."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "unbounded"
    exact = Decimal(f"{value:.2e}")
    if not exact:
        return "0"
    return f"{exact:,.{min(max(0, 2 - exact.adjusted()), 9)}f}"


def rounded_duration(seconds: float) -> str:
    """Format seconds in the unit that fits: `850 µs`, `20 ms`, `2.50 s`, `3 min 05 s`; `–` for nan, `unbounded` for
    infinity."""
    if not math.isfinite(seconds):
        return rounded(seconds)
    shown_s = float(f"{seconds:.3g}")
    if shown_s >= 60:
        minutes, rest_s = divmod(round(seconds), 60)
        return f"{minutes} min {rest_s:02d} s"
    unit, unit_s = ("s", 1.0) if shown_s >= 1 else ("ms", 1e-3) if shown_s >= 1e-3 else ("µs", 1e-6)
    return f"{rounded(seconds / unit_s)} {unit}" if shown_s else "0 ms"


def percentage(ratio: float | None) -> str:
    """Format a ratio as per cent: `12.3 %`, `5 %`; `–` for None and nan."""
    return "–" if ratio is None or math.isnan(ratio) else f"{rounded(ratio * 100)} %"


def signed_percent(ratio: float) -> str:
    """Format a change as per cent with its sign, without the unit: `+20.2`, `−4.9`; `–` for nan."""
    return "–" if math.isnan(ratio) else f"{'−' if ratio < 0 else '+'}{rounded(abs(ratio) * 100)}"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 run`, `3 runs`, `1,200 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
