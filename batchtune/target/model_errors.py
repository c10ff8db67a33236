"""What does an error of a model, or of what starts its server, mean, where that is known, and what is there to do?"""

from __future__ import annotations

import re
from typing import Final

OUT_OF_MEMORY: Final = "the batch does not fit in the device's memory: a smaller max_batch_size does"

_OUT_OF_RANGE: Final = re.compile(
    r"indices\[[^\]]*\] = -?\d+ is not in \[0, \d+\)|out of data bounds|index out of range in self"
)
_MEANINGS: Final = (
    (
        re.compile(r"Cannot connect to the Docker daemon|Is the docker daemon running|connect to Podman"),
        "no container engine runs: start it, or launch the server without one (target.server: local)",
    ),
    (
        re.compile(
            r"Unable to find image|pull access denied|manifest unknown|manifest for .* not found|No such image"
        ),
        "the image is not here, or not to be had: check target.docker.image, and pull it once by hand",
    ),
    (
        re.compile(r"could not select device driver|nvidia-container-cli"),
        "the engine gives containers no GPU: install the NVIDIA container toolkit, or leave target.docker.gpus out",
    ),
    (
        re.compile(r"port is already allocated|[Aa]ddress already in use|[Ff]ailed to bind"),
        "another program has that port: leave the port flags out, and free ones are taken",
    ),
    (
        re.compile(r"only with --allow_model_code"),
        "it runs in the server: where you trust the folder, add --set target.flags.allow_model_code=true",
    ),
    (
        re.compile(r"INTERNAL: (?:step \S+: )?(?:pre|post|lookup): "),
        "one of the model's own stages fails: mend its stages.yaml, or the code that this names",
    ),
    (
        re.compile(r"unsupported type (?:seq|map)\("),
        (
            "scikit-learn's ZipMap makes dictionaries, which no tensor holds: convert the model with "
            "options={'zipmap': False}"
        ),
    ),
    (
        re.compile(
            r"Got invalid dimensions for input: .*?index: 0 Got: \d+ Expected: \d+"
            r"|expected: \[1[,\]][^;]*actual: \[\d+|size\(\)\[0\] == 1\b|shape\[0\] to be equal to 1\b"
            r"|shape '\[1, [^']*' is invalid for input of size|requested shape:\{1,"
            r"|Can not cast TensorSpec\(shape=\(\d+,.*\(1,",
            re.DOTALL,
        ),
        (
            "the model's first dimension, that of the batch, is fixed: export it with a dynamic one, or serve it "
            "without batching"
        ),
    ),
    (
        re.compile(
            r"requested shape has \d+|cannot be reshaped to the requested shape|is invalid for input of size"
            r"|Incompatible shapes"
        ),
        "a shape inside the model is fixed: export it with a dynamic batch dimension",
    ),
    (
        _OUT_OF_RANGE,
        (
            "an input is an index beyond the model's table (its vocabulary, say): set its range with "
            "request.inputs: {random: {low: 0, high: N, whole: true}}"
        ),
    ),
    (
        re.compile(r"out of memory|OOM when allocating|Failed to allocate memory", re.IGNORECASE),
        OUT_OF_MEMORY,
    ),
)


def is_out_of_range(text: str) -> bool:
    """Whether an error text says that an input is an index beyond a table."""
    return _OUT_OF_RANGE.search(text) is not None


def meaning_of(text: str) -> str:
    """One line for an error text that is known; empty for any other."""
    return next((meaning for pattern, meaning in _MEANINGS if pattern.search(text)), "")


def error_text(body: str) -> str:
    """What the server's own answer of an error says."""
    import orjson

    try:
        return str(orjson.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:300]
