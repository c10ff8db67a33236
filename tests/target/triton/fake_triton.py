"""A Triton for tests: a KserveServer with a model repository; `config` is what the model runs with, `orders` what came.

It answers each request alone, and can be told to misbehave.
"""

from __future__ import annotations

import copy
import json
import threading
from typing import Any, Literal

from tests.target.kserve_server import Answer, KserveServer, statistics

CONFIG: dict[str, Any] = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "dynamic_batching": {"preferred_batch_size": [8], "max_queue_delay_microseconds": 500},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}
UNKNOWN: Answer = (400, {"error": "Request for unknown model: 'm' is not found"})

Fault = Literal["hangs", "refuses", "is deaf", "loses the model", "dies"]


class FakeTriton(KserveServer):
    """`refuse` answers the next orders with this text; `deaf` takes them and changes nothing.

    `faults` says what a load does that asks for such a max_batch_size. `pages` stand over what it would tell.
    """

    def __init__(self, *, loaded: bool = True, rest_port: int = 0) -> None:
        super().__init__(rest_port=rest_port)
        self.config = copy.deepcopy(CONFIG)
        self.on_disk = copy.deepcopy(CONFIG)
        self.loaded = loaded
        self.refuse = ""
        self.deaf = False
        self.orders: list[str] = []
        self.faults: dict[int, Fault] = {}
        self.pages: dict[str, Answer] = {}
        self.answered_before_load = 0
        self._ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.rest_port}"

    def page(self, path: str) -> Answer:
        if self.is_dead:
            return None
        if path in self.pages:
            return self.pages[path]
        if path == "/v2/models/m/config":
            return (200, self.config) if self.loaded else UNKNOWN
        if path == "/v2/models/m/stats":
            return 200, statistics((1, self._answered() - self.answered_before_load))
        return super().page(path)

    def is_order(self, path: str) -> bool:
        return path.startswith("/v2/repository/")

    def obey(self, path: str, body: bytes) -> Answer:
        if self.is_dead:
            return None
        if path in self.pages:
            return self.pages[path]
        if path == "/v2/repository/index":
            state = "READY" if self.loaded else "UNAVAILABLE"
            return 200, [{"name": "m", "version": "1", "state": state}, {"name": "other"}]
        order = path.rpartition("/")[2]
        self.orders.append(order)
        if self.refuse:
            return 503, {"error": self.refuse}
        config = json.loads(body or b"{}").get("parameters", {}).get("config")
        return self._loaded(None if config is None else json.loads(config), order)

    def _loaded(self, config: dict[str, Any] | None, order: str) -> Answer:
        fault = None if config is None else self.faults.get(config["max_batch_size"])
        match fault:
            case "hangs":
                self._ended.wait(30)
                return None
            case "refuses":
                return 400, {"error": "load failed for model 'm': version 1 is at UNAVAILABLE state"}
            case "loses the model":
                self.loaded = False
                return 200, b""
            case "dies":
                self.is_dead = True
                return None
            case "is deaf":
                return 200, b""
        if not self.deaf:
            self._load(config, order)
        return 200, b""

    def _load(self, config: dict[str, Any] | None, order: str) -> None:
        self.loaded = order == "load"
        if not self.loaded:
            return
        self.answered_before_load = self._answered()
        self.config = copy.deepcopy(self.on_disk) if config is None else config
        dynamic = self.config.get("dynamic_batching")
        if dynamic is not None:
            dynamic.setdefault("preferred_batch_size", [self.config["max_batch_size"]])

    def _answered(self) -> int:
        return sum(path.endswith("/infer") for path in list(self.paths))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        super().__exit__()
