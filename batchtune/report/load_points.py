"""Renders load points, a row each, with their limits and caveats: as a table, as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from batchtune.archive.table import figures_of_run
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import Touches
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import to_plain
from batchtune.report import tables
from batchtune.report.comparison import bucket_text
from batchtune.report.findings import Marks, labels, text_of, worded
from batchtune.report.live_view import measured_load
from batchtune.report.words import alike, bottleneck_sentence, capitalised, limit_word
from batchtune.scenario.spec.check import value_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.evidence.best_point import best_point, measurement_of, spoilt_by, trial_bottleneck
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import percentage, rounded, rounded_duration

_FIGURES: Final[Mapping[str, tuple[Touches | None, Callable[[Measurement], str]]]] = {
    "requests/s": ("throughput", lambda measured: tables.interval(measured.throughput_rps)),
    "goodput /s": ("throughput", lambda measured: rounded(measured.goodput_rps)),
    "goodput": (
        "latency",
        lambda measured: (
            value_words("goodput", missed.value) if (missed := measured.latency_s.get("goodput")) else "–"
        ),
    ),
    "tokens/s": (
        "tokens",
        lambda measured: rounded(None if measured.tokens is None else measured.tokens.output_per_s.value),
    ),
    "rows/s": ("throughput", lambda measured: rounded(measured.throughput_rows_per_s.value)),
    "errors": (None, lambda measured: percentage(measured.error_ratio)),
    "mean batch": (
        "server",
        lambda measured: rounded(figures_of_run(measured)["mean_batch_rows"]),
    ),
    "queue ms": ("server", lambda measured: rounded(figures_of_run(measured)["queue_ms"])),
    "compute ms": ("server", lambda measured: rounded(figures_of_run(measured)["compute_ms"])),
    "SLO": (None, lambda measured: " ".join(filter(None, (measured.decision, measured.verdict))) or "–"),
}
"""Heading -> (kind of caveats that touch the figure, None: none does; text of the figure of one run).

Latencies are not among them: their headings are `p95 ms` and the like.
"""


def figure_cells(
    measured: Measurement,
    headings: Iterable[str],
    *,
    marks: Marks | None = None,
    whose: str = "",
    counts: bool = True,
) -> list[str]:
    """Return the texts of a run's figures for the columns `headings`.

    `marks`, `whose`: each text is followed by the letters of the caveats of `whose` that touch it; `marks`
    None: no letters. `counts` False: the figures are not the server's, so that their intervals are left out.
    """
    cells = []
    for heading in headings:
        text = tables.milliseconds(measured.latency_s.get(heading.removesuffix(" ms")))
        if heading in _FIGURES:
            text = _FIGURES[heading][1](measured)
        text = text if counts else text.partition(" [")[0]
        cells.append(text if marks is None else marks.marked(text, whose, *_touched(measured, heading)))
    return cells


def _touched(measured: Measurement, heading: str) -> tuple[Touches, ...]:
    """Return the kinds of caveats that touch a run's figure in the column `heading`."""
    if heading in _FIGURES:
        kind = _FIGURES[heading][0]
        return () if kind is None else (kind,)
    figure = measured.latency_s.get(heading.removesuffix(" ms"))
    return ("latency", "bound") if figure is not None and math.isinf(figure.high) else ("latency",)


def points_dict(points: Sequence[Trial], *, scenario: Scenario | None = None) -> dict[str, Any]:
    """Return load points for --json: `{"points": […], "best": {number, why}}`; `best` is null where no point
    counts. Of several models `{"models": {NAME: {"together": trial, "alone": trial or null}}, "server": …}`.

    Each point is a trial as in trials.jsonl, its configuration as in `worded`, with two keys more: `bottleneck`,
    `{kind, text, advice, evidence}` or null, and `spoilt_by`, "client" or "host" where the figures are not the
    server's, else null.
    `scenario` gives CPUs and flags of the server, which the bottleneck depends on, and says whether there are several
    models; None: one.
    """
    if scenario is not None and scenario.target.models:
        models: dict[str, dict[str, Any]] = {}
        for part in parts_of(points):
            of_model = models.setdefault(part.model, {"together": None, "alone": None})
            of_model["alone" if part.request.models else "together"] = worded(part.to_dict())
        return {"models": models, "server": to_plain(points[0].server if points else None)}
    best = best_point(points)
    return {
        "points": [_point_dict(point, scenario) for point in points],
        "best": None if best is None else {"number": best.point.number, "why": text_of(best.why)},
    }


def print_points(points: Sequence[Trial], *, scenario: Scenario | None = None) -> None:
    """Print a table with a row for each load point, then the best point, what limits the server, and caveats.

    Of several models a row for each beside the others and one alone, then what the others cost it, and what the
    server did meanwhile. `scenario` gives CPUs and flags of the server, which the bottleneck depends on.
    """
    # Left out in this order where the terminal is too narrow.
    dispensable = ("compute ms", "queue ms", "p90 ms", "rows/s", "p50 ms", "mean batch", "errors", "p99 ms")
    measured = points_by_load(points)
    models = any(point.parts for point in points)
    named = _named(measured)
    limits = {load: None if models else trial_bottleneck(point, scenario) for load, point in measured.items()}
    marks = Marks(caveats={load: measurement_of(point).caveats for load, point in measured.items()})
    shown = ""
    if measured:
        rows = _rows(measured, named=named, limits=limits, marks=marks, scenario=scenario)
        printed = tables.print_rows(rows, dispensable=dispensable, elsewhere="--csv and --json have them")
        shown = "".join(cell for row in printed for cell in row)
        meanings = {
            "[≥": "[≥ …]: the upper end is not known",
            "unbounded": "unbounded: too many requests failed",
            "(a": "marks such as (a) refer to the warnings below",
        }
        explained = (text for sign, text in meanings.items() if sign in shown)
        tables.print_text(f"{'; '.join(['Brackets are 95 % intervals', *explained])}.", "")
    telling = {load: limits[load] for load, point in measured.items() if spoilt_by(point) is None}
    tables.print_text(
        *_endpoint_lines(measured, named),
        *(() if models else _best_lines(measured, named)),
        *_limit_lines(telling, named, points=len(measured)),
        *_server_lines(measured, named),
        *spoilt_lines(measured),
        *_parameter_lines(measured),
        *_cost_lines(measured),
        *_shared_server_lines(points[0].server if points else None),
    )
    tables.print_text(*marks.lines(named=named, shown=shown), indent="    ")
    failures = (
        f"failed: {point.model}: {point.failure}" if point.model else f"failed: {point.failure}"
        for point in parts_of(points)
        if point.failure is not None
    )
    tables.print_text(*failures, whole=True)


def plain_rows(points: Sequence[Trial], *, scenario: Scenario | None = None) -> list[list[str]]:
    """Return a table, headings first, with a row for each load point that was measured, without letters of
    caveats.

    `scenario` gives CPUs and flags of the server, which the bottleneck depends on.
    """
    measured = points_by_load(points)
    limits = {load: trial_bottleneck(point, scenario) for load, point in measured.items()}
    marks = Marks(caveats=dict.fromkeys(measured, ()))
    return _rows(measured, named=_named(measured), limits=limits, marks=marks, scenario=scenario)


def _named(measured: Mapping[str, Trial]) -> str:
    """Return what the keys of `points_by_load` are: `model`, `clients`, or `rate`."""
    if any(point.model for point in measured.values()):
        return "model"
    return "clients" if any(point.concurrency for point in measured.values()) else "rate"


def spoilt_message(points: Sequence[Trial]) -> str | None:
    """Return a sentence on what spoilt every point that was measured; None where a point counts or none was
    measured."""
    measured = [point for point in points if point.measurement is not None]
    causes = {spoilt_by(point) for point in measured}
    if not measured or None in causes:
        return None
    whose = "the load generator was the limit" if "client" in causes else "the host was noisy"
    return f"no point is a measurement of the server: {whose}"


def _rows(
    measured: Mapping[str, Trial],
    *,
    named: str,
    limits: Mapping[str, Bottleneck | None],
    marks: Marks,
    scenario: Scenario | None,
) -> list[list[str]]:
    """Return the table of load points, headings first; `measured`: load -> trial, `named`: what a load is.

    Goodput is a share where the SLO limits it, else a rate; without any limit all requests would be good.
    """
    headings = [
        *("requests/s", "rows/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "errors"),
        *("mean batch", "queue ms", "compute ms", "SLO"),
    ]
    if any(measurement_of(point).tokens is not None for point in measured.values()):  # streamed answers
        is_limited = any("goodput" in measurement_of(point).latency_s for point in measured.values())
        of_limits = ["goodput /s"] if scenario is None or scenario.slo.limits() else []
        headings = [
            *("requests/s", *(["goodput"] if is_limited else of_limits)),
            *("tokens/s", "ttft_p50 ms", "ttft_p95 ms"),
            *("itl_p50 ms", "itl_p99 ms", "p50 ms", "p95 ms", "errors", "SLO"),
        ]
    several = named == "model"

    def unshown(measured: Measurement) -> list[Touches]:
        shown = {kind for heading in headings for kind in _touched(measured, heading)}
        return [kind for kind in get_args(Touches) if kind not in shown]

    return [
        ["offered /s" if named == "rate" else named, *(["load"] if several else []), *headings, "limited by"],
        *(
            [
                marks.marked(load, load, *unshown(measurement_of(point))),
                *([measured_load(measurement_of(point))] if several else []),
                *figure_cells(
                    measurement_of(point), headings, marks=marks, whose=load, counts=spoilt_by(point) is None
                ),
                limit_word(limits[load]),
            ]
            for load, point in measured.items()
        ),
    ]


def _endpoint_lines(measured: Mapping[str, Trial], named: str) -> Iterator[str]:
    """Yield a line with the figures of each endpoint, where a load went to several."""
    for load, point in measured.items():
        of_load = f"{named} {load}, " if len(measured) > 1 else ""
        for replica in measurement_of(point).endpoints:
            p50, p95 = (tables.milliseconds(estimate) for estimate in (replica.p50_s, replica.p95_s))
            yield (
                f"{of_load}{replica.endpoint}: {rounded(replica.throughput_rps)} requests/s, p50 {p50} ms, "
                f"p95 {p95} ms, errors {percentage(replica.error_ratio)}"
            )


def _best_lines(measured: Mapping[str, Trial], named: str) -> Iterator[str]:
    """Yield the best point of a range, and why; nothing for a single point."""
    best = best_point(list(measured.values()))
    if best is not None and len(measured) > 1:
        load = next(load for load, point in measured.items() if point is best.point)
        yield f"Best: {named} {load}: {text_of(best.why)}."


def _limit_lines(limits: Mapping[str, Bottleneck | None], named: str, *, points: int) -> Iterator[str]:
    """Yield a line for each bottleneck with its advice, and the loads that have it; figures are those of the
    last load.

    Loads without a bottleneck need no advice to raise the load where another load has one, or misses the SLO.
    """
    groups = alike(limits)
    advised = [
        own for _, own in groups if own.kind not in ("none", "unknown") or own.advice.code == "lower_load"
    ]
    for loads, bottleneck in groups:
        where = "" if len(loads) == points else f" ({named} {', '.join(loads)})"
        last = f"{loads[-1]} clients" if named == "clients" else f"{named} {loads[-1]}"
        at = "" if len(loads) == 1 else f"at {last}, "
        advises = bottleneck in advised or not advised
        yield f"Bottleneck{where}: {bottleneck_sentence(bottleneck, at=at, advises=advises)}"


def _server_lines(measured: Mapping[str, Trial], named: str) -> Iterator[str]:
    """Yield a line on the length padding of each load, where inputs differ in length."""
    for load, point in measured.items():
        server = measurement_of(point).server
        where = f" ({named} {load})" if len(measured) > 1 else ""
        text = "" if server is None else bucket_text(server)
        if text:
            yield f"{capitalised(text)}{where}."


def spoilt_lines(measured: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a line for each cause, client or host, with the loads that it spoilt; `measured`: as `points_by_load`
    returns it."""
    by_cause: dict[str, list[str]] = {}
    for load, point in measured.items():
        cause = spoilt_by(point)
        if cause is not None:
            by_cause.setdefault(cause, []).append(load)
    for spoiler, loads in by_cause.items():
        yield f"{labels('spoilt')[spoiler]} ({_named(measured)} {', '.join(loads)})."


def _point_dict(point: Trial, scenario: Scenario | None) -> dict[str, Any]:
    bottleneck = trial_bottleneck(point, scenario)
    return {
        **worded(point.to_dict()),
        "bottleneck": worded(to_plain(bottleneck)),
        "spoilt_by": spoilt_by(point),
    }


def points_by_load(points: Sequence[Trial]) -> dict[str, Trial]:
    """Return text of the load (clients or requests/s) -> point, for those that were measured; the text of a second
    point under one load ends in `'`. With several models the text is `MODEL` for one loaded beside the others, `MODEL
    alone` for one by itself."""
    measured: dict[str, Trial] = {}
    for point in parts_of(points):
        if point.measurement is not None:
            rate = point.measurement.offered_rps or 0.0
            load = str(point.measurement.concurrency or f"{rate:,.6g}")
            if point.model:
                load = f"{point.model} alone" if point.request.models else point.model
            while load in measured:
                load += "'"
            measured[load] = point
    return measured


# A load of several models: a row each beside the others and alone.


def _parameter_lines(measured: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a line with each model's batching parameters; nothing where all have the same."""
    labels = {point.model: point.configuration.label() for point in measured.values() if point.model}
    if len(set(labels.values())) > 1:
        yield from (f"{name} with {label}." for name, label in labels.items())


def _cost_lines(measured: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a sentence for each model on its p95 beside the other models and alone; nothing for a model that
    was not measured both ways."""
    for name in dict.fromkeys(point.model for point in measured.values() if point.model):
        if not {name, f"{name} alone"} <= measured.keys():
            continue
        beside, apart = measurement_of(measured[name]), measurement_of(measured[f"{name} alone"])
        here, there = beside.latency_s["p95"], apart.latency_s["p95"]
        text = f"p95 {rounded_duration(here.value)} together with the others, {rounded_duration(there.value)} alone"
        overloaded = math.isinf(here.value) and math.isfinite(there.value)
        if not overloaded and here.low <= there.high and there.low <= here.high:
            text += ", with no measurable difference"
        elif there.value > 0.0 and not overloaded:
            text += f" (×{rounded(here.value / there.value)})"
        if beside.concurrency is not None:
            rates = (rounded(run.throughput_rps.value) for run in (beside, apart))
            text += "; {} requests/s with them, {} alone".format(*rates)
        yield f"{name}: {text}."


def _shared_server_lines(server: ServerActivity | None) -> Iterator[str]:
    """Yield sentences on what the server did over all models: batches, rows in each, time in the queue, share
    of each model."""
    if server is None or not server.batches:
        return
    facts = [f"{server.batches:,} batches"]
    if server.mean_batch_rows is not None:
        facts.append(f"{rounded(server.mean_batch_rows)} rows on average")
    if server.queue_wait_mean_s is not None:
        facts.append(f"{rounded_duration(server.queue_wait_mean_s)} in the queue")
    if server.device_busy_ratio is not None:
        facts.append(f"a batch under way {percentage(min(server.device_busy_ratio, 1.0))} of the time")
    yield f"The server, all models together: {', '.join(facts)}."
    all_micros = sum(server.model_batch_micros.values())
    if all_micros and len(server.model_batches) > 1:
        shares = (
            f"{name} {percentage(server.model_batch_micros.get(name, 0) / all_micros)} in batches of "
            f"{rounded(server.model_batch_rows.get(name, 0) / batches)} rows on average, padding included"
            for name, batches in server.model_batches.items()
        )
        yield f"Of the time of all batches {'; '.join(shares)}."
