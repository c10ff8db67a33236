"""Runs a server as a process of its own: starts it, watches it, reads its log, CPU time and memory, and ends it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from batchtune.errors import TargetError
from batchtune.system import text_of
from batchtune.target.container import ask, ending_with_us
from batchtune.target.endpoint import meaning_of
from batchtune.target.telemetry import Counters

HEAD_BYTES: Final = 2**18
TAIL_BYTES: Final = 3 * 2**18
"""Of a longer log the start (flags, devices, the load of the model) and the end are kept: 1 MiB in all."""

WRITTEN_BYTES_MAX: Final = 2**24
"""A scratch log longer than this is emptied once it was copied: a server that writes a line for each request
fills it in minutes."""

DYING_S: Final = 0.2
"""A server that is killed closes its connections this long before it has ended."""


def _is_said_again(line: str, later: Sequence[str]) -> bool:
    """Whether a later line ends with the last 80 characters of this one, both reporting one failure: a
    warning, and the error that follows."""
    return len(line) > 80 and any(other.endswith(line[-80:]) for other in later)


class ServerLog:
    """The scratch file that a server appends to; after a call of `keep_in` also a bounded copy of it elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: Path | None = None
        self._copied_bytes = 0

    def keep_in(self, path: Path) -> None:
        """Start a copy of the log at `path`, with the log so far; each call of `copy` adds the rest."""
        self.kept = path
        self.copy()

    def copy(self) -> None:
        """Bring the copy up to date; in a folder that cannot be written nothing is copied, and nothing is raised."""
        if self.kept is None:
            return
        with contextlib.suppress(OSError):
            added = self._new_bytes()
            if added:
                before = self.kept.read_bytes() if self.kept.exists() else b""
                self.kept.write_bytes(_bounded(before + added))

    def _new_bytes(self) -> bytes:
        with self.path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self._copied_bytes, size - HEAD_BYTES - TAIL_BYTES))
            added = log.read(HEAD_BYTES + TAIL_BYTES)
            self._copied_bytes = log.tell()
        if size > WRITTEN_BYTES_MAX:
            os.truncate(self.path, 0)  # the server appends, so it goes on at the new end
            self._copied_bytes = 0
        return added


def _bounded(text: bytes) -> bytes:
    """Return a log's text; of a long one its first HEAD_BYTES and last TAIL_BYTES."""
    if len(text) <= HEAD_BYTES + TAIL_BYTES:
        return text
    return text[:HEAD_BYTES] + b"\n[batchtune left out the middle of this log]\n" + text[-TAIL_BYTES:]


_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def last_words(log_path: Path, *, begins_at: int = 0) -> str:
    """Return the last lines of a log from byte `begins_at` on, at most twelve, indented by two spaces; "": it has none,
    or cannot be read.

    A long line whose end a later one repeats is left out.
    """
    try:
        with log_path.open("rb") as log:
            log.seek(max(begins_at, log_path.stat().st_size - 16_384))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    last = text.splitlines()[-12:]
    once = (line for at, line in enumerate(last) if not _is_said_again(line, last[at + 1 :]))
    return "\n".join(f"  {line}" for line in once)


@contextlib.contextmanager
def _on_cpus(cpus: Sequence[int] | None) -> Iterator[None]:
    """Within, processes that this thread starts run on these CPUs only; None: on any."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ServerProcess:
    """A server as a child process in a session of its own (Ctrl-C does not reach it), its output appended to a log
    file.

    Where util-linux's setpriv is installed, the kernel ends the server when this process is killed. `cpus`: those that
    the server may run on; None: all. `grace_s`: how long it may take to end after SIGTERM. `install`: the command that
    installs the server, for hints. `launches`: number of calls of `launch`.
    """

    def __init__(
        self,
        *,
        log_path: Path,
        cpus: Sequence[int] | None = None,
        grace_s: float = 5.0,
        install: str | None = None,
    ) -> None:
        self.log_path = log_path
        self._install = install
        self.launches = 0
        self._cpus = cpus
        self._grace_s = grace_s
        self._container: Container | None = None
        self._serves_elsewhere = False
        self._process: subprocess.Popen[bytes] | None = None
        self._apart: set[psutil.Process] = set()
        self._why = TargetError("the server has not been launched yet")

    def launch(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """End the process that runs, and start `command` in its place; `environment`: all variables that it gets, None:
        ours. A container that the command runs writes its id to a file beside the log.

        Raises:
            TargetError: the program does not exist or may not be executed, or the file for the container's id exists
                already.
        """
        self.stop()
        self.launches += 1
        self._serves_elsewhere = False
        self._apart.clear()
        self._container = container_of(command, self.log_path.with_name(f"container-{self.launches}"))
        try:
            self._process = self._started(command, environment)
        except TargetError as error:
            self._why = error
            raise

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        words = command
        if self._container is not None:
            self._container.require_no_id_file()
            words = self._container.run_command
        if shutil.which(words[0]) is None:
            raise TargetError(f"cannot start {words[0]!r}: no such program", hint=self._missing_hint())
        with self.log_path.open("ab") as log, _on_cpus(self._cpus):
            try:
                return subprocess.Popen(
                    [*ending_with_us(), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment,
                )
            except OSError as error:
                raise TargetError(f"cannot start {words[0]!r}: {error}") from error

    @property
    def pid(self) -> int | None:
        """The process id; None: not started, or stopped."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def raise_if_dead(self, *, within_s: float = 0.0) -> None:
        """Check that the process runs and does not end within `within_s` seconds.

        Raises:
            TargetError: it has ended, with the last lines of its log; or was not started, with the reason.
        """
        if self._process is None:
            raise TargetError(self._why.message, hint=self._why.hint)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        code = self._process.poll()
        if code is not None:
            ending = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            words = self.log_tail()
            raise TargetError(
                f"the server {ending}; its last words:\n{words}", hint=self._exit_hint(code, words)
            )

    def _exit_hint(self, code: int, words: str) -> str:
        """Return what to install if the log's last words, or the exit code, name something that is missing."""
        module = re.search(r"No module named '?(\w+)", words)
        no_program = 127  # of env, and of a shell
        if code == no_program or (module and module[1] in (self._install or "").replace("-", "_")):
            return self._missing_hint()
        return f"install the module {module[1]} for the Python that runs the server" if module else ""

    def _missing_hint(self) -> str:
        how = "install it" if self._install is None else f"`{self._install}`"
        return f"{how}, or check target.launch, target.server, target.command or target.docker"

    def log_tail(self) -> str:
        """Return the last twelve lines of the log, indented by two spaces; " (no log)" or " (the log is empty)" where
        there are none."""
        if not self.log_path.exists():
            return "  (no log)"
        return last_words(self.log_path) or "  (the log is empty)"

    def cpu_s(self) -> float | None:
        """Return the sum of user and system CPU seconds so far of the process, its descendants and its container; None:
        not known."""
        if self._process is None:
            return None
        own_s = tree_cpu_s(self._process.pid)
        if own_s is None or self._serves_elsewhere:
            return None
        if self._container is None:
            return own_s
        inside_s = self._container.cpu_s()
        return None if inside_s is None else own_s + inside_s

    def cpu_clock(self) -> Callable[[], float] | None:
        """Return a function that reads the CPU seconds so far of the process and its present descendants
        (`tree_cpu_clock`); None: the server does not run, or runs in a container or elsewhere."""
        if self._process is None or self._container is not None or self._serves_elsewhere:
            return None
        return tree_cpu_clock(self._process.pid)

    def memory_peak_bytes(self) -> int | None:
        """Return the peak memory in bytes: of the container if there is one, else the sum over the process and its
        descendants; None: not known."""
        if self._process is None or self._serves_elsewhere:
            return None
        if self._container is not None:
            return self._container.memory_peak_bytes()
        return tree_memory_peak_bytes(self._process.pid)

    def with_usage(self, counters: Counters) -> Counters:
        """Return `counters` with the server's CPU time and peak memory so far."""
        return replace(counters, server_cpu_s=self.cpu_s(), memory_peak_bytes=self.memory_peak_bytes())

    def look_for_listener(self, port: int | None) -> None:
        """Note whether the launched process or a descendant listens on this TCP port of the host; call it once the
        server answers there. Does nothing for a container, or where no process runs or `port` is None (not known).

        Where neither listens, the process only waits for the server, as a script that starts a container or a client of
        a service manager does; the server's CPU time and memory are then unknown.
        """
        self._note_apart()
        if self._process is not None and self._container is None and port is not None:
            self._serves_elsewhere = not tree_listens(self._process.pid, port)

    def stop(self) -> None:
        """End all processes of its session and its descendants in other sessions by SIGTERM, after `grace_s` by
        SIGKILL; then remove its container. Does nothing where no process runs."""
        if self._process is None:
            return
        self._note_apart()
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process, self._why = None, TargetError("the server is not running")
        if self._container is not None:
            self._container.remove()

    def _note_apart(self) -> None:
        """Note the children that have left the process group, which only their own ids reach."""
        if self._process is not None:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    if os.getpgid(child.pid) != self._process.pid:
                        self._apart.add(child)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
        for child in self._apart:
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)


@contextlib.contextmanager
def coming_up(process: ServerProcess) -> Iterator[None]:
    """Return a context manager for the time until a server is ready: any exception ends the server; a TargetError gets
    the last lines of its log and a hint at what they mean."""
    try:
        yield
    except TargetError as error:
        hint = (
            error.hint or meaning_of(error.message) or "fix what it names: the model, a flag, target.command"
        )
        message = error.message
        if process.running:
            message = f"{message}; its last words:\n{process.log_tail()}"
            process.stop()
        raise TargetError(message, hint=hint) from error
    except BaseException:
        process.stop()
        raise


@contextlib.contextmanager
def launch_named(process: ServerProcess) -> Iterator[None]:
    """Return a context manager for the time until a server of `target.launch` is ready: a TargetError gets the name of
    that key, the log's last lines and what to do."""
    try:
        yield
    except TargetError as error:
        if process.pid is None:
            raise
        if not process.running:
            raise TargetError(
                f"target.launch: {error.message}",
                hint=error.hint
                or "run the command by hand; it gets few environment variables here, others are named in "
                "target.environment",
            ) from error
        words = f"what target.launch started still runs; its last words:\n{process.log_tail()}"
        hint = "; ".join(
            filter(None, ("it may listen elsewhere than target.rest_url, grpc_url and ready say", error.hint))
        )
        raise TargetError(f"{error.message}; {words}", hint=hint) from error


def free_port() -> int:
    """Return a TCP port of the loopback that is free now, and that the kernel gives to no client's connection before
    the server listens.

    The kernel takes ports for connections from a range; the returned port lies below this range where there is room.
    """
    first_port = 10_000
    room = _first_port_of_connections() - first_port
    for _ in range(20 if room > 0 else 0):
        with contextlib.suppress(OSError):
            return _bound(first_port + secrets.randbelow(room))
    return _bound(0)


def _bound(port: int) -> int:
    """Return the port that a socket was bound to and has left again; `port` 0: any."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def _first_port_of_connections() -> int:
    """Return the first port that the kernel gives to connections; 0: not known."""
    try:
        return int(_LOCAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports, each found by `free_port`."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


# The CPU time and memory of a server, in a container too.
#
# `docker run` only talks to an engine, whose child the server is: neither our child nor a child of ours. The container
# reports its first process, and that process its control group, which counts the time of all that runs in it.


class Container:
    """The container that a command line runs. `run_command`: that command with an option to write the container's id to
    a file, to be started in its place."""

    def __init__(self, command: Sequence[str], id_file: Path) -> None:
        self._program = command[0]
        self._pid: int | None = None
        own = _own_id_file(command)
        self._id_file = id_file if own is None else own
        at = list(command).index("run") + 1
        added = (f"--cidfile={id_file}",) if own is None else ()
        self.run_command = (*command[:at], *added, *command[at:])

    def cpu_s(self, *, root: Path = Path("/")) -> float | None:
        """Return the CPU seconds so far, summed over all processes in the container; None: neither the engine nor the
        kernel reports them."""
        pid = self._first_process()
        if pid is None:
            return None
        group_s = group_cpu_s(pid, root=root)
        return tree_cpu_s(pid) if group_s is None else group_s

    def memory_peak_bytes(self, *, root: Path = Path("/")) -> int | None:
        """Return the peak memory of the whole container, in bytes; None: neither the engine nor the kernel reports
        it."""
        pid = self._first_process()
        if pid is None:
            return None
        group_bytes = group_memory_peak_bytes(pid, root=root)
        return tree_memory_peak_bytes(pid) if group_bytes is None else group_bytes

    def require_no_id_file(self) -> None:
        """Check that the container's id file does not exist yet; an existing one belongs to another container.

        Raises:
            TargetError: the file exists, so that the container program would not start.
        """
        if self._id_file.exists():
            raise TargetError(
                f"{self._id_file}, the --cidfile of the server's container, exists: it names another container",
                hint="leave --cidfile out, name another file, or delete this one once its container is gone",
            )

    def remove(self) -> None:
        """Remove the container with what runs in it, if the engine still has it, and its id file.

        A client that was killed leaves its container and id file behind; a client that ended in good order may have
        removed both.
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
            pid, _ = ask([self._program, "inspect", "--format={{.State.Pid}}", container_id], limit_s=5.0)
            self._pid = int(pid) or None if pid.isdigit() else None
        return self._pid


def container_of(command: Sequence[str], id_file: Path) -> Container | None:
    """Return the container that a command line runs; None: it runs none, or by `compose` or `exec`, which write no id.

    `id_file`: where its id is written; a --cidfile in the command takes precedence.
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
    """Return the CPU seconds so far of a process's control group; None: it shares ours, or the kernel does not report
    them."""
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
    """Return the peak memory of a process's control group in bytes, file cache included; None: it shares our group, or
    the kernel does not report it."""
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
    """Return the sum of the CPU seconds so far of a process and all its descendants; None: one of them has ended
    meanwhile."""
    try:
        clock = tree_cpu_clock(pid)
        return None if clock is None else clock()
    except psutil.Error:
        return None


def tree_cpu_clock(pid: int) -> Callable[[], float] | None:
    """Return a function that reads, within microseconds, the sum of the CPU seconds so far of a process and the
    descendants that it has now; None: the process has ended."""
    try:
        root = psutil.Process(pid)
        processes = (root, *root.children(recursive=True))
    except psutil.Error:
        return None
    return lambda: sum(map(process_cpu_s, processes))


def process_cpu_s(process: psutil.Process) -> float:
    """Read the CPU seconds of a process so far by its own clock (clock_getcpuclockid(3)), to the nanosecond.

    /proc counts them in ticks of 10 ms: for a run of 0.8 s this is several percent.

    Raises:
        psutil.Error: the process has ended.
    """
    with contextlib.suppress(OSError):  # gone, or of another PID namespace
        cpuclock_sched = 2  # what the scheduler gave it (linux/posix-timers.h)
        return time.clock_gettime((~process.pid << 3) | cpuclock_sched)
    used = process.cpu_times()
    return float(used.user + used.system)


def tree_memory_peak_bytes(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """Return the sum of the peak resident memory of a process and all its descendants, in bytes; None: the process has
    ended, or the kernel does not report its peak. A descendant without a reported peak counts as 0."""
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
    """Whether a process or one of its descendants listens on a TCP port; True too if the system does not say."""
    try:
        root = psutil.Process(pid)
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for process in (root, *root.children(recursive=True))
            for connection in process.net_connections(kind="tcp")
        )
    except psutil.Error:
        return True
