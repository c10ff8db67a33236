"""Exports a search to an SQLite file as an Optuna study, for optuna-dashboard or a study of one's own.

A trial a contender: its parameters are the knobs of the space, its value is what its runs held (capacity) or their mean
(throughput, p95 of latency); one that held nothing is pruned. Exported again, the study has what is known by then, and
keeps trials that somebody else added to it.
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
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

NAMES = "named_by"
"""The user attribute that every exported trial has: who named the contender."""

_STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)
_HINT = "give sqlite:///FILE"


def export_study(trials: Sequence[Trial], scenario: Scenario, url: str) -> str:
    """Write the trials to an Optuna study. Returns its name: the scenario's and the start of the first trial.

    Raises:
        UsageError: no trials, no SQLite, or a file that cannot be written.
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
    """Within, the Optuna storage of an SQLite URL; its connections are closed at the end.

    Raises:
        UsageError: another kind of storage, or a file that cannot be opened.
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
    return UsageError(f"--optuna-storage: the storage refuses: {words[:200]}", hint=_HINT)


def _exported(search: Search, by_number: Mapping[int, Trial]) -> Iterator[optuna.trial.FrozenTrial]:
    """The contenders that ran, in the order in which they were named."""
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
    """When a trial began, as Optuna has it: in this machine's time."""
    return datetime.fromisoformat(trial.started_utc).astimezone().replace(tzinfo=None)


def _value(search: Search, contender: Contender) -> float | None:
    """Requests/s, or seconds of p95; None: its runs held nothing."""
    if not isinstance(search, FixedLoadSearch):
        return contender.bracket.held_rps or None
    standing = search.standing(contender)
    if standing is None or not standing.keeps:
        return None
    return math.exp(-standing.mean if search.scenario.objective == "latency" else standing.mean)


def _point(contender: Contender, search: Search) -> dict[str, Any]:
    """Its values of the space's knobs, words as text; without batching none."""
    if contender.configuration.batching is None:
        return {}
    point = contender.point or {}
    for name in search.contenders.values.keys() - point.keys():
        point = {**point, name: in_force(contender.configuration, name, cpus=search.scenario.target.cpus)}
    return {name: value if is_number(value) else str(value) for name, value in point.items()}


def _distribution(values: Sequence[Any]) -> BaseDistribution:
    """Of numbers their range; of words, or of both, each of them."""
    if not all(map(is_number, values)):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    kind = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
    return kind(min(values), max(values))
