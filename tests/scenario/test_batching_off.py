"""Is no batching asked of a server only where its commands can tell it so?"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.report.findings import text_of
from batchtune.scenario.spec.target import TargetSpec, can_be_off
from batchtune.target.command import CommandTarget
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import sweep
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, scenario_of

FILE_ONLY = {
    "kind": "command",
    "model": "m",
    "rest_url": "http://h:1",
    "launch": ["server", "--enable_batching", "--batching_parameters_file={file}"],
    "render": "tfserving",
}
NOTE = "nothing was compared with no batching: a tfserving file, all that target's commands name, cannot express no batching"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"launch": None, "apply": ["reload", "{file}"]}, False),
        ({"apply": ["reload", "{file}"], "launch": ["server"]}, False),
        ({"launch": ["server", "{file}", "{json}"]}, True),
        ({"apply": ["reads its stdin"]}, True),
        *(({"render": dialect}, True) for dialect in ("flags", "k8s", "kserve", "triton", "cortex")),
    ],
)
def test_only_a_tfserving_file_alone_cannot_say_it(changes: dict[str, Any], expected: bool) -> None:
    assert can_be_off(TargetSpec.model_validate({**FILE_ONLY, **changes})) is expected


def test_it_is_never_applied_in_the_guise_of_the_defaults() -> None:
    spec = TargetSpec.model_validate({**FILE_ONLY, "launch": ["no-such-program", "{file}"]})
    with (
        CommandTarget(spec) as target,
        pytest.raises(BatchingParametersError, match="cannot express no batching"),
    ):
        target.apply(Configuration(batching=None))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fixed": {"enable_batching": False}}, "fixed"),
        ({"search": {"space": {"enable_batching": [True, False]}}}, "search"),
    ],
)
def test_a_scenario_that_asks_for_it_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match="cannot express no batching") as raised:
        scenario_of(target=FILE_ONLY, **changes)
    assert f"'{key}'" in str(raised.value.errors()[0]["ctx"])


@pytest.mark.parametrize("search", [{"strategy": "optuna"}, {"strategy": "guided"}])
def test_a_sweep_leaves_it_out_says_so_and_can_be_established(search):
    space = {"max_batch_size": [4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1]}
    scenario = scenario_of(target=FILE_ONLY, search={**search, "budget": {"time": "40s"}, "space": space})
    clock = FakeClock()
    target = FakeTarget(clock, law=Law())
    done = sweep(scenario, target, FakeFleet(target, seed=1), now_s=clock)
    trials = [result.trial for result in done]
    assert not any(trial.configuration.batching is None for trial in trials)
    lone = next(trial for trial in trials if trial.source == "probe").configuration
    assert lone.label() == "max_batch_size=1 batch_timeout_micros=0 max_enqueued_batches=16"
    answer = recommend(trials, scenario=scenario)
    assert answer.established
    assert NOTE in map(text_of, answer.notes)
