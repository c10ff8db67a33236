"""Does every mistake in a scenario end in one clear line, and every right file in the scenario it means?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from batchtune.errors import ScenarioError
from batchtune.scenario.reader import (
    format_scenario,
    json_schema,
    parse_scenario,
    read_kept_scenario,
    read_scenario,
    read_variants,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import ListSpace, RangeSpace
from batchtune.scenario.spec.section import require_cpus
from batchtune.scenario.yaml_document import parse_override

pytestmark = pytest.mark.smoke


SCENARIOS = Path(__file__).parents[2] / "scenarios"


QUICKSTART = SCENARIOS / "quickstart.yaml"


SMALL = """\
name: small
target: {model: imdb_transformer}
load:
  arrivals: closed
  concurrency: 8
objective: throughput
search:
  space:
    max_batch_size: [1, 2, 4]
"""


OPEN = SMALL.replace("closed\n  concurrency: 8", "poisson\n  rate: 500/s").replace(
    "objective: throughput", "slo: {p95: 20ms}\nobjective: capacity"
)


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def with_line(text: str, line: str) -> str:
    """With this in place of the line of the same key, or at the end."""
    key = line.partition(":")[0]
    old = [one.strip() for one in text.splitlines() if one.strip().startswith(f"{key}:")]
    return changed(text, (old[0], line)) if old else f"{text}{line}\n"


def refused(text: str, overrides: tuple[str, ...] = ()) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, source="s.yaml", overrides=overrides)
    return caught.value


def test_keys_carry_units_and_attributes_their_names() -> None:
    text = with_line(
        with_line(OPEN, "slo: {p95: 20ms, p99.9: 0.1s, errors: 2%}"), "rate: 30/min\n  warm_up: 0"
    )
    scenario = parse_scenario(text)
    assert scenario.slo.limits() == {"p95": 0.02, "p99.9": 0.1}
    assert (scenario.slo.error_ratio, scenario.load.rate_rps, scenario.load.warm_up_s) == (0.02, 0.5, 0)


def test_defaults_are_those_of_a_first_try() -> None:
    scenario = parse_scenario(SMALL)
    asked = scenario.request
    assert (asked.protocol, asked.rows, asked.signature, asked.timeout_s) == (
        "grpc",
        1,
        "serving_default",
        10,
    )
    assert scenario.slo.limits() == {}
    assert (scenario.search.strategy, scenario.search.budget.time_s) == ("guided", 120)
    default = parse_scenario(SMALL.partition("search:")[0]).search
    assert [len(knob.values) for knob in default.space.values()] == [8, 6, 3]


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_published_scenario_is_legal_and_known_to_editors(path: Path) -> None:
    read_scenario(path)
    assert path.read_text().startswith("# yaml-language-server: $schema=scenario.schema.json\n")
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(path.read_text()))


def test_the_published_schema_is_the_models_own() -> None:
    published = json.loads((SCENARIOS / "scenario.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    assert published == json_schema(), (
        "write it anew: python -c 'import json; from batchtune.scenario.reader import json_schema; "
        "print(json.dumps(json_schema(), indent=2, ensure_ascii=False))' > scenarios/scenario.schema.json"
    )


def test_the_quickstart_asks_what_the_readme_says() -> None:
    scenario = read_scenario(QUICKSTART)
    assert scenario.target.model == "imdb_transformer"
    assert scenario.objective == "throughput"
    assert len(scenario.search.grid()) == 126
    point = {"max_batch_size": 8, "batch_timeout_micros": 500, "num_batch_threads": 4}
    assert point in scenario.search.grid()
    assert scenario.configuration(point).label() == (
        "max_batch_size=8 batch_timeout_micros=500 max_enqueued_batches=100 num_batch_threads=4"
    )


@pytest.mark.parametrize("text", [SMALL, OPEN, QUICKSTART.read_text()])
def test_a_scenario_written_is_read_back_equal(text: str) -> None:
    scenario = parse_scenario(text)
    written = format_scenario(scenario)
    assert parse_scenario(written) == scenario
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(written))


def test_client_and_server_are_kept_on_cpus_that_this_machine_has_and_runs_of_others_are_read() -> None:
    elsewhere = parse_scenario(with_line(SMALL, "concurrency: 8\n  cpus: [4096]"))
    assert (elsewhere.load.cpus, elsewhere.target.cpus) == ((4096,), None)
    require_cpus("load.cpus", None)
    require_cpus("load.cpus", (min(os.sched_getaffinity(0)),))
    with pytest.raises(ScenarioError, match=r"load\.cpus: this process may run on CPUs .*, not on CPU 4096"):
        require_cpus("load.cpus", elsewhere.load.cpus)


MISTAKEN = """\
nam: small
target:
load:
  arrivals: closed
  concurency: 8
  concurrency: eight
  duration: 2
  warm_up: 2 fortnights
  seed: true
  requests: 99999999999999999999
objective: thruput
request: {ok: {status: 200}, inputs: randm, mix: [{rows: 0}]}
slo: {errors: 5, p95_s: 20ms}
search:
  spce: {}
  space: {max_batch_size: [], num_batch_threads: 4, batch_timeout_micros: {low: 64, high: 1}}
max_batch_size: 8
"""
MISTAKES = """\
1: nam: unknown key (did you mean 'name'?)
1: name: missing (letters, digits, dots, - and _; names the results directory)
2: target: expected keys and values; was None (known are: kind, model, models, rest_url, grpc_url, endpoints, url, set, means, metrics, defaults, present, traps, framework, device, server, docker, command, flags, ready_timeout, cpus, launch, install, apply, render, ready, stop, restore, environment, step_timeout, tls, found)
5: load.concurency: unknown key (did you mean 'concurrency'?)
6: load.concurrency: expected a whole number; was 'eight'
7: load.duration: expected a duration with its unit, such as 20ms, 1.5s or 3m; was 2 (write 2s or 2m)
8: load.warm_up: expected a duration with its unit, such as 20ms, 1.5s or 3m; was '2 fortnights' (units: ns, us, ms, s, m, h)
9: load.seed: expected a whole number; was True
10: load.requests: expected less than or equal to 2147483647; was 99999999999999999999
11: objective: expected 'capacity', 'throughput' or 'latency'; was 'thruput' (did you mean 'throughput'?)
12: request.inputs: expected 'random' or 'zeros'; was 'randm' (did you mean 'random'?)
12: request.mix.0.rows: expected greater than or equal to 1; was 0
12: request.ok.status: expected a list; was 200
13: slo.errors: expected a percentage such as 1%, or a ratio from 0 to 1; was 5 (write 5%)
13: slo.p95_s: unknown key (did you mean 'p95'?)
15: search.spce: unknown key (did you mean 'space'?)
16: search.space.batch_timeout_micros.low: low is above high: 64 > 1 (swap low and high)
16: search.space.max_batch_size: expected at least one value; the list is empty
16: search.space.num_batch_threads: expected a list of values, or a range {low, high, step} or {low, high, log: true}
17: max_batch_size: no key of its own, but a batching parameter (one value: fixed.max_batch_size; values to try: search.space.max_batch_size)
"""


MISTAKEN_BLOCKS = """\
name: ../up
load: {arrivals: closed}
slo: {p95: 20ms, p99: 5ms}
objective: throughput
request: {protocol: openai, shapes: {x: [4]}}
search: {space: {}}
"""
MISTAKES_OF_BLOCKS = """\
1: name: expected letters, digits, dots, - and _; was '../up'
1: target: missing (The server that is launched, attached to or only loaded, and the model that it serves.)
2: load.concurrency: missing: arrivals: closed needs the number of clients (add concurrency: 32)
3: slo.p99: the limit of p99 is below that of p95, which it includes
5: request.shapes: not read with protocol: openai, whose inputs are prompts (request.lengths sets the tokens of a prompt)
6: search.space: the search space is empty (list values for at least one parameter, such as max_batch_size: [1, 8, 32])
"""


@pytest.mark.parametrize(("text", "mistakes"), [(MISTAKEN, MISTAKES), (MISTAKEN_BLOCKS, MISTAKES_OF_BLOCKS)])
def test_several_mistakes_are_reported_at_once_in_the_order_of_lines(text: str, mistakes: str) -> None:
    assert refused(text).message.replace("s.yaml:", "").splitlines() == mistakes.splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            with_line(SMALL, "concurrency: 8\n  rate: 5/s"),
            "6: load.rate: a closed loop has no rate: its clients send as fast as they are answered (use arrivals: poisson for a rate)",
        ),
        (
            changed(SMALL, ("max_batch_size:", "max_batchsize:")),
            "9: search.space.max_batchsize: unknown batching parameter (did you mean 'max_batch_size'? (write --max_batchsize for a server flag))",
        ),
        (
            with_line(SMALL, "max_batch_size: [0, 2]"),
            "9: search.space.max_batch_size: max_batch_size must be positive; was 0 (raise max_batch_size to at least 1)",
        ),
        (
            with_line(SMALL, "fixed: {max_batch_size: 3}"),
            "10: fixed.max_batch_size: both fixed and searched (remove one of the two)",
        ),
        (
            with_line(SMALL, "fixed:\n  num_batch_threads: none"),
            "11: fixed.num_batch_threads: num_batch_threads must be a whole number; was 'none' ()",
        ),
        (
            with_line(SMALL, "objective: capacity"),
            "6: objective: capacity is measured in an open loop; load.arrivals is closed (set load.arrivals to poisson, or objective to throughput)",
        ),
        (
            changed(OPEN, ("slo: {p95: 20ms}\n", "")),
            "1: slo: missing: objective capacity needs a latency limit (add slo: {p95: 20ms})",
        ),
        (
            changed(OPEN, ("objective: capacity", "objective: latency"), ("\n  rate: 500/s", "")),
            "3: load.rate: missing: arrivals poisson at objective latency needs a rate (add rate: 500/s)",
        ),
        (
            with_line(OPEN, "arrivals: gamma"),
            "3: load.gamma: missing: arrivals: gamma needs a gamma block ()",
        ),
        (
            with_line(OPEN, "rate: 500/s\n  gamma: {cv: 2}"),
            "6: load.gamma: read only with arrivals: gamma; arrivals is poisson (set load.arrivals to gamma, or remove the block)",
        ),
        (
            with_line(SMALL, "request: {inputs: {file: nowhere.npz}}"),
            "10: request.inputs.file: no such file: nowhere.npz (paths are relative to the scenario's own directory)",
        ),
        (SMALL + "name: again\n", "10: name: given twice, first on line 1 (keep one of them)"),
        (
            changed(SMALL, ("  concurrency", "\tconcurrency")),
            "5: not YAML: found a tab character that violates indentation (indent with spaces; YAML allows no tabs there)",
        ),
        ("", " the file is empty (a scenario begins with name: and target:)"),
        ("- a\n", "1: expected keys such as name: and target:, not a list or a word ()"),
    ],
)
def test_every_mistake_names_file_line_key_and_what_was_expected(text: str, said: str) -> None:
    error = refused(text)
    assert f"{error.message} ({error.hint})" == f"s.yaml:{said}"
    assert error.exit_code == 2


def test_keys_of_before_are_refused_with_what_takes_their_place(tmp_path: Path) -> None:
    old = changed(
        SMALL, ("search:\n", "search:\n  strategy: guide\n  sampler: tpe\n  mode: bulk\n  repeats: 3\n")
    )
    lines = refused(old).message.splitlines()
    assert lines[0].startswith(
        "s.yaml:8: search.strategy: this strategy no longer exists; was 'guide' (set guided"
    )
    assert [line.partition(" (")[0] for line in lines[1:]] == [
        f"s.yaml:{line}: search.{key}: this key no longer exists"
        for line, key in ((9, "sampler"), (10, "mode"), (11, "repeats"))
    ]
    assert "take it out: close configurations run again" in lines[3]
    override = refused(SMALL, ("search.sampler=gp",))
    assert override.message == "--set search.sampler=gp: this key no longer exists"
    path = tmp_path / "scenario.yaml"
    path.write_text(old)
    kept = read_kept_scenario(path)
    assert kept.search.strategy == "guided"
    assert kept == parse_scenario(SMALL)
    path.unlink()
    with pytest.raises(ScenarioError, match=r"the run is incomplete: it has no scenario\.yaml"):
        read_kept_scenario(path)


@pytest.mark.parametrize("part", ["slo", "request.ok", "target.means"])
def test_null_unsets_a_whole_part(part: str) -> None:
    rest = ["load.arrivals=closed", "load.rate=null", "load.concurrency=4", "objective=throughput"]
    scenario = parse_scenario(OPEN, overrides=["slo=null", *rest, f"{part}=null"])
    plain = parse_scenario(OPEN, overrides=["slo=null", *rest, f"{part}={{}}"])
    assert scenario == plain


def test_overrides_replace_single_keys() -> None:
    overrides = [
        "load.concurrency=64",
        "slo.p99.9=80ms",
        "search.space.max_batch_size=[8, 16]",
        "request={rows: 5, protocol: rest}",
        "target.flags.tensorflow_intra_op_parallelism=1",
    ]
    scenario = parse_scenario(SMALL, overrides=overrides)
    assert scenario.load.concurrency == 64
    assert scenario.slo.limits() == {"p99.9": 0.08}
    assert scenario.search.space == {"max_batch_size": ListSpace(values=(8, 16))}
    assert (scenario.request.rows, scenario.request.protocol) == (5, "rest")
    assert scenario.target.flags == {"tensorflow_intra_op_parallelism": 1}


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("load.duration=3", "expected a duration with its unit", "write 3s or 3m"),
        ("search.budget.time=45", "expected a duration with its unit", "write 45s or 45m"),
        ("slo.p95=30", "expected a duration with its unit", "write 30ms or 30s"),
        ("load.duraton=3s", "unknown key", "did you mean 'duration'?"),
        ("load", "expected key=value", ""),
        ("=3", "expected key=value", ""),
        ("load.seed=[", "not YAML", ""),
        ("load.on_off={on: 1s, on: 2s}", "on: given twice", ""),
        ("load.ramp={from: -1, to: 5}", "load.ramp.from: expected 0 or more", ""),
        ("slo.p59=20ms", "unknown key", ""),
    ],
)
def test_a_wrong_override_is_named_as_it_was_given(override: str, message: str, hint: str) -> None:
    error = refused(SMALL, (override,))
    assert error.message.startswith(f"--set {override}: {message}")
    assert hint in error.hint


VARIANTS = (
    SMALL
    + """\
variants:
  without: {fixed: {enable_batching: false}}
  with:
    fixed: {max_enqueued_batches: 16}
    load: {concurrency: 500}
"""
)


def test_variants_are_scenarios_that_differ_where_they_say(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"{VARIANTS}  searched: {{fixed: {{max_batch_size: 64}}}}\n")
    variants = read_variants(path, overrides=["load.seed=9"])
    found = {name: (one.configuration({}).label(), one.load.concurrency) for name, one in variants.items()}
    assert found == {
        "without": ("no batching", 8),
        "with": ("max_enqueued_batches=16", 500),
        "searched": ("max_batch_size=64", 8),
    }
    assert {one.load.seed for one in variants.values()} == {9}


def test_a_mistake_in_a_variant_is_found_when_the_scenario_is_read() -> None:
    error = refused(changed(VARIANTS, ("concurrency: 500", "concurency: 500")))
    assert error.message == "s.yaml:14: variants.with: load.concurency: unknown key"


def test_file_names_are_relative_to_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "requests.npz").touch()
    path = tmp_path / "s.yaml"
    path.write_text(
        changed(SMALL, ("imdb_transformer", "./model")) + "request: {inputs: {file: requests.npz}}\n"
    )
    scenario = read_scenario(path)
    assert scenario.target.model == str(tmp_path / "model")
    assert scenario.document()["request"]["inputs"] == {"file": str(tmp_path / "requests.npz")}
    elsewhere = parse_scenario(format_scenario(scenario), directory=Path("/"))
    assert elsewhere == scenario


def test_a_missing_scenario_is_told_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    (tmp_path / "written-in-another-encoding.yaml").write_bytes(b"name: caf\xe9\n")
    for name, message, hint in (
        ("quikstart.yaml", "quikstart.yaml: no such file", "quickstart.yaml"),
        ("", "expected a scenario, a .yaml file; is a directory", ""),
        ("written-in-another-encoding.yaml", "not UTF-8", ""),
        ("nothing.yaml", "nothing.yaml: no such file", ""),
    ):
        with pytest.raises(ScenarioError) as caught:
            read_scenario(tmp_path / name)
        assert message in caught.value.message
        assert caught.value.hint.endswith(hint)
    assert "there is" not in caught.value.hint


def test_keys_are_words_also_where_yaml_sees_truth_values() -> None:
    """YAML 1.1 reads `on` and `off` as true and false, in a file and within a value of --set."""
    on_off = "{on: 100ms, off: 300ms}"
    written = parse_scenario(with_line(OPEN, f"arrivals: on_off\n  on_off: {on_off}"))
    for scenario in (
        written,
        parse_scenario(OPEN, overrides=["load.arrivals=on_off", f"load.on_off={on_off}"]),
    ):
        assert scenario.load.on_off is not None
        assert (scenario.load.on_off.on_s, scenario.load.on_off.off_s) == (0.1, 0.3)


def test_anchors_and_merge_keys_work_and_loops_do_not() -> None:
    text = changed(
        VARIANTS,
        ("load: {concurrency: 500}", "load: &l {concurrency: 500}\n  more: {load: {<<: *l, seed: 4}}"),
    )
    assert parse_scenario(text).variants["more"] == {"load": {"concurrency": 500, "seed": 4}}
    assert "contains itself" in refused("a: &a {b: *a}\n").message


def test_a_mix_is_filled_in_from_the_request() -> None:
    scenario = parse_scenario(SMALL + "request: {rows: 2, mix: [{weight: 9}, {rows: 5, inputs: zeros}]}\n")
    kinds = scenario.request.kinds()
    assert [(one.weight, one.rows, one.inputs) for one in kinds] == [(9, 2, "random"), (1, 5, "zeros")]
    assert {one.signature for one in kinds} == {"serving_default"}


def test_ranges_and_lists_are_ordered_values() -> None:
    assert ListSpace(values=(1, 2)).values == (1, 2)
    space = parse_scenario(changed(SMALL, ("[1, 2, 4]", "[8, 1, 2]"))).search.space
    assert space["max_batch_size"].values == (1, 2, 8)
    assert RangeSpace(low=1, high=100, log=True).values == (1, 2, 4, 8, 16, 32, 64, 100)
    assert RangeSpace(low=1, high=64, log=True).values == (1, 2, 4, 8, 16, 32, 64)
    assert RangeSpace(low=0, high=1000, step=250).values == (0, 250, 500, 750, 1000)
    assert RangeSpace(low=2, high=5).values == (2, 3, 4, 5)
    assert RangeSpace(low=7, high=7).values == (7,)


def test_a_point_has_a_value_of_each_knob() -> None:
    grid = parse_scenario(with_line(SMALL, "max_batch_size: [1, 2, 4]\n    some_flag: [a, b]")).search.grid()
    assert (len(grid), grid[-1]) == (6, {"max_batch_size": 4, "some_flag": "b"})


def test_reading_a_scenario_imports_nothing_heavy() -> None:
    code = (
        "import sys; from batchtune.scenario.reader import read_scenario; "
        "heavy = {'tensorflow', 'optuna', 'pandas', 'rich', 'typer', 'grpc', 'httpx', 'pyarrow'}; "
        "sys.exit(', '.join(heavy & sys.modules.keys()) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_scenario_can_be_made_from_python_by_attribute_names() -> None:
    made = Scenario.model_validate(
        {
            "name": "made",
            "target": {"model": "m"},
            "load": {"arrivals": "poisson", "rate_rps": 100.0, "duration_s": 2.0},
            "slo": {"p95_s": 0.05},
            "objective": "capacity",
        }
    )
    assert parse_scenario(format_scenario(made)) == made


def test_the_space_that_nobody_wrote_holds_only_what_is_not_fixed() -> None:
    text = SMALL.partition("search:")[0] + "fixed: {max_batch_size: 64}\n"
    assert list(parse_scenario(text).search.space) == ["batch_timeout_micros", "num_batch_threads"]
    others = "64, batch_timeout_micros: 0, num_batch_threads: 1, max_enqueued_batches: 4"
    everything = parse_scenario(text.replace("64", others))
    assert not everything.search.space
    assert parse_scenario(format_scenario(everything)) == everything


@pytest.mark.parametrize("value", ["", " ", " # 8"])
def test_an_override_without_a_value_is_no_override(value: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_override(f"fixed.max_batch_size={value}")
    assert caught.value.message == "--set: fixed.max_batch_size is empty"
    assert "fixed.max_batch_size=null" in caught.value.hint
    assert parse_override("fixed.max_batch_size=null").data == {"fixed": {"max_batch_size": None}}


def test_every_rate_takes_its_unit_and_steps_take_as_long_as_they_take() -> None:
    ramp = parse_scenario(
        OPEN, overrides=["load.arrivals=ramp", "load.rate=null", "load.ramp={from: 0/s, to: 0.6k/s}"]
    ).load.ramp
    assert ramp is not None
    assert (ramp.from_rps, ramp.to_rps) == (0.0, 600.0)
    steps = "load.steps=[{rate: 60/min, duration: 2s}, {rate: 5, duration: 4s}]"
    load = parse_scenario(OPEN, overrides=["load.arrivals=steps", "load.rate=null", steps]).load
    assert [one.rate_rps for one in load.steps or ()] == [1.0, 5.0]
    assert load.duration_s == 6


@pytest.mark.parametrize(
    "nested", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000, "[" * 80 + "]" * 80]
)
def test_a_document_nested_too_deep_is_told_in_a_line(nested: str) -> None:
    with pytest.raises(ScenarioError, match="nested too deep"):
        parse_scenario(f"name: {nested}")
    with pytest.raises(ScenarioError, match="nested too deep") as caught:
        parse_override(f"search.space={nested}")
    assert len(caught.value.message) < 300


FLAGS = [
    ("enable_batching: true", "enable_batching: each trial gives the server its parameters", "in fixed"),
    ("--batching_parameters_file: b.txt", "--batching_parameters_file: each trial gives", "in fixed"),
    ("rest_api_port: x", "rest_api_port: expected a port, 0 to 65535; was 'x'", ""),
    ("port: 70000", "port: expected a port, 0 to 65535; was 70000", ""),
    ("port: true", "port: expected a port", ""),
    ("model_base_path: /m", "model_base_path: target.model sets the model's path", "leave it out"),
    ("monitoring_config_file: m", "monitoring_config_file: each trial writes its own", "leave it out"),
    ("enable_per_model_batching_parameters: true", "enable_per_model_batching_parameters: with it", "leave"),
]


@pytest.mark.parametrize(("flag", "said", "hint"), FLAGS)
def test_a_flag_that_contradicts_the_trials_or_is_no_port_is_refused(flag: str, said: str, hint: str) -> None:
    """The last of two equal flags counts: every trial would have run with the parameters of that one."""
    error = refused(with_line(SMALL, f"target: {{model: imdb_transformer, flags: {{{flag}}}}}"))
    assert error.message.startswith(f"s.yaml:2: target.flags.{said}")
    assert hint in error.hint


def test_a_fixed_flag_that_contradicts_the_trials_is_refused_and_one_of_an_older_run_is_read(
    tmp_path: Path,
) -> None:
    error = refused(SMALL + "fixed: {--model_base_path: /m}\n")
    assert error.message.startswith("s.yaml:10: fixed.--model_base_path: target.model sets")
    error = refused(SMALL + "fixed: {batching_parameters_file: b.txt}\n")
    assert error.message.startswith("s.yaml:10: fixed.batching_parameters_file: ")
    assert "--batching-parameters-file" in error.hint
    once = "{model: imdb_transformer, flags: {enable_per_model_batching_parameters: true}}"
    (tmp_path / "kept.yaml").write_text(with_line(SMALL, f"target: {once}"))
    flags = read_kept_scenario(tmp_path / "kept.yaml").target.flags
    assert flags == {"enable_per_model_batching_parameters": True}


@pytest.mark.parametrize("errors", ["-1", "500"])
def test_a_hint_for_a_ratio_is_one_that_would_be_taken(errors: str) -> None:
    error = refused(f"{SMALL}\nslo: {{errors: {errors}}}\n")
    assert ("from 0 to 1" in error.message, error.hint) == (True, "")


def test_a_request_that_fits_in_no_batch_is_refused_before_it_is_sent() -> None:
    parse_scenario(SMALL).require_rows_fit()
    huge = with_line(SMALL, "request: {rows: 5000}")
    with pytest.raises(ScenarioError, match="a request of 5,000 rows fits in no batch"):
        parse_scenario(huge).require_rows_fit()
    parse_scenario(
        huge.partition("search:")[0] + "request: {rows: 5000}\nfixed: {enable_batching: false}\n"
    ).require_rows_fit()
    parse_scenario(with_line(huge, "space:\n    enable_batching: [true, false]")).require_rows_fit()
