"""Puts a page together: answers first, then figures, caveats, trials, provenance, all in one file.

plotly.js is inside the page, compressed; the page's policy forbids it any network.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchtune.archive.run import Run, write_whole
from batchtune.batching.parameters import Configuration
from batchtune.plain_values import Coded
from batchtune.report.findings import Marks, advice_of, text_of
from batchtune.report.html.shell.drawing import Section, label, provenance_of
from batchtune.report.live_view import measured_load
from batchtune.report.load_points import figure_cells
from batchtune.report.tables import without_empty_columns
from batchtune.report.words import Fact, limit_word, parameters_of, sentence
from batchtune.scenario.spec.check import limit_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.best_point import trial_bottleneck
from batchtune.tune.trials.trial import Trial
from batchtune.units import counted, rounded

if TYPE_CHECKING:
    from markupsafe import Markup


COLUMNS: Final = (
    "trial",
    "source",
    "configuration",
    "load",
    "requests/s",
    "ttft_p95 ms",
    "itl_p99 ms",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "errors",
    "mean batch",
    "limited by",
    "SLO",
    "caveats",
    "why",
)
"""Headings of a page's table of trials; those without any value are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """The table of trials on a page.

    `rows`: a row of texts for each trial, as `COLUMNS`. `details`: what a click on a point shows, (heading,
    configuration, indices of its rows); a point's `customdata` is an index into it.
    """

    rows: Sequence[Sequence[str]]
    details: Sequence[tuple[str, Configuration, Sequence[int]]]


def trial_rows(trials: Sequence[Trial], scenario_of: Callable[[Trial], Scenario]) -> list[list[str]]:
    """Return a row of texts for each trial, under `COLUMNS`; `scenario_of`: the scenario that a trial ran
    under."""
    return [_row(trial, scenario_of(trial)) for trial in trials]


def table_of_single_trials(
    trials: Sequence[Trial], scenario_of: Callable[[Trial], Scenario], heading_of: Callable[[Trial], str]
) -> TrialTable:
    """Return a table with a detail for each trial, in the order given; `heading_of`: trial -> heading of its
    detail."""
    details = [
        (f"Trial {trial.number}: {heading_of(trial)}", trial.configuration, [at])
        for at, trial in enumerate(trials)
    ]
    return TrialTable(rows=trial_rows(trials, scenario_of), details=details)


def _row(trial: Trial, scenario: Scenario) -> list[str]:
    measured = trial.measurement
    configuration, source = trial.configuration, trial.source.replace("_", " ")
    if trial.model:
        configuration = configuration.of_model(trial.model)
        kind = "alone" if trial.request.models else "together"
        source = f"{trial.model} {kind} ×{rounded(trial.request.scale)}"
    head = [str(trial.number), source, label(configuration)]
    if measured is None:
        return [*head, *["–"] * (len(COLUMNS) - len(head) - 1), trial.failure or trial.state]
    return [
        *head,
        measured_load(measured),
        *figure_cells(measured, COLUMNS[4:12]),
        limit_word(trial_bottleneck(trial, scenario)),
        *figure_cells(measured, ["SLO"]),
        ", ".join(caveat.code.replace("_", " ") for caveat in measured.caveats) or "–",
        trial.reason,
    ]


PAGE_FILE: Final = "report.html"

_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page says, from top to bottom.

    `answers`: at its head. `caveats`: (whose, text, advice). `step`: command that would confirm an open
    answer. `command`: deploys the answer. `alternatives`: (parameters, what they trade). `provenance`: (name,
    value). `intervals`: a sentence on what the page's intervals mean. `emulated`: the device was emulated.
    """

    title: str
    subtitle: str
    answers: Sequence[Fact]
    sections: Sequence[Section]
    trials: TrialTable
    provenance: Sequence[tuple[str, str]]
    intervals: str
    emulated: bool
    caveats: Sequence[tuple[str, str, str]] = ()
    step: str | None = None
    command: str | None = None
    notes: Sequence[str] = ()
    alternatives: Sequence[tuple[Sequence[tuple[str, str]], str]] = ()

    @property
    def not_shown(self) -> list[tuple[str, list[str]]]:
        """(Reason why sections are missing, titles of these sections) for each reason, once."""
        titles: dict[str, list[str]] = {}
        for section in self.sections:
            if section.missing:
                titles.setdefault(section.missing, []).append(section.title)
        return [(sentence(reason), names) for reason, names in titles.items()]


def write_page(document: Report, path: Path) -> Path:
    """Write a page as one HTML file, and return `path`.

    Raises:
        ArchiveError: the file cannot be written.
    """
    write_whole(path, render(document).encode())
    return path


def render(document: Report) -> str:
    """Return the page as HTML; text from a scenario or a server is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: unbroken(value) if type(value) is str else value,
    )
    environment.filters["coded"] = _coded
    text = json.dumps(_data(document), allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return environment.get_template("page.html").render(
        page=document,
        trials=counted(len(document.trials.rows), "trial"),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - ours
        script=Markup((_HERE / "page.js").read_text(encoding="utf-8")),  # noqa: S704 - ours
        plotly=Markup(_plotly()),  # noqa: S704 - base64
        data=Markup(text),  # noqa: S704 - escaped above
    )


def traffic_text(scenario: Scenario) -> str:
    """Return `poisson arrivals` or the like for an open loop, `8 clients in a closed loop` for a closed one."""
    clients = scenario.load.concurrency
    if scenario.load.open_loop or clients is None:
        return f"{scenario.load.arrivals} arrivals"
    return f"{counted(clients, 'client')} in a closed loop"


def slo_words(scenario: Scenario) -> list[str]:
    """Return [`slo_text`]; empty for several models, each of which has an SLO of its own."""
    return [] if scenario.target.models else [slo_text(scenario)]


def slo_text(scenario: Scenario) -> str:
    """Return `SLO` with every limit, such as `SLO p95 ≤ 20 ms`, or `no SLO`."""
    limits = [limit_words(name, limit) for name, limit in scenario.limits.items()]
    return f"SLO {', '.join(limits)}" if limits else "no SLO"


def gathered_caveats(by_name: Mapping[str, Sequence[Coded]]) -> list[tuple[str, str, str]]:
    """Return (names, text, advice) of each caveat, once.

    `by_name`: name of a variant, a load point or a side -> its caveats. names: those that the caveat
    concerns, joined by commas, or "all" for all of three or more.
    """
    gathered = []
    for concerned in Marks(caveats=by_name).concerned().values():
        names = "all" if len(concerned) == len(by_name) > 2 else ", ".join(concerned)
        caveat = next(iter(concerned.values()))
        gathered.append((names, text_of(caveat), advice_of(caveat)))
    return gathered


def provenance_rows(run: Run, scenario: Scenario) -> list[tuple[str, str]]:
    """Return (name, value) for run, scenario, machine, versions and seed; nested names are joined by dots."""
    return [("run", run.path.name), ("scenario", scenario.name), *flat_rows(provenance_of(run))]


def flat_rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each value; one in a nested mapping is named `outer.inner`; None and empty lists
    are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_rows(value, f"{prefix}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None and name != "schema_version":
            yield f"{prefix}{name}", f"{value:,}" if prefix == "" and name.endswith("_bytes") else str(value)


def unbroken(text: str) -> str:
    """Return the text with a no-break space between each number and its unit."""
    return re.sub(r"(?<=[\d\]]) (?=(?:%|(?:ms|µs|s|min|[KMG]iB|points)\b))", "\u00a0", text)


def _coded(text: str) -> Markup:
    """Return the text escaped for HTML, with text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(unbroken(text)))))  # noqa: S704 - escaped


def _data(document: Report) -> dict[str, Any]:
    """Return what the page's script reads: figures by section, and the table of trials with its details."""
    figures = {
        section.anchor: {"data": section.figure.data, "layout": section.figure.layout}
        for section in document.sections
        if section.figure is not None
    }
    details = [
        {"heading": heading, "parameters": parameters_of(configuration), "rows": rows}
        for heading, configuration, rows in document.trials.details
    ]
    columns, *rows = without_empty_columns([COLUMNS, *document.trials.rows])
    return {"figures": figures, "columns": columns, "rows": rows, "details": details}


@cache
def _plotly() -> str:
    """Return plotly.js as base64 of gzip: its bundle of Cartesian charts, a third of the whole."""
    # Of plotly.js: 9 takes three times as long and saves 1 %.
    compression = 6
    source = (_HERE / "plotly-cartesian.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, compression, mtime=0)).decode()
