"""Finds out what answers at an address of the user's: by which protocol, and with which model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from batchtune.errors import TargetError, UsageError
from batchtune.scenario.examples import running_scenario
from batchtune.scenario.spec.workload import Protocol
from batchtune.target.endpoint import (
    NO_GRPC,
    Endpoint,
    answer_of,
    control_client,
    external_endpoint,
    in_words,
    listed_models,
)
from batchtune.target.external import external_signature
from batchtune.target.model_files import readable
from batchtune.target.tfserving import TUNING_PATH
from batchtune.wire.signature import DEFAULT_SIGNATURE

_ADDRESS: Final = re.compile(
    r"(?:(?P<scheme>https?|grpcs?)://)?(?P<authority>(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5})(?P<path>/.*)?"
)
_MODEL: Final = re.compile(r"/(?:v[12]/models/)?(?P<name>[^/:]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A model that a running server serves; exactly one of the two URLs is set."""

    model: str
    protocol: Protocol
    rest_url: str | None = None
    grpc_url: str | None = None

    def endpoint(self) -> Endpoint:
        """Return where the model answers."""
        return external_endpoint(model_name=self.model, rest_url=self.rest_url, grpc_url=self.grpc_url)


def is_address(text: str) -> bool:
    """Whether a text given for a model is an address, HOST:PORT or a URL, rather than the path of an existing file.

    Raises:
        UsageError: this user may not look at that path.
    """
    if "://" not in text and _ADDRESS.fullmatch(text) is None:
        return False
    with readable(Path(text)):
        return not Path(text).exists()


def answering_at(text: str) -> Address:
    """Find out which model answers at `HOST:PORT/MODEL`, or at a URL of a server's API, and by which protocol: that of
    the scheme (grpc, grpcs), or without one of these the first that works.

    Raises:
        UsageError: `text` is no address, or does not say which of several models is meant.
        TargetError: nobody answers there, or what answers is no model server.
    """
    parts = _ADDRESS.fullmatch(text)
    if parts is None:
        raise UsageError(
            f"{text}: no address of a server", hint="write HOST:PORT/MODEL, or http://HOST:PORT/MODEL"
        )
    model, scheme, authority = _model_in(parts), parts["scheme"], parts["authority"]
    if (endpoint := _rest_endpoint(parts)) is None:
        return _by_grpc(text, f"{scheme}://{authority}", model)
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
        model = _only_model(text, endpoint) if spoken == "kserve_rest" else _no_model(text)
    return Address(model=model, protocol=spoken, rest_url=endpoint.rest_url)


def attachable(address: Address) -> dict[str, Any] | None:
    """Return the keys of a scenario's `target`, such as `{"kind": "triton", "rest_url": "http://127.0.0.1:8000"}`, for
    a sweep that changes this running server and restores it at the end; None: the server cannot be reconfigured through
    its address."""
    if address.rest_url is None:
        return None
    if address.protocol == "kserve_rest":
        name = str(_document(address.endpoint(), "/v2").get("name"))
        return {"kind": "triton", "rest_url": address.rest_url} if "triton" in name else None
    url = f"{address.rest_url}{TUNING_PATH}"
    if "enable_batching" not in _document(address.endpoint(), TUNING_PATH):
        return None
    tuned = ("max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches")
    change: dict[str, Any] = {name: f"{{{{{name}}}}}" for name in tuned}
    off = {"enable_batching": False}
    request = {"url": url, "method": "PUT", "read": url, "body": "{{changed}}", "off": off}
    return {
        "kind": "http",
        "url": address.rest_url,
        "set": {"request": {**request, "change": {"enable_batching": True, **change}}},
        "means": {"rows": tuned[0], "wait_micros": tuned[1], "concurrency": tuned[2]},
    }


def preset_at(text: str) -> str | None:
    """Return the text of a scenario, as YAML, for the server that answers at `HOST:PORT[/MODEL]`, if there is a preset
    for it: a Ray Serve whose dashboard answers, or an MLServer of this machine; None: neither.

    Raises:
        UsageError: there are several models and none is named, or the server cannot be given parameters.
    """
    parts = _ADDRESS.fullmatch(text)
    if parts is None or (endpoint := _rest_endpoint(parts)) is None:
        return None
    name = _model_in(parts)
    if isinstance((status := _document(endpoint, "/api/serve/applications/")).get("applications"), dict):
        return _ray_serve(text, endpoint, status, name)
    if "mlserver" in str(_document(endpoint, "/v2").get("name")):
        return _mlserver(text, endpoint, name or _only_model(text, endpoint))
    return None


def language_model_at(text: str) -> dict[str, Any] | None:
    """Return the scenario of a load test, as plain data, for the server of OpenAI's API that answers at
    `HOST:PORT[/MODEL]` or at the URL of one of its calls; None: no such server answers.

    Its lengths and limits are guesses, from the preset of the server that the answer names, else of transformers-serve.

    Raises:
        UsageError: there are several models and none is named, or the named one is missing.
    """
    parts = _ADDRESS.fullmatch(text)
    if parts is None or (endpoint := _rest_endpoint(parts)) is None:
        return None
    owners = listed_models(endpoint)
    if not owners:
        return None
    call = (parts["path"] or "").strip("/").removeprefix("v1").strip("/")
    named = "" if call in ("chat/completions", "completions", "embeddings", "models") else call
    model = next(iter(owners)) if not named and len(owners) == 1 else named.removeprefix("models/")
    if model not in owners:
        _no_model(parts["authority"], sorted(owners))
    owner = owners[model] if owners[model] in ("vllm", "sglang") else "transformers-serve"
    document = yaml.safe_load(
        running_scenario(owner, "model", {"http://127.0.0.1:{port}": endpoint.rest_url})
    )
    asked, metrics = document["request"]["openai"], document["target"].get("metrics")
    asked |= {"api": call if call in ("completions", "embeddings") else "chat", "model": model}
    slo = document["slo"]
    if asked["api"] == "embeddings":
        slo = {"p95": "500ms"}
        del asked["output"], asked["ignore_eos"]
    url = f"{endpoint.rest_url}/v1/{'chat/completions' if asked['api'] == 'chat' else asked['api']}"
    return {
        "name": model,
        "target": {"kind": "http", "model": model, "url": url}
        | ({"metrics": metrics} if metrics and _is_there(endpoint, metrics["url"]) else {}),
        "request": document["request"],
        "load": {"arrivals": "closed", "concurrency": 8},
        "slo": slo,
        "objective": "throughput",
    }


def http_app_at(text: str) -> str | None:
    """Return the URL of an app that answers HTTP by no API that is known here; None: `text` is no URL of HTTP, or the
    server speaks TensorFlow Serving's or KServe's API.

    Raises:
        TargetError: nobody answers there, or not by HTTP.
    """
    parts = _ADDRESS.fullmatch(text)
    if parts is None or not parts["scheme"] or (endpoint := _rest_endpoint(parts)) is None:
        return None
    # An app may have an `error` for a path that it lacks too; TensorFlow Serving has these words.
    if _spoken(endpoint) == "kserve_rest" or "Malformed request" in str(
        _document(endpoint, "/v2").get("error")
    ):
        return None
    answer_of(endpoint, parts["path"] or "/", hint="is this the port of the app?")
    return text


def _is_there(endpoint: Endpoint, url: str) -> bool:
    with suppress(TargetError):
        return answer_of(endpoint, url).status_code == 200
    return False


def _ray_serve(text: str, dashboard: Endpoint, status: Mapping[str, Any], name: str | None) -> str:
    """Return the scenario of an application of Ray Serve. A PUT replaces all applications, so that the others
    are sent as they are."""
    applications = status["applications"]
    name = next(iter(applications)) if name is None and len(applications) == 1 else name
    if name is None or name not in applications:
        name = _no_model(text, sorted(applications))
    deployed = {other: application.get("deployed_app_config") for other, application in applications.items()}
    if None in deployed.values():
        raise UsageError(
            f"{text}: an application there was deployed from Python, so that nothing can be sent back to it",
            hint="deploy it from a file: `serve build my_app:app -o serve.yaml`, then `serve deploy serve.yaml`",
        )
    words = {"max_batch_size", "batch_wait_timeout_s"}
    taking = (
        at
        for at, deployment in enumerate(deployed[name].get("deployments") or [])
        if words <= (deployment.get("user_config") or {}).keys()
    )
    if (at := next(taking, None)) is None:
        raise UsageError(
            f"{text}: no deployment of {name} has {' and '.join(sorted(words))} in its user_config",
            hint="what it needs: `batchtune init my_app.py:app --server ray-serve`",
        )
    proxy = replace(dashboard, rest_port=int((status.get("http_options") or {}).get("port") or 8000))
    return running_scenario(
        "ray-serve",
        name,
        {
            "http://127.0.0.1:8000/": f"{proxy.rest_url}{applications[name].get('route_prefix') or '/'}",
            "http://127.0.0.1:8265": dashboard.rest_url,
            "http://127.0.0.1:{port}/metrics": _metrics_page(dashboard) or "{port}",
            "every: 1s": "every: 10s",  # Ray's default
            "applications.default": f"applications.{name}",
            "deployments.0": f"deployments.{at}",
        },
        [config for other, config in deployed.items() if other != name],
    )


def _metrics_page(dashboard: Endpoint) -> str | None:
    """Return the URL of the metrics page of a Ray cluster of one node; None: several nodes, or the page cannot
    be read from here."""
    nodes = (_document(dashboard, "/nodes?view=summary").get("data") or {}).get("summary") or []
    alive = [node["raylet"] for node in nodes if (node.get("raylet") or {}).get("state") == "ALIVE"]
    if len(alive) == 1:
        url = f"{replace(dashboard, rest_port=alive[0].get('metricsExportPort')).rest_url}/metrics"
        if _is_there(dashboard, url):
            return url
    return None


def _mlserver(text: str, endpoint: Endpoint, name: str) -> str:
    """Return the scenario of a model of MLServer, whose settings lie in the folder that it was started with."""
    for folder in _folders_listening(endpoint.rest_port):
        for file in folder.rglob("model-settings.json"):
            if _named(file) == name:
                places = {
                    "http://127.0.0.1:{port}": endpoint.rest_url,
                    "{scratch}/model-settings.json": str(file),
                }
                return running_scenario("mlserver", name, places)
    raise UsageError(
        f"{text}: an MLServer reads its parameters from model-settings.json, and that of {name} is not found here",
        hint="run batchtune on the server's machine, as its user; `batchtune load` measures it from anywhere",
    )


def _folders_listening(port: int | None) -> Iterator[Path]:
    """Yield the folders among the words of the command line whose process listens on the port, as seen from
    where it runs."""
    import psutil

    with suppress(psutil.Error):  # where only root may look, nobody is found
        for there in psutil.net_connections("tcp"):
            if there.status == psutil.CONN_LISTEN and there.laddr[1:2] == (port,) and there.pid:
                process = psutil.Process(there.pid)
                words = (Path(process.cwd()) / word for word in process.cmdline())
                yield from (path for path in words if path.is_dir())


def _named(settings: Path) -> str:
    """Return the name of the model in a model-settings.json; "": it is no such file."""
    try:
        return str(json.loads(settings.read_bytes())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _document(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Return the JSON object at a path of the server; empty where there is none."""
    try:
        document = answer_of(endpoint, path).json()
    except (TargetError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _rest_endpoint(parts: re.Match[str]) -> Endpoint | None:
    """Return the endpoint of an address's REST API; None: its scheme says gRPC."""
    if parts["scheme"] in ("grpc", "grpcs"):
        return None
    rest_url = f"{parts['scheme'] or 'http'}://{parts['authority']}"
    return external_endpoint(model_name="", rest_url=rest_url, grpc_url=None)


def _model_in(parts: re.Match[str]) -> str | None:
    named = _MODEL.match(parts["path"] or "")
    return named["name"] if named else None


def _spoken(endpoint: Endpoint) -> Protocol | None:
    """Return the protocol of a server's REST: KServe's where GET /v2 lists extensions, TensorFlow Serving's
    where the answer is JSON with an error; None: neither.

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
    if answer.status_code == 200 and "extensions" in document:
        return "kserve_rest"
    return "rest" if "error" in document else None


def _no_model_server(endpoint: Endpoint, model: str | None) -> TargetError:
    """Make the error for a server that serves no model by any API that is known here."""
    import httpx

    path = f"/v1/models/{quote(model or 'MODEL', safe='')}"
    try:
        with control_client(endpoint) as client:
            answer = f"answers HTTP, but GET {path} gives {client.get(path).status_code}"
    except httpx.HTTPError as error:
        answer = in_words(error)
    return TargetError(
        f"{endpoint.rest_authority}: {answer}: neither TensorFlow Serving nor KServe v2",
        hint="give the port of the model server; any other HTTP server takes a scenario with target.kind: http, one of "
        "OpenAI's API with request.protocol: openai too: `batchtune init http://HOST:PORT/PATH` writes one",
    )


def _by_grpc(text: str, grpc_url: str, model: str | None) -> Address:
    """Return the address of a gRPC server: by KServe's API where TensorFlow Serving's is not implemented,
    else by the latter."""
    address = Address(model=model or _no_model(text), protocol="grpc", grpc_url=grpc_url)
    try:
        external_signature(address.endpoint(), DEFAULT_SIGNATURE)
    except TargetError as error:
        if "UNIMPLEMENTED" in error.message:
            return Address(model=address.model, protocol="kserve_grpc", grpc_url=grpc_url)
        if "no connection" in error.message or NO_GRPC in error.message:
            raise
    return address


def _only_model(text: str, endpoint: Endpoint) -> str:
    """Return the one model that is ready on a KServe server with a repository; raises UsageError where there
    are none or several."""
    try:
        index = answer_of(endpoint, "/v2/repository/index", method="POST", json={}).json()
        names = sorted({entry["name"] for entry in index if entry.get("state", "READY") == "READY"})
    except (TargetError, ValueError, KeyError, TypeError, AttributeError):
        names = []
    return names[0] if len(names) == 1 else _no_model(text, names)


def _no_model(text: str, names: list[str] | None = None) -> str:
    """Raise UsageError: which model is meant is not known; `names` are those to choose from."""
    there = f"; there are {', '.join(names)}" if names else ""
    raise UsageError(f"{text}: which model of that server?", hint=f"give {text.rstrip('/')}/MODEL{there}")
