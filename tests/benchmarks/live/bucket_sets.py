"""What do length boundaries bring the real transformer, does a sweep find good ones, and does the twin foretell them?

    python tests/benchmarks/live/bucket_sets.py measure --out FILE     # a round: 20 sets, one queue, auto; some 110 s
    python tests/benchmarks/live/bucket_sets.py sweep --out FILE       # one sweep over sets and one queue; some 110 s
    python tests/benchmarks/live/bucket_sets.py probes --out FILE      # what the twin is made and tried with; some 60 s
    python tests/benchmarks/live/bucket_sets.py report --out FILE      # reads FILE, measures nothing
    python tests/benchmarks/live/bucket_sets.py twin --out FILE        # nor does this

Model, traffic and parameters are those of `scenarios/length-buckets.yaml`: lengths log-normal around 40 of 256, 64 clients
that wait for their answers, batches of 16. Every round measures each of the twenty sets of `replay/bucket_search.py`, one
queue and the server's own choice once, in an order drawn anew; all commands append to FILE. A set's truth is the median of
its rounds; what it gains is compared with one queue within each round. `twin` calibrates a twin from the probes alone, and
compares p95 and throughput of what was tried, in closed and open loops, and throughput of every set, with what it foretells.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import spearmanr

from batchtune.batching.parameters import (
    AUTO_BUCKETS,
    LENGTH_BUCKETS,
    NO_BUCKETS,
    Configuration,
    format_length_buckets,
)
from batchtune.errors import BatchtuneError
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import from_plain, to_plain
from batchtune.report.findings import text_of
from batchtune.report.twin_text import accuracy_text
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, draw
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.loader import Loader, LoadRun
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import SearchSummary
from batchtune.twin.calibrate import calibrate, observation_of
from batchtune.twin.simulator.simulate import Batcher, batcher_of
from batchtune.twin.traffic import Traffic, traffic_of
from batchtune.twin.twin import Twin
from tests.benchmarks.replay.bucket_search import SETS
from tests.tune.tune_fakes import heard

SCENARIO = Path(__file__).parents[3] / "scenarios" / "length-buckets.yaml"
WARM_UP_S, MEASURED_S = 1.0, 2.5
SWEEP_S = 85
BUCKETS = (NO_BUCKETS, AUTO_BUCKETS, *(format_length_buckets(boundaries) for boundaries in SETS))
TRIED = ("64", "32,64,128,192", "16,32,48,64,96,128")
"""What the twin is tried on; it is made from the probes alone."""

PROBES: tuple[dict[str, Any], ...] = (
    {"size": 1, "buckets": NO_BUCKETS, "clients": 2},
    {"size": 4, "buckets": NO_BUCKETS, "clients": 8},
    {"size": 16, "buckets": NO_BUCKETS, "clients": 64},
    {"size": 16, "buckets": "48,96", "clients": 64},
    {"size": 8, "buckets": "48,96", "clients": 64},
    {"size": 16, "buckets": "48,96", "share": 0.5},
)
SHARE = 0.6
"""Of the throughput of 64 clients: the rate at which open loops are tried."""


def configuration(scenario: Scenario, buckets: str, size: int | None = None) -> Configuration:
    point = {} if buckets == NO_BUCKETS else {LENGTH_BUCKETS: buckets}
    return scenario.configuration(point | ({} if size is None else {"max_batch_size": size}))


class Server:
    """The model, launched, and what loads it."""

    def __init__(self, scenario: Scenario, target: Any, fleet: LoadFleet, kept: Path) -> None:
        self._scenario, self._target, self._kept = scenario, target, kept
        self._loader = Loader(scenario, target, fleet, guard=HostGuard())

    def measure(
        self,
        buckets: str,
        *,
        what: str,
        size: int | None = None,
        clients: int = 64,
        rate_rps: float | None = None,
    ) -> Measurement:
        """One load, kept."""
        asked = configuration(self._scenario, buckets, size)
        self._target.apply(asked)
        total_s = WARM_UP_S + MEASURED_S
        arrivals: Arrivals = ClosedLoop(concurrency=clients, duration_s=total_s)
        if rate_rps is not None:
            load = self._scenario.load.model_copy(update={"arrivals": "poisson", "rate_rps": rate_rps})
            arrivals = draw(load, rate_rps=rate_rps, duration_s=total_s, seed=1)
        run = LoadRun(arrivals=arrivals, warm_up_s=WARM_UP_S)
        measured = self._loader.run(run, on_live=lambda _live: None).measurement
        keep(self._kept, what, buckets=buckets, configuration=asked.to_dict(), measurement=to_plain(measured))
        print(
            f"{what} {buckets:20} {asked.label()} {measured.concurrency or rate_rps}: "
            f"{measured.throughput_rps.value:.1f}/s, p95 {measured.latency_s['p95'].value * 1e3:.0f} ms",
            flush=True,
        )
        return measured


@contextmanager
def served(kept: Path) -> Iterator[Server]:
    scenario = read_scenario(SCENARIO)
    with target_of(scenario) as target, LoadFleet() as fleet:
        target.apply(configuration(scenario, NO_BUCKETS))
        yield Server(scenario, target, fleet, kept)


def measure_round(kept: Path) -> None:
    number = sum(entry["what"] == "set" and entry["buckets"] == NO_BUCKETS for entry in entries(kept))
    order = list(BUCKETS)
    random.Random(number).shuffle(order)
    with served(kept) as server:
        for buckets in order:
            server.measure(buckets, what="set")


def measure_probes(kept: Path) -> None:
    """Probes first, then what the twin is tried on, in closed and open loops."""
    with served(kept) as server:
        full_rps = 0.0
        for probe in PROBES:
            rate_rps = probe["share"] * full_rps if "share" in probe else None
            measured = server.measure(
                probe["buckets"],
                what="probe",
                size=probe["size"],
                clients=probe.get("clients", 64),
                rate_rps=rate_rps,
            )
            if probe["size"] == 16 and probe["buckets"] != NO_BUCKETS and rate_rps is None:
                full_rps = measured.throughput_rps.value
        for buckets in TRIED:
            measured = server.measure(buckets, what="tried")
            server.measure(buckets, what="tried", rate_rps=SHARE * measured.throughput_rps.value)


def run_sweep(kept: Path) -> None:
    values = yaml.safe_load(SCENARIO.read_text(encoding="utf-8"))
    del values["variants"]
    number = sum(entry["what"] == "sweep" for entry in entries(kept))
    values["search"] = {
        "budget": {"time": f"{SWEEP_S}s"},
        "seed": 1 + number,
        "space": {LENGTH_BUCKETS: [NO_BUCKETS, *map(list, SETS)]},
    }
    scenario = Scenario.model_validate(values)
    began_s = time.monotonic()
    summaries: list[SearchSummary] = []
    on_event = heard(on_summary=summaries.append)
    with target_of(scenario) as target, LoadFleet() as fleet:
        trials = [
            finished.trial
            for finished in sweep(scenario, target, fleet, on_event=on_event, guard=HostGuard())
        ]
    chosen, label = "", ""
    try:
        configuration = recommend(trials, scenario=scenario).configuration
        label = configuration.label()
        if configuration.batching is not None:
            chosen = dict(configuration.flags).get(LENGTH_BUCKETS, NO_BUCKETS)
    except BatchtuneError as error:
        label = error.message
    took_s, tried = time.monotonic() - began_s, [trial.configuration.label() for trial in trials]
    keep(
        kept,
        "sweep",
        buckets=chosen,
        label=label,
        tried=tried,
        trials=len(trials),
        took_s=took_s,
        ended=text_of(summaries[0].stop_reason),
    )
    print(f"sweep of {took_s:.0f} s and {len(trials)} trials: {label}; {text_of(summaries[0].stop_reason)}")


def report(kept: Path) -> None:
    measured = [entry for entry in entries(kept) if entry["what"] == "set"]
    rps: dict[str, list[float]] = {}
    p95_s: dict[str, list[float]] = {}
    for entry in measured:
        rps.setdefault(entry["buckets"], []).append(entry["measurement"]["throughput_rps"]["value"])
        p95_s.setdefault(entry["buckets"], []).append(entry["measurement"]["latency_s"]["p95"]["value"])
    rounds = min(map(len, rps.values()))
    truth = {buckets: statistics.median(values) for buckets, values in rps.items()}
    best = max((buckets for buckets in truth if buckets != AUTO_BUCKETS), key=lambda buckets: truth[buckets])
    print(
        f"{rounds} rounds; rows/s and p95, medians over the rounds; gain over one queue: median [least, most] of the rounds"
    )
    for buckets in sorted(truth, key=lambda buckets: -truth[buckets]):
        gains = [rps[buckets][at] / rps[NO_BUCKETS][at] for at in range(rounds)]
        waits = [p95_s[buckets][at] / p95_s[NO_BUCKETS][at] for at in range(rounds)]
        print(
            f"{buckets:22} {truth[buckets]:6.1f}/s  p95 {statistics.median(p95_s[buckets]) * 1e3:4.0f} ms  "
            f"x{statistics.median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] rows/s at "
            f"x{statistics.median(waits):.2f} the p95  {1 - truth[buckets] / truth[best]:6.1%} below the best"
        )
    for entry in entries(kept):
        if entry["what"] == "sweep":
            lost = 1 - truth[entry["buckets"]] / truth[best] if entry["buckets"] in truth else math.nan
            print(
                f"sweep of {entry['took_s']:.0f} s, {entry['trials']} trials: {entry['buckets'] or entry['label']}, {lost:.1%} below the best"
            )
    print(f"between rounds of one set (standard deviation of logarithms): {_spread(rps):.1%}")


def _spread(rps: dict[str, list[float]]) -> float:
    squares = [np.var(np.log(values), ddof=1) for values in rps.values() if len(values) > 1]
    return math.sqrt(float(np.mean(squares))) if squares else math.nan


def foretell(kept: Path) -> None:
    scenario = read_scenario(SCENARIO)
    by_what: dict[str, list[tuple[str, Configuration, Measurement]]] = {}
    for entry in entries(kept):
        if "measurement" in entry:
            asked, measured = (
                Configuration.from_dict(entry["configuration"]),
                from_plain(Measurement, entry["measurement"]),
            )
            by_what.setdefault(entry["what"], []).append((entry["buckets"], asked, measured))
    twin = calibrate([observation_of(asked, measured, scenario) for _, asked, measured in by_what["probe"]])
    print(f"{accuracy_text(twin)}; {twin.best_fit.length}")
    off: dict[str, list[float]] = {"p95": [], "throughput": []}
    for buckets, asked, measured in by_what.get("tried", []):
        expected = twin.predict(*_asked(scenario, asked, measured), only_best=True)
        ours = {"p95": expected.latency("p95").value, "throughput": expected.throughput.value}
        theirs = {"p95": measured.latency_s["p95"].value, "throughput": measured.throughput_rps.value}
        for name, errors in off.items():
            errors.append(ours[name] / theirs[name] - 1.0)
        load = (
            f"{measured.offered_rps:.0f}/s"
            if measured.concurrency is None
            else f"{measured.concurrency} clients"
        )
        print(
            f"{buckets:22} {load:10}  p95 {theirs['p95'] * 1e3:4.0f} ms, foretold {ours['p95'] * 1e3:4.0f} "
            f"({off['p95'][-1]:+.1%})  {theirs['throughput']:6.1f}/s, foretold {ours['throughput']:6.1f} "
            f"({off['throughput'][-1]:+.1%})"
        )
    for name, errors in off.items():
        print(f"{name}: median error {np.median(np.abs(errors)):.1%}, worst {np.max(np.abs(errors)):.1%}")
    _foretell_sets(twin, scenario, [entry for entry in by_what.get("set", []) if entry[0] != AUTO_BUCKETS])


def _foretell_sets(
    twin: Twin, scenario: Scenario, measured_sets: list[tuple[str, Configuration, Measurement]]
) -> None:
    pairs = []
    for buckets in dict.fromkeys(entry[0] for entry in measured_sets):
        rounds = [(asked, measured) for name, asked, measured in measured_sets if name == buckets]
        ours = twin.predict(*_asked(scenario, *rounds[0]), only_best=True).throughput.value
        pairs.append((ours, statistics.median(measured.throughput_rps.value for _, measured in rounds)))
    if pairs:
        errors = [abs(ours / theirs - 1.0) for ours, theirs in pairs]
        best = max(theirs for _, theirs in pairs)
        ranks = spearmanr(*zip(*pairs, strict=True)).statistic
        print(
            f"throughput of {len(pairs)} sets: median error {np.median(errors):.1%}, worst {max(errors):.1%}, rank correlation "
            f"{ranks:.2f}; the set foretold as best is {1 - max(pairs)[1] / best:.1%} below the best"
        )


def _asked(scenario: Scenario, asked: Configuration, measured: Measurement) -> tuple[Batcher, Traffic]:
    rate_rps = None if measured.concurrency else measured.offered_rps
    return batcher_of(asked), traffic_of(scenario, rate_rps=rate_rps, concurrency=measured.concurrency)


def keep(kept: Path, what: str, **values: Any) -> None:
    with kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "at": time.strftime("%FT%TZ", time.gmtime()), **values}) + "\n")


def entries(kept: Path) -> list[dict[str, Any]]:
    if not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["measure", "sweep", "probes", "report", "twin"])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    commands = {
        "measure": measure_round,
        "sweep": run_sweep,
        "probes": measure_probes,
        "report": report,
        "twin": foretell,
    }
    commands[asked.what](asked.out)


if __name__ == "__main__":
    main()
