"""Is every combination that a scenario can search one that a server accepts?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from batchtune.batching.parameters import BatchingParameters, Configuration, validate
from batchtune.errors import BatchingParametersError, ScenarioError
from batchtune.report.findings import text_of
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.knobs import KNOBS, misspelt_knob
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import TargetSpec, can_be_off
from batchtune.target.command import CommandTarget
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import sweep
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, scenario_of

# The flags of tensorflow_model_server (main.cc) that are not batching parameters.
SERVER_FLAGS = """port grpc_max_threads grpc_socket_path rest_api_port rest_api_num_threads rest_api_timeout_in_ms
rest_api_enable_cors_support batching_parameters_file enable_per_model_batching_parameters model_name
model_base_path model_config_file model_config_file_poll_wait_seconds file_system_poll_wait_seconds num_load_threads
num_unload_threads max_num_load_retries load_retry_interval_micros flush_filesystem_caches
tensorflow_session_parallelism tensorflow_intra_op_parallelism tensorflow_inter_op_parallelism
tensorflow_session_config_file per_process_gpu_memory_fraction platform_config_file saved_model_tags
enable_model_warmup num_request_iterations_for_warmup monitoring_config_file enable_profiler
enable_grpc_healthcheck_service enable_serialization_as_tensor_content prefer_tflite_model num_tflite_pools
xla_cpu_compilation_enabled mixed_precision ssl_config_file grpc_channel_arguments batch_scheduler"""


def scenario(space: dict[str, Any], fixed: dict[str, Any] | None = None) -> Scenario:
    parts = {"name": "knobs", "target": {"model": "m"}, "load": {"arrivals": "closed", "concurrency": 1}}
    searched = {"objective": "throughput", "search": {"space": space}, "fixed": fixed or {}}
    return Scenario.model_validate({**parts, **searched})


def test_names_that_are_no_parameter_are_server_flags() -> None:
    asked = scenario({"max_batch_size": [8]}, {"rest_api_num_threads": 4, "--enable_profiler": False})
    assert asked.configuration({"max_batch_size": 8}) == Configuration(
        batching=BatchingParameters(max_batch_size=8),
        flags=(("enable_profiler", "false"), ("rest_api_num_threads", "4")),
    )
    assert asked.fixed_flags == asked.configuration().flags


@pytest.mark.parametrize("port", ["abc", -1, 65536, 1.5, True])
def test_a_port_that_is_none_is_refused_wherever_it_stands(port: object) -> None:
    for space, fixed in (({"max_batch_size": [8]}, {"port": port}), ({"--rest_api_port": [8501, port]}, {})):
        with pytest.raises(ValueError, match="expected a port, 0 to 65535"):
            scenario(space, fixed)
    assert dict(scenario({"max_batch_size": [8]}, {"port": 8500}).configuration().flags) == {"port": "8500"}


def test_no_server_flag_is_taken_for_a_misspelt_parameter() -> None:
    assert not [flag for flag in SERVER_FLAGS.split() if misspelt_knob(flag) is not None]


@pytest.mark.parametrize("name", ["max_batchsize", "max-batch-size", "Max_Batch_Size"])
def test_a_misspelt_parameter_is_recognised(name: str) -> None:
    assert misspelt_knob(name) == "max_batch_size"
    assert misspelt_knob(f"--{name}") is None
    assert misspelt_knob("max_batch_size") is None


def test_each_parameter_with_a_missing_letter_is_recognised() -> None:
    for meant in ("batch_timeout_micros", "num_batch_threads", "allowed_batch_sizes"):
        assert (misspelt_knob(meant[:-1]), misspelt_knob(meant)) == (meant, None)


def test_every_point_of_a_space_is_legal() -> None:
    asked = scenario(
        {
            "max_batch_size": {"low": 1, "high": 48, "log": True},
            "allowed_batch_sizes": ["none", "powers_of_two", [8, 16, 32], [4]],
            "enable_large_batch_splitting": [False, True],
            "max_execution_batch_size": [4, 64],
            "batch_timeout_micros": [0, 1000],
            "enable_batching": [True, False],
        }
    )
    configurations = [asked.configuration(point) for point in asked.search.grid()]
    for configuration in configurations:
        if configuration.batching is not None:
            validate(configuration.batching)
    assert sum(configuration.batching is None for configuration in configurations) == len(configurations) // 2


@pytest.mark.parametrize(
    ("sizes", "largest", "fitted"),
    [
        ("powers_of_two", 1, (1,)),
        ("powers_of_two", 32, (1, 2, 4, 8, 16, 32)),
        ("powers_of_two", 48, (1, 2, 4, 8, 16, 32, 48)),
        ("none", 32, ()),
        ((8, 16, 32), 16, (8, 16)),
        ((8, 16, 32), 64, (8, 16, 32, 64)),
        ((8, 16, 32), 4, (4,)),
        ("powers_of_two", np.int64(6), (1, 2, 4, 6)),
    ],
)
def test_sizes_are_fitted_to_the_searched_maximum(sizes: Any, largest: int, fitted: tuple[int, ...]) -> None:
    asked = scenario({"max_batch_size": [int(largest)]}, {"allowed_batch_sizes": sizes})
    batching = asked.configuration({"max_batch_size": largest}).batching
    assert batching is not None
    assert batching.allowed_batch_sizes == fitted


def test_what_is_fixed_alone_is_never_fitted() -> None:
    with pytest.raises(ValueError, match="Last entry in allowed_batch_sizes must match max_batch_size"):
        scenario({"num_batch_threads": [1]}, {"max_batch_size": 32, "allowed_batch_sizes": [8, 16]})


def test_fixed_sizes_do_not_hinder_the_reference_points() -> None:
    asked = scenario({"max_batch_size": [8, 16]}, {"allowed_batch_sizes": [4, 8]})
    assert asked.configuration({}).batching == BatchingParameters(allowed_batch_sizes=(4, 8, 1000))


@pytest.mark.parametrize(
    "point", [{"allowed_batch_sizes": "some"}, {"enable_batching": 1}, {"num_batch_threads": 0}]
)
def test_an_illegal_point_is_refused(point: dict[str, Any]) -> None:
    with pytest.raises(BatchingParametersError):
        scenario({"max_batch_size": [8]}).configuration(point)


def test_the_knobs_are_the_parameters_and_the_switch() -> None:
    assert set(KNOBS) == {*BatchingParameters.__dataclass_fields__, "enable_batching"}


FILE_ONLY = {
    "kind": "command",
    "model": "m",
    "rest_url": "http://h:1",
    "launch": ["server", "--enable_batching", "--batching_parameters_file={file}"],
    "render": "tfserving",
}


NOTE = "nothing was compared with no batching: a tfserving file, all that target's commands name, cannot express no batching"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"launch": None, "apply": ["reload", "{file}"]}, False),
        ({"apply": ["reload", "{file}"], "launch": ["server"]}, False),
        ({"launch": ["server", "{file}", "{json}"]}, True),
        ({"apply": ["reads its stdin"]}, True),
        *(({"render": dialect}, True) for dialect in ("flags", "k8s", "kserve", "triton", "cortex")),
    ],
)
def test_only_a_tfserving_file_alone_cannot_say_it(changes: dict[str, Any], expected: bool) -> None:
    assert can_be_off(TargetSpec.model_validate({**FILE_ONLY, **changes})) is expected


def test_it_is_never_applied_in_the_guise_of_the_defaults() -> None:
    spec = TargetSpec.model_validate({**FILE_ONLY, "launch": ["no-such-program", "{file}"]})
    with (
        CommandTarget(spec) as target,
        pytest.raises(BatchingParametersError, match="cannot express no batching"),
    ):
        target.apply(Configuration(batching=None))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fixed": {"enable_batching": False}}, "fixed"),
        ({"search": {"space": {"enable_batching": [True, False]}}}, "search"),
    ],
)
def test_a_scenario_that_asks_for_it_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match="cannot express no batching") as raised:
        scenario_of(target=FILE_ONLY, **changes)
    assert f"'{key}'" in str(raised.value.errors()[0]["ctx"])


@pytest.mark.parametrize("search", [{"strategy": "optuna"}, {"strategy": "guided"}])
def test_a_sweep_leaves_it_out_says_so_and_can_be_established(search):
    space = {"max_batch_size": [4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1]}
    scenario = scenario_of(target=FILE_ONLY, search={**search, "budget": {"time": "40s"}, "space": space})
    clock = FakeClock()
    target = FakeTarget(clock, law=Law())
    done = sweep(scenario, target, FakeFleet(target, seed=1), now_s=clock)
    trials = [result.trial for result in done]
    assert not any(trial.configuration.batching is None for trial in trials)
    lone = next(trial for trial in trials if trial.source == "probe").configuration
    assert lone.label() == "max_batch_size=1 batch_timeout_micros=0 max_enqueued_batches=16"
    answer = recommend(trials, scenario=scenario)
    assert answer.established
    assert NOTE in map(text_of, answer.notes)


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
