"""Reads and writes the folder of one run, and finds the latest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchtune.archive.server_files import (
    BATCHING_PARAMETERS,
    CONFIG_PBTXT,
    MODELS_CONFIG,
    PARAMETERS_JSON,
    parameters_name,
    server_files,
)
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.load.samples import COLUMNS, Samples, WorkerShare
from batchtune.plain_values import from_plain, to_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.claim import OriginalModel
from batchtune.target.tfserving import OWN_PARAMETERS
from batchtune.tune.answer.recommendation import SCHEMA_VERSION, Recommendation
from batchtune.tune.trials.trial import SearchSummary, Trial, of_whole_loads

if TYPE_CHECKING:
    from pandas import DataFrame


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it has the old content or the new, whole: written beside it, synced,
    renamed, folder synced.

    Raises:
        ArchiveError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed either
            beside.unlink(missing_ok=True)
        raise ArchiveError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write values that JSON takes as a file, as `write_whole` does.

    Raises:
        ArchiveError: the file cannot be written.
    """
    write_whole(path, (json.dumps(document, allow_nan=False, indent=2) + "\n").encode())


def json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object, and return it as a dict.

    Raises:
        ArchiveError: it is missing, not JSON, or another JSON value.
    """
    try:
        document = json.loads(read_bytes(path))
    except ValueError as error:
        raise ArchiveError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArchiveError(f"{path}: not a JSON object")
    return document


def read_bytes(path: Path) -> bytes:
    """Read all bytes of a file.

    Raises:
        ArchiveError: missing, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_server_files(files: Mapping[Path, str]) -> None:
    """Write each text to its path, and make missing folders; after a crash each file is the old or the new
    one, whole.

    Raises:
        ArchiveError: one cannot be written.
    """
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArchiveError(f"cannot write {path}: {error.strerror}") from error
        write_whole(path, text.encode())


def append_trial(path: Path, trial: Trial) -> None:
    """Append a trial to the ledger `path`, as one line of JSON; it is on disk when this returns.

    An incomplete last line, left by a process that was killed, is cut off first.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(trial.to_dict(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with path.open("ab") as ledger:
        _cut_torn_line(ledger.fileno(), path)
        ledger.write(line)
        ledger.flush()
        os.fsync(ledger.fileno())


def read_trials(path: Path) -> tuple[list[Trial], tuple[str, ...]]:
    """Return (trials, notes) of a ledger: every finished trial, in order, and a sentence about each line left
    out.

    A last line without its newline was being written when the run was killed: it is left out, with the note
    `FILE:LINE: the last line is incomplete and was left out`. Older versions wrote a line for each model of a
    load: where a load lacks some of them, its other lines are left out without a note.

    Raises:
        ArchiveError: a line is no trial, and the message starts with `file:line`; or the file is missing or
            cannot be read.
    """
    whole, newline, torn = read_bytes(path).rpartition(b"\n")
    notes: tuple[str, ...] = ()
    if torn:
        number = whole.count(b"\n") + (2 if newline else 1)
        notes = (f"{path}:{number}: the last line is incomplete and was left out",)
    lines = whole.split(b"\n") if newline else []
    read = (_trial(line, path=path, number=number) for number, line in enumerate(lines, start=1))
    return of_whole_loads(read), notes


def _trial(line: bytes, *, path: Path, number: int) -> tuple[Trial, Mapping[str, Any] | None]:
    """Parse one line of a ledger; return (trial, company).

    `company` is None but in runs of older versions, which wrote a line for each model of a load: there it
    says which load, and which model of it, the line is about.
    """
    try:
        values = json.loads(line)
        return Trial.from_dict(values), values.get("company")
    except (ValueError, AttributeError, BatchtuneError) as error:
        raise ArchiveError(
            f"{path}:{number}: not a trial: {str(error).removeprefix('not a trial: ')}",
            hint="restore the file, or remove this line to do without it",
        ) from error


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Cut the file off after its last newline, so that the next line does not continue an incomplete one."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.ftruncate(descriptor, data.rfind(b"\n") + 1)


LEDGER = "trials.jsonl"
SCENARIO = "scenario.yaml"
PROVENANCE = "provenance.json"
SEARCH = "search.json"
RECOMMENDATION = "recommendation.json"
JOINT_RECOMMENDATION = "joint_recommendation.json"
"""The recommendation for several models in runs of older versions; now it is in RECOMMENDATION."""
COMPARISON = "comparison.json"
CHECK = "check.json"
DUETS = "duets.jsonl"
SERVER_LOG = "server.log"
MODEL_CONFIG = "model_config.json"

RUN_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
"""Name of a sweep's folder, `<UTC>-<id>`; the folders of other runs have `-<kind>` after it."""
NOT_RUNS = "reference"
"""Folder of a results folder whose runs are kept for reference: none of them is ever the latest run."""

SAMPLES_SCHEMA_VERSION = 1


class Run:
    """The folder of one run, with a method for each file in it.

    `notes`: what the last call of `ledger` left out, a sentence each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self._lock: int | None = None

    def hold(self) -> None:
        """Lock the run for this process, so that no other one measures for it, until `release` or the end of
        this process.

        A second call does nothing.

        Raises:
            ArchiveError: another process holds the lock, or the directory cannot be written.
        """
        if self._lock is not None:
            return
        path = self.path / "lock"
        try:
            self._lock = lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
        except BlockingIOError as error:
            pid = path.read_text(errors="replace").strip()
            self.release()
            raise ArchiveError(
                f"{self.path} is in use by pid {pid or 'unknown'}", hint="wait for it, or start a new run"
            ) from error
        except OSError as error:
            self.release()
            raise ArchiveError(f"cannot write {path}: {error.strerror}") from error

    def release(self) -> None:
        """Unlock the run; does nothing where it is not locked."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, trial: Trial, samples: Samples | Mapping[str, Samples] | None) -> None:
        """Save a finished trial: its requests to samples/, then its line to the ledger; on disk when this
        returns.

        `samples`: every request of the trial; of several models a mapping from model to its requests; None
        where no request was sent.

        Raises:
            ArchiveError: the directory cannot be written.
        """
        try:
            by_model = samples if isinstance(samples, Mapping) else {"": samples}
            for name, own in by_model.items():
                if own is not None:
                    self._write_samples(trial.parts[name].number if name else trial.number, own)
            append_trial(self.path / LEDGER, trial)
        except (OSError, ArchiveError) as error:
            why = error.message if isinstance(error, ArchiveError) else error.strerror
            raise ArchiveError(
                f"trial {trial.number} cannot be saved: {why}",
                hint=f"all earlier trials are saved; when there is room: --resume {self.path}",
            ) from error

    def keep_duet(self, block: int, cpu_s: tuple[float, float]) -> None:
        """Save the server's CPU seconds per request, (baseline, candidate), of one block of a check, measured while the
        load went from one server to the other in short turns.

        Raises:
            ArchiveError: the file cannot be written.
        """
        path = self.path / DUETS
        line = json.dumps({"block": block, "before_cpu_s": cpu_s[0], "after_cpu_s": cpu_s[1]}) + "\n"
        try:
            with path.open("a", encoding="utf-8") as duets:
                duets.write(line)
        except OSError as error:
            raise ArchiveError(
                f"block {block} cannot be saved: cannot write {path}: {error.strerror}"
            ) from error

    def ledger(self) -> list[Trial]:
        """Read every finished trial, in order; `Run.trials` returns them as a table.

        A last line without its newline was being written when the run was killed: it is left out, and `notes`
        says so.

        Raises:
            ArchiveError: a line is no trial; the message starts with `file:line`.
        """
        trials, self.notes = read_trials(self.path / LEDGER)
        return trials

    def scenario(self) -> Scenario:
        """Read the scenario that the run saved when it was last started or resumed.

        Raises:
            ScenarioError: this version of batchtune cannot read it any more.
        """
        from batchtune.scenario.reader import read_kept_scenario

        return read_kept_scenario(self.path / SCENARIO)

    def provenance(self) -> dict[str, Any]:
        """Read the provenance: the machine, versions and commit under which the run was measured.

        Raises:
            ArchiveError: missing or corrupt.
        """
        return json_object(self.path / PROVENANCE)

    def trials(self) -> DataFrame:
        """Return the ledger as a pandas frame, a row for each trial; `archive.table.TRIAL_COLUMNS` lists the
        columns.

        Raises:
            ArchiveError: pandas is not installed, or a line is no trial.
        """
        from batchtune.archive.table import trials_frame

        return trials_frame(self.ledger())

    def samples(self, number: int) -> DataFrame:
        """Return the requests of trial `number` as a pandas frame, with the columns of
        `archive.table.samples_frame`.

        Raises:
            ArchiveError: missing, corrupt or of another schema, or pandas is not installed.
        """
        from batchtune.archive.table import samples_frame

        return samples_frame(self.requests(number))

    def requests(self, number: int) -> Samples:
        """Return the requests of trial `number` as arrays, as the load generator recorded them, but without `streams`.

        Raises:
            ArchiveError: missing, corrupt or of another schema.
        """
        path = self._samples_path(number)
        if not path.exists():
            raise ArchiveError(
                f"{self.path}: no requests of trial {number} are stored",
                hint=f"`batchtune trials {self.path}` lists the trials",
            )
        return read_parquet(path)

    def write_search(self, summary: SearchSummary) -> None:
        """Write the summary of how the sweep searched; `search` reads it.

        Raises:
            ArchiveError: the file cannot be written.
        """
        write_json(self.path / SEARCH, summary.to_dict())

    def search(self) -> SearchSummary | None:
        """Read the summary of how the sweep searched; None for a run that was killed before its end, or that
        has no such file.

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
        """Write the result of `compare` or of `noise`, given as values that JSON takes.

        Raises:
            ArchiveError: the file cannot be written.
        """
        write_json(self.path / COMPARISON, comparison)

    def write_recommendation(
        self, recommendation: Recommendation, document: Mapping[str, Any] | None = None
    ) -> None:
        """Save the recommendation and the files that hold its parameters for a server; those of an earlier
        recommendation are deleted.

        `document`: the content of recommendation.json, with its findings as sentences; None:
        `recommendation.to_dict()`, with their codes.

        Raises:
            ArchiveError: a file cannot be written or deleted; or, before any is, the run's model_config.json is
                corrupt.
        """
        files = self.server_files(recommendation)
        write_json(self.path / RECOMMENDATION, document or recommendation.to_dict())
        self._remove(path for path in self._files_for_servers() if path not in files)
        write_server_files(files)

    def server_files(self, recommendation: Recommendation) -> dict[Path, str]:
        """Return the files from which a server reads the recommended parameters: path in this run's folder -> text.

        Empty for TensorFlow Serving without batching, which takes none.

        Raises:
            ArchiveError: the run's model_config.json is corrupt.
            ScenarioError: with several models, this version of batchtune cannot read the run's scenario any more.
        """
        models = self.scenario().target.models if recommendation.models else ()
        file = self.path / parameters_name(recommendation.configuration)
        return server_files(file, recommendation, models, model_config=self.model_config())

    def remove_recommendation(self) -> None:
        """Delete the recommendation of an earlier sweep, and the files for servers that came with it.

        Raises:
            ArchiveError: the directory cannot be written.
        """
        recommendations = (self.path / name for name in (RECOMMENDATION, JOINT_RECOMMENDATION))
        self._remove((*self._files_for_servers(), *recommendations))

    def _files_for_servers(self) -> list[Path]:
        """List the paths of all parameter files that this or an earlier recommendation may have written."""
        names = (BATCHING_PARAMETERS, CONFIG_PBTXT, PARAMETERS_JSON, MODELS_CONFIG)
        return [*(self.path / name for name in names), *self.path.glob(f"models/*/{OWN_PARAMETERS}")]

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ArchiveError(f"cannot remove {path}: {error.strerror}") from error

    def recommendation(self) -> Recommendation:
        """Read the recommendation that was written last.

        One of an older schema, or of an older run of several models, is not read but computed again from the
        trials.

        Raises:
            ArchiveError: missing or corrupt.
            BatchtuneError: computed again, the trials recommend nothing; its class says why.
        """
        path = self.path / RECOMMENDATION
        is_joint = not path.exists() and (self.path / JOINT_RECOMMENDATION).is_file()
        document = {"schema_version": 0} if is_joint else json_object(path)
        version = document.get("schema_version")
        if isinstance(version, int) and version < SCHEMA_VERSION:
            from batchtune.tune.answer.recommend import recommend

            return recommend(self.ledger(), scenario=self.scenario())
        try:
            return Recommendation.from_dict(document)
        except (KeyError, TypeError, ValueError, BatchtuneError) as error:
            raise ArchiveError(f"{path}: not a recommendation: {error}") from error

    def model_config(self) -> dict[str, Any] | None:
        """Read the configuration that the model had on Triton before the run; None: the server was no Triton.

        Raises:
            ArchiveError: corrupt.
        """
        path = self.path / MODEL_CONFIG
        if not path.exists():
            return None
        config = json_object(path).get("config")
        return config if isinstance(config, dict) else None

    def _samples_path(self, number: int) -> Path:
        return self.path / "samples" / f"{number:04d}.parquet"

    def _write_samples(self, number: int, samples: Samples) -> None:
        path = self._samples_path(number)
        path.parent.mkdir(exist_ok=True)  # of an old run somebody may have removed them: they are large
        write_whole(path, to_parquet(samples))


def require_writable(root: Path | None) -> None:
    """Check that runs can be saved below `root`, before a server is launched for them; None: none is to be saved.

    Raises:
        ArchiveError: this user may make no folder there.
    """
    if root is None:
        return
    nearest = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "it cannot be written" if nearest.is_dir() else "it is no folder"
        raise ArchiveError(
            f"cannot make {root}: {nearest}: {why}", hint="choose another folder with --results"
        )


def create_run(
    scenario: Scenario,
    scenario_text: str,
    root: Path = Path("results"),
    *,
    provenance: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    kind: Literal["", "compare", "noise", "load", "check"] = "",
) -> Run:
    """Make the folder of a new run, `root/<scenario>/<UTC>-<id>`, with the scenario, provenance and an empty
    ledger.

    `provenance`: None collects it now. `now`: the time in the folder's name. `kind`: ends that name; such a
    run is no sweep, and `latest_run` passes over it.

    Raises:
        ArchiveError: the directory cannot be made, or a file in it not written.
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
    """Open the run in folder `path`, or the newest sweep of a scenario's folder; None: the latest sweep under
    `root`.

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
        raise ArchiveError(f"{path} is not a run: it has no {LEDGER}", hint=hint)
    return _newest(inside)


def latest_run(root: Path = Path("results")) -> Run:
    """Open the sweep under `root` that was started last, of whichever scenario; those in its folder `reference` do
    not count.

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
    """List the folders of sweeps under `root` whose paths match the glob `pattern`, without those kept for
    reference."""
    return [
        ledger.parent
        for ledger in root.glob(f"{pattern}/{LEDGER}")
        if RUN_NAME.fullmatch(ledger.parent.name) and ledger.parent.parent.name != NOT_RUNS
    ]


def _newest(runs: Sequence[Path]) -> Run:
    return Run(max(runs, key=lambda run: (run.name[:16], (run / LEDGER).stat().st_mtime_ns)))


def _folder(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def write_original(folder: Path, original: OriginalModel) -> OriginalModel:
    """Save what a server had before the run as model_config.json in `folder`, the run's; on disk when this returns.

    Returns `original` with its `run` set, the folder of the run that changed the server first: `folder` where
    it is "". Where `original.restored` is set and that first run still has a model_config.json, it is replaced
    by the same content.

    Raises:
        ArchiveError: a file cannot be written.
    """
    original = replace(original, run=original.run or str(folder.resolve()))
    document = to_plain(original)
    write_json(folder / MODEL_CONFIG, document)
    first = Path(original.run) / MODEL_CONFIG
    if original.restored and first.is_file():
        write_json(first, document)
    return original


def read_original(run: Run) -> OriginalModel | None:
    """Read what a server that ran already had before the run; None: the run changed no such server.

    Raises:
        ArchiveError: corrupt.
    """
    path = run.path / MODEL_CONFIG
    try:
        return from_plain(OriginalModel, json_object(path)) if path.exists() else None
    except (ValueError, TypeError) as error:
        raise ArchiveError(f"{path}: not the configuration of a model: {error}") from error


def to_parquet(samples: Samples) -> bytes:
    """Return requests as the bytes of a Parquet file, which `read_parquet` reads; `streams` is left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = {
        "schema_version": SAMPLES_SCHEMA_VERSION,
        "started_ns": samples.started_ns,
        "wall_s": samples.wall_s,
        "client_cpu_s": samples.client_cpu_s,
        "client_cores": samples.client_cores,
        "concurrency": samples.concurrency,
        "offered_rps": samples.offered_rps,
        "stopped_early": samples.stopped_early,
        "answers_checked": samples.answers_checked,
        "error_texts": samples.error_texts,
        "notes": list(samples.notes),
        "pauses_ns": list(samples.pauses_ns),
        "workers": [asdict(share) for share in samples.workers],
        "endpoints": list(samples.endpoints),
        "one_in": samples.one_in,
        "failures": samples.failures,
    }
    columns = {name: getattr(samples, name) for name in COLUMNS}
    for name in ("worker", "endpoint"):
        if getattr(samples, name) is not None:
            columns[name] = getattr(samples, name)
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"batchtune": json.dumps(described)}), sink, compression="zstd"
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_parquet(path: Path) -> Samples:
    """Read requests from a Parquet file of `to_parquet`; those of older versions may lack some columns.

    Raises:
        ArchiveError: missing, corrupt or of another schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        described = json.loads(table.schema.metadata[b"batchtune"])
        if described.pop("schema_version") != SAMPLES_SCHEMA_VERSION:
            raise ArchiveError(
                f"{path}: another schema version", hint="read it with the batchtune that wrote it"
            )
        pauses_ns = tuple((start, length) for start, length in described.pop("pauses_ns", ()))
        notes = tuple(described.pop("notes"))
        workers = tuple(WorkerShare(**share) for share in described.pop("workers", ()))
        columns = {name: table[name].to_numpy() for name in COLUMNS}
        endpoints = tuple(described.pop("endpoints", ()))
        return Samples(
            **columns,
            **described,
            notes=notes,
            pauses_ns=pauses_ns,
            worker=table["worker"].to_numpy() if workers else None,
            workers=workers,
            endpoint=table["endpoint"].to_numpy() if endpoints else None,
            endpoints=endpoints,
        )
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise ArchiveError(f"{path}: samples cannot be read: {error}") from error
