"""Which of all hand-set numbers of the search matter? Moves all of them at once by 30 %, each up or down; no server.

    nice python tests/benchmarks/replay/policy_screen.py

`policy.py` moves one number after another: with a hundred of them that is a night. Here every sweep moves each number
of `batchtune.tune.policy` to 0.7 or 1.3 times itself by a row of a Hadamard matrix, so that each number is high in one
half of the sweeps and low in the other, and any two are high together in a quarter: one set of N sweeps tells the effect
of every number as well as N sweeps would tell that of one. The same workloads and seeds run once as it stands.

`effect` is the mean regret (points of per cent lost to the best configuration, a choice that misses the SLO loses all)
with the number high less that with it low, the workload's own mean taken out, ± one standard error; of a hundred numbers
that do nothing five lie beyond 2 errors. `never read`: no sweep asked for it. What is far off is then moved alone by
`policy.py --only`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from batchtune.tune import policy
from tests.benchmarks.replay.policy import FACTORS, WORKLOADS, be_quiet, ending, moved, numbers

PRIME = 151
"""Of the matrix: one more sweep, and as many numbers at most."""


class ReadPolicy(types.ModuleType):
    """The module `policy`, which remembers the names that were asked of it."""

    names_read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.isupper():
            ReadPolicy.names_read.add(name)
        return super().__getattribute__(name)


def paley(prime: int) -> NDArray[np.int8]:
    """Paley's first Hadamard matrix: +1 and -1, orthogonal columns, shape (prime + 1,) * 2; the prime is 3 modulo 4."""
    squares = {number * number % prime for number in range(1, prime)}
    residue = np.array([0, *(1 if number in squares else -1 for number in range(1, prime))])
    matrix = np.ones((prime + 1, prime + 1), dtype=np.int8)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = residue[np.subtract.outer(np.arange(prime), np.arange(prime)) % prime]
    matrix[np.diag_indices(prime + 1)] = 1
    return matrix


def regret_of(workload: str, seed: int, settings: Mapping[str, Any]) -> tuple[float, set[str]]:
    """The loss of one sweep under these settings, and the names it read."""
    policy.__class__ = ReadPolicy
    ReadPolicy.names_read.clear()
    regret = ending(workload, seed, settings).regret
    return regret, set(ReadPolicy.names_read)


def effects(levels: NDArray[np.int8], regrets: Sequence[float]) -> tuple[NDArray[np.float64], float]:
    """High less low of each column, and the standard error that all have in common.

    Shapes (sweeps, numbers) and (sweeps,); rows of one workload are those that agree modulo the number of workloads.
    """
    residuals = np.asarray(regrets, dtype=float)
    for first in range(len(WORKLOADS)):
        residuals[first :: len(WORKLOADS)] -= residuals[first :: len(WORKLOADS)].mean()
    high_less_low = 2.0 * (levels.T @ residuals) / len(residuals)
    return high_less_low, 2.0 * float(residuals.std(ddof=len(WORKLOADS))) / float(np.sqrt(len(residuals)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--first-seed", type=int, default=0)
    asked = parser.parse_args()
    standing = dict(numbers())
    if len(standing) > PRIME:
        sys.exit(f"{len(standing)} numbers: a matrix of a larger PRIME is needed")
    sweeps = PRIME + 1
    levels = paley(PRIME)[:, 1 : 1 + len(standing)]
    workloads = [list(WORKLOADS)[row % len(WORKLOADS)] for row in range(sweeps)]
    seeds = [asked.first_seed + row // len(WORKLOADS) for row in range(sweeps)]
    settings = [
        {
            name: moved(value, FACTORS[int(level > 0)])
            for (name, value), level in zip(standing.items(), row, strict=True)
        }
        for row in levels
    ]
    started_s = time.monotonic()
    with ProcessPoolExecutor(asked.processes, initializer=be_quiet) as pool:
        usual = list(pool.map(regret_of, workloads, seeds, [{}] * sweeps))
        print(_summary("as it stands", workloads, [regret for regret, _ in usual]), flush=True)
        screened = list(pool.map(regret_of, workloads, seeds, settings))
    regrets = [regret for regret, _ in screened]
    print(_summary("all moved at once", workloads, regrets))
    read = set[str]().union(*(names for _, names in [*usual, *screened]))
    high_less_low, error = effects(levels, regrets)
    print(f"{'number':28} {'as it stands':>32}   effect (points) ± {100 * error:.2f}")
    for index in np.argsort(-np.abs(high_less_low)):
        name = list(standing)[index]
        note = "" if name in read else "   never read"
        marked = "   beyond 3 errors" if abs(high_less_low[index]) > 3.0 * error else ""
        print(f"{name:28} {standing[name]!s:>32.32}   {100 * high_less_low[index]:+6.2f}{marked}{note}")
    print(f"{time.monotonic() - started_s:.0f} s")


def _summary(title: str, workloads: Sequence[str], regrets: Sequence[float]) -> str:
    means = (
        f"{name} {100 * np.mean([regret for regret, of in zip(regrets, workloads, strict=True) if of == name]):.2f}"
        for name in WORKLOADS
    )
    return (
        f"{title}: mean regret {100 * np.mean(regrets):.2f} % over {len(regrets)} sweeps ({', '.join(means)})"
    )


if __name__ == "__main__":
    main()
