"""How long does the page of a long sweep take to write and to draw? Prints its size and seconds.

    python tests/benchmarks/report/pages.py [--trials 2000] [--repeats 3] [--keep long.html]

The run is the reference quickstart with as many trials more as are wanted, drawn over a wide space around its own figures,
and requests kept for every fresh run. `written`: wall and CPU seconds of `batchtune report`, the first in this process
apart, for it compiles the simulator. `drawn`: seconds in headless Chromium from the start of the page until the last
figure is there. Median and range of the repeats.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from batchtune.archive.run import LEDGER, SCENARIO, Run
from batchtune.cli.commands.report import write_report
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.benchmarks.rivals import spread
from tests.report.chromium import chromium_page
from tests.report.pages import about, latencies, quickstart_run

REQUESTS = 20_000
SPACE = {
    "max_batch_size": [1, 2, 4, 8, 12, 16, 24, 32, 48, 64],
    "batch_timeout_micros": [0, 200, 500, 1000, 2000, 3000, 5000, 7500, 10000, 15000],
    "num_batch_threads": [1, 2, 3, 4, 6, 8],
}


def long_run(root: Path, *, trials: int) -> Run:
    """The reference sweep and `trials` more, over a space of 600 configurations."""
    run = quickstart_run(root)
    document = yaml.safe_load((run.path / SCENARIO).read_text())
    document["search"]["space"] = SPACE
    (run.path / SCENARIO).write_text(yaml.safe_dump(document, sort_keys=False))
    wide = run.scenario()
    recorded, drawn = run.ledger(), np.random.default_rng(1)
    models = [
        one for one in recorded if one.measurement is not None and one.source in ("sampler", "twin", "race")
    ]
    more = [_varied(models, 1000 + at, drawn, wide) for at in range(trials)]
    lines = [json.dumps(trial.to_dict(), separators=(",", ":")) for trial in [*recorded, *more]]
    (run.path / LEDGER).write_text("\n".join(lines) + "\n")
    (run.path / "samples").mkdir(exist_ok=True)
    for trial in recorded:
        if trial.source == "confirm":
            run._write_samples(trial.number, latencies(drawn.lognormal(2.0, 0.4, REQUESTS).tolist()))
    return run


def _varied(models: Sequence[Trial], number: int, drawn: np.random.Generator, scenario: Scenario) -> Trial:
    """A run of some configuration, slower than what was recorded; its runs differ by 3 %."""
    point = {name: int(drawn.choice(values)) for name, values in SPACE.items()}
    own = np.random.default_rng(list(point.values()))
    trial = models[int(own.integers(len(models)))]
    off = float(np.exp(own.uniform(-1.0, -0.3) + drawn.normal(0.0, 0.03)))
    measured = trial.measurement
    assert measured is not None
    throughput = about(measured.throughput_rps.value * off, 0.03)
    latency_s = {name: about(one.value / off, 0.03) for name, one in measured.latency_s.items()}
    reason, configuration = "synthesised around a recorded trial", scenario.configuration(point)
    return replace(
        trial,
        number=number,
        request=TrialRequest(configuration=configuration, source="sampler", reason=reason, point=point),
        repeat_of=None,
        objective=throughput,
        measurement=replace(measured, throughput_rps=throughput, latency_s=latency_s),
    )


def written_in(run: Run) -> tuple[float, float]:
    """Wall, CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    write_report(run)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="leave the page there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pages-") as root:
        run = long_run(Path(root), trials=chosen.trials)
        first, *others = [written_in(run) for _ in range(1 + chosen.repeats)]
        file = run.path / "report.html"
        print(f"trials   {len(run.ledger()):,}, {file.stat().st_size / 1e6:.2f} MB")
        print(f"written  first {first[0]:.2f} s, CPU {first[1]:.2f} s")
        wall, cpu = zip(*others, strict=True)
        print(f"written  {spread(wall)} s, CPU {spread(cpu)} s", flush=True)
        with chromium_page(Path(root) / "profile") as page:
            print(f"drawn    {spread([page.open(file) for _ in range(chosen.repeats)])} s")
            print(f"problems {page.problems or 'none'}")
        if chosen.keep is not None:
            shutil.copy(file, chosen.keep)


if __name__ == "__main__":
    main()
