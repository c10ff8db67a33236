"""Is the answer of a sweep under a load of its own right: the highest throughput of so many clients, the lowest p95 at a rate?

    python tests/benchmarks/noisy/fixed_load.py --hosts quiet,ordinary,harsh --budgets 45 --seeds 1-4

The devices and hosts of `noisy.py`, in virtual time. Each sweep is the product's own; its answer is judged by what the
simulator gives that configuration without noise, beside the best of a grid, the server's defaults and no batching.

Printed: for each question the share of the best of each seed (E: called established; W: established below 90 %;
BAD: below 95 % of the defaults or of no batching), then a line for each host and budget.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.twin.simulator.simulate import SimulatedTraffic, closed_traffic, summary_of
from tests.benchmarks.noisy.devices import DEVICES, SimulatedDevice
from tests.benchmarks.noisy.hosts import HOSTS
from tests.benchmarks.noisy.product import new_users_scenario, swept
from tests.benchmarks.noisy.truth import DEFAULTS, ERROR_RATIO, NO_BATCHING, grid

WRONG, BAD = 0.9, 0.95
REQUESTS, TURNS = 40_000, 60
"""Of a stream that is due at a rate; of closed loops so many requests of each client, if that is more."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a device: the most requests/s of `clients` in a closed loop, or the lowest p95 at `rate_rps`."""

    device: str
    clients: int = 0
    rate_rps: float = 0.0

    def sections(self) -> dict[str, Any]:
        if self.clients:
            return {"objective": "throughput", "load": {"arrivals": "closed", "concurrency": self.clients}}
        return {"objective": "latency", "load": {"arrivals": "poisson", "rate": self.rate_rps}}

    def text(self) -> str:
        return f"{self.clients} clients" if self.clients else f"{self.rate_rps:,.0f}/s"


QUESTIONS = (
    *(Question(name, clients=clients) for name, clients in {
        "fast": 128, "tiny": 256, "mid": 32, "slow": 32, "linear": 16, "parallel": 64, "steps": 64, "flat": 16, "jitter": 32,
    }.items()),
    *(Question(name, rate_rps=rate) for name, rate in {
        "fast": 5000.0, "tiny": 20_000.0, "mid": 800.0, "slow": 60.0, "steps": 1500.0, "jitter": 800.0,
    }.items()),
)  # fmt: skip


def true_value(device: SimulatedDevice, configuration: Configuration, question: Question) -> float:
    """Requests/s, or 1/p95, without noise; 0.0: not within the limit."""
    batcher, devices = device.batcher(configuration), [device.device()]
    if question.clients:
        requests = max(REQUESTS // 2, TURNS * question.clients)
        traffic, warm_up_s = closed_traffic(question.clients, requests, device.rows), 0.0
    else:
        due_s = np.cumsum(np.random.default_rng(3).exponential(1.0 / question.rate_rps, REQUESTS))
        warm_up_s = 0.05 * float(due_s[-1])
        traffic = SimulatedTraffic(due_s=due_s, rows=device.rows)
    said = summary_of(traffic, batcher, devices, warm_up_s=warm_up_s, quantiles=(0.95,))
    p95_s = float(said.latency_s[0, 0])
    if p95_s > device.p95_ms / 1e3 or said.error_ratio[0] > ERROR_RATIO:
        return 0.0
    return float(said.throughput_rps[0]) if question.clients else 1.0 / p95_s


@cache
def known(question: Question) -> tuple[float, float]:
    """The best of a grid, the defaults and no batching; the better of these two."""
    device = DEVICES[question.device]
    references = [true_value(device, one, question) for one in (DEFAULTS, NO_BATCHING)]
    return max(*references, *(true_value(device, one, question) for one in grid(device))), max(references)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the best, by the truth; whether it lies below a reference; whether it was called established."""

    share: float
    below_reference: bool
    established: bool

    def text(self) -> str:
        mark = "W" if self.established and self.share < WRONG else "E" if self.established else ""
        return f"{self.share:.0%}{mark}{' BAD' if self.below_reference else ''}"


def outcome(question: Question, host: str, budget_s: float, seed: int) -> Outcome:
    device, (best, floor) = DEVICES[question.device], known(question)
    scenario = new_users_scenario(device, seed=seed, budget_s=budget_s, **question.sections())
    try:
        recommended = swept(device, HOSTS[host], scenario, key=f" {question.text()}").recommended
    except BatchtuneError as error:
        print(f"  no answer: {question.device}, {host}, seed {seed}: {error.message}")
        return Outcome(0.0, floor > 0.0, established=False)
    value = true_value(device, recommended.configuration, question)
    return Outcome(value / max(best, value), value < BAD * floor, recommended.established)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--budgets", default="45", help="seconds")
    parser.add_argument("--seeds", default="1-4", help="first-last")
    asked = parser.parse_args()
    first, last = map(int, asked.seeds.split("-"))
    budgets_s = [float(word) for word in asked.budgets.split(",")]
    sums: dict[tuple[str, float], list[Outcome]] = defaultdict(list)
    for question, host, budget_s in product(QUESTIONS, asked.hosts.split(","), budgets_s):
        row = [outcome(question, host, budget_s, seed) for seed in range(first, last + 1)]
        sums[host, budget_s] += row
        shares = " ".join(one.text() for one in row)
        print(f"{question.device:9} {question.text():12} {host:9} {budget_s:3.0f} s  {shares}", flush=True)
    for (host, budget_s), outcomes in sums.items():
        share = [one.share for one in outcomes]
        print(
            f"{host}, {budget_s:.0f} s: {len(outcomes)} sweeps, worst {min(share):.0%}; at least 95 % of the best in "
            f"{np.mean(np.array(share) >= BAD):.0%}; below a reference {sum(o.below_reference for o in outcomes)}; "
            f"established {np.mean([o.established for o in outcomes]):.0%}, "
            f"wrongly {sum(o.established and o.share < WRONG for o in outcomes)}"
        )


if __name__ == "__main__":
    main()
