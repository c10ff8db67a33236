"""At which load points does the command line ask: which rates, or how many clients?"""

from __future__ import annotations

from batchtune.errors import UsageError
from batchtune.scenario.arrivals import parse_range


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
    if any(one != int(one) or one < 1 for one in counts):
        raise UsageError(
            f"--concurrency: {text!r} has a value that is no number of clients", hint="write 8, or 1:64:x2"
        )
    return tuple(map(int, counts))
