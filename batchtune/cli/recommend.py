"""`batchtune recommend`: choose from a run, write the parameters down, say why."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from batchtune.archive import Run, open_run
from batchtune.batching import Configuration, format_cortex, format_flags, format_tfserving_text, format_triton
from batchtune.errors import NoFeasibleConfigurationError, UsageError
from batchtune.recommend import Recommendation, recommend
from batchtune.report.console import print_recommendation
from batchtune.scenario.reader import parse_duration_s
from batchtune.scenario.spec import Scenario
from batchtune.tune.trial import Trial

_PARAMETERS_FILE = "batching_parameters.txt"


def run_recommend(
    path: Path | None, limits: Mapping[str, str], *, dialect: str, write: Path | None, results: Path, json: bool
) -> int:
    """The exit code: 0, or 3 when nothing measured meets the limits."""
    run = open_run(path, root=results)
    scenario = run.scenario()
    slo = {name: _limit_s(name, text) for name, text in limits.items()}
    return conclude(run, scenario, run.trials(), slo=slo or None, dialect=dialect, write=write, json=json)


def conclude(
    run: Run,
    scenario: Scenario,
    trials: Sequence[Trial],
    *,
    slo: Mapping[str, float] | None = None,
    dialect: str,
    write: Path | None,
    json: bool,
) -> int:
    """Recommend from the trials, write the recommendation into the run, print it; 3 when nothing meets the SLO."""
    try:
        chosen = recommend(trials, scenario=scenario, slo=slo)
    except NoFeasibleConfigurationError as error:
        if json:
            sys.stdout.buffer.write(orjson.dumps({"error": error.message, "hint": error.hint}) + b"\n")
        raise
    run.write_recommendation(chosen)
    file = _write_parameters(chosen.configuration, run.path / _PARAMETERS_FILE)
    if write is not None:
        write.write_text(formatted(chosen.configuration, dialect, scenario), encoding="utf-8")
    if json:
        sys.stdout.buffer.write(orjson.dumps(_document(chosen, run), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        print_recommendation(chosen, scenario=scenario, trials=trials, parameters_file=write or file)
        if dialect != "tfserving" and write is None:
            print(formatted(chosen.configuration, dialect, scenario))
    return 0


def formatted(configuration: Configuration, dialect: str, scenario: Scenario) -> str:
    """The configuration in a server's own words.

    Raises:
        BatchingParametersError: the dialect cannot say it.
    """
    batching = configuration.batching
    if dialect == "json":
        return orjson.dumps(configuration.to_dict(), option=orjson.OPT_INDENT_2).decode() + "\n"
    if batching is None:
        return "# no batching: start the server without --enable_batching\n"
    match dialect:
        case "triton":
            return format_triton(batching)
        case "cortex":
            return format_cortex(batching)
        case "flags":
            return format_flags(batching) + "\n"
        case _:
            return format_tfserving_text(batching)


def _write_parameters(configuration: Configuration, path: Path) -> Path | None:
    """Write the parameters; without batching there is no file, and an older one must not be mistaken for one."""
    if configuration.batching is None:
        path.unlink(missing_ok=True)
        return None
    path.write_text(format_tfserving_text(configuration.batching), encoding="utf-8")
    return path


def _document(chosen: Recommendation, run: Run) -> dict[str, object]:
    return {"run": str(run.path), **_finite(chosen.to_dict())}


def _finite(value: object) -> object:
    return value


def _limit_s(name: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--slo-{name}: {error}", hint="write a duration such as 20ms or 1.5s") from error
