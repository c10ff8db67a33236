"""What does a model take and give, whichever protocol asks for it?"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a signature says of one tensor; the batch dimension is part of `shape`.

    `dtype` is numpy's name ("object" for strings); `shape` None: unknown rank; a None dimension: any size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A callable of a model: its inputs and outputs, each sorted by name."""

    name: str
    method_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
