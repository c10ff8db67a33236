"""What does the page of a noise floor say: how small a change can be told on this machine, and at what price?"""

from __future__ import annotations

from batchtune.archive.run import Run
from batchtune.measure.statistics.paired import BLOCKS_NEEDED
from batchtune.report.comparison import host_lines, noise_lines, noise_rows
from batchtune.report.html.comparison_figures import block_values
from batchtune.report.html.comparison_page import (
    BLOCK_INTERVALS,
    TYPICAL,
    arms_of_runs,
    short_lines,
    typical_runs,
)
from batchtune.report.html.noise_figures import detectable, differences
from batchtune.report.html.shell.document import (
    Answer,
    Document,
    gathered_caveats,
    provenance_rows,
    traffic_text,
)
from batchtune.report.html.shell.drawing import Section, Table
from batchtune.report.html.shell.latency_figures import distribution
from batchtune.report.html.shell.shown import is_emulated
from batchtune.report.html.shell.trial_rows import table_of_single_trials
from batchtune.report.marks import Marks
from batchtune.report.units import interval, percent, ratio
from batchtune.report.words import PROTOCOLS
from batchtune.scenario.units import counted
from batchtune.target.model_files import served_name
from batchtune.tune.compare.noise_floor import ARMS, NoiseFloor, arms_of, noise_floor
from batchtune.tune.compare.variant import Metric

_USUAL_BLOCKS = 10
"""What `batchtune compare` runs by default."""


def noise_document(run: Run) -> Document:
    """The page of a run of `batchtune noise`, whole or interrupted.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    floor = noise_floor(trials, arms_of(scenario))
    arms = arms_of_runs(ARMS, trials)
    objective = scenario.objective
    metric: Metric = "p95" if objective == "latency" else objective
    sections = [detectable(floor), differences(floor, arms[0], arms[1])]
    if floor.floors:
        headings, *rows = noise_rows(floor, Marks(caveats={"A/A": ()}))
        sections.append(
            Section(anchor="figures", title="In figures", table=Table(headings=headings, rows=rows))
        )
        sections.append(Section(anchor="words", title="In words", paragraphs=noise_lines(floor)))
    sections.append(block_values(arms, metric, slo=scenario.slo))
    sections.append(distribution(typical_runs(arms, run), scenario.slo, which=TYPICAL))
    said = [served_name(scenario.target.model), PROTOCOLS[scenario.request.protocol], traffic_text(scenario)]
    return Document(
        title=scenario.name,
        subtitle=" · ".join(["Noise floor (A/A)", *said, counted(floor.pairs, "block")]),
        emulated=is_emulated(trials),
        answers=_answers(floor),
        sections=sections,
        caveats=gathered_caveats({"both": floor.caveats}),
        provenance=provenance_rows(run, scenario),
        trials=table_of_single_trials(
            trials, lambda _: scenario, lambda trial: f"{trial.reason}, block {trial.block}"
        ),
        intervals=BLOCK_INTERVALS,
    )


def _answers(floor: NoiseFloor) -> tuple[Answer, ...]:
    if not floor.floors:
        why = floor.failure or "no block gave two figures"
        return (
            Answer(
                question="How small a change can be told?", headline="Not known", lines=(why,), tone="bad"
            ),
            Answer(
                question="What now?",
                headline="Run it again",
                lines=("`batchtune noise` needs two runs a block.",),
            ),
        )
    return (_smallest(floor), _by_blocks(floor), _quiet(floor), _sure(floor))


def _smallest(floor: NoiseFloor) -> Answer:
    (name, first), *others = floor.floors.items()
    lines = [f"of {name}, with {_USUAL_BLOCKS} blocks, in 4 of 5 comparisons"]
    lines += [f"{percent(figure.smallest[_USUAL_BLOCKS])} of {other}" for other, figure in others]
    headline = percent(first.smallest[_USUAL_BLOCKS])
    return Answer(question="How small a change can be told?", headline=headline, lines=short_lines(lines))


def _by_blocks(floor: NoiseFloor) -> Answer:
    name, first = next(iter(floor.floors.items()))
    fewest, *_, most = first.smallest
    longer = f"`batchtune compare --blocks {most}` takes {most / fewest:.1f} times as long as {fewest}."
    return Answer(
        question="What do more blocks buy?",
        headline=f"{percent(first.smallest[most])} with {most}",
        pairs=tuple((f"{blocks} blocks", percent(change)) for blocks, change in first.smallest.items()),
        lines=(f"Changes of {name}; {longer}",),
    )


def _quiet(floor: NoiseFloor) -> Answer:
    name, first = next(iter(floor.floors.items()))
    headline = f"{interval(first.spread, scale=100).split(' [')[0]} % a block"
    lines = [f"spread of {name} within a block: {interval(first.spread, scale=100)} %"]
    lines += host_lines(floor.repeats, floor.noisy, floor.runs) or ["The host disturbed no run."]
    return Answer(question="How noisy is it here?", headline=headline, lines=short_lines(lines))


def _sure(floor: NoiseFloor) -> Answer:
    question = "How sure is that?"
    strange = [name for name, figure in floor.floors.items() if figure.differs]
    name, first = next(iter(floor.floors.items()))
    lines = [
        f"{counted(floor.pairs, 'block')}, A and A again side by side.",
        f"A again is {ratio(first.ratio)} of A in {name}." if floor.pairs >= BLOCKS_NEEDED else
        f"An interval needs {BLOCKS_NEEDED} blocks.",
    ]  # fmt: skip
    if floor.client_limited:
        lines.append("This is the spread of the load generator, not of the server.")
        return Answer(question=question, headline="Invalid: client-limited", lines=tuple(lines), tone="bad")
    if strange:
        lines.append("By chance that happens to one figure in twenty; again and again it means drift.")
        headline = f"Drift in {', '.join(strange)}?"
        return Answer(question=question, headline=headline, lines=tuple(lines), tone="open")
    if floor.pairs < BLOCKS_NEEDED:
        return Answer(question=question, headline="Too few blocks", lines=tuple(lines), tone="open")
    return Answer(question=question, headline="No drift seen", lines=tuple(lines), tone="good")
