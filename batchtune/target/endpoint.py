"""Addresses and signature of a served model, and the control requests to it."""

from __future__ import annotations

import re
import socket
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, urlsplit

from batchtune.errors import ServerGoneError, TargetError, UsageError
from batchtune.scenario.spec.target import TargetSpec, TlsSpec
from batchtune.wire.signature import Signature

if TYPE_CHECKING:
    import grpc
    import httpx


@cache
def _known_errors() -> dict[str, tuple[re.Pattern[str], str]]:
    """Read `known_errors.toml`: name -> (pattern that matches the texts of the error, what it means)."""
    with Path(__file__).with_name("known_errors.toml").open("rb") as file:
        known = tomllib.load(file)
    return {name: (re.compile("|".join(own["patterns"])), own["meaning"]) for name, own in known.items()}


def is_out_of_range(text: str) -> bool:
    """Whether a server's error text says that an input is an index beyond the end of a table."""
    pattern, _ = _known_errors()["out_of_range"]
    return pattern.search(text) is not None


def meaning_of(text: str) -> str:
    """Explain an error text of a server in one line, by the table of known errors; "": the text is not in it."""
    return next((meaning for pattern, meaning in _known_errors().values() if pattern.search(text)), "")


def error_text(body: str) -> str:
    """Return the "error" of a JSON answer, else the first 300 characters of the body."""
    import orjson

    try:
        return str(orjson.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:300]


_PROBE_LIMIT_S: Final = 2.0
"""A readiness probe without an answer after this is sent again."""

RETURN_LIMIT_S: Final = 10.0
"""How long a server that answered before may refuse connections: a restart by its owner, or a reload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of one served model, by REST, by gRPC or by both."""

    model_name: str
    host: str = "127.0.0.1"
    # None: the server does not speak gRPC, or nobody knows its port; so for `rest_port`.
    grpc_port: int | None = None
    rest_port: int | None = None
    # None: the version that the server takes by itself.
    model_version: int | None = None
    # None: without TLS.
    tls: TlsSpec | None = None
    monitoring_path: str = "/monitoring/prometheus/metrics"
    # Where requests of protocol http go.
    path: str = "/"
    # The parameters with which the model's own graph batches, in words; "": it does not, or nobody knows.
    batches_inside: str = ""

    @property
    def grpc_authority(self) -> str:
        """HOST:PORT of gRPC, such as `127.0.0.1:8500` or `[::1]:8500`."""
        return f"{self._bracketed_host}:{self.grpc_port}"

    @property
    def rest_authority(self) -> str:
        """HOST:PORT of REST, such as `127.0.0.1:8501` or `[::1]:8501`."""
        return f"{self._bracketed_host}:{self.rest_port}"

    @property
    def rest_url(self) -> str:
        """The URL of the REST port, without a path: `http://127.0.0.1:8501`."""
        return f"{'https' if self.tls else 'http'}://{self.rest_authority}"

    @property
    def model_path(self) -> str:
        """URL path of the model in TensorFlow Serving's REST: `/v1/models/NAME`, then `/versions/N` where a version is
        given."""
        version = "" if self.model_version is None else f"/versions/{self.model_version}"
        return f"/v1/models/{quote(self.model_name, safe='')}{version}"

    @property
    def kserve_path(self) -> str:
        """URL path of the model in KServe v2's REST: `/v2/models/NAME`, then `/versions/N` where a version is given."""
        version = "" if self.model_version is None else f"/versions/{self.model_version}"
        return f"/v2/models/{quote(self.model_name, safe='')}{version}"

    def authority(self, transport: Literal["grpc", "rest"]) -> str:
        """Return the HOST:PORT that requests of this transport go to."""
        return self.grpc_authority if transport == "grpc" else self.rest_authority

    @property
    def _bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def require_launched(endpoint: Endpoint | None) -> Endpoint:
    """Return `endpoint`, that of a server which is launched before it is used.

    Raises:
        TargetError: `endpoint` is None: the server has not been launched yet.
    """
    if endpoint is None:
        raise TargetError("the server has not been launched yet")
    return endpoint


def control_client(endpoint: Endpoint, *, timeout_s: float = 5.0) -> httpx.Client:
    """Make an HTTP client for readiness, metadata, metrics and administration, never for load; the caller closes it. It
    takes paths of the REST URL, if there is a REST port, else whole URLs; proxies of the environment are not used.

    Raises:
        UsageError: a TLS file of the endpoint cannot be used.
    """
    import httpx

    def name_server(request: httpx.Request) -> None:
        if endpoint.tls and endpoint.tls.server_name and request.url.host == endpoint.host.lower():
            request.extensions["sni_hostname"] = endpoint.tls.server_name  # which is verified too

    base_url = endpoint.rest_url if endpoint.rest_port else ""
    verify = endpoint.tls.context() if endpoint.tls else False
    hooks = {"request": [name_server]}
    return httpx.Client(
        base_url=base_url, timeout=timeout_s, verify=verify, trust_env=False, event_hooks=hooks
    )


def answer_of(
    endpoint: Endpoint,
    path: str,
    *,
    method: str = "GET",
    json: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    what: str = "",
    hint: str = "",
) -> httpx.Response:
    """Send a control request to the server, at a path (`/v1/models/NAME`) or a whole URL, and return the answer with
    whatever status it has.

    Raises:
        TargetError: there is no answer; `what` ("": the URL) begins the message.
    """
    import httpx

    try:
        with control_client(endpoint, timeout_s=timeout_s) as client:
            return client.request(method, path, json=json, headers=headers)
    except httpx.HTTPError as error:
        what = what or (path if "://" in path else f"{endpoint.rest_url}{path}")
        raise TargetError(f"{what}: {in_words(error)}", hint=hint) from error


def listed_models(endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return model name -> owner, as a server of OpenAI's API lists them at /v1/models; {}: the server has no such
    list."""
    try:
        document = answer_of(endpoint, "/v1/models", headers=headers).json()
        entries = document["data"] if document["object"] == "list" else []
        return {str(entry["id"]): str(entry.get("owned_by")) for entry in entries}
    except (TargetError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def in_words(error: httpx.HTTPError) -> str:
    """Say in a few words why a control request got no answer, such as "no connection"."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error):
            return "no TLS connection: the server speaks http, not https"
        return f"no TLS connection: {error}" if "SSL" in str(error) else "no connection"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "the connection was closed without an answer"
    return str(error) or type(error).__name__


NO_GRPC: Final = "what answers there speaks no gRPC"


def grpc_words(error: grpc.RpcError) -> str:
    """Say in a few words why a control call by gRPC failed: `no connection`, or the status and its details,
    `UNAVAILABLE: …`."""
    code, details = error.code().name, str(error.details())
    if "HTTP/2" in details or "SETTINGS frame" in details:
        return NO_GRPC
    if "onnection refused" in details or "resolution failed" in details:
        return "no connection"
    return f"{code}: {details}"


def control_channel(endpoint: Endpoint) -> grpc.Channel:
    """Open a gRPC channel for control calls, never for load; the caller closes it.

    Raises:
        UsageError: a TLS file of the endpoint cannot be read.
    """
    import grpc

    # One request may have a large answer; grpcio's own limit is 4 MiB.
    any_length = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    if endpoint.tls is None:
        return grpc.insecure_channel(endpoint.grpc_authority, options=any_length)
    name = endpoint.tls.server_name
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    credentials = grpc.ssl_channel_credentials(*endpoint.tls.pem_files())
    return grpc.secure_channel(endpoint.grpc_authority, credentials, options=(*any_length, *named))


def wait_for(
    failure: Callable[[float], str],
    *,
    what: str,
    limit_s: float,
    still_alive: Callable[[], None] | None = None,
    step_s: float = 0.02,
    hint: str = "a big model may need a longer target.ready_timeout",
) -> None:
    """Call `failure` again and again, with the seconds that are left, until it returns "", which means success.

    `still_alive` is called before each call, and raises when waiting has become pointless; its error passes through.

    Raises:
        TargetError: `failure` still returns a text after `limit_s` seconds; the message is `what` and that text.
    """
    give_up, last = time.monotonic() + limit_s, "no answer"
    while (left_s := give_up - time.monotonic()) > 0.0:
        if still_alive is not None:
            still_alive()
        last = failure(left_s)
        if not last:
            return
        time.sleep(min(step_s, max(0.0, give_up - time.monotonic())))
    raise TargetError(f"{what} after {limit_s:g} s: {last}", hint=hint)


def connection_failure(endpoint: Endpoint) -> OSError | None:
    """Return why the server takes no connection within 1 s on its REST port (80 where it has none); None: it does."""
    try:
        with socket.create_connection((endpoint.host, endpoint.rest_port or 80), timeout=1.0):
            return None
    except OSError as error:
        return error


def refuses(endpoint: Endpoint) -> bool:
    """Whether the server's REST port refuses connections, since nothing listens there; False for any other failure."""
    return isinstance(connection_failure(endpoint), ConnectionRefusedError)


def require_there(endpoint: Endpoint, on_event: Callable[[str], None]) -> bool:
    """Check that a server that answered before takes connections; return whether it did not at first. A server that
    refuses them has RETURN_LIMIT_S to return, of which `on_event` gets a message.

    Raises:
        ServerGoneError: it still refuses them.
    """
    if not refuses(endpoint):
        return False
    on_event(
        f"{endpoint.rest_url} refuses connections: waiting up to {RETURN_LIMIT_S:g} s for the server to return"
    )
    try:
        wait_for(
            lambda _left_s: "connection refused" if refuses(endpoint) else "",
            what=f"the server at {endpoint.rest_url} has ended and did not return",
            limit_s=RETURN_LIMIT_S,
            step_s=0.2,
        )
    except TargetError as error:
        raise ServerGoneError(error.message, hint="start the server again, then go on") from error
    return True


def wait_until_ready(
    endpoint: Endpoint, *, limit_s: float = 120.0, still_alive: Callable[[], None] | None = None
) -> None:
    """Wait until the server reports that a version of the model is AVAILABLE. `still_alive`: raises when waiting is
    pointless.

    Raises:
        TargetError: the model failed to load, or is not AVAILABLE after `limit_s` seconds.
    """
    import httpx

    with control_client(endpoint) as client:

        def failure(left_s: float) -> str:
            try:
                answer = client.get(endpoint.model_path, timeout=min(_PROBE_LIMIT_S, left_s))
            except httpx.HTTPError as error:
                return in_words(error)
            return _unreadiness(answer.status_code, answer.text)

        what = f"model {endpoint.model_name!r} at {endpoint.rest_url} is not ready"
        wait_for(failure, what=what, limit_s=limit_s, still_alive=still_alive)


def url_failure(
    url: str, endpoint: Endpoint, *, status: Sequence[int] = (200,), body: str | None = None
) -> str:
    """Request the URL that shows whether the server is ready. Return "" where the answer has one of `status` and
    contains `body` (None: anything), else what is wrong, such as `http://127.0.0.1:8501/ready: HTTP 503: loading`.

    Raises:
        TargetError: `url` is no URL.
    """
    import httpx

    shown = re.sub(r"(?<=//)[^/@]*@", "", url)
    try:
        answer = answer_of(endpoint, url, timeout_s=_PROBE_LIMIT_S, what=shown)
    except TargetError as error:
        return error.message
    except httpx.InvalidURL as error:
        raise TargetError(f"target.ready: {error}") from error
    if answer.status_code in status and (body is None or body in answer.text):
        return ""
    return f"{shown}: HTTP {answer.status_code}: {answer.text[:200].strip()}"


def read_signature(endpoint: Endpoint, signature_name: str) -> Signature:
    """Read the signature called `signature_name` from the model's metadata, by TensorFlow Serving's REST.

    Raises:
        TargetError: no metadata, or no such signature (the message lists those there are).
    """
    from google.protobuf import json_format

    from batchtune.wire.tfserving.messages import SignatureDef
    from batchtune.wire.tfserving.tensors import signature_from_def

    definitions = _definitions(endpoint)
    if signature_name not in definitions:
        raise no_such_signature(endpoint, signature_name, definitions)
    try:
        definition = json_format.ParseDict(
            definitions[signature_name], SignatureDef(), ignore_unknown_fields=True
        )
        return signature_from_def(signature_name, definition)
    except (json_format.ParseError, ValueError) as error:
        raise TargetError(f"{endpoint.rest_url}{endpoint.model_path}/metadata: {error}") from error


def no_such_signature(endpoint: Endpoint, name: str, known: Iterable[str]) -> TargetError:
    """Make the error for a signature that the model lacks; its message lists the model's signatures, `known`."""
    there = ", ".join(sorted(known)) or "none"
    return TargetError(
        f"model {endpoint.model_name!r} has no signature {name!r}; it has: {there}",
        hint="set request.signature to one of them",
    )


def _definitions(endpoint: Endpoint) -> Mapping[str, Any]:
    """Read the signatures in the model's metadata, by name, as the REST API writes them."""
    path = f"{endpoint.model_path}/metadata"
    where = f"{endpoint.rest_url}{path}"
    own_json = "a server that has no such API, but a JSON of its own, takes target.kind: http"
    answer = answer_of(endpoint, path, hint="is the server up, and is this its port?")
    try:
        document = answer.json()
        if answer.status_code != 200:
            raise TargetError(
                f"{where}: HTTP {answer.status_code}: {document.get('error')}",
                hint="" if "error" in document else own_json,
            )
        return dict(document["metadata"]["signature_def"]["signature_def"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(
            f"{where}: HTTP {answer.status_code} without a model's metadata; is it TensorFlow Serving's REST port?",
            hint=own_json,
        ) from error


def _unreadiness(status_code: int, text: str) -> str:
    import orjson

    try:
        versions = orjson.loads(text)["model_version_status"]
        states = [(version["state"], version["status"]["error_message"]) for version in versions]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status_code}: {text[:200].strip()}"
    if any(state == "AVAILABLE" for state, _ in states):
        return ""
    failed = [message for state, message in states if state == "END" and message]
    if failed:
        raise TargetError(
            f"the model failed to load: {failed[0]}", hint=meaning_of(failed[0]) or "check target.model"
        )
    return f"state {', '.join(state for state, _ in states) or 'unknown'}"


def external_endpoint(
    *,
    model_name: str,
    rest_url: str | None,
    grpc_url: str | None,
    tls: TlsSpec | None = None,
    names: tuple[str, str] = ("--rest-url", "--grpc-url"),
) -> Endpoint:
    """Make the endpoint behind `--rest-url http[s]://HOST:PORT` and `--grpc-url HOST:PORT` (or `grpc[s]://…`).

    Where only one of two URLs has a scheme, that scheme decides for both whether they use TLS. `names`: names of the
    two options, for messages.

    Raises:
        UsageError: no URL, one without host or port or of another scheme, two of different hosts, or one with TLS and
            one without.
    """
    hosts, ports, secure = [], {}, set()
    for option, url, schemes in (
        (names[0], rest_url, ("http", "https")),
        (names[1], grpc_url, ("grpc", "grpcs")),
    ):
        if url is None:
            continue
        host, port, scheme = _split(option, url if "://" in url else f"{schemes[0]}://{url}", schemes)
        hosts.append(host)
        ports[option] = port
        if "://" in url:
            secure.add(scheme == schemes[1])
    if not hosts or len(set(hosts)) > 1:
        raise UsageError(f"{names[0]} and {names[1]} must name one host", hint="give the same host in both")
    if len(secure) > 1:
        raise UsageError(
            f"{names[0]} and {names[1]}: one is with TLS, the other without",
            hint="write https with grpcs, or http with grpc; or give only the URL that the requests go to",
        )
    return Endpoint(
        model_name=model_name,
        host=hosts[0],
        rest_port=ports.get(names[0]),
        grpc_port=ports.get(names[1]),
        tls=(tls or TlsSpec()) if True in secure else None,
    )


def http_endpoint(url: str, *, model_name: str, tls: TlsSpec | None = None) -> Endpoint:
    """Make the endpoint for a server whose requests go to one whole URL, `http[s]://HOST[:PORT]/PATH`.

    Raises:
        UsageError: `url` is no such URL.
    """
    parts = urlsplit(url)
    origin = f"{parts.scheme}://{parts.netloc}"
    if ":" not in parts.netloc.rpartition("]")[2]:
        origin += ":443" if parts.scheme == "https" else ":80"
    host, port, scheme = _split("target.url", origin, ("http", "https"))
    query = f"?{parts.query}" if parts.query else ""
    return Endpoint(
        model_name=model_name,
        host=host,
        rest_port=port,
        tls=(tls or TlsSpec()) if scheme == "https" else None,
        path=f"{parts.path or '/'}{query}",
    )


def running_endpoint(target: TargetSpec, model_name: str) -> Endpoint:
    """Make the endpoint of a server that runs already, at the URLs of the scenario's `target`.

    Raises:
        UsageError: a URL is missing, of another form or scheme, or with TLS where the other is without.
    """
    of_http = target.url and http_endpoint(target.url, model_name=model_name, tls=target.tls)
    if of_http and target.grpc_url is None:
        return of_http
    endpoint = external_endpoint(
        model_name=model_name,
        rest_url=of_http.rest_url if of_http else target.rest_url,
        grpc_url=target.grpc_url,
        tls=target.tls,
        names=("target.url" if of_http else "target.rest_url", "target.grpc_url"),
    )
    return replace(endpoint, path=of_http.path) if of_http else endpoint


def replicas_of(
    endpoint: Endpoint, addresses: Sequence[str], transport: Literal["grpc", "rest"]
) -> tuple[Endpoint, ...]:
    """Make an endpoint for each replica of the model of `endpoint`, given as HOST:PORT, which requests of this
    transport go to; with TLS where `endpoint` has it.

    Raises:
        UsageError: an address is not HOST:PORT.
    """
    replicas = []
    for address in addresses:
        host, port, _ = _split("target.endpoints", f"grpc://{address}", ("grpc", "grpcs"))
        grpc_port, rest_port = (port, None) if transport == "grpc" else (None, port)
        replicas.append(replace(endpoint, host=host, grpc_port=grpc_port, rest_port=rest_port))
    return tuple(replicas)


def _split(option: str, url: str, schemes: tuple[str, str]) -> tuple[str, int, str]:
    """Return host, port and scheme of a URL; raises UsageError for any other text, with `option` as what it
    was given for."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UsageError(
            f"{option}: a user's name and password in the URL would not be sent",
            hint=f"write {schemes[0]}://HOST:PORT; what each request must carry goes in request.headers",
        )
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{option}: {url!r}: {error}", hint="write HOST:PORT") from error
    beyond = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in schemes or not host or port is None or beyond:
        raise UsageError(f"{option}: {url!r} is not an address", hint=f"write {schemes[0]}://HOST:PORT")
    return host, port, parts.scheme
