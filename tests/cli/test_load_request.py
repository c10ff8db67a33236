"""What `batchtune load` is asked for: settings of the server, the loop, the protocol, and what cannot apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.cli.arguments.load_request import (
    LoadRequest,
    asked_configuration,
    asked_load,
    asked_plans,
    parse_range,
)
from batchtune.cli.commands.model_scenario import subject_of_comparison, subject_of_sweep
from batchtune.errors import BatchingParametersError, ScenarioError, UsageError
from batchtune.scenario.reader import read_scenario, read_variants
from batchtune.scenario.spec.scenario import Scenario

SWEEP = """\
name: swept
target: {model: m, flags: {tensorflow_intra_op_parallelism: 1}}
load: {arrivals: closed, concurrency: 8, think_time: 1ms}
slo: {p95: 30ms}
objective: throughput
search:
  space:
    max_batch_size: [4, 16]
    batch_timeout_micros: [0, 1000]
    --tensorflow_session_parallelism: [0, 2]
fixed: {max_enqueued_batches: 50, allowed_batch_sizes: [1, 2, 4, 8, 16]}
"""
OPEN = """\
name: bursty
target: {model: m}
load: {rate: 300, LOAD}
slo: {p95: 30ms}
objective: latency
"""
CONFIG_PBTXT = """\
max_batch_size: 48
dynamic_batching { max_queue_delay_microseconds: 700 preferred_batch_size: 8 }
"""
PATTERNS = [
    ("gamma", "arrivals: gamma, gamma: {cv: 3}"),
    ("on_off", "arrivals: on_off, on_off: {on: 1s, off: 1s}"),
    ("ramp", "arrivals: ramp, ramp: {from: 0, to: 100/s}"),
    ("steps", "arrivals: steps, steps: [{rate: 10/s, duration: 1s}]"),
    ("trace", "arrivals: trace, trace: {file: trace.csv}"),
]


def asked(folder: Path, text: str, *overrides: str, **options: Any) -> tuple[Scenario, LoadRequest]:
    path = folder / "scenario.yaml"
    path.write_text(text)
    (folder / "trace.csv").write_text("offset_s\n0\n0.5\n1\n")
    return asked_load(LoadRequest(scenario=path, overrides=overrides, **options))


def configuration(folder: Path, *overrides: str, text: str = SWEEP, **options: Any) -> Configuration:
    scenario, wanted = asked(folder, text, *overrides, **options)
    return asked_configuration(scenario, wanted)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8", [8]),
        ("500/s", [500]),
        ("1,2,8", [1, 2, 8]),
        ("1:4", [1, 2, 3, 4]),
        ("100:500:200", [100, 300, 500]),
        ("100:450:200", [100, 300]),
        ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:100:x2", [1, 2, 4, 8, 16, 32, 64, 100]),
        ("100/s:1k/s:*10", [100, 1000]),
        ("4:4:x2", [4]),
        ("1,4:8:4", [1, 4, 8]),
    ],
)
def test_ranges_of_rates_and_concurrencies(text: str, values: list[float]) -> None:
    assert parse_range(text) == tuple(values)


HUGE = ("9" * 400, f"1:{'9' * 400}:x2")


@pytest.mark.parametrize(
    "text",
    ["", "a", "1:", "4:1", "1:4:0", "1:4:x1", "0:4:x2", "1:2:3:4", "1:9:x", "0:1M:1", "1:64:x1.00001", *HUGE],
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_range(text)


@pytest.mark.parametrize("override", ["max_batch_size=8", "fixed.max_batch_size=8"])
def test_a_point_of_the_space_can_be_loaded(tmp_path: Path, override: str) -> None:
    batching = configuration(tmp_path, override).batching
    assert batching == from_dict(
        {"max_batch_size": 8, "max_enqueued_batches": 50, "allowed_batch_sizes": [1, 2, 4, 8]}
    )


def test_a_parameter_that_one_of_several_models_has_of_its_own_is_refused(tmp_path: Path) -> None:
    text = """\
name: two
target:
  models:
    - {name: ranker, model: imdb_transformer, rate: 5/s}
    - {name: reader, model: sequence_transformer, rate: 5/s, batching: {max_batch_size: 4}}
load: {arrivals: poisson}
slo: {p95: 1s}
objective: latency
"""
    with pytest.raises(UsageError, match=r"fixed\.max_batch_size: reader has its own") as caught:
        asked(tmp_path, text, "max_batch_size=8")
    assert caught.value.hint == "set it for each model: --set target.models.1.batching.max_batch_size=…"
    own = "target.models.1.batching.max_batch_size=2"
    sizes = [batching.max_batch_size for _, batching in configuration(tmp_path, own, text=text).models]
    assert sizes == [2]
    assert asked(tmp_path, text, "max_batch_size=8", own)[1].settings == {"max_batch_size": 8}


def test_a_flag_and_sizes_are_set_and_no_batching_keeps_the_flag(tmp_path: Path) -> None:
    flag = "--tensorflow_session_parallelism=2"
    asked = configuration(tmp_path, flag, "allowed_batch_sizes=1,6", "max_batch_size=6")
    assert dict(asked.flags) == {"tensorflow_session_parallelism": "2"}
    assert asked.batching is not None
    assert asked.batching.allowed_batch_sizes == (1, 6)
    off = configuration(tmp_path, flag, no_batching=True)
    assert (off.batching, off.flags) == (None, asked.flags)


def test_a_parameter_turns_batching_on_where_the_scenario_has_it_off(tmp_path: Path) -> None:
    text = SWEEP.replace("fixed: {max_enqueued_batches: 50,", "fixed: {enable_batching: false,")
    assert configuration(tmp_path, text=text).batching is None
    assert configuration(tmp_path, "num_batch_threads=2", text=text).batching is not None


def test_settings_lie_over_the_parameters_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "parameters.txt"
    file.write_text("max_batch_size { value: 32 }\nbatch_timeout_micros { value: 5000 }\n")
    asked = configuration(tmp_path, "batch_timeout_micros=0", batching_parameters_file=file)
    assert asked.batching == from_dict({"max_batch_size": 32, "batch_timeout_micros": 0})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, str]:
    """A file of Triton's parameters, and a scenario to sweep."""
    file, scenario = tmp_path / "config.pbtxt", tmp_path / "s.yaml"
    file.write_text(CONFIG_PBTXT)
    scenario.write_text(SWEEP)
    return file, str(scenario)


def test_a_file_of_another_server_is_translated_and_what_it_says_more_is_noted(
    tmp_path: Path, files: tuple[Path, str]
) -> None:
    file, _ = files
    scenario, wanted = asked(tmp_path, SWEEP, batching_parameters_file=file)
    translated = from_dict({"max_batch_size": 48, "batch_timeout_micros": 700})
    assert asked_configuration(scenario, wanted).batching == translated
    assert f"{file}: preferred_batch_size has no counterpart in TensorFlow Serving" in wanted.notes
    file.write_text("dynamic_batching { }\n")
    with pytest.raises(BatchingParametersError, match=f"^{file}: max_batch_size is absent"):
        asked(tmp_path, SWEEP, batching_parameters_file=file)


def test_a_sweep_starts_from_a_file(
    tmp_path: Path, files: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, scenario = files
    subject = subject_of_sweep(scenario, LoadRequest(batching_parameters_file=file, quiet=True))
    swept = read_scenario(subject.scenario, overrides=subject.overrides)
    assert swept.search.space["max_batch_size"].values == (4, 16, 48)
    assert swept.search.space["batch_timeout_micros"].values == (0, 700, 1000)
    assert swept.fixed == {}
    file = tmp_path / "batching_parameters.txt"
    file.write_text("max_batch_size { value: 16 }\nnum_batch_threads { value: 3 }\n")
    subject = subject_of_sweep(scenario, LoadRequest(batching_parameters_file=file, quiet=True))
    swept = read_scenario(subject.scenario)
    assert swept.search.space["max_batch_size"].values == (4, 16)
    assert swept.fixed == {"num_batch_threads": 3}
    assert "note: " in capsys.readouterr().err


def test_a_comparison_has_a_file_under_its_variants(files: tuple[Path, str]) -> None:
    file, scenario = files
    variants = "variants: {theirs: {}, ours: {fixed: {max_batch_size: 2}}}\n"
    without_sizes = SWEEP.replace(", allowed_batch_sizes: [1, 2, 4, 8, 16]", "")
    Path(scenario).write_text(f"{without_sizes}{variants}")
    subject = subject_of_comparison(scenario, LoadRequest(batching_parameters_file=file, quiet=True))
    compared = read_variants(subject.scenario).items()
    sizes = {name: variant.configuration().batching.max_batch_size for name, variant in compared}
    assert sizes == {"theirs": 48, "ours": 2}


def test_a_mistake_in_a_file_is_told_before_a_model_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "b.txt"
    file.write_text("max_batch_size: 8\n")
    with pytest.raises(UsageError, match=r"b\.txt:1: max_batch_size is a wrapper message"):
        subject_of_sweep("no model", LoadRequest(batching_parameters_file=file, quiet=True))


LAUNCHED = "is for a server that is launched"
AT_PORT: dict[str, Any] = {"grpc_url": "h:1"}
UNBATCHED: dict[str, Any] = {"no_batching": True}
BY_FILE: dict[str, Any] = {"batching_parameters_file": Path("x")}


@pytest.mark.parametrize(
    ("override", "options", "words", "hint"),
    [
        ("max_batch_size=", {}, "--set: max_batch_size is empty", "max_batch_size=null"),
        ("max_batch_size=8,16", {}, "one load test has one configuration", "simulate"),
        ("max_batch_sise=8", {}, "no such parameter or key", "max_batch_size"),
        ("lod.rate=8", {}, "unknown key", "load"),
        ("request.protocol=grpc", {"rest_url": "h:1"}, "cannot be sent to --rest-url", ""),
        ("", {**AT_PORT, **UNBATCHED}, f"^--no-batching {LAUNCHED}", ""),
        ("", {**AT_PORT, **BY_FILE}, f"^--batching-parameters-file {LAUNCHED}", ""),
        ("max_batch_size=8", AT_PORT, f"^--set max_batch_size {LAUNCHED}", ""),
        ("fixed.num_batch_threads=8", AT_PORT, f"^--set fixed.num_batch_threads {LAUNCHED}", ""),
        ("target.flags.x=8", AT_PORT, f"^--set target.flags.x {LAUNCHED}", ""),
        ("max_batch_size=8", UNBATCHED, "exclude each other", ""),
        ("", {**UNBATCHED, **BY_FILE}, "exclude each other", ""),
        ("", {"rate": "1", "concurrency": "1"}, "exclude each other", ""),
    ],
)
def test_what_cannot_be_asked_for_is_told(
    tmp_path: Path, override: str, options: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        asked(tmp_path, SWEEP, *filter(None, [override]), **options)
    assert hint in (raised.value.hint or "")


def test_a_setting_that_would_serve_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a second path would override"):
        configuration(tmp_path, "--model_base_path=/other")


@pytest.mark.parametrize(("arrivals", "load"), PATTERNS)
def test_a_rate_keeps_the_pattern(tmp_path: Path, arrivals: str, load: str) -> None:
    scenario, wanted = asked(tmp_path, OPEN.replace("LOAD", load), rate="100,200")
    assert scenario.load.arrivals == arrivals
    plans = list(asked_plans(scenario, wanted, Configuration(batching=None)))
    assert [plan.request.rate_rps for plan in plans] == [100, 200]


def test_a_trace_of_one_instant_has_no_rate_and_the_option_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "burst.csv").write_text("offset_s\n1\n1\n")
    text = OPEN.replace("LOAD", "arrivals: trace, trace: {file: burst.csv}")
    with pytest.raises(UsageError, match=r"^--rate: all requests of the trace"):
        asked(tmp_path, text, rate="100")


def test_a_closed_loop_that_is_asked_for_a_rate_becomes_poisson(tmp_path: Path) -> None:
    scenario, _ = asked(tmp_path, SWEEP, rate="100")
    assert (scenario.load.arrivals, scenario.load.rate_rps) == ("poisson", 100)


@pytest.mark.parametrize(("arrivals", "load"), PATTERNS)
def test_clients_have_no_pattern_and_the_option_is_blamed(tmp_path: Path, arrivals: str, load: str) -> None:
    text = OPEN.replace("LOAD", load)
    with pytest.raises(UsageError, match=f"^--concurrency: the scenario's arrivals are {arrivals}") as told:
        asked(tmp_path, text, concurrency="4")
    *_, closed, _, without = told.value.hint.split()
    scenario, _ = asked(tmp_path, text, closed, without, concurrency="4")
    assert (scenario.load.arrivals, scenario.load.concurrency) == ("closed", 4)


HTTP = """\
name: own
target: {kind: http, url: "http://h:1/score"}
request: {body: {x: "{{row}}"}}
load: {LOAD}
"""


@pytest.mark.parametrize(
    ("load", "objective"),
    [("arrivals: closed, concurrency: 4", "throughput"), ("arrivals: poisson, rate: 40/s", "latency")],
)
@pytest.mark.parametrize("named", ["", "objective: capacity\n"])
def test_a_load_needs_no_objective_and_no_slo(tmp_path: Path, load: str, objective: str, named: str) -> None:
    assert asked(tmp_path, HTTP.replace("LOAD", load) + named)[0].objective == objective


def test_the_option_rest_is_refused_for_a_server_with_requests_of_its_own(tmp_path: Path) -> None:
    text, rest = HTTP.replace("LOAD", "arrivals: closed, concurrency: 4"), "request.protocol=rest"
    for own in (text, text.replace("body: {", "protocol: openai, openai: {")):
        with pytest.raises(UsageError, match=r"^--rest: ") as told:
            asked(tmp_path, own, rest)
        assert "request: {protocol: rest}" in told.value.hint
    speaks_it = text.replace('body: {x: "{{row}}"}', "protocol: rest")
    assert asked(tmp_path, speaks_it, rest)[0].request.protocol == "rest"


def test_a_rate_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    text = OPEN.replace("rate: 300, LOAD", "arrivals: poisson").replace("latency", "capacity")
    for own in (text, text.replace("slo: {p95: 30ms}\n", "")):
        with pytest.raises(UsageError, match="names no rate"):
            asked(tmp_path, own)


@pytest.mark.parametrize(
    ("said", "options", "loaded"),
    [
        ("grpc", {"rest_url": "h:1"}, "rest"),
        ("rest", {"grpc_url": "h:1"}, "grpc"),
        ("kserve_grpc", {"rest_url": "h:1"}, "kserve_rest"),
        ("kserve_rest_binary", {"grpc_url": "h:1"}, "kserve_grpc"),
        ("kserve_rest_binary", {"rest_url": "h:1"}, "kserve_rest_binary"),
        ("rest", {"rest_url": "h:1", "grpc_url": "h:2"}, "rest"),
        ("grpc", {"rest_url": "h:1", "grpc_url": "h:2"}, "grpc"),
    ],
)
def test_one_url_says_the_protocol(tmp_path: Path, said: str, options: dict[str, str], loaded: str) -> None:
    text = SWEEP + f"request: {{protocol: {said}}}\n"
    scenario, wanted = asked(tmp_path, text, **options)
    assert scenario.request.protocol == loaded
    assert (said in "".join(wanted.notes)) == (said != loaded)


def test_the_flags_of_a_scenario_are_not_those_of_a_server_that_runs_already(tmp_path: Path) -> None:
    assert asked(tmp_path, SWEEP, grpc_url="h:1")[0].target.flags == {}
    assert asked(tmp_path, SWEEP)[0].target.flags != {}


def test_a_server_that_the_command_line_names_has_no_replicas_of_the_scenario(tmp_path: Path) -> None:
    text = (
        "name: e\nload: {arrivals: closed, concurrency: 4}\nobjective: throughput\n"
        "target: {kind: external, model: m, grpc_url: 'lb:1', endpoints: ['a:1', 'b:1']}\n"
    )
    assert asked(tmp_path, text)[0].target.endpoints == ("a:1", "b:1")
    scenario, wanted = asked(tmp_path, text, grpc_url="c:1")
    assert scenario.target.endpoints == ()
    assert any("target.endpoints is left out" in note for note in wanted.notes)
    scenario, wanted = asked(tmp_path, text, 'target.endpoints=["c:1", "d:1"]', grpc_url="lb2:1")
    assert scenario.target.endpoints == ("c:1", "d:1")


def test_a_number_of_requests_is_not_cut_at_the_default_duration(tmp_path: Path) -> None:
    text = SWEEP.replace("think_time: 1ms", "requests: 10000")
    assert asked(tmp_path, text)[0].load.duration_s == 600.0
    assert asked(tmp_path, text, "load.duration=3s")[0].load.duration_s == 3.0


def test_a_mistake_in_the_file_is_still_the_files(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"scenario\.yaml:3: load\.gamma"):
        asked(tmp_path, OPEN.replace("LOAD", "arrivals: poisson, gamma: {cv: 3}"), rate="100")
