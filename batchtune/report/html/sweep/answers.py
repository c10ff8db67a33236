"""What to deploy, what does it gain, how sure is that, what limits it now: the first screen?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.near_best import NearBest
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.report.answer import kept_text
from batchtune.report.bottleneck import limit_title
from batchtune.report.html.shell.document import Answer, sentence
from batchtune.report.html.sweep.account import Account
from batchtune.report.statement import capacity_text
from batchtune.report.units import interval, latency, number
from batchtune.report.words import REFERENCES, capitalised, gains_of, parameters_of
from batchtune.scenario.units import counted, percentage, rounded_duration

_GAINED = {"throughput": "throughput", "capacity": "capacity", "latency": "lower p95"}


def answers_of(account: Account) -> tuple[Answer, ...]:
    """The four."""
    chosen = account.chosen
    if chosen is None:
        return (
            Answer(
                question="What to deploy?",
                headline="Nothing yet",
                lines=(sentence(account.refusal),),
                tone="bad",
            ),
            Answer(question="What does it gain?", headline="–", lines=("There is nothing to compare.",)),
            Answer(
                question="How sure is that?",
                headline=counted(len(account.trials), "trial"),
                lines=("All of them are below.",),
            ),
            Answer(question="What now?", headline="Next", lines=(sentence(account.advice),)),
        )
    return (
        _deploy(chosen),
        _gain(chosen),
        _sure(chosen),
        _limit(chosen),
    )


def _deploy(chosen: Recommendation) -> Answer:
    pairs = parameters_of(chosen.configuration)
    if chosen.configuration.batching is None:
        return Answer(question="What to deploy?", headline="No batching", pairs=tuple(pairs))
    if not pairs:
        return Answer(question="What to deploy?", headline="The server's defaults")
    return Answer(question="What to deploy?", headline="Batching with", pairs=tuple(pairs))


def _gain(chosen: Recommendation) -> Answer:
    own = {
        reference.name for reference in chosen.references if reference.configuration == chosen.configuration
    }
    gains = [(name, gain) for name, gain in gains_of(chosen).items() if gain is not None and name not in own]
    headline = "Not known"
    lines: list[str] = []
    if gains:
        name, gain = gains[0]
        headline = f"{_factor(gain)} {_GAINED[chosen.objective]}"
        lines.append(f"over {REFERENCES[name]}{_ends(gain)}")
        lines += [f"{_factor(gain)} over {REFERENCES[name]}{_ends(gain)}" for name, gain in gains[1:]]
    elif own:
        headline = "Nothing to set"
        lines.append("What was tuned is not better beyond doubt.")
    if chosen.capacity_rps is not None:
        lines.append(f"capacity {capacity_text(chosen, chosen.capacity_rps)} requests/s")
    else:
        lines.append(f"{interval(chosen.throughput_rps)} requests/s")
    lines.append(f"p95 {latency(chosen.latency_s.get('p95'))}")
    return Answer(question="What does it gain?", headline=headline, lines=tuple(lines))


def _sure(chosen: Recommendation) -> Answer:
    lines = [
        f"SLO {promise.name} ≤ {rounded_duration(promise.limit_s)}: {kept_text(promise, chosen)}."
        for promise in chosen.promises
    ]
    if not chosen.established:
        lines += [sentence(question) for question in chosen.open_questions[:2]]
    if chosen.near_best is not None:
        lines.append(_better(chosen.near_best))
    basis = f"{counted(chosen.trials, 'trial')}, {counted(chosen.confirmations, 'fresh run')} of this"
    headline = "Established" if chosen.established else "Not established"
    return Answer(
        question="How sure is that?",
        headline=headline,
        lines=(*lines, f"{basis}."),
        tone="good" if chosen.established else "open",
    )


def _limit(chosen: Recommendation) -> Answer:
    limited = chosen.bottleneck
    if limited is None:
        return Answer(
            question="What limits it?", headline="Not known", lines=("The server tells too little.",)
        )
    title = limit_title(limited)
    return Answer(
        question="What limits it?",
        headline=capitalised(title),
        lines=(sentence(limited.text), sentence(limited.advice)),
    )


def _better(near: NearBest) -> str:
    chance = f"Chance that something is 5 % better: {percentage(1.0 - near.probability)}"
    return f"{chance}." if near.probability >= 0.5 else f"{chance}; more time may find it."


def _factor(gain: Estimate) -> str:
    return f"at least ×{number(gain.value)}" if math.isinf(gain.high) else f"×{number(gain.value)}"


def _ends(gain: Estimate) -> str:
    if not (math.isfinite(gain.low) and math.isfinite(gain.high)):
        return ""
    none = ": may be none" if gain.low <= 1.0 <= gain.high else ""
    return f" [{number(gain.low)}, {number(gain.high)}{none}]"


def notes_of(chosen: Recommendation) -> Iterator[str]:
    """What else a reader should know: why, and what weakens it."""
    yield sentence(chosen.reason)
    if chosen.cannot_pay is not None:
        yield sentence(chosen.cannot_pay)
    yield from map(sentence, chosen.notes)
