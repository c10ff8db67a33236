"""How are counters and histograms kept cheaply, and written as Prometheus text as TensorFlow Serving does?

Names are mangled as its exporter does: every character outside [a-zA-Z0-9_] becomes a colon; metrics without
labels print `{}`; only TYPE lines, no HELP.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

FOLDED_AT = 256
"""20 µs of the event loop."""

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts per bucket; a value equal to a bound belongs to the bucket above it, as in TensorFlow (histogram.cc),
    whatever Prometheus' `le` means. Not locked."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_right(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, values: Sequence[float], times: int = 1) -> None:
        """As `add` for each value; a few bisections for all of them, which matters between two batches."""
        ordered = sorted(values)
        at, end = 0, len(ordered)
        while at < end:
            bucket = bisect_right(self.bounds, ordered[at])
            last = bucket == len(self.bounds)
            after = end if last else bisect_left(ordered, self.bounds[bucket], at)
            self.counts[bucket] += (after - at) * times
            at = after
        self.total += sum(ordered) * times


class Times(list[float]):
    """Values that are put into their histogram FOLDED_AT at once, which costs less than half as much each."""

    __slots__ = ("_histogram",)

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._histogram = Histogram(bounds)

    def add(self, value: float) -> None:
        self.append(value)
        if len(self) >= FOLDED_AT:
            self.fold()

    def fold(self) -> Histogram:
        """The histogram of all values so far."""
        if self:
            self._histogram.add_all(self)
            self.clear()
        return self._histogram


def exponential_bounds(first: float, growth: float, count: int) -> tuple[float, ...]:
    """first, first*growth, … (`count` bounds), as tensorflow::monitoring::Buckets::Exponential."""
    return tuple(first * growth**power for power in range(count))


def render_values(name: str, kind: str, values: Mapping[Labels, float]) -> Iterable[str]:
    """The lines of a counter or gauge; nothing when it has no values yet."""
    if not values:
        return
    mangled = mangle(name)
    yield f"# TYPE {mangled} {kind}"
    for labels, value in values.items():
        yield f"{mangled}{{{_label_text(labels)}}} {_number(value)}"


def render_histograms(name: str, histograms: Mapping[Labels, Histogram]) -> Iterable[str]:
    """The lines of a histogram; buckets are cumulative."""
    if not histograms:
        return
    mangled = mangle(name)
    yield f"# TYPE {mangled} histogram"
    for labels, histogram in histograms.items():
        text = _label_text(labels)
        separator = "," if text else ""
        so_far = 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            so_far += count
            le = "+Inf" if bound is None else format(bound, "g")
            yield f'{mangled}_bucket{{{text}{separator}le="{le}"}} {so_far}'
        yield f"{mangled}_sum{{{text}}} {_number(histogram.total)}"
        yield f"{mangled}_count{{{text}}} {so_far}"


def mangle(name: str) -> str:
    """The exported name of /tensorflow/serving/…"""
    return "".join(char if char == "_" or (char.isascii() and char.isalnum()) else ":" for char in name)


def _label_text(labels: Labels) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else format(value, ".10g")
