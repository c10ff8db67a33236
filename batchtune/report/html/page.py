"""How is the page put together: the answers, the figures, the trials, where it comes from, all in one file?

plotly.js comes from plotly's wheel, compressed inside the page; the page's policy forbids it any network.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from batchtune.archive.run import write_whole
from batchtune.errors import ArchiveError
from batchtune.measure.validity.caveats import Caveat
from batchtune.report.html.account import PAGE_FILE, Account
from batchtune.report.html.answers import answers_of, notes_of
from batchtune.report.html.batch_figures import service_time, sizes
from batchtune.report.html.drawing import Section
from batchtune.report.html.forecast import Forecast
from batchtune.report.html.latency_figures import distribution, split, timeline
from batchtune.report.html.search_figures import history, pareto
from batchtune.report.html.space_figures import heat_maps, slices
from batchtune.report.html.trial_rows import COLUMNS, trial_rows
from batchtune.report.html.twin_figures import agreement, rates
from batchtune.report.words import PROTOCOLS, parameters_of
from batchtune.scenario.units import counted, rounded_duration
from batchtune.target.model_files import served_name

_HERE: Final = Path(__file__).parent


def write_page(account: Account, *, deployment: str | None = None, path: Path | None = None) -> Path:
    """Write the page into the run, or to `path`; `deployment` is the command that serves what is recommended.

    Raises:
        ArchiveError: the file cannot be written.
    """
    path = path or account.run.path / PAGE_FILE
    write_whole(path, page_of(account, deployment=deployment).encode())
    return path


def page_of(account: Account, *, deployment: str | None = None) -> str:
    """The whole file."""
    sections = _sections(account)
    chosen = account.chosen
    return render(
        title=account.scenario.name,
        subtitle=_subtitle(account),
        emulated=account.emulated,
        answers=answers_of(account),
        command=deployment,
        notes=[] if chosen is None else [note for note in notes_of(chosen) if note],
        open_questions=[] if chosen is None else chosen.open_questions,
        alternatives=[]
        if chosen is None
        else [(parameters_of(other.configuration), other.trade) for other in chosen.alternatives],
        sections=sections,
        caveats=_caveats(account),
        provenance=_provenance(account),
        trials=f"{counted(len(account.trials), 'trial')}",
        document={
            "figures": {
                section.anchor: {"data": section.figure.data, "layout": section.figure.layout}
                for section in sections
                if section.figure is not None
            },
            "columns": COLUMNS,
            **trial_rows(account),
        },
    )


def render(*, document: Mapping[str, Any], **shown: Any) -> str:
    """The template, filled; whatever comes from a scenario or a server is escaped by it."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return environment.get_template("page.html").render(
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - ours
        script=Markup((_HERE / "page.js").read_text(encoding="utf-8")),  # noqa: S704 - ours
        plotly=Markup(_plotly()),  # noqa: S704 - base64
        document=Markup(text),  # noqa: S704 - escaped above
        **shown,
    )


@cache
def _plotly() -> str:
    """plotly.js of the installed plotly, compressed, as base64.

    Raises:
        ArchiveError: plotly is not installed.
    """
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ArchiveError("no page without plotly", hint="pip install plotly")
    source = Path(found.origin).parent / "package_data" / "plotly.min.js"
    return base64.b64encode(gzip.compress(source.read_bytes(), 9, mtime=0)).decode()


def _sections(account: Account) -> list[Section]:
    forecast = None if account.twin is None else Forecast(twin=account.twin, scenario=account.scenario)
    return [
        pareto(account),
        heat_maps(account, forecast),
        slices(account, forecast),
        distribution(account),
        timeline(account),
        split(account),
        sizes(account),
        service_time(account),
        agreement(account, forecast),
        rates(account, forecast),
        history(account),
    ]


def _subtitle(account: Account) -> str:
    scenario, chosen = account.scenario, account.chosen
    rows = max(kind.rows or 1 for kind in scenario.request.kinds())
    clients = scenario.load.concurrency
    traffic = (
        f"{scenario.load.arrivals} arrivals"
        if scenario.load.open_loop or clients is None
        else f"{counted(clients, 'client')} in a closed loop"
    )
    limits = [f"{name} ≤ {rounded_duration(limit_s)}" for name, limit_s in scenario.slo.limits().items()]
    slo = f"SLO {', '.join(limits)}" if limits else "no SLO"
    spent = "" if chosen is None else f" · {rounded_duration(chosen.seconds)} of measuring"
    model = served_name(scenario.target.model)
    return (
        f"{model} · {PROTOCOLS[scenario.request.protocol]} · {counted(rows, 'row')} a request · {traffic} · {slo} · "
        f"objective {scenario.objective}{spent}"
    )


def _caveats(account: Account) -> list[tuple[Caveat, str]]:
    """Each caveat of the figures above once, with whom it concerns."""
    concerned: dict[str, tuple[Caveat, list[str]]] = {}
    for name, pooled in account.roles.items():
        for run in pooled.runs:
            measured = run.trial.measurement
            for caveat in () if measured is None else measured.caveats:
                _, names = concerned.setdefault(caveat.code, (caveat, []))
                if name not in names:
                    names.append(name)
    return [(caveat, ", ".join(names)) for caveat, names in concerned.values()]


def _provenance(account: Account) -> list[tuple[str, str]]:
    """Run, machine, versions, seed; nested names joined by points."""
    rows = [("run", account.run.path.name), ("scenario", account.scenario.name)]
    rows += list(flat_rows(account.provenance))
    return rows


def flat_rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value with its name, a nested one behind the name of what holds it; what is None is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_rows(value, f"{prefix}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None and name != "schema_version":
            yield f"{prefix}{name}", f"{value:,}" if prefix == "" and name.endswith("_bytes") else str(value)
