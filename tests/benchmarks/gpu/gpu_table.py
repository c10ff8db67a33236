"""Print gpu_checks.json as one table with the bars beside the figures: python gpu_table.py gpu_checks.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
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


def main(path: Path) -> int:
    document = json.loads(path.read_text())
    card, sections = document.get("card", {}), document["sections"]
    print(
        f"{card.get('name', card.get('device', '?'))}, torch {card.get('torch')}, cuda {card.get('cuda')}"
        f"{', TINY: a rehearsal, no figure means anything' if document.get('tiny') else ''}; "
        f"{document.get('seconds', 0):.0f} s"
    )
    parts = {
        "models": models,
        "correctness": correctness,
        "ceiling": ceiling,
        "server_share": server_share,
        "text_recognition": text_recognition,
        "imdb": imdb,
        "search": search,
        "resnet50": resnet50,
    }
    for name, lines in parts.items():
        if name not in sections:
            continue
        found = sections[name]
        print(f"\n{name}: {found['status']}, {found.get('seconds', 0):.0f} s")
        for line in lines(found.get("rows", {})):
            print(f"  {line}")
    return 0


def models(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        yield f"{name:<18} exported after {one['seconds']:.0f} s, {one['megabytes']:.1f} MB"


def correctness(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        if name == "out_of_memory":
            yield f"{'out of memory':<18} {one}"
            continue
        apart = ", ".join(
            f"{key.replace('_', ' ')} {one[key]:.1e}"
            for key in one
            if "_from_" in key and one[key] is not None
        )
        verdict = "right" if one["right"] else "WRONG"
        yield f"{name:<18} {verdict}: {apart}; mean batch {one['mean_batch_rows']:.1f} rows"


def ceiling(rows: dict[str, Any]) -> Iterator[str]:
    ways = ("eager", "graph", "graph_two_streams", "with_copies")
    yield f"{'rows/s':<18} {'rows':>5} " + " ".join(f"{way:>18}" for way in ways)
    for name, sizes in rows.items():
        for size, one in sizes.items():
            yield f"{name:<18} {size:>5} " + " ".join(f"{number(one.get(way)):>18}" for way in ways)


def server_share(rows: dict[str, Any]) -> Iterator[str]:
    for name, one in rows.items():
        for threads, found in one["threads"].items():
            share = found["share_of_model"]
            limit = (found.get("limit") or {}).get("kind", "?")
            met = "met" if share is not None and share >= SHARE else f"limited by {limit}"
            yield (
                f"{name:<18} batches of {one['size']}, {threads} threads, {one['clients']} clients: "
                f"{number(found['rows_per_s'])} rows/s = {number(share)} of the model alone ({met}); "
                f"mean batch {number(found.get('mean_batch_rows'))}, p95 {number(found['p95_ms'])} ms"
                f"{gpu_words(found)}{failure(found)}"
            )


def text_recognition(rows: dict[str, Any]) -> Iterator[str]:
    yield from comparison(rows.get("comparison"), FACTORS)
    for name, table in rows.get("table", {}).items():
        published_rows, published_ms = PUBLISHED[name]
        yield f"{name} (published at 16 clients: {published_rows:.0f} rows/s, p95 {published_ms:.1f} ms)"
        for one in table:
            yield (
                f"  {one['clients']:>3} clients {number(one['rows_per_s']):>9} rows/s, p95 {number(one['p95_ms']):>7} ms, "
                f"mean batch {number(one.get('mean_batch_rows'))}, limited by {(one.get('limit') or {}).get('kind', '?')}"
            )


def imdb(rows: dict[str, Any]) -> Iterator[str]:
    yield from comparison(rows.get("comparison"), {})
    for one in (rows.get("comparison") or {}).get("batching", []):
        yield (
            f"does batching help {one['protocol']}, {number(one['rows_per_request'])} rows? {one['helps']}: "
            f"{ratio(one['pair']['ratio'])}"
        )


def comparison(found: dict[str, Any] | None, bars: dict[str, float]) -> Iterator[str]:
    if found is None:
        return
    for one in found["variants"]:
        throughput, p95 = one["throughput_rows_per_s"], one["latency_s"].get("p95")
        yield (
            f"{one['name']:<30} {number(throughput and throughput['value']):>9} rows/s, "
            f"p95 {number(p95 and p95['value'] * 1e3):>7} ms, mean batch {number(one['mean_batch_rows'])}, "
            f"limited by {(one['bottleneck'] or {}).get('kind', '?')}{failure(one)}"
        )
    for one in found["pairs"]:
        bar = bars.get(one["variant"])
        value = (one["ratio"] or {}).get("value")
        met = "" if bar is None or value is None else f"; {against(bar, one['ratio'])}"
        yield f"{one['variant']} over {one['baseline']}: {ratio(one['ratio'])} ({one['outcome']}){met}"


def search(rows: dict[str, Any]) -> Iterator[str]:
    yield from recommended("guided", rows.get("guided"))
    grid = [one for one in rows.get("grid", []) if one["feasible"]]
    if grid:
        best = max(grid, key=lambda one: one["rows_per_s"] or 0.0)
        yield f"grid of {len(rows['grid'])}: best {best['configuration']}: {number(best['rows_per_s'])} rows/s"
    yield from met("guided over the grid's best", rows.get("guided_over_grid"))


def resnet50(rows: dict[str, Any]) -> Iterator[str]:
    yield from recommended("rule", rows.get("rule"))
    yield from recommended("guided", rows.get("guided"))
    yield from met("guided over the rule", rows.get("guided_over_rule"))


def recommended(name: str, found: dict[str, Any] | None) -> Iterator[str]:
    if not found:
        return
    if "configuration" not in found:
        yield f"{name}: {found.get('error', 'nothing')}"
        return
    yield (
        f"{name}: {found['label']}: {number(found['throughput_rps']['value'])} requests/s "
        f"[{number(found['throughput_rps']['low'])}, {number(found['throughput_rps']['high'])}], "
        f"gain over no batching {ratio(found.get('gain_over_no_batching'))}, {found.get('trials')} trials"
    )


def met(what: str, found: dict[str, Any] | None) -> Iterator[str]:
    if not found or not found["ratio"]:
        return
    same = " (the same configuration)" if found["same"] else ""
    yield f"{what}: {ratio(found['ratio'])}{same}; {against(NEAR, found['ratio'])}"


def against(bar: float, found: dict[str, Any]) -> str:
    """Whether a ratio meets a bar; its interval may say that this is not sure."""
    if found["value"] < bar:
        return f"bar ×{bar}: NOT met"
    low = found.get("low")
    sure = low is None or (not isinstance(low, str) and low >= bar)
    return f"bar ×{bar}: met" + ("" if sure else ", but the interval reaches below")


def ratio(found: dict[str, Any] | None) -> str:
    if not found:
        return "not measured"
    ends = f" [{number(found['low'])}, {number(found['high'])}]" if "low" in found else ""
    return f"×{found['value']:.2f}{ends}"


def number(value: float | str | None) -> str:
    """Three digits; `inf` and `nan` travel through JSON as words."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def failure(one: dict[str, Any]) -> str:
    return f"; FAILED: {one['failure']}" if one.get("failure") else ""


def gpu_words(found: dict[str, Any]) -> str:
    told = [
        f"{name} {number(value)}"
        for name, value in found.items()
        if "gpu" in name and not isinstance(value, dict)
    ]
    return "".join(f", {one}" for one in told)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
