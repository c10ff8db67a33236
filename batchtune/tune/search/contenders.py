"""Lists the contenders, the configurations that may be the answer: what runs now, no batching, the server's defaults,
the rule's and the tuning guide's points, the points of the space.

All are treated alike; a configuration that several sources name is one contender with several sources. A space that
batchtune proposed itself (`search.grow`) has no edge: where the best point lies on it, the space grows by a step.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Final

from batchtune.batching.parameters import BatchingParameters, Configuration, server_defaults
from batchtune.batching.triton_config import configuration_as_found
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.knobs import KNOBS, server_flags
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import ListSpace, RangeSpace
from batchtune.scenario.spec.target import can_be_off
from batchtune.system import usable_threads
from batchtune.tune.evidence.bracket import Bracket, BracketRun
from batchtune.tune.trials.pace import UNBATCHED_CLIENTS, fits_requests, rows_of
from batchtune.tune.trials.trial import Source, is_beyond_memory

REFERENCES: Final[tuple[Source, ...]] = ("present", "no_batching", "defaults")
"""Sources of the configurations that every answer is compared with, in the order in which it shows them."""

SIZE: Final = "max_batch_size"
THREADS: Final = "num_batch_threads"
_TIMEOUT: Final = "batch_timeout_micros"
_QUEUE: Final = "max_enqueued_batches"

ROWS_MAX: Final = 4096
"""Rows of the largest batch, and batches of the longest queue, to which a space that may grow does (noisy.py,
thousand)."""

GROWING: Final = (SIZE, THREADS, _TIMEOUT, _QUEUE)
"""Parameters whose values grow in a space that batchtune proposed."""


@dataclass(eq=False, slots=True)
class Contender:
    """A configuration that may be the answer, the sources that proposed it, and its runs.

    `sources`: what proposed it ("defaults", "rule", "guide", …), earliest first. `rows`: of its largest batch.
    `threads`: number of its batch threads.
    `point`: parameter -> value in the space, which may have grown; None: the configuration lies outside.
    `eligible`: whether it can be the answer; False: the space that the user wrote excludes it.
    `failures`: number of failed trials. `runs`: all its loads, judged by the SLO.
    `model_says`: its figure predicted by the service-time curve: requests/s, or 1 / p95 with objective latency; 0: no
    prediction, or the SLO would be missed. `hope`: that prediction, corrected by the runs of this sweep
    (FixedLoadSearch with a curve: its natural log).
    """

    configuration: Configuration
    sources: list[Source]
    point: dict[str, Any] | None
    rows: int
    threads: int
    eligible: bool = True
    failures: int = 0
    runs: list[BracketRun] = field(default_factory=list)
    model_says: float = 0.0
    hope: float = 0.0
    _bracket: Bracket | None = None

    def add(self, run: BracketRun) -> None:
        """Add a run of the contender, judged by the SLO."""
        self.runs.append(run)
        self._bracket = None

    @property
    def bracket(self) -> Bracket:
        """The bracket of the contender's runs so far."""
        if self._bracket is None:
            self._bracket = Bracket(tuple(self.runs))
        return self._bracket

    @property
    def is_broken(self) -> bool:
        """Whether the server refuses the configuration or dies of it: half of its runs or more failed, and at least
        one."""
        return 2 * self.failures >= max(len(self.runs), 1)

    @property
    def is_reference(self) -> bool:
        """Whether the contender is what runs now, no batching, or the server's defaults."""
        return not {*REFERENCES}.isdisjoint(self.sources)

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Sort key (kind, rows, threads), lowest for the simplest to deploy; kind: no batching, then the defaults, then
        any other."""
        kind = 0 if self.configuration.batching is None else 1 if "defaults" in self.sources else 2
        return kind, self.rows, self.threads


class Contenders:
    """All contenders of a search, in the order in which they were proposed, and the values of the space.

    Iteration yields those that can be the answer. `alone`: with several models, the name of the only model that the
    search loads, while each parameter of the other models has its middle value; "": all are loaded.
    """

    def __init__(self, scenario: Scenario, *, alone: str = "") -> None:
        self._scenario = scenario
        self._space = Space(scenario)
        self._bars_points = bool(scenario.target.models) or not scenario.sizes_batches
        axes = {name: list(knob.values) for name, knob in scenario.axes.items()}
        self.values: dict[str, list[Any]] = {
            name: values for name, values in axes.items() if not alone or _model(name) in ("", alone)
        }
        self._others = {name: _middle(values) for name, values in axes.items() if name not in self.values}
        self._by_configuration: dict[Configuration, Contender] = {}
        self._by_point: dict[str, Configuration | None] = {}
        self.ceiling_rows = float("inf")
        """Least rows of a batch that ran out of memory; contenders with as many are barred. inf: none did."""
        self.beyond_memory: list[dict[str, Any]] = []
        """Points that ran out of memory, for spaces in which other parameters than the rows take memory too."""
        for source, configuration in () if alone else reference_configurations(scenario).items():
            self.add(configuration, source)

    def __iter__(self) -> Iterator[Contender]:
        """Yield the contenders that can be the answer: eligible, not broken, and not barred for lack of memory."""
        return filter(self.can_win, self.all())

    def can_win(self, contender: Contender) -> bool:
        """Whether a contender can be the answer: eligible, not broken, and not barred for lack of memory."""
        return contender.eligible and not contender.is_broken and not self.is_barred(contender)

    @property
    def is_empty(self) -> bool:
        """Whether no contender can be the answer: there is none yet, or all are barred or broken."""
        return next(iter(self), None) is None

    def all(self) -> tuple[Contender, ...]:
        """Return all contenders, also those that cannot be the answer."""
        return tuple(self._by_configuration.values())

    def is_barred(self, contender: Contender) -> bool:
        """Whether a contender's batches would run out of memory, judged by the sizes or points that ran out of it."""
        if self._bars_points and contender.point is not None:
            return is_beyond_memory(contender.point, self.beyond_memory)
        return contender.configuration.batching is not None and contender.rows >= self.ceiling_rows

    def of(self, source: Source) -> Contender | None:
        """Return the first contender that `source` proposed; None: there is none."""
        return next((c for c in self._by_configuration.values() if source in c.sources), None)

    def find(self, configuration: Configuration) -> Contender | None:
        """Return the contender with this configuration (a parameter left out has the server's default); None: there is
        none."""
        return self._by_configuration.get(self._space.filled(configuration))

    def add(
        self, configuration: Configuration, source: Source, point: Mapping[str, Any] | None = None
    ) -> Contender:
        """Return the contender of this configuration, which is made at the first call; `source` is added to its
        sources.

        `point`: its point in the space, parameter -> value, such as `{"max_batch_size": 8}`; None: the point is found
        from its parameters.
        """
        key = self._space.filled(configuration)
        known = self._by_configuration.get(key)
        if known is None:
            self._widen(point)
            inside = point is not None and all(point[name] in values for name, values in self.values.items())
            located = dict(point) if point is not None and inside else self._space.locate(configuration)
            known = Contender(
                configuration=configuration,
                sources=[],
                point=located,
                rows=rows_of(configuration, self._scenario),
                threads=self._threads(configuration),
                eligible=located is not None or self._is_eligible(configuration, source),
            )
            self._by_configuration[key] = known
        if source not in known.sources:
            known.sources.append(source)
        return known

    def at(self, point: Mapping[str, Any], source: Source) -> Contender | None:
        """Return the contender of a point (parameter -> value); None: its parameters are not legal, or the largest
        request does not fit in a batch."""
        asked = repr(point)  # true is not 1, the text of a flag
        if asked not in self._by_point:
            self._by_point[asked] = self._space.configuration({**self._others, **point})
        configuration = self._by_point[asked]
        return None if configuration is None else self.add(configuration, source, point)

    def overlaid(self, wanted: Mapping[str, Any], source: Source) -> Contender | None:
        """Return the contender with the `wanted` parameters (name -> value), as far as the server has them; any other
        parameter has its fixed value, or else its value in `base`.

        None: these are not legal together, or the largest request does not fit in a batch.
        """
        if self._scenario.dialect == "http":
            has = {name for name, _, _ in self._scenario.target.words}
            wanted = {name: value for name, value in wanted.items() if name in has}
        base = {**self.base(), **wanted}
        point = {name: value for name, value in base.items() if name not in self._scenario.fixed}
        configuration = self._space.configuration(point)
        return None if configuration is None else self.add(configuration, source)

    def base(self) -> dict[str, Any]:
        """Return the point (parameter -> value) nearest to the server's defaults, but with the lowest batch timeout."""
        base = self._space.nearest({_TIMEOUT: 0})
        return {name: base[name] for name in self.values}

    def scattered(self, count: int) -> list[Contender]:
        """Return contenders for the middle of the space and for `count` random points (by the search's seed)."""
        chance = random.Random(f"{self._scenario.search.seed} {sorted(self.values)}")
        points = [{name: _middle(values) for name, values in self.values.items()}]
        points += [
            {name: chance.choice(values) for name, values in self.values.items()} for _ in range(count)
        ]
        return _unique(self.at(point, "grid") for point in points)

    def indices(self, contender: Contender) -> tuple[int, ...] | None:
        """Return, for each parameter, the index of the contender's value among the values of the space; None: the
        contender lies outside the space."""
        point = contender.point
        if point is None or any(point[name] not in values for name, values in self.values.items()):
            return None
        return tuple(values.index(point[name]) for name, values in self.values.items())

    def put_together(self, best: Mapping[str, Mapping[str, Any]]) -> list[Contender]:
        """Return contenders that combine, for several models, the best point of each model alone.

        `best`: model name -> its point. A model's own parameters come from its point. Parameters that the models share
        come from the point of one model, of each model in turn: one contender for each model, fewer where they agree.
        """
        points = ({name: best[_model(name) or lender][name] for name in self.values} for lender in best)
        return _unique(self.at(point, "alone") for point in points)

    def grid(self, most: int) -> list[Contender]:
        """Return contenders for all batch sizes times all numbers of threads; other parameters have their values in
        `base`.

        Further parameters are varied too as long as there are at most `most` points.
        """
        base = self.base()
        names: list[str] = [name for name in (SIZE, THREADS) if name in self.values]
        count = 1
        for name in names:
            count *= len(self.values[name])
        for name, values in self.values.items():
            if name not in names and count * len(values) <= most:
                names.append(name)
                count *= len(values)
        points = product(*(self.values[name] for name in names))
        return _unique(self.at({**base, **dict(zip(names, point, strict=True))}, "grid") for point in points)

    def whole(self, most: int) -> list[Contender]:
        """Return contenders for every point of the space, in its order, but only for the first `most` points."""
        names = list(self.values)
        points = (dict(zip(names, point, strict=True)) for point in product(*self.values.values()))
        return _unique(self.at(point, "grid") for point in islice(points, most))

    def neighbours(self, contender: Contender) -> list[Contender]:
        """Return the contenders that differ from this one by one step in one parameter; in a parameter whose values are
        words, by any other value.

        A space that may grow first gets a value beyond its edge. []: no batching, or strategy rule or optuna.
        """
        point = self.point_of(contender)
        if point is None or self._scenario.search.strategy in ("rule", "optuna"):
            return []
        near = []
        for name in self.values:
            self._grow(name, point[name])
            values = self.values[name]
            at = values.index(point[name])
            beside = (
                values if isinstance(point[name], str | bool | tuple) else values[max(at - 1, 0) : at + 2]
            )
            near += [self.at({**point, name: value}, "neighbour") for value in beside if value != point[name]]
        return [other for other in _unique(near) if other is not contender]

    def grow_sizes(self, contender: Contender) -> bool:
        """Add a larger batch size to the space if the space may grow and this contender has the largest size. Return
        whether a size was added."""
        sizes = self.values.get(SIZE, []) if self._scenario.search.strategy in ("guided", "grid") else []
        before = len(sizes)
        if sizes and isinstance(sizes[-1], int) and contender.rows >= sizes[-1]:
            self._grow(SIZE, sizes[-1])
        return len(sizes) > before

    def point_of(self, contender: Contender) -> dict[str, Any] | None:
        """Return the point (parameter -> value) of a contender, or the point nearest to it where it lies outside the
        space; None: no batching."""
        if contender.point is not None:
            return contender.point
        if contender.configuration.batching is None:
            return None
        wanted = {
            name: contender.configuration.in_force(name, cpus=self._scenario.target.cpus)
            for name in self.values
        }
        return self._space.nearest(wanted)

    def _grow(self, name: str, value: Any) -> None:
        """Add the double of a parameter's largest value, if the space grows, `value` is that largest value, and the
        limit (ROWS_MAX, twice the CPUs, a second, the clients) allows it."""
        values = self.values[name]
        if not self._scenario.search.grow or name not in GROWING or value != values[-1]:
            return
        step = max(2 * value, 1)
        limit = 1e6 if name == _TIMEOUT else ROWS_MAX  # no batch timeout beyond a second
        if name == THREADS:
            limit = 2 * usable_threads(self._scenario.target.cpus)
        clients = self._scenario.load.concurrency
        if name == SIZE and clients is not None:
            limit = min(limit, clients * self._scenario.request.rows_most)
        if step <= limit:
            values.append(step)

    def _widen(self, point: Mapping[str, Any] | None) -> None:
        """Add the values of a point that a space which grows does not have: an interrupted sweep had added them."""
        grown = point if point is not None and self._scenario.search.grow else {}
        for name, value in grown.items():
            values = self.values.get(name)
            if values is not None and name in GROWING and value not in values:
                values.append(value)
                values.sort()

    def _threads(self, configuration: Configuration) -> int:
        if configuration.batching is None:
            return UNBATCHED_CLIENTS // 2
        return int(configuration.in_force(THREADS, cpus=self._scenario.target.cpus) or 1)

    def _is_eligible(self, configuration: Configuration, source: Source) -> bool:
        """Whether a configuration that is no point of the space can be the answer.

        Always in a space that batchtune proposed; in one that the user wrote, between the ends of its ranges. What
        runs now can always be, the defaults that a scenario of kind http states, and the rule's point with strategy
        rule.
        """
        search = self._scenario.search
        stated: Source = "defaults" if self._scenario.target.defaults else "present"
        asked_for = source in ("present", stated, search.strategy)
        return search.grow or asked_for or lies_inside(configuration, self._scenario)


def reference_configurations(scenario: Scenario) -> dict[Source, Configuration]:
    """Return source -> configuration of the references that exist, each with the scenario's fixed server flags.

    `present`: an attached server's configuration, or that of `fixed` where it sets a size, a timeout or threads (kind
    http: a size or a timeout). `no_batching`: where the server can do without; for kind http not with streamed answers.
    `defaults`: the server's; for Triton those of the model's configuration, with `dynamic_batching { }` where it has
    none; for kind http those that the scenario states, unless there is a `present`. A `present`, or for kind http
    `defaults`, that no server would accept is left out.
    """
    flags = scenario.fixed_flags
    original = scenario.target.found
    if scenario.target.kind == "http":
        return _references_of_http(scenario)
    if original is not None:
        unbatched = replace(original, dynamic_batching=False)
        own: dict[Source, Configuration] = {
            "no_batching": configuration_as_found(unbatched, flags=flags, batching=False),
            "defaults": configuration_as_found(original, flags=flags),
        }
        present: Source = "present"
        return {present: own["defaults" if original.dynamic_batching else "no_batching"], **own}
    references: dict[Source, Configuration] = {}
    if {SIZE, _TIMEOUT, THREADS} & scenario.fixed.keys():
        with suppress(BatchingParametersError):
            references["present"] = scenario.configuration({})
    if can_be_off(scenario.target):
        references["no_batching"] = Configuration(batching=None, flags=flags)
    references["defaults"] = Configuration(batching=BatchingParameters(), flags=flags)
    return references


def _references_of_http(scenario: Scenario) -> dict[Source, Configuration]:
    """`reference_configurations` for a server of kind http: its defaults only where the scenario states them."""
    target = scenario.target
    references: dict[Source, Configuration] = {}
    named = {name for name, _, _ in target.words} & scenario.fixed.keys()
    if target.present or {SIZE, _TIMEOUT} & named:
        with suppress(BatchingParametersError):
            references["present"] = scenario.configuration(target.in_house_words(target.present))
    if can_be_off(target) and not scenario.streams:
        references["no_batching"] = scenario.configuration({"enable_batching": False})
    if target.defaults and "present" not in references:
        with suppress(BatchingParametersError):
            references["defaults"] = scenario.configuration()
    space = Space(scenario)
    return {
        source: filled if (filled := space.filled(own)).batching is None else own
        for source, own in references.items()
    }


def first_configuration(scenario: Scenario) -> Configuration:
    """Return the configuration that an attached server has; for a server to launch, the one to start it with
    (`one_by_one`)."""
    present = reference_configurations(scenario).get("present") if scenario.target.attached else None
    return one_by_one(scenario) if present is None else present


def last_configuration(scenario: Scenario) -> Configuration | None:
    """Return the last point of the grid, for a second attempt on a server of kind http that fails with the first point;
    None for other kinds."""
    return scenario.configuration(scenario.search.grid()[-1]) if scenario.target.kind == "http" else None


def one_by_one(scenario: Scenario) -> Configuration:
    """Return the configuration without batching. Where the server always batches: batches of one request without a
    timeout, for kind http the first point of the grid."""
    alone = reference_configurations(scenario).get("no_batching")
    if alone is not None:
        return alone
    if scenario.target.kind == "http":
        return scenario.configuration(scenario.search.grid()[0])
    batching = BatchingParameters(
        max_batch_size=scenario.request.rows_most,
        batch_timeout_micros=0,
        max_enqueued_batches=UNBATCHED_CLIENTS,
    )
    return Configuration(batching=batching, flags=scenario.fixed_flags)


def same_instances(unbatched: Configuration, batched: Configuration) -> Configuration:
    """Return `unbatched` with as many model instances as `batched` has; unchanged where the server has no flag for
    their number."""
    name = batched.instances_flag
    if not name or (batched.dialect == "http" and name not in dict(unbatched.flags)):
        return unbatched
    count = str(batched.in_force(THREADS) or 1)
    flags = tuple(sorted({**dict(unbatched.flags), name: count}.items()))
    return replace(unbatched, flags=flags)


# The space: its points as configurations, configurations as its points, and the value that is in force.


class Space:
    """The scenario's search space, a grid. A point of the space maps the name of each parameter to one of its
    values."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._axes = scenario.axes
        self._streams = scenario.streams
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
            first = numbers[len(numbers) // 2] if numbers and self._streams else knob.values[0]
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


def _model(axis: str) -> str:
    """Name of the model that a parameter `MODEL:NAME` belongs to; "": all models share it."""
    return axis.rpartition(":")[0]


def _middle(values: Sequence[Any]) -> Any:
    return values[(len(values) - 1) // 2]


def _unique(contenders: Iterable[Contender | None]) -> list[Contender]:
    return list(dict.fromkeys(contender for contender in contenders if contender is not None))
