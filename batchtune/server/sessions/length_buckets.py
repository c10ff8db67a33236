"""Which queue does a request of a variable-length model wait in? One for each range of lengths, on the shared threads.

The length of a request is the largest size of any dimension that its signature leaves open, the rows aside. A queue
takes lengths above the boundary before its own up to its own, the last queue whatever is longer; so a batch is padded
no further than its boundary. Each has its own `max_enqueued_batches`, as each signature has in TF Serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace

from batchtune.server.backends.model import Tensors
from batchtune.server.sessions.batched import BatchingSession
from batchtune.server.sessions.request import BatchObserver, BatchRecord, Done, Request
from batchtune.wire.signature import Signature, TensorSpec

OpenAxes = Mapping[str, tuple[int, ...] | None]


class LengthBuckets:
    """A batching session for each range of lengths; the same `submit` as one session.

    `open_session` makes one for the observer that counts its batches under the bucket's name: its boundary, `>` and the
    last boundary for what is longer.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        open_axes: OpenAxes,
        *,
        observer: BatchObserver,
        open_session: Callable[[BatchObserver], BatchingSession],
    ) -> None:
        self._boundaries = boundaries
        self._open_axes = tuple(open_axes.items())
        names = [*map(str, boundaries), f">{boundaries[-1]}"]
        self._sessions = [open_session(_OfBucket(observer, name)) for name in names]

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> Request | None:
        """As `BatchingSession.submit`, in the queue of the request's length."""
        bucket = bisect_left(self._boundaries, self._length(inputs))
        return self._sessions[bucket].submit(inputs, output_names, deadline_ns, done)

    def close(self) -> None:
        """Refuse new requests and return when all queued ones are answered."""
        for session in self._sessions:
            session.close()

    @property
    def queue_depth(self) -> tuple[int, int]:
        """(batches, rows) that wait."""
        depths = [session.queue_depth for session in self._sessions]
        return sum(batches for batches, _ in depths), sum(rows for _, rows in depths)

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
    """The dimensions beside the rows that each input leaves open, None for all; inputs that leave none are left out."""
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
