"""How are the sample models written in Keras, and how do they become a SavedModel?"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.sample_models.sizes import CLASSES, EMBEDDING, FEED_FORWARD, HEADS, LENGTH, SEED, VOCABULARY

PLACES = 200
PIECE_MAX = 3
LABELS = np.array([b"negative", b"positive"], dtype=object)


def preprocess(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """`text` [batch] to `embedded` [batch, 200, width]: the pieces after the 200th are left out."""
    indices, embeddings = tables()
    rows = np.zeros((len(tensors["text"]), PLACES), np.int64)  # 0 is padding
    for row, text in zip(rows, tensors["text"], strict=True):
        known = [indices[piece] for piece in pieces_of(cleaned(text.decode()), indices)][:PLACES]
        row[: len(known)] = known
    return {"embedded": embeddings[rows]}


def postprocess(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """`scores` [batch, 2], and the `label` of the higher one."""
    scores = tensors["scores"]
    return {"scores": scores, "label": LABELS[scores.argmax(axis=1)]}


def cleaned(text: str) -> str:
    """Small letters without accents; what is no letter or digit parts words."""
    letters = []
    for letter in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(letter)
        if kind != "Mn":
            letters.append(letter if kind[0] in "LN" else " ")
    return "".join(letters)


def pieces_of(text: str, indices: Mapping[str, int]) -> Iterator[str]:
    """Each word's longest known pieces, from its start; a letter that is not known is passed over."""
    for word in text.split():
        start = 0
        while start < len(word):
            sizes = (size for size in range(PIECE_MAX, 0, -1) if word[start : start + size] in indices)
            size = next(sizes, 0)
            if size:
                yield word[start : start + size]
            start += size or 1


@cache
def tables() -> tuple[dict[str, int], NDArray[np.float32]]:
    """The index of each piece, and the embedding of each index."""
    folder = Path(__file__).parent
    pieces = (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    return {piece: index for index, piece in enumerate(pieces) if piece}, np.load(folder / "embeddings.npy")


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
    """The named model; the same weights on every machine."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    keras.utils.set_random_seed(SEED)
    return {"imdb_transformer": _imdb_transformer, "resnet50": _resnet50}[name]()


def _imdb_transformer() -> Any:
    """The text classifier of the Keras examples: one transformer block over 200 words, two classes."""
    import keras

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


def _resnet50() -> Any:
    """Keras's own ResNet50 behind a transposition, so that it takes the images that the torch one takes."""
    import keras

    image = keras.Input(shape=(3, 224, 224), dtype="float32", name="image")
    rows_columns_channels = keras.layers.Permute((2, 3, 1))(image)
    network = keras.applications.ResNet50(weights=None, classes=CLASSES, input_shape=(224, 224, 3))
    return keras.Model(image, network(rows_columns_channels), name="resnet50")
