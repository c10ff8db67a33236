"""Where does the time go: how long do requests take, when, and in what; and how does that grow with the load?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np

from batchtune.load.record.samples import Samples, Status
from batchtune.measure.statistics.quantiles import QUANTILES
from batchtune.report.html.account import Account
from batchtune.report.html.drawing import (
    COLOURS,
    DASHES,
    SYMBOLS,
    Figure,
    Section,
    Trace,
    axis,
    finite,
    numbers,
    with_limit,
)
from batchtune.scenario.units import rounded_duration
from batchtune.tune.evidence.pooled import Pooled

QUANTILE_POINTS: Final = 160
TIMELINE_BINS: Final = 60
_TICKS: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_NO_SAMPLES: Final = "the requests of these runs were not kept (samples/ is missing in the run's folder)"
_PARTS: Final = (
    ("queue_mean_s", "in the batching queue", "@queue"),
    ("compute_mean_s", "in the model", "@compute"),
    ("overhead_mean_s", "network, front end, client", "@other"),
)


def distribution(account: Account) -> Section:
    """Latency by the share of requests that are faster, for the recommended, no batching and the defaults."""
    section = Section(anchor="distribution", title="Latency of single requests")
    data: list[Trace] = []
    kept = True
    for name, pooled in account.roles.items():
        samples = account.samples(pooled)
        shares, latency_ms = (
            _quantiles_of(samples, pooled) if samples is not None else _kept_quantiles(pooled)
        )
        kept = kept and samples is not None
        if not latency_ms:
            continue
        data.append(
            {
                "x": [finite(1.0 / (1.0 - share)) for share in shares],
                "y": latency_ms,
                "mode": "lines" if samples is not None else "lines+markers",
                "name": name,
                "line": {"color": COLOURS[name], "dash": DASHES[name], "width": 2.5},
                "marker": {"symbol": SYMBOLS[name], "size": 8},
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
        lead="Lower is better; the further right, the rarer. The dashed line is the SLO."
        if account.scenario.slo.limits()
        else "Lower is better; the further right, the rarer.",
        figure=Figure(data=data, layout=limited(account, layout)),
        how=(
            "From the instant a request was due to its last byte; a request without a good answer counts as slower "
            "than any. The latest run of each configuration, without its warm-up."
            + ("" if kept else " Only the quantiles that the ledger keeps, for the single requests are gone.")
        ),
    )


def timeline(account: Account) -> Section:
    """Median and p95 of the requests that were due in each part of the run."""
    section = Section(anchor="timeline", title="Latency over time")
    data: list[Trace] = []
    for name, pooled in account.roles.items():
        samples = account.samples(pooled)
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
                    "line": {"color": COLOURS[name], "dash": DASHES[name], "width": width},
                    "hovertemplate": f"%{{x:.3~r}} s: {quantile} %{{y:,.4~r}} ms<extra>{name}</extra>",
                }
            )
    if not data:
        return replace(section, missing=_NO_SAMPLES)
    layout = {"xaxis": axis("seconds since the load began"), "yaxis": axis("latency, ms", rangemode="tozero")}
    return replace(
        section,
        lead="Thick: p95, thin: the median. A run that climbs has not settled, spikes are the host or the model.",
        figure=Figure(data=data, layout=limited(account, layout), height_px=340),
        how=f"The latest run of each configuration, with its warm-up, in {TIMELINE_BINS} parts.",
    )


def split(account: Account) -> Section:
    """Mean latency in its parts, by the server's own account."""
    section = Section(anchor="split", title="Where the time goes")
    runs = {name: pooled.runs[-1].trial.measurement for name, pooled in account.roles.items()}
    measured = {name: each for name, each in runs.items() if each is not None}
    told = {name: each for name, each in measured.items() if each.overhead_mean_s is not None}
    if not told:
        return replace(section, missing="the server tells neither its queue's waits nor its execution times")
    names = list(told)[::-1]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [finite(getattr(told[name], part), 1e3) for name in names],
            "name": words,
            "marker": {"color": colour, "line": {"width": 1, "color": "@surface"}},
            "hovertemplate": f"%{{x:,.3~r}} ms {words}<extra>%{{y}}</extra>",
        }
        for part, words, colour in _PARTS
    ]
    silent = [name for name in measured if name not in told]
    missing = f" Of {' and '.join(silent)} the server tells no parts." if silent else ""
    return replace(
        section,
        lead=f"Means, in ms.{missing}",
        figure=Figure(
            data=data,
            layout={"barmode": "stack", "xaxis": axis("ms"), "yaxis": axis("")},
            height_px=130 + 55 * len(names),
        ),
        how=(
            "Queue and model by the server's counters, batches weighted by their rows. The server does not tell "
            "waiting for company (batch_timeout_micros) from waiting for a thread: both are the batching queue. The "
            "rest is what the client saw beyond these two."
        ),
    )


def limited(account: Account, layout: dict[str, Any], *, log: bool = False) -> dict[str, Any]:
    """The layout with a line at the SLO's p95, where there is one."""
    limit_s = account.scenario.slo.limits().get("p95")
    if limit_s is None:
        return layout
    return with_limit(layout, limit_s * 1e3, f"SLO: p95 ≤ {rounded_duration(limit_s)}", log=log)


def _quantiles_of(samples: Samples, pooled: Pooled) -> tuple[list[float], list[float | None]]:
    """Of as many requests as were measured, the last that became due: those before are the warm-up."""
    measured = pooled.runs[-1].trial.measurement
    requests = len(samples) if measured is None else min(measured.requests, len(samples))
    latency_ms = np.sort(_latencies_ms(samples)[len(samples) - requests :])
    if not len(latency_ms):
        return [], []
    last = min(1.0 - 1.0 / len(latency_ms), 0.999)
    shares = 1.0 - np.geomspace(1.0, max(1.0 - last, 1e-3), QUANTILE_POINTS)
    places = np.minimum((shares * len(latency_ms)).astype(int), len(latency_ms) - 1)
    return shares.tolist(), numbers(latency_ms[places].tolist())


def _kept_quantiles(pooled: Pooled) -> tuple[list[float], list[float | None]]:
    latency_s = pooled.runs[-1].latency_s
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
