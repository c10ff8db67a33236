"""`simulate` and `plan` answer from a recorded run, and say what to do when it cannot tell."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batchtune.archive.run import Run, create_run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.app import app, main
from batchtune.cli.commands import ask_twin as cli_calibrated
from batchtune.errors import TwinError, UsageError
from batchtune.report.twin_text import measured_text, note_when_slow
from batchtune.scenario.reader import format_scenario, read_scenario
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.trials.trial import Source
from batchtune.twin.calibrate import Observation, calibrate
from batchtune.twin.replicas import MeasuredRates
from batchtune.twin.twin import FitError, Twin
from batchtune.units import rounded
from tests.tune.tune_fakes import (
    FakeClock,
    FakeTarget,
    Law,
    batches_of,
    bench_of,
    capacity_scenario,
    planned,
    scenario_of,
)

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LAW = Law(fixed_s=0.002, per_row_s=0.00005, contention=1.0)
PROBED = ((1, 1, 1), (4, 1, 8), (16, 1, 32), (32, 1, 64), (32, 2, 64), (16, 2, 48))


def configuration_of(size: int, threads: int = 1) -> Configuration:
    configuration = batches_of(size, threads=threads)
    assert configuration.batching is not None
    return replace(configuration, batching=replace(configuration.batching, max_enqueued_batches=1000))


def recorded(
    results: Path,
    scenario: Scenario,
    probed: tuple[tuple[int, int, int], ...] = PROBED,
    *,
    rates: Sequence[tuple[float, Source]] = (),
    of_four: Sequence[tuple[float, Source]] = (),
) -> Run:
    """A run of the fake server, archived as a sweep would; 16 rows on one thread at `rates` come last, and 4 rows on
    one thread at those `of_four`."""
    bench = bench_of(scenario, FakeTarget(FakeClock(), LAW))
    run = create_run(scenario, format_scenario(scenario), root=results, provenance={})
    loops: Source = "calibration" if scenario.objective == "capacity" else "sampler"
    plans = [
        *(planned(configuration_of(size, on), source=loops, concurrency=by) for size, on, by in probed),
        *(planned(configuration_of(16), source=source, rate_rps=rate) for rate, source in rates),
        *(planned(configuration_of(4), source=source, rate_rps=rate) for rate, source in of_four),
    ]
    for number, plan in enumerate(plans, 1):
        run.append(bench.run(replace(plan, number=number, seed=number)).trial, None)
    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run") / "results"
    recorded(root, scenario_of())
    return root


Ask = Callable[..., tuple[int, str, str]]


CALIBRATED: dict[str, Twin] = {}
"""By what was observed: it takes half a second, and most questions are about one run."""


def calibrated_once(observations: list[Observation], **options: Any) -> Twin:
    key = repr((observations, options))
    if key not in CALIBRATED:
        CALIBRATED[key] = calibrate(observations, **options)
    return CALIBRATED[key]


@pytest.fixture
def ask(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    monkeypatch.setattr(cli_calibrated, "calibrate", calibrated_once)

    def answer(*words: str, root: Path = results) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchtune", *words, "--results", str(root)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    return answer


def predicted(ask: Ask, *words: str, **root: Path) -> dict[str, Any]:
    """What `--json` says."""
    code, out, err = ask(*words, "--json", **root)
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.slow
def test_simulate_answers_every_combination_as_it_was_measured(ask: Ask, results: Path) -> None:
    sizes = ("--set", "max_batch_size=4,16", "--set", "batch_timeout_micros=0,2000")
    sets = (*sizes, "--set", "num_batch_threads=1")
    points = predicted(ask, "simulate", *sets, "--concurrency", "32")["points"]
    told = [point["configuration"]["batching"] for point in points]
    assert [batching["max_batch_size"] for batching in told] == [4, 4, 16, 16]
    assert [batching["batch_timeout_micros"] for batching in told] == [0, 2000, 0, 2000]
    assert {point["traffic"]["clients"] for point in points} == {32}
    (run,) = map(Run, results.glob("fake/*"))
    (measured,) = (trial.measurement for trial in run.ledger() if trial.configuration == configuration_of(16))
    assert measured is not None
    simulated = points[2]
    assert simulated["throughput_rps"]["value"] == pytest.approx(measured.throughput_rps.value, rel=0.1)
    assert simulated["latency_s"]["p95"]["value"] == pytest.approx(measured.latency_s["p95"].value, rel=0.15)


def test_overload_is_told_as_what_is_completed_and_what_is_refused(ask: Ask) -> None:
    """A million requests/s: a simulation of them lasts 40 ms, one batch of 100,000 rows takes 5 s."""
    sizes = ("--set", "max_batch_size=16,100000", "--set", "num_batch_threads=1")
    usual, large = predicted(ask, "simulate", *sizes, "--rate", "1000000")["points"]
    assert usual["throughput_rps"]["value"] == pytest.approx(16 / 0.0028, rel=0.15)
    assert large["throughput_rps"]["value"] == pytest.approx(20_000, rel=0.3)
    for point in (usual, large):
        assert point["error_ratio"]["value"] > 0.95
        assert (point["latency_s"]["p95"]["value"], point["busy_ratio"]["value"]) == (None, 1.0)
        completed = rounded(point["throughput_rps"]["value"])  # one figure, as in the table
        overload = f"overload: 1,000,000 requests/s are more than the {completed} completed"
        assert overload in point["extrapolations"]


def test_without_batching_overload_waits_without_end(ask: Ask) -> None:
    (point,) = predicted(ask, "simulate", "--set", "enable_batching=false", "--rate", "100000")["points"]
    assert point["label"] == "no batching"
    assert point["throughput_rps"]["value"] > 100.0
    assert (point["error_ratio"]["value"], point["latency_s"]["p50"]["value"]) == (0.0, None)


Change = Callable[[Twin], Twin]
Changing = Callable[[Change], None]


@pytest.fixture
def twin_made(monkeypatch: pytest.MonkeyPatch) -> Changing:
    """Has the twin changed after it was calibrated."""
    calibrated_run = cli_calibrated.calibrated_run

    def made(change: Change) -> None:
        def changed(*given: Any, **named: Any) -> Any:
            run = calibrated_run(*given, **named)
            return replace(run, twin=change(run.twin))

        monkeypatch.setattr(cli_calibrated, "calibrated_run", changed)

    return made


@pytest.mark.parametrize("words", [("simulate",), ("plan", "--rate", "1000")])
def test_a_twin_that_is_not_to_be_relied_on_ends_with_5(
    ask: Ask, twin_made: Changing, words: tuple[str, ...]
) -> None:
    error = FitError(p95_ratio=0.5, throughput_ratio=0.3, mape=0.4, left_out=7)
    twin_made(lambda twin: replace(twin, error=error))
    code, out, err = ask(*words)
    assert code == 5
    assert err.count("too inaccurate for this server") == 1
    assert re.sub(r"\s+", " ", out + err).count("mean error was 40 % in 7 trials") == 1
    assert "search" not in out + err
    doubt = "The simulator is too inaccurate to rely on for this server."
    assert out.startswith(f"{doubt}\n")
    if words == ("simulate",):
        assert json.loads(ask(*words, "--json")[1])["notes"][0] == doubt


RATES = (*((4_000.0, "confirm"),) * 3, *((6_500.0, "neighbour"),) * 2)
"""At which 16 rows on one thread are measured: it answers 5,714/s at most."""
SIXTEEN = ("--set", "max_batch_size=16", "--set", "num_batch_threads=1")
PLAN = ("plan", "--rate", "400k/s", "--routing", "random", *SIXTEEN)


@pytest.fixture(scope="module")
def capacity_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Closed loops, and one configuration at a rate that held three times and one that missed twice."""
    root = tmp_path_factory.mktemp("capacity") / "results"
    load = {"arrivals": "poisson", "warm_up": "200ms", "duration": "2s"}
    recorded(root, scenario_of(objective="capacity", load=load), rates=RATES)
    return root


@pytest.mark.slow
def test_simulate_of_a_capacity_run_starts_from_what_is_recommended(ask: Ask, capacity_run: Path) -> None:
    (point,) = predicted(ask, "simulate", root=capacity_run)["points"]
    (run,) = map(Run, capacity_run.glob("fake/*"))
    chosen = recommend(run.ledger(), scenario=run.scenario())
    assert chosen.capacity is not None
    assert point["traffic"]["rate_rps"] == chosen.capacity.held_rps
    _, out, _ = ask("simulate", root=capacity_run)
    assert "The rate is the capacity that the run found for the recommended" in out


def test_a_plan_with_measured_parameters_reads_the_measured_bracket(ask: Ask, capacity_run: Path) -> None:
    plan = predicted(ask, *PLAN, root=capacity_run)
    measured, share = plan["measured"], plan["per_replica_rps"]
    assert (measured["held_rps"], measured["missed_rps"], measured["is_share"]) == (4_000.0, 6_500.0, False)
    assert 4_000.0 <= share["low"] <= share["value"] <= share["high"] <= 6_500.0
    assert 400_000 / 6_500 <= plan["advised"] <= 100
    _, text, _ = ask(*PLAN, root=capacity_run)
    bracket = "Measured: one replica met the SLO at 4,000/s; its capacity is below 6,500/s."
    assert bracket in " ".join(text.split())


@pytest.mark.slow
def test_a_plan_is_for_the_configuration_that_is_recommended_for_its_slo(ask: Ask, tmp_path: Path) -> None:
    """At 4,000/s p95 of 16 rows is above 5 ms, at 300/s that of 4 rows is not."""
    load = {"arrivals": "poisson", "warm_up": "200ms", "duration": "2s"}
    scenario = scenario_of(objective="capacity", load=load)
    run = recorded(tmp_path, scenario, rates=RATES, of_four=((300.0, "confirm"),) * 3)
    labels = []
    for limit in ("50ms", "5ms"):
        slo = SloSpec.model_validate({"p95": limit})
        labels.append(recommend(run.ledger(), scenario=scenario, slo=slo).configuration.label())
        _, out, _ = ask("plan", "--rate", "2k/s", "--slo-p95", limit, "--json", root=tmp_path)
        assert json.loads(out)["label"] == labels[-1]
    assert len(set(labels)) == 2


HELD = "one replica met the SLO at 450/s; no rate that misses the SLO was found"
MISSED = "no run at a fixed rate met the SLO; the capacity of one replica is below 1,000/s"
BETWEEN = "one replica met the SLO at 9,340/s; its capacity is below 11,200/s"


@pytest.mark.parametrize(
    ("held_rps", "missed_rps", "twin_rps", "reads", "outside"),
    [
        (450.0, None, 5e3, HELD, ""),
        (450.0, None, 100.0, HELD, "450/s and more"),
        (0.0, 1e3, 800.0, MISSED, ""),
        (0.0, 1e3, 5e3, MISSED, "0-1,000/s"),
        (9340.0, 11.2e3, 1e4, BETWEEN, ""),
        (9340.0, 11.2e3, 36.7e3, BETWEEN, "9,340-11,200/s"),
    ],
)
def test_what_was_measured_reads_as_a_range(
    held_rps: float, missed_rps: float | None, twin_rps: float, reads: str, outside: str
) -> None:
    text = measured_text(MeasuredRates(held_rps=held_rps, missed_rps=missed_rps), twin_rps)
    says = f"; the simulator predicts {twin_rps:,.0f}/s, outside the measured {outside}, so the measured rate counts"
    assert text == reads + (says if outside else "")


@pytest.mark.parametrize(
    ("missed_rps", "ends"),
    [
        (None, "no rate was missed by most runs; the lowest that a run missed is 1,000/s"),
        (1_330.0, "its capacity is below about 1,330/s; the lowest rate that a run missed is 1,000/s"),
    ],
)
def test_a_rate_that_is_not_confirmed_is_told_as_such(missed_rps: float | None, ends: str) -> None:
    doubted: dict[str, Any] = {"is_share": True, "is_bound": True, "doubtful_rps": 1_000.0, "missed_runs": 2}
    text = measured_text(MeasuredRates(held_rps=870.0, missed_rps=missed_rps, **doubted), 900.0)
    doubt = "not confirmed: 2 confirmation runs missed it there or above"
    assert text == f"one replica is expected to meet the SLO at 870/s ({doubt}); {ends}"


def test_an_slo_that_no_run_kept_leaves_the_twin_below_what_missed(
    ask: Ask, capacity_run: Path, twin_made: Changing
) -> None:
    """At 4,000/s p95 is above 5 ms; a twin that is five times too fast thinks it is not."""
    twin_made(lambda twin: twin.slower(0.2))
    words = ("plan", "--rate", "50k/s", "--slo-p95", "5ms", "--routing", "random", *SIXTEEN, "--json")
    code, out, err = ask(*words, root=capacity_run)
    assert code == 5
    assert "no run with these parameters met the limits" in err
    plan = json.loads(out)
    assert plan["measured"]["held_rps"] == 0.0
    assert plan["per_replica_rps"]["high"] <= plan["measured"]["missed_rps"]


def test_simulate_holds_the_twin_to_what_was_measured(
    ask: Ask, capacity_run: Path, twin_made: Changing
) -> None:
    twin_made(lambda twin: twin.slower(0.2))
    words = ("simulate", "--set", "max_batch_size=16,24", *SIXTEEN[2:], "--rate", "3k,9k")
    low, high, unmeasured, _ = predicted(ask, *words, root=capacity_run)["points"]
    assert (low["measured"]["held_rps"], low["measured"]["missed_rps"]) == (4_000.0, 6_500.0)
    assert low["latency_s"]["p95"]["value"] < 0.05
    assert (high["latency_s"]["p95"]["value"] or math.inf) > 0.05
    assert (unmeasured["measured"], unmeasured["twin_rps"]) == (None, None)
    _, text, _ = ask(*words, root=capacity_run)
    said = " ".join(text.split())
    assert said.count("outside the measured 4,000-6,500/s, so the measured rate counts.") == 1


def test_simulate_marks_batches_beyond_those_that_were_measured(ask: Ask) -> None:
    code, out, _ = ask("simulate", "--set", "max_batch_size=8,256", "--concurrency", "600")
    assert code == 0
    assert "* batches of up to" in out


def test_plan_says_replicas_with_an_interval_by_the_scenarios_limit_where_none_is_given(ask: Ask) -> None:
    plan = predicted(ask, "plan", "--rate", "50k/s")
    assert (plan["rate_rps"], plan["limits"]) == (50_000.0, [{"name": "p95", "seconds": 0.05}])
    assert plan["replicas"]["low"] <= plan["replicas"]["value"] <= plan["replicas"]["high"]
    assert plan["advised"] >= 50_000 / plan["saturation_rps"]


TEN = ("plan", "--rate", "10")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plan",), "write --rate 10000, or 10k/s"),
        ((*TEN, "--exact"), "--exact: this option of plan no longer exists"),
        (("plan", "--profile=day.csv"), "plan for the peak with --rate"),
        ((*TEN, "--failing", "none"), "--failing none: expected replicas"),
        ((*TEN, "--failing", "0"), "write --failing 1 for one replica"),
        ((*TEN, "--failing", "100%"), "less than 100 %"),
        ((*TEN, "--failing", "x%"), "--failing: expected a percentage"),
        (("simulate", "--set", "max_batch=4"), "did you mean 'max_batch_size'"),
        (("simulate", "--set", "max_batch_size"), "expected KEY=VALUE"),
        (("simulate", "--set", "max_batch_size=many"), "is not a whole number"),
        (("simulate", "--set", "max_batch_size=0"), "--set max_batch_size=0: out of its range"),
        (("simulate", "--set", "max_batch_size=1000000000000"), "give a whole number from 1 to 100,000"),
        ((*TEN, "--set", "num_batch_threads=0"), "give a whole number from 1"),
        (("simulate", "--set", "batch_timeout_micros=-1"), "give a whole number from 0"),
        (("simulate", "--rate", "5", "--concurrency", "5"), "exclude each other"),
        (("simulate", "--rate", "0"), "not above 0"),
        (("simulate", "--concurrency", "1.5"), "is not a number of clients"),
        (("plan", "--rate", "0"), "not above 0"),
        ((*TEN, "--slo-p95", "soon"), "--slo-p95: expected a duration"),
        ((*TEN, "--set", "max_batch_size=4,8"), "batchtune simulate"),
    ],
)
def test_mistakes_are_named_and_cured(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    if expected != "batchtune simulate":  # that depends on the run
        monkeypatch.setattr(cli_calibrated, "calibrate", None)  # what is misspelt is told before
    ended, out, err = ask(*words)
    assert (ended, out) == (2, "")
    assert "error: " in err
    assert expected in err


def test_a_limit_that_no_rate_meets_is_told(ask: Ask) -> None:
    code, out, err = ask(*TEN, "--slo-p95", "1us")
    assert (code, out) == (5, "")
    assert "predicts no rate that meets p95" in err


CONTINUOUS = read_scenario(SCENARIOS / "emulated-llm.yaml")


@pytest.mark.parametrize(
    ("scenario", "words", "code", "expected"),
    [
        (scenario_of(), ("simulate",), 5, ("no measured trial", "batchtune sweep")),
        (scenario_of(slo={}), TEN, 2, ("--slo-p95 20ms",)),
        (CONTINUOUS, ("simulate",), 5, ("batches continuously", "batchtune load")),
        (CONTINUOUS, TEN, 5, ("batches continuously", "batchtune load")),
        (None, TEN, 2, ("batchtune sweep",)),
    ],
)
def test_a_run_that_cannot_tell_says_what_would_help(
    ask: Ask,
    tmp_path: Path,
    scenario: Scenario | None,
    words: tuple[str, ...],
    code: int,
    expected: tuple[str, ...],
) -> None:
    if scenario is not None:
        create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={})
    ended, _, err = ask(*words, root=tmp_path)
    assert ended == code
    assert all(part in err for part in expected), err


def test_a_server_whose_batch_rows_nobody_named_has_no_twin(tmp_path: Path) -> None:
    """Of kind http: which of its parameters the rows are only `means` says."""
    target = {"kind": "http", "url": "http://h/score", "set": {"env": {"size": "SIZE"}}, "launch": ["true"]}
    search = {"space": {"size": [1, 8]}}
    scenario = capacity_scenario(target=target, request={"body": {"x": "{{row}}"}}, search=search)
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={})
    unsupported = r"without target\.means\.rows, which the simulator does not support"
    with pytest.raises(TwinError, match=unsupported) as raised:
        cli_calibrated.calibrated_run(run, quiet=True)
    assert "add means: {rows: PARAMETER} to target" in raised.value.hint


OWN_WORDS = (("max_batch_size", "max_batch", 1), ("batch_timeout_micros", "wait_ms", 1000))


def test_the_simulator_is_asked_in_the_own_words_of_a_server() -> None:
    asked = cli_calibrated.asked_values(["max_batch=8,16", "wait_ms=0.5"], words=OWN_WORDS)
    assert asked == {"max_batch_size": [8, 16], "batch_timeout_micros": [500]}
    base = Configuration(batching=BatchingParameters(max_batch_size=4), dialect="http", words=OWN_WORDS)
    labels = [one.label() for one in cli_calibrated.asked_configurations(base, asked)]
    assert labels == ["max_batch=8 wait_ms=0.5", "max_batch=16 wait_ms=0.5"]


def test_a_parameter_that_no_word_of_the_server_means_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--set max_bach: .*target\.means") as told:
        cli_calibrated.asked_values(["max_bach=8"], words=OWN_WORDS)
    assert "'max_batch'" in told.value.hint
    with pytest.raises(UsageError, match="--set max_enqueued_batches"):
        cli_calibrated.asked_values(["max_enqueued_batches=8"], words=OWN_WORDS)
    with pytest.raises(UsageError, match="--set wait_ms: 'soon' is not a number"):
        cli_calibrated.asked_values(["wait_ms=soon"], words=OWN_WORDS)


def test_batching_that_is_asked_for_runs_as_many_batches_at_once_as_the_base() -> None:
    words = (*OWN_WORDS, ("num_batch_threads", "workers", 1))
    base = Configuration(
        batching=None, flags=(("model", "x"), ("num_batch_threads", "3")), dialect="http", words=words
    )
    (asked,) = cli_calibrated.asked_configurations(base, {"max_batch_size": [8]})
    assert asked.label() == "max_batch=8 workers=3 model=x"
    (off,) = cli_calibrated.asked_configurations(base, {"enable_batching": [False]})
    assert off == base


def test_what_is_slow_says_so_and_what_is_quick_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchtune.report.twin_text.PATIENCE_S", 0.0)
    with note_when_slow("thinking", quiet=False):
        while not (said := capsys.readouterr().err):
            pass
    assert said == "thinking …\n"
    monkeypatch.setattr("batchtune.report.twin_text.PATIENCE_S", 1e-3)
    with note_when_slow("thinking", quiet=True):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("simulate --set max_b", ["max_batch_size="]),
        ("sweep s.yaml --set load.du", ["load.duration="]),
        ("load s.yaml --set obj", ["objective="]),
        ("sweep app --server lit", ["litserve"]),
        ("check s.yaml --max-regress p95=5%,thr", ["p95=5%,throughput="]),
    ],
)
def test_the_shell_completes_parameters_and_keys(typed: str, expected: list[str]) -> None:
    asked = {
        "_BATCHTUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"batchtune {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    done = CliRunner().invoke(app, prog_name="batchtune", env=asked)
    assert done.output.split() == expected
