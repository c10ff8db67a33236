"""Which call of the REST API does a method and a path name? The routes of TensorFlow Serving, to the letter.

http_rest_api_util.cc matches the raw path with its query, if any, in full and without regard to case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from batchtune.wire.status import StatusError

TUNING_PATH = b"/v1/tuning/batching_parameters"

_API = re.compile(rb"/v1/.*", re.IGNORECASE | re.DOTALL)
_CALL = re.compile(
    rb"/v1/models/([^/:]+)(?:(?:/versions/([0-9]+))|(?:/labels/([^/:]+)))?:(classify|regress|predict)",
    re.IGNORECASE,
)
_STATUS = re.compile(
    rb"/v1/models(?:/([^/:]+))?(?:(?:/versions/([0-9]+))|(?:/labels/([^/:]+)))?(?:/(metadata))?",
    re.IGNORECASE,
)
_VERSION_MAX = 2**63 - 1

Action = Literal["classify", "regress", "predict", "status", "metadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A call of the API on a model; `model_name` is "" when the path names none."""

    action: Action
    model_name: str
    version: int | None = None
    label: str | None = None


def is_api_path(raw_path: bytes) -> bool:
    """Whether the API answers for this path at all, if only with an error."""
    return _API.fullmatch(raw_path) is not None


def find_route(method: str, raw_path: bytes) -> Route:
    """Find the call that a request names.

    Raises:
        StatusError: INVALID_ARGUMENT for any other request, and for a version beyond int64.
    """
    if method == "POST" and (match := _CALL.fullmatch(raw_path)):
        name, version, label, action = match.groups()
        return _route(action.lower().decode(), name, version, label)
    if method == "GET" and (match := _STATUS.fullmatch(raw_path)):
        name, version, label, metadata = match.groups()
        return _route("status" if metadata is None else "metadata", name, version, label)
    raise StatusError(
        "INVALID_ARGUMENT", f"Malformed request: {method} {raw_path.decode('utf-8', 'replace')}"
    )


def _route(action: str, name: bytes | None, version: bytes | None, label: bytes | None) -> Route:
    if version is not None and (len(version) > 19 or int(version) > _VERSION_MAX):
        raise StatusError("INVALID_ARGUMENT", f"Failed to convert version: {version.decode()} to numeric.")
    return Route(
        action=_ACTIONS[action],
        model_name="" if name is None else unquote(name.decode("latin-1")),
        version=None if version is None else int(version),
        label=None if label is None else unquote(label.decode("latin-1")),
    )


_ACTIONS: dict[str, Action] = {
    "classify": "classify",
    "regress": "regress",
    "predict": "predict",
    "status": "status",
    "metadata": "metadata",
}
