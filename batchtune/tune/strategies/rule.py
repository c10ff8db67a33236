"""How is the throughput × interval rule carried through all its five steps, trial by trial?

Its first answer is a reference point (`references`); from there `rule_rounds` says what comes next. In a closed loop
every round is a trial under the scenario's own load, so each is a candidate. An open loop does not show the peak
throughput that the rule wants, so the rounds are short probes with as many clients as fill two batches, and the
parameters on which they settle are then measured under the scenario's own load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import rule_ask, rule_probes
from batchtune.tune.strategies.rule_rounds import Conclusion, Round, Step, next_step
from batchtune.tune.trials.ledger import without_superseded
from batchtune.tune.trials.out_of_memory import out_of_memory
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Ask, Trial

PROBE_REASON = "for the rule: peak throughput; "


def rule_strategy(outlook: Outlook) -> Strategy:
    """Measure the rule's answer and follow its advice to the fixed point, as far as time allows."""
    scenario = outlook.scenario
    first = _first_answer(outlook.trials)
    if first is None:
        yield from rule_probes(outlook)
        ask = rule_ask(outlook)
        if ask is None:
            return
        first = yield ask
    if scenario.load.open_loop:
        yield from _probed_rounds(outlook, first)
    else:
        yield from _measured_rounds(outlook, first)


def rule_conclusion(scenario: Scenario, trials: Sequence[Trial]) -> Conclusion | None:
    """The rule's verdict on what the ledger holds; None when it has tried nothing yet."""
    rounds = [_round_of(trial) for trial in _round_trials(scenario, without_superseded(trials))]
    if not rounds:
        return None
    step = next_step(
        rounds,
        rows_per_request=scenario.request.rows_most,
        rows_under_way=_rows_under_way(scenario),
        last=True,
    )
    return step if isinstance(step, Conclusion) else None


def _measured_rounds(outlook: Outlook, first: Trial) -> Strategy:
    rounds, tried = [_round_of(first)], {first.configuration}
    while len(rounds) < policy.RULE_ROUNDS_MAX:
        step = _step(outlook, rounds)
        ask = None if step is None else _candidate(outlook, step.max_batch_size, step.interval_s, step.reason)
        if ask is None or ask.configuration in tried or not outlook.may_propose():
            return
        tried.add(ask.configuration)
        rounds.append(_round_of((yield ask)))


def _probed_rounds(outlook: Outlook, first: Trial) -> Strategy:
    """Rounds by probes, then one trial of what they settle on, unless that was the first answer."""
    scenario = outlook.scenario
    ask: Ask | None = _probe(scenario, first.configuration, "the rule's first answer")
    rounds: list[Round] = []
    tried: set[Configuration] = set()
    while ask is not None and ask.configuration not in tried and outlook.may_propose(policy.RULE_PROBE_S):
        tried.add(ask.configuration)
        rounds.append(_round_of((yield ask)))
        step = _step(outlook, rounds) if len(rounds) < policy.RULE_ROUNDS_MAX else None
        ask = None if step is None else _probe_of(scenario, step)
    settled = _settled(outlook, rounds)
    if settled is not None and settled.configuration != first.configuration and outlook.may_propose():
        yield settled


def _settled(outlook: Outlook, rounds: Sequence[Round]) -> Ask | None:
    """The trial of what the rounds recommend; None when nothing works."""
    if not rounds:
        return None
    step = next_step(rounds, rows_per_request=outlook.scenario.request.rows_most, last=True)
    if not isinstance(step, Conclusion) or step.best is None:
        return None
    best = step.best
    return _candidate(outlook, best.max_batch_size, best.interval_s, f"the rule settles here: {step.text}")


def _step(outlook: Outlook, rounds: Sequence[Round]) -> Step | None:
    step = next_step(
        rounds,
        rows_per_request=outlook.scenario.request.rows_most,
        rows_under_way=_rows_under_way(outlook.scenario),
    )
    return step if isinstance(step, Step) else None


def _candidate(outlook: Outlook, max_batch_size: int, interval_s: float, reason: str) -> Ask | None:
    step = Step(max_batch_size=max_batch_size, interval_s=interval_s, reason=reason)
    configuration = _configuration(outlook.scenario, step)
    if configuration is None:
        return None
    point = outlook.space.locate(configuration)
    outside = "" if point else " (outside the search space)"
    return Ask(configuration=configuration, source="rule", reason=f"{reason}{outside}", point=point)


def _probe(scenario: Scenario, configuration: Configuration, why: str) -> Ask:
    requests = math.ceil(2 * in_force(configuration, "max_batch_size") / scenario.request.rows_most)
    return Ask(
        configuration=configuration,
        source="probe",
        reason=f"{PROBE_REASON}{why}",
        concurrency=min(max(requests, policy.SATURATING_CLIENTS), policy.PROBE_CLIENTS_MAX),
        duration_s=policy.RULE_PROBE_S,
    )


def _probe_of(scenario: Scenario, step: Step) -> Ask | None:
    configuration = _configuration(scenario, step)
    return None if configuration is None else _probe(scenario, configuration, step.reason)


def _configuration(scenario: Scenario, step: Step) -> Configuration | None:
    """What is fixed stays; None when the rest does not go with it."""
    wanted: dict[str, Any] = {
        "max_batch_size": step.max_batch_size,
        "batch_timeout_micros": round(step.interval_s * 1e6),
    }
    try:
        return scenario.configuration(
            {name: value for name, value in wanted.items() if name not in scenario.fixed}
        )
    except BatchingParametersError:
        return None


def _round_of(trial: Trial) -> Round:
    """The parameters in force and what they gave; a trial that failed in any way does not work."""
    failure = out_of_memory(trial) or (trial.failure if trial.state == "failed" else None)
    measured = trial.measurement
    rows_per_s = math.nan if failure is not None or measured is None else measured.throughput_rows_per_s.value
    if failure is None and not math.isfinite(rows_per_s):
        failure = "no throughput could be told"
    return Round(
        max_batch_size=in_force(trial.configuration, "max_batch_size"),
        interval_s=in_force(trial.configuration, "batch_timeout_micros") / 1e6,
        rows_per_s=rows_per_s,
        failure=failure,
    )


def _round_trials(scenario: Scenario, trials: Sequence[Trial]) -> list[Trial]:
    if scenario.load.open_loop:
        return [
            trial for trial in trials if trial.source == "probe" and trial.reason.startswith(PROBE_REASON)
        ]
    return [trial for trial in trials if trial.source == "rule"]


def _rows_under_way(scenario: Scenario) -> int | None:
    clients = scenario.load.concurrency
    return None if clients is None else clients * scenario.request.rows_most


def _first_answer(trials: Sequence[Trial]) -> Trial | None:
    return next((trial for trial in reversed(trials) if trial.source == "rule"), None)
