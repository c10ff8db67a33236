"""What did the batches of inputs of any length hold: what requests brought, and what filled it up?"""

from __future__ import annotations

from collections.abc import Iterable

from batchtune.server.metrics.prometheus_text import Labels, render_values
from batchtune.server.sessions.request import BatchRecord

_FIGURES = ("rows", "sent_elements", "padding_elements")


class LengthUse:
    """Rows, elements sent and elements of padding, for each length bucket; not locked."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, int]] = {}

    def add(self, record: BatchRecord) -> None:
        """One batch; of inputs that all have one length there is nothing to count."""
        if not record.sent_elements:
            return
        sums = self._sums.setdefault(record.bucket, dict.fromkeys(_FIGURES, 0))
        for figure in _FIGURES:
            sums[figure] += getattr(record, figure)

    def lines(self, prefix: str) -> Iterable[str]:
        """As Prometheus text: `<prefix>length_bucket_<figure>_total{bucket="64"}`; "" without buckets."""
        for figure in _FIGURES:
            values: dict[Labels, float] = {
                (("bucket", bucket),): sums[figure] for bucket, sums in self._sums.items()
            }
            yield from render_values(f"{prefix}length_bucket_{figure}_total", "counter", values)
