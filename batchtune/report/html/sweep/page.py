"""Puts the page of a sweep together: what to deploy, all contenders, the space, the latencies, the trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from batchtune.measure.validity.caveats import Caveat
from batchtune.report.html.shell.batch_sizes import sizes
from batchtune.report.html.shell.document import (
    Answer,
    Document,
    gathered_caveats,
    provenance_rows,
    sentence,
    slo_text,
    traffic_text,
)
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Trace,
    finite,
    is_emulated,
    label,
    log_axis,
    numbers,
)
from batchtune.report.html.shell.latency_figures import distribution, split, timeline
from batchtune.report.html.shell.trial_rows import Detail, TrialTable, trial_rows
from batchtune.report.html.sweep.account import LATEST, Account
from batchtune.report.html.sweep.contender_figures import brackets, contenders, history, pareto, rates
from batchtune.report.html.sweep.space_figures import heat_map, slices
from batchtune.report.words import (
    PROTOCOLS,
    capitalised,
    figures_sentence,
    gain_sentences,
    limit_title,
    name_without_parameters,
    named_sentences,
    offer_sentences,
    parameters_of,
    promise_sentence,
    why_sentence,
)
from batchtune.scenario.units import counted, rounded_duration
from batchtune.target.model_files import served_name
from batchtune.tune.answer.recommendation import Recommendation
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


def answers_of(account: Account) -> tuple[Answer, ...]:
    """The four."""
    chosen = account.chosen
    if chosen is None:
        trials = counted(len(account.trials), "trial")
        return (
            Answer(
                question="What to deploy?",
                headline="Nothing yet",
                lines=(sentence(account.refusal),),
                tone="bad",
            ),
            Answer(question="What does it gain?", headline="–", lines=("There is nothing to compare.",)),
            Answer(question="How sure is that?", headline=trials, lines=("All of them are below.",)),
            Answer(question="What now?", headline="Next", lines=(sentence(account.advice),)),
        )
    name = name_without_parameters(chosen.configuration)
    deploy = Answer(
        question="What to deploy?",
        headline="Batching with" if name is None else capitalised(name),
        pairs=tuple(parameters_of(chosen.configuration)),
    )
    return deploy, _gain(chosen), _sure(chosen), _limit(chosen)


def _gain(chosen: Recommendation) -> Answer:
    first, *others = [*gain_sentences(chosen)] or ["Nothing to compare with."]
    return Answer(
        question="What does it gain?",
        headline=first.removesuffix("."),
        lines=(*others, figures_sentence(chosen)),
    )


def _sure(chosen: Recommendation) -> Answer:
    lines = [f"SLO {promise_sentence(promise, chosen)}" for promise in chosen.promises]
    lines += [sentence(question.text()) for question in chosen.open_questions]
    basis = f"{counted(chosen.trials, 'trial')}, {counted(chosen.confirmations, 'fresh run')} of this."
    return Answer(
        question="How sure is that?",
        headline="Established" if chosen.established else "Not established",
        lines=(*lines, basis, *offer_sentences(chosen, None)),
        tone="good" if chosen.established else "open",
    )


def _limit(chosen: Recommendation) -> Answer:
    limited = chosen.bottleneck
    if limited is None:
        lines = ("The server tells too little.",)
        return Answer(question="What limits it?", headline="Not known", lines=lines)
    return Answer(
        question="What limits it?",
        headline=capitalised(limit_title(limited)),
        lines=(sentence(limited.text), sentence(limited.advice)),
    )


def notes_of(chosen: Recommendation) -> Iterator[str]:
    """What else a reader should know: why, how the rule and the guide fared, and what weakens it."""
    yield why_sentence(chosen)
    yield from named_sentences(chosen)
    yield from map(sentence, chosen.notes)


_INTERVALS: Final = (
    "A range holds the runs named beside it; from five fresh runs on it holds 95 % of further runs. A gain is the "
    "ratio of two brackets, from the rate held to the rate missed. In the list of trials an interval is the 95 % "
    "interval of one run, from order statistics."
)


def sweep_document(account: Account, *, deployment: str | None = None) -> Document:
    """The page; `deployment` is the command that serves what is recommended."""
    chosen = account.chosen
    return Document(
        title=account.scenario.name,
        subtitle=_subtitle(account),
        emulated=is_emulated(account.trials),
        answers=answers_of(account),
        command=deployment,
        notes=[] if chosen is None else [note for note in notes_of(chosen) if note],
        open_questions=[] if chosen is None else [question.text() for question in chosen.open_questions],
        alternatives=[]
        if chosen is None
        else [(parameters_of(other.configuration), other.trade) for other in chosen.alternatives],
        sections=_sections(account),
        caveats=gathered_caveats(_caveats_by_role(account)),
        provenance=provenance_rows(account.run, account.scenario),
        trials=_trials(account),
        intervals=_INTERVALS,
    )


def _sections(account: Account) -> list[Section]:
    shown, slo = account.shown, account.scenario.slo
    return [
        brackets(account),
        contenders(account),
        rates(account) if account.scenario.objective == "capacity" else pareto(account),
        heat_map(account),
        slices(account),
        distribution(shown, slo, which=LATEST),
        timeline(shown, slo, which=LATEST),
        split(shown, which=LATEST),
        sizes(shown, which=LATEST),
        service_time(account),
        history(account),
    ]


def _subtitle(account: Account) -> str:
    scenario, chosen = account.scenario, account.chosen
    rows = max(kind.rows or 1 for kind in scenario.request.kinds())
    parts = [
        served_name(scenario.target.model),
        PROTOCOLS[scenario.request.protocol],
        f"{counted(rows, 'row')} a request",
        traffic_text(scenario),
        slo_text(scenario),
        f"objective {scenario.objective}",
    ]
    if chosen is not None:
        parts.append(f"{rounded_duration(chosen.seconds)} of measuring")
    return " · ".join(parts)


def _caveats_by_role(account: Account) -> dict[str, tuple[Caveat, ...]]:
    return {name: contender.caveats for name, contender in account.roles.items()}


def _trials(account: Account) -> TrialTable:
    """A detail for each configuration, in the order of the table of contenders."""
    places = defaultdict(list)
    for at, trial in enumerate(account.trials):
        places[trial.configuration].append(at)
    details = [
        Detail(
            heading=label(contender.configuration),
            parameters=parameters_of(contender.configuration),
            rows=places[contender.configuration],
        )
        for contender in account.contenders
    ]
    return TrialTable(rows=trial_rows(account.trials, lambda _: account.scenario), details=details)
