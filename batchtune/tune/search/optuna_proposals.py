"""Asks Optuna's sampler for a point of the space, by what the points so far held."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

STARTUP_TRIALS = 4
"""Points known before the sampler models them; below, it draws at random."""


def proposed_point(
    values: Mapping[str, Sequence[Any]], known: Sequence[tuple[Mapping[str, Any], float]], *, seed: int
) -> dict[str, Any] | None:
    """A point of the grid of `values`; `known` are points with what they held, higher is better.

    None: every knob has one value.
    """
    open_knobs = {name: list(choices) for name, choices in values.items() if len(choices) > 1}
    if not open_knobs:
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, Any] = {
        name: optuna.distributions.IntDistribution(0, len(choices) - 1)
        if _is_ordered(choices)
        else optuna.distributions.CategoricalDistribution(tuple(range(len(choices))))
        for name, choices in open_knobs.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for point, value in known:
            if all(point.get(name) in choices for name, choices in open_knobs.items()):
                study.add_trial(
                    optuna.trial.create_trial(
                        params={name: choices.index(point[name]) for name, choices in open_knobs.items()},
                        distributions=distributions,
                        value=value,
                    )
                )
        asked = study.ask(distributions)
    fixed = {name: choices[0] for name, choices in values.items() if len(choices) == 1}
    return {**fixed, **{name: choices[asked.params[name]] for name, choices in open_knobs.items()}}


def _is_ordered(choices: Sequence[Any]) -> bool:
    return all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices)
