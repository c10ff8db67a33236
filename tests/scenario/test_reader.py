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

DURATION = "expected a duration with its unit, such as 20ms, 1.5s or 3m"
SPACE = "expected a list of values, or a range {low, high, step} or {low, high, log: true}"


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def refused(text: str, overrides: tuple[str, ...] = ()) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, source="s.yaml", overrides=overrides)
    return caught.value


def test_keys_carry_units_and_attributes_their_names() -> None:
    scenario = parse_scenario(
        changed(
            OPEN, ("20ms", "20ms, p99.9: 0.1s, errors: 2%"), ("rate: 500/s", "rate: 30/min\n  warm_up: 0")
        )
    )
    assert scenario.slo.limits() == {"p95": 0.02, "p99.9": 0.1}
    assert scenario.slo.error_ratio == 0.02
    assert scenario.load.rate_rps == 0.5
    assert scenario.load.warm_up_s == 0
    assert scenario.request.timeout_s == 10


def test_defaults_are_those_of_a_first_try() -> None:
    scenario = parse_scenario(SMALL)
    assert scenario.request.protocol == "grpc"
    assert scenario.request.rows == 1
    assert scenario.request.signature == "serving_default"
    assert scenario.slo.limits() == {}
    assert scenario.search.strategy == "guided"
    assert scenario.search.budget.time_s == 120
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
    first = min(os.sched_getaffinity(0))
    elsewhere = parse_scenario(changed(SMALL, ("concurrency: 8", "concurrency: 8\n  cpus: [4096]")))
    assert elsewhere.load.cpus == (4096,)
    assert elsewhere.target.cpus is None
    require_cpus("load.cpus", None)
    require_cpus("load.cpus", (first,))
    with pytest.raises(ScenarioError, match=r"load\.cpus: this process may run on CPUs .*, not on CPU 4096"):
        require_cpus("load.cpus", elsewhere.load.cpus)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            changed(SMALL, ("concurrency: 8", "concurency: 8\n  concurrency: 8")),
            "s.yaml:5: load.concurency: unknown key",
            "did you mean 'concurrency'?",
        ),
        (
            changed(SMALL, ("concurrency: 8", "concurrency: 8\n  duration: 2")),
            f"s.yaml:6: load.duration: {DURATION}; was 2",
            "write 2s or 2m",
        ),
        (
            changed(SMALL, ("concurrency: 8", "concurrency: 8\n  duration: 2 fortnights")),
            f"s.yaml:6: load.duration: {DURATION}; was '2 fortnights'",
            "units: ns, us, ms, s, m, h",
        ),
        (
            changed(SMALL, ("concurrency: 8", "concurrency: eight")),
            "s.yaml:5: load.concurrency: expected a whole number; was 'eight'",
            "",
        ),
        (
            changed(SMALL, ("objective: throughput", "objective: throughput\nrequest: {ok: {status: 200}}")),
            "s.yaml:7: request.ok.status: expected a list; was 200",
            "",
        ),
        (
            changed(
                SMALL,
                (
                    "objective: throughput",
                    "objective: throughput\nrequest: {protocol: openai, shapes: {x: [4]}}",
                ),
            ),
            "s.yaml:7: request.shapes: not read with protocol: openai, whose inputs are prompts",
            "request.lengths sets the tokens of a prompt",
        ),
        (
            changed(SMALL, ("concurrency: 8", "concurrency: true")),
            "s.yaml:5: load.concurrency: expected a whole number; was True",
            "",
        ),
        (
            changed(SMALL, ("objective: throughput", "objective: thruput")),
            "s.yaml:6: objective: expected 'capacity', 'throughput' or 'latency'; was 'thruput'",
            "did you mean 'throughput'?",
        ),
        (
            changed(SMALL, ("\n  concurrency: 8", "")),
            "s.yaml:3: load.concurrency: missing: arrivals: closed needs the number of clients",
            "add concurrency: 32",
        ),
        (
            changed(SMALL, ("concurrency: 8", "concurrency: 8\n  rate: 5/s")),
            "s.yaml:6: load.rate: a closed loop has no rate: its clients send as fast as they are answered",
            "use arrivals: poisson for a rate",
        ),
        (
            changed(SMALL, ("target: {model: imdb_transformer}\n", "")),
            "s.yaml:1: target: missing (The server that is launched, attached to or only loaded, and the model that it serves.)",
            "",
        ),
        (
            changed(SMALL, ("target: {model: imdb_transformer}", "target:")),
            "s.yaml:2: target: expected keys and values; was None",
            "known are: kind, model, models, rest_url, grpc_url, endpoints, url, set, means, metrics, defaults, present, traps, framework, device, server, docker, command, flags, ready_timeout, cpus, launch, install, apply, render, ready, stop, restore, environment, step_timeout, tls, found",
        ),
        (
            changed(SMALL, ("    max_batch_size: [1, 2, 4]", "    {}")),
            "s.yaml:8: search.space: the search space is empty",
            "list values for at least one parameter, such as max_batch_size: [1, 8, 32]",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "[]")),
            "s.yaml:9: search.space.max_batch_size: expected at least one value; the list is empty",
            "",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "{low: 64, high: 1}")),
            "s.yaml:9: search.space.max_batch_size.low: low is above high: 64 > 1",
            "swap low and high",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "4")),
            f"s.yaml:9: search.space.max_batch_size: {SPACE}",
            "",
        ),
        (
            changed(SMALL, ("max_batch_size:", "max_batchsize:")),
            "s.yaml:9: search.space.max_batchsize: unknown batching parameter",
            "did you mean 'max_batch_size'? (write --max_batchsize for a server flag)",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "[0, 2]")),
            "s.yaml:9: search.space.max_batch_size: max_batch_size must be positive; was 0",
            "raise max_batch_size to at least 1",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "[1, 2, 4]\nfixed: {max_batch_size: 3}")),
            "s.yaml:10: fixed.max_batch_size: both fixed and searched",
            "remove one of the two",
        ),
        (
            changed(SMALL, ("[1, 2, 4]", "[1, 2, 4]\nfixed:\n  num_batch_threads: none")),
            "s.yaml:11: fixed.num_batch_threads: num_batch_threads must be a whole number; was 'none'",
            "",
        ),
        (
            changed(SMALL, ("objective: throughput", "objective: capacity")),
            "s.yaml:6: objective: capacity is measured in an open loop; load.arrivals is closed",
            "set load.arrivals to poisson, or objective to throughput",
        ),
        (
            changed(OPEN, ("slo: {p95: 20ms}\n", "")),
            "s.yaml:1: slo: missing: objective capacity needs a latency limit",
            "add slo: {p95: 20ms}",
        ),
        (
            changed(OPEN, ("objective: capacity", "objective: latency"), ("\n  rate: 500/s", "")),
            "s.yaml:3: load.rate: missing: arrivals poisson at objective latency needs a rate",
            "add rate: 500/s",
        ),
        (
            changed(OPEN, ("20ms", "20ms, p99: 5ms")),
            "s.yaml:6: slo.p99: the limit of p99 is below that of p95, which it includes",
            "",
        ),
        (
            changed(OPEN, ("20ms", "20ms, errors: 5")),
            "s.yaml:6: slo.errors: expected a percentage such as 1%, or a ratio from 0 to 1; was 5",
            "write 5%",
        ),
        (
            changed(OPEN, ("arrivals: poisson", "arrivals: gamma")),
            "s.yaml:3: load.gamma: missing: arrivals: gamma needs a gamma block",
            "",
        ),
        (
            changed(OPEN, ("rate: 500/s", "rate: 500/s\n  gamma: {cv: 2}")),
            "s.yaml:6: load.gamma: read only with arrivals: gamma; arrivals is poisson",
            "set load.arrivals to gamma, or remove the block",
        ),
        (
            SMALL + "request: {inputs: {file: nowhere.npz}}\n",
            "s.yaml:10: request.inputs.file: no such file: nowhere.npz",
            "paths are relative to the scenario's own directory",
        ),
        (
            SMALL + "request: {inputs: randm}\n",
            "s.yaml:10: request.inputs: expected 'random' or 'zeros'; was 'randm'",
            "did you mean 'random'?",
        ),
        (
            SMALL + "max_batch_size: 8\n",
            "s.yaml:10: max_batch_size: no key of its own, but a batching parameter",
            "one value: fixed.max_batch_size; values to try: search.space.max_batch_size",
        ),
        (SMALL + "name: again\n", "s.yaml:10: name: given twice, first on line 1", "keep one of them"),
        (
            SMALL + "fixed: {max_batch_size: 1, max_batch_size: 2}\n",
            "s.yaml:10: fixed.max_batch_size: given twice, first on line 10",
            "keep one of them",
        ),
        (
            changed(SMALL, ("  concurrency", "\tconcurrency")),
            "s.yaml:5: not YAML: found a tab character that violates indentation",
            "indent with spaces; YAML allows no tabs there",
        ),
        ("", "s.yaml: the file is empty", "a scenario begins with name: and target:"),
        ("- a\n", "s.yaml:1: expected keys such as name: and target:, not a list or a word", ""),
        (
            changed(SMALL, ("name: small", "name: ../up")),
            "s.yaml:1: name: expected letters, digits, dots, - and _; was '../up'",
            "",
        ),
    ],
)
def test_every_mistake_names_file_line_key_and_what_was_expected(text: str, message: str, hint: str) -> None:
    error = refused(text)
    assert (error.message, error.hint) == (message, hint)
    assert error.exit_code == 2


def test_several_mistakes_are_reported_at_once_in_the_order_of_lines() -> None:
    error = refused(
        changed(
            SMALL, ("name: small", "nam: small"), ("concurrency: 8", "concurrency: 0"), ("space:", "spce:")
        )
    )
    assert error.message.splitlines() == [
        "s.yaml:1: nam: unknown key (did you mean 'name'?)",
        "s.yaml:1: name: missing (letters, digits, dots, - and _; names the results directory)",
        "s.yaml:5: load.concurrency: expected greater than or equal to 1; was 0",
        "s.yaml:8: search.spce: unknown key (did you mean 'space'?)",
    ]


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


def test_names_of_attributes_are_no_keys() -> None:
    error = refused(changed(OPEN, ("p95: 20ms", "p95_s: 20ms")))
    assert error.message == "s.yaml:6: slo.p95_s: unknown key"
    assert error.hint == "did you mean 'p95'?"


@pytest.mark.parametrize("part", ["slo", "request.ok", "target.means"])
def test_null_unsets_a_whole_part(part: str) -> None:
    rest = ["load.arrivals=closed", "load.rate=null", "load.concurrency=4", "objective=throughput"]
    scenario = parse_scenario(OPEN, overrides=["slo=null", *rest, f"{part}=null"])
    plain = parse_scenario(OPEN, overrides=["slo=null", *rest, f"{part}={{}}"])
    assert scenario == plain


def test_overrides_replace_single_keys() -> None:
    scenario = parse_scenario(
        SMALL,
        overrides=[
            "load.concurrency=64",
            "slo.p99.9=80ms",
            "search.space.max_batch_size=[8, 16]",
            "request={rows: 5, protocol: rest}",
            "target.flags.tensorflow_intra_op_parallelism=1",
        ],
    )
    assert scenario.load.concurrency == 64
    assert scenario.slo.limits() == {"p99.9": 0.08}
    assert scenario.search.space == {"max_batch_size": ListSpace(values=(8, 16))}
    assert (scenario.request.rows, scenario.request.protocol) == (5, "rest")
    assert scenario.target.flags == {"tensorflow_intra_op_parallelism": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("load.duration=3", "--set load.duration=3: expected a duration with its unit"),
        ("load.duraton=3s", "--set load.duraton=3s: unknown key"),
        ("load", "--set load: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("load.seed=[", "--set load.seed=[: not YAML"),
        ("load.on_off={on: 1s, on: 2s}", "--set load.on_off={on: 1s, on: 2s}: on: given twice"),
        (
            "load.ramp={from: -1, to: 5}",
            "--set load.ramp={from: -1, to: 5}: load.ramp.from: expected 0 or more",
        ),
        ("slo.p59=20ms", "--set slo.p59=20ms: unknown key"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_given(override: str, message: str) -> None:
    assert refused(SMALL, (override,)).message.startswith(message)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("load.duration=3", "write 3s or 3m"),
        ("search.budget.time=45", "write 45s or 45m"),
        ("slo.p95=30", "write 30ms or 30s"),
    ],
)
def test_a_missing_unit_is_proposed_as_long_as_its_key_means(override: str, hint: str) -> None:
    assert refused(SMALL, (override,)).hint == hint


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
    path.write_text(VARIANTS)
    variants = read_variants(path, overrides=["load.seed=9"])
    assert list(variants) == ["without", "with"]
    assert variants["without"].configuration({}).batching is None
    assert variants["without"].load.concurrency == 8
    assert variants["with"].load.concurrency == 500
    assert variants["with"].configuration({}).label() == "max_enqueued_batches=16"
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
    with pytest.raises(ScenarioError) as caught:
        read_scenario(tmp_path / "quikstart.yaml")
    assert caught.value.message.endswith("quikstart.yaml: no such file")
    assert caught.value.hint.endswith("quickstart.yaml")
    with pytest.raises(ScenarioError, match=r"expected a scenario, a \.yaml file; is a directory"):
        read_scenario(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ScenarioError, match="not UTF-8"):
        read_scenario(tmp_path / "latin.yaml")


def test_keys_are_words_also_where_yaml_sees_truth_values() -> None:
    scenario = parse_scenario(
        changed(OPEN, ("arrivals: poisson", "arrivals: on_off\n  on_off: {on: 100ms, off: 300ms}"))
    )
    assert scenario.load.on_off is not None
    assert (scenario.load.on_off.on_s, scenario.load.on_off.off_s) == (0.1, 0.3)


def test_anchors_and_merge_keys_work_and_loops_do_not() -> None:
    text = changed(
        VARIANTS,
        ("load: {concurrency: 500}", "load: &l {concurrency: 500}\n  more: {load: {<<: *l, seed: 4}}"),
    )
    assert parse_scenario(text).variants["more"] == {"load": {"concurrency": 500, "seed": 4}}
    assert "contains itself" in refused("a: &a {b: *a}\n").message


def test_steps_take_as_long_as_they_take() -> None:
    steps = "steps\n  steps: [{rate: 100, duration: 2s}, {rate: 300, duration: 4s}]"
    scenario = parse_scenario(changed(OPEN, ("poisson\n  rate: 500/s", steps)))
    assert scenario.load.duration_s == 6


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
    search = parse_scenario(changed(SMALL, ("[1, 2, 4]", "[1, 2, 4]\n    some_flag: [a, b]"))).search
    assert len(search.grid()) == 6
    assert search.grid()[-1] == {"max_batch_size": 4, "some_flag": "b"}


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


def test_a_variant_may_fix_what_the_scenario_searches(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "variants:\n  with: {fixed: {max_batch_size: 64}}\n")
    assert read_variants(path)["with"].configuration({}).label() == "max_batch_size=64"


def test_the_space_that_nobody_wrote_holds_only_what_is_not_fixed() -> None:
    text = SMALL.partition("search:")[0] + "fixed: {max_batch_size: 64}\n"
    read = parse_scenario(text)
    assert list(read.search.space) == ["batch_timeout_micros", "num_batch_threads"]
    everything = parse_scenario(
        text.replace("64", "64, batch_timeout_micros: 0, num_batch_threads: 1, max_enqueued_batches: 4")
    )
    assert not everything.search.space
    assert parse_scenario(format_scenario(everything)) == everything


def test_keys_within_a_value_of_set_are_taken_as_written() -> None:
    """YAML 1.1 reads `on` and `off` as true and false."""
    changes = ["load.arrivals=on_off", "load.on_off={on: 100ms, off: 300ms}"]
    scenario = parse_scenario(OPEN, overrides=changes)
    assert scenario.load.on_off is not None
    assert (scenario.load.on_off.on_s, scenario.load.on_off.off_s) == (0.1, 0.3)


@pytest.mark.parametrize("value", ["", " ", " # 8"])
def test_an_override_without_a_value_is_no_override(value: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_override(f"fixed.max_batch_size={value}")
    assert caught.value.message == "--set: fixed.max_batch_size is empty"
    assert "fixed.max_batch_size=null" in caught.value.hint
    assert parse_override("fixed.max_batch_size=null").data == {"fixed": {"max_batch_size": None}}


def test_every_rate_takes_its_unit() -> None:
    ramp = parse_scenario(
        OPEN, overrides=["load.arrivals=ramp", "load.rate=null", "load.ramp={from: 0/s, to: 0.6k/s}"]
    )
    assert ramp.load.ramp is not None
    assert (ramp.load.ramp.from_rps, ramp.load.ramp.to_rps) == (0.0, 600.0)
    steps = "load.steps=[{rate: 60/min, duration: 1s}, {rate: 5, duration: 1s}]"
    scenario = parse_scenario(OPEN, overrides=["load.arrivals=steps", "load.rate=null", steps])
    assert scenario.load.steps is not None
    assert [one.rate_rps for one in scenario.load.steps] == [1.0, 5.0]


@pytest.mark.parametrize(
    "nested", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000, "[" * 80 + "]" * 80]
)
def test_a_document_nested_too_deep_is_told_in_a_line(nested: str) -> None:
    with pytest.raises(ScenarioError, match="nested too deep"):
        parse_scenario(f"name: {nested}")
    with pytest.raises(ScenarioError, match="nested too deep") as caught:
        parse_override(f"search.space={nested}")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("flag", "said", "hint"),
    [
        ("enable_batching: true", "enable_batching: each trial gives the server its parameters", "in fixed"),
        ("--batching_parameters_file: b.txt", "--batching_parameters_file: each trial gives", "in fixed"),
        ("rest_api_port: x", "rest_api_port: expected a port, 0 to 65535; was 'x'", ""),
        ("port: 70000", "port: expected a port, 0 to 65535; was 70000", ""),
        ("port: true", "port: expected a port", ""),
        ("model_base_path: /m", "model_base_path: target.model sets the model's path", "leave it out"),
        ("monitoring_config_file: m", "monitoring_config_file: each trial writes its own", "leave it out"),
        (
            "enable_per_model_batching_parameters: true",
            "enable_per_model_batching_parameters: with it",
            "leave it",
        ),
    ],
)
def test_a_flag_that_contradicts_the_trials_or_is_no_port_is_refused(
    tmp_path: Path, flag: str, said: str, hint: str
) -> None:
    """The last of two equal flags counts: every trial would have run with the parameters of that one."""
    given = changed(SMALL, ("{model: imdb_transformer}", f"{{model: imdb_transformer, flags: {{{flag}}}}}"))
    error = refused(given)
    assert error.message.startswith(f"s.yaml:2: target.flags.{said}")
    assert hint in error.hint
    if "per_model" in flag:  # it was allowed once
        kept = tmp_path / "kept.yaml"
        kept.write_text(given)
        assert read_kept_scenario(kept).target.flags == {"enable_per_model_batching_parameters": True}
    if "model_base_path" in flag:
        fixed = refused(SMALL + "fixed: {--model_base_path: /m}\n")
        assert fixed.message.startswith("s.yaml:10: fixed.--model_base_path: target.model sets")
    if "batching" in flag:
        fixed = refused(SMALL + "fixed: {batching_parameters_file: b.txt}\n")
        assert fixed.message.startswith("s.yaml:10: fixed.batching_parameters_file: ")
        assert "--batching-parameters-file" in fixed.hint


def test_numbers_beyond_what_a_server_counts_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"load\.concurrency: expected less than or equal to 2147483647"):
        parse_scenario(changed(SMALL, ("concurrency: 8", "concurrency: 99999999999999999999")))


@pytest.mark.parametrize(("errors", "hint"), [("-1", ""), ("5", "write 5%"), ("500", "")])
def test_a_hint_for_a_ratio_is_one_that_would_be_taken(errors: str, hint: str) -> None:
    with pytest.raises(ScenarioError, match="from 0 to 1") as caught:
        parse_scenario(f"{SMALL}\nslo: {{errors: {errors}}}\n")
    assert caught.value.hint == hint


def test_a_request_that_fits_in_no_batch_is_refused_before_it_is_sent() -> None:
    scenario = parse_scenario(SMALL)
    scenario.require_rows_fit()
    huge = scenario.model_copy(update={"request": scenario.request.model_copy(update={"rows": 5000})})
    with pytest.raises(ScenarioError, match="a request of 5,000 rows fits in no batch"):
        huge.require_rows_fit()
    unbatched = huge.model_copy(
        update={
            "fixed": {"enable_batching": False},
            "search": scenario.search.model_copy(update={"space": {}}),
        }
    )
    unbatched.require_rows_fit()
    either = changed(
        SMALL,
        ("search:", "request: {rows: 5000}\nsearch:"),
        ("  space:", "  space:\n    enable_batching: [true, false]"),
    )
    parse_scenario(either).require_rows_fit()


def test_a_file_that_is_not_there_suggests_only_one_of_a_like_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    with pytest.raises(ScenarioError) as caught:
        read_scenario(tmp_path / "nothing.yaml")
    assert "there is" not in caught.value.hint
