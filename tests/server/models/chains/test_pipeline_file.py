"""A mistake in a pipeline.yaml is named by file, line and key, whether the file shows it or the models do."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.server.models.chains.beside import models_beside
from batchtune.server.models.chains.pipeline import Condition, Source
from batchtune.server.models.chains.pipeline_file import read_pipeline
from batchtune.server.models.model_config import ModelConfig
from batchtune.wire.status import StatusError
from tests.server.models.chains.chain_server import (
    TRIGGER_AND_SELECT,
    ChainServer,
    Model,
    select,
    serve,
    spec,
    trigger,
)


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = TRIGGER_AND_SELECT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "pipeline.yaml").write_text(text)
    return folder / "pipeline.yaml"


@pytest.mark.parametrize("text", ["1e4", "1.0e4", "+1e4", "10000"])
def test_what_yaml_takes_for_a_text_is_a_number_all_the_same(tmp_path: Path, text: str) -> None:
    _, select_step = read_pipeline(write(tmp_path, ("{y: -1}", f"{{y: {text}}}"))).steps
    assert select_step.otherwise == {"y": 10000}


def test_a_pipeline_is_read(tmp_path: Path) -> None:
    pipeline = read_pipeline(write(tmp_path))
    first, second = pipeline.steps
    assert (first.name, first.model, first.signature, first.when) == (
        "trigger",
        "trigger",
        "serving_default",
        None,
    )
    assert second.inputs == {"x": Source("request", "x"), "score": Source("trigger", "score")}
    assert second.when == Condition(
        source=Source("trigger", "score"), element=None, comparison=">", number=0.5
    )
    assert second.otherwise == {"y": -1}
    assert [spec.name for spec in pipeline.outputs] == ["score", "y"]


@pytest.mark.parametrize(
    ("text", "element", "comparison", "number"),
    [("trigger.score>=.5", None, ">=", 0.5), ("trigger.score[3] != -1e-3", 3, "!=", -0.001)],
)
def test_a_condition_compares_with_a_number(
    tmp_path: Path, text: str, element: int | None, comparison: str, number: float
) -> None:
    when = read_pipeline(write(tmp_path, ("trigger.score > 0.5", f'"{text}"'))).steps[1].when
    assert when is not None
    assert (when.element, when.comparison, when.number) == (element, comparison, number)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("    when:", "    wen:", "12: steps.select.wen: unknown key, did you mean when?"),
        ("    model: select\n", "", "9: steps.select.model: missing; expected a model's name"),
        (
            "request.x, score",
            "request.z, score",
            "11: steps.select.inputs.x: the request has no input z; it has x",
        ),
        (
            "score: trigger.score}",
            "score: triger.score}",
            "11: steps.select.inputs.score: no step triger before this, ",
        ),
        (
            "score: trigger.score}",
            "score: select.y}",
            "11: steps.select.inputs.score: no step select before this; ",
        ),
        (
            "trigger.score > 0.5",
            "trigger.score",
            "12: steps.select.when: 'trigger.score'; expected STEP.OUTPUT ",
        ),
        (
            "trigger.score > 0.5",
            "trigger.score > 1.2.3",
            "12: steps.select.when: 'trigger.score > 1.2.3'; expected",
        ),
        ("trigger.score > 0.5", "__import__('os')", "12: steps.select.when: \"__import__('os')\"; expected"),
        ("    otherwise: {y: -1}\n", "", "9: steps.select.otherwise.y: missing; outputs.y.from uses it"),
        ("    when: trigger.score > 0.5\n", "", "12: steps.select.otherwise: read only beside when"),
        ("{y: -1}", "{y: [1]}", "13: steps.select.otherwise.y: [1]; expected a number, an earlier tensor"),
        ("{y: -1}", "{y: 1e400}", "13: steps.select.otherwise.y: '1e400'; expected a number, an earlier"),
        (
            "score > 0.5",
            "score > 1e400",
            "12: steps.select.when: 'trigger.score > 1e400'; expected STEP.OUTPUT",
        ),
        (
            "from: trigger.score",
            "form: trigger.score",
            "15: outputs.score.form: unknown key, did you mean from?",
        ),
        (
            "dtype: float32, shape: [1]",
            "dtype: float33",
            "15: outputs.score.dtype: 'float33', did you mean float32?",
        ),
        ("  select:\n", "  trigger:\n", "6: steps.trigger: given twice, in line 6 and in line 9"),
        ("  trigger:\n", "  request:\n", "6: steps.request: no name of a step"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_key(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = write(tmp_path, (old, new))
    with pytest.raises(StatusError) as raised:
        read_pipeline(path)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert raised.value.message.startswith(f"{path}:{int(fault.split(':')[0])}:{fault.partition(':')[2]}")


@pytest.mark.parametrize(
    "text",
    [
        "", "- a\n", "inputs: {x: {}}\n", "inputs: {x: {}}\nsteps: {}\n", "a: [\n", "steps: 2026-13-13\n",
        "[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pipeline.yaml").write_text(text)
    with pytest.raises(StatusError) as raised:
        read_pipeline(tmp_path / "pipeline.yaml")
    assert (raised.value.code, raised.value.message[: len(str(tmp_path))]) == (
        "INVALID_ARGUMENT",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (
            "model: select",
            "model: selct",
            "10: steps.select.model: this server has no model selct, did you mean select?",
        ),
        ("model: select", "model: chain", "10: steps.select.model: chain is this chain; expected a model"),
        (
            "model: select",
            "model: select\n    signature: s",
            "11: steps.select.signature: model select version 1 has no ",
        ),
        ("x: request.x, ", "", "11: steps.select.inputs: model select version 1 also takes x"),
        (
            "{x: request.x, score",
            "{z: request.x, x: request.x, score",
            "11: steps.select.inputs.z: model select version ",
        ),
        (
            "score: trigger.score}",
            "score: trigger.scor}",
            "11: steps.select.inputs.score: step trigger has no output scor",
        ),
        (
            "score: trigger.score}",
            "score: request.x}",
            "11: steps.select.inputs.score: float32 [?,2] is given where ",
        ),
        (
            "trigger.score > 0.5",
            "request.x > 0.5",
            "12: steps.select.when: a row of request.x has 2 values; name one",
        ),
        (
            "trigger.score > 0.5",
            "request.x[2] > 0.5",
            "12: steps.select.when: a row of request.x has 2 values, from",
        ),
        ("{y: -1}", "{y: trigger.score}", "13: steps.select.otherwise.y: float32 [?,1] is given where"),
        (
            "{y: -1}",
            "{y: {text: nobody}}",
            "13: steps.select.otherwise.y: y is of float32; expected a number",
        ),
        (
            "float32, shape: [1]",
            "float64, shape: [1]",
            "15: outputs.score.from: float32 [?,1] is given where float64",
        ),
    ],
)
def test_what_does_not_fit_the_models_is_named_by_file_line_and_key(
    tmp_path: Path, old: str, new: str, fault: str
) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        text = TRIGGER_AND_SELECT.replace(old, new)
        assert text != TRIGGER_AND_SELECT
        with pytest.raises(StatusError) as raised:
            server.open(tmp_path, text)
        assert raised.value.code == "INVALID_ARGUMENT"
        assert raised.value.message.startswith(f"{tmp_path / 'pipeline.yaml'}:{fault}")

    serve(scenario)


def test_a_value_for_an_output_of_any_size_is_refused(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", Model([spec("score", 1), spec("x", 2)], [spec("y", None)], lambda _given: {}))
        with pytest.raises(
            StatusError, match=r"13: steps\.select\.otherwise\.y: y is \[\?,\?\], so that it is not known"
        ):
            server.open(tmp_path)

    serve(scenario)


def test_a_chain_that_asks_a_chain_is_refused(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        server.latest["select"] = server.open(tmp_path)
        with pytest.raises(
            StatusError, match=r"pipeline.yaml:10: steps\.select\.model: select is a chain itself"
        ):
            server.open(tmp_path)

    serve(scenario)


def test_stages_beside_a_chain_are_refused_with_both_files(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        (tmp_path / "stages.yaml").write_text("pre: stages.py:f\n")
        with pytest.raises(StatusError) as raised:
            server.open(tmp_path)
        assert raised.value.message.startswith(
            f"{tmp_path / 'stages.yaml'}: not read beside {tmp_path / 'pipeline.yaml'}, which declares a chain"
        )

    serve(scenario)


def test_many_aliases_in_a_pipeline_are_refused_unexpanded(tmp_path: Path) -> None:
    bomb = "".join(f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]\n" for depth in range(1, 10))
    (tmp_path / "pipeline.yaml").write_text(f"a0: &a0 x\n{bomb}inputs: *a9\n")
    with pytest.raises(StatusError, match=r"pipeline\.yaml:6: more than 20,000 keys and values"):
        read_pipeline(tmp_path / "pipeline.yaml")


def test_a_model_that_has_no_version_yet_is_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.open(tmp_path, configured=("trigger", "select", "chain"))

    serve(scenario)
    assert (
        "cannot answer yet: step select: Servable not found for request: Latest(select)"
        in capfd.readouterr().err
    )


def test_the_models_beside_a_chain_are_those_that_its_steps_ask_and_that_are_there(tmp_path: Path) -> None:
    for folder in ("chain/1", "chain/2", "chain/3", "trigger/1", "other/1", "later/1"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "chain" / "1")
    write(tmp_path / "chain" / "2", ("model: select", "model: later"))
    (tmp_path / "chain" / "3" / "pipeline.yaml").write_text("no: pipeline")
    beside = models_beside(ModelConfig(name="chain", base_path=tmp_path / "chain"))
    assert beside == tuple(ModelConfig(name=name, base_path=tmp_path / name) for name in ("trigger", "later"))
    (tmp_path / "laid out").mkdir()
    (tmp_path / "laid out" / "1").symlink_to(tmp_path / "chain" / "1")
    other = tmp_path / "other" / "1"
    for name in ("../other", str(tmp_path / "other"), ".", "..", "chain/../other", "o" * 300, '"a\\0"'):
        write(other, ("model: select", f"model: {name}"))
        chain = ModelConfig(name="other", base_path=tmp_path / "other")
        assert [model.name for model in models_beside(chain)] == ["trigger"], name
    linked = models_beside(ModelConfig(name="chain", base_path=tmp_path / "laid out"))
    assert linked == beside[:1]
    assert not models_beside(ModelConfig(name="m", base_path=tmp_path / "trigger"))
