"""What every command says of kept runs: console, `--json`, files and the text of pages, as in the files beside this one.

A text that changes on purpose is written anew by `BATCHTUNE_GOLDEN=write python -m pytest tests/golden`; the difference
then stands in the commit.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.listing import kind_by_trials
from batchtune.archive.run import Run
from batchtune.archive.table import trial_table
from batchtune.cli.commands import ask_twin
from batchtune.cli.commands.report import write_report
from batchtune.report.comparison import print_comparison, print_noise, variant_line
from batchtune.report.live_view import trial_line
from batchtune.report.load_points import points_dict, print_points
from batchtune.report.run_tables import print_trials
from batchtune.scenario.reader import parse_scenario, read_kept_variants
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import noise_floor, summarise
from tests.cli.in_process import answered
from tests.cli.test_twin import calibrated_once, recorded
from tests.report.pages import (
    BUSY_CLIENT,
    STEAL,
    document_of,
    kept_run,
    load_trial,
    loaded_run,
    rising_rates,
    two_arms_run,
)
from tests.tune.answer.ledgers import CAPACITY, SCENARIO, capacity_ledger, helping_ledger
from tests.tune.search.test_several_models import TEXT, swept
from tests.tune.tune_fakes import scenario_of

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "results/reference"
WRITES = os.environ.get("BATCHTUNE_GOLDEN") == "write"

DIALECTS = ("tfserving", "triton", "cortex", "flags", "docker", "k8s", "kserve", "json")


TWO_MODELS = parse_scenario(TEXT.replace("num_batch_threads: [1, 2]", "num_batch_threads: [1]"))
"""So few parameters that Optuna, whose versions differ, names nobody."""


def reference(day: str, name: str, run_id: str) -> Callable[[Path], Run]:
    def copied(root: Path) -> Run:
        path = root / name / run_id
        shutil.copytree(REFERENCE / day / name, path)
        return Run(path)

    return copied


def clients(root: Path) -> Run:
    points = [
        load_trial(1, clients=1, throughput=120.0, p95_s=0.0085),
        load_trial(2, clients=8, throughput=812.34, p95_s=0.0123, caveats=[STEAL]),
        load_trial(3, clients=64, throughput=905.6, p95_s=1.2345, verdict="UNSURE", caveats=[BUSY_CLIENT]),
    ]
    failed = replace(points[0], number=4, measurement=None, failure="the server died", concurrency=128)
    return loaded_run(root, [*points, failed])


SWEEPS: dict[str, Callable[[Path], Run]] = {
    "fixed_load": reference("2026-11-21-epyc-2-cores", "quickstart", "20261121T213251Z-5e8892"),
    "capacity": reference("2026-11-24-epyc-2-cores", "quickstart", "20261124T091500Z-0a1b2c"),
    "helping": lambda root: kept_run(root, SCENARIO, trials=helping_ledger()),
    "held_rates": lambda root: kept_run(root, CAPACITY, trials=capacity_ledger()),
    "several_models": lambda root: kept_run(root, TWO_MODELS, trials=swept(TWO_MODELS)),
}
SMALL = ("helping", "held_rates")
LOADS: dict[str, Callable[[Path], Run]] = {
    "rates": lambda root: loaded_run(root, rising_rates()),
    "clients": clients,
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_reads_as_before(name: str, tmp_path: Path) -> None:
    run = SWEEPS[name](tmp_path / "results")
    path = f"results/{run.path.parent.name}/{run.path.name}"
    options = ["", "--why", "--slo-p95=1ms", "--slo-p99=15ms"]
    options += ["--json"] if name in SMALL else []
    options += [f"--format {dialect}" for dialect in DIALECTS if name == "helping"]
    asked = [["recommend", path, *option.split()] for option in options]
    if name in SMALL:
        asked += [["trials", path, *option.split()] for option in ("", "--csv", "--markdown", "--sort p95")]
        asked += [["runs"], ["report", path]]
    text = "".join(command(words, run, tmp_path) for words in asked)
    lines = "\n".join(trial_line(trial, scenario=run.scenario()) for trial in run.ledger()[-20:])
    page = page_text(run, trials=name in SMALL)
    assert_golden(f"sweep_{name}", f"{text}# Lines of its trials\n{lines}\n{page}", run)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_test_reads_as_before(name: str, tmp_path: Path) -> None:
    run = LOADS[name](tmp_path / "results")
    points, scenario = run.ledger(), run.scenario()
    table, rows = io.StringIO(), io.StringIO()
    with redirect_stdout(table):
        print_points(points, scenario=scenario)
    with redirect_stdout(rows):
        print_trials(trial_table(points), sort=None, output="csv")
    document = json.dumps(points_dict(points, scenario=scenario), indent=1, sort_keys=True)
    parts = [table.getvalue(), rows.getvalue(), document, page_text(run)]
    assert_golden(f"load_{name}", "\n".join(parts), run)


def test_a_comparison_reads_as_before(tmp_path: Path) -> None:
    run = reference("2026-11-21-epyc-2-cores", "imdb-benchmark", "20261121T115158Z-781031-compare")(tmp_path)
    scenarios = read_kept_variants(run.path / "scenario.yaml")
    variants = [Variant(name=name, scenario=scenarios[name]) for name in scenarios]
    comparison, stream = summarise(run.ledger(), variants), io.StringIO()
    with redirect_stdout(stream):
        print_comparison(comparison, path=run.path)
    lines = "\n".join(map(variant_line, run.ledger()[:12]))
    document = json.dumps(comparison.to_dict())[:2000]
    page = page_text(run, trials=False)
    assert_golden("compare", "\n".join([stream.getvalue(), lines, document, page]), run)


def test_a_noise_floor_reads_as_before(tmp_path: Path) -> None:
    run = two_arms_run(tmp_path, ("a", "b"), blocks=8, gain=1.0, kind="noise")
    floor = noise_floor(run.ledger(), [Variant(name=name, scenario=SCENARIO) for name in ("a", "b")])
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_noise(floor, path=run.path)
    assert_golden(
        "noise", f"{stream.getvalue()}\n{json.dumps(floor.to_dict(), indent=1, sort_keys=True)}\n", run
    )


def test_the_twin_reads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are drawn: only the words and the form are held."""
    monkeypatch.setattr(ask_twin, "calibrate", calibrated_once)
    run = recorded(tmp_path / "results", scenario_of())
    path = f"results/{run.path.parent.name}/{run.path.name}"
    words = [
        ["simulate", path, "--set", "max_batch_size=8,32", "--concurrency", "16"],
        ["simulate", path, "--set", "max_batch_size=16", "--rate", "500", "--json"],
        ["plan", path, "--rate", "9k/s", "--slo-p95", "60ms", "--failing", "1"],
        ["plan", path, "--rate", "9k/s", "--slo-p95", "60ms", "--json"],
    ]
    text = "".join(command([*asked, "-q"], run, tmp_path) for asked in words)
    shown = re.sub(r"-?\d[\d,.]*(e-\d+)?", "#", text.replace(run.path.name, "RUN"))
    said = "\n".join(
        textwrap.fill(" ".join(part.replace("─", "").split()), width=110) for part in shown.split("\n$ ")
    )
    assert_golden("twin", said, run)


def command(words: Sequence[str], run: Run, folder: Path) -> str:
    done = answered(*words, cwd=folder)
    return f"$ batchtune {' '.join(words)}\n{done.stdout}{done.stderr}# exit code {done.returncode}\n\n"


def page_text(run: Run, *, trials: bool = True) -> str:
    """What a page shows, a line each, and its table of trials."""
    assert kind_by_trials(run)
    with redirect_stderr(io.StringIO()):
        text = write_report(run).read_text(encoding="utf-8")
    data = document_of(text)
    rows = [" | ".join(data["columns"]), *(" | ".join(row) for row in data["rows"])]  # type: ignore[arg-type,attr-defined]
    shown = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    shown = html.unescape(re.sub(r"<[^>]*>", "\n", shown))
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    return "\n".join(["# The page", *lines, "# Its trials", *(rows if trials else [])]) + "\n"


def assert_golden(name: str, text: str, run: Run) -> None:
    path = HERE / f"{name}.txt"
    text = text.replace(run.path.name, "RUN").replace(str(run.path.parents[1]), "ROOT")
    text = re.sub(r"RUN, \d+ \w+ old", "RUN, AGE old", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d\S*", "UTC", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    if WRITES:
        path.write_text(text, encoding="utf-8")
    assert rounded(text).splitlines() == rounded(path.read_text(encoding="utf-8")).splitlines(), f"see {path}"


def rounded(text: str) -> str:
    """The text with numbers of twelve digits: numpy's sums differ in the last of sixteen from CPU to CPU."""
    return re.sub(r"\d+\.\d{12,}", lambda number: f"{float(number[0]):.12g}", text)
