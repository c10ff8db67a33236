"""How well do two servers' CPU seconds a request compare when the load alternates between them in short turns?

    python tests/benchmarks/check/duet.py [--turns 8,25,50,100,200,1000] [--seconds 12] [--plant 0.05]

Two bundled servers of an emulated device, alive at once on CPU 0, the client on CPU 1; a closed loop of 16 gRPC clients,
which has the turns of a check (load/duet.py) and rests between them until the last answer has come. `--plant`: CPU ms more a
batch of the second server. For each length of a turn in ms: pairs of turns, CPU µs a request of each server, the mean and the
median of the log ratio, its standard deviation and its correlation from pair to pair, the standard error of the mean by blocks
of 1 s, the seconds that would know it to ±2 % (95 %), and by how much the first server's cost moves from block to block.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchtune.load.duet import DuetPlan, run_duet
from batchtune.measure.quantiles import balanced_orders
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.tune.loader import LoadRun
from tests.benchmarks.live.live_target import Case, Loading, live

CLIENTS = 16
GAP_S = 0.015
"""A turn's last batch, one that nobody fills, and 2 ms for what the server does behind its last answer."""

BLOCK_S = 1.0
CASE = Case(base_ms=4.0, per_row_ms=0.1, batch_timeout_micros=2000, max_batch_size=CLIENTS, floats=200)


def measured(sides: tuple[Loading, Loading], turn_s: float, seconds: float) -> NDArray[np.float64]:
    """[pairs, 2]: CPU seconds a request."""
    pairs = round(seconds / (2.0 * (turn_s + GAP_S)))
    orders = balanced_orders((0, 1), blocks=pairs, seed=1)
    plan = DuetPlan(
        turn_ns=round(turn_s * 1e9),
        gap_ns=round(GAP_S * 1e9),
        order=tuple(one for two in orders for one in two),
    )
    run = LoadRun(arrivals=ClosedLoop(concurrency=CLIENTS, duration_s=seconds), warm_up_s=0.0)
    jobs = [side.loader.job(run) for side in sides]
    return np.array(run_duet(sides[0].fleet, jobs, plan, [side.target.cpu_clock() for side in sides]))


def told(turn_ms: str, costs_s: NDArray[np.float64], pair_s: float) -> str:
    logs = np.log(costs_s[:, 1] / costs_s[:, 0])
    per_block = max(1, round(BLOCK_S / pair_s))
    blocks = block_means(logs, per_block)
    error = float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))) if len(blocks) > 1 else math.nan
    needed_s = len(logs) * pair_s * (1.96 * error / 0.02) ** 2
    lag = float(np.corrcoef(logs[:-1], logs[1:])[0, 1]) if len(logs) > 3 else math.nan
    first, second = np.median(costs_s, axis=0) * 1e6
    swing = np.std(np.log(block_means(costs_s[:, 0], per_block)))
    return (
        f"{turn_ms:>7} {len(logs):7d} {first:7.2f} {second:7.2f} {np.mean(logs):+7.4f} {np.median(logs):+7.4f} "
        f"{np.std(logs):7.4f} {lag:+7.2f} {error:7.4f} {needed_s:7.1f} {swing:7.4f}"
    )


def block_means(values: NDArray[np.float64], per_block: int) -> NDArray[np.float64]:
    whole = len(values) // per_block * per_block
    return np.asarray(values[:whole].reshape(-1, per_block).mean(axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", default="8,25,50,100,200,1000", help="ms")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--plant", type=float, default=0.0)
    asked = parser.parse_args()
    heads = ("turn", "pairs", "µs A", "µs B", "mean", "median", "sd", "lag 1", "error", "s to 2%", "swing")
    print(" ".join(f"{head:>7}" for head in heads))
    with live(CASE) as first, live(replace(CASE, cpu_ms=asked.plant)) as second:
        for side in (first, second):
            side.closed_loop(CLIENTS)
        for turn_ms in asked.turns.split(","):
            turn_s = float(turn_ms) / 1e3
            costs_s = measured((first, second), turn_s, asked.seconds)
            print(told(turn_ms, costs_s, 2.0 * (turn_s + GAP_S)), flush=True)


if __name__ == "__main__":
    main()
