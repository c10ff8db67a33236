"""All that wants a GPU, in one command of at most nine minutes: is it right, how fast, and what limits it?

    python tests/benchmarks/gpu/gpu_checks.py prepare                     # where there is a network: wheels to .gpu-wheels
    python3 tests/benchmarks/gpu/gpu_checks.py run --wheels .gpu-wheels --out results/gpu       # on the GPU machine
    python tests/benchmarks/gpu/gpu_checks.py run --device cpu --tiny --out /tmp/gpu            # a rehearsal without a GPU

`run` needs Python, PyTorch and numpy there, and of the rest what is not among the wheels; no network. Each section is
a process of its own with a time of its own: one that fails, hangs or runs out of time leaves what it has found, and
the next one starts; the budgets are ample, so that they add up to more than the limit. The figures go to
OUT/gpu_checks.json, with provenance, the table to OUT/gpu_checks.txt and stdout. `--only NAMES` runs some sections
(each needs `models` before it, `server_share` the `ceiling` too).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[3])]

from tests.benchmarks.gpu.gpu_models import ROOT, Asked
from tests.benchmarks.gpu.gpu_table import table

# The function of each section and the seconds that it may take, in the order in which they run: the surest and most
# telling first.
SECTIONS = {
    "provenance": ("gpu_models.provenance", 45),
    "models": ("gpu_models.export_all", 60),
    "correctness": ("gpu_correctness.correctness", 60),
    "ceiling": ("gpu_ceiling.ceiling", 50),
    "server_share": ("gpu_served.server_share", 75),
    "text_recognition": ("gpu_served.text_recognition", 110),
    "imdb": ("gpu_served.imdb", 85),
    "search": ("gpu_served.search", 110),
    "resnet50": ("gpu_served.rule_against_search", 100),
}
LIMIT_S = 520
LEAST_S = 15
"""A section is not begun with less time left."""

LAST_WORDS_S = 12
"""So long a section that is out of time may take to stop its server."""

# Not on a bare machine with PyTorch, or only in another version; the wheels carry the versions installed here.
WHEELS = [
    "annotated-types",
    "click",
    "colorlog",
    "h11",
    "hpack",
    "httptools",
    "optuna",
    "orjson",
    "packaging",
    "protobuf",
    "pydantic",
    "pydantic-core",
    "tensorflow-serving-api",
    "tqdm",
    "typing-extensions",
    "typing-inspection",
    "uvloop",
]
PLATFORMS = ["_2_28", "_2_27", "_2_24", "_2_17", "_2_5", "2014", "1"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="download the wheels that the GPU machine lacks")
    prepare.add_argument("--folder", type=Path, default=ROOT / ".gpu-wheels")
    prepare.add_argument("--python", default="3.12", help="the GPU machine's Python")
    run = commands.add_parser("run", help="run the checks")
    run.add_argument("--wheels", type=Path, help="install these first, into a scratch folder")
    run.add_argument("--out", type=Path, default=ROOT / "results" / "gpu")
    run.add_argument("--device", default="cuda")
    run.add_argument("--tiny", action="store_true", help="small models and short loads: does it all run?")
    run.add_argument("--only", help="sections, separated by commas")
    run.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    one = commands.add_parser("section", help=argparse.SUPPRESS)
    one.add_argument("name")
    one.add_argument("asked", type=lambda text: Asked(**json.loads(text)))
    given = parser.parse_args()
    match given.command:
        case "prepare":
            return download(given.folder, given.python)
        case "run":
            return check(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    module, _, name = SECTIONS[given.name][0].partition(".")
    getattr(importlib.import_module(f"tests.benchmarks.gpu.{module}"), name)(given.asked)
    return 0


def download(folder: Path, python: str) -> int:
    """Wheels for CPython on x86-64 Linux, as installed here; their needs are among the names or on the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{name}=={importlib.metadata.version(name)}" for name in WHEELS]
    platforms = [f"--platform=manylinux{version}_x86_64" for version in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, "-d", str(folder), *names]
    done = subprocess.run(command, check=False)
    wheels = sorted(folder.glob("*.whl"))
    print(f"{folder}: {len(wheels)} wheels, {sum(one.stat().st_size for one in wheels) / 1e6:.1f} MB")
    return done.returncode


def check(given: argparse.Namespace) -> int:
    started_s = time.monotonic()
    chosen = list(SECTIONS)[1:] if given.only is None else given.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise SystemExit(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = {}
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as name:
        scratch = Path(name)
        environment = surroundings(scratch, given.wheels)
        for section in ["provenance", *chosen]:
            left_s = given.limit - (time.monotonic() - started_s) - LAST_WORDS_S
            budget_s = min(SECTIONS[section][1], left_s)
            if budget_s < LEAST_S:
                found: dict[str, Any] = {"status": "no time left"}
            else:
                found = run_section(section, given, scratch, environment, budget_s)
            print(f"-- {section}: {found['status']}, {found.get('seconds', 0):.0f} s", flush=True)
            sections[section] = found
            document = {
                **sections["provenance"].get("rows", {}),
                "sections": {name: one for name, one in sections.items() if name != "provenance"},
                "seconds": time.monotonic() - started_s,
            }
            (given.out / "gpu_checks.json").write_text(json.dumps(document, indent=1) + "\n")
    words = "\n".join(table(document)) + "\n"
    print(words)
    (given.out / "gpu_checks.txt").write_text(words)
    return int(any(found["status"] != "ok" for found in document["sections"].values()))


def surroundings(scratch: Path, wheels: Path | None) -> dict[str, str]:
    """The environment of every section: this checkout, the wheels, a cache that goes with the scratch folder."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if wheels is not None:
        site = str(scratch / "site")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--upgrade", "--target", site, *map(str, sorted(wheels.glob("*.whl")))]
        subprocess.run(command, check=True)
        paths.insert(0, site)
    cache = {"BATCHTUNE_CACHE_DIR": str(scratch / "cache")}
    return {
        **cache,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }


def run_section(
    section: str, given: argparse.Namespace, scratch: Path, environment: dict[str, str], budget_s: float
) -> dict[str, Any]:
    """What the section left behind, whatever became of it."""
    out, started_s = scratch / f"{section}.json", time.monotonic()
    asked = {"device": given.device, "tiny": given.tiny, "out": str(out), "budget_s": budget_s}
    command = [sys.executable, __file__, "section", section, json.dumps(asked)]
    with (scratch / f"{section}.log").open("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=scratch
        )
        status = ended(process, budget_s)
        log.seek(0)
        said = log.read()[-3000:]
    found = json.loads(out.read_text()) if out.exists() else {}
    if status == "ok" and fails(found.get("rows")):
        status = "in part"
    found |= {"status": status, "seconds": time.monotonic() - started_s, "budget_s": budget_s}
    if status not in {"ok", "in part"}:
        found["log"] = said
        print(said, file=sys.stderr)
    return found


def fails(found: object) -> bool:
    """Whether anything in there says that it failed."""
    if isinstance(found, dict):
        return any(found.get(name) for name in ("failure", "error")) or any(map(fails, found.values()))
    return isinstance(found, list) and any(map(fails, found))


def ended(process: subprocess.Popen[bytes], budget_s: float) -> str:
    """Out of time it is asked to stop, so that it stops its server; then it is made to."""
    try:
        code = process.wait(timeout=budget_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return "out of time"
    return "ok" if code == 0 else f"failed with {code}"


if __name__ == "__main__":
    sys.exit(main())
