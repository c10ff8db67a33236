"""How long did each step of a chain take, and for which rows was it asked?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchtune.server.metrics.prometheus_text import Labels, Times, render_histograms, render_values


class StepUse:
    """One step; on the event loop. `times`: micros from its submit to its outputs, queueing included."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.times = Times(bounds)
        self.rows = 0
        self.rows_not_asked = 0
        self.failures: dict[str, int] = {}

    def count_rows(self, asked: int, not_asked: int) -> None:
        """The rows of one request."""
        self.rows += asked
        self.rows_not_asked += not_asked

    def failed(self, code: str) -> None:
        """One request ended in this step, with a gRPC code's name."""
        self.failures[code] = self.failures.get(code, 0) + 1


class ChainUse:
    """The steps of all chains, by the names of chain and step; versions of a chain count together."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._steps: dict[tuple[str, str], StepUse] = {}

    def step(self, chain: str, step: str) -> StepUse:
        """Where a step leaves its figures."""
        return self._steps.setdefault((chain, step), StepUse(self._bounds))

    def lines(self, prefix: str) -> Iterable[str]:
        """As Prometheus text: `<prefix>chain_step_<figure>{model_name="chain",step="select"}`; latency in micros."""
        steps = [(_labels(*names), use) for names, use in list(self._steps.items())]
        histograms = {labels: use.times.fold() for labels, use in steps}
        asked = {labels: histogram for labels, histogram in histograms.items() if any(histogram.counts)}
        yield from render_histograms(f"{prefix}chain_step_latency", asked)
        for name, values in (
            ("rows_total", {labels: use.rows for labels, use in steps}),
            ("rows_not_asked_total", {labels: use.rows_not_asked for labels, use in steps}),
        ):
            yield from render_values(f"{prefix}chain_step_{name}", "counter", values)
        failures: dict[Labels, float] = {
            (*labels, ("status", code)): count
            for labels, use in steps
            for code, count in use.failures.items()
        }
        yield from render_values(f"{prefix}chain_step_failed_count", "counter", failures)


def _labels(chain: str, step: str) -> Labels:
    return (("model_name", chain), ("step", step))
