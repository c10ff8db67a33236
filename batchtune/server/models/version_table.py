"""What is the state of each version of each model, and which servable answers for a name, version or label?

`find` runs on the event loop for every request: it reads dictionaries that are replaced, never changed, and takes
no lock. Everything else holds `changed`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from batchtune.server.models.loaded import LoadedVersion
from batchtune.server.models.model_config import ModelConfig
from batchtune.wire.status import StatusError

State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatus:
    """A version's state, as GetModelStatus shows it; the error is that of the last attempt to load."""

    version: int
    state: State
    error_code: str = "OK"
    error_message: str = ""


@dataclass(slots=True, kw_only=True)
class VersionEntry:
    """One version: `retry_at_s` (time.monotonic) is set while a failed load waits to be tried again."""

    status: VersionStatus
    servable: LoadedVersion | None = None
    attempts: int = 0
    retry_at_s: float | None = None


class VersionBook:
    """The versions by model name and number; `changed` guards and announces every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.entries: dict[str, dict[int, VersionEntry]] = {}
        self.labels: Mapping[str, Mapping[str, int]] = {}
        self._available: Mapping[str, Mapping[int, LoadedVersion]] = {}
        self._latest: Mapping[str, LoadedVersion] = {}

    def find(self, name: str, *, version: int | None = None, label: str | None = None) -> LoadedVersion:
        """The AVAILABLE version that is named or labelled, else the latest.

        Raises:
            StatusError: NOT_FOUND, or INVALID_ARGUMENT for an unknown label, or without a name.
        """
        if not name:
            raise StatusError("INVALID_ARGUMENT", "ModelSpec has no name specified.")
        if label is not None:
            version = self.labels.get(name, {}).get(label)
            if version is None:
                raise StatusError("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        if version is None:
            loaded = self._latest.get(name)
            asked = f"Latest({name})"
        else:
            loaded = self._available.get(name, {}).get(version)
            asked = f"Specific({name}, {version})"
        if loaded is None:
            raise StatusError("NOT_FOUND", f"Servable not found for request: {asked}")
        return loaded

    def statuses(self, name: str, *, version: int | None) -> list[VersionStatus]:
        """The states of a model's versions, newest first, or of one version.

        Raises:
            StatusError: NOT_FOUND where there is none.
        """
        with self.changed:
            statuses = [entry.status for entry in self.entries.get(name, {}).values()]
        if version is not None:
            statuses = [status for status in statuses if status.version == version]
        if not statuses:
            what = "any versions" if version is None else f"version {version}"
            raise StatusError("NOT_FOUND", f"Could not find {what} of model {name}")
        return sorted(statuses, key=lambda status: -status.version)

    def available(self, name: str) -> Mapping[int, LoadedVersion]:
        """The versions of a model that answer now."""
        return self._available.get(name, {})

    def publish(self, entry: VersionEntry, *, servable: LoadedVersion | None, status: VersionStatus) -> None:
        """Let requests find, or no longer find, a version."""
        with self.changed:
            entry.servable = servable
            entry.status = status
            self._available = {
                name: {
                    version: other.servable
                    for version, other in versions.items()
                    if other.servable is not None
                }
                for name, versions in self.entries.items()
            }
            self._latest = {
                name: versions[max(versions)] for name, versions in self._available.items() if versions
            }
            self.changed.notify_all()

    def announce(self, versions: Iterable[tuple[str, int]]) -> None:
        """Let versions that are about to be loaded be seen: START, unless they are being retried."""
        with self.changed:
            for name, version in versions:
                entries = self.entries.setdefault(name, {})
                if version not in entries or entries[version].status.state == "END":
                    entries[version] = VersionEntry(status=VersionStatus(version=version, state="START"))

    def failures(self, names: Iterable[str], complaints: Mapping[str, str]) -> list[str]:
        """Why each model without an AVAILABLE version has none, as ServerCore words it."""
        failures = []
        for name in names:
            if self.available(name):
                continue
            failed = [
                entry.status for entry in self.entries.get(name, {}).values() if entry.status.error_message
            ]
            failures += [
                f"{{name: {name} version: {status.version}}} due to error: {status.error_code}: {status.error_message}"
                for status in failed
            ] or [complaints.get(name, f"{{name: {name}}} has no version")]
        return failures

    def check_labels(self, model: ModelConfig) -> None:
        """A new label may name only an AVAILABLE version.

        Raises:
            StatusError: FAILED_PRECONDITION.
        """
        for label, version in model.labels.items():
            known = self.labels.get(model.name, {}).get(label) == version
            if version not in self.available(model.name) and not known:
                raise StatusError(
                    "FAILED_PRECONDITION",
                    f"Request to assign label to version {version} of model {model.name}, which is not currently "
                    "available for inference",
                )
