"""The sample models in PyTorch, exported as files that a server loads.

`model.pt2` (torch.export) or `model.pt` (TorchScript), with a free batch dimension, and `signature.yaml` beside it,
which names the tensors. Each batch normalisation is folded into the convolution before it, as any runtime for
inference does.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import nn

from batchtune.sample_models import IMAGE_CLASSES, IMDB, SEED, SEQUENCE, TEXT_CLASSES, TEXT_LINE, text_stages
from batchtune.sample_models.torch_layers import (
    ImdbTransformer,
    SequenceTransformer,
    TextRecognition,
    WordRelevance,
    imdb_transformer,
    resnet50,
)

# The model text_classifier, which has stages on the CPU before and after its network.
#
# It takes a text. The network is the transformer of imdb_transformer from the embedding on; cleaning, the vocabulary of
# 18,278 pieces and the embedding are the stage before it (text_stages.py).

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
    """`ImdbTransformer` without its table of words: maps `embedded` [batch, 200, width] to `scores` [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        del self.words
        nn.init.uniform_(self.positions.weight, -0.05, 0.05)

    def forward(self, embedded: Any) -> Any:
        return self.classified(embedded + self.positions.weight)


def write_stages(version_path: Path) -> None:
    """Write the stages, the vocabulary and the embeddings into the version directory; the vocabulary has every word
    piece of up to three letters from a to z."""
    sizes = range(1, text_stages.PIECE_MAX + 1)
    pieces = ("".join(letters) for size in sizes for letters in product(ascii_lowercase, repeat=size))
    vocabulary = ["", *pieces]
    embeddings = np.random.default_rng(SEED).uniform(-0.05, 0.05, (len(vocabulary), IMDB.embedding))
    embeddings[0] = 0.0
    (version_path / "stages.yaml").write_text(STAGES, encoding="utf-8")
    (version_path / "vocabulary.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    np.save(version_path / "embeddings.npy", embeddings.astype(np.float32))
    shutil.copyfile(text_stages.__file__, version_path / "stages.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One model: what builds it, and the names and shapes of its tensors without the batch dimension.

    `length_max`: the first dimension of its input is free, up to this; None: it is fixed. `beside` writes further files
    into the version directory.
    """

    build: Callable[[], Any]
    input_name: str
    input_shape: tuple[int, ...]
    output_name: str
    output_shape: tuple[int, ...]
    input_dtype: str = "float32"
    length_max: int | None = None
    beside: Callable[[Path], None] | None = None

    def signature_yaml(self) -> str:
        """Return the text of the model's signature.yaml: names, dtypes and shapes of its input and output."""
        given, gives = list(self.input_shape), list(self.output_shape)
        if self.length_max is not None:
            given[0] = -1
        return (
            f"inputs: {{{self.input_name}: {{dtype: {self.input_dtype}, shape: {given}}}}}\n"
            f"outputs: {{{self.output_name}: {{dtype: float32, shape: {gives}}}}}\n"
        )


FORMS = {
    "imdb_transformer": Form(
        build=imdb_transformer,
        input_name="tokens",
        input_shape=(IMDB.length,),
        output_name="scores",
        output_shape=(2,),
    ),
    "sequence_transformer": Form(
        build=SequenceTransformer,
        input_name="tokens",
        input_shape=(SEQUENCE.length,),
        output_name="scores",
        output_shape=(2,),
        input_dtype="int64",
        length_max=SEQUENCE.length,
    ),
    "text_classifier": Form(
        build=EmbeddedTransformer,
        input_name="embedded",
        input_shape=(IMDB.length, IMDB.embedding),
        output_name="scores",
        output_shape=(2,),
        beside=write_stages,
    ),
    "word_relevance": Form(
        build=WordRelevance,
        input_name="tokens",
        input_shape=(IMDB.length,),
        output_name="relevance",
        output_shape=(1,),
    ),
    "text_recognition": Form(
        build=TextRecognition,
        input_name="image",
        input_shape=(1, *TEXT_LINE),
        output_name="logits",
        output_shape=(TEXT_LINE[1] // 4 + 1, TEXT_CLASSES),  # as many places as its features are wide
    ),
    "resnet50": Form(
        build=resnet50,
        input_name="image",
        input_shape=(3, 224, 224),
        output_name="scores",
        output_shape=(IMAGE_CLASSES,),
    ),
}


def torch_model(name: str) -> Any:
    """Make the named model for inference, with seeded weights, equal on every machine; `folded` is not applied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return FORMS[name].build().eval()


def write_program(
    name: str, version_path: Path, *, torchscript: bool = False, module: Any | None = None
) -> None:
    """Write the version directory of the model `name`, which the server loads. `module`: the network to write; None:
    the full-sized one."""
    form = FORMS[name]
    module = folded(torch_model(name) if module is None else module)
    example = torch.zeros(2, *form.input_shape, dtype=getattr(torch, form.input_dtype))
    version_path.mkdir(parents=True)
    (version_path / "signature.yaml").write_text(form.signature_yaml(), encoding="utf-8")
    if form.beside is not None:
        form.beside(version_path)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # both exporters warn of what they themselves do
        if torchscript:
            torch.jit.save(torch.jit.trace(module, (example,)), str(version_path / "model.pt"))
            return
        sizes = {0: torch.export.Dim("batch", min=1)}
        if form.length_max is not None:
            sizes[1] = torch.export.Dim("length", min=1, max=form.length_max)
        # What 2.6 exports in its strict way it cannot always read again.
        program = torch.export.export(module, (example,), dynamic_shapes=(sizes,), strict=False)
        torch.export.save(program, version_path / "model.pt2")


def folded(module: Any) -> Any:
    """Merge every batch normalisation of a module into the convolution before it, in place; returns the module."""
    for name, child in list(module.named_children()):
        if isinstance(module, nn.Sequential) and isinstance(child, nn.BatchNorm2d):
            before = str(int(name) - 1)
            fused = torch.nn.utils.fusion.fuse_conv_bn_eval(module.get_submodule(before), child)
            setattr(module, before, fused)
            setattr(module, name, nn.Identity())
        else:
            folded(child)
    return module
