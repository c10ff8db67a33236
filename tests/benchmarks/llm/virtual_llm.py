"""Sweeps of the emulated language model in virtual time, against its exact capacity.

    python -m tests.benchmarks.llm.virtual_llm [--sweeps 20] [--budget 90] [--slower 0.0]

The server's own scheduler steps on a clock that costs nothing, so no host disturbs it; `--slower` is the standard
deviation of the logarithm of a whole run's step times. Prints, of each sweep, what it recommends and states, the exact
capacity of that and of the best configuration, and how often memory ran out. The bar: the exact capacity of what is
recommended within 5 % of the best in 18 of 20, and the stated one within 5 % of its own; out of memory at most twice.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.load.fleet import LiveAggregate, LoadJob
from batchtune.load.samples import NEVER_NS, Samples, Status, Streams
from batchtune.scenario.arrivals import ClosedLoop, Schedule
from batchtune.scenario.prompts import build_prompts
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.server.emulated_llm import OUT_OF_MEMORY, Device, Scheduler, Sequence
from batchtune.target.endpoint import Endpoint
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.bench import Bench
from batchtune.tune.search.contenders import Contenders
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import out_of_memory
from tests.benchmarks.llm.served import emulated_llm
from tests.tune.tune_fakes import FakeClock, FakeTarget

SCENARIO = "scenarios/emulated-llm.yaml"
APPLY_S = 1.5
"""What a restart of the emulated server takes."""
EXACT_REQUESTS = 12_000
DEVICE = Device()


def limits_of(configuration: Configuration) -> dict[str, int]:
    values = configuration.server_values()
    return {name: int(values[name]) for name in ("max_num_seqs", "max_num_batched_tokens")}


def kv_tokens(configuration: Configuration) -> int:
    return DEVICE.kv_tokens(**limits_of(configuration))


@dataclass(frozen=True, slots=True)
class Played:
    """What became of each request, in seconds from the start; inf: it had not ended when the load was given up."""

    due_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    gap_p99_s: NDArray[np.float64]
    gaps_s: NDArray[np.float64]
    gap_ended_s: NDArray[np.float64]


def play(
    configuration: Configuration,
    arrivals: NDArray[np.float64] | ClosedLoop,
    lengths: list[tuple[int, int]],
    *,
    slower: float = 1.0,
    until_s: float = math.inf,
) -> Played:
    """Arrivals at these times, or a closed loop; the i-th request has the i-th lengths in turn."""
    steps = Scheduler(DEVICE, **limits_of(configuration))
    to_come: deque[float] | list[float]
    loop = arrivals if isinstance(arrivals, ClosedLoop) else None
    to_come = [0.0] * loop.concurrency if loop else deque(arrivals.tolist())  # type: ignore[union-attr]
    due: list[float] = []
    instants: list[list[float]] = []
    now_s = 0.0

    def arrive(due_s: float) -> None:
        prompt, output = lengths[len(due) % len(lengths)]
        steps.add(Sequence(prompt=prompt, output=output, owner=len(due)))
        due.append(due_s)
        instants.append([])

    while now_s < until_s:
        while to_come and to_come[0] <= now_s and (loop is None or to_come[0] < loop.duration_s):
            arrive(heapq.heappop(to_come) if loop else to_come.popleft())  # type: ignore[arg-type, union-attr]
        if steps.is_idle:
            if not to_come or (loop and to_come[0] >= loop.duration_s):
                break
            now_s = to_come[0]
            continue
        seconds, answered = steps.step()
        now_s += seconds * slower
        for sequence in answered:
            instants[sequence.owner].append(now_s)
            if loop and sequence.produced >= sequence.output:
                heapq.heappush(to_come, now_s)  # type: ignore[arg-type]
    wanted = [lengths[number % len(lengths)][1] for number in range(len(due))]
    ended = zip(instants, wanted, strict=True)
    gaps = [np.diff(own) for own in instants]
    return Played(
        due_s=np.array(due),
        first_s=np.array([own[0] if own else math.inf for own in instants]),
        done_s=np.array([own[-1] if len(own) == output else math.inf for own, output in ended]),
        gap_p99_s=np.array([_p99_s(own) for own in gaps]),
        gaps_s=np.concatenate([*gaps, np.zeros(0)]),
        gap_ended_s=np.concatenate([*(np.array(own[1:]) for own in instants), np.zeros(0)]),
    )


def _p99_s(gaps_s: NDArray[np.float64]) -> float:
    return float(np.sort(gaps_s)[math.ceil(0.99 * len(gaps_s)) - 1]) if len(gaps_s) else 0.0


class VirtualTarget(FakeTarget):
    """Takes a restart for each configuration, and ends at its start where that does not fit.

    A real server stands behind its address for the one request that is asked before any load.
    """

    port = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(model_name="emulated", rest_port=self.port)

    def apply(self, configuration: Configuration) -> float | None:
        if configuration == self.in_force and self.running:
            return super().apply(configuration)
        self.running = False
        fits = kv_tokens(configuration) >= 1
        words = f"the server exited with 1; its last words:\n  {OUT_OF_MEMORY}"
        self.refuses = lambda _configuration: None if fits else words
        self.clock.sleep(APPLY_S)
        return super().apply(configuration)


class VirtualFleet:
    """Plays each job on the scheduler of what is in force."""

    def __init__(self, target: VirtualTarget, *, seed: int, slower_sd: float) -> None:
        self._target, self._chance, self._slower_sd = target, np.random.default_rng(seed), slower_sd

    def retire(self, _name: str, _why: str) -> bool:
        return False

    def run(
        self,
        job: LoadJob,
        *,
        on_progress: Callable[[LiveAggregate], None] | None = None,
        should_stop: Callable[[LiveAggregate], bool] | None = None,
    ) -> Samples:
        del on_progress
        assert self._target.in_force is not None
        arrivals = job.arrivals
        closed = isinstance(arrivals, ClosedLoop)
        drain_s = job.timeout_or_default_s if job.drain_s is None else job.drain_s
        gives_up_s = arrivals.duration_s + drain_s
        played = play(
            self._target.in_force,
            arrivals if closed else arrivals.due_ns / 1e9,
            lengths_of(job.requests.bodies),
            slower=math.exp(self._chance.normal(0.0, self._slower_sd)),
            until_s=gives_up_s,
        )
        stopped_s = arrivals.duration_s
        if should_stop is not None:
            late_s = job.overdue_after_s or job.timeout_or_default_s
            for now_s in np.arange(0.25, arrivals.duration_s, 0.25):
                if should_stop(_live(played, float(now_s), late_s)):
                    stopped_s, gives_up_s = float(now_s), float(now_s) + 1.0
                    break
        stopped = stopped_s < arrivals.duration_s
        sent = played.due_s < (stopped_s if stopped else math.inf)
        done_s = played.done_s[sent]
        done = done_s <= gives_up_s
        wall_s = max(gives_up_s if not done.all() else float(done_s.max(initial=0.0)), stopped_s)
        self._target.clock.sleep(wall_s)
        due_ns, ones = _ns(played.due_s[sent]), np.ones(int(sent.sum()), dtype=np.int64)
        ended = played.gap_ended_s <= wall_s
        return Samples(
            due_ns=due_ns,
            sent_ns=due_ns,
            first_byte_ns=_ns(np.minimum(played.first_s[sent], 1e6)),
            done_ns=np.where(done, _ns(np.where(done, done_s, 0.0)), NEVER_NS),
            connection_wait_ns=0 * ones,
            status=np.where(done, Status.OK, Status.UNFINISHED).astype(np.uint8),
            rows=ones.astype(np.int32),
            started_ns=0,
            wall_s=wall_s,
            client_cpu_s=1e-5 * len(ones),
            client_cores=1,
            concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
            offered_rps=arrivals.offered_rps if isinstance(arrivals, Schedule) else None,
            stopped_early=stopped,
            streams=Streams(
                prompt_tokens=ones,
                output_tokens=ones,
                gap_p99_ns=_ns(played.gap_p99_s[sent]),
                gaps_ns=_ns(played.gaps_s[ended]),
                gap_ended_ns=_ns(played.gap_ended_s[ended]),
            ),
        )


def _live(played: Played, now_s: float, late_s: float) -> LiveAggregate:
    sent = played.due_s <= now_s
    done = sent & (played.done_s <= now_s)
    waited_s = np.minimum(played.first_s, now_s)[sent] - played.due_s[sent]
    late = waited_s > late_s
    return LiveAggregate(
        elapsed_s=now_s,
        sent=int(sent.sum()),
        done=int(done.sum()),
        errors=0,
        late=int((late & done[sent]).sum()),
        throughput_rps=0.0,
        p50_s=0.0,
        p95_s=0.0,
        in_flight=int(sent.sum() - done.sum()),
        overdue=int((late & ~done[sent]).sum()),
    )


@cache
def lengths_of(bodies: tuple[bytes, ...]) -> list[tuple[int, int]]:
    documents = [orjson.loads(body) for body in bodies]
    return [(len(each["messages"][0]["content"].split()), each["max_tokens"]) for each in documents]


def _ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.round(seconds * 1e9).astype(np.int64)


def exact_rps(
    configuration: Configuration, scenario: Scenario, *, requests: int = EXACT_REQUESTS, within: float = 1.01
) -> float:
    """The highest rate of Poisson arrivals at which a long run keeps the limits, within this factor."""
    if kv_tokens(configuration) < 1:
        return 0.0
    lengths = lengths_of(build_prompts(scenario.request, model_name="m").bodies)
    rng = np.random.default_rng(7)
    gaps, order = rng.exponential(1.0, requests).cumsum(), rng.integers(0, len(lengths), requests)
    drawn = [lengths[which] for which in order]
    low, high = 20.0, 640.0
    slo = scenario.slo
    while high > within * low:
        rate = math.sqrt(low * high)
        played = play(configuration, gaps / rate, drawn, until_s=gaps[-1] / rate + 1.0)
        after = played.due_s > 0.1 * played.due_s[-1]
        ttft_s = np.quantile((played.first_s - played.due_s)[after], 0.95, method="higher")
        itl_s = np.quantile(played.gaps_s, 0.99)
        kept = ttft_s <= (slo.ttft_p95_s or math.inf) and itl_s <= (slo.itl_p99_s or math.inf)
        low, high = (rate, high) if kept else (low, rate)
    return low


def sweep(scenario: Scenario, *, seed: int, slower_sd: float) -> tuple[Recommendation, int, float]:
    """The answer, how often memory ran out, and seconds."""
    load = scenario.load.model_copy(update={"seed": 1000 + seed})
    scenario = scenario.model_copy(update={"load": load})
    clock = FakeClock()
    target = VirtualTarget(clock, apply_s=0.05)
    fleet = VirtualFleet(target, seed=seed, slower_sd=slower_sd)
    bench = Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, now_s=clock, sleep=clock.sleep)
    trials = [done.trial for done in sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=clock)]
    ran_out = sum(out_of_memory(trial) is not None for trial in trials)
    return recommend(trials, scenario=scenario, search=None), ran_out, clock() - FakeClock.now_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--slower", type=float, default=0.0)
    options = parser.parse_args()
    with emulated_llm() as VirtualTarget.port:
        judge(options)


def judge(options: argparse.Namespace) -> None:
    scenario = read_scenario(SCENARIO, overrides=[f"search.budget.time={options.budget:g}s"])
    space = [contender.configuration for contender in Contenders(scenario).whole(10_000)]
    coarse = {one: exact_rps(one, scenario, requests=800, within=1.1) for one in space}
    exact = {one: exact_rps(one, scenario) for one in sorted(coarse, key=coarse.__getitem__)[-4:]}
    best = max(exact, key=exact.__getitem__)
    ran_out = sum(rate == 0 for rate in coarse.values())
    print(f"best: {best.label()}, {exact[best]:.0f}/s exactly; {ran_out} of {len(coarse)} run out of memory")
    held = np.zeros(3, int)
    for seed in range(options.sweeps):
        answer, ran_out, seconds = sweep(scenario, seed=seed, slower_sd=options.slower)
        chosen, stated = answer.configuration, 0.0 if answer.capacity is None else answer.capacity.likely_rps
        if chosen not in exact:
            exact[chosen] = exact_rps(chosen, scenario)
        share, own = exact[chosen] / exact[best], stated / exact[chosen]
        held += np.array([share >= 0.95, abs(own - 1.0) <= 0.05, ran_out <= 2])
        print(
            f"{seed:2}: {chosen.label()}: {stated:.0f}/s stated, {own:.1%} of what it can do, which is {share:.1%} of the "
            f"best, {'' if answer.established else 'not '}established, out of memory {ran_out} ×, {seconds:.0f} s",
            flush=True,
        )
    words = "within 5 % of the best", "stated within 5 % of their own", "out of memory twice at most"
    print(f"of {options.sweeps}: {', '.join(map('{} {}'.format, held, words))}")


if __name__ == "__main__":
    main()
