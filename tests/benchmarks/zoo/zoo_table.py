"""The targets of the zoo: each one question to `batchtune sweep`, and what a true answer to it is."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.benchmarks.emulated import Emulated
from tests.benchmarks.zoo.zoo_models import model_directory


@dataclass(frozen=True)
class ZooTarget:
    """One target.

    `truth`: "exact" by simulation of the true device, "recorded" from a grid (`record_table.py`), "none" for a trap.
    `exits`: the exit codes that are true of it; empty: 0 where the promise holds, 3 where nothing meets the SLO, 5.
    `says`: what its output must contain, lower case; `within_s`: when it must have ended, None: budget and start-up.
    `seconds`: the budget; `brisk` False: loads last as long as batchtune chooses. `clients` are those of throughput.
    """

    name: str
    model: Emulated | str
    _: KW_ONLY
    truth: Literal["exact", "recorded", "none"]
    objective: Literal["throughput", "capacity", "latency"] = "throughput"
    p95: str = "50ms"
    clients: int = 32
    rate_rps: int | None = None
    brisk: bool = True
    protocol: Literal["grpc", "rest"] = "grpc"
    request: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    threads: tuple[int, ...] = (1, 2, 4)
    seconds: float = 90.0
    exits: tuple[int, ...] = ()
    says: str = ""
    within_s: float | None = None

    def document(self, model: str, *, seed: int, seconds: float | None = None) -> dict[str, Any]:
        """The scenario of one sweep of the model in this directory."""
        load: dict[str, Any] = {"arrivals": "poisson", "seed": seed}
        if self.objective == "throughput":
            load |= {"arrivals": "closed", "concurrency": self.clients}
        load |= {"rate": self.rate_rps} if self.rate_rps else {}
        load |= {"warm_up": "500ms", "duration": "2s"} if self.brisk else {}
        space = {"max_batch_size": list(self.sizes), "batch_timeout_micros": [0, 1000, 5000]}
        return {
            "name": f"zoo-{self.name}",
            "target": {"model": model, "device": "cpu"},
            "request": {"protocol": self.protocol, **self.request},
            "load": load,
            "slo": {"p95": self.p95},
            "objective": self.objective,
            "fixed": {"max_enqueued_batches": 1000},
            "search": {
                "budget": {"time": f"{seconds or self.seconds:g}s"},
                "seed": seed,
                "space": {**space, **({"num_batch_threads": list(self.threads)} if self.threads else {})},
            },
        }

    def write_scenario(self, folder: Path, *, seed: int, seconds: float | None = None) -> Path:
        """The scenario's file; an emulated model is written beside it, a real one is built once."""
        path, model = folder / "scenario.yaml", model_directory(self.model, self.name, folder)
        path.write_text(yaml.safe_dump(self.document(model, seed=seed, seconds=seconds)), encoding="utf-8")
        return path


STEPS_OF_8 = tuple((8 * count, 2.5 + 1.5 * count) for count in range(1, 9))
"""4 ms up to 8 rows and 1.5 ms for every further 8: a 9th row costs as much as eight."""

SLOWER_ABOVE_32 = tuple((rows, 3.0 + 0.2 * rows + 0.6 * max(rows - 32, 0)) for rows in range(1, 65))
"""3 ms + 0.2 ms a row, and 0.8 ms for each row above 32, as where a cache is full."""

DEVICE_2MS, DEVICE_40MS = Emulated(base_ms=2.0, per_row_ms=0.1), Emulated(base_ms=40.0, per_row_ms=2.0)
DEVICE_400MS = Emulated(base_ms=400.0, per_row_ms=10.0)
INTERFERING = Emulated(base_ms=4.0, per_row_ms=0.3, parallel=True, contention_ratio=0.5)
TOKENS = {"inputs": {"random": {"low": 0, "high": 20000, "whole": True}}}

exact = partial(ZooTarget, truth="exact")
capacity = partial(exact, objective="capacity")
# 30 points, so that a grid is recorded twice in three to five minutes.
recorded = partial(ZooTarget, truth="recorded", sizes=(1, 4, 8, 16, 32), threads=(1, 2))
trap = partial(ZooTarget, truth="none", clients=16)

TARGETS: dict[str, ZooTarget] = {
    target.name: target
    for target in (
        recorded("device-0.05ms", Emulated(base_ms=0.05, per_row_ms=0.002), p95="20ms", seconds=60.0),
        capacity("device-2ms", DEVICE_2MS, p95="20ms"),
        exact(
            "device-2ms-latency-rest",
            Emulated(base_ms=2.0, per_row_ms=0.3),
            objective="latency",
            rate_rps=900,
            p95="30ms",
            protocol="rest",
        ),
        capacity("device-2ms-parallel", Emulated(base_ms=2.0, per_row_ms=0.4, parallel=True), p95="20ms"),
        capacity("device-40ms", DEVICE_40MS, p95="400ms", seconds=120.0),
        exact(
            "device-40ms-rest",
            Emulated(base_ms=40.0, per_row_ms=2.0, jitter_ratio=0.1),
            brisk=False,
            p95="500ms",
            protocol="rest",
        ),
        exact("device-400ms", DEVICE_400MS, clients=16, brisk=False, p95="3s", seconds=120.0),
        capacity("device-400ms-capacity", DEVICE_400MS, brisk=False, p95="3s", seconds=120.0),
        exact(
            "steps-of-8",
            Emulated(steps=STEPS_OF_8),
            clients=48,
            p95="40ms",
            sizes=(1, 4, 8, 9, 12, 16, 18, 24, 32, 40, 64),
            threads=(1, 2),
        ),
        capacity(
            "slower-above-32",
            Emulated(steps=SLOWER_ABOVE_32),
            sizes=(1, 4, 8, 16, 24, 32, 40, 48, 64),
            threads=(),
        ),
        exact("interference", INTERFERING),
        capacity("interference-capacity-rest", INTERFERING, p95="30ms", protocol="rest"),
        exact(
            "memory-ceiling",
            Emulated(base_ms=3.0, per_row_ms=0.1, rows_max=24),
            clients=64,
            p95="60ms",
            sizes=(1, 4, 8, 16, 24, 32, 64),
            threads=(),
        ),
        capacity("batching-cannot-pay", Emulated(per_row_ms=3.0), p95="30ms"),
        recorded("transformer", "imdb_transformer", p95="60ms", request=TOKENS),
        recorded(
            "transformer-5-rows",
            "imdb_transformer",
            clients=16,
            p95="150ms",
            request={"rows": 5, **TOKENS},
            sizes=(5, 10, 20, 40, 80),
        ),
        recorded("conv-net", "conv-net", clients=16, p95="300ms"),
        recorded(
            "dense-slow",
            "dense-slow",
            clients=16,
            brisk=False,
            p95="2s",
            sizes=(1, 2, 4, 8, 16),
            seconds=120.0,
        ),
        recorded("two-inputs", "two-inputs", objective="latency", rate_rps=3000, p95="20ms"),
        recorded("string-input-rest", "words", protocol="rest"),
        recorded("forest-rest", "forest", protocol="rest"),
        recorded(
            "requests-of-1MB",
            Emulated(base_ms=5.0, per_row_ms=1.0, floats=262_144),
            clients=8,
            p95="200ms",
            request={"distinct": 4},
            sizes=(1, 2, 4, 8),
        ),
        trap("batch-fixed-at-1", "fixed-batch", seconds=60.0, exits=(5, 7), says="invalid dimensions"),
        trap("forest-zipmap", "forest-zipmap", exits=(7,), says="seq(map", within_s=30.0),
        trap("cannot-load", "broken", exits=(7,), says="saved_model.pb", within_s=30.0),
        trap("slo-out-of-reach", DEVICE_40MS, objective="capacity", p95="20ms", seconds=60.0, exits=(3,)),
    )
}
