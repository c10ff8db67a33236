"""What does the twin expect: of a growing rate, and of what was measured?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.html.shell.document import sentence
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Trace,
    axis,
    bars,
    finite,
    label,
    limited,
    log_axis,
    numbers,
    safe,
)
from batchtune.report.html.sweep.account import CHOSEN, ROLE_LOOKS, Account
from batchtune.report.html.sweep.forecast import Forecast
from batchtune.report.words import REFERENCES
from batchtune.tune.evidence.pooled import Pooled
from batchtune.twin.model.traffic import traffic_of
from batchtune.twin.model.twin import Prediction
from batchtune.twin.simulator.replica import batcher_of

RATES: Final = 9
_PANELS: Final = (("throughput", "requests/s", 1.0), ("p95", "p95, ms", 1e3))


def rates(account: Account, forecast: Forecast | None) -> Section:
    """p95 against the rate: the rates that a capacity rests on, else what the twin expects."""
    section = Section(anchor="rates", title="p95 against the rate")
    data = [trace for name, pooled in account.roles.items() for trace in _rungs(name, pooled)]
    predicted = not data
    if predicted and forecast is not None:
        for name, pooled in account.roles.items():
            if name == CHOSEN or name == REFERENCES["no_batching"]:
                data += _expected_rates(name, pooled, account, forecast)
    if not data:
        why = account.twin_missing or "the model of the server cannot tell"
        return replace(section, missing=f"the rate was not varied, and {why}")
    layout = {
        "xaxis": axis("offered requests/s", rangemode="tozero"),
        "yaxis": log_axis("p95, ms", [y for trace in data for y in trace["y"]]),
    }
    how = (
        "Each rate that was tried on the way to the capacity, in fresh runs too, with its p95; filled: it kept the SLO."
        if not predicted
        else "Not measured: the twin, simulated under Poisson arrivals up to where the server "
        "saturates. The bands hold 95 % of its readings."
    )
    return replace(
        section,
        lead="Each rate that was tried."
        if not predicted
        else "Predicted, not measured: what an open loop would see.",
        figure=Figure(data=data, layout=limited(account.scenario.slo, layout)),
        how=how,
    )


def agreement(account: Account, forecast: Forecast | None) -> Section:
    """What the twin says of each configuration that was measured, against what was measured."""
    section = Section(anchor="agreement", title="Predicted against measured")
    if forecast is None:
        return replace(section, missing=account.twin_missing)
    pairs: list[tuple[Pooled, Prediction]] = []
    for pooled in account.choice.pooled:
        measured = pooled.runs[-1].trial.measurement if pooled.runs else None
        if measured is None or not pooled.configuration.known:
            continue
        rate_rps = None if measured.concurrency is not None else measured.offered_rps
        if measured.concurrency is None and rate_rps is None:
            continue
        traffic = traffic_of(account.scenario, rate_rps=rate_rps, concurrency=measured.concurrency)
        prediction = forecast.under(pooled.configuration, traffic, turn="trials")
        if prediction is not None:
            pairs.append((pooled, prediction))
    if not pairs:
        return replace(
            section, missing="the model of the server predicts none of the measured configurations"
        )
    for name, _, _ in _PANELS:
        if not _ends(_readings(pairs, name)):
            return replace(section, missing=f"no configuration has both a measured and a predicted {name}")
    return replace(
        section,
        lead=f"On the line the two agree. {sentence(account.twin.accuracy() if account.twin else '')}",
        figure=_agreement_figure(pairs),
        how=(
            "Across: the latest run of each configuration with its 95 % interval. Up: the best reading of the twin "
            "under that run's load. The twin was fitted to some of these; the error above is of trials that were "
            "left out of a fit. The thin lines are 15 % off."
        ),
    )


def _readings(pairs: Sequence[tuple[Pooled, Prediction]], name: str) -> list[tuple[Estimate, float]]:
    """What was measured of each and what the twin says: requests/s, or seconds."""
    if name == "throughput":
        return [(pooled.runs[-1].throughput_rps, prediction.throughput.value) for pooled, prediction in pairs]
    return [(pooled.runs[-1].latency_s[name], prediction.latency(name).value) for pooled, prediction in pairs]


def _ends(readings: Sequence[tuple[Estimate, float]]) -> list[float]:
    """All figures of those that a logarithmic plane can hold, measured and predicted."""
    both = ((measured.value, expected) for measured, expected in readings)
    return [value for pair in both if all(0.0 < value < math.inf for value in pair) for value in pair]


def _agreement_figure(pairs: Sequence[tuple[Pooled, Prediction]]) -> Figure:
    data: list[Trace] = []
    layout: dict[str, object] = {
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "showlegend": False,
    }
    for at, (name, title, scale) in enumerate(_PANELS):
        suffix = "" if at == 0 else "2"
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        readings = _readings(pairs, name)
        measured, expected = [reading[0] for reading in readings], [reading[1] for reading in readings]
        ends = [value * scale for value in _ends(readings)]
        low, high = 0.9 * min(ends), 1.1 * max(ends)
        for factor, width in ((1.0, 1.5), (1.15, 0.7), (1 / 1.15, 0.7)):
            line = {"color": "@muted", "width": width}
            data.append(
                {
                    "x": [low, high],
                    "y": [low * factor, high * factor],
                    "mode": "lines",
                    "line": line,
                    "hoverinfo": "skip",
                    **place,
                }
            )
        data.append(
            {
                "x": numbers((estimate.value for estimate in measured), scale),
                "y": numbers(expected, scale),
                "error_x": {**bars(measured, scale), "color": "@predicted"},
                "mode": "markers",
                "marker": {"color": "@predicted", "size": 8, "line": {"width": 1, "color": "@surface"}},
                "text": [safe(label(pooled.configuration)) for pooled, _ in pairs],
                "hovertemplate": "%{text}<br>measured %{x:,.4~r}, predicted %{y:,.4~r} "
                + title.split(", ")[-1]
                + "<extra></extra>",
                **place,
            }
        )
        layout[f"xaxis{suffix}"] = log_axis(f"measured {title}", ends)
        layout[f"yaxis{suffix}"] = log_axis(f"predicted {title}", ends)
    return Figure(data=data, layout=layout, height_px=380)


def _rungs(name: str, pooled: Pooled) -> list[Trace]:
    tried = () if pooled.claim is None else pooled.claim.rungs
    rungs = sorted((rung for rung in tried if math.isfinite(rung.p95_s)), key=lambda rung: rung.rate_rps)
    if not rungs:
        return []
    look = ROLE_LOOKS[name]
    return [
        {
            "x": [finite(rung.rate_rps) for rung in rungs],
            "y": [finite(rung.p95_s, 1e3) for rung in rungs],
            "mode": "markers+lines",
            "name": name,
            "line": {"color": look.colour, "dash": look.dash, "width": 1.5},
            "marker": {
                "color": look.colour,
                "size": 9,
                "symbol": [look.symbol if rung.held else f"{look.symbol}-open" for rung in rungs],
            },
            "text": ["keeps the SLO" if rung.held else "misses the SLO" for rung in rungs],
            "hovertemplate": "%{x:,.4~r} requests/s: p95 %{y:,.4~r} ms, %{text}<extra>" + name + "</extra>",
        }
    ]


def _expected_rates(name: str, pooled: Pooled, account: Account, forecast: Forecast) -> list[Trace]:
    traffic = traffic_of(account.scenario, rate_rps=1.0)
    batcher = batcher_of(pooled.configuration, cpus=account.scenario.target.cpus)
    saturation_rps = forecast.twin.saturation_rps(batcher, replace(traffic, clients=None, think_s=0.0))
    rows: list[tuple[float, float, float, float]] = []
    for share in np.linspace(0.1, 0.97, RATES):
        rate_rps = float(share) * saturation_rps
        prediction = forecast.under(pooled.configuration, traffic.at(rate_rps), turn="rates", only_best=False)
        if prediction is not None:
            p95 = prediction.latency("p95")
            if math.isfinite(p95.value):
                rows.append((rate_rps, p95.value * 1e3, p95.low * 1e3, p95.high * 1e3))
    if len(rows) < 2:
        return []
    x, value, low, high = ([finite(row[at]) for row in rows] for at in range(4))
    band = {
        "x": [*x, *x[::-1]],
        "y": [*high, *low[::-1]],
        "fill": "toself",
        "mode": "none",
        "fillcolor": f"{ROLE_LOOKS[name].colour}-band",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    line: Trace = {
        "x": x,
        "y": value,
        "mode": "lines",
        "name": f"{name}, predicted",
        "line": {"color": ROLE_LOOKS[name].colour, "dash": "dash", "width": 2},
        "hovertemplate": "%{x:,.4~r} requests/s: p95 %{y:,.4~r} ms<extra>" + name + ", predicted</extra>",
    }
    return [band, line]
