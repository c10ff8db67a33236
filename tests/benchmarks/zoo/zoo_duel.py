"""By how much is the best of a recorded grid really better than what was recommended? Both, side by side.

    python tests/benchmarks/zoo/zoo_duel.py FILE.json … [--blocks 6]     # files that zoo.py --json wrote

A grid that was recorded on a machine that drifts by 10 % names a best that is partly luck, and its figures are those of
another hour. Here the recommended configuration and that best run in turn, in blocks (`batchtune compare`); printed is the
loss of the recommendation with its 95 % interval: 0 % where it is as good, more than 0 where it is worse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.zoo.zoo_run import ROOT
from tests.benchmarks.zoo.zoo_table import TARGETS
from tests.benchmarks.zoo.zoo_target import ZooTarget

BLOCK_RUNS_S = "2s"


def fixed_of(label: str) -> dict[str, Any]:
    """The parameters of a configuration from its label: `max_batch_size=8 batch_timeout_micros=0`."""
    if label == "no batching":
        return {"enable_batching": False}
    if label == "server defaults":
        return {}
    return {name: int(value) for name, _, value in (pair.partition("=") for pair in label.split())}


def duel_scenario(target: ZooTarget, folder: Path, *, recommended: str, best: str) -> Path:
    """The target's scenario with the two as variants, without a search."""
    path = target.write_scenario(folder, seed=11)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    del document["search"], document["fixed"]
    document["load"]["duration"] = BLOCK_RUNS_S
    document["variants"] = {
        name: {"fixed": fixed_of(label)} for name, label in (("best", best), ("recommended", recommended))
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def lost(pair: dict[str, Any]) -> tuple[float, float, float]:
    """What the recommendation loses to the best, and its interval, from the ratio recommended/best."""
    ratio = pair["ratio"]
    value, low, high = (float(ratio[name]) for name in ("value", "low", "high"))
    if pair["metric"] == "p95":
        return value - 1.0, low - 1.0, high - 1.0
    return 1.0 - value, 1.0 - high, 1.0 - low


def duels(results: Path, *, blocks: int) -> Iterator[str]:
    for judged in json.loads(results.read_text(encoding="utf-8")):
        target, recommended, best = (TARGETS[judged["target"]], judged["recommended"], judged["best"])
        if target.truth != "recorded" or recommended == best:
            yield f"{target.name:27s} {'is the best recorded' if recommended == best else 'has an exact truth'}"
            continue
        with tempfile.TemporaryDirectory() as folder:
            scenario = duel_scenario(target, Path(folder), recommended=recommended, best=best)
            options = [
                "--json",
                "--quiet",
                "--blocks",
                str(blocks),
                "--baseline",
                "best",
                "--results",
                folder,
            ]
            compared = subprocess.run(
                [sys.executable, "-m", "batchtune", "compare", str(scenario), *options],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
        if compared.returncode not in (0, 6):
            yield f"{target.name:27s} compare ended with {compared.returncode}: {compared.stderr.strip()[-300:]}"
            continue
        loss, low, high = lost(json.loads(compared.stdout)["pairs"][0])
        disturbed = ", disturbed by the host" if compared.returncode else ""
        yield (
            f"{target.name:27s} loses {100 * loss:5.1f} % [{100 * low:.1f}, {100 * high:.1f}] of "
            f"{target.objective} to the best recorded{disturbed}: {recommended} against {best}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--blocks", type=int, default=6)
    asked = parser.parse_args()
    for results in asked.results:
        for line in duels(results, blocks=asked.blocks):
            print(line, flush=True)


if __name__ == "__main__":
    main()
