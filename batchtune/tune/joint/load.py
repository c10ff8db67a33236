"""What is one load of several models: which was asked for, and did every model keep its SLO?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from batchtune.batching.parameters import Configuration
from batchtune.scenario.units import rounded
from batchtune.tune.evidence.bracket import ANSWERED, FAR_ANSWERED, Run
from batchtune.tune.trials.trial import Source, Trial

Kind = Literal["together", "alone"]

FAR_OVER = 2.0
"""A load that used so many times a limit missed by far: once is enough, unless the client or the host spoilt it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointAsk:
    """A load that the search wants: all models at `factor` times their stated rates.

    Of kind `alone` only the model `of` is loaded. `block` makes the seed of the arrivals; 0 or None: the
    scenario's own.
    """

    configuration: Configuration
    factor: float
    kind: Kind = "together"
    of: str = ""
    source: Source = "sampler"
    block: int | None = None

    def in_words(self) -> str:
        """`reader alone, ×1.15`, for a line of progress."""
        factor = f"×{rounded(self.factor)}"
        text = f"{self.of} alone, {factor}" if self.kind == "alone" else f"together, {factor}"
        return f"{text}, fresh" if self.source == "confirm" else text


@dataclass(frozen=True, slots=True, kw_only=True)
class JointLoad:
    """A load that was sent, with the trial of each loaded model; `number` counts from 1."""

    number: int
    ask: JointAsk
    trials: dict[str, Trial]

    @property
    def holds(self) -> bool:
        """Whether every model kept its SLO."""
        return all(_kept(trial) for trial in self.trials.values())

    @property
    def run(self) -> Run:
        """A vote for or against its factor; that of the model that did worst."""
        judged = self.trials.values()
        answered = min((_answered(trial) for trial in judged), default=0.0)
        requests = [trial.measurement.requests for trial in judged if trial.measurement is not None]
        is_far = (
            self.failure is not None
            or answered < FAR_ANSWERED
            or (self.tightness >= FAR_OVER and not self.spoilt)
        )
        return Run(
            trial=self.number,
            rate_rps=self.ask.factor,
            clients=None,
            answered_rps=self.ask.factor * answered,
            latency_s={},
            error_ratio=0.0,
            held=self.holds,
            far=not self.holds and is_far,
            fresh=self.ask.source == "confirm",
            requests=min(requests, default=0),
        )

    @property
    def tightness(self) -> float:
        """The largest share of a latency limit that a model used; above 1, or inf, where a promise is broken."""
        shares = [_share(trial) for trial in self.trials.values()]
        return max(shares, default=math.inf)

    @property
    def seconds(self) -> float:
        return max((trial.seconds for trial in self.trials.values()), default=0.0)

    @property
    def failure(self) -> str | None:
        return next((trial.failure for trial in self.trials.values() if trial.failure), None)

    @property
    def tells(self) -> bool:
        """Whether it says anything of the server: it did not fail, and the client was the limit of no model."""
        verdicts = {trial.measurement.verdict for trial in self.trials.values() if trial.measurement}
        return self.failure is None and "INVALID" not in verdicts

    @property
    def counts(self) -> bool:
        """Whether it speaks for or against its configuration: it tells of the server, or the server failed it."""
        return self.tells or self.failure is not None

    @property
    def spoilt(self) -> bool:
        """Whether the client was the limit, or the host noisy, for some model: nothing is told of the server."""
        verdicts = {trial.measurement.verdict for trial in self.trials.values() if trial.measurement}
        return bool(verdicts & {"INVALID", "NOISY"})


def loads_of(trials: Iterable[Trial], names: Collection[str]) -> list[JointLoad]:
    """The loads of a ledger, in order; trials of another kind of run, and floods of before, are passed over.

    So is a load of which trials are missing, one for each model of `names` that it loaded: the sweep was killed between
    the first of them and the last.
    """
    grouped: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.company is not None and trial.company.kind != "flood":
            grouped.setdefault(trial.company.load, []).append(trial)
    loads = [_load(number, members) for number, members in sorted(grouped.items())]
    return [load for load in loads if load.ask.kind == "alone" or load.trials.keys() == set(names)]


def next_load(trials: Iterable[Trial]) -> int:
    """The number of the load after those of a ledger."""
    return 1 + max((trial.company.load for trial in trials if trial.company is not None), default=0)


def _load(number: int, members: list[Trial]) -> JointLoad:
    first = members[0]
    company = first.company
    if company is None or company.kind == "flood":
        raise ValueError(f"trial {first.number} is of no load of several models")
    ask = JointAsk(
        configuration=first.configuration,
        factor=company.factor,
        kind=company.kind,
        of=company.of,
        source=first.source,
        block=first.block,
    )
    return JointLoad(
        number=number, ask=ask, trials={trial.company.model: trial for trial in members if trial.company}
    )


def _kept(trial: Trial) -> bool:
    verdict = None if trial.measurement is None else trial.measurement.verdict
    kept = trial.state == "complete" and trial.feasible and verdict != "INVALID"
    return kept and _answered(trial) >= ANSWERED


def _answered(trial: Trial) -> float:
    """Share of what was sent that was answered in time, and what a Poisson count may lack; 1: of a closed loop."""
    measured = trial.measurement
    if measured is None:
        return 0.0
    if not measured.offered_rps:
        return 1.0
    spare_rps = 2.0 * math.sqrt(measured.offered_rps / max(measured.window_s, 1e-9))
    return min((measured.throughput_rps.value + spare_rps) / measured.offered_rps, 1.0)


def _share(trial: Trial) -> float:
    if trial.state == "failed" or not trial.constraints:
        return math.inf
    if trial.constraints.get("errors", 0.0) > 0.0:
        return math.inf
    return max((1.0 + value for name, value in trial.constraints.items() if name != "errors"), default=0.0)
