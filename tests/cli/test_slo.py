"""The options `--slo-p50` to `--slo-errors`: one meaning for every command that promises something."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.cli.arguments.overrides import in_place_of, promised, slo_overrides
from batchtune.errors import UsageError
from batchtune.scenario.reader import parse_scenario

pytestmark = pytest.mark.smoke

SCENARIO = """\
name: one
target: {model: m}
load: {arrivals: closed, concurrency: 1}
slo: {p50: 10ms, p99: 50ms, errors: 2%}
objective: throughput
"""


@pytest.mark.parametrize("command", ["sweep", "recommend", "load", "compare", "plan"])
def test_every_command_with_an_slo_takes_all_its_limits(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).output
    for option in ("p50", "p90", "p95", "p99", "p99.9", "errors"):
        assert f"--slo-{option} " in shown


def test_limits_given_replace_all_limits_and_leave_the_errors() -> None:
    scenario = parse_scenario(SCENARIO)
    asked = in_place_of(scenario.slo, promised({"p95": "20ms"}))
    assert (asked.limits(), asked.error_ratio) == ({"p95": 0.02}, 0.02)
    assert parse_scenario(SCENARIO, overrides=slo_overrides({"p95": "20ms"})).slo == asked


def test_errors_given_leave_the_limits() -> None:
    scenario = parse_scenario(SCENARIO)
    asked = in_place_of(scenario.slo, promised({"errors": "0.1%"}))
    assert (asked.limits(), asked.error_ratio) == ({"p50": 0.01, "p99": 0.05}, 0.001)
    assert parse_scenario(SCENARIO, overrides=slo_overrides({"errors": "0.1%"})).slo == asked


def test_a_limit_with_a_dot_in_its_name_reaches_the_scenario() -> None:
    slo = parse_scenario(SCENARIO, overrides=slo_overrides({"p99.9": "1s"})).slo
    assert slo.limits() == {"p99.9": 1.0}


def test_nothing_given_changes_nothing() -> None:
    assert promised({}) is None
    scenario = parse_scenario(SCENARIO)
    assert in_place_of(scenario.slo, None) is scenario.slo
    assert slo_overrides({"p95": None}) == []


def test_a_limit_without_a_unit_is_proposed_with_each() -> None:
    with pytest.raises(UsageError) as raised:
        slo_overrides({"p95": "30"})
    assert raised.value.hint == "write 30ms or 30s"


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ({"p95": "soon"}, "--slo-p95: "),
        ({"p90": "0ms"}, "--slo-p90: .* not above 0"),
        ({"errors": "many"}, "--slo-errors: "),
        ({"errors": "120%"}, "--slo-errors: .* not between 0 and 100 %"),
        ({"p50": "2s", "p99": "1s"}, "the limit of p99 is below that of p50"),
    ],
)
def test_a_wrong_limit_blames_the_option(slo: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        slo_overrides(slo)


def test_the_scenario_need_not_be_read_to_refuse_an_option(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["load", str(tmp_path / "none.yaml"), "--slo-p95", "20 furlongs"])
    assert isinstance(done.exception, UsageError)
    assert "--slo-p95" in done.exception.message
