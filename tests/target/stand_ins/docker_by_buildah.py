"""What `docker` means on a machine without an engine: buildah runs the containers, in the network of this machine.

`run` takes the words that a sweep gives; as docker's own client it only watches: the container is a child of nobody, and
outlives a client that is killed. A container's files lie under BUILDAH_STATE, by its id.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

STATE = Path(os.environ["BUILDAH_STATE"])


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for ignored in ("--rm", "--init"):
        parser.add_argument(ignored, action="store_true")
    for repeated in ("--publish", "--mount"):
        parser.add_argument(repeated, action="append", default=[])
    parser.add_argument("--cidfile", type=Path, required=True)
    parser.add_argument("--cpuset-cpus", default="0-1023")
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    container = said("buildah", "from", "--pull-never", f"localhost/{asked.image}")
    volumes = []
    for mount in asked.mount:
        parts = dict(part.partition("=")[::2] for part in mount.split(","))
        volumes.append(f"--volume={parts['source']}:{parts['target']}:ro")
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    words = ["taskset", "--cpu-list", asked.cpuset_cpus, "buildah", "run", "--isolation", "chroot"]
    command = [*words, *volumes, container, "--", asked.entrypoint, *asked.command]
    program = subprocess.Popen(command, start_new_session=True)
    (STATE / container).write_text(str(program.pid))
    asked.cidfile.write_text(container)

    while (code := program.poll()) is None:
        first = inside(container, asked.entrypoint)
        while signals and first:  # one that comes while the container begins waits for its first process
            first[0].send_signal(signals.pop())
        time.sleep(0.02)
    remove(container)
    return code


def inside(container: str, program: str = "") -> list[psutil.Process]:
    """The processes that run in it, its first one first, without buildah's own; only those that name a program."""
    try:
        below = psutil.Process(int((STATE / container).read_text())).children(recursive=True)
        words = [(one, one.cmdline()) for one in below]
    except (OSError, psutil.Error):
        return []
    return [
        one
        for one, given in words
        if "buildah" not in "".join(given[:1] or ["buildah"]) and any(program in word for word in given)
    ]


def remove(container: str) -> None:
    for one in inside(container):
        one.kill()
    subprocess.run(["buildah", "rm", container], check=False, capture_output=True)
    (STATE / container).unlink(missing_ok=True)


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(words: list[str]) -> int:
    match words:
        case ["run", *rest]:
            return run(rest)
        case ["inspect", "--format={{.State.Pid}}", container]:
            first = inside(container)
            print(first[0].pid if first else 0)
        case ["rm", "--force", container]:
            remove(container)
        case ["version", *_]:
            print(said("buildah", "version").splitlines()[0])
        case _:
            print(f"unknown: {words}", file=sys.stderr)
            return 125
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
