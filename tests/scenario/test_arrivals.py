"""Do arrivals follow their law, with an exact mean rate, whoever sends them?

The statistical tests have fixed seeds; each states how often it would fail by chance if the seeds were drawn anew.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.arrivals import ClosedLoop, Schedule, arrivals_of, draw
from batchtune.scenario.spec.workload import LoadSpec

SEEDS = range(200)


def load(**keys: Any) -> LoadSpec:
    return LoadSpec.model_validate({"warm_up": 0.0, "duration": 10.0, **keys})


OPEN_LOADS = {
    "constant": load(arrivals="constant", rate=400.0),
    "poisson": load(arrivals="poisson", rate=400.0),
    "gamma": load(arrivals="gamma", rate=400.0, gamma={"cv": 3}),
    "on_off": load(arrivals="on_off", rate=400.0, on_off={"on": 0.1, "off": 0.3, "off_rate_ratio": 0.1}),
    "silent off": load(arrivals="on_off", rate=400.0, on_off={"on": 0.1, "off": 0.3, "phases": "fixed"}),
    "ramp": load(arrivals="ramp", ramp={"from": 0, "to": 800}),
    "even ramp": load(arrivals="ramp", ramp={"from": 600, "to": 200, "spacing": "constant"}),
    "steps": load(arrivals="steps", steps=[{"rate": 200, "duration": 5.0}, {"rate": 600, "duration": 5.0}]),
}
open_loads = pytest.mark.parametrize("spec", OPEN_LOADS.values(), ids=OPEN_LOADS.keys())


def kolmogorov_distance(sample: NDArray[np.float64], distribution: Any) -> float:
    """The largest gap between the sample's distribution function and the given one."""
    ordered = np.sort(sample)
    expected = distribution(ordered)
    count = len(ordered)
    return float(
        max(np.max(np.arange(1, count + 1) / count - expected), np.max(expected - np.arange(count) / count))
    )


@open_loads
def test_the_mean_rate_is_exact_and_times_are_sorted_within_the_run(spec: LoadSpec) -> None:
    schedule = draw(spec)
    assert (len(schedule.due_ns), schedule.offered_rps, schedule.due_ns.dtype) == (4000, 400, np.int64)
    assert np.all(np.diff(schedule.due_ns) >= 0)
    assert 0 <= schedule.due_ns[0] <= schedule.due_ns[-1] < 10e9


@open_loads
def test_the_same_seed_gives_the_same_schedule_and_another_another(spec: LoadSpec) -> None:
    again = draw(spec)
    assert np.array_equal(draw(spec).due_ns, again.due_ns)
    evenly_spaced = spec.arrivals == "constant" or (spec.ramp is not None and spec.ramp.spacing == "constant")
    assert np.array_equal(draw(spec, seed=spec.seed + 1).due_ns, again.due_ns) == evenly_spaced
    by_generator = draw(spec, seed=np.random.default_rng(spec.seed))
    assert np.array_equal(by_generator.due_ns, again.due_ns)


@open_loads
@settings(max_examples=25, deadline=None)
@given(workers=st.integers(1, 9))
def test_slices_merged_are_the_schedule_for_any_number_of_workers(spec: LoadSpec, workers: int) -> None:
    schedule = draw(spec)
    slices = [schedule.slice(worker, workers) for worker in range(workers)]
    merged = np.empty_like(schedule.due_ns)
    for worker, part in enumerate(slices):
        merged[worker::workers] = part.due_ns
    assert np.array_equal(merged, schedule.due_ns)
    assert sum(part.offered_rps for part in slices) == pytest.approx(schedule.offered_rps)


@open_loads
def test_an_asked_rate_keeps_the_shape(spec: LoadSpec) -> None:
    schedule = draw(spec, rate_rps=1000)
    assert schedule.offered_rps == 1000
    first_half = np.mean(schedule.due_ns < 5e9)
    expected = {"ramp": 0.25, "steps": 0.25, "even ramp": 0.625}
    kind = next(name for name, one in OPEN_LOADS.items() if one is spec)
    if kind in expected:  # 10,000 requests: five standard deviations are 0.025, two-sided 6e-7
        assert first_half == pytest.approx(expected[kind], abs=0.025)


def test_times_between_poisson_arrivals_are_exponential() -> None:
    """Kolmogorov-Smirnov per seed at 1 in 1,000; of 200 seeds at most 4 may fail: false alarms 2e-6.

    Given the total of 5,000, a gap is beta(1, 5000): within 4e-5 of the exponential, against a limit of 0.028.
    """
    spec = load(arrivals="poisson", rate=500.0)
    failures = 0
    for seed in SEEDS:
        gaps_s = np.diff(draw(spec, seed=seed).due_ns) / 1e9
        distance = kolmogorov_distance(gaps_s, lambda gap: 1 - np.exp(-gap * 500))
        failures += distance > 1.949 / math.sqrt(len(gaps_s))
    assert failures <= 4


def test_seeds_are_independent_of_each_other() -> None:
    """Counts per bin of 200 consecutive seeds: no correlation. |r| < 5/√n fails once in 2 million."""
    spec = load(arrivals="poisson", rate=100.0)
    counts = np.stack(
        [np.histogram(draw(spec, seed=seed).due_ns, bins=50, range=(0, 10e9))[0] for seed in SEEDS]
    )
    following, before = counts[1:].ravel(), counts[:-1].ravel()
    assert abs(np.corrcoef(following, before)[0, 1]) < 5 / math.sqrt(len(before))


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_arrivals_are_as_bursty_as_asked(cv: float) -> None:
    """Coefficient of variation over 200,000 gaps, within 5 %: at least five standard errors; false alarms 6e-7."""
    gaps = np.diff(draw(load(arrivals="gamma", rate=20_000.0, gamma={"cv": cv}), seed=2).due_ns)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_fixed_phases_are_busy_and_silent_in_turn() -> None:
    due_s = draw(OPEN_LOADS["silent off"]).due_ns / 1e9
    assert np.all(due_s % 0.4 <= 0.1 + 1e-6)


def test_random_phases_make_counts_vary_more_than_poisson() -> None:
    """An MMPP that is silent three quarters of the time: dispersion of 100 ms counts far above 1 for every seed."""
    spec = load(arrivals="on_off", rate=400.0, on_off={"on": 0.1, "off": 0.3})
    for seed in range(20):
        counts = np.histogram(draw(spec, seed=seed).due_ns, bins=100, range=(0, 10e9))[0]
        assert counts.var() / counts.mean() > 5


def test_an_even_ramp_is_the_inverse_of_the_integral() -> None:
    due_s = draw(OPEN_LOADS["even ramp"]).due_ns / 1e9
    sent = 600 * due_s - 20 * due_s**2
    assert np.allclose(sent, np.arange(4000), atol=1e-3)


def test_a_ramp_begins_after_the_warm_up() -> None:
    spec = load(arrivals="ramp", warm_up=5.0, ramp={"from": 100, "to": 300, "spacing": "constant"})
    schedule = draw(spec)
    assert (schedule.duration_s, len(schedule.due_ns)) == (15, 500 + 2000)
    assert np.count_nonzero(schedule.due_ns < 5e9) == 500


def test_steps_start_again_when_the_run_is_longer() -> None:
    due_s = draw(OPEN_LOADS["steps"], duration_s=20).due_ns / 1e9
    counts = np.histogram(due_s, bins=4, range=(0, 20))[0]
    assert len(due_s) == 8000  # 1,000 and 3,000 in turn: five standard deviations are 140 and 210
    assert counts == pytest.approx([1000, 3000, 1000, 3000], abs=210)


def test_the_same_seed_at_a_nearby_rate_gives_nearly_the_same_pattern() -> None:
    spec = OPEN_LOADS["poisson"]
    slow, fast = draw(spec).due_ns[:1000], draw(spec, rate_rps=500).due_ns[:1000]
    assert np.corrcoef(np.diff(slow), np.diff(fast))[0, 1] > 0.999


TRACE_JSONL = """\
{"offset_s": 0.03, "request": 2, "rows": 1}

{"offset_s": 0.01, "request": 0, "rows": 4}
{"offset_s": 0.02, "request": 1, "rows": 1}
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.csv", "offset_ms, request, rows\n30, 2, 1\n10, 0, 4\n20, 1, 1\n"), ("t.jsonl", TRACE_JSONL)],
)
def test_a_trace_is_played_from_its_first_request_and_again(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    spec = load(arrivals="trace", duration=0.05, trace={"file": str(tmp_path / name)})
    schedule = draw(spec)
    assert schedule.due_ns.tolist() == [0, 10_000_000, 20_000_000, 30_000_000, 40_000_000]
    columns = (schedule.request_index, schedule.trace_rows, schedule.slice(1, 2).trace_rows)
    assert [np.array(one).tolist() for one in columns] == [[0, 1, 2, 0, 1], [4, 1, 1, 4, 1], [1, 4]]
    assert schedule.offered_rps == pytest.approx(100)


def test_a_trace_can_be_played_faster_or_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("offset_us\n" + "".join(f"{at * 1000}\n" for at in range(100)))
    doubled = draw(load(arrivals="trace", duration=0.05, trace={"file": str(path), "speed": 2}))
    assert len(doubled.due_ns) == 100
    assert np.allclose(np.diff(doubled.due_ns), 500_000)
    assert (
        draw(load(arrivals="trace", trace={"file": str(path)}), rate_rps=50, duration_s=4).offered_rps == 50
    )


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("t.csv", "offset_s\n0.1\nsoon\n", r"t\.csv:3: offset_s: expected a number; was 'soon'"),
        ("t.csv", "time\n1\n", "no column for the time; found time"),
        ("t.csv", "offset_s\n", "the trace is empty"),
        ("t.csv", "offset_s,request\n0,-1\n", "request: expected whole numbers from 0"),
        ("t.csv", "offset_s,rows\n0,1.5\n", "rows: expected whole numbers from 1"),
        ("t.csv", "offset_s\nnan\n", "expected a number"),
        ("t.jsonl", '{"offset_s": 1}\n{"offset_s"\n', r"t\.jsonl:2: not JSON"),
        ("t.jsonl", "[1]\n", r"t\.jsonl:1: expected an object"),
        ("none.csv", None, "cannot be read as a trace"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(
    tmp_path: Path, name: str, content: str | None, what: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ScenarioError, match=what):
        draw(load(arrivals="trace", trace={"file": str(tmp_path / name)}))


def test_a_load_without_requests_or_rate_is_refused() -> None:
    for keys, said in (
        ({"arrivals": "poisson", "rate": 0.01}, "expected 1 to"),
        ({"arrivals": "poisson"}, "need a rate"),
        ({"arrivals": "closed", "concurrency": 4}, "no schedule"),
    ):
        with pytest.raises(UsageError, match=said):
            draw(load(**keys))


def test_a_closed_loop_takes_the_load_or_what_replaces_it() -> None:
    spec = load(arrivals="closed", concurrency=4, think_time=0.01, requests=10, warm_up=1.0)
    asked = ClosedLoop(concurrency=4, duration_s=11, think_s=0.01, requests_max=10)
    assert arrivals_of(spec) == asked
    assert arrivals_of(spec, concurrency=9, duration_s=2) == replace(asked, concurrency=9, duration_s=2)
    assert isinstance(arrivals_of(load(arrivals="poisson", rate=5.0)), Schedule)


@given(concurrency=st.integers(1, 200), requests=st.none() | st.integers(1, 1000), workers=st.integers(1, 16))
def test_workers_share_the_clients_of_a_closed_loop(
    concurrency: int, requests: int | None, workers: int
) -> None:
    loop = ClosedLoop(concurrency=concurrency, duration_s=1, requests_max=requests)
    parts = [loop.slice(worker, workers) for worker in range(workers)]
    assert sum(part.concurrency for part in parts) == concurrency
    assert max(part.concurrency for part in parts) - min(part.concurrency for part in parts) <= 1
    if requests is not None:
        assert sum(part.requests_max or 0 for part in parts) == requests
