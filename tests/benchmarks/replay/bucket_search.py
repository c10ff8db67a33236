"""Does a sweep find the length boundaries that suit a traffic? On a simulated server, against every set there is.

    python tests/benchmarks/replay/bucket_search.py --from 0 --to 10

Twenty distributions of lengths (log-normal, of two kinds of text, uniform, a long tail), each swept with `length_buckets` of
twenty sets and none, max_batch_size and num_batch_threads fixed, in 60 s of virtual time. A batch takes
`fixed + per element · rows · its longest length`, as a transformer's, on one device; runs differ by 2 % beside what the lengths
drawn for each make of them. `best` is the set with the most requests/s over 40 s, by the same simulator without noise; `loss`
how much less the recommended set gives there, `one queue` what is lost without buckets.

With `--auto 4,6,8` no sweep: what the boundaries lose that the server's `--length_buckets=auto` makes of the first 256
lengths, with so many queues at most: 4, 6, 8 and 12 queues lose 5.0, 4.1, 4.1 and 4.7 % in the mean, 16.5 % at worst with 6.

All twenty: 18 within 5 % of the best; mean loss 1.4 %, worst 9.2 % (one queue: 30 % in the mean, 56 % at worst).
"""

from __future__ import annotations

import argparse
import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import (
    LENGTH_BUCKETS,
    Configuration,
    boundaries_for,
    parse_length_buckets,
    rounded_up,
)
from batchtune.load.fleet import LoadJob
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.spec.scenario import Scenario
from batchtune.server.sessions.bucketed_session import FIRST_REQUESTS
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import sweep
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, _Played, scenario_of

LONGEST = 256
BUDGET_S = 60
TRUE_S = 40.0
CLIENTS = 64
SIZE = 16
TIMEOUT_MICROS = 5000
FIXED_S, PER_ELEMENT_S = 0.002, 4e-6
NOISE = 0.02
SETS = (
    (32,), (64,), (128,), (16, 64), (32, 64), (32, 128), (64, 128), (96, 160), (16, 32, 64), (24, 48, 96),
    (32, 64, 128), (40, 80, 160), (48, 96, 192), (64, 128, 192), (16, 32, 64, 128), (32, 48, 64, 128),
    (32, 64, 128, 192), (16, 32, 48, 64, 96, 128), (20, 40, 60, 80, 120, 160), (32, 64, 96, 128, 160, 192),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Each kind of text with its share, median and the sd of its logarithm; `sigma` 0: uniform up to the median."""

    kinds: tuple[tuple[float, float, float], ...]

    def draw(self, count: int, seed: int) -> NDArray[np.int64]:
        drawn = np.random.default_rng(seed)
        shares = [share for share, _, _ in self.kinds]
        kind = drawn.choice(len(self.kinds), size=count, p=shares)
        lengths = np.empty(count)
        for at, (_, median, sigma) in enumerate(self.kinds):
            mine = kind == at
            normal = drawn.normal(size=count)
            uniform = drawn.uniform(1.0, median, size=count)
            lengths[mine] = (median * np.exp(sigma * normal) if sigma else uniform)[mine]
        return np.clip(np.ceil(lengths), 1, LONGEST).astype(np.int64)


TRAFFICS = (
    *(Lengths(((1.0, median, sigma),)) for median in (16, 40, 80, 128) for sigma in (0.3, 0.7, 1.1)),
    Lengths(((1.0, 128, 0.0),)),
    Lengths(((1.0, 256, 0.0),)),
    Lengths(((0.9, 20, 0.3), (0.1, 200, 0.15))),
    Lengths(((0.5, 24, 0.2), (0.5, 110, 0.2))),
    Lengths(((0.7, 40, 0.2), (0.3, 240, 0.05))),
    Lengths(((0.6, 12, 0.4), (0.3, 60, 0.3), (0.1, 180, 0.2))),
    Lengths(((0.97, 30, 0.4), (0.03, 250, 0.02))),
    Lengths(((0.5, 60, 0.1), (0.5, 70, 0.1))),
)


class BucketFleet(FakeFleet):
    """Requests with lengths of their own, drawn anew for each job."""

    def __init__(self, target: FakeTarget, lengths: Lengths, *, seed: int) -> None:
        super().__init__(target, seed=seed)
        self._lengths = lengths
        self._seed = seed

    def _play(self, job: LoadJob, configuration: Configuration, slower: float) -> _Played:
        drawn = self._lengths.draw(50_000, 1000 * self._seed + len(self.jobs))
        return BucketPlayed(job, configuration, self._target, slower, drawn)


class BucketPlayed(_Played):
    """A queue for each range of lengths; a free thread asks them in turn, as the server's do."""

    def __init__(
        self,
        job: LoadJob,
        configuration: Configuration,
        target: FakeTarget,
        slower: float,
        lengths: NDArray[np.int64],
    ) -> None:
        buckets = dict(configuration.flags).get(LENGTH_BUCKETS, "none")
        self._boundaries = parse_length_buckets(buckets) if configuration.batching else ()
        self._queues: list[deque[int]] = [deque() for _ in range(len(self._boundaries) + 1)]
        self._turn = 0
        self._lengths = lengths.tolist()
        super().__init__(job, configuration, target, slower)

    def _length(self, request: int) -> int:
        return self._lengths[request % len(self._lengths)]

    def _start_batches(self, now_ns: int) -> None:
        while self._queue:
            request = self._queue.popleft()
            self._queues[bisect_left(self._boundaries, self._length(request))].append(request)
        asked = 0
        while self._busy < self._threads and asked < len(self._queues):
            queue = self._queues[self._turn]
            self._turn = (self._turn + 1) % len(self._queues)
            asked += 1
            if not queue:
                continue
            full = len(queue) >= self._limit
            oldest_ns = self._due[queue[0]]
            if not full and now_ns < oldest_ns + self._timeout_ns:
                self._push(oldest_ns + self._timeout_ns, "timer")
                continue
            asked = 0
            batch = [queue.popleft() for _ in range(min(self._limit, len(queue)))]
            longest = max(map(self._length, batch))
            alone_s = (FIXED_S + PER_ELEMENT_S * len(batch) * longest) * self._slower
            took_s = alone_s * (1.0 + self._law.contention * self._busy)  # two at once take twice as long
            self._busy += 1
            self._push(now_ns + round(took_s * 1e9), "finish", batch)
            if self._batched:
                self._count(len(batch), took_s, "full" if full else "timeout")


def scenario(seed: int) -> Scenario:
    return scenario_of(
        load={"arrivals": "closed", "concurrency": CLIENTS, "warm_up": "200ms", "duration": "2s"},
        slo={"p95": "2s"},
        fixed={"max_batch_size": SIZE, "batch_timeout_micros": TIMEOUT_MICROS, "num_batch_threads": 1},
        search={
            "strategy": "guided",
            "budget": {"time": f"{BUDGET_S}s"},
            "seed": seed,
            "space": {LENGTH_BUCKETS: ["none", *map(list, SETS)]},
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one traffic: what the recommended set and one queue lose to the best, and a line of it."""

    loss: float
    text: str


def outcome(traffic: int) -> Outcome:
    lengths = TRAFFICS[traffic]
    asked = scenario(traffic + 1)
    clock = FakeClock()
    target = FakeTarget(clock, law=Law(noise=NOISE))
    fleet = BucketFleet(target, lengths, seed=traffic + 1)
    trials = [finished.trial for finished in sweep(asked, target, fleet, now_s=clock)]
    truth = true_by_set(lengths)
    best = max(truth, key=lambda boundaries: truth[boundaries])
    chosen = recommend(trials, scenario=asked).configuration
    loss, without = 1.0 - true_rps(lengths, chosen) / truth[best], 1.0 - truth[()] / truth[best]
    named = dict(chosen.flags).get(LENGTH_BUCKETS) or chosen.label()
    text = (
        f"{traffic:2}  loss {loss:6.1%}  one queue {without:6.1%}  {len(trials)} trials  "
        f"{named} for {','.join(map(str, best)) or 'none'}  [{lengths.kinds}]"
    )
    return Outcome(loss=loss, text=text)


def automatic_losses(traffic: int, most: list[int]) -> list[float]:
    """What the server's own boundaries lose to the best set, by how many queues they may have."""
    lengths = TRAFFICS[traffic]
    best_rps = max(true_by_set(lengths).values())
    rows = Counter(rounded_up(int(length)) for length in lengths.draw(FIRST_REQUESTS, seed=100 + traffic))
    chosen = [boundaries_for(rows, queues) for queues in most]
    return [1.0 - true_rps(lengths, configuration_of(boundaries)) / best_rps for boundaries in chosen]


def true_by_set(lengths: Lengths) -> dict[tuple[int, ...], float]:
    return {boundaries: true_rps(lengths, configuration_of(boundaries)) for boundaries in ((), *SETS)}


def configuration_of(boundaries: tuple[int, ...]) -> Configuration:
    return scenario(1).configuration({LENGTH_BUCKETS: ",".join(map(str, boundaries))} if boundaries else {})


def true_rps(lengths: Lengths, configuration: Configuration) -> float:
    """Requests/s over a long run, the same lengths for every set."""
    job: Any = SimpleNamespace(
        arrivals=ClosedLoop(concurrency=CLIENTS, duration_s=TRUE_S),
        requests=SimpleNamespace(rows=(1,)),
        drain_s=1.0,
        timeout_or_default_s=10.0,
    )
    played = BucketPlayed(job, configuration, FakeTarget(FakeClock()), 1.0, lengths.draw(50_000, 7))
    return len(played._done) / TRUE_S


def print_losses(losses: Sequence[float], *, of: str) -> None:
    near = sum(loss <= 0.05 for loss in losses)
    print(
        f"{near} of {len(losses)} within 5 % of the best{of}; mean loss {statistics.mean(losses):.1%}, worst "
        f"{max(losses):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="end", type=int, default=len(TRAFFICS))
    parser.add_argument("--auto", type=lambda text: [int(word) for word in text.split(",")], metavar="4,6,8")
    asked = parser.parse_args()
    traffics = range(asked.first, asked.end)
    with ProcessPoolExecutor(2) as pool:
        if not asked.auto:
            losses = []
            for result in pool.map(outcome, traffics):
                losses.append(result.loss)
                print(result.text, flush=True)
            print_losses(losses, of="")
            return
        by_traffic = list(pool.map(partial(automatic_losses, most=asked.auto), traffics))
    for traffic, lost in zip(traffics, by_traffic, strict=True):
        print(f"{traffic:2}  {'  '.join(f'{loss:6.1%}' for loss in lost)}  [{TRAFFICS[traffic].kinds}]")
    for queues, losses in zip(asked.auto, map(list, zip(*by_traffic, strict=True)), strict=True):
        print(f"{queues} queues: ", end="")
        print_losses(losses, of=f" of {len(SETS)} sets")


if __name__ == "__main__":
    main()
