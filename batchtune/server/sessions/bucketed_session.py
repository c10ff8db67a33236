"""Queues by length for models of variable length: one for each range of lengths, on the shared threads.

The length of a request is the largest size of any dimension that its signature leaves open, the rows aside. A queue
takes lengths above the boundary before its own up to its own, the last queue whatever is longer; so a batch is padded
no further than its boundary. Each has its own `max_enqueued_batches`, as each signature has in TF Serving. Boundaries
are given, or chosen from the lengths that come (`auto_buckets`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from batchtune.batching.length_buckets import PAYS_FROM, boundaries_for, rounded_up
from batchtune.server.backends.model import Tensors
from batchtune.server.log import say
from batchtune.server.sessions.batched import BatchingSession, BatchObserver, BatchRecord, Done, Request
from batchtune.wire.signature import Signature, TensorSpec

FIRST_REQUESTS: Final = 256
"""After so many the share of requests below a length is known within 3 points: enough to gain most of what there is."""

WINDOW_REQUESTS: Final = 2_048
"""From then on each so many are looked at by themselves, known within 1 point; what was long ago does not count."""


class LengthWindow:
    """A histogram of the last lengths, in at most 32 + 16 bins an octave whatever they are, and when to look at it.

    Longer lengths than 32 are rounded up, by a sixteenth at most.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._requests = 0
        self._wanted = FIRST_REQUESTS

    def add(self, length: int, rows: int) -> bool:
        """Count a request. Returns whether enough have come to choose boundaries."""
        length = rounded_up(length)
        self._rows[length] = self._rows.get(length, 0) + rows
        self._requests += 1
        return self._requests >= self._wanted

    def take(self) -> dict[int, int]:
        """Return the rows of each length counted so far, and begin anew."""
        rows, self._rows, self._requests = self._rows, {}, 0
        self._wanted = WINDOW_REQUESTS
        return rows


def better_boundaries(rows_by_length: Mapping[int, int], present: tuple[int, ...]) -> tuple[int, ...]:
    """Choose other boundaries where they save enough elements, else return those present."""
    best = boundaries_for(rows_by_length)
    pays = computed_elements(rows_by_length, best) < (1.0 - PAYS_FROM) * computed_elements(
        rows_by_length, present
    )
    return best if pays else present


def computed_elements(rows_by_length: Mapping[int, int], boundaries: tuple[int, ...]) -> float:
    """Count the elements of these requests, each padded to the boundary above it, the last ones to the longest."""
    longest = max(rows_by_length, default=0)
    lengths = np.array(list(rows_by_length), dtype=np.float64)
    rows = np.array(list(rows_by_length.values()), dtype=np.float64)
    ends = np.array([*(end for end in boundaries if end < longest), longest], dtype=np.float64)
    return float(np.sum(rows * ends[np.searchsorted(ends, lengths)]))


OpenAxes = Mapping[str, tuple[int, ...] | None]


class LengthBuckets:
    """A batching session for each range of lengths; the same `submit` as one session.

    `open_session` makes one for the observer that counts its batches under the bucket's name: its boundary, `>` and the
    last boundary for what is longer, "" for all lengths. With a `window` other boundaries come into force where the
    lengths that came call for them: later requests have new queues, what waits in the old ones is answered there, those
    that are tried again (`settle` waits for them) included.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        open_axes: OpenAxes,
        *,
        observer: BatchObserver,
        open_session: Callable[[BatchObserver], BatchingSession],
        name: str = "",
        window: LengthWindow | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.boundaries = boundaries
        self._open_axes = tuple(open_axes.items())
        self._observer = observer
        self._open_session: Callable[[BatchObserver], BatchingSession] | None = open_session
        self._window = window
        self._settle = settle
        self._sessions = self._opened(boundaries, open_session)
        self._left: list[BatchingSession] = []  # of earlier boundaries, until what they have is answered
        self._leaving: list[threading.Thread] = []

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> Request | None:
        """Submit a request to the queue of its length, as `BatchingSession.submit`."""
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
        """Batches and rows that wait."""
        depths = [session.queue_depth for session in (*self._sessions, *self._left)]
        return sum(batches for batches, _ in depths), sum(rows for _, rows in depths)

    def _opened(
        self, boundaries: tuple[int, ...], open_session: Callable[[BatchObserver], BatchingSession]
    ) -> list[BatchingSession]:
        names = [*map(str, boundaries), f">{boundaries[-1]}"] if boundaries else [""]
        return [open_session(_OfBucket(self._observer, name)) for name in names]

    def _follow(self, rows_by_length: dict[int, int]) -> None:
        """On the thread that submits, 1 ms for each window: no request is given to a queue that closes."""
        boundaries = better_boundaries(rows_by_length, self.boundaries)
        if boundaries == self.boundaries or self._open_session is None:
            return
        ratio = computed_elements(rows_by_length, boundaries) / computed_elements(
            rows_by_length, self.boundaries
        )
        self._left += self._sessions
        old, self._sessions = self._sessions, self._opened(boundaries, self._open_session)
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
        """On a thread of its own: to say something may block, as the rest does."""
        say(text)
        self._settle()
        for session in sessions:
            session.close()
            self._left.remove(session)

    def _length(self, inputs: Tensors) -> int:
        """0 where the inputs are not those of the signature: whichever session gets them refuses them."""
        length = 0
        for name, axes in self._open_axes:
            array = inputs.get(name)
            if array is not None:
                shape = array.shape
                sizes = shape[1:] if axes is None else [shape[axis] for axis in axes if axis < len(shape)]
                length = max(length, *sizes) if sizes else length
        return length


def open_axes_of(signature: Signature) -> dict[str, tuple[int, ...] | None]:
    """Find the dimensions beside the rows that each input leaves open, None for all; inputs without are left out."""
    axes = {spec.name: _open_axes(spec) for spec in signature.inputs}
    return {name: open_axes for name, open_axes in axes.items() if open_axes != ()}


def _open_axes(spec: TensorSpec) -> tuple[int, ...] | None:
    if spec.shape is None:
        return None
    return tuple(axis for axis, size in enumerate(spec.shape) if axis and size is None)


class _OfBucket:
    """Tells of the batches of one bucket."""

    def __init__(self, observer: BatchObserver, bucket: str) -> None:
        self._observer = observer
        self._bucket = bucket
        self.on_rejected = observer.on_rejected

    def on_batch(self, record: BatchRecord) -> None:
        self._observer.on_batch(replace(record, bucket=self._bucket))
