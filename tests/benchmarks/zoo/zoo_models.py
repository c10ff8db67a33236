"""How are the zoo's models made? Emulated devices are a file; real ones are built once, in a folder of the user's cache.

python -m tests.benchmarks.zoo.zoo_models NAME FOLDER     # writes FOLDER/1/…; `zoo.py` calls it in a process of its own
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.twin.simulator.simulate import Device
from tests.benchmarks.commands import ROOT
from tests.benchmarks.emulated import Emulated

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchtune-zoo"
EDITION = "1"
"""Raised when a builder below changes, so that nobody measures an older model under its name."""

FEATURES = 16
BATCH_OVERHEAD_S = 65e-6
"""From the end of a batch to the start of the next: 3.6 ms of device give 98.2 % of its rate (front_ends.py)."""

FRONT_END_S = {"grpc": 12e-6, "rest": 31e-6}
"""CPU of the server's event loop per request (front_ends.py)."""

DELAY_S = 0.3e-3
"""Loopback, client and hand-over of a lone request beyond its batch (live_target.Calibrated: 0.2-0.4 ms)."""


def simulated_device(model: Emulated, protocol: str) -> Device:
    """The true device for the simulator, with the server's overheads as measured elsewhere."""
    return Device(
        tau_s=model.tau_ms() / 1e3 + BATCH_OVERHEAD_S,
        contention=model.contention_ratio,
        serial=not model.parallel,
        jitter_ratio=model.jitter_ratio,
        delay_s=DELAY_S,
        front_end_s=FRONT_END_S[protocol],
    )


def model_directory(model: Emulated | str, name: str, folder: Path) -> str:
    """The directory of a target's model, or its name where it is one of batchtune's samples.

    Raises:
        subprocess.CalledProcessError: a model that could not be built; its words are on stderr.
    """
    if isinstance(model, Emulated):
        return str(model.write(folder / name))
    if model not in BUILDERS:
        return model
    path = CACHE / f"{model}-{EDITION}"
    if not path.exists():
        beside = CACHE / f".{model}-{os.getpid()}"
        build = [sys.executable, "-m", __name__, model, beside]
        subprocess.run(build, cwd=ROOT, check=True, stdout=sys.stderr)
        beside.rename(path)
    return str(path)


def _save_keras(model: Any, version: Path) -> None:
    import keras
    import tensorflow as tf

    archive = keras.export.ExportArchive()
    archive.track(model)
    taken = [tf.TensorSpec(given.shape, given.dtype, name=given.name) for given in model.inputs]
    archive.add_endpoint(
        "serving_default", lambda *given: {"scores": model(list(given))}, input_signature=taken
    )
    archive.write_out(str(version), verbose=False)


def _conv_net(version: Path) -> None:
    """Images of 64 × 64: about 5 ms a row on one core."""
    import keras

    keras.utils.set_random_seed(1)
    image = hidden = keras.Input((64, 64, 3), name="image")
    for filters in (64, 128, 128):
        hidden = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
        hidden = keras.layers.MaxPooling2D()(hidden)
    _save_keras(keras.Model([image], keras.layers.Dense(10)(keras.layers.Flatten()(hidden))), version)


def _two_inputs(version: Path) -> None:
    import keras

    keras.utils.set_random_seed(1)
    user, item = keras.Input((64,), name="user"), keras.Input((256,), name="item")
    both = keras.layers.Concatenate()([user, item])
    for units in (512, 512):
        both = keras.layers.Dense(units, activation="relu")(both)
    _save_keras(keras.Model([user, item], keras.layers.Dense(1)(both)), version)


def _dense_slow(version: Path) -> None:
    """240 layers of 2048 units that share one matrix of 16 MB: 70 ms a row on one core, 200 ms a batch of 16."""
    import tensorflow as tf

    class Slow(tf.Module):
        def __init__(self) -> None:
            random = np.random.default_rng(1)
            self.weight = tf.Variable(random.normal(0, 2048**-0.5, (2048, 2048)).astype(np.float32))

        @tf.function(input_signature=[tf.TensorSpec([None, 2048], tf.float32, name="x")])
        def __call__(self, x: Any) -> dict[str, Any]:
            for _ in range(240):
                x = tf.tanh(tf.matmul(x, self.weight))
            return {"scores": x[:, :4]}

    slow = Slow()
    tf.saved_model.save(slow, str(version), signatures={"serving_default": slow.__call__})


def _words(version: Path) -> None:
    """One string a row: split, hashed, embedded, summed."""
    import tensorflow as tf

    class Words(tf.Module):
        def __init__(self) -> None:
            random = np.random.default_rng(1)
            self.table = tf.Variable(random.normal(0, 1, (5000, 64)).astype(np.float32))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
        def __call__(self, text: Any) -> dict[str, Any]:
            letters = tf.strings.unicode_split(text, "UTF-8", errors="replace").to_tensor(shape=[None, 64])
            hashed = tf.strings.to_hash_bucket_fast(letters, 5000)
            return {"scores": tf.reduce_sum(tf.nn.embedding_lookup(self.table, hashed), axis=1)[:, :4]}

    words = Words()
    tf.saved_model.save(words, str(version), signatures={"serving_default": words.__call__})


def save_onnx(path: Path, nodes: list[Any], given: Any, outputs: list[Any], **weights: Any) -> None:
    import onnx
    from onnx import helper, numpy_helper

    named = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph(nodes, path.stem, [given], outputs, named)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def _forest(version: Path, *, zipmap: bool = False) -> None:
    """A random forest as scikit-learn's converter writes it: 100 trees of depth 6, three classes."""
    from onnx import TensorProto, helper

    of_ml = {"domain": "ai.onnx.ml", "classlabels_int64s": [0, 1, 2]}
    attributes = {**of_ml, **_trees(trees=100, depth=6), "post_transform": "NONE"}
    nodes = [helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "scores"], **attributes)]
    outputs = [helper.make_tensor_value_info("label", TensorProto.INT64, [None])]
    if zipmap:
        nodes.append(helper.make_node("ZipMap", ["scores"], ["map"], **of_ml))
        score = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
        pairs = helper.make_map_type_proto(TensorProto.INT64, score)
        outputs.append(helper.make_value_info("map", helper.make_sequence_type_proto(pairs)))
    else:
        outputs.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 3]))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, FEATURES])
    save_onnx(version / "model.onnx", nodes, given, outputs)


def _trees(*, trees: int, depth: int) -> dict[str, list[Any]]:
    """Attributes of complete binary trees with random splits; node n's children are 2n + 1 and 2n + 2."""
    random = np.random.default_rng(1)
    inner, nodes = 2**depth - 1, 2 ** (depth + 1) - 1
    ids = list(range(nodes)) * trees
    splits = [node < inner for node in ids]
    leaves = [(tree, node) for tree in range(trees) for node in range(inner, nodes)]
    return {
        "nodes_treeids": [tree for tree in range(trees) for _ in range(nodes)],
        "nodes_nodeids": ids,
        "nodes_featureids": random.integers(0, FEATURES, len(ids)).tolist(),
        "nodes_values": random.random(len(ids)).tolist(),
        "nodes_modes": ["BRANCH_LEQ" if split else "LEAF" for split in splits],
        "nodes_truenodeids": [2 * node + 1 if split else 0 for node, split in zip(ids, splits, strict=True)],
        "nodes_falsenodeids": [2 * node + 2 if split else 0 for node, split in zip(ids, splits, strict=True)],
        "class_treeids": [tree for tree, _ in leaves],
        "class_nodeids": [node for _, node in leaves],
        "class_ids": random.integers(0, 3, len(leaves)).tolist(),
        "class_weights": [1.0 / trees] * len(leaves),
    }


def _fixed_batch(version: Path) -> None:
    """The commonest mistake in exporting to ONNX: the batch dimension is fixed at 1."""
    from onnx import TensorProto, helper

    weight = np.random.default_rng(1).normal(size=(FEATURES, 4)).astype(np.float32)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, FEATURES])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    save_onnx(version / "model.onnx", nodes, given, [output], w=weight)


BUILDERS: dict[str, Callable[[Path], object]] = {
    "conv-net": _conv_net,
    "two-inputs": _two_inputs,
    "dense-slow": _dense_slow,
    "words": _words,
    "forest": _forest,
    "forest-zipmap": lambda version: _forest(version, zipmap=True),
    "fixed-batch": _fixed_batch,
    "broken": lambda version: (version / "saved_model.pb").write_bytes(b"cut off in the middle of a copy"),
}


if __name__ == "__main__":
    made = Path(sys.argv[2]) / "1"
    made.mkdir(parents=True, exist_ok=True)
    BUILDERS[sys.argv[1]](made)
