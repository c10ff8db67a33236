"""What is kept of a baseline, and what may be compared with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.check.baseline import RUNS_MIN, baseline_of, differences, read_baseline, write_baseline
from batchtune.check.gate import Gate, gates_of
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.commands.run_check import comparability, update_baseline, widened
from batchtune.errors import ArchiveError, BaselineError
from batchtune.scenario.spec.workload import FileInputs, MixSpec
from batchtune.tune.compare.blocks import Variant
from tests.check.check_fakes import measurement, trial
from tests.tune.tune_fakes import exactly, scenario_of

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
BLOCKS = range(1, RUNS_MIN + 1)


def runs(rps: float, blocks=BLOCKS) -> list:
    return [trial("candidate", block, measurement(throughput_rps=exactly(rps + block))) for block in blocks]


def baseline(scenario=SCENARIO, trials=None):
    return baseline_of(scenario, trials or runs(1000.0), HOST, relaunches=False)


KEPT = baseline()


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
        assert [run["throughput"] for run in read.runs] == [1000.0 + block for block in BLOCKS]
        assert math.isnan(read.runs[0]["gpu"])
        assert differences(read, SCENARIO, HOST, relaunches=False) == ([], [])
    assert kept.stat().st_size < 50_000


def updated(path: Path, *, scenario=SCENARIO, gates=None, relaunches=False, asked=None, **figures) -> int:
    """What `check --update-baseline` ends with where each of six runs has these figures."""
    (path.parent / "run").mkdir(exist_ok=True)
    course: Any = SimpleNamespace(
        measure=lambda *_asked: None,
        trials=[trial("candidate", block, measurement(**figures)) for block in range(1, 7)],
        variants=[Variant(name="candidate", scenario=scenario)],
        relaunches=relaunches,
        run=SimpleNamespace(path=path.parent / "run"),
    )
    request = CheckRequest(scenario=path, **(asked or {}))
    gates = gates_of(gates or {}, objective=scenario.objective)
    return update_baseline(course, path, request, gates=gates, provenance=HOST, blocks=6)


def test_a_slow_drift_is_refused_and_force_accepts_it(tmp_path, capsys):
    """Each of three steps of -1.5 % would pass a margin of 5 %; the third lies 4.4 % below the best that was kept."""
    path = tmp_path / "baseline.json"

    def update(rps: float, **asked) -> int:
        return updated(path, throughput_rps=exactly(rps), asked=asked)

    assert [update(1000.0), update(985.0), update(970.5)] == [0, 0, 0]
    kept = path.read_bytes()
    capsys.readouterr()
    assert update(956.0) == 1
    assert path.read_bytes() == kept
    assert "throughput −4.4 % against the best earlier baseline" in capsys.readouterr().err
    assert [update(956.0, force=True), update(950.0), update(1100.0), update(1050.0)] == [0, 0, 0, 1]


@pytest.mark.parametrize(("objective", "code"), [("throughput", 1), ("latency", 0)])
def test_a_baseline_of_another_workload_bounds_no_drift(kept, objective, code):
    scenario = SCENARIO.model_copy(update={"objective": objective})
    assert updated(kept, scenario=scenario, throughput_rps=exactly(500.0)) == code


def test_a_drift_of_a_figure_that_only_the_scenario_guards_is_refused_too(tmp_path, capsys):
    def update(p50_s: float) -> int:
        latency_s = {**measurement().latency_s, "p50": exactly(p50_s)}
        return updated(tmp_path / "baseline.json", gates={"p50": 0.02}, latency_s=latency_s)

    assert [update(0.0100), update(0.0102), update(0.0104)] == [0, 0, 1]
    assert "p50 +4 % against the best earlier baseline" in capsys.readouterr().err


def test_a_capacity_is_kept_only_where_runs_searched_one():
    assert "capacity" not in KEPT.runs[0]
    assert "capacity" in baseline(SCENARIO.model_copy(update={"objective": "capacity"})).runs[0]


OURS = '"kind": "batchtune baseline", "schema_version"'


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 4, r"NO BASELINE: .*does not exist; nothing was compared"),
        (f"{{{OURS}: 99}}", 4, "schema_version 99"),
        (f'{{{OURS}: 2, "runs": [{{"p95": 0.01}}]}}', 4, "1 runs; a baseline needs 6"),
        (f"{{{OURS}: 1}}", 4, "schema_version 1, whose memory is not the peak"),
        ("", 2, "not JSON, or cut short"),
        (" " * (2**20 + 1), 2, "1,048,577 bytes are not a baseline"),
        (f'{{{OURS}: 2, "scen', 2, "not JSON, or cut short"),
        ("[" * 100_000, 2, "not JSON, or cut short"),
        ("\x00\xff", 2, "not JSON, or cut short"),
        ("[1, 2]", 2, "not a baseline of batchtune"),
        ('{"verdict": "OK"}', 2, "not a baseline of batchtune"),
        (f"{{{OURS}: 2}}", 2, "not a whole baseline"),
        *((f'{{{OURS}: 2, "runs": {runs}}}', 2, "not a whole baseline") for runs in ('["x"]', "[{}]", "7")),
        *((f'{{{OURS}: 2, "runs": [{{"p95": {p95}}}]}}', 2, "not a whole") for p95 in ('"fast"', "null")),
    ],
)
def test_a_baseline_that_is_none_or_half_of_one_says_what_it_is_with_its_own_exit_code(
    kept, text, code, words
):
    whole = json.loads(kept.read_text())
    if text is None:
        kept.unlink()
    elif OURS in text and text.endswith("]}"):
        kept.write_text(json.dumps(whole | json.loads(text)))
    else:
        kept.write_bytes(text.encode("latin-1"))
    with pytest.raises((ArchiveError, BaselineError), match=words) as raised:
        read_baseline(kept)
    assert raised.value.exit_code == code
    assert "--update-baseline" in raised.value.hint


def refusal_of(kept, scenario, host=HOST, *, relaunches=False, **asked) -> tuple[str, str]:
    candidate = Variant(name="candidate", scenario=scenario)
    return comparability(
        kept, candidate, host, CheckRequest(scenario=Path("s.yaml"), **asked), relaunches=relaunches
    )


def test_a_baseline_of_a_git_ref_keeps_its_commit_and_says_which_it_is(tmp_path, capsys):
    path = tmp_path / "kept.json"
    asked = {"commit": "f00", "note": "candidate: net at v1 (f00)"}
    assert updated(path, relaunches=True, asked=asked) == 0
    kept = read_baseline(path)
    assert (kept.commit, kept.workload["server_launches"]) == ("f00", "every run")
    assert "candidate: net at v1 (f00)" in capsys.readouterr().out
    assert "server_launches: every run against once" in refusal_of(kept, SCENARIO)[0]


def test_another_workload_is_never_compared_and_another_host_only_as_a_tripwire():
    refusal, _ = refusal_of(KEPT, scenario_of(load={"arrivals": "closed", "concurrency": 7}))
    assert "another workload" in refusal
    assert "load.concurrency" in refusal
    here = {**HOST, "cpu": {**HOST["cpu"], "model": "Xeon"}}
    assert "another host (cpu.model: EPYC against Xeon)" in refusal_of(KEPT, SCENARIO, here)[0]
    refusal, note = refusal_of(KEPT, SCENARIO, here, allow_mismatch=True)
    assert (refusal, note[:16]) == ("", "ROUGH CHECK ONLY")


def with_own(scenario=SCENARIO, **parts: dict[str, Any]):
    """The scenario, had its parts other values."""
    new = {name: getattr(scenario, name).model_copy(update=values) for name, values in parts.items()}
    return scenario.model_copy(update=new)


def recorded(folder: str, name: str = "x.npz"):
    """Recorded requests that lie there."""
    inputs = FileInputs.model_construct(file=f"{folder}/{name}")
    mixed = MixSpec.model_construct(weight=1.0, inputs=FileInputs.model_construct(file=f"{folder}/y.npz"))
    return with_own(request={"inputs": inputs, "mix": (mixed,)})


def on_cpus(server: tuple[int, ...] | None, client: tuple[int, ...] | None):
    return with_own(target={"cpus": server}, load={"cpus": client})


FOUR_CPUS = on_cpus((0, 1, 2), (3,))
SHARED = ["load.cpus: 1 CPU against not set", "server_cpus: 3 CPUs against not set"]


@pytest.mark.parametrize(
    ("kept", "candidate", "usable", "workload", "host"),
    [
        # another model or seed is what a check is about
        (SCENARIO, with_own(load={"seed": 99}, target={"model": "/another"}), 2, [], []),
        # files are compared by their names wherever they lie
        (recorded("/home/a"), recorded("/builds/b"), 2, [], []),
        (recorded("/a"), recorded("/a", "z.npz"), 2, ["request.inputs.file: x.npz against z.npz"], []),
        # of CPUs their number counts, and only on the same host
        (FOUR_CPUS, on_cpus((4, 5, 6), (7,)), 2, [], []),
        (FOUR_CPUS, on_cpus((0,), (1,)), 2, ["server_cpus: 3 CPUs against 1 CPU"], []),
        (FOUR_CPUS, on_cpus(None, None), 2, SHARED, []),
        (FOUR_CPUS, on_cpus(None, None), 1, [], ["cpu.usable: 2 against 1"]),
    ],
)
def test_what_differs_is_of_the_workload_or_the_host(kept, candidate, usable, workload, host):
    here = {**HOST, "cpu": {**HOST["cpu"], "usable": usable}}
    assert differences(baseline(kept), candidate, here, relaunches=False) == (workload, host)


@pytest.mark.parametrize(
    ("is_other_host", "margins"), [(False, [0.05, 0.4, 0.001]), (True, [0.25, 0.4, 0.001])]
)
def test_margins_are_no_less_than_sessions_and_hosts_differ(is_other_host, margins):
    asked = (("p95", 0.02), ("p99", 0.4), ("errors", 0.001))
    gates = [Gate(metric=metric, margin=margin) for metric, margin in asked]
    assert [gate.margin for gate in widened(gates, is_other_host=is_other_host)] == margins


def test_a_noisy_attempt_that_was_repeated_is_not_kept():
    first, *others = runs(1000.0)
    kept = baseline(trials=[first, *runs(0.0, [2]), *others])
    assert [run["throughput"] for run in kept.runs] == [1000.0 + block for block in BLOCKS]


def test_each_run_stands_beside_one_of_the_baseline_and_fresh_ones_beside_others():
    fresh = [trial("candidate", block) for block in (7, 8)]
    screen, confirmation = (KEPT.blocks_with(fresh, phase) for phase in ("screen", "confirmation"))
    assert [block["throughput"] for block in screen] == [(1001.0, 1600.0), (1002.0, 1600.0)]
    assert [block["throughput"] for block in confirmation] == [(1006.0, 1600.0), (1005.0, 1600.0)]
