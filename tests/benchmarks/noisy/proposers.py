"""Who should name the next configuration? Optuna's samplers against neighbours, on surfaces whose best is known.

    python tests/benchmarks/noisy/proposers.py [--seeds 30]

Every surface is a capacity in requests/s as batching servers have it, drawn anew for each seed; a run adds a log-normal
error of 5 %. All proposers begin with what a sweep has tried by then: the smallest and the largest size, with one thread
and with most, and the best size and threads, everything else as the server has it. Printed: the true share of the best of
whoever measured best after so many proposals, the median over the seeds; the mean; the tenth percentile.

`neighbours + NAME`: neighbours while there are untried ones, then the sampler, which is not told of the neighbours' runs;
`(told all)`: it is. `tpe` is Optuna's TPESampler with one distribution of all parameters (multivariate), `single` with one
for each parameter.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import optuna

from batchtune.tune.search.proposals import proposed_points, usual_sampler

Values: TypeAlias = Mapping[str, Sequence[Any]]
Point: TypeAlias = dict[str, Any]
Seen: TypeAlias = list[tuple[Point, float, str]]
"""A point, what was measured, who named it."""
Proposer: TypeAlias = Callable[[Values, Seen, int], tuple[Point, str] | None]
Sampler: TypeAlias = Callable[[int], optuna.samplers.BaseSampler]

NOISE = 0.05
AFTER = (5, 10, 20, 40)
"""Proposals after which is told how far a proposer has come."""

SIZES, THREADS = [1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 4, 8]
TIMEOUTS = [0, 500, 1000, 2000, 5000, 10_000]
HILL: Values = {"max_batch_size": SIZES, "batch_timeout_micros": TIMEOUTS, "num_batch_threads": THREADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Where everybody begins in the space of `values`, and the true rate of each point; drawn by a seed."""

    base: Point
    rate_rps: Callable[[Point], float]
    values: Values

    def points(self) -> list[Point]:
        return [
            dict(zip(self.values, point, strict=True)) for point in itertools.product(*self.values.values())
        ]

    def begun(self) -> list[Point]:
        """What was tried before anybody proposes."""
        pairs = itertools.product(SIZES, THREADS)
        points = {
            pair: {**self.base, "max_batch_size": pair[0], "num_batch_threads": pair[1]} for pair in pairs
        }
        corners = itertools.product((SIZES[0], SIZES[-1]), (THREADS[0], THREADS[-1]))
        best = max(points, key=lambda pair: self.rate_rps(points[pair]))
        return [points[pair] for pair in dict.fromkeys((*corners, best))]


def _batched_rps(point: Point, *, fixed_ms: float, row_ms: float, limit_ms: float, parallel: float) -> float:
    """Rows a second of full batches whose wait and two executions end within the limit; less of larger ones."""
    size, threads = point["max_batch_size"], point["num_batch_threads"]
    gain = threads / (1.0 + (threads - 1) / parallel)
    batch_ms = fixed_ms + row_ms * size
    late = max(0.0, (point["batch_timeout_micros"] / 1e3 + 2.0 * batch_ms * threads / gain) / limit_ms - 1.0)
    waits = 1.0 - 0.08 * np.exp(-point["batch_timeout_micros"] / 1e3 / (0.3 * batch_ms))
    return float(1e3 * gain * size / batch_ms * waits * np.exp(-3.0 * late))


def _device(chance: np.random.Generator) -> dict[str, float]:
    fixed_ms = float(np.exp(chance.uniform(np.log(0.3), np.log(10.0))))
    row_ms = fixed_ms * float(np.exp(chance.uniform(np.log(0.01), np.log(0.3))))
    return {
        "fixed_ms": fixed_ms,
        "row_ms": row_ms,
        "limit_ms": fixed_ms * chance.uniform(6.0, 30.0),
        "parallel": chance.uniform(1.0, 6.0),
    }


def three(chance: np.random.Generator) -> Surface:
    """Size, timeout, threads: one hill."""
    rate_rps = partial(_batched_rps, **_device(chance))
    return Surface(values=HILL, base={"batch_timeout_micros": 0}, rate_rps=rate_rps)


def words(chance: np.random.Generator) -> Surface:
    """Besides, one of six execution modes, each with a factor of its own and its own liking for large batches."""
    modes = ["none", "graph", "eager", "fused", "int8", "half"]
    factors = dict(zip(modes, [1.0, *np.exp(chance.normal(-0.1, 0.35, 5))], strict=True))
    slopes = dict(zip(modes, [0.0, *chance.normal(0.0, 0.08, 5)], strict=True))
    rate = partial(_batched_rps, **_device(chance))

    def rate_rps(point: Point) -> float:
        doublings = np.log2(point["max_batch_size"] / 16)
        return float(rate(point) * factors[point["mode"]] * np.exp(slopes[point["mode"]] * doublings))

    base = {"batch_timeout_micros": 0, "mode": "none"}
    return Surface(values={**HILL, "mode": modes}, base=base, rate_rps=rate_rps)


def five(chance: np.random.Generator, *, trap: bool = False) -> Surface:
    """Besides threads within an operation and between operations; they and the batch threads share the CPUs.

    `trap`: one batch on all CPUs is a hill of its own; many batches on a CPU each are another, a third higher, with a
    valley between them: whoever changes one parameter at a time goes down first.
    """
    inter = [1, 2, 4]
    rate = partial(_batched_rps, **{**_device(chance), "parallel": 1e9})
    best_inter, gain = chance.choice(inter), chance.uniform(0.25, 0.45)

    def rate_rps(point: Point) -> float:
        inside, threads = np.log2(point["intra_op_threads"]), np.log2(point["num_batch_threads"])
        if trap:
            one_batch = np.exp(-0.35 * (threads + 3.0 - inside))
            shared = max(one_batch, (1.0 + gain) * np.exp(-0.15 * (3.0 - threads + inside)))
        else:
            shared = np.exp(-0.06 * abs(threads + inside - 3.0)) * (1.0 + gain * threads / 3.0)
        lost = np.exp(-0.08 * abs(np.log2(point["inter_op_threads"] / best_inter)))
        return float(rate({**point, "num_batch_threads": 1}) * shared * lost)

    return Surface(
        values={**HILL, "intra_op_threads": [1, 2, 4, 8], "inter_op_threads": inter},
        base={"batch_timeout_micros": 0, "intra_op_threads": 8, "inter_op_threads": 1},
        rate_rps=rate_rps,
    )


SURFACES = {"three": three, "words": words, "five": five, "trap": partial(five, trap=True)}


def neighbours(values: Values, seen: Seen, seed: int) -> tuple[Point, str] | None:
    """A step of one parameter from whoever measured best, words to any other word; None: all were tried."""
    tried = [point for point, _, _ in seen]
    top = max(seen, key=lambda run: run[1])[0]
    steps = []
    for name, choices in values.items():
        at = choices.index(top[name])
        beside = choices if isinstance(top[name], str) else choices[max(at - 1, 0) : at + 2]
        steps += [{**top, name: value} for value in beside if value != top[name]]
    untried = [point for point in steps if point not in tried]
    if not untried:
        return None
    return untried[int(np.random.default_rng(seed).integers(len(untried)))], "neighbour"


def sampled(make: Sampler, *, told_all: bool) -> Proposer:
    """What a sampler names that was not tried; at random where it repeats itself."""

    def propose(values: Values, seen: Seen, seed: int) -> tuple[Point, str]:
        tried = [point for point, _, _ in seen]
        known = [(point, value) for point, value, by in seen if told_all or by != "neighbour"]
        for named in proposed_points(values, known, seed=seed, sampler=make(seed)):
            if named not in tried:
                return named, "sampler"
        chance = np.random.default_rng(seed)
        return {
            name: choices[int(chance.integers(len(choices)))] for name, choices in values.items()
        }, "sampler"

    return propose


def then(make: Sampler, *, told_all: bool = False) -> Proposer:
    beyond = sampled(make, told_all=told_all)
    return lambda values, seen, seed: neighbours(values, seen, seed) or beyond(values, seen, seed)


PROPOSERS: dict[str, Proposer] = {
    "neighbours": neighbours,
    "neighbours + random": then(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    # A sequence is drawn from its beginning: every proposal of a run is of the same one.
    "neighbours + qmc": then(lambda seed: optuna.samplers.QMCSampler(seed=seed // 1000, scramble=True)),
    "neighbours + single": then(
        lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4, multivariate=False)
    ),
    "neighbours + tpe": then(usual_sampler),
    "neighbours + tpe (told all)": then(usual_sampler, told_all=True),
}


def shares(surface: Surface, proposer: Proposer, *, seed: int) -> list[float]:
    """The true share of the best, of whoever measured best, after each of AFTER."""
    chance = np.random.default_rng(seed)
    best = max(surface.rate_rps(point) for point in surface.points())

    def run(point: Point, by: str) -> tuple[Point, float, str]:
        return point, surface.rate_rps(point) * float(np.exp(chance.normal(0.0, NOISE))), by

    seen = [run(point, "scout") for point in surface.begun()]
    found = []
    for turn in range(1, AFTER[-1] + 1):
        named = proposer(surface.values, seen, 1000 * seed + turn)
        if named is not None:
            seen.append(run(*named))
        if turn in AFTER:
            found.append(surface.rate_rps(max(seen, key=lambda run: run[1])[0]) / best)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30)
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for surface, draw in SURFACES.items():
        space = draw(np.random.default_rng(0)).points()
        print(f"\n{surface}: {len(space)} points; after {', '.join(map(str, AFTER))} proposals")
        for name, proposer in PROPOSERS.items():
            drawn = [shares(draw(np.random.default_rng(seed)), proposer, seed=seed) for seed in range(seeds)]
            of_all = np.median(drawn, axis=0), np.mean(drawn, axis=0), np.quantile(drawn, 0.1, axis=0)
            columns = zip(*of_all, strict=True)
            figures = "   ".join(f"{middle:4.0%} {mean:4.0%} {low:4.0%}" for middle, mean, low in columns)
            print(f"{name:30} {figures}", flush=True)


if __name__ == "__main__":
    main()
