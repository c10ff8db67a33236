"""What does a sweep say of itself when it ends, and who leads until then?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.pooled import is_inside, pool, run_noise
from batchtune.tune.evidence.ranking import leaders
from batchtune.tune.sweep import time_budget
from batchtune.tune.sweep.progress import phase_of
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Trial


def leading(trials: Sequence[Trial], *, scenario: Scenario) -> Trial | None:
    """The last run of the configuration that would be recommended now; None: none may be."""
    inside = [pooled for pooled in pool(trials, scenario=scenario) if is_inside(pooled, scenario)]
    ranked = leaders(inside, scenario=scenario)
    return ranked[0].runs[-1].trial if ranked else None


def account_of(
    findings: SearchSummary,
    trials: Sequence[Trial],
    *,
    scenario: Scenario,
    space_size: int,
    stop_reason: str,
    seconds_by_phase: Mapping[str, float],
) -> SearchSummary:
    """What the strategy found, with what the ledger says; `stop_reason` where the strategy gives none."""
    return replace(
        findings,
        stop_reason=findings.stop_reason or stop_reason,
        space_size=space_size,
        proposals=dict(Counter(trial.source for trial in trials if trial.source in ("twin", "sampler"))),
        noise_ratio=run_noise(pool(trials, scenario=scenario), scenario=scenario).sd,
        repeated_trials=sum(trial.repeat_of is not None for trial in trials),
        seconds_by_phase=dict(seconds_by_phase),
        trials_by_phase=dict(Counter(phase_of(trial.source) for trial in trials)),
    )


def budget_spent(trials: Sequence[Trial], *, scenario: Scenario, left_s: float) -> str:
    """Which part of the budget is spent, in words; "": neither time nor trials."""
    most = scenario.search.trials
    if left_s <= 0.0:
        return "the time is spent"
    if most is not None and time_budget.searched_trials(trials) >= most:
        return "the budget of trials is spent"
    return ""
