"""Does a check say of a real change what ten long runs say? Three changes, some minutes each.

layer: the transformer of the examples, and the same with a second layer of attention behind its first; intra: one thread
within an operation of TensorFlow, and two; inter: one over operations, and two. For each: the check (exit code, seconds,
blocks), then `compare` of ten blocks of runs of SECONDS (6) under the same gates. A gate agrees when both call it the same, or
the check's interval and that of the long runs overlap where one of them is open.
Run: python tests/benchmarks/check/real_change.py [layer] [intra] [inter] [--long SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCKS = 10
GATES = "throughput=3%,p95=10%,cpu=5%"
SCENARIO = """\
name: real
target: {model: ./one_layer}
request: {protocol: grpc, rows: 1, inputs: random}
load: {arrivals: closed, concurrency: 8, warm_up: 500ms, duration: 1500ms, seed: 1}
objective: throughput
fixed: {max_batch_size: 8, batch_timeout_micros: 1000, num_batch_threads: 1}
variants:
  baseline: {target: {flags: BEFORE}}
  candidate: {target: {model: MODEL, flags: AFTER}}
"""
INTRA = "tensorflow_intra_op_parallelism"
INTER = "tensorflow_inter_op_parallelism"
CHANGES = {
    "layer": {"MODEL": "./two_layers", "BEFORE": "{}", "AFTER": "{}"},
    "intra": {"MODEL": "./one_layer", "BEFORE": f"{{{INTRA}: 1}}", "AFTER": f"{{{INTRA}: 2}}"},
    "inter": {"MODEL": "./one_layer", "BEFORE": f"{{{INTER}: 1}}", "AFTER": f"{{{INTER}: 2}}"},
}
"""The words of the scenario that each change fills in."""

BUILD = """
import sys
import keras
tokens = keras.Input(shape=(200,), dtype="float32", name="tokens")
hidden = keras.layers.Embedding(20_000, 32)(keras.ops.cast(keras.ops.abs(tokens), "int32"))
attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=32)(hidden, hidden)
hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
hidden = hidden + keras.layers.Dense(32, activation="relu")(hidden)
for _ in range(int(sys.argv[2]) - 1):
    hidden = hidden + keras.layers.MultiHeadAttention(num_heads=2, key_dim=32)(hidden, hidden)
pooled = keras.layers.GlobalAveragePooling1D()(hidden)
keras.Model(tokens, keras.layers.Dense(2, activation="softmax")(pooled)).export(sys.argv[1], verbose=False)
"""


def batchtune(folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchtune", *words, "--json", "--quiet"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def gate_text(gate: dict[str, Any]) -> str:
    low, value, high = (
        "…" if gate["change"][name] is None else f"{gate['change'][name]:+.1%}"
        for name in ("low", "value", "high")
    )
    return f"{value} [{low}, {high}] {gate['state']}"


def agrees(check: dict[str, Any], long: dict[str, Any]) -> bool:
    states = {check["state"], long["state"]}
    if len(states) == 1:
        return True
    if "open" not in states:
        return False
    inf = float("inf")
    ends = [(gate["change"]["low"], gate["change"]["high"]) for gate in (check, long)]
    (low, high), (other_low, other_high) = (
        (-inf if a is None else a, inf if b is None else b) for a, b in ends
    )
    return low <= other_high and other_low <= high


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("changes", nargs="*", metavar="CHANGE", help=", ".join(CHANGES))
    parser.add_argument("--long", type=int, default=6, metavar="SECONDS")
    given = parser.parse_args()
    os.environ["NO_COLOR"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, layers in (("one_layer", "1"), ("two_layers", "2")):
            build = [sys.executable, "-c", BUILD, str(folder / model / "1"), layers]
            subprocess.run(build, check=True, capture_output=True)
        for change in given.changes or CHANGES:
            text = SCENARIO
            for word, value in CHANGES[change].items():
                text = text.replace(word, value)
            (folder / "scenario.yaml").write_text(text)
            check = batchtune(folder, "check", "scenario.yaml", "--max-regress", GATES)
            print(
                f"{change}: {check['verdict']}, exit code {check['exit_code']}, {check['seconds']:.0f} s, "
                f"{check['blocks']} + {check['fresh_blocks']} blocks; {check['reason']}",
                flush=True,
            )
            scenario = text.replace("duration: 1500ms", f"duration: {given.long}s")
            (folder / "scenario.yaml").write_text(scenario)
            compared = batchtune(
                folder, "compare", "scenario.yaml", "--max-regress", GATES, "--blocks", str(BLOCKS)
            )
            (long,) = compared["checks"]
            pairs = list(zip(check["gates"], long["gates"], strict=False))
            for ours, theirs in pairs:
                word = "agree" if agrees(ours, theirs) else "DIFFER"
                print(
                    f"  {ours['metric']:>10}: {gate_text(ours)}; long runs {gate_text(theirs)}: {word}",
                    flush=True,
                )
            print(
                f"  long runs: {long['verdict']} ({BLOCKS} of {given.long} s each); check: {check['verdict']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
