"""A Triton's model repository for tests, on http.server: `config` is what the model runs with, `orders` what came in."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from tests.target.kserve_server import _HttpServer

CONFIG: dict[str, Any] = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "dynamic_batching": {"preferred_batch_size": [8], "max_queue_delay_microseconds": 500},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}


class FakeTriton:
    """`refuse` answers the next orders with this text; `deaf` takes them and changes nothing."""

    def __init__(self, *, loaded: bool = True) -> None:
        self.config = copy.deepcopy(CONFIG)
        self.on_disk = copy.deepcopy(CONFIG)
        self.loaded = loaded
        self.refuse = ""
        self.deaf = False
        self.orders: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v2/models/m/config" and outer.loaded:
                    self.reply(200, outer.config)
                else:
                    self.reply(400, {"error": f"Request for unknown model: {self.path}"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if self.path == "/v2/repository/index":
                    state = "READY" if outer.loaded else "UNAVAILABLE"
                    self.reply(200, [{"name": "m", "version": "1", "state": state}, {"name": "other"}])
                    return
                order = self.path.rpartition("/")[2]
                outer.orders.append(order)
                if outer.refuse:
                    self.reply(503, {"error": outer.refuse})
                    return
                if not outer.deaf:
                    outer.obey(order, body.get("parameters", {}).get("config"))
                self.reply(200, None)

            def reply(self, status: int, document: Any) -> None:
                text = b"" if document is None else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_args: object) -> None:
                pass

        self._http = _HttpServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def obey(self, order: str, config: str | None) -> None:
        self.loaded = order == "load"
        if self.loaded:
            self.config = copy.deepcopy(self.on_disk) if config is None else json.loads(config)
            dynamic = self.config.get("dynamic_batching")
            if dynamic is not None:
                dynamic.setdefault("preferred_batch_size", [self.config["max_batch_size"]])

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
