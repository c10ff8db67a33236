"""The table of all that was tried: who named it, what it held and missed, in how many runs, what is gained over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchtune.batching.parameters import Configuration, to_dict
from batchtune.report.listing import short_label
from batchtune.report.tables import span
from batchtune.report.words import REFERENCES, gain_cell, limit_word, names_text, other_references
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.units import rounded

RECOMMENDED = "recommended"

_GAINS = {"throughput": "gain", "capacity": "gain in capacity", "latency": "gain in p95"}

Table = list[list[str]]
"""The headings, then a row each."""


def compared_table(chosen: Recommendation) -> Table:
    """What is recommended and each reference, without their parameters."""
    headings = ["", *_rate_headings(chosen), "p95 ms", "runs", _GAINS[chosen.objective]]
    first: list[tuple[str, Recommendation | Compared, str]] = [(RECOMMENDED, chosen, "")]
    others = [(REFERENCES[other.name], other, gain_cell(other)) for other in other_references(chosen)]
    rows = [
        [
            name,
            *_rates(contender, chosen),
            span(contender.latency_s.get("p95"), scale=1e3),
            str(contender.runs),
            gain,
        ]
        for name, contender, gain in (*first, *others)
    ]
    return _without_empty([headings, *rows])


def contenders_table(chosen: Recommendation) -> Table:
    """All that was tried, what is recommended first, then the references, then the best."""
    others = (*other_references(chosen), *chosen.contenders)
    common = common_parameters([chosen.configuration, *(other.configuration for other in others)])
    headings = [
        "named by",
        "configuration",
        *_rate_headings(chosen),
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "mean batch",
        "limited by",
        "runs",
        _GAINS[chosen.objective],
    ]
    rows = [
        [
            name,
            brief_label(contender.configuration, common),
            *_rates(contender, chosen),
            *(span(contender.latency_s.get(quantile), scale=1e3) for quantile in ("p50", "p95", "p99")),
            rounded(contender.mean_batch_rows),
            limit_word(contender.bottleneck),
            str(contender.runs),
            gain,
        ]
        for name, contender, gain in _all(chosen, others)
    ]
    return _without_empty([headings, *rows])


DISPENSABLE = ("p50 ms", "p99 ms", "mean batch", "limited by")
"""Columns of the table of all contenders that go first where there is little room."""


def common_parameters(configurations: Sequence[Configuration]) -> dict[str, Any]:
    """The parameters that have one value in all of these that batch."""
    batchings = [configuration.batching for configuration in configurations]
    batched = [parameters for batching in batchings if batching and (parameters := to_dict(batching))]
    if len(batched) < 2:
        return {}
    return {
        name: value
        for name, value in batched[0].items()
        if all(parameters.get(name) == value for parameters in batched)
    }


def brief_label(configuration: Configuration, common: Mapping[str, Any]) -> str:
    """A configuration in a few words, without the parameters that all have in `common`."""
    text = short_label(configuration.label())
    for name, value in common.items():
        text = text.replace(f" · {short_label(f'{name}={value}')}", "")
    return text


def _all(
    chosen: Recommendation, others: Sequence[Compared]
) -> list[tuple[str, Recommendation | Compared, str]]:
    """Name, figures and gain."""
    first = ", ".join(filter(None, (RECOMMENDED, names_text(chosen.names))))
    return [
        (first, chosen, ""),
        *((_name(other), other, gain_cell(other)) for other in others),
    ]


def _name(other: Compared) -> str:
    return ", ".join(filter(None, (names_text(other.names), "outside the space" if other.outside else "")))


def _rate_headings(chosen: Recommendation) -> list[str]:
    return ["requests/s"] if chosen.capacity is None else ["held /s", "missed /s"]


def _rates(contender: Recommendation | Compared, chosen: Recommendation) -> list[str]:
    if chosen.capacity is None:
        return [span(contender.throughput_rps)]
    if contender.capacity is None:
        return ["–", "–"]
    held = rounded(contender.capacity.held_rps) if contender.capacity.held_rps else "none"
    held += " by loops" if contender.capacity.by_loops else ""
    bound = "≤ " if contender.capacity.is_bound and contender.capacity.missed_rps is not None else ""
    return [held, f"{bound}{rounded(contender.capacity.missed_rps)}"]


def _without_empty(table: Table) -> Table:
    """Columns in which no row says anything stay away."""
    kept = [at for at in range(len(table[0])) if any(row[at] not in ("", "–") for row in table[1:])]
    return [[row[at] for at in kept] for row in table]
