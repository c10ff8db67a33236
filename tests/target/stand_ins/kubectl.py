"""A stand-in for `kubectl`: it keeps every command line, and runs the bundled server as the pod of a Deployment.

What only a cluster can show (pods side by side, field managers, a rollout that stalls) is not tested.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

SCRIPT = """#!PYTHON
import json, os, pathlib, signal, subprocess, sys, time, urllib.request
folder = pathlib.Path("FOLDER")
config = json.loads((folder / "config").read_text())
words = sys.argv[1:]
with (folder / "command_lines").open("a") as file:
    file.write(json.dumps(words) + "\\n")


def end_server():
    pid = folder / "pid"
    if pid.exists():
        try:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass
        pid.unlink()


if words[0] == "apply":
    import yaml

    text = pathlib.Path(words[-1].removeprefix("--filename=")).read_text()
    (folder / "manifest").write_text(text)
    end_server()
    *maps, changed = yaml.safe_load_all(text)
    for config_map in maps:
        for name, content in config_map["data"].items():
            (folder / "mounted" / name).write_text(content)
    if config["model"]:
        args = changed["spec"]["template"]["spec"]["containers"][0]["args"]
        args = [word.replace("=/batchtune/", f"={folder}/mounted/") for word in args]
        command = [sys.executable, "-m", "batchtune.server", f"--port={config['ports'][0]}"]
        command += [f"--rest_api_port={config['ports'][1]}", "--model_name=my_model"]
        command += [f"--model_base_path={config['model']}", *args]
        (folder / "words").write_text(json.dumps(command))
        log = (folder / "server.log").open("ab")
        environment = {**os.environ, "PYTHONPATH": config["python_path"]}
        server = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        (folder / "pid").write_text(str(server.pid))
if words[0] == "rollout":
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        try:
            url = f"http://127.0.0.1:{config['ports'][1]}/v1/models/my_model"  # as a pod's readiness probe
            if b"AVAILABLE" in urllib.request.urlopen(url, timeout=1).read():
                sys.exit(0)
        except OSError:
            pass
        time.sleep(0.02)
    sys.exit("error: timed out waiting for the condition")
if words[0] == "replace":
    end_server()
"""


class StandInKubectl:
    """`folder` goes on the PATH; without a `model` no server runs."""

    def __init__(self, folder: Path, model: Path | None, ports: list[int]) -> None:
        self.folder = folder / "cluster"
        self.mounted = self.folder / "mounted"
        self.mounted.mkdir(parents=True)
        path = str(Path(__file__).parents[3])
        config = {"model": model and str(model), "ports": ports, "python_path": path}
        (self.folder / "config").write_text(json.dumps(config))
        self.program = self.folder / "kubectl"
        self.program.write_text(SCRIPT.replace("PYTHON", sys.executable).replace("FOLDER", str(self.folder)))
        self.program.chmod(0o755)

    @property
    def command_lines(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "command_lines").read_text().splitlines()]

    def server_words(self) -> list[str]:
        return list(json.loads((self.folder / "words").read_text()))

    def manifest(self) -> str:
        return (self.folder / "manifest").read_text()

    def running(self) -> bool:
        pid = self.folder / "pid"
        return pid.exists() and psutil.pid_exists(int(pid.read_text()))
