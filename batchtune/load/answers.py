"""Checks answers: the first one, before any load; those of a run, against what the server answers to a lone request.

Each distinct request is sent once and alone, over httpx and grpcio rather than our own wire; batched answers are to be
the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.errors import TargetError, UsageError, WrongAnswerError
from batchtune.load.clients.client import content_headers, grpc_path, http_path
from batchtune.load.samples import Recorder, Status, error_within, http_words
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.places import has_value
from batchtune.scenario.prompts import build_prompts
from batchtune.scenario.spec.target import name_in
from batchtune.scenario.spec.workload import Protocol, RequestSpec, transport_of
from batchtune.target.endpoint import (
    Endpoint,
    control_channel,
    control_client,
    in_words,
    listed_models,
    meaning_of,
)
from batchtune.wire.kserve_infer import decode_infer_json, decode_infer_response
from batchtune.wire.tfserving.rest_json import decode_predict_json
from batchtune.wire.tfserving.tensors import decode_predict_response


def check_answers(recorder: Recorder, requests: RequestSet, request_order: NDArray[np.int32]) -> int:
    """Decode every answer that the recorder has; one that does not decode becomes MALFORMED, one with other outputs
    than expected WRONG_ANSWER. Return how many were checked.

    `request_order[i % len(request_order)]`: index in the set of the request that was sent i-th.
    """
    for index, answer in recorder.answers.items():
        which = int(request_order[index % len(request_order)])
        try:
            outputs = decode_answer(requests.protocol, answer)
        except ValueError as error:
            begin = answer[:4_096]
            page = f": {begin.decode('utf-8', 'replace')}" if b"<html" in begin.lower() else ""
            recorder.reject_answer(index, Status.MALFORMED, f"the answer does not decode: {error}{page}")
            continue
        expected = requests.expected[which] if requests.expected else None
        wrong = "" if expected is None else difference(outputs, expected)
        if wrong:
            recorder.reject_answer(index, Status.WRONG_ANSWER, wrong)
    return len(recorder.answers)


def difference(outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> str:
    """Return how outputs differ from the expected ones, in words, such as `output 'y' differs from the expected
    values`; "": they are equal to float32 precision.

    An output called "" (REST does not name a single output) is compared with the only expected one.
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
    """Return output name -> values of an answer; the single output of a REST answer has no name and is called "".

    For protocol http the answer must be JSON, and {} is returned.

    Raises:
        ValueError: the bytes are no answer of this protocol; or the protocol is openai, whose tokens are read as they
            arrive.
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
        case "http":
            orjson.loads(answer)
            return {}
        case "openai":
            raise ValueError("tokens are read as they arrive")


def _equal(output: NDArray[Any], right: NDArray[Any]) -> bool:
    # Batching changes the order of sums: float32 answers of one row differ in the last digits.
    if right.dtype.kind in "fc":
        return np.allclose(output.astype(right.dtype), right, rtol=1e-3, atol=1e-5, equal_nan=True)
    return np.array_equal(output, right)


def with_lone_answers(endpoint: Endpoint, requests: RequestSet) -> RequestSet:
    """Return the set with expected answers: each request is sent to the server alone, and the answer becomes the
    expected one.

    Raises:
        TargetError: a request gets no answer, an error, or an answer that does not decode.
    """
    answers = answers_alone(endpoint, requests)
    expected: list[dict[str, NDArray[Any]] | None] = []
    for number, answer in enumerate(answers):
        try:
            outputs = decode_answer(requests.protocol, answer)
        except ValueError as error:
            raise TargetError(
                f"request {number}, asked alone: the answer does not decode: {error}"
            ) from error
        expected.append({name: np.array(values) for name, values in outputs.items()})
    return replace(requests, expected=tuple(expected))


def prompts_to(
    endpoint: Endpoint, request: RequestSpec, *, seed: int = 1, distinct: int | None = None
) -> RequestSet:
    """Encode the prompts of a scenario (`build_prompts`) for the model that it names; if it names none, for the only
    model that the server lists.

    Raises:
        UsageError: the scenario names no model and the server lists none or several; or the prompts cannot be built.
    """
    name = endpoint.model_name
    if (
        endpoint.path
        and name == name_in(endpoint.path)
        and (request.openai is None or request.openai.model is None)
    ):
        name = _only_listed(endpoint, request.headers)
    return build_prompts(request, model_name=name, seed=seed, distinct=distinct)


def _only_listed(endpoint: Endpoint, headers: Mapping[str, str]) -> str:
    """Return the name of the one model that a server of OpenAI's API serves.

    Raises:
        UsageError: it lists none or several.
    """
    names = sorted(listed_models(endpoint, headers))
    if len(names) == 1:
        return names[0]
    there = f"lists {', '.join(names)}" if names else "lists none"
    raise UsageError(
        "request.openai.model: missing: which model of that server?",
        hint=f"set it to a name that the server knows; {endpoint.rest_url}/v1/models {there}",
    )


def ask_once(endpoint: Endpoint, request: RequestSpec) -> None:
    """Send one request of a scenario of protocol http or openai, so that a wrong URL, body or app is reported before
    any load.

    Raises:
        WrongAnswerError: the answer is not a good one by the scenario (`require_answer`).
        TargetError: there is no answer, or its status is one of a server that is overloaded or not ready yet.
        UsageError: the request cannot be built.
    """
    if request.protocol == "http":
        requests = build_requests(request, {}, model_name=endpoint.model_name, distinct=1)
    else:
        requests = prompts_to(endpoint, request, distinct=1)
    is_json = request.protocol == "http" and request.answers.check != "status"
    require_answer(endpoint, requests, is_json=is_json)


def require_answer(endpoint: Endpoint, requests: RequestSet, *, is_json: bool) -> None:
    """Send the first request once, so that a wrong URL, body or app is reported before any load.

    Raises:
        WrongAnswerError: the answer has no end, is a redirect, has a status other than `ok.status`, or, with `is_json`,
            is no JSON, or has no value at `ok.path` or, without that, an `error`; of protocol openai, with or without
            `is_json`: it has an `error`, or neither server-sent events nor a JSON object.
        TargetError: there is no answer, or its status is 429, 502, 503 or 504: a server that is overloaded or not ready
            yet.
    """
    answer_bytes_max = 2**26  # Of one answer that is looked at before any load.
    not_now = (429, 502, 503, 504)  # Statuses that pass: too many requests, not ready, a timeout.
    import httpx

    url = f"{endpoint.rest_url}{requests.path or endpoint.path}"
    headers = {"Content-Type": "application/json", **dict(requests.headers)}
    read, give_up = bytearray(), time.monotonic() + requests.timeout_s
    try:
        with (
            control_client(endpoint, timeout_s=requests.timeout_s) as client,
            client.stream(requests.method, url, content=requests.bodies[0], headers=headers) as answer,
        ):
            for piece in answer.iter_bytes():
                read += piece
                is_late = time.monotonic() > give_up and "content-length" not in answer.headers
                if is_late or len(read) > answer_bytes_max:
                    raise WrongAnswerError(
                        f"{url}: the answer has no end: {len(read):,} bytes within {requests.timeout_s:g} s",
                        hint="a longer request.timeout waits longer for it"
                        if requests.protocol == "openai"
                        else "a stream of events needs request.protocol: openai, or an option of the app to answer at "
                        "once",
                    )
    except httpx.HTTPError as error:
        raise TargetError(
            f"{url}: {in_words(error)}", hint="is the server up, and is target.url its address?"
        ) from error
    text = bytes(read[:300]).decode("utf-8", "replace").strip()
    if answer.is_redirect:
        there = answer.headers.get("location", "nowhere")
        raise WrongAnswerError(
            f"{url}: HTTP {answer.status_code}: a redirect to {there}",
            hint="set target.url to where it leads",
        )
    if answer.status_code not in requests.ok.status:
        hint = _hint_at(answer.status_code, text, requests)
        error_type = TargetError if answer.status_code in not_now else WrongAnswerError
        raise error_type(f"{url}: {http_words(answer.status_code)}: {text}", hint=hint)
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if requests.protocol == "openai":
        _require_tokens(url, kind, bytes(read), text)
    if not is_json:
        return
    try:
        document = orjson.loads(bytes(read))
    except ValueError as error:
        raise WrongAnswerError(
            f"{url}: the answer is {kind or 'of no type'}, not JSON: {text}",
            hint="is target.url right? With request.answers.check: status answers need not be JSON",
        ) from error
    if requests.ok.path and not has_value(document, requests.ok.path):
        raise WrongAnswerError(
            f"{url}: the answer has no value at {requests.ok.path!r} (request.ok.path): {text}",
            hint="is this an error with a status of success?",
        )
    if not requests.ok.path and (failure := error_within(bytes(read))):
        hint = (
            "the app's log says why; where this is a right answer, set request.ok.path to a place that it has"
        )
        raise WrongAnswerError(f"{url}: {failure}", hint=hint)


def _hint_at(status: int, text: str, requests: RequestSet) -> str:
    """Return what to do about a first answer with this status and text."""
    if status in (404, 405):
        return "the app has no such path or method: set target.url, or request.method"
    if status == 429:
        return "send fewer requests, or raise the limit of the server"
    if known := meaning_of(text):
        return known
    what = "the request (request.openai)" if requests.protocol == "openai" else "request.body"
    hint = f"{what} is not what the app takes, or the app fails: its log says why"
    body = requests.bodies[0][:200].decode("utf-8", "replace")
    return f"{hint}; the body sent: {body}" if 400 <= status < 500 else hint


def _require_tokens(url: str, kind: str, body: bytes, text: str) -> None:
    """Raise WrongAnswerError where an answer of protocol openai is an error, or has neither server-sent events nor a
    JSON object; `kind`: its content type, `text`: its beginning."""
    if failure := error_within(body):
        raise WrongAnswerError(f"{url}: {failure}", hint="the server's log says why")
    has_events = any(line.startswith(b"data:") for line in body.splitlines())
    if not has_events and not body.lstrip().startswith(b"{"):
        raise WrongAnswerError(
            f"{url}: the answer is {kind or 'of no type'}, neither events nor JSON: {text}",
            hint="is target.url right? A proxy or a page to log in may answer in place of the server",
        )


def answers_alone(endpoint: Endpoint, requests: RequestSet) -> Iterator[bytes]:
    """Yield the bytes of the server's answer to each request of the set, sent one after another.

    Raises:
        TargetError: a request gets no answer or an error.
    """
    by_grpc = transport_of(requests.protocol) == "grpc"
    return _by_grpc(endpoint, requests) if by_grpc else _by_http(endpoint, requests)


def _by_http(endpoint: Endpoint, requests: RequestSet) -> Iterator[bytes]:
    import httpx

    path = http_path(endpoint, requests.protocol)
    with control_client(endpoint, timeout_s=requests.timeout_s) as client:
        for number, body in enumerate(requests.bodies):
            headers = {**content_headers(requests.protocol, body), **dict(requests.headers)}
            try:
                answer = client.post(path, content=body, headers=headers)
            except httpx.HTTPError as error:
                raise TargetError(f"request {number}, asked alone: {in_words(error)}") from error
            if answer.status_code != 200:
                raise TargetError(
                    f"request {number}, asked alone: HTTP {answer.status_code}: {answer.text[:300]}"
                )
            yield answer.content


def _by_grpc(endpoint: Endpoint, requests: RequestSet) -> Iterator[bytes]:
    import grpc

    with control_channel(endpoint) as channel:
        call = channel.unary_unary(
            grpc_path(requests.protocol), request_serializer=None, response_deserializer=None
        )
        for number, body in enumerate(requests.bodies):
            try:
                yield call(body, timeout=requests.timeout_s, metadata=requests.headers)
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                raise TargetError(f"request {number}, asked alone: {reason}") from error
