"""A search as an Optuna study in SQLite, and what cannot be had."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import optuna
import pytest

from batchtune.errors import UsageError
from batchtune.tune.search.fixed_load import search_of
from batchtune.tune.sweep.optuna_export import export_study, opened_storage
from tests.tune.tune_fakes import capacity_scenario, planted, scenario_of, swept

SPACE = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000]}
SEARCH = {"budget": {"time": "40s"}, "space": SPACE}
CLOSED = scenario_of(fixed={"num_batch_threads": 1}, search=SEARCH)
CAPACITY = capacity_scenario(fixed={"num_batch_threads": 1}, search=SEARCH)


@pytest.fixture(scope="module", params=[CLOSED, CAPACITY], ids=["throughput", "capacity"])
def measured(request):
    """A scenario and its ledger; one configuration is refused."""

    def refuses(one):
        return "no" if one.in_force("max_batch_size") == 4 and one.in_force("batch_timeout_micros") else None

    return request.param, list(swept(request.param, refuses=refuses))


@pytest.fixture(scope="module")
def exported(measured, tmp_path_factory):
    """A scenario, its ledger, and the study that they were exported as."""
    scenario, trials = measured
    url = f"sqlite:///{tmp_path_factory.mktemp('exported') / 'study.db'}"
    name = export_study(trials, scenario, url)
    with opened_storage(url) as storage:
        yield scenario, trials, optuna.load_study(study_name=name, storage=storage)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def loaded(url):
    """Opens studies by name, and closes their storages in the end."""
    with ExitStack() as stack:
        yield lambda name: optuna.load_study(
            study_name=name, storage=stack.enter_context(opened_storage(url))
        )


def test_every_contender_that_ran_is_a_trial_with_what_it_held_and_who_named_it(exported):
    scenario, trials, study = exported
    search = search_of(scenario, budget_s=1.0)
    search.observe(trials)
    ran = [contender for contender in search.contenders.all() if contender.runs]
    dead = {trial.configuration.label() for trial in trials if trial.state == "failed"}
    is_capacity = scenario.objective == "capacity"
    for ours, theirs in zip(ran, study.trials, strict=True):
        held = sum(run.held for run in ours.runs)
        told = {"named_by": ", ".join(ours.sources), "held": held, "missed": len(ours.runs) - held}
        assert theirs.user_attrs.items() >= told.items()
        assert (theirs.state.name == "FAIL") == (theirs.user_attrs["configuration"] in dead)
        if theirs.state.name == "PRUNED":
            assert theirs.value is None
            assert not (is_capacity and ours.bracket.held_rps)
        if theirs.state.name == "COMPLETE":
            best = ours.bracket.held_rps if is_capacity else max(run.answered_rps for run in ours.runs)
            assert theirs.value == (best if is_capacity else pytest.approx(best, rel=0.1))
        if ours.point is not None:
            assert theirs.params == ours.point
    assert dead or is_capacity
    assert study.direction.name == "MAXIMIZE"
    assert study.best_trial.user_attrs["configuration"] == search.leader().configuration.label()


def test_no_batching_has_no_parameters_and_the_defaults_their_own_values(exported):
    scenario, _, study = exported
    named = {trial.user_attrs["named_by"]: trial for trial in study.trials}
    assert named["no_batching"].params == {}
    if scenario.objective == "throughput":
        assert named["defaults"].params == {"max_batch_size": 1000, "batch_timeout_micros": 0}


@pytest.mark.slow
def test_exported_again_it_has_what_is_known_by_then_and_keeps_what_others_added(measured, url, loaded):
    scenario, trials = measured
    name = export_study(trials[: len(trials) // 2], scenario, url)
    study = loaded(name)
    before = len(study.trials)
    trial = study.ask({"max_batch_size": optuna.distributions.IntDistribution(1, 1000)})
    size = float(trial.params["max_batch_size"])
    study.tell(trial, size)
    assert export_study(trials, scenario, url) == name
    assert name.startswith("fake-2")
    kept = loaded(name).trials
    assert len(kept) > before + 1
    assert [one.value for one in kept if "named_by" not in one.user_attrs] == [size]
    assert export_study(trials, scenario, url) == name
    assert len(loaded(name).trials) == len(kept)


def test_latency_is_a_study_that_is_minimised_in_seconds(url, loaded):
    load = {"arrivals": "poisson", "rate": 500}
    scenario = scenario_of(load=load, objective="latency", search={**SEARCH, "budget": {"time": "20s"}})
    study = loaded(export_study(list(swept(scenario)), scenario, url))
    assert study.direction.name == "MINIMIZE"
    assert 0.0 < study.best_value < 0.05


def test_words_and_lists_of_sizes_are_exported_as_text(url, loaded):
    space = {"max_batch_size": [4, 8], "allowed_batch_sizes": ["none", [4, 8]]}
    scenario = scenario_of(search={**SEARCH, "strategy": "grid", "space": space})
    study = loaded(export_study(list(swept(scenario)), scenario, url))
    words = {trial.params.get("allowed_batch_sizes") for trial in study.trials}
    assert {"none", "(4, 8)"} <= words


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@h/x", "no SQLite file: 'postgresql'"),
        ("study.log", "no SQLite file: 'study.log'"),
        ("sqlite:////no/such/x.db", "unable to open database file"),
    ],
)
def test_a_storage_that_cannot_be_had_is_told_with_a_hint_and_without_the_password(url, message):
    with pytest.raises(UsageError) as caught, opened_storage(url):
        pass
    assert message in caught.value.message
    assert "give sqlite:///FILE" in caught.value.hint
    assert "secret" not in caught.value.message + caught.value.hint


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("2026-01-01 started\n" * 100)
    with pytest.raises(UsageError, match="file is not a database"):
        export_study([planted(1, throughput=1, p95_s=0.01)], CLOSED, f"sqlite:///{path}")
    assert path.read_text() == "2026-01-01 started\n" * 100


def test_nothing_to_export_is_said(url):
    with pytest.raises(UsageError, match="no trials"):
        export_study([], CLOSED, url)
