"""Which point of a range is best, why, and with which exit code a load test therefore ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchtune.cli.commands.run_load import _exit_code, without_empty_verdict
from batchtune.report.findings import text_of
from batchtune.report.load_points import points_dict
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.best_point import best_point
from batchtune.tune.trials.trial import FinishedTrial, Trial
from tests.report.test_load_points import BUSY, STEAL, point, said
from tests.tune.tune_fakes import remeasured, scenario_of


def chosen(points) -> tuple[int | None, str]:
    best = best_point(points)
    assert best is not None
    return best.point.concurrency, text_of(best.why)


def test_the_most_throughput_within_the_slo_is_best() -> None:
    points = [point(4), point(8), point(16, verdict="FAIL"), point(32, verdict="UNSURE")]
    assert chosen(points) == (8, "of the points that meet the SLO it has the highest throughput")


def test_of_points_that_cannot_be_told_apart_the_least_load_is_best() -> None:
    def beside(clients: int, **figures) -> Trial:
        return replace(remeasured(point(8), concurrency=clients, **figures), concurrency=clients)

    assert chosen([point(4), point(8), beside(64)])[0] == 8
    nine = point(9).measurement.throughput_rps
    assert chosen([point(8), beside(64, throughput_rps=nine)])[0] == 64
    clients, why = chosen([point(8), beside(2)])
    assert clients == 2
    assert "no measurable difference from the highest, 800 requests/s at 8" in why


def test_without_a_point_that_keeps_the_slo_one_that_may_comes_first() -> None:
    assert chosen([point(4, verdict="FAIL"), point(8, verdict="UNSURE")])[0] == 8
    broken = [
        replace(point(clients, verdict="FAIL"), constraints={"p95": by})
        for clients, by in ((4, 0.5), (8, 0.2))
    ]
    clients, why = chosen(broken)
    assert clients == 8
    assert "comes closest" in why


def test_void_points_are_not_chosen() -> None:
    assert best_point([point(4, BUSY, verdict="INVALID")]) is None
    assert chosen([point(4), point(8, STEAL, verdict="NOISY")])[0] == 4


@pytest.mark.parametrize(
    ("verdicts", "code", "words"),
    [
        (["PASS"], 0, ""),
        (["FAIL"], 3, "the SLO is missed"),
        (["UNSURE"], 5, "no verdict on the SLO"),
        (["PASS", "FAIL"], 0, ""),
        (["FAIL", "UNSURE"], 5, "no verdict on the SLO"),
        (["FAIL", "FAIL"], 3, "the SLO is missed"),
        ([None], 0, ""),
        (["NOISY"], 6, "invalid"),
        (["NOISY", "FAIL"], 3, "the SLO is missed"),
    ],
)
def test_the_best_point_decides_the_exit_code(verdicts, code, words, capsys) -> None:
    points = [
        point(4 * at, *([STEAL] if verdict == "NOISY" else []), verdict=verdict)
        for at, verdict in enumerate(verdicts, 1)
    ]
    assert _exit_code(points, scenario_of()) == code
    assert words in capsys.readouterr().err


def test_a_failed_point_decides_whatever_the_others_say() -> None:
    assert _exit_code([point(4), point(8, failure="the server died")], scenario_of()) == 7


def test_without_a_promise_there_is_no_verdict() -> None:
    silent = scenario_of(slo={})
    assert not silent.slo.promises
    assert SloSpec.model_validate({"errors": "1%"}).promises

    def verdict(asked: str, scenario: Scenario) -> str | None:
        finished = FinishedTrial(trial=point(4, verdict=asked), samples=None)
        return without_empty_verdict(finished, scenario).trial.measurement.verdict

    assert verdict("FAIL", silent) is None
    assert verdict("NOISY", silent) == "NOISY"
    assert verdict("FAIL", scenario_of()) == "FAIL"


def test_a_range_says_which_point_is_best() -> None:
    points = [point(4), point(8)]
    assert "Best: clients 8: " in said(points)
    assert "Best:" not in said([point(4)])
    assert points_dict(points)["best"]["number"] == points[1].number
    assert points_dict([])["best"] is None
