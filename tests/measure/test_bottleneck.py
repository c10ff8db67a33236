from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.load.samples import Status, merge_endpoints
from batchtune.measure.bottleneck import Bottleneck, Kind, advice_for, find_bottleneck
from batchtune.measure.caveats import ServerSettings, caveat, settings_of
from batchtune.measure.measurement import Measurement, measure
from batchtune.plain_values import Coded, from_plain, to_plain
from batchtune.report.findings import text_of
from batchtune.report.words import bottleneck_sentence
from batchtune.scenario.spec.workload import Protocol
from batchtune.target.telemetry import ServerActivity
from tests.measure.measure_streams import make_samples, p95_within

EVENLY = np.arange(0, 5, 0.002)
PLAIN = ServerActivity(
    duration_s=5.0,
    batches=1000,
    rows=2500,
    mean_batch_rows=2.5,
    batches_by_rows={2: 500, 3: 500},
    execution_s_by_rows={2: 0.002, 3: 0.002},
    queue_wait_mean_s=0.001,
    device_busy_ratio=0.4,
    server_cpu_s=2.0,
)
SETTINGS = ServerSettings(max_batch_size=32, batch_threads=1, server_cores=2.0)


def loaded(
    latency_s: Any = 0.005,
    *,
    activity: ServerActivity | None = PLAIN,
    limit_s: float | None = None,
    notes: tuple[Coded, ...] = (),
    **samples: Any,
) -> Measurement:
    """A run of even requests."""
    made = make_samples(EVENLY, np.broadcast_to(latency_s, EVENLY.shape), **samples)
    slo = None if limit_s is None else p95_within(limit_s)
    return measure(made, warm_up_s=1.0, slo=slo, activity=activity, notes=notes)


def each(every: int, failed: Status) -> NDArray[np.uint8]:
    status = np.zeros(len(EVENLY), dtype=np.uint8)
    status[::every] = failed
    return status


def run(
    *,
    latency_s: float = 0.005,
    concurrency: int | None = 64,
    offered_rps: float | None = None,
    failed: Status = Status.OK,
    client_cpu_ratio: float = 0.1,
    **activity: object,
) -> Measurement:
    return loaded(
        latency_s,
        activity=replace(PLAIN, **activity),
        limit_s=0.05,
        status=each(10, failed),
        concurrency=concurrency,
        offered_rps=offered_rps,
        client_cpu_ratio=client_cpu_ratio,
    )


def named(measurement: Measurement, **settings: object) -> Kind:
    return find_bottleneck(measurement, replace(SETTINGS, **settings)).kind


BUSY = {"device_busy_ratio": 0.97, "mean_batch_rows": 30.0}
FEW = {"concurrency": 4, "mean_batch_rows": 2.0, "device_busy_ratio": 0.97}
FEW_GAIN = {**FEW, "execution_s_by_rows": {1: 0.002, 2: 0.0021}}
FEW_LOSE = {**FEW, "execution_s_by_rows": {1: 0.002, 2: 0.004}, "emulated": True}
TWO_THREADS = {"latency_s": 0.1, "mean_batch_rows": 1.7, "queue_wait_mean_s": 0.0002}
TWO_THREADS |= {"device_busy_ratio": 0.6}
CLOSED = {"timeout": 95, "full": 5}
TIMED_OUT = {"latency_s": 0.055, "concurrency": 16, "queue_wait_mean_s": 0.049}
TIMED_OUT |= {"device_busy_ratio": 0.05, "close_reasons": CLOSED}
QUICK = {"latency_s": 0.01, "mean_batch_rows": 20.0}
LATE_LOOP = {"mean_batch_rows": 20.0, "event_loop_lag_p99_s": 0.00256}
MODEL = {"batches_by_rows": {20: 500}, "execution_s_by_rows": {20: 0.004}, "server_cpu_s": 6.0}
IDLE_THREADS = {"latency_s": 0.3, "device_busy_ratio": 0.99, "server_cpu_s": 9.7}
"""Sixteen batch threads on two cores: two or three batches at a time fill the CPU."""
LARGE = {"mean_batch_rows": 485.0, "batches_by_rows": {485: 100}, "execution_s_by_rows": {485: 0.25}}
MIXED = {"mean_batch_rows": 27.0, "batches_by_rows": {4: 181, 124: 17, 125: 10, 496: 1}, "concurrency": 500}
"""The published experiment: 500 clients, max_batch_size 1000, 16 threads on two cores, one row a request.

From a few rows on each costs the same 2 ms (on two cores five batches run at once), so batches of 27 are as good
as batches of 1000.
"""
GROWING = {"execution_s_by_rows": {4: 0.0125, 124: 0.25, 125: 0.252, 496: 0.99}}
FIXED = {"execution_s_by_rows": dict.fromkeys((4, 124, 125, 496), 0.05)}
SIXTEEN = {"max_batch_size": 1000, "batch_threads": 16}
ALONE = {"mean_batch_rows": None, "queue_wait_mean_s": None, "batches_by_rows": {1: 2500}}
ALONE |= {"execution_s_by_rows": {1: 0.0038}, "latency_s": 0.1}
UNBATCHED = {"max_batch_size": None, "batch_threads": 8, "request_threads": 2}


@pytest.mark.parametrize(
    ("figures", "settings", "kind"),
    [
        ({"client_cpu_ratio": 0.95, "device_busy_ratio": 0.99}, {}, "client"),
        ({"failed": Status.QUEUE_FULL}, {}, "queue_limit"),
        ({"failed": Status.QUEUE_FULL, **BUSY, "server_cpu_s": 9.5}, {}, "device"),
        ({"failed": Status.THREAD_POOL_EXHAUSTED}, {}, "server_threads"),
        (TWO_THREADS, {"request_threads": 2}, "server_threads"),
        (TWO_THREADS, {"request_threads": 200}, "front_end"),
        ({**BUSY, "gpu_busy_ratio": 0.4}, {}, "batch_threads"),
        ({**BUSY, "gpu_busy_ratio": 0.97}, {}, "device"),
        ({**BUSY, "device_busy_ratio": 0.5, "gpu_busy_ratio": 0.9}, {}, "device"),
        ({**BUSY, "server_cpu_s": 4.0}, {}, "batch_threads"),
        ({**BUSY, "device_busy_ratio": 1.9, "server_cpu_s": 9.5}, {"batch_threads": 2}, "device"),
        ({**BUSY, "emulated": True}, {}, "device"),
        ({**BUSY, "emulated": True, "device_parallel": True}, {}, "batch_threads"),
        (TIMED_OUT, {"batch_timeout_s": 0.05}, "batch_timeout"),
        (TIMED_OUT, {"batch_timeout_s": 0.0}, "concurrency"),
        (FEW_GAIN, {"max_batch_size": 64}, "concurrency"),
        (FEW_LOSE, {"max_batch_size": 64}, "device"),
        ({**QUICK, "event_loop_lag_p99_s": 0.01, "server_cpu_s": 4.0}, {}, "front_end"),
        ({**QUICK, "server_cpu_s": 9.5}, {}, "front_end"),
        ({**QUICK, "queue_wait_mean_s": 0.0001}, {}, "front_end"),
        ({**LATE_LOOP, "server_cpu_s": 1.0, "emulated": True}, {}, "none"),  # kept from running
        ({**LATE_LOOP, **MODEL}, {}, "none"),  # it waits for its threads as long as the model executes
        ({**LATE_LOOP, **MODEL, "emulated": True}, {}, "front_end"),
        ({**IDLE_THREADS, **LARGE}, {**SIXTEEN, "rows_per_request": 40.0}, "device"),
        ({**IDLE_THREADS, **MIXED, **GROWING, "queue_wait_mean_s": 0.01}, SIXTEEN, "device"),
        ({**IDLE_THREADS, **MIXED, **FIXED, "queue_wait_mean_s": 0.01}, SIXTEEN, "concurrency"),
        ({**BUSY, "server_cpu_s": 2.8}, {"server_cores": 1.0}, "device"),  # other programs take the CPUs
        ({**BUSY, "server_cpu_s": 2.8}, {}, "batch_threads"),
        (ALONE, UNBATCHED, "server_threads"),
        ({**ALONE, "device_busy_ratio": 0.99}, UNBATCHED, "none"),
    ],
)
def test_what_limits_a_run_is_named_by_its_figures(
    figures: dict[str, Any], settings: dict[str, object], kind: Kind
) -> None:
    assert named(run(**figures), **settings) == kind


def test_a_noisy_host_comes_before_all() -> None:
    noise = caveat("host_steal", steal_ratio=0.1)
    assert named(loaded(concurrency=8, client_cpu_ratio=0.95, notes=(noise,))) == "host_noise"


@pytest.mark.parametrize(
    ("failed", "every", "verdict", "kind"),
    [
        (Status.SERVER_ERROR, 2, "FAIL", "errors"),
        (Status.SERVER_ERROR, 10, "FAIL", "errors"),
        (Status.QUEUE_FULL, 2, "FAIL", "queue_limit"),
        (Status.QUEUE_FULL, 10, "NOISY", "host_noise"),  # which a slower host may cause near capacity
        (Status.TIMEOUT, 2, "NOISY", "host_noise"),
    ],
)
def test_errors_that_are_the_servers_own_are_no_noise_of_the_host(
    failed: Status, every: int, verdict: str, kind: Kind
) -> None:
    noise = caveat("host_busy", foreign_ratio=0.3)
    noisy = loaded(limit_s=0.05, status=each(every, failed), concurrency=8, notes=(noise,))
    assert (noisy.verdict, named(noisy)) == (verdict, kind)


def test_a_client_throttled_to_half_is_named() -> None:
    assert named(loaded(0.002 + EVENLY, lag_s=EVENLY, offered_rps=500.0)) == "client"


MET = "the server met the offered rate and had capacity left"
LOWER = {"concurrency": None, "offered_rps": 500.0, "failed": Status.TIMEOUT}
FULL = {**QUICK, "server_cpu_s": 9.5, "device_busy_ratio": 0.7}


MORE_ROWS = "put more rows in each request"
LATE_CHECKS = "the server's event loop was late by more than 2.56 ms in 1 of 100 checks"
OWN_THREADS = (
    "the model's own threads fill the CPUs: the server uses 95 % of them, and it executes 70 % of the time"
)
UNMET = "450 of 500 requests/s are answered, but nothing that the server reports is used up"
ITS_CPU = "the server uses 95 % of its CPU, for more than executing batches"


@pytest.mark.parametrize(
    ("figures", "kind", "text", "advice"),
    [
        ({}, "none", "nothing that the server reports is used up", "measure with more clients"),
        ({"concurrency": None}, "none", MET, "raise the rate"),
        # 500/s were due where 540/s was the rate, for so the draw fell: all are answered
        ({"concurrency": None, "offered_rps": 540.0}, "none", MET, "raise the rate"),
        (LOWER, "none", UNMET, "lower the rate"),
        ({**LATE_LOOP, "server_cpu_s": 4.0, "emulated": True}, "front_end", LATE_CHECKS, MORE_ROWS),
        (FULL, "device", OWN_THREADS, "use a faster device"),
        ({**FULL, "emulated": True}, "front_end", ITS_CPU, MORE_ROWS),
    ],
)
def test_what_limits_a_run_is_told_with_its_figures_and_advice(
    figures: dict[str, Any], kind: Kind, text: str, advice: str
) -> None:
    found = find_bottleneck(run(**figures), SETTINGS)
    assert (found.kind, text_of(found.text)) == (kind, text)
    assert text_of(found.advice).startswith(advice)


@pytest.mark.parametrize(
    ("flags", "protocol", "threads"),
    [
        ({}, "grpc", None),
        ({"processes_per_replica": 2, "threads_per_process": 3}, "rest", 6),
        ({"--grpc_max_threads": "8", "rest_api_num_threads": 4}, "grpc", 8),
        ({"grpc_max_threads": 8, "rest_api_num_threads": 4}, "rest", 4),
        ({"grpc_max_threads": 0}, "grpc", None),
    ],
)
def test_request_threads_come_from_the_servers_flags(
    flags: dict[str, object], protocol: str, threads: int | None
) -> None:
    settings = settings_of(Configuration(batching=None), flags=flags, protocol=protocol)
    assert settings.request_threads == threads


def test_an_open_loop_that_is_met_by_half_empty_batches_has_room() -> None:
    """With a timeout of 0 a batch starts whenever one ends: busy threads, and room in each batch."""
    gains = {1: 0.002, 2: 0.0021, 4: 0.0023}
    busy = replace(PLAIN, device_busy_ratio=0.95, emulated=True, execution_s_by_rows=gains)
    met = loaded(offered_rps=500.0, activity=busy)
    assert named(met) == "none"
    assert text_of(find_bottleneck(met, SETTINGS).text) == (
        "batch threads execute 95 % of the time, in batches of 2.5 rows: larger ones serve more rows, each in more time"
    )
    ended = find_bottleneck(met, SETTINGS, at_capacity=True)
    assert (ended.kind, text_of(ended.text)) == ("device", "batch threads execute 95 % of the time")
    idle = replace(met, server=replace(busy, device_busy_ratio=0.3, execution_s_by_rows={}))
    assert text_of(find_bottleneck(idle, SETTINGS).advice) == "raise the rate to find what limits it"
    ended = find_bottleneck(idle, SETTINGS, at_capacity=True)
    assert (ended.kind, text_of(ended.advice)) == (
        "none",
        "higher rates miss the SLO: a looser limit, a faster device or more replicas serve more",
    )
    assert named(replace(met, requests=2 * met.requests)) == "device"
    assert named(met, max_batch_size=4) == "device"


def test_a_client_that_is_kept_from_running_is_named_in_a_closed_loop() -> None:
    samples = make_samples(EVENLY, np.full(len(EVENLY), 0.005), concurrency=8)
    halves = tuple((at * 100_000_000, 50_000_000) for at in range(50))
    throttled = measure(replace(samples, pauses_ns=halves), warm_up_s=1.0, slo=None, activity=PLAIN)
    assert named(throttled) == "client"


def test_a_smaller_batch_size_is_advised_only_where_batches_wait_for_rows() -> None:
    few = run(concurrency=4, mean_batch_rows=2.0)
    advised = {
        timeout_s: text_of(find_bottleneck(few, replace(SETTINGS, batch_timeout_s=timeout_s)).advice)
        for timeout_s in (0.0, 0.01)
    }
    assert "more clients" in advised[0.0]
    assert "max_batch_size" not in advised[0.0]
    assert "lower max_batch_size" in advised[0.01]


def test_more_threads_are_not_advised_where_other_programs_take_the_cpus() -> None:
    disturbed = replace(run(**BUSY, server_cpu_s=2.8), caveats=(caveat("host_busy", foreign_ratio=0.6),))
    assert find_bottleneck(disturbed, SETTINGS, blame_host=False).kind == "device"


@pytest.mark.parametrize(
    ("threads", "cores", "batch_s", "told"),
    [
        (1, None, 0.0049, {"device_busy_ratio": None}),  # worked out of execution times
        (
            2,
            2.0,
            0.0098,
            {"device_busy_ratio": 0.99, "server_cpu_s": 9.5},
        ),  # which counts overlapping ones once
    ],
)
def test_how_busy_threads_are_is_that_of_their_batches(
    threads: int, cores: float | None, batch_s: float, told: dict[str, Any]
) -> None:
    batches = {"batches_by_rows": {30: 1000}, "execution_s_by_rows": {30: batch_s}}
    settings = replace(SETTINGS, batch_threads=threads, server_cores=cores)
    found = find_bottleneck(run(mean_batch_rows=30.0, **batches, **told), settings)
    assert found.kind == "device"
    assert found.evidence["thread_busy_ratio"] == pytest.approx(0.98)


CROWDED = caveat("host_pressure", pressure_ratio=0.8, pressed="this machine")


@pytest.mark.parametrize(("concurrency", "due"), [(8, 1), (None, 2)])
def test_time_outside_queue_and_execution_is_the_front_ends_where_client_and_server_share_cpus(
    concurrency: int | None, due: int
) -> None:
    """REST on an attached server whose CPU time is not known: 11 of 14 ms are neither wait nor execution."""
    load = {"concurrency": concurrency, "offered_rps": 500.0 if concurrency is None else None}
    told = run(**load, latency_s=0.014, device_busy_ratio=0.15, server_cpu_s=None, mean_batch_rows=20.0)
    crowded = replace(told, requests=due * told.requests, caveats=(CROWDED,))
    found = find_bottleneck(crowded, replace(SETTINGS, protocol="rest"))
    assert found.kind == "front_end"
    assert "11 ms of 14 ms pass outside queue and device" in text_of(found.text)
    assert "use gRPC instead of REST" in text_of(found.advice)


@pytest.mark.parametrize("caveats", [(), (CROWDED,)])
def test_a_server_that_falls_behind_has_no_capacity_left_and_its_limit_is_open_without_its_cpu_time(
    caveats: tuple[Coded, ...],
) -> None:
    kept_up = run(concurrency=None, offered_rps=500.0, server_cpu_s=None, queue_wait_mean_s=0.004)
    behind = replace(kept_up, requests=2 * kept_up.requests, caveats=caveats)
    found = find_bottleneck(behind, SETTINGS)
    assert (find_bottleneck(kept_up, SETTINGS).kind, found.kind) == ("none", "unknown")
    assert "capacity left" not in text_of(found.text)


def test_a_server_that_tells_nothing_leaves_it_open() -> None:
    assert named(loaded(concurrency=8, activity=None)) == "unknown"


@pytest.mark.parametrize("concurrency", [8, None])
def test_where_many_requests_fail_and_nothing_is_used_up_no_more_load_is_advised(
    concurrency: int | None,
) -> None:
    """A closed loop of 8 could not fill its batches either: of those that fail more clients make more."""
    found = find_bottleneck(run(concurrency=concurrency, failed=Status.SERVER_ERROR), SETTINGS)
    assert (found.kind, text_of(found.text)) == ("errors", "10 % of the requests failed (server_error)")
    assert "clients" not in text_of(found.advice)
    assert "rate" not in text_of(found.advice)


def test_a_dead_replica_is_named_by_the_limit() -> None:
    parts = [
        make_samples(EVENLY[at::3], np.full(len(EVENLY[at::3]), 0.005), status=status, concurrency=8)
        for at, status in enumerate([None, None, np.full(len(EVENLY[2::3]), Status.REFUSED, dtype=np.uint8)])
    ]
    loaded = measure(merge_endpoints(parts, ["a:1", "b:2", "c:3"]), warm_up_s=1.0, slo=None)
    found = find_bottleneck(loaded, SETTINGS)
    assert found.kind == "errors"
    assert text_of(found.text).startswith(
        "33.4 % of the requests failed (refused); c:3 failed 100 % of its requests"
    )


def test_a_verdict_carries_its_figures_and_survives_json() -> None:
    found = find_bottleneck(run(device_busy_ratio=0.97, mean_batch_rows=30.0, emulated=True), SETTINGS)
    assert found.evidence["thread_busy_ratio"] == 0.97
    assert "97 %" in text_of(found.text)
    assert from_plain(Bottleneck, orjson.loads(orjson.dumps(to_plain(found)))) == found


def test_settings_come_from_a_configuration_and_its_servers_defaults() -> None:
    silent = settings_of(Configuration(batching=BatchingParameters(num_batch_threads=3)))
    assert (silent.max_batch_size, silent.batch_timeout_s, silent.batch_threads) == (1000, 0.0, 3)
    assert settings_of(Configuration(batching=None)).max_batch_size is None
    parameters = BatchingParameters(max_batch_size=8, batch_timeout_micros=2500)
    told = settings_of(Configuration(batching=parameters))
    assert (told.max_batch_size, told.batch_timeout_s) == (8, 0.0025)
    assert settings_of(Configuration(batching=None), cpus=[0, 1, 2]).batch_threads == 12
    for dialect, threads in (("tfserving", 3), ("triton", 1), ("http", 1)):
        absent = Configuration(batching=BatchingParameters(), dialect=dialect)
        assert settings_of(absent, cpus=[0, 1, 2]).batch_threads == threads


def test_without_batching_request_threads_that_all_execute_are_the_device() -> None:
    busy = {"execution_s_by_rows": {1: 0.0157}, "device_busy_ratio": 0.98, "server_cpu_s": 4.6}
    settings = replace(settings_of(Configuration(batching=None), server_cores=2.0), batch_threads=8)
    found = find_bottleneck(run(**{**ALONE, **busy, "latency_s": 0.005}), settings)
    assert (found.kind, text_of(found.text)) == ("device", "request threads execute 98.1 % of the time")
    assert "batching" not in text_of(found.advice)


@pytest.mark.parametrize("code", ["host_busy", "host_pressure", "host_steal"])
def test_a_late_event_loop_on_a_noisy_host_is_not_the_front_ends(code: str) -> None:
    ratios = {"foreign_ratio": 0.34, "pressure_ratio": 0.4, "steal_ratio": 0.1, "pressed": "this machine"}
    late = run(**LATE_LOOP, server_cpu_s=4.0)
    noisy = replace(late, caveats=(*late.caveats, caveat(code, **ratios)))
    found = find_bottleneck(noisy, SETTINGS, blame_host=False)
    assert found.kind == "none"
    assert "it did not have the machine's CPUs to itself" in text_of(found.text)
    assert text_of(found.advice) == "on a quiet machine it may serve more"


def test_a_server_with_unknown_parameters_is_not_judged_by_any() -> None:
    """98 % busy in batches of 31 rows of 32, which nobody told: neither 1000 rows nor a timeout is assumed."""
    busy = run(mean_batch_rows=31.0, device_busy_ratio=0.98, queue_wait_mean_s=0.002, latency_s=0.005)
    foreign = settings_of(Configuration(batching=None), protocol="grpc", known=False)
    found = find_bottleneck(busy, replace(foreign, server_cores=2.0))
    assert found.kind in ("device", "none")
    assert "max_batch_size" not in text_of(found.text) + text_of(found.advice)
    assert "request threads" not in text_of(found.text)


def cases() -> Iterator[SimpleNamespace]:
    """What advice depends on of the facts, in every combination."""
    protocols: tuple[Protocol | None, ...] = (*get_args(Protocol), None)
    either = (True, False)
    for protocol, batching, closed, full, met, disturbed, at_capacity in itertools.product(
        protocols, (True, False, None), either, (True, False, None), either, either, either
    ):
        yield SimpleNamespace(
            settings=SimpleNamespace(
                protocol=protocol, batching=batching, own_words=None, batch_timeout_s=0.01
            ),
            run=SimpleNamespace(concurrency=8 if closed else None),
            batches_full=full,
            is_met=met,
            is_missed=False,
            disturbed=disturbed,
            at_capacity=at_capacity,
        )


def can_be(kind: Kind, case: SimpleNamespace) -> bool:
    """Which kinds `find_bottleneck` can give: these need a batching parameter that is known, or a closed loop."""
    if kind in ("batch_timeout", "batch_threads"):
        return case.settings.batching is True
    return kind != "concurrency" or (case.settings.batching is True and case.run.concurrency is not None)


def forbidden(case: SimpleNamespace) -> Iterator[str]:
    """What would contradict the case, or another sentence of the same report."""
    yield "no batching parameter"  # the report may say in the same breath that better points are likely
    yield "buys more"
    if case.settings.protocol != "rest":
        yield "REST"
    if case.settings.protocol in ("grpc", "kserve_grpc", None):
        yield "gRPC"
    if case.settings.protocol != "kserve_rest":
        yield "JSON"
    if case.run.concurrency is not None:
        yield "the rate"
    else:
        yield "more clients"
        yield "in flight"
    if case.settings.batching is not True:
        yield from ("max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches")
        yield "larger batches"
    yield "batching is off"  # of a sweep and of a comparison: they measured it


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_advice_contradicts_its_case(kind: Kind) -> None:
    for case in filter(lambda one: can_be(kind, one), cases()):
        text = text_of(advice_for(kind, case))  # type: ignore[arg-type]
        assert text
        assert [words for words in forbidden(case) if words in text] == [], (case, text)
        assert not (case.batches_full and "or larger batches" in text), (case, text)
        is_open = case.run.concurrency is None
        reached = not case.is_met or case.at_capacity
        assert not (kind == "none" and reached and is_open and "raise the rate" in text), case


@pytest.mark.parametrize("code", ["no_target_metrics", "no_server_counters", "no_metrics_page"])
@pytest.mark.parametrize("concurrency", [64, None])
def test_of_a_server_that_reports_no_batches_no_load_shows_capacity_left(
    code: str, concurrency: int | None
) -> None:
    told = run(concurrency=concurrency)
    silent = find_bottleneck(replace(told, caveats=(*told.caveats, caveat(code))), SETTINGS)
    assert find_bottleneck(told, SETTINGS).kind == "none"
    assert (silent.kind, silent.text.code) == ("unknown", "server_silent")
    assert bottleneck_sentence(silent).startswith(
        "not known; the server reports nothing about itself. Let the server"
    )


UNTOLD: dict[str, Any] = {"execution_s_by_rows": {}, "queue_wait_mean_s": None, "device_busy_ratio": None}
BATCHES_ONLY = {**UNTOLD, "mean_batch_rows": 32.0}


def test_batches_alone_show_no_capacity_left_in_a_closed_loop_but_a_rate_that_was_met_does() -> None:
    full = find_bottleneck(run(**BATCHES_ONLY), SETTINGS)
    assert (full.kind, full.text.code) == ("unknown", "busy_untold")
    assert "how long its batches execute" in bottleneck_sentence(full)
    waits = BATCHES_ONLY | {"queue_wait_mean_s": 0.004}
    assert find_bottleneck(run(**waits), SETTINGS).kind == "unknown"
    met = run(**BATCHES_ONLY, concurrency=None, offered_rps=500.0)
    assert find_bottleneck(met, SETTINGS).kind == "none"


def http_settings(**words: str) -> ServerSettings:
    """Of a server of kind http that has these parameters, by our names."""
    configuration = Configuration(
        batching=BatchingParameters(max_batch_size=32),
        dialect="http",
        words=tuple((ours, own, 1) for ours, own in words.items()),
    )
    return settings_of(configuration, server_cores=2.0, protocol="http")


def test_a_server_without_a_number_of_threads_is_not_advised_to_raise_it() -> None:
    busy = run(device_busy_ratio=0.97, mean_batch_rows=30.0, server_cpu_s=0.1)
    alone = find_bottleneck(busy, http_settings(max_batch_size="rows"))
    assert alone.kind == "device"
    assert "num_batch_threads" not in bottleneck_sentence(alone)
    several = find_bottleneck(busy, http_settings(max_batch_size="rows", num_batch_threads="workers"))
    assert several.kind == "batch_threads"
    assert "Raise workers: the device has room" in bottleneck_sentence(several)
    few = find_bottleneck(run(concurrency=4), http_settings(max_batch_size="rows"))
    assert "lower rows to the rows that arrive together" in bottleneck_sentence(few)
    refused = find_bottleneck(run(failed=Status.QUEUE_FULL), http_settings(max_batch_size="rows"))
    assert "max_enqueued_batches" not in bottleneck_sentence(refused)
    assert (
        "requests were refused: the server's queue is full, or its limit on requests is reached"
        in text_of(refused.text)
    )
    assert bottleneck_sentence(refused).startswith("the server's limit on waiting requests; ")
