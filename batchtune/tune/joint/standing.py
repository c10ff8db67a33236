"""How good is each configuration, by the loads of several models that it was measured under?

Of a capacity the score is the highest factor of the stated rates at which every model kept its SLO; of a latency it is
how much room the tightest of all latency limits left at the stated rates: 2 means that half of it was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Objective
from batchtune.tune import policy
from batchtune.tune.evidence.run_noise import mean_keeps
from batchtune.tune.joint.load import JointLoad, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A configuration that kept every SLO; `fresh` are the runs behind its score that were made after it was chosen.

    `held` of them kept every SLO too; `unsure` are the limits, such as `reader's p95`, that their mean may not keep.
    """

    configuration: Configuration
    score: float
    factor: float
    fresh: int = 0
    held: int = 0
    unsure: tuple[str, ...] = ()

    @property
    def is_confirmed(self) -> bool:
        """Whether enough fresh runs kept every SLO, and their mean keeps every latency limit at 95 %."""
        return self.held >= policy.CONFIRMATIONS and not self.unsure


def score_of(load: JointLoad, objective: Objective) -> float:
    """What one load says of its configuration; 0.0: nothing good."""
    if objective == "capacity":
        return load.ask.factor if load.holds else 0.0
    room = 1.0 / load.tightness if load.tightness > 0.0 else 0.0
    return room if load.holds else min(room, 0.999)


def standings(
    loads: Sequence[JointLoad], objective: Objective, *, kind: Kind = "together", of: str = ""
) -> list[Standing]:
    """Every configuration that held under such loads, the best first; of equals the one measured first.

    One that broke an SLO under most of its floods is none.
    """
    flooded = {
        load.ask.configuration for load in loads if load.ask.kind == "flood" and _floods_break(load, loads)
    }
    alike: dict[Configuration, list[JointLoad]] = {}
    for load in loads:
        if (load.ask.kind, load.ask.of) == (kind, of) and not (
            kind == "together" and load.ask.configuration in flooded
        ):
            alike.setdefault(load.ask.configuration, []).append(load)
    ranked = [standing for own in alike.values() if (standing := _standing(own, objective)) is not None]
    return sorted(ranked, key=lambda standing: -standing.score)


def answer_of(ranked: Sequence[Standing]) -> Standing:
    """The best that enough fresh runs held, else the best."""
    return next((standing for standing in ranked if standing.held >= policy.CONFIRMATIONS), ranked[0])


def unsure(loads: Sequence[JointLoad]) -> tuple[str, ...]:
    """The latency limits that the mean of these loads does not keep at 95 %; a single load tells of none."""
    shares: dict[str, list[float]] = {}
    for load in loads:
        for name, trial in load.judged().items():
            for quantile, over in trial.constraints.items():
                if quantile != "errors":
                    shares.setdefault(f"{name}'s {quantile}", []).append(1.0 + over)
    return tuple(name for name, used in shares.items() if not mean_keeps(used, 1.0))


def _standing(loads: Sequence[JointLoad], objective: Objective) -> Standing | None:
    """By the highest factor that holds: of fresh runs at a factor most must, else the one run of the search.

    A run that the client limited is neither for nor against it.
    """
    for factor in sorted({load.ask.factor for load in loads}, reverse=True):
        here = [load for load in loads if load.ask.factor == factor and load.counts]
        fresh = [load for load in here if load.ask.source == "confirm"]
        counted = fresh or here
        held = [load for load in counted if load.holds]
        if 2 * len(held) <= len(counted):
            continue
        doubted = unsure(fresh) if len(fresh) >= policy.CONFIRMATIONS else ()
        scores = sorted(score_of(load, objective) for load in held)
        return Standing(
            configuration=loads[0].ask.configuration,
            score=scores[len(scores) // 2],
            factor=factor,
            fresh=len(fresh),
            held=sum(load.holds for load in fresh),
            unsure=doubted,
        )
    return None


def _floods_break(load: JointLoad, loads: Sequence[JointLoad]) -> bool:
    alike = [
        other.holds
        for other in loads
        if (other.ask.kind, other.ask.of, other.ask.configuration)
        == ("flood", load.ask.of, load.ask.configuration)
        and other.counts
    ]
    return bool(alike) and 2 * sum(alike) <= len(alike)
