"""Which endpoint do the URLs of a running server mean?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

from batchtune.errors import UsageError
from batchtune.scenario.spec.server_words import TlsSpec
from batchtune.target.endpoint import Endpoint, TlsOptions


def external_endpoint(
    *,
    model_name: str,
    rest_url: str | None,
    grpc_url: str | None,
    tls: TlsOptions | None = None,
    names: tuple[str, str] = ("--rest-url", "--grpc-url"),
) -> Endpoint:
    """The endpoint behind `--rest-url http[s]://HOST:PORT` and `--grpc-url HOST:PORT` (or `grpc[s]://…`).

    Of two, one without a scheme is as the other: with TLS or without.
    `names` are what the two are called in a message.

    Raises:
        UsageError: a URL without host or port, of another scheme, or two URLs of different hosts, or of which only one
            says TLS.
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
        tls=(tls or TlsOptions()) if True in secure else None,
    )


def replicas_of(
    endpoint: Endpoint, addresses: Sequence[str], transport: Literal["grpc", "rest"]
) -> tuple[Endpoint, ...]:
    """The same model at each HOST:PORT, where requests of this transport go; TLS as at the endpoint."""
    replicas = []
    for address in addresses:
        host, port, _ = _split("target.endpoints", f"grpc://{address}", ("grpc", "grpcs"))
        grpc_port, rest_port = (port, None) if transport == "grpc" else (None, port)
        replicas.append(replace(endpoint, host=host, grpc_port=grpc_port, rest_port=rest_port))
    return tuple(replicas)


def tls_options(spec: TlsSpec | None) -> TlsOptions | None:
    """What a scenario says of TLS."""
    if spec is None:
        return None
    return TlsOptions(
        ca_file=spec.ca_file,
        certificate_file=spec.certificate_file,
        key_file=spec.key_file,
        server_name=spec.server_name,
    )


def _split(option: str, url: str, schemes: tuple[str, str]) -> tuple[str, int, str]:
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
        raise UsageError(f"{option}: {url!r} is no address", hint=f"write {schemes[0]}://HOST:PORT")
    return host, port, parts.scheme
