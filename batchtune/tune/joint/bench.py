"""How is one load of several models sent: parameters applied, every model loaded at its rate, what came of it kept?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from batchtune.errors import BatchingParametersError, TargetError
from batchtune.load.live import LiveAggregate
from batchtune.measure.validity.host import HostGuard
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.tfserving import ServedModel, TfServingTarget
from batchtune.tune.bench import SEED_STRIDE
from batchtune.tune.joint.space import JointAsk, JointLoad
from batchtune.tune.loader import Fleet
from batchtune.tune.together import ModelLoad, load_together
from batchtune.tune.trials.trial import Company, FinishedTrial, Trial, TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A load, and the trials behind it with their requests."""

    load: JointLoad
    trials: tuple[FinishedTrial, ...]


class JointBench:
    """A launched server of several models, and a fleet for each of them."""

    def __init__(
        self,
        scenario: Scenario,
        server: TfServingTarget,
        fleets: Mapping[str, Fleet],
        *,
        guard: HostGuard | None = None,
        on_live: Callable[[str, LiveAggregate], None] = lambda _name, _live: None,
    ) -> None:
        self._scenario = scenario
        self._server = server
        self._fleets = fleets
        self._guard = HostGuard() if guard is None else guard
        self._on_live = on_live

    def run(self, ask: JointAsk, *, number: int, first_trial: int) -> Finished:
        """Send a load; where the server refuses the parameters or dies every trial of it failed.

        Raises:
            MeasurementInvalidError: a load generator died.
            UsageError: requests that do not fit a model.
        """
        loaded = [
            own.name for own in self._scenario.target.models if ask.kind != "alone" or own.name == ask.of
        ]
        try:
            self._server.apply(ask.configuration)
            done = load_together(
                [self._model_load(name, ask) for name in loaded],
                first_number=first_trial,
                source=ask.source,
                all_or_none=True,
                guard=self._guard,
                on_live=self._on_live,
            ).finished
        except (TargetError, BatchingParametersError) as error:
            done = tuple(
                FinishedTrial(trial=_failed(ask, first_trial + at, error.message), samples=None)
                for at, _ in enumerate(loaded)
            )
        trials = tuple(
            replace(finished, trial=_placed(finished.trial, name, ask, number))
            for name, finished in zip(loaded, done, strict=True)
        )
        named = {name: finished.trial for name, finished in zip(loaded, trials, strict=True)}
        return Finished(load=JointLoad(number=number, ask=ask, trials=named), trials=trials)

    def _model_load(self, name: str, ask: JointAsk) -> ModelLoad:
        own = ask.configuration.of_model(name)
        return ModelLoad(
            name=name,
            scenario=model_scenario(self._scenario, name, ask),
            configuration=own,
            target=ServedModel(self._server, name, own),
            fleet=self._fleets[name],
        )


def model_scenario(scenario: Scenario, name: str, ask: JointAsk) -> Scenario:
    """One model's part in a load: its rate, and a seed of the block."""
    own = scenario.of_models()[name]
    seed = own.load.seed + SEED_STRIDE * (ask.block or 0)
    load = own.load.model_copy(update={"seed": seed})
    if load.open_loop:
        load = load.model_copy(update={"rate_rps": (load.rate_rps or 0.0) * ask.factor})
    objective = "latency" if load.open_loop else "throughput"
    return own.model_copy(update={"load": load, "objective": objective})


def _placed(trial: Trial, name: str, ask: JointAsk, number: int) -> Trial:
    company = Company(model=name, load=number, kind=ask.kind, factor=ask.factor, of=ask.of)
    request = replace(trial.request, configuration=ask.configuration, block=ask.block)
    return replace(trial, request=request, company=company)


def _failed(ask: JointAsk, number: int, why: str) -> Trial:
    return Trial(
        number=number,
        state="failed",
        failure=why,
        seed=0,
        seconds=0.0,
        started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        request=TrialRequest(configuration=ask.configuration, source=ask.source, reason=""),
    )
