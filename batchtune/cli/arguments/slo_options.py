"""Which promise do the options `--slo-p50` to `--slo-p99.9` and `--slo-errors` make?"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from batchtune.cli.arguments.options import of_option
from batchtune.errors import UsageError
from batchtune.measure.quantiles import QUANTILES
from batchtune.scenario.spec.check import SloSpec
from batchtune.units import parse_duration_s, parse_ratio

ERRORS = "errors"


def promised(slo: Mapping[str, str | None]) -> SloSpec | None:
    """What was given, and nothing else set; None: nothing was given.

    Raises:
        UsageError: a value that is no limit, or limits that contradict each other.
    """
    given = {name: text for name, text in slo.items() if text is not None}
    if not given:
        return None
    values = _limits_s(given)
    if ERRORS in given:
        values[ERRORS] = _error_ratio(given[ERRORS])
    try:
        return SloSpec.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"--slo-…: {error.errors()[0]['msg']}") from error


def in_place_of(scenario: SloSpec, promise: SloSpec | None) -> SloSpec:
    """The scenario's promise with what was given in its place.

    Latency limits replace all of the scenario's; the share of errors that may be stays unless it is given too.
    """
    if promise is None:
        return scenario
    errors = promise if "error_ratio" in promise.model_fields_set else scenario
    limits = promise if promise.limits() else scenario
    return limits.model_copy(update={"error_ratio": errors.error_ratio})


def slo_overrides(slo: Mapping[str, str | None]) -> list[str]:
    """What was given for a scenario that is still to be read, as its `--set`.

    Raises:
        UsageError: as `promised`.
    """
    promise = promised(slo)
    if promise is None:
        return []
    overrides = [f"slo.{name}={slo.get(name) or 'null'}" for name in QUANTILES] if promise.limits() else []
    errors = slo.get(ERRORS)
    return overrides if errors is None else [*overrides, f"slo.{ERRORS}={errors}"]


def positive_s(option: str, text: str, *, units: tuple[str, str] = ("ms", "s")) -> float:
    """The seconds of an option's text; `units` as `parse_duration_s`.

    Raises:
        UsageError: no duration above 0; it names the option.
    """
    with of_option(option):
        seconds = parse_duration_s(text, units=units)
    if seconds <= 0:
        raise UsageError(f"{option}: {text!r} is not above 0", hint=f"write a duration such as 20{units[0]}")
    return seconds


def _limits_s(given: Mapping[str, str]) -> dict[str, float]:
    """Seconds by quantile, of the latency limits."""
    return {name: positive_s(f"--slo-{name}", text) for name, text in given.items() if name != ERRORS}


def _error_ratio(text: str) -> float:
    hint = "write a share such as 0.1% or 0.001"
    with of_option("--slo-errors", hint=hint):
        ratio = parse_ratio(text)
    if not 0.0 <= ratio <= 1.0:
        raise UsageError(f"--slo-errors: {text!r} is not between 0 and 100 %", hint=hint)
    return ratio
