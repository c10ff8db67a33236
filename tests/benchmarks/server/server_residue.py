"""What a server process holds (memory, threads, descriptors), and how that grows."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SETTLED_FROM = 0.2
"""Share of the figures that are not looked at: a warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """At one instant; `at_s` on the caller's clock, megabytes of 10^6 bytes."""

    at_s: float
    resident_mb: float
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Growth per unit of the first axis, with the 95 % interval of a regression."""

    per_unit: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.per_unit:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def residue_of(pid: int, at_s: float) -> Residue:
    """What /proc says of the process now."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Residue(
        at_s=at_s,
        resident_mb=pages * resource.getpagesize() / 1e6,
        threads=sum(1 for _ in (process / "task").iterdir()),
        descriptors=sum(1 for _ in (process / "fd").iterdir()),
    )


def forget_peak(pid: int) -> None:
    """Begin a new peak of resident memory (/proc/PID/clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    """The highest resident memory since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def growth_of(at: Sequence[float], residues: Sequence[Residue], *, fewest: int) -> dict[str, Slope]:
    """Of each figure by `at`, after the warm-up; {}: fewer than `fewest` are left."""
    first = round(len(residues) * SETTLED_FROM)
    settled = residues[first:]
    if len(settled) < fewest:
        return {}
    return {
        name: slope_of(at[first:], [getattr(residue, figure) for residue in settled])
        for name, figure in (("MB", "resident_mb"), ("threads", "threads"), ("descriptors", "descriptors"))
    }


def in_words(growth: dict[str, Slope]) -> str:
    return ", ".join(f"{slope} {name}" for name, slope in growth.items()) or "too few to say"


def slope_of(at: Sequence[float], values: Sequence[float], *, blocks: int = 20) -> Slope:
    """Least squares over the means of so many blocks: values one after the other are too alike for an interval."""
    count = min(blocks, len(at))
    x, y = (
        np.array([part.mean() for part in np.array_split(np.array(axis), count)]) for axis in (at, values)
    )
    if np.ptp(y) == 0.0:
        return Slope(per_unit=0.0, low=0.0, high=0.0)
    from scipy import stats  # a second to import

    fit = stats.linregress(x, y)
    half = stats.t.ppf(0.975, count - 2) * fit.stderr
    return Slope(per_unit=fit.slope, low=fit.slope - half, high=fit.slope + half)
