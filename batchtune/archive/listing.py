"""Lists the runs there are: the question of each, and its result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from batchtune.archive.run import (
    CHECK,
    COMPARISON,
    JOINT_RECOMMENDATION,
    LEDGER,
    NOT_RUNS,
    RECOMMENDATION,
    RUN_NAME,
    Run,
)
from batchtune.errors import NO_ANSWER, ArchiveError, BatchtuneError
from batchtune.plain_values import fields_to_plain
from batchtune.tune.compare.result import ARMS
from batchtune.tune.trials.trial import parts_of

Kind = Literal["sweep", "load", "compare", "noise", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One line of the list of runs.

    `path`: folder of the run. `trials`: how many lines its ledger has. `verdict`: of a sweep "established",
    "open" or "no recommendation"; of a load test its load points by verdict, such as "3 PASS, 1 FAIL"; of a
    comparison or noise run "done"; of a check its own verdict; "unfinished" for a load test without points, and for
    a comparison, noise run or check without a result; "unreadable: " and the error. `recommended`: label of the
    recommended configuration, None without one. `target`: the model as the scenario names it, several joined
    by " + "; None where the scenario cannot be read.
    """

    path: Path
    scenario: str
    started: datetime
    kind: Kind
    trials: int
    verdict: str
    recommended: str | None
    target: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as values that JSON takes; `id` is the name of the run's folder, `when_utc` its
        start in ISO 8601."""
        plain = fields_to_plain(self)
        del plain["path"], plain["started"]
        return {"run": str(self.path), "id": self.path.name, "when_utc": self.started.isoformat(), **plain}


def runs_under(root: Path = Path("results")) -> list[RunEntry]:
    """List all runs of a results folder, or of one scenario's folder in it, the newest first.

    A run that cannot be read is listed too: its `verdict` is the error.
    """
    ledgers = [*root.glob(f"*/{LEDGER}"), *root.glob(f"*/*/{LEDGER}")]
    entries = [entry for ledger in ledgers for entry in _entries(Run(ledger.parent))]
    return sorted(entries, key=lambda entry: entry.path.name, reverse=True)


def swept_scenarios(root: Path = Path("results")) -> list[str]:
    """Return, sorted, the names of the scenario folders in a results folder that hold at least one sweep."""
    runs = (ledger.parent for ledger in root.glob(f"*/*/{LEDGER}"))
    return sorted({run.parent.name for run in runs if RUN_NAME.fullmatch(run.name)} - {NOT_RUNS})


def kind_by_name(run: Run) -> Kind:
    """Return the kind of a run by the end of its folder's name: `…-check` is "check"; without such an end
    "sweep"."""
    kinds: tuple[Kind, ...] = ("load", "compare", "noise", "check")
    return next((kind for kind in kinds if run.path.name.endswith(f"-{kind}")), "sweep")


def kind_by_trials(run: Run) -> Kind:
    """Return the kind of a run, by its first trial; without trials, by the end of its folder's name.

    A check that saved no verdict counts as a comparison or, without trials, as a sweep.

    Raises:
        ArchiveError: the ledger cannot be read.
    """
    trials = run.ledger()
    if not trials:
        named = kind_by_name(run)
        return "sweep" if named == "check" else named
    match trials[0].source:
        case "load":
            return "load"
        case "variant":
            if (run.path / CHECK).is_file():
                return "check"
            return "noise" if all(trial.reason in ARMS for trial in trials) else "compare"
        case _:
            return "sweep"


def _entries(run: Run) -> Iterator[RunEntry]:
    """Yield the entry of a folder with a ledger; nothing where the folder's name is not that of a run
    (`<UTC>-<id>`)."""
    name = RUN_NAME.match(run.path.name)
    if name is None:
        return
    kind = kind_by_name(run)
    scenario, target, recommended, trials = run.path.parent.name, None, None, 0
    try:
        trials = (run.path / LEDGER).read_bytes().count(b"\n")
        asked = run.scenario()
        models = " + ".join(own.name for own in asked.target.models)
        scenario, target = asked.name, models or asked.target.model
        verdict, recommended = _outcome(run, kind)
    except BatchtuneError as error:
        verdict = f"unreadable: {error.message}"
    yield RunEntry(
        path=run.path,
        scenario=scenario,
        started=datetime.strptime(run.path.name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC),
        kind=kind,
        trials=trials,
        verdict=verdict,
        recommended=recommended,
        target=target,
    )


def _outcome(run: Run, kind: Kind) -> tuple[str, str | None]:
    """Return the verdict, as `RunEntry.verdict` has it, and the recommended configuration's label (None
    without one)."""
    if kind == "load":
        verdicts = Counter(
            "not judged" if trial.measurement is None else trial.measurement.verdict or "not judged"
            for trial in parts_of(run.ledger())
        )
        return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "unfinished", None
    if kind in ("compare", "noise"):
        return "done" if (run.path / COMPARISON).is_file() else "unfinished", None
    if kind == "check":
        return _check_verdict(run), None
    if not any((run.path / name).is_file() for name in (RECOMMENDATION, JOINT_RECOMMENDATION)):
        return "no recommendation", None
    try:
        chosen = run.recommendation()
    except NO_ANSWER:
        return "no recommendation", None
    return "established" if chosen.established else "open", chosen.configuration.label()


def _check_verdict(run: Run) -> str:
    """Return the verdict that the run's check.json holds; "unfinished" without that file.

    Raises:
        ArchiveError: the file cannot be read or is no check.
    """
    path = run.path / CHECK
    try:
        return str(json.loads(path.read_bytes())["verdict"])
    except FileNotFoundError:
        return "unfinished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"{path}: not a check: {error}") from error
