"""How often does a paired check cry wolf, what does it catch, and how long does that take? About twenty minutes.

Simulated blocks (tests/check/simulated_blocks.py), the default gates of a closed loop, 1,000 seeds a line. `flagged`: the
screen called some gate regressed; `failed`: fresh blocks said so too, exit code 1. `blocks`: median of screen and
confirmation together; `s` and `9 of 10`: seconds by a model of a quiet host whose servers start in 2 s (`SECONDS`), in the
median and in nine of ten checks. `at margin` is the hardest that must pass: every figure worse by its margin.
Run: python tests/benchmarks/check/simulated_check.py [SEEDS] [BLOCKS_MAX] [PLANTED ...]
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from batchtune.check.gate import ONE_LAUNCH, BlockFigures, Gate, default_gates
from batchtune.check.paired_check import Phase, run_check
from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX, Metric
from batchtune.tune.compare.blocks import DUET_S
from tests.check.simulated_blocks import (
    FASTER_10,
    MORE_CPU,
    P99_ONLY,
    SLOWER_5,
    SLOWER_10,
    SLOWER_20,
    TWICE,
    Host,
    SimulatedPair,
)

PLANTED: Mapping[str, Mapping[Metric, float]] = {
    "A/A": {},
    "at margin": {"throughput": 0.98, "p95": 1.05, "p99": 1.1, "cpu": 1.03},
    "x2 slower": TWICE,
    "20 % slower": SLOWER_20,
    "10 % slower": SLOWER_10,
    "5 % slower": SLOWER_5,
    "p99 x2 only": P99_ONLY,
    "5 % more CPU": MORE_CPU,
    "10 % faster": FASTER_10,
}
GATES = default_gates("throughput")
HOSTS: tuple[Host, ...] = ("steady", "drifting", "two-speed", "lumpy")
SECONDS = {"launch": 6.5, "block": 2.8, "duet": DUET_S}
"""Of both servers, started one after another and probed; of two runs of 0.2 and 0.8 s with what is between them."""


class TimedPair(SimulatedPair):
    """Counts what the course of a check would take (cli/commands/check_course.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seconds = 0.0
        self._blocks: Counter[Phase] = Counter()
        self._duets: Counter[Phase] = Counter()

    def measure(self, phase: Phase, blocks: int, guarded: Collection[Gate] = ()) -> Sequence[BlockFigures]:
        have = self._blocks[phase]
        if blocks > have:
            self.seconds += SECONDS["launch"] * (not have or have >= ONE_LAUNCH)
            self.seconds += SECONDS["block"] * (blocks - have)
            self._blocks[phase] = blocks
        if any(gate.metric == "cpu" for gate in guarded):
            self.seconds += SECONDS["duet"] * (blocks - self._duets[phase])
            self._duets[phase] = blocks
        return super().measure(phase, blocks, guarded)


def line(name: str, *, sd: float, host: Host, launch_sd: float, seeds: int, blocks_max: int) -> None:
    verdicts: Counter[str] = Counter()
    flagged = 0
    blocks, seconds = [], []
    for seed in range(seeds):
        pair = TimedPair(seed=seed, sd=sd, host=host, change=PLANTED[name], launch_sd=launch_sd)
        conclusion = run_check(GATES, pair.measure, blocks_max=blocks_max)
        verdicts[conclusion.verdict] += 1
        flagged += conclusion.fresh_blocks > 0
        blocks.append(conclusion.blocks + conclusion.fresh_blocks)
        seconds.append(pair.seconds)
    shares = [verdicts[verdict] / seeds for verdict in ("REGRESSED", "OK", "IMPROVED", "INCONCLUSIVE")]
    print(
        f"{name:>12} {host:>9} {sd:>5.1%} {launch_sd:>7.1%} {flagged / seeds:>8.1%} "
        + " ".join(f"{share:>8.1%}" for share in shares)
        + f" {statistics.median(blocks):>8.0f} {statistics.median(seconds):>8.0f}"
        + f" {sorted(seconds)[int(0.9 * seeds)]:>8.0f}",
        flush=True,
    )


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    blocks_max = int(sys.argv[2]) if len(sys.argv) > 2 else CHECK_BLOCKS_MAX
    heads = ("flagged", "failed", "OK", "IMPROVED", "open", "blocks", "s", "9 of 10")
    print(f"{'planted':>12} {'host':>9} {'sd':>5} {'launch':>7} " + " ".join(f"{head:>8}" for head in heads))
    noises: Mapping[Host, tuple[float, ...]] = {
        "steady": (0.01, 0.02, 0.03, 0.05, 0.1),
        "drifting": (0.01, 0.03),
        "two-speed": (0.01, 0.03),
        "lumpy": (0.001,),
    }
    for name in sys.argv[3:] or PLANTED:
        for host in HOSTS:
            for sd in noises[host]:
                line(name, sd=sd, host=host, launch_sd=0.0, seeds=seeds, blocks_max=blocks_max)
        line(name, sd=0.01, host="steady", launch_sd=0.01, seeds=seeds, blocks_max=blocks_max)


if __name__ == "__main__":
    main()
