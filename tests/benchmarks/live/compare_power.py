"""How often does `compare` cry wolf, and how often does it find 5 %? Many comparisons of two emulated servers.

    python tests/benchmarks/live/compare_power.py --comparisons 20 --blocks 10 --duration 1s --slower 0
    python tests/benchmarks/live/compare_power.py --comparisons 20 --blocks 10 --duration 1s --slower 0.05

Each comparison is `batchtune compare` through the command line: its own servers, its own seed. With `--slower 0` both
servers are alike and a difference declared is a false alarm; issue 5 allows 1 of 20. With `--slower 0.05` the second
one's service time is 5 % longer, and at least 18 of 20 comparisons, of at most 3 minutes each, must find it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks.commands import batchtune
from tests.benchmarks.emulated import Emulated

SCENARIO = """\
name: power
target: {{model: one}}
load: {{arrivals: closed, concurrency: 16, warm_up: 200ms, duration: {duration}, seed: {seed}}}
objective: throughput
fixed: {{max_batch_size: 16, batch_timeout_micros: 0, num_batch_threads: 1}}
variants:
  one: {{}}
  other: {{target: {{model: other}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--duration", default="1s")
    parser.add_argument("--slower", type=float, default=0.0)
    asked = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, factor in (("one", 1.0), ("other", 1.0 + asked.slower)):
            Emulated(base_ms=2.0 * factor, per_row_ms=0.05 * factor, floats=8).write(folder / model)
        for seed in range(1, asked.comparisons + 1):
            scenario = folder / "power.yaml"
            scenario.write_text(SCENARIO.format(duration=asked.duration, seed=seed))
            ended = batchtune("compare", scenario, "--quiet", "--blocks", asked.blocks, cwd=folder)
            document = ended.or_exit()
            (pair,) = document["pairs"]
            found += pair["outcome"] == "different"
            ratio = pair["ratio"]
            print(
                f"{seed:3d} {pair['outcome']:<20} ×{ratio['value']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}] "
                f"{document['repeats']} repeats, {ended.seconds:.0f} s; {found} of {seed} differ",
                flush=True,
            )


if __name__ == "__main__":
    main()
