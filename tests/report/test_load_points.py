"""Load points as a table, as JSON: what limits each, which figures a caveat touches, which are void."""

from __future__ import annotations

import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batchtune.cli.commands.run_load import _exit_code
from batchtune.measure.caveats import caveat
from batchtune.measure.measurement import TokenFigures
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded
from batchtune.report.findings import Marks, advice_of, text_of
from batchtune.report.live_view import trial_line
from batchtune.report.load_points import points_dict, print_points, spoilt_message
from batchtune.scenario.spec.check import SloSpec
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.evidence.best_point import spoilt_by, trial_bottleneck, usual_bottleneck
from batchtune.tune.trials.trial import Trial
from tests.report.pages import Terminal, load_trial, rising_rates
from tests.tune.answer.ledgers import BATCH_14, STREAMED, streamed_ledger
from tests.tune.tune_fakes import asked, planted, remeasured, scenario_of

BUSY = caveat("client_busy", cpu_ratio=0.95)
LATE = caveat("client_late", lag_s=0.003)
STEAL = caveat("host_steal", steal_ratio=0.05)
EMULATED = caveat("emulated_device")
TOKENS = TokenFigures(
    prompt_mean=250.0,
    output_mean=60.0,
    output_per_s=Estimate(value=6e3, low=5e3, high=7e3),
    untold_ratio=0.0,
)
SERVER = ServerActivity(
    duration_s=1.0,
    batches=164,
    rows=2230,
    mean_batch_rows=13.6,
    batches_by_rows={14: 164},
    execution_s_by_rows={14: 0.006},
    close_reasons={"full": 164},
)


def point(clients: int, *caveats: Coded, verdict: str | None = "PASS", server=None, failure=None, rate=None):
    concurrency = None if rate else clients
    load = {"concurrency": concurrency, "offered_rps": rate}
    told = {"server": server, "failure": failure, "verdict": verdict, "caveats": caveats, **load}
    trial = planted(clients, batching=BATCH_14, throughput=100.0 * clients, p95_s=0.01, **told)
    return trial if failure else replace(trial, concurrency=concurrency, rate_rps=rate)


def table(points) -> str:
    stream = Terminal()
    with redirect_stdout(stream):
        print_points(points)
    return stream.getvalue()


def said(points) -> str:
    return re.sub(r"\s+", " ", table(points))


def row_of(text: str, head: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(head))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def test_a_caveat_of_all_figures_marks_the_row_and_one_of_latency_only_its_latencies():
    text = table([point(4, EMULATED), point(8, EMULATED, BUSY, LATE, verdict="INVALID")])
    assert row_of(text, "4 (a)").split()[1:4] == ["(a)", "400", "[396,"]
    marked = row_of(text, "8 (a, b)")
    assert len(re.findall(r" \(c\)(?= |$)", marked)) == 3  # p50, p95, p99; no p90 was measured
    assert "800 [792, 808] (c)" not in marked
    assert "marks such as (a) refer to the warnings below" in text
    assert "refer to the warnings" not in table([point(4)])


def test_a_bound_that_is_missing_marks_no_figure_that_has_one():
    few = caveat("few_requests", requests=90, quantile="p99")
    open_ended = point(8, few)
    latency_s = open_ended.measurement.latency_s
    unbounded = {**latency_s, "p99": replace(latency_s["p99"], high=math.inf)}
    row = row_of(table([point(4), remeasured(open_ended, latency_s=unbounded)]), "8")
    assert row.count("(a)") == 1
    assert "[≥ 12.9] (a)" in row
    assert row_of(table([point(4), point(8, few)]), "8").split()[:2] == ["8", "(a)"]
    assert Marks(caveats={"one": (few,)}).head("one") == "one (a)"


def test_each_caveat_is_told_once_with_whom_it_concerns_and_the_same_advice_once():
    text = said([point(4, EMULATED), point(8, EMULATED, BUSY, LATE, verdict="INVALID")])
    assert text.count("the device is emulated") == 1
    assert (
        "(a) the device is emulated by its service time — measure on the real device before you deploy"
        in text
    )
    assert "(b) clients 8: the client used 95 % of the CPU that it has — give the load generator more" in text
    assert "1 in 100 by more than 3 ms — as for (b)" in text
    assert text.count(advice_of(BUSY)) == 1


def test_every_point_says_what_limits_it_and_each_limit_has_one_advice():
    text = said([point(4), point(8, server=SERVER), point(16, server=SERVER)])
    assert "Bottleneck (clients 4): not known" in text
    limits = (
        "Bottleneck (clients 8, 16): the device; at 16 clients, batch threads execute 98.4 % of the time. Use"
    )
    assert f"{limits} a faster device" in text
    assert row_of(table([point(8, server=SERVER)]), "8").split()[-1] == "device"
    assert "Bottleneck: the device" in said([point(8, server=SERVER)])


def test_where_every_rate_was_served_the_advice_is_a_higher_one():
    assert "execute 97.1 % of the time. Raise the rate to find what limits it." in said(rising_rates()[:2])


@pytest.mark.parametrize("loop", [{"rate": 500.0}, {"clients": 8}])
@pytest.mark.parametrize("known", [True, False])
def test_a_load_that_misses_the_slo_on_an_idle_server_is_not_advised_to_rise(loop, known):
    """Whether or not the server tells anything of itself."""
    late = load_trial(1, **loop, throughput=499.0, p95_s=0.4, verdict="FAIL")
    idle = replace(late.measurement.server, execution_s_by_rows={}) if known else None
    text = said([remeasured(late, server=idle)])
    assert f"Bottleneck: {'none' if known else 'not known'}; " in text
    assert "Lower the load until the SLO is met" in text
    for wrong in ("capacity left", "Raise the rate", "more clients"):
        assert wrong not in text


def test_beside_a_rate_that_misses_the_slo_none_is_advised_to_rise():
    kept, late = (load_trial(at, rate=500.0 * at, throughput=500.0 * at) for at in (1, 2))
    idle = replace(kept.measurement.server, execution_s_by_rows={})
    text = said([remeasured(kept, server=idle), remeasured(late, server=idle, verdict="FAIL")])
    assert "Bottleneck (rate 500): none; the server met the offered rate and had capacity left." in text
    assert "Lower the load until the SLO is met" in text
    assert "Raise the rate" not in text


@pytest.mark.parametrize("verdict", ["FAIL", "UNSURE"])
def test_a_rate_that_is_answered_but_misses_the_slo_has_a_bottleneck(verdict):
    late = load_trial(1, rate=500.0, throughput=499.0, p95_s=0.4, verdict=verdict)
    assert trial_bottleneck(late).kind == "device"


def test_rates_name_the_points_of_an_open_loop_and_two_alike_stay_apart():
    text = table([point(4, rate=50.0), point(8, rate=50.0), point(16, rate=1234.0)])
    assert all(row_of(text, head) for head in ("50 ", "50'", "1,234"))
    assert "offered /s" in text


def test_a_point_that_counts_for_nothing_has_no_intervals():
    spoilt, good = (row_of(table([point(4), point(8, BUSY, verdict="INVALID")]), load) for load in ("8", "4"))
    assert re.search(r"\[\d", good)
    assert not re.search(r"\[\d", spoilt)


def test_a_failed_point_is_told_below_the_table():
    text = table([point(4), point(8, failure="the server died")])
    assert text.rstrip().endswith("failed: the server died")
    assert "failed: the server died" in table([point(8, failure="the server died")])


@pytest.mark.parametrize(
    ("verdict", "caveats", "spoiler"),
    [
        ("PASS", (), None),
        ("PASS", (BUSY, STEAL), None),  # an SLO that was kept in spite of them is kept
        ("FAIL", (BUSY,), None),
        ("INVALID", (BUSY,), "client"),
        ("NOISY", (STEAL,), "host"),
        (None, (BUSY,), "client"),
        (None, (STEAL,), "host"),
        (None, (EMULATED,), None),
    ],
)
def test_the_verdict_says_who_spoilt_a_point_and_without_one_the_bottleneck(verdict, caveats, spoiler):
    assert spoilt_by(point(4, *caveats, verdict=verdict)) == spoiler


GOOD, CLIENT, HOST = point(4), point(8, BUSY, verdict="INVALID"), point(16, STEAL, verdict="NOISY")
FAILED = point(32, failure="no")
CLIENTS_FAULT = "no point is a measurement of the server: the load generator was the limit"
HOSTS_FAULT = "no point is a measurement of the server: the host was noisy"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([CLIENT], CLIENTS_FAULT),
        ([HOST], HOSTS_FAULT),
        ([CLIENT, HOST, FAILED], CLIENTS_FAULT),
        ([GOOD, CLIENT, HOST], None),
        ([FAILED], None),
        ([], None),
    ],
)
def test_a_load_is_void_only_when_every_point_measured_is(points, message):
    assert spoilt_message(points) == message


def test_void_points_are_named_below_the_table_and_who_spoilt_one_is_not_its_bottleneck_once_more():
    text = said([point(4), point(8, BUSY, verdict="INVALID"), point(16, STEAL, verdict="NOISY")])
    assert "INVALID: the load generator was the limit here, not the server (clients 8)." in text
    assert "NOISY: the host was disturbed, also when the point was repeated (clients 16)." in text
    assert "Bottleneck (clients 4): not known" in text
    assert "the load generator; the client used" not in text
    assert text.count(text_of(BUSY)) == 1
    assert "INVALID" not in said([point(4, LATE)])


def test_json_has_the_bottleneck_and_the_spoiler_of_every_point():
    points = [point(8, server=SERVER), point(16, BUSY, verdict="INVALID"), point(32, failure="no")]
    first, second, third = json.loads(json.dumps(points_dict(points), allow_nan=False))["points"]
    assert first["bottleneck"]["kind"] == "device"
    assert first["bottleneck"]["evidence"]["thread_busy_ratio"] == pytest.approx(164 * 0.006)
    assert first["bottleneck"]["advice"]
    assert (first["spoilt_by"], second["spoilt_by"], third["bottleneck"]) == (None, "client", None)


@pytest.mark.parametrize(
    ("trial", "end"),
    [
        (point(8, server=SERVER), "mean batch 13.6 rows, limited by device"),
        (point(8, STEAL, server=SERVER), f"limited by device, {text_of(STEAL)}"),
        (point(8, BUSY), text_of(BUSY)),
    ],
)
def test_a_trial_of_a_sweep_says_in_its_line_what_limits_it(trial, end):
    assert trial_line(trial).endswith(end)
    assert trial_line(trial, head="8 clients").startswith("8 clients: ")
    assert "limited" not in trial_line(point(8))


def test_marks_stand_in_the_order_of_the_list_below():
    marks = Marks(caveats={"one": (LATE,), "two": (EMULATED, LATE)})
    assert marks.head("one") == "one"
    assert marks.head("two") == "two (b)"
    assert marks.marked("9.35", "two", "latency") == "9.35 (a)"
    assert marks.marked("9.35", ("one", "two"), "latency", "everything") == "9.35 (a, b)"
    assert [line[:3] for line in marks.lines()] == ["(a)", "(b)"]
    assert marks.lines()[1].startswith("(b) two: the device is emulated")
    assert marks.lines()[0].startswith("(a) the load generator sent requests late")
    unlettered, lettered = marks.lines(shown="two (b) 9.35")  # the column with (a) did not fit
    assert unlettered.startswith("the load generator sent requests late")
    assert lettered.startswith("(b) two: ")


def test_the_letters_have_no_gap_where_the_servers_figures_are_not_shown():
    """By gRPC alone the server reports nothing, so its columns are empty and their caveat has no mark."""
    silent = caveat("no_server_counters")
    lines = Marks(caveats={"one": (LATE, silent, EMULATED)}).lines(shown="one (b) 9.35 (a)")
    heads = ("(a) the load generator", "(b) the device is emulated", "the server reports nothing about its")
    assert all(line.strip().startswith(head) for line, head in zip(lines, heads, strict=True))
    assert advice_of(silent).startswith("for batch sizes and queue waits add --rest-url")


def test_the_servers_flags_tell_which_threads_limit_it():
    """1600 requests/s of 1 ms each take 1.6 of the 2 threads; 19 of 20 ms pass before a request has one."""
    flags = {"processes_per_replica": 2, "threads_per_process": 1}
    scenario = scenario_of(target={"model": "fake", "flags": flags})
    twos = {"mean_batch_rows": 2.0, "execution_s_by_rows": {2: 0.001}, "batches_by_rows": {2: 100}}
    slow = replace(SERVER, queue_wait_mean_s=0.0, **twos)
    limited = remeasured(point(16, server=slow), latency_mean_s=0.020)
    (found,) = points_dict([limited], scenario=scenario)["points"]
    assert found["bottleneck"]["kind"] == "server_threads"
    (unknown,) = points_dict([limited])["points"]
    assert unknown["bottleneck"]["kind"] != "server_threads"


def test_a_server_that_fills_its_one_cpu_is_limited_by_it():
    """Of the one that it has, as `target.cpus` says; of all CPUs of the machine it is half idle."""
    busy = replace(SERVER, server_cpu_s=0.97, execution_s_by_rows={14: 0.002})
    line = trial_line(point(8, server=busy), scenario=scenario_of(target={"model": "fake", "cpus": [0]}))
    assert line.endswith("limited by front end")


@pytest.mark.parametrize(("objective", "kind"), [("latency", "none"), ("capacity", "device")])
def test_a_rate_that_was_asked_for_and_met_has_no_bottleneck_in_a_comparison_either(objective, kind):
    """The highest rate, which a search of the capacity ends at, has one."""
    met = rising_rates()[1]
    scenario = scenario_of(load={"arrivals": "poisson", "rate": "1000/s"}, objective=objective)
    assert usual_bottleneck(met.configuration, [met.measurement], scenario=scenario).kind == kind
    assert "limited by" not in trial_line(met)


def test_goodput_is_a_share_where_it_is_limited_and_absent_without_any_limit(capsys):
    (trial, *_) = streamed_ledger()
    trial = remeasured(trial, tokens=TOKENS)
    missed = {**trial.measurement.latency_s, "goodput": Estimate(value=0.25, low=0.2, high=0.3)}
    limited = remeasured(trial, latency_s=missed)
    unlimited = STREAMED.model_copy(update={"slo": SloSpec()})
    print_points([limited], scenario=STREAMED)
    assert {"goodput", "75", "%"} <= {*capsys.readouterr().out.split()}
    print_points([trial], scenario=STREAMED)
    assert "goodput /s" in capsys.readouterr().out
    print_points([trial], scenario=unlimited)
    assert "goodput" not in capsys.readouterr().out
    scenario = STREAMED.model_copy(update={"slo": STREAMED.slo.model_copy(update={"goodput": 0.9})})
    judged = remeasured(limited, verdict="FAIL", verdict_reason=Coded("text", {"text": "too slow"}))
    assert _exit_code([judged], scenario) == 3
    said = "the SLO is missed: too slow; goodput is 75 %, and the SLO says goodput ≥ 90 %"
    assert said in capsys.readouterr().err


def test_a_caveat_of_columns_that_a_table_of_streams_lacks_is_marked_at_the_load(capsys):
    (trial, *_) = streamed_ledger()
    caveats = (caveat("no_target_metrics"), STEAL)
    print_points([remeasured(trial, caveats=caveats, tokens=TOKENS)], scenario=STREAMED)
    text = capsys.readouterr().out
    (row,) = (line for line in text.splitlines() if line.startswith("100"))
    assert row.startswith("100 (a, b)")
    assert "refer to the warnings below" in " ".join(text.split())


def test_only_a_load_test_of_its_own_points_to_a_sweep_for_batching():
    server = replace(SERVER, gpu_busy_ratio=0.97)
    batched = point(8, server=server)
    trial = asked(batched, configuration=replace(batched.configuration, batching=None))
    alone = trial_bottleneck(trial)
    measured = usual_bottleneck(trial.configuration, [trial.measurement])
    assert (alone.kind, measured.kind) == ("device", "device")
    assert "batching is off: `batchtune sweep`" in text_of(alone.advice)
    assert "batching" not in text_of(measured.advice)
    foreign = asked(trial, configuration=replace(trial.configuration, known=False))
    assert "batching is off" not in text_of(trial_bottleneck(foreign).advice)


def test_padding_of_variable_lengths_is_told_by_bucket():
    server = replace(
        SERVER,
        bucket_sent_elements={"64": 100, ">64": 100, "32": 100},
        bucket_padding_elements={"64": 50, "32": 25, ">64": 225},
    )
    told = "Length padding: 50 % of the elements computed (bucket 32: 20 %, 64: 33.3 %, >64: 69.2 %)"
    assert f"{told}." in said([point(8, server=server)])
    assert f"{told} (clients 8)." in said([point(4, server=SERVER), point(8, server=server)])
    assert "adding" not in said([point(8, server=SERVER)])


def loaded(points: dict[str, Trial], *models: str, server: ServerActivity | None = None) -> Trial:
    """One load of these models; `models`: named where only these were loaded."""
    parts = {name: asked(replace(part, model=name), models=models) for name, part in points.items()}
    first = next(iter(parts.values()))
    return replace(first, model="", measurement=None, parts=parts, server=server)


def test_several_models_are_told_beside_each_other_alone_and_what_each_takes_of_the_server():
    together = {"ranker": point(8), "reader": point(4, verdict="FAIL", rate=30.0)}
    alone = [loaded({name: point(8, rate=30.0)}, name) for name in together]
    server = replace(
        SERVER,
        model_batches={"ranker": 100, "reader": 50},
        model_batch_rows={"ranker": 400, "reader": 50},
        model_batch_micros={"ranker": 250_000, "reader": 750_000},
    )
    shown = table([loaded(together, server=server), *alone])
    text = re.sub(r"\s+", " ", shown)
    assert row_of(shown, "ranker").split()[1:3] == ["8", "clients"]
    assert row_of(shown, "reader").split()[1] == "30/s"
    assert row_of(shown, "reader alone").split()[2] == "30/s"
    assert "FAIL" in row_of(shown, "reader")
    alike = "ranker: p95 10 ms together with the others, 10 ms alone, with no measurable difference; 800 requests/s"
    assert alike in text
    assert "Best:" not in text
    assert "The server, all models together: 164 batches, 13.6 rows on average" in text
    assert (
        "Of the time of all batches ranker 25 % in batches of 4 rows on average, padding included; reader 75 %"
        in text
    )


@pytest.mark.parametrize(
    ("p95_s", "words"),
    [
        (0.03, "30 ms together with the others, 10 ms alone (×3)."),
        (math.inf, "unbounded together with the others, 10 ms alone."),
    ],
)
def test_what_the_others_cost_a_model_is_told(p95_s: float, words: str):
    slow = point(4, verdict="FAIL", rate=30.0)
    low, high = (p95_s, p95_s) if math.isinf(p95_s) else (0.029, 0.031)
    latency_s = {**slow.measurement.latency_s, "p95": Estimate(value=p95_s, low=low, high=high)}
    slow = remeasured(slow, latency_s=latency_s)
    text = said([loaded({"reader": slow}), loaded({"reader": point(8, rate=30.0)}, "reader")])
    assert f"reader: p95 {words}" in text


def test_a_document_of_several_models_has_each_beside_the_others_and_alone():
    points = [loaded({"ranker": point(8), "reader": point(4)}), loaded({"ranker": point(8)}, "ranker")]
    several = SimpleNamespace(target=SimpleNamespace(models=("ranker", "reader")))
    document = json.loads(json.dumps(points_dict(points, scenario=several), allow_nan=False))
    assert document["models"]["ranker"]["alone"]["measurement"]["verdict"] == "PASS"
    assert document["models"]["reader"]["together"]["model"] == "reader"
    assert document["models"]["reader"]["alone"] is None
    assert document["server"] is None


@pytest.mark.parametrize(("error_ratio", "is_shown"), [(0.0, False), (0.468, True)])
def test_errors_are_shown_on_narrow_terminals_where_there_are_any(monkeypatch, error_ratio, is_shown):
    monkeypatch.setenv("COLUMNS", "60")
    failing = remeasured(point(8, server=SERVER), error_ratio=error_ratio)
    text = said([point(4, server=SERVER), failing])
    assert ("46.8 %" in text.partition("Columns that do not fit")[0]) is is_shown
    assert ("errors" in text.partition("Columns that do not fit")[2].partition(";")[0]) is not is_shown
