"""What is kept of a baseline, and what may be compared with it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchtune.check.baseline import RUNS_MIN, baseline_of, differences, read_baseline, write_baseline
from batchtune.check.gate import Gate, gates_of
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.commands.run_check import comparability, update_baseline, widened
from batchtune.errors import ArchiveError, BaselineError
from batchtune.scenario.spec.workload import FileInputs, MixSpec
from batchtune.tune.compare.blocks import Variant
from tests.check.check_fakes import exactly, measurement, trial
from tests.tune.tune_fakes import scenario_of

HOST = {
    "schema_version": 1,
    "machine": {"architecture": "x86_64", "host": "a"},
    "kernel_series": "6.8",
    "cpu": {"model": "EPYC", "logical": 2, "usable": 2, "cgroup_limit": None, "governor": None},
    "python": {"series": "3.11"},
    "gpu": {"names": [], "driver": None},
    "git": {"commit": "abc"},
}
SCENARIO = scenario_of()
TRIALS = [
    trial("candidate", block, measurement(throughput_rps=exactly(1000.0 + block)))
    for block in range(1, RUNS_MIN + 1)
]
KEPT = baseline_of(SCENARIO, TRIALS, HOST, relaunches=False)


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "baseline.json"
    write_baseline(KEPT, path)
    return path


def test_it_is_read_as_it_was_written_from_the_file_or_its_folder(kept):
    for place in (kept, kept.parent):
        read = read_baseline(place)
        assert read.commit == "abc"
        assert [run["throughput"] for run in read.runs] == [
            1000.0 + block for block in range(1, RUNS_MIN + 1)
        ]
        assert math.isnan(read.runs[0]["gpu"])
        assert differences(read, SCENARIO, HOST, relaunches=False) == ([], [])
    assert kept.stat().st_size < 50_000


def updated(path: Path, measured, *, scenario=SCENARIO, gates=None, **asked) -> int:
    """What `check --update-baseline` ends with where each of six runs has these figures."""
    run = path.parent / "run"
    run.mkdir(exist_ok=True)
    course = SimpleNamespace(
        measure=lambda *_asked: None,
        trials=[trial("candidate", block, measured) for block in range(1, 7)],
        variants=[Variant(name="candidate", scenario=scenario)],
        relaunches=False,
        run=SimpleNamespace(path=run),
    )
    gates = gates_of(gates or {}, objective=scenario.objective)
    return update_baseline(
        course, path, CheckRequest(scenario=path, **asked), gates=gates, provenance=HOST, blocks=6
    )


def test_a_slow_drift_is_refused_and_force_accepts_it(tmp_path, capsys):
    """Each of three steps of -1.5 % would pass a margin of 5 %; the third lies 4.4 % below the best that was kept."""
    path = tmp_path / "baseline.json"

    def update(rps: float, **asked) -> int:
        return updated(path, measurement(throughput_rps=exactly(rps)), **asked)

    assert [update(1000.0), update(985.0), update(970.5)] == [0, 0, 0]
    kept = path.read_bytes()
    capsys.readouterr()
    assert update(956.0) == 1
    assert path.read_bytes() == kept
    assert "throughput −4.4 % against the best earlier baseline" in capsys.readouterr().err
    assert update(956.0, force=True) == 0
    assert update(950.0) == 0
    assert update(1100.0) == 0
    assert update(1050.0) == 1


def test_a_baseline_of_another_workload_bounds_no_drift(kept):
    slower = measurement(throughput_rps=exactly(500.0))
    other = SCENARIO.model_copy(update={"objective": "latency"})
    for scenario, code in ((SCENARIO, 1), (other, 0)):
        path = kept.with_name("other.json")
        write_baseline(KEPT, path)
        assert updated(path, slower, scenario=scenario) == code


def test_a_drift_of_a_figure_that_only_the_scenario_guards_is_refused_too(tmp_path, capsys):
    def slower(p50_s: float):
        latency_s = {**measurement().latency_s, "p50": exactly(p50_s)}
        return replace(measurement(), latency_s=latency_s)

    path = tmp_path / "baseline.json"
    steps = [updated(path, slower(p50_s), gates={"p50": 0.02}) for p50_s in (0.0100, 0.0102, 0.0104)]
    assert steps == [0, 0, 1]
    assert "p50 +4 % against the best earlier baseline" in capsys.readouterr().err


def test_a_capacity_is_kept_only_where_runs_searched_one():
    assert "capacity" not in KEPT.runs[0]
    searched = baseline_of(
        SCENARIO.model_copy(update={"objective": "capacity"}), TRIALS, HOST, relaunches=False
    )
    assert "capacity" in searched.runs[0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, 4),
        ("{", 2),
        ('{"verdict": "OK"}', 2),
        ('{"kind": "batchtune baseline", "schema_version": 99}', 4),
    ],
    ids=["none", "cut short", "foreign", "future"],
)
def test_a_baseline_that_is_none_ends_with_its_own_exit_code(tmp_path, text, code):
    path = tmp_path / "baseline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ArchiveError, BaselineError)) as raised:
        read_baseline(path)
    assert raised.value.exit_code == code


def test_none_and_one_of_the_future_are_no_baselines(kept):
    with pytest.raises(BaselineError, match=r"NO BASELINE: .*does not exist; nothing was compared"):
        read_baseline(kept.with_name("none.json"))
    changed(kept, schema_version=99)
    with pytest.raises(BaselineError, match="schema_version 99"):
        read_baseline(kept)
    changed(kept, schema_version=2, runs=[{"p95": 0.01}])
    with pytest.raises(BaselineError, match="1 runs; a baseline needs 6"):
        read_baseline(kept)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON, or cut short"),
        ('{"kind": "batchtune baseline", "schema_version": 2, "scen', "not JSON, or cut short"),
        ("[" * 100_000, "not JSON, or cut short"),
        ("\x00\xff", "not JSON, or cut short"),
        ("[1, 2]", "not a baseline of batchtune"),
        ('{"verdict": "OK"}', "not a baseline of batchtune"),
        ('{"kind": "batchtune baseline", "schema_version": 2}', "not a whole baseline"),
    ],
)
def test_a_file_that_is_none_or_half_of_one_says_what_it_is(tmp_path, text, words):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ArchiveError, match=words) as raised:
        read_baseline(path)
    assert "--update-baseline" in raised.value.hint


@pytest.mark.parametrize("runs", [["x"], [{}], [{"p95": "fast"}], [{"p95": None}], "runs", 7], ids=str)
def test_runs_that_are_no_figures_are_refused(kept, runs):
    changed(kept, runs=runs)
    with pytest.raises(ArchiveError, match="not a whole baseline"):
        read_baseline(kept)


def test_the_memory_of_an_old_baseline_was_none_at_its_peak(kept):
    changed(kept, schema_version=1)
    with pytest.raises(BaselineError, match="schema_version 1, whose memory is not the peak") as raised:
        read_baseline(kept)
    assert raised.value.exit_code == 4
    assert "--update-baseline" in raised.value.hint


def test_runs_that_launched_their_servers_are_never_compared_with_runs_that_did_not(kept):
    same = Variant(name="candidate", scenario=SCENARIO)
    refusal, _ = comparability(
        read_baseline(kept), same, HOST, CheckRequest(scenario=Path("s.yaml")), relaunches=True
    )
    assert "server_launches: once against every run" in refusal


def test_a_baseline_of_a_git_ref_keeps_its_commit_and_says_which_it_is(tmp_path, capsys):
    course = SimpleNamespace(
        measure=lambda *_asked: (),
        trials=TRIALS,
        variants=[Variant(name="candidate", scenario=SCENARIO)],
        relaunches=True,
        run=SimpleNamespace(path=tmp_path),
    )
    wanted = CheckRequest(scenario=tmp_path / "s.yaml", commit="f00", note="candidate: net at v1 (f00)")
    path = tmp_path / "kept.json"
    assert update_baseline(course, path, wanted, gates=(), provenance=HOST, blocks=6) == 0
    kept = read_baseline(path)
    assert (kept.commit, kept.workload["server_launches"]) == ("f00", "every run")
    assert "candidate: net at v1 (f00)" in capsys.readouterr().out


def test_another_workload_is_never_compared_and_another_host_only_as_a_tripwire():
    other = scenario_of(load={"arrivals": "closed", "concurrency": 7})
    asked = CheckRequest(scenario=Path("s.yaml"))
    candidate = Variant(name="candidate", scenario=other)
    refusal, _ = comparability(KEPT, candidate, HOST, asked, relaunches=False)
    assert "another workload" in refusal
    assert "load.concurrency" in refusal
    here = {**HOST, "cpu": {**HOST["cpu"], "model": "Xeon"}}
    same = Variant(name="candidate", scenario=SCENARIO)
    refusal, _ = comparability(KEPT, same, here, asked, relaunches=False)
    assert "another host (cpu.model: EPYC against Xeon)" in refusal
    mismatch = replace(asked, allow_mismatch=True)
    refusal, note = comparability(KEPT, same, here, mismatch, relaunches=False)
    assert (refusal, note[:16]) == ("", "ROUGH CHECK ONLY")


def test_another_model_or_seed_is_what_a_check_is_about():
    load = SCENARIO.load.model_copy(update={"seed": 99})
    target = SCENARIO.target.model_copy(update={"model": "/another"})
    other = SCENARIO.model_copy(update={"load": load, "target": target})
    assert differences(KEPT, other, HOST, relaunches=False) == ([], [])


def recorded(folder: str, name: str = "x.npz"):
    """Recorded requests that lie there."""
    inputs = FileInputs.model_construct(file=f"{folder}/{name}")
    mixed = MixSpec.model_construct(weight=1.0, inputs=FileInputs.model_construct(file=f"{folder}/y.npz"))
    request = SCENARIO.request.model_copy(update={"inputs": inputs, "mix": (mixed,)})
    return SCENARIO.model_copy(update={"request": request})


def test_files_are_compared_by_their_names_wherever_they_lie():
    kept = baseline_of(recorded("/home/a"), TRIALS, HOST, relaunches=False)
    assert differences(kept, recorded("/builds/b"), HOST, relaunches=False) == ([], [])
    other, _ = differences(kept, recorded("/home/a", "z.npz"), HOST, relaunches=False)
    assert other == ["request.inputs.file: x.npz against z.npz"]


def on_cpus(server: tuple[int, ...] | None, client: tuple[int, ...] | None):
    target = SCENARIO.target.model_copy(update={"cpus": server})
    return SCENARIO.model_copy(
        update={"target": target, "load": SCENARIO.load.model_copy(update={"cpus": client})}
    )


def test_of_cpus_their_number_counts_and_only_on_the_same_host():
    kept = baseline_of(on_cpus((0, 1, 2), (3,)), TRIALS, HOST, relaunches=False)
    assert differences(kept, on_cpus((4, 5, 6), (7,)), HOST, relaunches=False) == ([], [])
    fewer, _ = differences(kept, on_cpus((0,), (1,)), HOST, relaunches=False)
    assert fewer == ["server_cpus: 3 CPUs against 1 CPU"]
    shared, _ = differences(kept, on_cpus(None, None), HOST, relaunches=False)
    assert shared == ["load.cpus: 1 CPU against not set", "server_cpus: 3 CPUs against not set"]
    smaller = {**HOST, "cpu": {**HOST["cpu"], "usable": 1}}
    workload, host = differences(kept, on_cpus(None, None), smaller, relaunches=False)
    assert (workload, host) == ([], ["cpu.usable: 2 against 1"])


def test_margins_are_no_less_than_sessions_and_hosts_differ():
    gates = [
        Gate(metric="p95", margin=0.02),
        Gate(metric="p99", margin=0.4),
        Gate(metric="errors", margin=0.001),
    ]
    assert [gate.margin for gate in widened(gates, is_other_host=False)] == [0.05, 0.4, 0.001]
    assert [gate.margin for gate in widened(gates, is_other_host=True)] == [0.25, 0.4, 0.001]


def test_a_noisy_attempt_that_was_repeated_is_not_kept():
    noisy = trial("candidate", 2, measurement(throughput_rps=exactly(1.0)))
    kept = baseline_of(SCENARIO, [TRIALS[0], noisy, *TRIALS[1:]], HOST, relaunches=False)
    assert [run["throughput"] for run in kept.runs] == [run["throughput"] for run in KEPT.runs]


def test_each_run_stands_beside_one_of_the_baseline_and_fresh_ones_beside_others():
    fresh = [trial("candidate", block) for block in (7, 8)]
    screen, confirmation = (KEPT.blocks_with(fresh, phase) for phase in ("screen", "confirmation"))
    assert [block["throughput"] for block in screen] == [(1001.0, 1600.0), (1002.0, 1600.0)]
    assert [block["throughput"] for block in confirmation] == [(1006.0, 1600.0), (1005.0, 1600.0)]
