"""Asks Optuna's sampler for points of the space, by what the points so far held."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

STARTUP_TRIALS = 4
"""Points known before the sampler models them; below, it draws at random."""

GOOD = 0.25
"""Share of the points known that the sampler takes as good; Optuna's own tenth is one point of ten."""

AFAR = 3
"""Every so many runs the first point named is of a Sobol sequence, which knows nothing and so is caught nowhere."""

ATTEMPTS = 10
"""Points named one after another, where the first of them were tried already."""


def proposed_points(
    values: Mapping[str, Sequence[Any]],
    known: Sequence[tuple[Mapping[str, Any], float]],
    *,
    seed: int,
    sampler: BaseSampler | None = None,
) -> Iterator[dict[str, Any]]:
    """Points of the grid of `values`, the best hope first, at most ATTEMPTS of them, no two alike.

    `known`: points with what they held, higher is better; those that are not of the grid tell nothing. None where every
    knob has one value. `seed`: one for a whole sweep. `sampler`: another than the usual, without points from afar.
    """
    named = {name: list(choices) for name, choices in values.items() if len(choices) > 1}
    if not named:
        return
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(choices) for name, choices in named.items()}
    seen: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gamma and multivariate are marked as experimental
        study = optuna.create_study(direction="maximize", sampler=sampler or _sampler(seed + len(known)))
        for point, value in known:
            if all(point.get(name) in choices for name, choices in named.items()):
                params = {name: choices.index(point[name]) for name, choices in named.items()}
                study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=distributions, value=value)
                )
        if sampler is None and len(known) % AFAR == 0:
            study.enqueue_trial(_afar(named, seed=seed, turn=len(known) // AFAR))
        for _ in range(ATTEMPTS):
            params = study.ask(distributions).params
            point = {name: choices[params.get(name, 0)] for name, choices in values.items()}
            if point not in seen:
                seen.append(point)
                yield point


def _sampler(seed: int) -> BaseSampler:
    import optuna

    return optuna.samplers.TPESampler(
        seed=seed,
        n_startup_trials=STARTUP_TRIALS,
        multivariate=True,
        gamma=lambda count: max(math.ceil(GOOD * count), 1),
    )


def _afar(named: Mapping[str, Sequence[Any]], *, seed: int, turn: int) -> dict[str, int]:
    """The indices of a turn's point in a Sobol sequence over the grid."""
    from scipy.stats import qmc

    shares = qmc.Sobol(len(named), rng=seed).random(turn + 1)[-1]
    pairs = zip(named.items(), shares, strict=True)
    return {name: int(share * len(choices)) for (name, choices), share in pairs}


def _distribution(choices: Sequence[Any]) -> BaseDistribution:
    """Of the index of a value: numbers have an order, words have none."""
    import optuna

    if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices):
        return optuna.distributions.IntDistribution(0, len(choices) - 1)
    return optuna.distributions.CategoricalDistribution(tuple(range(len(choices))))
