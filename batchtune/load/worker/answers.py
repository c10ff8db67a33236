"""Are the answers that came back decodable, and are they the right ones? Looked at after the run, on a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.recorder import Recorder
from batchtune.load.record.samples import Status
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.request import Protocol
from batchtune.wire.kserve.infer import decode_infer_json, decode_infer_response
from batchtune.wire.tfserving.rest_json import decode_predict_json
from batchtune.wire.tfserving.tensors import decode_predict_response

ABSOLUTE_TOLERANCE: Final = 1e-5
"""Batching changes the order of sums: float32 answers of one row differ in the last digits."""


def check_answers(recorder: Recorder, requests: RequestSet, request_order: NDArray[np.int32]) -> int:
    """Decode every kept answer; one that does not decode becomes MALFORMED, a wrong one WRONG_ANSWER.

    `request_order[i % len(request_order)]` is which request of the set was sent i-th. Returns how many were checked.
    """
    for index, answer in recorder.answers.items():
        which = int(request_order[index % len(request_order)])
        try:
            outputs = decode_answer(requests.protocol, answer)
        except ValueError as error:
            recorder.reject_answer(index, Status.MALFORMED, f"the answer does not decode: {error}")
            continue
        expected = requests.expected[which] if requests.expected else None
        wrong = "" if expected is None else difference(outputs, expected)
        if wrong:
            recorder.reject_answer(index, Status.WRONG_ANSWER, wrong)
    return len(recorder.answers)


def difference(outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> str:
    """What is wrong with these outputs; "" when every expected one is there and equal to float precision.

    REST does not name a lone output: it is then compared under the name "".
    """
    if set(outputs) == {""} and len(expected) == 1:
        outputs = {next(iter(expected)): outputs[""]}
    for name, right in expected.items():
        if name not in outputs:
            return f"output {name!r} is missing; the answer has {sorted(outputs)}"
        output = outputs[name]
        if output.shape != right.shape:
            return f"output {name!r} has shape {output.shape}, not {right.shape}"
        if not _equal(output, right):
            return f"output {name!r} differs from the expected values"
    return ""


def decode_answer(protocol: Protocol, answer: bytes) -> Mapping[str, NDArray[Any]]:
    """The outputs by name; REST does not name a lone output: it is then "".

    Raises:
        ValueError: bytes that are no answer of this protocol.
    """
    match protocol:
        case "grpc":
            return decode_predict_response(answer)
        case "rest":
            decoded = decode_predict_json(answer)
            return decoded if isinstance(decoded, dict) else {"": decoded}
        case "kserve_grpc":
            return decode_infer_response(answer)
        case "kserve_rest" | "kserve_rest_binary":
            return decode_infer_json(answer)


def _equal(output: NDArray[Any], right: NDArray[Any]) -> bool:
    if right.dtype.kind in "fc":
        return bool(
            np.allclose(
                output.astype(right.dtype),
                right,
                rtol=1e-3,
                atol=ABSOLUTE_TOLERANCE,
                equal_nan=True,
            )
        )
    return bool(np.array_equal(output, right))
