"""How much longer does a batch take whose longest request is longer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.target.telemetry import ServerActivity
from batchtune.twin.model.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """τ(b, L) = fixed + b · (per row + per element · L), of which only the shares count: a `ServiceTime` says how long
    batches of one queue take. `longest`: the longest of their 1, 2, 4, … rows, on the mean."""

    fixed_s: float
    per_row_s: float
    per_element_s: float
    longest: tuple[float, ...]

    def usual(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The longest of so many rows of one queue, on the mean."""
        return np.interp(np.log2(np.maximum(rows, 1.0)), np.arange(len(self.longest)), self.longest)

    def share(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """By what share of the usual time a batch of so many rows takes longer for each unit of length."""
        per_length_s = rows * self.per_element_s
        whole_s = self.fixed_s + rows * self.per_row_s + per_length_s * self.usual(rows)
        return np.asarray(per_length_s / np.maximum(whole_s, 1e-12))

    def slower(self, rows: float, longest: float) -> float:
        """How many times as long such a batch takes as one of so many rows usually does."""
        sizes = np.array([rows])
        return float(1.0 + self.share(sizes)[0] * (longest - self.usual(sizes)[0]))


def fit_length_cost(servers: Sequence[ServerActivity], traffic: Traffic) -> LengthCost | None:
    """From what the server told of each length bucket: batches, rows, elements computed and execution time.

    None where it told nothing, or all batches were about as long. The times of batches that ran beside others are as
    good as any, as long as all did: only shares count.
    """
    points = np.array([point for server in servers for point in _told(server)])
    if not len(points) or not traffic.lengths:
        return None
    rows, elements, sent, seconds, batches = points.T
    # A unit of length may be several elements: of several inputs, or of vectors.
    per_length = max(
        round(float(np.sum(sent * batches) / np.sum(rows * batches) / np.mean(traffic.lengths))), 1
    )
    elements = elements / per_length
    longest = elements / rows
    # The longest requests of some batches must be this many times as long as those of others, on the mean.
    told_apart = 1.2
    if longest.max() < told_apart * longest.min():
        return None
    design = np.stack([np.ones_like(rows), rows, elements], axis=1)
    weights = np.sqrt(batches) / seconds
    from scipy.optimize import nnls

    fixed_s, per_row_s, per_element_s = nnls(design * weights[:, np.newaxis], seconds * weights)[0].tolist()
    octaves = 13
    return LengthCost(
        fixed_s=fixed_s,
        per_row_s=per_row_s,
        per_element_s=per_element_s,
        longest=tuple(traffic.mean_longest((), float(1 << octave)) for octave in range(octaves)),
    )


def _told(server: ServerActivity) -> list[tuple[float, ...]]:
    """(rows, elements, elements sent, seconds, batches), all but the last of one batch on the mean, by bucket."""
    points = []
    fewest_batches = 10
    for bucket, batches in server.bucket_batches.items():
        rows, micros = server.bucket_rows.get(bucket, 0), server.bucket_execution_micros.get(bucket, 0)
        sent, padding = (
            server.bucket_sent_elements.get(bucket, 0),
            server.bucket_padding_elements.get(bucket, 0),
        )
        if batches >= fewest_batches and rows and sent and micros:
            whole = (rows, sent + padding, sent, micros / 1e6)
            points.append((*(value / batches for value in whole), float(batches)))
    return points
