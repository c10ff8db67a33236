"""`batchtune noise`: the scenario's configuration against itself; the smallest change that can be told here."""

from __future__ import annotations

import json as json_text
from pathlib import Path

from batchtune.cli.commands.compare import INTERRUPTED, run_blocks, void_by_host
from batchtune.errors import MeasurementInvalidError, TargetError
from batchtune.report.comparison import print_noise
from batchtune.scenario.reader import read_scenario
from batchtune.target.choice import refuse_several_models
from batchtune.tune.compare.noise_floor import arms_of, noise_floor


def run_noise(
    path: Path, overrides: list[str], *, blocks: int, results: Path, json: bool, quiet: bool
) -> int:
    """The exit code: 0, 6 when the client was the limit or the host disturbed every run, 130 when interrupted.

    Raises:
        TargetError: the server failed, or no block came to its end.
    """
    scenario = read_scenario(path, overrides=overrides)
    refuse_several_models(scenario)
    arms = arms_of(scenario)
    done = run_blocks(scenario, arms, kind="noise", blocks=blocks, results=results, quiet=quiet)
    if done.run is None:
        return INTERRUPTED
    floor = noise_floor(done.trials, done.variants)
    done.run.write_comparison(floor.to_dict())
    if not done.interrupted and (floor.failure is not None or not floor.floors):
        raise TargetError(floor.failure or "no block gave two figures", hint=f"see {done.run.path}")
    if json:
        print(json_text.dumps({"run": str(done.run.path), **floor.to_dict()}, indent=2))
    elif floor.floors:
        print_noise(floor, path=done.run.path)
    if done.interrupted:
        return INTERRUPTED
    if floor.client_limited:
        return MeasurementInvalidError.exit_code
    return void_by_host("both arms") if floor.noisy == floor.runs else 0
