"""Where is a compressed request inflated? On the event loop if that is quick, else on a thread.

16 kB of gzip may hold 16 MB, which take 100 ms; the event loop goes on meanwhile, for zlib lets go of the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from batchtune.wire.grpc.framing import inflate
from batchtune.wire.grpc.server_call import GrpcCall, hand_over
from batchtune.wire.status import StatusError

_ON_LOOP_BYTES_MAX = 1 << 10  # gzip makes at most a thousand times as much of it: 1 MB, 2 ms
_WAITING_BYTES_MAX = 1 << 26
"""Of compressed requests that wait for the thread."""

_thread = ThreadPoolExecutor(1, "inflate")
_waiting_bytes = 0


def inflate_call(call: GrpcCall, inflated_bytes_max: int, dispatch: Callable[[GrpcCall], None]) -> None:
    """Inflate a call's message and dispatch it, now or later.

    Raises:
        StatusError: the message cannot be inflated, or too many wait.
    """
    global _waiting_bytes
    message, encoding = call.message, call.head.encoding
    if len(message) <= _ON_LOOP_BYTES_MAX:
        call.message = inflate(message, encoding, inflated_bytes_max)
        dispatch(call)
        return
    if _waiting_bytes + len(message) > _WAITING_BYTES_MAX:
        raise StatusError("RESOURCE_EXHAUSTED", "too many compressed requests wait to be inflated")
    _waiting_bytes += len(message)
    call.message = b""
    future = asyncio.get_running_loop().run_in_executor(
        _thread, _inflate_unless_gone, call, message, encoding, inflated_bytes_max
    )
    future.add_done_callback(partial(_go_on, call, len(message), dispatch))


def _inflate_unless_gone(call: GrpcCall, message: bytes, encoding: str, inflated_bytes_max: int) -> bytes:
    return b"" if call.cancelled else inflate(message, encoding, inflated_bytes_max)


def _go_on(
    call: GrpcCall, waiting_bytes: int, dispatch: Callable[[GrpcCall], None], future: asyncio.Future[bytes]
) -> None:
    global _waiting_bytes
    _waiting_bytes -= waiting_bytes
    try:
        call.message = future.result()
    except StatusError as error:
        call.fail(error.code, error.message)
    except MemoryError:
        call.fail("RESOURCE_EXHAUSTED", "there is no memory to inflate the request")
    else:
        hand_over(call, dispatch)
