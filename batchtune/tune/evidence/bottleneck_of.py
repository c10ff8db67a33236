"""What limits a configuration: one trial of it, or several runs together?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final, Literal

from batchtune.batching.parameters import Configuration
from batchtune.cpus import usable_cpus
from batchtune.measure.bottleneck import Bottleneck, find_bottleneck
from batchtune.measure.bottleneck_advice import TRY_BATCHING
from batchtune.measure.measurement import Measurement
from batchtune.measure.validity.server_settings import settings_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

_SEARCHED: Final[Mapping[str, tuple[str, bool]]] = {
    "batch_timeout": ("batch_timeout_micros", True),
    "batch_threads": ("num_batch_threads", False),
}
"""The parameter that is advised to change, and whether it is advised to be less."""
_SPOILT: Final[Mapping[str, Literal["client", "host"]]] = {"INVALID": "client", "NOISY": "host"}


def trial_bottleneck(trial: Trial, scenario: Scenario | None = None) -> Bottleneck | None:
    """What limits a load test of its own, a noisy host and a slow client included; None: it measured nothing."""
    if trial.measurement is None:
        return None
    configuration = trial.configuration
    verdict = _verdict(configuration, trial.measurement, scenario)
    if verdict.kind == "device" and configuration.known and configuration.batching is None:
        return replace(verdict, advice=f"{verdict.advice}; {TRY_BATCHING}")
    return verdict


def usual_bottleneck(
    configuration: Configuration, measured: Sequence[Measurement], *, scenario: Scenario | None = None
) -> Bottleneck | None:
    """What limits most of the runs, in the words of the last of them; None without runs.

    `scenario` tells the server's flags, so that its request threads are known. Noise of the host is left out: it
    comes and goes between runs and is told as a caveat.
    """
    verdicts = [_verdict(configuration, measurement, scenario, blame_host=False) for measurement in measured]
    if not verdicts:
        return None
    kind = Counter(verdict.kind for verdict in verdicts).most_common(1)[0][0]
    return [verdict for verdict in verdicts if verdict.kind == kind][-1]


def searched_bottleneck(
    configuration: Configuration,
    measured: Sequence[Measurement],
    *,
    tried: Iterable[Configuration],
    scenario: Scenario,
) -> Bottleneck | None:
    """The same of what a search chose: no advice to do what was tried, `tried`, and not chosen."""
    verdict = usual_bottleneck(configuration, measured, scenario=scenario)
    name, less = _SEARCHED.get("none" if verdict is None else verdict.kind, ("", False))
    if verdict is None or not name:
        return verdict
    ours, *others = (
        in_force(other, name, cpus=scenario.target.cpus)
        for other in (configuration, *tried)
        if other.batching is not None
    )
    if not any(other < ours if less else other > ours for other in others):
        return verdict
    which = f"a {'lower' if less else 'higher'} {configuration.word(name)}"
    return replace(verdict, advice=f"{which} was tried, and is no better here")


def spoilt_by(trial: Trial) -> Literal["client", "host"] | None:
    """Who made its figures void; None: they are the server's, or there are none.

    A verdict that was reached in spite of a late client or a noisy host stands.
    """
    measured = trial.measurement
    if measured is None:
        return None
    if measured.verdict is not None:
        return _SPOILT.get(measured.verdict)
    kind = _verdict(trial.configuration, measured).kind
    return "client" if kind == "client" else "host" if kind == "host_noise" else None


def rows_per_request(measured: Measurement) -> float | None:
    """The mean; None when no request was answered."""
    requests_per_s = measured.throughput_rps.value
    return measured.throughput_rows_per_s.value / requests_per_s if requests_per_s > 0.0 else None


def _verdict(
    configuration: Configuration,
    measured: Measurement,
    scenario: Scenario | None = None,
    *,
    blame_host: bool = True,
) -> Bottleneck:
    cpus = None if scenario is None else scenario.target.cpus
    settings = settings_of(
        configuration,
        rows_per_request=rows_per_request(measured) or 1.0,
        server_cores=_cores(None if cpus is None else tuple(cpus)),
        flags={} if scenario is None else scenario.target.flags,
        protocol=None if scenario is None else scenario.request.protocol,
        cpus=cpus,
        known=configuration.known,
    )
    return find_bottleneck(measured, settings, blame_host=blame_host)


@cache
def _cores(cpus: tuple[int, ...] | None) -> float:
    """CPUs' worth of time on these; the control groups are read once, not for each of a report's 2,000 trials."""
    return usable_cpus(cpus)
