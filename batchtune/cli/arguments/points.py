"""At which load points does the command line ask: which rates, or how many clients?"""

from __future__ import annotations

import math

from batchtune.errors import UsageError
from batchtune.scenario.units import parse_rate_rps

_RANGE_MAX = 10_000
_FEW = f" and at most {_RANGE_MAX:,} values"


def refuse_both(*, rate: str | None, concurrency: str | None) -> None:
    """A load is open or closed.

    Raises:
        UsageError: both are given.
    """
    if rate is not None and concurrency is not None:
        raise UsageError("--concurrency and --rate exclude each other", hint="give one of the two")


def rates_rps(text: str) -> tuple[float, ...]:
    """The rates of `--rate`, all above 0.

    Raises:
        UsageError: no rates.
    """
    try:
        rates = parse_range(text)
    except UsageError as error:
        raise UsageError(f"--rate: {error.message}", hint=error.hint or "write 500, or 100:1k:100") from error
    if min(rates) <= 0.0:
        raise UsageError(f"--rate: {text!r} is not above 0", hint="write --rate 500")
    return rates


def client_counts(text: str) -> tuple[int, ...]:
    """The numbers of clients of `--concurrency`.

    Raises:
        UsageError: no whole numbers above 0.
    """
    try:
        counts = parse_range(text)
    except UsageError as error:
        raise UsageError(
            f"--concurrency: {error.message}", hint=error.hint or "write 8, or 1:64:x2"
        ) from error
    if any(count != int(count) or count < 1 for count in counts):
        raise UsageError(
            f"--concurrency: {text!r} has a value that is no number of clients", hint="write 8, or 1:64:x2"
        )
    return tuple(map(int, counts))


def parse_range(text: str) -> tuple[float, ...]:
    """The values of `8`, `1,2,8`, `start:end:step` (end included where met), or `start:end:x2` (doubling, and end).

    For rates and concurrencies; values may carry a unit (`100/s:1k/s:100`).

    Raises:
        UsageError: anything else.
    """
    if "," in text:
        return tuple(value for part in text.split(",") for value in parse_range(part))
    parts = text.split(":")
    expected = f"expected a value, start:end:step or start:end:x2; was {text!r}"
    multiplied = len(parts) == 3 and parts[2][:1] in {"x", "*"}
    if multiplied:
        parts[2] = parts[2][1:]
    try:
        numbers = [parse_rate_rps(part) for part in parts]
    except UsageError as error:
        raise UsageError(expected) from error
    if len(numbers) > 3 or not all(map(math.isfinite, numbers)):
        raise UsageError(expected)
    if len(numbers) == 1:
        return (numbers[0],)
    start, end, step = numbers if len(numbers) == 3 else (*numbers, 1.0)
    if start > end:
        raise UsageError(f"{text!r} starts above its end", hint=f"write {parts[1]}:{parts[0]}")
    if multiplied:
        return _multiplied(start, end, step, expected)
    if step <= 0 or (end - start) / step >= _RANGE_MAX:
        raise UsageError(f"{text!r}: expected a step above 0{_FEW}")
    return tuple(start + step * at for at in range(math.floor((end - start) / step + 1e-9) + 1))


def _multiplied(start: float, end: float, factor: float, expected: str) -> tuple[float, ...]:
    if start <= 0 or factor <= 1:
        raise UsageError(expected)
    if math.log(end / start) >= _RANGE_MAX * math.log(factor):
        raise UsageError(f"x{factor}: expected a larger factor{_FEW}")
    values = [start]
    while values[-1] * factor < end * (1 + 1e-9):
        values.append(values[-1] * factor)
    return tuple(values if math.isclose(values[-1], end) else [*values, end])
