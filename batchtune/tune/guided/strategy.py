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
from typing import Any

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.cpus import usable_threads
from batchtune.scenario.units import percentage
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.evidence.rates import locate, rungs_of
from batchtune.tune.guided.calibration import calibration_probes, searched_sizes
from batchtune.tune.guided.crowd import whole_crowd
from batchtune.tune.guided.race import Survivor, race
from batchtune.tune.guided.state import Insight
from batchtune.tune.strategies.optuna_sampler import Sampler
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import (
    reference_configurations,
    rule_ask,
    rule_probes,
    rule_without_waiting,
)
from batchtune.tune.trials.ask import Ask
from batchtune.tune.trials.pace import full_rows, rung_load, times_of
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Source, Trial

_REASONS: dict[Source, str] = {
    "no_batching": "reference point: batching off",
    "defaults": "reference point: the server's own defaults",
}


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
    elif outlook.remaining_s() < policy.TIGHT_RUNS * _usual_run_s(outlook):
        yield from _in_haste(outlook, insight)
        findings.stop_reason = "there was time for few trials: no race was run"
    else:
        yield from _references(outlook, insight)
        yield from _seeds(outlook, insight)
        findings.stop_reason = yield from _proposals(outlook, insight)
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
    sampler = _sampler(outlook)
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
        ask = _proposal(outlook, insight, sampler, is_twins=is_twins, explores=False)
        if ask is None:
            return
        yield ask
        insight.look(test=False)


def _references(
    outlook: Outlook, insight: Insight, only: Source | None = None, *, runs: int | None = None
) -> Strategy:
    for source, configuration in reference_configurations(outlook.scenario).items():
        at = insight.place(configuration)
        if at is not None and only in (None, source) and _is_affordable(outlook, configuration):
            yield from _located(
                outlook, insight, at, source, _REASONS[source], runs=runs or policy.REFERENCE_RUNS
            )
            insight.believe()


def _located(
    outlook: Outlook, insight: Insight, at: int, source: Source, reason: str, *, runs: int
) -> Strategy:
    """One trial; of a capacity a few rates around where the twin expects it, until they are near each other."""
    scenario = outlook.scenario
    ask = _ask(insight, at, source, reason)
    if scenario.objective != "capacity" or not insight.predicts or insight.hopeless(at):
        yield ask
        return
    rate_rps = policy.RATE_SHARE * min(math.exp(insight.expected(at)), insight.most_rps(at))
    near = insight.expected(at) > float(insight.believed.expected.max()) - policy.FAR_BEHIND
    runs_made: list[Trial] = []
    for _ in range(runs):
        runs_made.append((yield _one_rate(outlook, ask, rate_rps)))
        located = locate(rungs_of([trial for trial in runs_made if trial.state == "complete"], scenario.slo))
        if located is None or (located.bracketed and located.sd <= policy.REFERENCE_SD[near]):
            return
        step = 0.0 if located.bracketed else policy.REFERENCE_STEP[near]
        rate_rps = located.crossing_rps * (1.0 + step if located.held_rps > 0.0 else 1.0 - step)


def _seeds(outlook: Outlook, insight: Insight) -> Strategy:
    """The rule's answer, its size without waiting, where TF Serving's guide begins, all clients in one batch; also when
    the twin has no hope for them, as they put it to the test."""
    asks = [rule_ask(outlook)]
    unwaiting = rule_without_waiting(outlook)
    if unwaiting is not None:
        why = "nearest to the rule's size, without waiting"
        asks.append(Ask(configuration=unwaiting[0], source="rule", reason=why, point=unwaiting[1]))
    asks += [_guides_answer(outlook), whole_crowd(outlook, insight.twin)]
    for ask in asks:
        if ask is None or insight.is_measured(ask.configuration) or not outlook.may_propose():
            continue
        if _is_affordable(outlook, ask.configuration):
            yield _at_rate(outlook, insight, ask)


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


def _proposals(outlook: Outlook, insight: Insight) -> Generator[Ask, Trial, str]:
    """Blocks of the twin's candidates and the sampler's own; returns why no more are made."""
    sampler = _sampler(outlook)
    ends_below_s = (1.0 - policy.SEARCH_SHARE) * outlook.remaining_s()
    small = 0
    while outlook.may_propose() and outlook.remaining_s() > max(ends_below_s, 0.0):
        insight.look()
        small = small + 1 if insight.believed.gain_left(insight.settled()) < policy.PROPOSAL_GAIN_MIN else 0
        if small >= 2:
            return f"another trial is expected to add less than {percentage(policy.PROPOSAL_GAIN_MIN, 1)}"
        for turn, is_twins in enumerate(_turns(insight)):
            if not outlook.may_propose() or (turn and outlook.remaining_s() <= ends_below_s):
                break
            ask = _proposal(outlook, insight, sampler, is_twins=is_twins)
            if ask is None:
                return "every point of the space was measured"
            yield ask
            insight.believe()
    return "what is left of the time goes to the race and the confirmation"


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


def _is_affordable(outlook: Outlook, configuration: Configuration) -> bool:
    """Whether a run of it fits into what is left for the search; of a capacity the rate matters more than the size."""
    if outlook.scenario.objective == "capacity":
        return True
    times = times_of(outlook.pace, outlook.scenario, configuration)
    return times.run_s <= max(outlook.remaining_s(), 0.0)


def _sampler(outlook: Outlook) -> Sampler:
    search, maximise = outlook.scenario.search, outlook.scenario.objective != "latency"
    return Sampler(outlook.space, maximise=maximise, seed=search.seed, kind=search.sampler)


def _turns(insight: Insight) -> list[bool]:
    """Which of a block's proposals are the twin's: four of five, half, or none."""
    match insight.trust:
        case "leads":
            return [True] * (policy.PROPOSALS_BLOCK - 1) + [False]
        case "shares":
            return [True, False] * (policy.PROPOSALS_BLOCK // 2)
        case "off":
            return [False] * policy.PROPOSALS_BLOCK


def _proposal(
    outlook: Outlook, insight: Insight, sampler: Sampler, *, is_twins: bool, explores: bool = True
) -> Ask | None:
    """The twin's: the best of one draw, or unless it `explores` what is expected to be best; else the sampler's."""
    trials = outlook.trials
    failed = {trial.configuration: trial.point for trial in trials if trial.state == "failed"}
    enqueue: list[dict[str, Any]] = []
    if is_twins:
        without = (
            insight.settled()
            | insight.barred()
            | {
                at
                for at, cell in enumerate(insight.cells)
                if cell.point is None or not _is_affordable(outlook, cell.configuration)
            }
        )
        pick = insight.believed.top_two if explores else insight.believed.highest
        enqueue = [dict(insight.cells[at].point or {}) for at in pick(1, without=without)]
    proposal = sampler.propose(pool(trials, scenario=outlook.scenario), failed=failed, enqueue=enqueue)
    if proposal is None:
        return None
    at = insight.place(proposal.configuration)
    by_twin = proposal.proposer == "twin" and at is not None
    ask = Ask(
        configuration=proposal.configuration,
        source=proposal.proposer,
        reason=f"the twin expects {insight.words(at)}" if by_twin and at is not None else proposal.reason,
        point=proposal.point,
    )
    return _at_rate(outlook, insight, ask)


def _race(outlook: Outlook, insight: Insight) -> Generator[Ask, Trial, str]:
    """The leader and the few that may be better, side by side; returns why it ended."""
    believed = [insight.leader(), *insight.believed.contenders(policy.SURVIVORS)]
    simplest = [insight.simplest(at) for at in believed if not insight.hopeless(at)]
    # The first one's rival without waiting races in any case: a timeout is fitted to one number of clients.
    # So does the one with fewer threads: with more than the device needs, a closed loop falls into rhythms by chance.
    rivals = [rival(at) for at in simplest[:1] for rival in (insight.unwaiting, insight.fewest_threads)]
    racing = dict.fromkeys([*simplest[:1], *rivals, *simplest[1:]])
    survivors = [
        Survivor(configuration=insight.cells[at].configuration, point=_point(insight, at))
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


def _ask(insight: Insight, at: int, source: Source, reason: str) -> Ask:
    configuration = insight.cells[at].configuration
    return Ask(configuration=configuration, source=source, reason=reason, point=_point(insight, at))


def _point(insight: Insight, at: int) -> dict[str, Any] | None:
    point = insight.cells[at].point
    return None if point is None else dict(point)


def _one_rate(outlook: Outlook, ask: Ask, rate_rps: float) -> Ask:
    rate_rps, duration_s = rung_load(outlook.pace, outlook.scenario, ask.configuration, rate_rps)
    return replace(ask, rate_rps=rate_rps, duration_s=duration_s)


def _at_rate(outlook: Outlook, insight: Insight, ask: Ask) -> Ask:
    """Of a capacity one rate is tried: what it, or the leader, is expected to take."""
    if outlook.scenario.objective != "capacity":
        return ask
    leader, own = insight.leader(), insight.place(ask.configuration)
    measured = insight.is_measured(insight.cells[leader].configuration)
    if not insight.predicts and not measured:
        return ask
    most_rps = math.inf if own is None else insight.most_rps(own)
    bar_rps = max(math.exp(insight.expected(leader)), min(insight.held_rps(), most_rps))
    hoped_rps = bar_rps if own is None else math.exp(insight.expected(own))
    if measured:
        # A leader that is only believed in sets no bar: it may be wrong, and all would fail at its rate.
        hoped_rps = max(bar_rps, min(hoped_rps, bar_rps * math.exp(policy.STEP_UP[insight.trust])))
    return _one_rate(outlook, ask, policy.RATE_SHARE * min(hoped_rps, max(most_rps, bar_rps)))
