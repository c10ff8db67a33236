"""Names points of the space: by the throughput × interval rule, by TensorFlow Serving's tuning guide, and by Optuna's
sampler, from the results of the points that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE
from batchtune.plain_values import Coded, coded
from batchtune.scenario.spec.scenario import Scenario
from batchtune.system import usable_threads
from batchtune.tune.search.contenders import SIZE, THREADS

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

# The throughput × interval rule.
#
# Published with Cortex's server-side batching: measure the throughput X without batching, choose the largest interval
# I that the application accepts, set `max_batch_size = X·I` and the batch timeout to I. X counts rows, not requests.
#
# The interval is what the SLO leaves. A request waits at most I for its batch to close; then the batch is executed,
# which for X·I rows takes at worst (no economy of scale at all) X·I/X = I; and everything around the model costs the
# latency L of a lone request. So 2·I + L ≤ SLO, and
#
#     I = (SLO − L) / 2        max_batch_size = round(X·I)        batch_timeout_micros = I
#
# The same 2·τ(b) ≤ SLO is Nexus's rule (Shen et al., SOSP 2019). Without an SLO on latency, I = L: batching may then
# double the latency of a lone request.


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """The parameters by the throughput × interval rule, not limited to a space, and the figures that they were computed
    from.

    `interval_s` 0: the SLO leaves no time to wait for a batch. `slo_s` None: there is no latency limit.
    """

    rows_per_s: float
    lone_latency_s: float
    slo_s: float | None
    interval_s: float
    max_batch_size: int
    batch_timeout_micros: int

    @property
    def point(self) -> dict[str, Any]:
        """The rule's parameters by name: `{"max_batch_size": 8, "batch_timeout_micros": 2000}`."""
        return {"max_batch_size": self.max_batch_size, "batch_timeout_micros": self.batch_timeout_micros}

    def arithmetic(self) -> Coded:
        """Return a finding with the figures from which the batch size was computed."""
        code = "rule_no_interval"
        if self.slo_s is None:
            code = "rule_without_slo"
        elif self.interval_s > 0:
            code = "rule"
        return coded(
            code,
            x=self.rows_per_s,
            interval_s=self.interval_s,
            slo_s=self.slo_s,
            lone_s=self.lone_latency_s,
            size=self.max_batch_size,
        )


def throughput_interval_rule(
    *, rows_per_s: float, lone_latency_s: float, limits: Mapping[str, float], rows_per_request: int
) -> RuleAnswer:
    """Compute the parameters by the throughput × interval rule.

    `rows_per_s`: X, rows/s without batching. `lone_latency_s`: L, the latency of a lone request. `limits`: quantile
    name -> the SLO's limit in seconds; the limit of p95 is used, else the tightest one. The max_batch_size is at least
    `rows_per_request`: a smaller one would refuse every request.
    """
    slo_s = limits.get("p95", min(limits.values(), default=None))
    interval_s = lone_latency_s if slo_s is None else max(0.0, (slo_s - lone_latency_s) / 2.0)
    return RuleAnswer(
        rows_per_s=rows_per_s,
        lone_latency_s=lone_latency_s,
        slo_s=slo_s,
        interval_s=interval_s,
        max_batch_size=max(round(rows_per_s * interval_s), rows_per_request),
        batch_timeout_micros=round(interval_s * 1e6),
    )


def guide_point(scenario: Scenario, values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the parameters, name -> value, that TensorFlow Serving's tuning guide starts from: as many threads as CPUs
    (not for Triton), the largest batch size, no timeout. `values`: parameter -> its values in the space.

    Source: tensorflow_serving/batching/README.md, "Performance Tuning".
    """
    sizes = [value for value in values.get(SIZE, ()) if isinstance(value, int)]
    wanted: dict[str, Any] = {"batch_timeout_micros": 0, SIZE: max(sizes, default=DEFAULT_MAX_BATCH_SIZE)}
    if scenario.dialect != "triton":
        wanted[THREADS] = usable_threads(scenario.target.cpus)
    return wanted


# Optuna's sampler.

STARTUP_TRIALS = 4
"""Results that the sampler needs before it models them; with fewer it draws points at random (proposers.py)."""

ATTEMPTS = 10
"""Points that are proposed at most: the caller may have tried the first of them already (proposers.py)."""


def proposed_points(
    values: Mapping[str, Sequence[Any]],
    known: Sequence[tuple[Mapping[str, Any], float]],
    *,
    seed: int,
    sampler: BaseSampler | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield at most ATTEMPTS different points that Optuna proposes, the most promising first.

    `values`: parameter -> its values; the grid of them is searched. `known`: (point, result), higher is better; points
    outside the grid are ignored. `sampler`: in place of `usual_sampler`, for benchmarks. Yields nothing where each
    parameter has one value only.
    """
    named = {name: list(choices) for name, choices in values.items() if len(choices) > 1}
    if not named:
        return
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(choices) for name, choices in named.items()}
    named_before: list[dict[str, Any]] = []
    study = optuna.create_study(direction="maximize", sampler=sampler or usual_sampler(seed))
    for point, value in known:
        if all(point.get(name) in choices for name, choices in named.items()):
            params = {name: choices.index(point[name]) for name, choices in named.items()}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=value)
            )
    for _ in range(ATTEMPTS):
        params = study.ask(distributions).params
        point = {name: choices[params.get(name, 0)] for name, choices in values.items()}
        if point not in named_before:
            named_before.append(point)
            yield point


def usual_sampler(seed: int) -> BaseSampler:
    """Make the sampler: TPE that models all parameters together, the best of those in
    tests/benchmarks/noisy/proposers.py beside the leader's neighbours.

    Figures there: median share of the best point's value after 40 proposals with 5 % noise, 30 seeds, in a space of
    three parameters · with six words · of five parameters · of five with a local optimum that no single step leaves.
    Neighbours alone: 96 · 96 · 84 · 70 %. Neighbours and random points: 97 · 96 · 87 · 76 %; a Sobol sequence: 97 · 96
    · 89 · 88 %; TPE of each parameter by itself: 99 · 97 · 92 · 93 %; this: 98 · 96 · 93 · 93 % (means in the last
    space: 86 and 89 %). If the sampler learns the neighbours' results too, it stays in the local optimum: 71 %. After
    20 proposals: this 97 · 96 · 87 · 75 %, neighbours 96 · 96 · 84 · 70 %.
    """
    import optuna

    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)


def _distribution(choices: Sequence[Any]) -> BaseDistribution:
    """Optuna's distribution of the index of a value: ordered for numbers, without order for words."""
    import optuna

    if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices):
        return optuna.distributions.IntDistribution(0, len(choices) - 1)
    return optuna.distributions.CategoricalDistribution(tuple(range(len(choices))))
