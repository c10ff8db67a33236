"""Does a paired check on this machine cry wolf, and does it catch what was planted? Half a minute to a minute a check.

Two servers of an emulated device: the candidate is the same (aa), has batches that take 5, 10 or 20 % longer (slower5,
slower10, slower20) or twice as long (twice), 1 % of its batches 10 times as slow (tail), or burns 5 % more CPU a request
(cpu: of what the server uses at that time). A closed loop of 16 clients; of tail 600 requests/s, so that rare slow
batches take nothing from the throughput. A line a check, with the tally of its case so far: exit codes, how many were caught and on which gate, median
seconds to the verdict, and what a test of fixed length (36 blocks, as many again where it confirms) would have taken.
With --out each check is kept as it ends; those kept there are not run again.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX
from batchtune.tune.compare.blocks import DUET_S

CLIENTS = 16
PLAIN = {"base_ms": 4.0, "per_row_ms": 0.1}
SHAPES = "inputs: {x: {dtype: float32, shape: [200]}}\noutputs: {y: {dtype: float32, shape: [2]}}\n"
SCENARIO = f"""\
name: live
target: {{model: ./baseline}}
request: {{protocol: grpc, rows: 1}}
load: LOAD
objective: OBJECTIVE
fixed: {{max_batch_size: {CLIENTS}, batch_timeout_micros: 2000, num_batch_threads: 1}}
"""
CLOSED = f"{{arrivals: closed, concurrency: {CLIENTS}, warm_up: 200ms, duration: 800ms, seed: 1}}"
OPEN = "{arrivals: poisson, rate: 600/s, warm_up: 200ms, duration: 1500ms, seed: 1}"
SLOWER = {"slower5": 1.05, "slower10": 1.1, "slower20": 1.2, "twice": 2.0}
"""Times the baseline's service time, by case."""

LOADS = {"aa": CLOSED, **dict.fromkeys(SLOWER, CLOSED), "tail": OPEN, "cpu": CLOSED}

Document = dict[str, Any]


def device(folder: Path, service_time: dict[str, float]) -> Path:
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "emulated.yaml").write_text(f"service_time: {json.dumps(service_time)}\n{SHAPES}")
    return folder


def planted(case: str) -> dict[str, float]:
    match case:
        case "slower5" | "slower10" | "slower20" | "twice":
            return {name: value * SLOWER[case] for name, value in PLAIN.items()}
        case "tail":
            return {**PLAIN, "slow_ratio": 0.01, "slow_factor": 10.0}
        case "cpu":
            return {**PLAIN, "cpu_ratio": 0.05}
        case _:
            return PLAIN


def checked(folder: Path, case: str, *, number: int, blocks: int) -> Document:
    """The document of one check, with the seconds that its runs took in all."""
    device(folder / "candidate", planted(case))
    objective = "latency" if LOADS[case] == OPEN else "throughput"
    (folder / "scenario.yaml").write_text(
        SCENARIO.replace("LOAD", LOADS[case]).replace("OBJECTIVE", objective)
    )
    command = [
        sys.executable, "-m", "batchtune", "check", "scenario.yaml", "--candidate-model", "candidate",
        "--blocks", str(blocks), "--set", f"load.seed={number}", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if not done.stdout:
        return {
            "verdict": "NO ANSWER",
            "exit_code": done.returncode,
            "reason": done.stderr[-500:],
            "gates": [],
        }
    document: Document = json.loads(done.stdout)
    lines = (folder / document["run"] / "trials.jsonl").read_text().splitlines()
    looks = [line.partition("] after ")[2] for line in done.stderr.splitlines() if "] after " in line]
    seconds = sum(json.loads(line)["seconds"] for line in lines)
    duets_file = folder / document["run"] / "duets.jsonl"
    duets = len(duets_file.read_text().splitlines()) if duets_file.exists() else 0
    return {**document, "runs_s": seconds, "runs": len(lines), "duets": duets, "looks": looks}


def kept(path: Path | None) -> list[Document]:
    """The checks of a file; those without a number were numbered in their order."""
    if path is None or not path.exists():
        return []
    documents: list[Document] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    before: Counter[str] = Counter()
    for document in documents:
        before[document["case"]] += 1
        document.setdefault("number", before[document["case"]])
    return documents


def line(document: Document) -> str:
    gates = " ".join(
        f"{gate['metric']} {gate['change']['value'] * 100:+.2f}%{'!' if gate['state'] == 'regressed' else ''}"
        for gate in document["gates"]
        if gate["state"] != "not measured" and gate["change"]["value"] is not None
    )
    blocks = f"{document.get('blocks', 0)}+{document.get('fresh_blocks', 0)}"
    return (
        f"{document['case']:>8} {document['number']:>3} {document['verdict']:<12} exit {document['exit_code']} "
        f"blocks {blocks:<6} {document.get('seconds', 0.0):>6.1f} s  {gates}  {document.get('reason', '')[:200]}"
    )


def tally(documents: Sequence[Document]) -> str:
    """`20 checks: exit codes 19 x 1, 1 x 5; on throughput 19, p95 18; median 31 s, of fixed length 88 s: 65% saved`."""
    codes = Counter(document["exit_code"] for document in documents)
    flagged = Counter(
        gate["metric"] for document in documents for gate in document["gates"] if gate["state"] == "regressed"
    )
    told = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
    on = f"; on {', '.join(f'{name} {count}' for name, count in flagged.most_common())}" if flagged else ""
    measured = [document for document in documents if document.get("blocks")]
    text = f"{len(documents)} checks: exit codes {told}{on}"
    if not measured:
        return text
    seconds = statistics.median(document["seconds"] for document in measured)
    saved = statistics.median(1.0 - document["seconds"] / fixed_s(document) for document in measured)
    fixed = statistics.median(map(fixed_s, measured))
    return f"{text}; median {seconds:.0f} s, of fixed length {fixed:.0f} s: {saved:.0%} saved"


def fixed_s(document: Document) -> float:
    """What the most blocks, and as many again where it confirmed, would have taken with one launch for each of the
    two, and with a duet for each block of a phase that had any."""
    phases = 2 if document["fresh_blocks"] else 1
    measured = document["blocks"] + document["fresh_blocks"]
    duets = document.get("duets", measured)
    launch_s = (document["seconds"] - document["runs_s"] - duets * DUET_S) / max(
        len(document.get("looks", ())), 1
    )
    with_duets = phases if duets > document["blocks"] else min(duets, 1)
    blocks_s = document["blocks_max"] * (phases * document["runs_s"] / measured + with_duets * DUET_S)
    return float(phases * launch_s + blocks_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", metavar="CASE=COUNT")
    parser.add_argument("--blocks", type=int, default=CHECK_BLOCKS_MAX)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["NO_COLOR"] = "1"
    asked = {case: int(count or 1) for case, _, count in (word.partition("=") for word in given.cases)}
    unknown = sorted(asked.keys() - LOADS.keys())
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; there are: {', '.join(LOADS)}")
    documents = kept(given.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device(folder / "baseline", PLAIN)
        for case, count in asked.items():
            for number in range(1, count + 1):
                of_case = [document for document in documents if document["case"] == case]
                if number in {document["number"] for document in of_case}:
                    continue
                answer = checked(folder, case, number=number, blocks=given.blocks)
                document = {"case": case, "number": number, **answer}
                documents.append(document)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps(document) + "\n")
                print(line(document), flush=True)
                print(f"{case:>8} so far: {tally([*of_case, document])}", flush=True)
    print()
    for case in asked:
        of_case = [document for document in documents if document["case"] == case]
        print(f"{case:>8}: {tally(of_case)}")


if __name__ == "__main__":
    main()
