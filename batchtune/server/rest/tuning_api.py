"""Who may read and replace the batching parameters over HTTP, and how?"""

from __future__ import annotations

import asyncio
import ipaddress
import re

import orjson

from batchtune.errors import BatchingParametersError
from batchtune.server.models.batching_control import BatchingControl
from batchtune.wire.status import StatusError

_BODY_BYTES_MAX = 1 << 20  # a hundred times the longest set of parameters
_HOST = re.compile(rb"\[(?P<bracketed>[^\]]*)\](?::[0-9]*)?|(?P<plain>[^:]*)(?::[0-9]*)?")


def check_client(peer: str, host: bytes | None) -> None:
    """Let only programs of this machine in, and no page whose own name was made to point here (DNS rebinding).

    `peer` is the client's address, "" for a Unix socket; `host` what it calls us. Raises StatusError
    PERMISSION_DENIED.
    """
    if peer and not _is_loopback(peer):
        raise StatusError("PERMISSION_DENIED", "the tuning API answers only clients on this machine")
    if host is not None and not _names_this_machine(host):
        raise StatusError(
            "PERMISSION_DENIED",
            f"the tuning API answers to localhost only, not to {host.decode('utf-8', 'replace')[:100]}",
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
