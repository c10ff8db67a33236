"""The race: bounds that may be looked at after every block, and the ladder of rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.tune import policy
from batchtune.tune.evidence.rates import Rung, locate
from batchtune.tune.guided.race import Survivor, as_good, dropped, mixture_half_width, race
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Trial
from tests.tune.tune_fakes import planted, scenario_of

SIZES = (4, 8, 16, 32)


def configuration(size: int) -> Configuration:
    return Configuration(batching=from_dict({"max_batch_size": size}))


def survivors(*sizes: int) -> list[Survivor]:
    return [Survivor(configuration=configuration(size), point=None) for size in sizes]


class Outlook:
    """A ledger with time without end; `answer` measures."""

    def __init__(self, scenario, seconds=float("inf")) -> None:
        self.scenario, self.space, self.trials = scenario, Space(scenario), []
        self.seconds = seconds
        self.pace = Pace()
        self.nodes = ()

    def remaining_s(self) -> float:
        return self.seconds - 2.0 * len(self.trials)

    def left_s(self) -> float:
        return self.remaining_s()

    def fresh_run_s(self) -> float:
        return 2.0

    def may_propose(self, seconds=None, *, beside=0) -> bool:
        return True

    def ahead(self, asks) -> None:
        pass


def run_race(outlook, racing, answer, *, rate_rps=None) -> tuple[list[Trial], str]:
    asking = race(outlook, racing, rate_rps=rate_rps)
    try:
        ask = next(asking)
        while True:
            trial = answer(ask, len(outlook.trials) + 1)
            outlook.trials.append(trial)
            ask = asking.send(trial)
    except StopIteration as end:
        return outlook.trials, end.value


def throughput_answer(truth: dict[int, float], noise: float, seed: int):
    rng = np.random.default_rng(seed)

    def answer(ask, number):
        size = ask.configuration.batching.max_batch_size
        value = truth[size] * float(np.exp(noise * rng.standard_normal()))
        return planted(
            number,
            throughput=value,
            p95_s=0.01,
            batching={"max_batch_size": size},
            source="race",
            block=ask.block,
        )

    return answer


def test_the_share_of_wrong_drops_is_read_when_it_is_asked_for(monkeypatch):
    merits = {"best": [0.0, 0.01, -0.01], "behind": [-0.07, -0.08, -0.06]}
    assert dropped(merits, prior_sd=0.03) == set()
    monkeypatch.setattr(policy, "RACE_ALPHA", 0.9)
    assert dropped(merits, prior_sd=0.03) == {"behind"}


def test_the_bound_holds_at_all_blocks_at_once():
    """Paths of 60 differences that ever leave the bound: policy.RACE_ALPHA at most, give or take three standard errors of 2000."""
    rng = np.random.default_rng(1)
    means = np.cumsum(rng.standard_normal((2000, 60)), axis=1) / np.arange(1, 61)
    bound = np.array([mixture_half_width(blocks, 1.0, policy.RACE_ALPHA) for blocks in range(1, 61)])
    left = np.mean((np.abs(means) > bound).any(axis=1))
    assert left <= policy.RACE_ALPHA + 3.0 * np.sqrt(policy.RACE_ALPHA * (1 - policy.RACE_ALPHA) / 2000)
    assert left > 0.0


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08])
def test_the_best_survivor_is_dropped_with_probability_alpha_at_most(noise):
    """400 races of four equals: the share in which a given one is dropped is at most policy.RACE_ALPHA.

    Allowed: three standard errors above it. The noise between runs is assumed to be 3 %, and may be more.
    """
    rng = np.random.default_rng(int(1000 * noise))
    lost = 0
    for _ in range(400):
        values = {name: list(noise * rng.standard_normal(policy.RACE_BLOCKS_MAX)) for name in range(4)}
        lost += any(
            0 in dropped({name: seen[:blocks] for name, seen in values.items()}, prior_sd=0.03)
            for blocks in range(1, policy.RACE_BLOCKS_MAX + 1)
        )
    assert lost / 400 <= policy.RACE_ALPHA + 3.0 * np.sqrt(policy.RACE_ALPHA * (1 - policy.RACE_ALPHA) / 400)


def test_a_survivor_far_behind_is_dropped_at_the_first_look():
    merits = {"best": [0.0, 0.01, -0.01], "near": [0.0, -0.01, 0.02], "far": [-0.3, -0.28, -0.31]}
    assert dropped(merits, prior_sd=0.03) == {"far"}
    assert dropped({name: seen[:2] for name, seen in merits.items()}, prior_sd=0.03) == set()


def test_survivors_are_as_good_only_when_no_large_gap_is_likely():
    assert as_good({"a": [0.0, 0.01, 0.0], "b": [-0.01, 0.0, 0.0]}, prior_sd=0.02)
    assert not as_good({"a": [0.0, 0.3, 0.0], "b": [0.25, 0.0, 0.1]}, prior_sd=0.02)


def test_blocks_run_every_survivor_once_and_end_when_they_are_as_good():
    outlook = Outlook(scenario_of())
    answer = throughput_answer(dict.fromkeys(SIZES, 1000.0), 0.01, seed=1)
    trials, reason = run_race(outlook, survivors(*SIZES), answer)
    assert reason == "none of 4 survivors beats the leader by more than 5 %"
    blocks = {one.block for one in trials}
    for block in blocks:
        assert len({one.configuration for one in trials if one.block == block}) == len(SIZES)


def test_those_that_are_far_behind_are_not_run_on():
    outlook = Outlook(scenario_of())
    answer = throughput_answer({4: 700.0, 8: 1000.0, 16: 980.0, 32: 690.0}, 0.05, seed=5)
    trials, _ = run_race(outlook, survivors(*SIZES), answer)
    late = {one.configuration for one in trials if one.block > 3}
    assert late <= {configuration(8), configuration(16)}


def test_the_race_stops_when_the_time_is_spent():
    outlook = Outlook(scenario_of(), seconds=10.0)
    answer = throughput_answer(dict.fromkeys(SIZES, 1000.0), 0.2, seed=3)
    trials, reason = run_race(outlook, survivors(*SIZES), answer)
    assert len(trials) == 4
    assert "time" in reason


def capacity_answer(capacities: dict[int, float], asked: list):
    """p95 grows with the tenth power of the rate: 50 ms at the capacity."""

    def answer(ask, number):
        asked.append(ask)
        size = ask.configuration.batching.max_batch_size
        p95_s = 0.05 * min((ask.rate_rps / capacities[size]) ** 10, 20.0)
        trial = planted(
            number,
            throughput=ask.rate_rps,
            p95_s=p95_s,
            batching={"max_batch_size": size},
            source="race",
            block=ask.block,
        )
        return replace(trial, asked_rate_rps=ask.rate_rps)

    return answer


def test_on_the_ladder_all_run_at_one_rate_and_only_a_second_miss_drops():
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    asked: list = []
    outlook = Outlook(scenario)
    trials, reason = run_race(
        outlook,
        survivors(4, 8, 16),
        capacity_answer({4: 900.0, 8: 1000.0, 16: 1150.0}, asked),
        rate_rps=950.0,
    )
    first = [one for one in asked if one.block == 1]
    assert len(first) == 3
    assert {one.rate_rps for one in first} == {950.0}
    again = [one for one in asked if one.block == 2]
    assert [one.configuration for one in again] == [configuration(4)]
    assert reason == "one survivor is left"
    assert trials[-1].configuration == configuration(16)
    assert trials[-1].asked_rate_rps == pytest.approx(1150.0, rel=0.06)


def test_one_miss_drops_nobody_where_the_time_ends_before_the_second():
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    answer = capacity_answer({4: 900.0, 8: 1000.0, 16: 1150.0}, [])
    outlook = Outlook(scenario, seconds=7.5)
    trials, reason = run_race(outlook, survivors(4, 8, 16), answer, rate_rps=950.0)
    assert len(trials) == 3
    assert reason == "the time for the race was spent with 3 survivors"


def test_when_all_miss_the_first_rate_the_ladder_steps_down():
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    asked: list = []
    answer = capacity_answer({4: 900.0, 8: 1000.0}, asked)
    _, reason = run_race(Outlook(scenario), survivors(4, 8), answer, rate_rps=1200.0)
    assert min(one.rate_rps for one in asked) < 1000.0
    assert reason == "one survivor is left"


def test_a_first_rate_that_all_miss_is_tried_once_and_one_above_what_was_held_twice():
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    asked: list = []
    answer = capacity_answer({4: 985.0, 8: 1000.0}, asked)
    run_race(Outlook(scenario), survivors(4, 8), answer, rate_rps=1200.0)
    runs = Counter(round(ask.rate_rps) for ask in asked)
    assert runs[1200] == 2
    held = max(ask.rate_rps for ask in asked if ask.rate_rps <= 985.0)
    above = min(ask.rate_rps for ask in asked if ask.rate_rps > held)
    assert runs[round(above)] >= 3


def test_after_all_missed_by_far_the_ladder_steps_down_by_more():
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    asked: list = []
    answer = capacity_answer({4: 880.0, 8: 900.0}, asked)
    run_race(Outlook(scenario), survivors(4, 8), answer, rate_rps=1500.0)
    second = next(ask.rate_rps for ask in asked if ask.rate_rps < 1500.0)
    assert 1500.0 / 1.25 < second < 1500.0 / 1.15


def test_the_last_survivor_is_led_to_a_rate_that_it_misses():
    """An interval without an upper end says nothing of the capacity."""
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
    asked: list = []
    answer = capacity_answer({4: 700.0, 8: 1400.0}, asked)
    trials, reason = run_race(Outlook(scenario), survivors(4, 8), answer, rate_rps=900.0)
    assert reason == "one survivor is left"
    of_leader = [trial for trial in trials if trial.configuration == configuration(8)]
    assert any(trial.measurement.latency_s["p95"].value > 0.05 for trial in of_leader)
    assert max(trial.asked_rate_rps for trial in of_leader) < 1.15 * 1400.0


def test_a_capacity_lies_between_what_was_held_and_what_was_missed():
    located = locate([Rung(rate_rps=1000.0, margin=-0.2), Rung(rate_rps=1100.0, margin=0.2)])
    assert located.held_rps == 1000.0
    assert located.crossing_rps == pytest.approx(np.sqrt(1000.0 * 1100.0))
    assert located.claim_rps < located.crossing_rps
    only_missed = locate([Rung(rate_rps=1000.0, margin=2.0)])
    assert only_missed.held_rps == 0.0
    assert only_missed.crossing_rps < 700.0
    assert locate([Rung(rate_rps=1000.0, margin=-0.2)]).claim_rps == 1000.0


def test_a_near_miss_tells_where_the_capacity_is_and_a_far_one_only_on_which_side():
    near, far = (locate([Rung(rate_rps=1000.0, margin=margin)]) for margin in (0.1, 1.5))
    assert (near.says, far.says) == ("about", "at most")
    assert 950.0 < near.crossing_rps < 1000.0 == far.bound_rps
    held = locate([Rung(rate_rps=1000.0, margin=-1.5)])
    assert (held.says, held.bound_rps) == ("at least", 1000.0)
    assert locate([]) is None
