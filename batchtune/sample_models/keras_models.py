"""The sample models in Keras, exported as SavedModels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchtune.sample_models import IMAGE_CLASSES, IMDB, SEED


def write_saved_model(name: str, version_path: Path) -> None:
    """Write the SavedModel with its signature `serving_default`; its output is called `scores`.

    Keras's own exporter tracks the variables so that session-based servers (TensorFlow Serving, ours) restore them.
    """
    model = keras_model(name)
    import keras
    import tensorflow as tf

    (taken,) = model.inputs
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serving_default",
        lambda given: {"scores": model(given, training=False)},
        input_signature=[tf.TensorSpec(taken.shape, tf.float32, name=taken.name)],
    )
    archive.write_out(str(version_path), verbose=False)


def keras_model(name: str) -> Any:
    """Make the named model, with the same weights on every machine."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(SEED)
    return {"imdb_transformer": _imdb_transformer, "resnet50": _resnet50}[name]()


def _imdb_transformer() -> Any:
    """Make the text classifier of the Keras examples: one transformer block over 200 words, two classes."""
    import keras

    tokens = keras.Input(shape=(IMDB.length,), dtype="float32", name="tokens")
    indices = keras.ops.cast(tokens, "int32")
    words = keras.layers.Embedding(IMDB.vocabulary, IMDB.embedding)(indices)
    positions = keras.layers.Embedding(IMDB.length, IMDB.embedding)(keras.ops.arange(IMDB.length))
    hidden = words + positions
    attended = keras.layers.MultiHeadAttention(num_heads=IMDB.heads, key_dim=IMDB.embedding)(hidden, hidden)
    hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
    forwarded = keras.layers.Dense(IMDB.feed_forward, activation="relu")(hidden)
    forwarded = keras.layers.Dense(IMDB.embedding)(forwarded)
    hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + forwarded)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    pooled = keras.layers.Dense(20, activation="relu")(pooled)
    scores = keras.layers.Dense(2, activation="softmax", name="scores")(pooled)
    return keras.Model(tokens, scores, name="imdb_transformer")


def _resnet50() -> Any:
    """Make Keras's own ResNet50 with a transposition before it, so that it takes the images that torch's one takes."""
    import keras

    image = keras.Input(shape=(3, 224, 224), dtype="float32", name="image")
    rows_columns_channels = keras.layers.Permute((2, 3, 1))(image)
    network = keras.applications.ResNet50(weights=None, classes=IMAGE_CLASSES, input_shape=(224, 224, 3))
    return keras.Model(image, network(rows_columns_channels), name="resnet50")
