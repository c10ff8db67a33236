"""A check that is kept is read again as the account that it was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from batchtune.archive.run import CHECK
from batchtune.check.account import account_from, read_account
from batchtune.check.gate import default_gates
from batchtune.check.paired_check import judge_fixed
from batchtune.errors import ArchiveError
from batchtune.plain_values import as_text, coded
from batchtune.report.check_text import account_document, closing, gate_table, headline
from tests.check.check_fakes import account, regressed

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
