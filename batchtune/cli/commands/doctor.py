"""`batchtune doctor`: says what is installed and usable here, and what to do about the rest."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from batchtune.cli.doctor_checks import (
    BACKENDS,
    IMPORT_LIMIT_S,
    WATCHED_WINDOWS,
    WINDOW_S,
    Check,
    Question,
    answers,
    backend,
    container_engine,
    cpus,
    gpu,
    memory,
    open_files,
    pressure,
    room_for_results,
    simulator,
    tensorflow_model_server,
    tritonserver,
    watch_host,
)
from batchtune.errors import TargetError
from batchtune.plain_values import to_plain
from batchtune.report.live_view import sweep_view
from batchtune.report.tables import paragraph, plain_console, text_width

LIMIT_S: Final = IMPORT_LIMIT_S + 5.0
"""Longest time for all checks together, in seconds, without watching the host's noise."""


def run_doctor(*, results: Path, json: bool, quiet: bool) -> int:
    """Run `batchtune doctor`. Returns the exit code: 0, or 7 where something is broken without which no sweep
    can run."""
    with sweep_view(quiet=quiet) as view:
        watched_s = WATCHED_WINDOWS * WINDOW_S
        view.event(f"watching this machine for {watched_s:g} s")
        noise = watch_host(lambda count: view.live(f"watched for {count * WINDOW_S:g} of {watched_s:g} s"))
        view.event(f"asking frameworks and programs, for {LIMIT_S:g} s at most")
        checks = {"host noise": noise}
        for name, check in answers(_questions(results), limit_s=LIMIT_S):
            checks[name] = check
            view.live(f"{len(checks)} asked, {name} last")
    lacking = lacking_for_a_sweep(checks)
    if json:
        listed = [{"name": name, **to_plain(check)} for name, check in checks.items()]
        print(json_text.dumps({"ready": not lacking, "lacking": lacking, "checks": listed}, indent=2))
    else:
        _print(checks, lacking)
    return TargetError.exit_code if lacking else 0


def _questions(results: Path) -> dict[str, Question]:
    """Return the checks by name, in the order in which they are shown."""
    return {
        "CPUs": cpus,
        "pressure": pressure,
        "memory": memory,
        "results": partial(room_for_results, results),
        "open files": open_files,
        **{name: partial(backend, wanted) for name, wanted in BACKENDS.items()},
        "numba": simulator,
        "GPU": gpu,
        "docker": container_engine,
        "TensorFlow Serving": tensorflow_model_server,
        "Triton": tritonserver,
    }


def lacking_for_a_sweep(checks: Mapping[str, Check]) -> list[str]:
    """Return the names of the checks that must be mended before any sweep can run."""
    return [name for name in ("results", "numba") if not _works(checks[name])]


def _works(check: Check) -> bool:
    """Whether what was checked can be used, if perhaps badly: a thing whose version is known could be
    imported."""
    return check.state == "ok" or check.version is not None


def _print(checks: Mapping[str, Check], lacking: list[str]) -> None:
    console, width = plain_console(), text_width()
    names = max(len(name) for name in checks)
    indent = " " * (len("optional") + 2 + names + 2)
    shown_as = {"ok": ("ready", "green"), "missing": ("optional", "dim"), "problem": ("problem", "red")}
    for name, check in checks.items():
        state, style = shown_as["problem" if name in lacking else check.state]
        head = f"{state:<8}  {name:<{names}}  "
        console.print(head, style=style, end="", markup=False, soft_wrap=True)
        shown = paragraph(f"{head}{check.text}", width=width, indent=indent)[len(head) :]
        console.print(shown, markup=False, soft_wrap=True)
        if check.advice:
            console.print(
                paragraph(f"{indent}→ {check.advice}", width=width, indent=f"{indent}  "),
                markup=False,
                soft_wrap=True,
            )
    if lacking:
        shown = f"Not ready for a sweep: mend {' and '.join(lacking)}."
    elif any(_works(checks[name]) for name in BACKENDS):
        shown = "Ready: `batchtune init --example quickstart` writes a scenario to sweep."
    else:
        shown = (
            "Ready for servers that run already. The bundled server has no framework to run a model: "
            f"{BACKENDS['TensorFlow'].install} (or onnx, or torch)"
        )
    console.print(shown, markup=False, soft_wrap=True)
