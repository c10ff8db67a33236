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
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
folder = pathlib.Path("FOLDER")
STATUS, METADATA = json.loads(r'''DOCUMENTS''')
with (folder / "server_lines").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
kind = (folder / "fault").read_text() if (folder / "fault").exists() else ""
print("loading the model", flush=True)
if kind.startswith("exit: "):
    sys.exit(kind.removeprefix("exit: "))
if kind == "slow":
    time.sleep(0.15)
FAULTS = {"503": (503, {"error": "overloaded"}), "garbage": (200, "<html>welcome</html>")}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        asked = self.path.endswith(":predict")
        fault = kind.removesuffix(" answers") if asked or not kind.endswith(" answers") else ""
        if fault == "hang":
            time.sleep(60)
        if fault == "die":
            print("Segmentation fault", flush=True)
            os._exit(139)
        page = {"predictions": [[1.0, 2.0]]} if asked else METADATA if "/metadata" in self.path else STATUS
        status, page = FAULTS.get(fault, (200, "" if "/monitoring" in self.path else page))
        body = (page if isinstance(page, str) else json.dumps(page)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *words):
        pass


flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(flags["rest_api_port"])), Handler).serve_forever()
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
