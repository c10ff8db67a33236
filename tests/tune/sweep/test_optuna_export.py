"""Trials in an Optuna storage: journal file, SQLite, a real PostgreSQL, and what cannot be had."""

from __future__ import annotations

import getpass
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from batchtune.errors import UsageError
from batchtune.tune.strategies.grid import grid_strategy
from batchtune.tune.sweep.optuna_export import export_study, opened_storage, study_name_of
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import planted, scenario_of

try:
    import psycopg
except ImportError:
    psycopg = None

SPACE = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000]}


@pytest.fixture(scope="module")
def measured():
    """A scenario and its ledger: reference points and the grid, one configuration refused."""
    scenario = scenario_of(
        fixed={"num_batch_threads": 1}, search={"strategy": "grid", "repeats": 2, "space": SPACE}
    )

    def refuses(configuration):
        batching = configuration.batching
        return "no" if batching and batching.max_batch_size == 4 and batching.batch_timeout_micros else None

    driver = Driver(scenario, refuses=refuses).refer()
    driver.run(grid_strategy)
    return scenario, driver.trials


@pytest.fixture(scope="module")
def postgres():
    """The URL of a server of our own, on loopback; skipped where Debian's PostgreSQL or the driver is missing."""
    if psycopg is None:
        pytest.skip("psycopg is missing")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if not programs:
        pytest.skip("PostgreSQL is missing; Debian's package postgresql has it")
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    user = "postgres" if as_user else getpass.getuser()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def control(*arguments: str) -> None:
        command = [*as_user, str(programs[-1]), "-D", folder, "-w", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)

    with tempfile.TemporaryDirectory() as home:
        folder = f"{home}/data"
        if as_user:
            shutil.chown(home, user)
        control("init", "-o", f"-A trust -U {user} --no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={home} -c fsync=off"
        control("start", "-l", f"{home}/log", "-o", options)
        try:
            yield f"postgresql://{user}@127.0.0.1:{port}"
        finally:
            control("stop", "-m", "immediate")


@pytest.fixture(
    params=["journal:///", "plain path", "sqlite:///", pytest.param("postgresql://", marks=pytest.mark.slow)]
)
def url(request, tmp_path):
    if request.param == "postgresql://":
        server, name = request.getfixturevalue("postgres"), f"study_{uuid.uuid4().hex}"
        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"{server}/{name}"
    name = {"sqlite:///": "study.db"}.get(request.param, "study.log")
    return f"{tmp_path / name}" if request.param == "plain path" else f"{request.param}{tmp_path / name}"


@pytest.fixture
def loaded():
    """Opens studies of a URL by name, and closes their storages in the end."""
    with ExitStack() as stack:
        yield lambda url, name: optuna.load_study(
            study_name=name, storage=stack.enter_context(opened_storage(url))
        )


def test_every_trial_but_probes_is_there_with_its_parameters_values_and_reasons(measured, url, loaded):
    scenario, trials = measured
    done = export_study(trials, scenario, url)
    study = loaded(url, done.study_name)
    expected = [one for one in trials if one.source != "probe"]
    assert (
        (done.trials, done.added) == (len(expected), len(expected)) == (len(study.trials), len(study.trials))
    )
    for ours, theirs in zip(expected, study.trials, strict=True):
        assert theirs.user_attrs["trial"] == ours.number
        assert theirs.user_attrs["source"] == ours.source
        assert theirs.user_attrs["reason"] == ours.reason
        if ours.state == "failed":
            assert (theirs.state.name, theirs.user_attrs["failure"]) == ("FAIL", "no")
        else:
            assert theirs.value == ours.objective.value
        if ours.source == "grid":
            assert theirs.params == ours.point
    assert study.direction.name == "MAXIMIZE"
    assert study.user_attrs == {"scenario": "fake", "objective": "throughput, requests/s"}


def test_no_batching_has_no_parameters_and_the_defaults_their_own_values(measured, url, loaded):
    scenario, trials = measured
    by_source = {
        one.user_attrs["source"]: one
        for one in loaded(url, export_study(trials, scenario, url).study_name).trials
    }
    assert by_source["no_batching"].params == {}
    assert by_source["defaults"].params == {"max_batch_size": 1000, "batch_timeout_micros": 0}


def test_exporting_again_adds_only_what_is_new(measured, url, loaded):
    scenario, trials = measured
    first = export_study(trials[:8], scenario, url)
    again = export_study(trials[:8], scenario, url)
    whole = export_study(trials, scenario, url)
    assert again.added == 0
    assert again.study_name == whole.study_name == first.study_name
    assert first.added + whole.added == whole.trials
    numbers = [one.user_attrs["trial"] for one in loaded(url, whole.study_name).trials]
    assert numbers == sorted(set(numbers))


def test_the_best_trial_keeps_the_promises(url, loaded):
    """A trial that misses one is not the best however fast; both Optuna 5 and the dashboard are told."""
    scenario = scenario_of(search={"space": SPACE})
    fast = planted(1, throughput=900, p95_s=0.2, batching={"max_batch_size": 16, "batch_timeout_micros": 0})
    kept = planted(2, throughput=500, p95_s=0.01, batching={"max_batch_size": 4, "batch_timeout_micros": 0})
    study = loaded(url, export_study([fast, kept], scenario, url).study_name)
    assert study.best_trial.user_attrs["trial"] == 2
    constraints = study.trials[0].constraints
    assert constraints["p95"] == pytest.approx(3.0)
    assert constraints["errors"] == pytest.approx(-1.0)
    assert study.trials[0].system_attrs["constraints"] == [pytest.approx(3.0), pytest.approx(-1.0)]


def test_of_a_spoilt_trial_and_its_repeat_the_repeat_counts(tmp_path, loaded):
    scenario = scenario_of(search={"space": SPACE})
    spoilt = planted(1, throughput=900, p95_s=0.01, batching={"max_batch_size": 4})
    repeat = replace(planted(2, throughput=500, p95_s=0.01, batching={"max_batch_size": 4}), repeat_of=1)
    path = f"{tmp_path / 'x.log'}"
    study = loaded(path, export_study([spoilt, repeat], scenario, path).study_name)
    assert [one.user_attrs["trial"] for one in study.trials] == [2]


def test_two_sweeps_of_one_scenario_are_two_studies(tmp_path):
    scenario = scenario_of(search={"space": SPACE})
    one = planted(1, throughput=900, p95_s=0.01)
    later = replace(one, started_utc="2026-01-02T00:00:00.000+00:00")
    path = f"{tmp_path / 'x.log'}"
    names = {export_study([trial], scenario, path).study_name for trial in (one, later)}
    assert names == {"fake-20260101T000000", "fake-20260102T000000"}
    assert study_name_of([one], scenario) == "fake-20260101T000000"


def test_undefined_figures_make_a_failed_trial_and_no_attribute(tmp_path, loaded):
    scenario = scenario_of(search={"space": SPACE, "sampler": "nsga2"})
    undefined = planted(1, throughput=900, p95_s=math.inf, batching={"max_batch_size": 4})
    fine = planted(2, throughput=900, p95_s=0.01, batching={"max_batch_size": 1})
    path = f"{tmp_path / 'x.log'}"
    study = loaded(path, export_study([undefined, fine], scenario, path).study_name)
    assert [one.state.name for one in study.trials] == ["FAIL", "COMPLETE"]
    assert "p95_s" not in study.trials[0].user_attrs
    assert study.trials[1].values == pytest.approx([900, 0.01])
    assert [one.name for one in study.directions] == ["MAXIMIZE", "MINIMIZE"]


def test_words_and_lists_of_sizes_are_exported_as_text(tmp_path, loaded):
    space = {"max_batch_size": [4, 8], "allowed_batch_sizes": ["none", [4, 8]], "flag": [True, False]}
    scenario = scenario_of(search={"space": space})
    driver = Driver(scenario_of(search={"strategy": "grid", "repeats": 1, "space": space}))
    trials = driver.run(grid_strategy)
    path = f"{tmp_path / 'x.log'}"
    study = loaded(path, export_study(trials, scenario, path).study_name)
    assert {one.params["allowed_batch_sizes"] for one in study.trials} == {"none", "(4, 8)"}
    assert {one.params["flag"] for one in study.trials} == {"True", "False"}


def test_an_exported_study_can_be_gone_on_with(measured, tmp_path, loaded):
    scenario, trials = measured
    path = f"sqlite:///{tmp_path / 'x.db'}"
    study = loaded(path, export_study(trials, scenario, path).study_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = study.ask()
        size = trial.suggest_int("max_batch_size", 1, 16)
        study.tell(trial, float(size))
    assert export_study(trials, scenario, path).added == 0


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        (
            "postgresql://me:secret@h/x",
            "no driver is installed for postgresql://",
            "pip install 'psycopg[binary]'",
        ),
        ("study", "no storage: 'study'", "give one of journal:///PATH"),
        ("/no/such/x.log", "no such directory: /no/such", "create it first"),
        ("sqlite:////no/such/x.db", "unable to open database file", "give one of"),
        ("redis+what://h/x", "the storage refuses", "give one of"),
    ],
)
def test_a_storage_that_cannot_be_had_is_told_with_a_hint_and_without_the_password(
    url, message, hint, monkeypatch
):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError) as caught, opened_storage(url):
        pass
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "secret" not in caught.value.message + caught.value.hint


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("2026-01-01 started\n")
    scenario = scenario_of(search={"space": SPACE})
    with pytest.raises(UsageError, match="is no journal of Optuna"):
        export_study([planted(1, throughput=1, p95_s=0.01)], scenario, str(path))
    assert path.read_text() == "2026-01-01 started\n"


def test_nothing_to_export_is_said(tmp_path):
    with pytest.raises(UsageError, match="no trials"):
        export_study([], scenario_of(), str(tmp_path / "x.log"))
