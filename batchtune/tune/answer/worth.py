"""The finding that no batch can pay."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.scenario.units import counted, rounded
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

WIDE_SIZES = 4
"""The largest size seen must be this many times the smallest."""

PAYS_FROM = 1.1
"""A row that gets cheaper by less than this factor pays for no batching."""

SEEN_BATCHES_MIN = 5
"""Batches of a size whose mean time counts."""


def cannot_pay(trials: Sequence[Trial]) -> str | None:
    """The finding that no batch can pay: executing b rows takes b times as long as one (τ(b) is proportional to b).

    By the server's account of all trials with the fewest batch threads, whose batches disturb each other least; None
    when larger batches do more rows per second, or when too few sizes were seen.
    """
    times = _execution_times(trials)
    if len(times) < 2 or max(times) < WIDE_SIZES * min(times):
        return None
    least, most = min(times), max(times)
    per_row_s = {rows: mean_s / rows for rows, mean_s in times.items()}
    if per_row_s[least] / min(per_row_s.values()) >= PAYS_FROM:
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
        rows: spent_s / batches for rows, (batches, spent_s) in spent.items() if batches >= SEEN_BATCHES_MIN
    }
