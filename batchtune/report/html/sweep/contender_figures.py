"""Draws what was tried: the bracket of each contender, throughput against latency, every rate, the trials over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchtune.report.contenders import brief_label, common_parameters, contenders_table
from batchtune.report.html.shell.drawing import (
    MERITS,
    Figure,
    Section,
    Table,
    Trace,
    axis,
    bars,
    finite,
    label,
    limited,
    log_axis,
    numbers,
    safe,
    spread_axis,
)
from batchtune.report.html.sweep.account import OTHER, ROLE_LOOKS, Account, keeping, merit_of
from batchtune.report.tables import span
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.tune.evidence.bracket import Run
from batchtune.tune.sweep.sweep import PHASES, phase_of
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial
from batchtune.units import counted, rounded

_BARS_MOST = 40
"""The best of them; the table has all."""


def contenders(account: Account) -> Section:
    """The table of all contenders."""
    section = Section(anchor="contenders", title="Everything that was tried")
    if account.chosen is None:
        return replace(section, missing=account.refusal)
    headings, *rows = contenders_table(account.chosen)
    return replace(section, table=Table(headings=headings, rows=rows, marked=0))


def brackets(account: Account) -> Section:
    """From the rate held to the rate missed; of a fixed load the range of the runs."""
    section = Section(anchor="brackets", title="How the contenders compare", clickable=True)
    if account.chosen is None:
        return replace(section, missing=account.refusal)
    merit = MERITS[account.scenario.objective]
    shown = account.contenders[:_BARS_MOST]
    common = common_parameters([contender.configuration for contender in shown])
    data: list[Trace] = []
    names = []
    for at, contender in enumerate(shown):
        role = account.names.get(contender.configuration)
        text = brief_label(contender.configuration, common)
        names.append(f"{role}: {text}" if role and role not in text else text)
        estimate = merit_of(contender, account.scenario.objective)
        if estimate is None or not math.isfinite(estimate.value):
            continue
        look = account.look(contender.configuration)
        data.append(
            {
                "x": [finite(estimate.value, merit.scale)],
                "y": [at],
                "error_x": {
                    **bars([estimate], merit.scale),
                    "color": look.colour,
                    "thickness": 5,
                    "width": 0,
                },
                "mode": "markers",
                "marker": {"color": look.colour, "symbol": look.symbol, "size": 11},
                "customdata": [at],
                "text": [f"<b>{safe(label(contender.configuration))}</b><br>{safe(_told(contender))}"],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    if not data:
        return replace(section, missing="no contender has a figure")
    capacity = account.chosen.capacity is not None
    return replace(
        section,
        lead=f"{'All' if len(shown) == len(account.contenders) else f'The best {len(shown)}'} of "
        f"{len(account.contenders)}; further {'right' if merit.more_is_better else 'left'} is better.",
        figure=Figure(
            data=data,
            layout={
                "xaxis": axis(merit.title, rangemode="tozero"),
                "yaxis": axis(
                    "", tickvals=[*range(len(names))], ticktext=[*map(safe, names)], autorange="reversed"
                ),
                "showlegend": False,
                "hovermode": "closest",
            },
            height_px=120 + 24 * len(names),
        ),
        how=(
            "From the highest rate that held the SLO to the lowest that missed it; without a bar no rate was clearly "
            "missed. What held at no rate that was tried has no point."
            if capacity
            else "Median and range of the runs of each configuration: of confirmation runs where there are any."
        ),
    )


def pareto(account: Account) -> Section:
    """Throughput against p95 under the scenario's own load, a point a configuration."""
    section = Section(anchor="pareto", title="Throughput against latency", clickable=True)
    kept = {contender.configuration for contender, _ in keeping(account)}
    data: list[Trace] = []
    known = []
    for at, contender in enumerate(account.contenders):
        p95 = contender.latency_s.get("p95")
        if contender.throughput_rps is None or p95 is None or not 0.0 < p95.value < math.inf:
            continue
        known.append(p95.value * 1e3)
        look = account.look(contender.configuration)
        misses = contender.configuration not in kept
        colour = "@limit" if misses and look is OTHER else look.colour
        data.append(
            {
                "x": [finite(contender.throughput_rps.value)],
                "y": [finite(p95.value, 1e3)],
                "error_x": {**bars([contender.throughput_rps]), "color": colour},
                "error_y": {**bars([p95], 1e3), "color": colour},
                "mode": "markers",
                "name": account.names.get(contender.configuration, "misses the SLO" if misses else "tried"),
                "showlegend": look is not OTHER,
                "marker": {
                    "color": colour,
                    "symbol": "x-thin" if misses and look is OTHER else look.symbol,
                    "size": 9 if look is OTHER else 15,
                    "line": {"width": 1.5, "color": colour if misses and look is OTHER else "@surface"},
                },
                "customdata": [at],
                "text": [f"<b>{safe(label(contender.configuration))}</b><br>{safe(_told(contender))}"],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    if not data:
        return replace(section, missing="no configuration has both a throughput and a p95")
    layout = {
        "xaxis": axis("requests/s", rangemode="tozero"),
        "yaxis": log_axis("p95, ms", known),
        "hovermode": "closest",
        "legend": {"traceorder": "reversed"},
    }
    return replace(
        section,
        lead=f"{counted(len(data), 'configuration')}; further right and lower is better.",
        # What is recommended is drawn last, over the others.
        figure=Figure(data=data[::-1], layout=limited(account.scenario.slo, layout), height_px=440),
        how="Medians and ranges of the runs of each configuration. A thin cross misses the SLO.",
    )


def rates(account: Account) -> Section:
    """p95 against the rate offered: every run at a rate, filled where it held the SLO."""
    section = Section(anchor="rates", title="p95 against the rate")
    tried = [
        (trial, run)
        for trial, run in account.runs
        if run.rate_rps is not None and math.isfinite(run.latency_s.get("p95", math.nan))
    ]
    if not tried:
        return replace(section, missing="no run at a rate has a p95")
    data: list[Trace] = []
    for name, look in {**ROLE_LOOKS, "others": OTHER}.items():
        mine = [
            (trial, run) for trial, run in tried if account.names.get(trial.configuration, "others") == name
        ]
        mine.sort(key=lambda pair: pair[1].rate_rps or 0.0)
        if mine:
            data.append(
                {
                    "x": numbers(run.rate_rps for _, run in mine),
                    "y": numbers((run.latency_s["p95"] for _, run in mine), 1e3),
                    "mode": "markers" if look is OTHER else "markers+lines",
                    "name": name,
                    "line": {"color": look.colour, "dash": look.dash, "width": 1.5},
                    "marker": _held_or_not(look.colour, look.symbol, [run for _, run in mine]),
                    "text": [_run_text(trial, run) for trial, run in mine],
                    "hovertemplate": "%{text}<br>%{x:,.4~r} requests/s: p95 %{y:,.4~r} ms<extra></extra>",
                }
            )
    layout = {
        "xaxis": axis("offered requests/s", rangemode="tozero"),
        "yaxis": log_axis("p95, ms", [y for trace in data for y in trace["y"]]),
    }
    return replace(
        section,
        lead="Each run at a rate; filled: it held the SLO.",
        figure=Figure(data=data, layout=limited(account.scenario.slo, layout)),
        how="A run holds a rate when it keeps every limit and answers what was offered. One run is one vote.",
    )


def history(account: Account) -> Section:
    """The runs in the order in which they were made."""
    section = Section(anchor="history", title="How the search went")
    capacity = account.scenario.objective == "capacity"
    merit = MERITS[account.scenario.objective]
    timed = all(trial.elapsed_s is not None for trial, _ in account.runs)
    data: list[Trace] = []
    for phase, symbol in zip(PHASES, ("circle", "square", "star"), strict=True):
        mine = [
            (trial, run, height)
            for trial, run in account.runs
            if phase_of(trial.source) == phase
            and (capacity or trial.source not in NO_CANDIDATES)
            and (height := _height(run, account.scenario.objective)) is not None
        ]
        if mine:
            data.append(
                {
                    "x": [finite(trial.elapsed_s if timed else float(trial.number)) for trial, _, _ in mine],
                    "y": [finite(height, merit.scale) for _, _, height in mine],
                    "mode": "markers",
                    "name": phase,
                    "marker": _held_or_not("@chosen", symbol, [run for _, run, _ in mine]),
                    "text": [f"{_run_text(trial, run)}: {safe(trial.reason)}" for trial, run, _ in mine],
                    "hovertemplate": "%{text}<br>%{y:,.4~r}<extra></extra>",
                }
            )
    if not data:
        return replace(section, missing="no trial has a figure")
    title = "offered or answered requests/s" if capacity else merit.title
    return replace(
        section,
        lead="Filled: it held the SLO."
        if capacity
        else "Filled: it met the SLO. Scouts under other loads are left out.",
        figure=Figure(
            data=data,
            layout={
                "xaxis": axis("seconds since the sweep began" if timed else "trial", rangemode="tozero"),
                "yaxis": spread_axis(title, [y for trace in data for y in trace["y"]]),
            },
            height_px=340,
        ),
        how="Each run once: at the rate that was offered; of a closed loop at what was answered."
        if capacity
        else "Each run once, with what it gave.",
    )


def _height(run: Run, objective: str) -> float | None:
    """What of a run is drawn; None: nothing that a logarithmic axis can hold."""
    if objective == "latency":
        value = run.latency_s.get("p95", math.nan)
    else:
        value = run.rate_rps if objective == "capacity" and run.rate_rps is not None else run.answered_rps
    return value if 0.0 < value < math.inf else None


def _held_or_not(colour: str, symbol: str, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "color": colour,
        "size": 9,
        "symbol": [symbol if run.held else f"{symbol}-open" for run in runs],
    }


def _run_text(trial: Trial, run: Run) -> str:
    verdict = "held" if run.held else "missed"
    return f"trial {trial.number}, {safe(label(trial.configuration))}: {verdict}"


def _told(contender: Recommendation | Compared) -> str:
    """What a configuration gave, in the words of the table."""
    rate, capacity = f"{span(contender.throughput_rps)} requests/s", contender.capacity
    if capacity is not None:
        held = f"held {rounded(capacity.held_rps)}/s" if capacity.held_rps else "held at no rate tried"
        rate = held if capacity.missed_rps is None else f"{held}, missed {rounded(capacity.missed_rps)}/s"
    p95 = span(contender.latency_s.get("p95"), scale=1e3)
    return f"{rate}, p95 {p95} ms, {counted(contender.runs, 'run')}"
