"""Does our scheduler form the same batches, and refuse with the same words, as TensorFlow's own in C++?

The same arrivals go through `BatchFunction` of the installed wheel and through our scheduler. One batch thread is
held up while they arrive, so that no batch depends on how fast this machine is; each arrival waits until the process
is quiet, which is when TensorFlow has queued the one before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.wire.status import StatusError
from tests.server.scheduling.scheduler_bench import Bench, Rows

# Importing TensorFlow, and its own threads; test_schedulers.py holds the same rules.
pytestmark = pytest.mark.slow

BLOCKER = -1
Request = pytest.FixtureRequest
QUIET_SAMPLES = 3


Outcome = tuple[list[list[int]], dict[int, str]]
"""What became of a trace: rows of each batch in the order of execution, and the refusals by arrival."""


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    max_batch_size: int
    max_enqueued_batches: int = 100
    allowed_batch_sizes: tuple[int, ...] = ()
    splitting: bool = False


def rows_of(case: Case) -> list[list[int]]:
    """Each arrival's rows, numbered through."""
    starts = np.cumsum([0, *case.sizes])
    return [list(range(start, start + size)) for start, size in zip(starts, case.sizes, strict=False)]


# -- TensorFlow --


@pytest.fixture(scope="session")
def tensorflow() -> Any:
    return pytest.importorskip("tensorflow")


class HeldFunction:
    """A BatchFunction with one batch thread that waits at a gate and notes the rows of each batch."""

    def __init__(self, tf: Any, case: Case, name: str) -> None:
        self.tf = tf
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.held = threading.Semaphore(0)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def note(rows: Any) -> Any:
            return tf.numpy_function(self._note, [rows], tf.int64)

        inner = note.get_concrete_function()

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def batched(rows: Any) -> Any:
            return tf.raw_ops.BatchFunction(
                in_tensors=[rows],
                captured_tensors=[],
                f=inner,
                num_batch_threads=1,
                max_batch_size=case.max_batch_size,
                batch_timeout_micros=1000,
                Tout=[tf.int64],
                max_enqueued_batches=case.max_enqueued_batches,
                allowed_batch_sizes=list(case.allowed_batch_sizes),
                shared_name=name,
                enable_large_batch_splitting=case.splitting,
                batch_padding_policy="PAD_UP",
            )[0]

        self.call: Callable[[Any], Any] = batched.get_concrete_function()

    def _note(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.held.release()
        self.gate.wait(30)
        self.batches.append(rows.tolist())
        return rows

    def submit(self, pool: ThreadPoolExecutor, rows: Sequence[int]) -> Future[Any]:
        return pool.submit(lambda: self.call(self.tf.constant(rows, self.tf.int64)).numpy().tolist())


def wait_until_quiet() -> None:
    """Return when every other thread of this process sleeps: whatever was started has come to wait for something."""
    own = str(threading.get_native_id())
    quiet, give_up_s = 0, time.monotonic() + 20
    while quiet < QUIET_SAMPLES and time.monotonic() < give_up_s:
        time.sleep(0.0003)
        states = []
        for task in Path("/proc/self/task").iterdir():
            try:
                states.append(
                    task.name == own or (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
                )
            except OSError:
                continue  # the thread has ended
        quiet = quiet + 1 if all(states) else 0
    assert quiet == QUIET_SAMPLES


def play_in_tensorflow(tf: Any, case: Case, name: str) -> Outcome:
    function = HeldFunction(tf, case, name)
    refusals: dict[int, str] = {}
    with ThreadPoolExecutor(len(case.sizes) + 1) as pool:
        blocker = function.submit(pool, [BLOCKER])
        assert function.held.acquire(timeout=30)
        answers = []
        for rows in rows_of(case):
            answers.append(function.submit(pool, rows))
            wait_until_quiet()
        function.gate.set()
        blocker.result(30)
        for index, (answer, rows) in enumerate(zip(answers, rows_of(case), strict=True)):
            try:
                assert answer.result(30) == rows
            except tf.errors.OpError as error:
                refusals[index] = error.message
    return function.batches[1:], refusals


# -- ours --


def play_in_ours(case: Case) -> Outcome:
    bench, refusals = Bench(), {}
    # With splitting on, BatchFunction executes batches of the last allowed size (batch_resource_base.cc).
    limit = case.allowed_batch_sizes[-1] if case.splitting and case.allowed_batch_sizes else None
    queue = bench.queue(
        max_batch_size=case.max_batch_size,
        batch_timeout_micros=1000,
        max_enqueued_batches=case.max_enqueued_batches,
        enable_large_batch_splitting=case.splitting,
        max_execution_batch_size=limit,
        allowed_batch_sizes=case.allowed_batch_sizes,
    )
    bench.occupy()
    for index, rows in enumerate(rows_of(case)):
        try:
            queue.schedule(Rows(rows))
        except StatusError as error:
            refusals[index] = error.message
    bench.close()
    return [[row for task in batch.tasks for row in task.rows] for batch in bench.batches], refusals


# -- the comparison --


def random_cases() -> Iterator[Case]:
    rng = random.Random(20_260_730)
    for _ in range(6):
        limit = rng.randint(2, 12)
        yield Case(tuple(rng.randint(1, limit) for _ in range(12)), limit)
    for _ in range(4):
        limit = rng.randint(3, 10)
        sizes = tuple(rng.randint(1, limit + 1) for _ in range(12))
        yield Case(sizes, limit, max_enqueued_batches=rng.randint(1, 4))
    for _ in range(6):
        executed = rng.randint(2, 6)
        limit = executed * rng.randint(1, 3)
        yield Case(
            tuple(rng.randint(1, limit) for _ in range(10)),
            limit,
            max_enqueued_batches=rng.randint(2, 8),
            allowed_batch_sizes=(executed,),
            splitting=True,
        )


def without_padding(batches: list[list[int]]) -> list[list[int]]:
    """BatchFunction repeats a row to pad; rows are distinct otherwise."""
    return [list(dict.fromkeys(batch)) for batch in batches]


@pytest.mark.parametrize("case", list(random_cases()), ids=str)
def test_batches_and_refusals_are_those_of_tensorflow(tensorflow: Any, case: Case, request: Request) -> None:
    batches, refusals = play_in_tensorflow(tensorflow, case, request.node.name)
    ours, our_refusals = play_in_ours(case)
    assert ours == without_padding(batches)
    assert list(our_refusals) == list(refusals)
    for index, message in our_refusals.items():
        assert message in refusals[index]


@pytest.mark.parametrize("sizes", [(1,) * 11, (3, 3, 3), (2, 2, 1, 4, 1)], ids=str)
def test_padding_is_that_of_tensorflow(tensorflow: Any, sizes: tuple[int, ...], request: Request) -> None:
    # The scheduler of BatchFunction sees the allowed sizes only with splitting on.
    case = Case(sizes, 16, allowed_batch_sizes=(4, 8, 16), splitting=True)
    batches, _ = play_in_tensorflow(tensorflow, case, request.node.name)
    assert play_in_ours(case)[0] == without_padding(batches)
