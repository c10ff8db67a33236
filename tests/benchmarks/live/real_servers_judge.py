"""Does a sweep of Ray Serve, BentoML, LitServe, MLServer or `transformers serve` end within 10 % of a grid's best?

    python -m tests.benchmarks.live.real_servers_judge [--servers litserve mlserver] [--slo 100ms] [--budget 90s]
        [--seconds 2.0] [--rounds 3] [--environments FOLDER] [--keep FOLDER] [--file FILE.jsonl]

The app's batch takes 2 ms + 0.05 ms a row (tests/real_servers/apps); `transformers serve` has a small model of random
weights, and the limits of its preset. First `batchtune sweep APP --server NAME`, objective capacity, as a user types it.
Then every configuration of the grid is loaded fresh, started or configured as the sweep does it: a closed loop, and open
loops from a little below what that answered, down to the first that held or up to the last. The best three of the grid, no batching and what
was recommended then take turns in rounds; each is worth its median. Prints the share of the best, and what was stated
beside what held. A grid's best is the luckiest of twelve: on a noisy host it is too good.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from batchtune.archive.run import open_run
from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.load.fleet import LoadFleet
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, draw
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import can_be_off
from batchtune.target.choice import LaunchedTarget, target_of
from batchtune.tune.evidence.bracket import ANSWERED, keeps
from batchtune.tune.loader import Loader, LoadRun
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


class Judge:
    """Loads configurations of one scenario, each started or configured anew."""

    def __init__(self, scenario: Scenario, target: LaunchedTarget, fleet: LoadFleet, seconds: float) -> None:
        self._scenario, self._target, self._seconds = scenario, target, seconds
        self._loader = Loader(scenario, target, fleet)
        self._seed = 1000

    def capacity_rps(self, configuration: Configuration) -> float:
        """The highest rate tried that held; 0: none did, or the server refuses the configuration."""
        try:
            self._target.apply(configuration)
            total_s = WARM_UP_S + self._seconds
            if self._scenario.request.protocol == "openai":  # the model is loaded at the first request
                self._load(ClosedLoop(concurrency=8, duration_s=total_s))
            answered_rps, _ = self._load(ClosedLoop(concurrency=CLIENTS, duration_s=total_s))
            rate_rps, held_rps = FIRST * answered_rps, 0.0
            while rate_rps > LEAST * answered_rps:
                if self._holds(rate_rps, total_s):
                    held_rps, rate_rps = rate_rps, rate_rps / STEP  # a loop of long answers tells too little
                elif held_rps:
                    break
                else:
                    rate_rps *= STEP
            return held_rps
        except BatchtuneError as error:
            print(f"    {configuration.label()}: {error.message}", flush=True)
        return 0.0

    def _holds(self, rate_rps: float, total_s: float) -> bool:
        self._seed += 1
        load = self._scenario.load.model_copy(update={"arrivals": "poisson", "rate_rps": rate_rps})
        got_rps, kept = self._load(draw(load, rate_rps=rate_rps, duration_s=total_s, seed=self._seed))
        return kept and got_rps >= ANSWERED * rate_rps - 2.0 * (rate_rps / self._seconds) ** 0.5

    def _load(self, arrivals: Arrivals) -> tuple[float, bool]:
        """Requests/s answered, and whether the limits were kept."""
        run = LoadRun(arrivals=arrivals, warm_up_s=WARM_UP_S)
        measured = self._loader.run(run, on_live=lambda _live: None).measurement
        latency_s = {name: quantile.value for name, quantile in measured.latency_s.items()}
        return measured.throughput_rps.value, keeps(self._scenario.slo, latency_s, measured.error_ratio)


def swept(server: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the sweep prints as JSON."""
    limits = [] if SERVERS[server].writes_app else ["--slo-p95", options.slo]
    words = ["sweep", app_of(server, os.environ["PATH"], folder), "--server", server, *limits, "--json"]
    command = [sys.executable, "-m", "batchtune", *words, "--budget", options.budget]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{server}: the sweep ended with {done.returncode}:\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def judged(server: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row of results: the shares, and what every configuration held."""
    started_s = time.monotonic()
    answer = swept(server, folder, options)
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
    held: dict[str, list[float]] = {}
    with target_of(scenario) as target, LoadFleet() as fleet:
        judge = Judge(scenario, target, fleet, options.seconds)
        grid = {label: judge.capacity_rps(one) for label, one in named.items()}
        for label, rate in grid.items():
            print(f"    {label}: {rate:.0f}/s", flush=True)
        best = sorted(grid, key=grid.__getitem__)[-FINALISTS:]
        finalists = dict.fromkeys(
            [chosen.label(), *(["no batching"] if "no batching" in named else []), *best]
        )
        for _ in range(options.rounds):
            for label in finalists:
                held.setdefault(label, []).append(judge.capacity_rps(named[label]))
    medians = {label: statistics.median(rates) for label, rates in held.items()}
    ours = medians[chosen.label()]
    row = {
        "server": server,
        "chosen": chosen.label(),
        "stated_rps": stated,
        "held_rps": ours,
        "share": ours / max(medians.values()),
        "over_no_batching": ours / (medians.get("no batching") or float("nan")),
        "established": answer["established"],
        "grid": grid,
        "rounds": held,
        "host_load": os.getloadavg()[0],
    }
    for label, rates in held.items():
        print(f"    {label}: {', '.join(f'{rate:.0f}' for rate in rates)}/s", flush=True)
    print(
        f"{server}: {row['share']:.1%} of the best (bar: 90 %); {stated:.0f}/s stated, {ours:.0f}/s held; "
        f"×{row['over_no_batching']:.2f} of no batching; {time.monotonic() - started_s:.0f} s, "
        f"load average {row['host_load']:.1f}",
        flush=True,
    )
    return row


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
    parser.add_argument("--keep", type=Path, help="a folder that keeps the runs; without it they go")
    parser.add_argument("--file", type=Path, help="each result is appended here")
    options = parser.parse_args()
    shares = []
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:
        for server in options.servers:
            os.environ["PATH"] = before
            os.environ["PATH"] = path_with(server, options.environments or Path(name))
            folder = (options.keep or Path(name)) / f"sweep-{server}"
            folder.mkdir(parents=True)
            row = judged(server, folder, options)
            shares.append(row["share"])
            if options.file is not None:
                with options.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0 if min(shares) >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
