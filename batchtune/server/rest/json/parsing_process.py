"""Parses large JSON bodies in the parsing process, so that they do not block the event loop.

A thread would not help, since the parser holds the interpreter's lock. Times for 1 MB: floats in rows of 200
4 ms, short integers 18 ms, rows of one number 84 ms, a body that is no tensor 290 ms, Examples 350 ms. So
predict bodies up to 128 KiB (11 ms, faulty ones 38 ms) and others up to 32 KiB (11 ms) are parsed on the
loop. The process is started for the first larger body.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, TypeVar

from numpy.typing import NDArray

from batchtune.server.backends.model import example_inputs
from batchtune.server.memory import share_one_heap, trim
from batchtune.server.rest.json.predict_request import parse_examples, parse_predict
from batchtune.wire.signature import Signature
from batchtune.wire.status import FAULT, StatusError

PREDICT_ON_LOOP_BYTES_MAX = 128 << 10
EXAMPLES_ON_LOOP_BYTES_MAX = 32 << 10

_Read = TypeVar("_Read")


class LargeBodies:
    """Parses bodies one at a time in the parsing process; only for the thread of one event loop."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._waiting_bytes = 0

    async def predict(
        self, body: bytes, signatures: Mapping[str, Signature] | StatusError
    ) -> tuple[str, bool, dict[str, NDArray[Any]]]:
        """Parse the body of a predict call; return (signature name, whether the body is by row, input name -> array).

        signatures: the model's, by name; or the error that there is no model, raised if the body is well formed. Raises
        StatusError: INVALID_ARGUMENT or UNIMPLEMENTED for a wrong body, RESOURCE_EXHAUSTED while too many bytes wait,
        INTERNAL where the process has died.
        """
        return await self._run(read_predict, body, signatures)

    async def examples(self, body: bytes) -> tuple[str, dict[str, NDArray[Any]] | StatusError]:
        """Parse the body of a classify or regress call; return (signature name or "", input name -> array).

        If there are too many Examples, the second is a StatusError instead of raising it, so that a missing model is
        reported first. Raises StatusError: INVALID_ARGUMENT for any other fault, RESOURCE_EXHAUSTED while too many
        bytes wait, INTERNAL where the process has died.
        """
        return await self._run(read_examples, body)

    def close(self) -> None:
        """End the process when it has parsed its present body; bodies that wait for it are discarded."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, read: Callable[..., _Read | StatusError], body: bytes, *arguments: Any) -> _Read:
        waiting_bytes_max = 256 << 20  # of bodies: four of the largest that are taken by default
        if self._waiting_bytes + len(body) > waiting_bytes_max:
            raise StatusError("RESOURCE_EXHAUSTED", "Too many large request bodies wait to be read")
        self._waiting_bytes += len(body)
        pool = self._pool
        trimmed_bytes_min = 1 << 20  # of a body after which the process lets go of memory: 5 ms
        try:
            if pool is None:
                context = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(1, mp_context=context, initializer=_live_with_the_server)
                self._pool = pool
            outcome = await asyncio.get_running_loop().run_in_executor(pool, read, body, *arguments)
            if len(body) > trimmed_bytes_min:
                with suppress(RuntimeError):  # the pool has ended
                    pool.submit(trim)  # its queue, too, holds what it sent until it sends something else
        except BrokenProcessPool as error:  # killed for its memory, say; the next body starts another
            if self._pool is pool:
                self.close()
            raise StatusError("INTERNAL", FAULT) from error
        finally:
            self._waiting_bytes -= len(body)
        if isinstance(outcome, StatusError):
            raise StatusError(outcome.code, outcome.message)
        return outcome


def read_predict(
    body: bytes, signatures: Mapping[str, Signature] | StatusError
) -> tuple[str, bool, dict[str, NDArray[Any]]] | StatusError:
    """Parse a predict body, in the parsing process. Returns the tuple of `LargeBodies.predict`, or its error.

    An error is returned, not raised: a raised one would keep the body in memory.
    """
    try:
        return parse_predict(body, lambda name: find_signature(signatures, name))
    except StatusError as error:
        return StatusError(error.code, error.message)


def read_examples(body: bytes) -> tuple[str, dict[str, NDArray[Any]] | StatusError] | StatusError:
    """Parse a classify or regress body, in the parsing process.

    Returns (signature name, input name -> array); (signature name, StatusError) if its examples are wrong; StatusError
    if the body is no such request.
    """
    try:
        name, message = parse_examples(body)
    except StatusError as error:
        return StatusError(error.code, error.message)
    try:
        return name, example_inputs(message)
    except StatusError as error:
        return name, StatusError(error.code, error.message)


def find_signature(signatures: Mapping[str, Signature] | StatusError, name: str) -> Signature:
    """Return the signature called `name` for a predict call.

    Raises StatusError: `signatures` itself if it is an error, or INVALID_ARGUMENT for an unknown name.
    """
    if isinstance(signatures, StatusError):
        raise StatusError(signatures.code, signatures.message)
    signature = signatures.get(name)
    if signature is None:
        raise StatusError("INVALID_ARGUMENT", f'Serving signature name: "{name}" not found in signature def')
    return signature


def _live_with_the_server() -> None:
    """Set up the parsing process: it ignores Ctrl-C, and ends whenever the server process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    share_one_heap()
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(0)
