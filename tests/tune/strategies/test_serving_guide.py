"""TensorFlow Serving's tuning guide, step by step."""

from __future__ import annotations

import itertools

import pytest

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.target.telemetry import ServerActivity
from batchtune.tune import policy
from batchtune.tune.strategies.serving_guide import best_trial, chosen_size, guide_strategy, has_accelerator
from batchtune.tune.sweep.sweep import sweep
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, planted, scenario_of

SPACE = {
    "max_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "batch_timeout_micros": [0, 500, 1000, 2000, 5000, 10000, 20000],
}
OPEN = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s", "seed": 3}


def scenario(device: str, *, space=None, fixed=None, search=None, **changes):
    return scenario_of(
        target={"model": "fake", "device": device},
        search={"strategy": "guide", "space": SPACE if space is None else space, **(search or {})},
        fixed={"num_batch_threads": 1} if fixed is None else fixed,
        **changes,
    )


def capacity(device: str, **changes):
    return scenario(device, **{"load": OPEN, "objective": "capacity", "slo": {"p95": "40ms"}, **changes})


def sizes(trials) -> list[int]:
    return [one.configuration.batching.max_batch_size for one in trials]


def timeouts(trials) -> list[int]:
    return [one.configuration.batching.batch_timeout_micros for one in trials]


def test_on_a_cpu_a_large_size_is_tried_without_a_timeout_and_then_with_a_few_milliseconds():
    trials = Driver(capacity("cpu")).run(guide_strategy)
    assert {one.source for one in trials} == {"guide"}
    assert set(sizes(trials)) == {128}
    assert timeouts(trials)[0] == 0
    assert timeouts(trials)[1:-1] == [500, 1000, 5000, 10000]
    assert "a large max_batch_size, no timeout" in trials[0].reason


def test_on_an_accelerator_the_size_is_tuned_with_full_batches_before_the_timeout():
    """τ(b) = 0.9 + 0.4·b ms on one thread: two batches of 64 miss 40 ms, and 32 gain 7 % over 16.

    Twice as many clients as a batch has room for wait two executions, by hand 2 · 13.7 = 27.4 ms for 32 rows.
    """
    trials = Driver(capacity("cuda")).run(guide_strategy)
    filling = [one for one in trials if one.source == "probe"]
    assert set(timeouts(filling)) == {policy.GUIDE_FILLING_TIMEOUT_MICROS}
    assert sizes(filling) == [8, 16, 32, 64]
    assert [one.concurrency for one in filling] == [16, 32, 64, 128]
    assert filling[2].measurement.latency_s["p95"].value == pytest.approx(0.0274, rel=0.01)
    reined = trials[len(filling) : -1]
    assert set(sizes(reined)) == {32}
    assert timeouts(reined) == [10000, 5000, 1000, 500, 0]
    assert {one.source for one in reined} == {"guide"}


def test_online_serving_ends_with_a_queue_as_short_as_there_are_threads():
    for device in ("cpu", "cuda"):
        trials = Driver(capacity(device)).run(guide_strategy)
        queues = [one.configuration.batching.max_enqueued_batches for one in trials]
        assert set(queues[:-1]) == {policy.GUIDE_LONG_QUEUE_BATCHES}
        assert queues[-1] == default_num_batch_threads()
        best = best_trial([one for one in trials[:-1] if one.source == "guide"], scenario=capacity(device))
        assert (sizes(trials)[-1], timeouts(trials)[-1]) == (sizes([best])[0], timeouts([best])[0])


def test_bulk_work_keeps_the_long_queue_and_may_wait_for_seconds():
    space = {"max_batch_size": SPACE["max_batch_size"]}
    load = {"arrivals": "closed", "concurrency": 128, "warm_up": "100ms", "duration": "1s"}
    bulk = scenario("cuda", space=space, search={"mode": "bulk"}, load=load, slo={})
    trials = Driver(bulk).run(guide_strategy)
    last = trials[-1].configuration.batching
    assert trials[-1].source == "guide"
    assert (last.batch_timeout_micros, last.max_enqueued_batches) == (
        2_000_000,
        policy.GUIDE_LONG_QUEUE_BATCHES,
    )
    assert sum(one.source == "guide" for one in trials) == 1


def test_a_closed_loop_bounds_the_size_to_half_of_what_its_clients_send_and_says_so():
    """16 clients: a size above 8 is not tried, on a CPU nor on an accelerator."""
    cpu = Driver(scenario("cpu")).run(guide_strategy)
    assert set(sizes(cpu)) == {8}
    assert "16 clients fill two batches of 8 rows at most" in cpu[0].reason
    gpu = Driver(scenario("cuda")).run(guide_strategy)
    assert max(sizes(gpu)) == 8
    assert "16 clients, as the scenario has" in gpu[0].reason
    assert {one.concurrency for one in gpu} == {16}
    assert not any(
        timeout == policy.GUIDE_FILLING_TIMEOUT_MICROS
        for timeout in timeouts(gpu)
        if timeout not in timeouts(gpu[:2])
    )


def test_sizes_fall_where_the_first_one_misses_the_slo():
    tight = capacity("cuda", slo={"p95": "5ms"})
    trials = Driver(tight).run(guide_strategy)
    filling = [one for one in trials if one.source == "probe"]
    assert sizes(filling) == [8, 4, 2]
    assert chosen_size(filling) == 4


def test_a_device_without_economy_of_scale_gets_the_smallest_size():
    trials = Driver(capacity("cuda"), law=Law(fixed_s=0.0, per_row_s=0.001)).run(guide_strategy)
    filling = [one for one in trials if one.source == "probe"]
    assert sizes(filling) == [8, 16, 4, 2, 1]
    assert chosen_size(filling) == 1


def test_the_smallest_of_nearly_equal_throughputs_is_chosen_and_none_where_nothing_works():
    def probe(number: int, size: int, throughput: float, p95_s: float, **changes):
        batching = {"max_batch_size": size}
        return planted(
            number, throughput=throughput, p95_s=p95_s, batching=batching, source="probe", **changes
        )

    four, eight, sixteen = probe(1, 4, 900, 0.01), probe(2, 8, 980, 0.02), probe(3, 16, 1000, 0.03)
    assert chosen_size([four, eight, sixteen]) == 8
    assert chosen_size([four, eight, probe(3, 16, 1500, 0.2)]) == 8
    assert chosen_size([probe(1, 4, 900, 0.3), probe(2, 8, 980, 0.2)]) == 8
    assert chosen_size([probe(1, 4, 900, 0.3, failure="OOM")]) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_out_of_memory_lowers_the_size_until_it_works(device):
    trials = Driver(capacity(device, slo={"p95": "200ms"}), law=Law(rows_max=24)).run(guide_strategy)
    working = [one for one in trials if one.state == "complete" and one.source == "guide"]
    assert working
    assert sizes(working)[-1] == 16
    assert sizes(trials)[-1] == 16


def test_a_sweep_outlives_sizes_that_are_out_of_memory():
    """512 clients fill batches of 256, 128, 64 and 32 rows; 20 fit."""
    load = {"arrivals": "closed", "concurrency": 512, "warm_up": "100ms", "duration": "1s"}
    asked = scenario("cpu", space={"num_batch_threads": [1]}, fixed={}, load=load, slo={"p95": "2s"})
    clock = FakeClock()
    target = FakeTarget(clock, law=Law(rows_max=20))
    trials = [one.trial for one in sweep(asked, target, FakeFleet(target), now_s=clock)]
    runs = [
        len(list(group))
        for failed, group in itertools.groupby(one.state == "failed" for one in trials)
        if failed
    ]
    assert max(runs, default=0) >= 4
    assert trials[-1].state == "complete"


def test_rows_of_large_requests_are_the_unit_of_sizes():
    trials = Driver(capacity("cuda", request={"rows": 5}, space={"num_batch_threads": [1]}, fixed={})).run(
        guide_strategy
    )
    filling = [one for one in trials if one.source == "probe"]
    assert all(size % 5 == 0 for size in sizes(filling))
    assert filling[0].concurrency == 2 * sizes(filling)[0] // 5


def test_what_is_fixed_stays():
    fixed = {"num_batch_threads": 1, "max_enqueued_batches": 50, "max_batch_size": 16}
    space = {"batch_timeout_micros": [0, 1000]}
    trials = Driver(capacity("cuda", fixed=fixed, space=space)).run(guide_strategy)
    assert set(sizes(trials)) == {16}
    assert {one.configuration.batching.max_enqueued_batches for one in trials} == {50}
    assert timeouts(trials) == [policy.GUIDE_FILLING_TIMEOUT_MICROS, 1000, 0]


def test_threads_are_the_cores_or_the_nearest_that_the_space_has():
    space = {**SPACE, "num_batch_threads": [1, 1024]}
    trials = Driver(capacity("cuda", space=space, fixed={})).run(guide_strategy)
    assert {one.configuration.batching.num_batch_threads for one in trials} == {1}
    free = Driver(capacity("cuda", space=SPACE, fixed={})).run(guide_strategy)
    assert {one.configuration.batching.num_batch_threads for one in free} == {default_num_batch_threads()}


def test_the_device_is_told_by_the_scenario_or_by_an_emulating_server():
    assert has_accelerator(scenario("cuda"), [])
    assert has_accelerator(scenario("cuda:1"), [])
    assert not has_accelerator(scenario("cpu"), [])
    emulated = planted(
        1,
        throughput=1,
        p95_s=0.01,
        server=ServerActivity(duration_s=1.0, emulated=True),
        source="no_batching",
    )
    assert has_accelerator(scenario("cpu"), [emulated])


def test_time_ends_the_guide():
    assert len(Driver(capacity("cuda"), trials_max=3).run(guide_strategy)) == 3
    assert len(Driver(capacity("cpu"), trials_max=1).run(guide_strategy)) == 1
