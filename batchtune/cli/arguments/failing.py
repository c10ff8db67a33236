"""Which replicas may be down at once, by `--failing`?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchtune.cli.arguments.option import of_option
from batchtune.errors import UsageError
from batchtune.scenario.units import parse_ratio

if TYPE_CHECKING:
    from batchtune.twin.model.replicas import Failing

_HINT = "write --failing 1 for one replica, or --failing 5% of the fleet"


def failing_of(failing: str | None) -> Failing | None:
    """What was asked for; None: nothing may fail.

    Raises:
        UsageError: no number of replicas and no share of them.
    """
    from batchtune.twin.model.replicas import Failing

    if failing is None:
        return None
    count, share = _down(failing.strip())
    return Failing(count=count, share=share)


def _down(text: str) -> tuple[int, float]:
    if text.endswith("%"):
        with of_option("--failing", hint=_HINT):
            share = parse_ratio(text)
        if not 0.0 < share < 1.0:
            raise UsageError(f"--failing {text}: expected more than 0 % and less than 100 %", hint=_HINT)
        return 0, share
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise UsageError(f"--failing {text}: no number of replicas from 1 and no percentage", hint=_HINT)
    return int(text), 0.0
