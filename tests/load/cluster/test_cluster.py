"""Workers on several machines: one schedule, many clocks, and what happens when one of them is slow, dies or is reset."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from batchtune.batching.parameters import Configuration
from batchtune.cli.app import app
from batchtune.errors import MeasurementInvalidError, ScenarioError, UsageError
from batchtune.load.calibration import null_server
from batchtune.load.cluster import cluster_fleet, ray_actors
from batchtune.load.cluster.cluster_fleet import (
    ClusterFleet,
    WorkerLostError,
    client_max_rps,
    fleet_of,
    placement,
)
from batchtune.load.cluster.host import ClockReading, Host, read_clock
from batchtune.load.fleet import LiveAggregate, LoadFleet, LoadInterrupted, LoadJob, split
from batchtune.load.samples import Samples, merge
from batchtune.report.findings import text_of
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.target.choice import OF_A_FLEET, placed
from batchtune.target.process import ServerProcess
from batchtune.tune.loader import Figures, Loader, LoadRun
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED
from tests.load.cluster.cluster_fakes import LATENCY_NS, FakeHost, FakeTime, cluster_of, fleet_of_fakes
from tests.load.load_servers import a_job, evenly, requests_for
from tests.ray_script import answer_of
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, scenario_of

MS = 1_000_000
WRONG_CLOCKS = ({"offset_ns": 50 * MS}, {"offset_ns": -50 * MS}, {"offset_ns": 50 * MS, "drift_ppm": 100.0})


def poisson(rate_rps: float, duration_s: float) -> Schedule:
    generator = np.random.default_rng(7)
    count = round(rate_rps * duration_s)
    due_ns = np.sort(generator.integers(0, int(duration_s * 1e9), count))
    order = generator.integers(0, 5, count).astype(np.int32)
    return Schedule(due_ns=due_ns, duration_s=duration_s, offered_rps=rate_rps, request_index=order)


def job_of(schedule: Schedule) -> LoadJob:
    bodies = tuple(b"%d" % number for number in range(5))
    return a_job("rest", 1, schedule, requests=requests_for("rest", bodies=bodies, rows=(1, 2, 3, 4, 5)))


def hosts_of(count: int, *, clock: FakeTime | None = None, **changes: Any) -> list[FakeHost]:
    clock = clock or FakeTime()
    return [FakeHost(clock, node=f"node-{number}", **changes) for number in range(count)]


def run_on(hosts: list[FakeHost], schedule: Schedule, **fleet: Any) -> Samples:
    with fleet_of_fakes(hosts, **fleet) as started:
        return started.run(job_of(schedule))


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("wrong", [(), WRONG_CLOCKS], ids=["true clocks", "wrong clocks"])
@pytest.mark.parametrize("chunk_rows", [100, 10_000])
def test_all_workers_together_send_the_schedule_of_one_process(
    workers: int, wrong: Any, chunk_rows: int
) -> None:
    """To the nanosecond, the same request each time; a part of it is each worker's, whatever its clock says."""
    schedule = poisson(2000, 1.0)
    hosts = hosts_of(workers)
    for host, clock in zip(hosts, wrong, strict=False):
        vars(host).update(clock)
    samples = run_on(hosts, schedule, chunk_rows=chunk_rows)
    assert samples.due_ns.tolist() == schedule.due_ns.tolist()
    assert schedule.request_index is not None
    assert samples.rows.tolist() == (schedule.request_index + 1).tolist()
    assert samples.offered_rps == 2000
    names = [f"worker {number} on node-{number}" for number in range(workers)]
    assert [share.name for share in samples.workers] == (names if workers > 1 else [])
    assert samples.worker is None or samples.worker.tolist() == [n % workers for n in range(2000)]
    count = len(hosts[0].parts[0].request_order)
    chunks = [(first, min(first + chunk_rows, count)) for first in range(0, count, chunk_rows)]
    assert hosts[0].asked_rows == chunks
    assert abs(samples.latency_ns - LATENCY_NS).max() <= LATENCY_NS * 100e-6


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", WRONG_CLOCKS)
def test_a_clock_set_off_and_drifting_moves_no_request(wrong: dict[str, float]) -> None:
    """Each is sent within what the round trip leaves open, and 100 ppm of the time since the start."""
    right, other = hosts = hosts_of(2)
    vars(other).update(wrong)
    samples = run_on(hosts, evenly(100, 2.0))
    apart_ns = other.true_ns(other.start_ns) - right.true_ns(right.start_ns)
    assert abs(apart_ns) <= right.round_trip_ns + 0.3e9 * 100e-6
    note = next(note for note in samples.notes if note.startswith("worker 1 on node-1: clock"))
    assert f"{other.offset_ns / 1e6:+.1f}"[:5] in note.replace(",", "")
    assert f"drift {wrong.get('drift_ppm', 0.0):+.0f}" in note


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    asymmetry=st.floats(0.0, 1.0),
    round_trip_ns=st.integers(1_000, 10**8),
)
def test_an_offset_lies_within_its_uncertainty(offset_ns: int, asymmetry: float, round_trip_ns: int) -> None:
    host = FakeHost(FakeTime(), offset_ns=offset_ns, asymmetry=asymmetry, round_trip_ns=round_trip_ns)
    reading = read_clock(host.clock_ns, host.time, pings=3)
    assert abs(reading.offset_ns - offset_ns) <= reading.uncertainty_ns
    assert reading.uncertainty_ns <= round_trip_ns // 2 + 2


def test_the_shortest_round_trip_counts() -> None:
    host = FakeHost(FakeTime(), asymmetry=1.0)
    lengths = iter([9 * MS, 1 * MS, 5 * MS])

    def clock_ns() -> int:
        host.round_trip_ns = next(lengths)
        return host.clock_ns()

    assert read_clock(clock_ns, host.time, pings=3).uncertainty_ns == pytest.approx(MS / 2, abs=2)


def test_a_drift_within_what_its_readings_leave_open_is_no_reset() -> None:
    before = ClockReading(offset_ns=0, uncertainty_ns=2 * MS, at_ns=0)
    after = ClockReading(offset_ns=3 * MS, uncertainty_ns=2 * MS, at_ns=100 * MS)
    assert not before.is_lost(after)
    assert before.is_lost(replace(after, offset_ns=5 * MS))


def test_a_worker_of_no_request_sends_none() -> None:
    samples = run_on(hosts_of(3), evenly(2, 1.0))
    assert (len(samples), len(samples.workers)) == (2, 3)


FAULTS = [
    ({"dies_after_s": 0.5}, "load worker 1 on node-1: its node is gone"),
    ({"jump_ns": 20 * MS}, "load worker 1 on node-1: its clock was set or stopped under the load"),
    ({"silent": True}, "load worker 1 on node-1: it does not report back"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("fault", "told"), FAULTS)
def test_a_lost_worker_voids_the_load_and_the_next_goes_without(fault: dict[str, Any], told: str) -> None:
    hosts = hosts_of(3)
    events: list[str] = []
    schedule = poisson(300, 1.0)
    with fleet_of_fakes(hosts, on_event=events.append) as fleet:
        assert len(fleet.run(job_of(schedule))) == 300
        vars(hosts[1]).update(fault)
        with pytest.raises(WorkerLostError) as caught:
            fleet.run(job_of(schedule))
        assert caught.value.message.startswith(told)
        assert caught.value.left == 2
        assert events[-1] == caught.value.message
        assert "measured again with 2 workers" in events[-1]
        assert [host.closed for host in hosts] == [False, True, False]
        assert [hosts[0].stopped, hosts[2].stopped] == [True, True]
        samples = fleet.run(job_of(schedule))
    assert samples.due_ns.tolist() == schedule.due_ns.tolist()
    assert [share.name for share in samples.workers] == ["worker 0 on node-0", "worker 2 on node-2"]
    assert all(host.closed for host in hosts)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("place", "load worker 1: its node is gone"),
        ("open", "load worker 1 on node-1: its node is gone"),
    ],
)
def test_a_worker_that_is_lost_before_it_has_started_ends_the_command(call: str, told: str) -> None:
    hosts = hosts_of(3)
    hosts[1].dies_at = call
    with pytest.raises(MeasurementInvalidError) as caught, fleet_of_fakes(hosts):
        pass
    assert caught.value.message == told


def loader_of(
    fleet: Any, *, clock: FakeClock, target: FakeTarget, of_ray: bool = True, **options: Any
) -> Loader:
    target.apply(Configuration(batching=None))
    load: dict[str, Any] = {"arrivals": "poisson", "rate": 50}
    scenario = scenario_of(load=load | ({"fleet": {"ray": "auto"}} if of_ray else {}), objective="latency")
    return Loader(scenario, target, fleet, sleep=clock.sleep, **options)


def run_by(loader: Loader) -> Figures:
    return loader.run(LoadRun(arrivals=evenly(50, 2.0), warm_up_s=0.0), on_live=lambda _live: None)


def losses_of(figures: Figures) -> list[str]:
    return [text_of(each) for each in figures.measurement.caveats if each.code == "worker_lost"]


@pytest.mark.parametrize("call", ["client_max_rps", "prepare", "ready"])
def test_a_worker_that_is_lost_before_the_start_of_a_load_is_gone_on_without(call: str) -> None:
    clock = FakeClock()
    hosts = hosts_of(3)
    hosts[0].dies_at = call
    with fleet_of_fakes(hosts) as fleet:
        loader = loader_of(fleet, clock=clock, target=FakeTarget(clock), client_max_rps=fleet.client_max_rps)
        figures = run_by(loader)
    assert len(figures.samples) == 100
    (loss,) = losses_of(figures)
    assert loss.startswith("load worker 0 on node-0: its node is gone")
    assert loader._client_max_rps == pytest.approx(2000.0)


def test_with_less_than_half_of_the_workers_it_ends() -> None:
    hosts = hosts_of(3)
    hosts[0].dies_after_s = hosts[1].dies_after_s = 0.5
    with fleet_of_fakes(hosts) as fleet:
        with pytest.raises(WorkerLostError) as caught:
            fleet.run(job_of(evenly(100, 1.0)))
        assert caught.value.left == 2
        with pytest.raises(WorkerLostError, match="1 of 3 workers are left, too few to continue") as caught:
            fleet.run(job_of(evenly(100, 1.0)))
        assert caught.value.left == 0


def test_a_fleet_lets_no_worker_go_that_it_needs() -> None:
    with fleet_of_fakes(hosts_of(2)) as fleet:
        retired = [fleet.retire(f"worker {n} on node-{n}", "slow") for n in (9, 0, 1)]
        assert (retired, fleet.processes) == ([False, True, False], 1)


def test_each_worker_has_a_cpu_of_its_machine_from_the_highest_down() -> None:
    clock = FakeTime()
    hosts = [FakeHost(clock, machine=name, node=name) for name in ("a", "a", "b", "a", "a", "a")]
    with fleet_of_fakes(hosts) as fleet:
        assert [host.cpu for host in hosts] == [3, 2, 3, 1, 0, 3]
        assert fleet.client_cores == 5
        assert placement(fleet._workers) == "6 workers: 5 on a (CPUs 0-3), 1 on b (CPU 3)"
        assert fleet.client_max_rps(requests_for("rest")) == 3000.0
    with fleet_of_fakes(hosts_of(3, machine="c"), cpus=(1, 2)) as fleet:
        assert fleet.client_cores == 2
        assert fleet.client_max_rps(requests_for("rest")) == 1500.0
    with fleet_of_fakes(hosts_of(3)) as fleet:
        assert fleet.client_max_rps(requests_for("rest")) == 3000.0


def test_workers_that_whatever_else_runs_goes_before_are_told() -> None:
    events: list[str] = []
    hosts = hosts_of(3)
    with fleet_of_fakes(hosts, on_event=events.append):
        assert [event for event in events if "niceness" in event] == []
    hosts[1].niceness = hosts[2].niceness = 15
    with fleet_of_fakes(hosts, on_event=events.append):
        assert events[-1].startswith(
            "load fleet: 2 workers at niceness 15, behind whatever else runs there; "
        )
        assert events[-1].endswith("start Ray there with RAY_worker_niceness=0")


def test_the_loopback_of_one_machine_is_not_sent_to_from_another() -> None:
    with fleet_of_fakes(hosts_of(1, machine="elsewhere")) as fleet:
        with pytest.raises(UsageError, match=r"worker 0 on node-0 cannot reach 127\.0\.0\.1"):
            fleet.run(job_of(evenly(10, 1.0)))
        job = job_of(evenly(10, 1.0))
        assert len(fleet.run(replace(job, endpoint=replace(job.endpoint, host="10.0.0.7")))) == 10


def test_live_counts_are_sums_and_a_stop_reaches_every_worker() -> None:
    hosts = hosts_of(2)
    heard: list[LiveAggregate] = []
    with fleet_of_fakes(hosts) as fleet:
        fleet.run(
            job_of(evenly(100, 60.0)), on_progress=heard.append, should_stop=lambda live: live.sent >= 100
        )
    assert [host.stopped for host in hosts] == [True, True]
    assert 100 <= heard[-1].sent <= 200
    assert heard[-1].p95_s == pytest.approx(LATENCY_NS / 1e9)


def interrupt_ourselves(_live: LiveAggregate | None = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_every_worker_and_keeps_what_was_measured() -> None:
    hosts = hosts_of(2)

    def interrupt(live: LiveAggregate) -> None:
        if live.sent > 10 and not hosts[0].stopped:
            interrupt_ourselves()

    with fleet_of_fakes(hosts) as fleet, pytest.raises(LoadInterrupted) as caught:
        fleet.run(job_of(evenly(100, 60.0)), on_progress=interrupt)
    assert len(caught.value.samples) > 10
    assert [host.stopped for host in hosts] == [True, True]


def test_ctrl_c_when_the_workers_start_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the first worker is told to start."""
    hosts = hosts_of(2)
    start = hosts[0].start
    monkeypatch.setattr(hosts[0], "start", lambda start_ns: (start(start_ns), interrupt_ourselves()))
    with pytest.raises(LoadInterrupted):
        run_on(hosts, evenly(100, 60.0))
    assert [host.stopped for host in hosts] == [True, True]


def test_ctrl_c_under_a_load_that_loses_a_worker_ends_it() -> None:
    hosts = hosts_of(3)
    hosts[1].dies_after_s = 0.1
    signals = [signal.SIGINT]
    with fleet_of_fakes(hosts) as fleet:
        with pytest.raises(KeyboardInterrupt) as caught:
            fleet.run(
                job_of(evenly(100, 60.0)),
                on_progress=lambda _live: os.kill(os.getpid(), signals.pop()) if signals else None,
            )
        assert isinstance(caught.value.__cause__, WorkerLostError)
        assert fleet.processes == 2


class LosingFleet(FakeFleet):
    """Loses a worker under its first load, or the second of its two is late in the first `late` loads."""

    late = 0
    retired: tuple[str, ...] = ()

    def run(self, job: LoadJob, **watchers: Any) -> Samples:
        samples = super().run(job, **watchers)
        if not self.late and len(self.jobs) == 1:
            raise WorkerLostError("load worker 1 on node-1: its node is gone", left=3, before=4)
        if not self.late or self.retired:
            return samples
        half = len(samples) // 2
        first, second = samples.between(0, half), samples.between(half, len(samples))
        is_late = len(self.jobs) <= self.late
        return merge([first, replace(second, sent_ns=second.sent_ns + 50 * MS) if is_late else second])

    def retire(self, name: str, _why: str) -> bool:
        self.retired = (*self.retired, name)
        return True


AGAIN = "load worker 1: the load generator sent requests late"


@pytest.mark.parametrize(
    ("late", "of_ray", "loads", "retired", "told", "client_max_rps"),
    [
        (0, True, 2, (), "load worker 1 on node-1: its node is gone", 75.0),
        (1, True, 2, (), AGAIN, 100.0),
        (2, True, 3, ("worker 1",), AGAIN, 50.0),
        (9, False, 1, (), None, 100.0),
    ],
    ids=["lost", "late once", "late again", "of one machine"],
)
def test_a_load_is_sent_again_without_a_worker_that_was_lost_or_slow_twice(
    late: int, of_ray: bool, loads: int, retired: tuple[str, ...], told: str | None, client_max_rps: float
) -> None:
    clock = FakeClock()
    target = FakeTarget(clock)
    fleet = LosingFleet(target)
    fleet.late = late
    options = {"of_ray": of_ray, "client_max_rps": lambda _requests: 90.0}
    loader = loader_of(fleet, clock=clock, target=target, **options)
    figures = run_by(loader)
    assert [loss[: len(told or "")] for loss in losses_of(figures)[:1]] == ([told] if told else [])
    assert ("worker_slow" in {each.code for each in figures.measurement.caveats}) == (not of_ray)
    assert (len(fleet.jobs), fleet.retired) == (loads, retired)
    assert loader._client_max_rps == pytest.approx(0.9 * client_max_rps)


def test_more_requests_than_are_kept_come_back_as_some_of_each_worker() -> None:
    """Drawn there, so that no more than is kept passes through the head."""
    hosts = hosts_of(2)
    schedule = evenly(1000, 1.0)
    samples = run_on(hosts, schedule, chunk_rows=50, kept_max=250)
    assert (len(samples), samples.one_in, samples.failures) == (250, 4, 0)
    assert set(samples.due_ns.tolist()) <= set(schedule.due_ns.tolist())
    assert [len(samples.of_worker(number)) for number in (0, 1)] == [125, 125]
    assert hosts[0].asked_rows == [(0, 200), (200, 400), (400, 500)]
    kept = np.searchsorted(schedule.due_ns[::2], samples.of_worker(0).due_ns)
    assert (kept // 4).tolist() == list(range(125))


@pytest.mark.slow
def test_stations_with_their_own_workers_send_what_two_local_ones_do() -> None:
    """The Host that runs in a Ray actor, here in this process: real workers, clocks and answers."""
    schedule = poisson(400, 0.4)
    job = job_of(schedule)
    with null_server() as endpoint, ClusterFleet(cluster_of([Host(), Host()])) as fleet:
        job = replace(job, endpoint=replace(endpoint, model_name="m"))
        samples = fleet.run(job)
        with pytest.raises(UsageError, match="does not answer REST"):
            fleet.run(replace(job, endpoint=replace(job.endpoint, rest_port=None)))
        again = fleet.run(replace(job, arrivals=evenly(100, 20.0)), should_stop=lambda live: live.sent > 0)
    assert samples.due_ns.tolist() == schedule.due_ns.tolist()
    assert samples.errors() == {}
    assert again.stopped_early
    assert (samples.sent_ns >= samples.due_ns).all()
    assert (samples.latency_ns > 0).all()
    assert all(share.cpu_s > 0 for share in samples.workers)
    for part, number in zip(split(job, 2), (0, 1), strict=True):
        assert isinstance(part.arrivals, Schedule)
        assert samples.of_worker(number).due_ns.tolist() == part.arrivals.due_ns.tolist()


FLEET = """\
name: many
target: {kind: external, model: m, grpc_url: "10.0.0.7:8500"}
load: {arrivals: poisson, rate: 100, fleet: {ray: auto}}
objective: latency
"""


def test_a_scenario_says_where_its_workers_run() -> None:
    scenario = parse_scenario(FLEET, overrides=["load.fleet.workers=4", 'load.fleet.ray="ray://head:10001"'])
    assert scenario.load.fleet is not None
    assert (scenario.load.fleet.workers, scenario.load.fleet.placement) == (4, "spread")
    assert parse_scenario(format_scenario(scenario)).load.fleet == scenario.load.fleet
    made = parse_scenario(FLEET.replace(", fleet: {ray: auto}", ""), overrides=["load.fleet.ray=auto"])
    assert made.load.fleet is not None
    assert made.load.fleet.workers is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("load.fleet.ray=somewhere", r"load\.fleet\.ray"),
        ("load.fleet.workers=0", r"load\.fleet\.workers"),
        ("load.processes=2", r"load\.processes=2: a fleet's workers are its processes"),
        ("load.fleet.ray=null", r"load\.fleet\.ray"),
        ("load.fleet.resources={gpu: 0}", r"load\.fleet\.resources"),
    ],
)
def test_a_mistake_in_a_fleet_names_its_key(change: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        parse_scenario(FLEET, overrides=[change])


def test_a_launched_server_is_told_of_workers_beside_it() -> None:
    launched = scenario_of(
        load={"arrivals": "poisson", "rate": 50, "fleet": {"ray": "auto"}}, objective="latency"
    )
    assert placed(launched, cpus=range(4)) == (launched, OF_A_FLEET)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "ray://a..b:1"])
def test_a_cluster_that_nobody_answers_for_is_told_at_once(address: str) -> None:
    with pytest.raises(UsageError, match=f"nobody answers at {re.escape(address)}"):
        ray_actors._require_listener(address, key="load.fleet")


def test_of_a_traceback_that_a_cluster_sends_its_error_is_told() -> None:
    sent = (
        "Initialization failed:\nTraceback (most recent call last):\n  File x\nRuntimeError: not started\n\n"
    )
    assert ray_actors._reason(ConnectionError(sent)) == "Initialization failed: RuntimeError: not started"


def test_a_node_has_room_for_as_many_workers_as_its_scarcest_resource() -> None:
    bundle = {"CPU": 0.1, "load_generator": 1.0}
    assert ray_actors._room({"CPU": 0.3, "load_generator": 9.0}, bundle) == 3
    assert ray_actors._room({"CPU": 8.0, "load_generator": 2.0}, bundle) == 2
    assert ray_actors._room({"CPU": 8.0}, bundle) == 0


def test_nodes_that_join_are_waited_for_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "require_ray", lambda key: None)
    monkeypatch.setattr(ray_actors, "JOIN_LIMIT_S", 0.02)
    monkeypatch.setattr(ray_actors, "SOON_S", 0.001)
    said: list[str] = []
    first, more = ({"Alive": True, "Resources": resources} for resources in ({}, {"CPU": 1.0}))
    looks = iter([[first, more], [first, more, more]])
    actors = ray_actors.RayActors("auto", key="load.fleet", thing="worker", on_event=said.append)
    actors._ray = SimpleNamespace(nodes=lambda: next(looks, [first, more, more]))
    assert sum(actors._rooms({"CPU": 1.0}, 2)) == 2
    assert said == ["the cluster's 2 nodes can take 1 worker, not 2: waiting up to 0.02 s for nodes to join"]
    for wanted, told in ((None, 1), (9, 2)):
        assert sum(actors._rooms({"CPU": 1.0}, wanted)) == 2
        assert len(said) == told


def test_without_a_fleet_the_workers_are_processes_of_this_machine() -> None:
    fleet = fleet_of(scenario_of().load)
    assert isinstance(fleet, LoadFleet)
    with fleet_of_fakes(hosts_of(2)) as cluster:
        assert client_max_rps(cluster, requests_for("rest")) == 2000.0


# -- by the commands that measure --

SCENARIO = """\
name: emulated
target: {kind: tfserving, model: MODEL}
load: {arrivals: closed, concurrency: 4, warm_up: 100ms, duration: 300ms}
objective: throughput
search: {space: {max_batch_size: [1, 8]}}
variants: {small: {fixed: {max_batch_size: 1}}, large: {fixed: {max_batch_size: 8}}}
"""
COMMANDS = ("load", "sweep", "compare", "check")


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Any]:
    """Call a command with a scenario of its own and such options; its exception."""
    version = tmp_path / "emulated" / "1"
    version.mkdir(parents=True)
    (version / "emulated.yaml").write_text(EMULATED)
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("MODEL", str(tmp_path / "emulated")))

    def invoked(command: str, *settings: str) -> Any:
        words = [command, str(path), "--results", str(tmp_path / "results"), "--quiet"]
        options = [word for setting in settings for word in ("--set", f"load.fleet.{setting}")]
        return CliRunner().invoke(app, [*words, *options]).exception

    return invoked


@pytest.mark.parametrize("command", COMMANDS)
def test_without_ray_each_command_names_the_extra(
    command: str, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a server is launched."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
    )
    launched: list[Any] = []
    monkeypatch.setattr(ServerProcess, "launch", lambda *command, **_: launched.append(command))
    error = invoke(command, "ray=auto")
    assert isinstance(error, UsageError)
    assert (error.exit_code, error.hint) == (2, "pip install 'batchtune[ray]'")
    assert launched == []


def test_a_fleet_is_asked_for_by_name(invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_actors: Any, spec: Any, _on_event: Any) -> None:
        raise UsageError(f"{spec.ray} {spec.workers}")

    monkeypatch.setattr(cluster_fleet, "RayActors", lambda *_address, **_names: None)
    monkeypatch.setattr(cluster_fleet, "ray_cluster", refuse)
    error = invoke("load", "ray=ray://head:10001", "workers=3")
    assert error.message == "ray://head:10001 3"


def test_workers_without_a_cluster_are_refused(invoke: Callable[..., Any]) -> None:
    error = invoke("load", "workers=3")
    assert isinstance(error, UsageError)
    assert "load.fleet.ray" in error.message


def test_the_options_of_before_say_what_to_write(tmp_path: Path) -> None:
    done = answered("sweep", "s.yaml", "--fleet=auto", cwd=tmp_path)
    told = "error: --fleet: this option of sweep no longer exists\nhint: use --set load.fleet.ray=ADDRESS\n"
    assert (done.returncode, done.stderr) == (2, told)


# -- on a real Ray cluster of two nodes on this machine --


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'batchtune[ray]'")
def test_fleets_on_two_nodes_send_the_schedule_survive_one_of_them_and_leave_nothing() -> None:
    found = answer_of(Path(__file__).with_name("ray_two_nodes.py"), timeout_s=290)
    for run in ("connecting", "connected", "killed"):
        assert (found[run]["same_schedule"], found[run]["errors"]) == (True, {}), run
    clocks = [
        re.findall(r"clock ([+-][\d.,]+) ± ([\d.]+) ms", note)[0] for note in found["connected"]["clocks"]
    ]
    assert len(clocks) == 2
    for offset, uncertainty in clocks:  # of one machine
        assert abs(float(offset.replace(",", ""))) <= float(uncertainty) + 0.001
    told = r"load worker [01] on .*; what it was sending is invalid, and measured again with 1 worker$"
    assert re.match(told, found["killed"]["message"])
    assert found["killed"]["left"] == 1
    assert found["too_many"] == "load.fleet: the cluster's 2 nodes can take 2 workers with 1 CPU each, not 9"
    assert found["left"] == {"actors": [], "workers": [], "objects": 0, "cpus_taken": 0.0}
    client = found["client"]
    if "not_started" in client:
        pytest.skip(f"Ray's own server for its clients does not start here: {client['not_started']}")
    assert (client["same_schedule"], client["errors"]) == (True, {})
