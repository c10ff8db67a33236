"""Does a fleet on a Ray cluster measure what a local fleet does? The two take turns on one server.

    RAY_TMPDIR=/tmp/r python tests/benchmarks/load/ray_beside_local.py [--blocks 10] [--seconds 2] [--rate 400] [--seed 1]

Two workers each, local processes and actors on two nodes of this machine, on the same two CPUs; the bundled server on an
emulated device that leaves the CPUs mostly idle. A block is local, Ray, Ray, local or its mirror, all four on the schedule
of the block. One line a block, then of rate, p50, p95, p99 and the workers' CPU a request the ratio Ray / local with its
95 % interval (log ratios of the blocks). `of Ray`: CPU of all of Ray's processes, idle while local workers send; `of the
head`: of this process.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from contextlib import ExitStack, suppress

import numpy as np
import psutil
from scipy.stats import gmean

from batchtune.load.cluster.cluster_fleet import AnyFleet, fleet_of
from batchtune.load.fleet import LoadJob
from batchtune.measure.quantiles import balanced_orders, ratio_estimate
from batchtune.scenario.arrivals import arrivals_of
from batchtune.system import schedulable_cpus
from batchtune.tune.loader import LoadRun
from tests.benchmarks.live.live_target import Case, live
from tests.benchmarks.load.ray_cluster import children, fleets, two_nodes

WARM_UP_S = 0.3
FIGURES = ("rate", "p50", "p95", "p99", "CPU a request")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    cpus = tuple(sorted(schedulable_cpus(), reverse=True))
    case = Case(base_ms=5.0, per_row_ms=0.5, max_batch_size=8, server_cores=cpus)
    with ExitStack() as open_:
        specs = fleets(open_.enter_context(two_nodes(1)), asked.rate, 2)
        server = open_.enter_context(live(case))
        started: dict[str, AnyFleet] = {
            name: open_.enter_context(fleet_of(spec)) for name, spec in specs.items()
        }

        def job(seed: int) -> LoadJob:
            duration_s = WARM_UP_S + asked.seconds
            arrivals = arrivals_of(specs["local"], rate_rps=asked.rate, duration_s=duration_s, seed=seed)
            return server.loader.job(LoadRun(arrivals=arrivals, warm_up_s=WARM_UP_S, patient=True))

        for fleet in started.values():
            fleet.run(job(0))
        print(f"{'rate /s':>17}{'p50 ms':>17}{'p95 ms':>17}  (local, Ray)")
        orders = balanced_orders(tuple(started), blocks=asked.blocks, seed=asked.seed)
        blocks = [
            _block(started, (*order, *order[::-1]), job(1000 * asked.seed + number))
            for number, order in enumerate(orders)
        ]
    _tell(blocks)


def _block(fleets: dict[str, AnyFleet], order: tuple[str, ...], job: LoadJob) -> dict[str, Figures]:
    """The geometric mean of the two turns of each fleet."""
    runs: dict[str, list[Figures]] = defaultdict(list)
    for name in order:
        runs[name].append(_run(fleets[name], job))
    means = {
        name: {figure: float(gmean([max(run[figure], 1e-9) for run in turns])) for figure in turns[0]}
        for name, turns in runs.items()
    }
    shown = "".join(
        f"{means['local'][figure] * scale:>9,.2f}{means['Ray'][figure] * scale:>8,.2f}"
        for figure, scale in (("rate", 1.0), ("p50", 1e3), ("p95", 1e3))
    )
    print(f"{shown}  {' '.join(order)}", flush=True)
    return means


def _run(fleet: AnyFleet, job: LoadJob) -> Figures:
    """Of what became due after the warm-up; CPU of Ray and of the head in seconds a second."""
    ray_cpu_s, head_cpu_s, begun_s = _ray_cpu_s(), time.process_time(), time.monotonic()
    samples = fleet.run(job)
    run_s = time.monotonic() - begun_s
    ray_cpu_s, head_cpu_s = _ray_cpu_s() - ray_cpu_s, time.process_time() - head_cpu_s
    if samples.errors():
        raise RuntimeError(f"not all were answered: {samples.errors()}")
    counted = samples.due_ns >= WARM_UP_S * 1e9
    done_ns = samples.done_ns[counted]
    p50, p95, p99 = np.quantile(samples.latency_ns[counted], (0.5, 0.95, 0.99)) / 1e9
    return {
        "rate": (len(done_ns) - 1) / float(done_ns.max() - done_ns.min()) * 1e9,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "CPU a request": samples.client_cpu_s / len(samples),
        "of Ray": ray_cpu_s / run_s,
        "of the head": head_cpu_s / run_s,
        "send lag p99": float(np.quantile(samples.sent_ns[counted] - samples.due_ns[counted], 0.99)) / 1e9,
    }


def _ray_cpu_s() -> float:
    """CPU of the cluster's processes so far, the actors without the load workers that they started."""
    spent_s = 0.0
    for process, words in children().items():
        if "ray" in words and "spawn_main" not in words:
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent_s += times.user + times.system
    return spent_s


def _tell(blocks: list[dict[str, Figures]]) -> None:
    for figure in FIGURES:
        ratio = ratio_estimate((block["local"][figure], block["Ray"][figure]) for block in blocks)
        assert ratio is not None
        change = [100.0 * (end - 1.0) for end in (ratio.value, ratio.low, ratio.high)]
        print(f"{figure:>14}: Ray / local {change[0]:+.2f} % [{change[1]:+.2f}, {change[2]:+.2f}]")
    for name in ("local", "Ray"):
        of_ray, of_head, lag_s = (
            float(np.median([block[name][figure] for block in blocks]))
            for figure in ("of Ray", "of the head", "send lag p99")
        )
        print(
            f"while {name} sends: {100 * of_ray:.1f} % of a CPU of Ray, {100 * of_head:.1f} % of the head, "
            f"send lag p99 {lag_s * 1e6:.0f} µs"
        )


if __name__ == "__main__":
    main()
