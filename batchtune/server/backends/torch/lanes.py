"""Runs several batches at once on a device, each on its own stream, by recorded graphs where possible.

A lane is what a running batch needs: a stream, an event, and the graphs recorded on that stream. For each
batch a thread takes the free lane of the lowest number, so n threads use n lanes. A recorded graph saves the
launch of every kernel, for small models most of the time. It fits exact shapes only, so
`allowed_batch_sizes`, to which batches are padded, decide which batches can be replayed.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from batchtune.server.backends.torch.device import CudaGraph, Forward, TorchDevice, first_line, to_numpy
from batchtune.server.log import note
from batchtune.wire.status import StatusError

Arrays = Sequence[NDArray[Any]]

RECORDING_LIMIT_S = 15.0
"""Most time for recording graphs: whoever changes the parameters waits for it; the tuner for at most 30 s."""

# One at a time in a process, and no replay meanwhile: older PyTorch keeps one state of random numbers for all graphs,
# which refuses a replay while any graph is recorded, and which graphs change unguarded when they are freed.
_RECORDING = threading.Lock()


class Lanes:
    """Runs `forward` on `device` for batch threads, each batch on a free lane: a stream with its recorded
    graphs.

    failures: the exceptions that `forward` may raise.
    """

    def __init__(
        self, torch: Any, device: TorchDevice, forward: Forward, *, failures: tuple[type[Exception], ...]
    ) -> None:
        self._torch = torch
        self._device = device
        self._forward = forward
        self._failures = failures
        self._free = _FreeLanes(device)
        self._noted = True  # until graphs are wanted
        self._prepared: tuple[frozenset[Any], int | None] | None = None

    def run(self, arrays: Arrays) -> list[NDArray[Any]]:
        """Run one batch and return its outputs; blocks for a free lane, then for the device, without the GIL.

        Raises StatusError UNAVAILABLE after `close`; exceptions of `forward` pass through.
        """
        device, torch = self._device, self._torch
        lane = self._free.take()
        try:
            with device.on(lane.stream), torch.inference_mode():
                staged = [device.staged(array) for array in arrays]
                graph = self._graph(lane, arrays) if device.records and not _RECORDING.locked() else None
                if graph is None:
                    outputs = self._forward([device.to_device(array) for array in staged])
                else:
                    outputs = _replayed(graph, staged)
                copies = [device.to_host(tensor) for tensor in outputs]
                device.wait(lane.event)
                return [to_numpy(torch, tensor) for tensor in copies]
        finally:
            self._free.add(lane)

    def prepare(self, examples: Sequence[Arrays], *, at_once: int | None) -> None:
        """Make `at_once` lanes (None: the device's lanes_max), each with a graph for each example's shapes.

        The new lanes and graphs replace the present ones, unless these are for equal shapes and number: a sweep that
        changes only the timeout records nothing again. Blocks until running batches have ended and graphs are recorded,
        the largest first, since smaller ones share their memory; batches that arrive meanwhile run without a graph. So
        do batches whose shapes cannot be recorded, or not within RECORDING_LIMIT_S; a note on stderr says so.
        """
        asked = frozenset(_shapes(arrays) for arrays in examples), at_once
        if not self._device.records or asked == self._prepared:
            return
        self._prepared = asked
        largest_first = sorted(examples, key=lambda arrays: -sum(array.nbytes for array in arrays))
        due_s = time.monotonic() + RECORDING_LIMIT_S
        with _RECORDING:
            self._noted = False
            lanes = self._free.renew(at_once or self._device.lanes_max)
            try:
                while lanes and largest_first:
                    largest_first = self._record(lanes[0], largest_first, due_s)
                    self._free.add(lanes.pop(0))
            finally:
                for lane in lanes:
                    self._free.add(lane)

    def close(self) -> None:
        """Free the lanes and graphs once the running batches have ended; later batches are refused."""
        with _RECORDING:
            self._free.end()

    def _record(self, lane: _Lane, examples: Sequence[Arrays], due_s: float) -> list[Arrays]:
        """Record a lane's graphs, until `due_s`; returns the examples that succeeded, for the next lane."""
        device, good = self._device, []
        with device.on(lane.stream), self._torch.inference_mode():
            lane.pool = device.new_pool()
            for arrays in examples:
                if time.monotonic() > due_s:
                    self._noted = True
                    note(
                        f"no more CUDA graphs after {RECORDING_LIMIT_S:g} s; allow fewer batch sizes or threads"
                    )
                    return []
                try:
                    staged = [device.staged(array) for array in arrays]
                    lane.graphs[_shapes(arrays)] = device.record(self._forward, staged, lane.pool)
                    good.append(arrays)
                except self._failures as error:
                    device.end_if_lost(error)
                    self._noted = True
                    rows = _rows(_shapes(arrays))
                    note(f"no CUDA graph for {rows} rows, such batches run without: {first_line(error)}")
                    if not device.is_out_of_memory(error):
                        return good  # the smaller sizes would fail in the same way
                    error.__traceback__ = None  # it holds the tensors of the failed run
                    device.free_cache()
        return good

    def _graph(self, lane: _Lane, arrays: Arrays) -> CudaGraph | None:
        graph = lane.graphs.get(_shapes(arrays))
        if graph is None and not self._noted:
            self._noted = True
            sizes = sorted({_rows(shapes) for shapes in lane.graphs})
            recorded = f"recorded are {', '.join(map(str, sizes))} rows" if sizes else "none is recorded"
            rows = _rows(_shapes(arrays))
            note(f"no CUDA graph for a batch of {rows} rows, such batches run without: {recorded}")
        return graph


class _Lane:
    __slots__ = ("event", "graphs", "number", "pool", "stream")

    def __init__(self, device: TorchDevice, number: int) -> None:
        self.number = number
        self.stream = device.new_stream()
        self.event = device.new_event()
        self.pool: Any = None
        self.graphs: dict[Any, CudaGraph] = {}


class _FreeLanes:
    """The lanes of a model; at first `device.lanes_max` of them, None: one is made whenever none is free."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._taken = 0
        self._ended = False
        for lane in self.renew(device.lanes_max):
            self.add(lane)

    def take(self) -> _Lane:
        """Take the free lane of the lowest number for one batch; while there is none it makes one where the lanes grow
        (`renew(None)`), else blocks.

        Raises:
            StatusError: UNAVAILABLE after `end`.
        """
        with self._lock:
            while not self._numbers:
                if self._ended:
                    raise StatusError("UNAVAILABLE", "The model is closed")
                if self._grows:
                    heapq.heappush(self._numbers, len(self._lanes))
                    self._lanes.append(_Lane(self._device, len(self._lanes)))
                else:
                    self._added.wait()
            self._taken += 1
            return self._lanes[heapq.heappop(self._numbers)]

    def add(self, lane: _Lane) -> None:
        """Give a lane back: it is free again; while `renew` or `end` waits for running batches, it is dropped
        instead."""
        with self._lock:
            self._taken -= 1
            if self._closed:
                self._idle.notify()
            else:
                heapq.heappush(self._numbers, lane.number)
                self._added.notify()

    def end(self) -> None:
        """Wait for running batches, then drop all lanes; from now on `take` raises StatusError."""
        self._ended = True
        self.renew(0)

    def renew(self, count: int | None) -> list[_Lane]:
        """Wait for running batches, then replace all lanes by `count` new ones, which are returned and count as taken.

        count None: no lane now, and a new one whenever no lane is free. One caller at a time.
        """
        with self._lock:
            self._numbers: list[int] = []
            self._closed, self._grows = True, False
            while self._taken:
                self._idle.wait()
            # One after the other, so that streams and graphs are gone before new ones are made.
            self._lanes: list[_Lane] = []
            self._lanes += [_Lane(self._device, number) for number in range(count or 0)]
            self._closed, self._grows, self._taken = False, count is None, len(self._lanes)
            self._added.notify_all()
            return list(self._lanes)


def _replayed(graph: CudaGraph, staged: Sequence[Any]) -> list[Any]:
    for kept, fresh in zip(graph.inputs, staged, strict=True):
        kept.copy_(fresh, non_blocking=True)
    graph.replay()
    return graph.outputs


def _shapes(arrays: Arrays) -> tuple[Any, ...]:
    return tuple([(array.shape, array.dtype) for array in arrays])


def _rows(shapes: tuple[Any, ...]) -> int:
    shape = shapes[0][0] if shapes else ()
    return int(shape[0]) if shape else 1
