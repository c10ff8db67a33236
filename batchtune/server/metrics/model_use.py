"""What did each of the models that share the batch threads take of them?"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from batchtune.server.metrics.prometheus_text import Labels, render_values

_FIGURES = ("batches", "batch_rows", "batch_micros")


class ModelUse:
    """Batches of each model that ran, their rows with padding, and how long they took; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, int, int]] = {}

    def add(self, model_name: str, rows: int, nanoseconds: int) -> None:
        """One batch has run."""
        with self._lock:
            batches, all_rows, all_ns = self._sums.get(model_name, (0, 0, 0))
            self._sums[model_name] = batches + 1, all_rows + rows, all_ns + nanoseconds

    def lines(self, prefix: str) -> Iterable[str]:
        """As Prometheus text: `<prefix>model_<figure>_total{model_name="m"}`."""
        with self._lock:
            sums = dict(self._sums)
        for at, figure in enumerate(_FIGURES):
            values: dict[Labels, float] = {
                (("model_name", name),): own[at] / 1000 if figure == "batch_micros" else own[at]
                for name, own in sums.items()
            }
            yield from render_values(f"{prefix}model_{figure}_total", "counter", values)
