"""Which loop do `--rate` and `--concurrency` make of a scenario's load?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from batchtune.cli.arguments.points import client_counts, rates_rps
from batchtune.errors import UsageError
from batchtune.scenario.spec.load import ArrivalKind

_PATTERNS: Final = frozenset(get_args(ArrivalKind)) - {"closed", "constant", "poisson"}


def loop_overrides(load: Mapping[str, Any], *, rate: str | None, concurrency: str | None) -> list[str]:
    """Overrides that turn the scenario's load into the one that `--rate` or `--concurrency` asks for; of a range the
    first.

    A rate keeps the pattern of the arrivals (gamma, on_off, ramp, steps, trace), stretched to that mean.

    Raises:
        UsageError: no rate, no number of clients, or clients for a pattern of arrivals.
    """
    arrivals = load.get("arrivals")
    if rate is not None:
        open_loop = [f"load.rate={rates_rps(rate)[0]}", "objective=latency"]
        if arrivals != "closed":
            return open_loop
        return [
            "load.arrivals=poisson", "load.concurrency=null", "load.think_time=0s", "load.requests=null", *open_loop
        ]  # fmt: skip
    if concurrency is not None:
        if arrivals in _PATTERNS:
            raise UsageError(
                f"--concurrency: the scenario's arrivals are {arrivals}; clients that wait for their answers have no "
                "such pattern",
                hint="give --rate, which keeps it, or add "
                f"--set load.arrivals=closed --set load.{arrivals}=null",
            )
        return [
            "load.arrivals=closed", "load.rate=null", "load.max_in_flight=null",
            f"load.concurrency={client_counts(concurrency)[0]}", "objective=throughput",
        ]  # fmt: skip
    return []


def refuse_range(*, rate: str | None, concurrency: str | None) -> None:
    """A sweep and a comparison have one load.

    Raises:
        UsageError: a range or a list is given.
    """
    for option, values in (
        ("--rate", () if rate is None else rates_rps(rate)),
        ("--concurrency", () if concurrency is None else client_counts(concurrency)),
    ):
        if len(values) > 1:
            raise UsageError(f"{option}: one value, not {len(values)}", hint="`batchtune load` takes a range")
