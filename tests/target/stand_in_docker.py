"""A stand-in for `docker`: it keeps every command line, and runs the bundled server as the container.

The container is a process in a session of its own, which outlives a client that is killed, as with a real engine; `rm`
ends it. What only an engine can show (images, GPUs, its network) is not tested.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SCRIPT = """#!PYTHON
import contextlib, json, os, pathlib, signal, subprocess, sys
folder = pathlib.Path("FOLDER")
words = sys.argv[1:]
with (folder / "command_lines").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "run":
    fault = folder / "fault"
    if fault.exists():
        sys.exit(fault.read_text())
    at = next(number for number, word in enumerate(words) if number and not word.startswith("-"))
    options = [word.removeprefix("--").partition("=")[::2] for word in words[1:at]]
    mounts = [dict(part.split("=") for part in value.split(",") if "=" in part) for name, value in options if name == "mount"]
    arguments = words[at + 1 :]
    for mount in mounts:
        arguments = [word.replace("=" + mount["target"], "=" + mount["source"]) for word in arguments]
    server = subprocess.Popen([*SERVER, *arguments], start_new_session=True)
    (folder / "pid").write_text(str(server.pid))
    pathlib.Path(dict(options)["cidfile"]).write_text("c0ffee")
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    sys.exit(server.wait())
if words[0] == "inspect":
    print((folder / "pid").read_text())
if words[0] == "rm":
    with contextlib.suppress(OSError):
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
"""


class StandInDocker:
    """`program` is the executable; `fault` is what `run` says instead of running, `server` another one than ours."""

    def __init__(self, folder: Path, *, server: Path | None = None) -> None:
        self._folder = folder / "engine"
        self._folder.mkdir()
        self.program = self._folder / "docker"
        command = [sys.executable, "-m", "batchtune.server"] if server is None else [str(server)]
        text = SCRIPT.replace("PYTHON", sys.executable).replace("FOLDER", str(self._folder))
        self.program.write_text(text.replace("SERVER", repr(command)))
        self.program.chmod(0o755)

    @property
    def command_lines(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._folder / "command_lines").read_text().splitlines()]

    @property
    def pid(self) -> int:
        """Of the server in the container."""
        return int((self._folder / "pid").read_text())

    def fail(self, words: str) -> None:
        (self._folder / "fault").write_text(words)
