"""`batchtune compare` and `batchtune noise` as a user meets them: a real server, an emulated model, and mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from batchtune.check.account import Conclusion
from batchtune.check.gate import Gate
from batchtune.cli.benches import Benches
from batchtune.cli.commands.compare import _accounts, _exit_code
from batchtune.measure.caveats import caveat
from batchtune.plain_values import Coded
from batchtune.report.check_text import print_check
from batchtune.report.comparison import print_comparison
from batchtune.report.live_view import sweep_view
from batchtune.scenario.reader import read_scenario, read_variants
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import summarise
from batchtune.tune.trials.trial import Trial
from tests.check.check_fakes import exactly, measurement, trial
from tests.cli.in_process import answered
from tests.cli.test_cli import batchtune, servers_of, write_version
from tests.load.cluster.cluster_fakes import FakeHost, FakeTime, fleet_of_fakes
from tests.load.load_servers import requests_for
from tests.tune.tune_fakes import scenario_of

ROOT = Path(__file__).parents[2]
EXTERNAL = (ROOT / "scenarios" / "external.yaml").read_text()
SCENARIO = """\
name: pair
target: {model: ./emulated}
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 16, warm_up: 100ms, duration: 300ms, seed: 1}
objective: throughput
variants:
  without: {fixed: {enable_batching: false}}
  with: {fixed: {max_batch_size: 16, batch_timeout_micros: 0, num_batch_threads: 1}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    write_version(tmp_path / "emulated")
    path = tmp_path / "pair.yaml"
    path.write_text(SCENARIO)
    return path


def measured(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command's ending; up to three tries while a busy machine keeps the client from its work (6)."""
    for _ in range(3):
        done = answered(*arguments, cwd=cwd)
        if done.returncode != 6:
            break
        shutil.rmtree(cwd / "results")
    return done


@pytest.mark.slow
def test_a_comparison_says_that_batching_helps_an_emulated_device(scenario: Path) -> None:
    """One row takes 2.05 ms, sixteen take 2.8 ms: batching gives several times the throughput on any machine."""
    done = measured("compare", scenario, "--blocks", "6", "--json", cwd=scenario.parent)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (pair,) = document["pairs"]
    assert (pair["variant"], pair["baseline"], pair["outcome"]) == ("with", "without", "different")
    assert pair["ratio"]["low"] > 1.5
    assert document["batching"][0]["helps"] == "yes"
    assert "block 1, with" in done.stderr
    run = scenario.parent / document["run"]
    assert run.name.endswith("-compare")
    assert json.loads((run / "comparison.json").read_text())["pairs"] == document["pairs"]
    assert "Does batching help?" in (run / "report.html").read_text()
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == document["trials"]
    assert {trial["source"] for trial in trials} == {"variant"}
    assert len(list((run / "samples").glob("*.parquet"))) == len(trials)
    assert read_scenario(run / "scenario.yaml").name == "pair"
    assert batchtune("recommend", cwd=scenario.parent).returncode == 2


@pytest.mark.slow
def test_a_variant_that_fails_ends_with_the_targets_code_and_the_others_are_kept(scenario: Path) -> None:
    text = scenario.read_text() + "  broken: {target: {command: [no_such_model_server]}}\n"
    scenario.write_text(text)
    done = batchtune("compare", scenario, "--blocks", "2", cwd=scenario.parent)
    assert done.returncode == 7, done.stderr
    assert "broken: not measured: cannot start 'no_such_model_server'" in done.stdout
    assert "without" in done.stdout
    (ledger,) = scenario.parent.glob("results/pair/*-compare/trials.jsonl")
    states = [(one["reason"], one["state"]) for one in map(json.loads, ledger.read_text().splitlines())]
    assert states.count(("broken", "failed")) == 2
    assert {name for name, state in states if state == "complete"} == {"without", "with"}


MODELS = "{models: [{name: a, model: ./emulated}, {name: b, model: ./emulated}]}"
UNVARIED = SCENARIO.partition("variants:")[0]
SEVERAL = UNVARIED.replace("{model: ./emulated}", MODELS)
ONCE = "compare launches each server once"
OF_ONE = (
    "target.models: this is of one model; `load`, `sweep`, `compare` and `check` side by side take several"
)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (SEVERAL, "noise", (OF_ONE, "and remove target.models")),
        (SEVERAL, "check --baseline b.json --update-baseline", (OF_ONE,)),
        (UNVARIED, "compare", ("variants: a comparison needs two", "hint: add: variants")),
        (SCENARIO, "compare --baseline witout", ("no variant is called 'witout'", "did you mean 'without'?")),
        (SCENARIO, "compare --set request.protocol=kserve_grpc", ("without: no tfserving server speaks",)),
        (SCENARIO, "compare --set target.model=no_such_model", ("no_such_model",)),
        (SCENARIO, "compare --max-regress memory=5%", (f"memory: {ONCE}", "`batchtune check`")),
        (SCENARIO, "compare --max-regress gpu_memory=5%", (f"gpu_memory: {ONCE}",)),
        (EXTERNAL, "noise", ("loaded as it is",)),
    ],
)
def test_mistakes_are_named_before_anything_is_launched_or_written(
    scenario: Path, text: str, words: str, expected: tuple[str, ...]
) -> None:
    scenario.write_text(text)
    before = sorted(scenario.parent.iterdir())
    command, *options = words.split()
    done = answered(command, scenario, *options, cwd=scenario.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(part in done.stderr for part in ("error: ", *expected)), done.stderr
    assert not servers_of(scenario.parent)
    assert sorted(scenario.parent.iterdir()) == before


def two_candidates(*caveats: Coded, slower: float) -> tuple[list[Trial], list[Variant]]:
    """`b` is slower than `a` by a factor, `c` alike; the caveats are those of every run of `c`."""
    p95_s = {"a": 0.010, "b": 0.010 * slower, "c": 0.010}

    def run(name: str, block: int) -> Trial:
        latency_s = {
            **measurement().latency_s,
            "p95": exactly(p95_s[name] * (1 + 1e-4 * block * (name != "a"))),
        }
        measured = measurement(latency_s=latency_s, caveats=caveats if name == "c" else ())
        return trial(name, block, measured)

    trials = [run(name, block) for block in range(1, 9) for name in "abc"]
    return trials, [Variant(name=name, scenario=scenario_of()) for name in "abc"]


STOLEN = caveat("host_steal", steal_ratio=0.2)
P95 = [Gate(metric="p95", margin=0.05)]


def accounts_of(trials: list[Trial], variants: list[Variant]) -> list[Conclusion]:
    return _accounts(trials, variants, P95, scenario=scenario_of(), seconds=1.0)


def test_each_fleet_has_a_maximum_of_its_own(tmp_path: Path) -> None:
    """Two workers on a CPU each, and two on one."""
    time = FakeTime()
    with ExitStack() as stack:
        benches = Benches(view=sweep_view(quiet=True), stack=stack, blocks=1, folder=tmp_path)
        apart, sharing = (
            stack.enter_context(fleet_of_fakes([FakeHost(time), FakeHost(time)], cpus=cpus))
            for cpus in ((1, 2), (1,))
        )
        most_rps = [
            benches._calibrated(fleet, None, requests_for("rest")) for fleet in (apart, sharing, apart)
        ]
    assert most_rps == [2000.0, 1000.0, 2000.0]


def test_variants_share_one_error_rate() -> None:
    trials, variants = two_candidates(slower=1.0)
    assert [account.error_rate for account in accounts_of(trials, variants)] == [0.025, 0.025]


@pytest.mark.parametrize(
    ("caveats", "slower", "code"),
    [
        ((), 1.0, 0),
        ((), 1.2, 1),
        ((STOLEN,), 1.0, 6),
        ((STOLEN,), 1.2, 1),
        ((caveat("client_busy", cpu_ratio=0.95),), 1.2, 6),
    ],
)
def test_a_regression_counts_on_a_disturbed_host_but_not_where_the_client_was_the_limit(
    caveats: tuple[Coded, ...], slower: float, code: int
) -> None:
    trials, variants = two_candidates(*caveats, slower=slower)
    assert _exit_code(summarise(trials, variants), accounts_of(trials, variants)) == code


def test_a_regression_of_a_disturbed_side_is_none_in_its_gate_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a confirmation the host may have made it: both lines, the JSON and the exit code agree."""
    trials, (_, slower, disturbed) = two_candidates(STOLEN, slower=1.2)
    variants = [disturbed, slower]
    accounts = accounts_of(trials, variants)
    comparison = summarise(trials, variants)
    print_comparison(comparison, path=tmp_path)
    print_check(accounts[0])
    printed = capsys.readouterr().out
    assert "b: invalid: disturbed by the host" in printed
    assert "INVALID  b against c: the host disturbed every run of c" in printed
    assert "undecided: not confirmed" in printed
    assert "REGRESSED" not in printed
    assert accounts[0].to_dict()["gates"][0]["state"] == "open"
    assert _exit_code(comparison, accounts) == 6


@pytest.mark.slow
def test_noise_states_the_smallest_change_that_can_be_told(scenario: Path) -> None:
    quick = ["--set", "fixed.max_batch_size=16", "--set", "load.duration=150ms"]
    done = measured("noise", scenario, "--blocks", "6", "--json", *quick, cwd=scenario.parent)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["pairs"] == 6
    smallest = document["figures"]["throughput"]["smallest_change"]
    assert smallest["6"] > smallest["10"] > smallest["20"] > 0.0
    assert not (scenario.parent / document["run"] / "report.html").exists()
    assert answered("noise", scenario, "--blocks", "5", cwd=scenario.parent).returncode == 2


def test_the_published_experiment_is_a_scenario_with_its_variants() -> None:
    path = ROOT / "scenarios" / "imdb-benchmark.yaml"
    variants = read_variants(path)
    assert {one.load.requests for one in variants.values()} == {10_000}
    assert {one.load.concurrency for one in variants.values()} == {500}
    compared = {
        name: (variant.request.protocol, variant.request.rows, variant.configuration({}).batching is not None)
        for name, variant in variants.items()
    }
    requests = {"rest_5_rows": ("rest", 5), "grpc_5_rows": ("grpc", 5), "grpc_1_row": ("grpc", 1)}
    plain = {name: (*request, False) for name, request in requests.items()}
    assert compared == plain | {f"{name}_batched": (*request, True) for name, request in requests.items()}
    batched = variants["rest_5_rows_batched"].configuration({}).batching
    assert batched is not None
    assert (batched.max_batch_size, batched.batch_timeout_micros) == (1000, 1000)
    assert (batched.max_enqueued_batches, batched.num_batch_threads) == (16, 16)
