"""Does a sweep of Ray Serve, BentoML, LitServe, MLServer or `transformers serve` end within 10 % of a grid's best?

    python -m tests.benchmarks.live.real_servers_judge [--servers litserve mlserver] [--slo 100ms] [--budget 90s]
        [--seconds 2.0] [--rounds 3] [--environments FOLDER]

The app's batch takes 2 ms + 0.05 ms a row (tests/real_servers/apps); `transformers serve` has a small model of random
weights, and the limits of its preset. First `batchtune sweep APP --server NAME`, objective capacity, as a user types it.
Then every configuration of the grid is loaded fresh, started or configured as the sweep does it: a closed loop, and open
loops from a little below what that answered, down to the first that held or up to the last. The best three of the grid, no batching and what
was recommended then take turns in rounds; each is worth its median. Prints the share of the best, and what was stated
beside what held. A grid's best is the luckiest of twelve: on a noisy host it is too good.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Final

from batchtune.archive.run import open_run
from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.load.fleet import LoadFleet
from batchtune.scenario.spec.target import can_be_off
from batchtune.target.choice import target_of
from batchtune.tune.evidence.bracket import ANSWERED, keeps
from tests.benchmarks.commands import batchtune
from tests.benchmarks.live.live_target import Loading
from tests.real_servers.environments import SERVERS, app_of, path_with

GRIDS: Final[Mapping[str, Mapping[str, tuple[float, ...]]]] = {
    "litserve": {"max_batch_size": (8, 16, 32, 64), "batch_timeout": (0, 0.002, 0.01)},
    "bentoml": {"max_batch_size": (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)},
    "mlserver": {"max_batch_size": (8, 16, 32, 64), "max_batch_time": (0.001, 0.005, 0.01)},
    "ray-serve": {"max_batch_size": (8, 16, 32, 64), "batch_wait_timeout_s": (0, 0.002, 0.01)},
    "transformers-serve": {"cb_max_batch_tokens": (64, 128, 256, 1024), "cb_num_blocks": (16, 64, 256)},
}
"""Twelve configurations each; BentoML has no wait that one could set."""

CLIENTS: Final = 96
FIRST, STEP, LEAST = 0.96, 0.94, 0.3
"""Open loops begin at this share of what the closed loop answered, go down or up by this factor, and end at this share."""

WARM_UP_S: Final = 1.0
FINALISTS: Final = 3


def capacity_rps(server: Loading, configuration: Configuration, *, seconds: float, seed: int) -> float:
    """The highest rate tried that held; 0: none did, or the server refuses the configuration."""
    scenario = server.scenario

    def holds(rate_rps: float) -> bool:
        run = server.open_loop(rate_rps, seed=seed, warm_up_s=WARM_UP_S, duration_s=seconds)
        measured = run.measurement
        latency_s = {name: quantile.value for name, quantile in measured.latency_s.items()}
        answered = measured.throughput_rps.value >= ANSWERED * rate_rps - 2.0 * (rate_rps / seconds) ** 0.5
        return answered and keeps(scenario.slo, latency_s, measured.error_ratio)

    try:
        server.target.apply(configuration)
        if scenario.request.protocol == "openai":  # the model is loaded at the first request
            server.closed_loop(8, warm_up_s=WARM_UP_S, duration_s=seconds)
        loop = server.closed_loop(CLIENTS, warm_up_s=WARM_UP_S, duration_s=seconds)
        answered_rps = loop.measurement.throughput_rps.value
        rate_rps, held_rps = FIRST * answered_rps, 0.0
        while rate_rps > LEAST * answered_rps:
            seed += 1
            if holds(rate_rps):
                held_rps, rate_rps = rate_rps, rate_rps / STEP  # a loop of long answers tells too little
            elif held_rps:
                break
            else:
                rate_rps *= STEP
        return held_rps
    except BatchtuneError as error:
        print(f"    {configuration.label()}: {error.message}", flush=True)
    return 0.0


def judged(server: str, folder: Path, options: argparse.Namespace) -> float:
    """The share of the best that the answer of a sweep holds."""
    started_s = time.monotonic()
    limits = [] if SERVERS[server].writes_app else ["--slo-p95", options.slo]
    app = app_of(server, os.environ["PATH"], folder)
    answer = batchtune(
        "sweep", app, "--server", server, *limits, "--budget", options.budget, cwd=folder
    ).or_exit()
    run = open_run(folder / answer["run"])
    chosen, stated = run.recommendation().configuration, answer["capacity"]["held_rps"]
    print(
        f"{server}: {chosen.label()}, {stated:.0f}/s stated, {time.monotonic() - started_s:.0f} s", flush=True
    )
    scenario = run.scenario()
    named = {chosen.label(): chosen}
    if can_be_off(scenario.target):
        named["no batching"] = scenario.configuration({"enable_batching": False})
    names, values = list(GRIDS[server]), GRIDS[server].values()
    for point in product(*values):
        asked = scenario.target.in_house_words(dict(zip(names, point, strict=True)))
        configuration = scenario.configuration(asked)
        named.setdefault(configuration.label(), configuration)
    held: dict[str, list[float]] = defaultdict(list)
    with target_of(scenario) as target, LoadFleet() as fleet:
        loading, seeds = Loading(scenario, target, fleet), itertools.count(1000, 100)

        def capacity(label: str) -> float:
            return capacity_rps(loading, named[label], seconds=options.seconds, seed=next(seeds))

        grid = {label: capacity(label) for label in named}
        for label, rate in grid.items():
            print(f"    {label}: {rate:.0f}/s", flush=True)
        best = sorted(grid, key=grid.__getitem__)[-FINALISTS:]
        unbatched = [label for label in named if label == "no batching"]
        for label in [*dict.fromkeys([chosen.label(), *unbatched, *best])] * options.rounds:
            held[label].append(capacity(label))
    medians = {label: statistics.median(rates) for label, rates in held.items()}
    ours = medians[chosen.label()]
    share, over = ours / max(medians.values()), ours / (medians.get("no batching") or math.nan)
    for label, rates in held.items():
        print(f"    {label}: {', '.join(f'{rate:.0f}' for rate in rates)}/s", flush=True)
    print(
        f"{server}: {share:.1%} of the best (bar: 90 %); {stated:.0f}/s stated, {ours:.0f}/s held; ×{over:.2f} of no "
        f"batching; {time.monotonic() - started_s:.0f} s, load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--slo", default="100ms")
    parser.add_argument("--budget", default="90s")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=os.environ.get("BATCHTUNE_SERVERS"))
    options = parser.parse_args()
    shares = []
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:
        for server in options.servers:
            os.environ["PATH"] = before
            os.environ["PATH"] = path_with(server, options.environments or Path(name))
            folder = Path(name) / f"sweep-{server}"
            folder.mkdir(parents=True)
            shares.append(judged(server, folder, options))
    return 0 if min(shares) >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
