"""How are the parameters written as `--name=value` flags?

For servers that take them so, and for people. tensorflow_model_server does not: it prints `unknown argument`
and starts with its defaults, so it needs the parameters file.
"""

from __future__ import annotations

import shlex

from batchtune.batching.parameters import BatchingParameters, to_dict


def format_flags(parameters: BatchingParameters | None) -> str:
    """One line for a shell; None gives `--enable_batching=false`."""
    if parameters is None:
        return "--enable_batching=false"
    words = ["--enable_batching=true"]
    for name, value in to_dict(parameters).items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{name}={shown.lower() if isinstance(value, bool) else shown}")
    return shlex.join(words)
