"""What the page of a sweep says: its trials, what is recommended of them, and beside what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from batchtune.archive.run import Run
from batchtune.batching.parameters import Configuration
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.contenders import RECOMMENDED
from batchtune.report.html.shell.drawing import Look, Shown
from batchtune.report.words import REFERENCES, other_references
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.tune.evidence.bracket import Run as JudgedRun
from batchtune.tune.evidence.bracket import runs_of
from batchtune.tune.trials.trial import Trial, without_superseded

ROLE_LOOKS: Final = {
    RECOMMENDED: Look(colour="@chosen", symbol="star", dash="solid"),
    REFERENCES["present"]: Look(colour="@predicted", symbol="triangle-up", dash="dashdot"),
    REFERENCES["no_batching"]: Look(colour="@unbatched", symbol="diamond", dash="dash"),
    REFERENCES["defaults"]: Look(colour="@defaults", symbol="square", dash="dot"),
}
OTHER: Final = Look(colour="@other", symbol="circle", dash="solid")
LATEST: Final = "The latest run of each configuration"
"""That which stands for a role in figures of single requests."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """A sweep: its trials that count, and what is recommended of them (None: nothing, `refusal` says why).

    `curve`: seconds of a batch by its rows, as the search read them.
    """

    run: Run
    scenario: Scenario
    trials: Sequence[Trial]
    chosen: Recommendation | None
    refusal: str = ""
    advice: str = ""
    curve: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def roles(self) -> dict[str, Recommendation | Compared]:
        """The configurations to compare, by name, the recommended one first."""
        if self.chosen is None:
            return {}
        references = {REFERENCES[other.name]: other for other in other_references(self.chosen)}
        return {RECOMMENDED: self.chosen, **references}

    @cached_property
    def contenders(self) -> list[Recommendation | Compared]:
        """All that was tried, in the order of the table."""
        return [*self.roles.values(), *(() if self.chosen is None else self.chosen.contenders)]

    @cached_property
    def names(self) -> dict[Configuration, str]:
        """The roles by their configurations."""
        return {contender.configuration: name for name, contender in self.roles.items()}

    def look(self, configuration: Configuration) -> Look:
        return ROLE_LOOKS.get(self.names.get(configuration, ""), OTHER)

    @cached_property
    def runs(self) -> list[tuple[Trial, JudgedRun]]:
        """Every load under the SLO's eyes, with its trial."""
        by_number = {trial.number: trial for trial in self.trials}
        judged = runs_of(self.trials, self.scenario.slo, self.scenario)
        return [(by_number[run.trial], run) for run in judged]

    @property
    def shown(self) -> list[Shown]:
        """The latest run of each role."""
        by_number = {trial.number: trial for trial in self.trials}
        return [
            Shown(name=name, look=ROLE_LOOKS[name], trial=by_number[contender.behind[-1]], run=self.run)
            for name, contender in self.roles.items()
            if contender.behind
        ]


def account_of(run: Run) -> Account:
    """Read a sweep.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    try:
        search = run.search()
    except ArchiveError:
        search = None
    chosen, refusal, advice = None, "", ""
    try:
        chosen = recommend(trials, scenario=scenario, search=search)
    except BatchtuneError as error:
        refusal, advice = error.message, error.hint or ""
    return Account(
        run=run,
        scenario=scenario,
        trials=without_superseded(trials),
        chosen=chosen,
        refusal=refusal,
        advice=advice,
        curve={} if search is None else search.curve,
    )


def merit_of(contender: Recommendation | Compared, objective: str) -> Estimate | None:
    """What is best to have more of, or of the objective latency less: a capacity from the rate held to that missed."""
    if objective == "latency":
        return contender.latency_s.get("p95")
    if objective != "capacity":
        return contender.throughput_rps
    if contender.capacity is None or not contender.capacity.held_rps:
        return None
    held_rps, missed_rps = contender.capacity.held_rps, contender.capacity.missed_rps
    return Estimate(value=held_rps, low=held_rps, high=missed_rps or held_rps)


def keeping(account: Account) -> Iterator[tuple[Recommendation | Compared, Estimate]]:
    """All that was tried and keeps the SLO, with its merit."""
    for contender in account.contenders:
        merit = merit_of(contender, account.scenario.objective)
        if merit is not None and (
            contender is account.chosen or (isinstance(contender, Compared) and contender.keeps)
        ):
            yield contender, merit
