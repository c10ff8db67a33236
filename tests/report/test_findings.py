"""Findings are codes with figures, worded once."""

from __future__ import annotations

import ast
import json
import math
import re
import string
from typing import get_args

import pytest

from batchtune.measure.caveats import TOUCHES
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, coded, from_plain, to_plain
from batchtune.report.findings import advice_of, labels, print_json, text_of, texts, worded
from batchtune.tune.search.proposals import throughput_interval_rule
from batchtune.tune.trials.trial import Source
from tests.check.check_fakes import measurement
from tests.package_trees import trees

UNBOUNDED = "without batching p95 is unbounded, above the 60 ms allowed"
HALF_LENGTHS = "closed_"
"""Begins codes whose ends are a server's words."""


def strings() -> set[str]:
    return {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_text_has_a_code_that_some_room_gives() -> None:
    given = strings()
    unused = {code for code in texts() if code not in given and not code.startswith(HALF_LENGTHS)}
    assert not {code for code in unused if code.removesuffix("_advice") not in given}


def calls() -> list[tuple[str, set[str]]]:
    """Code and names of figures of each `coded("…", …)` or `caveat("…", …)` that states both."""
    return [
        (node.args[0].value, {keyword.arg for keyword in node.keywords if keyword.arg})
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("coded", "caveat")
        and isinstance(node.args[0], ast.Constant)
        and all(keyword.arg for keyword in node.keywords)
    ]


def test_every_code_has_a_text_and_its_text_the_figures_that_it_is_given() -> None:
    found = calls()
    assert len(found) > 30
    for code, figures in found:
        assert code in texts(), code
        text = texts()[code] + labels("advice").get(code, "")
        wanted = {name for _, name, _, _ in string.Formatter().parse(text) if name}
        assert wanted <= figures, (code, wanted, figures)


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (coded("batches_hold", mean_rows=1.0), "batches contain 1 row on average"),
        (coded("batches_hold", mean_rows=13.62), "batches contain 13.6 rows on average"),
        (
            coded("event_loop_late", lag_s=0.00256),
            "the server's event loop was late by more than 2.56 ms in 1 of 100 checks",
        ),
        (coded("unbatched_above", name="p95", value_s=math.inf, limit_s=0.06), UNBOUNDED),
        (
            coded("unbatched_below", limit_ratio=0.9, value_ratio=0.85),
            "without batching goodput is 85 %, below the 90 % required",
        ),
        (coded("worth", gain=Estimate(value=2.1, low=1.8, high=2.5)), "batching is worth ×2.10 [1.80, 2.50]"),
        (as_text("as {it} was"), "as {it} was"),
        (
            coded("facts", facts=(coded("batches_hold", mean_rows=2), as_text("more"))),
            "batches contain 2 rows on average; more",
        ),
    ],
)
def test_a_text_is_alike_from_a_finding_and_from_json(finding: Coded, text: str) -> None:
    document = json.loads(json.dumps(to_plain(finding), allow_nan=False))
    assert text_of(finding) == worded(document) == text_of(from_plain(Coded, document)) == text


def test_of_a_server_that_speaks_kserve_parameters_have_tritons_names() -> None:
    assert text_of(coded("batch_timeout_advice", in_tritons_words=True)).startswith(
        "lower max_queue_delay_microseconds"
    )


@pytest.mark.parametrize("limits", [{}, {"p95": 0.001}, {"p95": 0.06}])
def test_the_rule_is_worded_with_and_without_an_slo(limits: dict[str, float]) -> None:
    rule = throughput_interval_rule(rows_per_s=900.0, lone_latency_s=0.002, limits=limits, rows_per_request=1)
    finding = rule.arithmetic()
    text = text_of(finding)
    assert text.startswith("X = 900 rows/s one by one")
    assert worded(json.loads(json.dumps(to_plain(finding)))) == text


def test_every_caveat_has_advice_and_no_other_finding_has() -> None:
    caveats = {code for code in texts() if code in TOUCHES}
    assert caveats == set(labels("advice")) == set(TOUCHES)


@pytest.mark.parametrize("code", ["host_steal", "of another version"])
def test_a_caveat_of_an_older_run_keeps_its_words(code: str) -> None:
    kept = {"code": code, "text": "5 % {stolen}", "advice": "wait"}
    (caveat,) = from_plain(Measurement, {**to_plain(measurement()), "caveats": [kept]}).caveats
    assert (text_of(caveat), advice_of(caveat)) == ("5 % {stolen}", "wait")
    assert worded(to_plain(caveat)) == kept


def test_numbers_that_are_not_finite_are_null_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"gain": {"value": 2.0, "high": "inf"}, "rates": ["nan", 1.0, math.nan], "text": "no inf"}
    expected = {"gain": {"value": 2.0, "high": None}, "rates": [None, 1.0, None], "text": "no inf"}
    print_json(document)
    assert json.loads(capsys.readouterr().out) == expected


def test_what_proposes_a_configuration_is_explained_before_a_sweep() -> None:
    explained = set(re.findall("[a-z]+", labels("notes")["trials"]))
    says_itself = {"present", "no_batching", "defaults", "alone"}
    of_other_commands, of_older_files = {"variant", "load"}, {"twin", "race", "node"}
    shown_as_scout = {"probe", "calibration"}
    rest = set(get_args(Source)) - says_itself - of_other_commands - of_older_files - shown_as_scout
    assert rest <= explained, rest - explained
