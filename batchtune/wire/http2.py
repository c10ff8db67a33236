"""HTTP/2 as both ends share it (RFC 9113): frames, their checks and order, windows of the sender, header blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = 2**24 - 1
LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1
OUR_FRAME_BYTES = 2**20
"""Largest payload of a frame that we accept, in bytes: a 64 MiB tensor then arrives in 64 frames, not in 4,096."""
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
    """The peer broke a rule in a way that ends the connection; `code` and `reason` go into our GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


def error_name(code: int) -> str:
    """Return the name of an error code; `error 0x…` for one that RFC 9113 does not list."""
    return ErrorCode(code).name if code in ErrorCode.__members__.values() else f"error {code:#x}"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Write one frame: its header of 9 bytes, then `payload`, which must be shorter than 2^24 bytes (RFC 9113 §4.1)."""
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
    """Write a GOAWAY frame; `reason` is its debug text, of which the first 1,000 bytes are sent."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + reason.encode()[:1000])


def header_frames(block: bytes, flags: int) -> tuple[bytes, ...]:
    """Write a header block as HEADERS and CONTINUATION frames, in pieces with a gap for each frame's stream
    id.

    `STREAM_ID.pack(stream_id).join(pieces)` are the frames of a stream.
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
    """Yield (setting, value) of a SETTINGS frame; raises PeerError for a value that RFC 9113 §6.5.2 forbids.

    `by_server`: whether a server sent the frame; it may not enable push.
    """
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
    """Return (last stream id, error code, debug text) of a GOAWAY frame that passed `check_control_frame`."""
    last, code = _GOAWAY.unpack_from(payload)
    return last & LARGEST_STREAM_ID, code, payload[8:208].decode(errors="replace")


def read_increment(payload: bytes) -> int:
    """Return the increment of a WINDOW_UPDATE, 0 to 2^31-1."""
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


class PartialFrame:
    """Stores the beginning of a frame until the rest arrives; copies each byte twice, however small the pieces."""

    __slots__ = ("held", "need")

    def __init__(self) -> None:
        self.held = bytearray()
        self.need = 0

    def join(self, data: bytes) -> bytes:
        """Add the bytes that arrived. Return b"" while the frame is incomplete, then all stored bytes."""
        held = self.held
        held += data
        if len(held) < self.need:
            return b""
        whole = bytes(held)
        held.clear()
        return whole

    def keep(self, data: bytes, used: int) -> None:
        """Store data[used:], the beginning of a frame; raises PeerError if that frame is larger than we accept."""
        held = self.held
        held += memoryview(data)[used:]
        self.need = HEADER_BYTES
        if len(held) >= HEADER_BYTES:
            length = FRAME.unpack_from(held)[0] >> 8
            if length > OUR_FRAME_BYTES:
                raise PeerError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            self.need += length


class HeaderBlock:
    """Joins a header block that comes in several frames.

    `stream_id`: stream of the incomplete block, 0: there is none. `flags`: those of the HEADERS frame that began it.
    """

    __slots__ = ("_block", "_block_bytes_max", "_frames", "flags", "stream_id")

    def __init__(self, block_bytes_max: int) -> None:
        self.stream_id = 0  # 0: none begun
        self.flags = 0
        self._block = bytearray()
        self._frames = 0
        self._block_bytes_max = block_bytes_max

    @property
    def held_bytes(self) -> int:
        """Bytes stored of an incomplete block; 0: there is none."""
        return len(self._block)

    def add(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bytes | None:
        """Add a HEADERS or CONTINUATION frame. Return the block when it is whole, else None.

        Raises PeerError for a frame out of order, and for a block that is too large or in too many frames.
        """
        if kind == CONTINUATION:
            if not self.stream_id or stream_id != self.stream_id:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._frames += 1
        else:
            payload = without_padding(payload, flags)
            self.stream_id, self.flags, self._frames = stream_id, flags, 0
        self._block += payload
        continuations_max = 64
        if len(self._block) > self._block_bytes_max or self._frames > continuations_max:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large or in too many frames")
        if not flags & END_HEADERS:
            return None
        block = bytes(self._block)
        self._block.clear()
        self.stream_id = 0
        return block


class _Body:
    """What is left to send of one stream: `data` from `sent` on, then `tail`.

    `tail`: frames that follow the last DATA frame; None: that frame ends the stream. `window`: bytes that the stream's
    window allows. `data` becomes a bytearray where more is added: to join bytes would take the square of their number.
    """

    __slots__ = ("data", "sent", "tail", "window")

    def __init__(self, data: bytes, tail: bytes | None, window: int) -> None:
        self.data: bytes | bytearray = data
        self.sent = 0
        self.tail = tail
        self.window = window


class OutgoingFlow:
    """The peer's receive windows, as the sender counts them, and the bodies that wait for them.

    `window`: bytes that the connection's window allows; `at_once`: largest body that a stream without a waiting body
    may send in one DATA frame, -1 while any stream's body waits. Fast path of both ends: a body of n bytes with `n <=
    flow.window and n <= flow.at_once` may be written in one frame; the writer then subtracts n from `window`. All else
    goes through `queue` and `pump`.
    """

    __slots__ = ("_frame_bytes", "_ready", "_waiting", "at_once", "initial_window", "queued_bytes", "window")

    def __init__(self) -> None:
        self.window = DEFAULT_WINDOW
        self.at_once = DEFAULT_FRAME_BYTES
        self.queued_bytes = 0  # of bodies not entirely written; each is in memory to its last byte
        self.initial_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME_BYTES
        self._waiting: dict[int, _Body] = {}
        self._ready: dict[int, _Body] = {}  # those that wait for the connection's window only

    @property
    def waiting(self) -> int:
        """Number of streams whose body has not been written entirely."""
        return len(self._waiting)

    def waits(self, stream_id: int) -> bool:
        """Whether part of this stream's body has not been written."""
        return stream_id in self._waiting

    def extend(self, stream_id: int, data: bytes, tail: bytes | None) -> None:
        """Append data to a body of this stream that already waits, and replace the frames that follow it by `tail`."""
        body = self._waiting[stream_id]
        if data:
            self.queued_bytes += len(data) - body.sent
            body.data = body.data if isinstance(body.data, bytearray) else bytearray(body.data)
            del body.data[: body.sent]
            body.data += data
            body.sent = 0
        body.tail = tail

    def queue(self, stream_id: int, data: bytes, tail: bytes | None, extra_window: int = 0) -> None:
        """Let a stream's body wait for the windows; `pump` writes it. For a stream whose body waits already: `extend`.

        `tail`: frames to write after its last DATA frame; None: that frame ends the stream. `extra_window`: bytes that
        WINDOW_UPDATEs have granted this stream above the initial window.
        """
        body = self._waiting[stream_id] = _Body(data, tail, self.initial_window + extra_window)
        if body.window > 0 or not data:
            self._ready[stream_id] = body
        self.queued_bytes += len(data)
        self.at_once = -1

    def drop(self, stream_id: int) -> bool:
        """Discard what is left of a stream's body. Return whether any was left."""
        body = self._waiting.pop(stream_id, None)
        if body is None:
            return False
        self._ready.pop(stream_id, None)
        self.queued_bytes -= len(body.data)
        self._set_at_once()
        return True

    def pump(self, out: list[bytes]) -> list[int]:
        """Append to `out` all frames that the windows allow, the oldest stream's first; return the ids of the finished
        streams.

        Streams whose own window is closed are not looked at: a client may have thousands of them.
        """
        finished: list[int] = []
        closed: list[int] = []
        for stream_id, body in self._ready.items():
            total = len(body.data)
            while True:
                size = min(total - body.sent, body.window, self.window, self._frame_bytes)
                if size <= 0 and body.sent < total:
                    if body.window <= 0:
                        closed.append(stream_id)
                    break
                chunk = bytes(body.data[body.sent : body.sent + size])
                body.sent += size
                body.window -= size
                self.window -= size
                done = body.sent == total
                out.append(frame(DATA, END_STREAM if done and body.tail is None else 0, stream_id, chunk))
                if done:
                    self.queued_bytes -= total
                    out.append(body.tail or b"")
                    finished.append(stream_id)
                    break
            if self.window <= 0:
                break
        for stream_id in closed:
            del self._ready[stream_id]
        for stream_id in finished:
            del self._waiting[stream_id], self._ready[stream_id]
        if finished:
            self._set_at_once()
        return finished

    def grow_connection(self, increment: int) -> None:
        """Apply a WINDOW_UPDATE of stream 0; raises PeerError when it is 0 or overflows."""
        if increment == 0:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        self.window += increment
        if self.window > LARGEST_WINDOW:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "connection window above 2^31-1")

    def grow_stream(self, stream_id: int, increment: int) -> bool:
        """Apply a WINDOW_UPDATE to a stream whose body waits; return False if its window then exceeds 2^31-1."""
        body = self._waiting[stream_id]
        body.window += increment
        if body.window > 0:
            self._ready[stream_id] = body
        return body.window <= LARGEST_WINDOW

    def set_initial_window(self, size: int) -> None:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE: the windows of streams whose body waits change by the difference (RFC
        9113 §6.9.2).

        Raises PeerError if a window then exceeds 2^31-1.
        """
        change = size - self.initial_window
        self.initial_window = size
        for stream_id, body in self._waiting.items():
            body.window += change
            if body.window > 0:
                self._ready[stream_id] = body
            if body.window > LARGEST_WINDOW:
                raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
        self._set_at_once()

    def set_frame_bytes(self, size: int) -> None:
        """Apply SETTINGS_MAX_FRAME_SIZE."""
        self._frame_bytes = size
        self._set_at_once()

    def _set_at_once(self) -> None:
        self.at_once = -1 if self._waiting else min(self.initial_window, self._frame_bytes)


# Header blocks, where neither end keeps a dynamic table: both announce SETTINGS_HEADER_TABLE_SIZE 0. A block is then a
# pure function of its fields, the same for every stream and connection, so that each distinct block is decoded by the
# hpack library once and remembered.

Fields = tuple[tuple[str, str], ...]

EMPTY_TABLE = b"\x20"
"""Dynamic table size update to 0: what RFC 7541 §4.2 asks of an encoder whose peer allows no table."""


def encode_block(fields: Iterable[tuple[str, str]], *, opens_table: bool = True) -> bytes:
    """Encode header fields without a dynamic table, and without Huffman's code.

    opens_table: begin with EMPTY_TABLE, which the first block of a connection needs; False: for later blocks.
    """
    encoder = hpack.Encoder()
    encoder.header_table_size = 0  # which it says first
    pairs = [(name.encode("ascii"), value.encode("latin-1")) for name, value in fields]
    block: bytes = encoder.encode(pairs, huffman=False)
    return block if opens_table else block.removeprefix(EMPTY_TABLE)


def new_decoder(*, table_bytes: int, header_list_bytes: int) -> hpack.Decoder:
    """Make a decoder for a peer with a dynamic table of at most `table_bytes`; the fields of a block may take
    `header_list_bytes`."""
    decoder = hpack.Decoder(max_header_list_size=header_list_bytes)
    decoder.header_table_size = table_bytes
    decoder.max_allowed_table_size = table_bytes
    return decoder


def decode_block(decoder: hpack.Decoder, block: bytes) -> Fields:
    """Decode a header block into (name, value) pairs; raises PeerError when it is not HPACK or too large."""
    try:
        fields = decoder.decode(block, raw=True)
        return tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in fields)
    except hpack.OversizedHeaderListError as error:
        raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from error
    except (hpack.HPACKError, UnicodeDecodeError) as error:
        raise PeerError(ErrorCode.COMPRESSION_ERROR, f"header block cannot be decoded: {error}") from error
