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
    """A server: what pip installs for it, its app, and a word of the trap that its sweep must name. `writes_app`: the
    app is a script that writes what is served, a model."""

    packages: tuple[str, ...]
    app: str
    trap: str
    writes_app: bool = False


SERVERS = {
    "litserve": Served(("litserve==0.2.19",), "litserve_app.py", "clock starts when a worker becomes free"),
    "bentoml": Served(("bentoml==1.4.40",), "bentoml_app.py:Service", "not a waiting time"),
    "mlserver": Served(
        ("mlserver==1.7.1", "uvloop<0.22"), "mlserver_app.py:Model", "not the size of a batch"
    ),
    "ray-serve": Served(("ray[serve]==2.60.0",), "ray_app.py:app", "max_ongoing_requests, 5 unless set"),
    "transformers-serve": Served(
        ("transformers[serving]==5.24.0", "torch"),
        "tiny_llama.py",
        "in blocks of 256 tokens",
        writes_app=True,
    ),
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


def app_of(server: str, path: str, folder: Path) -> str:
    """What is swept: the app, or the model that it writes into `folder`, with the programs of `path`."""
    served = SERVERS[server]
    if not served.writes_app:
        return str(APPS / served.app)
    model = folder / "tiny"
    if not model.exists():
        command = ["python", str(APPS / served.app), str(model)]
        subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, check=True)
    return str(model)
