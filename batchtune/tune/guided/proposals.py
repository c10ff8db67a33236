"""Which points are proposed: the twin's candidates, and the sampler's own?

On several nodes as many are proposed at once, one after another. Of each it is believed, until it was measured, that it
will be what is expected of it (the kriging believer: Ginsbourger, Le Riche and Carraro 2010, "Kriging is well-suited to
parallelize optimization"), so that the next one is looked for elsewhere; to the sampler it is as bad as can be (the
constant liar of the same paper).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from batchtune.scenario.units import percentage
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.guided.asks import at_hoped_rate, is_affordable
from batchtune.tune.guided.state import Insight
from batchtune.tune.strategies.optuna_sampler import Sampler
from batchtune.tune.strategies.protocol import Outlook
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.trials.trial import Ask, Trial


def proposals(outlook: Outlook, insight: Insight) -> Generator[Ask, Trial, str]:
    """Blocks of the twin's candidates and the sampler's own; returns why no more are made."""
    sampler = sampler_of(outlook)
    ends_below_s = (1.0 - policy.SEARCH_SHARE) * outlook.remaining_s()
    small = 0
    while outlook.may_propose() and outlook.remaining_s() > max(ends_below_s, 0.0):
        insight.look()
        small = small + 1 if insight.believed.gain_left(insight.settled()) < policy.PROPOSAL_GAIN_MIN else 0
        if small >= 2:
            return f"another trial is expected to add less than {percentage(policy.PROPOSAL_GAIN_MIN, 1)}"
        if outlook.nodes:
            asks = proposals_at_once(outlook, insight, sampler, len(outlook.nodes))
            if not asks:
                return "every point of the space was measured"
            yield from together(outlook, asks)
            continue
        for turn, is_twins in enumerate(turns_of(insight)):
            if not outlook.may_propose() or (turn and outlook.remaining_s() <= ends_below_s):
                break
            ask = proposal_of(outlook, insight, sampler, is_twins=is_twins)
            if ask is None:
                return "every point of the space was measured"
            yield ask
            insight.believe()
    return "what is left of the time goes to the race and the confirmation"


def proposals_at_once(
    outlook: Outlook, insight: Insight, sampler: Sampler, count: int, *, explores: bool = True
) -> list[Ask]:
    """So many proposals, fewer where trials or points end, each made as if those before had given what is expected."""
    made = sum(trial.source in ("twin", "sampler") for trial in outlook.trials)
    turns = turns_of(insight)
    asks: list[Ask] = []
    for turn in range(made, made + count):
        if asks and not outlook.may_propose(beside=len(asks)):
            break
        is_twins = turns[turn % len(turns)]
        ask = proposal_of(outlook, insight, sampler, is_twins=is_twins, explores=explores, pending=asks)
        if ask is None:
            break
        asks.append(ask)
        insight.believe(pending=[ask.configuration for ask in asks])
    return asks


def sampler_of(outlook: Outlook) -> Sampler:
    """The scenario's sampler."""
    search, maximise = outlook.scenario.search, outlook.scenario.objective != "latency"
    return Sampler(outlook.space, maximise=maximise, seed=search.seed, kind=search.sampler)


def turns_of(insight: Insight) -> list[bool]:
    """Which of a block's proposals are the twin's: four of five, half, or none."""
    match insight.trust:
        case "leads":
            return [True] * (policy.PROPOSALS_BLOCK - 1) + [False]
        case "shares":
            return [True, False] * (policy.PROPOSALS_BLOCK // 2)
        case "off":
            return [False] * policy.PROPOSALS_BLOCK


def proposal_of(
    outlook: Outlook,
    insight: Insight,
    sampler: Sampler,
    *,
    is_twins: bool,
    explores: bool = True,
    pending: Sequence[Ask] = (),
) -> Ask | None:
    """The twin's: the best of one draw, or unless it `explores` what is expected to be best; else the sampler's.

    `pending` are proposed and not measured yet.
    """
    trials = outlook.trials
    failed = {trial.configuration: trial.point for trial in trials if trial.state == "failed"}
    failed |= {ask.configuration: ask.point for ask in pending}
    enqueue: list[dict[str, Any]] = []
    if is_twins:
        without = (
            insight.settled()
            | insight.barred()
            | {
                at
                for at, cell in enumerate(insight.cells)
                if cell.point is None or not is_affordable(outlook, cell.configuration)
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
    return at_hoped_rate(outlook, insight, ask)
