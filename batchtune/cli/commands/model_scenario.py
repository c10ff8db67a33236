"""Makes what `sweep`, `load` and `compare` run: the scenario that they are given, or one for a bare model or server."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from batchtune.archive.run import SCENARIO
from batchtune.batching.formats import read_batching_file
from batchtune.batching.parameters import Configuration
from batchtune.cli.arguments.load_request import (
    loop_overrides,
    refuse_both,
    refuse_range,
    split_settings,
)
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.arguments.overrides import kind_of, model_of, scenario_source, with_file
from batchtune.errors import INTERRUPTED, TargetError, UsageError
from batchtune.load.first_tries import TIMES_LARGER, FirstTries, first_tries
from batchtune.report.live_view import sweep_view
from batchtune.scenario.examples import server_scenario
from batchtune.scenario.reader import ScenarioText, parse_scenario, section_of, unchecked_scenario
from batchtune.scenario.recordings import check_names, shown_shape
from batchtune.scenario.spec.check import limit_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.scenario.spec.workload import RandomRange, transport_of
from batchtune.target.address import Address, answering_at, attachable, language_model_at, preset_at
from batchtune.target.choice import placed, target_of
from batchtune.target.external import ExternalTarget
from batchtune.target.model_files import served_name
from batchtune.tune.trials.pace import proposed, tried_pace, usual_budget_s
from batchtune.units import counted, format_duration, rounded_duration
from batchtune.wire.signature import Signature, TensorSpec

Command = Literal["sweep", "load", "compare", "init"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """A model that answered a few requests, and the scenario that was made for it.

    `document`: the scenario as plain data. `tries`: what was sent and how fast it was answered. `notes`: a
    line on each guess, with the option that changes it. `guessed_limit`: the SLO is a guess too.
    """

    document: dict[str, Any]
    signature: Signature
    tries: FirstTries
    notes: tuple[str, ...]
    guessed_limit: bool = False

    def text(self, source: str) -> ScenarioText:
        """Return the scenario as YAML, as if it had been read from the file `source`."""
        return ScenarioText(text=yaml.safe_dump(self.document, sort_keys=False), source=source)


def look_at(
    subject: str | Address,
    overrides: Sequence[str],
    *,
    command: Command,
    say: Callable[[str], None] = lambda _text: None,
    live: Callable[[str], None] = lambda _text: None,
    batched: bool = True,
    target: Mapping[str, Any] | None = None,
) -> LookedAt:
    """Send a model a few requests, and make a scenario of what it answered: a bare model, for which a server is
    launched, or, given an address, the model of a running server.

    `overrides`: `KEY=VALUE` from the options. `say`: is called with each line of progress, `live` with what is sent
    next. `batched` False: the model may refuse the rows of several requests at once. `target`: keys of `target` for a
    running server that takes parameters, which a sweep searches; None: it is loaded as it is, whatever `command` is.
    For `init` without a limit, the limit is guessed from how fast the answers were.

    Raises:
        UsageError: no such model, or options that contradict each other or the model.
        TargetError: the server does not start, nobody answers, or the model refuses a request.
    """
    address = subject if isinstance(subject, Address) else None
    model = model_of(subject) if isinstance(subject, str) else subject.model
    command = "load" if address is not None and target is None else command
    base = _begun(model, command=command)
    if address is not None:
        base["request"]["protocol"] = address.protocol
        base["target"] |= target or {}
    guessed_limit = command == "init" and _lacks_limit(base, overrides)
    if guessed_limit:
        base["slo"] = {"p95": "1s"}  # until it is known how fast the model is
    name = str(subject) if address is None else model
    scenario, _ = placed(_scenario(base, overrides, model=name))
    if address is None:
        say(f"inspecting {name}: launching the server")
        signature, tries = _launched_tries(scenario, say=say, batched=batched, live=live)
    else:
        signature, tries = _running_tries(address, scenario, batched=batched, live=live)
    if guessed_limit:
        base["slo"] = {"p95": _likely_limit(tries.lone_s)}
        scenario, _ = placed(_scenario(base, overrides, model=name))
    request: dict[str, Any] = dict(base["request"])
    if tries.shapes:
        request["shapes"] = {name: list(sizes) for name, sizes in tries.shapes.items()}
    if tries.ranges:
        by_input = {name: _limits(limits) for name, limits in tries.ranges.items()}
        request["inputs"] = {"random": {"by_input": by_input}}
    document = {**base, "request": request}
    if target is not None or (address is None and command in ("sweep", "init")):
        document |= _search_of(scenario, tries, load=base["load"])
    text = ScenarioText(text=yaml.safe_dump(document, sort_keys=False), source=scenario.name)
    return LookedAt(
        document=_without_nothing(unchecked_scenario(text, overrides=overrides)),
        signature=signature,
        tries=tries,
        notes=tuple(_notes(signature, tries)),
        guessed_limit=guessed_limit,
    )


def _launched_tries(
    scenario: Scenario, *, say: Callable[[str], None], batched: bool, live: Callable[[str], None]
) -> tuple[Signature, FirstTries]:
    with target_of(scenario, on_event=say) as target:
        target.apply(Configuration(batching=None))
        signature = target.signature(scenario.request.signature)
        try:
            return signature, _tried(target.endpoint, signature, scenario, batched=batched, live=live)
        except TargetError as error:
            if target.alive():
                raise
            raise TargetError(
                f"{error.message}; the server died of it:\n{target.log_tail()}", hint=error.hint
            ) from error


def _running_tries(
    address: Address, scenario: Scenario, *, batched: bool, live: Callable[[str], None]
) -> tuple[Signature, FirstTries]:
    protocol = scenario.request.protocol
    if (transport_of(protocol) == "grpc") != (address.grpc_url is not None):
        option = "--rest" if protocol == "rest" else f"--set request.protocol={protocol}"
        raise UsageError(
            f"{address.grpc_url or address.rest_url}: speaks {address.protocol}, not {protocol}",
            hint=f"leave out {option}, or give the server's port for {protocol}",
        )
    server = ExternalTarget(address.endpoint(), kserve=address.protocol.startswith("kserve_"))
    try:
        signature = server.signature(scenario.request.signature)
    except TargetError as error:
        hint = f"is {address.model} the name under which that server serves it, and has it been loaded?"
        raise TargetError(error.message, hint=error.hint or hint) from error
    return signature, _tried(server.endpoint, signature, scenario, batched=batched, live=live)


def loop_of_model(
    overrides: Sequence[str], *, command: Command, rate: str | None, concurrency: str | None
) -> list[str]:
    """Return the `KEY=VALUE` overrides for --rate or --concurrency over the default load of `command` for a bare
    model.

    Raises:
        UsageError: as `loop_overrides`.
    """
    begun = ScenarioText(text=yaml.safe_dump(_begun("model", command=command)), source="MODEL")
    load = section_of(unchecked_scenario(begun, overrides=overrides), "load")
    loop = loop_overrides(load, rate=rate, concurrency=concurrency)
    return loop if rate is None else ["load.concurrency=null", *loop]


def wants_of(scenario: Scenario) -> str:
    """Return a line that says what a sweep of this scenario looks for, and which option decided that."""
    limits = ", ".join(limit_words(name, limit) for name, limit in scenario.slo.limits().items())
    within = f" within {limits}" if limits else ""
    load = scenario.load
    match scenario.objective:
        case "capacity":
            return f"goal: the highest rate{within} (--concurrency N: most requests/s of N clients)"
        case "throughput":
            clients = counted(load.concurrency or 0, "client")
            return f"goal: most requests/s of {clients}{within} (--concurrency)"
        case "latency":
            rate = f"the rates of its {load.arrivals}" if load.rate_rps is None else f"{load.rate_rps:g}/s"
            return f"goal: the lowest latency at {rate}{within} (--rate)"


def shortage_of(scenario: Scenario, tries: FirstTries) -> str | None:
    """Return a warning where the time budget is less than half of what a sweep of so slow a model usually takes; else
    None."""
    given_s, sure_s = scenario.search.budget.time_s, usual_budget_s(tries.lone_s)
    if given_s is None or given_s >= 0.5 * sure_s or sure_s == DEFAULT_TIME_BUDGET_S:
        return None
    needed = format_duration(math.ceil(sure_s))
    return (
        f"a request takes {rounded_duration(tries.lone_s)}: {rounded_duration(given_s)} allow few runs; "
        f"for a confirmed answer give --budget {needed}"
    )


def speed_of(tries: FirstTries) -> str:
    """Describe how fast the model answered: `1 row answered in 1.2 ms, 8 rows at once in 3.4 ms`."""
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
    """Describe the model's inputs: `x float32 [?, 28, 28], mask int32 [?, ?]`."""
    types = {"object": "string"}
    return ", ".join(
        f"{spec.name} {types.get(spec.dtype, spec.dtype)} {_shape(spec)}" for spec in signature.inputs
    )


def _begun(model: str, *, command: Command) -> dict[str, Any]:
    """Return the first draft of a bare model's scenario, with the load that the command has by default."""
    base: dict[str, Any] = {
        "name": _scenario_name(served_name(model)),
        "target": {"model": model},
        "request": {"protocol": "grpc", "rows": 1},
        "load": {"arrivals": "poisson"},
        "slo": {},
        "objective": "capacity",
    }
    if command in ("load", "compare"):
        base |= {"load": {"arrivals": "closed", "concurrency": 32}, "objective": "throughput"}
    if command == "compare":
        base["variants"] = {"no_batching": {"fixed": {"enable_batching": False}}, "batching": {}}
    return base


def _scenario(base: dict[str, Any], overrides: Sequence[str], *, model: str) -> Scenario:
    """Read the draft `base` with the overrides as a scenario.

    Raises:
        UsageError: there is no goal: no limit, no rate, no clients.
    """
    if _lacks_limit(base, overrides):
        raise UsageError(
            f"{model}: no goal: a capacity needs a latency limit",
            hint="give --slo-p95 20ms (the highest rate within it), --concurrency 32 (most requests/s of 32 clients), "
            "or --rate 500/s (the lowest latency at that rate)",
        )
    return parse_scenario(yaml.safe_dump(base, sort_keys=False), source=model, overrides=overrides)


def _lacks_limit(base: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the draft with the overrides has objective capacity, but no latency limit."""
    merged = unchecked_scenario(ScenarioText(text=yaml.safe_dump(base), source="MODEL"), overrides=overrides)
    slo = merged.get("slo") or {}
    if not isinstance(slo, dict) or merged["objective"] != "capacity":
        return False  # what is no SLO the reader says
    return not any(slo.get(name) for name in slo if name != "errors")


def _likely_limit(lone_s: float) -> str:
    """Return a latency limit, such as `20ms`, of about ten times that of a lone request, `lone_s` seconds."""
    steps_s = [step * 10.0**power for power in range(-3, 3) for step in (1.0, 2.0, 5.0)]
    return format_duration(next((step_s for step_s in steps_s if step_s >= 10.0 * lone_s), steps_s[-1]))


def _tried(
    endpoint: Any, signature: Signature, scenario: Scenario, *, batched: bool, live: Callable[[str], None]
) -> FirstTries:
    """Send the first requests to the model, after a check that --shape names inputs that it has."""
    check_names(signature, scenario.request.shapes, key="--shape")
    return first_tries(endpoint, signature, scenario.request, batched=batched, live=live)


def _search_of(scenario: Scenario, tries: FirstTries, *, load: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that a sweep of this model needs, `search`, `fixed` and `load`, with times that fit
    its speed."""
    larger_s = tries.lone_s * TIMES_LARGER if tries.larger_s is None else tries.larger_s
    larger_rows = TIMES_LARGER * scenario.request.rows
    pace = tried_pace(scenario, lone_s=tries.lone_s, larger_s=larger_s, larger_rows=larger_rows)
    parts = proposed(scenario, pace)
    if tries.refusal is not None and "space" in parts["search"]:
        sizes = parts["search"]["space"]["max_batch_size"]
        parts["search"]["space"]["max_batch_size"] = [size for size in sizes if size < larger_rows]
    if scenario.target.kind == "triton":
        parts.pop("fixed")  # it keeps as many requests as come
    return {**parts, "load": {**load, **parts["load"]}}


def _notes(signature: Signature, tries: FirstTries) -> Iterable[str]:
    """Yield a line on each thing that was guessed, with the option that changes it, and on what the model
    refused."""
    if tries.refusal is not None:
        rows = TIMES_LARGER * tries.request.rows
        yield f"{rows} rows at once are refused; trying smaller batches: {' '.join(tries.refusal.split())}"
    for spec in signature.inputs:
        name = spec.name
        if name in tries.shapes:
            sizes = "x".join(map(str, tries.shapes[name]))
            sent = f"{sizes or 'one value'} a row (--shape {name}={sizes or 128})"
            yield f"{name}: the model leaves {_shape(spec)} open; sent is {sent}"
        if name in tries.ranges:
            low, high = (int(limit or 0) for limit in (tries.ranges[name].low, tries.ranges[name].high))
            values = f"{low} only" if high == low + 1 else f"whole numbers from {low} to {high - 1}"
            # A mask or a type has no vocabulary.
            more = "0:20000 for a vocabulary of 20,000" if high > 2 else "LOW:HIGH for other values"
            yield f"{name}: {values} (--range {name}={more})"
        if spec.dtype == "object" and tries.request.inputs != "zeros" and not tries.recorded:
            yield f"{name}: 16 random letters (recorded requests: --set request.inputs.file=FILE)"


def _limits(limits: RandomRange) -> dict[str, Any]:
    return {"low": int(limits.low or 0), "high": int(limits.high or 0), "whole": True}


def _without_nothing(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without keys whose value is null or an empty section."""
    kept = {
        key: _without_nothing(value) if isinstance(value, dict) and key != "variants" else value
        for key, value in document.items()
    }
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _scenario_name(name: str) -> str:
    """Return the name with only letters, digits, dots, `-` and `_`, because it names a folder."""
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name
    )
    return plain.strip("._-") or "model"


def _shape(spec: TensorSpec) -> str:
    return "of any rank" if spec.shape is None else shown_shape(spec.shape)


# What the argument of a command means.


def subject_of_sweep(
    argument: str,
    wanted: LoadRequest,
    *,
    server: str | None = None,
    resume: Path | None = None,
) -> LoadRequest:
    """Return the request with the scenario of a sweep, found or made for the command's argument.

    `server`: name of a known server of which the argument is an app. `resume`: the run to resume.

    Raises:
        UsageError: neither a scenario nor a model, or a running server that takes no parameters.
        TargetError: a model that does not serve.
    """
    if server is None and resume is not None and kind_of(argument) != "scenario":
        raise UsageError(
            "--resume continues with the scenario of the run, not with a model",
            hint=f"batchtune sweep {resume / SCENARIO} --resume {resume}",
        )
    _check_loop_and_file(wanted)
    if server is not None:
        text = ScenarioText(text=server_scenario(server, argument), source=f"--server {server}")
        return _with_file(with_loop(wanted, text), searched=True)
    return _with_file(_subject(argument, wanted, command="sweep"), searched=True)


def subject_of_comparison(argument: str, wanted: LoadRequest) -> LoadRequest:
    """Return the request with the scenario of a comparison; a bare model has two variants, with and without
    batching.

    Raises:
        UsageError: as `subject_of_sweep`; a model without `--no-batching`, or a scenario with it.
        TargetError: a model that does not serve.
    """
    kind = kind_of(argument)
    if kind == "scenario" and wanted.no_batching:
        raise UsageError(
            "--no-batching is for a model alone; a scenario names its variants",
            hint="add to its variants: no_batching: {fixed: {enable_batching: false}}",
        )
    if kind == "model" and not wanted.no_batching:
        raise UsageError(
            f"{argument}: a model alone has no variants",
            hint="give --no-batching to compare with and without batching, or a scenario with variants",
        )
    _check_loop_and_file(wanted)
    return _with_file(_subject(argument, wanted, command="compare"), searched=False)


def subject_of_load(argument: str, wanted: LoadRequest, *, server: str | None = None) -> LoadRequest:
    """Return the request with the scenario of a load test; an address as argument names the server that is
    loaded.

    `server`: name of a known server of which the argument is an app.

    Raises:
        UsageError: neither a scenario, nor a model, nor an address.
        TargetError: a model that does not serve, or a server that does not answer.
    """
    if server is not None:
        text = ScenarioText(text=server_scenario(server, argument), source=f"--server {server}")
        return replace(wanted, scenario=text)
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
    of_scenario = replace(wanted, overrides=overrides)
    if kind == "model":
        looked = look(argument, of_scenario, command="load", batched=not wanted.no_batching)
        return replace(wanted, scenario=looked.text(argument))
    running = preset_at(argument)
    if running is not None:
        return replace(wanted, scenario=ScenarioText(text=running, source=argument))
    language_model = scenario_of_language_model(argument)
    if language_model is not None:
        del language_model["slo"]  # a guess, and none was given
        running = yaml.safe_dump(language_model, sort_keys=False)
        return replace(wanted, scenario=ScenarioText(text=running, source=argument))
    address = answering_at(argument)
    looked = look(argument, of_scenario, command="load", address=address, batched=False)
    return replace(
        wanted, scenario=looked.text(argument), rest_url=address.rest_url, grpc_url=address.grpc_url
    )


def scenario_of_language_model(address: str) -> dict[str, Any] | None:
    """Return the scenario, as plain data, that `language_model_at` makes, with a name that a folder may have; None
    where it returns None.

    Raises:
        UsageError: as `language_model_at`.
    """
    document = language_model_at(address)
    return document and document | {"name": _scenario_name(served_name(document["name"]))}


def _check_loop_and_file(wanted: LoadRequest) -> None:
    """Check the load and the file of parameters, before time is spent on asking a model; one load is allowed.

    Raises:
        UsageError: a range of loads.
        BatchingParametersError: the file cannot be read.
    """
    refuse_range(rate=wanted.rate, concurrency=wanted.concurrency)
    _check_file(wanted.batching_parameters_file)


def _check_file(batching_file: Path | None) -> None:
    if batching_file is not None:
        read_batching_file(batching_file)


def _with_file(wanted: LoadRequest, *, searched: bool) -> LoadRequest:
    if wanted.batching_parameters_file is None:
        return wanted
    source = with_file(wanted.scenario, wanted.overrides, wanted.batching_parameters_file, searched=searched)
    return replace(wanted, scenario=source, overrides=())


def with_loop(wanted: LoadRequest, source: Path | ScenarioText) -> LoadRequest:
    """Return the request with the scenario `source`, and with the load of --rate or --concurrency among its overrides.

    Raises:
        UsageError: as `loop_overrides`.
        ScenarioError, UsageError: as `unchecked_scenario`.
    """
    load = section_of(unchecked_scenario(source, overrides=wanted.overrides), "load")
    loop = loop_overrides(load, rate=wanted.rate, concurrency=wanted.concurrency)
    return replace(wanted, scenario=source, overrides=[*wanted.overrides, *loop])


def _subject(argument: str, wanted: LoadRequest, *, command: Command) -> LoadRequest:
    """Return the request with the scenario that the argument means: read, or made for a bare model or a
    running server.

    Raises:
        UsageError: a running server that the command cannot use.
        TargetError: a model that does not serve.
    """
    kind = kind_of(argument)
    if kind == "scenario":
        return with_loop(wanted, scenario_source(argument))
    address: Address | None = None
    target: Mapping[str, Any] | None = None
    if kind == "address":
        if command != "sweep":
            raise UsageError(
                f"{argument}: a {command} launches its own server",
                hint=f"`batchtune load {argument}` measures it as it is; `batchtune {command} MODEL_DIR` tries others",
            )
        running = preset_at(argument)
        if running is not None:
            return with_loop(wanted, ScenarioText(text=running, source=argument))
        if language_model_at(argument) is not None:
            raise UsageError(
                f"{argument}: a server of a language model takes its parameters when it starts",
                hint=f"`batchtune load {argument}` measures it as it is; `batchtune sweep MODEL --server vllm` "
                "(sglang, transformers-serve) launches one and searches its parameters",
            )
        address = answering_at(argument)
        target = attachable(address)
        if target is None:
            raise UsageError(
                f"{argument}: this server takes no parameters through its address",
                hint=f"`batchtune load {argument}` measures it as it is; a running server of another kind takes "
                "parameters by a scenario of kind: http (target.set.request)",
            )
    looked = look(
        argument,
        wanted,
        command=command,
        address=address,
        target=target,
        batched=address is None,
    )
    return replace(wanted, scenario=looked.text(argument), overrides=())


def look(
    argument: str,
    wanted: LoadRequest,
    *,
    command: Command,
    batched: bool = True,
    address: Address | None = None,
    target: Mapping[str, Any] | None = None,
) -> LookedAt:
    """Send the model a few requests, and print what was found and guessed.

    The result, the arguments and the errors are those of `look_at`; Ctrl-C ends the process with exit code 130.
    """
    loop = loop_of_model(wanted.overrides, command=command, rate=wanted.rate, concurrency=wanted.concurrency)
    overrides = [*wanted.overrides, *loop]
    with sweep_view(quiet=wanted.quiet) as view:
        try:
            looked = look_at(
                address or argument,
                overrides,
                command=command,
                say=view.event,
                live=view.live,
                batched=batched,
                target=target,
            )
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
