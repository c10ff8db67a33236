"""`search.parallel`: how many servers, on which cluster, and where that cannot be."""

from __future__ import annotations

import pytest

from batchtune.errors import ScenarioError
from batchtune.scenario.reader import parse_scenario

TEXT = """\
name: many
target: {kind: tfserving, model: half_plus_two}
load: {arrivals: closed, concurrency: 16}
objective: throughput
search: {strategy: STRATEGY, parallel: PARALLEL}
"""


ATTACHED = ("target.kind=triton", "target.rest_url=http://h:1")
COMMAND = ("target.kind=command", "target.rest_url=http://h:1", "target.apply=[kubectl]")


def parallel(value: str, *, strategy: str = "guided", overrides: tuple[str, ...] = ()):
    text = TEXT.replace("PARALLEL", value).replace("STRATEGY", strategy)
    return parse_scenario(text, overrides=overrides).search.parallel


def test_a_number_is_that_many_servers_on_the_cluster_of_this_machine():
    asked = parallel("4")
    assert (asked.servers, asked.ray, asked.gpus_per_server) == (4, "auto", None)


def test_what_each_needs_is_said_by_a_mapping_and_the_number_replaced_beside_it():
    asked = parallel(
        '{servers: 4, ray: "ray://head:10001", gpus_per_server: 1, resources: {inference: 1}}',
        overrides=("search.parallel.servers=2",),
    )
    assert (asked.servers, asked.ray, asked.gpus_per_server) == (2, "ray://head:10001", 1)
    assert parallel("4", overrides=("search.parallel.servers=2",)).servers == 2


@pytest.mark.parametrize(
    ("value", "strategy", "overrides", "message"),
    [
        ("2", "guided", ATTACHED, "target.kind tfserving, or triton without rest_url, of one model"),
        ("2", "guided", COMMAND, "target.kind tfserving, or triton without rest_url"),
        ("2", "guided", ("load.fleet.ray=auto",), "each server is loaded from its own node"),
        ("0", "guided", (), "search.parallel"),
        ("true", "guided", (), "search.parallel"),
        ("{ray: nowhere}", "guided", (), "search.parallel.ray"),
    ],
)
def test_what_cannot_be_is_refused_by_name(value, strategy, overrides, message):
    with pytest.raises(ScenarioError, match=message):
        parallel(value, strategy=strategy, overrides=overrides)


def test_a_launched_triton_may_be_several_and_one_server_needs_nothing():
    assert parallel("4", overrides=("target.kind=triton",)).servers == 4
    assert parallel("1", strategy="rule").servers == 1
