"""Is a batch of all clients at once worth a trial?

The twin's front end takes as long for each request, however requests come. A real one wakes up once for all that a
batch answers, and reads at once what comes back: where the front end is a notable share of the cost, answering all the
clients of a closed loop together is cheaper than the twin thinks, and no probe has a timeout. So one trial asks.
"""

from __future__ import annotations

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.guided.calibration import searched_sizes, searched_threads
from batchtune.tune.guided.state import TIMEOUT
from batchtune.tune.strategies.protocol import Outlook
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Ask
from batchtune.twin.model.twin import Twin


def whole_crowd(outlook: Outlook, twin: Twin | None) -> Ask | None:
    """The least size that holds a request of each client, with the least timeout in which they all return.

    None: an open loop, no point in which one batch can answer them all, or a front end that costs little. What the twin
    expects of it does not count.
    """
    scenario, clients = outlook.scenario, outlook.scenario.load.concurrency
    if scenario.load.open_loop or clients is None or twin is None:
        return None
    rows = clients * scenario.request.rows_most
    front_end_s = clients * twin.best_fit.front_end_s
    share = front_end_s / (front_end_s + float(twin.best_fit.service_time.tau_s(rows)[rows]))
    sizes = [size for size in searched_sizes(scenario) if size >= rows]
    returning_micros = 1e6 * (front_end_s + scenario.load.think_time_s)
    timeout_micros = _timeout_micros(scenario, returning_micros)
    if share < policy.FRONT_END_SHARE or not sizes or timeout_micros is None:
        return None
    threads = searched_threads(scenario)[0]
    wanted = {"max_batch_size": sizes[0], TIMEOUT: timeout_micros, "num_batch_threads": threads}
    point = outlook.space.nearest(wanted)
    configuration = outlook.space.configuration(point)
    if configuration is None or not _waits_for_all(configuration, rows=rows, micros=returning_micros):
        return None
    why = f"all {clients} clients answered by one batch, as what passes around the model is much of the cost"
    return Ask(configuration=configuration, source="twin", reason=why, point=point)


def _waits_for_all(configuration: Configuration, *, rows: int, micros: float) -> bool:
    """Whether the nearest point is still one whose batch holds so many rows and stays open for so long."""
    held, open_micros = in_force(configuration, "max_batch_size"), in_force(configuration, TIMEOUT)
    return configuration.batching is not None and (held or 0) >= rows and (open_micros or 0) >= micros


def _timeout_micros(scenario: Scenario, returning_micros: float) -> int | None:
    """The least one searched in which all clients return; None: none of them is that long."""
    knob = scenario.search.space.get(TIMEOUT)
    values = () if knob is None else knob.values
    enough = (int(value) for value in values if isinstance(value, int) and value >= returning_micros)
    return min((value for value in enough if value > 0), default=None)
