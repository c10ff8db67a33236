"""A sweep of a server that batches continuously, in virtual time: no curve, no twin, and an edge of memory that is learned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from batchtune.scenario.reader import read_scenario
from batchtune.server.emulated_llm import Device
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import Trial, out_of_memory
from tests.benchmarks.llm import virtual_llm
from tests.benchmarks.llm.virtual_llm import SCENARIO, VirtualFleet, VirtualTarget, exact_rps, limits_of
from tests.server.server_process import free_ports
from tests.tune.tune_fakes import FakeClock, bench_of


@pytest.fixture(scope="module", autouse=True)
def _first_answer() -> Iterator[None]:
    """A real server for the one request that is asked before any load."""
    (VirtualTarget.port,) = free_ports(1)
    command = [sys.executable, "-m", "batchtune.server.emulated_llm", f"--port={VirtualTarget.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        yield
        server.terminate()


def sweep(*overrides: str) -> tuple[list[Trial], object]:
    scenario = read_scenario(SCENARIO, overrides=["search.budget.time=60s", *overrides])
    clock = FakeClock()
    target = VirtualTarget(clock)
    fleet = VirtualFleet(target, seed=3, slower_sd=0.0)
    bench = bench_of(scenario, target, fleet)
    trials = [done.trial for done in sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=clock)]
    answer = recommend(trials, scenario=scenario, search=None)
    exact = exact_rps(answer.configuration, scenario)
    assert 0.8 * exact <= answer.capacity.held_rps <= 1.08 * exact
    assert answer.capacity_rps.value == pytest.approx(exact, rel=0.08)  # 5 % in 37-40 of 40 sweeps of 90 s
    assert any(note.code == "no_twin_of_streams" for note in answer.notes)
    return trials, answer


@pytest.mark.slow
def test_it_compares_no_batching_that_is_none_and_asks_no_rule() -> None:
    trials, _ = sweep()
    named = {"defaults", "grid", "neighbour", "sampler"}
    assert {trial.source for trial in trials} <= {"probe", "calibration", "confirm", *named}
    assert all(trial.configuration.batching is not None for trial in trials)


@pytest.mark.slow
def test_what_ran_out_of_memory_is_a_boundary_that_is_tried_twice_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_llm, "DEVICE", Device(memory_tokens=14_000))
    trials, _ = sweep(
        "search.space.max_num_seqs=[32,64,128,256,512,1024]",
        "search.space.max_num_batched_tokens=[256,512,1024,2048]",
        "target.defaults.max_num_seqs=256",  # which does not fit beside 512 tokens
    )
    ran_out = [trial for trial in trials if out_of_memory(trial) is not None]
    assert 1 <= len(ran_out) <= 2
    for number, trial in enumerate(trials):
        before = [limits_of(other.configuration) for other in trials[:number] if other in ran_out]
        now = limits_of(trial.configuration)
        assert not any(all(now[name] >= value for name, value in edge.items()) for edge in before)
