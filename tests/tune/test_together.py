"""Several models are loaded side by side: none begins before all can, and one that fails ends the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import MeasurementInvalidError, UsageError
from batchtune.load.record.samples import Samples
from batchtune.load.worker.job import LoadJob
from batchtune.measure.validity.host import HostNoise
from batchtune.tune.together import ModelLoad, load_together
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, scenario_of

BATCHED = Configuration(batching=BatchingParameters(max_batch_size=8, num_batch_threads=1))


class Watched:
    """A fake fleet that notes when it begins, after what the test wants done."""

    def __init__(self, target: FakeTarget, begun: list[str], name: str, first: Callable[..., None]) -> None:
        self._fleet = FakeFleet(target)
        self._begun, self._name, self._first = begun, name, first

    def retire(self, _name: str, _why: str) -> bool:
        return False

    def run(self, job: LoadJob, *, on_progress: Any = None, should_stop: Any = None) -> Samples:
        self._begun.append(self._name)
        self._first(should_stop)
        return self._fleet.run(job, on_progress=on_progress, should_stop=None)


def loads(begun: list[str], **first: Callable[..., None]) -> list[ModelLoad]:
    made = []
    for name, action in first.items():
        target = FakeTarget(FakeClock())
        target.apply(BATCHED)
        made.append(
            ModelLoad(
                name=name,
                scenario=scenario_of(),
                configuration=BATCHED,
                target=target,
                fleet=Watched(target, begun, name, action),
            )
        )
    return made


def nothing(_should_stop: Any) -> None:
    """Begin at once."""


def test_every_model_has_a_trial_of_its_own_and_the_server_is_told_apart() -> None:
    begun: list[str] = []
    done = load_together(loads(begun, a=nothing, b=nothing), first_number=3)
    assert sorted(begun) == ["a", "b"]
    assert [(one.number, one.reason, one.source, one.failure) for one in done.trials] == [
        (3, "a", "load", None),
        (4, "b", "load", None),
    ]
    assert all(one.measurement is not None and one.measurement.server is None for one in done.trials)
    assert done.server.duration_s > 0
    (alone,) = load_together(loads(begun, a=nothing), reason="{name} alone").trials
    assert (alone.number, alone.reason) == (1, "a alone")
    assert alone.measurement is not None
    assert alone.measurement.server is not None


def test_none_begins_before_the_requests_of_all_are_ready() -> None:
    """The second target tells its signature only when the first, were it not held back, would have begun."""
    begun: list[str] = []
    first, second = loads(begun, a=nothing, b=nothing)
    asked = threading.Event()
    signature = second.target.signature

    def late(name: str) -> Any:
        assert asked.wait(5)
        threading.Event().wait(0.03)  # time enough for the first to begin
        assert not begun
        return signature(name)

    second.target.signature = late  # type: ignore[method-assign]
    early = first.target.signature

    def note(name: str) -> Any:
        asked.set()
        return early(name)

    first.target.signature = note  # type: ignore[method-assign]
    load_together([first, second])
    assert sorted(begun) == ["a", "b"]


def test_requests_that_do_not_fit_a_model_name_it_and_nothing_is_sent() -> None:
    begun: list[str] = []
    first, second = loads(begun, a=nothing, b=nothing)

    def refuse(_name: str) -> Any:
        raise UsageError("request.shapes: open", hint="give it")

    second.target.signature = refuse  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"b: request\.shapes: open") as caught:
        load_together([first, second])
    assert caught.value.hint == "give it"
    assert begun == []


def test_a_load_generator_that_dies_ends_the_others() -> None:
    running, stopped = threading.Event(), threading.Event()

    def die(_should_stop: Any) -> None:
        assert running.wait(10.0)
        raise MeasurementInvalidError("load worker 0 died")

    def until_stopped(should_stop: Any) -> None:
        running.set()
        while not should_stop(None):
            stopped.wait(0.001)
        stopped.set()

    begun: list[str] = []
    with pytest.raises(MeasurementInvalidError, match="load worker 0 died"):
        load_together(loads(begun, a=die, b=until_stopped))
    assert stopped.is_set()


class WatchedHost:
    """A host guard that notes when it is read."""

    def __init__(self, begun: list[str], noise: HostNoise) -> None:
        self.begun, self.noise = begun, noise

    def begin(self, *, cpus: object = None) -> None:
        self.begun.append("guard")

    def end(self, *, loaded_cpu_s: float | None = None) -> HostNoise:
        self.begun.append("end")
        return self.noise


@pytest.mark.parametrize(("steal_ratio", "slo"), [(0.3, "p95: 1us"), (0.3, "p95: 100s"), (0.0, "p95: 1us")])
def test_a_disturbed_host_is_told_of_every_model_and_takes_the_verdict_of_a_late_one(
    steal_ratio: float, slo: str
) -> None:
    """The guard looks once all requests are ready, and once more after the last answer of all."""
    begun: list[str] = []
    noise = HostNoise(steal_ratio=steal_ratio, pressure_ratio=0.0, canary_change=0.0)
    limits = {"p95": slo.removeprefix("p95: ")}
    pair = [
        replace(
            load,
            scenario=scenario_of(
                slo=limits, load={"arrivals": "constant", "rate": "50/s"}, objective="latency"
            ),
        )
        for load in loads(begun, a=nothing, b=nothing)
    ]
    done = load_together(pair, guard=WatchedHost(begun, noise))  # type: ignore[arg-type]
    assert (begun[0], sorted(begun[1:3]), begun[3]) == ("guard", ["a", "b"], "end")
    runs = [trial.measurement for trial in done.trials]
    told = [run is not None and "host_steal" in {caveat.code for caveat in run.caveats} for run in runs]
    assert told == [steal_ratio > 0.02] * 2
    verdicts = {None if run is None else run.verdict for run in runs}
    assert ("NOISY" in verdicts) == (steal_ratio > 0.02 and slo == "p95: 1us"), verdicts
