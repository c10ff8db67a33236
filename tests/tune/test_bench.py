"""One trial at a time: early ends, servers that come to rest, failures told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import ServerGoneError
from batchtune.load.fleet import LoadInterrupted
from batchtune.load.samples import NEVER_NS, Status
from batchtune.measure.caveats import HostGuard, caveat
from batchtune.report.findings import text_of
from batchtune.target.telemetry import Counters
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.evidence.best_point import spoilt_by, trial_bottleneck
from batchtune.tune.trials.trial import Trial, TrialRequest, was_interrupted
from tests.tune.tune_fakes import SESSION, FakeClock, FakeFleet, FakeTarget, Law, scenario_of

pytestmark = pytest.mark.smoke

NO_BATCHING = Configuration(batching=None)


def run(scenario, plan, *, law=None, guard=None):
    clock = FakeClock()
    target = FakeTarget(clock, law=law or Law())
    fleet = FakeFleet(target)
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
        guard=guard,
    )
    return bench.run(plan), clock, fleet


def plan_for(configuration, **changes) -> Plan:
    own = {name: changes.pop(name) for name in ("number", "seed", "pace") if name in changes}
    request = TrialRequest(configuration=configuration, **{"source": "sampler", "reason": "", **changes})
    return Plan(**{"number": 1, "seed": 1, "request": request, **own})


def open_loop(rate, **changes):
    load = {"arrivals": "poisson", "rate": rate, "warm_up": "500ms", "duration": "4s"}
    return scenario_of(load=load, objective="latency", slo={"p95": "10ms"}, **changes)


def test_a_rate_far_beyond_what_the_server_can_do_is_given_up_early():
    found, clock, _ = run(open_loop(3000), plan_for(NO_BATCHING))
    assert found.samples.stopped_early
    assert clock() < 1000.0 + 4.5
    assert not found.trial.feasible
    assert found.trial.constraints["p95"] == 10.0


def test_a_rate_that_the_server_can_do_is_measured_to_its_end():
    found, _, _ = run(open_loop(300), plan_for(NO_BATCHING))
    assert not found.samples.stopped_early
    assert found.trial.feasible
    assert found.trial.rate_rps == pytest.approx(300, rel=0.01)
    assert found.trial.objective == found.trial.measurement.latency_s["p95"]


def test_a_trial_keeps_how_fast_the_host_was_beside_it():
    guard = HostGuard()
    found, _, _ = run(open_loop(300), plan_for(NO_BATCHING), guard=guard)
    assert found.trial.measurement.canary_s == min(guard.canaries_s) > 0.0
    assert Trial.from_dict(json.loads(json.dumps(found.trial.to_dict()))) == found.trial
    unknown, _, _ = run(open_loop(300), plan_for(NO_BATCHING))
    assert unknown.trial.measurement.canary_s is None


def test_a_probe_is_short_and_has_its_own_clients():
    found, _, fleet = run(scenario_of(), plan_for(NO_BATCHING, source="probe", concurrency=1, duration_s=1.0))
    assert found.trial.concurrency == 1
    assert fleet.jobs[0].arrivals.duration_s == pytest.approx(1.1)
    assert found.trial.measurement.latency_s["p50"].value == pytest.approx(0.0013, rel=0.01)


@pytest.mark.parametrize(("duration_s", "code"), [(None, "warm_up_short"), (1.0, "warm_up_cut")])
def test_a_short_run_is_not_advised_to_raise_the_warm_up_that_it_cuts(duration_s: float | None, code: str):
    batching = Configuration(batching=BatchingParameters(max_batch_size=8, num_batch_threads=1))
    plan = plan_for(batching, source="calibration", duration_s=duration_s)
    found, _, _ = run(scenario_of(slo={}), plan, law=Law(fixed_s=0.1))
    codes = {caveat.code for caveat in found.trial.measurement.caveats}
    assert codes & {"warm_up_short", "warm_up_cut"} == {code}


def test_a_server_that_answers_nothing_is_told_with_the_classes_of_error():
    found, _, _ = run(scenario_of(slo={}), plan_for(NO_BATCHING), law=Law(fixed_s=60.0))
    assert found.trial.state == "failed"
    assert "no request was answered: 16 × UNFINISHED" in found.trial.failure


class LateFleet(FakeFleet):
    """The load is ended before the first of its answers, all of which come; a lone request is answered at once."""

    def run(self, job, **options):
        samples = super().run(job, **options)
        if len(samples) < 2:
            return samples
        unfinished = np.full_like(samples.status, int(Status.UNFINISHED))
        never = np.full_like(samples.done_ns, NEVER_NS)
        return replace(samples, status=unfinished, done_ns=never, stopped_early=True)


def test_a_server_whose_answers_only_come_too_late_is_overloaded_and_has_not_failed():
    target = FakeTarget(FakeClock(), law=Law())
    bench = Bench(
        open_loop(300), target, LateFleet(target), on_live=lambda _plan, _live: None, now_s=target.clock
    )
    trial = bench.run(plan_for(NO_BATCHING, source="load")).trial
    assert (trial.state, trial.failure, trial.feasible) == ("complete", None, False)
    assert trial.measurement.verdict == "FAIL"


def test_a_server_that_answers_nothing_has_failed_also_beside_a_slow_client():
    """And not "INVALID: the load generator was the limit" beside "no request was answered"."""

    class Slow(HostGuard):
        def end(self, **_used: Any) -> Any:
            return SimpleNamespace(
                caveats=lambda: (caveat("client_throttled", paused_ratio=0.2),), canary_s=None
            )

    found, _, _ = run(scenario_of(slo={}), plan_for(NO_BATCHING), law=Law(fixed_s=60.0), guard=Slow())
    assert found.trial.measurement.verdict == "FAIL"
    assert text_of(found.trial.measurement.verdict_reason) == found.trial.failure
    assert spoilt_by(found.trial) is None
    assert trial_bottleneck(found.trial) is None


def test_a_capacity_search_that_overwhelms_the_server_is_an_answer_not_a_failure():
    load = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s"}
    scenario = scenario_of(load=load, objective="capacity", slo={"p95": "10ms"})
    found, _, _ = run(scenario, plan_for(NO_BATCHING, source="variant"), law=Law(fixed_s=60.0))
    assert found.trial.state == "complete"
    assert found.trial.objective is None
    assert not found.trial.feasible
    assert found.trial.probes


def test_requests_are_encoded_once_for_all_trials():
    scenario = scenario_of()
    clock = FakeClock()
    target = FakeTarget(clock)
    fleet = FakeFleet(target)
    bench = Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, now_s=clock)
    for size in (1, 8):
        bench.run(plan_for(Configuration(batching=BatchingParameters(max_batch_size=size))))
    assert fleet.jobs[0].requests is fleet.jobs[1].requests


def test_a_fixed_number_of_requests_counts_from_the_start_to_the_last_answer():
    load = {
        "arrivals": "closed",
        "concurrency": 1,
        "requests": 100,
        "warm_up": "200ms",
        "duration": "10s",
    }
    found, _, fleet = run(scenario_of(load=load), plan_for(NO_BATCHING))
    warm_up, counted = (job.arrivals for job in fleet.jobs)
    assert (warm_up.duration_s, warm_up.requests_max) == (0.2, None)
    assert (counted.duration_s, counted.requests_max) == (10.0, 100)
    assert found.trial.measurement.requests == 100
    assert found.trial.measurement.window_s == pytest.approx(100 * 0.0013, rel=0.01)
    assert found.trial.measurement.throughput_rps.value == pytest.approx(1 / 0.0013, rel=0.01)
    assert "requests_cut" not in {one.code for one in found.trial.measurement.caveats}


def test_a_number_of_requests_that_the_duration_cuts_is_told():
    load = {"arrivals": "closed", "concurrency": 1, "requests": 1000, "warm_up": "0s", "duration": "100ms"}
    found, _, _ = run(scenario_of(load=load), plan_for(NO_BATCHING))
    measured = found.trial.measurement
    cut = next(one for one in measured.caveats if one.code == "requests_cut")
    assert text_of(cut) == f"{measured.requests} of 1,000 requests were sent when load.duration ended the run"


def test_an_answer_after_the_measured_time_is_overload_and_no_failure():
    load = {"arrivals": "closed", "concurrency": 16, "warm_up": "100ms", "duration": "1s"}
    found, _, _ = run(
        scenario_of(load=load), plan_for(NO_BATCHING), law=Law(fixed_s=1.5, unbatched_threads=16)
    )
    assert found.trial.state == "complete"


def test_a_run_that_waits_only_as_long_as_the_slo_cares_calls_silence_overload():
    found, _, _ = run(open_loop(10), plan_for(NO_BATCHING), law=Law(fixed_s=30.0))
    assert found.trial.state == "complete"
    assert not found.trial.feasible


def overwhelming(target):
    """A bench whose load ends early, and which then waits until the server has come to rest."""
    clock = target.clock
    return Bench(
        open_loop(3000),
        target,
        FakeFleet(target),
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
    )


@dataclass
class TwoServers(FakeTarget):
    """Behind a balancer that asks them in turn."""

    readings: int = 0

    def counters(self):
        self.readings += 1
        batches = {(): 100.0 - 50.0 * (self.readings % 2)}
        return replace(super().counters(), series={f"{SESSION}wrapped_run_count": batches})


def test_counters_that_fall_do_not_say_that_a_server_has_come_to_rest():
    target = TwoServers(FakeClock())
    bench = overwhelming(target)
    assert bench.run(plan_for(NO_BATCHING)).samples.stopped_early
    assert target.readings > 6


@dataclass
class WithinABatch(FakeTarget):
    """Executes one more batch until `busy_until_s` of the clock; counted only when it has ended, as `shows` tells."""

    busy_until_s: float = 60.0
    shows: str = "device"
    read_at_s: list[float] = field(default_factory=list)

    def counters(self):
        now_s = self.clock()
        self.read_at_s.append(now_s)
        ended = now_s >= self.busy_until_s
        series = {f"{SESSION}wrapped_run_count": {(): 1.0 + ended}}
        series[":batchtune:serving:batch_execution_count"] = {(("batch_size", "9"),): 1.0 + ended}
        if self.shows == "gauges":
            series[":batchtune:serving:requests_inside"] = {(): float(not ended)}
        if self.shows == "device":
            busy_micros = 1e6 * min(now_s, self.busy_until_s)
            series[":batchtune:serving:device_busy_micros_total"] = {(): busy_micros}
        cpu_s = min(now_s, self.busy_until_s) if self.shows == "cpu" else None
        return replace(super().counters(), series=series, server_cpu_s=cpu_s)


@pytest.mark.parametrize("shows", ["device", "cpu", "gauges"])
def test_a_server_within_a_batch_longer_than_expected_has_not_come_to_rest(shows):
    clock = FakeClock()
    target = WithinABatch(clock, shows=shows, busy_until_s=clock() + 6.0)
    bench = overwhelming(target)
    assert bench.run(plan_for(NO_BATCHING)).samples.stopped_early
    assert target.read_at_s[-1] >= target.busy_until_s


def test_a_server_that_computes_even_when_idle_is_waited_for_once():
    target = WithinABatch(FakeClock(), shows="cpu", busy_until_s=1e9)
    bench = overwhelming(target)
    readings = []
    for _ in range(2):
        assert bench.run(plan_for(NO_BATCHING)).samples.stopped_early
        readings.append(len(target.read_at_s))
    assert readings[0] > 50
    assert readings[1] - readings[0] < 10


def test_a_trial_keeps_the_start_up_of_the_server_that_was_launched_for_it():
    clock = FakeClock()
    target = FakeTarget(clock, apply_s=0.7)
    fleet = FakeFleet(target)
    bench = Bench(
        scenario_of(), target, fleet, on_live=lambda _plan, _live: None, now_s=clock, sleep=clock.sleep
    )
    first, second = (bench.run(plan_for(NO_BATCHING)).trial for _ in range(2))
    assert (first.startup_s, second.startup_s) == (0.7, None)
    assert Trial.from_dict(json.loads(json.dumps(first.to_dict()))).startup_s == 0.7


class HangingFleet(FakeFleet):
    """A server that answers nothing to a load that it gets with the configurations `hangs_with`."""

    hangs_with: tuple[Configuration, ...] = ()

    def run(self, job, **options):
        samples = super().run(job, **options)
        if self._target.in_force not in self.hangs_with:
            return samples
        return replace(
            samples,
            status=np.full_like(samples.status, int(Status.UNFINISHED)),
            done_ns=np.full_like(samples.done_ns, NEVER_NS),
        )


def hanging(scenario):
    clock = FakeClock()
    target = FakeTarget(clock, law=Law())
    fleet = HangingFleet(target)
    bench = Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, now_s=clock, sleep=clock.sleep)
    return bench, fleet, target


def running(scenario):
    """The scenario of a server that runs already."""
    return scenario.model_copy(update={"target": scenario.target.model_copy(update={"launch": None})})


BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))


def test_a_running_server_that_answers_nothing_whatever_its_configuration_is_gone():
    bench, fleet, target = hanging(running(http_scenario()))
    assert bench.run(plan_for(NO_BATCHING)).trial.state == "complete"
    fleet.hangs_with = (NO_BATCHING, BATCHED)
    with pytest.raises(ServerGoneError, match="stopped answering"):
        bench.run(plan_for(BATCHED))
    assert target.applied[-1] == NO_BATCHING


def test_a_configuration_under_which_a_running_server_answers_nothing_is_a_trial_like_any_other():
    bench, fleet, _ = hanging(running(http_scenario()))
    bench.run(plan_for(NO_BATCHING))
    fleet.hangs_with = (BATCHED,)
    assert not bench.run(plan_for(BATCHED)).trial.feasible
    assert bench.run(plan_for(NO_BATCHING)).trial.feasible


def test_a_launched_server_that_answers_nothing_is_not_gone_since_it_is_launched_again():
    bench, fleet, target = hanging(http_scenario())
    bench.run(plan_for(NO_BATCHING))
    fleet.hangs_with = (NO_BATCHING, BATCHED)
    assert not bench.run(plan_for(BATCHED)).trial.feasible
    assert target.applied == [NO_BATCHING, BATCHED]


def http_scenario(**metrics):
    target = {
        "kind": "http",
        "url": "http://h:1",
        "grpc_url": "h:2",
        "launch": ["serve"],
        "set": {"env": {"n": "N"}},
    }
    if metrics:
        target["metrics"] = {"url": "http://h:1/metrics", "batch_size": "rows", **metrics}
    return open_loop(
        300,
        target=target,
        request={"protocol": "kserve_grpc"},
        search={"budget": {"trials": 2}, "space": {"n": [1, 2]}},
    )


def test_a_server_of_kind_http_that_counts_nothing_needs_target_metrics_and_not_a_flag_of_tf_serving():
    found, _, _ = run(http_scenario(), plan_for(NO_BATCHING))
    codes = {note.code for note in found.trial.measurement.caveats}
    assert "no_target_metrics" in codes
    assert "no_server_counters" not in codes


class MisnamedPage(FakeTarget):
    """A server whose metrics page lacks a name of the scenario's."""

    def counters(self) -> Counters:
        return replace(super().counters(), series={}, missing={"batch_size": "batch_rows", "queue": ""})


def test_a_name_that_the_metrics_page_lacks_is_told_once_a_load_has_run():
    scenario = http_scenario(queue="zzz")
    target = MisnamedPage(FakeClock(), law=Law())
    bench = Bench(scenario, target, FakeFleet(target), on_live=lambda _plan, _live: None, now_s=target.clock)
    measured = bench.run(plan_for(BATCHED)).trial.measurement
    (note,) = (note for note in measured.caveats if note.code == "missing_metrics")
    assert text_of(note) == (
        "the server's metrics page lacks rows (target.metrics.batch_size; did you mean batch_rows?); "
        "zzz (target.metrics.queue)"
    )
    assert "no_target_metrics" not in {note.code for note in measured.caveats}


class SlowPage(FakeTarget):
    """A server whose metrics page shows what was counted once `every_s` have passed without a load."""

    every_s = 1.0
    shown: Counters | None = None
    idle_since_s = 0.0

    def counters(self) -> Counters:
        now = super().counters()
        if self.shown is None or now.monotonic_s > self.idle_since_s + 0.99 * self.every_s:
            self.shown = now
        return replace(now, series=self.shown.series)


class SlowPageFleet(FakeFleet):
    def run(self, job, **options):
        samples = super().run(job, **options)
        self._target.idle_since_s = self._target.clock()
        return samples


def run_slow(scenario):
    """Two trials, the second of other batches, of a server that changes its metrics as the scenario says."""
    clock = FakeClock()
    target = SlowPage(clock, law=Law())
    target.every_s = scenario.target.metrics.every_s
    bench = Bench(
        scenario,
        target,
        SlowPageFleet(target),
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
    )
    sizes = (BatchingParameters(max_batch_size=size, batch_timeout_micros=20_000) for size in (64, 1))
    return [bench.run(plan_for(Configuration(batching=size))).trial.measurement for size in sizes]


def test_metrics_that_change_slowly_are_read_once_they_include_the_run():
    batched, single = run_slow(http_scenario(every="1s"))
    assert batched.server.mean_batch_rows > 2.0
    assert single.server.mean_batch_rows == 1.0
    assert single.server.duration_s == pytest.approx(4.5, abs=0.1)


def test_metrics_that_change_more_slowly_than_a_run_lasts_leave_the_mean_batch_unknown():
    for measured in run_slow(http_scenario(every="10s")):
        assert measured.server.mean_batch_rows is None
        (note,) = (note for note in measured.caveats if note.code == "slow_metrics")
        assert text_of(note).startswith(
            "the server's metrics change every 10 s, too slowly for a run of 4.5 s"
        )


class InterruptedFleet(FakeFleet):
    """Ctrl-C comes after `after_s` seconds of each load; what is due in the last second before has no answer."""

    after_s = 3.0

    def run(self, job, **options):
        samples = super().run(job, **options)
        due_s = samples.due_ns / 1e9
        kept = samples.between(0, int(np.count_nonzero(due_s < self.after_s)))
        left = kept.due_ns / 1e9 >= self.after_s - 1.0
        status = np.where(left, np.uint8(Status.UNFINISHED), kept.status)
        done_ns = np.where(left, NEVER_NS, kept.done_ns)
        raise LoadInterrupted(replace(kept, status=status, done_ns=done_ns, stopped_early=True))


def interrupted_bench(after_s: float) -> Bench:
    clock = FakeClock()
    target = FakeTarget(clock)
    fleet = InterruptedFleet(target)
    fleet.after_s = after_s
    load = {"arrivals": "poisson", "rate": 200, "warm_up": "500ms", "duration": "8s"}
    scenario = scenario_of(load=load, objective="latency", slo={"p95": "1s"})
    return Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, now_s=clock, sleep=clock.sleep)


def test_an_interrupted_load_test_keeps_what_was_answered_and_does_not_pass() -> None:
    finished = interrupted_bench(3.0).run(plan_for(NO_BATCHING, source="load"))
    measured = finished.trial.measurement
    assert was_interrupted(finished.trial)
    assert measured.verdict == "UNSURE"
    assert text_of(measured.verdict_reason) == "the run was interrupted before its end"
    assert measured.errors == {}
    assert measured.window_s == pytest.approx(1.5, abs=0.05)
    assert {noted.code for noted in measured.caveats}.isdisjoint({"stopped_early", "nothing_measured"})


@pytest.mark.parametrize(("after_s", "source"), [(2.2, "load"), (3.0, "sampler")])
def test_an_interrupted_run_that_is_short_or_of_a_sweep_is_not_kept(after_s: float, source: str) -> None:
    with pytest.raises(LoadInterrupted):
        interrupted_bench(after_s).run(plan_for(NO_BATCHING, source=source))
