"""Several models are loaded side by side: none begins before all can, and one that fails ends the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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

TEXT = """\
name: two
target: {models: [{name: a, model: a}, {name: b, model: b, rate: 40/s, slo: {p95: 5s}}]}
load: {arrivals: constant, rate: 100/s, duration: 1s, warm_up: 0s, seed: 3}
request: {protocol: grpc}
slo: {p95: LIMIT}
objective: latency
"""


class Watched(FakeFleet):
    """A fake fleet that tells when it begins, and how it may be asked to stop."""

    begins: Callable[[Any], None]

    def retire(self, _name: str, _why: str) -> bool:
        return False

    def run(self, job: LoadJob, *, on_progress: Any = None, should_stop: Any = None) -> Samples:
        self.begins(should_stop)
        return super().run(job, on_progress=on_progress)


class Loads:
    """Trials of both models, what happened in its order, and what is done first: before a model tells its signature,
    before its load begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.before_signature: dict[str, Callable[[], Any]] = {}
        self.before_load: dict[str, Callable[[Any], None]] = {}
        monkeypatch.setattr(tfserving, "read_signature", self._tell)

    def _tell(self, endpoint: Any, _name: str) -> Any:
        self.before_signature.get(endpoint.model_name, lambda: None)()
        return SIGNATURE

    def _fleet(self, target: FakeTarget, name: str) -> Watched:
        def begins(should_stop: Any) -> None:
            self.order.append(name)
            self.before_load.get(name, lambda _should_stop: None)(should_stop)

        fleet = Watched(target)
        fleet.begins = begins
        return fleet

    def run(self, *, guard: Any = None, limit: str = "100s", asked: Any = None, **fake: Any) -> FinishedTrial:
        target = FakeTarget(FakeClock(), **fake)
        target.batches_inside = {}  # type: ignore[attr-defined]
        fleets = {name: self._fleet(target, name) for name in ("a", "b")}
        bench = bench_of(parse_scenario(TEXT.replace("LIMIT", limit)), target, fleets, guard=guard)
        request = {"source": "load", "reason": "now", "block": 2, **(asked or {})}
        return bench.run(planned(batches_of(8, timeout_micros=None), number=3, seed=7, **request))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def test_every_model_has_a_part_of_its_own_and_the_server_is_told_apart(loads: Loads) -> None:
    done = loads.run()
    assert sorted(loads.order) == ["a", "b"]
    trial = done.trial
    parts = [(part.number, part.reason, part.model, part.seed) for part in trial.parts.values()]
    assert parts == [(3, "now/a", "a", 7), (4, "now/b", "b", 8)]
    assert (trial.number, trial.last_number, trial.state, trial.feasible) == (3, 4, "complete", True)
    assert {name: len(samples) for name, samples in done.samples.items()} == {"a": 100, "b": 40}
    assert {name: run.offered_rps for name, run in trial.measurements.items()} == {"a": 100.0, "b": 40.0}
    assert all(run.server is None for run in trial.measurements.values())
    assert trial.server is not None


def test_a_lone_client_of_each_is_loaded_once_however_few_answers_one_gets(loads: Loads) -> None:
    """More answers of one would wait for the others, whose loads have ended."""
    lone = {"source": "probe", "concurrency": 1, "duration_s": 0.5}
    trial = loads.run(asked=lone, law=Law(fixed_s=0.2)).trial
    assert (sorted(loads.order), trial.state) == (["a", "b"], "complete")
    assert {run.concurrency for run in trial.measurements.values()} == {1}
    assert {part.request.rate_rps for part in trial.parts.values()} == {None}


def test_one_of_several_is_loaded_alone_at_a_multiple_of_its_rate_and_has_the_account_of_the_server(
    loads: Loads,
) -> None:
    trial = loads.run(asked={"models": ("b",), "scale": 1.5}).trial
    assert loads.order == ["b"]
    (part,) = trial.parts.values()
    assert (part.number, part.reason, part.request.rate_rps) == (3, "now/b", 60.0)
    assert (part.measurement.offered_rps, part.measurement.server is None) == (60.0, False)


def test_a_server_that_refuses_fails_every_part(loads: Loads) -> None:
    done = loads.run(refuses=lambda _configuration: "no such parameter")
    assert loads.order == []
    assert (done.trial.state, done.trial.failure, done.samples) == ("failed", "no such parameter", {})
    assert {part.failure for part in done.trial.parts.values()} == {"no such parameter"}


def test_none_begins_before_the_requests_of_all_are_ready(loads: Loads) -> None:
    """The second model tells its signature only when the first, were it not held back, would have begun."""
    asked = threading.Event()

    def late() -> None:
        assert asked.wait(5)
        threading.Event().wait(0.03)  # time enough for the first to begin
        assert not loads.order

    loads.before_signature.update(a=asked.set, b=late)
    loads.run()
    assert sorted(loads.order) == ["a", "b"]


def test_requests_that_do_not_fit_a_model_name_it_and_nothing_is_sent(loads: Loads) -> None:
    def refuse() -> None:
        raise UsageError("request.shapes: open", hint="give it")

    loads.before_signature["b"] = refuse
    with pytest.raises(UsageError, match=r"b: request\.shapes: open") as caught:
        loads.run()
    assert (caught.value.hint, loads.order) == ("give it", [])


def test_a_load_generator_that_dies_ends_the_others(loads: Loads) -> None:
    running, stopped = threading.Event(), threading.Event()

    def die(_should_stop: Any) -> None:
        assert running.wait(10.0)
        raise MeasurementInvalidError("load worker 0 died")

    def until_stopped(should_stop: Any) -> None:
        running.set()
        while not should_stop(SimpleNamespace(elapsed_s=0.0)):
            stopped.wait(0.001)
        stopped.set()

    loads.before_load.update(a=die, b=until_stopped)
    with pytest.raises(MeasurementInvalidError, match="load worker 0 died"):
        loads.run()
    assert stopped.is_set()


@pytest.mark.parametrize(("steal_ratio", "limit"), [(0.3, "1us"), (0.3, "100s"), (0.0, "1us")])
def test_a_disturbed_host_is_told_of_every_model_and_takes_the_verdict_of_a_late_one(
    loads: Loads, steal_ratio: float, limit: str
) -> None:
    """The guard looks once all requests are ready, and once more after the last answer of all."""

    def end(*, client_cpu_s: float = 0.0, **_used: Any) -> HostNoise:
        loads.order.append("end")
        assert client_cpu_s == pytest.approx(0.002)  # of both
        return HostNoise(steal_ratio=steal_ratio, pressure_ratio=0.0, canary_change=0.0)

    guard = SimpleNamespace(begin=lambda **_cpus: loads.order.append("guard"), end=end)
    trial = loads.run(guard=guard, limit=limit).trial
    assert (loads.order[0], sorted(loads.order[1:3]), loads.order[3]) == ("guard", ["a", "b"], "end")
    runs = list(trial.measurements.values())
    told = ["host_steal" in {caveat.code for caveat in run.caveats} for run in runs]
    assert told == [steal_ratio > 0.02] * 2
    assert (runs[0].verdict == "NOISY") == (steal_ratio > 0.02 and limit == "1us"), runs[0].verdict
