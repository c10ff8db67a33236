"""Which parameters does a file say, whichever server it was written for, and what of them does another server lack?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    BatchingParameters,
    to_dict,
)
from batchtune.batching.triton_words import MISSING, SETTINGS
from batchtune.errors import BatchingParametersError

FileDialect = Literal["tfserving", "triton", "cortex", "flags", "docker", "kubernetes"]

_QUEUE: Final = "default_queue_policy.max_queue_size"
UINT32_MAX: Final = 2**32 - 1
_NO_LIMIT_HERE: Final = (
    f"max_enqueued_batches is absent, in TensorFlow Serving {DEFAULT_MAX_ENQUEUED_BATCHES}; "
    "Triton's queue has no limit"
)
_LIMIT_HERE: Final = (
    f"{_QUEUE} is absent or 0, in Triton no limit; TensorFlow Serving refuses what comes when "
    f"{DEFAULT_MAX_ENQUEUED_BATCHES} batches wait, unless max_enqueued_batches says otherwise"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingFile:
    """What a file says. `enabled` False: no batching, and the parameters only count once it is switched on.

    `settings` are Triton's own fields of `dynamic_batching`, or flags of the server, as a scenario writes them; `notes`
    are what the file says and nobody here can act on.
    """

    dialect: FileDialect
    parameters: BatchingParameters
    enabled: bool = True
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()

    def knobs(self, *, on_triton: bool, rows_per_request: int = 1) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The values as a scenario's `fixed` holds them for such a server, and what that server cannot be told.

        A limit on waiting requests becomes one on waiting batches and the other way round, each at least 1; where the
        file has none it is told that the other server's default differs.

        Raises:
            BatchingParametersError: a Triton's file without `max_batch_size`, for TensorFlow Serving.
        """
        values: dict[str, Any] = to_dict(self.parameters) | dict(self.settings)
        if not self.enabled:
            values["enable_batching"] = False
        size, notes = self.parameters.max_batch_size, list(self.notes)
        translated = self.enabled and on_triton != (self.dialect == "triton")
        in_a_batch = requests_a_batch(size, rows_per_request)
        if on_triton:
            batches = values.pop("max_enqueued_batches", None)
            if batches is not None:
                values[_QUEUE] = min(batches * in_a_batch, UINT32_MAX)
            elif translated:
                notes.append(_NO_LIMIT_HERE)
            alien = {*MISSING, *(name for name in self.settings if name not in SETTINGS)}
            lacking, server = [name for name in values if name in alien], "Triton"
        else:
            if translated and size is None:
                raise BatchingParametersError(
                    "max_batch_size is absent: Triton makes no batches then, unless the model's backend fills it in",
                    hint="write the one that Triton reports (GET /v2/models/MODEL/config) into the file",
                )
            requests = values.pop(_QUEUE, None)
            if requests:
                values["max_enqueued_batches"] = max(1, requests // in_a_batch)
            elif translated:
                notes.append(_LIMIT_HERE)
            lacking, server = [name for name in values if name in SETTINGS], "TensorFlow Serving"
        for name in lacking:
            del values[name]
        return values, (*notes, *(f"{name} has no counterpart in {server}" for name in lacking))


def requests_a_batch(max_batch_size: int | None, rows_per_request: int) -> int:
    """How many requests fill a batch, at least 1; a size of None is TensorFlow Serving's default."""
    return max(1, (max_batch_size or DEFAULT_MAX_BATCH_SIZE) // rows_per_request)
