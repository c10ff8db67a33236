"""Runs a script on a Ray cluster of its own: Ray keeps threads and handlers until its process ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def answer_of(script: Path, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What the script prints last, as JSON; where it fails, its stderr and what Ray's processes said."""
    folder = tempfile.mkdtemp(prefix="bt-ray-")  # sockets lie in it, whose paths have 107 characters at most
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "90",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    try:
        process = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if process.returncode != 0:
            raise AssertionError(
                f"{script.name} ended with {process.returncode}\n{errors_in(folder)}\n{process.stderr[-6000:]}"
            )
        answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return answer
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def errors_in(folder: str) -> str:
    """Last lines of what processes of Ray wrote to stderr."""
    logs = sorted({path.resolve() for path in Path(folder).rglob("*.err")})
    texts = ((path, path.read_text(errors="replace").strip()) for path in logs)
    return "\n".join(f"{path.name}: {text[-600:]}" for path, text in texts if text)
