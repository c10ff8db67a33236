"""What does TensorFlow Serving's own tuning guide come to, step by step?

Source: tensorflow_serving/batching/README.md, its sections on performance tuning. On a CPU: as many batch threads as
cores, a very large max_batch_size, a timeout of 0, then timeouts of 1 to 10 ms. On an accelerator: as many batch
threads as cores; a timeout so long that every batch fills while max_batch_size is tuned for throughput and latency;
then, for online serving, the timeout reined in for the tail, down to 0. While this goes on, the queue is long; at its
end it is as short as there are threads for online serving, and stays long for bulk work, whose timeout may be seconds.

Batches fill only when about twice as many rows are under way as a batch has room for. Where the loop is open, short
probes bring that many clients with them; a closed loop has the clients that it has, so that larger sizes than half of
what they send at once are left out.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.cpus import usable_threads
from batchtune.errors import BatchingParametersError
from batchtune.provenance import gpu_names
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.evidence.ranking import merit
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.trials.out_of_memory import out_of_memory
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Ask, Trial

_Tuning: TypeAlias = Generator[Ask, Trial, list[Trial]]


def guide_strategy(outlook: Outlook) -> Strategy:
    """Follow the guide for the device that is there, and for what `search.mode` says the server is for."""
    if has_accelerator(outlook.scenario, outlook.trials):
        yield from _for_accelerator(_Guide(outlook, "GPU"))
    else:
        yield from _for_cpu(_Guide(outlook, "CPU"))


def has_accelerator(scenario: Scenario, trials: Sequence[Trial]) -> bool:
    """Whether the model runs beside the CPU: the scenario's device, an emulated one, or for `auto` a GPU here."""
    servers = [trial.measurement.server for trial in trials if trial.measurement is not None]
    if any(server is not None and server.emulated for server in servers):
        return True
    device = scenario.target.device.lower()
    return bool(gpu_names()) if device == "auto" else device != "cpu"


def _for_cpu(guide: _Guide) -> Strategy:
    why = f"threads as cores, a large max_batch_size{guide.loop_bound()}, no timeout"
    tried = yield from guide.with_timeouts([0], guide.sizes[-1], why)
    if not tried:
        return
    size = in_force(tried[-1].configuration, "max_batch_size")
    why = "a timeout of a few milliseconds instead of 0"
    tried += yield from guide.with_timeouts(
        [timeout for timeout in guide.timeouts() if timeout > 0], size, why
    )
    yield from guide.with_final_queue(tried)


def _for_accelerator(guide: _Guide) -> Strategy:
    size = chosen_size((yield from guide.filled()))
    if size is None:
        return
    if guide.bulk:
        why = "for bulk work the last batch may wait for seconds, and the queue is long"
        yield from guide.with_timeouts([guide.bulk_timeout()], size, why)
        return
    why = "the timeout reined in for the tail"
    tried = yield from guide.with_timeouts(guide.timeouts()[::-1], size, why)
    yield from guide.with_final_queue(tried)


def chosen_size(filled: Sequence[Trial]) -> int | None:
    """The smallest max_batch_size with (nearly) the most rows per second of those that keep the SLO.

    Where none keeps it, the one that misses it least; None where none works at all.
    """
    working = [trial for trial in filled if _works(trial)]
    kept = [trial for trial in working if trial.feasible]
    if not kept:
        nearest = min(working, key=lambda trial: max(trial.constraints.values()), default=None)
        return None if nearest is None else in_force(nearest.configuration, "max_batch_size")
    most = max(_rows_per_s(trial) for trial in kept)
    enough = [trial for trial in kept if _rows_per_s(trial) >= (1.0 - policy.GUIDE_ENOUGH_GAIN) * most]
    return min(int(in_force(trial.configuration, "max_batch_size")) for trial in enough)


class _Guide:
    """The guide's steps on one scenario; what is fixed stays, and what is searched keeps to the space."""

    def __init__(self, outlook: Outlook, device: str) -> None:
        self._outlook = outlook
        self._scenario = outlook.scenario
        self._device = device
        self._rows = self._scenario.request.rows_most
        self._threads = usable_threads(self._scenario.target.cpus)
        self.bulk = self._scenario.search.mode == "bulk"
        self.sizes = self._sizes()

    def filled(self) -> _Tuning:
        """Probes of full batches: larger sizes while they gain rows per second within the SLO, else smaller ones."""
        sizes = self.sizes
        enough = (at for at, size in enumerate(sizes) if size >= policy.GUIDE_FIRST_REQUESTS * self._rows)
        start = next(enough, len(sizes) - 1)
        tried = yield from self._larger(sizes[start:])
        if tried and chosen_size(tried) in (None, sizes[start]):
            tried += yield from self._smaller(sizes[:start][::-1], beside=tried[0])
        return tried

    def _larger(self, sizes: Sequence[int]) -> _Tuning:
        tried: list[Trial] = []
        for size in sizes:
            tried += yield from self._probed(size)
            if len(tried) < 1 or not _keeps(tried[-1]) or (len(tried) > 1 and not _gains(*tried[-2:])):
                break
        return tried

    def _smaller(self, sizes: Sequence[int], *, beside: Trial) -> _Tuning:
        tried: list[Trial] = []
        for size in sizes:
            tried += yield from self._probed(size)
            if not tried or (_keeps(beside) and _gains(tried[-1], beside)):
                break
            beside = tried[-1]
        return tried

    def with_timeouts(self, timeouts_micros: Sequence[int], size: int, why: str) -> _Tuning:
        """The size with each of the timeouts, under the scenario's own load; smaller where it is out of memory."""
        tried: list[Trial] = []
        smaller = [smaller_size for smaller_size in self.sizes if smaller_size < size]
        for micros in timeouts_micros:
            because = why
            while True:
                reason = (
                    f"guide, {self._device}: {because}; max_batch_size {size}, timeout {micros / 1e3:g} ms"
                )
                ask = self._ask(size, micros, reason=reason)
                known = {trial.configuration for trial in tried}
                if ask is None or ask.configuration in known or not self._outlook.may_propose():
                    break
                tried.append((yield ask))
                words = out_of_memory(tried[-1])
                if words is None or not smaller:
                    break
                because, size = f"{size} rows do not work ({words})", smaller.pop()
        return tried

    def with_final_queue(self, tried: Sequence[Trial]) -> Strategy:
        """For online serving the best so far with as short a queue as there are threads."""
        best = best_trial(tried, scenario=self._scenario)
        if best is None or self.bulk or "max_enqueued_batches" in self._scenario.fixed:
            return
        ask = self._ask(
            in_force(best.configuration, "max_batch_size"),
            in_force(best.configuration, "batch_timeout_micros"),
            queue_batches=self._threads,
            reason=f"guide, {self._device}: for online serving a queue of as many batches as threads, {self._threads}",
        )
        if ask is not None and ask.configuration != best.configuration and self._outlook.may_propose():
            yield ask

    def timeouts(self) -> list[int]:
        """Those of the space up to 10 ms, else the usual ones; none as long as the SLO allows in all; rising."""
        knob = self._scenario.search.space.get("batch_timeout_micros")
        values = policy.GUIDE_TIMEOUTS_MICROS if knob is None else knob.values
        limit_s = min(self._scenario.slo.limits().values(), default=math.inf)
        timeouts = sorted(
            int(value)
            for value in values
            if isinstance(value, int | float)
            and value <= policy.GUIDE_TIMEOUTS_MICROS[-1]
            and value < limit_s * 1e6
        )
        if len(timeouts) <= policy.GUIDE_TIMEOUTS_MAX:
            return timeouts
        return [
            timeouts[round(at * (len(timeouts) - 1) / (policy.GUIDE_TIMEOUTS_MAX - 1))]
            for at in range(policy.GUIDE_TIMEOUTS_MAX)
        ]

    def bulk_timeout(self) -> int:
        knob = self._scenario.search.space.get("batch_timeout_micros")
        values = [] if knob is None else [value for value in knob.values if isinstance(value, int | float)]
        return int(max(values, default=policy.GUIDE_BULK_TIMEOUT_MICROS))

    def _probed(self, size: int) -> _Tuning:
        """A short closed loop that fills two batches of this size, the timeout out of the way."""
        clients = self._scenario.load.concurrency
        if clients is None:
            clients = min(max(math.ceil(2 * size / self._rows), 2), policy.PROBE_CLIENTS_MAX)
            who = f"{clients} clients fill two"
        else:
            who = f"{clients} clients, as the scenario has, fill two or more"
        ask = self._ask(
            size,
            policy.GUIDE_FILLING_TIMEOUT_MICROS,
            reason=f"guide, {self._device}: batches of {size} rows, always full; {who}",
            clients=clients,
        )
        if ask is None or not self._outlook.may_propose(policy.RULE_PROBE_S):
            return []
        return [(yield ask)]

    def _sizes(self) -> list[int]:
        """Sizes to try, rising: those of the space or doublings, as far as the clients of a closed loop fill two."""
        fixed = self._scenario.fixed.get("max_batch_size")
        if isinstance(fixed, int):
            return [fixed]
        knob = self._scenario.search.space.get("max_batch_size")
        if knob is not None:
            sizes = sorted(
                {int(value) for value in knob.values if isinstance(value, int) and value >= self._rows}
            )
        else:
            sizes = [self._rows << power for power in range(policy.GUIDE_LARGEST_ROWS.bit_length())]
            sizes = [size for size in sizes if size < DEFAULT_MAX_BATCH_SIZE] + [DEFAULT_MAX_BATCH_SIZE]
        bound = self._rows_bound()
        return [size for size in sizes if size <= bound] or sizes[:1]

    def _rows_bound(self) -> float:
        clients = self._scenario.load.concurrency
        return math.inf if clients is None else max(clients * self._rows / 2, self._rows)

    def loop_bound(self) -> str:
        clients = self._scenario.load.concurrency
        return (
            ""
            if clients is None
            else f"; {clients} clients fill two batches of {self._rows_bound():g} rows at most"
        )

    def _ask(
        self,
        size: int,
        timeout_micros: int,
        *,
        reason: str,
        queue_batches: int | None = None,
        clients: int | None = None,
    ) -> Ask | None:
        """A candidate under the scenario's load, or with `clients` a probe; None where what is fixed forbids it.

        `queue_batches` None: a queue that is never full.
        """
        if queue_batches is None:
            queue_batches = policy.GUIDE_LONG_QUEUE_BATCHES
        wanted = {
            "max_batch_size": size,
            "batch_timeout_micros": timeout_micros,
            "num_batch_threads": self._threads,
            "max_enqueued_batches": queue_batches,
        }
        configuration = self._configuration(wanted, out_of_the_way=clients is not None)
        if configuration is None:
            return None
        return Ask(
            configuration=configuration,
            source="guide" if clients is None else "probe",
            reason=reason,
            point=self._outlook.space.locate(configuration),
            concurrency=clients,
            duration_s=None if clients is None else policy.RULE_PROBE_S,
        )

    def _configuration(self, wanted: Mapping[str, Any], *, out_of_the_way: bool) -> Configuration | None:
        values = {**wanted, **self._outlook.space.nearest(wanted)}
        if out_of_the_way:
            values["batch_timeout_micros"] = wanted["batch_timeout_micros"]
        try:
            return self._scenario.configuration(
                {name: value for name, value in values.items() if name not in self._scenario.fixed}
            )
        except BatchingParametersError:
            return None


def best_trial(tried: Sequence[Trial], *, scenario: Scenario) -> Trial | None:
    """The feasible one with the best objective; None without any.

    Of nearly equal ones the one with the lowest p95 (to two digits), then the shortest timeout.
    """
    kept = {
        trial.number: merit(trial.objective.value, scenario)
        for trial in tried
        if trial.feasible and trial.objective
    }
    if not kept:
        return None
    equal = [
        trial
        for trial in tried
        if kept.get(trial.number, -math.inf) >= max(kept.values()) - policy.GUIDE_SAME_OBJECTIVE
    ]
    return min(
        equal,
        key=lambda trial: (
            float(f"{_p95_s(trial):.1e}"),
            in_force(trial.configuration, "batch_timeout_micros"),
        ),
    )


def _works(trial: Trial) -> bool:
    return trial.state == "complete" and out_of_memory(trial) is None


def _keeps(trial: Trial) -> bool:
    return _works(trial) and trial.feasible


def _gains(smaller: Trial, larger: Trial) -> bool:
    """Whether the larger size brings enough more rows per second."""
    return (1.0 - policy.GUIDE_ENOUGH_GAIN) * _rows_per_s(larger) > _rows_per_s(smaller)


def _rows_per_s(trial: Trial) -> float:
    return 0.0 if trial.measurement is None else trial.measurement.throughput_rows_per_s.value


def _p95_s(trial: Trial) -> float:
    return math.inf if trial.measurement is None else trial.measurement.latency_s["p95"].value
