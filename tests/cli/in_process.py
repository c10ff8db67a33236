"""`batchtune …` in this process, for what is not about the process: a second Python takes a second to start.

The host counts as quiet and the client as quick: beside the other half of the tests a run would be called disturbed and
be run three times.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from batchtune.cli import main
from batchtune.load.cluster import cluster_fleet
from batchtune.measure import caveats as host
from batchtune.measure.caveats import HostReading

QUIET = HostReading(monotonic_s=0.0, ticks=(), pressure_s=None, canary_s=0.01)


def answered(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """How the command ended and what it printed, called in this folder."""
    out, err = StringIO(), StringIO()
    command = ["batchtune", *map(str, words)]
    with (
        patch.object(host, "read_host", lambda *_words, **_options: QUIET),
        patch.object(cluster_fleet, "calibrate", lambda *_words, **_options: 1e6),
        patch.object(sys, "argv", command),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = _exit_code()
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
