"""Which point of a load test is best, and why?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.measure.measurement import Measurement
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.units import rounded
from batchtune.tune.evidence.bottleneck_of import spoilt_by
from batchtune.tune.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPoint:
    """One point of a range, and what makes it the best."""

    point: Trial
    why: str


def best_point(points: Sequence[Trial]) -> BestPoint | None:
    """The most throughput within the SLO; None: no point counts.

    Of points whose throughput cannot be told apart it is the one with the least load. Where no point keeps the SLO for
    sure, one that may comes before those that break it; of these the one that breaks it least.
    """
    counting = [point for point in points if point.measurement is not None and spoilt_by(point) is None]
    if not counting:
        return None
    by_verdict = {
        verdict: [point for point in counting if _measured(point).verdict == verdict]
        for verdict in ("PASS", "UNSURE", "FAIL", None)
    }
    if by_verdict["PASS"]:
        return _most_throughput(by_verdict["PASS"], "of the points that keep the SLO ")
    if by_verdict["UNSURE"]:
        return _most_throughput(by_verdict["UNSURE"], "no point keeps the SLO for sure; of those that may ")
    if by_verdict["FAIL"]:
        nearest = min(by_verdict["FAIL"], key=lambda point: max(point.constraints.values(), default=0.0))
        return BestPoint(point=nearest, why="no point keeps the SLO, and this one misses it by least")
    return _most_throughput(by_verdict[None], "")


def _most_throughput(points: Sequence[Trial], among: str) -> BestPoint:
    top = max(points, key=lambda point: _throughput(point).value)
    enough = [point for point in points if _throughput(point).value >= _throughput(top).low]
    least = min(enough or [top], key=_load)
    if least is top:
        return BestPoint(point=top, why=f"{among}it has the highest throughput".strip())
    highest = f"{rounded(_throughput(top).value)} requests/s at {_load(top):,.6g}"
    return BestPoint(
        point=least, why=f"{among}it needs the least load for what cannot be told from the highest, {highest}"
    )


def _load(point: Trial) -> float:
    measured = _measured(point)
    return float(measured.concurrency or measured.offered_rps or 0.0)


def _throughput(point: Trial) -> Estimate:
    return _measured(point).throughput_rps


def _measured(point: Trial) -> Measurement:
    if point.measurement is None:
        raise ValueError("only points that were measured are judged")
    return point.measurement
