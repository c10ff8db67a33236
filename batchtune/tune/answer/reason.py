"""Why this configuration, or why none, in one sentence built from what was measured?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError, InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.measure.length_padding import padding_per_element, padding_share, saved_text
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import counted, percentage, rounded, rounded_duration
from batchtune.target.telemetry import ServerActivity
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.trials.failure_texts import explain_failure
from batchtune.tune.trials.space import Space, in_force
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial, is_feasible, violations

_CLOSINGS = {
    "full": "because they are full",
    "timeout": "on the timeout",
    "no_room": "because the next request does not fit",
    "closed": "at the end",
}


def explain_gain(
    batched: Pooled | None,
    *,
    absence: str,
    no_batching: Pooled | None,
    gain: Estimate | None,
    unbatched_rows_per_s: float,
    limits_s: dict[str, float],
) -> str:
    """Why batching pays, or why not: the sentence for the best batched configuration against no batching.

    `absence` is why there is none, where `batched` is None. `unbatched_rows_per_s` is what the server does without
    batching when it is kept busy; NaN when it was not measured, or when the load in question leaves it idle.
    """
    if batched is None:
        return absence
    clauses = [_batch_cost(batched, unbatched_rows_per_s), _batch_sizes(batched)]
    if no_batching is not None and not no_batching.feasible:
        clauses.append(_missed(no_batching, limits_s))
    facts = "; ".join(clause for clause in clauses if clause)
    if gain is None:
        return facts or "there is no run without batching to compare with"
    verdict = (
        f"batching is worth {rounded(gain.value)}× no batching ({rounded(gain.low)} to {rounded(gain.high)})"
    )
    if math.isinf(gain.high):
        verdict = (
            f"batching is worth at least {rounded(gain.value)}× no batching, which held at no rate tried"
        )
    return f"{facts}: {verdict}" if facts else verdict


def padding_note(chosen: Pooled, trials: Sequence[Trial]) -> tuple[str, ...]:
    """What its length buckets save of the padding in one queue; of the same parameters, else of the fastest without.

    A calibration will do: padding depends on the batches, not on what is compared.
    """
    per_element = padding_per_element(_servers(run.trial for run in chosen.runs))
    if per_element is None or LENGTH_BUCKETS not in dict(chosen.configuration.flags):
        return ()
    whole = f"{padding_share(per_element)} of the elements computed are padding"
    rivals = [
        trial
        for trial in trials
        if trial.configuration.batching is not None
        and LENGTH_BUCKETS not in dict(trial.configuration.flags)
        and padding_per_element(_servers([trial])) is not None
    ]
    alike = [trial for trial in rivals if trial.configuration.batching == chosen.configuration.batching]
    best = max(alike or rivals, key=_throughput_rps, default=None)
    in_one_queue = None if best is None else padding_per_element(_servers([best]))
    if best is None or in_one_queue is None:
        return (f"{whole}; what the buckets save is not known: one queue was not measured",)
    saved = saved_text(per_element, in_one_queue=in_one_queue)
    there = f"{padding_share(in_one_queue)} in one queue with {best.configuration.label()}"
    return (f"{saved or 'no padding to save'}: {whole}, {there}",)


def absence_of_batching(
    inside: Sequence[Pooled], pooled: Sequence[Pooled], trials: Sequence[Trial], *, tried: bool
) -> str:
    """Why no configuration with batching can be recommended; `tried`: at a rate as low as no batching takes."""
    failure = failure_with_batching(trials)
    if failure is not None:
        return f"every configuration with batching failed: {failure}"
    if any(candidate.configuration.batching is not None for candidate in inside):
        missed = "meets the SLO" if tried else "was tried at a rate as low as no batching takes"
        return f"no configuration with batching {missed}"
    if any(candidate.configuration.batching is not None for candidate in pooled):
        return "no configuration with batching was measured inside the search space"
    return "no configuration with batching was measured"


def nothing_to_recommend(
    pooled: Sequence[Pooled], trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec
) -> BatchtuneError:
    """The error that says so: 7 where all failed, 3 where what was tried misses the SLO, 5 where that is not known."""
    why = explain_miss(pooled, trials, slo)
    if trials and all(trial.state == "failed" for trial in trials):
        return TargetError(
            why, hint="the failed trials are in the ledger; see whether the server works by hand"
        )
    open_question = _open_question(pooled, trials, scenario=scenario, slo=slo)
    if open_question is not None:
        return InconclusiveError(f"{why}; {open_question}", hint=advise_miss((), trials))
    return NoFeasibleConfigurationError(why, hint=advise_miss(pooled, trials))


def _open_question(
    pooled: Sequence[Pooled], trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec
) -> str | None:
    """Why it is not known that nothing meets the SLO; None: it is."""
    if not pooled:
        return "whether something meets the SLO is not known"
    if not any(
        candidate.configuration.batching is not None for candidate in pooled
    ) and not failure_with_batching(trials):
        outside = any(trial.configuration.batching is not None for trial in _candidates(trials))
        return f"whether batching would meet it is not known: none {'of your space ' if outside else ''}was tried"
    if scenario.objective != "capacity":
        return _too_few_tried(trials, scenario=scenario, slo=slo)
    lone = _lone_request(trials)
    if lone is not None and not _keeps(lone, slo):
        return None
    if any(candidate.claim is not None and candidate.claim.misses for candidate in pooled):
        return "what held in the search was refuted by fresh runs, and no lower rate was tried"
    if lone is not None:
        return "a lone request keeps it, so a rate low enough would: too little time to find one"
    return None


def _too_few_tried(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec) -> str | None:
    """That the misses of so few points say nothing of the others; None where a lone request misses the SLO too."""
    lone = _lone_request(trials)
    if lone is not None and not _keeps(lone, slo):
        return None
    candidates = (trial.configuration for trial in _candidates(trials))
    tried = len({configuration for configuration in candidates if configuration.batching is not None})
    size = Space(scenario).size
    if tried >= min(policy.FEW_POINTS, size):
        return None
    were = "was" if tried == 1 else "were"
    return f"whether another would is not known: only {tried} with batching {were} tried, of {size:,} points"


def _candidates(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.source not in NO_CANDIDATES]


def _lone_request(trials: Sequence[Trial]) -> Trial | None:
    """The run of one client without batching, which no configuration answers sooner; None: it was not made."""
    probes = (trial for trial in trials if trial.source == "probe" and trial.measurement is not None)
    return next((trial for trial in probes if trial.concurrency == 1), None)


def _keeps(trial: Trial, slo: SloSpec) -> bool:
    if trial.measurement is None:
        return False
    latency_s = {name: quantile.value for name, quantile in trial.measurement.latency_s.items()}
    return is_feasible(
        violations(latency_s, trial.measurement.error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)
    )


def failure_with_batching(trials: Sequence[Trial]) -> str | None:
    """The model's own words, where every trial with batching failed; None: one worked, or none was made."""
    batched = [trial for trial in trials if trial.configuration.batching is not None]
    worked = [
        trial
        for trial in batched
        if trial.state == "complete"
        and trial.measurement is not None
        and trial.measurement.error_ratio < policy.ALL_FAIL_RATIO
    ]
    if not batched or worked:
        return None
    return explain_failure(batched) or batched[-1].failure or "no request had a good answer"


def explain_miss(pooled: Sequence[Pooled], trials: Sequence[Trial], slo: SloSpec) -> str:
    """What was asked for, which configuration comes nearest, and by how much it misses."""
    wanted = ", ".join(f"{name} ≤ {rounded_duration(limit)}" for name, limit in slo.limits().items())
    wanted = f"{wanted}{', ' if wanted else ''}errors ≤ {rounded(slo.error_ratio)}"
    if not pooled:
        failures = [trial.failure for trial in trials if trial.failure]
        if failures:
            why = explain_failure([trial for trial in trials if trial.error_texts])
            cause = f": {why}" if why else f"; the last: {failures[-1]}"
            return f"nothing to recommend: {counted(len(failures), 'trial')} failed{cause}"
        probes = f", only {counted(len(trials), 'probe')}" if trials else ""
        return f"nothing to recommend: no trial is finished{probes}"
    nearest = min(pooled, key=lambda candidate: (candidate.failures > 0, candidate.violation))
    missed = {name: value for name, value in nearest.constraints.items() if value > 0}
    misses = " and ".join(_miss(nearest, name, slo) for name in missed) or "it failed in another run"
    label = nearest.configuration.label()
    return f"no configuration of {len(pooled)} measured meets {wanted}; nearest: {label}, {misses}"


def advise_miss(pooled: Sequence[Pooled], trials: Sequence[Trial]) -> str:
    """What to do next where nothing can be recommended."""
    if pooled:
        return "relax the SLO, lower the load, or widen the search space"
    if any(trial.failure for trial in trials):
        return "what failed would fail again: change the search space or the scenario; all is in trials.jsonl"
    return "go on with that sweep (--resume), with a larger search.budget where it was spent"


def _miss(nearest: Pooled, name: str, slo: SloSpec) -> str:
    if name == "errors":
        ratios = [run.error_ratio for run in nearest.runs]
        return f"{percentage(sum(ratios) / len(ratios), 2)} of requests fail where {percentage(slo.error_ratio, 2)} may"
    value_s, limit_s = nearest.latency_s.get(name, math.nan), slo.limits()[name]
    if not math.isfinite(value_s):
        return f"{name} is undefined: too many requests had no good answer"
    shown, allowed, ratio = (
        f"{name} {rounded_duration(value_s)}",
        rounded_duration(limit_s),
        value_s / limit_s,
    )
    return (
        f"{shown} misses {allowed} by {percentage(ratio - 1)}"
        if ratio < 2
        else f"{shown} is {rounded(ratio)} × {allowed}"
    )


def _batch_cost(batched: Pooled, unbatched_rows_per_s: float) -> str:
    """`a batch of 14 rows takes 6.1 ms where 14 rows one by one take 18 ms`, for the size that held most rows.

    Where several batches run at once, the time between two that are done is what compares; `unbatched_rows_per_s` NaN
    (the load does not keep the server busy) leaves the comparison out.
    """
    activity = _activity(batched)
    if activity is None or not activity.execution_s_by_rows:
        return ""
    counts, times_s = activity.batches_by_rows, activity.execution_s_by_rows
    rows = max(times_s, key=lambda size: size * counts.get(size, 0))
    busy_s = sum(counts.get(size, 0) * each_s for size, each_s in times_s.items())
    at_once = busy_s / activity.duration_s if activity.duration_s > 0 else 0.0
    batch_time = rounded_duration(times_s[rows])
    took = f"a batch of {_rows(rows)} takes {batch_time}"
    if not math.isfinite(unbatched_rows_per_s) or unbatched_rows_per_s <= 0:
        return took
    if at_once >= 1.2:
        every = rounded_duration(times_s[rows] / at_once)
        took = (
            f"a batch of {_rows(rows)} is done every {every} ({rounded(at_once)} at once, {batch_time} each)"
        )
    return f"{took} where {_rows(rows)} one by one take {rounded_duration(rows / unbatched_rows_per_s)}"


def _batch_sizes(batched: Pooled) -> str:
    """`batches hold 13.6 rows on average, 87 % close because they are full`."""
    activity = _activity(batched)
    if activity is None or activity.mean_batch_rows is None:
        return ""
    mean = rounded(activity.mean_batch_rows)
    held = f"batches hold {mean} row{'' if mean == '1' else 's'} on average"
    closed = sum(activity.close_reasons.values())
    if not closed:
        return held
    reason = max(activity.close_reasons, key=lambda name: activity.close_reasons[name])
    share = percentage(activity.close_reasons[reason] / closed)
    return f"{held}, {share} {closing(reason, batched.configuration)}"


def closing(reason: str, configuration: Configuration) -> str:
    """Why batches of this configuration go, by the server's word for it: `close because they are full`."""
    if reason == "timeout" and not in_force(configuration, "batch_timeout_micros"):
        return "go as soon as a thread is free"
    return f"close {_CLOSINGS.get(reason, f'by {reason}')}"


def _missed(no_batching: Pooled, limits_s: dict[str, float]) -> str:
    for name, limit_s in limits_s.items():
        value_s = no_batching.latency_s.get(name, math.nan)
        if not value_s <= limit_s:
            shown = rounded_duration(value_s) if math.isfinite(value_s) else "without bound"
            return f"without batching {name} is {shown}, above the {rounded_duration(limit_s)} allowed"
    return "without batching too many requests fail"


def _servers(trials: Iterable[Trial]) -> list[ServerActivity | None]:
    return [trial.measurement.server for trial in trials if trial.measurement is not None]


def _throughput_rps(trial: Trial) -> float:
    return 0.0 if trial.measurement is None else trial.measurement.throughput_rps.value


def _activity(candidate: Pooled) -> ServerActivity | None:
    measurement = candidate.runs[-1].trial.measurement
    return None if measurement is None else measurement.server


def _rows(number: int) -> str:
    return counted(number, "row")
