"""How are a native library's start-up messages kept off stderr, and nothing else?

TensorFlow 2.21 writes some lines before it looks at TF_CPP_MIN_LOG_LEVEL.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NATIVE_LOG_LINE = re.compile(
    rb"^(?:[IWEF]\d{4} \d\d:\d\d:|WARNING: All log messages before absl::InitializeLog)"
)

# Two that swapped the descriptor crosswise would leave it on what one of them has collected.
_SWAPPING = threading.Lock()


@contextmanager
def native_log_lines_dropped() -> Iterator[None]:
    """Within, collect what is written to file descriptor 2; afterwards write all but native log lines.

    Of the whole process: other threads' lines come late, not never. One thread at a time.
    """
    with _SWAPPING, tempfile.TemporaryFile() as collected:
        kept = os.dup(2)
        os.dup2(collected.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            collected.seek(0)
            with suppress(OSError):  # nobody reads it, or its disk is full
                for line in collected:
                    if not _NATIVE_LOG_LINE.match(line):
                        os.write(2, line)
