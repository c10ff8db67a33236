"""Against what is every choice compared? No batching, the server's defaults, the throughput × interval rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.batching.triton_config import configuration_as_found
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.batching_off import can_be_off
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.rule_formula import RuleAnswer, throughput_interval_rule
from batchtune.tune.trials.trial import RULE_PROBES, Ask, Source, Trial


def reference_configurations(scenario: Scenario) -> dict[Source, Configuration]:
    """No batching where the server can be told so, and its own defaults; with the scenario's fixed server flags.

    Of a Triton the defaults are what the model's configuration says, with `dynamic_batching { }` where it has none.
    """
    flags = scenario.fixed_flags
    original = scenario.target.found
    if original is not None:
        unbatched = replace(original, dynamic_batching=False)
        return {
            "no_batching": configuration_as_found(unbatched, flags=flags, batching=False),
            "defaults": configuration_as_found(original, flags=flags),
        }
    defaults: dict[Source, Configuration] = {
        "defaults": Configuration(batching=BatchingParameters(), flags=flags)
    }
    if not can_be_off(scenario.target):
        return defaults
    return {"no_batching": Configuration(batching=None, flags=flags), **defaults}


def reference_asks(outlook: Outlook) -> dict[Source, Ask]:
    """What asks for each of them once."""
    reasons: dict[Source, str] = {
        "no_batching": "reference point: batching off",
        "defaults": "reference point: the server's own defaults",
    }
    return {
        source: Ask(
            configuration=configuration,
            source=source,
            reason=reasons[source],
            point=outlook.space.locate(configuration),
        )
        for source, configuration in reference_configurations(outlook.scenario).items()
    }


def one_by_one(scenario: Scenario) -> Configuration:
    """No batching; where the server cannot be told so, batches of one request that wait for no other.

    As many of those may wait as a probe of the rule has clients.
    """
    alone = reference_configurations(scenario).get("no_batching")
    if alone is not None:
        return alone
    batching = BatchingParameters(
        max_batch_size=scenario.request.rows_most,
        batch_timeout_micros=0,
        max_enqueued_batches=policy.SATURATING_CLIENTS,
    )
    return Configuration(batching=batching, flags=scenario.fixed_flags)


def reference_points(outlook: Outlook) -> Strategy:
    """No batching (see `reference_configurations`), what the rule needs and its answer, the server's defaults."""
    asks = reference_asks(outlook)
    if "no_batching" in asks:
        yield asks["no_batching"]
    yield from rule_probes(outlook)
    rule = rule_ask(outlook)
    if rule is not None:
        yield rule
    yield asks["defaults"]


def rule_probes(outlook: Outlook) -> Strategy:
    """What the rule needs to know: the latency of a lone request and, in an open loop, the throughput unbatched.

    Where nodes were compared they were by just these loads.
    """
    if outlook.nodes:
        return
    lone = one_by_one(outlook.scenario)

    def ask(clients: int, what: str) -> Ask:
        return Ask(
            configuration=lone,
            source="probe",
            reason=f"for the rule: {what}",
            concurrency=clients,
            duration_s=policy.RULE_PROBE_S,
        )

    yield ask(1, "latency of a lone request")
    if outlook.scenario.load.open_loop:
        yield ask(saturating_clients(outlook.pace.lone_s), "throughput one by one")


def saturating_clients(lone_s: float) -> int:
    """Clients that keep a device busy without batching, which answers one of them in so many seconds (NaN: unknown)."""
    turns = policy.SATURATING_TURN_S / lone_s if lone_s > 0.0 else math.inf
    return int(min(policy.SATURATING_CLIENTS, max(turns, policy.SATURATING_CLIENTS_MIN)))


def rule_ask(outlook: Outlook) -> Ask | None:
    """The rule's answer, where the probes give one that goes with what is fixed and fits into memory."""
    scenario, space = outlook.scenario, outlook.space
    answer = rule_answer(scenario, outlook.trials)
    if answer is None:
        return None
    configuration = _overlaid(scenario, answer.point)
    if configuration is None or space.is_barred(configuration):
        return None
    point = space.locate(configuration)
    outside = "" if point else " (outside the search space)"
    return Ask(configuration=configuration, source="rule", reason=f"{answer.explain()}{outside}", point=point)


def rule_answer(scenario: Scenario, trials: Sequence[Trial]) -> RuleAnswer | None:
    """What the rule says of its probes; None when they are missing or tell nothing."""
    lone = _probe(trials, lone=True)
    busy = _probe(trials, lone=False) if scenario.load.open_loop else _last(trials, "no_batching")
    if lone is None or busy is None or lone.measurement is None or busy.measurement is None:
        return None
    rows_per_s = busy.measurement.throughput_rows_per_s.value
    lone_latency_s = lone.measurement.latency_s["p50"].value
    if not (math.isfinite(rows_per_s) and math.isfinite(lone_latency_s)):
        return None
    return throughput_interval_rule(
        rows_per_s=rows_per_s,
        lone_latency_s=lone_latency_s,
        limits=scenario.slo.limits(),
        rows_per_request=scenario.request.rows_most,
    )


def rule_without_waiting(outlook: Outlook) -> tuple[Configuration, dict[str, Any]] | None:
    """The rule's size with a timeout of 0, where the space has it: behind a busy device batches grow unasked."""
    answer = rule_answer(outlook.scenario, outlook.trials)
    if answer is None:
        return None
    point = outlook.space.nearest({"max_batch_size": answer.max_batch_size, "batch_timeout_micros": 0})
    configuration = outlook.space.configuration(point)
    return None if configuration is None else (configuration, point)


def _overlaid(scenario: Scenario, wanted: dict[str, Any]) -> Configuration | None:
    point = {name: value for name, value in wanted.items() if name not in scenario.fixed}
    try:
        return scenario.configuration(point)
    except BatchingParametersError:  # what is fixed does not go with it
        return None


def _probe(trials: Sequence[Trial], *, lone: bool) -> Trial | None:
    probes = (trial for trial in trials if trial.source in RULE_PROBES and trial.state == "complete")
    return next((probe for probe in probes if (probe.asked_concurrency == 1) is lone), None)


def _last(trials: Sequence[Trial], source: Source) -> Trial | None:
    return next((trial for trial in reversed(trials) if trial.source == source), None)
