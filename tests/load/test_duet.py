"""Two servers loaded in turn: who is sent to when, and what their CPU clocks then say of a request, on any host."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from batchtune.load.clients import source as source_module
from batchtune.load.clients.source import NOTHING, ClosedSource
from batchtune.load.duet import ClockReader, DuetPlan, Reading, pair_costs, run_duet
from batchtune.load.fleet import LoadFleet
from batchtune.load.samples import NEVER_NS
from batchtune.measure.quantiles import balanced_orders
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from tests.load.load_servers import ScriptedHttp, a_job, always, evenly, http_answer
from tests.load.test_samples import some_samples

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
