"""Which parameters does a file say, whichever server it was written for, and what of them does another server lack?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, BatchingParameters, to_dict
from batchtune.batching.triton_words import MISSING, SETTINGS

FileDialect = Literal["tfserving", "triton", "cortex", "flags", "docker", "kubernetes"]

_QUEUE: Final = "default_queue_policy.max_queue_size"
UINT32_MAX: Final = 2**32 - 1


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

        A limit on waiting requests becomes one on waiting batches and the other way round, each at least 1.
        """
        values: dict[str, Any] = to_dict(self.parameters) | dict(self.settings)
        if not self.enabled:
            values["enable_batching"] = False
        size = self.parameters.max_batch_size
        requests_a_batch = max(1, (size or DEFAULT_MAX_BATCH_SIZE) // rows_per_request)
        if on_triton:
            batches = values.pop("max_enqueued_batches", None)
            if batches is not None:
                values[_QUEUE] = min(batches * requests_a_batch, UINT32_MAX)
            alien = {*MISSING, *(name for name in self.settings if name not in SETTINGS)}
            lacking, server = [name for name in values if name in alien], "Triton"
        else:
            requests = values.pop(_QUEUE, None)
            if requests:
                values["max_enqueued_batches"] = max(1, requests // requests_a_batch)
            lacking, server = [name for name in values if name in SETTINGS], "TensorFlow Serving"
        for name in lacking:
            del values[name]
        return values, (*self.notes, *(f"{name} has no counterpart in {server}" for name in lacking))
