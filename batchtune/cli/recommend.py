"""`batchtune recommend`: choose from a run, write the parameters down, say why."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchtune.archive import BATCHING_PARAMETERS, Run, batching_file, open_run, write_whole
from batchtune.batching import format_cortex, format_flags, format_triton
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
    """The exit code: 0; errors say otherwise (3: nothing measured meets the limits)."""
    promised(limits, SloSpec())
    run = open_run(path, root=results)
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
        conclude(run, scenario, trials, slo=slo, json=json, write=write, dialect=dialect)
    except (InconclusiveError, NoFeasibleConfigurationError, TargetError) as error:
        raise type(error)(f"{run.path}: {error.message}", hint=error.hint) from error
    return 0


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
) -> None:
    """Recommend from the trials, keep that in the run, print it, and below it the parameters in another dialect.

    Raises:
        InconclusiveError, NoFeasibleConfigurationError, TargetError: nothing was measured, or nothing measured meets
            the SLO, or nothing worked; with `json` the
            document says so too.
        BatchingParametersError: the dialect cannot say it; nothing was printed or written.
    """
    try:
        chosen = recommend(trials, scenario=scenario, slo=slo, search=run.search())
    except (InconclusiveError, NoFeasibleConfigurationError, TargetError) as error:
        if json:
            print(json_text.dumps({"run": str(run.path), "error": error.message, "hint": error.hint}))
        raise
    text = "" if json and write is None else formatted(chosen, dialect)
    kept = _kept(run, chosen)
    if write is not None:
        _write(write, text)
    if json:
        print(json_text.dumps({"run": str(run.path), **chosen.to_dict()}, indent=2, allow_nan=False))
    else:
        file = write if write is not None and dialect == "tfserving" else kept
        print_recommendation(chosen, scenario=scenario, parameters_file=file)
        if dialect != "tfserving" and write is None:
            print(text)


def _kept(run: Run, chosen: Recommendation) -> Path:
    """Where the parameters are kept; a run that cannot be written, such as another's, is answered from all the same."""
    try:
        run.write_recommendation(chosen)
    except ArchiveError as error:
        print(f"note: {error.message}; --write FILE keeps the parameters elsewhere", file=sys.stderr)
        return Path("FILE")
    return run.path / BATCHING_PARAMETERS


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
