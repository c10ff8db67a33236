"""What does the server answer when nobody else asks? Batched answers are to be the same.

Each distinct request is asked once and alone, over httpx and grpcio rather than our own wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import TargetError
from batchtune.load.clients.client import content_headers, grpc_path, http_path
from batchtune.load.worker.job import decode_answer
from batchtune.scenario.payloads import RequestSet
from batchtune.target.endpoint import Endpoint, control_channel, control_client, in_words


def with_lone_answers(endpoint: Endpoint, requests: RequestSet) -> RequestSet:
    """The set with `expected` filled from the server's own answers to each request alone.

    Raises:
        TargetError: the server does not answer one of them, or with an error or nonsense.
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


def answers_alone(endpoint: Endpoint, requests: RequestSet) -> Iterator[bytes]:
    """The server's answer to each request of the set, asked one after the other.

    Raises:
        TargetError: it does not answer one of them, or with an error.
    """
    return _by_grpc(endpoint, requests) if requests.transport == "grpc" else _by_http(endpoint, requests)


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
