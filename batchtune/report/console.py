"""How does a recommendation, or a table of load points, read on a terminal or in a log? Data goes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from batchtune.batching import Configuration, to_dict
from batchtune.measure.measurement import Measurement
from batchtune.recommend import Recommendation
from batchtune.report.units import duration, interval, milliseconds, number, percent, ratio
from batchtune.scenario.spec import Scenario
from batchtune.tune.trial import Trial

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_recommendation(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    trials: Sequence[Trial],
    parameters_file: Path | None,
    stream: TextIO = sys.stdout,
) -> None:
    """The parameters, what they give, the gain, the reason, how sure, and how to deploy them."""
    console = _console(stream)
    console.print(f"{_headline(chosen)} for {_workload(scenario)}", style="bold", markup=False)
    console.print()
    for name, value in _parameters(chosen.configuration):
        console.print(f"  {name:<28} {value}", markup=False)
    console.print()
    console.print(_comparison(chosen, trials))
    console.print()
    for line in _sentences(chosen):
        console.print(line, markup=False)
    console.print()
    console.print(_deployment(chosen.configuration, parameters_file), markup=False)


def _headline(chosen: Recommendation) -> str:
    if chosen.configuration.batching is None:
        return "Recommended: no batching"
    return "Recommended batching parameters"
