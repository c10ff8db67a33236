"""A trial, one load of one configuration: what was requested and why, what was measured, and its line in JSON.

Also why trials fail, and the summary of a sweep.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from batchtune.batching.parameters import Configuration
from batchtune.load.samples import Samples, Status
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, check_version, fields_to_plain, from_plain, is_number
from batchtune.target.endpoint import meaning_of
from batchtune.target.telemetry import ServerActivity
from batchtune.units import percentage

SCHEMA_VERSION = 1
"""Version of a line of trials.jsonl and of search.json; counted up when an older reader would misread a newer line."""

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
"""Who named the configuration of a trial, or what the trial is for.

`present`, `no_batching`, `defaults`: a reference. `rule`, `guide`: the glossary's. `alone`: the best of each of several
models by itself, combined. `grid`: a point of the space. `neighbour`: of the leader. `sampler`: Optuna's.
`probe`: a lone client. `calibration`: a scout. `confirm`: a confirmation run of a configuration measured before.
`variant`: of a comparison; `reason` is the variant's name, `block` the block. `load`: a point of a load test.
Only in older files: `twin` (the twin proposed it), `race` (a repeat among the best), `node` (a load on each of several
nodes)."""

NO_CANDIDATES: frozenset[Source] = frozenset(("probe", "node", "calibration", "load"))
"""Trials under other loads than the scenario's: their figures are not compared by the objective."""

REPEATS: frozenset[Source] = frozenset(("race", "confirm"))
"""Trials of a configuration that was tried before: they do not count against a budget of trials."""

State = Literal["complete", "failed"]

WORST_VIOLATION = 10.0
"""Largest relative violation of a limit; an undefined or infinite quantile counts as this (joint_search.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What a trial is to measure: a configuration, the load it gets, and why.

    `source`: what proposed the configuration, or what the trial is for. `reason`: why, in words.
    `point`: the configuration as a point of the search space (parameter -> value); None: it lies outside.
    `block`: number of the block whose seed the trial has; None: a seed of its own.
    `rate_rps`, `concurrency` (clients of a closed loop), `duration_s` (the measured part): in place of the scenario's;
    None: the scenario's. With `rate_rps`, this rate is measured and no capacity searched.
    `scale`, `models`: with several models, the factor on their stated rates, and those to load (empty: all).
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

    @property
    def is_lone(self) -> bool:
        """Whether the load is the lone client at the start of a sweep."""
        return self.source == "probe" and self.concurrency == 1


def _key(name: str) -> str:
    """Key of a TrialRequest's field in a trial's JSON: `asked_…` for the load asked for, since `rate_rps` and
    `concurrency` there are those that were measured."""
    return f"asked_{name}" if name in ("rate_rps", "concurrency", "duration_s") else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One rate tried in the search for a capacity: whether it met the SLO, latency quantiles in seconds by name, and
    the share of requests that failed."""

    rate_rps: float
    met: bool
    latency_s: dict[str, float]
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of one configuration under load: its request and its result.

    `number`: from 1; names the samples file. `request`: what was to be measured. `seed`: of the load.
    `state`, `failure`: "failed" where there are no figures to trust, and why; `failure` is None when complete.
    `is_refused`: the server did not take the configuration, so that no load was sent.
    `seconds`: from applying the parameters to the measurement. `started_utc`: when the trial began, ISO 8601.
    `rate_rps`, `concurrency`: the load that was measured (open loop: requests/s; closed loop: clients).
    `objective`: throughput or capacity in requests/s, or p95 in seconds, as the scenario asks; None: not measured.
    `constraints`, `feasible`: what `violations` returns, and whether all limits are kept.
    `probes`: the rates tried, where a capacity was searched.
    `repeat_of`: number of the trial that this one repeats, since the host or the client spoilt it; None: it repeats
    none.
    `error_texts`: class of error -> one of the server's texts.
    `startup_s`: from the launch of a server for this trial until its model was AVAILABLE; None: no launch, or unknown.
    `elapsed_s`: what the sweep had spent when the trial ended, its own computing included; None: older file, no sweep.
    `node`: name of the node that the trial ran on; None: there was one server.

    With several models, `parts` maps each loaded model to its part, a trial whose `model` is that name. Parts have
    numbers of their own; the first has that of the whole trial. The whole trial has no `measurement`, is failed where a
    part is, and its `server` has the counters of all models together.
    """

    number: int
    request: TrialRequest
    state: State
    seconds: float
    started_utc: str
    seed: int
    failure: str | None = None
    is_refused: bool = False
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
        """Model name -> measurement, of the models that have one; with a single model its name is ""."""
        measured = {name: part.measurement for name, part in (self.parts or {"": self}).items()}
        return {name: own for name, own in measured.items() if own is not None}

    @property
    def last_number(self) -> int:
        """Highest number that the trial takes: its own, or that of its last part."""
        return max((part.number for part in self.parts.values()), default=self.number)

    @property
    def configuration(self) -> Configuration:
        """Configuration that the trial measured."""
        return self.request.configuration

    @property
    def source(self) -> Source:
        """What proposed the configuration, or what the trial is for."""
        return self.request.source

    @property
    def reason(self) -> str:
        """Why the trial was run, in words; of a comparison the variant's name."""
        return self.request.reason

    @property
    def point(self) -> dict[str, Any] | None:
        """The configuration as parameter -> value in the search space; None: it lies outside."""
        return self.request.point

    @property
    def block(self) -> int | None:
        """Number of the block whose seed the trial has; None: a seed of its own."""
        return self.request.block

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, safe for JSON, as one flat mapping; a field of `self.request` has the key that `_key`
        gives it."""
        plain = fields_to_plain(self)
        request = {_key(name): value for name, value in plain.pop("request").items()}
        plain = {"schema_version": SCHEMA_VERSION, **request, **plain}
        for key in () if self.parts or self.model else ("scale", "models", "model", "parts", "server"):
            del plain[key]  # of an only model they say nothing
        if not self.is_refused:
            del plain["is_refused"]
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
    """A trial and the samples of its requests; with several models, model name -> samples. None: no request was
    sent."""

    trial: Trial
    samples: Samples | Mapping[str, Samples] | None


def violations(
    latency_s: Mapping[str, float], error_ratio: float, *, limits: Mapping[str, float], error_limit: float
) -> dict[str, float]:
    """Return limit name -> by how much it is exceeded, as a share of the limit: value / limit - 1, at most 0 when kept.

    First the names of `limits` (quantile name -> seconds) in their order, then "errors" (with an `error_limit` of 0 the
    share of errors itself). An undefined quantile counts as WORST_VIOLATION, and no value exceeds it.
    """
    misses = {name: _relative(latency_s.get(name, math.nan), limit) for name, limit in limits.items()}
    misses["errors"] = (
        _relative(error_ratio, error_limit) if error_limit > 0 else min(error_ratio, WORST_VIOLATION)
    )
    return misses


def is_feasible(constraints: Mapping[str, float]) -> bool:
    """Whether every limit is kept: no value of `constraints`, the result of `violations`, is above 0."""
    return all(value <= 0.0 for value in constraints.values())


def _relative(value: float, limit: float) -> float:
    if math.isnan(value):
        return WORST_VIOLATION
    return min(value / limit - 1.0, WORST_VIOLATION)


def spent_s(trials: Sequence[Trial]) -> float:
    """Return the seconds that a sweep had spent when the last of these trials ended.

    In older files, whose trials have no `elapsed_s`, the sum of the trials' seconds.
    """
    known = [trial.elapsed_s for trial in trials if trial.elapsed_s is not None]
    return max(known) if known else sum(trial.seconds for trial in trials)


def measuring_s(trials: Sequence[Trial]) -> float:
    """Return the seconds that these trials took: on one server the sum of their seconds; on several nodes at once, what
    the sweep had spent when the last of them ended (`spent_s`)."""
    return spent_s(trials) if any(trial.node for trial in trials) else sum(trial.seconds for trial in trials)


def parts_of(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials, but in place of each trial of several models its parts."""
    return [part for trial in trials for part in trial.parts.values() or (trial,)]


def was_interrupted(trial: Trial) -> bool:
    """Whether the trial's figures are of a load that Ctrl-C ended early."""
    measurement = trial.measurement
    return measurement is not None and any(noted.code == "cut_short" for noted in measurement.caveats)


def of_whole_loads(lines: Iterable[tuple[Trial, Mapping[str, Any] | None]]) -> list[Trial]:
    """Return the trials of a ledger from its lines, one trial for each load.

    `lines`: (trial, None); in older files (trial, `company`), one line for each model of a load, where `company`
    ({load, model, kind, of, factor}) says to which load it belongs. Such lines become one trial with parts. A load with
    missing lines (the run was killed while it wrote them) is left out.
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
    """The fields of a TrialRequest, and the model, that the `company` of a line in an older file stands for."""
    models = [company["of"]] if company["kind"] == "alone" else []
    asked = {"model": company["model"], "scale": company["factor"], "models": models}
    # A flood sent a model more than its rate, which nobody asks any more: nothing is chosen by it.
    flood = {"source": "load", "reason": f"flood of {company['of']}"} if company["kind"] == "flood" else {}
    return asked | flood


def without_superseded(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials without those that a later one of them repeats (`repeat_of`)."""
    superseded = {trial.repeat_of for trial in trials}
    return [trial for trial in trials if trial.number not in superseded]


# Why trials fail: batches that are too large for the memory, and from which size on; the meaning of error texts.

_OUT_OF_MEMORY = re.compile(
    r"\bOOM\b|out of memory|bad_alloc|failed to allocate|allocate memory|exited with (?:137|-9)\b"
    r"|no available memory for the cache|not enough memory\b",
    re.IGNORECASE,
)


def out_of_memory(trial: Trial) -> str | None:
    """Return the part of a trial's error texts that says that memory ran out, in one line of at most 60 characters;
    None: no text says so.

    "exited with 137" or "-9" counts too: under load only a lack of memory kills a server. A trial that answered other
    requests may have such a text, since batches differ in size.
    """
    return memory_words("\n".join((trial.failure or "", *trial.error_texts.values())))


def memory_words(text: str) -> str | None:
    """Return the part of a text that says that memory ran out, in one line of at most 60 characters, such as `out of
    memory. Tried to allocate 2.00 GiB`; None: it does not say so."""
    words_max = 60
    for line in text.splitlines():
        match = _OUT_OF_MEMORY.search(line)
        if match is not None:
            return " ".join(line[match.start() :].split())[:words_max]
    return None


def memory_ceiling_rows(trials: Sequence[Trial]) -> float:
    """Return the smallest max_batch_size that ran out of memory and is larger than every size that worked; inf: there
    is none.

    A size worked where a complete trial with it has no error that says that memory ran out.
    """
    sizes = [
        (trial.configuration.in_force("max_batch_size"), out_of_memory(trial) is not None, trial.state)
        for trial in trials
        if trial.configuration.batching is not None
    ]
    worked = max((size for size, ran_out, state in sizes if not ran_out and state == "complete"), default=0)
    return min((size for size, ran_out, _ in sizes if ran_out and size > worked), default=math.inf)


def points_beyond_memory(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return the points (parameter -> value) that ran out of memory; a point is left out if another one that worked is
    at least as large (`is_as_large`)."""
    known = [trial for trial in trials if trial.point is not None]
    worked = [trial.point for trial in known if trial.state == "complete" and out_of_memory(trial) is None]
    ran_out = [trial.point for trial in known if out_of_memory(trial) is not None]
    return [
        point
        for point in ran_out
        if point and not any(is_as_large(other, point) for other in worked if other)
    ]


def is_beyond_memory(point: Mapping[str, Any], ran_out: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a point is expected to run out of memory, judged by the points `ran_out` that did.

    It is where it is as large as one of them (`is_as_large`). From two such points on, also where the product of its
    numbers is at least their least product: several parameters take memory together (batch size times threads).
    """
    if len(ran_out) > 1 and _size(point) >= min(map(_size, ran_out)):
        return True
    return any(is_as_large(point, other) for other in ran_out)


def is_as_large(point: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether every number of `other` is at most that of `point`, and every other value of `other` equals that of
    `point`."""
    return all(
        point.get(name) == value or (is_number(value) and is_number(point.get(name)) and point[name] >= value)
        for name, value in other.items()
    )


def _size(point: Mapping[str, Any]) -> float:
    return math.prod(max(float(value), 1.0) for value in point.values() if is_number(value))


_OVERLOAD: Final = frozenset(
    status.name.lower()
    for status in (Status.UNFINISHED, Status.UNSENT, Status.TIMEOUT, Status.QUEUE_FULL, Status.EXPIRED)
)
"""Classes of error, as in the keys of a trial's `error_texts`, of a working server that gets too many requests."""


def texts_by_class(samples: Samples) -> dict[str, str]:
    """Return class of error -> one error text of the server; classes are named as in `Measurement.errors`, in lower
    case: `{"timeout": "…"}`."""
    return {name.lower(): text for name, text in samples.error_texts.items()}


def is_overload(samples: Samples) -> bool:
    """Whether every error is of a class that a working server has when it gets too many requests; True without
    errors."""
    return {name.lower() for name in samples.errors()} <= _OVERLOAD


def unanswered(samples: Samples) -> str:
    """Return the text of why a trial failed in which no request was answered: counts by class of error, the server's
    texts, and what these mean where that is known: `no request was answered: 20 × TIMEOUT: …`."""
    classes = ", ".join(f"{count} × {name}" for name, count in samples.errors().items())
    texts = "; ".join(samples.error_texts.values())
    meaning = meaning_of(texts)
    return f"no request was answered: {classes}{': ' + texts if texts else ''}{f' ({meaning})' if meaning else ''}"


def undecodable(samples: Samples) -> str:
    """Return the text of why a trial failed if half or more of the answers that were checked cannot be decoded, `of 10
    answers that were looked at 9 are none: …`; else ""."""
    malformed = min(int((samples.status == Status.MALFORMED).sum()), samples.answers_checked)
    if not malformed or 2 * malformed < samples.answers_checked:
        return ""
    text = samples.error_texts.get(Status.MALFORMED.name, "")
    return f"of {samples.answers_checked} answers that were looked at {malformed} are none: {text}"


def explain_failure(trials: Sequence[Trial]) -> str:
    """Return the commonest error text of the failed trials, with its explanation where that is known; "": no failed
    trial has a text.

    A complete trial counts as failed if more than half of its requests failed, at least one of them by an error of the
    model or the server rather than by too much load.
    """
    failed = [trial for trial in trials if trial.state == "failed" or has_only_errors(trial)]
    words = Counter(word for word in map(_words, failed) if word)
    if not words:
        return ""
    text, _ = words.most_common(1)[0]
    meaning = next(
        (meaning for trial in failed if _words(trial) == text and (meaning := _meaning(trial))), ""
    )
    return f"{text.rstrip('.')}: {meaning}" if meaning else text


def commonest_error(trial: Trial) -> str:
    """Return the share and text of a trial's most frequent error that has a text: `(20 % of all) by HTTP 503: busy`;
    "": no error has a text.

    The share is of all requests; the text is one line of at most 90 characters.
    """
    measured = trial.measurement
    counts = {} if measured is None else measured.errors
    text_max_chars = 90
    for name, count in counts.items():
        if measured is not None and trial.error_texts.get(name):
            share = percentage(measured.error_ratio * count / sum(counts.values()))
            return f"({share} of all) by {_in_a_line(trial.error_texts[name], text_max_chars)}"
    return ""


def has_only_errors(trial: Trial) -> bool:
    """Whether more than half of a trial's requests failed, at least one of them by another error than an overload."""
    measured = trial.measurement
    return measured is not None and measured.error_ratio > 1 / 2 and bool(_texts_of_model(trial))


def _texts_of_model(trial: Trial) -> list[str]:
    return [text for status, text in trial.error_texts.items() if status not in _OVERLOAD]


def _words(trial: Trial) -> str:
    """First error text of the model or the server, else the first line of the trial's failure; "" without any.

    In one line of at most 200 characters, without the meaning that `unanswered` appends in brackets.
    """
    failure = (trial.failure or "").removesuffix(f" ({_meaning(trial)})").replace("; its last words:", "", 1)
    texts: Iterable[str] = _texts_of_model(trial) or failure.splitlines()[:1]
    return next((_in_a_line(text) for text in texts if text.strip()), "")


def _in_a_line(text: str, max_chars: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def _meaning(trial: Trial) -> str:
    """What a trial's error texts mean, from the table of known errors; "" where that is unknown."""
    meaning = meaning_of("\n".join([*_texts_of_model(trial), trial.failure or ""]))
    return meaning or (meaning_of("out of memory") if out_of_memory(trial) is not None else "")


# The summary of a sweep, written when it ends to search.json, beside the ledger.


@dataclass(slots=True, kw_only=True)
class SearchSummary:
    """How a sweep searched its space.

    `strategy`: the scenario's. `stop_reason`: why the sweep ended. `space_size`: number of points of the space.
    `plan`: how the budget was to be divided among the phases. `proposals`: source -> number of trials.
    `curve`: rows of a batch -> seconds of its execution, as the search estimated them.
    `nodes`: names of the nodes that ran trials at once, separated by commas; "": there was one server.
    `seconds_by_phase`, `trials_by_phase`: "scouting", "comparing", "confirming" -> seconds, and number of trials.
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
        """Return this summary of a resumed sweep with the seconds of each phase of `earlier`, before the interruption,
        added."""
        phases = dict.fromkeys((*earlier.seconds_by_phase, *self.seconds_by_phase))
        spent = {
            phase: earlier.seconds_by_phase.get(phase, 0.0) + self.seconds_by_phase.get(phase, 0.0)
            for phase in phases
        }
        return replace(self, seconds_by_phase=spent)

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the fields by name, as values that JSON takes."""
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
