"""On a host whose speed drifts, do fresh runs minutes later fall inside the intervals that a sweep states?

    python tests/benchmarks/twin/drifting_host.py [--sweeps 400]

Simulated, nothing is loaded. A host's speed follows an Ornstein-Uhlenbeck process of so large a standard deviation and
so long a memory (or stays). A sweep of 90 s makes a trial every 2.6 s: twelve of points that are seen once, three blocks
of three that race, five blocks of three that are confirmed. Each trial times the canary, the faster of two readings with
2 % of their own noise of which one in ten is preempted and a third slower, and runs at the host's speed with 2 % of its
own noise (p95: 4 %, and 1.4 times the host's; of a claimed capacity 4 times). Three fresh runs follow within 10 to
300 s. Printed for each host: the share of fresh runs whose throughput and p95 both lie inside the intervals, and the
median half widths of throughput's and of p95's, first without the canary, then with it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.tune import policy
from batchtune.tune.evidence import host_drift
from batchtune.tune.evidence.host_speed import ahead_sd
from batchtune.tune.evidence.run_noise import predict

TRIAL_S = 2.6
OWN_SD, OWN_P95_SD, CANARY_SD = 0.02, 0.04, 0.02
P95_PER_SPEED = {
    "a rate or a closed loop": host_drift.LATENCY_PER_SPEED,
    "capacity": 1.0 / policy.RATE_ELASTICITY,
}
HOSTS = [(0.0, 180.0), *((sd, memory_s) for sd in (0.05, 0.1, 0.2) for memory_s in (60.0, 180.0, 600.0))]


@dataclass(slots=True)
class Host:
    """Log speed of a machine, at instants that never go back."""

    sd: float
    memory_s: float
    chance: random.Random
    now_s: float = 0.0
    log_speed: float = 0.0

    def __post_init__(self) -> None:
        self.log_speed = self.chance.gauss(0.0, self.sd)

    def at(self, now_s: float) -> float:
        kept = math.exp(-(now_s - self.now_s) / self.memory_s)
        self.now_s = now_s
        self.log_speed = kept * self.log_speed + self.sd * math.sqrt(1.0 - kept**2) * self.chance.gauss(
            0.0, 1.0
        )
        return self.log_speed


@dataclass(frozen=True, slots=True)
class Run:
    throughput: float
    p95: float


@dataclass(frozen=True, slots=True)
class SimulatedSweep:
    """Runs by configuration, those that confirm the recommended one, the canaries, and the fresh runs that follow."""

    repeats: list[list[Run]]
    confirmed: list[Run]
    canaries_s: list[float]
    fresh: list[Run]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of fresh runs inside both intervals, and the median half widths of these in logs."""

    inside_ratio: float
    throughput_half: float
    p95_half: float


def simulated_sweep(
    sd: float, memory_s: float, *, chance: random.Random, p95_per_speed: float
) -> SimulatedSweep:
    host, now_s = Host(sd, memory_s, chance), 0.0
    runs: dict[int, list[Run]] = {}
    canaries_s: list[float] = []
    for arm in _arms():
        now_s += TRIAL_S
        speed = host.at(now_s)
        canaries_s.append(min(_canary_s(speed, chance) for _ in range(2)))
        runs.setdefault(arm, []).append(_run(speed, chance, p95_per_speed))
    fresh = []
    for delay_s in sorted(chance.uniform(10.0, 300.0) for _ in range(3)):
        fresh.append(_run(host.at(now_s + delay_s), chance, p95_per_speed))
    return SimulatedSweep([*runs.values()], runs[0][-5:], canaries_s, fresh)


def _arms() -> Iterator[int]:
    """Which configuration each trial runs; the recommended one is 0."""
    yield from range(12)
    for _ in range(8):
        yield from (0, 1, 2)


def _canary_s(speed: float, chance: random.Random) -> float:
    preempted = 1.33 if chance.random() < 0.1 else 1.0
    return preempted * math.exp(-speed + chance.gauss(0.0, CANARY_SD))


def _run(speed: float, chance: random.Random, p95_per_speed: float) -> Run:
    p95 = math.exp(-p95_per_speed * speed + chance.gauss(0.0, OWN_P95_SD))
    return Run(throughput=math.exp(speed + chance.gauss(0.0, OWN_SD)), p95=p95)


def stated(sweep: SimulatedSweep, *, ahead: float, p95_per_speed: float) -> tuple[Estimate, Estimate]:
    """The intervals of throughput and p95 of the recommended configuration, as `recommend` makes them.

    `ahead`: how far the speed may be from that of the trials, as a standard deviation in logs.
    """
    names = ("throughput", "p95")
    priors = (policy.FRESH_THROUGHPUT_PRIOR_SD, policy.FRESH_LATENCY_PRIOR_SD)
    throughput, p95 = (
        predict(
            [_exactly(getattr(run, name)) for run in sweep.confirmed],
            repeats=[[getattr(run, name) for run in runs] for runs in sweep.repeats],
            prior_sd=prior_sd,
            drift_sd=drifting * ahead,
        )
        for name, prior_sd, drifting in zip(names, priors, (1.0, p95_per_speed), strict=True)
    )
    return throughput, p95


def coverage(
    sd: float,
    memory_s: float,
    *,
    sweeps: int,
    seed: int = 1,
    p95_per_speed: float = host_drift.LATENCY_PER_SPEED,
) -> list[Coverage]:
    """Without the canary, and with it."""
    chance = random.Random(seed)
    inside = [0, 0]
    halves: list[list[tuple[float, float]]] = [[], []]
    for _ in range(sweeps):
        sweep = simulated_sweep(sd, memory_s, chance=chance, p95_per_speed=p95_per_speed)
        times_s = [TRIAL_S * number for number in range(len(sweep.canaries_s))]
        drift = ahead_sd(times_s, [math.log(canary_s) for canary_s in sweep.canaries_s])
        for at, ahead in enumerate((0.0, drift)):
            throughput, p95 = stated(sweep, ahead=ahead, p95_per_speed=p95_per_speed)
            halves[at].append((_half(throughput), _half(p95)))
            inside[at] += sum(
                throughput.low <= run.throughput <= throughput.high and p95.low <= run.p95 <= p95.high
                for run in sweep.fresh
            )
    return [
        Coverage(hits / (3 * sweeps), *map(statistics.median, zip(*half, strict=True)))
        for hits, half in zip(inside, halves, strict=True)
    ]


def _half(interval: Estimate) -> float:
    return 0.5 * math.log(interval.high / interval.low)


def _exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=400)
    asked = parser.parse_args()
    for name, p95_per_speed in P95_PER_SPEED.items():
        print(f"{name:<21}{'without the canary':>26}{'with it':>26}")
        for sd, memory_s in HOSTS:
            cells = coverage(sd, memory_s, sweeps=asked.sweeps, p95_per_speed=p95_per_speed)
            told = "".join(
                f"{cell.inside_ratio:9.1%} ±{math.expm1(cell.throughput_half):6.1%} ±{math.expm1(cell.p95_half):6.1%}"
                for cell in cells
            )
            print(f"{f'{sd:.0%}, {memory_s:.0f} s' if sd else 'steady':<18}{told}", flush=True)


if __name__ == "__main__":
    main()
