"""Hostile variations of well-formed inputs, from one seed; and a run that watches time and memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

GROWTH_BYTES_MAX = 64 << 20
INPUT_S_MAX = 1.0


class Mutator:
    """Bends, cuts, repeats and splices a corpus, and throws in tokens of the language."""

    def __init__(self, corpus: Sequence[bytes], tokens: Sequence[bytes], seed: int) -> None:
        self._random = random.Random(seed)
        self._corpus = list(corpus)
        self._tokens = list(tokens)

    def next(self) -> bytes:
        value = bytearray(self._random.choice(self._corpus))
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            self._bend(value)
        return bytes(value[:4096])

    def _bend(self, value: bytearray) -> None:
        pick = self._random
        at = pick.randrange(len(value) + 1)
        to = min(len(value), at + pick.choice((1, 2, 4, 16)))
        match pick.randrange(7):
            case 0 if at < len(value):
                value[at] ^= 1 << pick.randrange(8)
            case 1 if at < len(value):
                value[at] = pick.choice((0, 1, 0x7F, 0x80, 0xFF, pick.randrange(256)))
            case 2:
                del value[at:to]
            case 3:
                value[at:at] = value[at:to] * pick.choice((1, 2, 20))
            case 4:
                other = pick.choice(self._corpus)
                start = pick.randrange(len(other) + 1)
                value[at:] = other[start:]
            case 5:
                value[at:at] = pick.choice(self._tokens)
            case _:
                del value[at:]


def run(check: Callable[[bytes], None], mutator: Mutator, *, inputs: int, seconds: float) -> int:
    """Check so many inputs, or until time is up; the number done. AssertionError names the input that failed."""
    end_s = time.monotonic() + seconds
    resident = 0
    for done in range(inputs):
        value = mutator.next()
        began_s = time.monotonic()
        if began_s > end_s:
            return done
        try:
            check(value)
        except Exception as error:
            raise AssertionError(f"input {done} failed: {value!r}") from error
        took_s = time.monotonic() - began_s
        assert took_s < INPUT_S_MAX, f"input {done} took {took_s:.2f} s: {value!r}"
        if done == min(20_000, inputs // 2):
            resident = resident_bytes()
    if resident:
        growth = resident_bytes() - resident
        assert growth < GROWTH_BYTES_MAX, f"memory grew by {growth >> 20} MiB over {inputs} inputs"
    return inputs


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
