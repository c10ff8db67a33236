"""How long does the page of a long sweep take to write and to draw? Prints its size, seconds and whether it answers.

    python tests/benchmarks/report/pages.py
    python tests/benchmarks/report/pages.py --trials 200 --repeats 1 --keep long.html

The run is the reference quickstart with as many trials more as are wanted, drawn over a wide space around its own figures,
and requests kept for every fresh run. `written`: wall and CPU seconds of `batchtune report`, the first in this process
apart, for it compiles the simulator. `drawn`: seconds in headless Chromium from the start of the page until the last
figure is there, and when each came. Median and range of the repeats.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from batchtune.archive.run import LEDGER, SCENARIO, Run
from batchtune.cli.commands.report import write_report
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.report.chromium import Page, chromium_page
from tests.report.pages import latencies, quickstart_run

REQUESTS = 20_000
SPACE = {
    "max_batch_size": [1, 2, 4, 8, 12, 16, 24, 32, 48, 64],
    "batch_timeout_micros": [0, 200, 500, 1000, 2000, 3000, 5000, 7500, 10000, 15000],
    "num_batch_threads": [1, 2, 3, 4, 6, 8],
}


def long_run(root: Path, *, trials: int) -> Run:
    """The reference sweep and `trials` more, over a space of 600 configurations."""
    run = quickstart_run(root)
    scenario = (run.path / SCENARIO).read_text()
    start = scenario.index("  space:")
    end = next(
        at for at in range(start + 9, len(scenario)) if scenario[at] == "\n" and scenario[at + 1] not in " -"
    )
    listed = "".join(f"    {name}: {json.dumps(values)}\n" for name, values in SPACE.items())
    (run.path / SCENARIO).write_text(f"{scenario[:start]}  space:\n{listed}{scenario[end + 1 :]}")
    recorded = run.ledger()
    drawn = np.random.default_rng(1)
    models = [
        trial
        for trial in recorded
        if trial.measurement is not None and trial.source in ("sampler", "twin", "race")
    ]
    wide = run.scenario()
    more = [_varied(models, 1000 + at, drawn, wide) for at in range(trials)]
    lines = [json.dumps(trial.to_dict(), separators=(",", ":")) for trial in [*recorded, *more]]
    (run.path / LEDGER).write_text("\n".join(lines) + "\n")
    for trial in recorded:
        if trial.source == "confirm":
            (run.path / "samples").mkdir(exist_ok=True)
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

    def scaled(estimate: Estimate, factor: float) -> Estimate:
        return Estimate(value=estimate.value * factor, low=estimate.low * factor, high=estimate.high * factor)

    throughput = scaled(measured.throughput_rps, off)
    request = TrialRequest(
        configuration=scenario.configuration(point),
        source="sampler",
        reason="synthesised around a recorded trial",
        point=point,
    )
    return replace(
        trial,
        number=number,
        request=request,
        repeat_of=None,
        objective=throughput,
        measurement=replace(
            measured,
            throughput_rps=throughput,
            latency_s={name: scaled(each, 1.0 / off) for name, each in measured.latency_s.items()},
        ),
    )


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """Wall, CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def drawn_in(page: Page, file: Path, *, repeats: int) -> None:
    marks: dict[str, list[float]] = {}
    totals = []
    for _ in range(repeats):
        totals.append(page.open(file))
        found = page.evaluate(
            "performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"
        )
        for name, at_ms in found:
            marks.setdefault(name, []).append(at_ms / 1e3)
    print(f"drawn    {spread(totals)} s")
    for name, values in marks.items():
        print(f"  {name:<20} {spread(values)}")
    place = page.evaluate(
        "(() => { const plot = document.querySelector('[data-figure=pareto]'); plot.scrollIntoView({block: 'center'});"
        " const traces = [...plot.querySelectorAll('.scatterlayer .trace')];"
        " const box = traces[traces.length - 1].querySelector('.point').getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    began = time.perf_counter()
    page.move(*place)
    hover = page.waited("document.querySelector('.hovertext')?.textContent")
    print(f"hover    {'answers' if hover else 'FAILS'} after {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    page.click(*place)
    detail = page.waited("document.querySelector('#pareto .detail').textContent")
    print(f"click    {'answers' if detail else 'FAILS'} after {time.perf_counter() - began:.2f} s")
    print(f"problems {page.problems or 'none'}")
    print(
        f"asked    {[each for each in page.asked if not each.startswith(('file:', 'data:', 'about:'))] or 'nothing'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="leave the page there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pages-") as root:
        run = long_run(Path(root), trials=chosen.trials)
        file = run.path / "report.html"
        first = seconds_of(lambda: write_report(run))
        times = [seconds_of(lambda: write_report(run)) for _ in range(chosen.repeats)]
        print(f"trials   {len(run.ledger()):,}")
        print(f"size     {file.stat().st_size / 1e6:.2f} MB")
        print(f"written  first {first[0]:.2f} s, CPU {first[1]:.2f} s")
        print(
            f"written  {spread([wall for wall, _ in times])} s, CPU {spread([cpu for _, cpu in times])} s",
            flush=True,
        )
        with chromium_page(Path(root) / "profile") as page:
            drawn_in(page, file, repeats=chosen.repeats)
        if chosen.keep is not None:
            shutil.copy(file, chosen.keep)


if __name__ == "__main__":
    main()
