"""Several replicas: requests go to them in turn, whoever sends, and the figures of each are told."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.archive.run import read_parquet, to_parquet
from batchtune.errors import ScenarioError
from batchtune.load import worker_process as process
from batchtune.load.fleet import LoadFleet, split
from batchtune.load.samples import Samples, Status, merge, merge_endpoints, new_memory
from batchtune.measure.measurement import Measurement, measure
from batchtune.report.findings import text_of
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.target.endpoint import Endpoint, replicas_of
from tests.load.load_servers import ScriptedHttp, a_job, always, closed, evenly, http_answer, requests_for
from tests.measure.measure_streams import make_samples, p95_within

EVENLY = np.arange(0, 5, 0.002)


def at(*ports: int) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(model_name="m", rest_port=port) for port in ports)


def test_requests_go_to_the_endpoints_in_turn_however_many_workers_send() -> None:
    schedule = evenly(1000, 0.1)
    job = replace(a_job("rest", 1, schedule), replicas=at(10, 11, 12))
    for workers in (1, 2, 5):
        sent: dict[int, int | None] = {}
        for part in split(job, workers):
            assert isinstance(part.arrivals, Schedule)
            sent |= dict.fromkeys(part.arrivals.due_ns.tolist(), part.endpoint.rest_port)
        assert [sent[due] for due in schedule.due_ns.tolist()] == [10 + i % 3 for i in range(100)]


@pytest.mark.parametrize("arrivals", [evenly(500, 0.2), closed(4, 100)], ids=["open loop", "closed loop"])
def test_replicas_are_sent_their_shares_and_told_apart(fleet: LoadFleet, arrivals: Any) -> None:
    bodies = tuple(b"%d" % number for number in range(4))
    refused = http_answer(status="500 Internal Server Error")
    with ScriptedHttp(always(http_answer())) as good, ScriptedHttp(always(refused)) as bad:
        job = a_job("rest", 1, arrivals, requests=requests_for("rest", bodies=bodies))
        samples = fleet.run(replace(job, replicas=at(good.port, bad.port)))
    assert len(samples) == 100
    assert samples.endpoints == (f"127.0.0.1:{good.port}", f"127.0.0.1:{bad.port}")
    assert samples.endpoint is not None
    assert samples.worker is not None
    assert [good.count, bad.count] == np.bincount(samples.endpoint).tolist()
    assert (samples.status[samples.endpoint == 0] == Status.OK).all()
    assert (samples.status[samples.endpoint == 1] != Status.OK).all()
    if isinstance(arrivals, Schedule):
        assert samples.due_ns.tolist() == arrivals.due_ns.tolist()
        assert samples.endpoint.tolist() == [0, 1] * 50
        assert set(good.bodies) == {b"0", b"2"}
    assert samples.client_cores == 2


async def test_all_endpoints_are_connected_to_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not answer costs one timeout, however many more do not."""
    meeting = asyncio.Barrier(2)

    async def prepare() -> None:
        await asyncio.wait_for(meeting.wait(), 1.0)

    driver = SimpleNamespace(prepare=prepare, abandon=lambda: "abandoned")
    monkeypatch.setattr(process, "Driver", lambda *_given: driver)
    parts = split(replace(a_job("rest", 1, evenly(100, 0.1)), replicas=at(10, 11)), 1)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send("stop")
        done = await process._run(theirs, parts, [new_memory(part.capacity) for part in parts])
        assert ours.recv() == "ready"
    assert done == ("abandoned", "abandoned")


def test_a_pause_of_the_process_that_loads_four_replicas_counts_once() -> None:
    part = make_samples(EVENLY, np.full(len(EVENLY), 0.005))
    stalls_ns = [((2_000_000_000, length_ns),) for length_ns in (150_000_000, 160_000_000, 155_000_000)]
    merged = merge_endpoints([replace(part, pauses_ns=stall_ns) for stall_ns in stalls_ns], ["a", "b", "c"])
    assert merged.pauses_ns == stalls_ns[1]


def of_replicas(*latencies_ms: float) -> Samples:
    """Requests in turn to replicas that answer in about so long."""
    generator = np.random.default_rng(5)
    dues_s = [EVENLY[number :: len(latencies_ms)] for number in range(len(latencies_ms))]
    parts = [
        make_samples(due_s, latency_ms / 1e3 * generator.uniform(0.9, 1.1, len(due_s)))
        for due_s, latency_ms in zip(dues_s, latencies_ms, strict=True)
    ]
    return merge_endpoints(parts, [f"replica-{number}:8500" for number in range(len(parts))])


def judged(samples: Samples) -> tuple[Measurement, str]:
    measured = measure(samples, warm_up_s=1.0, slo=p95_within(0.05))
    codes = ("endpoint_slow", "endpoint_failing")
    return measured, "; ".join(text_of(each) for each in measured.caveats if each.code in codes)


def test_the_replica_that_is_slower_than_all_others_is_named() -> None:
    measured, told = judged(of_replicas(5.0, 5.1, 9.0, 5.0))
    assert told.startswith("replica-2:8500 is slower than the other 3: p95 9.8")
    figures = [(each.endpoint, each.requests) for each in measured.endpoints]
    assert figures == [(f"replica-{number}:8500", 500) for number in range(4)]
    assert measured.endpoints[2].p50_s.value == pytest.approx(0.009, rel=0.02)
    total_rps = sum(each.throughput_rps for each in measured.endpoints)
    assert total_rps == pytest.approx(measured.throughput_rps.value, rel=0.02)
    for alike in ((5.0, 5.0, 5.0), (5.0, 5.2, 5.1), (9.0, 9.0, 5.0), (5.0,)):
        assert judged(of_replicas(*alike))[1] == ""


def test_the_replica_that_fails_is_named_by_that() -> None:
    samples = of_replicas(5.0, 5.0, 5.0)
    assert samples.endpoint is not None
    status = samples.status.copy()
    status[np.flatnonzero(samples.endpoint == 1)[::10]] = int(Status.SERVER_ERROR)
    _, told = judged(replace(samples, status=status))
    assert re.fullmatch(r"replica-1:8500 failed 10\S* % of its requests, the next worst 0 %", told)


def test_endpoints_survive_workers_chunks_and_the_file(tmp_path: Path) -> None:
    whole = merge([of_replicas(5.0, 9.0), of_replicas(5.0, 9.0)])
    (path := tmp_path / "samples.parquet").write_bytes(to_parquet(whole))
    kept = read_parquet(path)
    assert kept.endpoints == whole.endpoints == ("replica-0:8500", "replica-1:8500")
    assert (kept.workers, kept.notes) == (whole.workers, whole.notes)
    for name in ("endpoint", "worker"):
        assert np.array_equal(getattr(kept, name), getattr(whole, name))
        assert len(getattr(whole, name)) == len(whole)
    path.write_bytes(to_parquet(whole.thinned(2)))
    assert (read_parquet(path).one_in, read_parquet(path).failures) == (2, 0)


REPLICAS = """\
name: replicas
target: {kind: external, model: m, grpc_url: "lb:8500", endpoints: ["10.0.0.7:8500", "[::1]:8501"]}
load: {arrivals: poisson, rate: 100}
objective: latency
"""


def test_a_scenario_names_its_replicas() -> None:
    scenario = parse_scenario(REPLICAS)
    assert parse_scenario(format_scenario(scenario)).target.endpoints == scenario.target.endpoints
    balancer = Endpoint(model_name="m", host="lb", grpc_port=8500, rest_port=8501)
    first, second = replicas_of(balancer, scenario.target.endpoints, "grpc")
    assert (first.host, first.grpc_port, first.rest_port) == ("10.0.0.7", 8500, None)
    assert second.authority("grpc") == "[::1]:8501"
    assert replicas_of(balancer, ["a:1"], "rest")[0].authority("rest") == "a:1"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('target.endpoints=["nowhere"]', r"target\.endpoints"),
        ('target.endpoints=["a:1", "a:1"]', r"--set target\.endpoints=.*: a:1 is given twice"),
        ("target.kind=tfserving", r"target\.endpoints: replicas run already"),
    ],
)
def test_a_mistake_in_the_replicas_names_the_key(change: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        parse_scenario(REPLICAS, overrides=[change])


EACH = "each worker sends a request to each endpoint at least, {} at once; the limit is {}"


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ("{arrivals: poisson, rate: 100, max_in_flight: 1}", "max_in_flight: " + EACH.format(2, 1)),
        (
            "{arrivals: poisson, rate: 100, max_in_flight: 3, processes: 2}",
            "max_in_flight: " + EACH.format(4, 3),
        ),
        (
            "{arrivals: closed, concurrency: 1}",
            "concurrency: 1 client cannot ask all 2 of target.endpoints: each client uses one",
        ),
        ("{arrivals: poisson, rate: 100, max_in_flight: 4, processes: 2}", None),
        ("{arrivals: closed, concurrency: 2}", None),
    ],
)
def test_a_load_needs_a_request_for_each_replica(load: str, told: str | None) -> None:
    objective = "latency" if "poisson" in load else "throughput"
    text = REPLICAS.replace("{arrivals: poisson, rate: 100}", load).replace("latency", objective)
    if told is None:
        assert len(parse_scenario(text).target.endpoints) == 2
        return
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, source="s.yaml")
    assert caught.value.message == f"s.yaml:3: load.{told}"
