"""Which short runs tell the twin most about the server?

Closed loops with a timeout of 0 and twice as many clients as a batch has room for: while one batch runs the next one
fills, so batches are full and the server's own histogram gives τ(b) for that size. A run with all threads shows the
contention between them. The rule's two probes without batching already tell τ(1) and what passes around the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.batching import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec import Scenario
from batchtune.tune import policy
from batchtune.tune.references import rows_per_request
from batchtune.tune.space import Space, in_force
from batchtune.tune.strategy import Ask, Outlook, Strategy


def calibration_probes(outlook: Outlook) -> Strategy:
    """The probes, the most telling first, as far as a share of the time goes."""
    ends_below_s = (1.0 - policy.CALIBRATION_SHARE) * outlook.remaining_s()
    for number, ask in enumerate(_asks(outlook)):
        if number >= policy.CALIBRATIONS_MIN and outlook.remaining_s() < ends_below_s:
            return
        yield ask


def _asks(outlook: Outlook) -> Iterator[Ask]:
    """Largest size, a middle one by all threads and by the fewest, the two sizes between: each known loop once."""
    scenario = outlook.scenario
    sizes, threads = searched_sizes(scenario), searched_threads(scenario)
    largest, fewest, most = sizes[-1], threads[0], threads[-1]
    wanted = [(largest, fewest), (_middle(sizes, 0.5), most), (_middle(sizes, 0.5), fewest)]
    wanted += [(_middle(sizes, 0.75), fewest), (_middle(sizes, 0.25), fewest)]
    if most > fewest:
        wanted.append((largest, most))
    asked = set()
    for size, count in wanted:
        configuration = _configuration(outlook.space, scenario, size, count)
        if configuration is None:
            continue
        size = in_force(configuration, "max_batch_size")
        count = in_force(configuration, "num_batch_threads", cpus=scenario.target.cpus)
        clients = round(size / rows_per_request(scenario) * (1 + count))
        clients = min(max(clients, policy.CALIBRATION_CLIENTS[0]), policy.CALIBRATION_CLIENTS[1])
        if (configuration, clients) in asked:
            continue
        asked.add((configuration, clients))
        yield Ask(
            configuration=configuration,
            source="calibration",
            reason=f"for the twin: batches of {size} rows on {count} threads",
            concurrency=clients,
            duration_s=policy.CALIBRATION_S,
        )


def searched_sizes(scenario: Scenario) -> list[int]:
    """Values of max_batch_size that the search may try, in rising order; those below one request's rows left out."""
    least = rows_per_request(scenario)
    knob = scenario.search.space.get("max_batch_size")
    values: tuple[Any, ...] = () if knob is None else knob.values
    found = sorted({int(one) for one in values if isinstance(one, int) and one >= least})
    if found:
        return found
    return [max(int(in_force(scenario.configuration(_first(scenario)), "max_batch_size")), least)]


def searched_threads(scenario: Scenario) -> list[int]:
    """Values of num_batch_threads that the search may try, in rising order."""
    knob = scenario.search.space.get("num_batch_threads")
    values: tuple[Any, ...] = () if knob is None else knob.values
    found = sorted({int(one) for one in values if isinstance(one, int)})
    if found:
        return found
    first = scenario.configuration(_first(scenario))
    return [int(in_force(first, "num_batch_threads", cpus=scenario.target.cpus))]


def _first(scenario: Scenario) -> Mapping[str, Any]:
    return scenario.search.point_from_indices([0] * len(scenario.search.space))


def _middle(sizes: list[int], share: float) -> int:
    """The size nearest to this share of the way from the smallest to the largest, on the logarithms."""
    wanted = math.log(sizes[0]) + share * math.log(sizes[-1] / sizes[0])
    return min(sizes, key=lambda size: abs(math.log(size) - wanted))


def _configuration(space: Space, scenario: Scenario, size: int, threads: int) -> Configuration | None:
    """The point nearest to such batches without a timeout; what is fixed or not searched stays."""
    wanted = {"max_batch_size": size, "batch_timeout_micros": 0, "num_batch_threads": threads}
    point = space.nearest(wanted)
    free = {name: value for name, value in wanted.items() if name not in scenario.fixed and name not in point}
    free.pop("num_batch_threads", None)
    try:
        return scenario.configuration({**point, **free})
    except BatchingParametersError:
        return space.configuration(point)
