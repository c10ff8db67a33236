"""A Ray Serve with two applications behind one port, or, with a folder, an MLServer with what lies in it.

Run as `python attached_server.py PORT [FOLDER]`.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = int(sys.argv[1])
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else None


def application(name: str, deployments: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"name": name, "route_prefix": f"/{name}", "import_path": "app:app", "deployments": deployments}
    return {"status": "RUNNING", "route_prefix": f"/{name}", "deployed_app_config": config}


LIVE = {"max_batch_size": 4, "batch_wait_timeout_s": 0.02, "further": "kept"}
APPLICATIONS = {
    "other": application("other", [{"name": "Other"}]),
    "main": application("main", [{"name": "Ingress"}, {"name": "Model", "user_config": LIVE}]),
}
LOADED: list[Any] = []
"""What the MLServer's file said at each load."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if FOLDER is None and self.path == "/api/serve/applications/":
            self._answer({"http_options": {"port": PORT}, "applications": APPLICATIONS})
        elif FOLDER is None and self.path == "/nodes?view=summary":
            self._answer({"data": {"summary": [{"raylet": {"state": "ALIVE", "metricsExportPort": PORT}}]}})
        elif FOLDER is not None and self.path == "/v2":
            self._answer({"name": "mlserver", "version": "1", "extensions": []})
        elif self.path == "/loaded":
            self._answer(LOADED)
        else:
            self._answer({}, status=200 if self.path.endswith(("/ready", "/metrics")) else 404)

    def do_PUT(self) -> None:
        given = {config["name"]: config for config in json.loads(self._body())["applications"]}
        for name in [*APPLICATIONS]:
            if name not in given:
                del APPLICATIONS[name]
            else:
                APPLICATIONS[name]["deployed_app_config"] = given[name]
        self._answer({})

    def do_POST(self) -> None:
        self._body()
        if self.path == "/v2/repository/index":
            self._answer([{"name": "m", "state": "READY"}])
        elif FOLDER is not None:
            LOADED.append(json.loads((FOLDER / "m" / "model-settings.json").read_text()))
            self._answer({})
        else:
            self._answer({"output": 1})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, document: Any, *, status: int = 200) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_words: object) -> None:
        """Nothing is logged."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
