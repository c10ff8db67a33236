"""The first screen of a sweep's page: what to deploy, what it gains, how sure that is, what limits it now."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.report.bottleneck import limit_title
from batchtune.report.html.shell.document import Answer, sentence
from batchtune.report.html.sweep.account import Account
from batchtune.report.words import (
    capitalised,
    figures_sentence,
    gain_sentences,
    name_without_parameters,
    named_sentences,
    offer_sentences,
    parameters_of,
    promise_sentence,
    why_sentence,
)
from batchtune.scenario.units import counted
from batchtune.tune.answer.recommendation import Recommendation


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
