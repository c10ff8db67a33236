"""One section of gpu_checks.py in a process of its own: python gpu_sections.py NAME --device cuda --out FILE …

Whatever a section finds it keeps at once, so that a section that is stopped has still said something.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a section is to do; `keep` writes `rows` down under a name."""

    device: str
    tiny: bool
    scratch: Path
    out: Path
    ends_s: float
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.out.write_text(json.dumps({"rows": self.found}))

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("--device", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = Asked(
        device=given.device,
        tiny=given.tiny,
        scratch=given.scratch,
        out=given.out,
        ends_s=time.monotonic() + given.budget - 3.0,
    )
    section(given.section)(asked)
    return 0


def section(name: str) -> Callable[[Asked], None]:
    match name:
        case "provenance":
            from tests.benchmarks.gpu.gpu_models import provenance as run
        case "models":
            from tests.benchmarks.gpu.gpu_models import export_all as run
        case "correctness":
            from tests.benchmarks.gpu.gpu_correctness import correctness as run
        case "ceiling":
            from tests.benchmarks.gpu.gpu_ceiling import ceiling as run
        case "server_share":
            from tests.benchmarks.gpu.gpu_served import server_share as run
        case "text_recognition":
            from tests.benchmarks.gpu.gpu_served import text_recognition as run
        case "imdb":
            from tests.benchmarks.gpu.gpu_served import imdb as run
        case "search":
            from tests.benchmarks.gpu.gpu_search import search as run
        case "resnet50":
            from tests.benchmarks.gpu.gpu_search import rule_against_search as run
        case _:
            raise SystemExit(f"no such section: {name}")
    return run


if __name__ == "__main__":
    sys.exit(main())
