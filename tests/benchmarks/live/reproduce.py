"""Does a fresh load test of the recommended file fall inside the intervals that the recommendation states?

    python tests/benchmarks/live/reproduce.py [SCENARIO.yaml] [REPEATS]

Runs one sweep, then REPEATS load tests of its batching_parameters.txt, each with a server of its own and a seed of its
own, and prints both figures of each beside the stated intervals. `load` repeats what the host disturbed, at most
twice; what is spoilt even then is said. The bar is 4 of 5.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLAIN = ("--json", "--quiet")
BATCHTUNE = [sys.executable, "-m", "batchtune"]


def output(*arguments: str, cwd: Path) -> dict:
    done = subprocess.run([*BATCHTUNE, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3, 5, 6):  # verdicts, and 6: spoilt; the document says by what
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def inside(value: float, stated: dict) -> bool:
    return float(stated["low"]) <= value <= float(stated["high"])


def main(scenario: Path, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        started = time.monotonic()
        chosen = output("sweep", str(scenario), *PLAIN, cwd=cwd)
        print(
            f"sweep: {time.monotonic() - started:.1f} s, {chosen['trials']} trials; recommended: {chosen['label']}"
        )
        gain = chosen["gain_over_no_batching"]
        print(f"gain over no batching: ×{gain['value']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]")
        throughput, p95 = chosen["throughput_rps"], chosen["latency_s"]["p95"]
        print(
            f"stated requests/s: {throughput['value']:.0f} [{throughput['low']:.0f}, {throughput['high']:.0f}]"
        )
        print(f"stated p95 ms: {p95['value'] * 1e3:.2f} [{p95['low'] * 1e3:.2f}, {p95['high'] * 1e3:.2f}]")
        print(
            f"by {chosen['runs']} runs, {chosen['confirmations']} to confirm; interval: {chosen['interval']}"
        )
        file = str(cwd / chosen["run"] / "batching_parameters.txt")
        mode = (
            ["--no-batching"]
            if chosen["configuration"]["batching"] is None
            else ["--batching-parameters-file", file]
        )
        good = 0
        for repeat in range(repeats):
            fresh = output(
                "load", str(scenario), *mode, "--set", f"load.seed={1000 + repeat}", *PLAIN, cwd=cwd
            )
            point = fresh["points"][0]
            measured = point["measurement"]
            rps, fresh_p95 = measured["throughput_rps"]["value"], measured["latency_s"]["p95"]["value"]
            both = inside(rps, throughput) and inside(float(fresh_p95), p95)
            good += both
            spoilt = f", spoilt by the {point['spoilt_by']}" if point["spoilt_by"] else ""
            print(
                f"repeat {repeat + 1}: {rps:.0f} requests/s, p95 {float(fresh_p95) * 1e3:.2f} ms: {both}{spoilt}"
            )
        print(f"{good} of {repeats} repeats within both intervals")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "scenarios" / "quickstart.yaml"
    main(path.resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
