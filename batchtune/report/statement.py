"""How does a recommendation read on a terminal or in a log? Figures first, then why, how sure, and what else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.tune.answer.alternatives import Alternative
from batchtune.recommend.near_best import NearBest
from batchtune.recommend.prediction import Promise, Reference
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.report.bottleneck import limit_sentence, limit_word
from batchtune.report.marks import Marks
from batchtune.report.tables import console_on, paragraph, print_table, table_of, text_width
from batchtune.report.units import interval, milliseconds, number, percent, ratio
from batchtune.report.words import (
    PROTOCOLS,
    REFERENCES,
    REFERENCES_IN_SENTENCES,
    capitalised,
    gains_of,
    likeness_of,
    name_without_parameters,
    other_references,
    parameters_of,
    sure_text,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import cpu_list
from batchtune.scenario.units import counted, percentage, rounded, rounded_duration
from batchtune.target.model_files import served_name
from batchtune.tune.trials.search_summary import SearchSummary

if TYPE_CHECKING:
    from rich.table import Table

    from batchtune.measure.bottleneck import Bottleneck
    from batchtune.measure.validity.caveats import Touches

ALTERNATIVES_SHOWN: Final = 3

_HELPS = {
    "yes": "Batching helps here",
    "no": "Batching does not help here",
    "not distinguishable": "Whether batching helps here cannot be told from these measurements",
}
_TRUST = {
    "leads": "the twin led the search",
    "shares": "the twin shared the search with the sampler",
    "off": "the twin was switched off",
}
_CHOSEN = "recommended"


def print_recommendation(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    deployment: str | None,
    run: str | None = None,
    next_step: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """The parameters, what they give, whether batching helps, how sure, what limits, and how to deploy them.

    `run` names the run and its age where nobody named it; `next_step` is what would establish what is open;
    `deployment` is the command line, None where another dialect follows.
    """
    console, width = console_on(stream), text_width(stream)

    def tell(text: str, indent: str = "  ") -> None:
        console.print(paragraph(text, width=width, indent=indent), markup=False, soft_wrap=True)

    marks = Marks(
        caveats={
            _CHOSEN: chosen.caveats,
            **{REFERENCES[reference.name]: reference.caveats for reference in other_references(chosen)},
        }
    )
    if run is not None:
        tell(run)
    tell(workload(scenario, chosen))
    console.print()
    console.print(paragraph(_headline(chosen), width=width, indent=""), style="bold", markup=False)
    if name_without_parameters(chosen.configuration) == REFERENCES_IN_SENTENCES["defaults"]:
        console.print("  (the server's defaults)", markup=False)
    for name, value in parameters_of(chosen.configuration):
        console.print(f"  {name:<26} {value}", markup=False, soft_wrap=True)
    console.print()
    print_table(console, _figures(chosen, marks))
    for text in _answer(chosen, marks.at(_CHOSEN, "latency", "everything")):
        tell(text)
    console.print()
    for text in _confidence(chosen):
        tell(text)
    tell(_establishment(chosen, next_step))
    console.print()
    for text in _alternatives(chosen):
        tell(text)
    for text in marks.lines():
        tell(text, indent="   ")
    if deployment is not None:
        console.print(f"Deploy: {deployment}", markup=False, soft_wrap=True)


def _headline(chosen: Recommendation) -> str:
    """Names what is recommended where that has a name, and from what it cannot be told."""
    named = name_without_parameters(chosen.configuration)
    head = "Recommended" if named is None else f"Recommended: {named}"
    return head + "".join(likeness_of(chosen) or ())


def workload(
    scenario: Scenario, chosen: Recommendation, *, with_slo: bool = True, brief: bool = False
) -> str:
    """What was asked: model, protocol, size of a request, traffic; the SLO and the objective beside it."""
    rows = f"{counted(chosen.rows_per_request, 'row')} per request"
    if chosen.concurrency is not None:
        traffic = f"{counted(chosen.concurrency, 'client')}{'' if brief else ' in a closed loop'}"
    else:
        traffic = f"{scenario.load.arrivals} arrivals{_at_rate(scenario)}"
    protocol = PROTOCOLS[scenario.request.protocol]
    limits = ", ".join(
        f"{name} ≤ {rounded_duration(limit)}" for name, limit in chosen.slo.items() if name != "errors"
    )
    slo = f"; SLO {limits}" if limits and with_slo else ""
    objective = f"; objective {scenario.objective}" if with_slo else ""
    model = served_name(scenario.target.model)
    server = scenario.target.cpus
    on = "" if server is None else f", {'' if brief else 'for a '}server on {cpu_list(server)}"
    return f"{model} by {protocol}, {rows}, {traffic}{slo}{on}{objective}"


def _at_rate(scenario: Scenario) -> str:
    """The mean rate that was asked for; of a capacity it is the answer, and some patterns have none."""
    rate_rps = None if scenario.objective == "capacity" else scenario.load.rate_rps
    return "" if rate_rps is None else f" at {rounded(rate_rps)}/s"


def _figures(chosen: Recommendation, marks: Marks) -> Table:
    """One column for the recommended configuration and for each reference point, one row a figure."""
    others = other_references(chosen)
    columns = [_CHOSEN, *(REFERENCES[reference.name] for reference in others)]
    table = table_of("", *map(marks.head, columns))
    rates = [rate_text(chosen), *(reference_rate_text(chosen, reference) for reference in others)]
    touching: tuple[Touches, ...] = (
        ("throughput",) if chosen.capacity_rps is None else ("throughput", "latency")
    )
    table.add_row(
        rate_title(chosen),
        *(marks.marked(rate, name, *touching) for name, rate in zip(columns, rates, strict=True)),
    )
    latencies = [chosen.latency_s, *(reference.latency_s for reference in others)]
    for quantile in ("p50", "p95", "p99"):
        texts = [milliseconds(latency_s.get(quantile)) for latency_s in latencies]
        cells = (marks.marked(text, name, "latency") for name, text in zip(columns, texts, strict=True))
        table.add_row(f"{quantile} ms", *cells)
    batches = [chosen.mean_batch_rows, *(reference.mean_batch_rows for reference in others)]
    table.add_row(
        "mean batch",
        *(marks.marked(number(rows), name, "server") for name, rows in zip(columns, batches, strict=True)),
    )
    limits: list[Bottleneck | None] = [chosen.bottleneck, *(reference.bottleneck for reference in others)]
    table.add_row(
        "limited by",
        *(
            marks.marked(limit_word(limit), name, "server")
            for name, limit in zip(columns, limits, strict=True)
        ),
    )
    if any(gains_of(chosen)[reference.name] is not None for reference in others):
        table.add_row("gain over", "", *(ratio(gains_of(chosen)[reference.name]) for reference in others))
    return table


def rate_title(chosen: Recommendation) -> str:
    """What `rate_text` and `reference_rate_text` are."""
    return "requests/s" if chosen.capacity_rps is None else "capacity /s"


def reference_rate_text(chosen: Recommendation, other: Reference) -> str:
    """What stands beside `rate_text`: of a capacity the reference's own, "–" where none is claimed."""
    if chosen.capacity_rps is None:
        return interval(other.throughput_rps)
    if other.capacity_rps is not None and math.isinf(other.capacity_rps.high):
        return f"at least {number(other.capacity_rps.value)}"
    return interval(other.capacity_rps)


def rate_text(chosen: Recommendation) -> str:
    """The requests/s of what is recommended; a capacity in the words of its own line, whatever single runs answered."""
    if chosen.capacity_rps is not None:
        return capacity_text(chosen, chosen.capacity_rps)
    return interval(chosen.throughput_rps)


def capacity_text(chosen: Recommendation, capacity_rps: Estimate) -> str:
    """Fresh runs that refute it leave no figure to promise; where nothing was missed it is at least so much."""
    if not chosen.promises:
        return f"below {number(capacity_rps.high)}" if math.isfinite(capacity_rps.high) else "not known"
    return (
        f"at least {number(capacity_rps.value)}" if math.isinf(capacity_rps.high) else interval(capacity_rps)
    )


def _answer(chosen: Recommendation, latency_marks: str) -> Iterator[str]:
    """Does batching help and why, is the SLO kept, what limits now?"""
    yield f"{_HELPS[chosen.batching_helps]}: {chosen.reason}."
    if chosen.cannot_pay is not None:
        yield f"{capitalised(chosen.cannot_pay)}."
    missing = [name for name in REFERENCES if name not in {reference.name for reference in chosen.references}]
    for name in missing:
        why = chosen.failed_references.get(name)
        ending = "not measured" if why is None else f"failed when it was tried ({why})"
        yield f"{REFERENCES[name].capitalize()}: {ending}."
    for promise in chosen.promises:
        yield f"SLO: {_promise(promise, latency_marks, established=chosen.established)}."
    if chosen.bottleneck is not None:
        yield f"Limit: {limit_sentence(chosen.bottleneck)}"


def _promise(promise: Promise, marks: str, *, established: bool) -> str:
    """Established without room for every single run, the fresh runs together keep the limit."""
    value = f"{promise.name} {rounded_duration(promise.value_s)} {marks}".strip()
    highest, limit = rounded_duration(promise.upper_bound_s), rounded_duration(promise.limit_s)
    if not math.isfinite(promise.upper_bound_s):
        return f"{value} of {limit} allowed; how high it comes in a fresh run is not known"
    if established and promise.spare_ratio < 0.0:
        return f"{value}; single runs may reach {highest} of {limit} allowed, the mean of the fresh runs keeps it"
    bound = f"{value}, in a fresh run at most {highest}"
    if promise.spare_ratio < 0.0:
        return f"{bound}: above the {limit} allowed, so it may be missed"
    return f"{bound} of {limit} allowed ({percentage(promise.spare_ratio)} to spare)"


def _confidence(chosen: Recommendation) -> Iterator[str]:
    """Trials and time, fresh runs, noise, whether better points may exist, the twin."""
    reasons = [
        f"How sure: {counted(chosen.trials, 'trial')} in {rounded_duration(chosen.seconds)}{_basis(chosen)}."
    ]
    if chosen.noise_ratio is not None:
        noise = f"Runs of one configuration differ by {percent(chosen.noise_ratio)} (standard deviation"
        reasons.append(f"{noise}{'' if chosen.noise_measured else ', assumed: too few were repeated'}).")
    if chosen.search is not None:
        reasons += _search(chosen.search)
    yield " ".join(reasons)
    if chosen.near_best is not None:
        yield _near_best(chosen.near_best)
    yield from (f"Note: {note}." for note in chosen.notes)


def _basis(chosen: Recommendation) -> str:
    if chosen.confirmations == 0:
        return ""
    runs = counted(chosen.confirmations, "fresh run")
    return f"; the figures rest on {runs}, made after the choice, and hold at 95 % for another fresh run"


def _near_best(near: NearBest) -> str:
    """What may be better, in the words of what is likelier."""
    if near.of == "measured":
        among = f"the {near.count} configurations measured; the rest of the space is not judged"
    elif near.space_size is not None:
        among = f"the {near.count} of {near.space_size:,} points that were looked at"
    else:
        among = f"the {near.count} points of the space"
    if near.probability >= 0.5:
        return f"Nothing better by 5 % or more is likely ({sure_text(near.probability)}) among {among}."
    return f"Better points may exist: +5 % or more is likely ({sure_text(1.0 - near.probability)}) among {among}."


def _establishment(chosen: Recommendation, next_step: str | None) -> str:
    """Whether a job may rely on it; else what is open and what would settle it."""
    if chosen.established:
        return "Established: fresh runs kept the SLO, and whether batching helps is known."
    step = "" if next_step is None else f" To establish it: {next_step}"
    return f"Not established: {'; '.join(chosen.open_questions)}.{step}"


def _search(search: SearchSummary) -> Iterator[str]:
    if search.trust is None:
        yield f"No twin took part (strategy {search.strategy})."
    elif search.proposals:
        many = counted(sum(search.proposals.values()), "proposal")
        made = f"The twin made {search.proposals.get('twin', 0)} of {many}"
        yield f"{made}{'; in the end it was switched off' if search.trust == 'off' else ''}."
    else:
        yield f"In the end {_TRUST[search.trust]}."
    if search.nodes:
        yield f"Trials ran on several nodes at once: {search.nodes}."
    if search.repeated_trials:
        many = "1 trial was" if search.repeated_trials == 1 else f"{search.repeated_trials} trials were"
        yield f"{many} repeated because of a noisy host or a slow client."


def _alternatives(chosen: Recommendation) -> Iterator[str]:
    for alternative in chosen.alternatives[:ALTERNATIVES_SHOWN]:
        yield f"Instead: {_alternative(alternative)}."


def _alternative(other: Alternative) -> str:
    searched = "" if other.confirmations else " (by the search alone)"
    return f"{other.configuration.label()}: {other.trade}{searched}"
