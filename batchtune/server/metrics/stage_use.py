"""What did the stages around the device part take, and how long were they waited for?"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from batchtune.server.metrics.prometheus_text import Labels, render_values

_FIGURES = ("calls", "rows", "micros", "wait_micros")


class StageUse:
    """Calls of each model's stages, their rows, how long they ran and were waited for; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], list[float]] = {}

    def add(self, model_name: str, stage: str, rows: int, nanoseconds: int) -> None:
        """One call has run; of a lookup it may be for many requests."""
        with self._lock:
            sums = self._of(model_name, stage)
            sums[0] += 1
            sums[1] += rows
            sums[2] += nanoseconds / 1000

    def add_wait(self, model_name: str, stage: str, nanoseconds: int) -> None:
        """Requests have waited for a stage, so long in all."""
        with self._lock:
            self._of(model_name, stage)[3] += nanoseconds / 1000

    def lines(self, prefix: str) -> Iterable[str]:
        """As Prometheus text: `<prefix>stage_<figure>_total{model_name="m",stage="pre"}`; none without stages."""
        with self._lock:
            sums = {key: list(own) for key, own in self._sums.items()}
        if not sums:
            return
        for at, figure in enumerate(_FIGURES):
            values: dict[Labels, float] = {
                (("model_name", name), ("stage", stage)): own[at] for (name, stage), own in sums.items()
            }
            yield from render_values(f"{prefix}stage_{figure}_total", "counter", values)

    def _of(self, model_name: str, stage: str) -> list[float]:
        return self._sums.setdefault((model_name, stage), [0, 0, 0.0, 0.0])
