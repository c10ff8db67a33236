"""How would others search a recorded grid? For `replay.py`: each rival measures cells of a table until time is up.

A rival is a coroutine that yields the indices of a cell and is sent what one run of it showed. Optuna's samplers are
used as its manual shows them: a constraint on p95, one run a trial, the best feasible value seen is the answer. Model
Analyzer's quick search is written from its description (/docs/config_search.md and its published constants): it climbs
over the exponent of the batch size and the number of instances, from the smallest of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import optuna

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One run: requests/s, and p95 over its limit minus one (at most 0 when met)."""

    value: float
    violation: float

    @property
    def feasible(self) -> bool:
        return self.violation <= 0.0


Rival = Generator[Indices, Shown, None]


def optuna_rival(make: Callable[[int], optuna.samplers.BaseSampler]) -> Callable[[Sequence[int], int], Rival]:
    """A study as a user would write it; `make(seed)` gives the sampler."""

    def rival(shape: Sequence[int], seed: int) -> Rival:
        study = optuna.create_study(direction="maximize", sampler=make(seed))
        space = {str(at): optuna.distributions.IntDistribution(0, size - 1) for at, size in enumerate(shape)}
        while True:
            trial = study.ask(fixed_distributions=space)
            shown = yield tuple(trial.params[str(at)] for at in range(len(shape)))
            trial.set_constraint("p95", shown.violation)
            study.tell(trial, shown.value)

    return rival


RADIUS = 3.0
FEWEST_NEIGHBOURS = 3
STEP_THRESHOLDS = (0.09, 0.3, 1.0)
REVISITS_MAX = 2


def quick_search(shape: Sequence[int], seed: int) -> Rival:
    """Model Analyzer's quick search over size and threads; the timeout stays at the smallest, as it does there.

    Each step measures at least three cells within Euclidean distance 3 of home, moves by the weighted gains of each
    dimension (1 to 3 steps by their size), steps back when that was worse, and ends when home stays or comes back.
    """
    del seed  # it draws nothing
    sizes, _, threads = shape
    seen: dict[tuple[int, int], Shown] = {}
    home, visits = (0, 0), {(0, 0): 1}
    while True:
        wanted = [home, *_neighbours(home, sizes, threads)]
        for cell in wanted:
            if cell not in seen and (cell == home or _measured_near(home, seen) < FEWEST_NEIGHBOURS):
                seen[cell] = yield (cell[0], 0, cell[1])
        step = _step(home, seen)
        following = (
            min(max(home[0] + step[0], 0), sizes - 1),
            min(max(home[1] + step[1], 0), threads - 1),
        )
        if following not in seen:
            seen[following] = yield (following[0], 0, following[1])
        if _score(seen[following]) < _score(seen[home]):
            following = max(seen, key=lambda cell: _score(seen[cell]))
        visits[following] = visits.get(following, 0) + 1
        if following == home or visits[following] > REVISITS_MAX:
            return
        home = following


def _neighbours(home: tuple[int, int], sizes: int, threads: int) -> list[tuple[int, int]]:
    cells = itertools.product(range(sizes), range(threads))
    near = [(math.dist(cell, home), cell) for cell in cells if 0 < math.dist(cell, home) <= RADIUS]
    return [cell for _, cell in sorted(near)]


def _measured_near(home: tuple[int, int], seen: dict[tuple[int, int], Shown]) -> int:
    return sum(0 < math.dist(cell, home) <= RADIUS for cell in seen)


def _score(shown: Shown) -> float:
    """Cells within the limit by their value; the others below all of them, by how far they miss it."""
    return shown.value if shown.feasible else -shown.violation


def _step(home: tuple[int, int], seen: dict[tuple[int, int], Shown]) -> tuple[int, int]:
    steps = []
    for dimension in (0, 1):
        gains = [
            (
                _gain(seen[home], shown) * (1 if cell[dimension] > home[dimension] else -1),
                math.dist(cell, home),
            )
            for cell, shown in seen.items()
            if cell[dimension] != home[dimension] and math.dist(cell, home) <= RADIUS
        ]
        weight = sum(1 / distance for _, distance in gains)
        gain = sum(one / distance for one, distance in gains) / weight if weight else 0.0
        size = sum(abs(gain) >= threshold for threshold in STEP_THRESHOLDS)
        steps.append(int(math.copysign(size, gain)))
    return steps[0], steps[1]


def _gain(home: Shown, other: Shown) -> float:
    """Relative, from -1 to 1."""
    if home.feasible != other.feasible:
        return 1.0 if other.feasible else -1.0
    here, there = (home.value, other.value) if home.feasible else (1 / home.violation, 1 / other.violation)
    return max(-1.0, min(1.0, there / here - 1.0))
