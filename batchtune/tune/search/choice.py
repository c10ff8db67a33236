"""The search of a scenario, by its objective."""

from __future__ import annotations

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.capacity import CapacitySearch
from batchtune.tune.search.fixed_load import FixedLoadSearch
from batchtune.tune.search.search import Search


def search_of(scenario: Scenario, *, budget_s: float) -> Search:
    """A capacity is searched by rates; throughput and latency under the scenario's own load."""
    kind = CapacitySearch if scenario.objective == "capacity" else FixedLoadSearch
    return kind(scenario, budget_s=budget_s)
