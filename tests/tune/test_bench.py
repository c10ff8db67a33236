"""One trial at a time: early ends, servers that come to rest, failures told."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration
from batchtune.errors import ServerGoneError
from batchtune.load.fleet import LoadInterrupted
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.caveats import HostGuard, caveat
from batchtune.report.findings import text_of
from batchtune.target.telemetry import Counters
from batchtune.tune.evidence.best_point import spoilt_by, trial_bottleneck
from batchtune.tune.trials.trial import Trial, was_interrupted
from tests.tune.tune_fakes import (
    OURS,
    SESSION,
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    batches_of,
    bench_of,
    capacity_scenario,
    planned,
    scenario_of,
)

pytestmark = pytest.mark.smoke

NO_BATCHING = Configuration(batching=None)
BATCHED = batches_of(4)


def run(scenario, plan=None, *, law=None, alter=None, **options):
    """The trial, with its samples and jobs."""
    target = FakeTarget(FakeClock(), law=law or Law())
    sender = FakeFleet(target)
    sender.alter = alter or sender.alter
    done = bench_of(scenario, target, sender, **options).run(plan or planned(NO_BATCHING))
    return done.trial, done.samples, [job.arrivals for job in sender.jobs]


def codes(trial: Trial) -> set[str]:
    return {note.code for note in trial.measurement.caveats}


def noted(measured: Any, code: str) -> str:
    """The text of its caveat of this code."""
    (note,) = (note for note in measured.caveats if note.code == code)
    return text_of(note)


def open_loop(rate, slo="10ms", duration="4s", **changes):
    load = {"arrivals": "poisson", "rate": rate, "warm_up": "500ms", "duration": duration}
    return scenario_of(load=load, objective="latency", slo={"p95": slo}, **changes)


def closed_loop(concurrency=1, **load):
    return scenario_of(load={"arrivals": "closed", "concurrency": concurrency, **load})


def test_a_rate_far_beyond_what_the_server_can_do_is_given_up_early():
    target = FakeTarget(FakeClock())
    found = bench_of(open_loop(3000), target).run(planned(NO_BATCHING))
    assert found.samples.stopped_early
    assert target.clock() < 1000.0 + 4.5
    assert (found.trial.feasible, found.trial.constraints["p95"]) == (False, 10.0)


def test_a_rate_that_the_server_can_do_is_measured_to_its_end_and_how_fast_the_host_was_beside_it():
    guard = HostGuard()
    trial, samples, _ = run(open_loop(300), guard=guard)
    assert (samples.stopped_early, trial.feasible) == (False, True)
    assert trial.rate_rps == pytest.approx(300, rel=0.01)
    assert trial.objective == trial.measurement.latency_s["p95"]
    assert trial.measurement.canary_s == min(guard.canaries_s) > 0.0
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial
    assert run(open_loop(300))[0].measurement.canary_s is None


def test_a_probe_is_short_and_has_its_own_clients():
    trial, _, (job,) = run(scenario_of(), planned(NO_BATCHING, source="probe", concurrency=1, duration_s=1.0))
    assert trial.concurrency == 1
    assert job.duration_s == pytest.approx(1.1)
    assert trial.measurement.latency_s["p50"].value == pytest.approx(0.0013, rel=0.01)


@pytest.mark.parametrize(("duration_s", "code"), [(None, "warm_up_short"), (1.0, "warm_up_cut")])
def test_a_short_run_is_not_advised_to_raise_the_warm_up_that_it_cuts(duration_s: float | None, code: str):
    plan = planned(batches_of(8), source="calibration", duration_s=duration_s)
    trial, _, _ = run(scenario_of(slo={}), plan, law=Law(fixed_s=0.1))
    assert codes(trial) & {"warm_up_short", "warm_up_cut"} == {code}


def late(samples: Samples) -> Samples:
    """The load is ended before the first of its answers, all of which come; a lone request is answered at once."""
    return samples if len(samples) < 2 else replace(unanswered(samples), stopped_early=True)


def unanswered(samples: Samples) -> Samples:
    unfinished = np.full_like(samples.status, int(Status.UNFINISHED))
    return replace(samples, status=unfinished, done_ns=np.full_like(samples.done_ns, NEVER_NS))


def test_a_server_whose_answers_only_come_too_late_is_overloaded_and_has_not_failed():
    trial, _, _ = run(open_loop(300), planned(NO_BATCHING, source="load"), alter=late)
    assert (trial.state, trial.failure, trial.feasible) == ("complete", None, False)
    assert trial.measurement.verdict == "FAIL"


def test_a_server_that_answers_nothing_has_failed_also_beside_a_slow_client():
    """And not "INVALID: the load generator was the limit" beside "no request was answered"."""

    class Slow(HostGuard):
        def end(self, **_used: Any) -> Any:
            notes = (caveat("client_throttled", paused_ratio=0.2),)
            return SimpleNamespace(caveats=lambda: notes, canary_s=None)

    for guard in (None, Slow()):
        trial, _, _ = run(scenario_of(slo={}), law=Law(fixed_s=60.0), guard=guard)
        assert (trial.state, trial.measurement.verdict) == ("failed", "FAIL")
        assert "no request was answered: 16 × UNFINISHED" in trial.failure
        assert text_of(trial.measurement.verdict_reason) == trial.failure
        assert (spoilt_by(trial), trial_bottleneck(trial)) == (None, None)


def test_a_capacity_search_that_overwhelms_the_server_is_an_answer_not_a_failure():
    load = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s"}
    plan = planned(NO_BATCHING, source="variant")
    trial, _, _ = run(capacity_scenario("10ms", load=load), plan, law=Law(fixed_s=60.0))
    assert (trial.state, trial.objective, trial.feasible) == ("complete", None, False)
    assert trial.probes


def test_requests_are_encoded_once_for_all_trials():
    target = FakeTarget(FakeClock())
    fleet = FakeFleet(target)
    bench = bench_of(scenario_of(), target, fleet)
    for size in (1, 8):
        bench.run(planned(batches_of(size)))
    assert fleet.jobs[0].requests is fleet.jobs[1].requests


def test_a_fixed_number_of_requests_counts_from_the_start_to_the_last_answer():
    trial, _, jobs = run(closed_loop(requests=100, warm_up="200ms", duration="10s"))
    assert [(job.duration_s, job.requests_max) for job in jobs] == [(0.2, None), (10.0, 100)]
    assert trial.measurement.requests == 100
    assert trial.measurement.window_s == pytest.approx(100 * 0.0013, rel=0.01)
    assert trial.measurement.throughput_rps.value == pytest.approx(1 / 0.0013, rel=0.01)
    assert "requests_cut" not in codes(trial)


def test_a_number_of_requests_that_the_duration_cuts_is_told():
    measured = run(closed_loop(requests=1000, warm_up="0s", duration="100ms"))[0].measurement
    said = f"{measured.requests} of 1,000 requests were sent when load.duration ended the run"
    assert noted(measured, "requests_cut") == said


@pytest.mark.parametrize(
    ("scenario", "law"),
    [
        (closed_loop(16, warm_up="100ms", duration="1s"), Law(fixed_s=1.5, unbatched_threads=16)),
        (open_loop(10), Law(fixed_s=30.0)),
    ],
    ids=["answers after the measured time", "a run that waits only as long as the SLO cares"],
)
def test_silence_that_is_overload_is_no_failure(scenario, law):
    trial, _, _ = run(scenario, law=law)
    assert (trial.state, trial.feasible) == ("complete", False)


SHOWN_BATCHES = f"{SESSION}wrapped_run_count"


def test_counters_that_fall_do_not_say_that_a_server_has_come_to_rest():
    """Two servers, behind a balancer that asks them in turn."""
    readings = count(1)

    def shows(counted: Counters) -> Counters:
        return replace(counted, series={SHOWN_BATCHES: {(): 100.0 - 50.0 * (next(readings) % 2)}})

    bench = bench_of(open_loop(3000), FakeTarget(FakeClock(), shows=shows))
    assert bench.run(planned(NO_BATCHING)).samples.stopped_early
    assert next(readings) > 7


def within_a_batch(kind: str, until_s: float) -> tuple[FakeTarget, list[float]]:
    """Executes one more batch until then; counted only when it has ended, as `kind` tells. When it was looked at."""
    read_at_s: list[float] = []

    def shows(counted: Counters) -> Counters:
        now_s = counted.monotonic_s
        read_at_s.append(now_s)
        ended, busy_s = now_s >= until_s, min(now_s, until_s)
        series = {SHOWN_BATCHES: {(): 1.0 + ended}}
        series[f"{OURS}batch_execution_count"] = {(("batch_size", "9"),): 1.0 + ended}
        if kind == "gauges":
            series[f"{OURS}requests_inside"] = {(): float(not ended)}
        if kind == "device":
            series[f"{OURS}device_busy_micros_total"] = {(): 1e6 * busy_s}
        return replace(counted, series=series, server_cpu_s=busy_s if kind == "cpu" else None)

    return FakeTarget(FakeClock(), shows=shows), read_at_s


@pytest.mark.parametrize("kind", ["device", "cpu", "gauges"])
def test_a_server_within_a_batch_longer_than_expected_has_not_come_to_rest(kind):
    target, read_at_s = within_a_batch(kind, 1006.0)
    assert bench_of(open_loop(3000), target).run(planned(NO_BATCHING)).samples.stopped_early
    assert read_at_s[-1] >= 1006.0


def test_a_server_that_computes_even_when_idle_is_waited_for_once():
    target, read_at_s = within_a_batch("cpu", 1e9)
    bench = bench_of(open_loop(3000), target)
    assert bench.run(planned(NO_BATCHING)).samples.stopped_early
    readings = len(read_at_s)
    assert bench.run(planned(NO_BATCHING)).samples.stopped_early
    assert readings > 50
    assert len(read_at_s) - readings < 10


def test_a_trial_keeps_the_start_up_of_the_server_that_was_launched_for_it():
    bench = bench_of(scenario_of(), FakeTarget(FakeClock(), apply_s=0.7))
    first, second = (bench.run(planned(NO_BATCHING)).trial for _ in range(2))
    assert (first.startup_s, second.startup_s) == (0.7, None)
    assert Trial.from_dict(json.loads(json.dumps(first.to_dict()))).startup_s == 0.7


def http_scenario(**metrics):
    target: dict[str, Any] = {"kind": "http", "url": "http://h:1", "grpc_url": "h:2"}
    target |= {"launch": ["serve"], "set": {"env": {"n": "N"}}}
    if metrics:
        target["metrics"] = {"url": "http://h:1/metrics", "batch_size": "rows", **metrics}
    search = {"budget": {"trials": 2}, "space": {"n": [1, 2]}}
    return open_loop(300, target=target, request={"protocol": "kserve_grpc"}, search=search)


def running(scenario):
    """The scenario of a server that runs already."""
    return scenario.model_copy(update={"target": scenario.target.model_copy(update={"launch": None})})


def hanging(scenario, *hangs_with: Configuration):
    """The bench of a server that has answered, and answers nothing with these from then on."""
    target = FakeTarget(FakeClock())
    fleet = FakeFleet(target)
    bench = bench_of(scenario, target, fleet)
    assert bench.run(planned(NO_BATCHING)).trial.state == "complete"
    fleet.alter = lambda samples: unanswered(samples) if target.in_force in hangs_with else samples
    return bench, target


def test_a_running_server_that_answers_nothing_whatever_its_configuration_is_gone():
    bench, target = hanging(running(http_scenario()), NO_BATCHING, BATCHED)
    with pytest.raises(ServerGoneError, match="stopped answering"):
        bench.run(planned(BATCHED))
    assert target.applied[-1] == NO_BATCHING


def test_one_that_answers_nothing_under_one_configuration_or_is_launched_again_is_not_gone():
    bench, _ = hanging(running(http_scenario()), BATCHED)
    assert [bench.run(planned(one)).trial.feasible for one in (BATCHED, NO_BATCHING)] == [False, True]
    bench, target = hanging(http_scenario(), NO_BATCHING, BATCHED)
    assert not bench.run(planned(BATCHED)).trial.feasible
    assert target.applied == [NO_BATCHING, BATCHED]


@pytest.mark.parametrize(
    ("found", "failure"),
    [(["size 3", ""], None), (["size 3"] * 2, "somebody else set size 3 under its load, twice")],
)
def test_a_trial_under_which_somebody_changed_the_parameters_runs_again(found, failure, monkeypatch):
    """What is measured under parameters of somebody else is of no configuration."""
    target, changes = FakeTarget(FakeClock()), iter(found)
    bench = bench_of(running(http_scenario()), target)
    monkeypatch.setattr(bench, "_foreign_change", lambda: next(changes))
    trial = bench.run(planned(BATCHED)).trial
    assert (trial.failure, trial.measurement is None) == (failure, failure is not None)
    assert target.applied == [BATCHED, BATCHED]


def test_a_running_server_that_ended_under_a_trial_is_waited_for_as_it_answered_last():
    target = FakeTarget(FakeClock(), dies_under=lambda one: one == BATCHED)
    bench = bench_of(running(http_scenario()), target)
    states = [bench.run(planned(one)).trial.state for one in (NO_BATCHING, BATCHED)]
    assert (states, target.applied) == (["complete", "failed"], [NO_BATCHING, BATCHED, NO_BATCHING])


def test_a_server_of_kind_http_that_counts_nothing_needs_target_metrics_and_not_a_flag_of_tf_serving():
    trial, _, _ = run(http_scenario())
    assert codes(trial) & {"no_target_metrics", "no_server_counters"} == {"no_target_metrics"}


def test_a_name_that_the_metrics_page_lacks_is_told_once_a_load_has_run():
    missing = {"batch_size": "batch_rows", "queue": ""}
    target = FakeTarget(FakeClock(), shows=lambda now: replace(now, series={}, missing=missing))
    trial = bench_of(http_scenario(queue="zzz"), target).run(planned(BATCHED)).trial
    assert noted(trial.measurement, "missing_metrics") == (
        "the server's metrics page lacks rows (target.metrics.batch_size; did you mean batch_rows?); "
        "zzz (target.metrics.queue)"
    )
    assert "no_target_metrics" not in codes(trial)


def run_slow(every: str):
    """Two trials, the second of other batches, of a server whose page shows what was counted once so long has passed
    without a load."""
    scenario, clock = http_scenario(every=every), FakeClock()
    page = SimpleNamespace(series=None, idle_since_s=0.0)

    def shows(now: Counters) -> Counters:
        if (
            page.series is None
            or now.monotonic_s > page.idle_since_s + 0.99 * scenario.target.metrics.every_s
        ):
            page.series = now.series
        return replace(now, series=page.series)

    def idle(samples: Samples) -> Samples:
        page.idle_since_s = clock()
        return samples

    target = FakeTarget(clock, shows=shows)
    fleet = FakeFleet(target)
    fleet.alter = idle
    bench = bench_of(scenario, target, fleet)
    sizes = (batches_of(size, timeout_micros=20_000, threads=None) for size in (64, 1))
    return [bench.run(planned(size)).trial.measurement for size in sizes]


def test_metrics_that_change_slowly_are_read_once_they_include_the_run_or_leave_the_mean_batch_unknown():
    batched, single = run_slow("1s")
    assert batched.server.mean_batch_rows > 2.0
    assert single.server.mean_batch_rows == 1.0
    assert single.server.duration_s == pytest.approx(4.5, abs=0.1)
    said = "the server's metrics change every 10 s, too slowly for a run of 4.5 s"
    for measured in run_slow("10s"):
        assert measured.server.mean_batch_rows is None
        assert noted(measured, "slow_metrics").startswith(said)


def interrupted(after_s: float, source: str) -> Trial:
    """Ctrl-C comes after so many seconds of the load; what is due in the last second before has no answer."""

    def alter(samples: Samples) -> Samples:
        kept = samples.between(0, int(np.count_nonzero(samples.due_ns < after_s * 1e9)))
        left = kept.due_ns >= (after_s - 1.0) * 1e9
        status = np.where(left, np.uint8(Status.UNFINISHED), kept.status)
        done_ns = np.where(left, NEVER_NS, kept.done_ns)
        raise LoadInterrupted(replace(kept, status=status, done_ns=done_ns, stopped_early=True))

    plan = planned(NO_BATCHING, source=source)
    return run(open_loop(200, slo="1s", duration="8s"), plan, alter=alter)[0]


def test_an_interrupted_load_test_keeps_what_was_answered_and_does_not_pass() -> None:
    trial = interrupted(3.0, "load")
    measured = trial.measurement
    assert was_interrupted(trial)
    assert (measured.verdict, measured.errors) == ("UNSURE", {})
    assert text_of(measured.verdict_reason) == "the run was interrupted before its end"
    assert measured.window_s == pytest.approx(1.5, abs=0.05)
    assert codes(trial).isdisjoint({"stopped_early", "nothing_measured"})


@pytest.mark.parametrize(("after_s", "source"), [(2.2, "load"), (3.0, "sampler")])
def test_an_interrupted_run_that_is_short_or_of_a_sweep_is_not_kept(after_s: float, source: str) -> None:
    with pytest.raises(LoadInterrupted):
        interrupted(after_s, source)
