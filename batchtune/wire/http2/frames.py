"""What does an HTTP/2 frame look like? Constants, checks and writers of RFC 9113 that both ends share."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = 2**24 - 1
LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1
OUR_FRAME_BYTES = 2**20
"""Frames that we accept: a 64 MiB tensor then arrives in 64 frames, not in 4,096."""
WINDOW_UPDATE_AT = 2**30
"""Bytes received since the last WINDOW_UPDATE before the next is sent."""

# length and type in one word (length << 8 | type), flags, stream id
FRAME = struct.Struct(">IBI")
STREAM_ID = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">II")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class PeerError(Exception):
    """The peer broke a rule in a way that ends the connection; `code` goes into our GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


def error_name(code: int) -> str:
    """Name an error code; one that RFC 9113 does not list is given as hexadecimal."""
    return ErrorCode(code).name if code in ErrorCode.__members__.values() else f"error {code:#x}"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Write one frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(settings: Mapping[Setting, int]) -> bytes:
    """Write a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in settings.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Write a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, STREAM_ID.pack(increment))


def rst_stream_frame(stream_id: int, code: ErrorCode) -> bytes:
    """Write a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, STREAM_ID.pack(code))


def goaway_frame(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Write a GOAWAY frame; `reason` is its debug text."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + reason.encode()[:1000])


def header_frames(block: bytes, flags: int) -> tuple[bytes, ...]:
    """Write a header block as HEADERS and CONTINUATION frames with a gap for each frame's stream id.

    The pieces joined by the packed stream id are the frames: `STREAM_ID.pack(stream_id).join(pieces)`.
    """
    chunks = [block[at : at + DEFAULT_FRAME_BYTES] for at in range(0, len(block), DEFAULT_FRAME_BYTES)]
    pieces, before = [], b""
    for index, chunk in enumerate(chunks):
        last = END_HEADERS if index == len(chunks) - 1 else 0
        word = len(chunk) << 8 | (CONTINUATION if index else HEADERS)
        pieces.append(before + struct.pack(">IB", word, last | (0 if index else flags)))
        before = chunk
    return (*pieces, before)


def read_settings(payload: bytes, *, by_server: bool) -> Iterator[tuple[int, int]]:
    """Read the settings of a SETTINGS frame; raises PeerError for a value that RFC 9113 §6.5.2 forbids."""
    if len(payload) % _SETTING.size:
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is not a multiple of 6 bytes")
    for key, value in _SETTING.iter_unpack(payload):
        if key == Setting.ENABLE_PUSH and value > (0 if by_server else 1):
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
        if key == Setting.INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        if key == Setting.MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= LARGEST_FRAME_BYTES:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
        yield key, value


def check_control_frame(kind: int, flags: int, stream_id: int, length: int) -> None:
    """Raise PeerError when a frame other than DATA has a length or stream id that its type forbids."""
    on_connection = kind in (SETTINGS, PING, GOAWAY)
    if kind <= CONTINUATION and kind != WINDOW_UPDATE and on_connection != (stream_id == 0):
        raise PeerError(ErrorCode.PROTOCOL_ERROR, f"frame type {kind} on stream {stream_id}")
    exact = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}.get(kind, length)
    if length != exact or (kind == GOAWAY and length < 8) or (kind == SETTINGS and flags & ACK and length):
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, f"frame type {kind} of {length} bytes")


def read_goaway(payload: bytes) -> tuple[int, int, str]:
    """Read (last stream id, error code, debug text) of a GOAWAY frame that passed `check_control_frame`."""
    last, code = _GOAWAY.unpack_from(payload)
    return last & LARGEST_STREAM_ID, code, payload[8:208].decode(errors="replace")


def read_increment(payload: bytes) -> int:
    """Read a WINDOW_UPDATE's increment, 0 to 2^31-1."""
    return int.from_bytes(payload) & LARGEST_WINDOW


def without_padding(payload: bytes, flags: int) -> bytes:
    """Take padding and priority off the payload of a DATA or HEADERS frame; raises PeerError if it cannot."""
    end = len(payload)
    start = 0
    if flags & PADDED:
        if not payload:
            raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a pad length")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "padding or priority exceeds the frame")
    return payload[start:end]


_CONTINUATIONS_MAX = 64


class PartialFrame:
    """The bytes of a frame that has not arrived entirely; a byte is copied twice, however thinly it drips in."""

    __slots__ = ("held", "need")

    def __init__(self) -> None:
        self.held = bytearray()
        self.need = 0

    def join(self, data: bytes) -> bytes:
        """Add what arrived; b"" while the frame is incomplete, then everything held."""
        held = self.held
        held += data
        if len(held) < self.need:
            return b""
        whole = bytes(held)
        held.clear()
        return whole

    def keep(self, data: bytes, used: int) -> None:
        """Hold data[used:], the beginning of a frame; raises PeerError if that is larger than we accept."""
        held = self.held
        held += memoryview(data)[used:]
        self.need = HEADER_BYTES
        if len(held) >= HEADER_BYTES:
            length = FRAME.unpack_from(held)[0] >> 8
            if length > OUR_FRAME_BYTES:
                raise PeerError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            self.need += length


class HeaderBlock:
    """A header block and the flags of the HEADERS frame that began it."""

    __slots__ = ("_block", "_block_bytes_max", "_frames", "flags", "stream_id")

    def __init__(self, block_bytes_max: int) -> None:
        self.stream_id = 0  # 0: none begun
        self.flags = 0
        self._block = bytearray()
        self._frames = 0
        self._block_bytes_max = block_bytes_max

    @property
    def held_bytes(self) -> int:
        """Count the bytes of a block that is not whole."""
        return len(self._block)

    def add(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bytes | None:
        """Take a HEADERS or CONTINUATION frame; the block once it is whole, else None.

        Raises PeerError for a frame out of order and for a block too large or in too many frames.
        """
        if kind == CONTINUATION:
            if not self.stream_id or stream_id != self.stream_id:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._frames += 1
        else:
            payload = without_padding(payload, flags)
            self.stream_id, self.flags, self._frames = stream_id, flags, 0
        self._block += payload
        if len(self._block) > self._block_bytes_max or self._frames > _CONTINUATIONS_MAX:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large or in too many frames")
        if not flags & END_HEADERS:
            return None
        block = bytes(self._block)
        self._block.clear()
        self.stream_id = 0
        return block
