"""Which targets does the zoo hold?"""

from __future__ import annotations

from tests.benchmarks.zoo.zoo_models import Emulated
from tests.benchmarks.zoo.zoo_target import CLIENTS, OPEN, REAL_SPACE, TIMEOUTS, ZooTarget


def _steps_of_8() -> tuple[tuple[int, float], ...]:
    """4 ms up to 8 rows and 1.5 ms for every further 8: a 9th row costs as much as eight."""
    return tuple((8 * count, 2.5 + 1.5 * count) for count in range(1, 9))


def _slower_above_32() -> tuple[tuple[int, float], ...]:
    """3 ms + 0.2 ms a row, and 0.8 ms for each row above 32, as where a cache is full."""
    return tuple((rows, 3.0 + 0.2 * rows + 0.6 * max(rows - 32, 0)) for rows in range(1, 65))


DEVICES = [
    ZooTarget(
        name="device-0.05ms",
        model=Emulated(base_ms=0.05, per_row_ms=0.002),
        p95="20ms",
        truth="recorded",
        space=REAL_SPACE,
        seconds=60.0,
    ),
    ZooTarget(
        name="device-2ms",
        model=Emulated(base_ms=2.0, per_row_ms=0.1),
        objective="capacity",
        load=OPEN,
        p95="20ms",
        truth="exact",
    ),
    ZooTarget(
        name="device-2ms-latency-rest",
        model=Emulated(base_ms=2.0, per_row_ms=0.3),
        objective="latency",
        load={**OPEN, "rate": 900},
        p95="30ms",
        truth="exact",
        protocol="rest",
    ),
    ZooTarget(
        name="device-2ms-parallel",
        model=Emulated(base_ms=2.0, per_row_ms=0.4, parallel=True),
        objective="capacity",
        load=OPEN,
        p95="20ms",
        truth="exact",
    ),
    ZooTarget(
        name="device-40ms",
        model=Emulated(base_ms=40.0, per_row_ms=2.0),
        objective="capacity",
        load=OPEN,
        p95="400ms",
        truth="exact",
        seconds=120.0,
    ),
    ZooTarget(
        name="device-40ms-rest",
        model=Emulated(base_ms=40.0, per_row_ms=2.0, jitter_ratio=0.1),
        load={"arrivals": "closed", "concurrency": 32},
        p95="500ms",
        truth="exact",
        protocol="rest",
    ),
    ZooTarget(
        name="device-400ms",
        model=Emulated(base_ms=400.0, per_row_ms=10.0),
        load={"arrivals": "closed", "concurrency": 16},
        p95="3s",
        truth="exact",
        seconds=120.0,
    ),
    ZooTarget(
        name="device-400ms-capacity",
        model=Emulated(base_ms=400.0, per_row_ms=10.0),
        objective="capacity",
        load={"arrivals": "poisson"},
        p95="3s",
        truth="exact",
        seconds=120.0,
    ),
    ZooTarget(
        name="steps-of-8",
        model=Emulated(steps=_steps_of_8()),
        load={**CLIENTS, "concurrency": 48},
        p95="40ms",
        truth="exact",
        space={
            "max_batch_size": [1, 4, 8, 9, 12, 16, 18, 24, 32, 40, 64],
            "batch_timeout_micros": TIMEOUTS,
            "num_batch_threads": [1, 2],
        },
    ),
    ZooTarget(
        name="slower-above-32",
        model=Emulated(steps=_slower_above_32()),
        objective="capacity",
        load=OPEN,
        truth="exact",
        space={"max_batch_size": [1, 4, 8, 16, 24, 32, 40, 48, 64], "batch_timeout_micros": TIMEOUTS},
    ),
    ZooTarget(
        name="interference",
        model=Emulated(base_ms=4.0, per_row_ms=0.3, parallel=True, contention_ratio=0.5),
        truth="exact",
    ),
    ZooTarget(
        name="interference-capacity-rest",
        model=Emulated(base_ms=4.0, per_row_ms=0.3, parallel=True, contention_ratio=0.5),
        objective="capacity",
        load=OPEN,
        p95="30ms",
        truth="exact",
        protocol="rest",
    ),
    ZooTarget(
        name="memory-ceiling",
        model=Emulated(base_ms=3.0, per_row_ms=0.1, rows_max=24),
        load={**CLIENTS, "concurrency": 64},
        p95="60ms",
        truth="exact",
        space={"max_batch_size": [1, 4, 8, 16, 24, 32, 64], "batch_timeout_micros": TIMEOUTS},
    ),
    ZooTarget(
        name="batching-cannot-pay",
        model=Emulated(per_row_ms=3.0),
        objective="capacity",
        load=OPEN,
        p95="30ms",
        truth="exact",
    ),
]

REAL = [
    ZooTarget(
        name="transformer",
        model="imdb_transformer",
        p95="60ms",
        truth="recorded",
        request={"inputs": {"random": {"low": 0, "high": 20000, "whole": True}}},
        space=REAL_SPACE,
    ),
    ZooTarget(
        name="transformer-5-rows",
        model="imdb_transformer",
        load={**CLIENTS, "concurrency": 16},
        p95="150ms",
        truth="recorded",
        request={"rows": 5, "inputs": {"random": {"low": 0, "high": 20000, "whole": True}}},
        space={**REAL_SPACE, "max_batch_size": [5, 10, 20, 40, 80]},
    ),
    ZooTarget(
        name="conv-net",
        model="conv-net",
        load={**CLIENTS, "concurrency": 16},
        p95="300ms",
        truth="recorded",
        space=REAL_SPACE,
    ),
    ZooTarget(
        name="dense-slow",
        model="dense-slow",
        load={"arrivals": "closed", "concurrency": 16},
        p95="2s",
        truth="recorded",
        space={**REAL_SPACE, "max_batch_size": [1, 2, 4, 8, 16]},
        seconds=120.0,
    ),
    ZooTarget(
        name="two-inputs",
        model="two-inputs",
        objective="latency",
        load={**OPEN, "rate": 3000},
        p95="20ms",
        truth="recorded",
        space=REAL_SPACE,
    ),
    ZooTarget(
        name="string-input-rest",
        model="words",
        truth="recorded",
        protocol="rest",
        space=REAL_SPACE,
    ),
    ZooTarget(
        name="forest-rest",
        model="forest",
        truth="recorded",
        protocol="rest",
        space=REAL_SPACE,
    ),
    ZooTarget(
        name="requests-of-1MB",
        model=Emulated(base_ms=5.0, per_row_ms=1.0, floats=262_144),
        load={**CLIENTS, "concurrency": 8},
        p95="200ms",
        truth="recorded",
        request={"distinct": 4},
        space={**REAL_SPACE, "max_batch_size": [1, 2, 4, 8]},
    ),
]

TRAPS = [
    ZooTarget(
        name="batch-fixed-at-1",
        model="fixed-batch",
        load={**CLIENTS, "concurrency": 16},
        truth="none",
        seconds=60.0,
        exits=(5, 7),
        says="invalid dimensions",
    ),
    ZooTarget(
        name="forest-zipmap",
        model="forest-zipmap",
        load={**CLIENTS, "concurrency": 16},
        truth="none",
        exits=(7,),
        says="seq(map",
        within_s=30.0,
    ),
    ZooTarget(
        name="cannot-load",
        model="broken",
        load={**CLIENTS, "concurrency": 16},
        truth="none",
        exits=(7,),
        says="saved_model.pb",
        within_s=30.0,
    ),
    ZooTarget(
        name="slo-out-of-reach",
        model=Emulated(base_ms=40.0, per_row_ms=2.0),
        objective="capacity",
        load=OPEN,
        p95="20ms",
        truth="none",
        seconds=60.0,
        exits=(3,),
    ),
]

TARGETS = {target.name: target for target in [*DEVICES, *REAL, *TRAPS]}
