"""What has a run of version_swaps.py shown? Its table, or a line."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.benchmarks.server.checked_clients import Tally
from tests.benchmarks.server.server_residue import Residue, Slope, slope_of

SLACK_MB = 20.0
"""Beside two versions: what requests, threads and a framework's own caches take while both are there."""
SETTLED_MIN = 5
"""Swaps after the first fifth: of fewer no slope is told."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the benchmark."""

    backend: str
    batched: bool
    swaps: int = 50
    clients: int = 64
    think_s: float = 0.01
    weights_mb: float = 100.0
    put_every_s: float = 0.1
    warm_up_s: float = 2.0

    def __str__(self) -> str:
        return f"{self.backend}, {'batched' if self.batched else 'not batched'}"


@dataclass(frozen=True, kw_only=True)
class Swap:
    """One swap: how the version came, what the server held at rest afterwards, and at most meanwhile."""

    way: str
    rest: Residue
    peak_mb: float


@dataclass(kw_only=True)
class Outcome:
    """What a run has shown; `base`: at rest with one version, before the first swap."""

    case: Case
    base: Residue
    swaps: list[Swap] = field(default_factory=list)
    answers: Tally = field(default_factory=Tally)
    puts: Tally = field(default_factory=Tally)
    lines: list[str] = field(default_factory=list)

    @property
    def over_two_versions_mb(self) -> float:
        """How far the peak was above two versions; negative: below."""
        weights_mb = self.case.weights_mb if self.case.backend != "emulated" else 0.0
        return max(swap.peak_mb for swap in self.swaps) - self.base.resident_mb - weights_mb


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a swap adds at rest, by regression after the first fifth; None: too few swaps to say."""

    resident_mb: Slope | None
    threads: Slope | None
    descriptors: Slope | None

    def __str__(self) -> str:
        if self.resident_mb is None:
            return "a swap: too few to say"
        return f"a swap, 95 %: {self.resident_mb} MB, {self.threads} threads, {self.descriptors} descriptors"


def growth_of(swaps: list[Swap]) -> Growth:
    """The slopes of what is held at rest."""
    settled = [swap.rest for swap in swaps[len(swaps) // 5 :]]
    if len(settled) < SETTLED_MIN:
        return Growth(resident_mb=None, threads=None, descriptors=None)
    numbers = [float(number) for number in range(len(settled))]
    return Growth(
        resident_mb=slope_of(numbers, [rest.resident_mb for rest in settled]),
        threads=slope_of(numbers, [float(rest.threads) for rest in settled]),
        descriptors=slope_of(numbers, [float(rest.descriptors) for rest in settled]),
    )


def report(outcome: Outcome) -> str:
    """The table of a run."""
    swaps, base = outcome.swaps, outcome.base
    lines = [f"{outcome.case}: {len(swaps)} swaps"]
    lines.append(
        f"  answers: {outcome.answers}; PUTs: {outcome.puts.counts['good']} good, {outcome.puts.failed} failed"
    )
    faults = outcome.answers.faults + outcome.puts.faults
    lines += [f"  {count} × {fault}" for fault, count in faults.most_common()]
    lines.append("  swap  way     MB at rest  MB at most  threads  descriptors")
    lines.append(f"  {0:4}  {'':6}{base.resident_mb:12.0f}{'':12}{base.threads:9}{base.descriptors:13}")
    for number, swap in enumerate(swaps, 1):
        if number % max(1, len(swaps) // 10) == 0:
            rest = swap.rest
            row = f"{rest.resident_mb:12.0f}{swap.peak_mb:12.0f}{rest.threads:9}{rest.descriptors:13}"
            lines.append(f"  {number:4}  {swap.way:6}{row}")
    lines.append(f"  peak: {outcome.over_two_versions_mb:+.1f} MB beside two versions (bar: {SLACK_MB:+g})")
    lines.append(f"  {growth_of(swaps)}")
    return "\n".join(lines)


def summary(outcome: Outcome, took_s: float) -> str:
    """A run in one line, its faults below it."""
    answers, puts = outcome.answers, outcome.puts
    line = (
        f"{outcome.case}: {len(outcome.swaps)} swaps in {took_s:.0f} s; "
        f"answers {answers.counts['good']:,} good, {answers.failed} failed; "
        f"PUTs {puts.counts['good']:,} good, {puts.failed} failed; "
        f"peak {outcome.over_two_versions_mb:+.1f} MB beside two versions; {growth_of(outcome.swaps)}"
    )
    faults = (answers.faults + puts.faults).most_common()
    return "\n".join([line, *(f"  {count} × {fault}" for fault, count in faults)])
