"""What becomes of an open loop that offers more than the server completes, in the long run?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from batchtune.measure.statistics.quantiles import QUANTILES
from batchtune.twin.model.reading import Fitted
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import Prediction, Twin
from batchtune.twin.simulator.replica import Batcher


def long_run(prediction: Prediction, twin: Twin, batcher: Batcher, traffic: Traffic) -> Prediction:
    """The prediction with overload told as such, by the readings whose saturation is below the rate.

    A simulation is short: that of a million requests/s for 40 ms ends before the first large batch does. In the long
    run a server completes its saturation. What exceeds it is refused once the queue of batches is full, and what is
    accepted waits for that whole queue. Without batching no queue is bounded, and the wait grows without end.
    """
    rate_rps = traffic.rate_rps
    if traffic.closed or rate_rps is None:
        return prediction
    saturations = np.array([fit.saturation_rps(batcher, traffic) for fit in twin.fits])
    over = saturations < rate_rps
    if not over.any():
        return prediction
    bounded = batcher.max_batch_size is not None and batcher.max_enqueued_batches is not None
    refused = 1.0 - saturations / rate_rps if bounded else np.zeros_like(saturations)
    waits_s = np.array([_full_queue_s(batcher, traffic, fit) for fit in twin.fits])
    latency_s = {
        name: np.where(over, np.where(refused > 1.0 - QUANTILES[name], math.inf, waits_s), simulated_s)
        for name, simulated_s in prediction.latency_s.items()
    }
    return replace(
        prediction,
        throughput_rps=np.where(over, saturations, prediction.throughput_rps),
        error_ratio=np.where(over, refused, prediction.error_ratio),
        busy_ratio=np.where(over, 1.0, prediction.busy_ratio),
        latency_s=latency_s,
    )


def _full_queue_s(batcher: Batcher, traffic: Traffic, fit: Fitted) -> float:
    """The wait of a request that found the last place of a full queue; inf where no queue is bounded."""
    if batcher.max_batch_size is None or batcher.max_enqueued_batches is None:
        return math.inf
    batches = max(batcher.max_enqueued_batches, 1) + batcher.batch_threads
    rows_per_s = fit.saturation_rps(batcher, traffic) * traffic.mean_rows
    return batches * (batcher.batch_rows_max or 1) / rows_per_s + fit.delay_s
