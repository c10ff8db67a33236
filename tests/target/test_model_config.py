"""The file that lists several models is one that a server reads, whatever their paths are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.reader import parse_scenario
from batchtune.server.models.model_config import read_model_config_file
from batchtune.server.startup import own_batching_parameters
from batchtune.target.tfserving import (
    OWN_PARAMETERS,
    model_config_text,
    own_fields,
    own_parameters,
    with_own_parameters,
)


@pytest.mark.parametrize("folder", ["plain", 'with "quotes" and \\', "mit Umlaut ü", "🐢"])
def test_models_and_paths_survive(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "models.txt"
    wanted = {"ranker": f"/models/{folder}", "reader-2.0": "/models/other"}
    path.write_text(model_config_text(wanted), encoding="utf-8")
    found = read_model_config_file(path)
    assert {one.name: str(one.base_path) for one in found} == wanted


def test_every_version_gets_the_models_own_parameters_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    for version in ("1", "2", "notes"):
        (tmp_path / "m" / version / "variables").mkdir(parents=True)
        (tmp_path / "m" / version / "saved_model.pb").write_text(version)
    (tmp_path / "m" / "2" / OWN_PARAMETERS).write_text("max_batch_size { value: 9 }")
    parameters = BatchingParameters(max_batch_size=4, num_batch_threads=2, thread_pool_name="x")
    base_path = with_own_parameters(tmp_path / "m", tmp_path / "own", parameters)
    assert sorted(path.name for path in base_path.iterdir()) == ["1", "2"]
    for version in ("1", "2"):
        assert (base_path / version / "saved_model.pb").read_text() == version
        assert (base_path / version / "variables").is_dir()
        assert own_batching_parameters(base_path / version) == BatchingParameters(max_batch_size=4)
    assert (tmp_path / "m" / "2" / OWN_PARAMETERS).read_text() == "max_batch_size { value: 9 }"
    assert not (tmp_path / "m" / "1" / OWN_PARAMETERS).exists()


def test_own_parameters_are_those_of_the_configuration_which_a_scenario_gives_its_own() -> None:
    scenario = parse_scenario(
        """\
name: s
target:
  models:
    - {name: a, model: imdb_transformer, batching: {max_batch_size: 4}}
    - {name: b, model: resnet50}
load: {arrivals: closed, concurrency: 1}
objective: throughput
"""
    )
    shared = Configuration(batching=BatchingParameters(max_batch_size=16, num_batch_threads=2))
    assert own_fields(own_parameters("ab", scenario.with_models(shared))) == {
        "a": {"max_batch_size": 4},
        "b": {"max_batch_size": 16},
    }
    joint = replace(shared, models=(("a", BatchingParameters(max_batch_size=1)),))
    assert own_fields(own_parameters("ab", scenario.with_models(joint))) == {
        "a": {"max_batch_size": 1},
        "b": {"max_batch_size": 16},
    }
    assert own_parameters("ab", shared) == {}
    assert own_parameters("ab", scenario.with_models(Configuration(batching=None))) == {}
