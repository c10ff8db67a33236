"""Who answers an HTTP request: a bare ASGI app over the calls on models, the metrics and the tuning API.

Errors are `{ "error": "<text>" }` with TensorFlow Serving's HTTP codes; paths outside /v1/ are 404, as is the
monitoring path unless it was asked for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from batchtune.errors import BatchingParametersError
from batchtune.server.cors import CORS_HEADERS, check_preflight
from batchtune.server.json_answers import error_answer
from batchtune.server.request_counts import RequestCounts, RequestMetrics
from batchtune.server.rest_calls import RestCalls
from batchtune.server.rest_routes import TUNING_PATH, Route, find_route, is_api_path
from batchtune.server.served_models import Models
from batchtune.wire.status import HTTP_CODES, StatusError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE = (b"content-type", b"application/json")
_TEXT_TYPE = (b"content-type", b"text/plain")
_ROUTES_MAX = 1024


class BatchingControl(Protocol):
    """The batching parameters in force; server.tuning implements it."""

    def in_force(self) -> dict[str, Any]:
        """What is in force."""
        ...

    def replace(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Put others in force and give what then is; BatchingParametersError or StatusError if they are invalid."""
        ...


class RenderedMetrics(RequestMetrics, Protocol):
    """Counters that can be read."""

    def render(self) -> str:
        """Everything, as Prometheus text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOptions:
    """`timeout_ms` is --rest_api_timeout_in_ms (0: none); `monitoring_path` None: no metrics; `tuning` None: no
    tuning API. A body may have `body_bytes_max` bytes, one that comes as gzip also `inflated_bytes_max` (TensorFlow
    Serving's, gzip_zlib.h) once it is inflated."""

    timeout_ms: int = 30_000
    cors: bool = False
    monitoring_path: str | None = None
    tuning: BatchingControl | None = None
    check_methods: bool = False
    body_bytes_max: int = 2**30
    inflated_bytes_max: int = 100 * 2**20


class RestApi:
    """The ASGI app.

    `calls` and `model_calls` (the POST routes seen so far, by raw path) serve a protocol that starts model calls
    without a task of their own.
    """

    def __init__(self, models: Models, metrics: RenderedMetrics, options: RestOptions) -> None:
        self.options = options
        self.calls = RestCalls(
            models,
            RequestCounts(metrics, "REST"),
            timeout_s=options.timeout_ms / 1000,
            check_methods=options.check_methods,
        )
        self.model_calls: dict[bytes, Route] = {}
        self.headers = (JSON_TYPE, *CORS_HEADERS) if options.cors else (JSON_TYPE,)
        self._metrics = metrics
        self._monitoring_path = (options.monitoring_path or "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            return
        method, raw_path = scope["method"], scope["raw_path"]
        headers: Iterable[tuple[bytes, bytes]] = self.headers
        try:
            if raw_path == self._monitoring_path and method in {"GET", "HEAD"}:
                headers = (_TEXT_TYPE,)
                status, answer = self._monitoring_page(scope["query_string"])
            elif not is_api_path(raw_path):
                status, answer = 404, error_answer(f"Not found: {raw_path.decode('utf-8', 'replace')}")
            else:
                body = await self._read(scope, receive)
                if scope["query_string"]:  # TensorFlow Serving matches it with the path (evhttp_request.cc)
                    raw_path += b"?" + scope["query_string"]
                status, answer = await self._call(method, raw_path, scope, body)
        except StatusError as error:
            status, answer = HTTP_CODES[error.code], error_answer(error.message)
        except _BodyTooLargeError as error:
            status, answer = 413, error_answer(str(error))
            headers = (*headers, (b"connection", b"close"))
        except ConnectionResetError:
            return  # the client has gone before its request was complete
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": answer})

    def _monitoring_page(self, query: bytes) -> tuple[int, bytes]:
        if not query:
            return 200, self._metrics.render().encode()
        path = self._monitoring_path
        return 400, b"Unexpected path: %b?%b. Should be %b" % (path, query, path)

    async def _call(self, method: str, raw_path: bytes, scope: Scope, body: bytes) -> tuple[int, bytes]:
        if method == "OPTIONS":
            check_preflight(scope["headers"])
            return 200, b""
        if raw_path == TUNING_PATH and self.options.tuning is not None and method in {"GET", "PUT"}:
            return 200, await _tune(self.options.tuning, method, scope["client"], body)
        route = find_route(method, raw_path)
        if route.action == "status":
            return 200, self.calls.counted(route, self.calls.status)
        if route.action == "metadata":
            return 200, self.calls.counted(route, self.calls.metadata)
        if len(self.model_calls) >= _ROUTES_MAX:
            self.model_calls.clear()
        self.model_calls[raw_path] = route
        answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def respond(status: int, answer: bytes) -> None:
            if not answered.done():  # cancelled when the server was cut off
                answered.set_result((status, answer))

        self.calls.start(route, body, respond)
        return await answered

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self.options.body_bytes_max
        packed = False
        for name, value in scope["headers"]:
            packed |= name == b"content-encoding" and b"gzip" in value
            if name == b"content-length" and int(value) > limit:
                raise _BodyTooLargeError(limit)
        message = await receive()
        body = message.get("body", b"")
        if message.get("more_body", False):
            chunks = [body]
            size = len(body)
            while message.get("more_body", False):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError
                chunks.append(message["body"])
                size += len(chunks[-1])
                if size > limit:
                    raise _BodyTooLargeError(limit)
            body = b"".join(chunks)
        if len(body) > limit:
            raise _BodyTooLargeError(limit)
        return inflate(body, min(limit, self.options.inflated_bytes_max)) if packed else bytes(body)


class _BodyTooLargeError(Exception):
    """A body beyond the limit, as sent or as inflated."""

    def __init__(self, limit: int, kind: str = "") -> None:
        super().__init__(f"the {kind}request body exceeds {limit} bytes")


def make_app(repository: Models, metrics: RenderedMetrics, *, options: RestOptions | None = None) -> RestApi:
    """Make the ASGI app of the REST API."""
    return RestApi(repository, metrics, options or RestOptions())


def inflate(body: bytes, limit: int) -> bytes:
    """Undo gzip; raises StatusError for what is no gzip, _BodyTooLargeError beyond `limit` bytes."""
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise StatusError("INVALID_ARGUMENT", f"Failed to uncompress the gzipped body: {error}") from error
    if len(plain) > limit:
        raise _BodyTooLargeError(limit, "inflated ")
    if not inflater.eof:
        raise StatusError("INVALID_ARGUMENT", "Failed to uncompress the gzipped body: it is cut short")
    return plain


async def _tune(control: BatchingControl, method: str, client: Any, body: bytes) -> bytes:
    if client is not None and not _is_loopback(client[0]):
        raise StatusError("PERMISSION_DENIED", "the tuning API answers only clients on this machine")
    if method == "GET":
        return orjson.dumps(control.in_force(), option=orjson.OPT_INDENT_2)
    try:
        parameters = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"JSON Parse error: {error}") from error
    if not isinstance(parameters, dict):
        raise StatusError("INVALID_ARGUMENT", "expected a JSON object of batching parameters")
    try:
        in_force = await asyncio.get_running_loop().run_in_executor(None, control.replace, parameters)
    except BatchingParametersError as error:
        raise StatusError("INVALID_ARGUMENT", error.message) from error
    return orjson.dumps(in_force, option=orjson.OPT_INDENT_2)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
