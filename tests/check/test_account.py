"""What a check says and keeps: what spoils it, where a change comes from, its history, its journey through JSON."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from batchtune.archive.run import CHECK
from batchtune.check.account import Conclusion, account_from, attribute, attributed, read_account
from batchtune.check.gate import Gate, default_gates
from batchtune.check.history import LEAST, append_history, change_points, history_line
from batchtune.check.paired_check import judge_fixed, judged
from batchtune.errors import ArchiveError
from batchtune.measure.caveats import caveat
from batchtune.plain_values import as_text, coded
from batchtune.report.check_text import account_document, attribution_text, closing, gate_table, headline
from batchtune.report.findings import text_of
from batchtune.tune.compare.blocks import Variant
from tests.check.check_fakes import account, measurement, moved, regressed, trial
from tests.tune.tune_fakes import scenario_of

VARIANTS = [Variant(name=name, scenario=scenario_of()) for name in ("main", "pull_request")]
OK = Conclusion(verdict="OK", findings=(), blocks=6, fresh_blocks=0, blocks_max=24)


def runs(measured=None) -> list:
    """Six blocks of both, of which the candidate measured this."""
    return [
        trial(name, block, measured if name == "pull_request" else None)
        for block in range(1, 7)
        for name in ("main", "pull_request")
    ]


NOISY = runs(measurement(caveats=(caveat("host_steal", steal_ratio=0.2),)))
LIMITED = runs(measurement(caveats=(caveat("client_busy", cpu_ratio=0.95),)))
FAILING = runs(measurement(verdict="FAIL", verdict_reason=as_text("p95 60 ms of 50 ms")))


@pytest.mark.parametrize(
    ("trials", "verdict", "exit_code", "words"),
    [
        (LIMITED, "INVALID", 6, "load generator was the limit"),
        (NOISY, "INVALID", 6, "the host disturbed every run of pull_request"),
        (FAILING, "SLO MISSED", 3, "p95 60 ms of 50 ms"),
    ],
)
def test_a_check_without_regression_ends_as_its_runs_say(trials, verdict, exit_code, words):
    assert judged(OK, runs(), VARIANTS) == OK
    conclusion = judged(OK, trials, VARIANTS)
    assert (conclusion.verdict, conclusion.exit_code) == (verdict, exit_code)
    assert words in text_of(conclusion.reason)


def test_a_confirmed_regression_stands_on_a_disturbed_host_and_not_where_the_client_was_the_limit():
    confirmed = replace(regressed(), confirms=True)
    assert judged(confirmed, NOISY, VARIANTS) == confirmed
    assert {judged(regressed(), spoilt, VARIANTS).verdict for spoilt in (LIMITED, NOISY)} == {"INVALID"}
    assert judged(regressed(), FAILING, VARIANTS).verdict == "REGRESSED"


def test_an_slo_that_half_of_the_runs_met_is_not_called_missed():
    assert judged(OK, [*FAILING[:6], *runs()[6:]], VARIANTS) == OK


def test_a_failed_server_stays_the_reason():
    failed = replace(OK, verdict="INVALID", reason=as_text("ended by signal 9"), target_failed=True)
    assert judged(failed, [], VARIANTS) == failed


def test_a_change_is_attributed_and_none_is_not():
    slower = runs(moved(execution_s_by_rows={16: 0.003}))
    sides = {"baseline": "main", "candidate": "pull_request"}
    assert attributed(regressed(), slower, **sides).cause == "compute"
    assert attributed(OK, slower, **sides) is None
    failing = judge_fixed([Gate(metric="errors", margin=0.001)], [{"errors": (0.0, 0.1)}] * 10)
    assert failing.verdict == "REGRESSED"
    assert attributed(failing, slower, **sides) is None


def test_the_history_gets_a_line_a_check_also_after_one_that_was_cut_short(tmp_path):
    provenance = {"git": {"commit": "abc"}, "machine": {"host": "ci"}, "cpu": {"model": "EPYC"}}
    line = history_line(account(), provenance)
    assert (line["verdict"], line["commit"], line["host"]) == ("REGRESSED", "abc", "ci")
    assert history_line(account(), {"git": {"commit": "abc"}}, commit="f00")["commit"] == "f00"
    assert line["gates"]["p95"]["state"] == "regressed"
    root = tmp_path / "results"
    path = append_history(root, line)
    with path.open("a") as file:
        file.write('{"cut')
    append_history(root, line)
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first) == json.loads(last)
    assert cut == '{"cut'


TIME = "batch execution time 2 ms →"
UNKNOWN = "the cause is not known"
DISTURBED = (caveat("host_steal", steal_ratio=0.1),)


SMALLER = {"mean_batch_rows": 8.0, "batches_by_rows": {8: 200}, "execution_s_by_rows": {8: 0.0015}}
FEWER = {"mean_batch_rows": 15.1, "batches_by_rows": {16: 90, 8: 10}, "queue_wait_mean_s": 0.0014}
WAITING = moved(execution_s_by_rows={16: 0.0021}, queue_wait_mean_s=0.004, server_cpu_s=0.6).server


@pytest.mark.parametrize(
    ("after", "cause", "words"),
    [
        (moved(execution_s_by_rows={16: 0.0022}), "compute", f"{TIME} 2.2 ms (+10 %)"),
        (moved(**SMALLER), "batch size", "mean batch size 16 → 8 rows (−50 %)"),
        (moved(queue_wait_mean_s=0.0005), "front end", "front end and network 1 ms → 1.5 ms"),
        (
            moved(server_cpu_s=0.352),
            "not known",
            f"{UNKNOWN}: server CPU per request 200 µs → 220 µs (+10 %)",
        ),
        (measurement(latency_mean_s=0.006), "front end", "front end and network 1 ms → 3 ms"),
        (
            measurement(),
            "tail",
            "no mean changed by more than 2 %: a few slow requests, or noise of the host",
        ),
        (measurement(caveats=DISTURBED), "host", "the host disturbed one side more often"),
        # batches of equal size that take longer, rather than a few rows less
        (
            moved(execution_s_by_rows={16: 0.00232, 8: 0.0012}, **FEWER),
            "compute",
            f"{TIME} 2.32 ms (+16 %); also ",
        ),
        # also where three others moved more
        (measurement(WAITING, latency_mean_s=0.02), "compute", f"{TIME} 2.1 ms (+5 %); also "),
        (measurement(moved(queue_wait_mean_s=0.002).server, latency_mean_s=0.005), "queue", ""),
    ],
)
def test_what_explains_most_is_named_first_with_its_figures(after, cause, words):
    attribution = attribute([measurement()] * 6, [after] * 6)
    assert attribution.cause == cause
    assert attribution_text(attribution).startswith(words)


def test_a_silent_server_leaves_the_cause_open():
    silent = [measurement(None)] * 6
    attribution = attribute(silent, silent)
    assert (attribution.cause, attribution.parts) == ("not known", ())
    assert attribute(silent, silent, cpu_s=(math.nan, math.nan)).cause == "not known"


BOUNDLESS = judge_fixed(
    default_gates("throughput"), [{"throughput": (100.0, 99.0), "p99": (1.0, math.inf)}] * 2
)
CONFIRMED = replace(regressed(), confirms=True)
VOID = replace(
    regressed(), verdict="INVALID", findings=(), reason=as_text("ended by signal 9"), target_failed=True
)


@pytest.mark.parametrize(
    "kept",
    [
        account(),
        account(BOUNDLESS, attribution=None, stored=True, note="another host"),
        account(VOID, attribution=None, run=None),
    ],
    ids=["regressed", "boundless", "void"],
)
def test_it_says_the_same_after_a_journey_through_json(kept):
    read = account_from(json.loads(json.dumps(kept.to_dict(), allow_nan=False)))
    for told in (headline, gate_table, closing, attrgetter("exit_code")):
        assert told(read) == told(kept)
    for ours, theirs in zip(read.findings, kept.findings, strict=True):
        bounds = (theirs.worsening.low, theirs.worsening.high)
        assert (ours.worsening.low, ours.worsening.high) == pytest.approx(bounds)


def test_a_check_of_the_first_release_is_read_as_what_it_was():
    for kept in (account(CONFIRMED), account(VOID, attribution=None)):
        document = json.loads(json.dumps(kept.to_dict()))
        del document["confirms"], document["target_failed"]
        for gate in document["gates"]:
            del gate["is_default"]
        assert account_from(document).exit_code == kept.exit_code
        assert account_from(document).confirms


def test_an_end_without_a_bound_was_a_loss_of_all():
    document = json.loads(json.dumps(account(BOUNDLESS, attribution=None).to_dict()))
    throughput = document["gates"][0]
    assert throughput["change"]["low"] is None
    throughput["change"]["low"] = -1.0
    assert account_from(document).findings[0].worsening.high == math.inf


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "not a whole check"),
        ("{", "not a whole check"),
        ("[]", "not a whole check"),
        ('{"schema_version": 99}', "schema_version 99"),
        ('{"schema_version": 1}', "not a whole check"),
    ],
)
def test_what_is_none_or_half_of_one_says_so(tmp_path: Path, text, words):
    if text is not None:
        (tmp_path / CHECK).write_text(text)
    with pytest.raises(ArchiveError, match=words):
        read_account(tmp_path)


def test_json_has_the_texts_that_a_check_reads_as() -> None:
    document = json.loads(json.dumps(account_document(account()), allow_nan=False))
    assert document["attribution"]["text"] == "batch execution time 2 ms → 2.12 ms (+6 %)"
    assert document["reason"] == ""
    void = replace(regressed(), verdict="INVALID", reason=coded("side_disturbed", side="main"))
    words = "the host disturbed every run of main, also when it was repeated"
    assert account_document(account(void))["reason"] == words
    assert account_from(account_document(account(void))).reason == as_text(words)


def series(*levels: tuple[float, int], sd: float = 0.01, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [level * (1.0 + chance.gauss(0.0, sd)) for level, count in levels for _ in range(count)]


def test_a_step_of_five_per_cent_is_found_where_it_came():
    (change,) = change_points(series((1.0, 12), (1.05, 12)))
    assert abs(change.at - 12) <= 1
    assert change.change == pytest.approx(0.05, abs=0.01)


def test_two_steps_are_told_in_the_order_of_time():
    found = change_points(series((1.0, 15), (1.1, 15), (0.9, 15)))
    assert [abs(change.at - at) <= 1 for change, at in zip(found, (15, 30), strict=True)] == [True, True]
    assert found[0].after == found[1].before


def test_a_series_without_a_change_shows_one_in_a_hundred():
    """1 % expected of 300; 9 have a probability below 0.2 %."""
    assert sum(bool(change_points(series((1.0, 20), seed=seed))) for seed in range(300)) <= 8


def test_the_fewest_values_show_a_step_halfway():
    assert all(change_points(series((1.0, LEAST // 2), (1.5, LEAST // 2), seed=seed)) for seed in range(20))


@pytest.mark.parametrize(
    "values",
    [
        [2.0] * 30,
        [3.0 * value if at == 10 else value for at, value in enumerate(series((1.0, 20)))],
        *([1.0 if at < count / 2 else 9.0 for at in range(count)] for count in (0, 1, LEAST - 1)),
    ],
    ids=["equal values", "one outlier", "none", "one", "too few"],
)
def test_what_is_no_change_shows_none(values):
    assert change_points(values) == []
