"""The Dockerfile, the compose files and the action name what is there; `test_images.py` builds and runs the images."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.errors import UsageError
from batchtune.scenario.reader import read_scenario
from batchtune.server.server_flags import parse_flags
from batchtune.system import is_loopback

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
NAMES = re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE)
STAGES = dict(zip(NAMES, re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:], strict=True))
IMAGES = {"cli", "fleet", "server", "server-cuda"}
COMPOSE_FILES = sorted((ROOT / "docker").glob("compose*.yaml"))


def services(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text())["services"])


def test_bases_are_pinned_and_images_run_as_a_user_of_their_own() -> None:
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-", DOCKERFILE, re.MULTILINE)
    for name, text in STAGES.items():
        base = text.split()[0]
        assert base in STAGES or base == "${BASE}"
        assert text.rpartition("USER ")[2].startswith("10001") == (name in IMAGES)


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_a_volume_is_mounted_where_the_image_s_user_owns_a_folder(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    mounts = [
        mount.split(":") for service in document["services"].values() for mount in service.get("volumes", ())
    ]
    folders = {inside for host, inside, *_ in mounts if host in document["volumes"]}
    owned = re.search(r"chown batchtune (.*)$", STAGES["base"], re.MULTILINE)
    assert owned is not None
    assert folders
    assert folders <= set(owned[1].split())


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text()
    kept = re.findall("^!(.*)$", ignored, re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert any(Path(name).match(pattern) for pattern in kept), name


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_a_compose_file_builds_what_there_is_and_waits_until_the_server_is_ready(path: Path) -> None:
    for service in services(path).values():
        if "build" in service:
            assert service["build"]["target"] in STAGES
            dockerfile = path.parent / service["build"]["context"] / service["build"]["dockerfile"]
            assert dockerfile.resolve() == ROOT / "docker" / "Dockerfile"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    server = services(path)["server"]
    assert "healthcheck" in server or "HEALTHCHECK" in STAGES[server["build"]["target"]]
    assert services(path)["tuner"]["depends_on"]["server"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("stage", ["server", "server-cuda"])
def test_a_server_in_a_container_is_reached_from_outside_of_it(stage: str) -> None:
    """The loopback is the container's own: neither a published port nor another container gets there."""
    line = re.search(r"^ENTRYPOINT (.*)$", STAGES[stage], re.MULTILINE)
    assert line is not None
    program, *flags = json.loads(line[1])
    assert program == "batchtune-model-server"
    commands = [
        service["command"]
        for path in COMPOSE_FILES
        for service in services(path).values()
        if service.get("build", {}).get("target") == stage
    ]
    for command in commands or [["--model_base_path=/models/m"]]:
        assert not is_loopback(parse_flags([*flags, *command])[1].host)


def test_the_server_s_image_has_what_the_server_imports_and_no_more() -> None:
    """Of the package's dependencies: without the others every module of the server is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {re.split("[<>=]", line)[0].lower() for line in project["dependencies"]}
    script = [sys.executable, ROOT / "docker" / "requirements.py", ROOT / "pyproject.toml", "server"]
    printed = subprocess.check_output(script, text=True)
    kept = {re.split("[<>=]", line)[0].lower() for line in printed.splitlines()}
    modules = packages_distributions()
    absent = [name for name, owners in modules.items() if {one.lower() for one in owners} <= packages - kept]
    assert {"scipy", "numba", "optuna"} <= set(absent)
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({absent}))
import batchtune.server
for found in pkgutil.walk_packages(batchtune.server.__path__, "batchtune.server."):
    importlib.import_module(found.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_pods_of_a_fleet_can_be_probed() -> None:
    assert re.search(r"apt-get install .*wget", STAGES["fleet"])


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_the_tuner_s_command_is_a_scenario_s(path: Path) -> None:
    words = services(path)["tuner"]["command"]
    words = words[words[0] == "batchtune" :]
    sets = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    overrides = [word.replace("${MODEL}", "m") for word in sets]
    scenario = read_scenario(ROOT / words[1].removeprefix("/"), overrides=overrides)
    assert scenario.target.runs_already


def test_a_fleet_s_manifests_name_one_cluster_and_what_batchtune_takes() -> None:
    cluster, job = yaml.safe_load_all((ROOT / "docker" / "kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (compose,) = (path for path in COMPOSE_FILES if path.name == "compose-fleet.yaml")
    for words, head in (
        (container["command"], f"{cluster['metadata']['name']}-head-svc"),
        (services(compose)["tuner"]["command"], "head"),
    ):
        assert f"--set=load.fleet.ray=ray://{head}:10001" in words
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        asked = CliRunner().invoke(app, ["load", "--help"], env={"COLUMNS": "200"}).output
        assert all(flag in asked for flag in flags), flags
    assert f"ray[default]=={cluster['spec']['rayVersion']}" in DOCKERFILE
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    retried = {"operator": "NotIn", "values": [UsageError.exit_code]}  # no cluster yet, or too few workers
    assert (rule["action"], rule["onExitCodes"]) == ("FailJob", retried)
    assert job["spec"]["backoffLimit"] > 0
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert services(compose)["worker"]["deploy"]["replicas"] == workers["replicas"]


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_a_compose_file_follows_the_schema_of_compose(path: Path) -> None:
    """The schema lies in docker-compose 1.29, which asks for an older PyYAML than ours: unpacked, it can be named."""
    folder = os.environ.get("COMPOSE_SCHEMA", "")
    schema = Path(folder) / "compose_spec.json"
    if not schema.is_file():
        pytest.skip("COMPOSE_SCHEMA names no folder with compose_spec.json")
    jsonschema.Draft7Validator(json.loads(schema.read_text())).validate(yaml.safe_load(path.read_text()))


@pytest.mark.slow
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("hadolint", path=path)
    if program is None:
        pytest.skip("hadolint is not installed")
    subprocess.run([program, ROOT / "docker" / "Dockerfile"], check=True)


def ended(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=cwd, env=given, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["TORCH_INDEX", "FRAMEWORKS"])
def test_a_build_argument_with_a_password_is_refused_since_it_would_stay_in_the_image(name: str) -> None:
    for user, code in (("", 0), ("me:secret@", 2)):
        url = f"https://{user}mirror.example/whl"
        done = ended(ROOT / "docker/build.sh", "server", **{"ENGINE": "true", name: url})
        assert done.returncode == code
        assert (name in done.stderr) == (code == 2)
        assert "secret" not in done.stdout + done.stderr


def test_what_is_no_model_is_said_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    for model in (tmp_path / "model.onnx", tmp_path, tmp_path / "none"):
        done = ended(ROOT / "docker/try.sh", str(model), ENGINE="false")
        assert done.returncode == 2
        assert "numbered version directories" in done.stderr


def test_the_source_distribution_has_what_its_tests_read() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    assert {"/tests", "/docker", "/README.md"} <= set(hatch["build"]["targets"]["sdist"]["include"])


ACTION: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
CHECK = STEPS["Check the change against its target branch, side by side"]


def job() -> str:
    """The workflow in docker/README.md."""
    (found,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docker" / "README.md").read_text(), re.DOTALL)
    return str(found)


def test_a_job_of_ten_lines_uses_the_action() -> None:
    assert len(job().strip().splitlines()) <= 10
    document = yaml.safe_load(job())
    (check,) = document["jobs"].values()
    (used,) = (step for step in check["steps"] if "/docker@" in step["uses"])
    assert set(used["with"]) <= set(ACTION["inputs"])
    assert {name for name, value in ACTION["inputs"].items() if value.get("required")} <= set(used["with"])


def in_shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step of bash; the programs of `folder` stand before the others."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    return ended(*shell, cwd=folder, PATH=path, **environment)


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 3), (5, 0), (7, 7)])
def test_the_check_ends_the_job_as_it_ended(tmp_path: Path, code: int, ends: int) -> None:
    program(tmp_path, "git", 'echo "git $*" >> said')
    program(tmp_path, "batchtune", f'for word; do echo "$word" >> said; done\nexit {code}')
    asked = {"BASE": "1a2b", "SCENARIO": "a b.yaml", "OPTIONS": "--max-regress p95=5%"}
    assert set(asked) == set(CHECK["env"])
    done = in_shell(CHECK["run"], tmp_path, **asked)
    assert done.returncode == ends, done.stderr
    assert ("::warning::" in done.stdout) == (code == 5)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == "git fetch --quiet --depth=1 origin 1a2b"
    assert said[1:] == ["check", "a b.yaml", "--baseline-ref", "1a2b", "--max-regress", "p95=5%"]


@pytest.mark.parametrize(("extras", "wanted"), [("", "/action/.."), ("onnx,torch", "/action/..[onnx,torch]")])
def test_it_installs_itself_with_what_the_model_needs(tmp_path: Path, extras: str, wanted: str) -> None:
    program(tmp_path, "pip", 'for word; do echo "$word" >> said; done')
    install = STEPS["Install batchtune"]
    assert in_shell(install["run"], tmp_path, SOURCE="/action/..", EXTRAS=extras).returncode == 0
    assert (tmp_path / "said").read_text().splitlines()[-1] == wanted
