"""A fleet in pieces is the fleet: same arrivals in law, same latencies, whoever plays which piece."""

from __future__ import annotations

import math
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching.parameters import Configuration
from batchtune.errors import TargetError, TwinError, UsageError
from batchtune.load.cluster.host import HostLostError
from batchtune.measure.slo import Limit
from batchtune.report.twin import print_plan
from batchtune.scenario.spec.load import LoadSpec
from batchtune.twin.model.exact import simulate_whole, whole_fleet
from batchtune.twin.model.exact_processes import process_players
from batchtune.twin.model.exact_ray import RangePlayer, _Turns, ray_players
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator import whole_fleet as module
from batchtune.twin.simulator.latency_histogram import RELATIVE_ERROR, LatencyHistogram
from batchtune.twin.simulator.replica import Routing
from batchtune.twin.simulator.summary import order_statistics
from batchtune.twin.simulator.whole_fleet import Gaps, WholeFleet, play_range
from tests.twin.simulated_run import simulate_open
from tests.twin.test_replicas import twin_of
from tests.twin.twin_fakes import batcher_of, device_of, plan_replicas

FLEET = WholeFleet(
    batcher=batcher_of(16, 1.0),
    device=device_of(),
    replicas=8,
    rate_rps=8_000.0,
    duration_s=20.0,
    routing="random",
)


@pytest.mark.parametrize("routing", ["random", "round_robin", "least_loaded"])
def test_latencies_are_those_of_the_fleet_in_one_piece(routing: Routing) -> None:
    fleet = replace(FLEET, routing=routing)
    due_s = np.cumsum(np.random.default_rng(5).exponential(1.0, 160_000)) / fleet.rate_rps
    together = simulate_open(due_s, 1, fleet.batcher, fleet.device, replicas=8, routing=routing)
    figures = simulate_whole(fleet, pool_latency_s={"p50": 0.0, "p95": 0.0}, processes=1)
    assert figures.requests == pytest.approx(160_000, rel=0.001)
    assert figures.latency_s["p50"] == pytest.approx(together.quantile(0.5), rel=0.015)
    assert figures.latency_s["p95"] == pytest.approx(together.quantile(0.95), rel=0.015)
    assert figures.mean_batch_rows == pytest.approx(together.mean_batch_rows, rel=0.02)
    assert figures.exact


def test_a_refused_request_is_one_without_an_answer() -> None:
    small = replace(FLEET.batcher, max_enqueued_batches=1, max_batch_size=1, batch_timeout_s=0.0)
    figures = simulate_whole(replace(FLEET, batcher=small), pool_latency_s={"p95": 0.0}, processes=1)
    answered_rps = figures.busy_ratio / 0.00205
    assert figures.error_ratio == pytest.approx(1.0 - answered_rps / 1_000.0, abs=0.01)
    assert figures.latency_s["p95"] == np.inf
    assert figures.busy_ratio > 0.8


def test_a_plan_says_that_more_is_refused_than_may_be() -> None:
    twin = twin_of(readings=3)
    limit = Limit(name="p50", quantile=0.5, seconds=0.02)
    plan = plan_replicas(twin, batcher_of(64), Traffic(rate_rps=1.0), rate_rps=500.0, limits=(limit,))
    kept = simulate_whole(
        replace(FLEET, replicas=1, rate_rps=500.0), pool_latency_s={"p50": 0.005}, processes=1
    )

    def told(**change: Any) -> str:
        stream = StringIO()
        exact = replace(plan, exact=replace(kept, **change))
        print_plan(exact, twin, configuration=Configuration(batching=None), run=Path("run"), stream=stream)
        return " ".join(stream.getvalue().split())

    assert "; every limit is kept." in told()
    assert "; more is REFUSED than the 1.00 % that may be." in told(error_ratio=0.2)
    assert "; a limit is MISSED and more is REFUSED than" in told(
        error_ratio=0.6, latency_s={"p50": math.inf}
    )


@given(
    replicas=st.integers(1, 2_000),
    routing=st.sampled_from(["random", "round_robin", "least_loaded"]),
    requests=st.integers(1_000, 50_000_000),
)
def test_pieces_are_all_of_the_fleet_and_bounded(replicas: int, routing: Routing, requests: int) -> None:
    fleet = replace(FLEET, replicas=replicas, routing=routing, rate_rps=1e5, duration_s=requests / 1e5)
    numbers = [number for first, last in fleet.ranges() for number in range(first, last)]
    assert numbers == list(range(len(numbers)))
    sizes = [fleet.of_piece(number) for number in numbers]
    most = max(module.PIECE_REQUESTS, module.TIED_PIECE_REQUESTS * module.BLOCK)
    assert max(counted for _, counted in sizes) <= most
    assert sum(counted for _, counted in sizes) == pytest.approx(requests, abs=len(numbers))
    per_replica = requests / replicas
    assert sum(counted / many for many, counted in sizes) == pytest.approx(
        fleet.blocks * per_replica, abs=len(numbers)
    )


@pytest.mark.parametrize("routing", ["random", "round_robin"])
@pytest.mark.parametrize("gaps", ["poisson", "gamma", "constant"])
def test_what_a_replica_gets_has_the_mean_and_the_spread_of_its_share(routing: Routing, gaps: Gaps) -> None:
    fleet = replace(FLEET, replicas=4, routing=routing, rate_rps=4.0, gaps=gaps, gaps_cv=2.0)
    rng = np.random.default_rng(9)
    drawn = np.diff(module._due_s(fleet, 1, 200_000, rng))
    whole_variance = {"poisson": 1.0, "gamma": 4.0, "constant": 0.0}[gaps] / 16.0
    in_turn = 4.0 * whole_variance
    at_random = 4.0 * whole_variance + 12.0 * (1.0 / 16.0)  # a geometric number: mean 4, variance 12
    assert drawn.mean() == pytest.approx(1.0, rel=0.02)
    assert drawn.var() == pytest.approx(
        in_turn if routing == "round_robin" else at_random, rel=0.05, abs=1e-12
    )


def test_figures_do_not_depend_on_who_plays_which_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_REQUESTS", 2_000)
    fleet = replace(FLEET, rate_rps=800.0)
    whole, first, second = play_range(fleet, 0, 8), play_range(fleet, 0, 3), play_range(fleet, 3, 8)
    first.add(second)
    assert first.latencies.counts.tolist() == whole.latencies.counts.tolist()
    assert first.busy_s == pytest.approx(whole.busy_s)
    assert (first.rows, first.batches) == (whole.rows, whole.batches)


@pytest.mark.slow
def test_processes_tell_the_same_figures_as_this_one() -> None:
    alone, shared = (
        simulate_whole(FLEET, pool_latency_s={"p50": 0.0, "p99": 0.0}, processes=processes)
        for processes in (1, 2)
    )
    assert shared.latency_s == alone.latency_s
    assert shared.requests == alone.requests
    assert shared.processes == 2


def test_a_process_that_is_killed_ends_the_simulation() -> None:
    killed: Any = signal.raise_signal
    with (
        pytest.raises(TwinError, match="one of the 2 processes that simulate the fleet was killed"),
        process_players(killed, 2) as play,
    ):
        list(play(iter([signal.SIGKILL])))  # type: ignore[list-item]


def test_progress_ends_with_all_requests() -> None:
    calls: list[tuple[int, int]] = []
    simulate_whole(
        replace(FLEET, duration_s=2.0),
        pool_latency_s={"p95": 0.0},
        processes=1,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (16_000, 16_000)


@pytest.mark.parametrize(
    "load",
    [
        {"arrivals": "on_off", "rate": "5/s", "on_off": {"on": "1s", "off": "1s"}},
        {"arrivals": "steps", "steps": [{"rate": "5/s", "duration": "1s"}]},
    ],
)
def test_arrivals_whose_rate_changes_are_refused_with_what_to_do(load: dict[str, object]) -> None:
    traffic = Traffic(rate_rps=1.0, load=LoadSpec.model_validate(load))
    with pytest.raises(TwinError, match="--exact simulates steady arrivals") as failure:
        whole_fleet(
            twin_of(readings=1).best_fit,
            batcher_of(16),
            traffic,
            replicas=2,
            rate_rps=10.0,
            duration_s=1.0,
            routing="random",
        )
    assert "--profile" in failure.value.hint


def test_kinds_of_requests_and_bursts_come_along() -> None:
    load = LoadSpec.model_validate({"arrivals": "gamma", "rate": "5/s", "gamma": {"cv": 3}})
    traffic = Traffic(rate_rps=1.0, load=load, rows=(1, 4), weights=(1.0, 1.0))
    fleet = whole_fleet(
        twin_of(readings=1).best_fit,
        batcher_of(16),
        traffic,
        replicas=100,
        rate_rps=20_000.0,
        duration_s=1.0,
        routing="least_loaded",
    )
    assert (fleet.gaps, fleet.gaps_cv, fleet.blocks) == ("gamma", 3.0, 2)
    figures = simulate_whole(fleet, pool_latency_s={"p95": 0.0}, processes=1)
    assert not figures.exact
    assert figures.relative_error == RELATIVE_ERROR
    assert figures.latency_s["p95"] < 0.1


# -- actors of a Ray cluster --


class FakeActor:
    """Plays at once; is lost when it has played so many ranges."""

    def __init__(self, lost_after: int) -> None:
        self._left = lost_after
        self._player = RangePlayer(FLEET)

    def ask(self, method: str, *arguments: Any, limit_s: float) -> Any:
        assert limit_s > 0
        if self._left == 0:
            raise HostLostError("gone")
        self._left -= 1
        return getattr(self._player, method)(*arguments)


def played(*lost_after: int) -> int:
    turns = _Turns([FakeActor(many) for many in lost_after])  # type: ignore[misc]
    with ThreadPoolExecutor(len(lost_after)) as threads:
        return sum(
            part.latencies.requests for part in threads.map(turns.play, [(0, 1), (1, 2), (2, 3), (3, 4)])
        )


def test_every_range_is_played_once_though_actors_are_lost() -> None:
    assert played(100, 0, 1) == 4 * 20_000


def test_without_an_actor_left_the_error_says_what_to_do() -> None:
    with pytest.raises(TargetError, match="every worker of the Ray cluster was lost"):
        played(1, 1)


def ray_with(free_cpus: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of four CPUs, of which so many are free, as the package `ray` would show it."""

    class FailedError(Exception):
        pass

    class Remote:
        def __init__(self, call: Any) -> None:
            self.remote = call

        def options(self, **_needs: object) -> Remote:
            return Remote(lambda make: SimpleNamespace(ask=Remote(partial(answered, make()))))

    def answered(made: Any, method: str, *arguments: Any) -> Any:
        return getattr(made, method)(*arguments)

    modules = {name: ModuleType(name) for name in ("ray", "ray.util", *(f"ray.util.{own}" for own in OF_RAY))}
    vars(modules["ray"]).update(
        __spec__=ModuleSpec("ray", None),
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 4.0},
        available_resources=lambda: {"CPU": free_cpus} if free_cpus else {},
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}],
        remote=Remote,
        get=lambda answer, timeout: answer,
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=FailedError, GetTimeoutError=FailedError),
    )
    vars(modules["ray.util.placement_group"]).update(
        placement_group=lambda bundles, strategy: SimpleNamespace(wait=lambda _s: len(bundles) <= free_cpus),
        remove_placement_group=lambda group: None,
    )
    modules["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = dict  # type: ignore[attr-defined]
    for name, package in modules.items():
        monkeypatch.setitem(sys.modules, name, package)


OF_RAY = ("placement_group", "scheduling_strategies")


def test_a_cluster_gives_the_cpus_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_with(2.5, monkeypatch)
    with ray_players(replace(FLEET, duration_s=1.0), "auto") as (many, play):
        assert many == 2
        assert sum(part.latencies.requests for part in play(iter([(0, 1), (1, 2)]))) > 0
    ray_with(0.0, monkeypatch)
    with (
        pytest.raises(UsageError, match="--fleet: no room for 1 workers") as caught,
        ray_players(FLEET, "auto"),
    ):
        pass
    assert caught.value.hint == "wait until others are done, or leave --fleet out"


# -- latencies of any number of requests --

QUANTILES = (0.01, 0.5, 0.95, 0.999, 1.0)


@given(values=st.lists(st.floats(1e-6, 4000.0), min_size=1, max_size=60))
def test_quantiles_are_those_of_the_values(values: list[float]) -> None:
    latency_s = np.array(values)
    histogram = LatencyHistogram()
    histogram.add(latency_s)
    assert histogram.requests == len(values)
    exact = order_statistics(latency_s, QUANTILES)
    assert histogram.quantiles(QUANTILES) == pytest.approx(exact, rel=RELATIVE_ERROR)


def test_what_is_never_answered_counts_as_slower_than_all() -> None:
    histogram = LatencyHistogram()
    histogram.add(np.array([0.001, 0.002, math.inf, 1e9]))
    assert histogram.unanswered == 2
    assert histogram.quantiles([0.5, 0.75]).tolist() == pytest.approx([0.002, math.inf], rel=RELATIVE_ERROR)


def test_columns_that_are_strided_are_counted_as_they_are() -> None:
    records = np.zeros(3, dtype=[("due_s", np.float64), ("latency_s", np.float64)])
    records["latency_s"] = 0.5
    histogram = LatencyHistogram()
    histogram.add(records["latency_s"])
    assert histogram.quantiles([0.5])[0] == pytest.approx(0.5, rel=RELATIVE_ERROR)


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(LatencyHistogram().quantiles([0.5])[0])
