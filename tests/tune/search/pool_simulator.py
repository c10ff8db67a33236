"""A server of several models, event by event: a queue each, threads in turn, one device; no clock but its own.

As TensorFlow's SharedBatchScheduler: an open batch may run when it is full or its timeout is over, a free thread asks the
queues in turn, and a queue refuses a task that would need a batch beyond `max_enqueued_batches`. The device runs one batch
at a time, in the order in which threads bring them, or any number at once.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Plan
from batchtune.tune.trials.trial import FinishedTrial, Trial, TrialRequest, is_feasible, violations
from tests.tune.tune_fakes import exactly, planted

APPLY_S = 0.5
"""What a load takes beside its measured part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """τ(rows) in seconds of each model: `fixed_s` + `per_row_s` · rows; `serial`: one batch at a time."""

    fixed_s: dict[str, float]
    per_row_s: dict[str, float]
    serial: bool = True

    def batch_s(self, model: str, rows: int) -> float:
        return self.fixed_s[model] + self.per_row_s[model] * rows


@dataclass(slots=True)
class _Queue:
    size: int
    timeout_s: float
    bound: int
    batches: deque[list[float]] = field(default_factory=deque)
    opened_s: float = 0.0

    def put(self, now_s: float) -> bool:
        if self.batches and len(self.batches[-1]) < self.size:
            self.batches[-1].append(now_s)
            return True
        if len(self.batches) >= self.bound:
            return False
        self.batches.append([now_s])
        self.opened_s = now_s
        return True

    def ready_s(self) -> float:
        """From when on a thread may take a batch; inf: there is none."""
        if not self.batches:
            return math.inf
        if len(self.batches) > 1 or len(self.batches[0]) >= self.size:
            return -math.inf
        return self.opened_s + self.timeout_s


def simulate(
    device: Device, configuration: Configuration, rates_rps: dict[str, float], *, duration_s: float, seed: int
) -> dict[str, tuple[np.ndarray, float]]:
    """By model the latencies in seconds of its requests, inf for one that was refused, and the share of these."""
    names = list(rates_rps)
    arrivals: list[tuple[float, int]] = []
    for at, name in enumerate(names):
        chance = random.Random(seed * 1009 + at)
        now_s = 0.0
        while (now_s := now_s + chance.expovariate(rates_rps[name])) < duration_s:
            arrivals.append((now_s, at))
    arrivals.sort()
    queues = [_queue(configuration, name) for name in names]
    batching = configuration.batching
    free = (batching.num_batch_threads if batching else None) or 2
    latencies: list[list[float]] = [[] for _ in names]
    running: list[tuple[float, int]] = []
    device_free_s, turn, coming, now_s, count = 0.0, 0, 0, 0.0, 0
    while coming < len(arrivals) or running or any(queue.batches for queue in queues):
        events = [arrivals[coming][0]] if coming < len(arrivals) else []
        events += [running[0][0]] if running else []
        if free:
            events += [max(now_s, due) for queue in queues if (due := queue.ready_s()) < math.inf]
        now_s = min(events)
        while coming < len(arrivals) and arrivals[coming][0] <= now_s:
            at = arrivals[coming][1]
            coming += 1
            if not queues[at].put(now_s):
                latencies[at].append(math.inf)
        while running and running[0][0] <= now_s:
            heapq.heappop(running)
            free += 1
        asked = 0
        while free and asked < len(queues):
            at, turn = turn, (turn + 1) % len(queues)
            asked += 1
            if queues[at].ready_s() > now_s:
                continue
            asked = 0
            batch = queues[at].batches.popleft()
            start_s = max(now_s, device_free_s) if device.serial else now_s
            end_s = start_s + device.batch_s(names[at], len(batch))
            device_free_s = end_s
            count += 1
            heapq.heappush(running, (end_s, count))
            latencies[at] += [end_s - sent_s for sent_s in batch]
            free -= 1
    return {
        name: (values, float(np.mean(np.isinf(values))) if len(values) else 0.0)
        for name, own in zip(names, latencies, strict=True)
        for values in [np.array(own)]
    }


def simulated_load(
    scenario: Scenario, device: Device, request: TrialRequest, *, number: int = 1, duration_s: float = 5.0
) -> Trial:
    """What a load would have measured: parts with constraints, as the bench makes them."""
    scenarios = scenario.of_models()
    rates_rps = {
        name: (scenarios[name].load.rate_rps or 1.0) * request.scale for name in request.models or scenarios
    }
    lone, seed = request.concurrency == 1, scenario.load.seed
    if lone:
        lone_s = {name: device.batch_s(name, 1) for name in rates_rps}
        played = {name: (np.full(int(duration_s / one_s) + 1, one_s), 0.0) for name, one_s in lone_s.items()}
    else:
        of_load = seed + 7919 * (number if request.block is None else request.block)
        played = simulate(device, request.configuration, rates_rps, duration_s=duration_s, seed=of_load)
    of_both: dict[str, Any] = {"seconds": duration_s, "seed": seed, "objective": None, "concurrency": None}
    parts = {}
    for at, (name, (values, error_ratio)) in enumerate(played.items()):
        slo, rate_rps = scenarios[name].slo, None if lone else rates_rps[name]
        quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        latency_s = {one: _quantile(values, quantile) for one, quantile in quantiles.items()}
        broken = violations(latency_s, error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)
        part = planted(
            number + at,
            throughput=float(np.isfinite(values).sum()) / duration_s,
            within=0.0,
            error_ratio=error_ratio,
            requests=len(values),
            window_s=duration_s,
            offered_rps=rate_rps,
            concurrency=1 if lone else None,
            latency_s={one: exactly(value_s) for one, value_s in latency_s.items()},
        )
        own = replace(
            request, configuration=request.configuration.of_model(name), rate_rps=rate_rps, reason=name
        )
        verdict: dict[str, Any] = {"constraints": broken, "feasible": is_feasible(broken)}
        parts[name] = replace(part, request=own, model=name, rate_rps=rate_rps, **verdict, **of_both)
    feasible = all(part.feasible for part in parts.values())
    whole = replace(planted(number), measurement=None, constraints={}, request=request, **of_both)
    return replace(whole, parts=parts, feasible=feasible)


def _quantile(values: np.ndarray, quantile: float) -> float:
    return float(np.quantile(values, quantile, method="higher")) if len(values) else 0.0


class SimulatedBench:
    """Runs the trials of a sweep on the simulated server; `change` has the last word on each load."""

    def __init__(
        self, scenario: Scenario, device: Device, *, change: Callable[[Trial], Trial] = lambda trial: trial
    ) -> None:
        self._scenario, self._device, self._change = scenario, device, change
        self.elapsed_s = 0.0

    def now_s(self) -> float:
        return self.elapsed_s

    def run(self, plan: Plan) -> FinishedTrial:
        duration_s = plan.request.duration_s or self._scenario.load.duration_s
        self.elapsed_s += duration_s + APPLY_S
        number = plan.number
        trial = simulated_load(
            self._scenario, self._device, plan.request, number=number, duration_s=duration_s
        )
        return FinishedTrial(trial=self._change(replace(trial, seconds=duration_s + APPLY_S)), samples=None)


def _queue(configuration: Configuration, name: str) -> _Queue:
    own = configuration.of_model(name).batching
    if own is None:
        return _Queue(size=1, timeout_s=0.0, bound=1_000_000)
    bound = 10 if own.max_enqueued_batches is None else own.max_enqueued_batches
    return _Queue(
        size=own.max_batch_size or 1000, timeout_s=(own.batch_timeout_micros or 0) / 1e6, bound=max(bound, 1)
    )
