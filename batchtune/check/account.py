"""What does one check say in all: the verdict, where a change comes from, what it compared, and what it took?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchtune.check.limit import Attribution, attribute
from batchtune.check.paired_check import Conclusion, Verdict
from batchtune.plain_values import fields_to_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, figures_of, runs_of
from batchtune.tune.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """`baseline` and `candidate` are the names of the two sides, `run` the folder that keeps the runs; `note` is what
    to know before believing it (empty: nothing). `attribution` is None where nothing changed, or nothing is known.
    `stored`: the baseline's figures are of another session, so that no error rate holds."""

    scenario: str
    baseline: str
    candidate: str
    conclusion: Conclusion
    attribution: Attribution | None
    seconds: float
    run: str | None = None
    note: str = ""
    stored: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON; without an error rate where the baseline was stored."""
        plain = fields_to_plain(self)
        if plain.pop("stored"):
            plain["error_rate"] = None
        return {**plain.pop("conclusion"), **plain}


def judged(conclusion: Conclusion, trials: Sequence[Trial], variants: Sequence[Variant]) -> Conclusion:
    """The conclusion, unless the runs are void or the candidate, the last variant, misses the scenario's SLO.

    A host that is disturbed hides changes and makes none: what two phases flag beside each other stands.
    """
    if conclusion.target_failed:
        return conclusion
    void = _void(trials, variants, by_host=conclusion.verdict != "REGRESSED")
    if void:
        return replace(conclusion, verdict="INVALID", reason=void)
    kept: tuple[Verdict, ...] = ("OK", "IMPROVED", "INCONCLUSIVE")
    for candidate in variants[-1].arms():
        missed = _slo_missed(trials, candidate.name, candidate.scenario)
        if missed and conclusion.verdict in kept:
            reason = f"{candidate.name} misses {'its' if candidate.model else 'the'} SLO: {missed}"
            return replace(conclusion, verdict="SLO MISSED", reason=reason)
    return conclusion


def attributed(
    conclusion: Conclusion, trials: Sequence[Trial], *, baseline: str, candidate: str
) -> Attribution | None:
    """Where a change comes from; None where no gate of time or rate tells one, and of several models, of which the
    server has one account."""
    if any(trial.parts or trial.model for trial in trials):
        return None
    moved = {
        finding.gate.metric for finding in conclusion.findings if finding.state in ("regressed", "improved")
    }
    # What the parts of a request's way do not explain.
    without_time = frozenset({"errors", "memory", "gpu_memory", "startup"})
    if not moved - without_time:
        return None
    sides = [
        [trial.measurement for trial in runs_of(trials, name).values() if trial.measurement is not None]
        for name in (baseline, candidate)
    ]
    cpu_s = [
        (finding.before, finding.after)
        for finding in conclusion.findings
        if finding.gate.metric == "cpu" and finding.state != "not measured"
    ]
    return attribute(sides[0], sides[1], cpu_s=cpu_s[0] if cpu_s else None)


def _void(trials: Sequence[Trial], variants: Sequence[Variant], *, by_host: bool) -> str:
    """Why the figures are not the servers'; empty: they are."""
    for arm in (arm for variant in variants for arm in variant.arms()):
        figures = figures_of(arm, trials)
        if figures.client_limited:
            return f"the load generator was the limit, not the server of {arm.name}"
        if by_host and figures.disturbed:
            return f"the host disturbed every run of {arm.name}, also when it was repeated"
    return ""


def _slo_missed(trials: Sequence[Trial], name: str, scenario: Scenario) -> str:
    """Why most runs fail the test of the SLO; empty: they do not, or nothing is promised."""
    if not scenario.slo.promises:
        return ""
    measured = [trial.measurement for trial in runs_of(trials, name).values()]
    failed = [run for run in measured if run is not None and run.verdict == "FAIL"]
    return failed[-1].verdict_reason if 2 * len(failed) > len(measured) else ""
