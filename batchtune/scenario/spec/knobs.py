"""Turns the named values of a scenario into the configuration of a server."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Final

from batchtune.batching.parameters import (
    AUTO_BUCKETS,
    DEFAULT_MAX_BATCH_SIZE,
    LENGTH_BUCKETS,
    NO_BUCKETS,
    PARAMETER_NAMES,
    SERVER_SWITCHES,
    BatchingParameters,
    Configuration,
    ServerWord,
    flag_text,
    from_dict,
    parse_length_buckets,
    require_ports,
    validate,
)
from batchtune.batching.triton_config import FoundBatching
from batchtune.batching.triton_words import ACTIONS, GROUPS, INSTANCES, MISSING, SETTINGS, WORDS
from batchtune.errors import BatchingParametersError

# The named values of a scenario as the configuration of a model on Triton.
#
# Inside the house the knobs that TensorFlow Serving has too go by its names; a scenario may use Triton's own, nested as
# in config.pbtxt (`instance_group: {count: [1, 2]}`) or dotted.

_SHARED: Final = ("max_batch_size", *WORDS)


def in_house_words(knobs: Any) -> Any:
    """Return a search space, or fixed values, with Triton's names replaced by TensorFlow Serving's; what is no
    mapping is returned as it is.

    Raises:
        ValueError: a parameter is given under both names.
    """
    flat = _flattened(knobs) if isinstance(knobs, Mapping) else knobs
    return in_words_of(flat, [(house, triton, 1) for house, triton in WORDS.items()])


def triton_configuration(
    fixed: Mapping[str, Any], point: Mapping[str, Any], *, original: FoundBatching | None
) -> Configuration:
    """Make a configuration of Triton from values by name: those of `point`, else of `fixed`, else of `original`.

    `original`: the batching that the server had before; None: one instance, batches of at most 4. Size, delay and
    instances are always set; without batching only the instances. Preferred sizes above `max_batch_size` are left
    out, so that every combination of a space is legal.

    Raises:
        BatchingParametersError: values that Triton would not accept.
    """
    values = {name: value for name, value in {**fixed, **point}.items() if value is not None}
    there = original or FoundBatching(max_batch_size=4)  # what Triton gives a model that names no maximum
    for name in values:
        if name in MISSING:
            raise BatchingParametersError(f"Triton has no {name}", hint=MISSING[name])
    enabled = _is_batched(values)
    batching = from_dict(
        {
            "max_batch_size": there.max_batch_size,
            "batch_timeout_micros": there.max_queue_delay_microseconds,
            "num_batch_threads": there.instance_count,
            **{name: values[name] for name in _SHARED if name in values},
        }
    )
    validate(batching)
    flags = server_flags_of(values)
    if not enabled:
        flags[INSTANCES] = str(batching.num_batch_threads)
        return _configuration(None, flags)
    largest = batching.max_batch_size or 1
    flags |= {name: _setting(name, values[name], largest) for name in SETTINGS if name in values}
    return _configuration(batching, {name: text for name, text in flags.items() if text})


def _is_batched(values: Mapping[str, Any]) -> bool:
    enabled = values.get("enable_batching", True)
    if not isinstance(enabled, bool):
        raise BatchingParametersError(f"enable_batching must be true or false; was {enabled!r}")
    return enabled


def server_flags_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the values that are flags of a launched tritonserver, neither a parameter nor a setting
    of the model: name without dashes -> text.

    Raises:
        BatchingParametersError: a port that is no number from 0 to 65535.
    """
    require_ports(values)
    return {
        name.lstrip("-"): flag_text(value)
        for name, value in values.items()
        if name not in _SHARED and name not in SETTINGS and name != "enable_batching"
    }


def misspelt_triton_knob(name: str, *, attached: bool) -> tuple[str, str] | None:
    """Check a parameter's name for Triton. Returns (what is wrong, hint); None: nothing is wrong.

    `attached`: the server runs already and takes no flags, so that every name must be a parameter.
    """
    if name in _SHARED or name in SETTINGS or name == "enable_batching":
        return None
    if name in MISSING:
        return "Triton has no such parameter", MISSING[name]
    known = ("max_batch_size", *WORDS.values(), *SETTINGS, "enable_batching")
    near = get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.8)
    if near and not name.startswith("--"):
        return "unknown batching parameter", f"did you mean {near[0]!r}? (write --{name} for a server flag)"
    if attached:
        return "a server that runs already takes no flags", f"Triton's own are: {', '.join(known)}"
    return None


def _configuration(batching: BatchingParameters | None, flags: Mapping[str, str]) -> Configuration:
    return Configuration(batching=batching, dialect="triton", flags=tuple(sorted(flags.items())))


def _flattened(knobs: Mapping[Any, Any]) -> dict[Any, Any]:
    flat: dict[Any, Any] = {}
    for name, value in knobs.items():
        if name in GROUPS and isinstance(value, Mapping):
            flat |= {f"{name}.{field}": below for field, below in value.items()}
        else:
            flat[name] = value
    return flat


def _setting(name: str, value: Any, largest: int) -> str:
    """Return a setting of Triton's as the text of a flag; "": it is left to Triton.

    Raises:
        BatchingParametersError: a value of another type.
    """
    match SETTINGS[name]:
        case "sizes":
            sizes = () if value == "none" else value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
                raise BatchingParametersError(f"{name} must be a list of sizes, or none; was {value!r}")
            return flag_text(sorted(size for size in sizes if size <= largest))
        case "boolean" if not isinstance(value, bool):
            raise BatchingParametersError(f"{name} must be true or false; was {value!r}")
        case "number" if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BatchingParametersError(f"{name} must be a whole number of at least 0; was {value!r}")
        case "action" if value not in ACTIONS:
            raise BatchingParametersError(f"{name} must be {' or '.join(ACTIONS)}; was {value!r}")
        case _:
            return flag_text(value)


# The named values of a scenario of kind http.
#
# Inside the house the parameters that `target.means` names go by our names, in our units; all others are flags.


def in_words_of(knobs: Any, words: Sequence[ServerWord]) -> Any:
    """Return a search space, fixed values or defaults with the server's own names replaced by TensorFlow Serving's,
    and values in its units; what is no mapping is returned as it is. `words`: as `MeansSpec.words` returns them.

    Raises:
        ValueError: a parameter is given under both names.
    """
    if not isinstance(knobs, Mapping):
        return knobs
    ours = {word: (name, units) for name, word, units in words}
    renamed: dict[Any, Any] = {}
    for word, value in knobs.items():
        name, units = ours.get(word, (word, 1))
        if name in renamed:
            raise ValueError(f"{word} is there twice: {name} means the same")
        renamed[name] = _in_our_units(value, units)
    return renamed


def _in_our_units(value: Any, units: int) -> Any:
    if units == 1 or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return round(value * units)
    if isinstance(value, Mapping):
        return {name: _in_our_units(below, units) for name, below in value.items()}
    return [_in_our_units(below, units) for below in value] if isinstance(value, list | tuple) else value


def http_configuration(
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    point: Mapping[str, Any],
    *,
    words: Sequence[ServerWord],
) -> Configuration:
    """Make a configuration of a server of kind http from values by name: those of `point`, else of `fixed`, else of
    `defaults`.

    Batching parameters go by TensorFlow Serving's names and units (`in_words_of`); names that are not among `words`
    become flags; a value of None is left out. Without batching num_batch_threads becomes a flag where the server has
    such a parameter.

    Raises:
        BatchingParametersError: a size, wait or number that no server would accept, or an enable_batching that is no
            boolean.
    """
    values = {**defaults, **fixed, **point}
    enabled = _is_batched(values)
    values.pop("enable_batching", None)
    meant = {name for name, _, _ in words}
    batching = from_dict({name: value for name, value in values.items() if name in meant})
    validate(batching)
    flags = {
        name: flag_text(value) for name, value in values.items() if name not in meant and value is not None
    }
    if not enabled and "num_batch_threads" in meant:
        flags["num_batch_threads"] = str(batching.num_batch_threads or 1)
    return Configuration(
        batching=batching if enabled else None,
        dialect="http",
        flags=tuple(sorted(flags.items())),
        words=tuple(words),
    )


KNOBS = (*PARAMETER_NAMES, "enable_batching")


def configuration_of(
    fixed: Mapping[str, Any], point: Mapping[str, Any], *, searched: Container[str]
) -> Configuration:
    """Make a configuration of TensorFlow Serving from values by name: those of `point`, else of `fixed`. Names that
    are no batching parameter become server flags.

    `enable_batching: false` turns batching off; its parameters and length buckets are then ignored. So that every
    combination of a space is legal, `allowed_batch_sizes` and `max_execution_batch_size` are each cut to
    `max_batch_size` where one of the two is among the `searched` names.

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
    enabled = _is_batched(values)
    flags = tuple(
        (name, text)
        for name, text in server_flags(values)
        if name != LENGTH_BUCKETS or (parse_length_buckets(text) and enabled)
    )
    if not enabled:
        return Configuration(batching=None, flags=flags)
    _fit_sizes(batching, searched=searched)
    parameters = from_dict(batching)
    validate(parameters)
    return Configuration(batching=parameters, flags=flags)


def server_flags(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return those of the values that are no batching parameter, as sorted pairs (name without dashes, text).

    Raises:
        BatchingParametersError: a flag by which each trial sets the parameters, or a port that is no number from 0 to
            65535.
    """
    for name in values:
        if name not in KNOBS and name.lstrip("-") in SERVER_SWITCHES:
            raise BatchingParametersError(
                f"{name}: each trial gives the server its parameters by this flag",
                hint="write the parameters in fixed, or give their file to --batching-parameters-file",
            )
    require_ports(values)
    flags = {name.lstrip("-"): flag_text(value) for name, value in values.items() if name not in KNOBS}
    return tuple(sorted(flags.items()))


def misspelt_knob(name: str) -> str | None:
    """Return the batching parameter that `name` was probably meant to be; None: it is one, begins with `--`, or
    resembles none, as the flags of a server do."""
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
