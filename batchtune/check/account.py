"""What one check says in all: the verdict, where a change comes from, what it compared, and what it took."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchtune.archive.run import CHECK
from batchtune.check.gate import ERROR_RATE, Finding, Gate
from batchtune.check.limit import Attribution, attribute
from batchtune.check.paired_check import CHECK_VERSION, Conclusion, Verdict
from batchtune.errors import ArchiveError, TargetError
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, coded, from_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, figures_of, runs_of
from batchtune.tune.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result of one check, as it is saved and printed: verdict, cause of a change, what was compared.

    `baseline` and `candidate`: names of the two sides. `attribution`: where a change comes from; None without
    a change or without figures that say. `seconds`: how long the check took. `run`: folder that keeps the
    runs. `note`: what to know before believing the verdict, "" for nothing. `stored`: the baseline's figures
    are from a file, measured at another time, so that no error rate holds.
    """

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
        """Return values that JSON takes: those of `Conclusion.to_dict` and the account's own.

        `error_rate` is null where the baseline was stored.
        """
        return {
            **self.conclusion.to_dict(),
            "schema_version": CHECK_VERSION,
            "error_rate": None if self.stored else self.conclusion.error_rate,
            "scenario": self.scenario,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "attribution": None if self.attribution is None else self.attribution.to_dict(),
            "seconds": self.seconds,
            "run": self.run,
            "note": self.note,
        }


def judged(conclusion: Conclusion, trials: Sequence[Trial], variants: Sequence[Variant]) -> Conclusion:
    """Return the conclusion, with another verdict where the gates alone do not decide.

    The verdict becomes INVALID where the load generator or the host spoilt a side's runs, and SLO MISSED
    where most runs of the candidate, the last variant, fail the scenario's SLO. A disturbed host makes no
    changes, it hides them: a REGRESSED that both phases flagged stays.
    """
    if conclusion.target_failed:
        return conclusion
    void = _void(trials, variants, by_host=conclusion.verdict != "REGRESSED")
    if void:
        return replace(conclusion, verdict="INVALID", reason=void)
    kept: tuple[Verdict, ...] = ("OK", "IMPROVED", "INCONCLUSIVE")
    for candidate in variants[-1].arms():
        missed = _slo_missed(trials, candidate.name, candidate.scenario)
        if missed is not None and conclusion.verdict in kept:
            reason = coded(
                "model_misses" if candidate.model else "side_misses", side=candidate.name, why=missed
            )
            return replace(conclusion, verdict="SLO MISSED", reason=reason)
    return conclusion


def attributed(
    conclusion: Conclusion, trials: Sequence[Trial], *, baseline: str, candidate: str
) -> Attribution | None:
    """Find where a change comes from, by the runs of both sides.

    None where no gate of a time or rate found a change, and with several models, whose requests share one
    server.
    """
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


def _void(trials: Sequence[Trial], variants: Sequence[Variant], *, by_host: bool) -> Coded | None:
    """Return why the figures say nothing about the servers, as a code; None where they do.

    `by_host`: a disturbed host counts too, not only a load generator at its limit.
    """
    for arm in (arm for variant in variants for arm in variant.arms()):
        figures = figures_of(arm, trials)
        if figures.client_limited:
            return coded("side_client_limited", side=arm.name)
        if by_host and figures.disturbed:
            return coded("side_disturbed", side=arm.name)
    return None


def _slo_missed(trials: Sequence[Trial], name: str, scenario: Scenario) -> Coded | None:
    """Return why the last of the failed runs missed the SLO, where more than half of the runs missed it; else
    None.

    None also where the scenario states no SLO.
    """
    if not scenario.slo.promises:
        return None
    measured = [trial.measurement for trial in runs_of(trials, name).values()]
    failed = [run for run in measured if run is not None and run.verdict == "FAIL"]
    return failed[-1].verdict_reason if 2 * len(failed) > len(measured) else None


# Read again from the folder of a run.


def read_account(run: Path) -> Account:
    """Read the account that a check saved in the folder of its run.

    Raises:
        ArchiveError: there is none, it is cut short, or of another version.
    """
    path = run / CHECK
    try:
        document = json.loads(path.read_bytes())
        if document["schema_version"] != CHECK_VERSION:
            raise ArchiveError(
                f"{path}: schema_version {document['schema_version']!r}, and this batchtune reads {CHECK_VERSION}"
            )
        return account_from(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{path}: not a whole check: {error!r}") from error


def account_from(document: Mapping[str, Any]) -> Account:
    """Make an account from what `Account.to_dict` returned; keys that older versions did not write get their
    defaults.

    Raises:
        KeyError, TypeError, ValueError: the document is no account.
    """
    stored = document["error_rate"] is None
    attribution = document["attribution"]
    conclusion = Conclusion(
        verdict=document["verdict"],
        findings=tuple(_finding(gate) for gate in document["gates"]),
        blocks=int(document["blocks"]),
        fresh_blocks=int(document["fresh_blocks"]),
        blocks_max=int(document["blocks_max"]),
        reason=as_text(document["reason"]) if document["reason"] else None,
        target_failed=bool(document.get("target_failed", document["exit_code"] == TargetError.exit_code)),
        error_rate=ERROR_RATE if stored else float(document["error_rate"]),
        confirms=bool(document.get("confirms", True)),
    )
    return Account(
        scenario=str(document["scenario"]),
        baseline=str(document["baseline"]),
        candidate=str(document["candidate"]),
        conclusion=conclusion,
        attribution=None if attribution is None else from_plain(Attribution, attribution),
        seconds=float(document["seconds"]),
        run=document["run"],
        note=str(document["note"]),
        stored=stored,
    )


def _finding(document: Mapping[str, Any]) -> Finding:
    gate = Gate(
        metric=document["metric"],
        margin=float(document["margin_asked"]),
        is_default=bool(document.get("is_default", False)),
        model=str(document.get("model", "")),
    )
    change = document["change"]
    ends = sorted(
        gate.worsening_of(without if change[name] is None else float(change[name]))
        for name, without in (("low", -math.inf), ("high", math.inf))
    )
    value = _figure(change["value"])
    return Finding(
        gate=gate,
        state=document["state"],
        blocks=int(document["blocks"]),
        worsening=Estimate(
            value=math.nan if math.isnan(value) else gate.worsening_of(value), low=ends[0], high=ends[1]
        ),
        margin=_figure(document["margin"]),
        before=_figure(document["before"]),
        after=_figure(document["after"]),
        confirmed=document["confirmed"],
    )


def _figure(value: Any) -> float:
    return math.nan if value is None else float(value)
