"""What does a run say that a page can show: what counts, what is recommended, beside what?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from batchtune.archive.run import Run
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.recommend.choice import Choice, choose
from batchtune.recommend.recommendation import Recommendation, recommend
from batchtune.report.words import REFERENCES
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.trials.ledger import without_superseded
from batchtune.tune.trials.trial import Trial
from batchtune.twin.model.twin import Twin

if TYPE_CHECKING:
    from batchtune.load.record.samples import Samples

CHOSEN: Final = "recommended"

PAGE_FILE: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A sweep: its trials that count, what is recommended of them (None: nothing, `refusal` says why), and the twin.

    `roles` are the configurations to compare, by name, the recommended one first. `twin_missing` says why there is no
    twin.
    """

    run: Run
    scenario: Scenario
    trials: Sequence[Trial]
    choice: Choice
    chosen: Recommendation | None
    refusal: str
    advice: str
    roles: Mapping[str, Pooled]
    twin: Twin | None
    twin_missing: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        return is_emulated(self.trials)

    def samples(self, pooled: Pooled) -> Samples | None:
        """Every request of the run that stands for a configuration; None where they were not kept."""
        return kept_requests(self.run, pooled.runs[-1].trial)


def account_of(run: Run) -> Account:
    """Read a sweep.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, every_trial = run.scenario(), run.ledger()
    try:
        search = run.search()
    except ArchiveError:
        search = None
    choice = choose(every_trial, scenario=scenario, slo=scenario.slo)
    chosen, refusal, advice = None, "", ""
    try:
        chosen = recommend(every_trial, scenario=scenario, search=search)
    except BatchtuneError as error:
        refusal, advice = error.message, error.hint or ""
    twin, missing = _twin(None if search is None else search.twin)
    return Account(
        run=run,
        scenario=scenario,
        trials=without_superseded(every_trial),
        choice=choice,
        chosen=chosen,
        refusal=refusal,
        advice=advice,
        roles=_roles(choice),
        twin=twin,
        twin_missing=missing,
        provenance=provenance_of(run),
    )


def is_emulated(trials: Sequence[Trial]) -> bool:
    """Whether the device of any trial was emulated by its service time."""
    servers = (trial.measurement.server for trial in trials if trial.measurement is not None)
    return any(server is not None and server.emulated for server in servers)


def kept_requests(run: Run, trial: Trial) -> Samples | None:
    """Every request of a trial; None where they were not kept."""
    try:
        return run.requests(trial.number)
    except ArchiveError:
        return None


def provenance_of(run: Run) -> Mapping[str, Any]:
    """On what it ran; empty where nobody kept it."""
    try:
        return run.provenance()
    except ArchiveError:
        return {}


def _roles(choice: Choice) -> dict[str, Pooled]:
    roles = {} if choice.chosen is None else {CHOSEN: choice.chosen}
    for name, pooled in choice.references.items():
        if choice.chosen is None or pooled.configuration != choice.chosen.configuration:
            roles[REFERENCES[name]] = pooled
    return {name: pooled for name, pooled in roles.items() if pooled.runs}


def _twin(kept: Mapping[str, Any] | None) -> tuple[Twin | None, str]:
    """The twin that the search ended with, or why there is none."""
    if kept is None:
        return None, "the search kept no model of the server (its strategy has none, or it ended early)"
    try:
        return Twin.from_dict(kept), ""
    except (KeyError, TypeError, ValueError) as error:
        return None, f"the model of the server that the search kept cannot be read: {error}"
