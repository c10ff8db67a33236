"""Which calls wait until their client has taken answers? Those of a client that has too many of them to take.

The connection is read on meanwhile: the windows that let answers go arrive on it too. While answers for all clients
together fill much of what they may, a client that has never taken any that waited has a few calls under way at a time,
one more for each whose answer left at once: one that reads nothing is known by their answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from batchtune.wire.grpc.server_call import GrpcCall, hand_over
from batchtune.wire.grpc.server_limits import ServerLimits
from batchtune.wire.shared_bytes import SharedBytes
from batchtune.wire.status import StatusError

_CALL_BYTES = 1_000  # of a call beside its message
_CALLS_PER_TURN = 8  # begun before other connections have their turn
_TIGHT_UNSENT_BYTES_MAX = 2**16  # of a client, while there is little room for all
_TRIED_CALLS_MAX = 2  # under way, of such a client, at first
_TOO_MANY = "too many calls wait for the client to read its answers"


class HeldCalls:
    """The calls of one connection that wait; `dispatch` hands a call to the service, `unsent` counts for all.

    `note_held` is called when calls come to wait that had been begun.
    """

    __slots__ = (
        "_calls",
        "_has_taken",
        "_is_behind",
        "_is_due",
        "_limits",
        "_note_held",
        "_tried",
        "_tried_max",
        "_unsent",
        "_unsent_bytes",
        "dispatch",
        "held_bytes",
    )

    def __init__(
        self,
        dispatch: Callable[[GrpcCall], None],
        limits: ServerLimits,
        unsent: SharedBytes,
        note_held: Callable[[], None],
    ) -> None:
        self.held_bytes = 0
        self.dispatch = dispatch
        self._limits = limits
        self._unsent = unsent
        self._note_held = note_held
        self._calls: deque[tuple[GrpcCall, Callable[[GrpcCall], None] | None]] = deque()
        self._is_behind = False  # the client, with its answers
        self._is_due = False  # that we go on
        self._unsent_bytes = 0
        self._has_taken = False  # answers that had to wait
        self._tried: list[GrpcCall] = []  # under way, begun while there was little room for all
        self._tried_max = _TRIED_CALLS_MAX

    def begin(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None = None) -> None:
        """Start a call whose message is whole, now or once the client has taken answers; by default, hand it over.

        Raises:
            StatusError: too much waits, or the service refuses the call.
        """
        if not self._is_behind and not self._calls and (self._has_taken or not self._unsent.is_tight):
            (start or self.dispatch)(call)
            return
        self._hold(call, start)
        self._go_on_soon()

    def put_off(self, call: GrpcCall, message: bytes, start: Callable[[GrpcCall], None]) -> bool:
        """Let a call that was begun, and not handed over, wait again if its client has fallen behind since.

        It fails where too much waits.
        """
        if not self._is_behind or call.cancelled:
            return False
        call.message = message
        try:
            self._hold(call, start)
        except StatusError as error:
            call.message = b""
            call.fail(error.code, error.message)
        self._note_held()
        return True

    def note_unsent(self, unsent_bytes: int) -> bool:
        """Take note of how much the client has to take; go on with its calls where it is little.

        True: calls wait, so that each answer matters.
        """
        bytes_max = self._limits.max_unsent_bytes
        if unsent_bytes < self._unsent_bytes:
            self._has_taken = True
        elif not self._has_taken and self._unsent.is_tight:
            bytes_max = min(bytes_max, _TIGHT_UNSENT_BYTES_MAX)
        if not unsent_bytes:
            self._tried_max += sum(call.answered and not call.cancelled for call in self._tried)
        self._unsent_bytes = unsent_bytes
        self._is_behind = unsent_bytes > bytes_max
        self._tried = [call for call in self._tried if not call.answered]
        self._go_on_soon()
        return bool(self._calls or self._tried)

    def refuse(self, message: str) -> None:
        """Fail every call that waits."""
        calls = list(self._calls)
        self._drop()
        for call, _ in calls:
            call.fail("RESOURCE_EXHAUSTED", message)

    def forget(self) -> None:
        """Drop every call that waits: the client is gone."""
        self._drop()
        self._note_held = _nothing  # it refers to the connection, which refers to us

    def _drop(self) -> None:
        self._calls.clear()
        self._tried.clear()
        self.held_bytes = 0
        self._unsent.waiting.discard(self._go_on_soon)

    def _hold(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None) -> None:
        held_bytes = self.held_bytes + len(call.message) + _CALL_BYTES
        if held_bytes > self._limits.max_buffered_bytes:
            raise StatusError("RESOURCE_EXHAUSTED", _TOO_MANY)
        self.held_bytes = held_bytes
        self._calls.append((call, start))

    def _go_on_soon(self) -> None:
        if self._calls and not self._is_behind and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        for _ in range(min(_CALLS_PER_TURN, len(self._calls))):
            is_tried = self._unsent.is_tight and not self._has_taken
            if self._is_behind:
                return
            if is_tried and len(self._tried) >= self._tried_max:
                self._unsent.waiting.add(self._go_on_soon)
                return
            call, start = self._calls.popleft()
            self.held_bytes -= len(call.message) + _CALL_BYTES
            if is_tried:
                self._tried.append(call)
            hand_over(call, start or self.dispatch)
        self._go_on_soon()


def _nothing() -> None:
    pass
