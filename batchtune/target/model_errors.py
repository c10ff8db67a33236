"""What does a model's own error mean, where that is known, and what is there to do?"""

from __future__ import annotations

import re
from typing import Final

_MEANINGS: Final = (
    (
        re.compile(r"unsupported type seq\(map\("),
        (
            "scikit-learn's ZipMap makes dictionaries, which no tensor holds: convert the model with "
            "options={'zipmap': False}"
        ),
    ),
    (
        re.compile(r"Got invalid dimensions for input: .*?index: 0 Got: \d+ Expected: \d+", re.DOTALL),
        (
            "the model's first dimension, that of the batch, is fixed: export it with a dynamic one, or serve it "
            "without batching"
        ),
    ),
    (
        re.compile(
            r"indices\[[^\]]*\] = -?\d+ is not in \[0, \d+\)|indices element out of data bounds|"
            r"index out of range in self"
        ),
        (
            "an input is an index beyond the model's table (its vocabulary, say): set its range with "
            "request.inputs: {random: {low: 0, high: N, whole: true}}"
        ),
    ),
    (
        re.compile(r"out of memory|OOM when allocating|Failed to allocate memory", re.IGNORECASE),
        "the batch does not fit in the device's memory: a smaller max_batch_size does",
    ),
)


def meaning_of(text: str) -> str:
    """One line for an error text that is known; empty for any other."""
    return next((meaning for pattern, meaning in _MEANINGS if pattern.search(text)), "")
