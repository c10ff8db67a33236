"""Chooses the best point of a load test with the reason, and finds what limits a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck, find_bottleneck
from batchtune.measure.caveats import settings_of
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, coded
from batchtune.scenario.spec.scenario import Scenario
from batchtune.system import usable_cpus
from batchtune.tune.trials.trial import Trial


def trial_bottleneck(trial: Trial, scenario: Scenario | None = None) -> Bottleneck | None:
    """Find what limits one point of a load test: the server, a noisy host or a slow client; None: the point failed or
    has no figures. A point at a rate that met the SLO is not said to be limited by the server.

    `scenario` None: the server's flags and CPUs are unknown.
    """
    if trial.measurement is None or trial.failure is not None:
        return None
    configuration = trial.configuration
    verdict = _verdict(configuration, trial.measurement, scenario, blame_met=False)
    if verdict.kind == "device" and configuration.known and configuration.batching is None:
        return replace(verdict, advice=coded("more_device_or_batching"))
    return verdict


def typical_run(
    configuration: Configuration,
    measured: Sequence[Measurement],
    *,
    scenario: Scenario | None = None,
    **blame: bool,
) -> tuple[Measurement, Bottleneck] | None:
    """Return (run, bottleneck) that stand for a configuration: the kind of bottleneck that most of its runs have, and
    the last run of this kind. None without runs.

    `scenario`: the flags of its target say how many request threads the server has. `blame`: `blame_met` and
    `at_capacity` of `find_bottleneck`; by default a run at a rate that met the SLO has a bottleneck only with objective
    capacity, or without a scenario. Noise of the host is no bottleneck here: it differs from run to run and is a
    caveat.
    """
    blame.setdefault("blame_met", scenario is None or scenario.objective == "capacity")
    limits = [(run, _verdict(configuration, run, scenario, blame_host=False, **blame)) for run in measured]
    usual = Counter(limit.kind for _, limit in limits).most_common(1)
    return [(run, limit) for run, limit in limits if limit.kind == usual[0][0]][-1] if usual else None


def usual_bottleneck(
    configuration: Configuration,
    measured: Sequence[Measurement],
    *,
    scenario: Scenario | None = None,
    **blame: bool,
) -> Bottleneck | None:
    """Return the bottleneck that most runs of a configuration have, with the figures of its `typical_run`; None without
    runs."""
    typical = typical_run(configuration, measured, scenario=scenario, **blame)
    return None if typical is None else typical[1]


def searched_bottleneck(
    configuration: Configuration,
    measured: Sequence[Measurement],
    *,
    tried: Iterable[Configuration],
    rivals: Iterable[Configuration],
    scenario: Scenario,
    at_capacity: bool = False,
) -> Bottleneck | None:
    """Return the bottleneck that most runs of a configuration have, with advice that fits a search; None without runs.

    Where the usual advice is a shorter batch timeout or more threads, but one of `tried` had that already, the advice
    says so; not where one of `rivals`, which may be better than the configuration, had it.
    """
    verdict = usual_bottleneck(configuration, measured, scenario=scenario, at_capacity=at_capacity)
    # The parameter that is advised to change, and whether it is advised to be less.
    searched = {
        "batch_timeout": ("batch_timeout_micros", True),
        "batch_threads": ("num_batch_threads", False),
    }
    name, less = searched.get("none" if verdict is None else verdict.kind, ("", False))
    if verdict is None or not name:
        return verdict
    ours = configuration.in_force(name, cpus=scenario.target.cpus)

    def is_among(others: Iterable[Configuration]) -> bool:
        batched = (other for other in others if other.batching is not None)
        values = (other.in_force(name, cpus=scenario.target.cpus) for other in batched)
        return any(value < ours if less else value > ours for value in values)

    if not is_among(tried) or is_among(rivals):
        return verdict
    which = "lower_was_tried" if less else "higher_was_tried"
    return replace(verdict, advice=coded(which, name=configuration.word(name)))


def spoilt_by(trial: Trial) -> Literal["client", "host"] | None:
    """Return whether the client or the host made a run's figures useless; None: neither did, or the run has no figures.

    A run with the verdict PASS, FAIL or UNSURE counts as not spoilt, even with a late client or a noisy host.
    """
    measured = trial.measurement
    if measured is None:
        return None
    spoilt: dict[str, Literal["client", "host"]] = {"INVALID": "client", "NOISY": "host"}
    if measured.verdict is not None:
        return spoilt.get(measured.verdict)
    kind = _verdict(trial.configuration, measured).kind
    return "client" if kind == "client" else "host" if kind == "host_noise" else None


def rows_per_request(measured: Measurement) -> float | None:
    """Compute the mean number of rows of an answered request; None when no request was answered."""
    requests_per_s = measured.throughput_rps.value
    return measured.throughput_rows_per_s.value / requests_per_s if requests_per_s > 0.0 else None


def _verdict(
    configuration: Configuration, measured: Measurement, scenario: Scenario | None = None, **blame: bool
) -> Bottleneck:
    """Find what limits a run; `blame`: `blame_host`, `blame_met` and `at_capacity` of `find_bottleneck`."""
    cpus = None if scenario is None else scenario.target.cpus
    settings = settings_of(
        configuration,
        rows_per_request=rows_per_request(measured) or 1.0,
        server_cores=_cores(None if cpus is None else tuple(cpus)),
        flags={} if scenario is None else scenario.target.flags,
        protocol=None if scenario is None else scenario.request.protocol,
        cpus=cpus,
        known=configuration.known,
    )
    return find_bottleneck(measured, settings, **blame)


@cache
def _cores(cpus: tuple[int, ...] | None) -> float:
    """`usable_cpus`, read once: a report asks for up to 2,000 trials, and each look reads the control groups."""
    return usable_cpus(cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPoint:
    """The best point of a load test, and why it is the best, as a finding."""

    point: Trial
    why: Coded


def best_point(points: Sequence[Trial]) -> BestPoint | None:
    """Choose the point with the highest throughput of those with the verdict PASS; without any, of those with UNSURE;
    then the FAIL that misses the SLO by least; without an SLO, of all points. None: all points are spoilt or failed.

    Of points whose throughput cannot be distinguished from the highest, the one with the least load is chosen.
    """
    counting = [point for point in points if point.measurement is not None and spoilt_by(point) is None]
    if not counting:
        return None
    by_verdict = {
        verdict: [point for point in counting if measurement_of(point).verdict == verdict]
        for verdict in ("PASS", "UNSURE", "FAIL", None)
    }
    if by_verdict["PASS"]:
        return _most_throughput(by_verdict["PASS"], "best_of_kept")
    if by_verdict["UNSURE"]:
        return _most_throughput(by_verdict["UNSURE"], "best_of_unsure")
    if by_verdict["FAIL"]:
        nearest = min(by_verdict["FAIL"], key=lambda point: max(point.constraints.values(), default=0.0))
        return BestPoint(point=nearest, why=coded("nearest_of_missed"))
    return _most_throughput(by_verdict[None], "best")


def _most_throughput(points: Sequence[Trial], code: str) -> BestPoint:
    top = max(points, key=lambda point: _throughput(point).value)
    enough = [point for point in points if _throughput(point).value >= _throughput(top).low]
    least = min(enough or [top], key=_load)
    if least is top:
        return BestPoint(point=top, why=coded(code, which=coded("highest_throughput")))
    which = coded("least_load", highest_rps=_throughput(top).value, load=f"{_load(top):,.6g}")
    return BestPoint(point=least, why=coded(code, which=which))


def _load(point: Trial) -> float:
    measured = measurement_of(point)
    return float(measured.concurrency or measured.offered_rps or 0.0)


def _throughput(point: Trial) -> Estimate:
    return measurement_of(point).throughput_rps


def measurement_of(point: Trial) -> Measurement:
    """Return the measurement of a point that was measured.

    Raises:
        ValueError: the point has no measurement.
    """
    if point.measurement is None:
        raise ValueError("only points that were measured are judged")
    return point.measurement
