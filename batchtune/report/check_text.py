"""Renders a check: the verdict, a line for each gate, where a change comes from, what to do next; and the history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from batchtune.check.account import MOVED, Attribution, Part
from batchtune.check.gate import Finding, margin_text
from batchtune.check.history import ERROR_RATE, LEAST, ChangePoint, Series, track_record
from batchtune.check.load_limits import AT_LEAST, LimitFinding
from batchtune.report.findings import labels, text_of, worded
from batchtune.report.tables import print_rows, print_text
from batchtune.scenario.spec.check import CHECK_BLOCKS_MOST
from batchtune.units import counted, percentage, rounded, rounded_duration, signed_percent

if TYPE_CHECKING:
    from batchtune.check.account import Conclusion


UNITS: Final = {
    "throughput": ("throughput /s", 1.0),
    "capacity": ("capacity /s", 1.0),
    "p50": ("p50 ms", 1e3),
    "p95": ("p95 ms", 1e3),
    "p99": ("p99 ms", 1e3),
    "errors": ("errors %", 100.0),
    "cpu": ("CPU µs/request", 1e6),
    "gpu": ("GPU µs/request", 1e6),
    "memory": ("memory MiB", 2.0**-20),
    "gpu_memory": ("GPU memory MiB", 2.0**-20),
    "startup": ("start-up s", 1.0),
    **{f"{of}_{name}": (f"{of}_{name} ms", 1e3) for of in ("ttft", "itl") for name in ("p50", "p95", "p99")},
}
"""Figure -> (heading with the unit, factor that turns the stored value into that unit)."""


STATES: Final = {"open": "undecided", "kept": "met"}
"""State of a gate or limit -> word for it, where that differs."""


def unit_of(figure: str) -> tuple[str, float]:
    """Return (heading with the unit, factor that turns the stored value into that unit) of a gate's figure.

    `figure`: the gate's name; `p95` gives (`p95 ms`, 1000), `ranker:p95` gives (`ranker: p95 ms`, 1000).
    """
    model, _, metric = figure.rpartition(":")
    title, scale = UNITS[metric]
    return f"{model}: {title}" if model else title, scale


def print_check(account: Conclusion) -> None:
    """Print a check: verdict, a row for each gate, where a change comes from, what to do next. With one model
    ≤ 15 lines."""
    print_text(headline(account), indent="      ")
    if account.findings:
        print_rows(gate_table(account))
    print_text(
        *(f"{label:<6}{text}" for label, text in closing(account)),
        *([] if account.run is None else [f"Saved in {account.run}"]),
        indent="      ",
    )


def headline(account: Conclusion) -> str:
    """Return verdict and outcome: `REGRESSED  candidate against baseline: throughput −4.9 % (margin 2 %)`."""
    return f"{account.verdict}  {outcome(account)}"


def outcome(account: Conclusion) -> str:
    """Return what was compared and what was found: `candidate against baseline: throughput −4.9 % (margin 2
    %)`."""
    head = f"{account.candidate} against {account.baseline}"
    if account.reason is not None:
        return f"{head}: {text_of(account.reason)}"
    texts = [finding_text(finding) for finding in _telling(account)]
    if account.verdict == "INCONCLUSIVE":
        texts += [f"{name} was asked for and not measured" for name in _asked_in_vain(account)]
        texts = texts or ["no figure was measured"]
    return f"{head}: {'; '.join(texts) or 'nothing got worse by its margin'}"


def finding_text(finding: Finding) -> str:
    """Return the change of one gate with its margin: `throughput −4.9 % (margin 2 %)`."""
    margin = margin_text(finding.gate, finding.margin)
    return f"{finding.gate.name} {change_text(finding, ends=False)} (margin {margin})"


def gate_table(account: Conclusion) -> list[list[str]]:
    """Return a table, headings first, with a row for each gate; empty where no gate was judged.

    The sides have their medians; the change is the median over pairs of runs, which is not the ratio of the two.
    """
    all_of_a_phase = (account.blocks, account.fresh_blocks)
    sides = (account.baseline, account.candidate)
    headings = ["figure", *sides, "median change of pairs [interval]", "margin", "verdict"]
    rows = [_row(finding, tells_blocks=finding.blocks not in all_of_a_phase) for finding in account.findings]
    return [headings, *rows] if rows else []


def closing(account: Conclusion) -> list[tuple[str, str]]:
    """Return the last lines of a check as (label, text): Why, Test, Next, Note; those without a text are left
    out."""
    attribution = account.attribution
    is_tested = account.findings and not (account.is_void or account.interrupted)
    lines = {
        "Why": "" if attribution is None else f"{attribution_text(attribution)}.",
        "Test": test_text(account) if is_tested else "",
        "Next": advice_text(account),
        "Note": account.note,
    }
    return [(label, text) for label, text in lines.items() if text]


def test_text(account: Conclusion) -> str:
    """Return how many blocks were measured, and with which error rate; none is stated for a stored baseline."""
    open_ = any(finding.state == "open" and finding.blocks for finding in account.findings)
    undecided = " Undecided: the interval contains the margin." if open_ else ""
    rate = f"{rounded(account.error_rate * 100)} %"
    rare = f"A check of two equal servers fails in at most {rate} of cases.{undecided}"
    if not account.confirms:
        return f"{counted(account.blocks, 'block')}, judged once. {rare}"
    fresh = f", then {counted(account.fresh_blocks, 'confirmation block')}" if account.fresh_blocks else ""
    blocks = f"{counted(account.blocks, 'block')} ({account.blocks_max} at most){fresh}; "
    blocks += f"{rounded_duration(account.seconds)}. "
    if account.stored:
        return f"{blocks}Runs of two sessions: the margins allow for their differences; the error rate is not known."
    return f"{blocks}{rare}"


def attribution_text(attribution: Attribution) -> str:
    """Return which parts of a request's time changed, the cause first, and what is known of the cause."""
    if not attribution.parts:
        return "the server reports nothing about its batches, so the cause is not known"
    first, *others = [_part_text(part) for part in attribution.largest] or [
        f"no mean changed by more than {percentage(MOVED)}"
    ]
    moved = f"{first}; also {', '.join(others)}" if others else first
    match attribution.cause:
        case "tail":
            return f"{moved}: a few slow requests, or noise of the host"
        case "host":
            return f"the host disturbed one side more often; {moved}"
        case "not known":
            return f"the cause is not known: {moved}"
        case _:
            return moved


def _part_text(part: Part) -> str:
    before, after = rounded_duration(part.before), rounded_duration(part.after)
    if part.name == "batch size":
        before, after = rounded(part.before), f"{rounded(part.after)} rows"
    return (
        f"{labels('causes').get(part.name, part.name)} {before} → {after} ({signed_percent(part.change)} %)"
    )


def account_document(account: Conclusion) -> dict[str, Any]:
    """Return a check for --json and check.json: `Conclusion.to_dict` with its findings as sentences."""
    document: dict[str, Any] = worded(account.to_dict())
    if account.attribution is not None:
        document["attribution"]["text"] = attribution_text(account.attribution)
    return document


def limit_text(finding: LimitFinding) -> str:
    """Return a measured figure against its limit: `p95 21 ms [20, 23]: at most 20 ms: undecided`."""
    metric, figure = finding.metric, finding.figure

    def shown(value: float) -> str:
        if metric == "throughput":
            return f"{rounded(value)}/s"
        return percentage(value) if metric == "errors" else rounded_duration(value)

    least = "at least" if metric in AT_LEAST else "at most"
    ends = "" if figure.low == figure.high else f" [{shown(figure.low)}, {shown(figure.high)}]"
    state = STATES.get(finding.state, finding.state)
    return f"{metric} {shown(figure.value)}{ends}: {least} {shown(finding.limit)}: {state}"


def advice_text(account: Conclusion) -> str:
    """Return what would decide an undecided check, or what follows from a regression; "" for nothing."""
    match account.verdict:
        case "REGRESSED":
            return "keep the baseline; find the cause, then check again"
        case "INCONCLUSIVE":
            return "let it run to its end" if account.interrupted else _settling(account)
        case "INVALID" if not account.target_failed:
            return "a quiet machine, or more processes or CPUs for the client"
        case _:
            return ""


def change_text(finding: Finding, *, ends: bool = True) -> str:
    """Return the change of a gate with its interval: `−4.9 % [−5.4, −4.3]`; `−4.9 % (at least −5.4)` without
    an upper end.

    `ends` False: without the interval.
    """
    change = finding.change
    unit = "points" if finding.gate.is_absolute else "%"
    if change.value == change.low == change.high == 0.0:
        return "none"
    value = f"{signed_percent(change.value)} {unit}"
    if not ends or not (math.isfinite(finding.worsening.low) or math.isfinite(finding.worsening.high)):
        return value
    if not math.isfinite(change.low):
        return f"{value} (at most {signed_percent(change.high)})"
    if not math.isfinite(change.high):
        return f"{value} (at least {signed_percent(change.low)})"
    return f"{value} [{signed_percent(change.low)}, {signed_percent(change.high)}]"


def _settling(account: Conclusion) -> str:
    """Return what may decide the gates that are undecided.

    --max-regress replaces all gates, so that the text names those that are decided too. A stored baseline has
    no more runs to compare with.
    """
    measured = [finding for finding in account.findings if finding.state != "not measured"]
    widest: dict[str, float] = {}  # one margin for a figure of all models
    for finding in measured:
        metric = finding.gate.metric
        margin = finding.gate.margin
        wider = min(2 * margin, 0.99) if finding.state == "open" else margin
        widest[metric] = max(widest.get(metric, 0.0), wider)
    margins = ",".join(f"{metric}={rounded(margin * 100)}%" for metric, margin in widest.items())
    if not any(finding.state == "open" for finding in measured):
        return f"ask only for what is measured here: --max-regress {margins}" if measured else ""
    ways = [] if account.stored else ["a longer load.duration"]
    blocks = min(2 * account.blocks_max, CHECK_BLOCKS_MOST)
    if not account.stored and blocks > account.blocks_max:
        ways.insert(0, f"--blocks {blocks}")
    return f"{', '.join([*ways, 'a quieter machine'])}, or wider margins: --max-regress {margins}"


def _row(finding: Finding, *, tells_blocks: bool) -> list[str]:
    gate = finding.gate
    title, scale = unit_of(gate.name)
    if not finding.blocks:  # also where the check ended before the loads that measure it
        return [title, "–", "–", "–", margin_text(gate, gate.margin), "not measured"]
    margin = margin_text(gate, finding.margin)
    if finding.margin > 1.001 * gate.margin:
        margin = f"{margin} (asked {margin_text(gate, gate.margin)}, widened for noise)"
    return [
        title,
        rounded(finding.before * scale),
        rounded(finding.after * scale),
        change_text(finding),
        margin,
        _state_text(finding) + (f" (in {counted(finding.blocks, 'block')})" if tells_blocks else ""),
    ]


def _state_text(finding: Finding) -> str:
    shown = "REGRESSED" if finding.state == "regressed" else STATES.get(finding.state, finding.state)
    if finding.confirmed is not None:
        return f"{shown}, confirmed" if finding.confirmed else f"{shown}: not confirmed"
    only_once = finding.state == "open" and finding.worsening.low > finding.gate.limit
    return f"{shown}: only the confirmation shows it" if only_once else shown


def _telling(account: Conclusion) -> Sequence[Finding]:
    """Return the findings that make the verdict."""
    state = {"REGRESSED": "regressed", "IMPROVED": "improved", "INCONCLUSIVE": "open"}.get(account.verdict)
    return [finding for finding in account.findings if finding.state == state]


def _asked_in_vain(account: Conclusion) -> list[str]:
    """Return the names of gates that the user asked for and no run measured."""
    return [
        finding.gate.name
        for finding in account.findings
        if finding.state == "not measured" and not finding.gate.is_default
    ]


def print_history(lines: Sequence[Mapping[str, Any]], series: Sequence[Series]) -> None:
    """Print a row for each saved check, oldest first, with the candidate's figures; then the changes that
    lasted.

    `lines`: as `read_history` returns them; `series`: as `series_of` does.
    """
    order = {name: list(UNITS).index(name.rpartition(":")[2]) for line in lines for name in line["gates"]}
    metrics = sorted(order, key=lambda name: (":" in name, order[name]))
    heads = ["when", "scenario", "verdict", *(unit_of(metric)[0] for metric in metrics)]
    rows = [[*heads, "commit"]]
    for line in lines:
        when = line["utc"][:16].replace("T", " ")
        rows.append(
            [when, line["scenario"], line["verdict"], *_cells(line, metrics), (line.get("commit") or "–")[:9]]
        )
    print_rows(rows, dispensable=_dispensable(heads))
    print_text(*change_lines(series), *record_lines(track_record(lines)))


def _dispensable(headings: Sequence[str]) -> list[str]:
    """Return the headings of figures that may be left out for want of width, the first to go first."""
    least = [
        "memory",
        "gpu_memory",
        "startup",
        "gpu",
        "itl_p50",
        "ttft_p50",
        "p50",
        "cpu",
        "errors",
        "ttft_p99",
    ]
    least += ["itl_p95", "p99", "p95"]
    titles = [UNITS[metric][0] for metric in least]
    return [head for title in titles for head in reversed(headings) if head.rpartition(": ")[2] == title]


def change_lines(series: Sequence[Series]) -> list[str]:
    """Return a sentence for each lasting change, or that there is none, and how seldom one is found by
    chance."""
    several = len({figure.scenario for figure in series}) > 1
    sentences = [
        f"{f'{figure.scenario}: ' if several else ''}{_change(figure, change)}"
        for figure in series
        for change in figure.changes
    ]
    looked_at = [figure for figure in series if len(figure.values) >= LEAST]
    if not looked_at:
        return [f"Changes: unknown; that takes {LEAST} checks of one scenario on one kind of CPU."]
    worth = (
        f"{counted(len(looked_at), 'figure')} analyzed; a figure that never changed shows a change in "
        f"{percentage(ERROR_RATE)} of all histories."
    )
    return [*(sentences or ["No change was found."]), worth]


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence on how often failed checks were confirmed, and one on how often equal sides failed."""
    again = record["failures"] - record["confirmed"] - record["dismissed"]
    failures = f"Failures: {record['failures']}"
    if record["failures"]:
        failures += (
            f" ({record['confirmed']} confirmed and {record['dismissed']} dismissed by a later check of the same "
            f"commit, {again} not checked again)"
        )
    if not record["unchanged"]:
        return [f"{failures}.", "False alarms: unknown; no check compared two equal sides."]
    alarms = (
        f"False alarms: {record['false_alarms']} of {counted(record['unchanged'], 'check')} of equal sides failed: "
        f"{percentage(record['false_alarms'] / record['unchanged'])}, at most {percentage(record['rate_most'])} "
        "(95 % confidence)."
    )
    return [f"{failures}.", alarms]


def _change(series: Series, change: ChangePoint) -> str:
    """Return a sentence on one lasting change: both medians, and when and with which commit it came."""
    title, scale = unit_of(series.metric)
    commit = series.commits[change.at]
    share = "" if math.isnan(change.change) else f" ({signed_percent(change.change)} %)"
    return (
        f"{title} {rounded(change.before * scale)} → {rounded(change.after * scale)}"
        f"{share} from {series.utc[change.at][:16].replace('T', ' ')} on"
        f"{f', commit {commit[:9]}' if commit else ''}."
    )


def _cells(line: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return the candidate's figures of one check as texts, `–` for each that it lacks."""
    cells = []
    for metric in metrics:
        after = line["gates"].get(metric, {}).get("after")
        cells.append(rounded(float(after) * unit_of(metric)[1]) if after is not None else "–")
    return cells
