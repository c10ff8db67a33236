"""What does batching cost per request, and how late does a batch start? Prints medians; takes a few seconds.

python tests/benchmarks/server/scheduler.py
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions, SharedBatchScheduler
from batchtune.server.sessions.batched import BatchingSession, BatchRecord, Completion
from batchtune.wire.signature import Signature, TensorSpec

ROWS = 64
SIGNATURE = Signature(
    name="serving_default",
    method_name="tensorflow/serving/predict",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 200)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 2)),),
)


class Task:
    size = 1


class Silent:
    def on_batch(self, record: BatchRecord) -> None:
        """Costs nothing: the session's own cost is wanted."""

    def on_rejected(self, reason: str) -> None:
        """Does not happen."""


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:<72} {value:8.2f} {unit}")


def schedule_cost(make: Callable[[], Any], batch_size: int, tasks: int = 100_000) -> float:
    """Mean microseconds of schedule() on one thread while a batch thread takes the batches."""
    scheduler = make()
    queue = scheduler.add_queue(
        QueueOptions(max_batch_size=batch_size, batch_timeout_micros=2000, max_enqueued_batches=10**6),
        lambda batch: None,
    )
    task = Task()
    started_ns = time.perf_counter_ns()
    for _ in range(tasks):
        queue.schedule(task)
    micros = (time.perf_counter_ns() - started_ns) / 1000 / tasks
    scheduler.close()
    return micros


def session_cost() -> tuple[float, float]:
    """Median microseconds per one-row task of submit() and of everything around the model's run."""
    answered = threading.Event()
    answers: list[Completion] = []
    result = np.ones((ROWS, 2), np.float32)
    busy_micros: list[float] = []
    entered_ns = 0

    def run(inputs: Any) -> Any:
        nonlocal entered_ns
        entered_ns = time.perf_counter_ns()
        return {"y": result}

    def deliver(completions: list[Completion]) -> None:
        answers.extend(completions)
        busy_micros.append((time.perf_counter_ns() - entered_ns) / 1000)
        answered.set()

    scheduler = SharedBatchScheduler(num_batch_threads=1)
    session = BatchingSession(
        signature=SIGNATURE,
        runner=run,
        scheduler=scheduler,
        options=QueueOptions(max_batch_size=ROWS, batch_timeout_micros=10**6),
        observer=Silent(),
        deliver=deliver,
    )
    rows = [np.random.default_rng(1).random((1, 200), np.float32) for _ in range(ROWS)]
    submits, whole = [], []
    for _ in range(300):
        answered.clear()
        started_ns = time.perf_counter_ns()
        for x in rows:
            session.submit({"x": x}, None, None, lambda outputs, error: None)
        submits.append((time.perf_counter_ns() - started_ns) / 1000 / ROWS)
        answered.wait()
    scheduler.close()
    queue: Any = session._queue
    for _ in range(300):
        batch = _batch_of(session, rows)
        started_ns = time.perf_counter_ns()
        queue.process(batch)
        whole.append((time.perf_counter_ns() - started_ns) / 1000 / ROWS)
    return statistics.median(submits), statistics.median(whole)


def _batch_of(session: BatchingSession, rows: list[Any]) -> Batch[Any]:
    from batchtune.server.sessions.batched import Request

    batch: Batch[Any] = Batch()
    for x in rows:
        batch.add(Request({"x": x}, 1, ("y",), None, lambda outputs, error: None), 1, 0)
    return batch


def start_delay(timeout_micros: int, repeats: int = 300) -> tuple[float, float]:
    """Median and 99th percentile of microseconds from when a batch is due to when it runs."""
    delays: list[float] = []
    ran = threading.Event()

    def process(batch: Batch[Task]) -> None:
        delays.append(time.monotonic_ns() / 1000 - batch.opened_micros - timeout_micros)
        ran.set()

    scheduler = SharedBatchScheduler(num_batch_threads=1)
    queue = scheduler.add_queue(
        QueueOptions(max_batch_size=1000, batch_timeout_micros=timeout_micros), process
    )
    for _ in range(repeats):
        ran.clear()
        queue.schedule(Task())
        ran.wait()
        time.sleep(0.0005)
    scheduler.close()
    delays.sort()
    return delays[len(delays) // 2], delays[int(len(delays) * 0.99)]


def start_delay_behind_a_busy_thread(switch_interval_s: float) -> float:
    """Median microseconds to start a batch while the scheduling thread goes on computing Python."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval_s)
    delays: list[float] = []
    scheduler = SharedBatchScheduler(num_batch_threads=1)
    queue = scheduler.add_queue(
        QueueOptions(max_batch_size=1),
        lambda batch: delays.append(time.monotonic_ns() / 1000 - batch.opened_micros),
    )
    for _ in range(40):
        queue.schedule(Task())
        until_ns = time.monotonic_ns() + 12_000_000
        while time.monotonic_ns() < until_ns:
            pass
    scheduler.close()
    sys.setswitchinterval(before_s)
    return statistics.median(delays)


def main() -> None:
    for batch_size in (1, 32, 64):
        cost = schedule_cost(lambda: SharedBatchScheduler(num_batch_threads=2), batch_size)
        say(f"schedule(), batches of {batch_size}", cost, "µs")
    submit, around = session_cost()
    say(f"session.submit() of 1 row of 200 float32, batches of {ROWS}", submit, "µs per task")
    say("session: merge, split and bookkeeping of such a batch", around, "µs per task")
    for timeout_micros in (0, 1000, 10_000):
        median, high = start_delay(timeout_micros)
        say(f"start of a batch after it is due, timeout {timeout_micros} µs: median", median, "µs")
        say(f"start of a batch after it is due, timeout {timeout_micros} µs: 99 %", high, "µs")
    for switch_interval_s in (0.005, 0.0005, 0.0001):
        delay = start_delay_behind_a_busy_thread(switch_interval_s)
        say(f"start behind a busy thread, switch interval {switch_interval_s * 1000:g} ms", delay, "µs")


if __name__ == "__main__":
    main()
