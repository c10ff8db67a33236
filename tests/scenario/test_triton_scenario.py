"""A scenario for a Triton takes Triton's own words, and says what Triton has not."""

from __future__ import annotations

import pytest

from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import ScenarioError
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import reference_configurations

ATTACHED = """\
name: attached
target: {kind: triton, model: m, rest_url: "http://127.0.0.1:8000", grpc_url: "127.0.0.1:8001"}
load: {arrivals: closed, concurrency: 8}
objective: throughput
"""
SPACE = """\
search:
  space:
    max_batch_size: [4, 16]
    max_queue_delay_microseconds: [0, 500]
    instance_group: {count: [1, 2]}
    preferred_batch_size: [none, [4, 8]]
    default_queue_policy: {max_queue_size: [0, 64]}
"""


def with_found(scenario: Scenario, found: FoundBatching) -> Scenario:
    target = scenario.target.model_copy(update={"found": found})
    return scenario.model_copy(update={"target": target})


def test_tritons_words_are_the_house_s_knobs() -> None:
    scenario = parse_scenario(ATTACHED + SPACE)
    assert list(scenario.search.space) == [
        "max_batch_size",
        "batch_timeout_micros",
        "num_batch_threads",
        "preferred_batch_size",
        "default_queue_policy.max_queue_size",
    ]
    point = {name: space.values[-1] for name, space in scenario.search.space.items()}
    assert scenario.configuration(point).label() == (
        "max_batch_size=16 max_queue_delay_microseconds=500 instance_group.count=2 "
        "default_queue_policy.max_queue_size=64 preferred_batch_size=4,8"
    )


def test_the_scenario_of_a_run_is_read_back_as_it_was() -> None:
    scenario = with_found(
        parse_scenario(ATTACHED + SPACE), FoundBatching(max_batch_size=8, preferred_batch_size=(2,))
    )
    assert parse_scenario(format_scenario(scenario)) == scenario


def test_a_triton_is_asked_by_its_own_protocol() -> None:
    assert parse_scenario(ATTACHED).request.protocol == "kserve_grpc"
    by_rest = ATTACHED.replace(', grpc_url: "127.0.0.1:8001"', "")
    assert parse_scenario(by_rest).request.protocol == "kserve_rest_binary"
    with pytest.raises(ScenarioError, match=r"request\.protocol: Triton does not speak rest"):
        parse_scenario(ATTACHED + "request: {protocol: rest}\n")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("fixed: {allowed_batch_sizes: [4]}", "Triton never pads a batch: preferred_batch_size"),
        ("fixed: {max_enqueued_batches: 4}", "default_queue_policy.max_queue_size"),
        ("fixed: {http-thread-count: 4}", "a server that runs already takes no flags"),
        ("fixed: {max_queue_delay_microsecond: 4}", "did you mean 'max_queue_delay_microseconds'"),
        ("fixed: {preserve_ordering: often}", "preserve_ordering must be true or false; was 'often'"),
        ("fixed: {default_queue_policy: {timeout_action: DROP}}", "must be REJECT or DELAY"),
        ("fixed: {batch_timeout_micros: 1, max_queue_delay_microseconds: 2}", "is there twice"),
    ],
)
def test_what_triton_does_not_take_is_told_with_what_to_do(more: str, words: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        parse_scenario(f"{ATTACHED}{more}\n")
    assert words in raised.value.message + raised.value.hint
    assert raised.value.message.startswith("<string>:")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("kind: external, model: m", "rest_url: missing: where the server is"),
        ('kind: triton, model: m, grpc_url: "h:1"', "rest_url: missing: Triton takes configurations by its"),
        ('kind: tfserving, model: m, rest_url: "http://h:1"', "rest_url: a server of kind tfserving is"),
        ('kind: triton, model: m, rest_url: "http://h:1", flags: {a: 1}', "flags: the server behind the URL"),
        ("kind: triton, model: ./m, device: cpu", "device: kind triton takes none"),
    ],
)
def test_a_target_that_contradicts_itself_is_refused(target: str, words: str) -> None:
    attached = ATTACHED.splitlines()[1]
    with pytest.raises(ScenarioError, match=f"<string>:2: target.{words}"):
        parse_scenario(ATTACHED.replace(attached, f"target: {{{target}}}"))


def test_what_was_found_is_what_nobody_named_and_the_reference() -> None:
    found = FoundBatching(max_batch_size=8, instance_count=3, preferred_batch_size=(2, 4))
    scenario = with_found(parse_scenario(ATTACHED + "search: {space: {max_batch_size: [2, 4]}}\n"), found)
    assert scenario.configuration({"max_batch_size": 2}).label() == (
        "max_batch_size=2 max_queue_delay_microseconds=0 instance_group.count=3"
    )
    references = reference_configurations(scenario)
    assert references["no_batching"].label() == "no batching instance_group.count=3"
    assert references["defaults"].label() == (
        "max_batch_size=8 max_queue_delay_microseconds=0 instance_group.count=3 preferred_batch_size=2,4"
    )
