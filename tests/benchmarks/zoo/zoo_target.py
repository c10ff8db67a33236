"""What is a target of the zoo: one question to `batchtune sweep`, and what a true answer to it is?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.benchmarks.zoo.zoo_models import Emulated, model_directory

Truth = Literal["exact", "recorded", "none"]
SIZES = [1, 2, 4, 8, 16, 32, 64]
TIMEOUTS = [0, 1000, 5000]
THREADS = [1, 2, 4]
REAL_SPACE = {
    "max_batch_size": [1, 4, 8, 16, 32],
    "batch_timeout_micros": [0, 1000, 5000],
    "num_batch_threads": [1, 2],
}
"""30 points, so that a grid is recorded twice in three to five minutes."""


BRISK = {"warm_up": "500ms", "duration": "2s"}
CLIENTS = {"arrivals": "closed", "concurrency": 32, **BRISK}
OPEN = {"arrivals": "poisson", **BRISK}


@dataclass(frozen=True, kw_only=True)
class ZooTarget:
    """One target.

    `truth`: "exact" by simulation of the true device, "recorded" from a grid (`zoo.py --record`), "none" for a trap.
    `exits`: the exit codes that are true of it; empty: 0 where the promise holds, 3 where nothing meets the SLO, 5.
    `says`: what its output must contain, lower case; `within_s`: when it must have ended, None: budget and start-up.
    `seconds`: the budget; `load` without duration and warm-up takes batchtune's own.
    """

    name: str
    model: Emulated | str
    truth: Truth
    objective: Literal["throughput", "capacity", "latency"] = "throughput"
    load: dict[str, Any] = field(default_factory=lambda: CLIENTS)
    p95: str = "50ms"
    protocol: Literal["grpc", "rest"] = "grpc"
    request: dict[str, Any] = field(default_factory=dict)
    space: dict[str, list[int]] = field(
        default_factory=lambda: {
            "max_batch_size": SIZES,
            "batch_timeout_micros": TIMEOUTS,
            "num_batch_threads": THREADS,
        }
    )
    seconds: float = 90.0
    exits: tuple[int, ...] = ()
    says: str = ""
    within_s: float | None = None

    def document(self, model: str, *, seed: int, seconds: float | None = None) -> dict[str, Any]:
        """The scenario of one sweep of the model in this directory."""
        return {
            "name": f"zoo-{self.name}",
            "target": {"model": model, "device": "cpu"},
            "request": {"protocol": self.protocol, **self.request},
            "load": {**self.load, "seed": seed},
            "slo": {"p95": self.p95},
            "objective": self.objective,
            "fixed": {"max_enqueued_batches": 1000},
            "search": {
                "budget": {"time": f"{seconds or self.seconds:g}s"},
                "seed": seed,
                "space": self.space,
            },
        }

    def write_scenario(self, folder: Path, *, seed: int, seconds: float | None = None) -> Path:
        """The scenario's file; an emulated model is written beside it, a real one is built once."""
        path, model = folder / "scenario.yaml", model_directory(self.model, self.name, folder)
        path.write_text(yaml.safe_dump(self.document(model, seed=seed, seconds=seconds)), encoding="utf-8")
        return path
