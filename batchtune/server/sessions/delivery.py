"""How do other threads reach the event loop?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batchtune.server.sessions.request import Completion
from batchtune.wire.status import StatusError

_logger = logging.getLogger(__name__)


class LoopPort:
    """Hands answers and functions to one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon_threadsafe

    def deliver(self, completions: list[Completion]) -> None:
        """Let the loop call each completion; one wake-up of the loop for all of them."""
        self._call_soon(_complete, completions)

    def run_soon(self, function: Callable[[], None]) -> None:
        """Let the loop call `function` after what it has been given before."""
        self._call_soon(function)


def _complete(completions: list[Completion]) -> None:
    for done, outputs, error in completions:
        try:
            done(outputs, error)
        except Exception:
            _logger.exception("an answer could not be given")
            if error is None:
                _complete([(done, None, StatusError("INTERNAL", "the server failed to write the answer"))])
