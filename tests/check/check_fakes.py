"""Trials and findings of a paired check, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.check.account import Attribution, Conclusion, Part
from batchtune.check.gate import BlockFigures, Gate
from batchtune.check.paired_check import judge_fixed
from batchtune.measure.measurement import Measurement
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.tune.tune_fakes import exactly, planted

SERVER = ServerActivity(
    duration_s=1.0,
    batches=100,
    rows=1600,
    mean_batch_rows=16.0,
    batches_by_rows={16: 100},
    execution_s_by_rows={16: 0.002},
    queue_wait_mean_s=0.001,
    requests_by_status={"OK": 1600},
    server_cpu_s=0.32,
    memory_peak_bytes=300 * 2**20,
)


def measurement(server: ServerActivity | None = SERVER, **changes: Any) -> Measurement:
    given: dict[str, Any] = {
        "requests": 1600,
        "concurrency": 32,
        "latency_s": {"p50": exactly(0.004), "p95": exactly(0.006), "p99": exactly(0.007)},
        "latency_mean_s": 0.004,
        "server": server,
    }
    measured = planted(1, throughput=1600.0, within=0.0, **{**given, **changes}).measurement
    assert measured is not None
    return measured


def moved(**changes: Any) -> Measurement:
    """A run of a server whose account differs so."""
    return measurement(replace(SERVER, **changes))


def trial(name: str, block: int, measured: Measurement | None = None, **changes: Any) -> Trial:
    given: dict[str, Any] = {
        "number": 2 * block,
        "state": "complete",
        "seconds": 1.0,
        "started_utc": "2026-11-22T12:00:00.000+00:00",
        "seed": block,
        "measurement": measured or measurement(),
    }
    unbatched = Configuration(batching=None)
    request = TrialRequest(configuration=unbatched, source="variant", reason=name, block=block)
    return Trial(**{"request": request, **given, **changes})


def slower_blocks(count: int = 10, *, by: float = 1.06) -> list[BlockFigures]:
    """p95 and CPU: one side slower by a factor, the other alike; each block a little different."""
    return [
        {"p95": (0.010, 0.010 * by * (1 + 0.001 * block)), "cpu": (2e-4, 2e-4 * (1 + 0.001 * (-1) ** block))}
        for block in range(count)
    ]


def regressed(count: int = 10) -> Conclusion:
    gates = [Gate(metric="p95", margin=0.02), Gate(metric="cpu", margin=0.02)]
    return judge_fixed(gates, slower_blocks(count))


def account(conclusion: Conclusion | None = None, **changes: Any) -> Conclusion:
    given: dict[str, Any] = {
        "scenario": "pair",
        "baseline": "main",
        "candidate": "pull_request",
        "attribution": Attribution(
            cause="compute", parts=(Part(name="compute", before=0.002, after=0.00212),)
        ),
        "seconds": 42.0,
        "run": "results/pair/20261122T120000Z-abcdef-check",
    }
    return replace(conclusion or regressed(), **{**given, **changes})
