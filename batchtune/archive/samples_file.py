"""Keeps what happened to each request as Parquet: a row a request, what concerns them all as JSON beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchtune.errors import ArchiveError
from batchtune.load.samples import COLUMNS, Samples, WorkerShare

SCHEMA_VERSION = 1


def to_parquet(samples: Samples) -> bytes:
    """Write samples as the content of a Parquet file that `read_parquet` reads."""
    described = {
        "schema_version": SCHEMA_VERSION,
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
    """Read samples from a Parquet file; an older one may lack `pauses_ns`, `workers`, `endpoints` or `one_in`.

    Raises:
        ArchiveError: missing, corrupt or of another schema.
    """
    try:
        table = pq.read_table(path)
        described = json.loads(table.schema.metadata[b"batchtune"])
        if described.pop("schema_version") != SCHEMA_VERSION:
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
