"""How do the trials of a sweep get into an Optuna storage, for optuna-dashboard or a study of one's own?

Each trial once, confirmations and repeats too, under the study's name: what is exported again is only added to. Probes
and calibration are left out, because they were measured under loads of their own; no simulated figure ever enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from batchtune.errors import UsageError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.strategies.optuna_study import directions
from batchtune.tune.evidence.ledger import without_superseded
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial

Knobs: TypeAlias = dict[str, BaseDistribution]

NUMBER = "trial"
"""The user attribute that holds a trial's number in the ledger, by which it is known again."""

_JOURNAL = "journal://"
_KINDS = "journal:///PATH or a file that ends in .log, sqlite:///PATH, postgresql://USER@HOST/NAME"
_STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError)
_DRIVERS = {
    "postgresql": "'psycopg[binary]'",
    "postgresql+psycopg2": "psycopg2-binary",
    "mysql": "mysqlclient",
}
_OBJECTIVES = {
    "capacity": "capacity, requests/s",
    "throughput": "throughput, requests/s",
    "latency": "p95 of latency, s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Where the trials went: the study's name, how many it has now, and how many of them are new."""

    study_name: str
    trials: int
    added: int


def export_study(
    trials: Sequence[Trial], scenario: Scenario, url: str, *, study_name: str | None = None
) -> Export:
    """Write the trials to the storage, those that it does not have yet; safe to repeat while a sweep runs.

    The study is named after the scenario and the start of the first trial. Its parameters are the knobs of the search
    space with their real values; a trial that has no such value (batching off) goes without.

    Raises:
        UsageError: no trials, no such kind of storage, no driver for it, no connection to it.
    """
    if not trials:
        raise UsageError("there are no trials to export")
    name = study_name or study_name_of(trials, scenario)
    goals = directions(scenario.search.sampler, maximise=scenario.objective != "latency")
    with opened_storage(url) as storage:
        try:
            study = optuna.create_study(
                study_name=name, storage=storage, directions=goals, load_if_exists=True
            )
            known = {trial.user_attrs.get(NUMBER) for trial in study.get_trials(deepcopy=False)}
            kept = [trial for trial in without_superseded(trials) if trial.source not in NO_CANDIDATES]
            knobs = _knobs(kept, scenario)
            new = [trial for trial in kept if trial.number not in known]
            study.add_trials([_exported(trial, scenario, knobs) for trial in new])
            if not known:
                study.set_user_attr("scenario", scenario.name)
                study.set_user_attr("objective", _OBJECTIVES[scenario.objective])
        except _STORAGE_ERRORS as error:
            raise _refused(error) from error
    return Export(study_name=name, trials=len(known | {trial.number for trial in new}), added=len(new))


def study_name_of(trials: Sequence[Trial], scenario: Scenario) -> str:
    """The scenario's name and when its first trial began, so that two sweeps never share a study."""
    started = datetime.fromisoformat(trials[0].started_utc)
    return f"{scenario.name}-{started:%Y%m%dT%H%M%S}"


@contextmanager
def opened_storage(url: str) -> Iterator[optuna.storages.BaseStorage]:
    """The storage behind a URL, or the journal file of that path; its connections are closed in the end.

    Raises:
        UsageError: no such kind of storage, no driver for it, no connection to it.
    """
    storage = _storage(url)
    try:
        yield storage
    finally:
        if isinstance(storage, optuna.storages.RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


def _storage(url: str) -> optuna.storages.BaseStorage:
    if "://" not in url or url.startswith(_JOURNAL):
        return _journal(url)
    scheme, _, rest = url.partition("://")
    try:
        # Which driver plain postgresql:// means has changed between versions of SQLAlchemy.
        return optuna.storages.RDBStorage(f"postgresql+psycopg://{rest}" if scheme == "postgresql" else url)
    except ImportError as error:
        driver = _DRIVERS.get(scheme)
        raise UsageError(
            f"--optuna-storage: no driver is installed for {scheme}://",
            hint=f"pip install {driver}" if driver else f"install it, or give one of {_KINDS}",
        ) from error
    except _STORAGE_ERRORS as error:
        raise _refused(error) from error


def _journal(url: str) -> optuna.storages.BaseStorage:
    path = Path(url.removeprefix(_JOURNAL))
    if not url.startswith(_JOURNAL) and path.suffix not in {".log", ".journal"}:
        raise UsageError(f"--optuna-storage: no storage: {url!r}", hint=f"give one of {_KINDS}")
    if not path.parent.is_dir():
        raise UsageError(f"--optuna-storage: no such directory: {path.parent}", hint="create it first")
    try:
        if not _may_hold_a_journal(path):
            raise UsageError(
                f"--optuna-storage: {path} exists and is no journal of Optuna", hint="give a file that is new"
            )
        return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise UsageError(f"--optuna-storage: {path} cannot be written: {error}") from error


def _may_hold_a_journal(path: Path) -> bool:
    """Whether it is new, empty or begins as a journal does; Optuna would append to any file, and then fail."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        line = file.readline(1000)
    return not line or b'"op_code"' in line


def _refused(error: Exception) -> UsageError:
    """The database's own words, without the URL and the password in it."""
    cause = getattr(error, "orig", None) or error.__cause__ or error
    words = " ".join(str(cause).split()) or type(cause).__name__
    return UsageError(f"--optuna-storage: the storage refuses: {words[:200]}", hint=f"give one of {_KINDS}")


def _exported(trial: Trial, scenario: Scenario, knobs: Knobs) -> optuna.trial.FrozenTrial:
    values_by_name = {name: _value(trial, name, knob, scenario) for name, knob in knobs.items()}
    params = {name: value for name, value in values_by_name.items() if value is not None}
    values = _values(trial, scenario)
    frozen = optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL if values is None else optuna.trial.TrialState.COMPLETE,
        values=values,
        params=params,
        distributions={name: knobs[name] for name in params},
        user_attrs=_attributes(trial),
        # Optuna 5 keeps constraints by name; optuna-dashboard up to 0.21 reads the list that Optuna 4 kept.
        system_attrs={"constraints": list(trial.constraints.values())} if trial.constraints else {},
        constraints=trial.constraints,
    )
    begun = datetime.fromisoformat(trial.started_utc).astimezone().replace(tzinfo=None)
    frozen.datetime_start, frozen.datetime_complete = begun, begun + timedelta(seconds=trial.seconds)
    return frozen


def _values(trial: Trial, scenario: Scenario) -> list[float] | None:
    """One a goal; None where the trial failed or a figure is undefined."""
    if trial.state != "complete" or trial.objective is None or trial.measurement is None:
        return None
    values = [trial.objective.value]
    if scenario.search.sampler == "nsga2":
        latency = scenario.objective == "latency"
        second = trial.measurement.throughput_rps if latency else trial.measurement.latency_s["p95"]
        values.append(second.value)
    return values if all(math.isfinite(value) for value in values) else None


def _attributes(trial: Trial) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        NUMBER: trial.number,
        "source": trial.source,
        "reason": trial.reason,
        "configuration": trial.configuration.label(),
        "feasible": trial.feasible,
        "failure": trial.failure,
        "block": trial.block,
        "rate_rps": trial.rate_rps,
        "concurrency": trial.concurrency,
        "seconds": trial.seconds,
    }
    if trial.objective is not None:
        attributes |= {"objective_low": trial.objective.low, "objective_high": trial.objective.high}
    if trial.measurement is not None:
        attributes["throughput_rps"] = trial.measurement.throughput_rps.value
        attributes |= {f"{name}_s": estimate.value for name, estimate in trial.measurement.latency_s.items()}
        attributes["error_ratio"] = trial.measurement.error_ratio
    return {name: value for name, value in attributes.items() if _tells(value)}


def _tells(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _knobs(trials: Sequence[Trial], scenario: Scenario) -> Knobs:
    """Numbers range over the space and everything that was tried; anything else is one of its values, as text."""
    distributions: Knobs = {}
    for name, knob in scenario.search.space.items():
        if not all(_is_number(value) for value in knob.values):
            distributions[name] = CategoricalDistribution([str(value) for value in knob.values])
            continue
        tried = [
            in_force(trial.configuration, name, cpus=scenario.target.cpus)
            for trial in trials
            if trial.configuration.batching is not None
        ]
        numbers = [*knob.values, *(value for value in tried if _is_number(value))]
        whole = all(isinstance(value, int) for value in knob.values)
        kind = IntDistribution if whole else FloatDistribution
        distributions[name] = kind(min(numbers), max(numbers))
    return distributions


def _value(trial: Trial, name: str, knob: BaseDistribution, scenario: Scenario) -> Any:
    if isinstance(knob, CategoricalDistribution):
        return None if trial.point is None else str(trial.point[name])
    if trial.configuration.batching is None:
        return None
    default = in_force(trial.configuration, name, cpus=scenario.target.cpus)
    value = default if trial.point is None else trial.point[name]
    return value if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
