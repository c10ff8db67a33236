"""Encodes every request of a scenario into bytes, once, outside the timed path."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.places import filled
from batchtune.scenario.recordings import (
    Recording,
    check_names,
    read_recordings,
    recorded_bodies,
    shown_shape,
)
from batchtune.scenario.spec.workload import (
    FileInputs,
    LengthsSpec,
    MixSpec,
    OkSpec,
    Protocol,
    RandomInputs,
    RandomRange,
    RequestSpec,
)
from batchtune.wire.kserve_infer import encode_infer_json, encode_infer_request
from batchtune.wire.signature import Signature, TensorSpec, little_endian
from batchtune.wire.tfserving.rest_json import encode_predict_json
from batchtune.wire.tfserving.tensors import encode_predict_request

_LENGTH_MAX = 2**31 - 1


def draw_lengths(spec: LengthsSpec, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` lengths from a distribution, shape (count,).

    The distribution is divided into `count` shares of equal probability, and one length is drawn from each,
    in random order.

    Raises:
        ScenarioError: a file that cannot be read, or contains no lengths.
    """
    levels = np.clip((rng.permutation(count) + rng.random(count)) / count, 1e-9, 1 - 1e-9)
    if spec.lognormal is not None:
        normal = NormalDist(math.log(spec.lognormal.median), spec.lognormal.sigma)
        drawn = [math.exp(min(normal.inv_cdf(level), math.log(_LENGTH_MAX))) for level in levels.tolist()]
        return np.clip(np.rint(drawn), 1, spec.lognormal.max).astype(np.int64)
    if spec.histogram is not None:
        ends = np.cumsum(spec.histogram.weights) / np.sum(spec.histogram.weights)
        places = np.minimum(np.searchsorted(ends, levels), len(ends) - 1)
        return np.asarray(spec.histogram.lengths, dtype=np.int64)[places]
    if spec.constant is not None:
        return np.full(count, spec.constant, dtype=np.int64)
    recorded = np.sort(_recorded(Path(str(spec.file))))
    return recorded[(levels * len(recorded)).astype(np.int64)]


def shapes_of_length(
    signature: Signature, shapes: Mapping[str, Sequence[int]], length: int
) -> dict[str, Sequence[int]]:
    """Return `shapes` with an entry added for each other input that has an open dimension.

    An entry maps an input's name to its dimensions after the first; in those added, open ones are `length`.

    Raises:
        UsageError: the model leaves no length open.
    """
    lengthened: dict[str, Sequence[int]] = dict(shapes)
    for spec in signature.inputs:
        inner = (None,) if spec.shape is None else spec.shape[1:]
        if None in inner and spec.name not in shapes:
            lengthened[spec.name] = tuple(length if size is None else size for size in inner)
    if len(lengthened) == len(shapes):
        raise UsageError(
            f"request.lengths: no input of signature {signature.name!r} has an open length",
            hint="leave lengths out, or do not give the input's shape in request.shapes",
        )
    return lengthened


def _recorded(path: Path) -> NDArray[np.int64]:
    lengths = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ScenarioError(f"request.lengths.file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"request.lengths.file: {path} is not a text", hint="write one length a line"
        ) from error
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and len(word) <= 10 and 0 < int(word) <= _LENGTH_MAX):
            raise ScenarioError(
                f"{path}:{number}: expected a length, a whole number above 0; was {word[:60]!r}"
            )
        lengths.append(int(word))
    if not lengths:
        raise ScenarioError(f"request.lengths.file: {path} contains no lengths", hint="write one a line")
    return np.asarray(lengths, dtype=np.int64)


def concrete_shape(spec: TensorSpec, rows: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of an input in a request of `rows` rows, () for a scalar; `shapes` gives the
    dimensions after the first, by input.

    Raises:
        UsageError: dimensions that stay open, or that contradict the model.
    """
    given = shapes.get(spec.name)
    if spec.shape is not None and not spec.shape:
        return ()
    shape = (None, *(given or ())) if spec.shape is None else spec.shape
    if spec.shape is None and given is None:
        raise _open_shape(spec)
    if shape[0] is not None and shape[0] != rows:
        raise UsageError(
            f"request.rows: input {spec.name!r} takes exactly {shape[0]} rows; was {rows}",
            hint=f"write request.rows: {shape[0]}, or give --rows {shape[0]}; such a model cannot be batched "
            f"(`batchtune load MODEL --rows {shape[0]} --no-batching` measures it)",
        )
    inner = shape[1:]
    if given is not None:
        agrees = len(given) == len(inner) and all(
            own is None or own == size for own, size in zip(inner, given, strict=True)
        )
        if not agrees:
            raise UsageError(
                f"request.shapes.{spec.name}: the model has {shown_shape(inner)}; was {shown_shape(given)}",
                hint="give the dimensions after the batch dimension",
            )
        inner = tuple(given)
    sizes = tuple(size for size in inner if size is not None)
    if len(sizes) != len(inner):
        raise _open_shape(spec)
    return (rows, *sizes)


def _open_shape(spec: TensorSpec) -> UsageError:
    shown = "any rank" if spec.shape is None else shown_shape(spec.shape)
    example = "[200]" if spec.shape is None else shown_shape([size or 200 for size in spec.shape[1:]])
    return UsageError(
        f"request.shapes: the model leaves the shape of input {spec.name!r} open: {shown}",
        hint=f"add request.shapes: {{{spec.name}: {example}}}",
    )


# Requests of any HTTP server, by a template.


def http_signature(request: RequestSpec, name: str) -> Signature:
    """Make the signature `name` of a request of protocol http: an input for every entry of `request.shapes`, or
    without entries one number a row, called `row`.

    The dtype is float64; int64 or object (texts) where `request.inputs` says so.
    """
    inputs = []
    for input_name, shape in (request.shapes or {"row": ()}).items():
        limits = RandomRange()
        if isinstance(request.inputs, RandomInputs):
            limits = request.inputs.random.by_input.get(input_name, request.inputs.random)
        dtype = "object" if limits.text else "int64" if limits.whole else "float64"
        inputs.append(TensorSpec(name=input_name, dtype=dtype, shape=(None, *shape)))
    return Signature(name=name, method_name="", inputs=tuple(inputs), outputs=())


def http_body(template: Any, inputs: Mapping[str, NDArray[Any]], rng: np.random.Generator) -> bytes:
    """Return the JSON of a template (`filled`): {{NAME}} is all values of that input, {{rows}} all rows, {{row}} the
    first; a row is a value where there is one input, else a mapping by name. `inputs`: arrays by name, whose
    first dimension is rows. `rng`: draws {{uuid}}."""
    columns = {name: _plain(array.tolist()) for name, array in inputs.items()}
    if len(columns) == 1:
        rows = next(iter(columns.values()))
    else:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    one_of_a_kind = uuid.UUID(bytes=rng.bytes(16), version=4)
    values = {**columns, "row": rows[0], "rows": rows, "uuid": str(one_of_a_kind)}
    return json.dumps(filled(template, values)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSet:
    """Encoded requests in rotation: the i-th request sent is `bodies[order[i % len(order)]]`."""

    protocol: Protocol
    model_name: str
    # Serialised messages (gRPC) or the bodies of POSTs.
    bodies: tuple[bytes, ...]
    # Number of rows of each body.
    rows: tuple[int, ...]
    # Indices into `bodies`, shape (m,).
    order: NDArray[np.int32]
    timeout_s: float
    method: str = "POST"
    # Which answers of protocol http are good.
    ok: OkSpec = field(default_factory=OkSpec)
    # Outputs that the answer to each body must equal, by name; None for a body without, or as a whole when no
    # answer is compared.
    expected: tuple[dict[str, NDArray[Any]] | None, ...] | None = None
    headers: tuple[tuple[str, str], ...] = ()
    # URL path of requests of protocol openai; "": the protocol or the endpoint determines it.
    path: str = ""


def build_requests(
    request: RequestSpec,
    signature: Signature | Mapping[str, Signature],
    *,
    model_name: str,
    version: int | None = None,
    seed: int = 1,
    distinct: int | None = None,
) -> RequestSet:
    """Encode the requests of a scenario; one seed always gives the same bytes.

    `signature` is the one that the request names, or name -> signature of all when a mix calls several;
    protocol http uses none. `version` of the model goes into each request; None: the server chooses.
    `distinct` replaces `request.distinct`, the number of different bodies; recorded requests are all used,
    whatever it is.

    Raises:
        UsageError: inputs that do not fit the signature; the text names the input and what to add.
        ScenarioError: a recorded file that cannot be read.
    """
    signatures = signature if isinstance(signature, Mapping) else {signature.name: signature}
    if request.protocol == "http":
        signatures = {name: http_signature(request, name) for name in request.signatures}
    kinds: list[list[Recording]] = []
    for number, kind in enumerate(request.kinds()):
        called = signatures.get(str(kind.signature))
        if called is None:
            raise UsageError(
                f"request.signature: {kind.signature!r} is not known",
                hint=f"known are: {', '.join(signatures)}",
            )
        rng = np.random.default_rng([seed, number])
        kinds.append(_recordings(request, kind, called, rng, distinct or request.distinct))
    recordings = [recording for kind in kinds for recording in kind]
    if request.answers.file is not None:
        recordings = _with_expected(recordings, request.answers.file)
    # Apart from the generators of the kinds of requests, whose second numbers are small.
    uuids = np.random.default_rng([seed, 1_000_003])
    try:
        bodies = tuple(
            _encoded(request, recording, model_name=model_name, version=version, rng=uuids)
            for recording in recordings
        )
    except ValueError as error:
        raise UsageError(f"request.inputs cannot be encoded for {request.protocol}: {error}") from error
    compared = any(recording.outputs is not None for recording in recordings)
    return RequestSet(
        protocol=request.protocol,
        model_name=model_name,
        bodies=bodies,
        rows=tuple(recording.rows for recording in recordings),
        order=rotation([kind.weight for kind in request.kinds()], [len(kind) for kind in kinds], seed),
        timeout_s=request.timeout_s,
        method=request.method,
        ok=request.ok,
        expected=tuple(recording.outputs for recording in recordings) if compared else None,
        headers=tuple(request.headers.items()),
    )


def _encoded(
    request: RequestSpec,
    recording: Recording,
    *,
    model_name: str,
    version: int | None,
    rng: np.random.Generator,
) -> bytes:
    """Return the body of a request; raises ValueError for what the protocol cannot express."""
    match request.protocol:
        case "grpc":
            return encode_predict_request(
                model_name, recording.signature_name, recording.inputs, version=version
            )
        case "rest":
            return recording.rest_body or encode_predict_json(
                recording.inputs,
                signature_name=recording.signature_name,
                row_format=request.rest_format == "row",
            )
        case "kserve_grpc":
            return encode_infer_request(model_name, recording.inputs, version=version)
        case "kserve_rest" | "kserve_rest_binary" as protocol:
            return encode_infer_json(recording.inputs, binary=protocol == "kserve_rest_binary")
        case "http":
            return recording.rest_body or http_body(request.body, recording.inputs, rng)
        case "openai":
            raise ValueError("prompts are not tensors")


def _recordings(
    request: RequestSpec, kind: MixSpec, signature: Signature, rng: np.random.Generator, distinct: int
) -> list[Recording]:
    rows = kind.rows or 1
    if isinstance(kind.inputs, FileInputs):
        if request.protocol == "http":
            return list(recorded_bodies(Path(kind.inputs.file), request.rows_path, signature.name))
        return read_recordings(kind.inputs.file, signature, rows=rows, rest=request.protocol == "rest")
    given = kind.shapes or {}
    check_names(signature, given, key="request.shapes")
    shapes: Sequence[Mapping[str, Sequence[int]]]
    if kind.lengths is not None:
        lengths = draw_lengths(kind.lengths, distinct, rng).tolist()
        shapes = [shapes_of_length(signature, given, length) for length in lengths]
        _check_size(signature, rows, shapes)
    else:
        count = 1 if kind.inputs == "zeros" else distinct
        _check_size(signature, rows, [given], count_each=count)
        shapes = [given] * count
    if isinstance(kind.inputs, RandomInputs):
        check_names(signature, kind.inputs.random.by_input, key="request.inputs.random.by_input")
    return [
        Recording(
            signature_name=signature.name,
            rows=rows,
            inputs={
                spec.name: _values(kind, spec.name, spec.dtype, concrete_shape(spec, rows, own), rng)
                for spec in signature.inputs
            },
        )
        for own in shapes
    ]


def _check_size(
    signature: Signature, rows: int, shapes: Sequence[Mapping[str, Sequence[int]]], *, count_each: int = 1
) -> None:
    """Raise UsageError for requests that no protocol carries or that do not fit in this machine's memory,
    before they are made."""
    distinct = len(shapes) * count_each
    sizes_bytes = [_request_bytes(signature, rows, own) for own in shapes]
    request_bytes = max(sizes_bytes)
    if request_bytes >= 2**31:  # protocol buffers count the bytes of a message in 31 bits
        raise UsageError(
            f"request.rows: {rows:,} rows of this model are {request_bytes / 2**30:,.3g} GiB in one request",
            hint="a message is limited to 2 GiB: send fewer rows in a request",
        )
    free_bytes = psutil.virtual_memory().available
    # Values are drawn in 64 bits before they are narrowed, and then encoded: twice the space for a moment.
    if 2 * sum(sizes_bytes) * count_each > free_bytes:
        raise UsageError(
            f"request.distinct: {distinct} requests of {request_bytes / 2**20:,.3g} MiB each do not fit in half of "
            f"the {free_bytes / 2**30:,.3g} GiB of free memory",
            hint="make fewer distinct requests, or send fewer rows in each",
        )


def _request_bytes(signature: Signature, rows: int, shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(
        math.prod(concrete_shape(spec, rows, shapes)) * little_endian(spec.dtype).itemsize
        for spec in signature.inputs
    )


def _values(
    kind: MixSpec, name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[Any]:
    if kind.inputs == "zeros":
        return (
            np.full(shape, b"", dtype=object)
            if dtype == "object"
            else np.zeros(shape, dtype=little_endian(dtype))
        )
    limits: RandomRange = RandomRange()
    if isinstance(kind.inputs, RandomInputs):
        limits = kind.inputs.random.by_input.get(name, kind.inputs.random)
    return _random(name, dtype, shape, limits, rng)


def _random(
    name: str, dtype: str, shape: tuple[int, ...], limits: RandomRange, rng: np.random.Generator
) -> NDArray[Any]:
    if dtype == "object":
        letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8)
        drawn_letters = letters[rng.integers(0, len(letters), (*shape, limits.length))]
        texts = drawn_letters.view(f"S{limits.length}").reshape(shape)
        return texts.astype(object)
    kind = little_endian(dtype)
    low = 0.0 if limits.low is None else limits.low
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        high = 100.0 if limits.high is None else limits.high
        info = np.iinfo(kind)
        lowest, beyond = int(np.ceil(low)), int(np.ceil(high))
        if lowest < info.min or beyond - 1 > info.max or lowest >= beyond:
            raise UsageError(
                f"request.inputs: no {dtype} of input {name!r} lies from {low:g} to below {high:g}"
            )
        return rng.integers(lowest, beyond, shape, dtype=kind)
    if kind.kind == "c":
        raise UsageError(
            f"request.inputs: input {name!r} is {dtype}", hint="record requests for it: {file: …}"
        )
    high = 1.0 if limits.high is None else limits.high
    drawn = rng.uniform(low, high, shape)
    values: NDArray[Any] = (np.floor(drawn) if limits.whole else drawn).astype(kind)
    return values


def _with_expected(recordings: list[Recording], file: str) -> list[Recording]:
    """Return the recordings with their rows of the outputs in an .npz file, taken in order; raises UsageError
    where they do not fit."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            outputs = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise UsageError(f"request.answers.file: {file} cannot be read: {error}") from error
    rows = sum(recording.rows for recording in recordings)
    for name, array in outputs.items():
        if not array.ndim or len(array) != rows:
            raise UsageError(
                f"request.answers.file: output {name!r} has shape {array.shape}; the requests have {rows} rows"
            )
    ends = np.cumsum([recording.rows for recording in recordings])
    return [
        replace(
            recording, outputs={name: array[end - recording.rows : end] for name, array in outputs.items()}
        )
        for recording, end in zip(recordings, ends.tolist(), strict=True)
    ]


def rotation(weights: list[float], sizes: list[int], seed: int) -> NDArray[np.int32]:
    """Return an order of bodies as indices, shape (4096,): each kind of request has its share by weight,
    shuffled, and its bodies come in turn. With one kind only: each body once, shape (size,).

    `weights`: of each kind. `sizes`: the number of bodies of each kind; those of the first kind have the
    lowest indices.
    """
    if len(sizes) == 1:
        return np.arange(sizes[0], dtype=np.int32)
    length = 4096
    bounds = np.rint(np.cumsum(weights) / np.sum(weights) * length).astype(int)
    kinds = np.searchsorted(bounds, np.arange(length), side="right")
    np.random.default_rng([seed, len(sizes)]).shuffle(kinds)
    order = np.empty(length, dtype=np.int32)
    first = 0
    for kind, size in enumerate(sizes):
        chosen = kinds == kind
        order[chosen] = first + np.arange(np.count_nonzero(chosen)) % size
        first += size
    return order
