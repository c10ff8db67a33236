"""Which strategy does a scenario ask for?

Optuna and the twin are imported only by those that use them.
"""

from __future__ import annotations

from batchtune.tune.strategies.grid import grid_strategy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import reference_points
from batchtune.tune.strategies.rule import rule_conclusion, rule_strategy
from batchtune.tune.strategies.serving_guide import guide_strategy
from batchtune.tune.trials.search_summary import SearchSummary


def strategy_of(outlook: Outlook, findings: SearchSummary) -> Strategy:
    """Everything up to the confirmations: reference points and the strategy's own asks."""
    match outlook.scenario.search.strategy:
        case "guided":
            from batchtune.tune.guided.strategy import guided_strategy
            from batchtune.tune.strategies.optuna_study import check_sampler

            check_sampler(outlook.scenario.search.sampler)
            yield from guided_strategy(outlook, findings)
        case "rule":
            yield from reference_points(outlook)
            yield from rule_strategy(outlook)
            conclusion = rule_conclusion(outlook.scenario, outlook.trials)
            findings.stop_reason = "" if conclusion is None else f"the rule's verdict: {conclusion.text}"
        case "guide":
            yield from reference_points(outlook)
            yield from guide_strategy(outlook)
        case "grid":
            yield from reference_points(outlook)
            yield from grid_strategy(outlook)
        case "optuna":
            from batchtune.tune.strategies.optuna_sampler import optuna_strategy

            proposals = optuna_strategy(outlook)  # made first: it refuses a sampler that cannot be had
            yield from reference_points(outlook)
            yield from proposals
