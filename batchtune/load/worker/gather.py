"""How do a worker's columns become samples?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.columns import ENDED, PENDING, Columns
from batchtune.load.record.samples import NEVER_NS, Samples, Status
from batchtune.load.worker.driver import WorkerReport
from batchtune.load.worker.job import WorkerJob
from batchtune.scenario.arrivals import ClosedLoop


def samples_of(columns: Columns, report: WorkerReport, part: WorkerJob, start_ns: int) -> Samples:
    """Copy the rows that the worker issued out of the shared memory, as offsets from `start_ns`."""
    issued = report.issued
    status = np.array(columns.outcomes()[:issued])
    status[status == PENDING] = Status.UNFINISHED + ENDED
    status -= ENDED
    sent_ns = _offsets(columns.times("sent")[:issued], start_ns)
    done_ns = _offsets(columns.times("done")[:issued], start_ns)
    done_ns[(status == Status.UNFINISHED) | (status == Status.UNSENT)] = NEVER_NS
    first_byte_ns = _offsets(columns.times("first_byte")[:issued], start_ns)
    in_one_piece = (first_byte_ns == NEVER_NS) & (status == Status.OK)
    wait_ns = np.array(columns.times("wait")[:issued])
    wait_ns[sent_ns == NEVER_NS] = 0
    return Samples(
        due_ns=columns.times("due")[:issued] - start_ns,
        sent_ns=sent_ns,
        first_byte_ns=np.where(in_one_piece, done_ns, first_byte_ns),
        done_ns=done_ns,
        connection_wait_ns=wait_ns,
        status=status,
        rows=part.rows(issued),
        started_ns=start_ns,
        wall_s=report.wall_s,
        client_cpu_s=report.cpu_s,
        client_cores=1,
        concurrency=part.arrivals.concurrency if isinstance(part.arrivals, ClosedLoop) else None,
        stopped_early=report.stopped_early,
        answers_checked=report.answers_checked,
        error_texts=report.error_texts,
        notes=report.notes,
        pauses_ns=report.pauses_ns,
    )


def _offsets(times_ns: NDArray[np.int64], start_ns: int) -> NDArray[np.int64]:
    return np.where(times_ns == 0, NEVER_NS, times_ns - start_ns)
