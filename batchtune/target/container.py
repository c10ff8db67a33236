"""Runs programs and containers for a server, writes what several models are given, and reads CPU time and
memory.

`docker run` only talks to an engine, whose child the server is: neither our child nor a child of ours. The
container reports its first process, and that process its control group, which counts the time of all that runs
in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from batchtune.batching.parameters import BatchingParameters, Configuration, to_dict
from batchtune.batching.tfserving_file import format_tfserving_text
from batchtune.errors import TargetError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import DockerSpec, TargetSpec
from batchtune.system import text_of

# A program that is run to its end.


def ending_with_us() -> tuple[str, ...]:
    """Return the words that go before a command so that the kernel ends it with the thread that starts it; ()
    without setpriv."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM") if setpriv else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of a program that ended; `failure`: why the output is of no use, "" where the exit code was
    0."""

    # Its stdout, stripped; "" with a failure.
    output: str = ""
    failure: str = ""


def ask(command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a program to its end and return its stdout, or why it failed; after `limit_s` seconds it is killed.

    `environment` is added to this process's own.
    """
    try:
        ended = subprocess.run(
            [*ending_with_us(), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return Answer(failure=f"no answer within {limit_s:g} s")
    except OSError as error:
        return Answer(failure=f"cannot be started: {error.strerror}")
    if ended.returncode == 0:
        return Answer(output=ended.stdout.strip())
    if ended.returncode < 0:
        return Answer(failure=f"ended by {signal.Signals(-ended.returncode).name}")
    last_words = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
    return Answer(failure=last_words[0].strip()[:200])


# The parameters of several models, each its own.

OWN_PARAMETERS: Final = "batching_params.pbtxt"
"""TensorFlow Serving's name for the file with a version's own batching parameters, read with
--enable_per_model_batching_parameters."""


def model_config_text(base_paths: Mapping[str, str]) -> str:
    """Write a ModelServerConfig as text protobuf; `base_paths`: name of a served model -> its base path."""
    entries = "".join(
        f'  config {{ name: {json.dumps(name)} base_path: {_quoted(path)} model_platform: "tensorflow" }}\n'
        for name, path in base_paths.items()
    )
    return f"model_config_list {{\n{entries}}}\n"


def own_parameters(names: Iterable[str], configuration: Configuration) -> dict[str, BatchingParameters]:
    """Return model name -> its own batching parameters; empty where all models have equal ones, or none
    batches."""
    batched = {name: configuration.of_model(name).batching for name in names if configuration.models}
    return {name: batching for name, batching in batched.items() if batching is not None}


def own_fields(models: Mapping[str, BatchingParameters]) -> dict[str, dict[str, Any]]:
    """Return model name -> the set fields of its own parameters, without threads."""
    return {name: to_dict(_without_threads(own)) for name, own in models.items()}


def own_text(parameters: BatchingParameters) -> str:
    """Write the parameters file for one model's version directories, without threads, which are set by the
    server's file only."""
    return format_tfserving_text(_without_threads(parameters))


def _without_threads(parameters: BatchingParameters) -> BatchingParameters:
    return replace(parameters, num_batch_threads=None, thread_pool_name=None)


def with_own_parameters(base_path: Path, folder: Path, parameters: BatchingParameters | None) -> Path:
    """Return a base directory in `folder` with the versions of `base_path` as links, each beside a file of
    `parameters`; None: no parameters of its own, `base_path` itself."""
    if parameters is None:
        return base_path
    text = own_text(parameters)
    for version in base_path.iterdir():
        if not (version.is_dir() and version.name.isdigit()):
            continue
        own = folder / version.name
        own.mkdir(parents=True)
        for file in version.iterdir():
            if file.name != OWN_PARAMETERS:
                (own / file.name).symlink_to(file.resolve())
        (own / OWN_PARAMETERS).write_text(text, encoding="utf-8")
    return folder


def _quoted(path: str) -> str:
    """Quote a path for text proto, bytes beyond ASCII as they are: it knows no surrogate pairs."""
    return json.dumps(path, ensure_ascii=False)


# How many requests a server gets at once, and whether it has the threads for them.
#
# In TensorFlow Serving a request holds a thread from its arrival to its answer, also while its batch fills: fewer
# threads than clients are a queue before the queue, and a batch never has more requests than there are threads.

THREAD_LIMITS: Final = ("grpc_max_threads", "rest_api_num_threads")

_OPEN_LOOP_REQUESTS: Final = 1024
"""Requests under way to allow for in an open loop, where as many wait as the server lets: beyond this it is
overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The most requests that a server has to handle at once."""

    # The most requests under way at once.
    clients: int
    # Rows of the largest request.
    rows: int
    # The scenario's `request.protocol`.
    protocol: str

    @property
    def threads(self) -> int:
        """A number of server threads that this many clients never exhaust."""
        return self.clients + 16  # gRPC's own pollers


NO_DEMAND: Final = Demand(clients=_OPEN_LOOP_REQUESTS, rows=1, protocol="grpc")


def demand_of(scenario: Scenario, *, clients_most: int = 0) -> Demand:
    """Compute the most requests that a search of the scenario may have under way, those of its load and of
    closed loops that keep the largest batches full.

    `clients_most`: the result is at least this.
    """
    rows = scenario.request.rows_most
    space = scenario.search.space

    def most(name: str) -> int:
        knob = space.get(name)
        values = (scenario.fixed.get(name),) if knob is None else knob.values
        return max((value for value in values if isinstance(value, int)), default=1)

    full = most("max_batch_size") * (1 + most("num_batch_threads")) // rows
    load = scenario.load
    waiting = load.max_in_flight or _OPEN_LOOP_REQUESTS if load.open_loop else load.concurrency or 1
    clients = max(waiting, full, clients_most, _OPEN_LOOP_REQUESTS)
    return Demand(clients=clients, rows=rows, protocol=scenario.request.protocol)


def thread_limits(target: TargetSpec, demand: Demand) -> dict[str, str]:
    """Return flags that set TensorFlow Serving's own limits of threads above `demand`: name -> text; {} for a
    server that may have other flags."""
    if target.runs not in ("local", "docker"):
        return {}
    return dict.fromkeys(THREAD_LIMITS, str(demand.threads))


def thread_words(configuration: Configuration, flags: Mapping[str, str], demand: Demand) -> Iterator[str]:
    """Yield a warning where the user's own limit of threads is too low for batches of `max_batch_size` ever
    to be full; else nothing."""
    name = "rest_api_num_threads" if demand.protocol == "rest" else "grpc_max_threads"
    text = flags.get(name, "")
    batching = configuration.batching
    if not text.isdigit() or batching is None or batching.max_batch_size is None:
        return
    threads = int(text)
    if batching.max_batch_size > threads * demand.rows:
        rows = f"{demand.rows} row{'' if demand.rows == 1 else 's'}"
        yield (
            f"max_batch_size {batching.max_batch_size} never fills: each request, of {rows}, holds one of "
            f"{threads} threads ({name}) while it waits"
        )


# A server in a container.
#
# Ports have the same number inside and outside, and lie on the loopback. The model, and what is written for the server,
# are mounted read-only.

MODELS_INSIDE: Final = "/models"
SCRATCH_INSIDE: Final = "/batchtune"


def tfservings_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """Return the `docker run` command of TensorFlow Serving, up to the server's flags. `mounts`: path here ->
    path inside.

    As the first process of a container it would ignore SIGTERM; `docker run --init` puts another before it.
    """
    docker = spec.docker or DockerSpec()
    image = docker.image or f"tensorflow/serving{'' if docker.gpus is None else ':latest-gpu'}"
    head = _run(docker, spec, ports, mounts)
    first = ["--init"] if Path(docker.program).name == "docker" else []
    return [*head, *first, "--entrypoint=tensorflow_model_server", *docker.options, image]


def tritons_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """Return the `docker run` command of NVIDIA's Triton image, up to the program's flags; Python models get
    shared memory. `mounts`: path here -> path inside."""
    docker = spec.docker or DockerSpec()
    head = _run(docker, spec, ports, mounts)
    return [*head, "--shm-size=1g", *docker.options, docker.image or "", "tritonserver"]


def _run(docker: DockerSpec, spec: TargetSpec, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    words = [docker.program, "run", "--rm"]
    words += [f"--publish=127.0.0.1:{port}:{port}" for port in ports]
    words += [f"--mount=type=bind,source={host},target={inside},readonly" for host, inside in mounts.items()]
    if docker.gpus is not None:
        words.append(f"--gpus={docker.gpus}")
    if spec.cpus is not None:
        words.append(f"--cpuset-cpus={','.join(map(str, spec.cpus))}")
    return words


class Container:
    """The container that a command line runs. `run_command`, started in its place, writes the container's id
    to a file."""

    def __init__(self, command: Sequence[str], id_file: Path) -> None:
        self._program = command[0]
        self._pid: int | None = None
        own = _own_id_file(command)
        self._id_file = id_file if own is None else own
        at = list(command).index("run") + 1
        added = (f"--cidfile={id_file}",) if own is None else ()
        self.run_command = (*command[:at], *added, *command[at:])

    def cpu_s(self, *, root: Path = Path("/")) -> float | None:
        """Return the CPU seconds of all processes in the container so far; None where neither the engine nor
        the kernel reports them."""
        pid = self._first_process()
        if pid is None:
            return None
        group_s = group_cpu_s(pid, root=root)
        return tree_cpu_s(pid) if group_s is None else group_s

    def memory_peak_bytes(self, *, root: Path = Path("/")) -> int | None:
        """Return the peak memory of all processes in the container, in bytes; None where neither the engine
        nor the kernel reports it."""
        pid = self._first_process()
        if pid is None:
            return None
        group_bytes = group_memory_peak_bytes(pid, root=root)
        return tree_memory_peak_bytes(pid) if group_bytes is None else group_bytes

    def require_no_id_file(self) -> None:
        """Check that the container's id file does not exist yet: an existing one belongs to another
        container.

        Raises:
            TargetError: it is there; a container program would not start.
        """
        if self._id_file.exists():
            raise TargetError(
                f"{self._id_file}, the --cidfile of the server's container, exists: it names another container",
                hint="leave --cidfile out, name another file, or delete this one once its container is gone",
            )

    def remove(self) -> None:
        """Remove the container with what runs in it, where the engine still has it, and then its id file.

        A client that was killed leaves its container behind; one that ended in good order has removed it.
        """
        try:
            container_id = self._id_file.read_text().strip()
        except OSError:
            return
        # An engine waits ten seconds for the container before it kills it.
        ask([self._program, "rm", "--force", container_id], limit_s=30.0)
        self._id_file.unlink(missing_ok=True)

    def _first_process(self) -> int | None:
        if self._pid is None and not os.environ.get("DOCKER_HOST", "").startswith(
            ("tcp://", "ssh://", "http://", "https://")
        ):
            try:
                container_id = self._id_file.read_text().strip()
            except OSError:
                return None
            # An engine answers within 0.1 s; one that hangs must not hang the sweep.
            answer = ask([self._program, "inspect", "--format={{.State.Pid}}", container_id], limit_s=5.0)
            self._pid = int(answer.output) or None if answer.output.isdigit() else None
        return self._pid


def container_of(command: Sequence[str], id_file: Path) -> Container | None:
    """Return the container that a command line runs; None: it runs none.

    The command's own --cidfile is taken in place of `id_file`.
    """
    if Path(command[0]).name not in {"docker", "podman", "nerdctl"} or "run" not in command:
        return None
    before = command[1 : list(command).index("run")]
    if "compose" in before or "exec" in before:  # which take no id file
        return None
    return Container(command, id_file)


def _own_id_file(command: Sequence[str]) -> Path | None:
    for at, word in enumerate(command):
        if word == "--cidfile" and at + 1 < len(command):
            return Path(command[at + 1])
        if word.startswith("--cidfile="):
            return Path(word.partition("=")[2])
    return None


def group_cpu_s(pid: int, *, root: Path = Path("/")) -> float | None:
    """Return the CPU seconds of a process's control group; None where it has no group but ours."""
    mount = root / "sys/fs/cgroup"
    for controllers, group in _groups(pid, root):
        if not controllers:
            for entry in text_of(mount / group / "cpu.stat").splitlines():
                name, _, value = entry.partition(" ")
                if name == "usage_usec":
                    return int(value) / 1e6
        elif "cpuacct" in controllers.split(","):
            for folder in (mount / controllers, mount / "cpuacct"):
                used_ns = text_of(folder / group / "cpuacct.usage")
                if used_ns.isdigit():
                    return int(used_ns) / 1e9
    return None


def group_memory_peak_bytes(pid: int, *, root: Path = Path("/")) -> int | None:
    """Return the peak memory of a process's control group in bytes, file cache included; None where it has no
    group but ours."""
    mount = root / "sys/fs/cgroup"
    for controllers, group in _groups(pid, root):
        unified = mount / group / "memory.peak"
        apart = mount / "memory" / group / "memory.max_usage_in_bytes"
        if not controllers or "memory" in controllers.split(","):
            text = text_of(apart if controllers else unified)
            if text.isdigit():
                return int(text)
    return None


def _groups(pid: int, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controllers, path) of each control group that a process does not share with us; controllers are
    "" in the unified hierarchy."""
    ours = text_of(root / "proc" / "self" / "cgroup").splitlines()
    for line in text_of(root / "proc" / str(pid) / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if group != "/" and line not in ours:
            yield controllers, group.lstrip("/")


def tree_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds of a process and its children so far; None: it is gone."""
    try:
        clock = tree_cpu_clock(pid)
        return None if clock is None else clock()
    except psutil.Error:
        return None


def tree_cpu_clock(pid: int) -> Callable[[], float] | None:
    """Return a function that reads, within microseconds, the CPU seconds so far of a process and the children
    that it has now; None: it is gone."""
    try:
        root = psutil.Process(pid)
        processes = (root, *root.children(recursive=True))
    except psutil.Error:
        return None
    return lambda: sum(map(process_cpu_s, processes))


def process_cpu_s(process: psutil.Process) -> float:
    """Read the CPU seconds of a process so far by its own clock (clock_getcpuclockid(3)), to the nanosecond.

    /proc counts them in ticks of 10 ms: of a run of 0.8 s that is several percent.

    Raises:
        psutil.Error: it is gone.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # gone, or of another PID namespace
            cpuclock_sched = 2  # what the scheduler gave it (linux/posix-timers.h)
            return time.clock_gettime((~process.pid << 3) | cpuclock_sched)
    used = process.cpu_times()
    return float(used.user + used.system)


def tree_memory_peak_bytes(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """Return the sum of the peak resident memory of a process and its children, in bytes; None: it is gone,
    or the kernel does not report it."""
    try:
        root = psutil.Process(pid)
        processes = [root.pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.Error:
        return None
    peaks = [_peak_bytes(text_of(proc / str(process) / "status")) for process in processes]
    return sum(peaks) if peaks[0] else None


def _peak_bytes(status: str) -> int:
    """Return VmHWM of a process's status in bytes; 0: it has ended."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return 0


def tree_listens(pid: int, port: int) -> bool:
    """Whether a process or one of its children listens on a TCP port; True too where the system does not
    report it."""
    try:
        root = psutil.Process(pid)
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for process in (root, *root.children(recursive=True))
            for connection in process.net_connections(kind="tcp")
        )
    except psutil.Error:
        return True
