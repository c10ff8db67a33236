"""How does each server, and what runs servers, write a configuration?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.kubernetes import ParametersFile, format_k8s, format_kserve
from batchtune.batching.parameters import Configuration
from batchtune.batching.tfserving import format_tfserving_text
from batchtune.batching.triton_pbtxt import format_triton

RenderedDialect = Literal["tfserving", "triton", "cortex", "flags", "k8s", "kserve", "json"]


def rendered(
    configuration: Configuration,
    dialect: RenderedDialect,
    *,
    model: str,
    rows_per_request: int = 1,
    file: ParametersFile | None = None,
) -> str:
    """The configuration as a file; a comment names what the dialect cannot say.

    `model` is the name that it is served by. `file` is what the server itself reads, for `k8s` and `kserve`; absent:
    TensorFlow Serving's.

    Raises:
        BatchingParametersError: the dialect cannot say it.
    """
    batching, flags = configuration.batching, configuration.flags
    match dialect:
        case "tfserving":
            return parameters_file(configuration).text
        case "triton":
            alien = () if configuration.dialect == "triton" else flags
            return without_counterpart(alien, "Triton") + format_triton(
                batching, rows_per_request=rows_per_request
            )
        case "cortex":
            return without_counterpart(flags, "Cortex") + format_cortex(batching)
        case "flags":
            own = [shlex.quote(f"--{name}={value}") for name, value in flags]
            return " ".join([format_flags(batching), *own]) + "\n"
        case "k8s":
            return format_k8s(configuration, file or parameters_file(configuration), model=model)
        case "kserve":
            return format_kserve(configuration, file or parameters_file(configuration), model=model)
        case "json":
            return json.dumps(configuration.to_dict(), indent=2) + "\n"


def parameters_file(configuration: Configuration) -> ParametersFile:
    """TensorFlow Serving's, with a comment that says what is in it.

    No batching has no parameters: the comment alone says so.
    """
    comment = f"# batchtune: {' '.join(configuration.label().split())}\n"
    if configuration.batching is None:
        text = "# Leave out --enable_batching; with it this file would mean the server's defaults.\n"
    else:
        text = format_tfserving_text(configuration.batching).rstrip("\n") + "\n"
    return ParametersFile(name="batching_parameters.txt", text=comment + text)


def without_counterpart(flags: Sequence[tuple[str, str]], server: str) -> str:
    """A line of comment for each flag that this server has not."""
    return "".join(f"# --{name}={value} has no counterpart in {server}\n" for name, value in flags)
