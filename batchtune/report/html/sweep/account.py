"""What does a run say that a page can show: what counts, what is recommended, beside what?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchtune.archive.run import Run
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.recommend.choice import Choice, choose
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.report.html.shell.shown import Look, Shown
from batchtune.report.words import REFERENCES
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.evidence.ledger import without_superseded
from batchtune.tune.trials.trial import Trial
from batchtune.twin.model.twin import Twin

CHOSEN: Final = "recommended"

ROLE_LOOKS: Final = {
    CHOSEN: Look(colour="@chosen", symbol="star", dash="solid"),
    REFERENCES["no_batching"]: Look(colour="@unbatched", symbol="diamond", dash="dash"),
    REFERENCES["defaults"]: Look(colour="@defaults", symbol="square", dash="dot"),
}
LATEST: Final = "The latest run of each configuration"
"""That which stands for a role in figures of single requests."""


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

    @property
    def shown(self) -> list[Shown]:
        """The latest run of each role."""
        return [
            Shown(name=name, look=ROLE_LOOKS[name], trial=pooled.runs[-1].trial, run=self.run)
            for name, pooled in self.roles.items()
        ]


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
    )


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
