"""The options `--slo-p50` to `--slo-errors`: one meaning for every command that promises something."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.cli.arguments.overrides import asked_scenario, in_place_of, promised, slo_overrides
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.reader import parse_scenario

pytestmark = pytest.mark.smoke

SCENARIO = """\
name: one
target: {model: m}
load: {arrivals: closed, concurrency: 1}
slo: {p50: 10ms, p99: 50ms, errors: 2%}
objective: throughput
"""
STREAMED = """\
name: llm
target: {model: m}
request: {protocol: openai}
load: {arrivals: poisson}
slo: {ttft_p95: 80ms, itl_p99: 25ms, p99: 2s, goodput: 90%}
objective: capacity
"""


@pytest.mark.parametrize("command", ["sweep", "recommend", "load", "compare", "plan", "check"])
def test_every_command_with_an_slo_takes_all_its_limits(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).output
    for quantile in ("p50", "p90", "p95", "p99", "p99.9"):
        assert f"--slo-{quantile}, --slo-e2e-{quantile} " in shown
    for name in ("ttft-p95", "ttft-p99", "itl-p95", "itl-p99", "goodput", "errors"):
        assert f"--slo-{name} " in shown


@pytest.mark.parametrize(
    ("given", "limits", "error_ratio"),
    [
        ({"p95": "20ms"}, {"p95": 0.02}, 0.02),
        ({"errors": "0.1%"}, {"p50": 0.01, "p99": 0.05}, 0.001),
        ({"p99.9": "1s"}, {"p99.9": 1.0}, 0.02),
    ],
)
def test_limits_given_replace_all_limits_and_errors_only_themselves(
    given: dict[str, str], limits: dict[str, float], error_ratio: float
) -> None:
    asked = in_place_of(parse_scenario(SCENARIO), promised(given))
    assert (asked.limits(), asked.error_ratio) == (limits, error_ratio)
    assert parse_scenario(SCENARIO, overrides=slo_overrides(given)).slo == asked


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"ttft_p95": "60ms"}, {"ttft_p95": 0.06}),
        ({"itl_p95": "20ms"}, {"itl_p95": 0.02}),
        ({"p95": "1s"}, {"p95": 1.0, "p99": None}),
        ({"errors": "2%"}, {}),
    ],
)
def test_a_limit_of_streams_replaces_its_own_and_whole_answers_those_of_whole_answers(
    given: dict[str, str], changed: dict[str, float | None]
) -> None:
    """What no option names is kept: nothing that the scenario promises is dropped unsaid."""
    scenario = parse_scenario(STREAMED)
    limits = {name: limit for name, limit in scenario.slo.limits().items() if name != "goodput"}
    expected = {name: limit for name, limit in (limits | changed).items() if limit is not None}
    read = parse_scenario(STREAMED, overrides=slo_overrides(given)).slo
    assert {name: read.limits()[name] for name in read.limits() if name != "goodput"} == expected
    assert read.goodput == 0.9
    asked = in_place_of(scenario, promised(given))
    assert {name: asked.limits()[name] for name in asked.limits() if name != "goodput"} == expected


def test_goodput_is_given_beside_the_limits_of_the_scenario() -> None:
    scenario = parse_scenario(STREAMED)
    given = {"goodput": "80%"}
    assert in_place_of(scenario, promised(given)).goodput == 0.8
    assert parse_scenario(STREAMED, overrides=slo_overrides(given)).slo.goodput == 0.8
    with pytest.raises(UsageError, match=r"--slo-goodput: .* not between 0 and 100 %"):
        promised({"goodput": "120%"})


def test_a_run_counts_goodput_by_its_own_limits_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A share of requests within other limits was not counted, so that no answer may rest on it."""
    scenario = parse_scenario(STREAMED)
    with pytest.raises(UsageError, match=r"--slo-goodput: .* ttft_p95 ≤ 80 ms"):
        in_place_of(scenario, promised({"goodput": "80%", "ttft_p95": "60ms"}))
    assert in_place_of(scenario, promised({"ttft_p95": "60ms"})).goodput is None
    assert "note: without goodput ≥ 90 %" in capsys.readouterr().err
    uncounted = parse_scenario(STREAMED.replace(", goodput: 90%", ""))
    with pytest.raises(UsageError, match="--slo-goodput: "):
        in_place_of(uncounted, promised({"goodput": "80%"}))


@pytest.mark.parametrize(
    ("name", "api"),
    [
        ("ttft_p95", ""),
        ("itl_p99", ""),
        ("goodput", ""),
        ("ttft_p99", "request: {protocol: openai, openai: {api: embeddings}}\n"),
    ],
)
def test_a_limit_of_streams_is_refused_where_no_answer_is_one(name: str, api: str) -> None:
    """Every run would miss it."""
    option = f"--slo-{name.replace('_', '-')}"
    value = "50%" if name == "goodput" else "20ms"
    with pytest.raises(ScenarioError, match=f"slo.{name}.*: only of streamed answers") as raised:
        parse_scenario(SCENARIO + api, overrides=slo_overrides({name: value}))
    assert option in str(raised.value.hint)
    with pytest.raises(UsageError, match=f"{option}: only of streamed answers"):
        in_place_of(parse_scenario(SCENARIO + api), promised({name: value}))


@pytest.mark.parametrize(
    ("text", "given", "note"),
    [
        (SCENARIO, {"p95": "20ms"}, "note: without p50 ≤ 10 ms, p99 ≤ 50 ms of the scenario"),
        (SCENARIO, {"p50": "10ms", "p99": "20ms"}, ""),
        (STREAMED.replace("p99: 2s", "e2e_p99: 2s"), {"p95": "1s"}, "note: without p99 ≤ 2s of the scenario"),
        (STREAMED, {"ttft_p95": "1s"}, ""),
    ],
)
def test_limits_that_are_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, given: dict[str, str], note: str
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(text)
    if text == SCENARIO:
        in_place_of(parse_scenario(text), promised(given))
    else:
        asked_scenario(file, slo_overrides(given))
    said = capsys.readouterr().err
    assert said.startswith(note)
    assert bool(said) == bool(note)


def test_nothing_given_changes_nothing() -> None:
    assert promised({}) is None
    scenario = parse_scenario(SCENARIO)
    assert in_place_of(scenario, None) is scenario.slo
    assert slo_overrides({"p95": None}) == []


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ({"p95": "30"}, "--slo-p95: "),
        ({"p90": "0ms"}, "--slo-p90: .* not above 0"),
        ({"errors": "many"}, "--slo-errors: "),
        ({"errors": "120%"}, "--slo-errors: .* not between 0 and 100 %"),
        ({"p50": "2s", "p99": "1s"}, "the limit of p99 is below that of p50"),
    ],
)
def test_a_wrong_limit_blames_the_option(slo: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        slo_overrides(slo)
    assert words != "--slo-p95: " or raised.value.hint == "write 30ms or 30s"


@pytest.mark.parametrize("option", ["--slo-p95", "--slo-e2e-p95"])
def test_an_option_is_refused_before_the_scenario_is_read(tmp_path: Path, option: str) -> None:
    """Whole answers are called e2e beside first tokens."""
    done = CliRunner().invoke(app, ["load", str(tmp_path / "none.yaml"), option, "20 furlongs"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.message.startswith("--slo-p95: ")
