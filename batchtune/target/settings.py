"""Gives a server of kind http its parameters: by variables, flags, a file, or a request that takes them live."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import Configuration, flag_text
from batchtune.errors import ScenarioError, TargetError, UsageError, WrongAnswerError
from batchtune.scenario.places import filled, holes, places_of, values_at, with_values
from batchtune.scenario.spec.http_server import (
    CHANGED,
    FileSetting,
    RequestSetting,
    SettingSpec,
    UntilSpec,
)
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.endpoint import Endpoint, answer_of, wait_for


def with_places(spec: TargetSpec, places: Mapping[str, str]) -> TargetSpec:
    """Return the target with every place, such as {port}, replaced by its value in all texts; `places`: place -> value,
    such as `{"{port}": "8501"}`."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(below) for name, below in value.items()}
        if isinstance(value, list):
            return [replaced(below) for below in value]
        for place, text in places.items():
            value = value.replace(place, text) if isinstance(value, str) else value
        return value

    return TargetSpec.model_validate(
        replaced(spec.model_dump(mode="json", by_alias=True, exclude_unset=True))
    )


class Settings:
    """Applies parameters to one server of kind http as `target.set` says, and keeps what was there before.

    `on_event`: called with a message where somebody else changed the settings meanwhile. `record`: called before the
    server is changed, whenever the result of `kept` has changed. `replaced`: what is to be put back was set by somebody
    else after the first change.
    """

    def __init__(
        self,
        spec: SettingSpec,
        endpoint: Endpoint,
        *,
        rows_per_request: int,
        limit_s: float,
        attached: bool,
        on_event: Callable[[str], None],
        record: Callable[[], None],
    ) -> None:
        self._attached = attached
        self._on_event = on_event
        self._record = record
        self._spec = spec
        self._endpoint = endpoint
        self._rows_per_request = rows_per_request
        self._limit_s = limit_s
        self._file_before: bytes | None = None
        self._written: bytes | None = None
        self._document: Any = None
        self._given: list[
            dict[str, Any]
        ] = []  # what the server may have from a trial, as `_figures` returns it
        self._changed = False
        self._is_written = False
        self._in_force: dict[str, Any] = {}  # what was read after the last change, as `_figures` returns it
        self.replaced = False

    def environment(self, configuration: Configuration) -> dict[str, str]:
        """Return name -> value, such as `{"MAX_BATCH_SIZE": "8"}`, of the environment variables that pass parameters to
        the server when it is started."""
        values = self._values(configuration)
        return {
            variable: flag_text(values[name]) for name, variable in self._spec.env.items() if name in values
        }

    def flags(self, configuration: Configuration) -> list[str]:
        """Return the words, such as `--max-batch-size` and `8`, that pass parameters to the server, to be appended to
        `target.launch`."""
        values = self._values(configuration)
        named = [(flag, values[name]) for name, flag in self._spec.flag.items() if name in values]
        return [word for flag, value in named for word in (flag, flag_text(value))]

    def present(self) -> dict[str, Any]:
        """Read the parameters in force: the server's own name -> value, as far as `set.request.read` or the settings
        file shows them; {"enable_batching": False} where batching is off.

        Raises:
            TargetError: the server does not answer, or its answer cannot be read.
            ScenarioError: the server shows no such place as `set.request.change` names.
        """
        self._look()
        return self.shown()

    def shown(self, document: Any = None) -> dict[str, Any]:
        """Return the parameters that `document`, an answer to `set.request.read` parsed from JSON, and the settings
        file show, in the form of `present`; `document` None: the answer that is to be put back."""
        places: list[tuple[Any, Mapping[str, Any]]] = []
        request, file = self._spec.request, self._spec.file
        if request is not None and request.read is not None:
            part = self._part(document)
            if request.off is not None and part == request.off:
                return {"enable_batching": False}
            places.append((part, request.change))
        if file is not None and self._file_before is not None and file.text is None:
            places.append((_json(self._file_before, file.path), file.change))
        values = {}
        for document, changes in places:
            for place, template in changes.items():
                there = values_at(document, place)
                if there and isinstance(template, str) and template == f"{{{{{next(holes(template), '')}}}}}":
                    values[next(holes(template))] = there[0]
        return {name: value for name, value in values.items() if value is not None}

    @property
    def tells(self) -> bool:
        """Whether the server or its file shows what is in force; a parameter that is absent there has the server's
        default."""
        request = self._spec.request
        return self._file_before is not None or (request is not None and request.read is not None)

    def original(self) -> dict[str, Any]:
        """Return what is to be put back, as `present` read it, in the form of `kept`.

        Raises:
            UsageError: what puts it back needs a parameter that is not shown.
        """
        self._require_restorable()
        return self.kept()

    def kept(self) -> dict[str, Any]:
        """Return what is to be put back, for JSON, and by what the last trial is recognized.

        "file": the text of the settings file before the first change (None: no file). "document": the answer to
        `set.request.read`. "written": the text last written into the file (None: nothing was). "given": what was sent
        last.
        """
        return {
            "file": _text(self._file_before),
            "document": self._document,
            "written": _text(self._written),
            "given": self._given,
        }

    @property
    def restorable(self) -> bool:
        """Whether what was there before the first change can be read, and thus put back."""
        request = self._spec.request
        return self._spec.file is not None or (request is not None and request.read is not None)

    def words(self, document: Any = None) -> str:
        """Return the server's parameters as text for a message: `max_batch_size 8, batch_timeout_micros 0`; `the
        parameters from before the run` where none is shown.

        `document`: the answer to `set.request.read`, parsed from JSON; None: the answer that is to be put back.
        """
        shown = ", ".join(f"{name} {value}" for name, value in self.shown(document).items())
        return shown or "the parameters from before the run"

    def _require_restorable(self) -> None:
        request = self._spec.request
        if request is None or (request.read is None and self._spec.file is None):
            return
        unknown = sorted({*holes(request.body)} - {CHANGED, *self.shown()})
        if unknown:
            shown = request.read or "the settings file"
            raise UsageError(
                f"target.set.request.body: {{{{{unknown[0]}}}}} cannot be restored at the end: {shown} shows no "
                f"{unknown[0]}",
                hint="give its place in target.set.request.change, below target.set.request.at",
            )

    def _require_places(self, kind: str, shows: str, part: Any, change: Mapping[str, Any]) -> None:
        """Check that each place that is to be changed is there, or can be: a server need not show what nobody has set,
        but the object around it.

        `kind`: request or file, of `target.set`; `shows`: what has the part, and a verb. A file may have none of the
        places at its top, which is how a server is left at its defaults.

        Raises:
            ScenarioError: what would hold a place is missing, or a key of nearly its name is beside it.
        """
        there = places_of(part)
        absent = [place for place in change if not values_at(part, place)]
        for place in absent:
            above, _, key = place.rpartition(".")
            unchanged = [other.rpartition(".") for other in there if other not in change]
            near = get_close_matches(key, {name for around, _, name in unchanged if around == above}, n=1)
            hint = f"did you mean {place.removesuffix(key) + near[0]!r}?" if near else ""
            holds = any(around is None or isinstance(around, Mapping) for around in values_at(part, above))
            if holds and not near and (above or kind == "file" or len(absent) < len(change)):
                continue
            why = ""
            if not near:
                if kind == "request":
                    self._require_restorable()
                why = ", nor another place of change" if holds else f", and no object at {above!r}"
                hint = f"there are: {', '.join(there[:12])}" if there else "it shows no parameter"
            keys = ("target", "set", kind, "change")
            said = f"{'.'.join(keys)}: {place}: {shows} no such key{why}"
            raise ScenarioError(said, hint=hint, path=(*keys, place))

    def take_kept(self, kept: Mapping[str, Any]) -> bool:
        """Take over what is to be put back at the end, from the result of `kept()` in an earlier process. Return
        whether this was done.

        False: what the server has now is not from that process; somebody has set it since, and it is what has to be put
        back.

        Raises:
            TargetError: what the server has now cannot be read.
        """
        now = self._read()
        self._document, self._given = kept.get("document"), list(kept.get("given") or ())
        if not self._is_known(now):
            self._document, self._given = now, []
            return False
        self._file_before = _bytes(kept.get("file"))
        self._written = _bytes(kept.get("written"))
        self._changed = True
        return True

    def write(self, configuration: Configuration) -> None:
        """Write the parameters into the settings file; does nothing without `set.file`.

        Raises:
            TargetError: the file that is there is not JSON.
        """
        file = self._spec.file
        if file is None:
            return
        self._look_at_file()
        self._is_written = True
        values = self._values(configuration)
        path = Path(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.text is not None:
            text = str(filled(file.text, values))
        else:
            before = file.base if self._file_before is None else _json(self._file_before, file.path)
            text = json.dumps(_changed(before, file, values), indent=2) + "\n"
        self._keep_edited(path)
        self._written = text.encode()
        self._record()
        path.write_bytes(self._written)

    def send(self, configuration: Configuration) -> None:
        """Send the parameters to the server, unless it has them, and wait until they are in force; does nothing without
        `set.request`.

        Where somebody else has set parameters since the last trial, these are put back at the end, and not those from
        before the sweep.

        Raises:
            WrongAnswerError: the server has no such path or method.
            TargetError: it refuses them, or they are not in force in time.
        """
        if self._spec.request is None:
            return
        self._look()
        now = self._read() if self._changed else self._document
        self._notice(now)
        self._changed = True
        request, values = self._spec.request, self._values(configuration)
        is_off = configuration.batching is None and request.off is not None
        changed = request.off if is_off else _changed(self._part(), request, values)
        self._send(request, {**values, CHANGED: changed}, now)

    def other_words(self) -> str:
        """Return in words, as `words` does, the parameters that an attached server has now, if somebody else changed
        those sent last; "": nobody did, or the server does not show them."""
        if not (self._attached and self._changed and self._in_force):
            return ""
        try:
            now = self._read()
        except TargetError:
            return ""  # the next request shows it
        if self._figures(self._part(now)) == self._in_force:
            return ""
        self._notice(now)
        return self.words(now)

    def _notice(self, now: Any) -> None:
        """Let an attached server have back what somebody else set: neither this process nor a trial did."""
        if not self._attached or self._is_known(now):
            return
        before, self._document, self.replaced = self.words(), now, True
        self._on_event(
            f"somebody else set {self.words()} during the sweep: at the end the server gets that back, not {before}"
        )

    def put_back(self) -> bool:
        """Put back the settings file and the parameters from before the first change, if there was one. Return False
        where these are not known.

        Raises:
            TargetError: the server does not take them.
        """
        changed = self._changed or self._is_written
        self._changed = self._is_written = False
        file, request = self._spec.file, self._spec.request
        if not self.restorable:
            return False
        if not changed:
            return True
        if file is not None:
            self._keep_edited(Path(file.path))
        if file is not None and self._file_before is None:
            Path(file.path).unlink(missing_ok=True)
        elif file is not None and self._file_before is not None:
            Path(file.path).write_bytes(self._file_before)
        if request is not None:
            self._send(request, {**self.shown(), CHANGED: self._part()}, self._read())
        return True

    def _read(self) -> Any:
        """Return the answer to `set.request.read` now; None without one.

        Raises:
            TargetError: there is none, or it is not JSON.
        """
        request = self._spec.request
        if request is None or request.read is None:
            return None
        document = self._answer("GET", request.read)
        if request.change and not isinstance(document, dict | list):
            raise TargetError(
                f"GET {request.read}: not JSON: {str(document)[:100]!r}",
                hint="target.set.request.read is to return the parameters",
            )
        return document

    def _figures(self, part: Any) -> dict[str, Any]:
        """Return what tells one configuration from another in the part that is changed: the values by their
        place, {"off": True} where it is `set.request.off`; {} where nothing does."""
        request = self._spec.request
        if request is None or request.read is None:
            return {}
        off = request.off
        if isinstance(off, Mapping) and isinstance(part, Mapping) and off.items() <= part.items():
            return {"off": True}
        return {place: values_at(part, place) for place in request.change}

    def _is_known(self, document: Any) -> bool:
        """Whether the server has what is to be put back, or what a trial gave it."""
        given = self._figures(self._part(document))
        return given in (self._figures(self._part()), *self._given) or self._spec.file is not None

    def _values(self, configuration: Configuration) -> dict[str, Any]:
        return configuration.server_values(self._rows_per_request)

    def _look(self) -> None:
        """Note what is there before the first change."""
        self._look_at_file()
        request = self._spec.request
        if self._changed or request is None or request.read is None:
            return
        self._document = self._read()
        part = self._part()
        if part != request.off and self._figures(part) != {"off": True}:
            self._require_places("request", f"{request.read} returns", part, request.change)

    def _look_at_file(self) -> None:
        file = self._spec.file
        if file is None or self._changed or self._is_written:
            return
        path = Path(file.path)
        self._file_before = path.read_bytes() if path.is_file() else None
        if self._file_before is not None and file.text is None:
            self._require_places("file", f"{path} has", _json(self._file_before, file.path), file.change)

    def _keep_edited(self, path: Path) -> None:
        """Copy the settings file beside itself where its content is neither the original nor what was written
        last."""
        there = path.read_bytes() if path.is_file() else None
        if there is None or there in (self._file_before, self._written):
            return
        copy = path.with_name(f"{path.name}.edited-{hashlib.sha256(there).hexdigest()[:8]}")
        copy.write_bytes(there)
        self._on_event(f"{path} was edited during the sweep or after it: the edited file is copied to {copy}")

    def _part(self, document: Any = None) -> Any:
        """Return the part of a document read (None: the one from before) that is changed and sent back, at
        `set.request.at`; None without `set.request.read`."""
        request = self._spec.request
        if request is None or request.read is None:
            return None
        there = values_at(self._document if document is None else document, request.at)
        if not there or there[0] is None:
            raise TargetError(
                f"{request.read} has no value at {request.at!r}",
                hint="is the application there, deployed from a file, and is target.set.request.at its place?",
            )
        return there[0]

    def _send(self, request: RequestSetting, values: Mapping[str, Any], now: Any) -> None:
        """Send the parameters, unless the server has them, and wait until they are in force; `now`: what it has."""
        wanted, there = self._figures(values.get(CHANGED)), self._figures(self._part(now))
        if not wanted or wanted != there or self._spec.file is not None:
            self._given = [there, wanted] if wanted else []
            self._record()
            try:
                self._answer(request.method, request.url, filled(request.body, values))
            finally:
                now = self._made()
        if request.until is not None:
            self._wait(request, request.until, filled(request.until.value, values))
            now = None
        if request.read is None:
            return
        now = self._part(self._read() if now is None else now)
        self._in_force = self._figures(now)
        for place in request.change:
            asked = values_at(values.get(CHANGED), place)
            if asked != (in_force := values_at(now, place)):
                shown, meant = (", ".join(map(str, values)) or "absent" for values in (in_force, asked))
                raise TargetError(f"{request.method} {request.url}: {place} is {shown} after it, not {meant}")

    def _made(self) -> Any:
        """Read what the server made of what was sent, which need not be what was asked for, and note it; None: it
        cannot be read."""
        with contextlib.suppress(TargetError):
            now = self._read()
            made = self._figures(self._part(now))
            if made and made not in self._given:
                self._given.append(made)
                self._record()
            return now
        return None

    def _wait(self, request: RequestSetting, until: UntilSpec, wanted: Any) -> None:
        def failure(_left_s: float) -> str:
            now = values_at(self._answer("GET", until.url), until.path)
            there = now[0] if now else None
            if there in until.failed:
                raise TargetError(f"{until.url}: {until.path} is {there} after {request.method}")
            return "" if there == wanted else f"{until.path} is {there}, not {wanted}"

        if not list(holes(wanted)):
            wait_for(failure, what=until.url, limit_s=self._limit_s, step_s=0.1)

    def _answer(self, method: str, url: str, body: Any = None) -> Any:
        answer = answer_of(
            self._endpoint,
            url,
            method=method,
            json=body,
            headers=None if self._spec.request is None else self._spec.request.headers,
            timeout_s=self._limit_s,
            what=f"{method} {url}",
            hint="is the server up, and is this its address?",
        )
        if answer.status_code >= 300:
            said = f"{method} {url}: HTTP {answer.status_code}: {answer.text[:300].strip()}"
            if answer.status_code not in (404, 405):
                raise TargetError(said)
            hint = "the server has no such path or method: correct target.set.request."
            if method == "GET":
                raise TargetError(said, hint=f"{hint}read")
            raise WrongAnswerError(said, hint=f"{hint}url")
        try:
            return answer.json() if answer.content else None
        except ValueError:
            return answer.text


def _changed(document: Any, setting: FileSetting | RequestSetting, values: Mapping[str, Any]) -> Any:
    """Return the document with the configuration's values at the setting's places, where they are known."""
    changes = {
        place: filled(template, values)
        for place, template in setting.change.items()
        if all(name in values for name in holes(template))
    }
    return with_values(document, changes)


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "surrogateescape")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


def _json(content: bytes, path: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise TargetError(f"{path}: not JSON: {error}", hint="give target.set.file a text instead") from error
