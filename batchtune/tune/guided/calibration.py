"""Which short runs tell the twin most about the server?

Closed loops with a timeout of 0 and twice as many clients as a batch has room for: while one batch runs the next one
fills, so batches are full and the server's own histogram gives τ(b) for that size. A run with all threads shows the
contention between them. The rule's two probes without batching already tell τ(1) and what passes around the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.batching.length_buckets import AUTO_BUCKETS, LENGTH_BUCKETS, NO_BUCKETS, parse_length_buckets
from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search import KnobValue
from batchtune.tune import policy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import reference_asks
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.trials.pace import full_rows, run_s
from batchtune.tune.trials.space import Space, in_force
from batchtune.tune.trials.trial import Ask


def calibration_probes(outlook: Outlook) -> Strategy:
    """The probes, the most telling first, as far as a share of the time goes; of a slow server from small sizes up."""
    remaining_s = outlook.remaining_s()
    sizes, threads = searched_sizes(outlook.scenario), searched_threads(outlook.scenario)
    first = _ask(outlook, sizes[-1], threads[0])
    if first is not None and run_s(
        first, outlook.pace, outlook.scenario
    ) > policy.CALIBRATION_SHARE * _finite(remaining_s):
        yield from _rising(outlook)
        return
    if outlook.nodes:
        yield from together(outlook, list(_asks(outlook)), later=_usual_answers(outlook))
        return
    for number, ask in enumerate(_asks(outlook)):
        if number >= policy.CALIBRATIONS_MIN and outlook.remaining_s() < (
            (1.0 - policy.CALIBRATION_SHARE) * remaining_s
        ):
            return
        yield ask


def _usual_answers(outlook: Outlook) -> list[Ask]:
    """No batching and the defaults, which are measured next; for a capacity at rates that only the twin can tell."""
    if outlook.scenario.objective == "capacity":
        return []
    return [ask for ask in reference_asks(outlook).values() if not outlook.space.is_barred(ask.configuration)]


def _rising(outlook: Outlook) -> Strategy:
    """Sizes that the traffic can fill, each some times the one before, while they pay and a share of the time allows.

    The time of each is foretold by those before it. Then once the largest of them by all threads.
    """
    threads = searched_threads(outlook.scenario)
    share_s = policy.CALIBRATION_SHARE * _finite(outlook.remaining_s())
    ask, paying = None, True
    for size in _rising_sizes(outlook):
        rising = _ask(outlook, size, threads[0])
        if rising is None or not paying or run_s(rising, outlook.pace, outlook.scenario) > share_s:
            break
        before_s = outlook.pace.batch_s(size / policy.RISING_FACTOR)
        yield rising
        ask = rising
        paying = outlook.pace.batch_s(size) < policy.RISING_FACTOR * before_s / policy.PAYS_FROM
        paying = paying or not outlook.pace.is_known
    if ask is None or threads[-1] == threads[0]:
        return
    crowded = _ask(outlook, in_force(ask.configuration, "max_batch_size"), threads[-1])
    if (
        crowded is not None
        and crowded.configuration != ask.configuration
        and run_s(crowded, outlook.pace, outlook.scenario) <= share_s
    ):
        yield crowded


def _rising_sizes(outlook: Outlook) -> list[int]:
    sizes, rows = searched_sizes(outlook.scenario), outlook.scenario.request.rows_most
    most = full_rows(outlook.scenario, sizes[-1], outlook.pace)
    wanted = policy.RISING_FACTOR * rows
    rising: list[int] = []
    for size in sizes:
        if size >= wanted and (size <= most or not rising):
            rising.append(size)
            wanted = policy.RISING_FACTOR * size
    return rising or sizes[-1:]


def _finite(remaining_s: float) -> float:
    return min(remaining_s, policy.TIME_BUDGET_S)


def _ask(outlook: Outlook, size: int, count: int, buckets: KnobValue | None = None) -> Ask | None:
    """A closed loop that keeps batches of this size full on so many threads; None where no server would accept it."""
    scenario = outlook.scenario
    configuration = _configuration(outlook.space, scenario, size, count, buckets)
    if configuration is None:
        return None
    size = in_force(configuration, "max_batch_size")
    count = in_force(configuration, "num_batch_threads", cpus=scenario.target.cpus)
    clients = round(size / scenario.request.rows_most * (1 + count))
    return Ask(
        configuration=configuration,
        source="calibration",
        reason=f"for the twin: batches of {size} rows on {count} threads" + (" by length" if buckets else ""),
        concurrency=min(max(clients, policy.CALIBRATION_CLIENTS[0]), policy.CALIBRATION_CLIENTS[1]),
        duration_s=policy.CALIBRATION_S,
    )


def _asks(outlook: Outlook) -> Iterator[Ask]:
    """Largest size, by length too where buckets are searched, a middle one by all threads and by the fewest, the two
    sizes between: each known loop once."""
    sizes, threads = searched_sizes(outlook.scenario), searched_threads(outlook.scenario)
    largest, fewest, most = sizes[-1], threads[0], threads[-1]
    finest = _finest_buckets(outlook.scenario)
    wanted: list[tuple[int, int, KnobValue | None]] = [(largest, fewest, None)]
    if finest is not None:
        wanted.append((largest, fewest, finest))
    wanted += [(_middle(sizes, 0.5), most, None), (_middle(sizes, 0.5), fewest, None)]
    wanted += [(_middle(sizes, 0.75), fewest, None), (_middle(sizes, 0.25), fewest, None)]
    if most > fewest:
        wanted.append((largest, most, None))
    asked = set()
    for size, count, buckets in wanted:
        ask = _ask(outlook, size, count, buckets)
        if ask is not None and (ask.configuration, ask.concurrency) not in asked:
            asked.add((ask.configuration, ask.concurrency))
            yield ask


def searched_sizes(scenario: Scenario) -> list[int]:
    """Values of max_batch_size that the search may try, in rising order; those below one request's rows left out."""
    least = scenario.request.rows_most
    knob = scenario.search.space.get("max_batch_size")
    values: tuple[Any, ...] = () if knob is None else knob.values
    sizes = sorted({int(value) for value in values if isinstance(value, int) and value >= least})
    if sizes:
        return sizes
    return [max(int(in_force(scenario.configuration(_first(scenario)), "max_batch_size")), least)]


def searched_threads(scenario: Scenario) -> list[int]:
    """Values of num_batch_threads that the search may try, in rising order."""
    knob = scenario.search.space.get("num_batch_threads")
    values: tuple[Any, ...] = () if knob is None else knob.values
    counts = sorted({int(value) for value in values if isinstance(value, int)})
    if counts:
        return counts
    first = scenario.configuration(_first(scenario))
    return [int(in_force(first, "num_batch_threads", cpus=scenario.target.cpus))]


def _first(scenario: Scenario) -> Mapping[str, Any]:
    return scenario.search.point_from_indices([0] * len(scenario.search.space))


def _middle(sizes: list[int], share: float) -> int:
    """The size nearest to this share of the way from the smallest to the largest, on the logarithms."""
    wanted = math.log(sizes[0]) + share * math.log(sizes[-1] / sizes[0])
    return min(sizes, key=lambda size: abs(math.log(size) - wanted))


def _finest_buckets(scenario: Scenario) -> KnobValue | None:
    """Of the length buckets that are searched those with the most boundaries, of which the twin learns what a length
    costs; None where there are none."""
    knob = scenario.search.space.get(LENGTH_BUCKETS)
    sets = [
        value
        for value in (knob.values if knob is not None else ())
        if value not in (AUTO_BUCKETS, NO_BUCKETS)
    ]
    return max(sets, key=lambda value: len(parse_length_buckets(value)), default=None)


def _configuration(
    space: Space, scenario: Scenario, size: int, threads: int, buckets: KnobValue | None
) -> Configuration | None:
    """The point nearest to such batches without a timeout; what is fixed or not searched stays."""
    wanted = {"max_batch_size": size, "batch_timeout_micros": 0, "num_batch_threads": threads}
    point = space.nearest(wanted) | ({} if buckets is None else {LENGTH_BUCKETS: buckets})
    free = {name: value for name, value in wanted.items() if name not in scenario.fixed and name not in point}
    free.pop("num_batch_threads", None)
    try:
        return scenario.configuration({**point, **free})
    except BatchingParametersError:
        return space.configuration(point)
