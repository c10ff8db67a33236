"""What does `--batching-parameters-file` make of a scenario: which values are fixed, and which are searched too?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from batchtune.batching.formats import read_batching_file
from batchtune.errors import BatchingParametersError
from batchtune.scenario.reader import ScenarioText, read_scenario, scenario_text
from batchtune.scenario.spec.knobs import KNOBS
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search import KnobValue, ListSpace


def file_knobs(path: Path, scenario: Scenario) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a file says, as the scenario's `fixed` would hold it, and what of it the target cannot be told.

    Raises:
        BatchingParametersError: it cannot be read, or says what no server would understand, or not this one.
    """
    file = read_batching_file(path)
    try:
        knobs, notes = file.knobs(
            on_triton=scenario.target.kind == "triton", rows_per_request=scenario.request.rows_most
        )
    except BatchingParametersError as error:
        raise BatchingParametersError(f"{path}: {error.message}", hint=error.hint) from error
    return knobs, tuple(f"{path}: {note}" for note in notes)


def with_file(
    source: Path | ScenarioText, overrides: Sequence[str], path: Path, *, searched: bool
) -> ScenarioText:
    """The scenario with the parameters of a file, for a sweep (`searched`) or a comparison; notes go to stderr.

    A parameter that the sweep searches keeps its space, in which the file's value then is; any other is fixed, instead
    of the parameters that the scenario fixes. A comparison searches nothing: all are fixed, but for what a variant says
    itself.

    Raises:
        BatchingParametersError: as `file_knobs`.
        ScenarioError: the scenario's.
    """
    scenario = read_scenario(source, overrides=overrides)
    knobs, notes = file_knobs(path, scenario)
    document = scenario.document()
    space: dict[str, Any] = document["search"].get("space", {})
    replaced = () if scenario.target.kind == "triton" else KNOBS
    fixed = {name: value for name, value in document["fixed"].items() if name not in replaced}
    document["fixed"] = fixed
    for name, value in knobs.items():
        knob = scenario.search.space.get(name)
        if knob is None:
            fixed[name] = value
        elif searched:
            space[name] = _with(space[name], knob.values, value)
        else:
            del space[name]
            fixed[name] = value
    if not space:
        document["search"].pop("space", None)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    read = scenario_text(source)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return ScenarioText(text=text, source=f"{read.source} with {path}", directory=read.directory)


def _with(written: Any, values: Sequence[KnobValue], value: Any) -> Any:
    """The space with the value in it; as it was where it is there, or where the space is too large to be listed."""
    value = tuple(value) if isinstance(value, list) else value
    # A range of more values is searched as it is: a list of them would be the run's scenario.
    listed_max = 200
    if value in values or len(values) > listed_max:
        return written
    return ListSpace.model_validate([*values, value]).model_dump(mode="json")
