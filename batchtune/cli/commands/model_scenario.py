"""Makes what `sweep`, `load` and `compare` run: the scenario that they are given, or one for a bare model or server."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from batchtune.archive.run import SCENARIO
from batchtune.batching.formats import read_batching_file
from batchtune.batching.parameters import Configuration
from batchtune.cli.arguments.load_request import (
    LoadRequest,
    loop_overrides,
    refuse_both,
    refuse_range,
    split_settings,
)
from batchtune.cli.arguments.overrides import kind_of, model_of, scenario_source, with_file
from batchtune.cli.session import INTERRUPTED
from batchtune.errors import TargetError, UsageError
from batchtune.load.first_tries import TIMES_LARGER, FirstTries, first_tries
from batchtune.report.live_view import sweep_view
from batchtune.scenario.examples import server_scenario
from batchtune.scenario.placement import placed
from batchtune.scenario.reader import ScenarioText, parse_scenario, unchecked_scenario
from batchtune.scenario.recordings import check_names
from batchtune.scenario.spec.request import Protocol, RandomRange, transport_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.target.address import Address, answering_at, attachable, preset_at
from batchtune.target.choice import target_of
from batchtune.target.external import ExternalTarget
from batchtune.target.model_files import served_name
from batchtune.tune.sweep.sweep import pace_of, proposed, usual_budget_s
from batchtune.tune.trials.pace import Pace
from batchtune.units import counted, format_duration, rounded_duration
from batchtune.wire.signature import Signature, TensorSpec

Command = Literal["sweep", "load", "compare", "init"]

CLIENTS: Final = 32
"""Of a load test or a comparison that nobody gave a load."""

_ANY_LIMIT: Final = "1s"
"""Of `init`, until the model was asked how fast it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """A model that answered: its signature, what was tried, and the scenario that follows, as plain data.

    `notes` say in a line each what was guessed, with the option that changes it; `guessed_limit`: so was the SLO.
    """

    document: dict[str, Any]
    signature: Signature
    tries: FirstTries
    notes: tuple[str, ...]
    guessed_limit: bool = False

    def text(self, source: str) -> ScenarioText:
        """The scenario, as if it had been read from a file."""
        return ScenarioText(text=yaml.safe_dump(self.document, sort_keys=False), source=source)


def look_at(
    model: str,
    overrides: Sequence[str],
    *,
    command: Command,
    say: Callable[[str], None],
    batched: bool = True,
) -> LookedAt:
    """Launch the model once, ask it, and complete the scenario: `model` is an argument of the command line.

    `batched` False: a model that takes one request's rows at a time will do.

    Raises:
        UsageError: no such model, or options that contradict each other or the model.
        TargetError: the server does not start, or the model refuses a request.
    """
    base = _begun(model_of(model), command=command)
    if command == "init" and _lacks_limit(base, overrides):
        base["slo"] = {"p95": _ANY_LIMIT}
    scenario, _ = placed(_scenario(base, overrides, model=model))
    say(f"looking at {model}: launching the server")
    with target_of(scenario, on_event=say) as target:
        target.apply(Configuration(batching=None))
        signature = target.signature(scenario.request.signature)
        try:
            tries = _tried(target.endpoint, signature, scenario, batched=batched)
        except TargetError as error:
            if target.alive():
                raise
            raise TargetError(
                f"{error.message}; the server died of it:\n{target.log_tail()}", hint=error.hint
            ) from error
    limited = bool(base["slo"])
    if limited:
        base["slo"] = {"p95": _likely_limit(tries.lone_s)}
        scenario, _ = placed(_scenario(base, overrides, model=model))
    looked = _completed(base, overrides, scenario, signature, tries, searched=command in ("sweep", "init"))
    return replace(looked, guessed_limit=limited)


def look_at_running(
    address: Address,
    overrides: Sequence[str],
    *,
    command: Command = "load",
    batched: bool = False,
    target: Mapping[str, Any] | None = None,
) -> LookedAt:
    """Ask the model of a running server; `command` and `batched` as of `look_at`.

    `target` are the keys of one that takes parameters, which a sweep searches; None: they are its owner's.

    Raises:
        UsageError: options that contradict each other or the model.
        TargetError: nobody answers, or the model refuses a request.
    """
    base = _begun(address.model, command="load" if target is None else command)
    base["request"]["protocol"] = address.protocol
    base["target"] |= target or {}
    is_guessed = target is not None and command == "init" and _lacks_limit(base, overrides)
    if is_guessed:
        base["slo"] = {"p95": _ANY_LIMIT}
    scenario = _scenario(base, overrides, model=address.model)
    _refuse_other_transport(address, scenario.request.protocol)
    server = ExternalTarget(address.endpoint(), kserve=address.protocol.startswith("kserve_"))
    unknown_there = "is {model} the name under which that server serves it, and has it been loaded?"
    try:
        signature = server.signature(scenario.request.signature)
    except TargetError as error:
        raise TargetError(
            error.message, hint=error.hint or unknown_there.format(model=address.model)
        ) from error
    tries = _tried(address.endpoint(), signature, scenario, batched=batched)
    if is_guessed:
        base["slo"] = {"p95": _likely_limit(tries.lone_s)}
        scenario = _scenario(base, overrides, model=address.model)
    looked = _completed(base, overrides, scenario, signature, tries, searched=target is not None)
    return replace(looked, guessed_limit=is_guessed)


def loop_of_model(
    overrides: Sequence[str], *, command: Command, rate: str | None, concurrency: str | None
) -> list[str]:
    """What --rate or --concurrency lays over a bare model's load, as the overrides have made it.

    Raises:
        UsageError: as `loop_overrides`.
    """
    begun = ScenarioText(text=yaml.safe_dump(_begun("model", command=command)), source="MODEL")
    load = unchecked_scenario(begun, overrides=overrides).get("load")
    loop = loop_overrides(load if isinstance(load, dict) else {}, rate=rate, concurrency=concurrency)
    return loop if rate is None else ["load.concurrency=null", *loop]


def wants_of(scenario: Scenario) -> str:
    """What a sweep of it looks for, and which option said so, in one line."""
    limits = ", ".join(
        f"{name} ≤ {rounded_duration(limit_s)}" for name, limit_s in scenario.slo.limits().items()
    )
    within = f" within {limits}" if limits else ""
    load = scenario.load
    match scenario.objective:
        case "capacity":
            return f"the highest rate{within} is looked for (--concurrency N: most requests/s of N clients)"
        case "throughput":
            clients = counted(load.concurrency or 0, "client")
            return f"most requests/s of {clients}{within} are looked for (--concurrency)"
        case "latency":
            rate = f"the rates of its {load.arrivals}" if load.rate_rps is None else f"{load.rate_rps:g}/s"
            return f"the lowest latency at {rate}{within} is looked for (--rate)"


def shortage_of(scenario: Scenario, tries: FirstTries) -> str | None:
    """That the budget is less than half of what a sure answer takes on so slow a model; None: it is not."""
    given_s, sure_s = scenario.search.time_budget_s, usual_budget_s(tries.lone_s)
    if given_s is None or given_s >= 0.5 * sure_s or sure_s == DEFAULT_TIME_BUDGET_S:
        return None
    needed = format_duration(math.ceil(sure_s))
    return (
        f"a request takes {rounded_duration(tries.lone_s)}: {rounded_duration(given_s)} hold few runs; "
        f"for a confirmed answer give --budget {needed}"
    )


def _pace(scenario: Scenario, tries: FirstTries) -> Pace:
    larger_s = tries.lone_s * TIMES_LARGER if tries.larger_s is None else tries.larger_s
    larger_rows = TIMES_LARGER * scenario.request.rows
    return pace_of(scenario, lone_s=tries.lone_s, larger_s=larger_s, larger_rows=larger_rows)


def speed_of(tries: FirstTries) -> str:
    """`1 row is answered in 1.2 ms, 8 rows at once in 3.4 ms`."""
    if tries.recorded:
        return f"a recorded request answered in {rounded_duration(tries.lone_s)}"
    rows = tries.request.rows
    alone = f"{counted(rows, 'row')} answered in {rounded_duration(tries.lone_s)}"
    if tries.refusal is not None:
        return f"{alone}, {TIMES_LARGER * rows} rows at once are refused"
    if tries.larger_s is None:
        return f"{alone}; no more at once"
    return f"{alone}, {counted(TIMES_LARGER * rows, 'row')} at once in {rounded_duration(tries.larger_s)}"


def inputs_of(signature: Signature) -> str:
    """`x float32 [?, 28, 28], mask int32 [?, ?]`."""
    return ", ".join(f"{spec.name} {_dtype(spec)} {_shape(spec)}" for spec in signature.inputs)


def _begun(model: str, *, command: Command) -> dict[str, Any]:
    """The least that a scenario says, with the load that the command has where nobody gave one."""
    base: dict[str, Any] = {
        "name": _scenario_name(served_name(model)),
        "target": {"model": model},
        "request": {"protocol": "grpc", "rows": 1},
        "load": {"arrivals": "poisson"},
        "slo": {},
        "objective": "capacity",
    }
    if command in ("load", "compare"):
        base |= {"load": {"arrivals": "closed", "concurrency": CLIENTS}, "objective": "throughput"}
    if command == "compare":
        base["variants"] = {"no_batching": {"fixed": {"enable_batching": False}}, "batching": {}}
    return base


def _scenario(base: dict[str, Any], overrides: Sequence[str], *, model: str) -> Scenario:
    if _lacks_limit(base, overrides):
        raise UsageError(
            f"{model}: nothing says what is wanted: a capacity needs a limit",
            hint="give --slo-p95 20ms (the highest rate within it), --concurrency 32 (most requests/s of 32 clients), "
            "or --rate 500/s (the lowest latency at that rate)",
        )
    return parse_scenario(yaml.safe_dump(base, sort_keys=False), source=model, overrides=overrides)


def _lacks_limit(base: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a capacity is asked for, and no latency limit given that would end it."""
    merged = unchecked_scenario(ScenarioText(text=yaml.safe_dump(base), source="MODEL"), overrides=overrides)
    slo = merged.get("slo") or {}
    if not isinstance(slo, dict) or merged["objective"] != "capacity":
        return False
    return not any(slo.get(name) for name in slo if name != "errors")


def _likely_limit(lone_s: float) -> str:
    """Some ten times the latency of a lone request, in a round number."""
    steps_s = [step * 10.0**power for power in range(-3, 3) for step in (1.0, 2.0, 5.0)]
    return format_duration(next((step_s for step_s in steps_s if step_s >= 10.0 * lone_s), steps_s[-1]))


def _tried(endpoint: Any, signature: Signature, scenario: Scenario, *, batched: bool) -> FirstTries:
    check_names(signature, scenario.request.shapes, key="--shape")
    return first_tries(endpoint, signature, scenario.request, batched=batched)


def _refuse_other_transport(address: Address, protocol: Protocol) -> None:
    if (transport_of(protocol) == "grpc") == (address.grpc_url is not None):
        return
    option = "--rest" if protocol == "rest" else f"--set request.protocol={protocol}"
    raise UsageError(
        f"{address.grpc_url or address.rest_url}: speaks {address.protocol}, not {protocol}",
        hint=f"leave out {option}, or give the server's port for {protocol}",
    )


def _completed(
    base: dict[str, Any],
    overrides: Sequence[str],
    scenario: Scenario,
    signature: Signature,
    tries: FirstTries,
    *,
    searched: bool,
) -> LookedAt:
    """The scenario with what was guessed and, for a sweep, proposed, laid under what was given."""
    request: dict[str, Any] = dict(base["request"])
    if tries.shapes:
        request["shapes"] = {name: list(sizes) for name, sizes in tries.shapes.items()}
    if tries.ranges:
        by_input = {name: _limits(limits) for name, limits in tries.ranges.items()}
        request["inputs"] = {"random": {"by_input": by_input}}
    document = {**base, "request": request}
    if searched:
        rows = TIMES_LARGER * scenario.request.rows
        parts = proposed(scenario, _pace(scenario, tries))
        if tries.refusal is not None and "space" in parts["search"]:
            sizes = parts["search"]["space"]["max_batch_size"]
            parts["search"]["space"]["max_batch_size"] = [size for size in sizes if size < rows]
        if scenario.target.kind == "triton":
            parts.pop("fixed")  # it keeps as many requests as come
        document = {**document, "load": {**base["load"], **parts.pop("load")}, **parts}
    text = ScenarioText(text=yaml.safe_dump(document, sort_keys=False), source=scenario.name)
    merged = _without_nothing(unchecked_scenario(text, overrides=overrides))
    return LookedAt(document=merged, signature=signature, tries=tries, notes=tuple(_notes(signature, tries)))


def _notes(signature: Signature, tries: FirstTries) -> Iterable[str]:
    if tries.refusal is not None:
        rows = TIMES_LARGER * tries.request.rows
        yield f"{rows} rows at once are refused, smaller batches are looked at: {' '.join(tries.refusal.split())}"
    for spec in signature.inputs:
        name = spec.name
        if name in tries.shapes:
            sizes = "x".join(map(str, tries.shapes[name]))
            sent = f"{sizes or 'one value'} a row (--shape {name}={sizes or 128})"
            yield f"{name}: the model leaves {_shape(spec)} open; sent is {sent}"
        if name in tries.ranges:
            low, high = (int(limit or 0) for limit in (tries.ranges[name].low, tries.ranges[name].high))
            values = f"{low} only" if high == low + 1 else f"whole numbers from {low} to {high - 1}"
            yield f"{name}: {values} (--range {name}=0:20000 for a vocabulary of 20,000)"
        if spec.dtype == "object" and tries.request.inputs != "zeros" and not tries.recorded:
            yield f"{name}: 16 random letters (recorded requests: --set request.inputs.file=FILE)"


def _limits(limits: RandomRange) -> dict[str, Any]:
    return {"low": int(limits.low or 0), "high": int(limits.high or 0), "whole": True}


def _without_nothing(document: dict[str, Any]) -> dict[str, Any]:
    """Without keys that say nothing: null, and sections that are empty."""
    kept = {
        key: _without_nothing(value) if isinstance(value, dict) and key != "variants" else value
        for key, value in document.items()
    }
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _scenario_name(name: str) -> str:
    """Of letters, digits, dots, - and _, as the folder of its runs."""
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name
    )
    return plain.strip("._-") or "model"


def _dtype(spec: TensorSpec) -> str:
    return "string" if spec.dtype == "object" else spec.dtype


def _shape(spec: TensorSpec) -> str:
    if spec.shape is None:
        return "of any rank"
    return f"[{', '.join('?' if size is None else str(size) for size in spec.shape)}]"


# What the argument of a command means.


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Where the scenario is read, and what to lay over it."""

    source: Path | ScenarioText
    overrides: list[str]


def subject_of_sweep(
    argument: str,
    overrides: Sequence[str],
    *,
    rate: str | None,
    concurrency: str | None,
    batching_file: Path | None = None,
    server: str | None = None,
    resume: Path | None,
    quiet: bool,
) -> Subject:
    """The scenario of a sweep; with `server` that of a server's preset, for the app that is the argument.

    Raises:
        UsageError: neither a scenario nor a model; a server that runs already.
        TargetError: a model that does not serve.
    """
    if server is not None:
        text = ScenarioText(text=server_scenario(server, argument), source=f"--server {server}")
        loop = loop_overrides(unchecked_scenario(text).get("load", {}), rate=rate, concurrency=concurrency)
        return _with_file(Subject(source=text, overrides=[*overrides, *loop]), batching_file, searched=True)
    if resume is not None and kind_of(argument) != "scenario":
        raise UsageError(
            "--resume goes on with the scenario of the run, not with a model",
            hint=f"batchtune sweep {resume / SCENARIO} --resume {resume}",
        )
    _check_file(batching_file)
    subject = _subject(argument, overrides, command="sweep", rate=rate, concurrency=concurrency, quiet=quiet)
    return _with_file(subject, batching_file, searched=True)


def subject_of_comparison(
    argument: str,
    overrides: Sequence[str],
    *,
    rate: str | None,
    concurrency: str | None,
    no_batching: bool,
    batching_file: Path | None = None,
    quiet: bool,
) -> Subject:
    """The scenario of a comparison; a bare model has no variants but with and without batching.

    Raises:
        UsageError: as `subject_of_sweep`; a model without `--no-batching`, or a scenario with it.
        TargetError: a model that does not serve.
    """
    is_scenario = kind_of(argument) == "scenario"
    if is_scenario and no_batching:
        raise UsageError(
            "--no-batching is for a model alone; a scenario names its variants",
            hint="add to its variants: no_batching: {fixed: {enable_batching: false}}",
        )
    if kind_of(argument) == "model" and not no_batching:
        raise UsageError(
            f"{argument}: a model alone has no variants",
            hint="give --no-batching to compare with and without batching, or a scenario with variants",
        )
    _check_file(batching_file)
    subject = _subject(
        argument, overrides, command="compare", rate=rate, concurrency=concurrency, quiet=quiet
    )
    return _with_file(subject, batching_file, searched=False)


def subject_of_load(argument: str, wanted: LoadRequest, *, quiet: bool) -> LoadRequest:
    """The request with its scenario; that of an address names the server that is loaded.

    Raises:
        UsageError: neither a scenario, nor a model, nor an address.
        TargetError: a model that does not serve, or a server that does not answer.
    """
    kind = kind_of(argument)
    if kind == "scenario":
        return replace(wanted, scenario=scenario_source(argument))
    if wanted.rest_url or wanted.grpc_url:
        raise UsageError(
            f"{argument}: --rest-url and --grpc-url go with a scenario",
            hint="give the address in the argument's place: batchtune load HOST:PORT/MODEL",
        )
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    _check_file(wanted.batching_parameters_file)
    _, overrides = split_settings(wanted.overrides)
    overrides += loop_of_model(overrides, command="load", rate=wanted.rate, concurrency=wanted.concurrency)
    if kind == "model":
        looked = looked_at(
            argument,
            lambda say: look_at(argument, overrides, command="load", say=say, batched=not wanted.no_batching),
            quiet=quiet,
        )
        return replace(wanted, scenario=looked.text(argument))
    running = preset_at(argument)
    if running is not None:
        return replace(wanted, scenario=ScenarioText(text=running.scenario(), source=argument))
    address = answering_at(argument)
    looked = looked_at(argument, lambda _say: look_at_running(address, overrides), quiet=quiet)
    return replace(
        wanted, scenario=looked.text(argument), rest_url=address.rest_url, grpc_url=address.grpc_url
    )


def _check_file(batching_file: Path | None) -> None:
    """A mistake in the file is told before a model is looked at."""
    if batching_file is not None:
        read_batching_file(batching_file)


def _with_file(subject: Subject, batching_file: Path | None, *, searched: bool) -> Subject:
    if batching_file is None:
        return subject
    source = with_file(subject.source, subject.overrides, batching_file, searched=searched)
    return Subject(source=source, overrides=[])


def _subject(
    argument: str,
    overrides: Sequence[str],
    *,
    command: Command,
    rate: str | None,
    concurrency: str | None,
    quiet: bool,
) -> Subject:
    refuse_both(rate=rate, concurrency=concurrency)
    refuse_range(rate=rate, concurrency=concurrency)
    kind = kind_of(argument)
    if kind == "address":
        return _attached(
            argument, overrides, command=command, rate=rate, concurrency=concurrency, quiet=quiet
        )
    if kind == "scenario":
        source = scenario_source(argument)
        load = unchecked_scenario(source, overrides=overrides).get("load")
        loop = loop_overrides(load if isinstance(load, dict) else {}, rate=rate, concurrency=concurrency)
        return Subject(source=source, overrides=[*overrides, *loop])
    loop = loop_of_model(overrides, command=command, rate=rate, concurrency=concurrency)
    laid_over = [*overrides, *loop]
    looked = looked_at(
        argument,
        lambda say: look_at(argument, laid_over, command=command, say=say),
        quiet=quiet,
        command=command,
    )
    return Subject(source=looked.text(argument), overrides=[])


def _attached(
    argument: str,
    overrides: Sequence[str],
    *,
    command: Command,
    rate: str | None,
    concurrency: str | None,
    quiet: bool,
) -> Subject:
    """The sweep of a server that runs, and that takes parameters through its address."""
    if command != "sweep":
        raise UsageError(
            f"{argument}: a {command} launches its own server",
            hint=f"`batchtune load {argument}` measures it as it is; `batchtune {command} MODEL_DIR` tries others",
        )
    running = preset_at(argument)
    if running is not None:
        text = ScenarioText(text=running.scenario(), source=argument)
        loop = loop_overrides(unchecked_scenario(text).get("load", {}), rate=rate, concurrency=concurrency)
        return Subject(source=text, overrides=[*overrides, *loop])
    address = answering_at(argument)
    target = attachable(address)
    if target is None:
        raise UsageError(
            f"{argument}: this server takes no parameters through its address",
            hint=f"`batchtune load {argument}` measures it as it is; a running server of another kind takes "
            "parameters by a scenario of kind: http (target.set.request)",
        )
    laid_over = [*overrides, *loop_of_model(overrides, command=command, rate=rate, concurrency=concurrency)]
    looked = looked_at(
        argument,
        lambda _say: look_at_running(address, laid_over, command="sweep", target=target),
        quiet=quiet,
        command=command,
    )
    return Subject(source=looked.text(argument), overrides=[])


def looked_at(
    argument: str,
    look: Callable[[Callable[[str], None]], LookedAt],
    *,
    quiet: bool,
    command: Command = "load",
) -> LookedAt:
    """The model, with what was found and guessed said on stderr."""
    with sweep_view(quiet=quiet) as view:
        try:
            looked = look(view.event)
        except KeyboardInterrupt:
            print("interrupted before the first trial", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        view.event(f"{inputs_of(looked.signature)}; {speed_of(looked.tries)}")
        for note in looked.notes:
            view.event(note)
        if command == "sweep":
            scenario = parse_scenario(looked.text(argument).text, source=argument)
            view.event(wants_of(scenario))
            shortage = shortage_of(scenario, looked.tries)
            if shortage is not None:
                view.event(shortage)
    return looked
