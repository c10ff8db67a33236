"""The highest rate within a limit is that of a server that runs for long, by each reading alike."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.measure.slo import Limit
from batchtune.scenario.payloads import build_requests
from batchtune.scenario.spec.workload import LoadSpec
from batchtune.twin.replicas import highest_rates
from batchtune.twin.service_time import Fitted, linear_service_time
from batchtune.twin.simulator.simulate import Batcher
from batchtune.twin.traffic import LONGEST_REQUESTS, Traffic, traffic_of
from batchtune.twin.twin import play
from tests.scenario.test_payloads import TOKENS, schedule
from tests.tune.tune_fakes import scenario_of
from tests.twin.twin_fakes import POISSON, batcher_of, limit_of

P95 = limit_of(0.06)


def changing(**load: object) -> Traffic:
    return Traffic(load=LoadSpec.model_validate({"warm_up": "0s", **load}))


STEPS = [{"rate": "100/s", "duration": "10s"}, {"rate": "300/s", "duration": "10s"}]


def test_steps_that_are_cut_to_some_requests_are_all_played_and_as_much_faster() -> None:
    due_s = changing(arrivals="steps", steps=STEPS).at(100_000.0).due_s(1_000)
    assert (len(due_s), math.ceil(due_s[-1])) == (LONGEST_REQUESTS, 4)
    assert np.count_nonzero(due_s < 2.0) == pytest.approx(LONGEST_REQUESTS / 4, rel=0.01)


def test_of_bursts_as_many_are_played_as_are_asked_for() -> None:
    bursts = changing(arrivals="on_off", on_off={"on": "1s", "off": "1s"}, rate="1/s")
    assert len(bursts.at(10_000.0).due_s(600_000)) == 600_000


def test_steps_without_a_rate_offer_their_mean() -> None:
    traffic = changing(arrivals="steps", steps=STEPS)
    assert (traffic.rate_rps, traffic.offered_rps) == (None, pytest.approx(200.0))
    assert changing(arrivals="poisson", rate="5/s").offered_rps is None
    assert Traffic(clients=4).offered_rps is None


def reading_of(fixed_s: float = 0.008, per_row_s: float = 0.0006, *, serial: bool = True) -> Fitted:
    return Fitted(
        service_time=linear_service_time(fixed_s, per_row_s, [1, 2, 4, 8, 16, 32, 64]),
        contention=0.0,
        serial=serial,
        jitter_ratio=1e-4,
        delay_s=0.0,
        front_end_s=0.0,
        wake_s=0.0,
    )


def highest(readings: list[Fitted], batcher: Batcher, *limits: Limit, error_ratio: float = 0.01) -> Any:
    return highest_rates(batcher, POISSON, readings, limits=limits or (P95,), error_ratio=error_ratio)


def true_capacity(reading: Fitted, size: int, threads: int) -> float:
    """Halving, with runs of many batches."""
    batcher = batcher_of(size, threads=threads)
    low, high = 0.0, reading.saturation_rps(batcher, POISSON)
    while high - low > 0.004 * high:
        rate = 0.5 * (low + high)
        played = play(batcher, POISSON.at(rate), [reading.device(64)], quantiles=(0.95,), requests=40_000)
        low, high = (rate, high) if played.latency_s[0, 0] <= P95.seconds else (low, rate)
    return low


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "parallel"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_small_and_large_batches_are_judged_alike(size: int, threads: int, serial: bool) -> None:
    reading = reading_of(serial=serial)
    found = highest([reading] * 3, batcher_of(size, threads=threads))
    truth = true_capacity(reading, size, threads)
    assert found[0] == pytest.approx(truth, rel=0.04)
    assert found[1:] == pytest.approx(np.full(2, truth), rel=0.04)


def test_no_rate_above_saturation_is_kept() -> None:
    reading, batcher = reading_of(), batcher_of(16)
    assert np.all(highest([reading] * 2, batcher, limit_of(30.0)) <= reading.saturation_rps(batcher, POISSON))


def test_each_reading_is_asked_even_where_the_first_keeps_the_limit_at_no_rate() -> None:
    slow, quick, usual = reading_of(0.08), reading_of(0.004), reading_of()
    found = highest([slow, quick, usual], batcher_of(16))
    assert found[0] == 0.0
    assert found[1] == pytest.approx(true_capacity(quick, 16, 1), rel=0.04)
    turned = highest([usual, quick, slow], batcher_of(16))
    assert turned[1] == pytest.approx(found[1], rel=0.02)
    assert turned[2] == 0.0


def test_the_highest_rate_keeps_every_limit_and_is_that_of_the_tightest() -> None:
    """A loose limit beside a tight one changes nothing; together they are kept where the first is missed."""
    p50 = Limit(name="p50", quantile=0.5, seconds=0.02)
    tight, loose, both = (
        highest([reading_of()], batcher_of(16), *ls)[0] for ls in ([p50], [P95], [p50, P95])
    )
    assert tight < 0.95 * loose
    assert both == pytest.approx(tight, rel=0.02)


def test_the_share_of_errors_is_a_limit_like_the_others() -> None:
    """A queue of one batch refuses long before p95 is missed; who allows no refusals gets a lower rate."""
    batcher = replace(batcher_of(16), max_enqueued_batches=1)
    lax, strict = (highest([reading_of()], batcher, error_ratio=ratio)[0] for ratio in (0.04, 0.0))
    assert strict < 0.9 * lax


# -- requests of a trace --

INDEX = np.array([0, 16, 17, 34, 40, 49, 53], np.int32)
MIX = [{"rows": 2, "weight": 98}, {"rows": 4, "inputs": "zeros"}, {"rows": 8, "weight": 1}]


def of_trace(path: Path, columns: str, *lines: object, **request: object) -> tuple[dict[int, float], Traffic]:
    """Shares of the numbers of rows, and the traffic, of a trace with such lines."""
    path.write_text("\n".join([f"offset_s,{columns}", *(f"{at},{line}" for at, line in enumerate(lines))]))
    load = {"arrivals": "trace", "trace": {"file": str(path)}}
    traffic = traffic_of(scenario_of(load=load, objective="latency", request={"mix": MIX, **request}))
    return dict(zip(traffic.rows, traffic.weights, strict=True)), traffic


def test_a_trace_says_how_many_rows_its_requests_have(tmp_path: Path) -> None:
    rows, traffic = of_trace(tmp_path / "t.csv", "rows", 8, 2, 8, 8)
    assert rows == {2: 1, 8: 3}
    assert traffic.at(100.0).mean_rows == 6.5


def test_a_trace_that_names_its_requests_has_the_rows_of_what_the_load_sends(tmp_path: Path) -> None:
    rows, _ = of_trace(tmp_path / "t.csv", "request", *INDEX)
    request = scenario_of(request={"mix": MIX}).request
    sent = build_requests(request, TOKENS, model_name="m")
    index = schedule(len(INDEX), request_index=INDEX).with_bodies(sent.order, sent.rows).request_index
    assert index is not None
    counts = np.unique(np.array(sent.rows)[index], return_counts=True)
    assert rows == dict(zip(*(column.tolist() for column in counts), strict=True))


def test_a_trace_that_does_not_say_or_is_gone_has_the_mix(tmp_path: Path) -> None:
    assert of_trace(tmp_path / "t.csv", "of", 1, 2)[0] == {2: 98, 4: 1, 8: 1}
    recorded = {"inputs": {"file": str(tmp_path / "recorded.npz")}}
    assert of_trace(tmp_path / "r.csv", "request", 1, 2, **recorded)[0] == {2: 98, 4: 1, 8: 1}
    gone = {"arrivals": "trace", "trace": {"file": str(tmp_path / "gone.csv")}}
    scenario = scenario_of(load=gone, objective="latency", request={"mix": MIX})
    assert traffic_of(scenario).rows == (2, 4, 8)
