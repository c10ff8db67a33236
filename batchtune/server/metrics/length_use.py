"""What did the batches of inputs of any length hold: what requests brought, and what filled it up, in which queues?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batchtune.server.metrics.prometheus_text import Labels, render_values
from batchtune.server.sessions.request import BatchRecord

_FIGURES = ("rows", "sent_elements", "padding_elements", "execution_micros")
_BATCHES = "batches"


class LengthUse:
    """Batches, rows, elements sent, elements of padding and execution time, for each length bucket; not locked."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {}

    def add(self, record: BatchRecord) -> None:
        """One batch; of inputs that all have one length there is nothing to count."""
        if not record.sent_elements:
            return
        sums = self._sums.setdefault(record.bucket, dict.fromkeys((_BATCHES, *_FIGURES), 0))
        sums[_BATCHES] += 1
        for figure in _FIGURES:
            sums[figure] += getattr(record, figure)

    def lines(self, prefix: str) -> Iterable[str]:
        """As Prometheus text: `<prefix>length_bucket_<figure>_total{bucket="64"}`; "" without buckets."""
        for figure in (_BATCHES, *_FIGURES):
            values: dict[Labels, float] = {
                (("bucket", bucket),): sums[figure] for bucket, sums in self._sums.items()
            }
            yield from render_values(f"{prefix}length_bucket_{figure}_total", "counter", values)


def boundary_lines(prefix: str, boundaries: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """The boundaries in force: `<prefix>length_buckets{session="m/1/serving_default",boundaries="32,64"} 1`."""
    values: dict[Labels, float] = {
        (("session", name), ("boundaries", ",".join(map(str, lengths)))): 1
        for name, lengths in boundaries.items()
    }
    yield from render_values(f"{prefix}length_buckets", "gauge", values)
