"""Emulated devices as the benchmarks serve them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A device of `emulated.yaml`; `floats` is the size of a row, `more` of its service time what has no field here."""

    base_ms: float = 0.0
    per_row_ms: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    parallel: bool = False
    contention_ratio: float = 0.0
    jitter_ratio: float = 0.0
    rows_max: int | None = None
    floats: int = 16
    more: dict[str, float] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write version 1 of the model into this folder, which is returned."""
        service_time: dict[str, Any] = {"base_ms": self.base_ms, "per_row_ms": self.per_row_ms}
        if self.steps:
            service_time = {"steps": dict(self.steps)}
        if self.parallel:
            service_time |= {"concurrency": "parallel", "contention_ratio": self.contention_ratio}
        document = {
            "service_time": {**service_time, "jitter_ratio": self.jitter_ratio, **self.more},
            **({"memory": {"rows_max": self.rows_max}} if self.rows_max else {}),
            "inputs": {"x": {"dtype": "float32", "shape": [self.floats]}},
            "outputs": {"y": {"dtype": "float32", "shape": [2]}},
        }
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "1" / "emulated.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        return folder

    def tau_ms(self, rows_max: int = DEFAULT_MAX_BATCH_SIZE) -> NDArray[np.float64]:
        """[rows_max + 1], what a batch takes by its rows, in milliseconds."""
        return np.array([self._tau_ms(rows) for rows in range(rows_max + 1)])

    def _tau_ms(self, rows: int) -> float:
        if not self.steps:
            return self.base_ms + self.per_row_ms * rows
        fitting = [milliseconds for most, milliseconds in self.steps if rows <= most]
        last, milliseconds = self.steps[-1]
        return fitting[0] if fitting else milliseconds * rows / last
