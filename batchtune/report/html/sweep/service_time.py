"""How long does a batch take: τ(b), measured and fitted?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from batchtune.report.html.shell.drawing import Figure, Section, Trace, finite, log_axis, numbers
from batchtune.report.html.sweep.account import Account
from batchtune.tune.trials.space import in_force

_FEW: Final = 3
"""Batches of a size that fewer were run of say little of its time."""


def service_time(account: Account) -> Section:
    """τ(b): how long a batch of b rows takes, measured and fitted; beside it b rows one by one."""
    section = Section(anchor="tau", title="τ(b): how long a batch takes")
    curves = _times_by_threads(account)
    if not curves:
        return replace(section, missing="the server tells no execution times")
    data = _band(account)
    for at, (threads, times) in enumerate(sorted(curves.items())):
        rows = sorted(times)
        counts = [times[size][0] for size in rows]
        symbol = ("circle", "square-open", "diamond-open", "cross-open", "x-open")[min(at, 4)]
        data.append(
            {
                "x": rows,
                "y": [finite(times[size][1] / times[size][0], 1e3) for size in rows],
                "mode": "markers",
                "name": f"measured, {threads} batch thread{'' if threads == 1 else 's'}",
                "marker": {"symbol": symbol, "size": 9, "color": "@chosen" if at == 0 else "@other"},
                "text": [f"{count:,} batches" for count in counts],
                "hovertemplate": "%{x} rows: %{y:,.4~r} ms, %{text}<extra></extra>",
            }
        )
    fewest = curves[min(curves)]
    least = min(fewest)
    one_s = fewest[least][1] / fewest[least][0] / least
    most = max(fewest)
    if most > least:
        data.append(
            {
                "x": [least, most],
                "y": [finite(one_s * least, 1e3), finite(one_s * most, 1e3)],
                "mode": "lines",
                "name": f"in batches of {least}",
                "line": {"color": "@unbatched", "dash": "dot", "width": 1.8},
                "hoverinfo": "skip",
            }
        )
    xs = [x for trace in data for x in trace["x"]]
    ys = [y for trace in data for y in trace["y"]]
    return replace(
        section,
        lead="The further a batch stays below the dotted line, the more batching pays.",
        figure=Figure(
            data=data,
            layout={"xaxis": log_axis("rows in a batch", xs), "yaxis": log_axis("ms", ys)},
        ),
        how=(
            "Points: mean execution times by the server's histograms over all trials, by the number of batch threads "
            f"(sizes of which at least {_FEW} batches ran). Several threads slow each other down. Line and band: τ of "
            "the twin, which is that of a batch alone, with 95 % of the readings that fit about as well."
        ),
    )


def _times_by_threads(account: Account) -> dict[int, dict[int, tuple[int, float]]]:
    """Batch threads -> rows -> (batches, seconds in all)."""
    curves: dict[int, dict[int, tuple[int, float]]] = {}
    for trial in account.trials:
        server = None if trial.measurement is None else trial.measurement.server
        if server is None or trial.configuration.batching is None:
            continue
        threads = in_force(trial.configuration, "num_batch_threads", cpus=account.scenario.target.cpus)
        times = curves.setdefault(int(threads or 0), {})
        for rows, mean_s in server.execution_s_by_rows.items():
            count = server.batches_by_rows.get(rows, 0)
            batches, spent_s = times.get(rows, (0, 0.0))
            times[rows] = (batches + count, spent_s + count * mean_s)
    kept = {
        threads: {rows: pair for rows, pair in times.items() if pair[0] >= _FEW}
        for threads, times in curves.items()
    }
    return {threads: times for threads, times in kept.items() if times}


def _band(account: Account) -> list[Trace]:
    """The twin's τ up to the largest batch that was measured."""
    if account.twin is None:
        return []
    most = account.twin.rows_max
    rows = np.unique(np.geomspace(1, max(most, 1), 60).round().astype(int))
    draws = np.array([device.tau_s for device in account.twin.draws])[:, rows]
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    x: list[Any] = rows.tolist()
    return [
        {
            "x": [*x, *x[::-1]],
            "y": [*numbers(high.tolist(), 1e3), *numbers(low[::-1].tolist(), 1e3)],
            "fill": "toself",
            "mode": "none",
            "fillcolor": "@predicted-band",
            "hoverinfo": "skip",
            "showlegend": False,
        },
        {
            "x": x,
            "y": numbers(np.asarray(account.twin.best.tau_s)[rows].tolist(), 1e3),
            "mode": "lines",
            "name": "fitted",
            "line": {"color": "@predicted", "width": 2},
            "hovertemplate": "%{x} rows: %{y:,.4~r} ms fitted<extra></extra>",
        },
    ]
