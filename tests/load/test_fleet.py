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
from itertools import chain, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from batchtune.errors import MeasurementInvalidError, TargetError
from batchtune.load.calibration import _serve, calibrate, null_server
from batchtune.load.fleet import LiveAggregate, LoadFleet, LoadInterrupted, LoadJob, split
from batchtune.load.worker_process import start_undisturbed
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.system import interrupt
from batchtune.target.endpoint import Endpoint
from tests.load.load_servers import ScriptedHttp, a_job, always, closed, evenly, http_answer, requests_for


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


@pytest.mark.parametrize(("protocol", "body_bytes"), [("rest", 20), ("rest", 200_000), ("grpc", 200_000)])
def test_the_null_server_answers_everything(fleet: LoadFleet, protocol: str, body_bytes: int) -> None:
    requests = requests_for(protocol, bodies=(bytes(body_bytes),))
    with null_server() as endpoint:
        samples = fleet.run(
            LoadJob(endpoint=endpoint, requests=requests, arrivals=closed(8, 64), check_every=0)
        )
    assert (len(samples), samples.errors()) == (64, {})


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
