"""Length buckets: a batching queue for each range of request lengths, all on the shared batch threads.

The length of a request is the largest size of any dimension that its signature leaves open, the rows aside.
Queue i takes lengths above boundary i - 1 up to boundary i, the last queue all longer ones; so a batch is
padded no further than its boundary. Each queue has its own `max_enqueued_batches`, as each signature has in
TF Serving. Boundaries are given, or chosen from the lengths of the requests so far (length_buckets auto).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from batchtune.batching.parameters import BUCKETS_PAY_FROM, boundaries_for, rounded_up
from batchtune.server.backends.model import Tensors
from batchtune.server.log import say
from batchtune.server.sessions.batched import BatchingSession, Done, Request
from batchtune.wire.signature import Signature, TensorSpec

FIRST_REQUESTS: Final = 256
"""Requests before boundaries are first chosen: the share below a length is then known within 3 points."""

WINDOW_REQUESTS: Final = 2_048
"""Requests before boundaries are chosen again, by these requests alone: shares are known within 1 point."""


class LengthWindow:
    """A histogram of request lengths: 32 bins of one length each, then 16 bins an octave.

    Lengths above 32 are rounded up, by a sixteenth at most.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._requests = 0
        self._wanted = FIRST_REQUESTS

    def add(self, length: int, rows: int) -> bool:
        """Count a request of `rows` rows; return whether enough requests are counted to choose boundaries."""
        length = rounded_up(length)
        self._rows[length] = self._rows.get(length, 0) + rows
        self._requests += 1
        return self._requests >= self._wanted

    def take(self) -> dict[int, int]:
        """Return the counted rows (length -> rows), and empty the histogram."""
        rows, self._rows, self._requests = self._rows, {}, 0
        self._wanted = WINDOW_REQUESTS
        return rows


def better_boundaries(rows_by_length: Mapping[int, int], present: tuple[int, ...]) -> tuple[int, ...]:
    """Return the best boundaries for requests (length -> rows), or `present` if they save less than the share
    BUCKETS_PAY_FROM of the elements that are computed with `present`."""
    best = boundaries_for(rows_by_length)
    pays = computed_elements(rows_by_length, best) < (1.0 - BUCKETS_PAY_FROM) * computed_elements(
        rows_by_length, present
    )
    return best if pays else present


def computed_elements(rows_by_length: Mapping[int, int], boundaries: tuple[int, ...]) -> float:
    """Count the elements to compute if each row is padded to the end of its bucket.

    rows_by_length: length -> rows of the requests; the last bucket ends at their longest length.
    """
    longest = max(rows_by_length, default=0)
    lengths = np.array(list(rows_by_length), dtype=np.float64)
    rows = np.array(list(rows_by_length.values()), dtype=np.float64)
    ends = np.array([*(end for end in boundaries if end < longest), longest], dtype=np.float64)
    return float(np.sum(rows * ends[np.searchsorted(ends, lengths)]))


OpenAxes = Mapping[str, tuple[int, ...] | None]


class LengthBuckets:
    """A BatchingSession for each range of lengths, with the interface of one session.

    boundaries: ascending; (): one bucket for all lengths. open_axes: input -> dimensions that count as its length
    (`open_axes_of`). open_session: makes the session of a bucket, which records batches under the bucket's name: its
    boundary, ">" and the last boundary for longer inputs, "" for all lengths. window: counts lengths, from which
    boundaries are chosen again and again: later requests then have new queues, and those in the old queues are answered
    there; None: boundaries stay. settle: blocks until no request is being retried.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        open_axes: OpenAxes,
        *,
        open_session: Callable[[], BatchingSession],
        name: str = "",
        window: LengthWindow | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.boundaries = boundaries
        self._open_axes = tuple(open_axes.items())
        self._open_session: Callable[[], BatchingSession] | None = open_session
        self._window = window
        self._settle = settle
        self._sessions = _opened(boundaries, open_session)
        self._left: list[BatchingSession] = []  # of earlier boundaries, until what they have is answered
        self._leaving: list[threading.Thread] = []

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> Request | None:
        """Queue a request in the session of its length and return it; the parameters are those of
        `BatchingSession.submit`. Raises StatusError when it is refused at once."""
        length = self._length(inputs)
        request = self._sessions[bisect_left(self.boundaries, length)].submit(
            inputs, output_names, deadline_ns, done
        )
        if self._window is not None and request is not None and self._window.add(length, request.size):
            self._follow(self._window.take())
        return request

    def close(self) -> None:
        """Refuse new requests and return when all queued ones are answered."""
        for session in self._sessions:
            session.close()
        for thread in self._leaving:
            thread.join()
        self._open_session = None  # it refers to the model

    @property
    def queue_depth(self) -> tuple[int, int]:
        """(batches, rows) that wait for a batch thread, summed over all queues, those of earlier boundaries too."""
        depths = [session.queue_depth for session in (*self._sessions, *self._left)]
        return sum(batches for batches, _ in depths), sum(rows for _, rows in depths)

    def _follow(self, rows_by_length: dict[int, int]) -> None:
        """Choose boundaries for these requests (length -> rows), and put them in force if they are better.

        Runs on the thread that submits, so that no request is given to a queue that closes; takes 1 ms.
        """
        boundaries = better_boundaries(rows_by_length, self.boundaries)
        if boundaries == self.boundaries or self._open_session is None:
            return
        ratio = computed_elements(rows_by_length, boundaries) / computed_elements(
            rows_by_length, self.boundaries
        )
        self._left += self._sessions
        old, self._sessions = self._sessions, _opened(boundaries, self._open_session)
        self.boundaries = boundaries
        lengths = ",".join(map(str, boundaries)) or "none"
        text = (
            f"length_buckets of {self.name}: {lengths} by the last {sum(rows_by_length.values()):,} rows; "
            f"{100 * (1.0 - ratio):.0f} % less to compute than before where batches are full"
        )
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        self._leaving.append(
            threading.Thread(target=self._leave, args=(old, text), name="leave_old_buckets", daemon=True)
        )
        self._leaving[-1].start()

    def _leave(self, sessions: list[BatchingSession], text: str) -> None:
        """Report the change and close the sessions of the old boundaries. Blocks: it has its own thread."""
        say(text)
        self._settle()
        for session in sessions:
            session.close()
            self._left.remove(session)

    def _length(self, inputs: Tensors) -> int:
        """Return the length of a request; 0 where it lacks the inputs, which makes any session refuse it."""
        length = 0
        for name, axes in self._open_axes:
            array = inputs.get(name)
            if array is not None:
                shape = array.shape
                sizes = shape[1:] if axes is None else [shape[axis] for axis in axes if axis < len(shape)]
                length = max(length, *sizes) if sizes else length
        return length


def open_axes_of(signature: Signature) -> dict[str, tuple[int, ...] | None]:
    """Return input name -> its axes of open size, without the rows; None: all axes.

    An input without an open dimension is left out.
    """
    axes = {spec.name: _open_axes(spec) for spec in signature.inputs}
    return {name: open_axes for name, open_axes in axes.items() if open_axes != ()}


def _open_axes(spec: TensorSpec) -> tuple[int, ...] | None:
    if spec.shape is None:
        return None
    return tuple(axis for axis, size in enumerate(spec.shape) if axis and size is None)


def _opened(
    boundaries: tuple[int, ...], open_session: Callable[[], BatchingSession]
) -> list[BatchingSession]:
    names = [*map(str, boundaries), f">{boundaries[-1]}"] if boundaries else [""]
    sessions = [open_session() for _ in names]
    for session, name in zip(sessions, names, strict=True):
        session.bucket = name
    return sessions
