"""The sample model `text_classifier`, which has stages on the CPU before and after its network.

It takes a text. The network is the transformer of `imdb_transformer` from the embedding on; cleaning, the vocabulary of
18,278 pieces and the embedding are the stage before it (`text_stages.py`).
"""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from torch import nn

from batchtune.sample_models import IMDB, SEED, text_stages
from batchtune.sample_models.torch_layers import ImdbTransformer

STAGES = """\
pre: stages.py:preprocess     # cleaned, cut into pieces, looked up, embedded
post: stages.py:postprocess   # the label of the higher score
inputs: {text: {dtype: string}}
outputs:
  label: {dtype: string}
  scores: {dtype: float32, shape: [2]}
request_threads: 1            # Python runs on one CPU at a time
"""


class EmbeddedTransformer(ImdbTransformer):
    """The transformer without its table of words: takes embedded words."""

    def __init__(self) -> None:
        super().__init__()
        del self.words
        nn.init.uniform_(self.positions.weight, -0.05, 0.05)

    def forward(self, embedded: Any) -> Any:
        return self.classified(embedded + self.positions.weight)


def write_stages(version_path: Path) -> None:
    """Write the stages, the vocabulary and the embeddings beside the model."""
    vocabulary = ["", *pieces()]
    embeddings = np.random.default_rng(SEED).uniform(-0.05, 0.05, (len(vocabulary), IMDB.embedding))
    embeddings[0] = 0.0
    (version_path / "stages.yaml").write_text(STAGES, encoding="utf-8")
    (version_path / "vocabulary.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    np.save(version_path / "embeddings.npy", embeddings.astype(np.float32))
    shutil.copyfile(text_stages.__file__, version_path / "stages.py")


def pieces() -> list[str]:
    """List all strings of one, two and three letters."""
    sizes = range(1, text_stages.PIECE_MAX + 1)
    return ["".join(letters) for size in sizes for letters in product(ascii_lowercase, repeat=size)]
