"""Where does the time go: how long do requests take, when, and in what; and how does that grow with the load?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from batchtune.load.record.samples import Samples, Status
from batchtune.measure.measurement import Measurement
from batchtune.measure.statistics.quantiles import QUANTILES
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Shown,
    Trace,
    axis,
    finite,
    limited,
    numbers,
    safe,
)
from batchtune.scenario.spec.check import SloSpec

TIMELINE_BINS: Final = 60
_TICKS: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_PARTS: Final = (
    ("in the batching queue", "@queue"),
    ("in the model", "@compute"),
    ("network, front end, client", "@other"),
)


def distribution(shown: Sequence[Shown], slo: SloSpec, *, which: str) -> Section:
    """Latency by the share of requests that are faster; `which` says which run stands for a name."""
    section = Section(anchor="distribution", title="Latency of single requests")
    data: list[Trace] = []
    kept = True
    for curve in shown:
        measured, samples = curve.measured, curve.samples()
        if measured is None:
            continue
        shares, latency_ms = (
            _quantiles_of(samples, measured) if samples is not None else _kept_quantiles(measured)
        )
        kept = kept and samples is not None
        name = safe(curve.name)
        if not latency_ms:
            continue
        data.append(
            {
                "x": [finite(1.0 / (1.0 - share)) for share in shares],
                "y": latency_ms,
                "mode": "lines" if samples is not None else "lines+markers",
                "name": name,
                "line": {"color": curve.look.colour, "dash": curve.look.dash, "width": 2.5},
                "marker": {"symbol": curve.look.symbol, "size": 8},
                "text": [f"{100 * share:.4g} %" for share in shares],
                "hovertemplate": "%{text} of the requests within %{y:,.4~r} ms<extra>" + name + "</extra>",
            }
        )
    if not data:
        return replace(section, missing="no run has latencies")
    layout: dict[str, Any] = {
        "xaxis": axis(
            "share of the requests that are faster",
            type="log",
            tickvals=[1.0 / (1.0 - share) for share in _TICKS],
            ticktext=[f"{100 * share:g} %" for share in _TICKS],
            range=[math.log10(1.0), math.log10(1.0 / (1.0 - 0.999)) + 0.05],
        ),
        "yaxis": axis("latency, ms", rangemode="tozero"),
    }
    return replace(
        section,
        lead="Lower is better; the further right, the rarer."
        + (" The dashed red line is the SLO." if slo.limits() else ""),
        figure=Figure(data=data, layout=limited(slo, layout, quantiles=tuple(slo.limits()))),
        how=(
            "From the instant a request was due to its last byte; a request without a good answer counts as slower "
            f"than any. {which}, without its warm-up."
            + ("" if kept else " Only the quantiles that the ledger keeps, for the single requests are gone.")
        ),
    )


def timeline(shown: Sequence[Shown], slo: SloSpec, *, which: str) -> Section:
    """Median and p95 of the requests that were due in each part of the run."""
    section = Section(anchor="timeline", title="Latency over time")
    data: list[Trace] = []
    for curve in shown:
        samples, name = curve.samples(), safe(curve.name)
        if samples is None or len(samples) < 2:
            continue
        at_s, p50_ms, p95_ms = _binned(samples)
        for quantile, values, width in (("p95", p95_ms, 2.2), ("p50", p50_ms, 1.0)):
            data.append(
                {
                    "x": at_s,
                    "y": values,
                    "mode": "lines",
                    "name": f"{name}, {quantile}",
                    "legendgroup": name,
                    "line": {"color": curve.look.colour, "dash": curve.look.dash, "width": width},
                    "hovertemplate": f"%{{x:.3~r}} s: {quantile} %{{y:,.4~r}} ms<extra>{name}</extra>",
                }
            )
    if not data:
        return replace(
            section,
            missing="the requests of these runs were not stored (samples/ is missing in the run's folder)",
        )
    layout = {"xaxis": axis("seconds since the load began"), "yaxis": axis("latency, ms", rangemode="tozero")}
    return replace(
        section,
        lead="Thick: p95, thin: the median. A run that climbs has not settled, spikes are the host or the model.",
        figure=Figure(data=data, layout=limited(slo, layout), height_px=340),
        how=f"{which}, with its warm-up, in {TIMELINE_BINS} parts.",
    )


def split(shown: Sequence[Shown], *, which: str) -> Section:
    """Mean latency in its parts, by the server's own account."""
    section = Section(anchor="split", title="Where the time goes")
    measured = {curve.name: curve.measured for curve in shown if curve.measured is not None}
    parts_s = {name: _parts_s(run) for name, run in measured.items()}
    known = {name: parts for name, parts in parts_s.items() if parts is not None}
    if not known:
        return replace(section, missing="the server reports neither queue waits nor execution times")
    names = list(known)[::-1]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [safe(name) for name in names],
            "x": [finite(known[name][at], 1e3) for name in names],
            "name": words,
            "marker": {"color": colour, "line": {"width": 1, "color": "@surface"}},
            "hovertemplate": f"%{{x:,.3~r}} ms {words}<extra>%{{y}}</extra>",
        }
        for at, (words, colour) in enumerate(_PARTS)
    ]
    silent = [name for name in measured if name not in known]
    notes = [f"Of {' and '.join(silent)} the server reports no parts."] if silent else []
    if any(queue_s is None for queue_s, _, _ in known.values()):
        notes.append(
            "Without batching there is no such queue: waiting for a thread is part of the grey rest."
        )
    return replace(
        section,
        lead=" ".join(("Means, in ms.", *notes)),
        figure=Figure(
            data=data,
            layout={"barmode": "stack", "xaxis": axis("ms"), "yaxis": axis("", type="category")},
            height_px=130 + (55 if len(names) < 6 else 34) * len(names),
        ),
        how=(
            f"{which}. Queue and model by the server's counters, batches weighted by their rows. The server does not "
            "separate waiting for company (batch_timeout_micros) from waiting for a thread: both are the batching "
            "queue. The rest is what the client saw beyond these two."
        ),
    )


def _parts_s(measured: Measurement) -> tuple[float | None, float, float] | None:
    """Queue (None: there is none to tell of), model, the rest; None: the server tells no execution times."""
    compute_s, queue_s = measured.compute_mean_s, measured.queue_mean_s
    if compute_s is None or not math.isfinite(measured.latency_mean_s):
        return None
    return queue_s, compute_s, max(0.0, measured.latency_mean_s - compute_s - (queue_s or 0.0))


def _quantiles_of(samples: Samples, measured: Measurement) -> tuple[list[float], list[float | None]]:
    """Of as many requests as were measured, the last that became due: those before are the warm-up."""
    requests = min(measured.requests // samples.one_in, len(samples))
    latency_ms = np.sort(_latencies_ms(samples)[len(samples) - requests :])
    if not len(latency_ms):
        return [], []
    last = min(1.0 - 1.0 / len(latency_ms), 0.999)
    shares = 1.0 - np.geomspace(1.0, max(1.0 - last, 1e-3), 160)
    places = np.minimum((shares * len(latency_ms)).astype(int), len(latency_ms) - 1)
    return shares.tolist(), numbers(latency_ms[places].tolist())


def _kept_quantiles(measured: Measurement) -> tuple[list[float], list[float | None]]:
    latency_s = measured.latency_s
    known = [(QUANTILES[name], latency_s[name].value) for name in QUANTILES if name in latency_s]
    return [share for share, _ in known], numbers((value for _, value in known), 1e3)


def _latencies_ms(samples: Samples) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each request in milliseconds; inf without a good answer."""
    good = samples.status == Status.OK
    latency_ms: np.ndarray[Any, np.dtype[np.float64]] = np.where(good, samples.latency_ns / 1e6, np.inf)
    return latency_ms


def _binned(samples: Samples) -> tuple[list[float | None], list[float | None], list[float | None]]:
    due_s, latency_ms = samples.due_ns / 1e9, _latencies_ms(samples)
    edges = np.linspace(0.0, float(due_s.max()) or 1.0, TIMELINE_BINS + 1)
    place = np.clip(np.searchsorted(edges, due_s, side="right") - 1, 0, TIMELINE_BINS - 1)
    rows: list[tuple[float, float, float]] = []
    for part in range(TIMELINE_BINS):
        mine = latency_ms[place == part]
        if len(mine):
            p50, p95 = np.quantile(mine, [0.5, 0.95], method="higher")
            rows.append((float(edges[part] + edges[part + 1]) / 2, float(p50), float(p95)))
    return numbers(row[0] for row in rows), numbers(row[1] for row in rows), numbers(row[2] for row in rows)
