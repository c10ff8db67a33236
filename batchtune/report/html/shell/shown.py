"""Which runs does a figure show: under which name, in which look, and what was kept of them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from batchtune.archive.run import Run
from batchtune.errors import ArchiveError
from batchtune.measure.measurement import Measurement
from batchtune.tune.trials.trial import Trial

if TYPE_CHECKING:
    from batchtune.load.record.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A colour of the page, a symbol and a dash, so that lines are told apart without colour too."""

    colour: str
    symbol: str
    dash: str


LOOKS: Final = (
    Look(colour="@chosen", symbol="circle", dash="solid"),
    Look(colour="@unbatched", symbol="diamond", dash="dash"),
    Look(colour="@defaults", symbol="square", dash="dot"),
    Look(colour="@predicted", symbol="triangle-up", dash="dashdot"),
    Look(colour="@queue", symbol="cross", dash="longdash"),
    Look(colour="@compute", symbol="hexagon", dash="longdashdot"),
    Look(colour="@muted", symbol="star-triangle-down", dash="solid"),
    Look(colour="@other", symbol="pentagon", dash="dash"),
)
"""Of variants and load points, in their order; a ninth looks like the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One trial that stands for a name in the figures; `run` keeps its requests."""

    name: str
    look: Look
    trial: Trial
    run: Run

    @property
    def measured(self) -> Measurement | None:
        return self.trial.measurement

    def samples(self) -> Samples | None:
        """Every request of it; None where they were not kept."""
        try:
            return self.run.requests(self.trial.number)
        except ArchiveError:
            return None


def is_emulated(trials: Sequence[Trial]) -> bool:
    """Whether the device of any trial was emulated by its service time."""
    servers = (trial.measurement.server for trial in trials if trial.measurement is not None)
    return any(server is not None and server.emulated for server in servers)


def provenance_of(run: Run) -> Mapping[str, Any]:
    """On what it ran; empty where nobody kept it."""
    try:
        return run.provenance()
    except ArchiveError:
        return {}
