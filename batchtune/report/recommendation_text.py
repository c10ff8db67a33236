"""Prints a recommendation: in some fifteen lines, or with the whole argument in the same form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from batchtune.batching.parameters import Configuration
from batchtune.measure.caveats import CLIENT_CODES, HOST_CODES
from batchtune.report import answer_words, tables, words
from batchtune.report.findings import Marks, advice_of, labels, text_of
from batchtune.report.run_tables import brief_labels, short_label
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import Capacity, Compared, Recommendation
from batchtune.units import counted, rounded, rounded_duration


def print_answer(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    deployment: str | None,
    run: str | None = None,
    next_step: str | None = None,
    offer: str | None = None,
    why: str | None = None,
    whole: bool = False,
) -> None:
    """Print a recommendation in some fifteen lines, as paragraphs with labels; commands and names of runs are
    not wrapped.

    `run`: line that names the run, None where the user named it. `next_step`: command that would confirm an
    open answer. `offer`: command for a longer search. `deployment`: command that serves it, None where
    another dialect follows. `why`: command that prints the whole argument. `whole`: this is it, with every
    contender, reason, alternative and caveat.
    """

    indent = " " * len("Recommended ")  # the longest label

    def tell(label: str, *texts: str, bold: bool = False, as_is: bool = False) -> None:
        for text in texts:
            line = f"{label:<{len(indent)}}{text}"
            tables.print_text(line, indent=indent, bold=bold, whole=as_is)
            label = ""

    others = answer_words.other_references(chosen)
    marks = Marks(
        caveats={
            RECOMMENDED: chosen.caveats,
            **{labels("references")[reference.name]: reference.caveats for reference in others},
        }
    )
    tables.print_text(*filter(None, (run, answer_words.workload(scenario, chosen))))
    advice = f"{use_text(chosen)}{answer_words.unconfirmed_text(chosen)}"
    tell("Recommended", " ".join(filter(None, (answer_words.keep_sentence(chosen), advice))), bold=True)
    first, then = (" ".join(part) for part in answer_words.gain_parts(chosen))
    tell("Gain", *filter(None, [first]), bold=True)
    tell("", *filter(None, [then]))
    if whole:
        _print_contenders(chosen, marks)
    else:
        tell("", *tables.aligned(compared_table(chosen)), as_is=True)
        tell("", *marks_texts([chosen, *others], starred=False))
    for label, texts in _argument(chosen, answer_words.ways_on(chosen, offer, next_step), whole=whole):
        tell(label, *texts)
    tell("Caveats", *(marks.lines() if whole else ()))
    commands = {"confirm": next_step, "deploy": deployment, "search": offer, "explain": why}
    tell("Next", *_steps(commands), as_is=True)


def _print_contenders(chosen: Recommendation, marks: Marks) -> None:
    """Print the table of all that was tried, with the marks of caveats after the names."""
    # Columns that go first where there is little room.
    dispensable = ("p50 ms", "limited by", "mean batch", "p99 ms", "runs", "p95 ms")
    headings, *rows = contenders_table(chosen)
    for whose, row in zip(marks.caveats, rows, strict=False):
        row[0] = marks.marked(row[0], whose, "everything", "throughput", "latency", "bound", "server")
    tables.print_text("")
    tables.print_rows([headings, *rows], dispensable=dispensable)
    tables.print_text(*marks_texts([chosen, *answer_words.other_references(chosen), *chosen.contenders]), "")


def _argument(
    chosen: Recommendation, more: Iterable[str], *, whole: bool
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (label, paragraphs) of what an answer says below its table; `more`: sentences after its confidence.

    `whole`: also how rule and guide compare, what the search did, every note and the alternatives; else a caveat
    only where it is decisive.
    """
    yield "Models", [*answer_words.model_sentences(chosen)]
    for promise in chosen.promises:
        yield "SLO", [answer_words.promise_sentence(promise, chosen)]
    yield "Why", [answer_words.why_sentence(chosen)]
    if whole:
        yield "Compared", [*answer_words.named_sentences(chosen), *_not_measured(chosen)]
    if chosen.bottleneck is not None:
        yield "Bottleneck", [words.capitalised(words.bottleneck_sentence(chosen.bottleneck))]
    if whole:
        yield "Search", [" ".join(_searched(chosen))]
    yield "Confidence", [" ".join([words.capitalised(answer_words.confidence_sentence(chosen)), *more])]
    always = ("short_sweep", "confirmation_failed", "ran_out", "refused", "some_failed")
    notes = [
        words.sentence(text_of(note))
        for note in chosen.notes
        if note.code in always or (whole and note.code != "unbatched_too_slow")  # which the gain says
    ]
    warnings = [*answer_words.qualifying_sentences(chosen), *([] if whole else [*notes, *_warnings(chosen)])]
    yield "Warning", [*filter(None, [" ".join(warnings)])]
    yield "Notes", notes if whole else []
    for alternative in chosen.alternatives[:3] if whole else ():
        label, trade = alternative.configuration.label(), text_of(alternative.trade)
        searched = "" if alternative.confirmations else " (without confirmation runs)"
        yield "Alternative", [f"{label}: {trade}{searched}."]


def _not_measured(chosen: Recommendation) -> Iterator[str]:
    """Yield a sentence for each of no batching and the defaults that has no figures: whether it failed when it was
    tried."""
    known = {reference.name for reference in chosen.references}
    known |= {"no_batching" for note in chosen.notes if note.code == "unbatched_too_slow"}
    for name in ("no_batching", "defaults"):
        if name in known:
            continue
        why = chosen.failed_references.get(name)
        ending = "not measured" if why is None else f"failed when it was tried ({why})"
        if name == "defaults" and why is None and chosen.configuration.dialect == "http":
            ending += "; target.defaults in the scenario tells what they are"
        yield f"{words.capitalised(labels('references')[name])}: {ending}."


def _searched(chosen: Recommendation) -> Iterator[str]:
    """Yield sentences on how many trials were made and how the search went: its plan, which sources proposed the runs,
    why it ended."""
    yield f"{counted(chosen.trials, 'trial')} in {rounded_duration(chosen.seconds)}."
    search = chosen.search
    if search is None:
        return
    if plan := text_of(search.plan):
        yield f"The plan was {plan}."
    if search.proposals:
        counts = sorted(search.proposals.items(), key=lambda pair: -pair[1])
        made = [f"{labels('names').get(name, 'the space')} {count}" for name, count in counts]
        yield f"Runs by source: {', '.join(made)}."
    if reason := text_of(search.stop_reason):
        yield f"The search ended: {reason}."
    if search.nodes:
        yield f"Trials ran on several nodes at once: {search.nodes}."


def use_text(chosen: Recommendation) -> str:
    """Return the recommended parameters in one line: `max_batch_size 32, batch_timeout_micros 1000`."""
    whole = chosen.configuration
    parts = [replace(whole, models=()), *(Configuration(batching=own) for _, own in whole.models)]
    heads = ["", *(f"{name}: " for name, _ in whole.models)]
    texts = [", ".join(f"{name} {value}" for name, value in words.parameters_of(part)) for part in parts]
    own = "; ".join(f"{head}{text}" for head, text in zip(heads, texts, strict=True) if text)
    return ", ".join(filter(None, (words.name_without_parameters(whole), own)))


def _steps(commands: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a line for each command, with its purpose before its first line; a command of None is left out."""
    for purpose, command in commands.items():
        for line in (command or "").splitlines():
            yield f"{purpose:<9}{line}"
            purpose = ""


def _warnings(chosen: Recommendation) -> Iterator[str]:
    """Yield a sentence on each decisive caveat of the recommended figures and of those that they are compared
    with.

    The last one says how many other caveats there are.
    """
    codes = {"emulated_device", "errors", "not_steady", "streams_textless"} | CLIENT_CODES | HOST_CODES
    # The backlog of runs above a capacity grows too: they show where it ends.
    codes |= {"growing_backlog"} if chosen.capacity is None else set()
    said: set[str] = set()
    of_references = ((own.caveats, f" ({words.reference_text(own.name)})") for own in chosen.references)
    owned = [(chosen.caveats, ""), *of_references]
    against = [(caveat, whose) for caveats, whose in owned for caveat in caveats]
    for caveat, whose in sorted(against, key=lambda entry: entry[0].code == "emulated_device"):
        if caveat.code in codes and caveat.code not in said:
            text, advice = words.capitalised(text_of(caveat)), words.capitalised(advice_of(caveat))
            yield f"{text}{whose}." if advice in said else f"{text}{whose}. {advice}."
            said |= {caveat.code, advice}
    more = len({caveat.code for caveat, _ in against} - said)
    if said and more:
        yield f"{counted(more, 'more warning')}: `--why`."


# The tables: which sources proposed a configuration, what it held and missed, in how many runs, what is gained over it.


RECOMMENDED = "recommended"


def compared_table(chosen: Recommendation) -> list[list[str]]:
    """Return a table, headings first, without parameters: a row for the recommended configuration and each
    reference.

    References are what others are compared with: no batching, the defaults, what runs now.
    """
    others = [
        (labels("references")[other.name], other, answer_words.gain_cell(other))
        for other in answer_words.other_references(chosen)
    ]
    left_out = ("named by", "configuration", "p50 ms", "p99 ms", "mean batch", "limited by")
    columns = _columns([(RECOMMENDED, chosen, ""), *others], objective=chosen.objective, limits=chosen.slo)
    shown = {name: cells for name, cells in columns.items() if name not in left_out}
    return _table({"": columns["named by"], **shown})


def contenders_table(chosen: Recommendation) -> list[list[str]]:
    """Return a table of all configurations that were tried, headings first: the recommended one, the references,
    then the others."""
    first = ", ".join(filter(None, (RECOMMENDED, words.names_text(chosen.names))))
    others = (*answer_words.other_references(chosen), *chosen.contenders)
    shown: list[_Row] = [
        (first, chosen, ""),
        *((_name(other), other, answer_words.gain_cell(other)) for other in others),
    ]
    return _table(_columns(shown, objective=chosen.objective, limits=chosen.slo))


def nearest_table(tried: Sequence[Compared], *, objective: str) -> list[list[str]]:
    """Return a table of all that was tried where nothing is recommended, headings first, in the order given."""
    return _table(_columns([(_name(other), other, "") for other in tried], objective=objective, limits={}))


_Row = tuple[str, Recommendation | Compared, str]
"""(sources that proposed a configuration, its figures, what is gained over it)."""


def _columns(shown: Sequence[_Row], *, objective: str, limits: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the columns of a table of configurations, heading -> cells; `limits`: quantile name -> seconds."""
    _, contenders, gains = (list(part) for part in zip(*shown, strict=True))
    labels, _ = brief_labels([contender.configuration.label() for contender in contenders])
    rates = zip(*(_rates(contender, objective) for contender in contenders), strict=True)
    rate_headings = ["met /s", "limit below /s"] if objective == "capacity" else ["requests/s"]
    of_models = [name for name in contenders[0].latency_s if ":" in name]
    quantiles = [name for name in of_models if name.endswith(":p95")]
    quantiles = quantiles or ["ttft_p95", "itl_p99", "p50", "p95", "p99"]
    return {
        "named by": [f"{name}{'†' if _is_predicted(own) else ''}" for name, own, _ in shown],
        "configuration": labels,
        **dict(zip(rate_headings, map(list, rates), strict=True)),
        **{
            f"{name} ms": [_latency(contender, name, limits.get(name, math.inf)) for contender in contenders]
            for name in quantiles
        },
        "mean batch": [rounded(contender.mean_batch_rows) for contender in contenders],
        "limited by": [words.limit_word(contender.bottleneck) for contender in contenders],
        "runs": [str(contender.runs) for contender in contenders],
        "gain [least, most]" if any("[" in gain for gain in gains) else "gain": gains,
    }


def _table(columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    return tables.without_empty_columns([[*columns], *map(list, zip(*columns.values(), strict=True))])


def marks_texts(shown: Sequence[Recommendation | Compared], *, starred: bool = True) -> Iterator[str]:
    """Yield a line on the server's defaults, and one on each mark in a table of these configurations: at rates, at
    figures that are prediction intervals, and, where they are `starred`, at configurations outside the search space."""
    defaults = next((own.defaults for own in shown if isinstance(own, Recommendation)), {})
    if defaults:
        known = " ".join(f"{name}={value}" for name, value in defaults.items() if value.isdecimal())
        others = (f"threads {value}" for value in defaults.values() if not value.isdecimal())
        yield f"{labels('references')['defaults']}: {' · '.join([short_label(known), *others])}."
    signs = {_sign(contender.capacity) for contender in shown if contender.capacity is not None}
    if "~" in signs:
        yield "~ is expected to be met: a share of a rate that was tried."
    if "?" in signs:
        yield "? is a guess: the runs that would show it missed the SLO, or none was made."
    if any(map(_is_predicted, shown)):
        yield "† 95 % of further runs; other rows have the range of their runs."
    if starred and any(isinstance(contender, Compared) and contender.outside for contender in shown):
        yield "* outside the search space: no candidate."


def _is_predicted(shown: Recommendation | Compared) -> bool:
    """Return whether figures are prediction intervals: those of a confirmed answer."""
    return isinstance(shown, Recommendation) and shown.interval == "prediction"


def _name(other: Compared) -> str:
    return f"{words.names_text(other.names)}{'*' if other.outside else ''}"


def _rates(contender: Recommendation | Compared, objective: str) -> list[str]:
    """Return the cells of the rates: under objective capacity (held, missed), else the requests/s."""
    if objective != "capacity":
        return [tables.span(contender.throughput_rps)]
    capacity = contender.capacity
    if capacity is None:
        return ["–", "–"]
    held = "–" if capacity.is_untried else "none"
    if capacity.lone_rps:
        held = f"{rounded(capacity.lone_rps)} by 1 client"
    elif capacity.held_rps:
        held = f"{_sign(capacity)}{rounded(capacity.held_rps)}{' by loops' if capacity.by_loops else ''}"
    is_about = capacity.missed_rps is not None and (capacity.is_bound or capacity.is_disputed_end)
    about = "about " if is_about else ""
    return [held, f"{about}{rounded(capacity.missed_rps)}"]


def _sign(capacity: Capacity) -> str:
    """Return the mark before a rate that is stated as held: a share of another rate, or a guess."""
    if capacity.lone_rps or not capacity.held_rps:
        return ""
    return "?" if capacity.is_guess else "~" if capacity.is_share else ""


def _latency(contender: Recommendation | Compared, name: str, limit_s: float) -> str:
    """Return the cell of a latency in ms, marked where it is that of runs that missed the SLO."""
    estimate, capacity = contender.latency_s.get(name), contender.capacity
    text = tables.span(estimate, scale=1e3)
    missed = capacity is not None and not (capacity.held_rps and estimate and estimate.high <= limit_s)
    return f"{text} (missed)" if missed and text != "–" else text
