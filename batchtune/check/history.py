"""The history of all checks, one line each in results/history.jsonl, and when which figure changed."""

from __future__ import annotations

import fcntl
import filecmp
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.check.account import Conclusion
from batchtune.check.gate import figure_name
from batchtune.errors import ArchiveError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.model_files import version_files

# When did a figure change, by the values of many checks in the order of time?
#
# Offline: the split with the largest rank CUSUM is tested by permutation, and each side of one that is found is split
# on. Without a change all orders are equally likely, so a series shows one with at most `ERROR_RATE`, whatever its law
# (Bradley, "Distribution-free statistical tests", 1968; the search is binary segmentation, Scott & Knott 1974). Ranks
# do not care how far an outlier lies.

ERROR_RATE: Final = 0.01
"""Most probability that a series without a change shows one."""

SIDE_MIN: Final = 4
"""Fewest values before and after a change: it is found only this many checks after it came."""

LEAST: Final = 12
"""Fewest values of a series. Fewer have too few orders for a permutation test: even a clear change can be
missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A lasting change in a series: from value number `at` (the first is 0) on the median is `after`.

    `before`: the median since the change before this one, or since the start.
    """

    at: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """The relative change of the median, 0.05 for 5 % more; nan where `before` is 0."""
        return self.after / self.before - 1.0 if self.before else math.nan


def change_points(values: Sequence[float]) -> list[ChangePoint]:
    """Find every lasting change in a series of finite values, in the order of time; fewer than LEAST values
    have none."""
    series = np.asarray(values, dtype=np.float64)
    edges = sorted(_splits(series, 0, np.random.default_rng(1))) if len(series) >= LEAST else []
    bounds = [0, *edges, len(series)]
    medians = [statistics.median(series[start:end]) for start, end in pairwise(bounds) if start < end]
    return [
        ChangePoint(at=edge, before=float(medians[number]), after=float(medians[number + 1]))
        for number, edge in enumerate(edges)
    ]


def _splits(series: NDArray[np.float64], first: int, chance: np.random.Generator) -> list[int]:
    """Return where the series changes, as indices that count from `first`; both sides of a change are
    searched again."""
    count = len(series)
    if count < 2 * SIDE_MIN:
        return []
    ranks = _ranks(series)
    statistic, place = _largest(ranks[np.newaxis, :])
    permutations = 999
    shuffled = chance.permuted(np.tile(ranks, (permutations, 1)), axis=1)
    as_large = int(np.count_nonzero(_largest(shuffled)[0] >= statistic[0] - 1e-9))
    if (as_large + 1) / (permutations + 1) > ERROR_RATE:
        return []
    at = int(place[0])
    return [
        first + at,
        *_splits(series[:at], first, chance),
        *_splits(series[at:], first + at, chance),
    ]


def _largest(ranks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return (statistics, places) for each row of ranks: the largest standardised CUSUM, and how many values
    lie before it."""
    count = ranks.shape[1]
    sizes = np.arange(SIDE_MIN, count - SIDE_MIN + 1)
    sums = np.cumsum(ranks - ranks.mean(axis=1, keepdims=True), axis=1)[:, sizes - 1]
    standardised = np.abs(sums) / np.sqrt(sizes * (count - sizes) / count)
    places = standardised.argmax(axis=1)
    return standardised[np.arange(len(ranks)), places], sizes[places]


def _ranks(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value, from 1 on; equal values share the mean of their ranks."""
    ordered = np.sort(series)
    below = np.searchsorted(ordered, series, side="left")
    up_to = np.searchsorted(ordered, series, side="right")
    ranks: NDArray[np.float64] = (below + up_to + 1) / 2.0
    return ranks


HISTORY: Final = "history.jsonl"
SCHEMA_VERSION: Final = 1
_VOID: Final = frozenset({"INVALID", "INCOMPARABLE"})
"""Verdicts of checks that are left out: their figures say nothing about the servers, or are of another
workload."""


def are_equal(before: Scenario, after: Scenario) -> bool:
    """Whether both sides have equal targets, loads and parameters, and models that are equal byte by byte, so that
    whatever a check flags is a false alarm."""
    documents = [side.document() for side in (before, after)]
    models = [document["target"].pop("model", None) for document in documents]
    for document in documents:
        for name in ("name", "variants", "check", "search"):
            document.pop(name, None)
    return documents[0] == documents[1] and _same_files(*(Path(str(model)) for model in models))


def _same_files(before: Path, after: Path) -> bool:
    if before == after:
        return True
    listed = [
        version_files(model)
        if model.is_file()
        else {str(file.relative_to(model)): file for file in model.rglob("*") if file.is_file()}
        for model in (before, after)
    ]
    if not listed[0] or listed[0].keys() != listed[1].keys():
        return False
    try:
        return all(filecmp.cmp(file, listed[1][name], shallow=False) for name, file in listed[0].items())
    except OSError:
        return False


def history_line(
    account: Conclusion, provenance: Mapping[str, Any], *, commit: str | None = None, unchanged: bool = False
) -> dict[str, Any]:
    """Make the line that a check adds to the history: figures of both sides, verdict, host, commit.

    `commit`: git commit of the candidate; None: that of the working tree. `unchanged`: both sides were equal,
    see `are_equal`.
    """
    document = account.to_dict()
    gates = {
        figure_name(gate["model"], gate["metric"]): {
            name: gate[name] for name in ("before", "after", "change", "state")
        }
        for gate in document["gates"]
    }
    kept = (
        "scenario",
        "baseline",
        "candidate",
        "verdict",
        "exit_code",
        "blocks",
        "fresh_blocks",
        "seconds",
        "run",
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: document[name] for name in kept},
        "gates": gates,
        "unchanged": unchanged,
        "commit": commit or (provenance.get("git") or {}).get("commit"),
        "host": provenance.get("machine", {}).get("host"),
        "cpu": provenance.get("cpu", {}).get("model"),
    }


def append_history(root: Path, line: Mapping[str, Any]) -> Path:
    """Append a line to history.jsonl in `root`, and return its path; two checks that end at once wait for
    each other.

    Raises:
        ArchiveError: it cannot be written.
    """
    path = root / HISTORY
    text = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else b"\n" + text
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ArchiveError(f"cannot write {path}: {error.strerror}") from error
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One figure of the candidates of one scenario, over all checks on one kind of CPU, in the order of time.

    `cpu`: the CPU's name, None where it is not known. `metric`: name of the gate. `utc`, `commits`, `values`:
    an entry for each check. `changes`: the lasting changes in `values`.
    """

    scenario: str
    cpu: str | None
    metric: str
    utc: tuple[str, ...]
    commits: tuple[str | None, ...]
    values: tuple[float, ...]
    changes: tuple[ChangePoint, ...]


def read_history(root: Path) -> list[dict[str, Any]]:
    """Read every line of the history in `root`; a line that is broken is left out.

    Raises:
        ArchiveError: there is no history, or it holds lines of another version.
    """
    path = root / HISTORY
    try:
        texts = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        hint = "`batchtune check SCENARIO.yaml` writes one line a check"
        raise ArchiveError(f"no check under {root}", hint=hint) from error
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error
    lines = [document for text in texts if (document := _whole(text)) is not None]
    newer = [line for line in lines if line["schema_version"] != SCHEMA_VERSION]
    if newer:
        raise ArchiveError(
            f"{path}: schema_version {newer[0]['schema_version']!r}, and this batchtune reads {SCHEMA_VERSION}"
        )
    return lines


def series_of(lines: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Collect the candidate's figures by (scenario, CPU, figure), from the valid checks that measured them,
    with their changes."""
    points: dict[tuple[str, str | None, str], list[tuple[str, str | None, float]]] = {}
    for line in lines:
        if line.get("verdict") in _VOID:
            continue
        for metric, gate in line["gates"].items():
            value = float(gate["after"]) if gate.get("after") is not None else math.nan
            if math.isfinite(value):
                key = (line["scenario"], line.get("cpu"), metric)
                points.setdefault(key, []).append((line["utc"], line.get("commit"), value))
    return [
        Series(
            scenario=scenario,
            cpu=cpu,
            metric=metric,
            utc=tuple(utc for utc, _, _ in series),
            commits=tuple(commit for _, commit, _ in series),
            values=tuple(value for _, _, value in series),
            changes=tuple(change_points([value for _, _, value in series])),
        )
        for (scenario, cpu, metric), series in points.items()
    ]


def track_record(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count, over checks in the order of time, how often they were right, by name.

    `failures`: checks of changed candidates that failed; a later check of the same commit `confirmed` or
    `dismissed` some of them. `unchanged`: checks of two equal sides, of which `false_alarms` failed; `rate_most`:
    upper bound of that rate at 95 % confidence (Clopper-Pearson), 1 where there are no equal sides.
    """
    valid = [line for line in lines if line.get("verdict") not in _VOID]
    equal = [line for line in valid if line.get("unchanged")]
    failed = [
        (at, line)
        for at, line in enumerate(valid)
        if line["verdict"] == "REGRESSED" and not line.get("unchanged")
    ]
    later = [_settled(line, valid[at + 1 :]) for at, line in failed]
    false_alarms, rate_most = sum(line["verdict"] == "REGRESSED" for line in equal), 1.0
    if false_alarms < len(equal):
        from scipy.special import betaincinv

        rate_most = float(betaincinv(false_alarms + 1, len(equal) - false_alarms, 0.95))
    return {
        "failures": len(failed),
        "confirmed": later.count("REGRESSED"),
        "dismissed": sum(verdict in ("OK", "IMPROVED") for verdict in later),
        "unchanged": len(equal),
        "false_alarms": false_alarms,
        "rate_most": rate_most,
    }


def _settled(failure: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict of the next check of the same commit that is clear (REGRESSED, OK, IMPROVED); ""
    without one."""
    for line in later:
        if (
            line["scenario"] == failure["scenario"]
            and failure.get("commit") is not None
            and line.get("commit") == failure["commit"]
            and line["verdict"] in ("REGRESSED", "OK", "IMPROVED")
        ):
            return str(line["verdict"])
    return ""


def _whole(text: bytes) -> dict[str, Any] | None:
    """Parse a line of the history; None where it is broken."""
    try:
        document = json.loads(text)
        texts = all(isinstance(document[key], str) for key in ("scenario", "utc", "verdict"))
        if document["schema_version"] == SCHEMA_VERSION:
            for gate in document["gates"].values():
                float(gate.get("after") or 0.0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return document if texts else None
