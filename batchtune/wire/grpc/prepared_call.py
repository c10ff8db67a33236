"""How is a unary call written once, to be sent many times?"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.wire.grpc.client_answers import HEADER_LIST_BYTES
from batchtune.wire.grpc.framing import PREFIX, encode_timeout
from batchtune.wire.http2 import frames as h2
from batchtune.wire.http2.frames import Setting
from batchtune.wire.http2.header_blocks import encode_block

OPENING = (
    h2.PREFACE
    + h2.settings_frame(
        {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW,
            Setting.MAX_FRAME_SIZE: h2.OUR_FRAME_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
        }
    )
    + h2.window_update_frame(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)
)
"""What a client begins with: the preface, no dynamic table, no push, the widest windows."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request ready for any stream of any connection: its frames with gaps for the stream id."""

    at_once: tuple[bytes, ...]
    head: tuple[bytes, ...]
    body: bytes
    body_bytes: int


def prepare_call(
    path: str,
    authority: str,
    message: bytes,
    *,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    timeout_s: float | None = None,
    scheme: str = "http",
) -> PreparedCall:
    """Encode a unary call; `path` is "/package.Service/Method", metadata keys are lower case.

    `timeout_s` travels as grpc-timeout and is enforced by the server only. Values of keys that end in "-bin" are
    bytes. Raises ValueError for a key, a value or a timeout that cannot be sent.
    """
    fields = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "batchtune")]
    if timeout_s is not None:
        fields.append(("grpc-timeout", encode_timeout(timeout_s)))
    fields += [_metadata_field(key, value) for key, value in metadata]
    head = h2.header_frames(encode_block(fields), 0)
    body = PREFIX.pack(0, len(message)) + message
    at_once = head
    if len(body) <= h2.LARGEST_FRAME_BYTES:
        data_head = struct.pack(">IB", len(body) << 8 | h2.DATA, h2.END_STREAM)
        at_once = (*head[:-1], head[-1] + data_head, body)
    return PreparedCall(at_once, head, body, len(body))


def _metadata_field(key: str, value: str | bytes) -> tuple[str, str]:
    if (
        not key
        or key != key.lower()
        or not key.isascii()
        or not key.isprintable()
        or key[0] == ":"
        or " " in key
    ):
        raise ValueError(f"{key!r} is no metadata key: lower-case ASCII letters, digits, '-', '_' and '.'")
    if key.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return key, base64.b64encode(raw).rstrip(b"=").decode()
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not (text.isprintable() or not text):
        raise ValueError(f"the value of metadata {key!r} is not printable ASCII")
    return key, text
