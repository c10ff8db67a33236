"""How does a recommendation read on a terminal or in a log? Figures first, then why, how sure, and what else."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from batchtune.batching import Configuration, to_dict
from batchtune.measure.quantiles import Estimate
from batchtune.recommend import Promise, Recommendation, Reference
from batchtune.report.limits import limit_sentence, limit_word
from batchtune.report.marks import Marks
from batchtune.report.tables import console_on, paragraph, print_table, table_of, text_width
from batchtune.report.units import interval, milliseconds, number, percent, ratio
from batchtune.scenario.spec import Scenario
from batchtune.scenario.specbase import cpu_list
from batchtune.scenario.units import counted, percentage, rounded_duration
from batchtune.tune.confidence import NearBest
from batchtune.tune.pareto import Alternative
from batchtune.tune.summary import SearchSummary

if TYPE_CHECKING:
    from rich.table import Table

    from batchtune.measure.bottleneck import Bottleneck

ALTERNATIVES_SHOWN: Final = 3

_HELPS = {
    "yes": "Batching helps here",
    "no": "Batching does not help here",
    "not distinguishable": "Whether batching helps here cannot be told from these measurements",
}
_PROTOCOLS = {
    "grpc": "gRPC",
    "rest": "REST",
    "kserve_grpc": "KServe gRPC",
    "kserve_rest": "KServe REST",
    "kserve_rest_binary": "KServe REST with binary tensors",
}
_REFERENCES = {"no_batching": "no batching", "defaults": "server defaults"}
_TRUST = {
    "leads": "The twin led the search",
    "shares": "The twin shared the search with the sampler",
    "off": "The twin was switched off",
}
_CHOSEN = "recommended"


def print_recommendation(
    chosen: Recommendation, *, scenario: Scenario, parameters_file: Path, stream: TextIO | None = None
) -> None:
    """The parameters, what they give, whether batching helps, how sure, what limits, and how to deploy them."""
    console, width = console_on(stream), text_width(stream)

    def tell(text: str, indent: str = "  ") -> None:
        console.print(paragraph(text, width=width, indent=indent), markup=False, soft_wrap=True)

    marks = Marks(
        caveats={
            _CHOSEN: chosen.caveats,
            **{_REFERENCES[one.name]: one.caveats for one in _others(chosen)},
        }
    )
    tell(_workload(scenario, chosen))
    console.print()
    console.print(_headline(chosen.configuration), style="bold", markup=False)
    for name, value in _parameters(chosen.configuration):
        console.print(f"  {name:<26} {value}", markup=False, soft_wrap=True)
    console.print()
    print_table(console, _figures(chosen, marks))
    for text in _answer(chosen, marks.at(_CHOSEN, "latency", "everything")):
        tell(text)
    console.print()
    for text in _confidence(chosen):
        tell(text)
    console.print()
    for text in _alternatives(chosen):
        tell(text)
    for text in marks.lines():
        tell(text, indent="   ")
    console.print(_deployment(chosen.configuration, parameters_file), markup=False, soft_wrap=True)


def _headline(configuration: Configuration) -> str:
    return "Recommended: no batching" if configuration.batching is None else "Recommended"


def _workload(scenario: Scenario, chosen: Recommendation) -> str:
    rows = f"{counted(chosen.rows_per_request, 'row')} per request"
    if chosen.concurrency is not None:
        traffic = f"{counted(chosen.concurrency, 'client')} in a closed loop"
    else:
        traffic = f"{scenario.load.arrivals} arrivals"
    protocol = _PROTOCOLS[scenario.request.protocol]
    limits = ", ".join(
        f"{name} ≤ {rounded_duration(limit)}" for name, limit in chosen.slo.items() if name != "errors"
    )
    slo = f"; SLO {limits}" if limits else ""
    model = Path(scenario.target.model).name
    server = scenario.target.cpus
    on = "" if server is None else f", for a server on {cpu_list(server)}"
    return f"{model} by {protocol}, {rows}, {traffic}{slo}{on}; objective {scenario.objective}"


def _parameters(configuration: Configuration) -> list[tuple[str, str]]:
    batching = {} if configuration.batching is None else to_dict(configuration.batching)
    if configuration.batching is not None and not batching:
        return [("(the server's defaults)", "")]
    named = [(name, _shown(value)) for name, value in batching.items()]
    return named + [(f"--{name}", value) for name, value in configuration.flags]


def _figures(chosen: Recommendation, marks: Marks) -> Table:
    """One column for the recommended configuration and for each reference point, one row a figure."""
    others = _others(chosen)
    columns = [_CHOSEN, *(_REFERENCES[one.name] for one in others)]
    table = table_of("", *map(marks.head, columns))
    if chosen.capacity_rps is not None:
        capacity = marks.marked(interval(chosen.capacity_rps), _CHOSEN, "throughput", "latency")
        table.add_row("capacity /s", capacity, *("" for _ in others))
    rates = [chosen.throughput_rps, *(one.throughput_rps for one in others)]
    table.add_row(
        "requests/s",
        *(
            marks.marked(interval(rate), name, "throughput")
            for name, rate in zip(columns, rates, strict=True)
        ),
    )
    latencies = [chosen.latency_s, *(one.latency_s for one in others)]
    for quantile in ("p50", "p95", "p99"):
        shown = [milliseconds(one.get(quantile)) for one in latencies]
        cells = (marks.marked(text, name, "latency") for name, text in zip(columns, shown, strict=True))
        table.add_row(f"{quantile} ms", *cells)
    batches = [chosen.mean_batch_rows, *(one.mean_batch_rows for one in others)]
    table.add_row(
        "mean batch",
        *(marks.marked(number(rows), name, "server") for name, rows in zip(columns, batches, strict=True)),
    )
    limits: list[Bottleneck | None] = [chosen.bottleneck, *(one.bottleneck for one in others)]
    table.add_row(
        "limited by",
        *(marks.marked(limit_word(one), name, "server") for name, one in zip(columns, limits, strict=True)),
    )
    if any(_gains(chosen)[one.name] is not None for one in others):
        table.add_row("gain over", "", *(ratio(_gains(chosen)[one.name]) for one in others))
    return table


def _answer(chosen: Recommendation, latency_marks: str) -> Iterator[str]:
    """Does batching help and why, is the SLO kept, what limits now?"""
    yield f"{_HELPS[chosen.batching_helps]}: {chosen.reason}."
    if chosen.cannot_pay is not None:
        yield f"{chosen.cannot_pay[:1].upper()}{chosen.cannot_pay[1:]}."
    for promise in chosen.promises:
        yield f"SLO: {_promise(promise, latency_marks)}."
    if chosen.bottleneck is not None:
        yield f"Limit: {limit_sentence(chosen.bottleneck)}"


def _promise(promise: Promise, marks: str) -> str:
    value = f"{rounded_duration(promise.value_s)} {marks}".strip()
    bound = f"{promise.name} {value}, in a fresh run at most {rounded_duration(promise.upper_bound_s)}"
    limit = rounded_duration(promise.limit_s)
    if promise.spare_ratio < 0.0:
        return f"{bound}: above the {limit} allowed, so it may be missed"
    return f"{bound} of {limit} allowed ({percentage(promise.spare_ratio)} to spare)"


def _confidence(chosen: Recommendation) -> Iterator[str]:
    """Trials and time, fresh runs, noise, the probability of being near the best, the twin."""
    told = [f"How sure: {_trials(chosen)}{_basis(chosen)}."]
    if chosen.near_best is not None:
        told.append(_near_best(chosen.near_best))
    if chosen.noise_ratio is not None:
        noise = f"Runs of one configuration differ by {percent(chosen.noise_ratio)} (standard deviation"
        told.append(f"{noise}{'' if chosen.noise_measured else ', assumed: too few were repeated'}).")
    if chosen.search is not None:
        told += _search(chosen.search)
    yield " ".join(told)
    yield from (f"Note: {note}." for note in chosen.notes)


def _trials(chosen: Recommendation) -> str:
    text = f"{counted(chosen.trials, 'trial')} in {rounded_duration(chosen.seconds)}"
    if chosen.search is None or not chosen.search.seconds_by_phase:
        return text
    phases = ", ".join(
        f"{name} {rounded_duration(spent)}" for name, spent in chosen.search.seconds_by_phase.items()
    )
    return f"{text} ({phases})"


def _basis(chosen: Recommendation) -> str:
    if chosen.confirmations == 0:
        return ""
    runs = counted(chosen.confirmations, "fresh run")
    return f"; the figures rest on {runs}, made after the choice, and hold at 95 % for another fresh run"


def _near_best(near: NearBest) -> str:
    sure = percentage(near.probability)
    if not 0.01 <= near.probability <= 0.99:
        sure = "over 99 %" if near.probability > 0.5 else "under 1 %"
    if near.of == "space":
        return (
            f"It lies within 5 % of the best of all {near.count} points of the space with probability {sure}."
        )
    return (
        f"It lies within 5 % of the best of the {near.count} configurations measured with probability {sure}; "
        "the rest of the space is not judged."
    )


def _search(search: SearchSummary) -> Iterator[str]:
    if search.trust is not None:
        # the reason ends with the verdict, which stands here at the beginning
        why = search.trust_reason.rpartition(": the twin ")[0] or search.trust_reason or _errors_of(search)
        yield f"{_TRUST[search.trust]}{': ' if why else ''}{why}."
    else:
        yield f"No twin took part (strategy {search.strategy})."
    if search.repeated_trials:
        many = "1 trial was" if search.repeated_trials == 1 else f"{search.repeated_trials} trials were"
        yield f"{many} repeated because of a noisy host or a slow client."
    if search.stop_reason:
        yield f"The search ended: {search.stop_reason}."


def _errors_of(search: SearchSummary) -> str:
    errors = [
        f"{name} {percent(search.twin_error[name])}"
        for name in ("p95", "throughput")
        if name in search.twin_error
    ]
    return f"its errors on what it had not seen are {', '.join(errors)}" if errors else ""


def _alternatives(chosen: Recommendation) -> Iterator[str]:
    for one in chosen.alternatives[:ALTERNATIVES_SHOWN]:
        yield f"Instead: {_alternative(one)}."


def _alternative(other: Alternative) -> str:
    searched = "" if other.confirmations else " (by the search alone)"
    return f"{other.configuration.label()}: {other.trade}{searched}"


def _deployment(configuration: Configuration, parameters_file: Path) -> str:
    flags = [f"--{name}={value}" for name, value in configuration.flags]
    if configuration.batching is None:
        told = f", with {shlex.join(flags)}" if flags else ""
        return f"Deploy: start the server without --enable_batching{told}"
    words = ["--enable_batching", f"--batching_parameters_file={parameters_file}", *flags]
    return f"Deploy: tensorflow_model_server {shlex.join(words)}"


def _others(chosen: Recommendation) -> list[Reference]:
    return [one for one in chosen.references if one.configuration != chosen.configuration]


def _gains(chosen: Recommendation) -> dict[str, Estimate | None]:
    return {"no_batching": chosen.gain_over_no_batching, "defaults": chosen.gain_over_defaults}


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
