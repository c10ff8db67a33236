"""Does a scenario of kind http say parameters in the server's own words, and requests by a template?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from batchtune.batching.parameters import Configuration
from batchtune.errors import ScenarioError, UsageError
from batchtune.report.findings import worded
from batchtune.report.words import parameters_of
from batchtune.scenario.examples import server_names, server_scenario
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.places import filled, values_at, with_values
from batchtune.scenario.reader import ScenarioText, format_scenario, parse_scenario, read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Contenders, reference_configurations
from tests.real_servers.environments import SERVERS


def scenario(request: Any = None, target: Any = None, **parts: Any) -> Scenario:
    document = {
        "name": "x",
        "target": {
            "url": "http://127.0.0.1:8000/predict",
            "kind": "http",
            "launch": ["serve"],
            "set": {"env": {"rows": "ROWS", "wait": "WAIT", "workers": "WORKERS", "mode": "MODE"}},
            "means": {"rows": "rows", "wait_ms": "wait", "concurrency": "workers"},
            **(target or {}),
        },
        "request": request or {"body": {"x": "{{rows}}"}},
        "load": {"arrivals": "poisson"},
        "slo": {"p95": "50ms"},
        "objective": "capacity",
        **parts,
    }
    return parse_scenario(yaml.safe_dump(document), source="x")


def requests(**request: Any) -> RequestSet:
    return build_requests(scenario(request=request).request, {}, model_name="m")


def test_parameters_are_written_and_shown_in_the_servers_own_words() -> None:
    asked = scenario(
        search={"space": {"rows": [1, 8], "wait": [0, 2.5]}}, fixed={"mode": "fast", "workers": 2}
    )
    best = asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 2500})
    assert best.label() == "rows=8 wait=2.5 workers=2 mode=fast"
    assert dict(parameters_of(best))["wait"] == "2.5"
    assert best.server_values() == {"rows": 8, "wait": 2.5, "workers": 2, "mode": "fast"}
    kept = json.loads(json.dumps(best.to_dict()))
    assert Configuration.from_dict(kept) == best
    told = {"batching": {"rows": 8, "wait": 2.5, "workers": 2}, "flags": {"mode": "fast"}}
    assert worded({"best": [{"configuration": kept}]}) == {"best": [{"configuration": told}]}
    alone = asked.configuration({"enable_batching": False}).to_dict()
    assert worded(alone) == {"batching": None, "flags": {"workers": "2", "mode": "fast"}}


def test_no_batching_is_one_request_a_batch_with_as_many_workers() -> None:
    asked = scenario(request={"body": {"x": "{{rows}}"}, "rows": 3}, fixed={"workers": 2})
    alone = reference_configurations(asked)["no_batching"]
    assert alone.server_values(3) == {"rows": 3, "wait": 0, "workers": 2}


def test_the_servers_defaults_are_a_reference_only_where_they_are_told() -> None:
    assert "defaults" not in reference_configurations(scenario())
    known = scenario(target={"defaults": {"rows": 4, "wait": 10}})
    assert reference_configurations(known)["defaults"].server_values() == {"rows": 4, "wait": 10}


def test_defaults_that_do_not_batch_are_no_rival_of_no_batching() -> None:
    asked = scenario(
        target={"defaults": {"rows": 1, "wait": 0}, "means": {"rows": "rows", "wait_ms": "wait"}},
        search={"space": {"rows": [1, 8], "wait": [0, 2.5]}},
    )
    references = reference_configurations(asked)
    assert references["defaults"] == references["no_batching"]
    assert references["no_batching"].batching is None
    contenders = Contenders(asked)
    contenders.grid(64)
    (alone,) = (
        own for own in contenders.all() if own.configuration.server_values()["rows"] == 1 and not own.point
    )
    assert alone.sources == ["no_batching", "defaults", "grid"]
    rivals = [own.configuration.server_values() for own in contenders.all()]
    assert sum(values == {"rows": 1, "wait": 0} for values in rivals) == 1


def test_a_run_keeps_a_scenario_that_reads_the_same() -> None:
    asked = scenario(search={"space": {"wait": {"low": 0, "high": 4, "step": 2}}}, fixed={"rows": 8})
    assert parse_scenario(format_scenario(asked), source="kept") == asked


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"fixed": {"row": 8}}, "did you mean 'rows'"),
        ({"target": {"means": {"rows": "size"}}}, "size is a parameter that target.set does not give"),
        ({"target": {"means": {"wait_s": "wait", "wait_ms": "wait"}}}, "the wait is given twice"),
        ({"target": {"launch": None}}, "variables and flags reach a server only when it starts"),
        ({"target": {"url": None}}, "missing: where requests go"),
        ({"request": {"rows": 1}}, "missing: what a request of this server looks like"),
        ({"request": {"body": [{"x": "{{rowz}}"}]}}, "no input rowz did you mean 'row"),
        ({"request": {"body": "{{2 * id}}", "shapes": {"ids": [2]}}}, "no input id did you mean 'ids'"),
        (
            {"request": {"body": ["{row}"]}},
            "{row} is not a placeholder; it would be sent as it is write {{row}}",
        ),
        ({"request": {"body": '{"x": {{row}}, "y": {{uuid}'}}, "body: {{uuid} is not a placeholder"),
        ({"request": {"body": "ids}}", "shapes": {"ids": [2]}}}, "body: ids}} is not a placeholder"),
        ({"target": {"url": "http://h:{port}/p"}}, "url: no word of launch has {port} in it add {port}"),
        ({"target": {"url": "http://h:{prt}/p", "launch": ["{prt}"]}}, "url: {prt} is not a placeholder"),
        ({"search": {"space": {"rows": [-1, 4]}}}, "space.rows: rows must be positive; was -1 raise rows to"),
        ({"search": {"space": {"wait": [-2, 4]}}}, "space.wait: wait must be non-negative; was -2 "),
        ({"fixed": {"rows": 0}}, "fixed.rows: rows must be positive; was 0 "),
        ({"target": {"grpc_url": None, "rest_url": "http://x:1"}}, "described by url"),
        ({"request": {"protocol": "kserve_grpc"}}, "target.grpc_url: missing: where kserve_grpc is spoken"),
    ],
)
def test_what_does_not_fit_together_is_told(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as told:
        scenario(**parts)
    assert said in f"{told.value.message} {told.value.hint}"


def test_braces_that_are_no_misspelt_place_are_sent_as_they_are() -> None:
    body = '{"x": {{rows}}, "note": "{mode} and {}"}'
    (sent, *_) = requests(body=body).bodies
    assert b"{mode} and {}" in sent


def test_a_body_has_a_row_or_rows_by_name_and_another_uuid_each() -> None:
    made = requests(
        body={"id": "a-{{uuid}}", "x": "{{rows}}", "first": "{{row}}", "ids": "{{ids}}"},
        shapes={"ids": [2], "mask": []},
        rows=2,
        inputs={"random": {"whole": True}},
    )
    bodies = [json.loads(body) for body in made.bodies]
    first = bodies[0]["first"]
    assert made.rows == (2,) * 16
    assert len({body["id"] for body in bodies}) == 16
    assert bodies[0]["x"][0] == first == {"ids": bodies[0]["ids"][0], "mask": first["mask"]}
    assert [len(body["ids"]) for body in bodies] == [2] * 16
    assert all(isinstance(value, int) for value in bodies[0]["ids"][0])


def test_rows_are_texts_where_the_scenario_says_so() -> None:
    made = requests(body={"inputs": "{{rows}}"}, inputs={"random": {"text": True, "length": 5}}, rows=2)
    assert [len(text) for text in json.loads(made.bodies[0])["inputs"]] == [5, 5]


def test_recorded_bodies_are_sent_as_they_are_with_the_rows_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"x": {"y": [1,  2]}}\n\n{"x": {"y": [3]}}\n')
    made = requests(inputs={"file": str(file)}, rows_path="x.y")
    assert made.bodies == (b'{"x": {"y": [1,  2]}}', b'{"x": {"y": [3]}}')
    assert made.rows == (2, 1)
    with pytest.raises(ScenarioError, match="no list of rows at 'x'"):
        requests(inputs={"file": str(file)}, rows_path="x")


def test_places_are_read_and_set_through_lists_objects_and_stars() -> None:
    document = {"a": [{"n": 1}, {"n": 2}], "b": None}
    assert values_at(document, "a.*.n") == [1, 2]
    assert values_at(document, "a.2.n") == values_at(document, "b.c") == []
    assert with_values(document, {"a.1.n": 5, "b.c": 6}) == {"a": [{"n": 1}, {"n": 5}], "b": {"c": 6}}
    assert document["b"] is None
    assert filled(["{{n}}", "{{2 * n}}", "n={{n}}", "{{m}}"], {"n": 3}) == [3, 6, "n=3", "{{m}}"]


@pytest.fixture
def app(tmp_path: Path) -> str:
    (tmp_path / "my_app.py").write_text("from x import app as given\n\nclass Model: ...\n")
    (tmp_path / "dynamic.py").write_text("from x import *\n")
    return f"{tmp_path}/my_app.py:Model"


@pytest.mark.parametrize("server", server_names())
def test_each_server_has_a_scenario_that_needs_no_change(server: str, app: str) -> None:
    named = ("infinity", "tei", "vllm", "sglang", "transformers-serve")
    argument = "org/model" if server in named else app
    asked = parse_scenario(server_scenario(server, argument), source=server)
    assert asked.target.kind == "http"
    places = set(re.findall(r"\{\w+\}", repr(asked.target)))
    assert not {"{file}", "{name}", "{module}", "{folder}", "{app}"} & places
    if server != "litserve":  # a script of the user's
        assert asked.target.launch
        assert asked.target.set
        file = asked.target.set.file
        listens = [*asked.target.launch, repr(file and file.base)]
        assert any("127.0.0.1" in word for word in listens), "other machines can use it"
    assert asked.target.install, "the packages, or the image, that an error names if it is not installed"
    tried = {name: space.values for name, space in asked.search.space.items()}
    assert asked.target.traps_of(tried) or not asked.target.traps or "max_latency_ms" in asked.target.traps


@pytest.mark.parametrize("server", SERVERS)
def test_the_trap_that_a_real_sweep_must_name_is_the_preset_s(server: str, app: str) -> None:
    argument = "org/model" if SERVERS[server].writes_app else app
    traps = parse_scenario(server_scenario(server, argument), source=server).target.traps
    assert SERVERS[server].trap in " ".join(traps.values())


def test_a_trap_is_told_where_its_parameter_is_set_and_only_there(app: str) -> None:
    target = parse_scenario(server_scenario("litserve", app), source="x").target
    assert target.traps_of({"batch_timeout_micros": (0,)}) == []
    (told,) = target.traps_of({"batch_timeout_micros": (0, 2000)})
    assert told.startswith("batch_timeout: LitServe's clock starts when a worker becomes free")


@pytest.mark.parametrize(
    ("server", "argument", "said"),
    [
        ("litsrve", "my_app.py", "did you mean 'litserve'"),
        ("litserve", "nowhere.py", "there is no file nowhere.py"),
        ("fastapi", "{folder}/my_app.py", "the name of the app"),
        ("fastapi", "{folder}/my_app.py:model", "/my_app.py has no model did you mean 'Model'"),
        ("bentoml", "{folder}/my_app.py:x", "/my_app.py has no x"),
        ("vllm", "my_app.py:app", "vllm serves a model, not an app"),
        ("infinity", "a model", "has a space or a mark in it"),
    ],
)
def test_an_app_that_the_server_cannot_start_is_told(server: str, argument: str, said: str, app: str) -> None:
    argument = argument.replace("{folder}", str(Path(app).parent))
    with pytest.raises(UsageError) as told:
        server_scenario(server, argument)
    assert said in f"{told.value.message} {told.value.hint}"


def test_names_that_an_app_imports_or_may_make_when_it_runs_are_taken(app: str) -> None:
    for own in ("my_app.py:given", "dynamic.py:anything"):
        assert own.replace(".py", "") in server_scenario("fastapi", f"{Path(app).parent}/{own}")


def test_the_help_names_every_server() -> None:
    from batchtune.cli.arguments.options import ServerOption

    (option,) = get_args(ServerOption)[1:]
    assert option.help.rstrip(".").partition(": ")[2].split(", ") == server_names()


UNSET = """name: x
target:
  kind: http
  url: http://127.0.0.1:8000/score
  means: {rows: max_batch}
request: {body: {x: "{{row}}"}}
load: {arrivals: closed, concurrency: 8}
objective: throughput
"""


def test_a_parameter_of_a_body_that_has_no_value_is_told_before_it_is_sent_as_a_place() -> None:
    setting = 'set: {request: {url: "http://127.0.0.1:8000/p", body: {max_batch: "{{max_batch}}", wait: "{{wait}}"}}}'
    text = UNSET.replace("  means", f"  {setting}\n  means") + "search: {space: {max_batch: [1, 4]}}\n"
    with pytest.raises(ScenarioError) as told:
        read_scenario(ScenarioText(text=text, source="s.yaml"), searched=True)
    assert told.value.message == "s.yaml:5: target.set.request.body: {{wait}} has no value"
    assert "fixed" in told.value.hint
    fixed = ScenarioText(text=f"{text}fixed: {{wait: 5}}\n", source="s.yaml")
    assert read_scenario(fixed, searched=True).fixed == {"wait": 5}


@pytest.mark.parametrize("search", ["", "search: {space: {max_batch: [1, 4]}}\n"])
def test_a_search_needs_a_server_that_is_given_its_parameters(search: str) -> None:
    text = ScenarioText(text=UNSET + search, source="s.yaml")
    assert read_scenario(text).target.set is None  # a load of it is possible
    with pytest.raises(ScenarioError) as told:
        read_scenario(text, searched=True)
    said = "s.yaml:2: target.set: missing: how the server is given its parameters, such as max_batch"
    assert told.value.message == said
    assert "target.set.request" in told.value.hint
    with pytest.raises(ScenarioError, match=r"^x:2: target\.set: missing: how the server is given"):
        parse_scenario(f"{UNSET}fixed: {{max_batch: 4}}\n", source="x")
