"""What one check says in all: its conclusion, where a change comes from, what it compared, and what it took."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from batchtune.archive.run import CHECK
from batchtune.check.gate import ERROR_RATE, Finding, Gate
from batchtune.errors import (
    INTERRUPTED,
    ArchiveError,
    BaselineError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
)
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, from_plain, to_plain
from batchtune.tune.compare.result import runs_of
from batchtune.tune.trials.trial import Trial

# Where a change came from: the time of a batch, its size, the queue, the front end, or the host.
#
# By the server's own account of the runs of both sides, medians over the runs. What explains most of the change is
# named; the others are reported where they moved.

Cause = Literal["compute", "batch size", "queue", "front end", "host", "tail", "not known"]
"""What made a side faster or slower. "tail": no median moved, so the slow requests did; "not known": no cause
was found."""

MOVED: Final = 0.02
"""A median that moved by less, as a share, counts as unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request's way, such as `queue`: its median before and after.

    `name`: as in `Cause`, or "server CPU". `before`, `after`: seconds; of the part "batch size", rows.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """The relative change of this part, 0.05 for 5 % more; nan where `before` is 0."""
        return self.after / self.before - 1.0 if self.before > 0.0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Where a change comes from: `cause` explains most of it; `parts` are all parts of a request's way that
    were measured."""

    cause: Cause
    parts: tuple[Part, ...]

    @property
    def largest(self) -> list[Part]:
        """The up to three parts that moved most: the cause first, then the largest relative change; empty where none
        moved by `MOVED`."""
        moved = [part for part in self.parts if _moved(part, MOVED)]
        return sorted(moved, key=lambda part: (part.name != self.cause, -abs(part.change)))[:3]


def attribute(
    before: Sequence[Measurement], after: Sequence[Measurement], *, cpu_s: tuple[float, float] | None = None
) -> Attribution:
    """Compare the runs of two sides part by part, and find the cause of the change.

    `cpu_s`: the server's CPU seconds per request, (before, after), where they were measured by loads of their
    own; None: they are computed from the runs.
    """
    size = _part("batch size", before, after, lambda run: run.server.mean_batch_rows if run.server else None)
    batch = _batch_time(before, after)
    queue = _part("queue", before, after, lambda run: run.queue_mean_s)
    outside = _part("front end", before, after, lambda run: run.overhead_mean_s)
    cpu = _part("server CPU", before, after, _cpu_of_request_s)
    if cpu_s is not None and math.isfinite(cpu_s[0] + cpu_s[1]):
        cpu = Part(name="server CPU", before=cpu_s[0], after=cpu_s[1])
    on_its_way = any(part is not None for part in (batch, size, queue, outside))
    parts = tuple(part for part in (batch, size, queue, outside, cpu) if part is not None)
    cause = _cause(batch=batch, size=size, queue=queue, outside=outside)
    host_moved = 0.25  # Where the host disturbed so many more of one side's runs, it may be the cause.
    if cause == "not known" and abs(_noisy_share(after) - _noisy_share(before)) > host_moved:
        cause = "host"
    if cause == "not known" and on_its_way and not any(_moved(part, MOVED) for part in parts):
        cause = "tail"
    return Attribution(cause=cause, parts=parts)


def _cause(*, batch: Part | None, size: Part | None, queue: Part | None, outside: Part | None) -> Cause:
    """Return the cause, looking first at parts that change others (batch size, time of batches of equal size: what
    changed more), then at those that follow.

    CPU time does not show the cause: it may be spent anywhere.
    """
    size_moved = 0.05  # Batches that hold so many more or fewer rows explain what follows from their size.
    size_change = 0.0 if size is None else abs(size.change)
    time_change = 0.0 if batch is None else abs(batch.change)
    if size_change > size_moved and not time_change > size_change:
        return "batch size"
    if time_change > MOVED:
        return "compute"
    moved = [part for part in (outside, queue) if part is not None and _moved(part, MOVED)]
    if moved:
        return "queue" if max(moved, key=lambda part: abs(part.after - part.before)) is queue else "front end"
    return "not known"


def _moved(part: Part | None, least: float) -> bool:
    return part is not None and abs(part.change) > least


def _part(
    name: str,
    before: Sequence[Measurement],
    after: Sequence[Measurement],
    value: Callable[[Measurement], float | None],
) -> Part | None:
    """Return a part with the median of `value` over the runs of each side; None where a side has no run with
    that value."""
    sides = [[figure for run in runs if (figure := value(run)) is not None] for runs in (before, after)]
    if not all(sides):
        return None
    return Part(name=name, before=statistics.median(sides[0]), after=statistics.median(sides[1]))


def _batch_time(before: Sequence[Measurement], after: Sequence[Measurement]) -> Part | None:
    """Return the mean time of a batch, over the batch sizes that both sides ran, weighted by how often both
    ran them.

    None where no size was run by both.
    """
    (left_s, left_count), (right_s, right_count) = _batches(before), _batches(after)
    common = left_s.keys() & right_s.keys()
    weights = {rows: min(left_count[rows], right_count[rows]) for rows in common}
    total = sum(weights.values())
    if not total:
        return None
    return Part(
        name="compute",
        before=sum(weights[rows] * left_s[rows] for rows in common) / total,
        after=sum(weights[rows] * right_s[rows] for rows in common) / total,
    )


def _batches(runs: Sequence[Measurement]) -> tuple[dict[int, float], dict[int, int]]:
    """Return (seconds, counts) by rows of a batch: the mean time of a batch over all runs, and how many
    batches there were."""
    spent_s: dict[int, float] = {}
    counts: dict[int, int] = {}
    for run in runs:
        server = run.server
        for rows, mean_s in ({} if server is None else server.execution_s_by_rows).items():
            count = 0 if server is None else server.batches_by_rows.get(rows, 0)
            spent_s[rows] = spent_s.get(rows, 0.0) + count * mean_s
            counts[rows] = counts.get(rows, 0) + count
    return {rows: spent_s[rows] / count for rows, count in counts.items() if count}, counts


def _cpu_of_request_s(run: Measurement) -> float | None:
    server = run.server
    if server is None or not server.server_cpu_s:
        return None
    requests = sum(server.requests_by_status.values())
    return server.server_cpu_s / requests if requests else None


def _noisy_share(runs: Sequence[Measurement]) -> float:
    noisy = sum(any(caveat.code in HOST_CODES for caveat in run.caveats) for run in runs)
    return noisy / len(runs) if runs else 0.0


CHECK_VERSION = 1

Verdict = Literal["REGRESSED", "OK", "IMPROVED", "INCONCLUSIVE", "INVALID", "INCOMPARABLE", "SLO MISSED"]
REGRESSION_EXIT_CODE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The result of a check: its verdict, and, once it is told, what was compared.

    `blocks`, `fresh_blocks`: how many blocks the screen and the confirmation took (0: no confirmation);
    `blocks_max`: the most for each of the two. `reason`: why the verdict is INVALID, INCOMPARABLE or SLO
    MISSED, or that the check was `interrupted`; None for any other verdict. `target_failed`: a server failed.
    `confirms`: what the screen flags is measured again before the check fails. `baseline` and `candidate`: names of the
    two sides. `attribution`: where a change comes from; None without a change or without figures that say. `seconds`:
    how long the check took. `run`: folder that keeps the runs. `note`: what to know before believing the verdict, ""
    for nothing. `stored`: the baseline's figures are from a file, of another time, so that no error rate holds.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    blocks: int
    fresh_blocks: int
    blocks_max: int
    reason: Coded | None = None
    target_failed: bool = False
    error_rate: float = ERROR_RATE
    confirms: bool = True
    interrupted: bool = False
    scenario: str = ""
    baseline: str = ""
    candidate: str = ""
    attribution: Attribution | None = None
    seconds: float = 0.0
    run: str | None = None
    note: str = ""
    stored: bool = False

    @property
    def is_void(self) -> bool:
        """Whether the figures say nothing about the servers, or are of another workload."""
        return self.verdict in ("INVALID", "INCOMPARABLE")

    @property
    def exit_code(self) -> int:
        """Exit code of the check for its verdict, from the list in README.md."""
        match self.verdict:
            case "OK" | "IMPROVED":
                return 0
            case "REGRESSED":
                return REGRESSION_EXIT_CODE
            case "INCONCLUSIVE":
                return INTERRUPTED if self.interrupted else InconclusiveError.exit_code
            case "INVALID":
                return (TargetError if self.target_failed else MeasurementInvalidError).exit_code
            case "INCOMPARABLE":
                return BaselineError.exit_code
            case "SLO MISSED":
                return NoFeasibleConfigurationError.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON takes, with the schema version and the exit code; `error_rate` is null where the
        baseline was stored."""
        return {
            "schema_version": CHECK_VERSION,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reason": "" if self.reason is None else to_plain(self.reason),
            "error_rate": None if self.stored else self.error_rate,
            "confirms": self.confirms,
            "target_failed": self.target_failed,
            "blocks": self.blocks,
            "fresh_blocks": self.fresh_blocks,
            "blocks_max": self.blocks_max,
            "gates": to_plain(self.findings),
            "scenario": self.scenario,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "attribution": to_plain(self.attribution),
            "seconds": self.seconds,
            "run": self.run,
            "note": self.note,
        }


def attributed(
    conclusion: Conclusion, trials: Sequence[Trial], *, baseline: str, candidate: str
) -> Attribution | None:
    """Find where a change comes from, by the runs of both sides.

    None where no gate of a time or rate found a change, and with several models, whose requests share one
    server.
    """
    if any(trial.parts or trial.model for trial in trials):
        return None
    moved = {
        finding.gate.metric for finding in conclusion.findings if finding.state in ("regressed", "improved")
    }
    # What the parts of a request's way do not explain.
    without_time = frozenset({"errors", "memory", "gpu_memory", "startup"})
    if not moved - without_time:
        return None
    sides = [
        [trial.measurement for trial in runs_of(trials, name).values() if trial.measurement is not None]
        for name in (baseline, candidate)
    ]
    cpu_s = [
        (finding.before, finding.after)
        for finding in conclusion.findings
        if finding.gate.metric == "cpu" and finding.state != "not measured"
    ]
    return attribute(sides[0], sides[1], cpu_s=cpu_s[0] if cpu_s else None)


# Read again from the folder of a run.


def read_account(run: Path) -> Conclusion:
    """Read the account that a check saved in the folder of its run.

    Raises:
        ArchiveError: there is none, it is cut short, or of another version.
    """
    path = run / CHECK
    try:
        document = json.loads(path.read_bytes())
        if document["schema_version"] != CHECK_VERSION:
            raise ArchiveError(
                f"{path}: schema_version {document['schema_version']!r}, and this batchtune reads {CHECK_VERSION}"
            )
        return account_from(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{path}: not a whole check: {error!r}") from error


def account_from(document: Mapping[str, Any]) -> Conclusion:
    """Make an account from what `Conclusion.to_dict` returned; keys that older versions did not write get their
    defaults.

    Raises:
        KeyError, TypeError, ValueError: the document is no account.
    """
    stored = document["error_rate"] is None
    attribution = document["attribution"]
    return Conclusion(
        verdict=document["verdict"],
        findings=tuple(_finding(gate) for gate in document["gates"]),
        blocks=int(document["blocks"]),
        fresh_blocks=int(document["fresh_blocks"]),
        blocks_max=int(document["blocks_max"]),
        reason=as_text(document["reason"]) if document["reason"] else None,
        target_failed=bool(document.get("target_failed", document["exit_code"] == TargetError.exit_code)),
        error_rate=ERROR_RATE if stored else float(document["error_rate"]),
        confirms=bool(document.get("confirms", True)),
        interrupted=document["exit_code"] == INTERRUPTED,
        scenario=str(document["scenario"]),
        baseline=str(document["baseline"]),
        candidate=str(document["candidate"]),
        attribution=None if attribution is None else from_plain(Attribution, attribution),
        seconds=float(document["seconds"]),
        run=document["run"],
        note=str(document["note"]),
        stored=stored,
    )


def _finding(document: Mapping[str, Any]) -> Finding:
    gate = Gate(
        metric=document["metric"],
        margin=float(document["margin_asked"]),
        is_default=bool(document.get("is_default", False)),
        model=str(document.get("model", "")),
    )
    change = document["change"]
    ends = sorted(
        gate.worsening_of(without if change[name] is None else float(change[name]))
        for name, without in (("low", -math.inf), ("high", math.inf))
    )
    value = _figure(change["value"])
    return Finding(
        gate=gate,
        state=document["state"],
        blocks=int(document["blocks"]),
        worsening=Estimate(
            value=math.nan if math.isnan(value) else gate.worsening_of(value), low=ends[0], high=ends[1]
        ),
        margin=_figure(document["margin"]),
        before=_figure(document["before"]),
        after=_figure(document["after"]),
        confirmed=document["confirmed"],
    )


def _figure(value: Any) -> float:
    return math.nan if value is None else float(value)
