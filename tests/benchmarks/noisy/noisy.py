"""Is the answer of a sweep right, on any host, in any time? Simulated devices on noisy hosts, in virtual time.

    python tests/benchmarks/noisy/noisy.py --hosts quiet,ordinary,harsh --budgets 20,45,90,300 --seeds 20 --processes 2 \\
        --out FILE.json
    python tests/benchmarks/noisy/noisy.py --read FILE.json --beside OTHER.json

Each sweep is the product's own search (`product.py`) as a new user starts it, on a device (`devices.py`) on a host
(`hosts.py`): no server runs, loads are simulated (`virtual_fleet.py`), and the clock is
charged for what they would take, and for the CPU time that the search thinks. So two runs of one seed are alike but for
the machine's speed. The answer is judged (`judge.py`) by the exact capacity of each configuration without noise
(`truth.py`), which the first run of all finds in half a minute and keeps in the folder for temporary files.

`--seeds 20`: 1 to 20; `7-10`: those. `--out` keeps the sweeps as JSON, where the bench is interrupted those that have
ended; `--read` prints the tables of such files and runs nothing; `--beside` adds the sweeps of others to the tables, under
the names of their files, and compares them sweep by sweep.

Printed: for each host and budget the share of the best that the chosen configuration truly holds, how often it lies
below 95 % of the server's defaults or of no batching ("a reference") and of what the sweep's own runs held, what is
stated over the truth, how often the bracket holds it (one without an upper end does above its lower one), how often the
answer is called established, and wrongly so; then each sweep by device; then the bars, PASS or FAIL. A sweep without an
answer has a share of 0, and its error is listed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from batchtune.errors import BatchtuneError
from tests.benchmarks.noisy import table, truth
from tests.benchmarks.noisy.devices import DEVICES
from tests.benchmarks.noisy.hosts import HOSTS
from tests.benchmarks.noisy.judge import Judged, Sweep, judged
from tests.benchmarks.noisy.product import new_users_scenario, swept

KEPT_EVERY = 20


def made(sweep: Sweep) -> Judged:
    """Make one sweep and judge it; whatever goes wrong in it is its result."""
    began_s = time.perf_counter()
    device, host = DEVICES[sweep.device], HOSTS[sweep.host]
    try:
        scenario = new_users_scenario(device, seed=sweep.seed, budget_s=sweep.budget_s)
        found = swept(device, host, scenario)
    except BatchtuneError as error:
        return Judged(sweep=sweep, error=error.message, real_s=time.perf_counter() - began_s)
    except Exception:  # noqa: BLE001  a bug ends its sweep, not the bench
        lines = traceback.format_exc().splitlines()
        text = " ".join(line.strip() for line in (*lines[-3:-1], lines[-1]))
        return Judged(sweep=sweep, error=f"bug: {text}", real_s=time.perf_counter() - began_s)
    return judged(sweep, device, found, real_s=time.perf_counter() - began_s)


def sweeps_of(asked: argparse.Namespace) -> list[Sweep]:
    """Seeds first, then budgets, hosts and devices: what is interrupted has seen a little of all."""
    devices = list(DEVICES) if asked.devices == "all" else asked.devices.split(",")
    first, _, last = asked.seeds.rpartition("-")
    seeds = range(int(first or 1), int(last) + 1)
    budgets_s = [float(word) for word in asked.budgets.split(",")]
    return [
        Sweep(search="product", host=host, device=device, budget_s=budget_s, seed=seed)
        for seed, budget_s, host, device in itertools.product(
            seeds, budgets_s, asked.hosts.split(","), devices
        )
    ]


def read(paths: Iterable[Path]) -> list[Judged]:
    """The sweeps that these files keep."""
    return [
        Judged.from_dict(one)
        for path in paths
        for one in json.loads(path.read_text(encoding="utf-8"))["sweeps"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--budgets", default="20,45,90,300", help="seconds")
    parser.add_argument("--seeds", default="20")
    parser.add_argument("--devices", default="all", help=",".join(DEVICES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", default=[])
    parser.add_argument("--beside", type=Path, nargs="+", default=[])
    asked = parser.parse_args()
    results = read(asked.read)
    if not asked.read:
        results = _run(sweeps_of(asked), asked)
    _print(results, [_named(one, path.stem) for path in asked.beside for one in read([path])])


def _named(one: Judged, search: str) -> Judged:
    return replace(one, sweep=replace(one.sweep, search=search))


def _run(sweeps: Sequence[Sweep], asked: argparse.Namespace) -> list[Judged]:
    """Make them; those that have ended are kept every so often. The truths first, so that no two processes look for one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[Judged] = []
    began_s = time.monotonic()
    with ProcessPoolExecutor(
        asked.processes, get_context("spawn"), initializer=warnings.simplefilter, initargs=("ignore",)
    ) as pool:
        names = dict.fromkeys(sweep.device for sweep in sweeps)
        for name, (best, rate_rps) in zip(names, pool.map(truth.best, names), strict=True):
            print(f"{name}: at best {rate_rps:,.0f}/s, {best.label()}", file=sys.stderr, flush=True)
        try:
            for one in pool.map(made, sweeps):
                results.append(one)
                if len(results) % KEPT_EVERY == 0:
                    _keep(asked.out, results)
                    took_s = time.monotonic() - began_s
                    print(f"{len(results)} of {len(sweeps)} in {took_s:.0f} s", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("interrupted", file=sys.stderr)
    _keep(asked.out, results)
    return results


def _keep(path: Path | None, results: Sequence[Judged]) -> None:
    """As JSON: {"sweeps": [...]}."""
    if path is not None:
        document = {"sweeps": [asdict(one) for one in results]}
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _print(results: Sequence[Judged], beside: Sequence[Judged]) -> None:
    both = [*results, *beside]
    if not both:
        print("no sweep was made")
        return
    parts = [table.figures(both), table.each_sweep(both), table.errors(both)]
    for search in dict.fromkeys(one.sweep.search for one in both):
        met = table.bars([one for one in both if one.sweep.search == search])
        parts.append("\n".join([f"bars of the {search}", *met]))
    for search in dict.fromkeys(one.sweep.search for one in beside):
        theirs = [one for one in beside if one.sweep.search == search]
        parts.append(f"less the {search}'s\n{table.compared(results, theirs)}")
    print("\n\n".join(part for part in parts if part))


if __name__ == "__main__":
    main()
