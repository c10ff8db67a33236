"""Draws how long a batch takes: τ(b) by the server's own account, and as the search read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from batchtune.report.html.shell.drawing import Figure, Section, Trace, finite, log_axis, numbers
from batchtune.report.html.sweep.account import Account
from batchtune.tune.trials.space import in_force

_FEW: Final = 3
"""Batches of a size that fewer were run of say little of its time."""


def service_time(account: Account) -> Section:
    """τ(b): how long a batch of b rows takes; beside it b rows one by one."""
    section = Section(anchor="tau", title="τ(b): how long a batch takes")
    curves = _times_by_threads(account)
    data = _read(account)
    if not curves and not data:
        return replace(section, missing="the server tells no execution times, and the search read none")
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
    fewest = (
        {rows: spent_s / count for rows, (count, spent_s) in curves[min(curves)].items()} if curves else {}
    )
    alone = fewest or account.curve
    least, most = min(alone), max(alone)
    if most > least:
        one_s = alone[least] / least
        data.append(
            {
                "x": [least, most],
                "y": numbers((one_s * least, one_s * most), 1e3),
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
            f"(sizes of which at least {_FEW} batches ran). Several threads slow each other down. Line: what the "
            "search read from closed loops that keep every batch full, by which it chose whom to load next."
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


def _read(account: Account) -> list[Trace]:
    """τ as the search read it from closed loops."""
    if not account.curve:
        return []
    rows = sorted(account.curve)
    return [
        {
            "x": rows,
            "y": numbers((account.curve[size] for size in rows), 1e3),
            "mode": "lines+markers",
            "name": "read from closed loops",
            "line": {"color": "@predicted", "width": 2},
            "hovertemplate": "%{x} rows: %{y:,.4~r} ms by closed loops<extra></extra>",
        }
    ]
