"""What of an ask and of the sweep so far makes the plan of a trial, and what of a node's speed enters its trial?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.bench import Plan
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Ask, Trial


def plan_of(
    ask: Ask,
    *,
    number: int,
    repeat_of: int | None,
    scenario: Scenario,
    space: Space,
    pace: Pace,
    budget_s: float,
    best: Trial | None,
) -> Plan:
    """The plan of the trial that answers an ask; `best` leads so far."""
    return Plan(
        number=number,
        configuration=ask.configuration,
        source=ask.source,
        reason=ask.reason,
        expected=ask.expected,
        seed=scenario.load.seed + policy.SEED_STRIDE * (ask.block or 0),
        point=ask.point if ask.point is not None else space.locate(ask.configuration),
        block=ask.block,
        node=ask.node,
        concurrency=ask.concurrency,
        duration_s=ask.duration_s,
        rate_rps=ask.rate_rps,
        hint_rps=_hint_rps(ask, scenario, best),
        repeat_of=repeat_of,
        pace=pace,
        budget_s=budget_s,
    )


def _hint_rps(ask: Ask, scenario: Scenario, best: Trial | None) -> float | None:
    """Where the search for a capacity begins: at the incumbent's, but for the reference points."""
    if ask.hint_rps is not None or scenario.objective != "capacity":
        return ask.hint_rps
    if ask.source in ("no_batching", "defaults") or best is None or best.objective is None:
        return None
    return best.objective.value


def at_usual_speed(trial: Trial, speeds: Mapping[str, float], *, scenario: Scenario) -> Trial:
    """The trial with the speed of its node, by which the objective is divided unless it is a fresh run's.

    Fresh runs are compared within a node, and state what was measured.
    """
    speed = speeds.get(trial.node or "", 1.0)
    objective = trial.objective
    if objective is not None and trial.source != "confirm":
        factor = speed if scenario.objective == "latency" else 1.0 / speed
        objective = Estimate(
            value=objective.value * factor, low=objective.low * factor, high=objective.high * factor
        )
    return replace(trial, node_speed=speed, objective=objective)
