"""Explains the answer: why batching pays or not, by the server's counters, and why there is nothing to recommend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from batchtune.batching.parameters import LENGTH_BUCKETS, Configuration
from batchtune.errors import (
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
)
from batchtune.measure.measurement import Measurement, padding_per_element
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, coded, complement
from batchtune.scenario.spec.check import value_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.choice import Capacities, FixedLoads
from batchtune.tune.answer.recommendation import limit_text
from batchtune.tune.evidence.bracket import FRESH, OPEN, BracketRun, of_limit, runs_of
from batchtune.tune.search.contenders import Contender, Contenders
from batchtune.tune.search.search_loop import Search
from batchtune.tune.trials.trial import (
    Trial,
    commonest_error,
    explain_failure,
    has_only_errors,
    measuring_s,
    out_of_memory,
)
from batchtune.units import counted, percentage, rounded


def explain_gain(
    batched: Measurement | None,
    *,
    runs: int,
    absence: Coded,
    gain: Estimate | None,
    unbatched_rows_per_s: float,
    missed: tuple[str, float, float] | None,
    configuration: Configuration,
) -> Coded:
    """Return a finding that compares the best configuration with batching, `configuration`, to no batching: what a
    batch costs, why batches close, and how much is gained.

    `batched`: the typical one of `runs` measurements of `configuration`; None: there is none, and `absence`, the
    finding that says why, is returned. `gain`: ratio of the figure with batching to that without; None: unknown.
    `unbatched_rows_per_s`: throughput of the busy server without batching, rows/s; NaN: not measured. `missed`:
    (quantile, its seconds, the limit in seconds) of a limit that is missed without batching; None: none is.
    """
    if batched is None:
        return absence
    activity = batched.server
    clauses = [*_batch_cost(activity, unbatched_rows_per_s, gain), _closings(activity, configuration)]
    if runs > 1 and clauses[0] is not None:
        clauses[0] = coded("in_typical_run", finding=clauses[0])
    if missed is not None:
        name, value_s, limit_s = missed
        if name == "goodput":
            clauses.append(
                coded("unbatched_below", limit_ratio=complement(limit_s), value_ratio=complement(value_s))
            )
        elif math.isfinite(value_s):
            clauses.append(coded("unbatched_above", name=name, limit_s=limit_s, value_s=value_s))
        else:
            clauses.append(coded("unbatched_misses", name=name, limit_s=limit_s))
    facts = tuple(clause for clause in clauses if clause is not None)
    worth = None if gain is None else _worth(gain)
    if worth is None:
        return coded("facts", facts=facts) if facts else coded("not_shown")
    return coded("facts_and_worth", facts=facts, worth=worth) if facts else worth


def _worth(gain: Estimate) -> Coded | None:
    """The finding on how much batching gains; None: unknown."""
    if math.isinf(gain.high):
        return coded("worth_at_least", least=gain.low) if gain.low > 1.0 else None
    if gain.low <= 1.0 <= gain.high:
        return coded("worth_nothing")
    return coded("worth", gain=gain)


def padding_note(
    runs: Sequence[Trial], configuration: Configuration, trials: Sequence[Trial]
) -> tuple[Coded, ...]:
    """Return (finding,) on how much padding the length buckets of a configuration save; () where it has no buckets or
    padding is not counted.

    `runs`: the configuration's own. They are compared with the fastest of all `trials` that batch without buckets, if
    possible of those with otherwise equal parameters. Scouts count too: padding depends on the batches only.
    """
    per_element = padding_per_element(_servers(runs))
    if per_element is None or LENGTH_BUCKETS not in dict(configuration.flags):
        return ()
    padding_ratio = per_element / (1.0 + per_element)
    rivals = [
        trial
        for trial in trials
        if trial.configuration.batching is not None
        and LENGTH_BUCKETS not in dict(trial.configuration.flags)
        and padding_per_element(_servers([trial])) is not None
    ]
    alike = [trial for trial in rivals if trial.configuration.batching == configuration.batching]
    best = max(alike or rivals, key=_throughput_rps, default=None)
    in_one_queue = None if best is None else padding_per_element(_servers([best]))
    if best is None or in_one_queue is None:
        return (coded("padding_unknown", padding_ratio=padding_ratio),)
    figures = {
        "padding_ratio": padding_ratio,
        "one_queue_ratio": in_one_queue / (1.0 + in_one_queue),
        "configuration": best.configuration.label(),
    }
    if in_one_queue <= 0.0:
        return (coded("no_padding_to_save", **figures),)
    saved = 1.0 - per_element / in_one_queue
    return (coded("padding_saved" if saved >= 0 else "padding_added", saved_ratio=abs(saved), **figures),)


def absence_of_batching(batched: Sequence[Contender], trials: Sequence[Trial]) -> Coded:
    """Return the finding on why no configuration with batching can be recommended: all failed, all of `batched` miss
    the SLO, or none was tried."""
    failure = failure_with_batching(trials)
    if failure is not None:
        return coded("batches_failed", why=failure)
    return coded("batches_miss" if batched else "no_batches")


def failure_with_batching(trials: Sequence[Trial]) -> str | None:
    """Return the commonest error text of the server where every trial with batching failed; None: a trial with batching
    worked, or none was run."""
    batched = [trial for trial in trials if trial.configuration.batching is not None]
    worked = [
        trial
        for trial in batched
        if trial.state == "complete"
        and trial.measurements
        and all(measured.error_ratio <= 1 / 2 for measured in trial.measurements.values())
    ]
    if not batched or worked:
        return None
    return explain_failure(batched) or batched[-1].failure or "no request had a good answer"


def failure_notes(trials: Sequence[Trial], contenders: Contenders) -> Iterator[Coded]:
    """Yield up to three findings on configurations that failed: by running out of memory, by being refused at the
    start, and under load (which includes those that never answered a request).

    Each names the configuration that failed most often and the number of others, and has the number of failed runs and
    of all runs of these configurations, what the search no longer tries, and the commonest error text.
    """
    answered = {
        trial.configuration
        for trial in trials
        if any(measured.throughput_rps.value > 0.0 for measured in trial.measurements.values())
    }
    ways: dict[str, list[Trial]] = {}
    for trial in trials:
        if out_of_memory(trial) is not None:
            ways.setdefault("ran_out", []).append(trial)
        elif trial.state == "failed" or trial.configuration not in answered:
            ways.setdefault("refused" if trial.is_refused else "some_failed", []).append(trial)
    for way, failed in ways.items():
        counts = Counter(trial.configuration for trial in failed)
        known = [contender for own in counts if (contender := contenders.find(own)) is not None]
        left_out = as_text("")
        if known and all(map(contenders.is_barred, known)):
            left_out = coded("left_out_as_large")
        elif known and all(contender.is_broken for contender in known):
            left_out = coded("left_out" if len(counts) == 1 else "left_out_all")
        yield coded(
            way,
            configuration=counts.most_common(1)[0][0].label(),
            others=as_text("") if len(counts) == 1 else coded("and_others", count=len(counts) - 1),
            failed=len(failed),
            runs=counted(sum(trial.configuration in counts for trial in trials), "run"),
            left_out=left_out,
            why=explain_failure(failed) or out_of_memory(failed[0]) or "no request was answered",
        )


def _batch_cost(
    activity: ServerActivity | None, unbatched_rows_per_s: float, gain: Estimate | None
) -> tuple[Coded, ...]:
    """The finding on the mean rows of a batch and on how long such a batch takes, beside as many rows without batching.

    Where several batches run at once, the time between the ends of two is compared. `unbatched_rows_per_s` NaN: nothing
    is compared; neither where it stands against `gain`. (): the server does not count batches.
    """
    if activity is None or activity.mean_batch_rows is None:
        return ()
    counts, times_s = activity.batches_by_rows, activity.execution_s_by_rows
    batches = sum(counts.get(size, 0) for size in times_s)
    figures: dict[str, Any] = {"mean_rows": activity.mean_batch_rows}
    if not batches:
        return (coded("batches_hold", **figures),)
    busy_s = sum(counts.get(size, 0) * each_s for size, each_s in times_s.items())
    at_once = busy_s / activity.duration_s if activity.duration_s > 0 else 0.0
    figures["batch_s"] = busy_s / batches
    every_s = figures["batch_s"] / at_once if at_once >= OPEN else figures["batch_s"]
    alone_s = activity.mean_batch_rows / unbatched_rows_per_s if unbatched_rows_per_s > 0 else math.nan
    against = gain is not None and (
        (gain.low > 1.0 and alone_s <= every_s) or (gain.high < 1.0 and alone_s >= every_s)
    )
    if not math.isfinite(alone_s) or against:
        return (coded("batch_takes", **figures),)
    figures["alone_s"] = alone_s
    if at_once >= OPEN:
        return (coded("batch_done_every", **figures, every_s=every_s, at_once=at_once),)
    return (coded("batch_takes_beside", **figures),)


def _closings(activity: ServerActivity | None, configuration: Configuration) -> Coded | None:
    """The finding on why most batches close; None: the server does not count the reasons."""
    closed = sum(activity.close_reasons.values()) if activity is not None else 0
    if activity is None or not closed:
        return None
    reason = max(activity.close_reasons, key=lambda name: activity.close_reasons[name])
    return coded(
        "batches_close",
        closed_ratio=activity.close_reasons[reason] / closed,
        closing=closing(reason, configuration),
    )


def closing(reason: str, configuration: Configuration) -> Coded:
    """Return the finding on why batches close; `reason`: the server's name of the cause ("full", "timeout", …)."""
    if reason == "timeout" and not configuration.in_force("batch_timeout_micros"):
        return coded("closed_at_once")
    known = reason in ("full", "timeout", "no_room", "closed")
    return coded(f"closed_{reason}") if known else coded("closed_by", reason=reason)


def _servers(trials: Iterable[Trial]) -> list[ServerActivity | None]:
    return [trial.measurement.server for trial in trials if trial.measurement is not None]


def _throughput_rps(trial: Trial) -> float:
    return 0.0 if trial.measurement is None else trial.measurement.throughput_rps.value


def nearest_first(account: Capacities | FixedLoads) -> dict[Contender, BracketRun]:
    """Return contender -> one of its runs, for a search without an answer; the contender nearest to the SLO comes
    first.

    The run is the one that missed the SLO by least; where some runs of the contender met it, the middle one. Contenders
    that met the SLO in a larger share of their runs come first; those outside the search space come last, of them those
    that keep the SLO at the very end. Scouts of a search under a fixed load count only where nothing else ran.
    """
    search = account.search
    tried = {c: account.behind(c)[0] for c in search.contenders.all()}
    if not any(tried.values()):
        tried = {c: c.runs for c in tried}
    nearest: dict[Contender, BracketRun] = {}
    for contender, runs in tried.items():
        shown = [run for run in runs if run.latency_s]
        shown.sort(key=lambda run: (not run.held, search.violation(run)))
        at = len(shown) // 2 if any(run.held for run in shown) else 0
        if shown and (account.keeps(contender) or not shown[at].held):
            nearest[contender] = shown[at]

    def distance(contender: Contender) -> tuple[bool, bool, float, float]:
        met_ratio = fmean(run.held for run in tried[contender])
        return (
            not contender.eligible,
            account.keeps(contender),
            -met_ratio,
            search.violation(nearest[contender]),
        )

    return {contender: nearest[contender] for contender in sorted(nearest, key=distance)}


def nothing_to_recommend(trials: Sequence[Trial], account: Capacities | FixedLoads) -> BatchtuneError:
    """Return the error to raise for a search without an answer; `account` has observed `trials`.

    TargetError: all trials failed. NoFeasibleConfigurationError: every configuration measured misses the SLO.
    InconclusiveError: too little was measured to say so. MeasurementInvalidError: the client limited every load of all
    models, or every run at a rate that missed.
    """
    if trials and all(trial.state == "failed" for trial in trials):
        why = explain_failure([trial for trial in trials if trial.error_texts])
        failures = [trial.failure or "without a word" for trial in trials]
        return TargetError(
            f"all trials failed ({len(failures)}){f': {why}' if why else f'; the last: {failures[-1]}'}",
            hint="`batchtune trials RUN` shows the failed trials; test the server by hand",
        )
    trials = [trial for trial in trials if not trial.request.models]
    search, scenario, slo = account.search, account.search.scenario, account.search.scenario.slo
    missed = [(c, run) for c, run in nearest_first(account).items() if not account.keeps(c)]
    has_run = any(run.latency_s for run in runs_of(trials, slo, scenario))
    if not missed and not has_run and any(trial.state == "complete" and trial.parts for trial in trials):
        return MeasurementInvalidError(
            "the client was the limit in every load of all models: no figure is of the server",
            hint="lower the rates, or give the client more: load.processes, load.cpus",
        )
    wanted = limit_text(search.limits, slo.error_ratio)
    lone = _lone(trials, search)
    if lone is not None and _is_nearest(lone, [c for c, _ in missed], search):
        longer = _miss(lone, search.limits, slo.error_ratio)
        return NoFeasibleConfigurationError(
            f"no configuration meets {wanted}: one request alone takes longer ({longer}), at any setting",
            hint=f"relax the SLO, or serve a faster model, or on a faster device{_quieter(trials)}",
        )
    if not missed:
        short = [run for run in runs_of(trials, slo, scenario) if run.latency_s]
        ran = f"{sum(run.kept for run in short)} of {counted(len(short), 'run')} met the SLO"
        ran = f"too little was measured: only short loads ran; {ran}" if has_run else "no trial is finished"
        hint = "resume that sweep (--resume), with a larger search.budget if it was spent"
        return InconclusiveError(ran, hint=hint)
    at_rates = [run for c, _ in missed for run in c.runs if run.rate_rps is not None and not run.held]
    if at_rates and all(run.by_client for run in at_rates):
        return MeasurementInvalidError(
            "the client was the limit in every run that missed the SLO: no miss is the server's",
            hint="give the client more: load.processes, load.cpus, or a quieter machine",
        )
    contender, run = missed[0]
    missed_by = _miss(run, search.limits, slo.error_ratio)
    trial = next(trial for trial in trials if trial.number == run.trial)
    if run.error_ratio > slo.error_ratio and (error := commonest_error(trial)):
        missed_by = f"{missed_by}, most often {error}"
    label = contender.configuration.label()
    runs = account.behind(contender)[0]
    if met := sum(run.held for run in runs):  # of the nearest, so that without any none met it
        wanted = f"{wanted} in most of its runs"
        missed_by = f"{missed_by}, though {met} of {counted(len(runs), 'run')} met it"
    why = f"no configuration of {len(missed)} measured meets {wanted}; nearest: {label}, {missed_by}"
    open_question = _open_question(trials, scenario, lone)
    if met and 2 * met == len(runs):
        open_question = "whether most runs would meet it is not known"
    if open_question:
        return InconclusiveError(f"{why}; {open_question}", hint=_more_time(trials))
    hint = f"relax the SLO, lower the load, or widen the search space{_quieter(trials)}"
    nearest = {run.trial for _, run in missed}
    if all(has_only_errors(trial) for trial in trials if trial.number in nearest):
        hint = "the server fails these requests under any load and limit: its log says why"
    return NoFeasibleConfigurationError(why, hint=hint)


def too_short(trials: Sequence[Trial], scenario: Scenario) -> tuple[Coded, ...]:
    """The finding that a sweep had less than half of the time that it has without a budget; (): it had more, or its
    budget is in trials."""
    had_s = max(scenario.search.budget.time_s or math.inf, measuring_s(trials))
    short = coded("short_sweep", had_s=had_s, usual_s=DEFAULT_TIME_BUDGET_S)
    return (short,) if 2.0 * had_s < DEFAULT_TIME_BUDGET_S else ()


def _quieter(trials: Sequence[Trial]) -> str:
    """Advice to repeat the search where other programs took much of the CPUs in most trials; "" where they did not."""
    measured = [trial.measurement for trial in trials if trial.measurement is not None]
    figures = [caveat.figures for run in measured for caveat in run.caveats if caveat.code == "host_busy"]
    taken = [own["foreign_ratio"] for own in figures if "foreign_ratio" in own]
    if 2 * len(taken) <= len(measured):
        return ""
    return f"; repeat on a quiet machine: other processes used {percentage(median(taken))} of the CPUs"


def _lone(trials: Sequence[Trial], search: Search) -> BracketRun | None:
    """The run of one client alone, the first with figures."""
    alone = [trial for trial in trials if trial.request.is_lone]
    return next((run for run in runs_of(alone, search.scenario.slo, search.scenario) if run.latency_s), None)


def _is_nearest(lone: BracketRun, contenders: Sequence[Contender], search: Search) -> bool:
    """Whether one request alone misses a limit on latency, and every run of the contenders by more."""
    others = (search.violation(run) for contender in contenders for run in contender.runs)
    return 1.0 < of_limit(lone.latency_s, search.limits) < min(others, default=math.inf)


def _more_time(trials: Sequence[Trial]) -> str:
    """Advice to measure for longer, after that on what failed last."""
    if all(map(_got_no_answer, trials[-2:])):  # one alone may only have had too much load
        return "the last trials had no answer at all: look at the server and its log, then give the sweep more time"
    if trials[-1].state != "failed":
        return "give the sweep more time"
    return "`batchtune trials RUN` shows the failed trials; test the server by hand, then give the sweep more time"


def _got_no_answer(trial: Trial) -> bool:
    """Whether all requests of a measured trial got no answer, not even an error."""
    measured = trial.measurement
    silent = {"timeout", "unfinished", "unsent"}
    return measured is not None and measured.error_ratio == 1.0 and measured.errors.keys() <= silent


def _open_question(trials: Sequence[Trial], scenario: Scenario, lone: BracketRun | None) -> str | None:
    """Why it is unknown whether a configuration meets the SLO, as text; None: none does. `lone`: as `_lone`."""
    if lone is not None and not lone.kept:
        return None  # no configuration answers sooner than a lone request is
    batched = {trial.configuration for trial in trials if trial.configuration.batching is not None}
    if not batched and failure_with_batching(trials) is None:
        return "whether batching would meet it is not known: none was tried"
    if scenario.objective == "capacity":
        if lone is None:
            return None
        failed = sum(trial.state == "failed" for trial in trials)
        cause = f"{failed} of {counted(len(trials), 'trial')} failed, most often: {explain_failure(trials)}"
        cause = cause if failed else "the sweep had no time to look for one"
        return f"a lone request meets it, so a lower rate may too: {cause}"
    if len(batched) < min(FRESH, math.prod(len(axis.values) for axis in scenario.axes.values())):
        tried, was = counted(len(batched), "configuration"), "was" if len(batched) == 1 else "were"
        return f"whether another would is not known: only {tried} with batching {was} tried"
    return None


def _miss(run: BracketRun, limits: Mapping[str, float], error_limit: float) -> str:
    """Text of which limits a run misses and by how much."""
    misses = []
    for name, limit_s in limits.items():
        value_s = run.latency_s.get(name, math.nan)
        if math.isnan(value_s) or math.isinf(value_s):
            misses.append(f"{name} is undefined: too many requests had no good answer")
        elif value_s > limit_s:
            allowed, ratio = value_words(name, limit_s), value_s / limit_s
            far = f"is {rounded(ratio)} × {allowed}"
            far = far if ratio >= 2 else f"misses {allowed} by {percentage(ratio - 1)}"
            misses.append(f"{name} {value_words(name, value_s)} {far}")
    if run.error_ratio > error_limit:
        misses.append(f"{percentage(run.error_ratio)} of requests fail where {percentage(error_limit)} may")
    if not misses and run.rate_rps is not None:
        misses.append(f"{rounded(run.answered_rps)} of {rounded(run.rate_rps)} requests/s were answered")
    return " and ".join(misses) or "where requests were not answered in time"
