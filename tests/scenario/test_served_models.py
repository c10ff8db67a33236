"""Several models of one server: each a scenario of its own, and mistakes told where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.reader import format_scenario, parse_scenario, read_arms, read_kept_scenario
from batchtune.target.choice import target_of

TWO = """\
name: two
target:
  models:
    - {name: ranker, model: imdb_transformer, rate: 300/s, slo: {p95: 50ms}, request: {rows: 2}}
    - {name: reader, model: sequence_transformer}
request: {rows: 4}
load: {arrivals: poisson, rate: 20/s, seed: 7}
slo: {p99: 1s}
objective: latency
"""
CLOSED = (
    TWO.replace("{arrivals: poisson, rate: 20/s, seed: 7}", "{arrivals: closed, concurrency: 8}")
    .replace("rate: 300/s", "concurrency: 3")
    .replace("objective: latency", "objective: throughput")
)
READER = "model: sequence_transformer"
OWN = TWO.replace(READER, f"{READER}, batching: {{max_batch_size: 4}}") + (
    "fixed: {max_batch_size: 16, batch_timeout_micros: 500, num_batch_threads: 2}\n"
)


EXTERNAL = "kind: external\n  grpc_url: h:1"


def refused(text: str, *overrides: str) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, overrides=overrides)
    return caught.value


def test_each_model_has_its_own_request_rate_and_slo_and_else_those_of_the_scenario() -> None:
    ranker, reader = parse_scenario(TWO).of_models().values()
    assert (ranker.target.model, reader.target.model) == ("imdb_transformer", "sequence_transformer")
    assert (ranker.request.rows, reader.request.rows) == (2, 4)
    assert (ranker.load.rate_rps, reader.load.rate_rps) == (300.0, 20.0)
    assert (ranker.slo.limits(), reader.slo.limits()) == ({"p95": 0.05}, {"p99": 1.0})
    assert (ranker.load.seed, reader.load.seed) == (7, 8)  # or both would send at the same instants
    assert not ranker.target.models


@pytest.mark.parametrize(
    ("override", "words", "instead"),
    [
        ("slo.p95=1ms", "slo: ranker has its own, which takes precedence", "slo.…=…"),
        ("request.protocol=rest", "request: ranker has its own", "request.…=…"),
        ("load.rate=9/s", "load.rate: ranker has its own", "rate=…"),
    ],
)
def test_what_would_not_be_heard_by_a_model_with_its_own_is_refused(
    tmp_path: Path, override: str, words: str, instead: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_scenario(TWO, overrides=["slo.errors=2%", override] if "slo" in override else [override])
    assert caught.value.hint == f"set it for each model: --set target.models.0.{instead}"
    (tmp_path / "two.yaml").write_text(TWO)
    with pytest.raises(UsageError) as caught:
        read_arms(tmp_path / "two.yaml", {"candidate": [override]})
    assert "--candidate-set target.models.0." in caught.value.hint
    own = [f"target.models.0.{key}=null" for key in ("slo", "request", "rate")]
    heard, other = parse_scenario(TWO, overrides=[override, *own]).of_models().values()
    assert heard.slo == other.slo
    assert heard.request == other.request
    assert heard.load.rate_rps == (9.0 if "rate" in override else 20.0)
    assert heard.slo.limits().get("p95") == 0.001 or heard.request.protocol == "rest" or "rate" in override


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("fixed.max_batch_size=8", "batching.max_batch_size"),
        ("search.space.batch_timeout_micros=[0]", "space.batch_timeout_micros"),
    ],
)
def test_a_parameter_of_all_is_refused_where_a_model_has_its_own(override: str, own: str) -> None:
    own_parts = "batching: {max_batch_size: 4}, space: {batch_timeout_micros: [0, 500]}"
    text = TWO.replace(READER, f"{READER}, {own_parts}")
    key = override.partition("=")[0]
    with pytest.raises(UsageError, match=f"{key}: reader has its own, which takes precedence") as caught:
        parse_scenario(text, overrides=[override])
    assert caught.value.hint == f"set it for each model: --set target.models.1.{own}=…"
    value = "2" if own.startswith("batching") else "[0, 1000]"
    heard = parse_scenario(text, overrides=[override, f"target.models.1.{own}={value}"])
    assert str(heard.target.models[1].model_dump(by_alias=True)).count(value) == 1
    assert parse_scenario(TWO, overrides=[override]).target.models == parse_scenario(TWO).target.models
    others = ["fixed.num_batch_threads=2", "search.space.max_enqueued_batches=[4, 8]"]
    assert parse_scenario(text, overrides=others).target.models == parse_scenario(text).target.models


def test_an_option_that_the_same_command_line_overrules_for_one_model_is_heard_by_the_other() -> None:
    without = [f"target.models.{at}.slo=null" for at in (0, 1)]
    overrides = [*without, "slo.p95=20ms", "target.models.0.slo.p95=10ms"]
    ranker, reader = parse_scenario(TWO, overrides=overrides).of_models().values()
    assert (ranker.slo.limits()["p95"], reader.slo.limits()["p95"]) == (0.01, 0.02)


def test_in_a_closed_loop_each_has_its_own_clients() -> None:
    found = [one.load.concurrency for one in parse_scenario(CLOSED).of_models().values()]
    assert found == [3, 8]


def test_it_reads_back_as_it_was_written() -> None:
    scenario = parse_scenario(TWO)
    assert scenario.target.model == "imdb_transformer"
    assert parse_scenario(format_scenario(scenario)) == scenario
    for text, promises in ((TWO, True), (TWO.replace("slo: {p95: 50ms}", "slo: {}"), False)):
        slo = parse_scenario(text).target.models[0].slo
        assert slo is not None
        assert bool(slo.promises) is promises


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (TWO, "name: reader", "name: ranker", "models.1.name: another model has this name"),
        (TWO, "name: reader", "name: ../x", "models.1.name: expected letters"),
        (TWO, "  models:", "  model: other\n  models:", "model: several models are listed"),
        (TWO, "  models:", "  server: docker\n  models:", "models: several models are served by"),
        (TWO, "  models:", f"  {EXTERNAL}\n  models:", "models: several models are served by"),
        (TWO, "  models:", "  flags: {model_name: x}\n  models:", "flags.model_name: the models are listed"),
        (TWO, "rate: 300/s", "concurrency: 3", "models.0.concurrency: load.arrivals is poisson"),
        (TWO, "rate: 20/s, ", "", "models.1.rate: missing: arrivals poisson needs the model's rate"),
        (TWO, "{p95: 50ms}", "{p95: 50}", "models.0.slo.p95: expected a duration with its unit"),
        (TWO, "rate: 300/s", "rats: 300/s", "models.0.rats: unknown key"),
        (TWO, READER, f"{READER}, rate: 10/s, flood: 50/s", "models.1.flood: this key no longer exists"),
        (
            TWO,
            READER,
            f"{READER}, space: {{num_batch_threads: [1]}}",
            "models.1.space.num_batch_threads: all",
        ),
        (TWO, READER, f"{READER}, space: {{max_batchsize: [1]}}", "models.1.space.max_batchsize: unknown"),
        (OWN, "max_batch_size: 4", "max_batch_size: 0", "models.1.batching: max_batch_size must be positive"),
        (OWN, "max_batch_size: 4", "max_batchsize: 4", "models.1.batching: unknown batching parameter"),
        (OWN, "max_batch_size: 4", "num_batch_threads: 4", "models.1.batching.num_batch_threads: all models"),
        (CLOSED, "concurrency: 3", "rate: 3/s", "models.0.rate: load.arrivals is closed, which has no rate"),
    ],
)
def test_a_mistake_is_told_where_it_stands(text: str, old: str, new: str, words: str) -> None:
    assert old in text
    assert f"target.{words}" in refused(text.replace(old, new)).message


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (
            TWO,
            "poisson, rate: 20/s",
            "ramp, ramp: {from: 1/s, to: 2/s}",
            "load.arrivals: several models take",
        ),
        (CLOSED, "concurrency: 8", "concurrency: 8, requests: 9", "load.requests: a load of several models"),
    ],
)
def test_a_load_that_several_models_cannot_share_is_refused(
    text: str, old: str, new: str, words: str
) -> None:
    assert words in refused(text.replace(old, new)).message


def test_one_of_the_models_is_changed_by_its_number() -> None:
    changed = ["target.models.1.rate=50/s", "target.models.1.batching.max_batch_size=4"]
    before, after = parse_scenario(TWO).target.models, parse_scenario(TWO, overrides=changed).target.models
    assert after[0] == before[0]
    assert (after[1].rate_rps, after[1].batching) == (50.0, {"max_batch_size": 4})
    for number in ("2", "-1", "x"):
        message = refused(TWO, f"target.models.{number}.rate=50/s").message
        assert "target.models: expected a list of models" in message
        assert "target.model:" not in message
    override = "target.models.1.rats=50/s"
    assert refused(TWO, override).message.startswith(f"--set {override}: unknown key")


def test_a_wrong_value_that_is_fixed_is_none_of_a_models_own() -> None:
    fixed = "fixed: {max_batch_size: 8, batch_timeout_micros: 0, num_batch_threads: 1, length_buckets: oto}\n"
    assert "<string>:10: fixed.length_buckets: length_buckets must be" in refused(TWO + fixed).message


@pytest.mark.parametrize("name", ["imdb_transformer", "sequence_transformer"])
def test_a_model_beside_the_list_is_refused_even_if_it_is_the_first_of_it(name: str) -> None:
    error = refused(TWO, f"target.model={name}")
    assert error.message == f"--set target.model={name}: several models are listed in target.models"
    assert error.hint == "remove target.model, or target.models to serve this one"


def test_a_kept_scenario_that_names_the_first_of_its_models_is_read(tmp_path: Path) -> None:
    kept = tmp_path / "scenario.yaml"
    kept.write_text(TWO.replace("target:\n", "target:\n  model: imdb_transformer\n"))
    assert read_kept_scenario(kept) == parse_scenario(TWO)


def test_what_takes_one_model_says_so() -> None:
    with pytest.raises(UsageError, match=r"target\.models: this is of one model; `load`, `sweep`"):
        target_of(parse_scenario(TWO))


def test_a_models_own_batching_lies_over_what_is_fixed() -> None:
    scenario = parse_scenario(OWN)
    shared = scenario.configuration()
    ranker, reader = scenario.target.models
    assert ranker.configuration(shared) == shared
    own = reader.configuration(shared).batching
    assert own == BatchingParameters(max_batch_size=4, batch_timeout_micros=500, num_batch_threads=2)
    assert reader.configuration(Configuration(batching=None)) == Configuration(batching=None)
    assert parse_scenario(format_scenario(scenario)) == scenario


def test_a_capacity_of_several_models_needs_a_limit_of_each() -> None:
    capacity = TWO.replace("objective: latency", "objective: capacity")
    assert parse_scenario(capacity).objective == "capacity"
    unlimited = capacity.replace("slo: {p99: 1s}\n", "")
    assert "objective capacity needs a latency limit" in refused(unlimited).message
    assert parse_scenario(unlimited.replace(READER, f"{READER}, slo: {{p95: 1s}}")).objective == "capacity"
