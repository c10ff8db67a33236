"""Calibrates the twin of a run, and reads which configurations the command line asks it about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from batchtune.archive.run import Run
from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import PARAMETER_NAMES, Configuration, did_you_mean, to_dict
from batchtune.batching.triton_words import MISSING, SETTINGS, WORDS
from batchtune.cli.arguments.kept_run import asked_run, kept_trials
from batchtune.errors import (
    InconclusiveError,
    NoFeasibleConfigurationError,
    TargetError,
    TwinError,
    UsageError,
)
from batchtune.report.twin import note_when_slow
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.knobs import KNOBS, configuration_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation, capacity_of
from batchtune.tune.trials.trial import Trial, without_superseded
from batchtune.twin.calibration.calibrate import calibrate, observation_of
from batchtune.twin.model.measured_rates import MeasuredRates
from batchtune.twin.model.traffic import lengths_of, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import left_out
from batchtune.units import counted

MOST_CONFIGURATIONS = 500

_INT64_MAX = 2**63 - 1
_MOST_ROWS = 100_000
"""The simulator holds a time for each number of rows: 0.8 MB for each of the twin's readings."""

_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "max_batch_size": (1, _MOST_ROWS),
    "max_execution_batch_size": (1, _MOST_ROWS),
    "allowed_batch_sizes": (1, _MOST_ROWS),
    "batch_timeout_micros": (0, _INT64_MAX),
    "max_enqueued_batches": (0, _INT64_MAX),
    "num_batch_threads": (1, 10_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A run, its scenario, trials and their twin; `base` is what `--set` starts from, `base_name` says why."""

    run: Run
    scenario: Scenario
    trials: Sequence[Trial]
    twin: Twin
    base: Configuration
    base_name: str

    def measured(self, configuration: Configuration, *, slo: SloSpec | None = None) -> MeasuredRates | None:
        """The rates that one server held and missed with these parameters, for the scenario's SLO or another one.

        None: its runs do not say, or they were made while the rate changed, and say nothing of a steady one.
        """
        if traffic_of(self.scenario).changes:
            return None
        capacity = capacity_of(configuration, self.trials, scenario=self.scenario, slo=slo)
        if capacity is None or (capacity.by_loops and capacity.missed_rps is None):
            return None
        # What closed loops kept is no rate that was held.
        held_rps = 0.0 if capacity.by_loops else capacity.held_rps
        return MeasuredRates(held_rps=held_rps, missed_rps=capacity.missed_rps)


def calibrated_run(path: Path | None, *, results: Path, quiet: bool) -> Calibrated:
    """Fit the twin to the trials of a run (None: the latest).

    Raises:
        ArchiveError: no such run.
        TwinError: none of its trials can be used; the hint says what would help.
    """
    run = asked_run(path, results=results)
    scenario = run.scenario()
    if scenario.target.models:
        raise TwinError(
            f"{run.path} is of several models, which a twin does not know",
            hint="name the run of a sweep of one model",
        )
    trials = kept_trials(run)
    measured = [
        trial
        for trial in without_superseded(trials)
        if trial.measurement is not None and trial.configuration.known
    ]
    if not measured:
        raise TwinError(
            f"{run.path} holds no measured trial of known parameters to calibrate a twin from",
            hint="`batchtune sweep SCENARIO.yaml` measures some; --set search.budget.time=30s is enough",
        )
    with note_when_slow(
        f"calibrating the twin from {counted(len(measured), 'trial')} of {run.path}", quiet=quiet
    ):
        twin = calibrate(
            [
                observation_of(trial.configuration, trial.measurement, scenario)
                for trial in measured
                if trial.measurement
            ]
        )
    chosen = _recommended(trials, scenario)
    base, base_name = scenario.configuration({}), "the scenario's own configuration"
    if chosen is not None:
        base, base_name = chosen.configuration, "the recommended configuration"
    return Calibrated(run=run, scenario=scenario, trials=trials, twin=twin, base=base, base_name=base_name)


def asked_values(settings: Sequence[str]) -> dict[str, list[Any]]:
    """What `--set KEY=VALUE[,VALUE…]` gives for each parameter; one that is named again has these values too.

    Raises:
        UsageError: an unknown parameter, a value of another type, or too many combinations.
    """
    choices: dict[str, list[Any]] = {}
    for name, values in map(_choices, settings):
        choices[name] = list(dict.fromkeys([*choices.get(name, ()), *values]))
    combinations = math.prod(map(len, choices.values()))
    if combinations > MOST_CONFIGURATIONS:
        raise UsageError(
            f"--set asks for {combinations:,} configurations; at most {MOST_CONFIGURATIONS}",
            hint="give fewer values",
        )
    return choices


def asked_configurations(
    base: Configuration, choices: Mapping[str, list[Any]], *, by_length: bool = True
) -> list[Configuration]:
    """Every combination of the values, laid over the base. `by_length`: the server has length buckets.

    Raises:
        UsageError: a parameter that the server does not have.
        BatchingParametersError: a combination that no server would accept.
    """
    for name in choices:
        if base.dialect == "triton" and name in MISSING:
            raise UsageError(f"--set {name}: Triton has no such parameter", hint=MISSING[name])
        if name == LENGTH_BUCKETS and (base.dialect == "triton" or not by_length):
            raise UsageError(
                f"--set {name}: only the bundled server groups requests by length", hint="leave it out"
            )
    values = {} if base.batching is None else to_dict(base.batching)
    if base.batching is None and not choices:
        return [base]
    configurations = []
    for combination in itertools.product(*choices.values()):
        point = dict(zip(choices, combination, strict=True))
        if base.batching is None and point.keys() - {"enable_batching"}:
            point.setdefault("enable_batching", True)
        kept = _without_stale_sizes(values, point)
        asked = configuration_of(kept, point, searched=())
        flags = tuple(flag for flag in base.flags if flag[0] != LENGTH_BUCKETS or LENGTH_BUCKETS not in point)
        configurations.append(replace(base, batching=asked.batching, flags=(*flags, *asked.flags)))
    return list(dict.fromkeys(configurations))


def _recommended(trials: Sequence[Trial], scenario: Scenario) -> Recommendation | None:
    """None: a comparison, a load test, or a run of which nothing can be recommended."""
    if any(trial.source in ("variant", "load") for trial in trials):
        return None
    try:
        return recommend(trials, scenario=scenario)
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError):
        return None


def notes_on(configurations: Sequence[Configuration]) -> list[str]:
    """What the twin leaves out of how a server of such configurations batches."""
    return [
        f"{text}." for text in dict.fromkeys(text for asked in configurations for text in left_out(asked))
    ]


def notes_on_lengths(calibrated: Calibrated) -> list[str]:
    """What the twin does not know of requests that differ in length."""
    request, flags = calibrated.scenario.request, calibrated.scenario.target.flags
    notes = []
    if any(name.lstrip("-") == LENGTH_BUCKETS for name in flags):
        notes.append("The length buckets of target.flags are not simulated: one queue is.")
    if not any(kind.lengths is not None for kind in request.kinds()):
        return notes
    if not lengths_of(request):
        notes.append(
            "The requests' lengths are not known (kinds with lengths of their own, or a file that cannot be read): all "
            "are simulated as equally long."
        )
    elif calibrated.twin.best_fit.length is None:
        notes.append(
            "What the length of a request costs is not known: the trials' batches were about equally long, or the "
            "server did not report them."
        )
    return notes


def _choices(text: str) -> tuple[str, list[Any]]:
    name, equals, given = text.partition("=")
    name = name.strip()
    if not equals or not given.strip():
        raise UsageError(
            f"--set {text}: expected KEY=VALUE", hint="for instance --set max_batch_size=16,32,64"
        )
    name = {word: house for house, word in WORDS.items()}.get(name, name)
    if name in SETTINGS:
        raise UsageError(f"--set {name}: the twin does not simulate it", hint="`batchtune sweep` measures it")
    if name == LENGTH_BUCKETS:
        return name, [given]
    if name not in KNOBS:
        raise UsageError(f"--set {name}: no batching parameter", hint=did_you_mean(name, KNOBS))
    if name == "allowed_batch_sizes":
        return name, [tuple(_value(name, size) for size in given.split(","))]
    return name, [_value(name, value) for value in given.split(",")]


def _value(name: str, text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if name == "thread_pool_name":
        return text
    try:
        number = int(text)
    except ValueError as error:
        raise UsageError(
            f"--set {name}: {text!r} is no whole number", hint="timeouts are in microseconds: 2000 is 2 ms"
        ) from error
    least, most = _RANGES.get(name, (-_INT64_MAX, _INT64_MAX))
    if not least <= number <= most:
        upper = "" if most == _INT64_MAX else f" to {most:,}"
        raise UsageError(
            f"--set {name}={number}: out of its range", hint=f"give a whole number from {least}{upper}"
        )
    return number


def _without_stale_sizes(values: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Allowed sizes end at max_batch_size: another maximum makes those of the base meaningless."""
    stale = {"allowed_batch_sizes", "max_execution_batch_size"} if "max_batch_size" in point else set()
    return {name: value for name, value in values.items() if name in PARAMETER_NAMES and name not in stale}
