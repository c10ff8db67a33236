"""Figures of where the time goes: how long requests take, when, and in what; and how that grows with the load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.load.samples import Samples, Status
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import QUANTILES
from batchtune.report.findings import text_of
from batchtune.report.html.shell import drawing
from batchtune.report.html.shell.drawing import Figure, PlottedRun, Section, Trace
from batchtune.scenario.spec.check import SloSpec
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.reason import closing
from batchtune.units import percentage

_REASONS: Final = {"full": "@compute", "timeout": "@queue", "no_room": "@unbatched", "closed": "@other"}
"""Why a batch closed -> colour; a reason that is not known here is drawn behind these, in another."""


def sizes(shown: Sequence[PlottedRun], *, which: str) -> Section:
    """Draw how many rows the batches have, as shares of all batches, and why batches closed.

    `which`: a phrase that says which run of a variant is shown.
    """
    most_sizes = 20  # Of bars side by side; more are summed up between powers of two.
    upright = 6  # The names of more bars than that are rotated on a phone.
    sizes_px, gap_px, slanted_px = 190, 96, 50
    activities = [(curve, activity) for curve in shown if (activity := _activity(curve)) is not None]
    if not activities:
        return drawing.section("batches", None)
    every_size = sorted({size for _, activity in activities for size in activity.batches_by_rows})
    names = {size: str(size) for size in every_size}
    if len(every_size) > most_sizes:
        names = {size: _range_of(size) for size in every_size}
    data = [_bars_of(curve, activity, names) for curve, activity in activities]
    closed = [(curve, activity) for curve, activity in activities if sum(activity.close_reasons.values())]
    bars_px = 34 * len(closed)
    gap_px += 0 if len(set(names.values())) <= upright else slanted_px
    area_px = sizes_px + (gap_px + bars_px if closed else 0)
    height_px = area_px + 110
    layout: dict[str, Any] = {
        "barmode": "group",
        "bargap": 0.2 if len(set(names.values())) > 4 else 0.6,
        "xaxis": drawing.categories("", dict.fromkeys(names.values())),
        "yaxis": drawing.axis("% of the batches", rangemode="tozero", domain=[1 - sizes_px / area_px, 1]),
        "annotations": [drawing.panel_title("rows in a batch")],
        "legend": drawing.legend_above(height_px),
    }
    if closed:
        layout |= {
            "xaxis2": drawing.axis("% of the batches", range=[0, 100], anchor="y2"),
            "yaxis2": drawing.axis("", type="category", anchor="x2", domain=[0, bars_px / area_px]),
        }
        layout["annotations"].append(drawing.panel_title("why they closed", "2"))
        data += _reason_bars(closed)
    figure = Figure(data=data, layout=layout, height_px=height_px)
    return drawing.section(
        "batches", figure, closings=_lead(activities) if len(activities) <= 3 else "", which=which
    )


def _brief_closing(reason: str, configuration: Configuration) -> str:
    """Return why a batch closed as text for a bar, which is short."""
    return "full" if reason == "full" else text_of(closing(reason, configuration)).removeprefix("close ")


def _activity(curve: PlottedRun) -> ServerActivity | None:
    """Return the server's counters of a run; None where it did not report its batches."""
    activity = None if curve.measured is None else curve.measured.server
    return activity if activity is not None and activity.batches_by_rows and activity.batches else None


def _bars_of(curve: PlottedRun, activity: ServerActivity, names: Mapping[int, str]) -> Trace:
    """Return the bars of one run: the share of its batches by the name of their size, in per cent."""
    batches = sum(activity.batches_by_rows.values())
    shares: dict[str, float] = {}
    for size, count in sorted(activity.batches_by_rows.items()):
        shares[names[size]] = shares.get(names[size], 0.0) + 100 * count / batches
    name = drawing.safe(curve.name)
    return {
        "type": "bar",
        "x": list(shares),
        "y": drawing.numbers(shares.values()),
        "name": name,
        "marker": {"color": curve.look.colour, "line": {"width": 1, "color": "@surface"}},
        "hovertemplate": "%{y:.3~r} % of the batches contain %{x} rows<extra>" + name + "</extra>",
    }


def _range_of(size: int) -> str:
    """Return the range between powers of two in which a size lies: `5–8` for 5 to 8."""
    most = 1 << max(size - 1, 0).bit_length()
    return f"{most // 2 + 1}–{most}" if most > 2 else str(size)


def _reason_bars(closed: Sequence[tuple[PlottedRun, ServerActivity]]) -> list[Trace]:
    """Return a bar for each run, made of the shares of the reasons; these are written inside, without a
    legend."""
    present = {reason for _, activity in closed for reason, count in activity.close_reasons.items() if count}
    begin = [0.0] * len(closed)
    bars: list[Trace] = []
    for reason in [*(known for known in _REASONS if known in present), *sorted(present - _REASONS.keys())]:
        bar, shares = _reason_bar(reason, closed[::-1], begin)
        bars.append(bar)
        begin = [start + share for start, share in zip(begin, shares, strict=True)]
    return bars


def _reason_bar(
    reason: str, closed: Sequence[tuple[PlottedRun, ServerActivity]], begin: Sequence[float]
) -> tuple[Trace, list[float]]:
    """Return (bars, shares in per cent) of one reason, a bar for each run; each begins where the reasons
    before end, `begin`."""
    telling_share = 15.0
    shares = [
        100 * activity.close_reasons.get(reason, 0) / sum(activity.close_reasons.values())
        for _, activity in closed
    ]
    reasons = [drawing.safe(_brief_closing(reason, curve.trial.configuration)) for curve, _ in closed]
    bar: Trace = {
        "type": "bar",
        "orientation": "h",
        "offsetgroup": "reasons",
        "width": 0.7,
        "y": [drawing.safe(curve.name) for curve, _ in closed],
        "x": drawing.numbers(shares),
        "base": drawing.numbers(begin),
        "text": [
            words if share >= telling_share else "" for words, share in zip(reasons, shares, strict=True)
        ],
        "hovertext": [f"{share:.3g} % {words}" for share, words in zip(shares, reasons, strict=True)],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "name": drawing.safe(reason),
        "showlegend": False,
        "marker": {"color": _REASONS.get(reason, "@other"), "line": {"width": 1, "color": "@surface"}},
        "hovertemplate": "%{hovertext}<extra>%{y}</extra>",
        "xaxis": "x2",
        "yaxis": "y2",
    }
    return bar, shares


def _lead(activities: Sequence[tuple[PlottedRun, ServerActivity]]) -> str:
    lines = [
        _closings(curve.name, activity, curve.trial.configuration)
        for curve, activity in activities
        if activity.mean_batch_rows is not None or activity.close_reasons
    ]
    return " ".join(lines)


def _closings(name: str, activity: ServerActivity, configuration: Configuration) -> str:
    closed = sum(activity.close_reasons.values())
    held = "" if activity.mean_batch_rows is None else f"{activity.mean_batch_rows:.3g} rows on average"
    if not closed:
        return f"{name}: {held}."
    shares = sorted(activity.close_reasons.items(), key=lambda item: -item[1])
    why = ", ".join(
        f"{percentage(count / closed)} {text_of(closing(reason, configuration))}" for reason, count in shares
    )
    return f"{name}: {held}; {why}."


TIMELINE_BINS: Final = 60


def distribution(shown: Sequence[PlottedRun], slo: SloSpec, *, which: str) -> Section:
    """Draw latency over the share of requests that are faster, for each run.

    `which`: a phrase that says which run of a variant is shown.
    """
    data: list[Trace] = []
    kept, ticks = True, (0.5, 0.9, 0.95, 0.99, 0.999)
    for curve in shown:
        measured, samples = curve.measured, curve.samples()
        if measured is None:
            continue
        shares, latency_ms = (
            _quantiles_of(samples, measured) if samples is not None else _kept_quantiles(measured)
        )
        kept = kept and samples is not None
        name = drawing.safe(curve.name)
        if not latency_ms:
            continue
        drawn = drawing.trace(
            [drawing.finite(1.0 / (1.0 - share)) for share in shares],
            latency_ms,
            colour=curve.look.colour,
            marker=None if samples is not None else {"symbol": curve.look.symbol, "size": 8},
            line={"width": 2.5, "dash": curve.look.dash},
            hover="%{text} of the requests within %{y:,.4~r} ms",
            of=name,
            name=name,
            text=[f"{100 * share:.4g} %" for share in shares],
        )
        data.append(drawn)
    layout: dict[str, Any] = {
        "xaxis": drawing.axis(
            "requests that are faster, %",
            type="log",
            tickvals=[1.0 / (1.0 - share) for share in ticks],
            ticktext=[f"{100 * share:g}" for share in ticks],
            range=[math.log10(1.0), math.log10(1.0 / (1.0 - 0.999)) + 0.05],
        ),
        "yaxis": drawing.axis("latency, ms", rangemode="tozero"),
    }
    figure = (
        Figure(data=data, layout=drawing.limited(slo, layout, quantiles=tuple(slo.limits())))
        if data
        else None
    )
    return drawing.section(
        "distribution",
        figure,
        limits=" The dashed red line is the SLO." if slo.limits() else "",
        which=which,
        gone="" if kept else " Only the quantiles that the ledger keeps, for the single requests are gone.",
    )


def timeline(shown: Sequence[PlottedRun], slo: SloSpec, *, which: str) -> Section:
    """Draw median and p95 of the requests that were due in each of TIMELINE_BINS parts of the run, over time.

    `which`: a phrase that says which run of a variant is shown.
    """
    data: list[Trace] = []
    for curve in shown:
        samples, name = curve.samples(), drawing.safe(curve.name)
        if samples is None or len(samples) < 2:
            continue
        at_s, p50_ms, p95_ms = _binned(samples)
        for quantile, values, width in (("p95", p95_ms, 2.2), ("p50", p50_ms, 1.0)):
            drawn = drawing.trace(
                at_s,
                values,
                colour=curve.look.colour,
                line={"width": width, "dash": curve.look.dash},
                hover=f"%{{x:.3~r}} s: {quantile} %{{y:,.4~r}} ms",
                of=name,
                name=f"{name}, {quantile}",
                legendgroup=name,
            )
            data.append(drawn)
    layout = {
        "xaxis": drawing.axis("seconds since the load began"),
        "yaxis": drawing.axis("latency, ms", rangemode="tozero"),
    }
    figure = Figure(data=data, layout=drawing.limited(slo, layout), height_px=340) if data else None
    return drawing.section("timeline", figure, which=which, bins=TIMELINE_BINS)


def split(shown: Sequence[PlottedRun], *, which: str) -> Section:
    """Draw the mean latency of each run in parts: queue, model, rest, by the server's counters. `which`: a phrase that
    says which run of a variant is shown."""
    measured = {curve.name: curve.measured for curve in shown if curve.measured is not None}
    parts_s = {name: _parts_s(run) for name, run in measured.items()}
    known = {name: parts for name, parts in parts_s.items() if parts is not None}
    if not known:
        return drawing.section("split", None)
    names = list(known)[::-1]
    parts = (
        ("in the batching queue", "@queue"),
        ("in the model", "@compute"),
        ("network, front end, client", "@other"),
    )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [drawing.safe(name) for name in names],
            "x": [drawing.finite(known[name][at], 1e3) for name in names],
            "name": words,
            "marker": {"color": colour, "line": {"width": 1, "color": "@surface"}},
            "hovertemplate": f"%{{x:,.3~r}} ms {words}<extra>%{{y}}</extra>",
        }
        for at, (words, colour) in enumerate(parts)
    ]
    silent = [name for name in measured if name not in known]
    notes = [f"Of {' and '.join(silent)} the server reports no parts."] if silent else []
    if any(queue_s is None for queue_s, _, _ in known.values()):
        notes.append(
            "Without batching there is no such queue: waiting for a thread is part of the grey rest."
        )
    figure = Figure(
        data=data,
        layout={"barmode": "stack", "xaxis": drawing.axis("ms"), "yaxis": drawing.axis("", type="category")},
        height_px=130 + (55 if len(names) < 6 else 34) * len(names),
    )
    return drawing.section("split", figure, which=which, notes="".join(f" {note}" for note in notes))


def _parts_s(measured: Measurement) -> tuple[float | None, float, float] | None:
    """Return mean seconds (queue, model, rest) of a request; queue None: there is no batching queue.

    None where the server does not report execution times.
    """
    compute_s, queue_s = measured.compute_mean_s, measured.queue_mean_s
    if compute_s is None or not math.isfinite(measured.latency_mean_s):
        return None
    return queue_s, compute_s, max(0.0, measured.latency_mean_s - compute_s - (queue_s or 0.0))


def _quantiles_of(samples: Samples, measured: Measurement) -> tuple[list[float], list[float | None]]:
    """Return (shares, latencies in ms) of a run's measured requests, from the requests themselves; both empty
    without any.

    Those due first are left out as the warm-up: as many as were measured count, from the last one back.
    """
    requests = min(measured.requests // samples.one_in, len(samples))
    latency_ms = np.sort(_latencies_ms(samples)[len(samples) - requests :])
    if not len(latency_ms):
        return [], []
    last = min(1.0 - 1.0 / len(latency_ms), 0.999)
    shares = 1.0 - np.geomspace(1.0, max(1.0 - last, 1e-3), 160)
    places = np.minimum((shares * len(latency_ms)).astype(int), len(latency_ms) - 1)
    return shares.tolist(), drawing.numbers(latency_ms[places].tolist())


def _kept_quantiles(measured: Measurement) -> tuple[list[float], list[float | None]]:
    """Return (shares, latencies in ms) of the quantiles that the ledger has."""
    latency_s = measured.latency_s
    known = [(QUANTILES[name], latency_s[name].value) for name in QUANTILES if name in latency_s]
    return [share for share, _ in known], drawing.numbers((value for _, value in known), 1e3)


def _latencies_ms(samples: Samples) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the latency of each request in milliseconds; inf for one without a good answer."""
    good = samples.status == Status.OK
    latency_ms: np.ndarray[Any, np.dtype[np.float64]] = np.where(good, samples.latency_ns / 1e6, np.inf)
    return latency_ms


def _binned(samples: Samples) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """Return (middle in seconds, p50 in ms, p95 in ms) of each part of the run in which requests were due."""
    due_s, latency_ms = samples.due_ns / 1e9, _latencies_ms(samples)
    edges = np.linspace(0.0, float(due_s.max()) or 1.0, TIMELINE_BINS + 1)
    place = np.clip(np.searchsorted(edges, due_s, side="right") - 1, 0, TIMELINE_BINS - 1)
    rows: list[tuple[float, float, float]] = []
    for part in range(TIMELINE_BINS):
        mine = latency_ms[place == part]
        if len(mine):
            p50, p95 = np.quantile(mine, [0.5, 0.95], method="higher")
            rows.append((float(edges[part] + edges[part + 1]) / 2, float(p50), float(p95)))
    return (
        drawing.numbers(row[0] for row in rows),
        drawing.numbers(row[1] for row in rows),
        drawing.numbers(row[2] for row in rows),
    )
