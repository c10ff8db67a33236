"""The search space: its points as configurations, configurations as its points, and the value that is in force."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from batchtune.batching.parameters import Configuration, server_defaults
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.knobs import KNOBS, server_flags
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import ListSpace, RangeSpace
from batchtune.scenario.spec.target import can_be_off

UNBATCHED_CLIENTS = 16
"""Clients of a closed loop that are enough to keep a server without batching busy."""


class Space:
    """The scenario's search space, a grid. A point of the space maps the name of each parameter to one of its
    values."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._axes = scenario.axes
        self._defaults = server_defaults(scenario.target.cpus, scenario.dialect)
        self._usual = self._defaults | scenario.target.in_house_words(scenario.target.defaults)
        self._unbatched = _sent_unbatched(scenario)

    def configuration(self, point: Mapping[str, Any]) -> Configuration | None:
        """Return the configuration of a point (parameter -> value); None: the parameters are not legal, or the
        scenario's largest request does not fit into a batch."""
        try:
            configuration = self._scenario.configuration(point)
        except BatchingParametersError:
            return None
        return configuration if fits_requests(configuration, self._scenario) else None

    def locate(self, configuration: Configuration) -> dict[str, Any] | None:
        """Return the point (parameter -> value) of this configuration; None: it is no point of the space, or does not
        batch.

        A parameter that the configuration leaves out has the server's default.
        """
        if configuration.batching is None:
            return None
        cpus = self._scenario.target.cpus
        point = {
            name: _value_among(knob, configuration, name, cpus=cpus) for name, knob in self._axes.items()
        }
        if any(point[name] not in knob.values for name, knob in self._axes.items()):
            return None
        meant = self.configuration(point)
        return point if meant is not None and self.filled(meant) == self.filled(configuration) else None

    def nearest(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the point (parameter -> value) with the value nearest to the wanted one in each parameter; for a
        parameter that `wanted` lacks, nearest to the server's default.

        Where a value or its choices are no numbers, the first choice is taken; for a server that batches continuously
        the middle number, since its smallest values are of no use.
        """
        point = {}
        for name, knob in self._axes.items():
            value = wanted.get(name, self._usual.get(name))
            numbers = [
                number
                for number in knob.values
                if isinstance(number, int | float) and not isinstance(number, bool)
            ]
            near = numbers and isinstance(value, int | float)
            first = numbers[len(numbers) // 2] if numbers and self._scenario.streams else knob.values[0]
            point[name] = min(numbers, key=lambda number: abs(number - value)) if near else first
        return point

    def filled(self, configuration: Configuration) -> Configuration:
        """Return the configuration with the server's default for each parameter that it leaves out. Where a server of
        kind http gets equal values for batching and for none, no batching is returned."""
        batching, unbatched = configuration.batching, self._unbatched
        if batching is None:
            return configuration
        rows = self._scenario.request.rows_most
        if unbatched is not None and configuration.server_values(rows) == unbatched.server_values(rows):
            return unbatched
        absent = {name: value for name, value in self._defaults.items() if getattr(batching, name) is None}
        return replace(configuration, batching=replace(batching, **absent))


def _sent_unbatched(scenario: Scenario) -> Configuration | None:
    """No batching, where a server of kind http gets it as values of its parameters; None: it gets it in another way, or
    always batches."""
    target = scenario.target
    if target.kind != "http" or scenario.streams or not can_be_off(target):
        return None
    if target.set is not None and target.set.request is not None and target.set.request.off is not None:
        return None
    return scenario.configuration({"enable_batching": False})


def lies_inside(configuration: Configuration, scenario: Scenario) -> bool:
    """Whether the space that the user wrote allows this configuration; a parameter left out has the server's default.

    A range allows every number between its ends, a list only its values. No batching is always allowed.
    """
    if configuration.batching is None:
        return True
    for name, knob in scenario.axes.items():
        value = _value_among(knob, configuration, name, cpus=scenario.target.cpus)
        if isinstance(knob, RangeSpace):
            if not (isinstance(value, int | float) and knob.low <= value <= knob.high):
                return False
        elif value not in knob.values:
            return False
    return True


def _value_among(
    knob: ListSpace | RangeSpace, configuration: Configuration, name: str, *, cpus: Collection[int] | None
) -> Any:
    """The value that a configuration has for a parameter, as the space writes it.

    A configuration keeps the value of a flag as text, and has `batching` None in place of `enable_batching: false`.
    """
    if name == "enable_batching":
        return True
    value = configuration.in_force(name, cpus=cpus)
    if name.rpartition(":")[2] in KNOBS:
        return value
    return next(
        (candidate for candidate in knob.values if server_flags({name: candidate})[0][1] == value), value
    )


def _has_no_size(configuration: Configuration, scenario: Scenario) -> bool:
    """Whether the server has no parameter that is known to be the largest batch."""
    named = {name for name, _, _ in configuration.words}
    return not scenario.sizes_batches and "max_batch_size" not in named


def rows_of(configuration: Configuration, scenario: Scenario) -> int:
    """Return the rows of the largest batch, with several models their sum over the models; without batching, or where
    the size of a batch is unknown, the rows of the largest request."""
    if configuration.batching is None or _has_no_size(configuration, scenario):
        return scenario.request.rows_most
    names = [f"{own.name}:max_batch_size" for own in scenario.target.models]
    return sum(int(configuration.in_force(name)) for name in names or ["max_batch_size"])


def fits_requests(configuration: Configuration, scenario: Scenario) -> bool:
    """Whether the scenario's largest request fits into a batch; with several models, that of each model into its batch.
    True where the size of a batch is unknown."""
    if _has_no_size(configuration, scenario):
        return True
    requests = {
        f"{own.name}:max_batch_size": own.request or scenario.request for own in scenario.target.models
    }
    sizes = requests or {"max_batch_size": scenario.request}
    return all(configuration.in_force(name) >= request.rows_most for name, request in sizes.items())


def clients_to_fill(configuration: Configuration, scenario: Scenario) -> int:
    """Return how many clients of a closed loop keep every batch full: so many that each thread has the requests of two
    batches.

    Without batching UNBATCHED_CLIENTS; for a server of kind http without a known largest batch, 64.
    """
    if configuration.batching is None:
        return UNBATCHED_CLIENTS
    # Clients of a closed loop that keep a server busy whose largest batch, or most of sequences, is not known.
    clients_of_unknown = 64
    if _has_no_size(configuration, scenario):
        return clients_of_unknown
    requests = -(-int(configuration.in_force("max_batch_size")) // scenario.request.rows_most)
    threads = int(configuration.in_force("num_batch_threads", cpus=scenario.target.cpus) or 1)
    return max(2 * requests * threads, 2)
