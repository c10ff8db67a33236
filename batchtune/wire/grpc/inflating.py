"""How does a compressed message become that of a call, and when is it let go of?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from batchtune.wire.grpc.framing import inflate_failure, wbits_of
from batchtune.wire.grpc.held_calls import HeldCalls
from batchtune.wire.grpc.server_call import CallSink, GrpcCall, GrpcStream, hand_over
from batchtune.wire.inflating import InflateError, Inflating, Outcome, Packed
from batchtune.wire.status import StatusError


def inflate_call(call: GrpcCall, inflating: Inflating, inflated_bytes_max: int, held: HeldCalls) -> None:
    """Inflate a call's message and dispatch it, now or later; one whose client has fallen behind waits in `held` again.

    Raises:
        StatusError: an unknown encoding, or too many wait.
    """
    content = call.message
    packed = Packed(
        content=content,
        wbits=wbits_of(call.head.encoding),
        bytes_max=inflated_bytes_max,
        go_on=partial(_go_on, call, inflated_bytes_max, held.dispatch),
        is_gone=lambda: call.cancelled,
        put_off=lambda: held.put_off(
            call, content, lambda call: inflate_call(call, inflating, inflated_bytes_max, held)
        ),
    )
    call.message = b""
    inflating.start(packed)


def _go_on(
    call: GrpcCall,
    inflated_bytes_max: int,
    dispatch: Callable[[GrpcCall], None],
    outcome: Outcome,
    release: Callable[[], None],
) -> None:
    call.sink = _ReleasingSink(call.sink, release)
    if isinstance(outcome, InflateError):
        outcome = inflate_failure(outcome, inflated_bytes_max)
    if isinstance(outcome, StatusError):
        call.fail(outcome.code, outcome.message)
        return
    call.message = outcome
    hand_over(call, dispatch)


class _ReleasingSink:
    """Takes the answer of a call that was inflated, and calls `release`."""

    __slots__ = ("_release", "_sink")

    def __init__(self, sink: CallSink, release: Callable[[], None]) -> None:
        self._sink = sink
        self._release = release

    def send_reply(self, call: GrpcCall, message: bytes) -> None:
        try:
            self._sink.send_reply(call, message)
        finally:
            self._release()

    def send_failure(self, call: GrpcCall | GrpcStream, code: str, message: str) -> None:
        try:
            self._sink.send_failure(call, code, message)
        finally:
            self._release()
