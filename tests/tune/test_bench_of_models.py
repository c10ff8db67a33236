"""Several models are loaded side by side: none begins before all can, and one that fails ends the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from batchtune.errors import MeasurementInvalidError, UsageError
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import Samples
from batchtune.measure.caveats import HostNoise
from batchtune.scenario.reader import parse_scenario
from batchtune.target import tfserving
from batchtune.tune.trials.trial import FinishedTrial
from tests.tune.tune_fakes import (
    SIGNATURE,
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    batches_of,
    bench_of,
    planned,
)


class Watched(FakeFleet):
    """A fake fleet that notes when it begins, after what the test wants done."""

    def __init__(self, target: FakeTarget, begun: list[str], name: str, first: Callable[..., None]) -> None:
        super().__init__(target)
        self._begun, self._name, self._first = begun, name, first

    def retire(self, _name: str, _why: str) -> bool:
        return False

    def run(self, job: LoadJob, *, on_progress: Any = None, should_stop: Any = None) -> Samples:
        self._begun.append(self._name)
        self._first(should_stop)
        return super().run(job, on_progress=on_progress)


TEXT = """\
name: two
target: {models: [{name: a, model: a}, {name: b, model: b, rate: 40/s, slo: {p95: 5s}}]}
load: {arrivals: constant, rate: 100/s, duration: 1s, warm_up: 0s, seed: 3}
request: {protocol: grpc}
slo: {p95: LIMIT}
objective: latency
"""


class FakeServer(FakeTarget):
    """A fake target that serves several models."""

    batches_inside: ClassVar[Mapping[str, str]] = {}


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """What is done, by model, before the signature of a model is told."""
    first: dict[str, Callable[[], Any]] = {}

    def tell(endpoint: Any, _name: str) -> Any:
        first.get(endpoint.model_name, lambda: None)()
        return SIGNATURE

    monkeypatch.setattr(tfserving, "read_signature", tell)
    return first


def nothing(_should_stop: Any) -> None:
    """Begin at once."""


def loaded(
    begun: list[str],
    *,
    guard: Any = None,
    limit: str = "100s",
    target: FakeServer | None = None,
    first: Mapping[str, Callable[..., None]] = MappingProxyType({"a": nothing, "b": nothing}),
    **asked: Any,
) -> FinishedTrial:
    """A trial of both models; `begun` tells whose load began, after its own of `first`."""
    target = target or FakeServer(FakeClock())
    fleets = {name: Watched(target, begun, name, action) for name, action in first.items()}
    scenario = parse_scenario(TEXT.replace("LIMIT", limit))
    bench = bench_of(scenario, target, fleets, guard=guard)
    asked = {"source": "load", "reason": "now", "block": 2, **asked}
    return bench.run(planned(batches_of(8, timeout_micros=None), number=3, seed=7, **asked))


@pytest.mark.usefixtures("signatures")
def test_every_model_has_a_part_of_its_own_and_the_server_is_told_apart() -> None:
    begun: list[str] = []
    done = loaded(begun)
    assert sorted(begun) == ["a", "b"]
    trial = done.trial
    assert [(part.number, part.reason, part.model, part.seed) for part in trial.parts.values()] == [
        (3, "now/a", "a", 7),
        (4, "now/b", "b", 8),
    ]
    assert (trial.number, trial.last_number, trial.state, trial.feasible) == (3, 4, "complete", True)
    assert [len(done.samples[name]) for name in ("a", "b")] == [100, 40]
    assert {name: run.offered_rps for name, run in trial.measurements.items()} == {"a": 100.0, "b": 40.0}
    assert all(run.server is None for run in trial.measurements.values())
    assert trial.server is not None


@pytest.mark.usefixtures("signatures")
def test_a_lone_client_of_each_is_loaded_once_however_few_answers_one_gets() -> None:
    """More answers of one would wait for the others, whose loads have ended."""
    begun: list[str] = []
    target = FakeServer(FakeClock(), law=Law(fixed_s=0.2))
    trial = loaded(begun, source="probe", concurrency=1, duration_s=0.5, target=target).trial
    assert sorted(begun) == ["a", "b"]
    assert trial.state == "complete"
    assert {run.concurrency for run in trial.measurements.values()} == {1}
    assert {part.request.rate_rps for part in trial.parts.values()} == {None}


@pytest.mark.usefixtures("signatures")
def test_one_of_several_is_loaded_alone_at_a_multiple_of_its_rate_and_has_the_account_of_the_server() -> None:
    begun: list[str] = []
    trial = loaded(begun, models=("b",), scale=1.5).trial
    assert begun == ["b"]
    (part,) = trial.parts.values()
    assert (part.number, part.reason, part.request.rate_rps) == (3, "now/b", 60.0)
    assert (part.measurement.offered_rps, part.measurement.server is None) == (60.0, False)


@pytest.mark.usefixtures("signatures")
def test_a_server_that_refuses_fails_every_part() -> None:
    begun: list[str] = []
    target = FakeServer(FakeClock(), refuses=lambda _configuration: "no such parameter")
    done = loaded(begun, target=target)
    assert begun == []
    assert (done.trial.state, done.trial.failure, done.samples) == ("failed", "no such parameter", {})
    assert {part.failure for part in done.trial.parts.values()} == {"no such parameter"}


def test_none_begins_before_the_requests_of_all_are_ready(
    signatures: dict[str, Callable[[], Any]],
) -> None:
    """The second model tells its signature only when the first, were it not held back, would have begun."""
    begun: list[str] = []
    asked = threading.Event()

    def late() -> None:
        assert asked.wait(5)
        threading.Event().wait(0.03)  # time enough for the first to begin
        assert not begun

    signatures["a"], signatures["b"] = asked.set, late
    loaded(begun)
    assert sorted(begun) == ["a", "b"]


def test_requests_that_do_not_fit_a_model_name_it_and_nothing_is_sent(
    signatures: dict[str, Callable[[], Any]],
) -> None:
    begun: list[str] = []

    def refuse() -> None:
        raise UsageError("request.shapes: open", hint="give it")

    signatures["b"] = refuse
    with pytest.raises(UsageError, match=r"b: request\.shapes: open") as caught:
        loaded(begun)
    assert caught.value.hint == "give it"
    assert begun == []


@pytest.mark.usefixtures("signatures")
def test_a_load_generator_that_dies_ends_the_others() -> None:
    running, stopped = threading.Event(), threading.Event()

    def die(_should_stop: Any) -> None:
        assert running.wait(10.0)
        raise MeasurementInvalidError("load worker 0 died")

    def until_stopped(should_stop: Any) -> None:
        running.set()
        while not should_stop(SimpleNamespace(elapsed_s=0.0)):
            stopped.wait(0.001)
        stopped.set()

    with pytest.raises(MeasurementInvalidError, match="load worker 0 died"):
        loaded([], first={"a": die, "b": until_stopped})
    assert stopped.is_set()


class WatchedHost:
    """A host guard that notes when it is read."""

    def __init__(self, begun: list[str], noise: HostNoise) -> None:
        self.begun, self.noise = begun, noise

    def begin(self, *, cpus: object = None) -> None:
        self.begun.append("guard")

    def end(self, *, server_cpu_s: float | None = None, client_cpu_s: float = 0.0) -> HostNoise:
        self.begun.append("end")
        assert client_cpu_s == pytest.approx(0.002)  # of both
        return self.noise


@pytest.mark.usefixtures("signatures")
@pytest.mark.parametrize(("steal_ratio", "limit"), [(0.3, "1us"), (0.3, "100s"), (0.0, "1us")])
def test_a_disturbed_host_is_told_of_every_model_and_takes_the_verdict_of_a_late_one(
    steal_ratio: float, limit: str
) -> None:
    """The guard looks once all requests are ready, and once more after the last answer of all."""
    begun: list[str] = []
    noise = HostNoise(steal_ratio=steal_ratio, pressure_ratio=0.0, canary_change=0.0)
    trial = loaded(begun, guard=WatchedHost(begun, noise), limit=limit).trial
    assert (begun[0], sorted(begun[1:3]), begun[3]) == ("guard", ["a", "b"], "end")
    runs = list(trial.measurements.values())
    told = ["host_steal" in {caveat.code for caveat in run.caveats} for run in runs]
    assert told == [steal_ratio > 0.02] * 2
    assert (runs[0].verdict == "NOISY") == (steal_ratio > 0.02 and limit == "1us"), runs[0].verdict
