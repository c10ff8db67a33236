"""What do length boundaries bring the real transformer? Twenty sets of them, one queue and the server's own choice.

    python tests/benchmarks/live/bucket_sets.py [--rounds 3] [--out bucket_sets.jsonl]     # some 110 s a round

Model, traffic and parameters are those of `scenarios/length-buckets.yaml`: lengths log-normal around 40 of 256, 64 clients
that wait for their answers, batches of 16. Every round measures each of the twenty sets of `replay/bucket_search.py`, one
queue and the server's own choice once, in an order drawn anew, and appends to the file. A set's truth is the median of the
rounds in the file; what it gains is compared with one queue within each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

from batchtune.batching.parameters import AUTO_BUCKETS, LENGTH_BUCKETS, NO_BUCKETS, format_length_buckets
from batchtune.load.fleet import LoadFleet
from batchtune.scenario.reader import read_scenario
from batchtune.target.choice import target_of
from tests.benchmarks.commands import ROOT
from tests.benchmarks.live.live_target import Loading
from tests.benchmarks.replay.bucket_search import SETS

BUCKETS = (NO_BUCKETS, AUTO_BUCKETS, *(format_length_buckets(boundaries) for boundaries in SETS))


def measure_round(number: int, kept: Path) -> None:
    """A line for each set: the boundaries, requests/s, p95 in seconds."""
    scenario = read_scenario(ROOT / "scenarios" / "length-buckets.yaml")
    order = list(BUCKETS)
    random.Random(number).shuffle(order)
    with target_of(scenario) as target, LoadFleet() as fleet:
        target.apply(scenario.configuration({}))
        server = Loading(scenario, target, fleet)
        for buckets in order:
            target.apply(scenario.configuration({} if buckets == NO_BUCKETS else {LENGTH_BUCKETS: buckets}))
            measured = server.closed_loop(64, warm_up_s=1.0, duration_s=2.5).measurement
            row = buckets, measured.throughput_rps.value, measured.latency_s["p95"].value
            print(f"{buckets:20} {row[1]:.1f}/s, p95 {row[2] * 1e3:.0f} ms", flush=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def report(kept: Path) -> None:
    rps: dict[str, list[float]] = defaultdict(list)
    p95_s: dict[str, list[float]] = defaultdict(list)
    for text in kept.read_text(encoding="utf-8").splitlines():
        buckets, rate, seconds = json.loads(text)
        rps[buckets].append(rate)
        p95_s[buckets].append(seconds)
    rounds = min(map(len, rps.values()))
    truth = {buckets: statistics.median(values) for buckets, values in rps.items()}
    best = max(value for buckets, value in truth.items() if buckets != AUTO_BUCKETS)
    print(
        f"{rounds} rounds; rows/s and p95, medians over the rounds; gain over one queue: median [least, most] of the rounds"
    )
    for buckets in sorted(truth, key=lambda buckets: -truth[buckets]):
        gains = [rps[buckets][at] / rps[NO_BUCKETS][at] for at in range(rounds)]
        waits = [p95_s[buckets][at] / p95_s[NO_BUCKETS][at] for at in range(rounds)]
        print(
            f"{buckets:22} {truth[buckets]:6.1f}/s  p95 {statistics.median(p95_s[buckets]) * 1e3:4.0f} ms  "
            f"x{statistics.median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] rows/s at "
            f"x{statistics.median(waits):.2f} the p95  {1 - truth[buckets] / best:6.1%} below the best"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="0: only tell of those that are kept")
    parser.add_argument("--out", type=Path, default=Path("bucket_sets.jsonl"))
    asked = parser.parse_args()
    asked.out.touch()
    done = len(asked.out.read_text(encoding="utf-8").splitlines()) // len(BUCKETS)
    for number in range(done, done + asked.rounds):
        measure_round(number, asked.out)
    report(asked.out)


if __name__ == "__main__":
    main()
