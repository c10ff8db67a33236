"""What weakens the answer: no fresh runs, better points outside, a timeout at half the load, a drifting host?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from batchtune.measure.statistics.distributions import Z_95
from batchtune.recommend.alternatives import Alternative
from batchtune.recommend.choice import Choice
from batchtune.recommend.prediction import predicted, predicted_latency
from batchtune.scenario.spec.batching_off import UNSAYABLE, can_be_off
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import counted, percentage
from batchtune.tune import policy
from batchtune.tune.evidence.host_drift import Drift
from batchtune.tune.evidence.pooled import Pooled, is_inside
from batchtune.tune.evidence.ranking import merit
from batchtune.tune.trials.ledger import measuring_s
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial

TIMEOUT: Final = "batch_timeout_micros"

WIDER_RATIO: Final = 1.25
"""An interval this much wider for the host's drift is worth a word."""


def may_promise(chosen: Pooled) -> bool:
    """Whether figures stand for the claim: a capacity that fresh runs did not keep promises nothing."""
    return chosen.claim is None or chosen.claim.established or not chosen.claim.misses


def notes_of(
    choice: Choice,
    unconfirmed: Sequence[Alternative],
    trials: Sequence[Trial],
    *,
    scenario: Scenario,
    promised: SloSpec,
) -> tuple[str, ...]:
    """What the choice and the time say against it."""
    chosen, notes = choice.chosen, []
    if chosen is None:
        return ()
    if not can_be_off(scenario.target):
        notes.append(f"nothing was compared with no batching: {UNSAYABLE}")
    if chosen.confirmations == 0 and may_promise(chosen):
        notes.append(
            f"not confirmed by fresh runs: the figures are from {counted(len(chosen.runs), 'run')} of the search, "
            "and the best of many such is often too good"
        )
    if not any(
        candidate.configuration.batching is not None and is_inside(candidate, scenario)
        for candidate in choice.pooled
    ):
        notes.append("no point of the search space was measured: the reference points took the time")
    if scenario.objective == "capacity" and promised != scenario.slo:
        notes.append("the capacity for an SLO that was not searched, read from the rates tried")
    if choice.outside is not None:
        notes.append(_outside(choice.outside, chosen, scenario=scenario))
    why = "no time was left to confirm it" if _is_time_spent(trials, scenario) else "it was not confirmed"
    notes += [
        f"{other.configuration.label()} seemed better in the search ({other.trade}); {why}"
        for other in unconfirmed
        if not other.confirmations
    ]
    return tuple(notes)


def half_load_notes(chosen: Pooled, search: SearchSummary | None, *, scenario: Scenario) -> tuple[str, ...]:
    """What the timeout costs at half the load; asks the twin, whose simulator takes its time to load."""
    if search is None or search.twin is None or not in_force(chosen.configuration, TIMEOUT):
        return ()
    from batchtune.recommend.half_load import at_half_load

    rate_rps = chosen.value if scenario.objective == "capacity" else None
    note = at_half_load(chosen.configuration, scenario, search.twin, rate_rps=rate_rps)
    return () if note is None else (note,)


def drift_notes(
    chosen: Pooled, pooled: Sequence[Pooled], ahead_sd: float, *, drift: Drift, scenario: Scenario
) -> tuple[str, ...]:
    """That it is the host that makes the interval wide, where it is; `ahead_sd` is that of `speed_ahead_sd`."""
    if scenario.load.open_loop:
        figure = "p95"
        wide, narrow = (
            predicted_latency(chosen, pooled, drift_sd=sd).get(figure) for sd in (drift.latency_sd, 0.0)
        )
    else:
        figure = "throughput"
        wide, narrow = (
            predicted(chosen, pooled, lambda run: run.throughput_rps, drift_sd=sd)
            for sd in (drift.rate_sd, 0.0)
        )
    if wide is None or narrow is None or not narrow.low > 0.0:
        return ()
    if not math.log(wide.high / wide.low) >= WIDER_RATIO * math.log(narrow.high / narrow.low):
        return ()
    note = (
        "the host drifts: by a fixed loop that every trial times, its speed minutes later may differ by "
        f"{percentage(math.expm1(Z_95 * ahead_sd))}, which makes a fresh run's {figure} uncertain by "
        f"{percentage(wide.half_width_ratio)} instead of {percentage(narrow.half_width_ratio)}"
    )
    return (note,)


def _is_time_spent(trials: Sequence[Trial], scenario: Scenario) -> bool:
    """Whether the time that was given left none for the fresh runs of one more configuration."""
    given_s = scenario.search.time_budget_s if scenario.search.budget_is_given else None
    runs_s = [trial.seconds for trial in trials if trial.source not in NO_CANDIDATES]
    if given_s is None or not runs_s:
        return False
    spent_s = measuring_s(trials)
    return spent_s + policy.CONFIRMATIONS * statistics.median(runs_s) > given_s


def _outside(outside: Pooled, chosen: Pooled, *, scenario: Scenario) -> str:
    ahead = percentage(math.expm1(merit(outside.value, scenario) - merit(chosen.value, scenario)))
    what = {"throughput": "throughput", "capacity": "capacity", "latency": "speed at p95"}[scenario.objective]
    return f"outside your space: {outside.configuration.label()}, {ahead} more {what}"
