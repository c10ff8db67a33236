"""A program in the place of tensorflow_model_server that fails in a chosen way; the standard library starts in no time.

`fault` is a file that says how; without it the server is in good order. It answers by REST only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

AVAILABLE = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
STATUS = {"model_version_status": [AVAILABLE]}
TENSOR = {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "2"}]}}
SIGNATURE = {"method_name": "tensorflow/serving/predict", "inputs": {"x": TENSOR}, "outputs": {"y": TENSOR}}
METADATA = {"metadata": {"signature_def": {"signature_def": {"serving_default": SIGNATURE}}}}

SCRIPT = """#!PYTHON -SE
import json, os, pathlib, socket, sys, threading, time
folder = pathlib.Path("FOLDER")
STATUS, METADATA = json.loads(r'''DOCUMENTS''')
with (folder / "server_lines").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
fault = folder / "fault"
kind = fault.read_text() if fault.exists() else ""
print("loading the model", flush=True)
if kind.startswith("exit: "):
    sys.exit(kind.removeprefix("exit: "))
if kind == "slow":
    time.sleep(0.15)
flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
listener = socket.create_server(("127.0.0.1", int(flags["rest_api_port"])), backlog=128)


def body_of(path):
    if kind == "503":
        return 503, b'{"error": "overloaded"}'
    if kind == "garbage" or (kind == "garbage answers" and path.endswith(":predict")):
        return 200, b"<html>welcome</html>"
    if kind == "503 answers" and path.endswith(":predict"):
        return 503, b'{"error": "Servable not found for request"}'
    if path.endswith(":predict"):
        return 200, b'{"predictions": [[1.0, 2.0]]}'
    if path.endswith("/metadata"):
        return 200, json.dumps(METADATA).encode()
    if path.startswith("/monitoring"):
        return 200, b""
    return 200, json.dumps(STATUS).encode()


def serve(connection):
    rest = b""
    while True:
        while b"\\r\\n\\r\\n" not in rest:
            more = connection.recv(65536)
            if not more:
                return
            rest += more
        head, _, rest = rest.partition(b"\\r\\n\\r\\n")
        path = head.split()[1].decode()
        length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\\r\\n") if line.startswith(b"content-length")), 0)
        while len(rest) < length:
            rest += connection.recv(65536)
        rest = rest[length:]
        if kind == "hang" or (kind == "hanging answers" and path.endswith(":predict")):
            time.sleep(60)
        if kind == "dies" and path.endswith(":predict"):
            print("Segmentation fault", flush=True)
            os._exit(139)
        status, body = body_of(path)
        connection.sendall(b"HTTP/1.1 %d X\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (status, len(body), body))


while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class FaultyServer:
    """`program` is the executable, in a `folder` that goes on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.program = self.folder / "tensorflow_model_server"
        text = SCRIPT.replace("PYTHON", sys.executable).replace("FOLDER", str(self.folder))
        self.program.write_text(text.replace("DOCUMENTS", json.dumps([STATUS, METADATA])))
        self.program.chmod(0o755)

    def fail(self, how: str) -> None:
        (self.folder / "fault").write_text(how)

    def mend(self) -> None:
        (self.folder / "fault").unlink(missing_ok=True)

    @property
    def command_lines(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "server_lines").read_text().splitlines()]
