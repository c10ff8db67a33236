"""A baseline in a small file, and whether it may be compared with what is measured here.

The figures of each run, a fingerprint of the workload and of the host. The file is meant to be committed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from batchtune.archive.run import write_whole
from batchtune.check.gate import DEFAULT_MARGINS, BlockFigures, Gate
from batchtune.check.paired_check import Phase, run_figures
from batchtune.errors import ArchiveError, BaselineError
from batchtune.plain_values import fields_to_plain, from_plain
from batchtune.provenance import comparable
from batchtune.scenario.spec.check import METRICS, Metric
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.result import runs_of
from batchtune.tune.trials.trial import Trial
from batchtune.units import counted, signed_percent

SCHEMA_VERSION: Final = 2
KIND: Final = "batchtune baseline"
BASELINE: Final = "baseline.json"
RUNS_MIN: Final = 6
"""A check refuses a baseline of fewer runs."""
DRIFT: Final = 0.03
"""A baseline may be worse than the best earlier one by this share, or by the gate's margin where that is
larger.

More is a slow drift, each step of which may have passed its check.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a check with `--baseline FILE` compares with: the figures of earlier runs, and where they were
    measured.

    `utc`: when. `workload`, `host`: what another measurement must share to be compared. `commit`: git commit
    of the model, None outside git. `runs`: the figures of each run. `best`: the best median of each figure
    over all baselines of this workload on this host.
    """

    scenario: str
    utc: str
    workload: Mapping[str, Any]
    host: Mapping[str, Any]
    commit: str | None
    runs: tuple[Mapping[Metric, float], ...]
    best: Mapping[Metric, float] = field(default_factory=dict)

    def medians(self) -> dict[Metric, float]:
        """Return the median of each figure over the runs, in the units of `run_figures`; a figure that some run lacks
        is left out."""
        by_metric = {metric: [run.get(metric, math.nan) for run in self.runs] for metric in METRICS}
        return {
            metric: statistics.median(values)
            for metric, values in by_metric.items()
            if values and all(map(math.isfinite, values))
        }

    def after(self, before: Baseline) -> Baseline:
        """Return this baseline with `best` set: for each figure the better of this baseline's median and the best
        of `before`, the baseline that it replaces."""
        best = {**before.medians(), **before.best}
        for metric, value in self.medians().items():
            worse = _gate(metric).worsening(best.get(metric, value), value)
            best[metric] = value if worse <= 0.0 or math.isnan(worse) else best[metric]
        return replace(self, best=best)

    def drifts(self, gates: Sequence[Gate]) -> list[str]:
        """List the figures of these gates whose median is worse than the best one by more than the gate's margin, and
        more than `DRIFT` except errors, as texts such as `throughput −3.8 %`."""
        texts, medians = [], self.medians()
        for gate in gates:
            best, value = self.best.get(gate.metric, math.nan), medians.get(gate.metric, math.nan)
            worse = gate.worsening(best, value)
            if worse > gate.limit_of(gate.margin if gate.is_absolute else max(gate.margin, DRIFT)):
                texts.append(f"{gate.metric} {_change_text(gate, worse)}")
        return texts

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON takes; `read_baseline` reads them from a file."""
        return {"kind": KIND, "schema_version": SCHEMA_VERSION, **fields_to_plain(self)}

    def blocks_with(self, trials: Sequence[Trial], phase: Phase) -> list[BlockFigures]:
        """Pair each new run with a stored one, and return (stored, new) of each figure for each pair.

        The screen takes the stored runs from the first on. A confirmation takes them from the last backwards,
        so that it compares with other stored runs than the screen. Runs beyond the shorter of the two lists
        are left out.
        """
        kept = self.runs if phase == "screen" else self.runs[::-1]
        return [
            {metric: (before.get(metric, math.nan), after.get(metric, math.nan)) for metric in METRICS}
            for before, after in zip(kept, _figures_of_blocks(trials), strict=False)
        ]


def baseline_of(
    scenario: Scenario,
    trials: Sequence[Trial],
    provenance: Mapping[str, Any],
    *,
    relaunches: bool,
    commit: str | None = None,
) -> Baseline:
    """Make a baseline of the complete runs of one variant.

    The figure `capacity` is kept only where the runs searched for one. `relaunches`: every run had a server
    of its own. `commit`: git commit of the model; None: that of the working tree.
    """
    left_out: frozenset[Metric] = frozenset() if scenario.objective == "capacity" else frozenset({"capacity"})
    return Baseline(
        scenario=scenario.name,
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=workload_of(scenario, relaunches=relaunches),
        host={
            key: provenance.get(key)
            for key in ("schema_version", "machine", "kernel_series", "cpu", "python", "gpu")
        },
        commit=commit or (provenance.get("git") or {}).get("commit"),
        runs=tuple(
            {metric: value for metric, value in run.items() if metric not in left_out}
            for run in _figures_of_blocks(trials)
        ),
    )


def workload_of(scenario: Scenario, *, relaunches: bool) -> dict[str, Any]:
    """Return what two measurements must have in common to be compared, name -> value: requests, load without
    its seed, SLO, objective, CPUs, launches.

    Model and batching parameters are left out: they are what a check compares. `relaunches`: every run had a
    server of its own.
    """
    document = scenario.document()
    workload = {key: document.get(key) for key in ("request", "load", "objective", "slo")}
    load = {key: value for key, value in document["load"].items() if key != "seed"}
    cpus = scenario.target.cpus
    return {
        **workload,
        "load": load,
        "server_cpus": None if cpus is None else list(cpus),
        "server_launches": "every run" if relaunches else "once",
    }


def differences(
    baseline: Baseline, scenario: Scenario, provenance: Mapping[str, Any], *, relaunches: bool
) -> tuple[list[str], list[str]]:
    """Return (workload, host): two lists of sentences on what differs between baseline and scenario; empty
    where nothing differs.

    A difference in workload forbids comparing; one in host makes the verdict less certain. `provenance`: that
    of this machine. `relaunches`: every run of the check has a server of its own.
    """
    host = comparable(baseline.host, provenance)
    asked = json.loads(json.dumps(workload_of(scenario, relaunches=relaunches)))
    ours, theirs = (_hostless(workload, is_same_host=not host) for workload in (baseline.workload, asked))
    workload = [
        f"{key}: {ours.get(key, 'not set')} against {theirs.get(key, 'not set')}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
    return workload, host


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a baseline to a file.

    Raises:
        ArchiveError: it cannot be written.
    """
    write_whole(path, (json.dumps(baseline.to_dict(), indent=1, allow_nan=False) + "\n").encode())


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from a file, or from the folder of a run that wrote one.

    Raises:
        BaselineError: there is none, it is of another version, or holds too few runs.
        ArchiveError: the file is no baseline, or only a part of one.
    """
    path = path / BASELINE if path.is_dir() else path
    remedy = f"measure it where the check will run: batchtune check SCENARIO.yaml --baseline {path} --update-baseline"
    bytes_max = 1 << 20
    try:
        if path.stat().st_size > bytes_max:
            raise ArchiveError(f"{path}: {path.stat().st_size:,} bytes are not a baseline", hint=remedy)
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise BaselineError(
            f"NO BASELINE: {path} does not exist; nothing was compared", hint=remedy
        ) from error
    except OSError as error:
        raise BaselineError(f"NO BASELINE: {path} cannot be read: {error.strerror}", hint=remedy) from error
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path}: not JSON, or cut short: {error}", hint=remedy) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ArchiveError(f"{path}: not a baseline of batchtune", hint=remedy)
    version = document.get("schema_version")
    old = {1: ", whose memory is not the peak since the launch"}  # What figures of older versions are not.
    if version != SCHEMA_VERSION:
        why = old.get(version, "") if isinstance(version, int) else ""
        raise BaselineError(
            f"{path}: schema_version {version!r}{why}, and this batchtune reads {SCHEMA_VERSION}",
            hint=f"use the batchtune that wrote it, or {remedy}",
        )
    try:
        baseline = from_plain(Baseline, document)
    except TypeError as error:
        raise ArchiveError(f"{path}: not a whole baseline: {error}", hint=remedy) from error
    if not all(baseline.runs):
        raise ArchiveError(f"{path}: not a whole baseline: a run without figures", hint=remedy)
    if len(baseline.runs) < RUNS_MIN:
        raise BaselineError(f"{path}: {len(baseline.runs)} runs; a baseline needs {RUNS_MIN}", hint=remedy)
    return baseline


def _gate(metric: Metric) -> Gate:
    return Gate(metric=metric, margin=DEFAULT_MARGINS[metric])


def _change_text(gate: Gate, worse: float) -> str:
    """Write a change such as `−3.8 %`, or `+0.2 points` for errors; `worse` is in the unit of
    `Gate.worsening`."""
    change = gate.change(worse)
    unit = "points" if gate.is_absolute else "%"
    return f"{signed_percent(change)} {unit}"


def _figures_of_blocks(trials: Sequence[Trial]) -> list[Mapping[Metric, float]]:
    """Return the figures of each block, in order, of the only variant: of its last complete attempt."""
    runs = runs_of(trials, trials[0].reason) if trials else {}
    return [run_figures(runs[block]) for block in sorted(runs)]


def _hostless(workload: Mapping[str, Any], *, is_same_host: bool) -> dict[str, Any]:
    """Return the workload as a flat mapping, `load.rate` -> value, without what depends on the machine.

    Of file paths only the names are kept, of lists of CPUs only how many, and that only where both machines
    are one.
    """
    flat = {
        key: Path(value).name if key.endswith(".file") and isinstance(value, str) else value
        for key, value in _flat(workload).items()
    }
    for key in ("server_cpus", "load.cpus"):
        cpus = flat.pop(key, None)
        if is_same_host and isinstance(cpus, list):
            flat[key] = counted(len(cpus), "CPU")
    return flat


def _flat(document: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings, and lists of mappings, as one mapping with dotted keys that begin with
    `prefix`."""
    if isinstance(document, list) and any(isinstance(value, Mapping) for value in document):
        document = dict(enumerate(document))
    if not isinstance(document, Mapping):
        return {prefix: document}
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
