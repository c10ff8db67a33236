"""Reads and writes the folder of one run, and finds the latest."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchtune.archive.deployable import (
    BATCHING_PARAMETERS,
    CONFIG_PBTXT,
    parameters_name,
    parameters_text,
)
from batchtune.archive.ledger import append_duet, append_trial, read_trials
from batchtune.archive.whole_files import json_object, write_whole
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import SCHEMA_VERSION, Recommendation
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Trial

if TYPE_CHECKING:
    from pandas import DataFrame

    from batchtune.load.record.samples import Samples

LEDGER = "trials.jsonl"
SCENARIO = "scenario.yaml"
PROVENANCE = "provenance.json"
SEARCH = "search.json"
RECOMMENDATION = "recommendation.json"
JOINT_RECOMMENDATION = "joint_recommendation.json"
COMPARISON = "comparison.json"
CHECK = "check.json"
DUETS = "duets.jsonl"
SERVER_LOG = "server.log"
MODEL_CONFIG = "model_config.json"

RUN_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
"""Of a sweep; a run of another kind has its kind behind that."""
NOT_RUNS = "reference"


class Run:
    """One results directory. `notes` say what reading it had to leave out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self._lock: int | None = None

    def hold(self) -> None:
        """Be the only process that measures for this run, until `release` or the end of this process.

        Raises:
            ArchiveError: another process does, or the directory cannot be written.
        """
        if self._lock is not None:
            return
        path = self.path / "lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ArchiveError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(lock, 20).decode(errors="replace").strip()
            os.close(lock)
            raise ArchiveError(
                f"{self.path} is in use by pid {pid or 'unknown'}", hint="wait for it, or start a new run"
            ) from error
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock

    def append(self, trial: Trial, samples: Samples | None) -> None:
        """Keep a finished trial; on disk when this returns.

        Raises:
            ArchiveError: the directory cannot be written.
        """
        try:
            if samples is not None:
                self._write_samples(trial.number, samples)
            append_trial(self.path / LEDGER, trial)
        except (OSError, ArchiveError) as error:
            why = error.message if isinstance(error, ArchiveError) else error.strerror
            raise ArchiveError(
                f"trial {trial.number} cannot be kept: {why}",
                hint=f"all before it is; when there is room: --resume {self.path}",
            ) from error

    def keep_duet(self, block: int, cpu_s: tuple[float, float]) -> None:
        """Keep what a request cost both sides of a check in CPU time, in one of its blocks."""
        append_duet(self.path / DUETS, block, cpu_s)

    def ledger(self) -> list[Trial]:
        """Every finished trial, in order; `trials` has them as a table.

        A last line without its newline is the trial that was being written when the run was killed: left out, and
        noted in `notes`.

        Raises:
            ArchiveError: a line that is no trial, with `file:line`.
        """
        trials, self.notes = read_trials(self.path / LEDGER)
        return trials

    def scenario(self) -> Scenario:
        """The scenario as it was run.

        Raises:
            ScenarioError: it cannot be read any more.
        """
        from batchtune.scenario.reader import read_kept_scenario

        return read_kept_scenario(self.path / SCENARIO)

    def provenance(self) -> dict[str, Any]:
        """On what it ran.

        Raises:
            ArchiveError: missing or corrupt.
        """
        return json_object(self.path / PROVENANCE)

    def trials(self) -> DataFrame:
        """The ledger as a pandas frame, a row a trial: see `archive.table.TRIAL_COLUMNS`."""
        from batchtune.archive.table import trials_frame

        return trials_frame(self.ledger())

    def samples(self, number: int) -> DataFrame:
        """Every request of one trial as a pandas frame: see `archive.table.samples_frame`.

        Raises:
            ArchiveError: missing, corrupt or of another schema.
        """
        from batchtune.archive.table import samples_frame

        return samples_frame(self.requests(number))

    def requests(self, number: int) -> Samples:
        """Every request of one trial, as they were loaded.

        Raises:
            ArchiveError: missing, corrupt or of another schema.
        """
        from batchtune.archive.samples_file import read_parquet

        return read_parquet(self._samples_path(number))

    def write_search(self, summary: SearchSummary) -> None:
        """Keep what the search says of itself."""
        document = json.dumps(summary.to_dict(), allow_nan=False, indent=2) + "\n"
        write_whole(self.path / SEARCH, document.encode())

    def search(self) -> SearchSummary | None:
        """What the search said of itself; None for a run that was killed before its end, or is older than that file.

        Raises:
            ArchiveError: corrupt.
        """
        path = self.path / SEARCH
        if not path.exists():
            return None
        hint = f"restore the file, or remove it: {LEDGER} alone gives a recommendation"
        try:
            return SearchSummary.from_dict(json_object(path))
        except (ValueError, ArchiveError) as error:
            what = error.message if isinstance(error, ArchiveError) else f"{path}: {error}"
            raise ArchiveError(what, hint=hint) from error

    def write_comparison(self, comparison: Mapping[str, Any]) -> None:
        """Keep what a comparison or a noise floor says, as plain types."""
        document = json.dumps(comparison, allow_nan=False, indent=2) + "\n"
        write_whole(self.path / COMPARISON, document.encode())

    def write_recommendation(self, recommendation: Recommendation) -> None:
        """Keep the recommendation, and the file that the server takes; without batching TF Serving takes none."""
        document = json.dumps(recommendation.to_dict(), allow_nan=False, indent=2) + "\n"
        write_whole(self.path / RECOMMENDATION, document.encode())
        path = self.path / parameters_name(recommendation.configuration)
        if recommendation.configuration.batching is None and path.name == BATCHING_PARAMETERS:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, parameters_text(recommendation, self.model_config()).encode())

    def remove_recommendation(self) -> None:
        """Drop what an earlier sweep recommended.

        Raises:
            ArchiveError: the directory cannot be written.
        """
        for name in (BATCHING_PARAMETERS, CONFIG_PBTXT, RECOMMENDATION):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                raise ArchiveError(f"cannot remove {self.path / name}: {error.strerror}") from error

    def recommendation(self) -> Recommendation:
        """The recommendation written last; one of an older schema is made anew from the trials.

        Raises:
            ArchiveError: missing or corrupt.
            BatchtuneError: made anew, there is none.
        """
        path = self.path / RECOMMENDATION
        document = json_object(path)
        version = document.get("schema_version")
        if isinstance(version, int) and version < SCHEMA_VERSION:
            from batchtune.tune.answer.recommend import recommend

            return recommend(self.ledger(), scenario=self.scenario())
        try:
            return Recommendation.from_dict(document)
        except (KeyError, TypeError, ValueError, BatchtuneError) as error:
            raise ArchiveError(f"{path}: not a recommendation: {error}") from error

    def model_config(self) -> dict[str, Any] | None:
        """The configuration that the model had on Triton before the run; None: it was no Triton."""
        path = self.path / MODEL_CONFIG
        if not path.exists():
            return None
        config = json_object(path).get("config")
        return config if isinstance(config, dict) else None

    def _samples_path(self, number: int) -> Path:
        return self.path / "samples" / f"{number:04d}.parquet"

    def _write_samples(self, number: int, samples: Samples) -> None:
        from batchtune.archive.samples_file import to_parquet

        path = self._samples_path(number)
        path.parent.mkdir(exist_ok=True)  # of an old run somebody may have removed them: they are large
        write_whole(path, to_parquet(samples))


def create_run(
    scenario: Scenario,
    scenario_text: str,
    root: Path = Path("results"),
    *,
    provenance: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    kind: Literal["", "compare", "noise", "load", "check"] = "",
) -> Run:
    """A new results directory with the scenario as run; `provenance` is collected when not given.

    A `kind` ends the folder's name: such a run is no sweep, and `latest_run` passes over it.

    Raises:
        ArchiveError: the directory cannot be made.
    """
    if provenance is None:
        from batchtune.provenance import collect

        provenance = collect(scenario.load.seed)
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    path = root / _folder(scenario.name) / f"{stamp}-{secrets.token_hex(3)}{f'-{kind}' if kind else ''}"
    try:
        (path / "samples").mkdir(parents=True)
    except OSError as error:
        raise ArchiveError(
            f"cannot make {path}: {error.strerror}", hint="choose another folder with --results"
        ) from error
    write_whole(path / SCENARIO, scenario_text.encode())
    write_whole(path / PROVENANCE, (json.dumps(provenance, indent=2, default=str) + "\n").encode())
    write_whole(path / LEDGER, b"")
    return Run(path)


def open_run(path: Path | str | None = None, root: Path = Path("results")) -> Run:
    """The run in `path`, or the newest in that folder of runs; None: the latest under `root`, whatever its scenario.

    Raises:
        ArchiveError: there is none.
    """
    if path is None:
        return latest_run(root)
    path = Path(path)
    if (path / LEDGER).is_file():
        return Run(path)
    inside = _runs_in(path, "*")
    if not inside:
        hint = "give a folder results/<name>/<UTC>-<id>"
        raise ArchiveError(f"{path} is no run: it has no {LEDGER}", hint=hint)
    return _newest(inside)


def latest_run(root: Path = Path("results")) -> Run:
    """The sweep started last, of whatever scenario; runs kept for reference do not count.

    Raises:
        ArchiveError: there is none.
    """
    runs = _runs_in(root, "*/*")
    if not runs and any(root.glob(f"*/*/{LEDGER}")):
        hint = "name the run that is meant: `batchtune runs` lists them all"
        raise ArchiveError(f"no sweep under {root}, only other runs", hint=hint)
    if not runs:
        raise ArchiveError(f"no run under {root}", hint="`batchtune sweep MODEL --slo-p95 20ms` makes one")
    return _newest(runs)


def _runs_in(root: Path, pattern: str) -> list[Path]:
    """The sweeps among the folders under `root` that match."""
    return [
        ledger.parent
        for ledger in root.glob(f"{pattern}/{LEDGER}")
        if RUN_NAME.fullmatch(ledger.parent.name) and ledger.parent.parent.name != NOT_RUNS
    ]


def _newest(runs: Sequence[Path]) -> Run:
    return Run(max(runs, key=lambda run: (run.name[:16], (run / LEDGER).stat().st_mtime_ns)))


def _folder(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
