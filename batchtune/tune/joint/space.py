"""Which configurations of a server of several models are there: each model's own parameters, and the shared threads?"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from batchtune.batching.parameters import PARAMETER_NAMES, BatchingParameters, Configuration
from batchtune.errors import BatchingParametersError, ScenarioError
from batchtune.scenario.spec.knobs import configuration_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import KnobValue
from batchtune.scenario.spec.served_models import SHARED, ServedModelSpec
from batchtune.tune.evidence.bracket import ANSWERED, FAR_ANSWERED, BracketRun
from batchtune.tune.trials.trial import Trial, TrialRequest

FAR_OVER = 2.0
"""A load that used so many times a limit missed by far: once is enough, unless the client or the host spoilt it."""


@dataclass(frozen=True, slots=True)
class JointLoad:
    """What a trial of several models says for or against its configuration."""

    trial: Trial

    @property
    def asked(self) -> TrialRequest:
        return self.trial.request

    @property
    def alone(self) -> str:
        """The model that nobody else was loaded beside; "": all were."""
        return next(iter(self.asked.models), "")

    @property
    def trials(self) -> dict[str, Trial]:
        return self.trial.parts

    @property
    def holds(self) -> bool:
        """Whether every model kept its SLO."""
        return bool(self.trials) and all(_kept(trial) for trial in self.trials.values())

    @property
    def run(self) -> BracketRun:
        """A vote for or against its scale; that of the model that did worst."""
        judged = self.trials.values()
        answered = min((_answered(trial) for trial in judged), default=0.0)
        is_far = (
            self.failure is not None
            or answered < FAR_ANSWERED
            or (self.tightness >= FAR_OVER and not self.spoilt)
        )
        return BracketRun(
            trial=self.trial.number,
            rate_rps=self.asked.scale,
            clients=None,
            answered_rps=self.asked.scale * answered,
            latency_s={},
            error_ratio=0.0,
            held=self.holds,
            far=not self.holds and is_far,
            fresh=self.asked.source == "confirm",
            requests=min((measured.requests for measured in self.trial.measurements.values()), default=0),
        )

    @property
    def tightness(self) -> float:
        """The largest share of a latency limit that a model used; above 1, or inf, where a promise is broken."""
        shares = [_share(trial) for trial in self.trials.values()]
        return max(shares, default=math.inf)

    @property
    def failure(self) -> str | None:
        return self.trial.failure

    @property
    def tells(self) -> bool:
        """Whether it says anything of the server: it did not fail, and the client was the limit of no model."""
        return self.failure is None and "INVALID" not in self._verdicts

    @property
    def counts(self) -> bool:
        """Whether it speaks for or against its configuration: it tells of the server, or the server failed it."""
        return self.tells or self.failure is not None

    @property
    def spoilt(self) -> bool:
        """Whether the client was the limit, or the host noisy, for some model: nothing is told of the server."""
        return bool(self._verdicts & {"INVALID", "NOISY"})

    @property
    def _verdicts(self) -> set[str | None]:
        return {measured.verdict for measured in self.trial.measurements.values()}


def loads_of(trials: Iterable[Trial]) -> list[JointLoad]:
    """The loads of a sweep; what else there is, such as floods of runs of before, is passed over."""
    return [JointLoad(trial) for trial in trials if trial.parts and trial.source != "load"]


def _kept(trial: Trial) -> bool:
    verdict = None if trial.measurement is None else trial.measurement.verdict
    kept = trial.state == "complete" and trial.feasible and verdict != "INVALID"
    return kept and _answered(trial) >= ANSWERED


def _answered(trial: Trial) -> float:
    """Share of what was sent that was answered in time, and what a Poisson count may lack; 1: of a closed loop."""
    measured = trial.measurement
    if measured is None:
        return 0.0
    if not measured.offered_rps:
        return 1.0
    spare_rps = 2.0 * math.sqrt(measured.offered_rps / max(measured.window_s, 1e-9))
    return min((measured.throughput_rps.value + spare_rps) / measured.offered_rps, 1.0)


def _share(trial: Trial) -> float:
    if trial.state == "failed" or not trial.constraints:
        return math.inf
    if trial.constraints.get("errors", 0.0) > 0.0:
        return math.inf
    return max((1.0 + value for name, value in trial.constraints.items() if name != "errors"), default=0.0)


Indices = tuple[int, ...]
"""A point: an index for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One parameter of one model; `model` "" is of what all share."""

    model: str
    knob: str
    values: tuple[KnobValue, ...]


class JointSpace:
    """The product of each model's own axes and the shared ones.

    Raises:
        ScenarioError: a combination of values that no server would accept.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        shared = {knob: values for knob, values in scenario.search.space.items() if not _is_own(knob)}
        own_space = {knob: values for knob, values in scenario.search.space.items() if _is_own(knob)}
        axes = [Axis(model="", knob=knob, values=tuple(listed.values)) for knob, listed in shared.items()]
        for own in scenario.target.models:
            common = {knob: listed for knob, listed in own_space.items() if knob not in own.batching}
            space = {**common, **own.space}
            axes += [
                Axis(model=own.name, knob=knob, values=tuple(listed.values)) for knob, listed in space.items()
            ]
        self.axes = tuple(axes)
        self._points: dict[Configuration, Indices | None] = {}
        self._check_ends()

    @property
    def shape(self) -> Indices:
        return tuple(len(axis.values) for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def axes_of(self, model: str) -> tuple[int, ...]:
        """The numbers of the axes that matter to one model: its own and the shared; "" means all."""
        return tuple(at for at, axis in enumerate(self.axes) if not model or axis.model in ("", model))

    def configuration(self, point: Sequence[int]) -> Configuration:
        """What the server is given at this point.

        Raises:
            BatchingParametersError: values that no server would accept.
        """
        configuration = self._given(point)
        self._points.setdefault(configuration, tuple(point))
        return configuration

    def accepted(self, point: Sequence[int]) -> Configuration | None:
        """What the server is given at this point; None: no server would accept it."""
        with suppress(BatchingParametersError):
            return self.configuration(point)
        return None

    def _given(self, point: Sequence[int]) -> Configuration:
        values: dict[str, dict[str, KnobValue]] = {"": {}}
        for axis, index in zip(self.axes, point, strict=True):
            values.setdefault(axis.model, {})[axis.knob] = axis.values[index]
        models = {
            own.name: self._own(own, values[""], values.get(own.name, {}))
            for own in self._scenario.target.models
        }
        first = next(iter(models.values()))
        if first.batching is None:
            return first
        threads = BatchingParameters(
            num_batch_threads=first.batching.num_batch_threads,
            thread_pool_name=first.batching.thread_pool_name,
        )
        own_parameters = tuple(
            (name, replace(batched.batching, num_batch_threads=None, thread_pool_name=None))
            for name, batched in models.items()
            if batched.batching is not None
        )
        return replace(first, batching=threads, models=own_parameters)

    def _own(
        self, own: ServedModelSpec, shared: Mapping[str, KnobValue], point: Mapping[str, KnobValue]
    ) -> Configuration:
        searched = {*self._scenario.search.space, *own.space}
        return configuration_of(
            {**self._scenario.fixed, **own.batching}, {**shared, **point}, searched=searched
        )

    def locate(self, configuration: Configuration) -> Indices | None:
        """A point at which the server is given this configuration; None: there is none."""
        if configuration not in self._points:
            shared = [at for at, axis in enumerate(self.axes) if not axis.model]
            for indices in itertools.product(*(range(self.shape[at]) for at in shared)):
                point = dict(zip(shared, indices, strict=True))
                owned = [self._own_point(own, point, configuration) for own in self._scenario.target.models]
                for part in owned:
                    point |= part or {}
                if None not in owned:
                    self._points[configuration] = tuple(point[at] for at in range(len(self.axes)))
                    break
            else:
                self._points[configuration] = None
        return self._points[configuration]

    def _own_point(
        self, own: ServedModelSpec, shared: Mapping[int, int], configuration: Configuration
    ) -> dict[int, int] | None:
        mine = [at for at, axis in enumerate(self.axes) if axis.model == own.name]
        common = {self.axes[at].knob: self.axes[at].values[index] for at, index in shared.items()}
        for indices in itertools.product(*(range(self.shape[at]) for at in mine)):
            point = dict(zip(mine, indices, strict=True))
            values = {self.axes[at].knob: self.axes[at].values[index] for at, index in point.items()}
            with suppress(BatchingParametersError):
                if self._own(own, common, values) == configuration.of_model(own.name):
                    return point
        return None

    def first(self) -> Configuration:
        """What the server is launched with: the middle, or no batching where no server would accept that."""
        return self.accepted(self.middle()) or Configuration(batching=None)

    def random_point(self, chance: random.Random) -> Indices:
        return tuple(chance.randrange(values) for values in self.shape)

    def middle(self) -> Indices:
        return tuple((values - 1) // 2 for values in self.shape)

    def around(self, point: Indices, axes: Sequence[int]) -> Iterator[list[Indices]]:
        """Points near this one: those a step of one parameter away, two steps, a step of each of two parameters."""
        singles = [((at, step),) for at in axes for step in (-1, 1)]
        doubles = [((at, 2 * step),) for ((at, step),) in singles]
        pairs = [
            (*first, *second)
            for first, second in itertools.combinations(singles, 2)
            if first[0][0] != second[0][0]
        ]
        for moves in (singles, doubles, pairs):
            yield [moved for steps in moves if (moved := self._moved(point, steps)) is not None]

    def _moved(self, point: Indices, steps: Sequence[tuple[int, int]]) -> Indices | None:
        indices = list(point)
        for at, step in steps:
            indices[at] += step
        inside = all(0 <= index < values for index, values in zip(indices, self.shape, strict=True))
        return tuple(indices) if inside else None

    def only(self, point: Indices, axes: Sequence[int]) -> Indices:
        """The point with all but these axes in the middle, so that equals are not tried twice."""
        return tuple(
            index if at in axes else middle
            for at, (index, middle) in enumerate(zip(point, self.middle(), strict=True))
        )

    def side_by_side(self, points: Mapping[str, Indices]) -> list[Indices]:
        """The own parameters of each model from its point, once with what all share from each of them."""
        return list(
            dict.fromkeys(
                tuple(points[axis.model or lender][at] for at, axis in enumerate(self.axes))
                for lender in points
            )
        )

    def _check_ends(self) -> None:
        for at, axis in enumerate(self.axes):
            for index in {0, len(axis.values) - 1}:
                point = [values - 1 for values in self.shape]
                point[at] = index
                try:
                    self.configuration(point)
                except BatchingParametersError as error:
                    where = f"target.models, {axis.model}: " if axis.model else ""
                    raise ScenarioError(f"{where}{axis.knob}: {error.message}", hint=error.hint) from error


def side_by_side(alone: Mapping[str, Configuration]) -> list[Configuration]:
    """What is best for each model alone put together, once with the threads and flags of each."""
    own_by_name = {name: dict(best.models).get(name) for name, best in alone.items()}
    models = tuple((name, own) for name, own in own_by_name.items() if own is not None)
    if any(best.batching is None for best in alone.values()):  # it is off for all models or for none
        return []
    return list(dict.fromkeys(replace(best, models=models) for best in alone.values()))


def _is_own(name: str) -> bool:
    return name in PARAMETER_NAMES and name not in SHARED
