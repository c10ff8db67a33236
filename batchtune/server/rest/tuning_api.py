"""Who may read and replace the batching parameters over HTTP, and how?"""

from __future__ import annotations

import asyncio
import ipaddress
import re

import orjson

from batchtune.errors import BatchingParametersError
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.rest.message import PROXY_FIELDS, Head
from batchtune.wire.status import StatusError

_BODY_BYTES_MAX = 1 << 20  # a hundred times the longest set of parameters
_HOST = re.compile(rb"\[(?P<bracketed>[^\]]*)\](?::[0-9]*)?|(?P<plain>[^:]*)(?::[0-9]*)?")


def check_client(peer: str, head: Head) -> None:
    """Let only programs of this machine in, no page, its own name made to point here (DNS rebinding) or not, and no
    proxy, which lets others in: one that adds no field of its own is known by HTTP/1.0, as nginx speaks unless told.

    `peer` is the client's address, "" for a Unix socket. Raises StatusError PERMISSION_DENIED.
    """
    if (peer and not _is_loopback(peer)) or head.is_http_1_0 or not PROXY_FIELDS.isdisjoint(head.fields):
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


def in_force(control: BatchingControl) -> bytes:
    """The parameters in force, as JSON."""
    return orjson.dumps(control.in_force(), option=orjson.OPT_INDENT_2)


async def tune(control: BatchingControl, body: bytes) -> bytes:
    """Put the parameters of a JSON object in force; gives those that then are. Raises StatusError."""
    if len(body) > _BODY_BYTES_MAX:
        raise StatusError("INVALID_ARGUMENT", f"batching parameters exceed {_BODY_BYTES_MAX} bytes")
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
    spelled = _HOST.fullmatch(host.strip())
    if spelled is None:
        return False
    name = (spelled["bracketed"] or spelled["plain"] or b"").decode("latin-1").lower()
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
