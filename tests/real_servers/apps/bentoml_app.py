"""A BentoML service whose batch takes 2 ms + 0.05 ms a row."""

from __future__ import annotations

import os
import time

import bentoml
import numpy as np

SIZE = int(os.environ["MAX_BATCH_SIZE"])


@bentoml.service(workers=int(os.environ["WORKERS"]))
class Service:
    @bentoml.api(
        batchable=SIZE > 1,
        max_batch_size=max(SIZE, 2),
        max_latency_ms=int(os.environ["MAX_LATENCY_MS"]),
    )
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        time.sleep(0.002 + 0.00005 * len(inputs))
        return inputs.sum(axis=1)
