"""How many batches should run at once? A hill climber on mean batch latency.

Source: `MaybeAdjustInflightLimit` of `adaptive_shared_batch_scheduler.h`. Every `batches_to_average_over` batches:
when the mean latency fell, keep the direction (step doubled if it had fallen before too, else halved); when not,
turn round. The first comparison is with 0, so the first move is always down.
"""

from __future__ import annotations

_LONGEST_STEP_RATIO = 1 / 8
_SHORTEST_STEP_RATIO = 1 / 128


class InFlightLimit:
    """`value` lies within `lowest` and `highest`; not thread-safe."""

    def __init__(self, *, initial: float, lowest: int, highest: int, batches_to_average_over: int) -> None:
        self.value = float(initial)
        self._lowest = lowest
        self._highest = highest
        self._batches_to_average_over = batches_to_average_over
        self._batches = 0
        self._latency_sum_micros = 0
        self._last_mean_micros = 0.0
        self._last_fell = False
        self._direction = 1
        self._step_ratio = _LONGEST_STEP_RATIO

    def record(self, latency_micros: int) -> None:
        """One regular batch took so long from its creation to its end."""
        self._batches += 1
        self._latency_sum_micros += latency_micros
        if self._batches == self._batches_to_average_over:
            self._adjust(self._latency_sum_micros / self._batches)
            self._batches = 0
            self._latency_sum_micros = 0

    def _adjust(self, mean_micros: float) -> None:
        fell = mean_micros < self._last_mean_micros
        if fell:
            self._step_ratio *= 2 if self._last_fell else 0.5
            self._step_ratio = max(min(self._step_ratio, _LONGEST_STEP_RATIO), _SHORTEST_STEP_RATIO)
        else:
            self._direction = -self._direction
        moved = self.value + self._direction * self.value * self._step_ratio
        self.value = max(min(moved, self._highest), self._lowest)
        self._last_mean_micros = mean_micros
        self._last_fell = fell
