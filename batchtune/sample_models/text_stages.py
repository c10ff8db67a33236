"""What comes before and after the text classifier: cleaned, cut into pieces, looked up, embedded; then a label.

This file is copied beside the model as its `stages.py`, and runs there alone. The vocabulary is a table of pieces, one
a line, and the embeddings are the rows of an array; a text is cut greedily into the longest pieces that are known.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_MAX = 3


def preprocess(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Turn `text` [batch] into `embedded` [batch, 200, width]; word pieces after the 200th are left out."""
    indices, embeddings = tables()
    places = 200
    rows = np.zeros((len(tensors["text"]), places), np.int64)  # 0 is padding
    for row, text in zip(rows, tensors["text"], strict=True):
        known = [indices[piece] for piece in pieces_of(cleaned(text.decode()), indices)][:places]
        row[: len(known)] = known
    return {"embedded": embeddings[rows]}


def postprocess(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return `scores` [batch, 2] as they are, and `label` [batch]: that of the higher score, negative or positive."""
    labels = np.array([b"negative", b"positive"], dtype=object)
    scores = tensors["scores"]
    return {"scores": scores, "label": labels[scores.argmax(axis=1)]}


def cleaned(text: str) -> str:
    """Return the text in lower case and without accents, with a space for each character that is no letter or digit."""
    letters = []
    for letter in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(letter)
        if kind != "Mn":
            letters.append(letter if kind[0] in "LN" else " ")
    return "".join(letters)


def pieces_of(text: str, indices: Mapping[str, int]) -> Iterator[str]:
    """Yield the pieces of each word, from its start on the longest that is a key of `indices`, of at most PIECE_MAX
    letters; a letter that begins no such piece is skipped."""
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
    """Return (indices, embeddings): word piece -> its index, and the embedding of each index, shape (pieces,
    width)."""
    folder = Path(__file__).parent
    pieces = (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    return {piece: index for index, piece in enumerate(pieces) if piece}, np.load(folder / "embeddings.npy")
