"""The course of a paired check from the first look to the verdict: how many blocks it takes, and what they say.

The screen stops at the first look where some gate is flagged or all are cleared. What it flags, and what is
still open, is measured once more, on fresh blocks after both servers were started anew, by the same rule and judged by
these alone. Only what both phases flag is a regression. What has loads of its own, the CPU time of a request, is
measured only where nothing else is flagged, and not again in a phase that has cleared it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal

from batchtune.check.account import Conclusion, Verdict
from batchtune.check.gate import (
    ERROR_RATE,
    RANK_FIRST,
    BlockFigures,
    Finding,
    Gate,
    Look,
    State,
    figure_name,
    find,
    looks_up_to,
    planned_looks,
)
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import Coded, coded
from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX, METRICS, Metric
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, paired_arms
from batchtune.tune.compare.result import figures_of, runs_of
from batchtune.tune.evidence.best_point import rows_per_request
from batchtune.tune.trials.trial import Trial

UNTOLD: Final = (math.nan, math.nan)
"""Stands for a figure, (before, after), that was to be measured and could not be."""


def paired_figures(
    trials: Sequence[Trial],
    before: Variant,
    after: Variant,
    *,
    cpu: Mapping[int, tuple[float, float]] = MappingProxyType({}),
) -> list[BlockFigures]:
    """Return the figures of both variants, in the units of `run_figures`, for each block that both completed, in the
    order of the blocks.

    With several models those of each, under names such as `ranker:p95`. `cpu`: block -> CPU seconds per request,
    (baseline, candidate), where those were measured by loads of their own; nan where that failed. They replace the
    runs' own CPU figures in every block where at least half of these entries are known (a block without one is nan),
    else in none: the two are never mixed.
    """
    arms = [
        (arm.model, runs_of(trials, left.name), runs_of(trials, arm.name))
        for left, arm in paired_arms(before, after)
    ]
    both = sorted(set.intersection(*({*left} & {*right} for _, left, right in arms)))
    asked = [cpu[block] for block in both if block in cpu]
    is_apart = bool(asked) and 2 * sum(not math.isnan(pair[0]) for pair in asked) >= len(asked)
    blocks: list[BlockFigures] = []
    for block in both:
        figures: dict[str, tuple[float, float]] = {}
        for model, left, right in arms:
            figures |= _side_by_side(left[block], right[block], model=model)
        blocks.append({**figures, "cpu": cpu.get(block, UNTOLD)} if is_apart else figures)
    return blocks


def _side_by_side(before: Trial, after: Trial, *, model: str) -> dict[str, tuple[float, float]]:
    """Return name of the figure -> (before, after) of two runs."""
    left, right = run_figures(before), run_figures(after)
    return {
        figure_name(model, metric): (left.get(metric, math.nan), right.get(metric, math.nan))
        for metric in METRICS
    }


def run_figures(trial: Trial) -> Mapping[Metric, float]:
    """Return every figure of one run: requests/s, latencies and start-up in seconds, CPU and GPU in seconds per
    request, memory in bytes, errors as a share of requests.

    nan: not measured; every figure is nan where the run has no measurement. Of a run whose answers are not streams,
    figures of streams are left out. The capacity of a run that met the SLO at no rate is 0.
    """
    measured = trial.measurement
    if measured is None:
        return dict.fromkeys(METRICS, math.nan)
    held_none = 0.0 if trial.state == "complete" else math.nan
    return {
        "throughput": measured.throughput_rps.value,
        "capacity": held_none if trial.objective is None else trial.objective.value,
        "errors": measured.error_ratio,
        "cpu": _per_request(measured, None if measured.server is None else measured.server.server_cpu_s),
        "gpu": _per_request(measured, _gpu_s(measured)),
        "memory": _told(None if measured.server is None else measured.server.memory_peak_bytes),
        "gpu_memory": _told(None if measured.server is None else measured.server.gpu_memory_used_bytes),
        "startup": _told(trial.startup_s),
        **{metric: measured.latency_s[metric].value for metric in METRICS if metric in measured.latency_s},
    }


def _gpu_s(measured: Measurement) -> float | None:
    server = measured.server
    if server is None or server.gpu_busy_ratio is None:
        return None
    return server.gpu_busy_ratio * server.duration_s


def _told(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _per_request(measured: Measurement, seconds: float | None) -> float:
    """Return `seconds`, which the server's counters report, over the requests that these count, those of the
    warm-up too.

    nan where either is not known.
    """
    server = measured.server
    if server is None or not seconds:
        return math.nan
    requests = float(sum(server.requests_by_status.values()))
    rows = rows_per_request(measured)
    if not requests and rows:
        requests = server.rows / rows
    return seconds / requests if requests else math.nan


Phase = Literal["screen", "confirmation"]

Measure = Callable[[Phase, int, Collection[Gate]], Sequence[BlockFigures]]
"""Measures until a phase has the given number of blocks, and returns all blocks of that phase.

Called with (phase, blocks, gates): only what these gates need is measured. Fewer blocks come back where they
could not be measured.
"""


def run_check(
    gates: Sequence[Gate],
    measure: Measure,
    *,
    blocks_max: int = CHECK_BLOCKS_MAX,
    on_look: Callable[[Phase, int, Sequence[Finding]], None] = lambda _phase, _blocks, _findings: None,
) -> Conclusion:
    """Measure blocks until a gate is flagged as regressed, no gate is open, or there are `blocks_max` (the screen);
    what is flagged is then measured again (the confirmation).

    The confirmation judges the flagged gates, and the open ones but cpu, by at most `blocks_max` new blocks alone.
    `on_look(phase, blocks, findings)` is called after each look.
    """
    counts = looks_up_to(blocks_max)
    settled: dict[tuple[Phase, Gate], Finding] = {}

    # What takes more time than the runs: once cleared it stays so. The looks spend their error rate whether
    # used or not, so that no verdict is dearer for it; it halves a check of equal servers
    # (tests/benchmarks/check/live_check.py).
    apart = frozenset({"cpu"})

    def look_after(phase: Phase, guarded: Sequence[Gate], look: Look) -> tuple[int, tuple[Finding, ...]]:
        asked = [gate for gate in guarded if (phase, gate) not in settled]
        first = [gate for gate in asked if gate.metric not in apart] or asked
        blocks = measure(phase, look.blocks, first)
        latest = _findings(asked, blocks, look, blocks_max=blocks_max)
        later = [gate for gate in asked if gate not in first]
        if later and look.blocks >= RANK_FIRST and not _is_flagged([latest[gate] for gate in first]):
            blocks = measure(phase, look.blocks, asked)
            latest = _findings(asked, blocks, look, blocks_max=blocks_max)
        else:
            latest |= {gate: replace(latest[gate], state="open", margin=gate.margin) for gate in later}
        findings = tuple(latest.get(gate) or settled[phase, gate] for gate in guarded)
        for gate, finding in latest.items():
            if gate.metric in apart and finding.state in ("ok", "improved"):
                settled[phase, gate] = finding
        on_look(phase, len(blocks), findings)
        return len(blocks), findings

    blocks = fresh = 0
    findings: tuple[Finding, ...] = ()
    again: tuple[Finding, ...] = ()
    clear_first = RANK_FIRST if any(gate.metric in apart for gate in gates) else 0
    for look in planned_looks(counts, gates=len(gates), clear_first=clear_first):
        blocks, findings = look_after("screen", gates, look)
        if blocks < look.blocks or _is_clear(findings):
            break
    flagged = [finding for finding in findings if finding.state == "regressed"]
    if flagged:
        unclear = {
            finding.gate: finding
            for finding in findings
            if finding.state == "regressed" or (finding.state == "open" and finding.gate.metric not in apart)
        }
        for look in planned_looks(counts, gates=len(flagged)):
            fresh, again = look_after("confirmation", tuple(unclear), look)
            again = tuple(_confirmed(finding, unclear[finding.gate]) for finding in again)
            if fresh < look.blocks or _is_clear(again):
                break
        by_gate = {finding.gate: finding for finding in again}
        findings = tuple(by_gate.get(finding.gate, finding) for finding in findings)
    ran = (finding if finding.blocks else replace(finding, state="not measured") for finding in findings)
    return Conclusion(
        verdict=_verdict(findings),
        findings=tuple(ran),
        blocks=blocks,
        fresh_blocks=fresh,
        blocks_max=blocks_max,
    )


def judge_fixed(
    gates: Sequence[Gate], blocks: Sequence[BlockFigures], *, error_rate: float = ERROR_RATE
) -> Conclusion:
    """Judge blocks that were all measured beforehand, by one look and without a confirmation.

    `error_rate`: probability that equal sides are judged to be different, 0 to 1.
    """
    (look,) = planned_looks((max(len(blocks), 1),), gates=len(gates), error_rate=error_rate)
    findings = tuple(_findings(gates, blocks, look, blocks_max=max(len(blocks), 1)).values())
    return Conclusion(
        verdict=_verdict(findings),
        findings=findings,
        blocks=len(blocks),
        fresh_blocks=0,
        blocks_max=len(blocks),
        error_rate=error_rate,
        confirms=False,
    )


def judge_interrupted(
    gates: Sequence[Gate], blocks: Sequence[BlockFigures], *, blocks_max: int
) -> Conclusion:
    """Judge the blocks of a screen that was interrupted, as `judge_fixed` does; but the verdict is always INCONCLUSIVE,
    and a gate that they flag is open, since it was not measured again."""
    so_far = judge_fixed(gates, blocks)
    findings = undecided(so_far.findings, "regressed")
    reason = coded("check_interrupted", blocks=len(blocks), blocks_max=blocks_max)
    return replace(so_far, verdict="INCONCLUSIVE", findings=findings, reason=reason, interrupted=True)


def judged(conclusion: Conclusion, trials: Sequence[Trial], variants: Sequence[Variant]) -> Conclusion:
    """Return the conclusion, with another verdict where the gates alone do not decide.

    The verdict becomes INVALID, and flagged gates undecided, where the load generator or the host spoilt the runs of
    either side; not for the host where both phases flag a regression, since without a confirmation the host may have
    made it. OK, IMPROVED and INCONCLUSIVE become SLO MISSED where more than half of the runs of the candidate, the last
    variant, fail the scenario's SLO.
    """
    if conclusion.target_failed or conclusion.interrupted:
        return conclusion
    void = _void(trials, variants, by_host=conclusion.verdict != "REGRESSED" or not conclusion.confirms)
    if void:
        findings = undecided(conclusion.findings, "regressed", "improved")
        return replace(conclusion, verdict="INVALID", findings=findings, reason=void)
    if conclusion.verdict not in ("OK", "IMPROVED", "INCONCLUSIVE"):
        return conclusion
    for candidate in variants[-1].arms():
        missed = _slo_missed(trials, candidate.name, candidate.scenario)
        if missed is not None:
            code = "model_misses" if candidate.model else "side_misses"
            reason = coded(code, side=candidate.name, why=missed)
            return replace(conclusion, verdict="SLO MISSED", reason=reason)
    return conclusion


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


def undecided(findings: Iterable[Finding], *states: State) -> tuple[Finding, ...]:
    """Return the findings, those in one of these states as open and not confirmed."""
    return tuple(
        replace(finding, state="open", confirmed=False) if finding.state in states else finding
        for finding in findings
    )


def _findings(
    gates: Sequence[Gate], blocks: Sequence[BlockFigures], look: Look, *, blocks_max: int
) -> dict[Gate, Finding]:
    return {gate: find(gate, blocks, look, blocks_max=blocks_max) for gate in gates}


def _is_clear(findings: Sequence[Finding]) -> bool:
    """Whether a phase can end: some gate is flagged, or none is open."""
    return _is_flagged(findings) or all(finding.state != "open" for finding in findings)


def _is_flagged(findings: Sequence[Finding]) -> bool:
    return any(finding.state == "regressed" for finding in findings)


def _confirmed(finding: Finding, screened: Finding) -> Finding:
    """Return a finding of the confirmation in the light of the screen's.

    A gate that only the confirmation flags was not seen twice, and one that it did not measure was not looked
    at again: both stay open.
    """
    if finding.state == "not measured":
        finding = replace(screened, state="open")
    is_regressed = finding.state == "regressed"
    if screened.state != "regressed":
        return replace(finding, state="open") if is_regressed else finding
    return replace(finding, confirmed=is_regressed)


def _verdict(findings: Sequence[Finding]) -> Verdict:
    if any(finding.state == "regressed" for finding in findings):
        return "REGRESSED"
    missing = any(finding.state == "not measured" and not finding.gate.is_default for finding in findings)
    measured = [finding for finding in findings if finding.state != "not measured"]
    if missing or not measured or any(finding.state == "open" for finding in measured):
        return "INCONCLUSIVE"
    return "IMPROVED" if any(finding.state == "improved" for finding in findings) else "OK"
