"""How is one target swept and its recommendation tried? Real commands as a user gives them, each a child process."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import Configuration
from tests.benchmarks.zoo.zoo_target import ZooTarget

ROOT = Path(__file__).parents[3]
START_UP_S = 60.0
"""For the server's start, the first compilation of the simulator and the end of a sweep, beyond its budget."""

ASKED_FOR = re.compile(r"--budget (\d+(?:\.\d+)?)(s|m|h)\b")
SECONDS_OF = {"s": 1.0, "m": 60.0, "h": 3600.0}
FRESH_REQUESTS = 600
"""Of a fresh load test: p95 has 30 requests above it."""

FRESH_S = (3.0, 30.0)
"""A fresh load test takes at least and at most so long."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What a sweep left behind; `document` is what it printed as JSON, {} for nothing."""

    exit_code: int
    seconds: float
    budget_s: float
    document: Mapping[str, Any]
    errors: str

    @property
    def configuration(self) -> Configuration | None:
        plain = self.document.get("configuration")
        return None if plain is None else Configuration.from_dict(plain)

    def asked_for_s(self) -> float | None:
        """The budget that the tool itself asks for; None: it asks for none."""
        asked = ASKED_FOR.search(self.errors + json.dumps(dict(self.document)))
        return None if asked is None else float(asked[1]) * SECONDS_OF[asked[2]]

    def said(self, text: str) -> bool:
        return text in (self.errors + json.dumps(dict(self.document))).lower()


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """One fresh load test of what was recommended.

    `spoilt_by`: "client" or "host" where the figures are not the server's; a load that failed has no answers.
    """

    throughput_rps: float
    p95_s: float
    error_ratio: float
    spoilt_by: str | None

    def inside(self, document: Mapping[str, Any]) -> bool:
        """Whether both figures lie within the intervals that the recommendation states."""
        return _inside(self.throughput_rps, document["throughput_rps"]) and _inside(
            self.p95_s, document["latency_s"]["p95"]
        )


def sweep(target: ZooTarget, scenario: Path, *, budget_s: float) -> Swept:
    """One `batchtune sweep` in the scenario's folder; interrupted when it takes far more than its budget."""
    started_s = time.monotonic()
    code, printed, errors = _run(
        ["sweep", str(scenario), "--json", "--results", str(scenario.parent / "results")],
        cwd=scenario.parent,
        within_s=2.0 * budget_s + 2.0 * START_UP_S,
    )
    return Swept(
        exit_code=code,
        seconds=time.monotonic() - started_s,
        budget_s=budget_s,
        document=_document(printed),
        errors=errors,
    )


def fresh_load(scenario: Path, swept: Swept, *, seed: int) -> Fresh:
    """One `batchtune load` of the recommended file at the load of the recommendation."""
    document = swept.document
    throughput_rps = float(document["throughput_rps"]["value"])
    duration_s = min(max(FRESH_REQUESTS / max(throughput_rps, 1e-9), FRESH_S[0]), FRESH_S[1])
    parameters = Path(document["run"]) / "batching_parameters.txt"
    batched = document["configuration"]["batching"] is not None
    command = ["load", str(scenario), "--json", "--quiet"]
    command += ["--batching-parameters-file", str(parameters)] if batched else ["--no-batching"]
    command += ["--set", f"load.seed={seed}", "--set", f"load.duration={duration_s:.1f}s"]
    if document["objective"] == "capacity":
        command += ["--rate", f"{float(document['rate_rps']):.6g}"]
    _, printed, errors = _run(command, cwd=scenario.parent, within_s=6.0 * duration_s + START_UP_S)
    points = _document(printed).get("points")
    if not points or points[0]["measurement"] is None:
        print(f"  fresh load failed: {' '.join(command)}: {errors.strip()[-500:]}", file=sys.stderr)
        return Fresh(throughput_rps=0.0, p95_s=math.inf, error_ratio=1.0, spoilt_by=None)
    measured = points[0]["measurement"]
    return Fresh(
        throughput_rps=float(measured["throughput_rps"]["value"]),
        p95_s=float(measured["latency_s"]["p95"]["value"]),
        error_ratio=float(measured["error_ratio"]),
        spoilt_by=points[0].get("spoilt_by"),
    )


def _run(arguments: list[str], *, cwd: Path, within_s: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; after `within_s` the child is interrupted, so that it stops its server itself."""
    child = subprocess.Popen(
        [sys.executable, "-m", "batchtune", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for how in (None, signal.SIGINT, signal.SIGKILL):
        if how is not None:
            os.killpg(child.pid, how)
        try:
            printed, errors = child.communicate(timeout=within_s if how is None else START_UP_S)
        except subprocess.TimeoutExpired:
            continue
        return child.returncode, printed, errors
    raise RuntimeError(f"process {child.pid} does not end")


def _document(printed: str) -> dict[str, Any]:
    try:
        document = json.loads(printed)
    except json.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _inside(value: float, stated: Mapping[str, Any]) -> bool:
    return float(stated["low"]) <= value <= float(stated["high"])
