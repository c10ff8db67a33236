"""Probes a model: whether it answers a request, and ones of twice and eight times its rows, and how long that takes.

The requests are sent one by one before anything is measured, so that the user learns at once what would fail in a
sweep: a shape or a range that the signature leaves open, a batch dimension that is fixed. What the signature leaves
open is guessed and tried.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from batchtune.errors import TargetError, UsageError
from batchtune.load.answers import answers_alone, decode_answer
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.workload import FileInputs, RandomInputs, RandomRange, RandomValues, RequestSpec
from batchtune.target.endpoint import (
    Endpoint,
    is_out_of_range,
    meaning_of,
)
from batchtune.units import counted
from batchtune.wire.signature import Signature, TensorSpec

TIMES_LARGER: Final = 8
"""Rows of the larger request, as a multiple; its time shows how much a row adds to the time of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTries:
    """What the first few requests to a model showed.

    `request`: a request that the model answers. `shapes`, `ranges`: those in it that had to be guessed. `lone_s`:
    median seconds of a request sent alone. `larger_s`: median seconds of a request with TIMES_LARGER times its rows;
    None: the model takes only the rows of one request, or refuses so many (`refusal` says why), or the requests are
    recorded.
    """

    request: RequestSpec
    shapes: Shapes
    ranges: Ranges
    lone_s: float
    larger_s: float | None
    refusal: str | None = None

    @property
    def recorded(self) -> bool:
        """Whether the requests come from a file, so that nothing about them had to be guessed."""
        return isinstance(self.request.inputs, FileInputs)


def first_tries(
    endpoint: Endpoint,
    signature: Signature,
    request: RequestSpec,
    *,
    batched: bool = True,
    live: Callable[[str], None] = lambda _text: None,
) -> FirstTries:
    """Probe a model: find shapes and ranges that it accepts, and time a request of the given rows and a larger one.

    `batched`: whether a model that accepts only the rows of one request is an error. `live`: is called with what is
    sent next.

    Raises:
        TargetError: the model refuses a request, or with `batched` a request of twice the rows; the hint says what that
            means.
        UsageError: the request does not fit the signature.
    """
    asking = _Asking(endpoint, signature, request, live)
    if isinstance(request.inputs, FileInputs):
        return asking.recorded()
    shapes, ranges = asking.settled()
    answered = guessed_request(request, shapes=shapes, ranges=ranges)
    larger_s, refusal = None, None
    fault = asking.fault_of(answered, times=2)
    if fault is None:
        larger_s, refusal = asking.larger(answered)
    elif batched:
        raise TargetError(
            f"a request of {counted(request.rows, 'row')} is answered, one of {2 * request.rows} is not: {fault}",
            hint=meaning_of(fault)
            or (
                "export the model with an open batch dimension: no server can batch it as it is now (`batchtune load "
                f"MODEL --rows {request.rows} --no-batching` measures it)"
            ),
        )
    return FirstTries(
        request=answered,
        shapes=shapes,
        ranges=ranges,
        lone_s=asking.seconds_of(answered, times=1),
        larger_s=larger_s,
        refusal=refusal,
    )


@dataclass(frozen=True, slots=True)
class _Asking:
    endpoint: Endpoint
    signature: Signature
    request: RequestSpec
    live: Callable[[str], None]

    def settled(self) -> tuple[Shapes, Ranges]:
        """Return the shapes and ranges with which the model answers; with `request.lengths` no shape is guessed.

        Raises:
            TargetError: the model answers with none of the guesses.
        """
        ranges: Ranges = range_guesses(self.signature, inputs_with_range(self.request, self.signature))
        first_fault = None
        every = {spec.name for spec in self.signature.inputs}
        given = self.request.shapes if self.request.lengths is None else every
        for shapes in shape_guesses(self.signature, given):
            fault = self.fault_of(guessed_request(self.request, shapes=shapes, ranges=ranges))
            if fault is not None and is_out_of_range(fault):
                for fewer in narrower(ranges):
                    if self.fault_of(guessed_request(self.request, shapes=shapes, ranges=fewer)) is None:
                        return shapes, fewer
            if fault is None:
                return shapes, ranges
            first_fault = first_fault or fault
        raise TargetError(f"the model refuses a request: {first_fault}", hint=self._hint(first_fault or ""))

    def recorded(self) -> FirstTries:
        """Time the first requests of the file, sent as they are.

        Raises:
            TargetError: the model refuses one of them.
        """
        fault = self.fault_of(self.request)
        if fault is not None:
            hint = meaning_of(fault) or "was the file recorded for this model and signature?"
            raise TargetError(f"the model refuses a recorded request: {fault}", hint=hint)
        lone_s = self.seconds_of(self.request, times=1)
        return FirstTries(request=self.request, shapes={}, ranges={}, lone_s=lone_s, larger_s=None)

    def fault_of(self, request: RequestSpec, *, times: int = 1) -> str | None:
        """Return why a request of `times` times the rows gets no answer or a wrong one; None: it gets a good answer."""
        try:
            for answer in answers_alone(self.endpoint, self._requests(request, times=times, distinct=1)):
                outputs = decode_answer(request.protocol, answer)
                if times > 1 and (fault := _rows_lost(outputs, times * request.rows)):
                    return fault
        except ValueError as error:
            return f"its answer does not decode: {error}"
        except TargetError as error:
            return _models_words(error)
        except UsageError as error:
            if times == 1:
                raise
            return f"the batch dimension is fixed ({error.message.partition(': ')[2]})"
        return None

    def larger(self, request: RequestSpec) -> tuple[float | None, str | None]:
        """Return (seconds of a request of TIMES_LARGER times the rows, None), or (None, why the model refuses it)."""
        try:
            return self.seconds_of(request, times=TIMES_LARGER), None
        except TargetError as error:
            return None, _models_words(error)

    def seconds_of(self, request: RequestSpec, *, times: int) -> float:
        """Return the median time (s) of requests of `times` times the rows, sent one at a time.

        Raises:
            TargetError: the model refuses one of them.
        """
        timed_answers = 24
        drawn_rows = 10_000  # So many rows at most are drawn for requests that differ: more take minutes.
        distinct = min(max(1, drawn_rows // (times * request.rows)), 4)
        requests = self._requests(request, times=times, distinct=distinct)
        requests = replace(requests, bodies=requests.bodies * max(1, timed_answers // len(requests.bodies)))
        times_s = list(_timed(answers_alone(self.endpoint, requests)))
        return statistics.median(times_s[1:] or times_s)

    def _requests(self, request: RequestSpec, *, times: int, distinct: int) -> RequestSet:
        recorded = 16  # Of a file of recorded requests the first so many are sent.
        patience_s = 60.0  # For one answer of a model of unknown speed.
        self.live(f"asking it for {counted(times * request.rows, 'row')} at once")
        patient = request.model_copy(
            update={"rows": times * request.rows, "timeout_s": patience_s, "mix": ()}
        )
        requests = build_requests(
            patient, self.signature, model_name=self.endpoint.model_name, distinct=distinct
        )
        return replace(requests, bodies=requests.bodies[:recorded])

    def _hint(self, fault: str) -> str:
        known = meaning_of(fault)
        if known:
            return known
        inputs = ", ".join(f"--shape {spec.name}=…" for spec in self.signature.inputs if _is_open(spec.shape))
        ranges = ", ".join(
            f"--range {spec.name}=LOW:HIGH" for spec in self.signature.inputs if spec.dtype != "object"
        )
        options = "; ".join(filter(None, (inputs, ranges)))
        say = f"say what it takes ({options}), or " if options else ""
        return f"{say}send recorded requests: --set request.inputs.file=inputs.npz"


def _rows_lost(outputs: Mapping[str, NDArray[Any]], rows: int) -> str | None:
    """Return what is wrong where an output has not as many rows as the input, so that no server can split a batch's
    answers; None where all have."""
    for name, output in outputs.items():
        if output.shape[:1] != (rows,):
            which = f"output {name!r}" if name else "the output"
            return f"{which} has shape {list(output.shape)}, not a row for each of {rows}"
    return None


def _models_words(error: TargetError) -> str:
    return error.message.partition("asked alone: ")[2] or error.message


def _is_open(shape: tuple[int | None, ...] | None) -> bool:
    return shape is None or None in shape[1:]


def _timed(answers: Iterator[bytes]) -> Iterator[float]:
    """Yield the seconds that each answer took, until 1 s is over."""
    timed_s = 1.0  # So long, or so many answers, are timed at most.
    started = before = time.perf_counter()
    for _ in answers:
        now = time.perf_counter()
        yield now - before
        if now - started > timed_s:
            return
        before = now


# What is tried where a signature leaves dimensions or values open, likeliest first.

Shapes = Mapping[str, tuple[int, ...]]
Ranges = Mapping[str, RandomRange]


SMALL: Final = RandomRange(low=0, high=100, whole=True)
"""Whole numbers below the size of nearly every vocabulary."""
BINARY: Final = RandomRange(low=0, high=2, whole=True)


def shape_guesses(signature: Signature, given: Collection[str]) -> list[dict[str, tuple[int, ...]]]:
    """Guess the dimensions after the first for every input that leaves some open; return the guesses, the likeliest
    first, each input name -> dimensions, such as `{"ids": (128,), "mask": (128,)}`.

    [{}] where no input leaves any open. Inputs in `given` are left out. A guess sets all inputs together: those that
    belong together (tokens and their mask) have one length.
    """
    candidates = {
        spec.name: sizes for spec in signature.inputs if spec.name not in given and (sizes := _sizes(spec))
    }
    count = max(map(len, candidates.values()), default=1)
    return [
        {name: sizes[min(at, len(sizes) - 1)] for name, sizes in candidates.items()} for at in range(count)
    ]


def range_guesses(signature: Signature, given: Collection[str]) -> dict[str, RandomRange]:
    """Guess the range of values of every input of whole numbers, and return input name -> range: ones for a mask, 0 or
    1 for a type, 0 to 255 for an image, small numbers for any other. Inputs in `given` are left out."""
    return {
        spec.name: _range(spec)
        for spec in signature.inputs
        if spec.name not in given and spec.dtype.startswith(("int", "uint"))
    }


def narrower(ranges: Ranges) -> Iterator[dict[str, RandomRange]]:
    """Yield narrower ranges to try, for models whose tables are smaller than guessed: first with one wide input limited
    to 0 and 1, each in turn, then with all of them."""
    wide = [name for name, limits in ranges.items() if limits.high is not None and limits.high > 2]
    for name in wide:
        yield {**ranges, name: BINARY}
    if len(wide) > 1:
        yield {**ranges, **dict.fromkeys(wide, BINARY)}


def guessed_request(request: RequestSpec, *, shapes: Shapes, ranges: Ranges) -> RequestSpec:
    """Return the request with the guessed dimensions and ranges added; those that it has already are kept."""
    inputs = request.inputs
    if ranges and (inputs == "random" or isinstance(inputs, RandomInputs)):
        values = inputs.random if isinstance(inputs, RandomInputs) else RandomValues()
        by_input = {**ranges, **values.by_input}
        inputs = RandomInputs(random=values.model_copy(update={"by_input": by_input}))
    return request.model_copy(update={"shapes": {**shapes, **request.shapes}, "inputs": inputs})


def inputs_with_range(request: RequestSpec, signature: Signature) -> set[str]:
    """Return the names of the inputs whose values the request itself determines: those with a range of their own; all
    inputs where it has one range for all, or sends zeros or recorded inputs."""
    every = {spec.name for spec in signature.inputs}
    if request.inputs == "random":
        return set()
    if not isinstance(request.inputs, RandomInputs):
        return every
    values = request.inputs.random
    return every if values.low is not None or values.high is not None else set(values.by_input)


def _sizes(spec: TensorSpec) -> list[tuple[int, ...]]:
    strings = spec.dtype == "object"
    if spec.shape is None:
        return [()] if strings else [(128,), (224, 224, 3), (3, 224, 224), ()]
    inner = spec.shape[1:]
    if None not in inner:
        return []
    if strings:
        return [_filled(inner, size) for size in (1, 8)]
    # Of a sequence: tokens of a sentence or two, then what convolutions and reshapes may want.
    lengths = (128, 64, 32, 16, 8, 256, 512, 1)
    if len(inner) != 3:
        return [_filled(inner, size) for size in lengths]
    sides = (224, 32, 64, 28, 299, 512)  # Of an image, in pixels: ImageNet's, CIFAR's, MNIST's, Inception's.
    if any(size in (1, 3, 4) for size in inner):
        return [_filled(inner, side) for side in sides]
    if inner == (None, None, None):
        return [(224, 224, 3), (3, 224, 224), (32, 32, 3), (28, 28, 1)]
    return [_filled(inner, size) for size in (*sides, 16, 8)]


def _filled(inner: tuple[int | None, ...], size: int) -> tuple[int, ...]:
    return tuple(size if dimension is None else dimension for dimension in inner)


def _range(spec: TensorSpec) -> RandomRange:
    name = spec.name.lower()
    if "mask" in name:
        return RandomRange(low=1, high=2, whole=True)
    if "type" in name or "segment" in name:
        return BINARY
    image = spec.dtype == "uint8" and spec.shape is not None and len(spec.shape) == 4
    return RandomRange(low=0, high=256, whole=True) if image else SMALL
