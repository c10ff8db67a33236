"""`batchtune doctor`: says what is installed and usable here, and what to do about the rest."""

from __future__ import annotations

import json as json_text
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, Literal

from batchtune.errors import TargetError
from batchtune.measure.caveats import (
    MOST_CANARY_CHANGE,
    MOST_FOREIGN_RATIO,
    MOST_STEAL_RATIO,
    HostGuard,
    HostNoise,
    read_host,
)
from batchtune.plain_values import to_plain
from batchtune.provenance import gpus
from batchtune.report.findings import print_json
from batchtune.report.live_view import sweep_view
from batchtune.report.tables import paragraph, plain_console, text_width
from batchtune.system import control_groups, quota_cpus, schedulable_cpus, text_of
from batchtune.target.container import ask
from batchtune.units import percentage


@dataclass(frozen=True, slots=True)
class Check:
    """What a check of `batchtune doctor` found.

    `state`: "ok"; "missing", it is not there, which may be intended; "problem", it is there and does not
    work. `text`: the finding in one phrase. `advice`: what to do, "" for nothing. `version`: of what is
    installed, None where it does not say.
    """

    state: Literal["ok", "missing", "problem"]
    text: str
    advice: str = ""
    version: str | None = None


def run_doctor(*, results: Path, json: bool, quiet: bool) -> int:
    """Run `batchtune doctor`. Returns the exit code: 0, or 7 where something is broken without which no sweep
    can run."""
    limit_s = IMPORT_LIMIT_S + 5.0  # for all checks together, but the watching
    with sweep_view(quiet=quiet) as view:
        watched_s = WATCHED_WINDOWS * WINDOW_S
        view.event(f"measuring the noise of this machine for {watched_s:g} s")
        noise = watch_host(lambda count: view.live(f"measured for {count * WINDOW_S:g} of {watched_s:g} s"))
        view.event(f"checking frameworks and programs, for {limit_s:g} s at most")
        checks = {"host noise": noise}
        for name, check in answers(_questions(results), limit_s=limit_s):
            checks[name] = check
            view.live(f"{len(checks)} checked, {name} last")
    lacking = lacking_for_a_sweep(checks)
    if json:
        listed = [{"name": name, **to_plain(check)} for name, check in checks.items()]
        print_json({"ready": not lacking, "lacking": lacking, "checks": listed})
    else:
        _print(checks, lacking)
    return TargetError.exit_code if lacking else 0


def _questions(results: Path) -> dict[str, Callable[[], Check]]:
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
    """Return the names of those failed checks that every sweep needs."""
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
        shown = f"Not ready for a sweep: fix {' and '.join(lacking)}."
    elif any(_works(checks[name]) for name in BACKENDS):
        wrong = [name for name, check in checks.items() if check.state == "problem"]
        despite = f", despite the problem above ({', '.join(wrong)})" if wrong else ""
        shown = f"Ready{despite}: `batchtune init --example quickstart` writes a scenario to sweep."
    else:
        shown = (
            "Ready to measure running servers. To serve models here, install a framework: "
            f"{BACKENDS['TensorFlow'][-1]} (or onnx, or torch)"
        )
    console.print(paragraph(shown, width=width), markup=False, soft_wrap=True)


def answers(questions: Mapping[str, Callable[[], Check]], *, limit_s: float) -> Iterator[tuple[str, Check]]:
    """Run all checks at once, and yield (name, what it found) in the order of `questions`.

    A check that has not ended after `limit_s` seconds is a problem; its thread is left behind and ends with
    this process.
    """
    give_up_s = time.monotonic() + limit_s
    boxes = {name: _asked_apart(question) for name, question in questions.items()}
    for name, box in boxes.items():
        try:
            check = box.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except Empty:
            check = Check("problem", f"no answer within {limit_s:g} s")
        yield name, check


def _asked_apart(question: Callable[[], Check]) -> SimpleQueue[Check]:
    """Run a check in a thread of its own; the queue returned gets its one result, a problem where it raises."""
    box: SimpleQueue[Check] = SimpleQueue()

    def answer() -> None:
        try:
            box.put(question())
        except Exception as error:  # noqa: BLE001 - what a check cannot do is its finding, whatever it is
            box.put(Check("problem", f"could not be checked: {type(error).__name__}: {error}"))

    Thread(target=answer, daemon=True).start()
    return box


WATCHED_WINDOWS: Final = 8
WINDOW_S: Final = 0.5


def cpus(root: Path = Path("/")) -> Check:
    """Check how many CPUs this process may use, by affinity and by the quota of its control groups.

    Fewer than 2, and a quota below the number by affinity, are problems. `root`: where /proc and /sys are, for tests.
    """
    count, quota = len(schedulable_cpus()), quota_cpus(root)
    text = (
        f"{count} of {os.cpu_count()} may be used, {'no quota' if quota is None else f'a quota of {quota:g}'}"
    )
    if min(count, quota or count) < 2:
        advice = "client and server need a CPU each: figures from one CPU are rough"
        return Check("problem", text, advice)
    if quota is not None and quota < count:
        advice = "TensorFlow starts one thread per CPU, and the quota then pauses it: make both equal"
        return Check("problem", text, f"{advice} (taskset, --cpuset-cpus)")
    return Check("ok", text)


def watch_host(on_window: Callable[[int], None], *, sleep: Callable[[float], None] = time.sleep) -> Check:
    """Check how much of the CPUs others use, over WATCHED_WINDOWS windows of WINDOW_S seconds in which
    batchtune is idle.

    `on_window` is called with the number of windows watched so far, from 0 on.
    """
    guard, windows = HostGuard(), []
    for count in range(WATCHED_WINDOWS):
        on_window(count)
        guard.begin()
        sleep(WINDOW_S)
        windows.append(guard.end(server_cpu_s=0.0))
    return host_noise(windows)


def host_noise(windows: Sequence[HostNoise]) -> Check:
    """Return a problem with the worst figures of the windows where two or more were noisy, else "ok"."""
    taken = max(window.foreign_ratio for window in windows)
    stolen = max(window.steal_ratio for window in windows)
    slower = max(0.0, *(window.canary_change for window in windows))
    noisy = sum(window.noisy for window in windows)
    watched = f"{len(windows) * WINDOW_S:g} s"
    noisy_windows = 2  # One disturbed half second is any machine's; a trial that meets it is repeated.
    if noisy < noisy_windows:
        return Check(
            "ok", f"quiet for {watched}: other processes used at most {percentage(taken)} of the CPUs"
        )
    texts = (
        (taken > MOST_FOREIGN_RATIO, f"other processes used up to {percentage(taken)} of these CPUs"),
        (stolen > MOST_STEAL_RATIO, f"the hypervisor took up to {percentage(stolen)} of their time"),
        (slower > MOST_CANARY_CHANGE, f"they were up to {percentage(slower)} slower than usual"),
    )
    said = "; ".join(text for beyond, text in texts if beyond)
    return Check(
        "problem",
        f"noisy in {noisy} of {len(windows)} half seconds: {said}",
        "stop other work here; `batchtune noise SCENARIO.yaml` reports the smallest difference it can detect",
    )


def pressure(root: Path = Path("/")) -> Check:
    """Check whether the kernel reports how long tasks wait for a CPU (PSI, pressure stall information)."""
    pressed = read_host(root=root).pressed
    if pressed is None:
        advice = "boot with psi=1; without it batchtune detects less of the noise on this machine"
        return Check("missing", "the kernel does not report CPU pressure (PSI)", advice)
    return Check("ok", f"the kernel reports how long {pressed} waits for a CPU (PSI)")


def memory(root: Path = Path("/")) -> Check:
    """Check the free memory, of the machine or of the control groups, whichever is less; below 2 GiB is a
    problem."""
    free_bytes = _free_memory_bytes(root)
    text = f"{free_bytes / 2**30:.1f} GiB free"
    memory_bytes = 2 * 2**30  # TensorFlow's server, two load processes and the search hold 1.5 GiB together.
    if free_bytes < memory_bytes:
        return Check("problem", text, "free 2 GiB, or serve a model that needs less")
    return Check("ok", text)


def _free_memory_bytes(root: Path) -> int:
    """Return the bytes of memory that can still be used, by the machine and by each control group; the least
    of these."""
    import psutil

    free_bytes = int(psutil.virtual_memory().available)
    for group in control_groups(root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = text_of(group / limit), text_of(group / used)
            if most.isdigit() and now.isdigit():
                kept = _entry(group / "memory.stat", cache)
                free_bytes = min(free_bytes, max(0, int(most) - int(now) + kept))
    return free_bytes


def _entry(path: Path, name: str) -> int:
    """Return the number after `name` in a file of `name number` lines; 0 where there is none."""
    entries = (line.partition(" ") for line in text_of(path).splitlines())
    return next((int(value) for key, _, value in entries if key == name and value.isdigit()), 0)


def room_for_results(results: Path) -> Check:
    """Check whether results can be written to the folder, and how much disk space it has; below 64 MiB is a
    problem."""
    folder = next(place for place in (results.absolute(), *results.absolute().parents) if place.exists())
    elsewhere = "name another folder with --results"
    if not folder.is_dir():
        return Check("problem", f"{folder} is a file", elsewhere)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("problem", f"{folder} cannot be written", elsewhere)
    free_bytes = shutil.disk_usage(folder).free
    text = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    least_disk_bytes = 2**26  # The quickstart's results are 10 MB.
    if free_bytes < least_disk_bytes:
        return Check("problem", f"{text}, too little for a sweep", elsewhere)
    return Check("ok", text, "" if free_bytes >= 2**30 else f"make room, or {elsewhere}")


def open_files() -> Check:
    """Check the hard limit of open files; load processes and the bundled server raise their own limit to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (resource.RLIM_INFINITY, -1):
        return Check("ok", "no limit of a process")
    text = f"{hard:,} a process (hard limit)"
    files = 4096  # With REST each client holds a connection at both ends.
    if hard < files:
        advice = f"ulimit -Hn {files} as root (or LimitNOFILE=); each connection is a file at both ends"
        return Check("problem", text, advice)
    return Check("ok", text)


# Which frameworks can a model server load, and is the search's simulator compiled?
#
# Whether a framework is installed is asked of the import system, whether it works of a Python process of its own: an
# import takes seconds, and may hang or crash.


def container_engine(program: str = "docker", *, limit_s: float = 5.0) -> Check:
    """Check whether a container engine answers within `limit_s` seconds; an installed `program` alone is not
    enough."""
    if shutil.which(program) is None:
        return Check("missing", "not installed", "needed only where target.command runs a container")
    version, failure = ask([program, "version", "--format", "{{.Server.Version}}"], limit_s=limit_s)
    if failure:
        return Check(
            "missing",
            f"its engine does not answer: {failure}",
            f"needed only for containers: start it, or join its group; `{program} version` says more",
        )
    return Check("ok", version, version=version)


def tensorflow_model_server() -> Check:
    """Check whether Google's server is installed; a scenario may launch it in place of the bundled one."""
    return _program(
        "tensorflow_model_server", "target: {command: [tensorflow_model_server]} in a scenario launches it"
    )


def tritonserver() -> Check:
    """Check whether NVIDIA's server is installed; batchtune can load one that runs."""
    return _program("tritonserver", "start it, then: batchtune load SCENARIO.yaml --grpc-url HOST:8001")


def _program(name: str, use: str) -> Check:
    """Check whether a program is on the PATH; `use` says what it is good for."""
    path = shutil.which(name)
    if path is None:
        return Check("missing", "not installed", "not needed: batchtune-model-server is bundled")
    return Check("ok", path, use)


def gpu(root: Path = Path("/")) -> Check:
    """Check which NVIDIA GPUs there are, and whether their use can be measured."""
    devices = gpus(root)
    names: list[str] = devices["names"]
    if not names:
        return Check("missing", "no NVIDIA GPU: models are served on the CPU")
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    if not devices["memory_bytes"]:
        return Check("problem", f"{kinds}: the driver does not answer", "`nvidia-smi` says why")
    if find_spec("pynvml") is None:
        return Check(
            "problem", f"{kinds}, utilization not measured", "pip install 'batchtune[gpu]' (nvidia-ml-py)"
        )
    return Check("ok", f"{kinds}, driver {devices['driver']}")


IMPORT_LIMIT_S: Final = 45.0
"""Longest time for an import, in seconds: TensorFlow takes 3 s from memory, 20 s from a slow disk."""


BACKENDS: Final = {
    "TensorFlow": (
        "tensorflow",
        "len(module.config.list_physical_devices('GPU'))",
        "pip install 'batchtune[tensorflow]'",
    ),
    "ONNX Runtime": (
        "onnxruntime",
        "int('CUDAExecutionProvider' in module.get_available_providers())",
        "pip install 'batchtune[onnx]'",
    ),
    "PyTorch": ("torch", "module.cuda.device_count()", "pip install 'batchtune[torch]'"),
}
"""Frameworks that the bundled server runs models with: name -> (module to import, a Python expression for the number of
GPUs that the imported `module` sees, command that installs it)."""


def backend(
    wanted: tuple[str, str, str],
    *,
    python: str = sys.executable,
    limit_s: float = IMPORT_LIMIT_S,
    root: Path = Path("/"),
) -> Check:
    """Check whether a framework is installed, can be imported by `python` within `limit_s` seconds, and sees
    the machine's GPU. `wanted`: (module, expression for the number of GPUs, how to install it), of BACKENDS."""
    module, count_gpus, install = wanted
    if find_spec(module) is None:
        return Check("missing", "not installed", f"to serve its models: {install}")
    values, failure = _asked(
        f"import {module} as module",
        f'{{"version": module.__version__, "gpus": {count_gpus}}}',
        python=python,
        limit_s=limit_s,
    )
    if values is None:
        return Check("problem", f"import fails: {failure}", f"reinstall it: {install}")
    version, count = str(values["version"]), int(values["gpus"])
    if count == 0 and any((root / "proc/driver/nvidia/gpus").glob("*")):
        return Check(
            "problem",
            f"{version}, which does not see the GPU",
            "install its build for CUDA; on the CPU it works",
            version=version,
        )
    return Check("ok", f"{version}, on {'the GPU' if count else 'the CPU'}", version=version)


def simulator(*, python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S) -> Check:
    """Check whether numba can be imported by `python` within `limit_s` seconds, and can save the simulator
    that it compiles."""
    values, failure = _asked(
        "import numba; from batchtune.twin.simulator.event_kernel import simulate",
        '{"version": numba.__version__, "cache": simulate.stats.cache_path}',
        python=python,
        limit_s=limit_s,
    )
    if values is None:
        return Check("problem", f"import fails: {failure}", "reinstall it: pip install numba")
    version, folder = str(values["version"]), values["cache"]
    if folder is None:
        return Check(
            "problem",
            f"{version}, cannot save its cache: every command compiles the simulator again, for some seconds",
            "set NUMBA_CACHE_DIR to a folder that can be written",
            version=version,
        )
    compiled = any(Path(folder).glob("event_kernel.simulate-*.nbc"))
    then = (
        "the simulator is compiled"
        if compiled
        else "the first search compiles the simulator for some seconds"
    )
    return Check("ok", f"{version}, {then}", version=version)


def _asked(imports: str, values: str, *, python: str, limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Run imports in a Python process and ask it for `values`, an expression; return (values, ""), or (None, why it
    failed)."""
    code = f"import json\n{imports}\nprint(json.dumps({values}))"
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    output, failure = ask([python, "-P", "-c", code], limit_s=limit_s, environment=quiet)
    if failure:
        return None, failure
    try:
        return json_text.loads(output.splitlines()[-1]), ""
    except (ValueError, IndexError):
        return None, f"it printed {output[-80:]!r}"
