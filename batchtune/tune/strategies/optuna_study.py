"""How does the ledger look to an Optuna sampler?

As a study that is built anew for each proposal, with one entry a configuration: the pooled figure of all its runs, as
samplers take the best single value for the truth and would chase noise. Every entry has every constraint, relative to
its limit and in one order: Optuna compares constraints by position and adds up their violations. Knobs are ordinal
numbers. Nothing that was not measured enters: a simulated value would soon be the study's best.

Some samplers keep a state of their own in the study, which a study built anew has lost: NSGA-II the generation of each
trial, so its trials are asked for and told again in order; the Sobol sequence its place, so it is followed from its
start, past what was measured.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import optuna

from batchtune.batching.parameters import Configuration
from batchtune.errors import UsageError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.search import SamplerKind
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.evidence.run_noise import geometric_mean
from batchtune.tune.trials.space import Space

optuna.logging.set_verbosity(optuna.logging.ERROR)

Direction: TypeAlias = Literal["maximize", "minimize"]


_NEEDS: Mapping[SamplerKind, str] = {"gp": "torch", "qmc": "scipy"}
_EXTRA = {"torch": "torch", "scipy": "qmc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One configuration as a sampler sees it: ordinal parameters, the objectives and relative violations."""

    params: dict[str, int]
    values: tuple[float, ...]
    constraints: dict[str, float]


def check_sampler(kind: SamplerKind) -> None:
    """Raise UsageError when a package that the sampler needs is not installed."""
    package = _NEEDS.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UsageError(
            f"search.sampler: {kind} needs {package}, which is not installed",
            hint=f"pip install 'batchtune[{_EXTRA[package]}]', or set search.sampler to tpe",
        )


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """One ordinal number a knob, in the order of the space, those of barred sizes left out."""
    return {
        name: optuna.distributions.IntDistribution(0, count - 1) for name, count in space.open_shape.items()
    }


def entries(
    pooled: Sequence[Pooled],
    failed: Mapping[Configuration, dict[str, Any] | None],
    *,
    space: Space,
    kind: SamplerKind,
    maximise: bool,
) -> list[Entry]:
    """The measured points of the space, then those that failed, as bad as the worst and missing every promise.

    Points of sizes that are barred are left out: no proposal may lie there.

    For nsga2 the values are the objective and p95; where the objective is p95, they are p95 and throughput.
    """
    goals = directions(kind, maximise=maximise)
    measured = [
        (candidate, _values(candidate, kind=kind, maximise=maximise))
        for candidate in pooled
        if candidate.point is not None
    ]
    worst = [
        (min if goal == "maximize" else max)(
            (v[at] for _, v in measured if math.isfinite(v[at])), default=0.0
        )
        for at, goal in enumerate(goals)
    ]
    names = list(pooled[0].constraints) if pooled else []
    kept = [
        Entry(
            params=_params(space, candidate.point or {}),
            values=tuple(
                value if math.isfinite(value) else bad for value, bad in zip(values, worst, strict=True)
            ),
            constraints={name: candidate.constraints.get(name, policy.WORST_VIOLATION) for name in names},
        )
        for candidate, values in measured
    ]
    missed = dict.fromkeys(names, policy.WORST_VIOLATION)
    kept += [
        Entry(params=_params(space, point), values=tuple(worst), constraints=missed)
        for point in failed.values()
        if point is not None
    ]
    counts = space.open_shape
    return [entry for entry in kept if all(index < counts[name] for name, index in entry.params.items())]


def directions(kind: SamplerKind, *, maximise: bool) -> list[Direction]:
    """Optuna's words for what is wanted of each of an entry's values."""
    first: Direction = "maximize" if maximise else "minimize"
    second: Direction = "minimize" if maximise else "maximize"
    return [first, second] if kind == "nsga2" else [first]


def build_study(
    ledger: Sequence[Entry], *, space: Space, kind: SamplerKind, maximise: bool, seed: int, turn: int
) -> optuna.Study:
    """A study of these entries that can be asked; `turn` counts the proposals so far and moves the seed on."""
    check_sampler(kind)
    goals = directions(kind, maximise=maximise)
    sampler = _sampler(kind, seed=seed, turn=turn)
    study = optuna.create_study(directions=goals, sampler=sampler)
    searched = distributions(space)
    match kind:
        case "tpe" | "gp":
            study.add_trials([_frozen(entry, searched) for entry in ledger])
        case "nsga2":
            for entry in ledger:
                _replay(study, sampler, entry, searched)
        case "qmc":
            study.add_trial(_marker(searched))
        case "random":
            pass
    return study


def _sampler(kind: SamplerKind, *, seed: int, turn: int) -> optuna.samplers.BaseSampler:
    match kind:
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed + turn, n_startup_trials=policy.STARTUP_TRIALS)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed + turn, n_startup_trials=policy.STARTUP_TRIALS)
        case "qmc":
            return _sobol(seed)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed + turn, population_size=policy.NSGA2_POPULATION)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed + turn)


def _sobol(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():  # it has been called experimental since Optuna 3.0
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def _frozen(
    entry: Entry, searched: dict[str, optuna.distributions.BaseDistribution]
) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(
        params=entry.params, distributions=searched, values=entry.values, constraints=entry.constraints
    )


def _replay(
    study: optuna.Study,
    sampler: optuna.samplers.BaseSampler,
    entry: Entry,
    searched: dict[str, optuna.distributions.BaseDistribution],
) -> None:
    """Ask for the entry and tell it; what is enqueued gets no generation by itself, and would be nobody's parent."""
    study.enqueue_trial(entry.params)
    trial = study.ask(fixed_distributions=searched)
    if isinstance(sampler, optuna.samplers.NSGAIISampler):
        sampler.get_trial_generation(study, study.get_trials(deepcopy=False)[-1])
    for name, value in entry.constraints.items():
        trial.set_constraint(name, value)
    study.tell(trial, list(entry.values))


def _marker(searched: dict[str, optuna.distributions.BaseDistribution]) -> optuna.trial.FrozenTrial:
    """The sequence learns the space from the first trial, and never looks at a value."""
    several = {name: knob for name, knob in searched.items() if not knob.single()}
    return optuna.trial.create_trial(params=dict.fromkeys(several, 0), distributions=several, value=0.0)


def _values(candidate: Pooled, *, kind: SamplerKind, maximise: bool) -> tuple[float, ...]:
    if kind != "nsga2":
        return (candidate.value,)
    if maximise:
        return candidate.value, candidate.latency_s.get("p95", math.inf)
    throughputs: list[Estimate] = [run.throughput_rps for run in candidate.runs]
    return candidate.value, geometric_mean(rate.value for rate in throughputs)


def _params(space: Space, point: Mapping[str, Any]) -> dict[str, int]:
    return dict(zip(space.shape, space.indices(point), strict=True))
