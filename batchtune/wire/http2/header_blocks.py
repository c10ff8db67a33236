"""How are header blocks written and read when neither end keeps a dynamic table?

Both ends announce SETTINGS_HEADER_TABLE_SIZE 0. A block is then a pure function of its fields, the same for every
stream and connection, so that each distinct block is decoded by the hpack library once and remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

import hpack

from batchtune.wire.http2.frames import ErrorCode, PeerError

Fields = tuple[tuple[str, str], ...]

EMPTY_TABLE = b"\x20"
"""Dynamic table size update to 0: what RFC 7541 §4.2 asks of an encoder whose peer allows no table."""

_STATIC_PAIRS = {
    (":method", "POST"): 0x83,
    (":scheme", "http"): 0x86,
    (":scheme", "https"): 0x87,
    (":status", "200"): 0x88,
}
_STATIC_NAMES = {
    ":authority": 1,
    ":path": 4,
    ":status": 8,
    "authorization": 23,
    "content-length": 28,
    "content-type": 31,
    "user-agent": 58,
}


def encode_block(fields: Iterable[tuple[str, str]], *, opens_table: bool = True) -> bytes:
    """Write fields as indexed or never-to-be-indexed literals; `opens_table` puts the size update to 0 in front."""
    block = bytearray(EMPTY_TABLE if opens_table else b"")
    for name, value in fields:
        pair = _STATIC_PAIRS.get((name, value))
        if pair is not None:
            block.append(pair)
            continue
        index = _STATIC_NAMES.get(name)
        if index is None:
            block.append(0)
            block += _string(name.encode("ascii"))
        else:
            block += _integer(index, 4)
        block += _string(value.encode("latin-1"))
    return bytes(block)


def _integer(value: int, prefix_bits: int) -> bytes:
    """Write an integer (RFC 7541 §5.1); the bits before the prefix are 0."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes((value,))
    encoded = bytearray((limit,))
    value -= limit
    while value >= 128:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _string(value: bytes) -> bytes:
    return _integer(len(value), 7) + value


def new_decoder(*, table_bytes: int, header_list_bytes: int) -> hpack.Decoder:
    """Make a decoder whose peer may keep a dynamic table of `table_bytes`."""
    decoder = hpack.Decoder(max_header_list_size=header_list_bytes)
    decoder.header_table_size = table_bytes
    decoder.max_allowed_table_size = table_bytes
    return decoder


def decode_block(decoder: hpack.Decoder, block: bytes) -> Fields:
    """Read a block; raises PeerError when it is not HPACK or larger than the decoder allows."""
    try:
        fields = decoder.decode(block, raw=True)
        return tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in fields)
    except hpack.OversizedHeaderListError as error:
        raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from error
    except (hpack.HPACKError, UnicodeDecodeError) as error:
        raise PeerError(ErrorCode.COMPRESSION_ERROR, f"header block cannot be decoded: {error}") from error
