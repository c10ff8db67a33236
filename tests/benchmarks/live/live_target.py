"""How do the live benchmarks run the bundled server on core 0 and the client on core 1, on an emulated device?"""

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
from batchtune.load.fleet import LiveAggregate, LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.scenario.arrivals import ClosedLoop, arrivals_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.loader import Figures, Loader, LoadRun

SERVER_CORE, CLIENT_CORE = 0, 1
MODEL = """\
service_time: {{base_ms: {base_ms}, per_row_ms: {per_row_ms}, concurrency: {concurrency}}}
inputs: {{x: {{dtype: float32, shape: [8]}}}}
outputs: {{y: {{dtype: float32, shape: [2]}}}}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An emulated device behind one scheduler; `max_batch_size` None: batching off."""

    base_ms: float = 3.0
    per_row_ms: float = 0.5
    concurrency: str = "serial"
    max_batch_size: int | None = 16
    batch_timeout_micros: int = 0
    num_batch_threads: int = 1
    max_enqueued_batches: int = 1_000_000
    protocol: str = "grpc"
    flags: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 1.0
    server_cores: tuple[int, ...] = (SERVER_CORE,)
    client_cores: tuple[int, ...] = (CLIENT_CORE,)
    max_in_flight: int | None = None

    @property
    def configuration(self) -> Configuration:
        if self.max_batch_size is None:
            return Configuration(batching=None)
        return Configuration(
            batching=BatchingParameters(
                max_batch_size=self.max_batch_size,
                batch_timeout_micros=self.batch_timeout_micros,
                num_batch_threads=self.num_batch_threads,
                max_enqueued_batches=self.max_enqueued_batches,
            )
        )

    def scenario(self, model: Path) -> Scenario:
        return Scenario.model_validate(
            {
                "name": "live",
                "target": {"model": str(model), "flags": self.flags},
                "request": {"protocol": self.protocol},
                "load": {
                    "arrivals": "poisson",
                    "rate": 100,
                    "warm_up": "500ms",
                    "duration": "2s",
                    "max_in_flight": self.max_in_flight,
                },
                "slo": {"p95": f"{self.limit_s * 1e3}ms"},
                "objective": "capacity",
            }
        )

    def nominal_tau_s(self) -> np.ndarray:
        """tau[b] of the device alone, b = 0 … max_batch_size."""
        return (self.base_ms + self.per_row_ms * np.arange((self.max_batch_size or 1) + 1)) / 1e3


@dataclass
class Live:
    """A server of a case that is up, and the client beside it."""

    case: Case
    scenario: Scenario
    target: TfServingTarget
    loader: Loader
    fleet: LoadFleet

    def client_pids(self) -> list[int]:
        return self.fleet.process_ids

    def load(self, run: LoadRun) -> Figures:
        return self.loader.run(run, on_live=_silent)

    def open_loop(self, rate_rps: float, *, seed: int, warm_up_s: float, duration_s: float) -> Figures:
        arrivals = arrivals_of(
            self.scenario.load, rate_rps=rate_rps, duration_s=warm_up_s + duration_s, seed=seed
        )
        return self.load(LoadRun(arrivals=arrivals, warm_up_s=warm_up_s))

    def closed_loop(self, clients: int, *, duration_s: float = 1.0, warm_up_s: float = 0.3) -> Figures:
        arrivals = ClosedLoop(concurrency=clients, duration_s=warm_up_s + duration_s)
        return self.load(LoadRun(arrivals=arrivals, warm_up_s=warm_up_s))


@contextmanager
def live(case: Case) -> Iterator[Live]:
    """Serve a case: launched unbatched, then given its parameters between two batches, as a sweep does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model" / "1"
        folder.mkdir(parents=True)
        text = MODEL.format(base_ms=case.base_ms, per_row_ms=case.per_row_ms, concurrency=case.concurrency)
        (folder / "emulated.yaml").write_text(text)
        scenario = case.scenario(folder.parent)
        with (
            TfServingTarget(scenario.target) as target,
            LoadFleet(processes=1, cpus=case.client_cores) as fleet,
        ):
            target.apply(Configuration(batching=None))
            target.apply(case.configuration)
            _pin(target.pid, case.server_cores)
            yield Live(case, scenario, target, Loader(scenario, target, fleet, guard=HostGuard()), fleet)


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What the server adds to the device: `tau_s` is a batch's whole cycle, `delay_s` the rest of a lone request's latency."""

    tau_s: np.ndarray
    delay_s: float

    @classmethod
    def of(cls, server: Live, *, requests_s: float = 1.0) -> Self:
        """From one client (its latency is delay + timeout + tau[1]) and from a closed loop that fills every batch.

        The recorded execution time of a batch is longer than the device's by its late wake-up; between two batches the
        batch thread hands answers over and takes the next one. Both lengthen the cycle that the exact chain runs on.
        """
        most = server.case.max_batch_size or 1
        alone = server.closed_loop(1, duration_s=requests_s)
        full = server.closed_loop(4 * most, duration_s=requests_s)
        nominal_s = server.case.nominal_tau_s()
        cycle_s = most / full.measurement.throughput_rps.value
        tau_s = nominal_s + (cycle_s - nominal_s[most])
        waited_s = server.case.batch_timeout_micros / 1e6 + float(tau_s[1])
        return cls(tau_s=tau_s, delay_s=alone.measurement.latency_s["p50"].value - waited_s)


def _pin(pid: int | None, cores: tuple[int, ...]) -> None:
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(thread.id, cores)


def _silent(_live: LiveAggregate) -> None:
    return None
