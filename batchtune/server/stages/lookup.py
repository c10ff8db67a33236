"""Whom does a lookup ask: a store, a function of the model's code, or a stand-in of known latency?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.emulated import EmulatedDevice, ServiceTime
from batchtune.server.backends.model import Runner, Tensors
from batchtune.server.stages.model_code import ModelCode
from batchtune.server.stages.stages_file import LookupStage, RedisSource
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError


def open_lookup(stage: LookupStage, code: ModelCode) -> Runner:
    """What answers a batch of keys with a batch of values.

    Raises:
        StatusError: the code cannot be loaded, or the package that speaks to the store is missing.
    """
    if stage.redis is not None:
        return RedisLookup(stage.redis, stage.inputs[0].name, stage.outputs[0])
    if stage.emulated is not None:
        service_time = ServiceTime(concurrency="parallel", **stage.emulated)  # type: ignore[arg-type]
        return EmulatedDevice(service_time, rows_max=None, outputs=stage.outputs)
    return code.function("lookup.code", stage.code, stage.outputs)


class RedisLookup:
    """One MGET for a batch; a key that the store has not is a row of zeros (empty strings)."""

    def __init__(self, source: RedisSource, key_name: str, value: TensorSpec) -> None:
        try:
            import redis
        except ImportError as error:
            raise StatusError(
                "FAILED_PRECONDITION", "lookup.redis needs redis: pip install 'batchtune[redis]'"
            ) from error
        timeout_s = source.timeout_ms / 1000
        self._failure = redis.RedisError
        self._client = redis.Redis.from_url(
            source.url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )
        self._where = _without_password(source.url)
        self._prefix = source.prefix.encode()
        self._key_name = key_name
        self._value = value

    def __call__(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """The values of a batch of keys.

        Raises:
            StatusError: UNAVAILABLE where the store does not answer, INTERNAL where a value has another size.
        """
        given = inputs[self._key_name]
        keys = [self._prefix + _key(key) for key in given.ravel().tolist()]
        try:
            values = self._client.mget(keys) if keys else []
        except self._failure as error:
            raise StatusError("UNAVAILABLE", f"lookup: {self._where}: {error}") from error
        array = _rows_of(values, keys, self._value)
        return {self._value.name: array.reshape(*given.shape, *array.shape[1:])}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _key(key: Any) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def _rows_of(values: Sequence[bytes | None], keys: Sequence[bytes], spec: TensorSpec) -> NDArray[Any]:
    shape = tuple(size or 0 for size in (spec.shape or (None,))[1:])
    if spec.dtype == "object":
        texts = np.empty(len(values), dtype=object)
        texts[:] = [value or b"" for value in values]
        return texts
    rows = np.zeros((len(values), *shape), np.dtype(spec.dtype))
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        if value is None:
            continue
        if len(value) != rows[row].nbytes:
            raise StatusError(
                "INTERNAL",
                f"lookup: the value of {key.decode(errors='replace')!r} has {len(value)} bytes; {spec.dtype} "
                f"{list(shape)} has {rows[row].nbytes}",
            )
        rows[row] = np.frombuffer(value, rows.dtype).reshape(shape)
    return rows


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
