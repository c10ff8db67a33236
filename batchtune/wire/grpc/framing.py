"""What gRPC puts on top of HTTP/2: message prefix, compression, timeouts, percent-encoding, status mapping.

Source: grpc/doc/PROTOCOL-HTTP2.md, http-grpc-status-mapping.md and statuscodes.md of the gRPC project.
"""

from __future__ import annotations

import math
import struct
from urllib.parse import quote, unquote_to_bytes

from batchtune.wire import inflating
from batchtune.wire.http2 import error_name
from batchtune.wire.status import GRPC_CODES, StatusError

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = PREFIX.size
FIRST_DATA = struct.Struct(">IBIBI")
"""A DATA frame's header (length << 8 | type, flags, stream id) and the message prefix after it (flag, length)."""

_UNITS_NS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}


def encode_timeout(timeout_s: float) -> str:
    """Write a grpc-timeout, rounded up: at most eight digits and a unit; raises ValueError unless `timeout_s` is
    positive."""
    if not timeout_s > 0 or math.isinf(timeout_s):
        raise ValueError(f"a timeout must be a positive number of seconds, not {timeout_s}")
    timeout_largest = 99_999_999
    for unit in ("u", "m", "S", "M", "H"):
        count = math.ceil(timeout_s * 1e9 / _UNITS_NS[unit])
        if count <= timeout_largest:
            return f"{count}{unit}"
    return f"{timeout_largest}H"


def decode_timeout_ns(text: str) -> int | None:
    """Return a grpc-timeout in nanoseconds; None where the text is not one."""
    digits, unit = text[:-1], text[-1:]
    if unit not in _UNITS_NS or not unit or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * _UNITS_NS[unit]


def encode_grpc_message(text: str) -> str:
    """Percent-encode a grpc-message: everything but printable ASCII, and the percent sign."""
    return quote(text, safe=bytes(range(0x20, 0x7F)).replace(b"%", b""))


def decode_grpc_message(text: str) -> str:
    """Read a percent-encoded grpc-message, given as latin-1 text; what is not UTF-8 becomes U+FFFD."""
    return unquote_to_bytes(text.encode("latin-1")).decode(errors="replace")


def status_of_http(http_status: str) -> int:
    """Return the gRPC status number for the HTTP status of an answer that has no grpc-status.

    UNKNOWN for an HTTP status that gRPC's mapping does not list, and for 200, where trailers are missing.
    """
    codes = {"400": "INTERNAL", "401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "404": "UNIMPLEMENTED"}
    codes |= dict.fromkeys(("429", "502", "503", "504"), "UNAVAILABLE")
    return GRPC_CODES[codes.get(http_status, "UNKNOWN")]


def status_of_reset(error_code: int) -> tuple[int, str]:
    """Return (gRPC status number, message) for the error code of a RST_STREAM frame."""
    codes = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
    code = codes.get(error_code, "INTERNAL")
    return GRPC_CODES[code], f"the peer reset the stream: {error_name(error_code)}"


def inflate(message: bytes, encoding: str, message_bytes_max: int) -> bytes:
    """Decompress a message; raises StatusError for an unknown encoding, broken bytes, or a result of more than
    `message_bytes_max`."""
    wbits = wbits_of(encoding)
    try:
        return inflating.inflate(message, wbits, message_bytes_max)
    except inflating.InflateError as error:
        raise inflate_failure(error, message_bytes_max) from error


def wbits_of(encoding: str) -> int:
    """Return zlib's `wbits` for a grpc-encoding, gzip or deflate; raises StatusError for any other."""
    if encoding in {"gzip", "deflate"}:
        return inflating.GZIP if encoding == "gzip" else 15
    known = "a message is flagged as compressed" if encoding in {"", "identity"} else "unknown encoding"
    code = "INTERNAL" if encoding in {"", "identity"} else "UNIMPLEMENTED"
    raise StatusError(code, f"{known}: grpc-encoding is {encoding or 'absent'!r}")


def inflate_failure(error: inflating.InflateError, message_bytes_max: int) -> StatusError:
    """Return the error that a peer gets for a message that cannot be decompressed, or is too large when
    decompressed."""
    if isinstance(error, inflating.TooLargeError):
        return too_large(message_bytes_max + 1, message_bytes_max)
    return StatusError("INTERNAL", f"a compressed message cannot be decompressed: {error}")


def too_large(message_bytes: int, message_bytes_max: int) -> StatusError:
    """Return the error for a message that exceeds the receiver's limit: RESOURCE_EXHAUSTED, with gRPC's own text."""
    return StatusError(
        "RESOURCE_EXHAUSTED",
        f"Received message larger than max ({message_bytes} vs. {message_bytes_max})",
    )


class MessageBuffer:
    """Cuts the DATA of one stream into gRPC messages, wherever frames begin and end; not for the one-frame fast path.

    `inflates`: whether compressed messages are inflated here; False: they are returned compressed.
    """

    __slots__ = (
        "_data",
        "_encoding",
        "_inflates",
        "_message_bytes_max",
        "completed",
        "compressed",
        "fed_bytes",
        "retained_bytes",
        "unacknowledged_bytes",
    )

    def __init__(self, encoding: str, message_bytes_max: int, *, inflates: bool = True) -> None:
        self._data = bytearray()
        self._encoding = encoding
        self._inflates = inflates
        self.compressed = False  # a message was, and is given as it came
        self._message_bytes_max = message_bytes_max
        self.completed = 0  # messages so far
        self.fed_bytes = 0
        self.retained_bytes = 0  # of messages that the receiver keeps until the stream ends
        self.unacknowledged_bytes = 0  # since the receiver's last WINDOW_UPDATE

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._data)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory for the stream: of the incomplete message, and of messages that the receiver stores."""
        return len(self._data) + self.retained_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the messages that these complete, each without gRPC's prefix, and inflated unless
        `inflates` is False: then `compressed` is set, and the message returned as it came.

        Raises StatusError for a broken message and, before its bytes are stored, for one larger than allowed.
        """
        held = self._data
        held += data
        self.fed_bytes += len(data)
        self.unacknowledged_bytes += len(data)
        messages: list[bytes] = []
        start = 0
        while len(held) - start >= PREFIX_BYTES:
            compressed, size = PREFIX.unpack_from(held, start)
            if size > self._message_bytes_max:
                raise too_large(size, self._message_bytes_max)
            if compressed > 1:
                raise StatusError("INTERNAL", f"a message prefix has the unknown flag {compressed}")
            if len(held) - start - PREFIX_BYTES < size:
                break
            end = start + PREFIX_BYTES + size
            message = bytes(memoryview(held)[start + PREFIX_BYTES : end])
            if compressed and self._inflates:
                message = inflate(message, self._encoding, self._message_bytes_max)
            elif compressed:
                self.compressed = True
            messages.append(message)
            start = end
        del held[:start]
        self.completed += len(messages)
        return messages
