"""Do any bytes sent as a gRPC request, however bent, end in one answer or one worded refusal, template or not?

python tests/server/fuzz/fuzz_predict_request.py [--inputs 1000000] [--seconds 180] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchtune.server.grpc_api.predict import PredictRequests, decode_inputs
from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.metrics import Metrics
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.grpc.server_call import GrpcCall, nothing
from batchtune.wire.status import GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import ClassificationRequest, MultiInferenceRequest, PredictResponse
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.fuzz.fuzz_mutations import Mutator, run
from tests.server.server_fakes import FakeModels, FakeServable, signature, spec

METHODS = ("Predict", "Predict", "Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata")


def corpus() -> list[bytes]:
    floats, ids = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3)
    texts = np.array([b"a", b"\xff\x00"], object)
    messages = [
        encode_predict_request("m", "serving_default", {"x": floats}),
        encode_predict_request("m", "", {"x": floats}, as_content=False, version=123, output_filter=("y",)),
        encode_predict_request("m", "two", {"ids": ids, "t": texts}),
        encode_predict_request("m", "two", {"ids": ids, "t": texts}, as_content=False),
    ]
    classify = ClassificationRequest()
    classify.model_spec.name = "m"
    classify.input.example_list.examples.add().features.feature["f"].int64_list.value.append(3)
    multi = MultiInferenceRequest(input=classify.input)
    multi.tasks.add(method_name="tensorflow/serving/classify").model_spec.name = "m"
    return [*messages, classify.SerializeToString(), multi.SerializeToString()]


TOKENS = [
    *(
        b"\x00",
        b"\xff",
        b"\x80" * 11,
        b"\xff" * 10 + b"\x01",
        b"\x0a\x00",
        b"\x12\x02\x08\x01",
        b"\x0b",
        b"\x0c",
    ),
    *(
        b"\x22\xff\xff\xff\xff\x07",
        b"\x2a\x04\x00\x00\x80\x3f",
        b"\x2d\x00\x00\x80\x3f",
        b"\x08\x07",
        b"\x08\x65",
    ),
    *(
        b"\x12\x0b\x12\x09\x08\x80\x80\x80\x80\x80\x80\x80\x01",
        b"\x12\x04\x12\x02\x08\x02",
        b"\x1a\x01y",
        b"m",
    ),
]


class RecordedCall:
    """A gRPC call, and the connection that it answers on, which remembers every answer, a second one too."""

    deadline_ns = None
    cancelled = False
    release = staticmethod(nothing)
    reply, fail, refuse = GrpcCall.reply, GrpcCall.fail, GrpcCall.refuse

    def __init__(self, path: str, message: bytes) -> None:
        self.path = path
        self.head = SimpleNamespace(path=path)
        self.sink = self
        self.message = message
        self.answers: list[tuple[str, Any]] = []

    @property
    def answered(self) -> bool:
        return False

    @answered.setter
    def answered(self, value: bool) -> None: ...

    def send_reply(self, call: Any, message: bytes) -> None:
        self.answers.append(("OK", message))

    def send_failure(self, call: Any, code: str, message: str) -> None:
        self.answers.append((code, message))


class Target:
    """The dispatch under test over a model that echoes, and a decoder that has learnt."""

    def __init__(self) -> None:
        echo = lambda inputs: {"y": next(iter(inputs.values()))}  # noqa: E731
        model = FakeServable(
            {
                "serving_default": (signature("serving_default", [spec("x")], [spec("y")]), echo),
                "two": (signature("two", [spec("ids"), spec("t")], [spec("y")]), echo),
            }
        )
        self._loop = asyncio.new_event_loop()
        self._dispatch = make_grpc_api(FakeModels(model), Metrics(), ServerFlags())[0]
        self._servable = model
        self._warm = PredictRequests()

    def close(self) -> None:
        self._loop.close()

    def check(self, message: bytes) -> None:
        """Raise unless the message gets one sound answer, and the same arrays with and without templates."""
        assert outcome(self._warm, message) == outcome(PredictRequests(), message)
        method = METHODS[len(message) % len(METHODS)]
        call = RecordedCall(f"/tensorflow.serving.PredictionService/{method}", message)
        self._loop.run_until_complete(self._ask(call))
        self._servable.asked.clear()
        ((code, answer),) = call.answers
        assert code in GRPC_CODES
        if code == "OK" and method == "Predict":
            PredictResponse.FromString(answer)
        elif code != "OK":
            assert 0 < len(answer) <= 1024 + len("...TRUNCATED")

    async def _ask(self, call: Any) -> None:
        self._dispatch(call)
        for _ in range(3):
            if not call.answers:
                await asyncio.sleep(0)


def outcome(requests: PredictRequests, message: bytes) -> Any:
    """Everything that decoding gives, in a form that can be compared."""
    try:
        plan, inputs, request = requests.decode(message)
        arrays = decode_inputs(request) if inputs is None else inputs
    except StatusError as error:
        return error.code, error.message
    fields = (
        plan.model_name,
        plan.version,
        plan.label,
        plan.signature_name,
        plan.input_names,
        plan.output_filter,
    )
    return fields, {name: (one.dtype.name, one.shape, contents(one)) for name, one in arrays.items()}


def contents(array: Any) -> Any:
    if array.size > 1 << 16:  # one value repeated: cheap to hold, dear to write out
        return array.ravel()[:1].tolist()
    return array.tolist() if array.dtype.hasobject else array.tobytes()


def fuzz(*, inputs: int, seconds: float, seed: int) -> int:
    """Check so many inputs, or until time is up; the number done."""
    target = Target()
    try:
        return run(target.check, Mutator(corpus(), TOKENS, seed), inputs=inputs, seconds=seconds)
    finally:
        target.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began_s = time.monotonic()
    done = fuzz(inputs=options.inputs, seconds=options.seconds, seed=options.seed)
    print(f"{done} messages in {time.monotonic() - began_s:.0f} s, seed {options.seed}: no failure")
