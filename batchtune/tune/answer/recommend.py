"""Recommends a configuration from the trials: the one that held the highest rate, or was best under the fixed load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from batchtune.batching.parameters import Configuration, server_defaults
from batchtune.errors import TargetError
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, coded
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import can_be_off, unsayable
from batchtune.tune.answer.choice import Capacities, FixedLoads
from batchtune.tune.answer.reason import (
    absence_of_batching,
    explain_gain,
    failure_notes,
    failure_with_batching,
    nearest_first,
    nothing_to_recommend,
    padding_note,
    too_short,
)
from batchtune.tune.answer.recommendation import (
    Alone,
    Alternative,
    Capacity,
    Compared,
    Helps,
    ModelResult,
    OpenQuestion,
    Promise,
    Recommendation,
    range_of,
)
from batchtune.tune.evidence.best_point import searched_bottleneck, typical_run, usual_bottleneck
from batchtune.tune.evidence.bracket import LEVEL, OPEN, PREDICTION_RUNS, BracketRun
from batchtune.tune.search.capacity import CapacitySearch
from batchtune.tune.search.contenders import REFERENCES, SIZE, THREADS, Contender, same_instances
from batchtune.tune.search.fixed_load import FixedLoadSearch, search_of
from batchtune.tune.search.search_loop import Search
from batchtune.tune.trials.trial import (
    SearchSummary,
    Trial,
    explain_failure,
    measuring_s,
    without_superseded,
)

WIDE_SIZES = 4
"""Largest over smallest batch size that must have been measured before sizes are compared (noisy.py, linear)."""


def cannot_pay(trials: Sequence[Trial]) -> Coded | None:
    """Return the finding that batching cannot pay, since the time of a batch grows in proportion to its rows; None:
    larger batches have more rows/s, or too few sizes were measured.

    The times are the server's counters, from the trials with the fewest batch threads, whose batches disturb each other
    least.
    """
    times = _execution_times(trials)
    if len(times) < 2 or max(times) < WIDE_SIZES * min(times):
        return None
    least, most = min(times), max(times)
    per_row_s = {rows: mean_s / rows for rows, mean_s in times.items()}
    if per_row_s[least] / min(per_row_s.values()) >= LEVEL:
        return None
    return coded("cannot_pay", most_rows=most, least_rows=least, times=times[most] / times[least])


def _execution_times(trials: Sequence[Trial]) -> dict[int, float]:
    """Rows -> mean seconds of a batch, in the trials with fewest batch threads."""
    accounts = [
        (trial.configuration.in_force("num_batch_threads"), trial.measurement.server)
        for trial in trials
        if trial.configuration.batching is not None
        and trial.measurement is not None
        and trial.measurement.server is not None
        and trial.measurement.server.execution_s_by_rows
    ]
    fewest = min((threads for threads, _ in accounts), default=0)
    spent: dict[int, tuple[int, float]] = {}
    for threads, server in accounts:
        if threads == fewest:
            for rows, mean_s in server.execution_s_by_rows.items():
                batches, spent_s = spent.get(rows, (0, 0.0))
                more = server.batches_by_rows.get(rows, 0)
                spent[rows] = (batches + more, spent_s + more * mean_s)
    return {rows: spent_s / batches for rows, (batches, spent_s) in spent.items() if batches}


def trades(
    configuration: Configuration, figures: Mapping[str, float], others: Sequence[Compared], *, spread: float
) -> tuple[Alternative, ...]:
    """Return those of `others` that have more throughput at a higher p95 than the recommended `configuration`, or less
    throughput at a lower p95; the lowest p95 first.

    Only differences beyond noise count, and only the Pareto front is returned. `figures`: `throughput_rps` and `p95_s`
    of `configuration`. `spread`: standard deviation of the natural log of a figure between runs.
    """
    trading = []
    for other in others:
        p95 = other.latency_s.get("p95")
        if (
            not other.keeps
            or other.outside
            or other.configuration == configuration
            or p95 is None
            or not math.isfinite(p95.value)  # fewer requests were answered than the quantile needs
            or other.throughput_rps is None
        ):
            continue
        alternative = Alternative(
            configuration=other.configuration,
            throughput_rps=other.throughput_rps.value,
            p95_s=p95.value,
            throughput_ratio=other.throughput_rps.value / figures["throughput_rps"],
            p95_ratio=p95.value / figures["p95_s"],
            confirmations=other.fresh,
        )
        least = max(LEVEL, math.exp(2.0 * spread))
        ratios = alternative.throughput_ratio, alternative.p95_ratio
        if min(ratios) >= least or max(ratios) <= 1.0 / least:
            trading.append(alternative)
    front = [
        candidate
        for candidate in trading
        if not any(
            rival.throughput_ratio >= candidate.throughput_ratio and rival.p95_ratio <= candidate.p95_ratio
            for rival in trading
            if rival is not candidate
        )
    ]
    return tuple(sorted(front, key=lambda alternative: alternative.p95_s))


def recommend(
    trials: Sequence[Trial],
    *,
    scenario: Scenario,
    slo: SloSpec | None = None,
    search: SearchSummary | None = None,
) -> Recommendation:
    """Choose the best of the configurations measured, by `slo` (None: the scenario's).

    `search`: the sweep's summary, which is copied into the recommendation.

    Raises:
        NoFeasibleConfigurationError: none meets the SLO; the message names the nearest and by how much it misses.
        InconclusiveError: none met the SLO, but too little was tried to say that none does.
        MeasurementInvalidError: the client limited every load of several models, or every run at a rate that missed.
        TargetError: every trial failed, or the server applied no configuration completely.
    """
    if search is not None and search.stop_reason.code == "nothing_set":
        last = next((trial.failure for trial in reversed(trials) if trial.failure), "")
        raise TargetError(
            f"the server applied no configuration completely; the last: {last}",
            hint="check by hand that it applies what target.set sends",
        )
    promised = slo or scenario.slo
    account = _accounts(trials, scenario, promised)
    chosen = account.chosen()
    if chosen is None:
        raise nothing_to_recommend(trials, account)
    account.beside = chosen
    return _Answer(account, chosen, trials, scenario, promised, search).recommendation()


def compared_with_slo(trials: Sequence[Trial], *, scenario: Scenario) -> tuple[Compared, ...]:
    """Return the configurations that were tried, the nearest to the SLO first, for a search without a recommendation.
    In each, `gain` is None and `open` False."""
    account = _accounts(trials, scenario, scenario.slo)
    return tuple(
        _Answer(account, contender, trials, scenario, scenario.slo, None).compared_with_slo(run)
        for contender, run in nearest_first(account).items()
    )


def _accounts(trials: Sequence[Trial], scenario: Scenario, slo: SloSpec) -> Capacities | FixedLoads:
    state = judged(trials, scenario=scenario, slo=slo)
    return Capacities(state) if isinstance(state, CapacitySearch) else FixedLoads(state)


def judged(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None) -> Search:
    """Return a search in the state after a sweep of these trials, whose runs are judged by `slo` (None: the
    scenario's)."""
    judged_by = scenario if slo is None else scenario.model_copy(update={"slo": slo})
    state = search_of(judged_by, budget_s=math.inf)
    state.observe(
        trial for trial in without_superseded(trials) if trial.source not in ("variant", "load", "node")
    )
    state.name_points()
    first = [run.answered_rps for run in state.unbatched().runs[:2] if run.clients is not None]
    state.name_rule(max(first, default=0.0))
    rule_rows = None if state.rule is None else state.rule.max_batch_size
    for contender in state.contenders.all():
        if rule_rows not in (None, contender.rows) and "rule" in contender.sources:
            contender.sources.remove("rule")  # of an older run, which applied the rule again and again
            contender.sources += [] if contender.sources else ["grid"]
    return state


class _Answer:
    """Assembles the recommendation of the `chosen` contender."""

    def __init__(
        self,
        account: Capacities | FixedLoads,
        chosen: Contender,
        trials: Sequence[Trial],
        scenario: Scenario,
        slo: SloSpec,
        search: SearchSummary | None,
    ) -> None:
        self._account, self._chosen, self._trials = account, chosen, trials
        self._scenario, self._slo, self._search = scenario, slo, search
        self._by_number = {trial.number: trial for trial in trials}
        self._stop_reason = "" if search is None else search.stop_reason.code
        self._state: Search = account.search

    def compared_with_slo(self, run: BracketRun) -> Compared:
        """Return the chosen contender compared with the SLO alone (`gain` None); `run`: shown where it has no run that
        counts."""
        names = {contender: name for name, contender in self._references().items()}
        return replace(self._compared(self._chosen, names.get(self._chosen), otherwise=[run]), gain=None)

    def recommendation(self) -> Recommendation:
        account, chosen, scenario = self._account, self._chosen, self._scenario
        runs, fresh = account.behind(chosen)
        measured = self._measured(runs)
        contenders = [c for c in self._state.contenders if c.runs]
        batched = [c for c in contenders if c.configuration.batching is not None and account.is_judged(c)]
        best = max((c for c in batched if account.keeps(c)), key=lambda c: account.ends(c)[0], default=None)
        if chosen.configuration.batching is not None:
            best = chosen
        unbatched = self._unbatched(best)
        gain = None if best is None or unbatched is None else account.gain(best, unbatched)
        unable = cannot_pay(self._trials)
        helps = self._helps(best, batched, unbatched, gain, unable=unable is not None)
        if helps == ("yes" if chosen.configuration.batching is None else "no"):
            helps = "not distinguishable"  # what is recommended says otherwise
        is_level = gain is not None and gain.low <= 1.0 <= gain.high
        capacity = account.capacity(chosen)
        is_refuted = capacity is not None and capacity.refuted_rps is not None
        is_open = is_level and unbatched is not None and account.is_open(unbatched, chosen)
        is_settled = helps == "no" or is_level == (helps == "not distinguishable")
        is_known = is_settled and not (is_refuted or is_open)
        references = self._references()
        named_apart = (chosen, *references.values())
        others = [c for c in self._state.contenders.all() if c not in named_apart and self._has_figures(c)]
        compared = tuple(self._compared(c) for c in sorted(others, key=lambda c: -account.ends(c)[0]))
        named = tuple(self._compared(c, name) for name, c in references.items())
        rivals = [c for c in contenders if account.is_open(c, chosen)]
        if self._state.of_models:  # without a curve whom nobody tried may hold anything
            rivals += self._untried_beside()
        questions = [*account.questions(chosen, rivals)]
        if self._stop_reason == "server_gone":
            questions.insert(0, OpenQuestion(code="server_gone"))
        missing = (
            too_short(self._trials, scenario) if questions and questions[0].code != "server_gone" else ()
        )
        bottleneck = None
        if not self._state.of_models:
            usual = searched_bottleneck(
                chosen.configuration,
                self._measured(_held_of(runs)),
                tried=(c.configuration for c in contenders),
                rivals=(c.configuration for c in rivals),
                scenario=scenario,
                at_capacity=bool(capacity and capacity.missed_rps),
            )
            bottleneck = self._refusing(usual, capacity)
        if bottleneck is not None and bottleneck.kind == "client" and not scenario.load.open_loop:
            questions.append(OpenQuestion(code="client_limited"))
        last = self._by_number[next((run for run in reversed(runs) if not run.failed), runs[-1]).trial]
        is_predicted = not questions and len(runs) >= PREDICTION_RUNS
        latency_s, throughput = self._latency(runs, is_predicted), _throughput(runs, is_predicted)
        rate_rps = self._state.stated_rps if self._state.of_models else last.rate_rps
        return Recommendation(
            configuration=chosen.configuration,
            names=tuple(chosen.sources),
            objective=scenario.objective,
            throughput_rps=throughput,
            throughput_rows_per_s=range_of(map(_rows_per_s, self._runs_trials(runs)), is_predicted),
            latency_s=latency_s,
            slo={**self._state.limits, "errors": self._slo.error_ratio},
            batching_helps=helps,
            reason=explain_gain(
                self._activity(best),
                runs=0 if best is None else len(account.behind(best)[0]),
                absence=absence_of_batching(batched, self._trials),
                gain=gain if is_known else None,
                unbatched_rows_per_s=self._unbatched_rows_per_s(unbatched),
                missed=self._missed(unbatched),
                configuration=chosen.configuration if best is None else best.configuration,
            ),
            trials=len(self._trials),
            seconds=measuring_s(self._trials),
            runs=len(runs),
            behind=tuple(run.trial for run in runs),
            confirmations=fresh,
            rate_rps=rate_rps if capacity is None else capacity.held_rps,
            concurrency=last.concurrency if capacity is None else None,
            rows_per_request=scenario.request.rows_most,
            interval="prediction" if is_predicted else "range",
            established=not questions,
            open_questions=tuple(questions),
            may_find_more=bool(self._untried_beside()),  # neighbours of the chosen contender did not run
            level_with=self._level_with(references),
            capacity=capacity,
            batching_gain=gain,
            mean_batch_rows=_mean_batch_rows(self._runs_trials(runs)),
            promises=self._promises(runs),
            cannot_pay=unable if helps == "no" else None,
            rule=None if self._state.rule is None else self._state.rule.arithmetic(),
            bottleneck=bottleneck,
            search=self._search,
            references=named,
            defaults=self._defaults(references),
            contenders=compared,
            failed_references=self._failed_references(),
            alternatives=()
            if isinstance(account, Capacities) or "p95" not in latency_s
            else trades(
                chosen.configuration,
                {"throughput_rps": throughput.value, "p95_s": latency_s["p95"].value},
                (*named, *compared),
                spread=account.search.spread(),
            ),
            caveats=_caveats(measured),
            ignored=self._ignored(),
            notes=(
                *missing,
                *self._notes(runs),
                *padding_note(self._runs_trials(runs), chosen.configuration, self._trials),
            ),
            models=self._models(capacity),
        )

    def _models(self, capacity: Capacity | None) -> tuple[ModelResult, ...]:
        """The result of each of several models, in the scenario's order; () with one model."""
        scale = 1.0 if capacity is None else capacity.held_rps / (self._state.stated_rps or 1.0)
        return tuple(
            ModelResult(
                name=name,
                stated_rps=own.load.rate_rps or 0.0,
                rate_rps=scale * (own.load.rate_rps or 0.0),
                alone=self._alone(self._state.alone.get(name)),
            )
            for name, own in self._scenario.of_models().items()
        )

    def _alone(self, search: Search | None) -> Alone | None:
        best = None if search is None else search.best()
        if search is None or best is None:
            return None
        rate_rps, standing = best.bracket.held_rps, None
        if isinstance(search, FixedLoadSearch):
            rate_rps, standing = search.stated_rps, search.standing(best)
        return Alone(
            configuration=best.configuration.of_model(search.name),
            rate_rps=rate_rps,
            of_limit=None if standing is None else math.exp(-standing.mean),
            tried=sum(bool(contender.runs) for contender in search.contenders.all()),
        )

    # The configurations beside the answer.

    def _references(self) -> dict[str, Contender]:
        """Name -> contender of the references that have figures, also if one is chosen; in the order of the answer."""
        named = ((name, self._state.contenders.of(name)) for name in REFERENCES)
        return {name: c for name, c in named if c is not None and self._has_figures(c)}

    def _defaults(self, references: Mapping[str, Contender]) -> dict[str, str]:
        """Parameter -> value of TensorFlow Serving's defaults, if `references` has them; {}: it has not."""
        of_server, cpus = references.get("defaults"), self._scenario.target.cpus
        if of_server is None or of_server.configuration.dialect != "tfserving":
            return {}
        values = {name: str(value) for name, value in server_defaults(cpus).items()}
        return values if cpus else {**values, THREADS: "one per CPU"}

    def _has_figures(self, contender: Contender) -> bool:
        return not contender.is_broken and bool(self._account.behind(contender)[0])

    def _unbatched(self, best: Contender | None) -> Contender | None:
        """The contender without batching to compare `best` with: the one with as many model instances, where it ran;
        None: none ran."""
        unbatched = alike = self._state.contenders.of("no_batching")
        if unbatched is not None and best is not None:
            alike = self._state.contenders.find(same_instances(unbatched.configuration, best.configuration))
        return next((c for c in (alike, unbatched) if c is not None and c.runs), None)

    def _compared(
        self, contender: Contender, name: str | None = None, *, otherwise: Sequence[BracketRun] = ()
    ) -> Compared:
        """Compare a contender with the answer; `otherwise`: its runs to show where it has none that count."""
        account = self._account
        runs, fresh = account.behind(contender)
        runs = runs or [*otherwise]
        measured, capacity = self._measured(runs), account.capacity(contender)
        named_runs = measured if name is not None and not self._state.of_models else ()
        return Compared(
            names=tuple(dict.fromkeys(filter(None, (name, *contender.sources)))),
            configuration=contender.configuration,
            throughput_rps=_throughput(runs) if runs else None,
            latency_s=self._latency(runs),
            runs=len(runs),
            fresh=fresh,
            behind=tuple(run.trial for run in runs),
            keeps=account.keeps(contender),
            undecided=self._is_undecided(contender),
            open=contender.eligible and account.is_open(contender, self._chosen),
            outside=not contender.eligible,
            capacity=capacity,
            gain=account.gain(self._chosen, contender),
            met=sum(run.held for run in runs),
            mean_batch_rows=_mean_batch_rows(self._runs_trials(runs)),
            bottleneck=usual_bottleneck(
                contender.configuration,
                named_runs,
                scenario=self._scenario,
                at_capacity=bool(capacity and capacity.missed_rps),
            ),
            caveats=_caveats(measured),
        )

    def _level_with(self, references: dict[str, Contender]) -> str | None:
        """Name of the simplest reference that may be as good as the chosen contender; None: none may."""
        chosen = self._chosen
        for name, reference in sorted(references.items(), key=lambda pair: pair[1].simplicity):
            gain = self._account.gain(chosen, reference)
            is_level = gain is not None and 0.0 < gain.low <= 1.0 <= gain.high < math.inf
            if is_level and reference is not chosen and self._account.keeps(reference):
                return name
        return None

    # Does batching help?

    def _helps(
        self,
        best: Contender | None,
        batched: Sequence[Contender],
        unbatched: Contender | None,
        gain: Estimate | None,
        *,
        unable: bool,
    ) -> Helps:
        """Whether batching helps, by the ends of the brackets; a gain below LEVEL counts as none.

        `best`: the best contender with batching that keeps the SLO; `batched`: all with batching that ran; `gain`: best
        over `unbatched`; `unable`: batching cannot pay on this device.
        """
        if unbatched is None or unbatched.is_broken or not batched:
            return "not distinguishable"
        account = self._account
        if best is None:
            is_open = any(account.is_open(c, unbatched) for c in batched)
            return "no" if account.keeps(unbatched) and not is_open else "not distinguishable"
        is_level = account.keeps(unbatched) and gain is not None and gain.value < LEVEL
        is_beyond = account.ends(best)[0] > account.ends(unbatched)[1] and not is_level
        misses = isinstance(account, FixedLoads) and not account.keeps(unbatched)
        if is_beyond or (misses and not self._is_undecided(unbatched)):
            return "yes"
        most = max(account.ends(c)[1] for c in batched)
        if most < LEVEL * account.ends(unbatched)[0] or (gain is not None and gain.high < LEVEL):
            return "no"
        return "no" if unable and gain is not None and gain.low < 1.0 else "not distinguishable"

    def _unbatched_rows_per_s(self, unbatched: Contender | None) -> float:
        """Median rows/s of the closed loops without batching; NaN: there is none."""
        rows = [
            measured.throughput_rows_per_s.value
            for run in (() if unbatched is None else unbatched.runs)
            if run.clients is not None and run.clients > 1
            for measured in self._measured([run])
        ]
        return statistics.median(rows) if rows else math.nan

    def _is_undecided(self, contender: Contender) -> bool:
        """Whether a contender missed the SLO in its only run, where the interval of each latency reaches below its
        limit; or in runs that cannot be compared with the recommended contender's (`Search.comparable`)."""
        account = self._account
        runs = account.behind(contender)[0]
        if isinstance(account, Capacities) or account.keeps(contender) or self._state.of_models:
            return False
        if not account.search.own_runs(contender, self._chosen):
            return bool(runs)
        measured = self._measured(runs)
        if len(runs) != 1 or not measured or measured[0].error_ratio > self._slo.error_ratio:
            return False
        lows = {name: latency.low for name, latency in measured[0].latency_s.items()}
        return all(lows.get(name, math.inf) <= limit for name, limit in self._state.limits.items())

    def _missed(self, unbatched: Contender | None) -> tuple[str, float, float] | None:
        """(quantile, its seconds, the limit in seconds) that no batching misses under the scenario's own load; None:
        it keeps the SLO, that is undecided, or the objective is capacity."""
        if unbatched is None or isinstance(self._account, Capacities) or self._account.keeps(unbatched):
            return None
        if self._is_undecided(unbatched):
            return None
        latency_s = self._latency(self._account.behind(unbatched)[0])
        for name, limit_s in self._state.limits.items():
            value = latency_s.get(name)
            if value is not None and not value.value <= limit_s:
                return name, value.value, limit_s
        return None

    def _activity(self, contender: Contender | None) -> Measurement | None:
        if contender is None:
            return None
        measured = self._measured(_held_of(self._account.behind(contender)[0]))
        typical = typical_run(contender.configuration, measured, scenario=self._scenario)
        return None if typical is None else typical[0]

    def _refusing(self, usual: Bottleneck | None, capacity: Capacity | None) -> Bottleneck | None:
        """Return `usual`; where it names no limit, the refusals by which all missed higher rates were missed."""
        if usual is None or capacity is None or usual.kind not in ("none", "unknown"):
            return usual
        higher = (run for run in self._chosen.runs if (run.rate_rps or 0.0) > capacity.held_rps)
        missed = self._measured(run for run in higher if not run.held and not run.by_client)
        commonest = {next(iter(run.errors), "") for run in missed}
        least_ratio = min((run.error_ratio for run in missed), default=0.0)
        refusals = {"queue_full", "server_error", "thread_pool_exhausted"}
        if least_ratio <= self._slo.error_ratio or not commonest <= refusals:
            return usual
        figures = {"rate_rps": capacity.held_rps, "error_ratio": least_ratio}
        text = coded("refuses_above", **figures, classes=", ".join(sorted(commonest)))
        return replace(usual, kind="errors", text=text, advice=coded("errors_advice"))

    # Figures.

    def _measured(self, runs: Iterable[BracketRun]) -> list[Measurement]:
        return [measured for trial in self._runs_trials(runs) for measured in trial.measurements.values()]

    def _runs_trials(self, runs: Iterable[BracketRun]) -> list[Trial]:
        return [self._by_number[run.trial] for run in runs if run.trial in self._by_number]

    def _latency(self, runs: Sequence[BracketRun], is_predicted: bool = False) -> dict[str, Estimate]:
        names = dict.fromkeys(name for run in runs for name in run.latency_s)
        values = {name: [run.latency_s[name] for run in runs if name in run.latency_s] for name in names}
        return {name: range_of(own, is_predicted) for name, own in values.items()}

    def _promises(self, runs: Sequence[BracketRun]) -> tuple[Promise, ...]:
        """Each latency limit with the runs against it, then that on errors where it is the nearest."""
        promises: list[Promise] = []
        missed = [
            run for run in self._chosen.bracket.open_runs if run.fresh and not run.held and run not in runs
        ]
        for name, limit_s in {**self._state.limits, "errors": self._slo.error_ratio}.items():
            known = [value for run in runs if not math.isnan(value := _figure(run, name))]
            if known and limit_s > 0.0 and (name != "errors" or (promises and max(known) > 0.0)):
                promises.append(
                    Promise(
                        name=name,
                        limit_s=limit_s,
                        value_s=statistics.median(known),
                        worst_s=math.inf if any(run.failed for run in runs) else max(known),
                        kept=sum(_keeps_limit(run, name, limit_s) for run in runs),
                        runs=len(runs),
                        missed_higher=sum(not _keeps_limit(run, name, limit_s) for run in missed),
                        fell_behind=sum(
                            run.fell_behind and _figure(run, name) <= limit_s for run in (*runs, *missed)
                        ),
                    )
                )
        nearest = min(promises, key=lambda promise: promise.spare_ratio, default=None)
        if promises and promises[-1].name == "errors" and promises[-1] is not nearest:
            promises.pop()
        return tuple(promises)

    # What else is to be said.

    def _untried_beside(self) -> list[Contender]:
        if self._chosen.configuration.batching is None:
            return []
        near = self._state.contenders.neighbours(self._chosen)
        barred = self._state.contenders.is_barred
        return [c for c in near if not c.runs and c.eligible and not barred(c)]

    def _failed_references(self) -> dict[str, str]:
        """Name -> error text of the references that failed."""
        failed = {
            name: [t for t in self._trials if t.configuration == c.configuration and t.state == "failed"]
            for name in REFERENCES
            if (c := self._state.contenders.of(name)) is not None and c.is_broken and c.runs
        }
        return {name: explain_failure(trials) or "without a word" for name, trials in failed.items()}

    def _notes(self, runs: Sequence[BracketRun]) -> Iterable[Coded]:
        if failure_with_batching(self._trials) is None:  # which the reason says
            yield from failure_notes(self._trials, self._state.contenders)
        if spoilt := self._runs_trials(run for run in runs if run.fresh and run.failed):
            yield coded(
                "confirmation_failed",
                failed=len(spoilt),
                runs=sum(run.fresh for run in runs),
                configuration=self._chosen.configuration.label(),
                why=explain_failure(spoilt) or "without a word",
            )
        if self._scenario.streams:
            yield coded("no_twin_of_streams")
        elif not can_be_off(self._scenario.target):
            yield coded("no_unbatched", why=unsayable(self._scenario.target))
        unbatched = self._unbatched(self._chosen)
        if (
            unbatched is not None
            and self._chosen.configuration.batching is not None
            and same_instances(unbatched.configuration, self._chosen.configuration) != unbatched.configuration
        ):
            yield coded("other_instances")
        if isinstance(self._account, Capacities) and self._slo != self._scenario.slo:
            yield coded("other_slo")
        if isinstance(self._account, FixedLoads):
            yield from self._too_slow(self._account.search)
            yield from self._left_out(self._account.search)
        yield from self._largest_of_space()

    def _too_slow(self, search: FixedLoadSearch) -> Iterator[Coded]:
        """That no batching cannot keep up with the scenario's rate, by its closed loop: then it has no run at it."""
        unbatched = search.contenders.of("no_batching")
        if unbatched is not None and search.is_saturated(unbatched) and not search.own_runs(unbatched):
            answered_rps = max(run.answered_rps for run in unbatched.runs)
            yield coded("unbatched_too_slow", rate_rps=search.stated_rps, answered_rps=answered_rps)

    def _left_out(self, search: FixedLoadSearch) -> Iterator[Coded]:
        """Which references have runs that do not count beside the recommended configuration."""
        for other in self._references().values():
            own = len(search.own_runs(other))
            left = own - len(search.own_runs(other, self._chosen))
            if left:
                label = other.configuration.label()
                yield coded("not_comparable", configuration=label, runs=left, of_runs=own)

    def _largest_of_space(self) -> Iterator[Coded]:
        """Of a space that the user wrote: which parameters that let a server do more at once have their largest value
        in the chosen configuration, so that the best may lie beyond."""
        values, point = self._state.contenders.values, self._chosen.point or {}
        names = values if self._scenario.streams else (SIZE, THREADS)
        for name in () if self._scenario.search.grow else names:
            several = values.get(name, ())
            if len(several) > 1 and type(several[-1]) is int and point.get(name) == several[-1]:
                yield coded("largest_of_space", name=self._chosen.configuration.word(name), value=several[-1])

    def _ignored(self) -> Literal["batches", "answers"] | None:
        """What suggests that the server ignores its batching parameters; None: nothing.

        "batches": some are larger than allowed. "answers": the server forms no batches, its parameters cannot be read
        back, and closed loops answer alike whatever the batch size.
        """
        means: dict[int, list[float]] = {}
        answered: dict[int, list[float]] = {}
        for contender in self._state.contenders.all():
            for measured in self._measured(contender.runs):
                mean = None if measured.server is None else measured.server.mean_batch_rows
                if mean is not None and contender.configuration.batching is not None:
                    means.setdefault(contender.rows, []).append(mean)
            loops = [run.answered_rps for run in contender.runs if (run.clients or 0) > 1 and run.latency_s]
            if loops:
                answered.setdefault(contender.rows, []).append(max(loops))
        if any(max(values) > OPEN * rows for rows, values in means.items() if len(means) > 1):
            return "batches"
        largest = max((mean for values in means.values() for mean in values), default=0.0)
        forms_batches = largest > OPEN * self._scenario.request.rows_most
        if forms_batches or self._scenario.target.reads_back or self._scenario.streams or not answered:
            return None
        rates = [rate for of_size in answered.values() for rate in of_size]
        is_wide = max(answered) >= WIDE_SIZES * min(answered)
        return "answers" if is_wide and max(rates) <= OPEN * min(rates) else None


def _throughput(runs: Sequence[BracketRun], is_predicted: bool = False) -> Estimate:
    """Requests/s of the runs that did not fail: median and range."""
    return range_of((run.answered_rps for run in runs if run.latency_s), is_predicted)


def _rows_per_s(trial: Trial) -> float:
    return math.fsum(measured.throughput_rows_per_s.value for measured in trial.measurements.values())


def _held_of(runs: Sequence[BracketRun]) -> Sequence[BracketRun]:
    """Those that met the SLO, which are typical of the rate that is stated; where none did, all."""
    return [run for run in runs if run.held] or runs


def _figure(run: BracketRun, name: str) -> float:
    """Latency quantile of a run, in seconds, or its share of errors; NaN: not measured."""
    return run.error_ratio if name == "errors" else run.latency_s.get(name, math.nan)


def _keeps_limit(run: BracketRun, name: str, limit: float) -> bool:
    return _figure(run, name) <= limit and not run.fell_behind


def _mean_batch_rows(trials: Sequence[Trial]) -> float | None:
    """Mean rows of a batch over these trials; None: the server counts none."""
    servers = [trial.server if trial.measurement is None else trial.measurement.server for trial in trials]
    rows = [server.mean_batch_rows for server in servers if server and server.mean_batch_rows is not None]
    return sum(rows) / len(rows) if rows else None


def _caveats(measured: Sequence[Measurement]) -> tuple[Coded, ...]:
    """The caveats of all runs, one of each code, with the figures of the last run that has it."""
    return tuple({caveat.code: caveat for measurement in measured for caveat in measurement.caveats}.values())
