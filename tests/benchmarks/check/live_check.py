"""Does a paired check on this machine cry wolf, and does it catch what was planted? Prints; a check takes 1 to 3 minutes.

Two servers of an emulated device, in a closed loop of 16 clients: the candidate is the same (aa), has 5 or 10 % slower
batches (slower5, slower10), 1 % of its batches 10 times as slow (tail), or burns 5 % more CPU a request (cpu; how much that
is, is taken from the baseline of a first check). A line a check: verdict, exit code, blocks, seconds, and each gate's change.
Then how many of each ended with 1, the median of the seconds, and what a test of fixed length (24 blocks, or 48 where it
confirms) would have taken.
Run: python tests/benchmarks/check/live_check.py CASE=COUNT … [--blocks N] [--out FILE.jsonl]
     python tests/benchmarks/check/live_check.py aa=40 slower5=20 slower10=20 tail=20 cpu=20 --out live.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = 16
BASE_MS, PER_ROW_MS = 4.0, 0.1
PLAIN = {"base_ms": BASE_MS, "per_row_ms": PER_ROW_MS}
SHAPES = "inputs: {x: {dtype: float32, shape: [200]}}\noutputs: {y: {dtype: float32, shape: [2]}}\n"
SCENARIO = f"""\
name: live
target: {{model: ./baseline}}
request: {{protocol: grpc, rows: 1}}
load: {{arrivals: closed, concurrency: {ROWS}, warm_up: 300ms, duration: 1200ms, seed: 1}}
objective: throughput
fixed: {{max_batch_size: {ROWS}, batch_timeout_micros: 2000, num_batch_threads: 1}}
"""
CASES = ("aa", "slower5", "slower10", "tail", "cpu")
FIXED_BLOCKS = 24


def device(folder: Path, service_time: dict[str, float]) -> Path:
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "emulated.yaml").write_text(f"service_time: {json.dumps(service_time)}\n{SHAPES}")
    return folder


def planted(case: str, cpu_of_request_s: float) -> dict[str, float]:
    match case:
        case "slower5" | "slower10":
            factor = 1.05 if case == "slower5" else 1.1
            return {name: value * factor for name, value in PLAIN.items()}
        case "tail":
            return {**PLAIN, "slow_ratio": 0.01, "slow_factor": 10.0}
        case "cpu":
            return {**PLAIN, "cpu_ms": 0.05 * cpu_of_request_s * ROWS * 1e3}
        case _:
            return PLAIN


def checked(folder: Path, case: str, *, number: int, blocks: int, cpu_of_request_s: float) -> dict[str, Any]:
    device(folder / "candidate", planted(case, cpu_of_request_s))
    command = [
        sys.executable, "-m", "batchtune", "check", "scenario.yaml", "--candidate-model", "candidate",
        "--blocks", str(blocks), "--set", f"load.seed={number}", "--json", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    if not done.stdout:
        return {
            "verdict": "NO ANSWER",
            "exit_code": done.returncode,
            "reason": done.stderr[-500:],
            "gates": [],
        }
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def line(case: str, number: int, document: dict[str, Any]) -> str:
    gates = " ".join(
        f"{gate['metric']} {gate['change']['value'] * 100:+.2f}%{'!' if gate['state'] == 'regressed' else ''}"
        for gate in document["gates"]
        if gate["state"] != "not measured" and gate["change"]["value"] is not None
    )
    blocks = f"{document.get('blocks', 0)}+{document.get('fresh_blocks', 0)}"
    return (
        f"{case:>8} {number:>3} {document['verdict']:<12} exit {document['exit_code']} blocks {blocks:<6} "
        f"{document.get('seconds', 0.0):>6.1f} s  {gates}  {document.get('reason', '')[:200]}"
    )


def cpu_of_request_s(document: dict[str, Any]) -> float:
    return next((gate["before"] for gate in document["gates"] if gate["metric"] == "cpu"), float("nan"))


def summary(case: str, documents: list[dict[str, Any]]) -> str:
    measured = [document for document in documents if document.get("seconds") and document.get("blocks")]
    codes = [document["exit_code"] for document in documents]
    counts = ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes)))
    if not measured:
        return f"{case}: {counts}"
    seconds = statistics.median(document["seconds"] for document in measured)
    fixed_s = statistics.median(
        document["seconds"] * FIXED_BLOCKS * (2 if document["fresh_blocks"] else 1)
        / (document["blocks"] + document["fresh_blocks"])
        for document in measured
    )  # fmt: skip
    return (
        f"{case}: exit codes {counts}; median {seconds:.0f} s, of fixed length {fixed_s:.0f} s: "
        f"{1 - seconds / fixed_s:.0%} saved"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", metavar="CASE=COUNT")
    parser.add_argument("--blocks", type=int, default=FIXED_BLOCKS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["NO_COLOR"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scenario.yaml").write_text(SCENARIO)
        device(folder / "baseline", PLAIN)
        of_request_s = float("nan")
        for asked in given.cases:
            case, _, count = asked.partition("=")
            documents: list[dict[str, Any]] = []
            if case == "cpu" and of_request_s != of_request_s:
                first = checked(folder, "aa", number=0, blocks=6, cpu_of_request_s=0.0)
                of_request_s = cpu_of_request_s(first)
            for number in range(1, int(count or 1) + 1):
                document = checked(
                    folder, case, number=number, blocks=given.blocks, cpu_of_request_s=of_request_s
                )
                documents.append(document)
                if of_request_s != of_request_s:
                    of_request_s = cpu_of_request_s(document)
                print(line(case, number, document), flush=True)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps({"case": case, **document}) + "\n")
            print(summary(case, documents), flush=True)


if __name__ == "__main__":
    main()
