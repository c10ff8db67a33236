"""Does a fresh load test of the recommended file fall inside the intervals that the recommendation states?

    python tests/benchmarks/live/reproduce.py [SCENARIO.yaml] [REPEATS]

Runs one sweep, then REPEATS load tests of its batching_parameters.txt, each with a server of its own and a seed of its
own, and prints both figures of each beside the stated intervals. `load` repeats what the host disturbed, at most
twice; what is spoilt even then is said. The bar is 4 of 5.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.benchmarks.commands import ROOT, batchtune
from tests.benchmarks.fresh_loads import fresh_load


def interval(stated: dict[str, float], factor: float = 1.0) -> str:
    return f"{factor * stated['value']:.2f} [{factor * stated['low']:.2f}, {factor * stated['high']:.2f}]"


def main(scenario: Path, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = batchtune("sweep", scenario, "--quiet", cwd=Path(folder))
        chosen = ended.or_exit()
        print(f"sweep: {ended.seconds:.1f} s, {chosen['trials']} trials; recommended: {chosen['label']}")
        print(f"gain over no batching: ×{interval(chosen['gain_over_no_batching'])}")
        print(f"stated requests/s: {interval(chosen['throughput_rps'])}")
        print(f"stated p95 ms: {interval(chosen['latency_s']['p95'], 1e3)}")
        print(
            f"by {chosen['runs']} runs, {chosen['confirmations']} to confirm; interval: {chosen['interval']}"
        )
        good = 0
        for repeat in range(1, repeats + 1):
            fresh = fresh_load(scenario, chosen, cwd=Path(folder), seed=999 + repeat)
            inside = fresh.inside(chosen)
            good += inside
            spoilt = f", spoilt by the {fresh.spoilt_by}" if fresh.spoilt_by else ""
            figures = f"{fresh.throughput_rps:.0f} requests/s, p95 {fresh.p95_s * 1e3:.2f} ms"
            print(f"repeat {repeat}: {figures}: {inside}{spoilt}", flush=True)
        print(f"{good} of {repeats} repeats within both intervals")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scenarios" / "quickstart.yaml"
    main(path.resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
