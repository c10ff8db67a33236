"""A SavedModel that batches inside its graph: what it has is told, and that a server which batches too does it twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import MeasurementInvalidError
from batchtune.wire.encoding import varint
from batchtune.wire.tfserving.rest_json import GraphBatching, graph_batching, read_graph_batching
from tests.cli.test_cli import batchtune

EXPORT = """
import sys
import tensorflow as tf

class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def predict(self, x):
        @tf.nondifferentiable_batch_function(
            num_batch_threads=1, max_batch_size=16, batch_timeout_micros=20000, allowed_batch_sizes=[4, 16]
        )
        def inside(rows):  # what it sees is the batch, padding included
            return tf.ones_like(rows[:, :1]) * tf.cast(tf.shape(rows)[0], tf.float32)
        return {"size": inside(x)}

model = Model()
tf.saved_model.save(model, sys.argv[1], signatures=model.predict)
"""
SCENARIO = """\
name: inside
target: {model: MODEL}
load: {arrivals: closed, concurrency: 16, warm_up: 100ms, duration: 500ms, connections: 2}
objective: throughput
"""
INSIDE = "max_batch_size 16, batch_timeout_micros 20000, num_batch_threads 1, allowed_batch_sizes 4,16"


@pytest.mark.slow
def test_a_model_that_batches_inside_is_told_and_twice_is_a_caveat(tmp_path: Path) -> None:
    model = tmp_path / "inside" / "1"
    subprocess.run([sys.executable, "-c", EXPORT, str(model)], check=True, capture_output=True, timeout=120)
    scenario = tmp_path / "inside.yaml"
    scenario.write_text(SCENARIO.replace("MODEL", str(model.parent)))
    done = batchtune("load", scenario, "--json", cwd=tmp_path)
    assert done.returncode in (0, MeasurementInvalidError.exit_code), done.stderr
    assert f"inside batches inside its graph: {INSIDE}" in done.stderr
    document = json.loads(done.stdout)
    caveats = {one["code"]: one["text"] for one in document["points"][0]["measurement"]["caveats"]}
    assert INSIDE in caveats["batched_twice"]
    assert "batched twice, in its graph too" in (tmp_path / document["run"] / "server.log").read_text()


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def attribute(name: bytes, value: bytes) -> bytes:
    return field(5, field(1, name) + field(2, value))


def node(op: bytes = b"BatchFunction", sizes: bytes = b"") -> bytes:
    numbers = {b"max_batch_size": 32, b"batch_timeout_micros": 5000, b"num_batch_threads": 2}
    attributes = [attribute(name, field(3, number)) for name, number in numbers.items()]
    attributes.append(attribute(b"allowed_batch_sizes", field(1, sizes)))
    return field(1, b"batch") + field(2, op) + b"".join(attributes)


def saved_model(*nodes: bytes, functions: tuple[bytes, ...] = ()) -> bytes:
    library = b"".join(field(1, field(3, inner)) for inner in functions)
    graph = b"".join(field(1, outer) for outer in nodes) + field(2, library)
    return field(1, 1) + field(2, field(1, b"") + field(2, graph))


BATCHER = GraphBatching(
    max_batch_size=32, batch_timeout_micros=5000, num_batch_threads=2, allowed_batch_sizes=(8, 300)
)


@pytest.mark.parametrize(
    "sizes", [field(3, varint(8) + varint(300)), field(3, 8) + field(3, 300)], ids=["packed", "single"]
)
def test_a_batcher_is_found_in_the_graph_and_in_its_functions_once(sizes: bytes) -> None:
    inner = node(sizes=sizes)
    assert graph_batching(saved_model(inner)) == (BATCHER,)
    assert graph_batching(saved_model(functions=(node(b"MatMul"), inner, inner))) == (BATCHER,)
    assert BATCHER.in_words().endswith("num_batch_threads 2, allowed_batch_sizes 8,300")


def test_a_graph_without_one_batches_nothing(tmp_path: Path) -> None:
    assert graph_batching(saved_model(node(b"BatchFunctionLike"), functions=(node(b"MatMul"),))) == ()
    assert read_graph_batching(tmp_path) == ()
    (tmp_path / "saved_model.pb").write_bytes(saved_model(node(sizes=field(3, 8) + field(3, 300))))
    assert read_graph_batching(tmp_path) == (BATCHER,)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_that_are_no_model_say_nothing(noise: bytes, place: int) -> None:
    whole = saved_model(node(sizes=b""), functions=(node(),))
    graph_batching(whole[:place] + noise + whole[place:])
    graph_batching(noise)
