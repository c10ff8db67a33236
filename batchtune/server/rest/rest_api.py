"""Dispatches HTTP requests to calls on models, the metrics page and the tuning API.

Errors are `{ "error": "<text>" }` with TensorFlow Serving's HTTP codes. Paths outside /v1/ are answered with
404, but for the metrics page where --monitoring_config_file enables it.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import Any

import orjson

from batchtune.errors import BatchingParametersError
from batchtune.server.metrics import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.rest.calls import TUNING_PATH, RestCalls, Route, find_route, is_api_path
from batchtune.server.rest.json.answers import error_answer
from batchtune.server.rest.parser import PROXY_FIELDS, Head, HttpRequest
from batchtune.server.server_flags import ServerFlags
from batchtune.system import is_loopback
from batchtune.wire.encoding import Memo
from batchtune.wire.inflating import GZIP, InflateError, Inflating, Outcome, Packed, TooLargeError
from batchtune.wire.listener import SharedBytes
from batchtune.wire.status import FAULT, HTTP_CODES, StatusError


def check_client(peer: str, head: Head) -> None:
    """Check that a client of the tuning API is a program of this machine.

    Other machines are refused, and web pages (also those whose own name resolves to this machine: DNS rebinding), and
    proxies, recognized by the fields that they add or by HTTP/1.0, which nginx speaks by default. peer: the client's
    address, "" for a Unix socket. Raises StatusError PERMISSION_DENIED.
    """
    if (peer and not is_loopback(peer)) or head.is_http_1_0 or not PROXY_FIELDS.isdisjoint(head.fields):
        raise StatusError(
            "PERMISSION_DENIED",
            "the tuning API answers only clients on this machine, by HTTP/1.1, without a proxy",
        )
    host = head.fields.get(b"host", b"")
    origin = head.fields.get(b"origin", b"http://" + host).partition(b"://")[2]
    for name in (host, origin):
        if not _names_this_machine(name):
            raise StatusError(
                "PERMISSION_DENIED",
                f"the tuning API answers to localhost only, not to {name.decode('utf-8', 'replace')[:100]}",
            )


async def tune(control: BatchingControl, body: bytes) -> bytes:
    """Put the parameters of a JSON object in force. Return all parameters that are then in force, as JSON.

    Raises StatusError INVALID_ARGUMENT for a body or parameters that are wrong; then nothing changes.
    """
    body_bytes_max = 1 << 20  # a hundred times the longest set of parameters
    if len(body) > body_bytes_max:
        raise StatusError("INVALID_ARGUMENT", f"batching parameters exceed {body_bytes_max} bytes")
    try:
        parameters = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"JSON Parse error: {error}") from error
    if not isinstance(parameters, dict):
        raise StatusError("INVALID_ARGUMENT", "expected a JSON object of batching parameters")
    try:
        replaced = await asyncio.get_running_loop().run_in_executor(None, control.replace, parameters)
    except BatchingParametersError as error:
        raise StatusError("INVALID_ARGUMENT", error.message) from error
    return orjson.dumps(replaced, option=orjson.OPT_INDENT_2)


def _names_this_machine(host: bytes) -> bool:
    spelling = rb"\[(?P<bracketed>[^\]]*)\](?::[0-9]*)?|(?P<plain>[^:]*)(?::[0-9]*)?"
    spelled = re.fullmatch(spelling, host.strip())
    if spelled is None:
        return False
    name = (spelled["bracketed"] or spelled["plain"] or b"").decode("latin-1").lower()
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def plain_body(outcome: Outcome, limit: int) -> bytes:
    """Return the inflated body; outcome: that body, or the error with which inflating it failed.

    Raises StatusError INVALID_ARGUMENT for a body that is no gzip, TooLargeError for a body beyond `limit` bytes; any
    other error of `outcome` is raised unchanged.
    """
    if isinstance(outcome, bytes):
        return outcome
    if isinstance(outcome, TooLargeError):
        raise TooLargeError(f"the inflated request body exceeds {limit} bytes")
    if isinstance(outcome, InflateError):
        raise StatusError("INVALID_ARGUMENT", f"Failed to uncompress the gzipped body: {outcome}")
    raise outcome


def deflate(answer: bytes) -> bytes:
    """Return an answer compressed with gzip, at the fastest level."""
    level = 1  # 9 takes five times as long for an eighth fewer bytes of JSON numbers
    return gzip.compress(answer, level, mtime=0)


_PATH_BYTES_MAX = 256  # of those whose route is remembered

_logger = logging.getLogger(__name__)
Respond = Callable[..., None]


class RestApi:
    """Answers HTTP requests; all methods are called on the event loop.

    monitoring_path: path of the metrics page; None: no page. tuning: what the tuning API changes; None: there is no
    such API.
    """

    def __init__(
        self,
        models: ModelRepository,
        metrics: Metrics,
        flags: ServerFlags,
        *,
        monitoring_path: str | None = None,
        tuning: BatchingControl | None = None,
    ) -> None:
        self._flags = flags
        self._tuning = tuning
        self.calls = RestCalls(
            models,
            metrics,
            timeout_s=flags.rest_api_timeout_in_ms / 1000,
            check_methods=flags.enable_signature_method_name_check,
        )
        self.known_heads: Memo[bytes, Head] = Memo(1_024)  # of model calls, by their bytes: at most 1 MiB
        self._fields_of_others = {b"content-encoding", b"expect", b"upgrade"}
        if flags.rest_api_enable_gzip_answers:
            self._fields_of_others.add(b"accept-encoding")
        self.start_model_call = self.calls.start
        self.body_bytes_max = flags.rest_api_max_body_bytes
        self.inflated_bytes_max = 100 << 20  # TensorFlow Serving's limit, gzip_zlib.h
        self.header_lines = b"content-type: application/json\r\n"
        if flags.rest_api_enable_cors_support:  # http_rest_api_util.cc
            self.header_lines += (
                b"access-control-allow-origin: *\r\naccess-control-allow-methods: POST, GET\r\n"
            )
            self.header_lines += b"access-control-allow-headers: Content-Type\r\n"
        self.tasks: set[asyncio.Task[None]] = set()
        self._inflating = Inflating()
        self._metrics = metrics
        self._monitoring_path = (monitoring_path or "").encode()

    def remember(self, written: bytes, head: Head) -> None:
        """Store a model call's head under its bytes, so that it is parsed only once, if `Head.is_remembered` allows
        that."""
        if head.is_remembered(written, but_with=self._fields_of_others):
            self.known_heads.keep(written, head)

    def share(self, unsent: SharedBytes) -> None:
        """Count the bytes of inflated requests together with those of `unsent` answers, under one limit."""
        self._inflating.unsent = unsent

    def close(self) -> None:
        """End the process that parses large bodies."""
        self.calls.close()

    def find_model_call(self, method: str, target: bytes) -> Route | None:
        """Return the predict, classify or regress call that a request names; None for any other request."""
        if method != "POST":
            return None
        try:
            return _find_call(target) if len(target) <= _PATH_BYTES_MAX else find_route(method, target)
        except StatusError:
            return None

    def start(self, request: HttpRequest, peer: str, respond: Respond) -> None:
        """Start any request; `respond(status, answer, *header_lines)` is called once, now or later.

        peer: the client's address, "" for a Unix socket.
        """
        head = request.head
        if self._flags.rest_api_enable_gzip_answers and head.takes_gzip:
            respond = partial(self._respond_in_gzip, respond)
        if head.route is None and not self._is_tuning(head, "PUT"):
            self._or_refuse(lambda: respond(*self._answer(head, peer)), head, respond)
        elif head.is_gzipped:
            self._or_refuse(lambda: self._inflate(head, request.body(), peer, respond), head, respond)
        else:
            self._or_refuse(lambda: self._start_call(head, request.body(), peer, respond), head, respond)

    def _or_refuse(self, start: Callable[[], None], head: Head, respond: Respond) -> None:
        """Call `start`; where it raises, answer the client with the error."""
        try:
            start()
        except (StatusError, TooLargeError) as error:
            respond(*_failure(error))
        except Exception:
            _logger.exception("%s %s failed", head.method, head.target[:_PATH_BYTES_MAX])
            respond(500, error_answer(FAULT))

    def _inflate(self, head: Head, body: bytes, peer: str, respond: Respond) -> None:
        """Inflate a body, now or later, then start its call."""
        bytes_max = min(self.body_bytes_max, self.inflated_bytes_max)

        def go_on(outcome: Outcome, release: Callable[[], None]) -> None:
            answer = partial(_release_and_respond, release, respond)
            self._or_refuse(
                lambda: self._start_call(head, plain_body(outcome, bytes_max), peer, answer), head, answer
            )

        self._inflating.start(Packed(content=body, wbits=GZIP, bytes_max=bytes_max, go_on=go_on))

    def _start_call(self, head: Head, body: bytes, peer: str, respond: Respond) -> None:
        tuning = self._tuning
        if head.route is not None:
            self.calls.start(head.route, body, respond)
        elif tuning is not None:
            check_client(peer, head)
            self._spawn(self._tune(tuning, body, respond), respond)

    async def _tune(self, control: BatchingControl, body: bytes, respond: Respond) -> None:
        respond(200, await tune(control, body))

    def _answer(self, head: Head, peer: str) -> tuple[Any, ...]:
        """Return (HTTP status, body[, header lines]) of a request that is answered at once."""
        path, _, query = head.target.partition(b"?")
        text_type = b"content-type: text/plain\r\n"
        if path == self._monitoring_path and head.method in {"GET", "HEAD"}:
            if not query:
                return 200, self._metrics.render().encode(), text_type
            return 400, b"Unexpected path: %b?%b. Should be %b" % (path, query, path), text_type
        if not is_api_path(path):
            return 404, error_answer(f"Not found: {path.decode('utf-8', 'replace')}")
        if head.method == "OPTIONS":
            if not re.search(rb"https?://", head.fields.get(b"origin", b"")):
                raise StatusError("FAILED_PRECONDITION", "Origin header is missing in CORS preflight")
            return 200, b""
        tuning = self._tuning
        if tuning is not None and self._is_tuning(head, "GET"):
            check_client(peer, head)
            return 200, orjson.dumps(tuning.in_force(), option=orjson.OPT_INDENT_2)
        route = find_route(head.method, head.target)
        return 200, self.calls.account(route)

    def _is_tuning(self, head: Head, method: str) -> bool:
        return head.target == TUNING_PATH and head.method == method and self._tuning is not None

    def _spawn(self, work: Coroutine[Any, Any, None], respond: Respond) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(partial(self._finish, respond))

    def _finish(self, respond: Respond, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            respond(*_failure(error))

    def _respond_in_gzip(self, respond: Respond, status: int, answer: bytes, *header_lines: bytes) -> None:
        lines = header_lines or (self.header_lines,)
        gzipped = b"content-encoding: gzip\r\nvary: accept-encoding\r\n"
        deflated_bytes_min = 1_024  # a smaller answer fits in one packet as it is
        deflated_on_loop_max = 1 << 16  # 2 ms of the event loop
        if len(answer) < deflated_bytes_min:
            respond(status, answer, *lines)
        elif len(answer) <= deflated_on_loop_max:
            respond(status, deflate(answer), *lines, gzipped)
        else:
            self._spawn(_deflate_and_respond(respond, status, answer, (*lines, gzipped)), respond)


@lru_cache(maxsize=1024)
def _find_call(target: bytes) -> Route:
    return find_route("POST", target)


async def _deflate_and_respond(
    respond: Respond, status: int, answer: bytes, lines: tuple[bytes, ...]
) -> None:
    respond(status, await asyncio.to_thread(deflate, answer), *lines)


def _release_and_respond(release: Callable[[], None], respond: Respond, *answer: Any) -> None:
    try:
        respond(*answer)
    finally:
        release()


def _failure(error: BaseException) -> tuple[int, bytes]:
    """Return (HTTP status, body) of the answer to a request that ended with `error`."""
    if isinstance(error, StatusError):
        return HTTP_CODES[error.code], error_answer(error.message)
    if isinstance(error, TooLargeError):
        return 413, error_answer(str(error))
    _logger.error("a request failed", exc_info=error)
    return 500, error_answer(FAULT)
