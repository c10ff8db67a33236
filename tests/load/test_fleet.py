"""The fleet: processes that send one job together, and what happens when they are stopped, interrupted or killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest

from batchtune.errors import MeasurementInvalidError, TargetError
from batchtune.load.calibration import _serve, calibrate, null_server
from batchtune.load.clients import source as source_module
from batchtune.load.clients.source import NOTHING, ClosedSource
from batchtune.load.duet import ClockReader, DuetPlan, Reading, pair_costs, run_duet
from batchtune.load.fleet import LiveAggregate, LoadFleet, LoadInterrupted, LoadJob, split
from batchtune.load.samples import NEVER_NS
from batchtune.load.worker_process import start_undisturbed
from batchtune.measure.quantiles import balanced_orders
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from batchtune.system import interrupt
from batchtune.target.endpoint import Endpoint
from tests.load.load_servers import ScriptedHttp, a_job, always, closed, evenly, http_answer, requests_for
from tests.load.test_samples import some_samples


@pytest.fixture
def server() -> Iterator[ScriptedHttp]:
    with ScriptedHttp(always(http_answer())) as started:
        yield started


def runs_on(fleet: LoadFleet, server: ScriptedHttp) -> bool:
    """Whether the fleet still runs a job."""
    return len(fleet.run(a_job("rest", server.port, closed(2, 10)))) == 10


def test_two_workers_send_one_schedule_between_them(fleet: LoadFleet, server: ScriptedHttp) -> None:
    bodies = tuple(b"%d" % number for number in range(5))
    schedule = evenly(1000, 0.2)
    job = a_job("rest", server.port, schedule, requests=requests_for("rest", bodies=bodies))
    samples = fleet.run(job)
    assert samples.due_ns.tolist() == schedule.due_ns.tolist()
    assert samples.errors() == {}
    assert (samples.sent_ns >= samples.due_ns).all()
    assert samples.offered_rps == 1000
    assert samples.client_cores == 2
    assert samples.client_cpu_s > 0
    assert sorted(server.bodies) == sorted(bodies * 40)


def test_of_more_requests_than_are_kept_some_are_drawn(
    fleet: LoadFleet, server: ScriptedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_kept_max", 30)
    schedule = evenly(1000, 0.1)
    samples = fleet.run(a_job("rest", server.port, schedule))
    assert (samples.one_in, samples.failures) == (4, 0)
    assert len(samples) == 26  # of each worker's 50 one in 4: 13
    assert set(samples.due_ns.tolist()) <= set(schedule.due_ns.tolist())
    assert (samples.latency_ns > 0).all()


def test_the_live_aggregate_is_heard_while_the_job_runs(fleet: LoadFleet, server: ScriptedHttp) -> None:
    heard: list[LiveAggregate] = []
    samples = fleet.run(a_job("rest", server.port, evenly(200, 0.6)), on_progress=heard.append)
    assert 2 <= len(heard) <= 6
    assert [live.done for live in heard] == sorted(live.done for live in heard)
    assert 0 < heard[-1].sent <= len(samples)
    assert heard[-1].p95_s > 0


def test_a_job_told_to_stop_keeps_what_had_become_due(fleet: LoadFleet, server: ScriptedHttp) -> None:
    job = a_job("rest", server.port, evenly(200, 30.0))
    samples = fleet.run(job, should_stop=lambda live: live.sent >= 20)
    assert samples.stopped_early
    assert 20 <= len(samples) < 6000
    assert samples.errors() == {}
    assert runs_on(fleet, server)


def test_ctrl_c_keeps_the_partial_samples_and_the_fleet(fleet: LoadFleet, server: ScriptedHttp) -> None:
    def interrupt(live: LiveAggregate) -> None:
        if live.sent >= 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(LoadInterrupted) as caught:
        fleet.run(a_job("rest", server.port, evenly(200, 30.0)), on_progress=interrupt)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert len(caught.value.samples) >= 20
    assert caught.value.samples.stopped_early
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert runs_on(fleet, server)


def test_ctrl_c_before_the_start_sends_nothing(server: ScriptedHttp) -> None:
    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.001)  # not before the fleet listens
        os.kill(os.getpid(), signal.SIGINT)

    with LoadFleet(processes=2) as fleet:  # its workers are still starting
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(LoadInterrupted) as caught:
            fleet.run(a_job("rest", server.port, evenly(200, 30.0)))
        interrupter.join()
        assert caught.value.samples.stopped_early
        assert runs_on(fleet, server)


def test_ctrl_c_at_the_start_ends_the_load(fleet: LoadFleet, server: ScriptedHttp) -> None:
    """It comes just after the workers were told to start."""
    stops = MagicMock()
    stops.__bool__.side_effect = chain([False], repeat(True))
    parts = split(a_job("rest", server.port, evenly(200, 3.0)), 2)
    assert all(samples.stopped_early for samples in fleet.run_parts(parts, stops=stops))
    assert runs_on(fleet, server)


def test_workers_do_not_die_of_a_ctrl_c_meant_for_the_parent(fleet: LoadFleet, server: ScriptedHttp) -> None:
    as_a_terminal_sends = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    for process, number in product(fleet.process_ids, as_a_terminal_sends):
        os.kill(process, number)
    assert runs_on(fleet, server)


def test_a_fleet_works_off_the_main_thread(fleet: LoadFleet, server: ScriptedHttp) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(runs_on, fleet, server).result(60)


def test_a_dead_worker_invalidates_the_job_and_the_next_one_runs(server: ScriptedHttp) -> None:
    def kill(live: LiveAggregate) -> None:
        if live.sent:
            os.kill(fleet.process_ids[1], signal.SIGKILL)

    with LoadFleet(processes=2) as fleet:
        with pytest.raises(MeasurementInvalidError, match=r"load worker 1 died \(signal SIGKILL\)"):
            fleet.run(a_job("rest", server.port, evenly(100, 30.0)), on_progress=kill)
        assert fleet.process_ids == []
        assert runs_on(fleet, server)


def test_a_signal_to_the_whole_group_is_an_interrupt_and_no_dead_worker(server: ScriptedHttp) -> None:
    """As a service manager sends SIGTERM: the workers die of it before the parent has told them to stop."""

    ended: list[int] = []

    def end_all(live: LiveAggregate) -> None:
        if live.sent and not ended:
            ended.extend((os.getpid(), *fleet.process_ids))
            for process in ended:
                os.kill(process, signal.SIGTERM)

    signal.signal(signal.SIGTERM, interrupt)
    with LoadFleet(processes=2) as fleet, pytest.raises(KeyboardInterrupt):
        fleet.run(a_job("rest", server.port, evenly(100, 30.0)), on_progress=end_all)


def test_a_worker_that_is_stopped_for_a_while_tells_of_it(fleet: LoadFleet, server: ScriptedHttp) -> None:
    held: list[int] = []

    def hold(live: LiveAggregate) -> None:
        if live.sent and not held:
            held.append(fleet.process_ids[0])
            os.kill(held[0], signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(held[0], signal.SIGCONT)

    job = a_job("rest", server.port, evenly(200, 30.0))
    samples = fleet.run(job, on_progress=hold, should_stop=lambda _live: bool(held))
    assert max(length for _, length in samples.pauses_ns) >= 20_000_000


def test_a_worker_passes_on_what_is_wrong_with_the_target(fleet: LoadFleet) -> None:
    nowhere = Endpoint(model_name="m", host="host.invalid", rest_port=1)
    with pytest.raises(TargetError, match="cannot be resolved"):
        fleet.run(LoadJob(endpoint=nowhere, requests=requests_for("rest"), arrivals=closed(1, 1)))


def test_workers_run_where_they_are_told_to_and_none_is_left_by_an_error_in_a_callback(
    server: ScriptedHttp,
) -> None:
    cpu = min(os.sched_getaffinity(0))
    with LoadFleet(processes=2, cpus=[cpu]) as fleet:
        assert fleet.run(a_job("rest", server.port, closed(2, 10))).client_cores == 1
        assert [os.sched_getaffinity(process) for process in fleet.process_ids] == [{cpu}] * 2
        with pytest.raises(ZeroDivisionError):
            fleet.run(a_job("rest", server.port, evenly(100, 30.0)), on_progress=lambda live: 1 // 0)
        assert fleet.process_ids == []


def test_a_fleet_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one process"):
        LoadFleet(processes=0)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "body_bytes"), [("rest", 20), ("rest", 200_000), ("grpc", 200_000)])
def test_the_null_server_answers_everything(fleet: LoadFleet, protocol: str, body_bytes: int) -> None:
    requests = requests_for(protocol, bodies=(bytes(body_bytes),))
    with null_server() as endpoint:
        samples = fleet.run(
            LoadJob(endpoint=endpoint, requests=requests, arrivals=closed(8, 64), check_every=0)
        )
    assert (len(samples), samples.errors()) == (64, {})


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_calibration_says_what_the_client_can_do(fleet: LoadFleet, protocol: str) -> None:
    assert 0.0 < calibrate(fleet, requests_for(protocol), duration_s=0.2) < np.inf


def test_a_long_closed_loop_takes_memory_only_as_it_is_used(fleet: LoadFleet, server: ScriptedHttp) -> None:
    loop = ClosedLoop(concurrency=2, duration_s=100_000.0)
    samples = fleet.run(a_job("rest", server.port, loop), should_stop=lambda live: live.sent > 10)
    assert len(samples) > 10
    assert samples.notes == ()


STARTED = """
import multiprocessing, time
from batchtune.load.worker_process import start_undisturbed

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,), daemon=True)
    start_undisturbed(process)
    with open(f"/proc/{process.pid}/status") as status:
        print(next(line for line in status if line.startswith("SigBlk")))
    process.terminate()
"""


def test_the_first_child_too_hears_no_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    """In a process of its own: the first child starts the resource tracker, after which Ctrl-C is let through."""
    (tmp_path / "started.py").write_text(STARTED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "started.py")], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout.split()[1], 16) & (1 << (signal.SIGINT - 1))


def test_ctrl_c_while_a_child_starts_is_raised_behind_that_and_ends_the_child() -> None:
    """Cut short, the child printed an EOFError: it reads what to run from its parent."""
    calls: list[str] = []

    def start() -> None:
        """Is interrupted, by way of a thread that does not block Ctrl-C as the main one does."""
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        calls.append("started")

    child: Any = SimpleNamespace(
        start=start, kill=lambda: calls.append("killed"), join=lambda: calls.append("joined")
    )
    with pytest.raises(KeyboardInterrupt):
        start_undisturbed(child)
    assert calls == ["started", "killed", "joined"]


async def test_a_null_server_whose_parent_is_gone_ends_silently() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    await _serve(theirs)
    theirs.close()


# -- two servers loaded in turn: who is sent to when, and what their CPU clocks then say of a request --


MS_NS = 1_000_000
PLAN = DuetPlan(turn_ns=25 * MS_NS, gap_ns=15 * MS_NS, order=(0, 1, 1, 0))


def test_a_schedule_goes_on_in_the_servers_next_turn_and_both_get_the_same():
    first, second = (PLAN.arranged(evenly(200, 0.05), server) for server in (0, 1))
    assert isinstance(first, Schedule)
    assert isinstance(second, Schedule)
    assert (first.due_ns // MS_NS).tolist() == [0, 5, 10, 15, 20, 120, 125, 130, 135, 140]
    assert (second.due_ns // MS_NS).tolist() == [40, 45, 50, 55, 60, 80, 85, 90, 95, 100]
    assert first.duration_s == second.duration_s == pytest.approx(0.16)


def test_clients_of_a_closed_loop_have_the_turns_of_their_server():
    loop = PLAN.arranged(ClosedLoop(concurrency=3, duration_s=0.05, requests_max=7), 1)
    assert isinstance(loop, ClosedLoop)
    assert loop.turns_ns == ((40 * MS_NS, 65 * MS_NS), (80 * MS_NS, 105 * MS_NS))
    assert loop.requests_max is None


def sent_by(source: ClosedSource, clock: list[int]) -> list[int]:
    """The numbers of the requests that a sender has taken, which takes whatever the source gives it."""
    sent: list[int] = []

    def fill() -> None:
        while source.backlog() and (index := source.take(clock[0])) != NOTHING:
            sent.append(index)

    source.sender = SimpleNamespace(fill=fill, flush=lambda: None)
    return sent


@pytest.mark.parametrize("think_ns", [0, 4])
def test_users_wait_between_turns_for_the_next_and_rest_after_the_last(columns, monkeypatch, think_ns):
    now, wakes = [1000], []
    monkeypatch.setattr(source_module, "_monotonic_ns", lambda: now[0])
    source = ClosedSource(
        columns,
        users=2,
        think_ns=think_ns,
        requests_max=100,
        wake_at=wakes.append,
        turns_ns=((10, 20), (30, 40)),
    )
    sent = sent_by(source, now)
    source.start(1000, 1040)
    assert (wakes, source.backlog(), source.exhausted) == ([1010], 0, False)
    now[0] = 1010
    source.wake()
    assert sent == [0, 1]
    now[0] = 1021  # both are answered after the end of the turn
    assert [source.finished(now[0]), source.finished(now[0])] == [NOTHING, NOTHING]
    now[0] = 1026
    source.wake()
    assert sent == [0, 1]
    assert (wakes[-1], source.exhausted) == (1030, False)
    now[0] = 1031
    source.wake()
    assert sent == [0, 1, 2, 3]
    now[0] = 1040
    assert source.finished(now[0]) == NOTHING
    assert source.exhausted


def test_a_turn_that_the_process_slept_through_is_lost_and_those_behind_it_are_not(columns, monkeypatch):
    now = [0]
    monkeypatch.setattr(source_module, "_monotonic_ns", lambda: now[0])
    source = ClosedSource(
        columns, users=1, think_ns=0, requests_max=9, wake_at=lambda _: None, turns_ns=((10, 20), (30, 40))
    )
    sent = sent_by(source, now)
    source.start(0, 40)
    now[0] = 35
    source.wake()
    assert sent == [0]
    assert columns.due[0] == 30


def requests_in(plan: DuetPlan, *, each: int = 4, latency_ns: int = 5 * MS_NS):
    """So many requests early in each turn."""
    samples = some_samples([int(begin) + number for begin in plan.begins_ns[:-1] for number in range(each)])
    samples.done_ns[:] = samples.due_ns + latency_ns
    return samples


def read_at(plan: DuetPlan, cpu_s: list[tuple[float, ...]]) -> list[Reading]:
    times = (plan.begins_ns - MS_NS).tolist()
    return [(at, at + 10, values) for at, values in zip(times, cpu_s, strict=True)]


CPU_S = [(0.0, 0.0), (0.4, 0.0), (0.4, 0.8), (0.4, 2.0), (1.2, 2.0)]


def test_a_cost_is_that_of_the_server_whose_turn_it_was():
    costs = pair_costs(requests_in(PLAN), read_at(PLAN, CPU_S), PLAN)
    assert costs == [pytest.approx((0.1, 0.2)), pytest.approx((0.2, 0.3))]


def test_a_pair_is_left_out_when_an_answer_or_a_reading_came_too_late():
    late, lost = requests_in(PLAN), requests_in(PLAN)
    late.done_ns[3] = PLAN.begins_ns[1]  # of the first turn, after its clocks were read
    lost.done_ns[-1] = NEVER_NS
    assert len(pair_costs(late, read_at(PLAN, CPU_S), PLAN)) == 1
    assert len(pair_costs(lost, read_at(PLAN, CPU_S), PLAN)) == 1
    readings = read_at(PLAN, CPU_S)
    readings[2] = (0, int(PLAN.begins_ns[2]) + 1, CPU_S[2])
    assert pair_costs(requests_in(PLAN), readings, PLAN) == []
    assert pair_costs(requests_in(PLAN), read_at(PLAN, CPU_S)[:1], PLAN) == []


def test_the_reader_ends_with_its_block_and_when_a_server_ends():
    with ClockReader([lambda: 1.0], PLAN) as unused:
        pass
    assert unused.readings == []

    def gone() -> float:
        raise psutil.NoSuchProcess(1)

    with ClockReader([lambda: 1.0, gone], PLAN) as reader:
        reader.start()
    assert reader.readings == []
    reader = ClockReader([lambda: 1.0], replace(PLAN, gap_ns=60_000 * MS_NS))
    reader.start()
    reader.__exit__(KeyboardInterrupt, None, None)  # waits for no turn
    assert len(reader.readings) <= 1


@pytest.mark.parametrize("arrivals", [ClosedLoop(concurrency=2, duration_s=0.1), evenly(400, 0.1)])
def test_a_fleet_sends_to_each_server_in_its_turns_alone(fleet: LoadFleet, arrivals: Arrivals) -> None:
    """What a request costs is made up: 1 s of one server, 3 s of the other. A host that stands still may spoil a duet."""

    orders = balanced_orders((0, 1), blocks=4, seed=1)
    plan = DuetPlan(
        turn_ns=25 * MS_NS, gap_ns=25 * MS_NS, order=tuple(server for order in orders for server in order)
    )
    with ScriptedHttp(always(http_answer())) as left, ScriptedHttp(always(http_answer())) as right:
        jobs = [a_job("rest", server.port, arrivals) for server in (left, right)]
        for _ in range(20):
            clocks = [lambda: 1.0 * left.count, lambda: 3.0 * right.count]
            if costs := run_duet(fleet, jobs, plan, clocks):
                break
    assert costs
    assert all(cost == pytest.approx((1.0, 3.0)) for cost in costs)
