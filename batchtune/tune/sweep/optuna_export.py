"""Exports a search to an SQLite file as an Optuna study, for optuna-dashboard or for a study of the user's.

Each contender becomes one Optuna trial. Its parameters are those of the space; its value is the highest rate held
(objective capacity) or the mean over its runs (throughput, p95); it is pruned where no run held the SLO. A second
export replaces these trials, and keeps those that somebody else added to the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from sqlalchemy.exc import SQLAlchemyError

from batchtune.errors import UsageError
from batchtune.plain_values import is_number
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.fixed_load import FixedLoadSearch, search_of
from batchtune.tune.search.search_loop import Search
from batchtune.tune.trials.trial import Trial

NAMES = "named_by"
"""Name of the user attribute that marks an exported trial; its value is the source that proposed the contender."""

_STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)
_HINT = "give sqlite:///FILE"


def export_study(trials: Sequence[Trial], scenario: Scenario, url: str) -> str:
    """Write the contenders of these trials to an Optuna study; `url`: `sqlite:///FILE`.

    Returns the name of the study: the scenario's name and the start of the first trial, `NAME-20261127T031500`. A study
    of that name is replaced, but for the trials in it that are not from here.

    Raises:
        UsageError: there are no trials, the URL is not of SQLite, or the file cannot be written.
    """
    if not trials:
        raise UsageError("there are no trials to export")
    search = search_of(scenario, budget_s=math.inf)
    search.observe(trials)
    name = f"{scenario.name}-{datetime.fromisoformat(trials[0].started_utc):%Y%m%dT%H%M%S}"
    direction: Literal["minimize", "maximize"] = "minimize" if scenario.objective == "latency" else "maximize"
    with opened_storage(url) as storage:
        try:
            create = partial(optuna.create_study, study_name=name, storage=storage, direction=direction)
            before = create(load_if_exists=True).trials
            optuna.delete_study(study_name=name, storage=storage)
            study = create()
            study.set_user_attr("objective", scenario.objective)
            others = [trial for trial in before if NAMES not in trial.user_attrs]
            study.add_trials([*_exported(search, {trial.number: trial for trial in trials}), *others])
        except _STORAGE_ERRORS as error:
            raise _refused(error) from error
    return name


@contextmanager
def opened_storage(url: str) -> Iterator[optuna.storages.BaseStorage]:
    """Open the Optuna storage at an SQLite URL for a `with` block, whose end closes its connections.

    Raises:
        UsageError: the URL is not of SQLite, or the file cannot be opened.
    """
    if not url.startswith("sqlite:///"):
        raise UsageError(f"--optuna-storage: no SQLite file: {url.partition('://')[0]!r}", hint=_HINT)
    try:
        storage = optuna.storages.RDBStorage(url)
    except _STORAGE_ERRORS as error:
        raise _refused(error) from error
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _refused(error: Exception) -> UsageError:
    cause = getattr(error, "orig", None) or error.__cause__ or error
    words = " ".join(str(cause).split()) or type(cause).__name__
    return UsageError(f"--optuna-storage: the storage refuses: {words}", hint=_HINT)


def _exported(search: Search, by_number: Mapping[int, Trial]) -> Iterator[optuna.trial.FrozenTrial]:
    """Yield an Optuna trial for each contender that ran, in the order in which they were proposed.

    `by_number`: trial number -> trial, of all trials of the search.
    """
    ran = [contender for contender in search.contenders.all() if contender.runs]
    points = [_point(contender, search) for contender in ran]
    names = dict.fromkeys(name for point in points for name in point)
    knobs = {name: _distribution([point[name] for point in points if name in point]) for name in names}
    for contender, point in zip(ran, points, strict=True):
        first, last = by_number[contender.runs[0].trial], by_number[contender.runs[-1].trial]
        value, missed_rps = _value(search, contender), contender.bracket.missed_rps
        state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
        frozen = optuna.trial.create_trial(
            state=optuna.trial.TrialState.FAIL if contender.is_broken else state,
            value=value,
            params=point,
            distributions={name: knobs[name] for name in point},
            user_attrs={
                NAMES: ", ".join(contender.sources),
                "configuration": contender.configuration.label(),
                "trials": ", ".join(dict.fromkeys(str(run.trial) for run in contender.runs)),
                "held": sum(run.held for run in contender.runs),
                "missed": sum(not run.held for run in contender.runs),
                "missed_rps": missed_rps if math.isfinite(missed_rps) else None,
            },
        )
        frozen.datetime_start = _began(first)
        frozen.datetime_complete = _began(last) + timedelta(seconds=last.seconds)
        yield frozen


def _began(trial: Trial) -> datetime:
    """When a trial began, in this machine's time without a zone, as Optuna stores it."""
    return datetime.fromisoformat(trial.started_utc).astimezone().replace(tzinfo=None)


def _value(search: Search, contender: Contender) -> float | None:
    """Value of a contender: requests/s, with objective latency seconds of p95; None: no run held the SLO."""
    if not isinstance(search, FixedLoadSearch):
        return contender.bracket.held_rps or None
    standing = search.standing(contender)
    if standing is None or not standing.keeps:
        return None
    return math.exp(-standing.mean if search.scenario.objective == "latency" else standing.mean)


def _point(contender: Contender, search: Search) -> dict[str, Any]:
    """Parameter -> the value that a contender has, for each parameter of the space; {} where it does not batch.

    Values that are no numbers are written as text.
    """
    if contender.configuration.batching is None:
        return {}
    point = contender.point or {}
    for name in search.contenders.values.keys() - point.keys():
        point = {**point, name: contender.configuration.in_force(name, cpus=search.scenario.target.cpus)}
    return {name: value if is_number(value) else str(value) for name, value in point.items()}


def _distribution(values: Sequence[Any]) -> BaseDistribution:
    """Optuna's distribution of a parameter with these values: a range if all are numbers, else a choice of them."""
    if not all(map(is_number, values)):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    kind = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
    return kind(min(values), max(values))
