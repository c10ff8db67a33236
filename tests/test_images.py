"""docker/build.sh builds the images with buildah, and what they say runs. IMAGE_BASE names the base: `docker/local_base.sh` makes one.

All containers of a test share a network of their own, of the loopback alone, as the services of a compose file do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import yaml

from tests.server.server_process import write_emulated
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
MB_OVER_BASE = {"batchtune": 650, "batchtune-server": 1_600}
USER = 10001
SHORTLY = ("--concurrency=2", "--set=load.duration=500ms", "--json")
MEASURED = (0, 3, 5, 6)
"""What a load or a sweep ends with that has run: how this machine did is no matter here."""

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(
        "IMAGE_BASE" not in os.environ or shutil.which("buildah") is None,
        reason="needs buildah, and IMAGE_BASE: the name of an image with Python and pip",
    ),
]


def buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True).stdout.strip()


def build(*targets: str) -> None:
    """By the program that a user would call."""
    environment = {**os.environ, "ENGINE": "buildah", "BASE": os.environ["IMAGE_BASE"]}
    done = subprocess.run(
        [ROOT / "docker" / "build.sh", *targets], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    build("cli", "server")


@pytest.fixture(scope="module")
def fleet_image(images: None) -> str:
    """Built where a test asks for it: Ray takes as long as the others together, and CI does without."""
    build("fleet")
    return "batchtune-fleet"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel, an ONNX model and an emulated one, and a file that names all three."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)  # another user reads it
    subprocess.run([sys.executable, "-c", WRITE_MODELS, folder], check=True, capture_output=True)
    write_emulated(folder / "emulated")
    entries = [
        f'config {{ name: "{name}" base_path: "/models/{name}" model_platform: "tensorflow" }}'
        for name in ("saved", "onnx", "emulated")
    ]
    (folder / "models.txt").write_text(f"model_config_list {{ {' '.join(entries)} }}")
    return folder


WRITE_MODELS = """
import pathlib, sys
import onnx
import tensorflow as tf
from onnx import TensorProto, helper

class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.float32, name="x")])
    def serve(self, x):
        return {"y": x * 2}

folder = pathlib.Path(sys.argv[1])
model = Model()
tf.saved_model.save(model, str(folder / "saved" / "1"), signatures={"serving_default": model.serve})
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
(folder / "onnx" / "1").mkdir(parents=True)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.save(model, folder / "onnx" / "1" / "model.onnx")
"""


class Container:
    """One container of an image, in the network of a pod; its entry point, user and environment are the image's."""

    def __init__(self, pod: Pod, image: str, mounts: Sequence[tuple[Path, str]] = ()) -> None:
        self._pod = pod
        self._image = image
        self._id = buildah("from", "--pull-never", f"localhost/{image}")
        inspected: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", f"localhost/{image}"))
        self._config = inspected["Docker"]["config"]
        self._options = [
            "--isolation=chroot",
            "--no-hosts",  # buildah's own would lie over the pod's every other time
            *(f"--volume={host}:{inside}:ro" for host, inside in [(pod.hosts, "/etc/hosts"), *mounts]),
        ]
        self._started = pod.folder / f"{self._id}.started"
        self._started.touch()
        self.log = pod.folder / f"{self._id}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.kill()
        buildah("rm", self._id)

    def _command(self, words: Sequence[str], *options: str) -> list[str]:
        return [*self._pod.enter, "buildah", "run", *self._options, *options, self._id, "--", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the image's entry point with these words to its end."""
        return self.run_program(*(self._config.get("Entrypoint") or []), *words)

    def run_program(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self._command(words)
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def start(self, *words: str, environment: dict[str, str] | None = None) -> None:
        options = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        command = self._command([*(self._config.get("Entrypoint") or []), *words], *options)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def healthy(self, environment: dict[str, str] | None = None) -> bool:
        """What the image's health check says, from a container beside it: buildah runs no two commands in one at once."""
        kind, *words = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        given = [f"{name}={value}" for name, value in (environment or {}).items()]
        with Container(self._pod, self._image) as beside:
            return beside.run_program("env", *given, *words).returncode == 0

    def processes(self) -> list[psutil.Process]:
        """Those that run in it, the first one first."""
        if self._process is None or self._process.poll() is not None:
            return []
        below = psutil.Process(self._process.pid).children(recursive=True)
        return [one for one in below if "buildah" not in " ".join(one.cmdline()[:1] or ["buildah"])]

    def stop(self) -> int:
        """What its first process ends with after SIGTERM."""
        assert self._process is not None
        self.processes()[0].send_signal(signal.SIGTERM)
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        for one in self.processes():
            one.kill()
        if self._process is not None:
            self._process.wait(LIMIT_S)

    def written(self) -> list[str]:
        """The files, and folders but /tmp, that were changed in it since it was made."""
        root = buildah("mount", self._id)
        own = f"-xdev -path {root}/tmp -prune -o -newer {self._started} -user {USER} -print"
        found = subprocess.check_output(["find", root, *own.split()], text=True).splitlines()
        buildah("umount", self._id)
        return [path.removeprefix(root) for path in found]


class Pod:
    """A network of the loopback alone, with names for the services of a compose file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost server head\n127.0.0.2 server-2\n")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep infinity"]
        )
        self.enter = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]

    def __enter__(self) -> Self:
        wait_until(lambda: "UP" in self.ask("ip", "-oneline", "link", "show", "lo").stdout, limit_s=10.0)
        return self

    def __exit__(self, *_raised: object) -> None:
        self._holder.kill()
        self._holder.wait()

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.enter, *words], capture_output=True, text=True, check=False)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with Pod(tmp_path) as made:
        yield made


def service(name: str, file: str = "compose.yaml") -> list[str]:
    return list(yaml.safe_load((ROOT / "docker" / file).read_text())["services"][name]["command"])


def scenarios() -> tuple[Path, str]:
    return ROOT / "scenarios", "/scenarios"


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def size_mb(image: str) -> float:
    """Of the files of an image."""
    with mounted(image) as root:
        said = subprocess.run(["du", "-sb", root], check=True, capture_output=True, text=True).stdout
    return int(said.split()[0]) / 1e6


@pytest.mark.parametrize("image", MB_OVER_BASE)
def test_an_image_is_small(image: str) -> None:
    over = size_mb(f"localhost/{image}") - size_mb(os.environ["IMAGE_BASE"])
    print(f"{image}: {over:.0f} MB over its base")
    assert over <= MB_OVER_BASE[image]


SECRETS = (
    *("etc/pip.conf", "etc/xdg/pip", "root/.config/pip", "root/.pip"),
    *("run/secrets/pip", "run/secrets/ca"),
)


@pytest.mark.parametrize("image", MB_OVER_BASE)
def test_no_layer_says_where_packages_came_from(image: str) -> None:
    with mounted(f"localhost/{image}") as root:
        secrets = [root / path for path in SECRETS]
        assert not any(path.is_dir() or (path.exists() and path.stat().st_size) for path in secrets)
        certificates = root / "etc/ssl/certs/ca-certificates.crt"
        assert certificates.stat().st_size, "those of the base"
    base, history = (
        buildah("inspect", "--type", "image", name)
        for name in (os.environ["IMAGE_BASE"], f"localhost/{image}")
    )
    hosts = set(re.findall(r"https?://[^/\s\"]+", history)) - set(re.findall(r"https?://[^/\s\"]+", base))
    assert hosts <= {"https://download.pytorch.org"}


def test_the_command_line_says_its_version_and_checks_its_container(pod: Pod) -> None:
    with Container(pod, "batchtune") as cli:
        version = cli.run("--version")
        assert version.returncode == 0, version.stderr
        assert version.stdout.startswith("batchtune ")
        doctor = cli.run("doctor", "--json")
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        assert json.loads(doctor.stdout)["ready"]
        # What doctor does not import: install.sh leaves some libraries out of their wheels.
        libraries = "import optuna, pyarrow.parquet, scipy.optimize, scipy.special"
        imported = cli.run_program("python", "-c", libraries)
        assert imported.returncode == 0, imported.stderr
        assert set(cli.written()) <= {"/results"}


def test_the_server_answers_for_three_kinds_of_models_and_ends_when_told_to(pod: Pod, models: Path) -> None:
    with Container(pod, "batchtune-server", [(models, "/models")]) as server:
        named = {"MODEL_NAME": "saved"}
        assert not server.healthy(named)
        server.start("--model_config_file=/models/models.txt", environment=named)
        wait_until(lambda: server.healthy(named) or not server.processes(), limit_s=LIMIT_S)
        assert server.healthy(named), server.log.read_text()
        first = server.processes()[0]
        assert set(first.uids()) == {USER}
        for name, asked in {"saved": [[2.5]], "onnx": [[2.5]], "emulated": [[1.0, 2.0]]}.items():
            url = f"http://127.0.0.1:8501/v1/models/{name}:predict"
            answer = pod.ask("curl", "--silent", "--fail", "--data", json.dumps({"instances": asked}), url)
            assert answer.returncode == 0, answer.stderr + server.log.read_text()
            if name != "emulated":
                assert json.loads(answer.stdout)["predictions"] == [[5.0]]
        with Container(pod, "batchtune", [scenarios()]) as cli:
            for name in ("saved", "onnx"):
                loaded = cli.run("load", f"127.0.0.1:8500/{name}", *SHORTLY)
                assert loaded.returncode in MEASURED, loaded.stderr
        assert server.stop() == 0
        assert not server.healthy(named)
        assert server.written() == []


def test_the_words_of_the_compose_file_load_the_server(pod: Pod, models: Path) -> None:
    with Container(pod, "batchtune-server", [(models / "saved", "/models/model")]) as server:
        server.start(*service("server"))
        wait_until(lambda: server.healthy({"MODEL_NAME": "model"}), limit_s=LIMIT_S)
        with Container(pod, "batchtune", [scenarios()]) as tuner:
            done = tuner.run(*service("tuner"), "--set=load.duration=500ms")
            assert done.returncode in MEASURED, done.stdout + done.stderr
            assert any(path.endswith("trials.jsonl") for path in tuner.written())


def test_one_command_loads_one_image_by_the_other(pod: Pod) -> None:
    done = pod.ask("env", "ENGINE=buildah", str(ROOT / "docker" / "try.sh"), "", *SHORTLY)
    assert done.returncode in MEASURED, done.stderr
    (point,) = json.loads(done.stdout)["points"]
    assert point["measurement"]["requests"] > 0
    assert "batchtune" not in buildah("containers", "--format", "{{.ImageName}}")


@pytest.mark.slow
def test_a_fleet_s_workers_send_from_the_image(pod: Pod, models: Path, fleet_image: str) -> None:
    """One node for all: each says that it is 127.0.0.1, since there is no other address."""
    file = "compose-fleet.yaml"
    with ExitStack() as stack:
        for address in ("127.0.0.1", "127.0.0.2"):
            image = Container(pod, "batchtune-server", [(models / "saved", "/models/model")])
            server = stack.enter_context(image)
            server.start("--model_name=model", "--model_base_path=/models/model", f"--host={address}")
        head = stack.enter_context(Container(pod, fleet_image))
        head.start(*service("head", file), "--node-ip-address=127.0.0.1", "--include-dashboard=false")
        compose = yaml.safe_load((ROOT / "docker" / file).read_text())
        health = compose["services"]["head"]["healthcheck"]["test"][1:]
        beside = stack.enter_context(Container(pod, fleet_image))
        wait_until(lambda: beside.run(*health).returncode == 0, limit_s=LIMIT_S)
        worker = stack.enter_context(Container(pod, fleet_image))
        worker.start(*service("worker", file), "--node-ip-address=127.0.0.1")
        tuner = stack.enter_context(Container(pod, fleet_image, [scenarios()]))
        shortly = ("--rate=50:100:50", "--set=load.fleet.workers=1", "--set=load.duration=500ms")
        done = tuner.run(*service("tuner", file), *shortly)
        logs = done.stdout + done.stderr + head.log.read_text() + worker.log.read_text()
        assert done.returncode in MEASURED, logs
        answered = re.findall(r"(server|server-2):8500: ([\d,]+) requests/s", done.stdout)
        assert {name for name, rate in answered if rate != "0"} == {"server", "server-2"}, logs


STAND_IN = """
FROM localhost/batchtune-server
USER 0
RUN ln -s "$(command -v batchtune-model-server)" /usr/bin/tensorflow_model_server
"""


@pytest.fixture
def sweep_by_docker(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that sweep in `tensorflow/serving`, our server in truth, by a `docker`, buildah in truth."""
    (tmp_path / "Dockerfile").write_text(STAND_IN)
    buildah("build", "--isolation=chroot", "--tag=localhost/tensorflow/serving", str(tmp_path))
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    stand_in = ROOT / "tests" / "target" / "stand_ins" / "docker_by_buildah.py"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(stand_in))} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("BUILDAH_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    scenario = ROOT / "scenarios" / "tfserving-docker-cpu.yaml"
    return [
        *(
            sys.executable,
            "-m",
            "batchtune",
            "sweep",
            str(scenario),
            f"--set=target.model={models / 'saved'}",
        ),
        *("--set=target.flags={port: 18500, rest_api_port: 18501}", "--set=search.budget.time=20s"),
        f"--results={tmp_path / 'results'}",
    ]


def running(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "state").iterdir()]


def test_a_sweep_in_containers_ends_without_any(sweep_by_docker: list[str], tmp_path: Path) -> None:
    before = buildah("containers", "--quiet")
    done = subprocess.run(sweep_by_docker, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 5), done.stderr
    assert "Recommended" in done.stdout
    assert running(tmp_path) == []
    assert buildah("containers", "--quiet") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_containers_end_with_a_sweep(
    sweep_by_docker: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    before = buildah("containers", "--quiet")
    with subprocess.Popen(sweep_by_docker, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sweep:
        wait_until(lambda: running(tmp_path) or sweep.poll() is not None, limit_s=LIMIT_S)
        assert sweep.poll() is None, sweep.communicate()
        sweep.send_signal(number)
        sweep.communicate(timeout=LIMIT_S)
    wait_until(lambda: running(tmp_path) == [], limit_s=LIMIT_S)
    wait_until(lambda: buildah("containers", "--quiet") == before, limit_s=LIMIT_S)
