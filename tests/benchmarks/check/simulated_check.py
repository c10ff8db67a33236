"""How often does a paired check cry wolf, what does it catch, and how many blocks does that take? About twelve minutes.

Simulated blocks (tests/check/simulated_blocks.py), the default gates of a closed loop, 1,000 seeds a line. `flagged`: the
screen called some gate regressed; `failed`: fresh blocks said so too, exit code 1. `blocks`: median of screen and
confirmation together, and the share that this saves in the median against a test of fixed length of the same most blocks
(36), with a confirmation as long where the screen of that test is flagged.
Run: python tests/benchmarks/check/simulated_check.py [SEEDS] [BLOCKS_MAX] [PLANTED ...]
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping

from batchtune.check.gate import default_gates
from batchtune.check.paired import judge_fixed, run_check
from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX, Metric
from tests.check.simulated_blocks import (
    FASTER_10,
    MORE_CPU,
    P99_ONLY,
    SLOWER_5,
    SLOWER_10,
    Host,
    SimulatedPair,
)

PLANTED: Mapping[str, Mapping[Metric, float]] = {
    "A/A": {},
    "5 % slower": SLOWER_5,
    "10 % slower": SLOWER_10,
    "p99 x2 only": P99_ONLY,
    "5 % more CPU": MORE_CPU,
    "10 % faster": FASTER_10,
}
GATES = default_gates("throughput")
HOSTS: tuple[Host, ...] = ("steady", "drifting", "two-speed")


def line(name: str, *, sd: float, host: Host, launch_sd: float, seeds: int, blocks_max: int) -> None:
    verdicts: Counter[str] = Counter()
    flagged, fixed_caught = 0, 0
    blocks, fixed_blocks = [], []
    for seed in range(seeds):
        pair = SimulatedPair(seed=seed, sd=sd, host=host, change=PLANTED[name], launch_sd=launch_sd)
        conclusion = run_check(GATES, pair.measure, blocks_max=blocks_max)
        verdicts[conclusion.verdict] += 1
        flagged += conclusion.fresh_blocks > 0
        blocks.append(conclusion.blocks + conclusion.fresh_blocks)
        fixed = judge_fixed(GATES, pair.measure("screen", blocks_max))
        is_flagged = fixed.verdict == "REGRESSED"
        if is_flagged:
            fixed_caught += (
                judge_fixed(GATES, pair.measure("confirmation", blocks_max)).verdict == "REGRESSED"
            )
        fixed_blocks.append(blocks_max * (2 if is_flagged else 1))
    shares = [verdicts[verdict] / seeds for verdict in ("REGRESSED", "OK", "IMPROVED", "INCONCLUSIVE")]
    usual, usual_fixed = statistics.median(blocks), statistics.median(fixed_blocks)
    print(
        f"{name:>12} {host:>9} {sd:>5.0%} {launch_sd:>7.1%} {flagged / seeds:>8.1%} "
        + " ".join(f"{share:>8.1%}" for share in shares)
        + f" {fixed_caught / seeds:>9.1%} {usual:>7.0f} {max(blocks):>5} {1 - usual / usual_fixed:>7.0%}",
        flush=True,
    )


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    blocks_max = int(sys.argv[2]) if len(sys.argv) > 2 else CHECK_BLOCKS_MAX
    heads = ("flagged", "failed", "OK", "IMPROVED", "open", "by fixed", "blocks", "most", "saved")
    print(f"{'planted':>12} {'host':>9} {'sd':>5} {'launch':>7} " + " ".join(f"{head:>8}" for head in heads))
    for name in sys.argv[3:] or PLANTED:
        for host in HOSTS:
            for sd in (0.01, 0.02, 0.03, 0.05) if host == "steady" else (0.01, 0.03):
                line(name, sd=sd, host=host, launch_sd=0.0, seeds=seeds, blocks_max=blocks_max)
        line(name, sd=0.01, host="steady", launch_sd=0.01, seeds=seeds, blocks_max=blocks_max)


if __name__ == "__main__":
    main()
