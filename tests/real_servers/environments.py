"""Environments of the real servers, one each, as their pins clash: made by pip on first use, and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

APPS = Path(__file__).parent / "apps"


@dataclass(frozen=True)
class Served:
    """A server: what pip installs for it, its app, and a word of the trap that its sweep must name."""

    packages: tuple[str, ...]
    app: str
    trap: str


SERVERS = {
    "litserve": Served(("litserve==0.2.19",), "litserve_app.py", "clock starts when a worker becomes free"),
    "bentoml": Served(("bentoml==1.4.40",), "bentoml_app.py:Service", "no waiting time"),
    "mlserver": Served(
        ("mlserver==1.7.1", "uvloop<0.22"), "mlserver_app.py:Model", "not the size of a batch"
    ),
    "ray-serve": Served(("ray[serve]==2.60.0",), "ray_app.py:app", "max_ongoing_requests, 5 unless set"),
}


def path_with(server: str, root: Path) -> str:
    """The PATH that has a server's programs first, from its environment in `root`.

    Raises:
        RuntimeError: pip cannot have it.
    """
    folder = root / server
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True)
        command = [folder / "bin/pip", "install", "--quiet", *SERVERS[server].packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{server} cannot be had here: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
