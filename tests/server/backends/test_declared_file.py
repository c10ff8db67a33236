"""A YAML file beside a model is read in a bounded time and memory, and its keys are found again by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchtune.server.backends.declared_file import read_declared
from batchtune.wire.status import StatusError

BILLIONS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]\n" for depth in range(1, 10)
)


def read(tmp_path: Path, text: str | bytes) -> Any:
    path = tmp_path / "stages.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_declared(path)


def test_a_document_and_the_lines_of_its_keys(tmp_path: Path) -> None:
    file = read(tmp_path, "# a comment\nx: {y: 1, z: [2, 3]}\nw: &w {v: yes}\nagain: *w\nmerged: {<<: *w}\n")
    assert file.data == {
        "x": {"y": 1, "z": [2, 3]}, "w": {"v": True}, "again": {"v": True}, "merged": {"v": True},
    }  # fmt: skip
    assert {key: file.lines[key] for key in ("x", "x.z[1]", "w.v", "again", "again.v")} == {
        "x": 2, "x.z[1]": 2, "w.v": 3, "again": 4, "again.v": 3,
    }  # fmt: skip
    for what, line in (("x.y: wrong", 2), ("w.u: missing", 3), ("the file: wrong", 1), ("xy: wrong", 1)):
        assert file.fault(what).message == f"{tmp_path / 'stages.yaml'}:{line}: {what}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BILLIONS, ":1: an alias that contains itself, or too large a document"),
        ("a: &a {b: 1}\nc: [" + "*a, " * 10_000 + "]", ":1: an alias that contains itself, or too large"),
        ("a: &a [*a]", ":1: an alias that contains itself"),
        ("a: *b", ":1: not YAML: found undefined alias"),
        ("[" * 100_000, ":1: nested too deep"),
        ("a: 1\nb: 2\na: 3\n", ":3: a: given twice, first on line 1"),
        ("a:\n  - 1\n  - 2026-13-13\n", ":3: a.1: '2026-13-13' cannot be read: month must be in 1..12"),
        ("a: 1\nb: c: d\n", ":2: not YAML: mapping values are not allowed"),
        ("a: 1\n--- {}\n", ":2: not YAML: but found another document"),
        (b"a: \xff", ": cannot be read: 'utf-8' codec"),
        ("a: \0", ": not YAML: "),
        ("# " + "x" * 262_144, ": more than 262,144 bytes; expected a small file"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(StatusError) as raised:
        read(tmp_path, text)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert raised.value.message.startswith(f"{tmp_path / 'stages.yaml'}{what}")
    assert len(raised.value.message) < 2_000


def test_a_tag_makes_no_object_and_an_empty_file_no_document(tmp_path: Path) -> None:
    assert read(tmp_path, "a: !!python/object/apply:os.system [ls]").data == {"a": ["ls"]}
    file = read(tmp_path, "")
    assert (file.data, file.lines) == (None, {})
    assert len(file.fault(f"a: {[0] * 10_000!r}").message) < 1_200  # a value is shown by its beginning
