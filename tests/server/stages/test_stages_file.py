"""A mistake in stages.yaml is named by file, line and key."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from batchtune.server.backends.model import LoadedModel
from batchtune.server.metrics import Metrics
from batchtune.server.server_flags import ServerFlags
from batchtune.server.stages.plan import StagePlan
from batchtune.server.stages.stages_file import read_stages_file
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError
from tests.server.models.model_fakes import X, Y
from tests.server.stages.stage_fakes import STAGES, declared_in, write_stages


def lookup(source: str) -> str:
    return f"""
inputs: {{user: {{dtype: string}}}}
lookup: {{inputs: {{user: {{dtype: string}}}}, outputs: {{x: {{shape: [1]}}}}, {source}}}
"""


LOOKUP = lookup("emulated: {base_ms: 1}")


def test_a_folder_without_the_file_has_no_stages(tmp_path: Path) -> None:
    assert read_stages_file(tmp_path) is None


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    declared = declared_in(write_stages(tmp_path, LOOKUP))
    defaults = ("", "", None, "serving_default")
    assert (declared.pre, declared.post, declared.outputs, declared.signature) == defaults
    assert declared.request_threads >= 1
    assert declared.lookup is not None
    queue = declared.lookup.queue
    assert (queue.max_batch_size, queue.batch_timeout_micros, queue.max_enqueued_batches) == (64, 1000, 100)
    assert declared.lookup.num_batch_threads == 2
    assert declared.code == {}


PRE = "{pre: stages.py:f, inputs: {x: {}}, %s}"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[]", "the file: []; expected a table with pre"),
        ("{}", "the file: no stage; expected pre, post or lookup"),
        ("prae: stages.py:f", "prae: unknown key; did you mean 'pre'?"),
        ("{pre: stages.py:f}", "inputs: missing; expected a table"),
        ("{post: stages.py:f}", "outputs: missing; expected a table"),
        ("{pre: ../s.py:f, inputs: {x: {}}}", "pre: '../s.py:f'; expected FILE.py:FUNCTION of this folder"),
        ("{pre: a/b/, inputs: {x: {}}}", "pre: 'a/b/'; expected FILE.py:FUNCTION"),
        ("{pre: 3, inputs: {x: {}}}", "pre: 3; expected FILE.py:FUNCTION"),
        ("{post: stages.py:f, outputs: {y: {}}, inputs: {x: {}}}", "inputs: read only with pre or lookup"),
        ("{pre: stages.py:f, inputs: {x: {dtype: text}}}", "inputs.x.dtype: 'text'"),
        (PRE % "request_threads: 0", "request_threads: 0; expected a whole number"),
        (PRE % "request_threads: 1000000", "request_threads: 1000000; expected 1024 at most"),
        (PRE % "signature: 3", "signature: 3; expected a name"),
        ("{pre: 2026-13-13}", "pre: '2026-13-13' cannot be read: month must be in 1..12"),
        (lookup("num_batch_threads: 9999, emulated: {}"), "lookup.num_batch_threads: 9999; expected 1024 at"),
        (lookup("max_batch_size: 0, emulated: {}"), "lookup.max_batch_size: 0; expected a whole"),
        (
            lookup("redis: {url: 'redis://h:port'}"),
            "lookup.redis.url: Port could not be cast to integer value",
        ),
        (lookup("redis: {url: 'http://h'}"), "lookup.redis.url: 'http://h'; expected redis://HOST"),
        (lookup(""), "lookup: one of code, redis, emulated says whom to ask"),
        (lookup("emulated: {base: 1}"), "lookup.emulated.base: unknown key; did you mean 'base_ms'?"),
        (lookup("emulated: {base_ms: -1}"), "lookup.emulated.base_ms: -1; expected a number"),
        (LOOKUP.replace("{shape: [1]}", "{shape: [-1]}"), "lookup.outputs.x.shape: -1"),
    ],
)
def test_a_mistake_is_named_by_its_key(tmp_path: Path, stages: str, message: str) -> None:
    with pytest.raises(StatusError) as raised:
        declared_in(write_stages(tmp_path, stages))
    assert raised.value.code == "INVALID_ARGUMENT"
    assert re.sub(r":\d+: ", ": ", raised.value.message, count=1).startswith(
        f"{tmp_path / 'stages.yaml'}: {message}"
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("pre: stages.py:preprocess", "pre: stages.py", "2: pre: 'stages.py'; expected FILE.py:FUNCTION"),
        ("text: {dtype: string}", "text: {dtype: text}", "4: inputs.text.dtype: 'text'"),
        ("shape: [1]", "shape: [one]", "5: outputs.y.shape: 'one'; expected a whole number"),
        ("outputs:", "outputs: {}\noutputs:", "6: outputs: given twice, first on line 5"),
        ("outputs:", "outputs", "5: not YAML: "),
    ],
)
def test_a_mistake_is_named_by_its_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    text = textwrap.dedent(STAGES).replace(old, new)
    with pytest.raises(StatusError) as raised:
        declared_in(write_stages(tmp_path, text))
    assert raised.value.message.startswith(f"{tmp_path / 'stages.yaml'}:{fault}")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (STAGES + "    signature: s\n", "6: signature: 's' is none of the model's; expected serving_default"),
        (LOOKUP.replace("{user:", "{name:", 1), "3: lookup.inputs.user: not among"),
        (LOOKUP.replace("{x:", "{z:"), "2: inputs: the model takes 'x', which nothing gives"),
    ],
)
def test_what_does_not_fit_the_model_is_told_at_load(tmp_path: Path, stages: str, message: str) -> None:
    signature = Signature(name="serving_default", method_name="p", inputs=(X,), outputs=(Y,))
    model = LoadedModel(signatures={"serving_default": signature}, runs={})
    declared = declared_in(write_stages(tmp_path, stages))
    with pytest.raises(StatusError) as raised:
        StagePlan(declared, model, model_name="m", use=Metrics().stages, options=ServerFlags())
    assert raised.value.message.startswith(f"{tmp_path / 'stages.yaml'}:{message}")
