"""States the capacity of a configuration under an SLO, from the ledger alone.

Every command reads it here: what is recommended, planned or simulated cannot differ. A looser SLO never gives less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune.answer.recommendation import Capacity
from batchtune.tune.evidence.bracket import BACK, UNCONFIRMED, Bracket, runs_of
from batchtune.tune.evidence.ledger import without_superseded
from batchtune.tune.search.capacity import LOOP_SHARE
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Trial


def capacity_of(
    configuration: Configuration, trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None
) -> Capacity | None:
    """The capacity of a configuration by all of its trials, for the scenario's SLO or another one.

    None: no run of it says anything.
    """
    space = Space(scenario)
    asked = space.filled(configuration)
    own = (
        trial
        for trial in without_superseded(trials)
        if space.filled(trial.configuration) == asked and not _is_foreign(trial)
    )
    return stated_capacity(Bracket(tuple(runs_of(own, slo or scenario.slo, scenario))))


def stated_capacity(bracket: Bracket) -> Capacity | None:
    """The rate that is stated as held, and the lowest that was missed; held 0: only misses are known."""
    held_rps, missed_rps = bracket.stated_rps, bracket.stated_missed_rps
    by_loops = not held_rps and bracket.loop_rps > 0.0
    if not held_rps:
        # What closed loops kept is believed as far as no open loop missed: where one held instead, no less is stated.
        missed = (run.rate_rps or 0.0 for run in bracket.open_runs)
        held_rps = min(LOOP_SHARE * bracket.loop_rps, UNCONFIRMED * BACK * min(missed, default=math.inf))
        missed_rps = max(bracket.missed_rps, held_rps)
    if not held_rps and not math.isfinite(missed_rps):
        return None
    return Capacity(
        held_rps=held_rps,
        missed_rps=missed_rps if math.isfinite(missed_rps) else None,
        held=bracket.held(held_rps, fresh=True),
        missed=bracket.missed(held_rps, fresh=True) if held_rps else len(bracket.open_runs),
        confirmed=0.0 < bracket.confirmed_rps == bracket.stated_rps,
        by_loops=by_loops,
        is_bound=not any(
            not run.held and math.isclose(run.rate_rps or 0.0, missed_rps, rel_tol=1e-3)
            for run in bracket.open_runs
        ),
    )


def _is_foreign(trial: Trial) -> bool:
    """Whether it says nothing of its configuration: a lone request, or a load that compares nodes."""
    return trial.source == "node" or (trial.source == "probe" and trial.asked_concurrency == 1)
