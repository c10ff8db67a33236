"""How do the named values of a scenario become the configuration of a server?"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from batchtune.batching.length_buckets import AUTO_BUCKETS, LENGTH_BUCKETS, NO_BUCKETS, parse_length_buckets
from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    PARAMETER_NAMES,
    SERVER_SWITCHES,
    Configuration,
    from_dict,
    require_ports,
    validate,
)
from batchtune.errors import BatchingParametersError

KNOBS = (*PARAMETER_NAMES, "enable_batching")


def configuration_of(
    fixed: Mapping[str, Any], point: Mapping[str, Any], *, searched: Container[str]
) -> Configuration:
    """The configuration of `fixed` overlaid with `point`; names that are no batching parameter are server flags.

    `enable_batching: false` turns batching off and leaves its parameters and length buckets aside. So that every
    combination of a space is legal, sizes are fitted to `max_batch_size` where one of the two is among the `searched`
    names.

    Raises:
        BatchingParametersError: values that no server would accept.
    """
    values = {**fixed, **point}
    if values.get(LENGTH_BUCKETS) in ([], (), ""):
        raise BatchingParametersError(
            f"{LENGTH_BUCKETS} must be a list of rising lengths, {AUTO_BUCKETS} or {NO_BUCKETS}; is empty"
        )
    batching = {
        name: value for name, value in values.items() if name in PARAMETER_NAMES and value is not None
    }
    enabled = values.get("enable_batching", True)
    flags = tuple(
        (name, text)
        for name, text in server_flags(values)
        if name != LENGTH_BUCKETS or (parse_length_buckets(text) and enabled)
    )
    if not isinstance(enabled, bool):
        raise BatchingParametersError(f"enable_batching must be true or false; was {enabled!r}")
    if not enabled:
        return Configuration(batching=None, flags=flags)
    _fit_sizes(batching, searched=searched)
    parameters = from_dict(batching)
    validate(parameters)
    return Configuration(batching=parameters, flags=flags)


def server_flags(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Those of the values that are no batching parameter, as sorted pairs of a name without dashes and a text.

    Raises:
        BatchingParametersError: a flag that each trial writes by itself, or a port that is none.
    """
    for name in values:
        if name not in KNOBS and name.lstrip("-") in SERVER_SWITCHES:
            raise BatchingParametersError(
                f"{name}: each trial gives the server its parameters by this flag",
                hint="write the parameters in fixed, or give their file to --batching-parameters-file",
            )
    require_ports(values)
    flags = {name.lstrip("-"): _flag_text(value) for name, value in values.items() if name not in KNOBS}
    return tuple(sorted(flags.items()))


def misspelt_knob(name: str) -> str | None:
    """The batching parameter that `name` was probably meant to be; None for one, or for a server flag."""
    known = (*KNOBS, LENGTH_BUCKETS)
    if name in known or name.startswith("--"):
        return None
    plain = name.lower().replace("-", "_")
    near = get_close_matches(plain, known, n=1, cutoff=0.85)
    return near[0] if near else None


def _fit_sizes(batching: dict[str, Any], *, searched: Container[str]) -> None:
    largest = batching.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE)
    sizes = batching.get("allowed_batch_sizes")
    limit_varies = "max_batch_size" in searched
    if isinstance(sizes, str):
        batching["allowed_batch_sizes"] = _sizes_by_pattern(sizes, largest)
    elif isinstance(sizes, Sequence) and sizes and (limit_varies or "allowed_batch_sizes" in searched):
        batching["allowed_batch_sizes"] = (*(size for size in sizes if size < largest), largest)
    execution = batching.get("max_execution_batch_size")
    if execution is not None and (limit_varies or "max_execution_batch_size" in searched):
        batching["max_execution_batch_size"] = min(execution, largest)


def _sizes_by_pattern(pattern: str, largest: Any) -> tuple[int, ...]:
    if pattern not in ("powers_of_two", "none"):
        raise BatchingParametersError(
            f"allowed_batch_sizes must be a list of sizes, powers_of_two or none; was {pattern!r}"
        )
    if pattern == "none" or not isinstance(largest, Integral) or largest < 1:
        return ()
    largest = int(largest)
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return (*(size for size in powers if size < largest), largest)


def _flag_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(_flag_text(item) for item in value)
    return str(value)
