"""Words that pages and tables of every command share: bottlenecks, facts, parameters, models, references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from batchtune.batching.parameters import Configuration, to_dict
from batchtune.measure.bottleneck import Bottleneck
from batchtune.report.findings import labels, text_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.model_files import served_name
from batchtune.units import rounded


def limit_word(bottleneck: Bottleneck | None) -> str:
    """Return the bottleneck as one or two words for a table; `–` for None, not measured."""
    return "–" if bottleneck is None else bottleneck.kind.replace("_", " ")


def limit_title(bottleneck: Bottleneck | None) -> str:
    """Return what limits the server, as the subject of a sentence; None counts as no limit found."""
    return labels("limits")["none" if bottleneck is None else bottleneck.kind]


def bottleneck_sentence(bottleneck: Bottleneck, *, at: str = "", advises: bool = True) -> str:
    """Return the bottleneck with the figures that show it and what to do, as text after the label `Bottleneck`.

    `at`: words before the figures, such as `at 8 clients, `. `advises` False: without what to do about it.
    """
    advice = f" {capitalised(text_of(bottleneck.advice))}." if advises else ""
    return f"{limit_title(bottleneck)}; {at}{text_of(bottleneck.text)}.{advice}"


def alike(bottlenecks: Mapping[str, Bottleneck | None]) -> list[tuple[list[str], Bottleneck]]:
    """Group names that have the same kind of bottleneck and the same advice. Returns (names, bottleneck of the last of
    them) for each group.

    `bottlenecks`: name of what was measured -> what limits it, None where that is not known.
    """
    groups: dict[tuple[str, str], list[tuple[str, Bottleneck]]] = {}
    for name, own in bottlenecks.items():
        if own is not None:
            groups.setdefault((own.kind, text_of(own.advice)), []).append((name, own))
    return [([name for name, _ in group], group[-1][1]) for group in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """An answer at the head of a page: a question, the answer in a few words, and lines below it.

    `pairs`: names and values, such as parameters, shown below the headline. `tone`: "good", "open", "bad", or
    "" for none.
    """

    question: str
    headline: str
    lines: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    tone: str = ""


def headline_of(code: str) -> tuple[str, str]:
    """Return (headline, tone) of an answer by its code, such as a verdict; a code that is not listed: ("No verdict",
    "open")."""
    return labels("headlines").get(code, "No verdict"), labels("tones").get(code, "open")


def limit_fact(bottleneck: Bottleneck | None) -> Fact:
    """Return the answer to "What limits it?": bottleneck, evidence and advice; `bottleneck` None: not known."""
    if bottleneck is None:
        lines: tuple[str, ...] = ("The server reports too little.",)
        return Fact(question="What limits it?", headline="Not known", lines=lines)
    lines = tuple(sentence(text_of(finding)) for finding in (bottleneck.text, bottleneck.advice))
    return Fact(question="What limits it?", headline=capitalised(limit_title(bottleneck)), lines=lines)


def fact_text(fact: Fact) -> str:
    """Return the question and its whole answer as one paragraph."""
    texts = (fact.headline, *(f"{name} {value}" for name, value in fact.pairs), *fact.lines)
    return " ".join([fact.question, *(f"{text.rstrip('.')}." for text in texts)])


def shortened(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Return the answers with at most five lines each; where lines are left out, the last line says how many."""
    most = 5
    return tuple(
        fact
        if len(fact.lines) <= most
        else replace(fact, lines=(*fact.lines[: most - 1], f"{len(fact.lines) - most + 1} more below."))
        for fact in facts
    )


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop; "" stays ""."""
    text = text.strip().rstrip(".")
    return f"{capitalised(text)}." if text else ""


def models_text(scenario: Scenario) -> str:
    """Return the name of the model that is served, several joined by ` + `; the scenario's where a model by OpenAI's
    API has none."""
    if scenario.target.is_unnamed and scenario.streams:
        return scenario.name
    names = [own.name for own in scenario.target.models] or [served_name(scenario.target.model)]
    return " + ".join(names)


def parameters_of(configuration: Configuration) -> list[tuple[str, str]]:
    """Return (name, value) of each batching parameter and flag that is set, in the server's own words and
    units.

    In the order of the server's file; those of one of several models as `MODEL: name`.
    """
    batching = {} if configuration.batching is None else to_dict(configuration.batching)
    named = []
    for name, ours in batching.items():
        value = configuration.in_its_unit(name, ours)
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        named.append((configuration.word(name), text))
    named += [(configuration.flag_word(name), value) for name, value in configuration.flags]
    owned = [
        (f"{model}: {name}", value)
        for model, batching in configuration.models
        for name, value in parameters_of(Configuration(batching=batching))
    ]
    return named + owned


def name_without_parameters(configuration: Configuration) -> str | None:
    """Return the name of a configuration that sets no batching parameter: "no batching", "the server's
    defaults"; else None."""
    if configuration.batching is None:
        return reference_text("no_batching")
    sets_others = configuration.dialect == "http" and bool(configuration.flags)
    sets_own = any(to_dict(batching) for _, batching in configuration.models)
    return None if to_dict(configuration.batching) or sets_others or sets_own else reference_text("defaults")


def reference_text(name: str) -> str:
    """Return the words for a reference, such as `no_batching`, within a sentence."""
    return "the server's defaults" if name == "defaults" else labels("references")[name]


def names_text(names: Iterable[str]) -> str:
    """Return the sources that proposed a contender, such as `no batching, rule`; "" for a point of the space
    that no source proposed by name."""
    return ", ".join(text for name, text in labels("names").items() if name in set(names))


def capitalised(text: str) -> str:
    """Return the text with its first letter as a capital, unless it begins with a parameter's name."""
    return text if "=" in text.partition(" ")[0] else f"{text[:1].upper()}{text[1:]}"


def requests_text(rows: float | None) -> str:
    """Return the size of requests: `requests of 8 rows`; `requests` where it is not known."""
    if rows is None:
        return "requests"
    shown = f"{rows:.0f}" if abs(rows - round(rows)) < 0.01 else rounded(rows)
    return f"requests of {shown} row{'' if shown == '1' else 's'}"
