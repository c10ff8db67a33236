"""Is batching worth its parameters here, by what was measured?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.choice import is_gain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, rounded
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

Helps = Literal["yes", "no", "not distinguishable"]


def batching_helps(
    chosen: Pooled,
    batched: Pooled | None,
    no_batching: Pooled | None,
    gain: Estimate | None,
    *,
    cannot_pay: bool,
    scenario: Scenario,
) -> Helps:
    """By the interval of the gain of the best with batching (None: none meets the SLO) and the margin WORTH_GAIN.

    What the search alone showed against batching is no answer where batching was chosen. Where no batch can pay, fresh
    runs of no batching that show no gain beyond their noise are one, however wide the gain's interval: it would take
    many more runs to see a gain of nothing to 5 %.
    """
    helps = _by_gain(batched, no_batching, gain, scenario=scenario)
    alone = chosen.configuration.batching is None
    if helps == "no" and not alone:
        return "not distinguishable"
    confirmed = alone and chosen.confirmations >= policy.ESTABLISHED_RUNS
    if helps == "not distinguishable" and cannot_pay and confirmed and gain is not None and gain.low < 1.0:
        return "no"
    return helps


def _by_gain(
    batched: Pooled | None, no_batching: Pooled | None, gain: Estimate | None, *, scenario: Scenario
) -> Helps:
    """By the interval of the gain and the margin WORTH_GAIN; meeting an SLO that no batching misses counts too.

    `batched` None: none that was tried meets the SLO.
    """
    if no_batching is None or no_batching.failures:
        return "not distinguishable"
    if batched is None:
        return "no"
    if not no_batching.feasible and scenario.objective != "capacity":
        return "yes"
    if gain is None:
        return "not distinguishable"
    if is_gain(gain):
        return "yes"
    return "no" if gain.high < 1.0 + policy.WORTH_GAIN else "not distinguishable"


def is_telling(batched: Pooled, no_batching: Pooled | None, *, scenario: Scenario) -> bool:
    """Whether it shows if batching helps: to miss the SLO at a rate above no batching's says nothing of lower ones."""
    if scenario.objective != "capacity" or no_batching is None or batched.feasible:
        return True
    alone_rps = no_batching.value if no_batching.claim is None else no_batching.claim.rps
    return batched.value <= policy.PAYS_FROM * alone_rps


def cannot_pay(trials: Sequence[Trial]) -> str | None:
    """The finding that no batch can pay: executing b rows takes b times as long as one (τ(b) is proportional to b).

    By the server's account of all trials with the fewest batch threads, whose batches disturb each other least; None
    when larger batches do more rows per second, or when too few sizes were seen.
    """
    times = _execution_times(trials)
    if len(times) < 2 or max(times) < policy.WIDE_SIZES * min(times):
        return None
    least, most = min(times), max(times)
    per_row_s = {rows: mean_s / rows for rows, mean_s in times.items()}
    if per_row_s[least] / min(per_row_s.values()) >= policy.PAYS_FROM:
        return None
    longer = rounded(times[most] / times[least])
    return (
        f"batching cannot pay here: a batch of {counted(most, 'row')} takes {longer} times as long as one of "
        f"{counted(least, 'row')}, so the device does no more rows in a second however they come"
    )


def _execution_times(trials: Sequence[Trial]) -> dict[int, float]:
    """Mean seconds of a batch by its rows, over the trials with the fewest batch threads."""
    accounts = [
        (in_force(trial.configuration, "num_batch_threads"), trial.measurement.server)
        for trial in trials
        if trial.configuration.batching is not None
        and trial.measurement is not None
        and trial.measurement.server is not None
        and trial.measurement.server.execution_s_by_rows
    ]
    fewest = min((threads for threads, _ in accounts), default=0)
    spent: dict[int, tuple[int, float]] = {}
    for threads, server in accounts:
        if threads == fewest:
            for rows, mean_s in server.execution_s_by_rows.items():
                batches, spent_s = spent.get(rows, (0, 0.0))
                more = server.batches_by_rows.get(rows, 0)
                spent[rows] = (batches + more, spent_s + more * mean_s)
    return {
        rows: spent_s / batches
        for rows, (batches, spent_s) in spent.items()
        if batches >= policy.SEEN_BATCHES_MIN
    }
