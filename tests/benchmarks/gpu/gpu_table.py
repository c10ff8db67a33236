"""gpu_checks.json as one table with the bars beside the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Images per second and p95 in ms at 16 clients, as published for an A100; then the factors over the first.
PUBLISHED = {
    "one_request_at_a_time": (975.0, 34.0),
    "dynamic_batching": (3188.0, 10.6),
    "dynamic_batching_two_threads": (4134.0, 8.2),
}
FACTORS = {"dynamic_batching": 3.27, "dynamic_batching_two_threads": 4.24}
SHARE = 0.85
NEAR = 0.95
WAYS = ("eager", "graph", "graph_two_streams", "with_copies")


def table(document: dict[str, Any]) -> Iterator[str]:
    card = document.get("card", {})
    tiny = ", TINY: a rehearsal, no figure means anything" if document.get("tiny") else ""
    yield f"{card.get('name', card.get('device'))}, torch {card.get('torch')}, cuda {card.get('cuda')}{tiny}"
    for name, found in document["sections"].items():
        yield f"\n{name}: {found['status']}, {found.get('seconds', 0):.0f} s"
        for line in LINES[name](found.get("rows", {})):
            yield f"  {line}"


def models(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        yield f"{name:<18} exported after {one['seconds']:.0f} s, {one['megabytes']:.1f} MB"


def correctness(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        apart = ", ".join(f"{key} {number(value)}" for key, value in one.items() if "_from_" in key)
        verdict = {True: "right", False: "WRONG", None: str(one)}[one.get("right")]
        yield f"{name:<18} {verdict} {apart}"


def ceiling(rows: dict[str, Any]) -> Iterator[str]:
    yield f"{'rows/s':<18} {'rows':>5} " + " ".join(f"{way:>18}" for way in WAYS)
    for name, sizes in rows.items():
        for size, one in sizes.items():
            yield f"{name:<18} {size:>5} " + " ".join(f"{number(one.get(way)):>18}" for way in WAYS)


def server_share(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        for threads, found in one["threads"].items():
            share = found["share_of_model"]
            bar = " (met)" if share is not None and share >= SHARE else ""
            gpu = [f", {key} {number(value)}" for key, value in found.items() if "gpu" in key and value]
            yield (
                f"{name:<18} batches of {one['size']}, {threads} threads, {one['clients']} clients: "
                f"{loaded(found)}; {number(share)} of the model alone{bar}{''.join(gpu)}"
            )


def text_recognition(rows: dict[str, Any]) -> Iterator[str]:
    yield from comparison(rows, FACTORS)
    for name, points in rows.get("table", {}).items():
        published_rows, published_ms = PUBLISHED[name]
        yield f"{name} (published at 16 clients: {published_rows:.0f} rows/s, p95 {published_ms:.1f} ms)"
        for one in points:
            yield f"  {one['clients']:>3} clients {loaded(one)}"


def imdb(rows: dict[str, Any]) -> Iterator[str]:
    yield from comparison(rows, {})
    for one in (rows.get("comparison") or {}).get("batching", []):
        asked = f"does batching help {one['protocol']}, {number(one['rows_per_request'])} rows?"
        yield f"{asked} {one['helps']}: {ratio(one['pair']['ratio'])}"


def comparison(rows: dict[str, Any], bars: dict[str, float]) -> Iterator[str]:
    found = rows.get("comparison") or {}
    for one in found.get("variants", []):
        figures = one["throughput_rows_per_s"], one["latency_s"].get("p95")
        rows_per_s, p95_s = (None if figure is None else figure["value"] for figure in figures)
        limit, batch = one["bottleneck"], one["mean_batch_rows"]
        p95_ms = None if p95_s is None else 1e3 * p95_s
        row = {**one, "rows_per_s": rows_per_s, "p95_ms": p95_ms, "mean_batch_rows": batch, "limit": limit}
        yield f"{one['name']:<30} {loaded(row)}"
    for one in found.get("pairs", []):
        words = f"{one['variant']} over {one['baseline']} ({one['outcome']})"
        yield against(words, one["ratio"], bars.get(one["variant"]))


def search(rows: dict[str, Any]) -> Iterator[str]:
    for name in ("rule", "guided"):
        if found := rows.get(name):
            yield f"{name}: {recommended(found) if 'configuration' in found else found.get('error', 'nothing')}"
    if grid := [one for one in rows.get("grid", []) if one["feasible"]]:
        best = max(grid, key=lambda one: one["rows_per_s"] or 0.0)
        yield f"grid of {len(rows['grid'])}: best {best['configuration']}: {number(best['rows_per_s'])} rows/s"
    for name in ("guided_over_grid", "guided_over_rule"):
        if found := rows.get(name):
            yield against(name.replace("_", " "), found["ratio"], NEAR) + " (the same)" * found["same"]


LINES = {
    "models": models,
    "correctness": correctness,
    "ceiling": ceiling,
    "server_share": server_share,
    "text_recognition": text_recognition,
    "imdb": imdb,
    "search": search,
    "resnet50": search,
}


def loaded(one: dict[str, Any]) -> str:
    """What one load has shown."""
    failed = f"; FAILED: {one['failure']}" if one.get("failure") else ""
    return (
        f"{number(one['rows_per_s'])} rows/s, p95 {number(one['p95_ms'])} ms, mean batch "
        f"{number(one.get('mean_batch_rows'))}, limited by {(one.get('limit') or {}).get('kind', '?')}{failed}"
    )


def recommended(found: dict[str, Any]) -> str:
    throughput, gain = found["throughput_rps"], ratio(found.get("gain_over_no_batching"))
    return f"{found['label']}: {number(throughput['value'])} requests/s, gain over no batching {gain}"


def against(what: str, found: dict[str, Any] | None, bar: float | None) -> str:
    """A ratio, and whether it meets a bar; its interval may say that this is not sure."""
    words = f"{what}: {ratio(found)}"
    if bar is None or not found:
        return words
    low = found.get("low")
    sure = low is None or (not isinstance(low, str) and low >= bar)
    verdict = "NOT met" if found["value"] < bar else "met" if sure else "met, but the interval reaches below"
    return f"{words}; bar ×{bar}: {verdict}"


def ratio(found: dict[str, Any] | None) -> str:
    if not found:
        return "not measured"
    ends = f" [{number(found['low'])}, {number(found['high'])}]" if "low" in found else ""
    return f"×{found['value']:.2f}{ends}"


def number(value: Any) -> str:
    """Three digits; `inf` and `nan` travel through JSON as words."""
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
