"""Runs to make pages of, and what a page holds."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.archive.run import CHECK, Run, create_run
from batchtune.check.account import attribute
from batchtune.check.gate import default_gates
from batchtune.check.paired_check import judge_fixed, paired_figures
from batchtune.load.samples import Samples
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded
from batchtune.report.html.contender_figures import sweep_results_of
from batchtune.report.html.shell.document import render
from batchtune.report.html.sweep_page import sweep_document
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.trials.trial import Trial
from tests.archive.test_table import of_three
from tests.measure.measure_streams import make_samples
from tests.tune.answer.ledgers import BATCH_14, SCENARIO, helping_ledger
from tests.tune.tune_fakes import asked, planted

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    """A stream that is a terminal; COLUMNS of the environment says how wide."""

    def isatty(self) -> bool:
        return True


REFERENCE = ROOT / "results/reference/2026-11-21-epyc-2-cores"
EVIL = "<script>window.hacked=1</script>"
BUSY_CLIENT = caveat("client_busy", cpu_ratio=0.95)
STEAL = caveat("host_steal", steal_ratio=0.05)
NOISY_BLOCK = 3


def kept_run(
    root: Path,
    scenario: Scenario = SCENARIO,
    *,
    trials: Sequence[Trial] = (),
    samples: Samples | None = None,
    repeat: int = 1,
) -> Run:
    """A sweep that finds that batching helps, or of these trials."""
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={"cpu": {"model": EVIL}})
    trials = trials or helping_ledger()
    for at in range(repeat):
        for trial in trials:
            run.append(replace(trial, number=at * len(trials) + trial.number), samples)
    return run


def quickstart_run(root: Path) -> Run:
    """The reference sweep, whose requests are not kept."""
    path = root / "quickstart" / "20261121T213251Z-5e8892"
    shutil.copytree(REFERENCE / "quickstart", path)
    return Run(path)


def compared_run(root: Path) -> Run:
    """The reference comparison: six variants in six blocks, whose requests are not kept."""
    path = root / "imdb-benchmark" / "20261121T115158Z-781031-compare"
    shutil.copytree(REFERENCE / "imdb-benchmark", path)
    return Run(path)


def two_arms_run(
    root: Path, names: Sequence[str], *, blocks: int, gain: float, kind: str, scenario: Scenario = SCENARIO
) -> Run:
    """Blocks of two arms, the second `gain` times as fast; the host disturbed the first of NOISY_BLOCK, and its repeat."""
    overrides = {name: {"fixed": {"enable_batching": at > 0}} for at, name in enumerate(names)}
    scenario = scenario.model_copy(update={"variants": overrides if kind == "compare" else {}})
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={}, kind=kind)  # type: ignore[arg-type]
    drawn, number = np.random.default_rng(3), 0
    for block in range(1, blocks + 1):
        for at, name in enumerate(names):
            for _ in range(2 if (block, at) == (NOISY_BLOCK, 0) else 1):
                number += 1
                factor = float(np.exp(drawn.normal(0.0, 0.01))) * (gain if at else 1.0)
                figures: dict[str, Any] = {"throughput": 1000 * factor, "p95_s": 0.02 / factor}
                figures["caveats"] = (STEAL,) if (block, at) == (NOISY_BLOCK, 0) else ()
                trial = planted(number, batching=None, source="variant", block=block, **figures)
                run.append(asked(trial, reason=name), latencies([1.0, 2.0, 4.0]))
    return run


def checked_run(
    root: Path,
    *,
    names: tuple[str, str] = ("baseline", "candidate"),
    blocks: int = 10,
    gain: float = 0.8,
) -> Run:
    """A check whose candidate is `gain` times as fast."""
    run = two_arms_run(root, names, blocks=blocks, gain=gain, kind="compare")
    trials = run.ledger()
    figures = paired_figures(trials, *(Variant(name=name, scenario=SCENARIO) for name in names))
    conclusion = replace(judge_fixed(default_gates("throughput"), figures), fresh_blocks=6, confirms=True)
    account = replace(
        conclusion,
        scenario=SCENARIO.name,
        baseline=names[0],
        candidate=names[1],
        attribution=attribute(
            *([trial.measurement for trial in trials if trial.reason == name] for name in names)
        ),
        seconds=42.0,
        run=str(run.path),
        note=f"baseline: net at {EVIL} (1a2b3c4d5)",
    )
    (run.path / CHECK).write_text(json.dumps(account.to_dict()))
    return run


def load_trial(
    number: int,
    *,
    rate: float | None = None,
    clients: int | None = None,
    throughput: float,
    p95_s: float = 0.01,
    verdict: str | None = "PASS",
    caveats: Sequence[Coded] = (),
) -> Trial:
    """A point of a load test."""
    server = ServerActivity(
        duration_s=1.0,
        batches=164,
        rows=2230,
        mean_batch_rows=13.6,
        batches_by_rows={13: 64, 14: 100},
        execution_s_by_rows={13: 0.0058, 14: 0.006},
        queue_wait_mean_s=0.001,
        close_reasons={"full": 100, "timeout": 64},
    )
    load = {"requests": round(rate or throughput), "offered_rps": rate, "concurrency": clients}
    told: dict[str, Any] = {"verdict": verdict, "caveats": tuple(caveats), "server": server, **load}
    trial = planted(number, batching=BATCH_14, throughput=throughput, p95_s=p95_s, source="load", **told)
    return replace(trial, rate_rps=rate, concurrency=clients)


def loaded_run(root: Path, trials: Sequence[Trial], *, slo: SloSpec | None = None) -> Run:
    """A load test with these points, three requests of each kept."""
    scenario = SCENARIO if slo is None else SCENARIO.model_copy(update={"slo": slo})
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={}, kind="load")
    for trial in trials:
        run.append(trial, latencies([1.0, 2.0, 4.0]))
    return run


def rising_rates() -> list[Trial]:
    """Four rates: two keep the SLO, one misses it, one was the load generator's."""
    return [
        load_trial(1, rate=500.0, throughput=499.0, p95_s=0.008),
        load_trial(2, rate=1000.0, throughput=997.0, p95_s=0.02),
        load_trial(3, rate=1500.0, throughput=1210.0, p95_s=0.4, verdict="FAIL"),
        load_trial(4, rate=2000.0, throughput=900.0, p95_s=0.9, verdict="INVALID", caveats=[BUSY_CLIENT]),
    ]


def latencies(latency_ms: Sequence[float]) -> Samples:
    """Good answers to requests that were due every millisecond."""
    return make_samples(np.arange(len(latency_ms)) / 1e3, np.array(latency_ms) / 1e3)


def evil_page(root: Path) -> str:
    """Of a run whose names are scripts, wherever names come from outside; no reader would let the scenario's pass."""
    run = kept_run(root, samples=of_three())
    trial = helping_ledger()[0]
    evil = asked(trial, reason=f"{EVIL}<a href='https://x'>")
    run.append(replace(evil, number=99, failure=EVIL), None)
    account = sweep_results_of(run)
    target = SCENARIO.target.model_copy(update={"model": EVIL})
    scenario = SCENARIO.model_copy(update={"name": EVIL, "target": target})
    return render(sweep_document(replace(account, scenario=scenario), deployment=EVIL))


def document_of(text: str) -> dict[str, object]:
    """What the page's script reads."""
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))


def about(value: float, share: float) -> Estimate:
    return Estimate(value=value, low=value * (1 - share), high=value * (1 + share))
