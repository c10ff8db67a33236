"""How far apart do two runs of one configuration lie, and what will the next run show?

Runs of a benchmark differ by more than the error within each of them: another seed, another placement of threads, a
busier neighbour. So a figure that a fresh run is to reproduce gets a prediction interval from the spread *between*
runs, on the log scale. Few runs estimate that spread badly; it is therefore moderated: the variance is averaged with
a stated prior, weighted as if the prior had been seen over policy.PRIOR_DEGREES degrees of freedom (the empirical-Bayes
variance of Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchtune.measure.statistics.distributions import Z_95, t_quantile
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.tune import policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Between-run standard deviation of a logarithm, and the degrees of freedom behind it (the prior's included)."""

    sd: float
    degrees: int

    def half_width(self, runs: int) -> float:
        """Half the 95 % prediction interval, in logs, of one fresh run after the mean of `runs` of them."""
        return t_quantile(0.975, self.degrees) * self.sd * math.sqrt(1.0 + 1.0 / runs)


def spread(groups: Iterable[Sequence[float]], *, prior_sd: float, prior_degrees: int | None = None) -> Noise:
    """The moderated noise of positive values; each group holds the runs of one configuration, side by side.

    A/A: only deviations from the group's own mean count, so configurations may differ as they please. `prior_degrees`
    None: as policy says.
    """
    if prior_degrees is None:
        prior_degrees = policy.PRIOR_DEGREES
    squares, degrees = 0.0, 0
    for values in groups:
        logs = _logs(values)
        if len(logs) > 1:
            mean = sum(logs) / len(logs)
            squares += sum((log - mean) ** 2 for log in logs)
            degrees += len(logs) - 1
    total = prior_degrees + degrees
    sd = math.sqrt((prior_degrees * prior_sd**2 + squares) / total) if total else math.nan
    return Noise(sd=sd, degrees=total)


def geometric_mean(values: Iterable[float]) -> float:
    """NaN when there is none, or when one is not a positive finite number."""
    values = list(values)
    logs = _logs(values)
    return math.exp(sum(logs) / len(logs)) if logs and len(logs) == len(values) else math.nan


def predict(
    runs: Sequence[Estimate],
    *,
    repeats: Iterable[Sequence[float]],
    prior_sd: float,
    drift_sd: float = 0.0,
) -> Estimate:
    """What a fresh run will show: geometric mean of `runs` and its 95 % prediction interval.

    The half width is the widest of three: from the spread of these runs, from that of all `repeats` (A/A: each
    group one configuration, over as much time as there is), and from the error within a run. What the host drifts from
    these runs to the fresh one, `drift_sd` in logs, is independent of all three.
    """
    values = [run.value for run in runs]
    centre = geometric_mean(values)
    if not math.isfinite(centre):
        return Estimate(value=values[0] if values else math.nan, low=math.nan, high=math.nan)
    own = spread([values], prior_sd=prior_sd).half_width(len(runs))
    pooled = spread(repeats, prior_sd=prior_sd).half_width(len(runs))
    within = _within(runs) * math.sqrt(1.0 + 1.0 / len(runs))
    half = math.hypot(max(own, pooled, within), Z_95 * drift_sd)
    return Estimate(value=centre, low=centre * math.exp(-half), high=centre * math.exp(half))


def paired_ratio(pairs: Sequence[tuple[float, float]], *, run_sd: float) -> Estimate | None:
    """The ratio a/b over pairs (a, b) measured side by side: geometric mean and 95 % interval of the mean.

    The spread of few pairs is moderated with what two independent runs would differ by, √2·`run_sd`. None when no
    pair has two positive finite values.
    """
    ratios = [a / b for a, b in pairs if _usable(a) and _usable(b)]
    if not ratios:
        return None
    noise = spread([ratios], prior_sd=math.sqrt(2.0) * run_sd)
    half = t_quantile(0.975, noise.degrees) * noise.sd / math.sqrt(len(ratios))
    centre = geometric_mean(ratios)
    return Estimate(value=centre, low=centre * math.exp(-half), high=centre * math.exp(half))


def _within(runs: Sequence[Estimate]) -> float:
    """Median over the runs of half the interval's width in logs; 0 where a run has no interval."""
    halves = sorted(
        0.5 * math.log(run.high / run.low) if _usable(run.low) and _usable(run.high) else 0.0 for run in runs
    )
    return halves[len(halves) // 2]


def _logs(values: Iterable[float]) -> list[float]:
    return [math.log(value) for value in values if _usable(value)]


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0.0


def mean_keeps(latencies: Sequence[float], limit: float) -> bool:
    """Whether the mean latency of runs alike lies below a limit, at 95 %; False where one has no bound."""
    if not all(math.isfinite(latency) for latency in latencies):
        return False
    noise = spread([latencies], prior_sd=policy.LATENCY_PRIOR_SD)
    error = t_quantile(0.95, noise.degrees) * noise.sd / math.sqrt(len(latencies))
    return geometric_mean(latencies) * math.exp(error) <= limit
