"""A server of nobody's protocol: answers POST /score by its variables, and takes parameters by PUT /parameters.

Run as `python http_app.py PORT`; other paths fail in the ways that a wrong app does. DELETE /parameters gives it those
back with which it started. CHANGES in its environment: at
the change of its parameters with this number it ends. KEEPS: a parameter that it does not let anybody change. MOST: the
largest size that it takes. COLD: so many requests are answered by 503 first. LEAST: it fails with a smaller size.
UNDER_LOAD: it ends at a request after so many changes of its parameters. SEIZED: with the request of this number its
size becomes 3, as if somebody else had set it. GET /reads says how often its parameters were read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def at_the_start() -> dict[str, dict[str, float]]:
    return {"app": {"size": int(os.environ.get("SIZE", "1")), "wait": float(os.environ.get("WAIT", "0"))}}


parameters = at_the_start()

changes_left = int(os.environ.get("CHANGES", "0"))

cold_left = int(os.environ.get("COLD", "0"))

free_left = int(os.environ.get("SEIZED", "0"))

reads = 0

FAULTS = {
    "/fails": (500, '{"detail": "no model"}', {}),
    "/refuses": (422, '{"detail": "features: field required"}', {}),
    "/unloaded": (200, '{"error": "model not loaded"}', {}),
    "/page": (200, "<html>Welcome</html>", {"Content-Type": "text/html"}),
    "/moved": (307, "", {"Location": "/score/"}),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        global reads
        reads += self.path == "/parameters"
        if self.path == "/no-page":
            self._answer(404, "none")
        elif self.path == "/reads":
            self._answer(200, str(reads))
        elif self.path == "/metrics":
            counted = "batches_total 2", "rows_total 6", "exec_seconds_sum 1.5", "exec_seconds_count 2"
            self._answer(200, "\n".join(["# TYPE batches_total counter", *counted]))
        else:
            self._answer(200, "ok" if self.path == "/text" else json.dumps(parameters))

    def do_PUT(self) -> None:
        global changes_left
        changes_left -= 1
        if not changes_left:
            os._exit(0)
        kept, name = {**parameters, **parameters["app"]}, os.environ.get("KEEPS")
        asked = json.loads(self._body())
        if self.path == "/no-such":
            self._answer(404, "none")
            return
        if asked.get("app", {}).get("size", 0) > int(os.environ.get("MOST", "1000")):
            self._answer(422, json.dumps({"error": "size is not licensed"}))
            return
        parameters.update(asked)
        for place in (parameters, parameters["app"]):
            place.update({name: kept[name]} if name in place else {})
        self._answer(200, "{}")

    def do_DELETE(self) -> None:
        parameters.clear()
        parameters.update(at_the_start())
        self._answer(200, "{}")

    def do_POST(self) -> None:
        global cold_left
        body = self._body()
        cold_left -= 1
        self._be_seized()
        if str(-changes_left) == os.environ.get("UNDER_LOAD"):
            os._exit(0)
        if cold_left >= 0:
            self._answer(503, json.dumps({"detail": "warming up"}))
        elif parameters["app"]["size"] < int(os.environ.get("LEAST", "0")):
            self._answer(500, json.dumps({"detail": os.environ.get("WHY", "too small")}))
        elif self.path == "/score":
            answer = {"score": json.loads(body), "size": parameters["app"]["size"], "error": None}
            self._answer(200, json.dumps(answer))
        elif self.path in FAULTS:
            print("KeyError: 'features'", file=sys.stderr, flush=True)
            status, text, head = FAULTS[self.path]
            self._answer(status, text, **head)
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"data: x\n\n")
                    time.sleep(0.02)
            except OSError:
                self.close_connection = True
        else:
            self._answer(404, json.dumps({"detail": "Not Found"}))

    def _be_seized(self) -> None:
        global free_left
        free_left -= 1
        if not free_left:
            parameters["app"]["size"] = 3

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, status: int, text: str, **head: str) -> None:
        self.send_response(status)
        lines = {"Content-Type": "application/json", "Content-Length": str(len(text)), **head}
        for name, value in lines.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_words: object) -> None:
        """Nothing is logged."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
