"""Loads a server directly, without a search, as the live benchmarks do; and serves an emulated device to them, the bundled
server on core 0 and the client on core 1."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.scenario.arrivals import ClosedLoop, draw
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.loader import Figures, Loader, LoadRun
from tests.benchmarks.emulated import Emulated

SERVER_CORE, CLIENT_CORE = 0, 1


class Loading:
    """A server that is up, and the client beside it; `target` is what a scenario launches."""

    def __init__(self, scenario: Scenario, target: Any, fleet: LoadFleet) -> None:
        self.scenario, self.target, self.fleet = scenario, target, fleet
        self.loader = Loader(scenario, target, fleet, guard=HostGuard())

    def load(self, run: LoadRun) -> Figures:
        return self.loader.run(run, on_live=lambda _live: None)

    def open_loop(self, rate_rps: float, *, seed: int, warm_up_s: float, duration_s: float) -> Figures:
        """Poisson arrivals, whatever the scenario's are."""
        load = self.scenario.load.model_copy(update={"arrivals": "poisson", "rate_rps": rate_rps})
        arrivals = draw(load, rate_rps=rate_rps, duration_s=warm_up_s + duration_s, seed=seed)
        return self.load(LoadRun(arrivals=arrivals, warm_up_s=warm_up_s))

    def closed_loop(self, clients: int, *, duration_s: float = 1.0, warm_up_s: float = 0.3) -> Figures:
        arrivals = ClosedLoop(concurrency=clients, duration_s=warm_up_s + duration_s)
        return self.load(LoadRun(arrivals=arrivals, warm_up_s=warm_up_s))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An emulated device behind one scheduler; `max_batch_size` None: batching off."""

    base_ms: float = 3.0
    per_row_ms: float = 0.5
    parallel: bool = False
    max_batch_size: int | None = 16
    batch_timeout_micros: int = 0
    max_enqueued_batches: int = 1_000_000
    floats: int = 8
    cpu_ms: float = 0.0
    protocol: str = "grpc"
    flags: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 1.0
    server_cores: tuple[int, ...] = (SERVER_CORE,)

    @property
    def configuration(self) -> Configuration:
        if self.max_batch_size is None:
            return Configuration(batching=None)
        return Configuration(
            batching=BatchingParameters(
                max_batch_size=self.max_batch_size,
                batch_timeout_micros=self.batch_timeout_micros,
                num_batch_threads=1,
                max_enqueued_batches=self.max_enqueued_batches,
            )
        )

    @property
    def device(self) -> Emulated:
        return Emulated(
            base_ms=self.base_ms,
            per_row_ms=self.per_row_ms,
            parallel=self.parallel,
            floats=self.floats,
            more={"cpu_ms": self.cpu_ms},
        )

    def scenario(self, model: Path) -> Scenario:
        return Scenario.model_validate(
            {
                "name": "live",
                "target": {"model": str(model), "flags": self.flags},
                "request": {"protocol": self.protocol},
                "load": {"arrivals": "poisson", "rate": 100, "warm_up": "500ms", "duration": "2s"},
                "slo": {"p95": f"{self.limit_s * 1e3}ms"},
                "objective": "capacity",
            }
        )

    def nominal_tau_s(self) -> np.ndarray:
        """tau[b] of the device alone, b = 0 … max_batch_size."""
        return self.device.tau_ms(self.max_batch_size or 1) / 1e3


@contextmanager
def live(case: Case) -> Iterator[Loading]:
    """Serve a case: launched unbatched, then given its parameters between two batches, as a sweep does."""
    with tempfile.TemporaryDirectory() as name:
        scenario = case.scenario(case.device.write(Path(name) / "model"))
        with (
            TfServingTarget(scenario.target) as target,
            LoadFleet(processes=1, cpus=(CLIENT_CORE,)) as fleet,
        ):
            target.apply(Configuration(batching=None))
            target.apply(case.configuration)
            for thread in psutil.Process(target.pid).threads():
                with contextlib.suppress(ProcessLookupError):  # a thread that has ended since
                    os.sched_setaffinity(thread.id, case.server_cores)
            yield Loading(scenario, target, fleet)


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What the server adds to the device: `tau_s` is a batch's whole cycle, `delay_s` the rest of a lone request's latency."""

    tau_s: np.ndarray
    delay_s: float

    @classmethod
    def of(cls, server: Loading, case: Case) -> Self:
        """From one client (its latency is delay + timeout + tau[1]) and from a closed loop that fills every batch.

        The recorded execution time of a batch is longer than the device's by its late wake-up; between two batches the
        batch thread hands answers over and takes the next one. Both lengthen the cycle that the exact chain runs on.
        """
        most = case.max_batch_size or 1
        alone, full = server.closed_loop(1), server.closed_loop(4 * most)
        nominal_s = case.nominal_tau_s()
        cycle_s = most / full.measurement.throughput_rps.value
        tau_s = nominal_s + (cycle_s - nominal_s[most])
        waited_s = case.batch_timeout_micros / 1e6 + float(tau_s[1])
        return cls(tau_s=tau_s, delay_s=alone.measurement.latency_s["p50"].value - waited_s)
