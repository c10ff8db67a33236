"""What is believed of every point of the space: the twin's readings, corrected by what was measured?

Each of the twin's readings gives every point a merit, the logarithm of its objective. Where a point was measured, the
difference says how far that reading is off there, and by a Gaussian process over the points how far it is probably off
nearby; where the twin is switched off, the process stands alone. One sample of the process for each reading makes a
draw of the whole space (Matheron's rule: Wilson et al. 2020, "Efficiently sampling functions from Gaussian process
posteriors"), from which proposals, survivors and the probability of being near the best are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.tune import policy
from batchtune.tune.trials.space import Space

NEAR: Final = 0.05
"""Within 5 % of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A point of the space, or a reference point off its grid (`point` None); unless `inside` none to recommend."""

    configuration: Configuration
    point: Mapping[str, object] | None
    inside: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A merit that was measured: its value and its standard deviation.

    Or a bound, of which `says` tells the side; `merit` is then where beyond it the merit probably lies.
    """

    merit: float
    sd: float
    says: Literal["about", "at least", "at most"] = "about"
    bound: float = math.nan


class Kinship:
    """How alike the errors at two cells are: of unit variance, and the same however much is measured.

    Worked out once a space: over 1,500 cells that takes 100 to 270 ms, and beliefs are made anew after every trial.
    """

    def __init__(self, cells: Sequence[Cell], space: Space) -> None:
        self.cells = cells
        self._space = space

    @cached_property
    def kernel(self) -> NDArray[np.float64]:
        """1 on the diagonal; a part common to all points, a part that fades with their distance."""
        count = len(self.cells)
        places = np.full((count, len(self._space.shape)), np.nan)
        for row, cell in enumerate(self.cells):
            if cell.point is not None:
                indices = np.array(self._space.indices(cell.point))
                places[row] = indices / np.maximum(np.array(list(self._space.shape.values())) - 1, 1)
        squared = np.square(places[:, np.newaxis, :] - places[np.newaxis, :, :]).sum(axis=2)
        near = np.exp(-squared / (2.0 * policy.KERNEL_LENGTH**2))
        near = np.where(np.isnan(squared), 0.0, near)
        np.fill_diagonal(near, 1.0)
        kernel: NDArray[np.float64] = policy.KERNEL_COMMON_SHARE + (1.0 - policy.KERNEL_COMMON_SHARE) * near
        return kernel

    @cached_property
    def root(self) -> NDArray[np.float64]:
        """Lower triangular: the kernel is its product with its transpose."""
        return np.asarray(np.linalg.cholesky(self.kernel + 1e-6 * np.eye(len(self.cells))), dtype=np.float64)


class Beliefs:
    """Draws of the merit of every cell, shape (cells, draws).

    `predicted` are the twin's merits of the same shape; None: the twin is off. `measured` maps cells, by their place,
    to what was measured there. `error` is how far the twin is thought to be off, in logs. `most` is the merit that each
    cell has at most, whatever its neighbours show.
    """

    def __init__(
        self,
        kinship: Kinship,
        *,
        predicted: NDArray[np.float64] | None,
        measured: Mapping[int, Measured],
        seed: int,
        error: float | None = None,
        barred: Collection[int] = (),
        most: NDArray[np.float64] | None = None,
        draws: int = 256,
    ) -> None:
        self.cells = kinship.cells
        self._inside = [at for at, cell in enumerate(kinship.cells) if cell.inside]
        self._kinship = kinship
        self._measured = measured
        self._random = np.random.default_rng(seed)
        prior = self._prior(
            predicted, np.array([measurement.merit for measurement in measured.values()]), draws
        )
        usual = (
            policy.TWIN_PRIOR_ERROR
            if error is None or math.isnan(error)
            else min(max(error, policy.TWIN_LEAST_ERROR), policy.TWIN_MOST_ERROR)
        )
        self.error = self._scale(prior, predicted, usual)
        self.merits = self._posterior(prior, self.error)
        if most is not None:
            self._cut(most)
        if barred:
            self.merits[list(barred)] = self.merits.min() + policy.NO_RATE_MERIT

    def _cut(self, most: NDArray[np.float64]) -> None:
        """No draw lies above what a cell can do at most, unless it was measured there."""
        held = [at for at, measurement in self._measured.items() if measurement.says != "at most"]
        ceilings = most + policy.BOUND_SD
        ceilings[held] = np.inf
        self.merits = np.minimum(self.merits, ceilings[:, np.newaxis])

    def _prior(
        self, predicted: NDArray[np.float64] | None, merits: NDArray[np.float64], draws: int
    ) -> NDArray[np.float64]:
        """Each reading of the twin as often as it takes; without a twin one level for all."""
        if predicted is None:
            level = float(np.mean(merits)) if len(merits) else 0.0
            return np.full((len(self.cells), draws), level)
        finite = predicted[np.isfinite(predicted)]
        least = (float(finite.min()) if len(finite) else 0.0) + policy.NO_RATE_MERIT
        known = np.where(np.isfinite(predicted), predicted, least)
        return known[:, np.arange(draws) % known.shape[1]]

    def _scale(
        self, prior: NDArray[np.float64], predicted: NDArray[np.float64] | None, usual: float
    ) -> float:
        """How far the twin's medians are off, moderated by what its errors elsewhere say; a bound that is kept says
        nothing."""
        if predicted is None:
            return policy.ALONE_PRIOR_SD
        telling = {
            at: measurement
            for at, measurement in self._measured.items()
            if _tells(measurement, float(np.median(prior[at])))
        }
        merits = np.array(
            [
                measurement.merit if measurement.says == "about" else measurement.bound
                for measurement in telling.values()
            ]
        )
        off = merits - np.median(prior[list(telling)], axis=1) if telling else np.zeros(0)
        # Points far from the best do not matter, and the twin was not asked to be right there.
        off = off[merits >= merits.max() - 1.0] if len(off) else off
        off = np.clip(off, -0.5, 0.5)
        squares = policy.TWIN_PRIOR_WEIGHT * usual**2 + float(off @ off)
        return math.sqrt(squares / (policy.TWIN_PRIOR_WEIGHT + len(off)))

    def _posterior(self, prior: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        draws = prior.shape[1]
        covariance = scale**2 * self._kinship.kernel
        moved = self._kinship.root @ self._random.standard_normal(prior.shape)
        drawn: NDArray[np.float64] = prior + scale * moved
        at = [cell for cell, measurement in self._measured.items() if measurement.says == "about"]
        if at:
            noise = np.array([self._measured[cell].sd for cell in at])
            merits = np.array([self._measured[cell].merit for cell in at])
            readings = merits[:, np.newaxis] + noise[:, np.newaxis] * self._random.standard_normal(
                (len(at), draws)
            )
            known = covariance[np.ix_(at, at)] + np.diag(noise**2)
            drawn = drawn + covariance[:, at] @ np.linalg.solve(known, readings - drawn[at])
            covariance = covariance - covariance[:, at] @ np.linalg.solve(known, covariance[at])
        for cell, measurement in self._measured.items():
            if measurement.says != "about":
                self._bound(drawn, covariance, cell, measurement)
        return drawn

    def _bound(
        self, drawn: NDArray[np.float64], covariance: NDArray[np.float64], cell: int, measurement: Measured
    ) -> None:
        """Move the draws that lie on the wrong side to where beyond the bound it probably lies, their neighbours along
        with them; the others stay."""
        side = 1.0 if measurement.says == "at least" else -1.0
        wrong = np.flatnonzero(side * (drawn[cell] - measurement.bound) < 0.0)
        if not len(wrong):
            return
        probably = measurement.merit + measurement.sd * self._random.standard_normal(len(wrong))
        moved = side * np.maximum(side * probably, side * measurement.bound) - drawn[cell, wrong]
        variance = covariance[cell, cell]
        drawn[:, wrong] += np.outer(covariance[:, cell] / (variance + policy.BOUND_SD**2), moved)

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """The median merit of each cell."""
        return np.median(self.merits, axis=1)

    def known_merits(self) -> list[float]:
        """What was measured of the cells with batching in the space, bounds left out."""
        return [
            measured.merit
            for at, measured in self._measured.items()
            if measured.says == "about" and self.cells[at].point is not None
        ]

    def best(self) -> int:
        """The cell of the highest median, of those inside the space."""
        return max(self._inside, key=lambda at: float(self.expected[at]))

    @property
    def measured(self) -> list[int]:
        """The cells of which a measurement is known."""
        return list(self._measured)

    def near_best(self, cell: int, *, among: Sequence[int] | None = None) -> float:
        """The probability that no cell, of those `among` which it is judged, is better by more than NEAR."""
        rivals = self.merits if among is None else self.merits[among]
        ahead = rivals.max(axis=0, initial=-math.inf) - self.merits[cell]
        return float(np.mean(ahead <= -math.log1p(-NEAR)))

    def gain_left(self, settled: frozenset[int] = frozenset()) -> float:
        """What the best cell neither measured nor `settled` is expected to add to the best measured one, in logs
        (expected improvement)."""
        at = [cell for cell in self._measured if self.cells[cell].inside]
        others = [cell for cell in self._inside if cell not in self._measured and cell not in settled]
        if not others or not at:
            return math.inf if others else 0.0
        incumbent = self.merits[max(at, key=lambda cell: self.expected[cell])]
        return float(np.maximum(self.merits[others].max(axis=0) - incumbent, 0.0).mean())

    def top_two(self, count: int, *, without: frozenset[int] = frozenset()) -> list[int]:
        """So many different cells, each the best of one draw, every other one the best but for the last one picked.

        Source: Russo 2016, "Simple Bayesian algorithms for best arm identification".
        """
        picked: list[int] = []
        for _ in range(50 * count):
            draw = self.merits[:, self._random.integers(self.merits.shape[1])]
            for cell in np.argsort(-draw, kind="stable")[:2]:
                if int(cell) not in picked and int(cell) not in without:
                    picked.append(int(cell))
                    break
            if len(picked) >= count:
                break
        return picked

    def highest(self, count: int, *, without: frozenset[int] = frozenset()) -> list[int]:
        """So many different cells, those expected to be best first."""
        order = np.argsort(-self.expected, kind="stable")
        return [int(cell) for cell in order if int(cell) not in without][:count]

    def contenders(self, count: int) -> list[int]:
        """At most so many cells by their probability of being near the best; beyond two only likely ones."""
        merits = self.merits[self._inside]
        near = (merits.max(axis=0) - merits <= -math.log1p(-NEAR)).mean(axis=1)
        order = np.lexsort((-self.expected[self._inside], -near))
        return [
            self._inside[int(place)]
            for at, place in enumerate(order[:count])
            if at < policy.CONTENDERS_MIN or near[place] >= policy.CONTENDER_CHANCE
        ]


def _tells(measurement: Measured, predicted: float) -> bool:
    """Whether a measurement contradicts or sharpens what the twin predicts; a bound that it keeps says nothing new."""
    match measurement.says:
        case "about":
            return True
        case "at least":
            return predicted < measurement.bound
        case "at most":
            return predicted > measurement.bound
