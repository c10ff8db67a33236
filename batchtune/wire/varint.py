"""How does protobuf write a whole number? Seven bits a byte, the lowest first; the last byte lacks the eighth bit."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Write a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends; IndexError where the message does, ValueError above 70 bits."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of too many bytes")
