"""What has arrived only in part: a frame cut by the socket, a header block cut by CONTINUATION?"""

from __future__ import annotations

from batchtune.wire.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    FRAME,
    HEADER_BYTES,
    OUR_FRAME_BYTES,
    ErrorCode,
    PeerError,
    without_padding,
)

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
