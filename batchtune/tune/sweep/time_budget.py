"""What can the budget of time and of trials do on a server of this pace?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, rounded_duration
from batchtune.tune import policy
from batchtune.tune.guided.calibration import searched_sizes
from batchtune.tune.trials.pace import Pace, full_rows, times_of
from batchtune.tune.trials.trial import NO_CANDIDATES, REPEATS, Trial


def budget_s(scenario: Scenario, pace: Pace) -> float:
    """Seconds that a sweep may take: the scenario's, or what a sure answer takes; inf: only trials count."""
    search = scenario.search
    if search.budget_is_given:
        return math.inf if search.time_budget_s is None else search.time_budget_s
    return min(max(policy.TIME_BUDGET_S, sure_s(scenario, pace)), policy.TIME_BUDGET_MAX_S)


def sure_s(scenario: Scenario, pace: Pace) -> float:
    """What a sweep takes that has time for everything."""
    return policy.SURE_RUNS * usual_run_s(scenario, pace)


def usual_run_s(scenario: Scenario, pace: Pace) -> float:
    """What a trial takes: the median over the sizes that may be tried and that the traffic can fill."""
    sizes = searched_sizes(scenario)
    most = full_rows(scenario, sizes[-1], pace)
    runs_s = []
    for size in [size for size in sizes if size <= most] or sizes[:1]:
        try:
            configuration = scenario.configuration(_with_size(scenario, size))
        except BatchingParametersError:
            continue
        rate_rps = _likely_rps(scenario, pace, size)
        runs_s.append(times_of(pace, scenario, configuration, rate_rps=rate_rps).run_s)
    load = scenario.load
    return statistics.median(runs_s) if runs_s else load.warm_up_s + load.duration_s


def usual_trial_s(trials: Sequence[Trial], scenario: Scenario, pace: Pace) -> float:
    """What a trial takes: the median so far, before that the scenario's own times."""
    seconds = [trial.seconds for trial in trials if trial.source not in NO_CANDIDATES | {"no_batching"}]
    return statistics.median(seconds) if seconds else usual_run_s(scenario, pace)


def fresh_run_s(
    scenario: Scenario, trials: Sequence[Trial], pace: Pace, *, best: Trial | None, budget_s: float
) -> float:
    """What a confirmation takes: as long as a trial, but for a capacity, which is then one load at one rate."""
    if scenario.objective != "capacity":
        return usual_trial_s(trials, scenario, pace)
    if best is None:
        return usual_run_s(scenario, pace) + 0.5
    rate_rps = None if best.objective is None else best.objective.value
    times = times_of(pace, scenario, best.configuration, rate_rps=rate_rps, fresh=True, budget_s=budget_s)
    return times.run_s + 0.5


def searched_trials(trials: Sequence[Trial]) -> int:
    """What counts against the budget of trials; several rates of one configuration count once."""
    tried = [trial for trial in trials if trial.source not in NO_CANDIDATES | REPEATS]
    firsts = [trial for trial in tried if trial.repeat_of is None]
    return len({(trial.configuration, trial.source, trial.block) for trial in firsts})


def may_repeat(trials: Sequence[Trial], spoilt: Trial, *, budget_s: float, left_s: float) -> bool:
    """Whether repeats have a share of trials and time left."""
    repeats = [trial for trial in trials if trial.repeat_of is not None]
    if len(repeats) >= max(policy.REPEATS_MAX, policy.REPEATS_SHARE * len(trials)):
        return False
    spent_s = sum(trial.seconds for trial in repeats) + spoilt.seconds
    return spent_s <= policy.REPEATS_SHARE * budget_s and spoilt.seconds <= left_s


def plan_text(scenario: Scenario, pace: Pace, *, at_once: int = 1) -> str:
    """What a full batch takes, how many trials there is time for, and what to give where that is too little.

    `at_once`: trials that run at the same time, each on a node of its own.
    """
    sizes = searched_sizes(scenario)
    rows = full_rows(scenario, sizes[-1], pace)
    batch_s, run_s, time_s = pace.batch_s(rows), usual_run_s(scenario, pace), budget_s(scenario, pace)
    about = "" if rows in pace.batch_s_by_rows else "about "
    text = f"a full batch ({counted(rows, 'row')}) takes {about}{rounded_duration(batch_s)}"
    if math.isfinite(time_s):
        runs = max(int(time_s / run_s), 1) * at_once
        text = f"{text}: {_minutes(time_s)} are enough for about {counted(runs, 'trial')}"
        if runs < policy.SURE_RUNS // 2:
            sure = _minutes(sure_s(scenario, pace) / at_once)
            text = f"{text}; for a sure answer give {sure} (--set search.budget.time={sure})"
    load, request = scenario.load, scenario.request
    if "duration_s" in load.model_fields_set and load.duration_s < policy.PROBE_BATCHES * batch_s:
        needed = _minutes(policy.RUN_BATCHES * batch_s)
        text = f"{text}; load.duration {rounded_duration(load.duration_s)} holds few batches: give {needed}"
    if "timeout_s" in request.model_fields_set and request.timeout_s < 2.0 * batch_s:
        needed = _minutes(policy.TIMEOUT_TURNS * batch_s)
        text = f"{text}; request.timeout {rounded_duration(request.timeout_s)} ends while batches run: give {needed}"
    return text


def _likely_rps(scenario: Scenario, pace: Pace, size: int) -> float | None:
    """Of a capacity: a rate that such batches can take; None where the scenario says the load."""
    batch_s = pace.batch_s(size)
    if scenario.objective != "capacity" or not batch_s > 0.0:
        return None
    return policy.LIKELY_LOAD * size / scenario.request.rows_most / batch_s


def _with_size(scenario: Scenario, size: int) -> dict[str, int]:
    return {} if "max_batch_size" in scenario.fixed else {"max_batch_size": size}


def _minutes(seconds: float) -> str:
    """Rounded up, as a scenario writes it: whole seconds below three minutes, whole minutes beyond."""
    return f"{math.ceil(seconds)}s" if seconds < 180.0 else f"{math.ceil(seconds / 60.0)}m"
