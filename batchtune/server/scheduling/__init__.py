"""TensorFlow's schedulers of batches, without tensors: how tasks become batches, and which thread runs them."""

from batchtune.server.scheduling.batch_queue import (
    BasicBatchScheduler,
    Batch,
    BatchQueue,
    QueueOptions,
    SharedBatchScheduler,
    Task,
)
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier, RetrierOptions
from batchtune.server.scheduling.streaming import StreamingBatchScheduler

__all__ = [
    "BasicBatchScheduler",
    "Batch",
    "BatchQueue",
    "BatchSchedulerRetrier",
    "QueueOptions",
    "RetrierOptions",
    "SharedBatchScheduler",
    "StreamingBatchScheduler",
    "Task",
]
