"""How does a calibrated twin lead the search, and when is it not believed?

Short probes calibrate the twin. It says whether batching can pay at all; if so, the usual answers (no batching, the
defaults, the rule, TF Serving's guide) are measured, which puts the twin to the test, and its candidates go through
the one Optuna study, of which at least one proposal in five is the sampler's own. The best few then race side by side.
The trust gate decides after every block whether the twin leads, shares or is off.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.cpus import usable_threads
from batchtune.tune import policy
from batchtune.tune.evidence.rates import locate, rungs_of
from batchtune.tune.guided.asks import ask_of, at_hoped_rate, at_one_rate, is_affordable, point_of
from batchtune.tune.guided.calibration import calibration_probes, searched_sizes
from batchtune.tune.guided.crowd import whole_crowd
from batchtune.tune.guided.proposals import proposal_of, proposals, proposals_at_once, sampler_of
from batchtune.tune.guided.race import Survivor, race
from batchtune.tune.guided.state import Insight
from batchtune.tune.strategies.optuna_sampler import Sampler
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import (
    reference_asks,
    reference_configurations,
    rule_ask,
    rule_probes,
    rule_without_waiting,
)
from batchtune.tune.strategies.side_by_side import in_step
from batchtune.tune.trials.pace import full_rows
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Ask, Source, Trial


def guided_strategy(outlook: Outlook, findings: SearchSummary) -> Strategy:
    """Calibrate, measure the usual answers, propose, race."""
    yield from rule_probes(outlook)
    yield from calibration_probes(outlook)
    insight = Insight(outlook, findings)
    outlook.at_end(insight.conclude)
    yield from _with_expectations(_search(outlook, insight, findings), insight)


def _with_expectations(asking: Strategy, insight: Insight) -> Strategy:
    """The same asks, each with what is expected of it while the twin has a say."""
    try:
        ask = next(asking)
        while True:
            ask = asking.send((yield replace(ask, expected=_expectation(insight, ask.configuration))))
    except StopIteration:
        return
    finally:
        asking.close()


def _expectation(insight: Insight, configuration: Configuration) -> str:
    at = insight.place(configuration) if insight.predicts else None
    return "" if at is None or insight.hopeless(at) else insight.words(at)


def _search(outlook: Outlook, insight: Insight, findings: SearchSummary) -> Strategy:
    """The usual answers, proposals and a race, or what of them the twin and the time leave to do."""
    if insight.cannot_pay():
        yield from _without_search(outlook, insight)
    elif outlook.remaining_s() < policy.TIGHT_RUNS * _usual_run_s(outlook) / max(len(outlook.nodes), 1):
        yield from _in_haste(outlook, insight)
        findings.stop_reason = "there was time for few trials: no race was run"
    else:
        yield from _references(outlook, insight)
        yield from _seeds(outlook, insight)
        findings.stop_reason = yield from proposals(outlook, insight)
        insight.look(test=False)
        ended = yield from _race(outlook, insight)
        findings.stop_reason = f"{findings.stop_reason}; race: {ended}"


def _without_search(outlook: Outlook, insight: Insight) -> Strategy:
    """No batching, the defaults and the best that the twin sees with batching, for the confirmation to compare."""
    yield from _references(outlook, insight)
    best = max(insight.batched(), key=insight.expected)
    if not insight.is_measured(insight.cells[best].configuration) and outlook.may_propose():
        why = "best with batching by the twin's account"
        yield from _located(outlook, insight, best, "twin", why, runs=policy.REFERENCE_RUNS)


def _in_haste(outlook: Outlook, insight: Insight) -> Strategy:
    """What the twin proposes first, no batching, more proposals, the defaults, and what else there is time for."""
    sampler = sampler_of(outlook)
    if outlook.nodes:
        yield from _in_haste_at_once(outlook, insight, sampler)
        return
    turns = (
        [False] * policy.PROPOSALS_BLOCK
        if insight.trust == "off"
        else [True] * (policy.PROPOSALS_BLOCK - 1) + [False]
    )
    for turn, is_twins in enumerate(turns):
        reference = policy.HASTY_REFERENCES.get(turn)
        if reference is not None and outlook.may_propose():
            yield from _references(outlook, insight, only=reference, runs=1)
        if not outlook.may_propose():
            return
        ask = proposal_of(outlook, insight, sampler, is_twins=is_twins, explores=False)
        if ask is None:
            return
        yield ask
        insight.look(test=False)


def _in_haste_at_once(outlook: Outlook, insight: Insight, sampler: Sampler) -> Strategy:
    """The reference points beside the first proposals, then proposals as long as there is time, at most a block."""
    references = [
        _reference(outlook, insight, source, runs=1) for source in reference_configurations(outlook.scenario)
    ]
    at_once = len(outlook.nodes)
    count = max(at_once - len(references), 1)
    made = 0
    while made < policy.PROPOSALS_BLOCK and outlook.may_propose(beside=len(references)):
        asks = proposals_at_once(outlook, insight, sampler, count, explores=False)
        if not asks:
            return
        yield from in_step(outlook, [*references, *map(_lone, asks)])
        insight.look(test=False)
        made, references, count = made + len(asks), [], at_once


def _lone(ask: Ask) -> Strategy:
    yield ask


def _references(
    outlook: Outlook, insight: Insight, only: Source | None = None, *, runs: int | None = None
) -> Strategy:
    sources = reference_configurations(outlook.scenario)
    asked = [_reference(outlook, insight, source, runs=runs) for source in sources if only in (None, source)]
    yield from in_step(outlook, asked)


def _reference(outlook: Outlook, insight: Insight, source: Source, *, runs: int | None) -> Strategy:
    """One reference point, where it is among the cells and there is time for it."""
    ask = reference_asks(outlook)[source]
    at = insight.place(ask.configuration)
    if at is not None and is_affordable(outlook, ask.configuration):
        runs = runs or policy.REFERENCE_RUNS
        yield from _located(outlook, insight, at, source, ask.reason, runs=runs)
        insight.believe()


def _located(
    outlook: Outlook, insight: Insight, at: int, source: Source, reason: str, *, runs: int
) -> Strategy:
    """One trial; of a capacity a few rates around where the twin expects it, until they are near each other."""
    scenario = outlook.scenario
    ask = ask_of(insight, at, source, reason)
    if scenario.objective != "capacity" or not insight.predicts or insight.hopeless(at):
        yield ask
        return
    rate_rps = policy.RATE_SHARE * min(math.exp(insight.expected(at)), insight.most_rps(at))
    near = insight.expected(at) > float(insight.believed.expected.max()) - policy.FAR_BEHIND
    runs_made: list[Trial] = []
    for _ in range(runs):
        runs_made.append((yield at_one_rate(outlook, ask, rate_rps)))
        located = locate(rungs_of([trial for trial in runs_made if trial.state == "complete"], scenario.slo))
        if located is None or (located.bracketed and located.sd <= policy.REFERENCE_SD[near]):
            return
        step = 0.0 if located.bracketed else policy.REFERENCE_STEP[near]
        rate_rps = located.crossing_rps * (1.0 + step if located.held_rps > 0.0 else 1.0 - step)


def _seeds(outlook: Outlook, insight: Insight) -> Strategy:
    """The rule's answer, its size without waiting, where TF Serving's guide begins, all clients in one batch; also when
    the twin has no hope for them, as they put it to the test."""
    asks: list[Ask | None] = [rule_ask(outlook)]
    unwaiting = rule_without_waiting(outlook)
    if unwaiting is not None:
        why = "nearest to the rule's size, without waiting"
        asks.append(Ask(configuration=unwaiting[0], source="rule", reason=why, point=unwaiting[1]))
    asks += [_guides_answer(outlook), whole_crowd(outlook, insight.twin)]
    seeds: dict[Configuration, Ask] = {}
    for ask in filter(None, asks):
        seeds.setdefault(ask.configuration, ask)
    asking = [
        _seed(outlook, insight, ask, beside=turn if outlook.nodes else 0)
        for turn, ask in enumerate(seeds.values())
    ]
    yield from in_step(outlook, asking)


def _seed(outlook: Outlook, insight: Insight, ask: Ask, *, beside: int) -> Strategy:
    if insight.is_measured(ask.configuration) or not outlook.may_propose(beside=beside):
        return
    if is_affordable(outlook, ask.configuration):
        yield at_hoped_rate(outlook, insight, ask)


def _guides_answer(outlook: Outlook) -> Ask | None:
    """As many threads as cores, large batches, no waiting: where TF Serving's guide begins on a CPU."""
    wanted = {
        "num_batch_threads": usable_threads(outlook.scenario.target.cpus),
        "max_batch_size": searched_sizes(outlook.scenario)[-1],
        "batch_timeout_micros": 0,
    }
    point = outlook.space.nearest(wanted)
    configuration = outlook.space.configuration(point)
    if configuration is None:
        return None
    why = "nearest to where TF Serving's guide begins: threads = cores, large batches, no waiting"
    return Ask(configuration=configuration, source="guide", reason=why, point=point)


def _usual_run_s(outlook: Outlook) -> float:
    """What a proposal takes: of a capacity one rate is tried, for less long than a fresh run."""
    if outlook.scenario.objective != "capacity":
        return outlook.fresh_run_s()
    recent = [trial.seconds for trial in outlook.trials if trial.asked_rate_rps is not None]
    usual_s = min(outlook.scenario.load.duration_s, policy.RUNG_S) + 0.5
    batches = policy.WARM_UP_BATCHES + policy.PROBE_BATCHES + 2  # two are under way when the sending ends
    return max(usual_s, float(np.median(recent)) if recent else batches * _full_batch_s(outlook))


def _full_batch_s(outlook: Outlook) -> float:
    largest = searched_sizes(outlook.scenario)[-1]
    return outlook.pace.batch_s(full_rows(outlook.scenario, largest, outlook.pace))


def _race(outlook: Outlook, insight: Insight) -> Generator[Ask, Trial, str]:
    """The leader and the few that may be better, side by side; returns why it ended."""
    believed = [insight.leader(), *insight.believed.contenders(policy.SURVIVORS)]
    simplest = [insight.simplest(at) for at in believed if not insight.hopeless(at)]
    # The first one's rival without waiting races in any case: a timeout is fitted to one number of clients.
    # So does the one with fewer threads: with more than the device needs, a closed loop falls into rhythms by chance.
    rivals = [rival(at) for at in simplest[:1] for rival in (insight.unwaiting, insight.fewest_threads)]
    racing = dict.fromkeys([*simplest[:1], *rivals, *simplest[1:]])
    survivors = [
        Survivor(configuration=insight.cells[at].configuration, point=point_of(insight, at))
        for at in list(racing)[: policy.SURVIVORS]
    ]
    is_capacity = outlook.scenario.objective == "capacity"
    if not survivors or (is_capacity and not insight.predicts and not insight.claim_rps()):
        return "nothing keeps the SLO"
    rate_rps = None
    if is_capacity:
        hoped_rps = max(
            math.exp(insight.expected(insight.leader())), insight.claim_rps(), insight.nearly_held_rps()
        )
        most_rps = max(insight.most_rps(at) for at in racing)
        rate_rps = policy.RACE_START_SHARE * min(hoped_rps, most_rps)
    return (yield from race(outlook, survivors, rate_rps=rate_rps))
