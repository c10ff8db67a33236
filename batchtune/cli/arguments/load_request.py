"""Reads the command line of `batchtune load`: scenario, configuration, points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from batchtune.batching.parameters import LENGTH_BUCKETS, PARAMETER_NAMES, TARGETS_FLAGS, Configuration
from batchtune.batching.triton_config import configuration_as_found
from batchtune.batching.triton_words import SETTINGS, WORDS
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.arguments.overrides import asked_scenario, file_knobs, of_option
from batchtune.errors import UsageError
from batchtune.scenario.arrivals import read_trace
from batchtune.scenario.reader import dotted_keys, section_of, unchecked_scenario
from batchtune.scenario.spec.knobs import (
    KNOBS,
    configuration_of,
    in_house_words,
    misspelt_knob,
    server_flags,
    server_flags_of,
    triton_configuration,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.served_models import refuse_unheard
from batchtune.scenario.spec.workload import ArrivalKind
from batchtune.scenario.yaml_document import empty_value, parse_override
from batchtune.target.choice import placed
from batchtune.tune.bench import Plan
from batchtune.tune.trials.trial import TrialRequest
from batchtune.units import parse_rate_rps

_RANGE_MAX = 10_000


def refuse_both(*, rate: str | None, concurrency: str | None) -> None:
    """Check that not both --rate and --concurrency are given: a load is an open loop or a closed loop.

    Raises:
        UsageError: both are given.
    """
    if rate is not None and concurrency is not None:
        raise UsageError("--concurrency and --rate exclude each other", hint="give one of the two")


def rates_rps(text: str) -> tuple[float, ...]:
    """Parse the text of --rate into rates, requests/s, all above 0.

    Raises:
        UsageError: no rates.
    """
    with of_option("--rate", otherwise="write 500, or 100:1k:100"):
        rates = parse_range(text)
    if min(rates) <= 0.0:
        raise UsageError(f"--rate: {text!r} is not above 0", hint="write --rate 500")
    return rates


def client_counts(text: str) -> tuple[int, ...]:
    """Parse the text of --concurrency into numbers of clients.

    Raises:
        UsageError: not whole numbers above 0.
    """
    hint = "write 8, or 1:64:x2"
    with of_option("--concurrency", otherwise=hint):
        counts = parse_range(text)
    if any(count != int(count) or count < 1 for count in counts):
        raise UsageError(f"--concurrency: {text!r} has a value that is not a number of clients", hint=hint)
    return tuple(map(int, counts))


def points_of(*, rate: str | None, concurrency: str | None) -> list[tuple[float | None, int | None]]:
    """Return (rate in requests/s, clients) of each load point that --rate or --concurrency asks for, one of
    the two None.

    Without either option [(None, None)], the scenario's own load.

    Raises:
        UsageError: both are given, or a text cannot be parsed.
    """
    refuse_both(rate=rate, concurrency=concurrency)
    if rate is not None:
        return [(rate_rps, None) for rate_rps in rates_rps(rate)]
    return (
        [(None, None)] if concurrency is None else [(None, clients) for clients in client_counts(concurrency)]
    )


def parse_range(text: str) -> tuple[float, ...]:
    """Parse rates or numbers of clients: `8`, `1,2,8`, `START:END` (steps of 1), `START:END:STEP` or `START:END:x2`,
    in which each value is twice the one before.

    The last value is END where a step meets it, after a factor always. Values may have a unit (`100/s:1k/s:100`).

    Raises:
        UsageError: any other text, or more than 10,000 values.
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
        raise UsageError(f"{text!r}: expected a step above 0 and at most {_RANGE_MAX:,} values")
    return tuple(start + step * at for at in range(math.floor((end - start) / step + 1e-9) + 1))


def _multiplied(start: float, end: float, factor: float, expected: str) -> tuple[float, ...]:
    if start <= 0 or factor <= 1:
        raise UsageError(expected)
    if math.log(end / start) >= _RANGE_MAX * math.log(factor):
        raise UsageError(f"x{factor}: expected a larger factor and at most {_RANGE_MAX:,} values")
    values = [start]
    while values[-1] * factor < end * (1 + 1e-9):
        values.append(values[-1] * factor)
    return tuple(values if math.isclose(values[-1], end) else [*values, end])


def loop_overrides(load: Mapping[str, Any], *, rate: str | None, concurrency: str | None) -> list[str]:
    """Return the `KEY=VALUE` overrides that give the scenario the load of --rate or --concurrency; of a
    range, its first value.

    A rate keeps the pattern of the arrivals (gamma, on_off, ramp, steps, trace), stretched to that mean.
    `load`: the scenario's section.

    Raises:
        UsageError: a text that cannot be parsed, or clients for a scenario whose arrivals have a pattern.
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
        if arrivals in {*get_args(ArrivalKind)} - {"closed", "constant", "poisson"}:
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
    """Check that --rate or --concurrency names one load, which is all that a sweep or a comparison takes.

    Raises:
        UsageError: both are given, or one has several values.
    """
    points = len(points_of(rate=rate, concurrency=concurrency))
    if points > 1:
        option = "--concurrency" if rate is None else "--rate"
        raise UsageError(f"{option}: one value, not {points}", hint="`batchtune load` takes a range")


def asked_load(wanted: LoadRequest) -> tuple[Scenario, LoadRequest]:
    """Read the scenario and change it as the options say; return it, and the request with `settings`, `file_knobs` and
    `notes`.

    A --set whose key is a batching parameter, or in the scenario's search space, becomes a setting of the
    server: a load test searches nothing.

    Raises:
        UsageError: options that contradict each other, that cannot apply to a server that runs already, or of which
            one of several models has its own value.
        BatchingParametersError: the file of parameters cannot be read, or holds values that no server would
            take.
        ScenarioError: as `read_scenario`.
    """
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    if wanted.no_batching and wanted.batching_parameters_file is not None:
        raise UsageError("--no-batching and --batching-parameters-file exclude each other")
    written = unchecked_scenario(wanted.scenario)
    given, is_named = wanted, not wanted.launches
    wanted = _with_scenarios_urls(wanted)
    settings, overrides = split_settings(wanted.overrides, searched=section_of(written, "search", "space"))
    _refuse_idle_options(wanted, settings)
    asked = unchecked_scenario(wanted.scenario, overrides=overrides)
    set_ = [{"fixed": settings}, *(parse_override(override).data for override in overrides)]
    refuse_unheard(asked, set_, option="--set")
    loop = loop_overrides(section_of(asked, "load"), rate=wanted.rate, concurrency=wanted.concurrency)
    if not loop and asked.get("objective", "capacity") == "capacity":  # which a load does not search
        own = section_of(asked, "load")
        has_rate = own.get("rate") or own.get("arrivals") in ("closed", "ramp", "steps", "trace")
        if "objective" in asked and not has_rate and not section_of(asked, "target").get("models"):
            raise UsageError(
                "the scenario names no rate: it asks for the highest one",
                hint="give --rate 500, or --rate 100:1k:100",
            )
        loop = [f"objective={'throughput' if own.get('arrivals') == 'closed' else 'latency'}"]
    chosen = "protocol" in section_of(asked, "request") or section_of(asked, "target").get("kind") != "triton"
    protocol, notes = _protocol(wanted, section_of(asked, "request")) if chosen else ([], ())
    scenario = asked_scenario(wanted.scenario, [*overrides, *loop, *protocol])
    if wanted.rate is not None:
        _refuse_rate_of_an_instant(scenario)
    scenario = _with_time_for_all(scenario)
    if wanted.launches:
        scenario, placement = placed(scenario)
        notes = (*notes, placement) if placement else notes
    else:
        scenario, left_out = _elsewhere(scenario, is_named=is_named, overrides=overrides)
        notes = (*notes, *left_out)
    knobs = None
    if wanted.batching_parameters_file is not None:
        knobs, lacking = file_knobs(wanted.batching_parameters_file, scenario)
        notes = (*notes, *lacking)
    return scenario, replace(given, settings=settings, file_knobs=knobs, notes=notes)


def is_launched(scenario: Scenario, wanted: LoadRequest) -> bool:
    """Whether a server is launched; False where command line or scenario name one that runs, which is loaded as it
    is."""
    target = scenario.target
    runs = target.kind in ("triton", "external") and (target.rest_url or target.grpc_url)
    return wanted.launches and not runs


def _elsewhere(
    scenario: Scenario, *, is_named: bool, overrides: Iterable[str]
) -> tuple[Scenario, tuple[str, ...]]:
    """Return (scenario, notes) for a server that runs already: without the flags and CPUs of a launch.

    `is_named`: the command line names the server; the scenario's `target.endpoints` are then left out, with a
    note, unless --set gives them.
    """
    update: dict[str, Any] = {"flags": {}, "cpus": None}
    is_left_out = is_named and scenario.target.endpoints and "target.endpoints" not in map(_key_of, overrides)
    if is_left_out:
        update["endpoints"] = ()
    note = "target.endpoints is left out: requests go to the server that the command line names"
    return scenario.with_target(**update), (note,) if is_left_out else ()


def _with_scenarios_urls(wanted: LoadRequest) -> LoadRequest:
    """Return the request with the URLs of a running server that the scenario names, where the command line
    names none."""
    of_target = [override for override in wanted.overrides if _key_of(override).startswith("target.")]
    target = section_of(unchecked_scenario(wanted.scenario, overrides=of_target), "target")
    if not wanted.launches or target.get("kind") not in ("triton", "external"):
        return wanted
    urls = (target.get(name) for name in ("rest_url", "grpc_url"))
    rest_url, grpc_url = (None if url is None else str(url) for url in urls)
    return replace(wanted, rest_url=rest_url, grpc_url=grpc_url)


def asked_configuration(scenario: Scenario, wanted: LoadRequest) -> Configuration:
    """Make the configuration for a launched server: `fixed` of the scenario, or the file's parameters,
    changed by the settings.

    Raises:
        BatchingParametersError: values that no server would take.
        UsageError: a flag that the launch itself sets, such as the model's name.
    """
    configuration = _configuration(scenario, wanted)
    if scenario.target.kind != "command":
        for name, _ in configuration.flags:
            if name in TARGETS_FLAGS:
                raise UsageError(f"--{name}: {TARGETS_FLAGS[name]}", hint="leave it out")
    return scenario.with_models(configuration)


def _configuration(scenario: Scenario, wanted: LoadRequest) -> Configuration:
    settings = wanted.settings
    if scenario.target.kind == "triton":
        return _on_triton(scenario, wanted)
    if scenario.target.kind == "http":
        off = {"enable_batching": False} if wanted.no_batching else {}
        return scenario.configuration({**scenario.target.in_house_words(settings), **off})
    if wanted.no_batching:
        return Configuration(batching=None, flags=server_flags({**scenario.fixed, **settings}))
    base: dict[str, Any] = dict(scenario.fixed)
    if wanted.file_knobs is not None:
        flags = {name: value for name, value in scenario.fixed.items() if name not in KNOBS}
        base = {**flags, **wanted.file_knobs}
    if settings.keys() & PARAMETER_NAMES:
        base.pop("enable_batching", None)
    return configuration_of(base, settings, searched={*scenario.search.space, *settings})


def _on_triton(scenario: Scenario, wanted: LoadRequest) -> Configuration:
    """Make the configuration for a launched Triton; where none was requested, the one that the model's
    files hold."""
    original = scenario.target.found
    knobs = {**scenario.fixed, **in_house_words(wanted.settings), **(wanted.file_knobs or {})}
    if wanted.no_batching:
        knobs["enable_batching"] = False
    if original is not None and knobs.keys() <= server_flags_of(knobs).keys():
        return configuration_as_found(original, flags=scenario.fixed_flags, batching=False)
    return triton_configuration(knobs, {}, original=original)


def asked_plans(scenario: Scenario, wanted: LoadRequest, configuration: Configuration) -> Iterator[Plan]:
    """Yield a plan for each load point of --rate or --concurrency, numbered from 1; without either option one plan, for
    the scenario's load.

    Raises:
        UsageError: as `points_of`.
    """
    request = TrialRequest(configuration=configuration, source="load", reason="load")
    points = points_of(rate=wanted.rate, concurrency=wanted.concurrency)
    for number, (rate_rps, clients) in enumerate(points, 1):
        asked = replace(request, rate_rps=rate_rps, concurrency=clients)
        yield Plan(number=number, seed=scenario.load.seed, request=asked)


def split_settings(
    overrides: Iterable[str], *, searched: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Divide --set overrides into (settings of the server: name -> value, the others, which change the
    scenario).

    `searched`: names in the scenario's search space, which are settings too.

    Raises:
        UsageError: an empty value, several values, or a misspelt parameter.
    """
    searched = {*searched, *WORDS.values(), *SETTINGS}  # the server's, Triton's own words too
    settings: dict[str, Any] = {}
    others = []
    for override in overrides:
        key, _, text = override.partition("=")
        key = key.strip()
        name = key.removeprefix("fixed.")
        if key in KNOBS or key == LENGTH_BUCKETS or name in searched or key.startswith("--"):
            settings[name] = _value(name, override, text)
            continue
        near = misspelt_knob(key) if "." not in key and key not in dotted_keys() else None
        if near is not None:
            raise UsageError(f"--set {override}: no such parameter or key", hint=f"did you mean {near!r}?")
        others.append(override)
    return settings, others


def _value(name: str, override: str, text: str) -> Any:
    """Parse the value of a setting: YAML; `allowed_batch_sizes` may be a list with commas.

    Raises:
        UsageError: an empty value, or several values.
    """
    if not text.strip():
        raise empty_value(_key_of(override), option="--set")
    if name == "allowed_batch_sizes" and "," in text and "[" not in text:
        text = f"[{text}]"
    elif "," in text and name in KNOBS and "[" not in text:
        raise UsageError(
            f"--set {override}: one load test has one configuration",
            hint="run `batchtune load` once for each value, or predict: `batchtune simulate` takes several",
        )
    return parse_override(f"value={text}").data["value"]


def _refuse_idle_options(wanted: LoadRequest, settings: Mapping[str, Any]) -> None:
    batching = sorted(settings.keys() & KNOBS)
    if wanted.no_batching and batching:
        raise UsageError(f"--no-batching and --set {batching[0]} exclude each other")
    if wanted.launches:
        return
    idle = {
        "--no-batching": wanted.no_batching,
        "--batching-parameters-file": wanted.batching_parameters_file is not None,
        **{f"--set {name}": True for name in settings},
        **{f"--set {key}": True for key in map(_key_of, wanted.overrides) if _of_a_launch(key)},
    }
    for option, given in idle.items():
        if given:
            raise UsageError(
                f"{option} is for a server that is launched; the one behind the URL runs already",
                hint="leave out the option, or --rest-url and --grpc-url",
            )


def _of_a_launch(key: str) -> bool:
    """Whether this key of a scenario says how a server is launched: `fixed`, and `target` but for what says
    where it runs."""
    asked = tuple(f"target.{name}" for name in ("model", "tls", "kind", "rest_url", "grpc_url", "endpoints"))
    return key.startswith("fixed.") or (key.startswith("target.") and not key.startswith(asked))


def _protocol(wanted: LoadRequest, request: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """Return (overrides, notes) that change the protocol to that of the only URL given; empty where it is
    right or both are.

    Raises:
        UsageError: --set asks for a protocol that the URL does not speak.
    """
    protocol = str(request.get("protocol", "grpc"))
    if (wanted.rest_url is None) == (wanted.grpc_url is None):
        return [], ()
    rest = {"grpc": "rest", "kserve_grpc": "kserve_rest"}
    grpc = {
        "rest": "grpc",
        "kserve_rest": "kserve_grpc",
        "kserve_rest_binary": "kserve_grpc",
    }
    option, others = ("--grpc-url", grpc) if wanted.rest_url is None else ("--rest-url", rest)
    if protocol not in others:
        return [], ()
    if any(_key_of(override) == "request.protocol" for override in wanted.overrides):
        raise UsageError(
            f"--set request.protocol={protocol} cannot be sent to {option}",
            hint=f"leave one of the two out, or say --set request.protocol={others[protocol]}",
        )
    note = f"request.protocol is {others[protocol]}, as {option} asks; the scenario says {protocol}"
    return [f"request.protocol={others[protocol]}"], (note,)


def _refuse_rate_of_an_instant(scenario: Scenario) -> None:
    """Raise UsageError where the scenario sends a trace whose requests all come at once: it cannot be
    stretched to a rate."""
    trace = scenario.load.trace
    if trace is None:
        return
    offsets_s, _, _ = read_trace(trace.file)
    if offsets_s[-1] <= offsets_s[0]:
        raise UsageError(
            f"--rate: all requests of the trace {trace.file} come at one instant, which has no rate",
            hint="leave --rate out, or add --set load.arrivals=poisson --set load.trace=null",
        )


def _with_time_for_all(scenario: Scenario) -> Scenario:
    """Return the scenario with a duration of 10 minutes where it has a number of requests and no duration.

    The load then ends with the last answer, not after the default duration; a job that hangs must end.
    """
    load = scenario.load
    if load.requests is None or "duration_s" in load.model_fields_set:
        return scenario
    return scenario.with_load(duration_s=600.0)


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()
