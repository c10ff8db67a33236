"""The words of an answer, the same on terminal, page and log: gains, figures, reason, confidence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from batchtune.measure.caveats import CLIENT_CODES, HOST_CODES
from batchtune.measure.quantiles import Estimate
from batchtune.report.findings import labels, text_of
from batchtune.report.tables import ratio, span
from batchtune.report.words import capitalised, models_text, reference_text, sentence
from batchtune.scenario.spec.check import limit_words, value_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import cpu_list
from batchtune.tune.answer.recommendation import (
    Capacity,
    Compared,
    OpenQuestion,
    Promise,
    Recommendation,
    tightest,
)
from batchtune.tune.evidence.bracket import FRESH, LEVEL
from batchtune.units import counted, percentage, rounded, rounded_duration

NO_DIFFERENCE: Final = "no measurable difference"


# What was asked, and who answers.


def workload(scenario: Scenario, chosen: Recommendation) -> str:
    """Describe what was measured in one line: model, protocol, rows per request, traffic, CPUs."""
    traffic = f"{scenario.load.arrivals} arrivals{_at_rate(scenario)}"
    if chosen.concurrency is not None:
        traffic = counted(chosen.concurrency, "client")
    rows = "" if scenario.target.models else f", {counted(chosen.rows_per_request, 'row')} per request"
    server = scenario.target.cpus
    on = "" if server is None else f", server on {cpu_list(server)}"
    protocol = labels("protocols")[scenario.request.protocol]
    return f"{models_text(scenario)} by {protocol}{rows}, {traffic}{on}"


def _at_rate(scenario: Scenario) -> str:
    """Return ` at 500/s`, the mean rate of the scenario's load; "" for a capacity, which is the answer,
    and without a rate."""
    rate_rps = None if scenario.objective == "capacity" else scenario.load.rate_rps
    return "" if rate_rps is None else f" at {rounded(rate_rps)}/s"


def other_references(chosen: Recommendation) -> list[Compared]:
    """Return the references that are not the recommended configuration, each configuration once."""
    by_configuration = {reference.configuration: reference for reference in reversed(chosen.references)}
    by_configuration.pop(chosen.configuration, None)
    return list(reversed(by_configuration.values()))


# Gains.


Outcome = Literal["open", "misses", "unknown", "none", "gained"]


def outcome_of(other: Compared) -> Outcome:
    """Return how another configuration compares with the recommended one: the first of these that holds.

    "open": it may be better. "misses": it misses the SLO. "unknown": the ratio of the two is not known.
    "none": their difference is not measurable. "gained": the ratio is measurably above or below 1, as a rule
    above.
    """
    if other.open:
        return "open"
    if not other.keeps and other.capacity is None:
        return "misses"
    return _gained(other.gain)


def _gained(gain: Estimate | None) -> Outcome:
    if gain is None or math.isnan(gain.value):
        return "unknown"
    if not gain.low <= 1.0 <= gain.high:
        return "gained"
    return "none" if gain.low > 0.0 and math.isfinite(gain.high) else "unknown"


def gain_text(gain: Estimate | None) -> str:
    """Write a gain: `×2.10 [1.80, 2.50]`, `at least ×9.00`, `no measurable difference`, or `–` where it is
    not known."""
    outcome = _gained(gain)
    if gain is None or outcome == "unknown":
        return "–"
    if outcome == "none":
        return NO_DIFFERENCE
    return f"at least ×{rounded(gain.low)}" if math.isinf(gain.high) else ratio(gain)


def gain_cell(other: Compared) -> str:
    """Return the gain over another configuration as a cell of a table, in a few words."""
    match outcome_of(other):
        case "open":
            return "may be better"
        case "misses":
            missed = "undecided" if other.undecided else "misses the SLO"
            return f"met in {other.met} of {other.runs}" if other.met else missed
        case "none":
            return "none measurable"
        case _:
            return gain_text(other.gain)


def gain_sentences(chosen: Recommendation) -> Iterator[str]:
    """Yield sentences on what is gained over the configuration that runs now; where none runs, over no
    batching and the defaults."""
    others = other_references(chosen)
    if "present" in chosen.names:
        yield "None: this is what runs now."
    present = [other for other in others if other.name == "present"]
    for other in present or others:
        yield _gain_sentence(chosen, other)
    if not is_refuted(chosen) and any(outcome_of(other) == "gained" for other in present or others):
        yield "Gains compare these runs on this host; at another time they may differ."
    level = next((other for other in others if other.name == chosen.level_with), None)
    if level is not None and present and level not in present and not level.open:
        yield f"{capitalised(NO_DIFFERENCE)} from {reference_text(level.name)}."
    yield from (sentence(text_of(note)) for note in chosen.notes if note.code == "unbatched_too_slow")


def gain_parts(chosen: Recommendation) -> tuple[list[str], list[str]]:
    """Return (sentences on gains, sentence on the measured figures); the figures first where they are a guess."""
    gains, figures = [*gain_sentences(chosen)], [figures_sentence(chosen)]
    return (figures, gains) if is_refuted(chosen) else (gains, figures)


def _gain_sentence(chosen: Recommendation, other: Compared) -> str:
    name, lone = reference_text(other.name), _met_by_one(other.capacity)
    match outcome_of(other):
        case "unknown" if other.gain is not None and other.gain.low <= 0.0:
            return (
                f"The gain over {name} is not known: `batchtune compare`, with both as variants, measures it."
            )
        case "unknown" if other.capacity is not None and not other.capacity.held_rps:
            return f"How much is gained over {name} is not known: {_met_none(other, lone)}."
        case "open" | "unknown":
            is_disturbed = other.gain is None and HOST_CODES & {caveat.code for caveat in other.caveats}
            why = ", since the host was disturbed" if is_disturbed else ""
            return f"Whether it is better than {name} is open{why}."
        case "misses":
            return f"{capitalised(name)} {_missed(other, 'miss' if other.name == 'defaults' else 'misses')}."
        case "none":
            return f"{capitalised(NO_DIFFERENCE)} from {name}."
        case "gained":
            never = "" if other.keeps else f" {capitalised(_met_none(other, lone))}."
            guess = ", if that guess holds" if is_refuted(chosen) else ""
            return f"{capitalised(gain_text(other.gain))} {_gained_what(chosen)} {name}{guess}.{never}"


def _met_none(other: Compared, lone: str) -> str:
    """State that no rate tried met the SLO; where none was tried, that the closed loops missed it."""
    under = _under(other.name)
    if other.capacity is not None and other.capacity.is_untried:
        return f"no rate was tried {under}, only closed loops, which missed the SLO{lone}"
    return f"no rate tried met the SLO {under}{lone}"


def _missed(other: Compared, misses: str = "misses") -> str:
    """State of a configuration that does not keep the SLO in how many runs it met it; where in none, that it misses."""
    if other.undecided:
        return "may meet the SLO: that is undecided"
    return f"met the SLO in {other.met} of {counted(other.runs, 'run')}" if other.met else f"{misses} the SLO"


def _met_by_one(capacity: Capacity | None) -> str:
    """State that one client alone met the SLO where no rate did; "" where it did not."""
    lone_rps = None if capacity is None else capacity.lone_rps
    return f"; one client alone met it, at {rounded(lone_rps)} requests/s" if lone_rps else ""


def _under(name: str) -> str:
    """Return the adverbial of a reference: `without batching`, `with the server's defaults`."""
    return "without batching" if name == "no_batching" else f"with {reference_text(name)}"


def _gained_what(chosen: Recommendation) -> str:
    """Return what is gained, such as `capacity over`; for the latency of several models, room in the tightest
    of all limits."""
    is_room = chosen.models and chosen.objective == "latency"
    return "more room in the tightest limit than" if is_room else labels("gained")[chosen.objective]


# Figures.


def quantile_of(chosen: Recommendation) -> str:
    """Return the name of the latency quantile to state: the first that the SLO limits and the runs measured,
    else "p95"."""
    return next((name for name in chosen.slo if name in chosen.latency_s), "p95")


def runs_text(chosen: Recommendation, runs: int) -> str:
    """Return the number of runs with their kind: `3 confirmation runs`, `2 runs of the search`, or `5 runs`
    for both kinds."""
    if chosen.confirmations == chosen.runs:
        return counted(runs, "confirmation run")
    return counted(runs, "run") + ("" if chosen.confirmations else " of the search")


def figures_sentence(chosen: Recommendation) -> str:
    """State the measured figures of the recommended configuration: `Capacity 84,600/s: met in 3 of 3
    confirmation runs (p95 9.40 ms); …`.

    With another objective than capacity: its requests/s and a latency quantile.
    """
    if chosen.models:
        return _figures_of_models(chosen)
    quantile = quantile_of(chosen)
    latency = f"{quantile} {_duration_span(chosen.latency_s.get(quantile))}"
    if chosen.capacity is None:
        figures, runs = f"{span(chosen.throughput_rps)} requests/s, {latency}", runs_text(chosen, chosen.runs)
        if chosen.interval == "prediction":
            return f"95 % of further runs, while the host stays as fast: {figures}, by {runs}."
        return f"{figures} in {runs}."
    if chosen.capacity.is_share:
        latency += f" in {runs_text(chosen, chosen.runs)}"
    by_client = any(caveat.code in CLIENT_CODES for caveat in chosen.caveats)
    more = labels("notes")["client"] if by_client else ""
    return f"{capitalised(capacity_text(chosen.capacity, latency))}.{more}"


def _figures_of_models(chosen: Recommendation) -> str:
    """State the figures for several models: `At ×1.5 of the stated rates, all models together: capacity 690/s
    held in …`."""
    at = f"At ×{rounded(chosen.scale)} of the stated rates, all models together"
    if chosen.capacity is not None:
        return f"{at}: {capacity_text(chosen.capacity)}."
    used = percentage(chosen.of_limit.value)
    rate = f"{span(chosen.throughput_rps)} requests/s"
    return f"{at}: {rate}; the tightest limit was used to {used} in {runs_text(chosen, chosen.runs)}."


def model_sentences(chosen: Recommendation) -> Iterator[str]:
    """Yield, for each of several models, a sentence on its rate in the answer and its rate when it was
    searched alone.

    The last sentence says how the best configurations of all models alone, put together, compare with the
    recommended one.
    """
    for model in chosen.models:
        gets = f"{model.name} gets {rounded(model.rate_rps)}/s"
        if model.alone is None:
            yield f"{gets}; it was not searched alone."
            continue
        alone = model.alone
        there = f"met its SLO at {rounded(alone.rate_rps)}/s"
        if alone.of_limit is not None:
            there = f"used {percentage(alone.of_limit)} of its tightest limit"
        tried = f"in the search, the best of {counted(alone.tried, 'configuration')} tried"
        is_short = alone.of_limit is None and model.rate_rps >= alone.rate_rps
        short = "; the search was too short to measure what the other models cost" if is_short else ""
        yield f"{gets}; alone it {there} with {alone.configuration.label()} ({tried}){short}."
    if "alone" in chosen.names:
        combined = [(model.alone, chosen.configuration.of_model(model.name)) for model in chosen.models]
        is_each = all(alone is None or alone.configuration == ours for alone, ours in combined)
        shared = "" if is_each else " (those that all models share from one of them)"
        yield f"The best parameters of each model alone, combined{shared}, are the recommended ones."
    other = _named(chosen, "alone")
    if other is not None:
        label, fared = other.configuration.label(), _fared(chosen, other)
        yield f"The best parameters of each model alone, combined, are {label}: {fared}."


def is_refuted(chosen: Recommendation) -> bool:
    """Return whether the stated capacity is below the lowest rate of confirmation runs that all missed the SLO."""
    return chosen.capacity is not None and chosen.capacity.refuted_rps is not None


def capacity_text(capacity: Capacity, latency: str = "") -> str:
    """State a capacity and where it ends: `capacity 84,600/s: met in 3 of 3 confirmation runs (p95 …); missed
    at 99,600/s`.

    `latency`: the text in brackets.
    """
    runs = capacity.held + capacity.missed
    of_all = counted(runs + capacity.missed_higher, "confirmation run")
    if capacity.refuted_rps is not None:
        share = f"{percentage(capacity.held_rps / capacity.refuted_rps)} of {rounded(capacity.refuted_rps)}/s"
        met = f"runs of the search met it at {_rates_met(capacity)}"
        missed = f"{_refuted(capacity)}{_behind(capacity)}"
        return f"capacity {rounded(capacity.held_rps)}/s is a guess, {share}: {missed}; {met}"
    if capacity.by_loops:
        how = f" by closed loops alone{_met_by_one(capacity)}"
    elif capacity.search_rps is not None:
        share = percentage(capacity.held_rps / capacity.search_rps)
        most = "most " if (capacity.doubtful_rps or math.inf) <= 1.001 * capacity.search_rps else ""
        how = f" is {share} of about {rounded(capacity.search_rps)}/s, which {most}runs met"
        if runs:
            how += f"; {capacity.held} of {of_all} at it or more met the SLO"
    elif capacity.disputed_rps is not None:
        share = percentage(capacity.held_rps / capacity.disputed_rps)
        missed = f"about {rounded(capacity.disputed_rps)}/s, the lowest rate missed"
        how = f" is {share} of {missed}: no rate was met more often than missed"
    elif not runs:
        how = " by the search alone"
    else:
        how = (
            f": met in {capacity.held} of {of_all}{' at this rate or more' if capacity.missed_higher else ''}"
        )
    shown = f"{f' ({latency})' if latency else ''}{_behind(capacity)}"
    end = no_miss_text(capacity.doubtful_rps)
    if capacity.missed_rps is not None:
        end = f"{'the limit is about' if capacity.is_bound else 'missed at'} {rounded(capacity.missed_rps)}/s"
        if capacity.doubtful_rps is not None:
            end += f"; the lowest rate that a run missed is {rounded(capacity.doubtful_rps)}/s"
    elif capacity.confirmed and (capacity.most_met_rps or 0.0) > capacity.held_rps:
        end += f"; a run met it at {rounded(capacity.most_met_rps)}/s"
    likely = ""
    if capacity.crossing_rps is not None:
        likely = f"about {rounded(capacity.crossing_rps)}/s, where its latencies cross the limit; "
    return f"capacity {likely}{rounded(capacity.held_rps)}/s{how}{shown}; {end}"


def met_text(capacity: Capacity) -> str:
    """Return the verb of a rate that is stated as held."""
    if capacity.is_guess:
        return "is guessed to meet"
    return "is expected to meet" if capacity.is_share else "met"


def _refuted(capacity: Capacity) -> str:
    """State that every confirmation run missed the SLO, and from which rate on."""
    runs, at = capacity.missed, f"{rounded(capacity.refuted_rps)}/s"
    which = {1: "the only confirmation run", 2: "both confirmation runs"}.get(
        runs, f"all {runs} confirmation runs"
    )
    return f"{which} missed the SLO, at {at}{'' if runs == 1 else ' or more'}"


def _rates_met(capacity: Capacity) -> str:
    """Return the range of the rates that runs met: `3,250-4,330/s`."""
    least, most = rounded(capacity.least_met_rps), rounded(capacity.most_met_rps)
    return f"{least}/s" if least == most else f"{least}-{most}/s"


def _behind(capacity: Capacity) -> str:
    """State in how many confirmation runs the server answered too little of the rate; "" where in none."""
    runs = counted(capacity.fell_behind, "confirmation run")
    return f"; in {runs} the server did not keep up with the rate" if capacity.fell_behind else ""


def no_miss_text(doubtful_rps: float | None) -> str:
    """State that no rate counts as missed, and the lowest that a run missed, if one did (requests/s)."""
    if doubtful_rps is None:
        return "no rate that misses the SLO was found"
    return f"no rate was missed by most runs; the lowest that a run missed is {rounded(doubtful_rps)}/s"


def promise_sentence(promise: Promise, chosen: Recommendation) -> str:
    """State a limit of the SLO and how it was met: `p95 ≤ 20 ms: met in 3 of 3 confirmation runs (worst 9.4
    ms, …).`"""
    head = f"{limit_words(promise.name, promise.limit_s)}:"
    met = f"met in {promise.kept} of {runs_text(chosen, promise.runs + promise.missed_higher)}"
    worst = f"worst {value_words(promise.name, promise.worst_s)}"
    if promise.missed_higher:
        at = "a higher rate" if promise.missed_higher == 1 else "higher rates"
        met += f", missed in {promise.missed_higher} at {at}"
        worst = worst.replace("worst", "worst of the others")
    if promise.fell_behind:
        met += f"; in {promise.fell_behind} since the server did not keep up with the rate"
    if not math.isfinite(promise.worst_s):
        worst = "in the worst run too many requests had no good answer"
    further = ""
    if chosen.interval == "prediction" and promise.name != "errors":
        further = f"; 95 % of further runs: {_duration_span(chosen.latency_s.get(promise.name))}"
    if promise.name == "goodput" and math.isfinite(promise.worst_s):
        may, did = percentage(promise.limit_s), percentage(promise.worst_s)
        return f"{head} {met} ({worst}; {did} of the requests missed a limit, {may} may)."
    if promise.kept < promise.runs:
        return f"{head} {met} ({worst}{further})."
    if promise.name != "errors" and not chosen.latency_s[promise.name].high <= promise.limit_s:
        return f"{head} {met} ({worst}{further}); a further run may miss it."
    return f"{head} {met} ({worst}, {percentage(promise.spare_ratio)} to spare{further})."


def _duration_span(estimate: Estimate | None) -> str:
    """Write a range of seconds with its unit, s from 1 s on, else ms: `8.90-9.40 ms`, `8.90 ms or more`."""
    unit, scale = ("ms", 1e3)
    if estimate is not None and estimate.low >= 0.9995:
        unit, scale = ("s", 1.0)
    if estimate is not None and math.isfinite(estimate.low) and not math.isfinite(estimate.high):
        return f"{rounded(estimate.low * scale)} {unit} or more"
    return f"{span(estimate, scale=scale)} {unit}"


# Reason, and confidence.


def why_sentence(chosen: Recommendation) -> str:
    """State whether batching helps, and why; with limits on streamed tokens, which limit is nearest."""
    if any(promise.name.startswith(("ttft", "itl")) for promise in chosen.promises):
        return _streams_sentence([promise for promise in chosen.promises if promise.name != "errors"])
    return f"{labels('helps')[chosen.batching_helps]}: {text_of(chosen.cannot_pay or chosen.reason)}."


def _streams_sentence(promises: Sequence[Promise]) -> str:
    """State the limit of streamed tokens that is nearest, then the others: `At that rate the time to the
    first token …`."""
    first, *others = sorted(
        promises, key=lambda promise: (promise.spare_ratio, -promise.value_s / promise.limit_s)
    )
    named = labels("stream_limits").items()
    what = next((words for name, words in named if first.name.startswith(name)), "the latency")
    rest = "".join(f"; {other.name} {_of_its_limit(other)}" for other in others)
    return f"At that rate {what} ({first.name}) is nearest to its limit: {_of_its_limit(first)}{rest}."


def _of_its_limit(promise: Promise) -> str:
    return f"{value_words(promise.name, promise.value_s)} of {value_words(promise.name, promise.limit_s)}"


def question_text(question: OpenQuestion, chosen: Recommendation) -> str:
    """Return a clause on one thing that keeps the answer from being confirmed."""
    match question.code:
        case "server_gone":
            return "the server ended during the sweep"
        case "client_limited":
            return "the load generator was the limit, so the figures are its own, not the server's"
        case "no_run":
            return f"no run at a fixed rate {_met(chosen)}, only closed loops did"
        case "unconfirmed":
            return _unconfirmed(question, chosen)
        case "unsteady":
            return f"its confirmation runs differ, the best and the worst by ×{rounded(question.high)}"
        case "wide":
            if question.high is None:
                doubtful_rps = None if chosen.capacity is None else chosen.capacity.doubtful_rps
                return f"{no_miss_text(doubtful_rps)}, so it may serve more"
            less = "less than stated, or " if is_refuted(chosen) else ""
            return f"its capacity may be {less}up to ×{rounded(question.high)} of what is stated"
        case "rivals":
            more = f" and {len(question.labels) - 1} more" if len(question.labels) > 1 else ""
            far = "by an unknown factor" if question.high is None else f"by up to ×{rounded(question.high)}"
            return f"{question.labels[0]}{more} may be better, {far}"


def _unconfirmed(question: OpenQuestion, chosen: Recommendation) -> str:
    met = _met(chosen)
    higher = 0 if chosen.capacity is None else chosen.capacity.missed_higher
    runs = counted(question.held + question.missed + higher, "confirmation run")
    if not question.held + question.missed:
        if chosen.capacity is None:
            return "no confirmation run was made"
        at = f"{rounded(chosen.capacity.held_rps)}/s or more{f', and {higher} missed it' if higher else ''}"
        return f"no confirmation run {met} at {at}"
    if chosen.capacity is not None and chosen.capacity.refuted_rps is not None:
        return _refuted(chosen.capacity)
    if not question.missed + higher:
        return f"only {runs} {met}, {FRESH} are needed"
    return f"only {question.held} of {runs} {met}"


def better_outside(chosen: Recommendation) -> Compared | None:
    """Return the best of the configurations outside the user's space that keep the SLO and whose figure is more than
    LEVEL times the recommended one's; None: there is none."""
    others = enumerate((*chosen.references, *chosen.contenders))
    outside = [(o.gain.value, at, o) for at, o in others if o.outside and o.keeps and o.gain is not None]
    return min(outside)[2] if outside and min(outside)[0] < 1.0 / LEVEL else None


def keep_sentence(chosen: Recommendation) -> str:
    """State that what the user has measured surely better than what the search space allows; "": it did not."""
    better = better_outside(chosen)
    has = {"present", "defaults"} & set(better.names if better else ())
    if better is None or better.gain is None or better.gain.high >= 1.0 or not has:
        return ""
    name = "present" if "present" in has else "defaults"
    are = "is" if name == "present" else "are"
    return (
        f"Keep {reference_text(name)}, which {are} outside search.space and measured better. In search.space:"
    )


def qualifying_sentences(chosen: Recommendation) -> Iterator[str]:
    """Yield a sentence for each thing that weakens the answer: a better configuration outside the space, parameters of
    the running server that the recommended configuration leaves out (`drops`), a timeout for which each batch waits
    where clients are fewer, a server that seems to ignore its parameters."""
    if (better := better_outside(chosen)) is not None and better.gain is not None:
        noise = "" if better.gain.high < 1.0 else ", within noise"
        yield (
            f"Outside search.space, {better.configuration.label()} measured better{noise}: what is recommended gives "
            f"{ratio(better.gain)} of it. To let it be the answer, widen search.space."
        )
    timeout_s, clients = chosen.configuration.timeout_s, 0
    if timeout_s and chosen.concurrency and not chosen.models:
        clients = -(-int(chosen.configuration.in_force("max_batch_size") or 0) // chosen.rows_per_request)
    if clients > 1 and clients >= (chosen.concurrency or 0):
        waits = f"waits for its timeout, {rounded_duration(timeout_s)}"
        yield f"With fewer than {clients} clients each batch {waits}."
    if chosen.drops:
        yield f"The answer drops {', '.join(chosen.drops)} of what runs now; to keep a field, name it in fixed."
    if chosen.ignored is not None:
        yield labels("ignored")[chosen.ignored]


def confidence_sentence(chosen: Recommendation) -> str:
    """State `confirmed: …`, with the number of confirmation runs, or `not confirmed: …`, with every open
    question."""
    held, runs, at = min((promise.kept for promise in chosen.promises), default=chosen.runs), chosen.runs, ""
    if (said := chosen.capacity) is not None:
        held, runs = said.held, said.held + said.missed + said.missed_higher
        at = " at this rate or more" if said.missed_higher else ""
    met = f"{held} of {counted(runs, 'confirmation run')}{at} {_met(chosen)}"
    if chosen.established:
        tried = "tried" if better_outside(chosen) is None else "of search.space that was tried"
        return f"confirmed: {met}, and no other configuration {tried} gains more than 10 %."
    questions = "; ".join(question_text(question, chosen) for question in chosen.open_questions)
    doubts = {"server_gone", "no_run", "unconfirmed"} & {question.code for question in chosen.open_questions}
    return f"not confirmed: {'' if doubts else f'{met}, but '}{questions}."


def unconfirmed_text(chosen: Recommendation) -> str:
    """Return ` (not confirmed: …)` with the first open question in a few words, to follow the recommended parameters;
    "" for a confirmed answer."""
    if not chosen.open_questions:
        return ""
    question, said = chosen.open_questions[0], chosen.capacity
    has_missed = question.missed or (said is not None and said.missed_higher)
    code = "missed" if question.code == "unconfirmed" and has_missed else question.code
    return f" (not confirmed: {labels('open')[code]})"


def _met(chosen: Recommendation) -> str:
    """Return what a good run did: `met the SLO`; without a limit on latency, what it kept of errors, or
    `succeeded`."""
    if any(name != "errors" for name in chosen.slo):
        return "met the SLO"
    return f"had at most {percentage(chosen.slo['errors'])} errors" if "errors" in chosen.slo else "succeeded"


def ways_on(chosen: Recommendation, offer: str | None, next_step: str | None) -> Iterator[str]:
    """Yield sentences on the commands that go on, which are shown under their labels: `next_step` with an open answer;
    `offer` where a longer search may find a better configuration than the confirmed one."""
    if "--resume" in (next_step or ""):
        yield labels("notes")["resumed"]
    if chosen.established and chosen.may_find_more:
        yield "A longer search may find a better configuration" + (": see `search`." if offer else ".")


def named_sentences(chosen: Recommendation) -> Iterator[str]:
    """Yield sentences on how the points of the throughput × interval rule and of the tuning guide compare
    with the recommended configuration."""
    rule = "" if chosen.rule is None else f" ({text_of(chosen.rule)})"
    for name, title in (("rule", f"throughput × interval rule{rule}"), ("guide", "tuning guide")):
        if name in chosen.names:
            yield f"The {title} names the recommended configuration."
            continue
        other = _named(chosen, name)
        if other is not None:
            yield f"The {title} names {other.configuration.label()}: {_fared(chosen, other)}."
        elif name == "rule" and chosen.rule is not None:
            yield f"The {title} names a configuration that was not run."


def _named(chosen: Recommendation, name: str) -> Compared | None:
    """Return the configuration that was measured and that `name`, such as "rule", names; None without one."""
    tried: Sequence[Compared] = (*chosen.references, *chosen.contenders)
    return next((other for other in tried if name in other.names), None)


def _fared(chosen: Recommendation, other: Compared) -> str:
    """Return a clause on another configuration's figures, and on what the recommended one gains over it."""
    if other.capacity is not None and other.capacity.held_rps:
        gave = f"it {met_text(other.capacity)} the SLO at {rounded(other.capacity.held_rps)}/s"
    elif other.capacity is not None and other.capacity.is_untried:
        gave = f"it ran in closed loops only, which missed the SLO{_met_by_one(other.capacity)}"
    elif chosen.capacity is not None:
        gave = f"it met the SLO at no rate tried{_met_by_one(other.capacity)}"
    elif not other.keeps:
        gave = f"it {_missed(other)}"
    elif chosen.models:
        gave = f"it used {percentage(tightest(other.latency_s, chosen.slo).value)} of the tightest limit"
    else:
        gave = f"{span(other.throughput_rps)} requests/s, p95 {_duration_span(other.latency_s.get('p95'))}"
    match outcome_of(other):
        case "unknown" | "misses":
            return gave
        case "open":
            return f"{gave}; it may still be better"
        case "none":
            return f"{gave}; {NO_DIFFERENCE} from the recommended configuration"
        case "gained":
            gain = f"{gain_text(other.gain)} {_gained_what(chosen)}"
            return f"{gave}; the recommended configuration gives {gain} it"
