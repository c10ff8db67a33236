"""What a timeout costs at half the load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.run import open_run
from batchtune.recommend.half_load import at_half_load
from batchtune.scenario.spec.load import LoadSpec
from tests.tune.tune_fakes import planted, scenario_of

KEPT = Path(__file__).parents[2] / "results/reference/2026-11-21-epyc-2-cores/quickstart"


def test_the_twin_tells_what_a_timeout_costs_with_half_the_clients():
    run = open_run(KEPT)
    scenario, search = run.scenario(), run.search()
    configuration = run.recommendation().configuration
    waiting = replace(configuration, batching=replace(configuration.batching, batch_timeout_micros=5000))
    told = at_half_load(waiting, scenario, search.twin, rate_rps=None)
    assert told.startswith("at half the load (16 clients) the twin expects p95 ")
    assert "with a timeout of 0 " in told


def test_without_a_timeout_or_a_twin_nothing_is_said():
    waiting = planted(1, batching={"max_batch_size": 8, "batch_timeout_micros": 500}, throughput=1, p95_s=1)
    at_once = planted(1, batching={"max_batch_size": 8, "batch_timeout_micros": 0}, throughput=1, p95_s=1)
    assert at_half_load(waiting.configuration, scenario_of(), None, rate_rps=None) is None
    assert at_half_load(at_once.configuration, scenario_of(), {}, rate_rps=None) is None


def at_half(load: dict[str, object]) -> str | None:
    """The quickstart's recommendation with a timeout of 5 ms, under another load."""
    run = open_run(KEPT)
    configuration = run.recommendation().configuration
    waiting = replace(configuration, batching=replace(configuration.batching, batch_timeout_micros=5000))
    scenario = run.scenario().model_copy(update={"load": LoadSpec.model_validate(load)})
    return at_half_load(waiting, scenario, run.search().twin, rate_rps=None)


@pytest.mark.parametrize(
    "load",
    [
        {"arrivals": "ramp", "ramp": {"from": 10, "to": 100}},
        {"arrivals": "steps", "steps": [{"rate": 10, "duration": "1s"}]},
        {"arrivals": "trace", "trace": {"file": "elsewhere.csv"}},
        {"arrivals": "closed", "concurrency": 1},
    ],
)
def test_where_there_is_no_half_of_the_load_nothing_is_said(load):
    assert at_half(load) is None


def test_half_of_two_clients_is_one_client():
    told = at_half({"arrivals": "closed", "concurrency": 2})
    assert told is not None
    assert "(1 client)" in told
