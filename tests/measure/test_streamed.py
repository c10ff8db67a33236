"""Limits of streamed answers: first tokens, gaps between tokens, goodput; and what is counted of tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchtune.load.samples import Samples, Status, Streams
from batchtune.measure.measurement import Measurement, measure
from batchtune.measure.slo import limits_of, primary_limit
from batchtune.plain_values import from_plain, to_plain
from batchtune.report.findings import text_of
from batchtune.scenario.spec.check import SloSpec, limit_words

MS = 1_000_000
COUNT = 2000


def streams(
    *,
    ttft_ms: float = 10.0,
    gap_ms: float = 5.0,
    slow_first: float = 0.0,
    slow_gap: float = 0.0,
    failed: int = 0,
) -> Samples:
    """A request a millisecond, of five tokens; a share of them has a first token, or a gap, ten times as late."""
    rng = np.random.default_rng(3)
    due_ns = np.arange(COUNT, dtype=np.int64) * MS
    first_ns = due_ns + np.where(rng.random(COUNT) < slow_first, 10 * ttft_ms, ttft_ms).astype(np.int64) * MS
    gaps_ns = np.where(rng.random((COUNT, 4)) < slow_gap, 10 * gap_ms, gap_ms) * MS
    done_ns = first_ns + gaps_ns.sum(axis=1).astype(np.int64)
    status = np.full(COUNT, Status.OK, dtype=np.uint8)
    status[:failed] = Status.RESET
    return Samples(
        due_ns=due_ns,
        sent_ns=due_ns,
        first_byte_ns=first_ns,
        done_ns=done_ns,
        connection_wait_ns=np.zeros(COUNT, dtype=np.int64),
        status=status,
        rows=np.ones(COUNT, dtype=np.int32),
        started_ns=0,
        wall_s=2.0,
        client_cpu_s=0.1,
        client_cores=1,
        offered_rps=1000.0,
        streams=Streams(
            prompt_tokens=np.full(COUNT, 100),
            output_tokens=np.full(COUNT, 7),  # two chunks held two tokens
            gap_p99_ns=gaps_ns.max(axis=1).astype(np.int64),
            gaps_ns=gaps_ns.ravel().astype(np.int64),
            gap_ended_ns=(first_ns[:, None] + gaps_ns.cumsum(axis=1).astype(np.int64)).ravel(),
        ),
    )


def measured(samples: Samples, **slo: Any) -> Any:
    return measure(samples, warm_up_s=0.0, duration_s=2.0, slo=SloSpec.model_validate(slo) if slo else None)


def test_quantiles_of_first_tokens_and_of_all_gaps_stand_beside_those_of_whole_answers() -> None:
    run = measured(streams(slow_gap=0.02))
    for name, value_s in {"ttft_p95": 0.010, "itl_p50": 0.005, "itl_p99": 0.050, "p50": 0.030}.items():
        assert run.latency_s[name].value == pytest.approx(value_s)
    assert run.tokens.output_per_s.value == pytest.approx(7 * 1000, rel=0.03)
    assert (run.tokens.prompt_mean, run.tokens.untold_ratio) == (100.0, 0.0)


@pytest.mark.parametrize(
    ("samples", "slo", "verdict"),
    [
        ({}, {"ttft_p95": "20ms", "itl_p99": "8ms"}, "PASS"),
        ({"slow_first": 0.1}, {"ttft_p95": "20ms"}, "FAIL"),
        ({"slow_first": 0.1}, {"itl_p99": "8ms"}, "PASS"),
        ({"slow_gap": 0.03}, {"itl_p99": "8ms"}, "FAIL"),
        ({"slow_gap": 0.03}, {"itl_p95": "8ms"}, "PASS"),
        (
            {"slow_gap": 0.03},
            {"itl_p95": "8ms", "goodput": "95%"},
            "FAIL",
        ),  # one in nine has its own slow gap
        ({"slow_gap": 0.03}, {"itl_p95": "8ms", "goodput": "80%"}, "PASS"),
        ({"failed": 100}, {"ttft_p95": "20ms"}, "FAIL"),
    ],
)
def test_each_limit_is_judged_by_what_it_limits(
    samples: dict[str, Any], slo: dict[str, Any], verdict: str
) -> None:
    assert measured(streams(**samples), **slo).verdict == verdict


def test_goodput_is_the_share_that_keeps_every_limit_by_its_own_figures() -> None:
    run = measured(streams(slow_gap=0.03), ttft_p95="20ms", itl_p99="8ms", goodput="95%")
    beyond = run.latency_s["goodput"]
    assert beyond.value == pytest.approx(1.0 - 0.97**4, abs=0.02)
    assert beyond.low < beyond.value < beyond.high
    assert run.goodput_rps == pytest.approx(1000 * 0.97**4, rel=0.05)


NONE = np.zeros(0, dtype=np.int64)
WHOLE = {"gaps_ns": NONE, "gap_ended_ns": NONE}
"""Answers that came in one piece."""


def with_usage(output_tokens: Any, prompt_tokens: Any = None, **values: Any) -> Samples:
    """Requests whose answers have these token counts, 0 where the server sent none."""
    samples = streams()
    counts = np.broadcast_to(np.asarray(output_tokens, dtype=np.int64), COUNT)
    prompts = counts if prompt_tokens is None else np.full(COUNT, prompt_tokens)
    assert samples.streams is not None
    return replace(
        samples, streams=replace(samples.streams, output_tokens=counts, prompt_tokens=prompts, **values)
    )


def caveats(run: Any) -> dict[str, str]:
    return {caveat.code: text_of(caveat) for caveat in run.caveats}


def test_an_answer_without_tokens_counts_neither_as_fast_nor_as_slow_between_them() -> None:
    run = measured(
        with_usage(0, prompt_tokens=100, gap_p99_ns=np.zeros(COUNT, np.int64), **WHOLE), itl_p99="8ms"
    )
    assert math.isnan(run.latency_s["itl_p99"].value)
    assert run.verdict == "UNSURE"


def test_answers_without_usage_count_neither_in_means_nor_as_no_tokens_of_the_rate() -> None:
    run = measured(with_usage(np.where(np.arange(COUNT) % 2, 7, 0)))
    assert (run.tokens.output_mean, run.tokens.prompt_mean) == (7.0, 7.0)
    assert run.tokens.output_per_s.value == pytest.approx(7 * 1000, rel=0.05)
    assert "50 % of the answers" in caveats(run)["tokens_untold"]
    assert "tokens_untold" not in caveats(measured(streams()))


def test_without_any_usage_there_are_no_token_figures() -> None:
    run = measured(with_usage(0))
    tokens = run.tokens
    assert np.isnan([tokens.output_per_s.value, tokens.output_mean, tokens.prompt_mean]).all()
    assert "tokens_untold" in caveats(run)
    assert "tokens_untold" not in caveats(measured(streams(failed=COUNT)))


def test_embeddings_have_tokens_of_prompts_only() -> None:
    run = measured(with_usage(0, prompt_tokens=9, **WHOLE))
    assert run.tokens.prompt_mean == 9.0
    assert math.isnan(run.tokens.output_per_s.value)
    assert caveats(run).keys().isdisjoint({"tokens_untold", "answers_whole"})


def test_answers_of_many_tokens_in_one_piece_were_not_streamed() -> None:
    run = measured(with_usage(7, **WHOLE), ttft_p95="20ms", itl_p99="8ms")
    assert "stream: true" in caveats(run)["answers_whole"]
    textless = caveats(measured(with_usage(7, **WHOLE, textless=COUNT)))
    assert f"{COUNT:,} of {COUNT:,} (100 %) answers had no text" in textless["streams_textless"]
    assert "answers_whole" not in textless
    some = caveats(measured(replace(streams(), streams=replace(streams().streams, textless=1))))
    assert f"1 of {COUNT:,} (" in some["streams_textless"]
    assert "answers_whole" not in caveats(measured(streams()))
    assert "answers_whole" not in caveats(measured(with_usage(1, **WHOLE)))


def test_e2e_is_a_name_for_whole_answers_and_the_watched_limit_is_the_first() -> None:
    slo = SloSpec.model_validate({"e2e_p95": "2s", "ttft_p95": "200ms", "itl_p99": "50ms", "goodput": "90%"})
    assert slo.limits() == {"p95": 2.0, "ttft_p95": 0.2, "itl_p99": 0.05, "goodput": 10 / 100}
    assert [limit.figure for limit in limits_of(slo)] == ["e2e", "ttft", "itl", "goodput"]
    assert primary_limit(slo).name == "p95"  # type: ignore[union-attr]
    assert primary_limit(SloSpec.model_validate({"itl_p99": "50ms", "ttft_p95": "1s"})).name == "ttft_p95"  # type: ignore[union-attr]
    assert slo.patience_s(streams=True) == 2.0
    assert SloSpec.model_validate({"itl_p99": "50ms"}).patience_s(streams=True) is None
    words = [limit_words(name, limit) for name, limit in slo.limits().items()]
    assert words == ["p95 ≤ 2 s", "ttft_p95 ≤ 200 ms", "itl_p99 ≤ 50 ms", "goodput ≥ 90 %"]


def test_json_gives_goodput_as_the_share_within_all_limits_and_not_in_seconds() -> None:
    run = measured(streams(slow_gap=0.03), ttft_p95="20ms", itl_p99="8ms", goodput="95%")
    plain = json.loads(json.dumps(to_plain(run), allow_nan=False))
    beyond = run.latency_s["goodput"]
    assert "goodput" not in plain["latency_s"]
    assert plain["goodput_ratio"] == {
        "value": pytest.approx(1.0 - beyond.value),
        "low": pytest.approx(1.0 - beyond.high),
        "high": pytest.approx(1.0 - beyond.low),
    }
    read = from_plain(Measurement, plain)
    assert read.latency_s["goodput"].value == pytest.approx(beyond.value)
    older = {**plain, "latency_s": {**plain["latency_s"], "goodput": to_plain(beyond)}}
    del older["goodput_ratio"]
    assert from_plain(Measurement, older).latency_s == run.latency_s


def test_goodput_alone_says_nothing() -> None:
    with pytest.raises(ValueError, match="goodput needs latency limits"):
        SloSpec.model_validate({"goodput": "90%"})
