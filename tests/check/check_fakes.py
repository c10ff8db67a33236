"""Trials and findings of a paired check, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchtune.check.account import Attribution, Conclusion, Part
from batchtune.check.gate import BlockFigures, Gate
from batchtune.check.paired_check import judge_fixed
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial, TrialRequest

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


def exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def measurement(server: ServerActivity | None = SERVER, **changes: Any) -> Measurement:
    given: dict[str, Any] = {
        "requests": 1600,
        "window_s": 1.0,
        "offered_rps": None,
        "concurrency": 32,
        "throughput_rps": exactly(1600.0),
        "throughput_rows_per_s": exactly(1600.0),
        "goodput_rps": 1600.0,
        "latency_s": {"p50": exactly(0.004), "p95": exactly(0.006), "p99": exactly(0.007)},
        "latency_mean_s": 0.004,
        "error_ratio": 0.0,
        "errors": {},
        "send_lag_p99_s": 0.0,
        "client_cpu_ratio": 0.1,
        "client_cpu_per_request_s": 1e-5,
        "server": server,
    }
    return Measurement(**{**given, **changes})


def moved(**changes: Any) -> Measurement:
    """A run of a server whose account differs so."""
    return measurement(replace(SERVER, **changes))


def trial(name: str, block: int, measured: Measurement | None = None, **changes: Any) -> Trial:
    from batchtune.batching.parameters import Configuration

    given: dict[str, Any] = {
        "number": 2 * block,
        "state": "complete",
        "seconds": 1.0,
        "started_utc": "2026-11-22T12:00:00.000+00:00",
        "seed": block,
        "measurement": measured or measurement(),
    }
    request = TrialRequest(
        configuration=Configuration(batching=None), source="variant", reason=name, block=block
    )
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
