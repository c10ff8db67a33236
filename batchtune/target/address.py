"""Who answers at an address that somebody gives: over which protocol, for which model?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from batchtune.errors import TargetError, UsageError
from batchtune.scenario.spec.request import Protocol
from batchtune.target.endpoint import NO_GRPC, Endpoint, control_client, external_endpoint, in_words
from batchtune.target.external import external_signature
from batchtune.target.model_files import readable
from batchtune.target.tfserving import TUNING_PATH
from batchtune.wire.signature import DEFAULT_SIGNATURE

_ADDRESS: Final = re.compile(
    r"(?:(?P<scheme>https?|grpcs?)://)?(?P<authority>(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5})(?P<path>/.*)?"
)
_MODEL: Final = re.compile(r"/(?:v[12]/models/)?(?P<name>[^/:]+)")


_TUNED: Final = ("max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches")
"""What a sweep changes by the tuning API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A model that a running server serves; of the two URLs one is set."""

    model: str
    protocol: Protocol
    rest_url: str | None = None
    grpc_url: str | None = None

    def endpoint(self) -> Endpoint:
        return external_endpoint(model_name=self.model, rest_url=self.rest_url, grpc_url=self.grpc_url)


def is_address(text: str) -> bool:
    """Whether it reads as HOST:PORT or a URL, and is no file."""
    if "://" not in text and _ADDRESS.fullmatch(text) is None:
        return False
    with readable(Path(text)):
        return not Path(text).exists()


def answering_at(text: str) -> Address:
    """The model behind `HOST:PORT/MODEL`, or a URL of its API; the protocol is found out unless the scheme tells.

    Raises:
        UsageError: no address, or none that says which of several models is meant.
        TargetError: nobody answers there.
    """
    parts = _ADDRESS.fullmatch(text)
    if parts is None:
        raise UsageError(
            f"{text}: no address of a server", hint="write HOST:PORT/MODEL, or http://HOST:PORT/MODEL"
        )
    named = _MODEL.match(parts["path"] or "")
    model = named["name"] if named else None
    scheme, authority = parts["scheme"], parts["authority"]
    if scheme in ("grpc", "grpcs"):
        return _by_grpc(text, f"{scheme}://{authority}", model)
    rest_url = f"{scheme or 'http'}://{authority}"
    endpoint = Endpoint(model_name="", **_rest_of(rest_url))
    spoken = _spoken(endpoint)
    if spoken is None and scheme is not None:
        raise _no_model_server(endpoint, model)
    if spoken is None:
        try:
            return _by_grpc(text, f"grpc://{authority}", model)
        except TargetError as error:
            if NO_GRPC not in error.message:
                raise
            raise _no_model_server(endpoint, model) from error
    if model is None:
        model = _only_model(text, rest_url) if spoken == "kserve_rest" else _no_model(text)
    return Address(model=model, protocol=spoken, rest_url=rest_url)


def attachable(address: Address) -> dict[str, Any] | None:
    """The keys of `target` for a sweep of this server, which it takes parameters for and gets what it had at the end;
    None: nobody may reconfigure it through its address."""
    if address.rest_url is None:
        return None
    if address.protocol == "kserve_rest":
        name = str(_told(address, "/v2").get("name"))
        return {"kind": "triton", "rest_url": address.rest_url} if "triton" in name else None
    url = f"{address.rest_url}{TUNING_PATH}"
    if "enable_batching" not in _told(address, TUNING_PATH):
        return None
    change: dict[str, Any] = {name: f"{{{{{name}}}}}" for name in _TUNED}
    request = {"url": url, "method": "PUT", "read": url, "body": "{{changed}}"}
    return {
        "kind": "http",
        "url": address.rest_url,
        "set": {"request": {**request, "change": {"enable_batching": True, **change}}},
        "means": {"rows": _TUNED[0], "wait_micros": _TUNED[1], "concurrency": _TUNED[2]},
    }


def how_to_attach(address: Address) -> str:
    """What to do where the address alone is not enough to reconfigure the server."""
    if "mlserver" in str(_told(address, "/v2").get("name")):
        return "an MLServer reads a file: see `batchtune init my_app.py:Model --server mlserver`"
    return (
        "a running server of another kind takes parameters by a scenario of kind: http (target.set.request)"
    )


def _told(address: Address, path: str) -> dict[str, Any]:
    """The JSON object there; empty where there is none."""
    import httpx

    try:
        with control_client(address.endpoint()) as client:
            document = client.get(path).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _rest_of(rest_url: str) -> dict[str, Any]:
    known = external_endpoint(model_name="", rest_url=rest_url, grpc_url=None)
    return {"host": known.host, "rest_port": known.rest_port, "tls": known.tls}


def _spoken(endpoint: Endpoint) -> Protocol | None:
    """KServe's REST where it tells its extensions, TensorFlow Serving's where the answer is JSON; None: neither.

    Raises:
        TargetError: nobody answers.
    """
    import httpx

    try:
        with control_client(endpoint) as client:
            answer = client.get("/v2")
    except (httpx.ConnectError, httpx.TimeoutException) as error:
        raise TargetError(
            f"{endpoint.rest_authority}: {in_words(error)}", hint="is the server up, and is this its port?"
        ) from error
    except httpx.HTTPError:
        return None
    try:
        document = answer.json()
    except ValueError:
        return None
    return "kserve_rest" if answer.status_code == 200 and "extensions" in document else "rest"


def _no_model_server(endpoint: Endpoint, model: str | None) -> TargetError:
    """What answers there serves no model by any API that is known here."""
    import httpx

    path = f"/v1/models/{quote(model or 'MODEL', safe='')}"
    try:
        with control_client(endpoint) as client:
            answer = f"answers HTTP, but GET {path} gives {client.get(path).status_code}"
    except httpx.HTTPError as error:
        answer = in_words(error)
    return TargetError(
        f"{endpoint.rest_authority}: {answer}: neither TensorFlow Serving nor KServe v2",
        hint="give the port of the model server; any other HTTP server takes a scenario with target.kind: http",
    )


def _by_grpc(text: str, grpc_url: str, model: str | None) -> Address:
    """TensorFlow Serving's API where the model's metadata are told so, else KServe's."""
    address = Address(model=model or _no_model(text), protocol="grpc", grpc_url=grpc_url)
    try:
        external_signature(address.endpoint(), DEFAULT_SIGNATURE)
    except TargetError as error:
        if "UNIMPLEMENTED" in error.message:
            return Address(model=address.model, protocol="kserve_grpc", grpc_url=grpc_url)
        if "no connection" in error.message or NO_GRPC in error.message:
            raise
    return address


def _only_model(text: str, rest_url: str) -> str:
    """The one model that a KServe server with a repository says is there."""
    import httpx

    try:
        with control_client(Endpoint(model_name="", **_rest_of(rest_url))) as client:
            index = client.post("/v2/repository/index", json={}).json()
        names = sorted({entry["name"] for entry in index if entry.get("state", "READY") == "READY"})
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        names = []
    return names[0] if len(names) == 1 else _no_model(text, names)


def _no_model(text: str, names: list[str] | None = None) -> str:
    there = f"; there are {', '.join(names)}" if names else ""
    raise UsageError(f"{text}: which model of that server?", hint=f"give {text.rstrip('/')}/MODEL{there}")
