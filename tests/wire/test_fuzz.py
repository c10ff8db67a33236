"""A short run of the fuzzer; the long one is `python tests/wire/fuzz_http2.py`."""

from __future__ import annotations

import asyncio
import resource

from tests.wire.fuzz_http2 import fuzz


def test_thousands_of_broken_inputs_raise_nothing_and_do_not_grow() -> None:
    asyncio.run(fuzz(600, seed=0))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(fuzz(2_500, seed=2))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000
