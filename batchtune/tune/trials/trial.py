"""A trial: what was asked of it and why, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from batchtune.batching.parameters import Configuration
from batchtune.load.samples import Samples
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, check_version, fields_to_plain, from_plain
from batchtune.target.telemetry import ServerActivity

SCHEMA_VERSION = 1
"""Of one line of trials.jsonl, and of search.json; raised when an older reader would misread a newer line."""

Source = Literal[
    "present",
    "no_batching",
    "defaults",
    "rule",
    "guide",
    "alone",
    "grid",
    "neighbour",
    "sampler",
    "twin",
    "race",
    "probe",
    "node",
    "calibration",
    "confirm",
    "variant",
    "load",
]
"""Who named its configuration: a reference, the rule, TF Serving's guide, what is best for each of several models
alone, the space, the leader's neighbours, Optuna's sampler. A `probe` is a lone client, a `calibration` a closed loop
that scouts. A `confirm` is a fresh run, made after the choice, of a configuration that was measured before. A `variant`
of a comparison proposes nothing: its `reason` is the variant's name, its `block` the round in which it ran. A `load` is
a point of a load test, which chooses nothing. Runs of before have a `twin` that proposed, a `race` of survivors, and a
`node`: one load on each of several nodes."""

NO_CANDIDATES: frozenset[Source] = frozenset(("probe", "node", "calibration", "load"))
"""Trials under loads of their own: they say nothing of the objective."""

RULE_PROBES: frozenset[Source] = frozenset(("probe", "node"))
"""Trials of a lone request, or of requests one by one."""

REPEATS: frozenset[Source] = frozenset(("race", "confirm"))
"""Trials of what was tried before: they do not count against a budget of configurations."""

State = Literal["complete", "failed"]

WORST_VIOLATION = 10.0
"""Relative violations are cut here, so that an undefined or infinite quantile stays a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """A load that somebody wants, with its reason in words.

    `point` is the point of the search space, None where the configuration lies outside it. `rate_rps`, `concurrency`
    (a closed loop of so many clients) and `duration_s` (the measured part) replace the scenario's; with `rate_rps` a
    capacity is not searched but this one rate measured. `block` numbers runs made side by side under one seed. Of
    several models `scale` multiplies the stated rates, and `models` are the only ones that are loaded; empty: all.
    """

    configuration: Configuration
    source: Source
    reason: str
    point: dict[str, Any] | None = None
    block: int | None = None
    rate_rps: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    scale: float = 1.0
    models: tuple[str, ...] = ()


def _key(name: str) -> str:
    """The key of a request's field in a trial's JSON, where the plain names of loads are of what was measured."""
    return f"asked_{name}" if name in ("rate_rps", "concurrency", "duration_s") else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One rate tried on the way to a capacity: whether it met the SLO, and what it measured."""

    rate_rps: float
    met: bool
    latency_s: dict[str, float]
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of a request: one configuration under load, once.

    `number` counts from 1 and names the samples file. `objective` is throughput in requests/s, p95 in seconds or
    capacity in requests/s, as the scenario asks. `constraints` are relative violations in a fixed order, at most 0 when
    met. `seconds` is everything it took, from applying the parameters to the measurement. `rate_rps` and `concurrency`
    are the load that was measured. `repeat_of` is the number of the trial, spoilt by the host or the client, that this
    one repeats. `error_texts` are the server's words, one for each class of error. `startup_s` is what a server
    launched for this trial took until its model was AVAILABLE; None: none was launched, or it does not tell.
    `elapsed_s` is what its sweep had spent of the budget when it ended, thinking included; None: a ledger of before, or
    no sweep. `node` is where it ran; None: there was one server.

    Of several models loaded at once `parts` are what each got, by name, a trial with a number of its own each, the
    first that of the whole; it has no measurement beside theirs, fails where one of them does, and says what the
    `server` did, which counts all models together. Of a part `model` is the name.
    """

    number: int
    request: TrialRequest
    state: State
    seconds: float
    started_utc: str
    seed: int
    failure: str | None = None
    rate_rps: float | None = None
    concurrency: int | None = None
    objective: Estimate | None = None
    constraints: dict[str, float] = field(default_factory=dict)
    feasible: bool = False
    measurement: Measurement | None = None
    probes: tuple[Probe, ...] = ()
    repeat_of: int | None = None
    error_texts: dict[str, str] = field(default_factory=dict)
    startup_s: float | None = None
    elapsed_s: float | None = None
    node: str | None = None
    model: str = ""
    parts: dict[str, Trial] = field(default_factory=dict)
    server: ServerActivity | None = None

    @property
    def measurements(self) -> dict[str, Measurement]:
        """Measurements by model; "" names the only one."""
        measured = {name: part.measurement for name, part in (self.parts or {"": self}).items()}
        return {name: own for name, own in measured.items() if own is not None}

    @property
    def last_number(self) -> int:
        """Highest number in use: the trial's own, or that of a part."""
        return max((part.number for part in self.parts.values()), default=self.number)

    @property
    def configuration(self) -> Configuration:
        return self.request.configuration

    @property
    def source(self) -> Source:
        return self.request.source

    @property
    def reason(self) -> str:
        return self.request.reason

    @property
    def point(self) -> dict[str, Any] | None:
        return self.request.point

    @property
    def block(self) -> int | None:
        return self.request.block

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, safe for JSON; the fields of the request stand beside the others."""
        plain = fields_to_plain(self)
        request = {_key(name): value for name, value in plain.pop("request").items()}
        plain = {"schema_version": SCHEMA_VERSION, **request, **plain}
        for key in () if self.parts or self.model else ("scale", "models", "model", "parts", "server"):
            del plain[key]  # of an only model they say nothing
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Make a trial from what `to_dict` returns.

        Raises:
            ValueError: another schema version, a key that is missing, or a value of the wrong type.
        """
        check_version(values, SCHEMA_VERSION)
        try:
            # An older ledger has these names in capitals, and those of the errors not.
            texts = {name.lower(): text for name, text in values.get("error_texts", {}).items()}
            values = {**values, **(_asked_of(values["company"]) if values.get("company") else {})}
            names = [field.name for field in fields(TrialRequest) if _key(field.name) in values]
            request = {name: values[_key(name)] for name in names}
            return from_plain(cls, {**values, "request": request, "error_texts": texts})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a trial: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial and the requests behind it, of several models by name; None when it failed before any was sent."""

    trial: Trial
    samples: Samples | Mapping[str, Samples] | None


def violations(
    latency_s: Mapping[str, float], error_ratio: float, *, limits: Mapping[str, float], error_limit: float
) -> dict[str, float]:
    """Compute by how much each promise is missed, as a share of it: at most 0 when kept.

    Keys in the order of `limits` (quantile name -> seconds), then "errors"; every trial gets all of them, because
    samplers compare constraints by position. An undefined quantile counts as missed by WORST_VIOLATION.
    """
    misses = {name: _relative(latency_s.get(name, math.nan), limit) for name, limit in limits.items()}
    misses["errors"] = (
        _relative(error_ratio, error_limit) if error_limit > 0 else min(error_ratio, WORST_VIOLATION)
    )
    return misses


def is_feasible(constraints: Mapping[str, float]) -> bool:
    """Whether a trial keeps every promise."""
    return all(value <= 0.0 for value in constraints.values())


def _relative(value: float, limit: float) -> float:
    if math.isnan(value):
        return WORST_VIOLATION
    return min(value / limit - 1.0, WORST_VIOLATION)


def spent_s(trials: Sequence[Trial]) -> float:
    """Compute the seconds that a sweep had spent after these trials; of a ledger that does not say it the sum of
    theirs."""
    known = [trial.elapsed_s for trial in trials if trial.elapsed_s is not None]
    return max(known) if known else sum(trial.seconds for trial in trials)


def measuring_s(trials: Sequence[Trial]) -> float:
    """Compute the seconds that these trials took: on one server their sum, on several nodes at once the time until
    the last had ended."""
    return spent_s(trials) if any(trial.node for trial in trials) else sum(trial.seconds for trial in trials)


def parts_of(trials: Iterable[Trial]) -> list[Trial]:
    """Return of trials of several models the part of each; others as they are."""
    return [part for trial in trials for part in trial.parts.values() or (trial,)]


def of_whole_loads(lines: Iterable[tuple[Trial, Mapping[str, Any] | None]]) -> list[Trial]:
    """Return the trials of a ledger; in older runs each model of a load had a line, with the `company` that it had
    there.

    A load of which lines are missing, since the run was killed between the first and the last, is left out.
    """
    lines = list(lines)
    names = {trial.model for trial, company in lines if company}
    loads: dict[int, list[Trial]] = {}
    whole: list[Trial] = []
    for trial, company in lines:
        if not company:
            whole.append(trial)
            continue
        parts = loads.setdefault(company["load"], [])
        parts.append(trial)
        if len(parts) == (1 if trial.request.models else len(names)):
            whole.append(_whole_load(parts))
    return whole


def _whole_load(parts: Sequence[Trial]) -> Trial:
    first = parts[0]
    failure = next((part.failure for part in parts if part.failure is not None), None)
    reason = "" if first.reason == first.model else first.reason.removesuffix(f"/{first.model}")
    return Trial(
        number=first.number,
        request=replace(first.request, reason=reason),
        state="complete" if failure is None else "failed",
        failure=failure,
        seconds=max(part.seconds for part in parts),
        started_utc=first.started_utc,
        seed=first.seed,
        feasible=all(part.feasible for part in parts),
        parts={part.model: part for part in parts},
    )


def _asked_of(company: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of a run of before says of the load that it was a part of."""
    models = [company["of"]] if company["kind"] == "alone" else []
    asked = {"model": company["model"], "scale": company["factor"], "models": models}
    # A flood sent a model more than its rate, which nobody asks any more: nothing is chosen by it.
    flood = {"source": "load", "reason": f"flood of {company['of']}"} if company["kind"] == "flood" else {}
    return asked | flood


def without_superseded(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that count: of one that was repeated and its repeats the last."""
    superseded = {trial.repeat_of for trial in trials}
    return [trial for trial in trials if trial.number not in superseded]


# What a sweep says of itself when it ends; kept beside the ledger, which holds what was measured.


@dataclass(slots=True, kw_only=True)
class SearchSummary:
    """How a space was searched.

    `plan`: what the budget was divided into, before it was spent. `proposals`: runs by who named the configuration.
    `curve`: seconds of a batch by its rows, as the search read them. `nodes`: those that ran trials at once; "": there
    was one server.
    """

    strategy: str
    stop_reason: Coded = field(default=as_text(""))
    space_size: int = 0
    plan: Coded = field(default=as_text(""))
    proposals: Mapping[str, int] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    nodes: str = ""
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    trials_by_phase: Mapping[str, int] = field(default_factory=dict)

    def continuing(self, earlier: SearchSummary) -> SearchSummary:
        """Return the summary of a sweep that went on where `earlier` ended: the time of both counts."""
        phases = dict.fromkeys((*earlier.seconds_by_phase, *self.seconds_by_phase))
        spent = {
            phase: earlier.seconds_by_phase.get(phase, 0.0) + self.seconds_by_phase.get(phase, 0.0)
            for phase in phases
        }
        return replace(self, seconds_by_phase=spent)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, safe for JSON."""
        return {"schema_version": SCHEMA_VERSION, **fields_to_plain(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchSummary:
        """Make a summary from what `to_dict` returns.

        Raises:
            ValueError: another schema version, a value of the wrong type, or no summary at all.
        """
        check_version(values, SCHEMA_VERSION)
        try:
            return from_plain(cls, values)
        except TypeError as error:
            raise ValueError(f"not a summary of a search: {error}") from error
