"""The text-classification transformer of the Keras examples, with seeded weights.

Vocabulary 20,000, length 200, one block (embedding 32, 2 heads, feed-forward 32), global average pooling, dense 20,
softmax over 2 classes. Input `tokens`: float32 `[batch, 200]`, word indices; output `scores`: float32 `[batch, 2]`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VOCABULARY = 20_000
LENGTH = 200
EMBEDDING = 32
HEADS = 2
FEED_FORWARD = 32
SEED = 20_200_510


def build_model() -> Any:
    """The Keras model; the same weights on every machine."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(SEED)
    tokens = keras.Input(shape=(LENGTH,), dtype="float32", name="tokens")
    indices = keras.ops.cast(tokens, "int32")
    words = keras.layers.Embedding(VOCABULARY, EMBEDDING)(indices)
    positions = keras.layers.Embedding(LENGTH, EMBEDDING)(keras.ops.arange(LENGTH))
    hidden = words + positions
    attended = keras.layers.MultiHeadAttention(num_heads=HEADS, key_dim=EMBEDDING)(hidden, hidden)
    hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
    forwarded = keras.layers.Dense(FEED_FORWARD, activation="relu")(hidden)
    forwarded = keras.layers.Dense(EMBEDDING)(forwarded)
    hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + forwarded)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    pooled = keras.layers.Dense(20, activation="relu")(pooled)
    scores = keras.layers.Dense(2, activation="softmax", name="scores")(pooled)
    return keras.Model(tokens, scores, name="imdb_transformer")


def export_saved_model(version_path: Path) -> None:
    """Write the SavedModel with its signature `serving_default`: tokens -> scores.

    Keras's own exporter tracks the variables so that session-based servers (TensorFlow Serving, ours) restore them.
    """
    model = build_model()
    import keras
    import tensorflow as tf

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serving_default",
        lambda tokens: {"scores": model(tokens, training=False)},
        input_signature=[tf.TensorSpec([None, LENGTH], tf.float32, name="tokens")],
    )
    archive.write_out(str(version_path), verbose=False)
