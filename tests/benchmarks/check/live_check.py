"""Does a paired check on this machine cry wolf, and does it catch what was planted? Half a minute to a minute a check.

Two servers of an emulated device: the candidate is the same (aa), has batches that take 5, 10 or 20 % longer (slower5,
slower10, slower20) or twice as long (twice), 1 % of its batches 10 times as slow (tail), or burns 5 % more CPU a request
(cpu: of what the server uses at that time). A closed loop of 16 clients; of tail 600 requests/s, so that rare slow
batches take nothing from the throughput. A line a check, with the tally of its case so far: exit codes, how many were
caught and on which gate, median seconds to the verdict.
With --out each check is kept as it ends; those kept there are not run again. With --compare it is `batchtune compare` of as
many blocks as --blocks says: its outcome, and the ratio of the requests/s (of p95 for tail); at most 1 of 20 comparisons of
equal servers may find a difference, and 18 of 20 must find 5 %.
Run: python tests/benchmarks/check/live_check.py CASE=COUNT … [--blocks N] [--out FILE.jsonl] [--compare]
     python tests/benchmarks/check/live_check.py aa=40 slower5=20 slower10=20 tail=20 cpu=20 --out live.jsonl
     python tests/benchmarks/check/live_check.py aa=20 slower5=20 --compare --blocks 10
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX
from tests.benchmarks.commands import batchtune
from tests.benchmarks.emulated import Emulated

SCENARIO = """\
name: live
target: {{model: ./baseline}}
request: {{protocol: grpc, rows: 1}}
load: {{{load}, warm_up: 200ms, seed: 1}}
objective: {objective}
fixed: {{max_batch_size: 16, batch_timeout_micros: 2000, num_batch_threads: 1}}
"""
VARIANTS = "variants: {baseline: {}, candidate: {target: {model: ./candidate}}}\n"
CLOSED = {"objective": "throughput", "load": "arrivals: closed, concurrency: 16, duration: 800ms"}
OPEN = {"objective": "latency", "load": "arrivals: poisson, rate: 600/s, duration: 1500ms"}
Document = dict[str, Any]


def device(slower: float = 1.0, **more: float) -> Emulated:
    return Emulated(base_ms=4.0 * slower, per_row_ms=0.1 * slower, floats=200, more=more)


PLANTED = {
    "aa": device(),
    "slower5": device(1.05),
    "slower10": device(1.1),
    "slower20": device(1.2),
    "twice": device(2.0),
    "tail": device(slow_ratio=0.01, slow_factor=10.0),
    "cpu": device(cpu_ratio=0.05),
}


def prepare(folder: Path, case: str, more: str = "") -> None:
    PLANTED[case].write(folder / "candidate")
    text = SCENARIO.format(**(OPEN if case == "tail" else CLOSED))
    (folder / "scenario.yaml").write_text(text + more)


def checked(folder: Path, case: str, *, number: int, blocks: int) -> Document:
    """The document of one check."""
    prepare(folder, case)
    words = ["--candidate-model", "candidate", "--blocks", blocks, "--set", f"load.seed={number}"]
    ended = batchtune("check", "scenario.yaml", *words, cwd=folder, within_s=900.0)
    if ended.code == 130:
        raise KeyboardInterrupt
    no_answer = {"verdict": "NO ANSWER", "exit_code": ended.code, "reason": ended.errors[-500:], "gates": []}
    document: Document = ended.document if "gates" in ended.document else no_answer
    return {"case": case, "number": number, **document}


def compared(folder: Path, case: str, *, number: int, blocks: int) -> Document:
    """The same of one comparison."""
    prepare(folder, case, VARIANTS)
    words = ["compare", "scenario.yaml", "--blocks", blocks, "--set", f"load.seed={number}"]
    ended = batchtune(*words, cwd=folder)
    (pair,) = ended.or_exit()["pairs"]
    low, high = (pair["ratio"][end] or math.nan for end in ("low", "high"))
    return {
        "case": case,
        "number": number,
        "verdict": pair["outcome"],
        "exit_code": ended.code,
        "reason": f"×{pair['ratio']['value']:.4f} [{low:.4f}, {high:.4f}]",
        "seconds": ended.seconds,
        "blocks": blocks,
        "gates": [],
    }


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
    """`20 checks: 19 x 1 REGRESSED, 1 x 5 INCONCLUSIVE; on throughput 19, p95 18; median 31 s`."""
    codes = Counter(f"{document['exit_code']} {document['verdict']}" for document in documents)
    flagged = Counter(
        gate["metric"] for document in documents for gate in document["gates"] if gate["state"] == "regressed"
    )
    told = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
    on = f"; on {', '.join(f'{name} {count}' for name, count in flagged.most_common())}" if flagged else ""
    seconds = [document["seconds"] for document in documents if document.get("blocks")]
    took = f"; median {statistics.median(seconds):.0f} s" if seconds else ""
    return f"{len(documents)} checks: {told}{on}{took}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE=COUNT", help=f"CASE: {', '.join(PLANTED)}")
    parser.add_argument("--blocks", type=int, default=CHECK_BLOCKS_MAX)
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    parser.add_argument("--compare", action="store_const", const=compared, default=checked, dest="made")
    given = parser.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    documents: list[Document] = [json.loads(text) for text in lines]
    with tempfile.TemporaryDirectory() as name:
        PLANTED["aa"].write(Path(name) / "baseline")
        for word in given.cases:
            case, _, count = word.partition("=")
            kept = {document["number"] for document in documents if document["case"] == case}
            for number in sorted(set(range(1, int(count or 1) + 1)) - kept):
                document = given.made(Path(name), case, number=number, blocks=given.blocks)
                documents.append(document)
                with given.out.open("a") as file:
                    file.write(json.dumps(document) + "\n")
                print(line(document), flush=True)
                print(
                    f"{case:>8} so far: {tally([one for one in documents if one['case'] == case])}",
                    flush=True,
                )
    for case in dict.fromkeys(document["case"] for document in documents):
        print(f"{case:>8}: {tally([one for one in documents if one['case'] == case])}")


if __name__ == "__main__":
    main()
