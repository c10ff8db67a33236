"""`batchtune recommend`: choose from a run, write the parameters down, say why."""

from __future__ import annotations

import json as json_text
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from batchtune.archive import (
    BATCHING_PARAMETERS,
    LEDGER,
    RECOMMENDATION,
    SCENARIO,
    Run,
    batching_file,
    latest_run,
    open_run,
    write_whole,
)
from batchtune.batching import format_cortex, format_flags, format_triton
from batchtune.cli.deployment import deployment
from batchtune.cli.options import Dialect
from batchtune.cli.slo import promised
from batchtune.errors import (
    ArchiveError,
    InconclusiveError,
    NoFeasibleConfigurationError,
    TargetError,
    UsageError,
)
from batchtune.recommend import Recommendation, recommend
from batchtune.report.statement import print_recommendation
from batchtune.scenario.spec import Scenario, SloSpec
from batchtune.tune.trial import Trial


def run_recommend(
    path: Path | None,
    limits: Mapping[str, str | None],
    *,
    dialect: Dialect,
    write: Path | None,
    results: Path,
    json: bool,
) -> int:
    """The exit code: 0 established, 5 not; errors say otherwise (3: what was tried misses the limits)."""
    promised(limits, SloSpec())
    run = _run_of(path, results)
    scenario = run.scenario()
    slo = promised(limits, scenario.slo)
    trials = kept_trials(run)
    if any(trial.source == "variant" for trial in trials):
        raise UsageError(
            f"{run.path} compares variants; there is nothing to choose from",
            hint="name the run of a sweep, or read comparison.json in that folder",
        )
    if any(trial.source == "load" for trial in trials):
        raise UsageError(
            f"{run.path} is a load test; there is nothing to choose from", hint="name the run of a sweep"
        )
    try:
        return conclude(
            run,
            scenario,
            trials,
            slo=slo,
            json=json,
            write=write,
            dialect=dialect,
            named=path is not None and run.path == path,
        )
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError) as error:
        raise type(error)(f"{run.path}: {error.message}", hint=error.hint) from error


def _run_of(path: Path | None, results: Path) -> Run:
    """The run named, the newest in a scenario's folder, or the newest of all."""
    if path is not None and not (path / LEDGER).exists() and any(path.glob(f"*/{LEDGER}")):
        return latest_run(path.parent, name=path.name)
    return open_run(path, root=results)


def kept_trials(run: Run) -> list[Trial]:
    """The trials of a run; what could not be read of it is told on stderr."""
    trials = run.trials()
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    return trials


def conclude(
    run: Run,
    scenario: Scenario,
    trials: Sequence[Trial],
    *,
    slo: SloSpec | None = None,
    json: bool = False,
    write: Path | None = None,
    dialect: Dialect = "tfserving",
    named: bool = True,
    swept: bool = False,
) -> int:
    """Recommend from the trials and print it, with another dialect's parameters below; the exit code, 0 or 5.

    Only a sweep, `swept`, keeps it in the run, and what finds none there: a question changes nothing that is deployed.
    `named`: somebody named this run, so it need not be said which it is.

    Raises:
        NoFeasibleConfigurationError, InconclusiveError, TargetError: nothing measured is known to meet the SLO, or
            nothing worked; with `json` the document says so too.
        BatchingParametersError: the dialect cannot say it; nothing was printed or written.
    """
    try:
        chosen = recommend(trials, scenario=scenario, slo=slo, search=run.search())
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError) as error:
        if json:
            print(json_text.dumps({"run": str(run.path), "error": error.message, "hint": error.hint}))
        raise
    text = "" if json and write is None else formatted(chosen, dialect)
    own = slo is None or slo == scenario.slo
    if own and (swept or not (run.path / RECOMMENDATION).is_file()):
        _keep(run, chosen)
    if write is not None:
        _write(write, text)
    step = None if chosen.established else to_establish(run, scenario)
    if json:
        document = {"run": str(run.path), "to_establish": step, **chosen.to_dict()}
        print(json_text.dumps(document, indent=2, allow_nan=False))
    else:
        shown = dialect == "tfserving" or write is not None
        file = _parameters_file(run, write if dialect == "tfserving" else None, own=own)
        print_recommendation(
            chosen,
            scenario=scenario,
            deployment=deployment(chosen.configuration, scenario, file) if dialect == "tfserving" else None,
            run=None if named else _run_line(run),
            next_step=step,
        )
        if not shown:
            print(text)
    return 0 if chosen.established else InconclusiveError.exit_code


def to_establish(run: Run, scenario: Scenario) -> str:
    """The command that goes on with the run, with twice its budget."""
    budget = scenario.search.budget
    more = f"search.budget.trials={2 * (scenario.search.trials or 10)}"
    if budget.time_s is not None:
        more = f"search.budget.time={math.ceil(2.0 * budget.time_s)}s"
    return f"batchtune sweep {shlex.quote(str(run.path / SCENARIO))} --resume {shlex.quote(str(run.path))} --set {more}"


def _run_line(run: Run) -> str:
    """`Run results/quickstart/…, 3 h old`."""
    started = datetime.strptime(run.path.name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    minutes = max(0, round((datetime.now(UTC) - started).total_seconds() / 60))
    age = (
        f"{minutes} min"
        if minutes < 120
        else f"{minutes // 60} h"
        if minutes < 2880
        else f"{minutes // 1440} days"
    )
    return f"Run {run.path}, {age} old"


def _parameters_file(run: Run, written: Path | None, *, own: bool) -> Path:
    """Where the parameters lie; FILE where `--write` has yet to put them."""
    if written is not None:
        return written
    kept = run.path / BATCHING_PARAMETERS
    return kept if own and kept.exists() else Path("FILE")


def _keep(run: Run, chosen: Recommendation) -> None:
    """A run that cannot be written, such as another's, is answered from all the same."""
    try:
        run.write_recommendation(chosen)
    except ArchiveError as error:
        print(f"note: {error.message}; --write FILE keeps the parameters elsewhere", file=sys.stderr)


def formatted(chosen: Recommendation, dialect: Dialect) -> str:
    """The recommended configuration in a server's own words.

    Raises:
        BatchingParametersError: the dialect cannot say it.
    """
    batching, flags = chosen.configuration.batching, chosen.configuration.flags
    match dialect:
        case "json":
            return json_text.dumps(chosen.configuration.to_dict(), indent=2) + "\n"
        case "triton":
            text = format_triton(batching, rows_per_request=chosen.rows_per_request)
            return _without_counterpart(flags, "Triton") + text
        case "cortex":
            return _without_counterpart(flags, "Cortex") + format_cortex(batching)
        case "flags":
            return (
                " ".join([format_flags(batching), *(shlex.quote(f"--{one}={said}") for one, said in flags)])
                + "\n"
            )
        case "tfserving":
            return batching_file(chosen)


def _without_counterpart(flags: Sequence[tuple[str, str]], server: str) -> str:
    return "".join(f"# --{name}={value} has no counterpart in {server}\n" for name, value in flags)


def _write(path: Path, text: str) -> None:
    """Whole or not at all; what is no plain file, such as /dev/stdout, is written to as it is."""
    try:
        if path.is_file() or not path.exists():
            write_whole(path.resolve(), text.encode())
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write: {error}") from error
    except ArchiveError as error:
        raise UsageError(f"--write: {error.message}") from error
