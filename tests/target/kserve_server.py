"""A KServe v2 server for tests: it doubles `x`, on http.server and grpcio; `fail` makes it refuse in Triton's words."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
import numpy as np
from google.protobuf import json_format

from batchtune.wire.kserve_infer import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
)

METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "python",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
}


Answer = tuple[int, Any] | None


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False


def times(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def spent(count: int) -> dict[str, dict[str, int]]:
    each_ns = {"compute_input": 1_000_000, "compute_infer": 8_000_000, "compute_output": 1_000_000}
    return {name: times(count, ns * count) for name, ns in each_ns.items()}


def statistics(*batches: tuple[int, int], failed: int = 0) -> dict[str, Any]:
    """As tritonserver 2.51.0 writes them; each batch of `rows` takes 1 + 8 + 1 ms, each request waits 2 ms."""
    rows = sum(size * count for size, count in batches)
    requests = {
        "success": times(rows, 12_000_000 * rows),
        "fail": times(failed, 0),
        "queue": times(rows, 2_000_000 * rows),
        **spent(rows),
        "cache_hit": times(0, 0),
        "cache_miss": times(0, 0),
    }
    model = {
        "name": "m",
        "version": "1",
        "last_inference": 1795230037159,
        "inference_count": rows,
        "execution_count": sum(count for _, count in batches),
        "inference_stats": requests,
        "response_stats": {},
        "batch_stats": [{"batch_size": size, **spent(count)} for size, count in batches],
        "memory_usage": [],
    }
    return {"model_stats": [model]}


class KserveServer:
    """`get` maps paths to (status, JSON) that GETs are answered with; `fail` is (HTTP status, gRPC code, text).

    `grpc_statistics` is what ModelStatistics answers; None: the server has no such method.
    """

    def __init__(self, *, rest_port: int = 0) -> None:
        self.is_dead = False
        self.get: dict[str, tuple[int, Any]] = {"/v2/models/m": (200, METADATA)}
        self.fail: tuple[int, grpc.StatusCode, str] | None = None
        self.garbage = False
        self.grpc_statistics: dict[str, Any] | None = None
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one write, or Nagle's algorithm holds the body back

            def do_GET(self) -> None:
                self.tell(outer.page(self.path))

            def tell(self, answer: Answer) -> None:
                if answer is None:
                    self.close_connection = True
                    return
                status, document = answer
                self.reply(status, document if isinstance(document, bytes) else json.dumps(document).encode())

            def do_POST(self) -> None:
                outer.paths.append(self.path)
                outer.heads.append(dict(self.headers))
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.is_order(self.path):
                    self.tell(outer.obey(self.path, body))
                elif outer.is_dead:
                    self.close_connection = True
                elif outer.fail is not None:
                    self.reply(outer.fail[0], json.dumps({"error": outer.fail[2]}).encode())
                elif outer.garbage:
                    self.reply(200, b"{}")
                else:
                    self.reply(200, *doubled(body, self.headers.get("Inference-Header-Content-Length")))

            def reply(self, status: int, body: bytes, json_length: int | None = None) -> None:
                self.send_response(status)
                if json_length is not None:
                    self.send_header("Inference-Header-Content-Length", str(json_length))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                pass

        self._http = _HttpServer(("127.0.0.1", rest_port), Handler)
        self.rest_port: int = self._http.server_address[1]
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        self._grpc.add_generic_rpc_handlers((_Service(self),))
        self.grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")

    def page(self, path: str) -> Answer:
        """What a GET is answered with; None: the connection is closed."""
        return None if self.is_dead else self.get.get(path, (404, {"error": "no such page"}))

    def is_order(self, _path: str) -> bool:
        """Whether a POST is no inference."""
        return False

    def obey(self, path: str, _body: bytes) -> Answer:
        """What such a POST is answered with, when it was done."""
        raise NotImplementedError(path)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._grpc.stop(None).wait()


def doubled(body: bytes, json_length: str | None) -> tuple[bytes, int | None]:
    """The answer to a REST call, and the length of its JSON if binary data follow."""
    end = len(body) if json_length is None else int(json_length)
    document = json.loads(body[:end])
    one = document["inputs"][0]
    output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": one["shape"]}
    if json_length is None:
        answer = {"outputs": [output | {"data": (2 * np.array(one["data"])).ravel().tolist()}]}
        return json.dumps(answer).encode(), None
    assert document["parameters"] == {"binary_data_output": True}
    assert one["parameters"]["binary_data_size"] == len(body) - end
    raw = (2 * np.frombuffer(body[end:], np.float32)).tobytes()
    head = json.dumps({"outputs": [output | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    return head + raw, len(head)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, server: KserveServer) -> None:
        self._server = server

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        method = call.method.rpartition("/")[2]
        self._server.paths.append(call.method)
        self._server.heads.append({one.key: one.value for one in call.invocation_metadata})
        methods = {"ModelInfer": self.infer, "ModelMetadata": self.tell}
        if self._server.grpc_statistics is not None:
            methods["ModelStatistics"] = self.count
        return grpc.unary_unary_rpc_method_handler(methods[method]) if method in methods else None

    def infer(self, message: bytes, call: grpc.ServicerContext) -> bytes:
        if self._server.fail is not None:
            call.abort(*self._server.fail[1:])
        request = ModelInferRequest.FromString(message)
        if self._server.garbage:
            return b"\xff"
        answer = ModelInferResponse(model_name=request.model_name)
        answer.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
        values = 2 * np.frombuffer(request.raw_input_contents[0], np.float32)
        answer.raw_output_contents.append(values.tobytes())
        return bytes(answer.SerializeToString())

    def tell(self, message: bytes, call: grpc.ServicerContext) -> bytes:
        if ModelMetadataRequest.FromString(message).name != "m":
            call.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found")
        return bytes(ModelMetadataResponse(**METADATA).SerializeToString())

    def count(self, message: bytes, _call: grpc.ServicerContext) -> bytes:
        asked = ModelStatisticsRequest.FromString(message)
        if self._server.garbage:
            return b"\xff"
        statistics = self._server.grpc_statistics if asked.name == "m" else {}
        parsed = json_format.ParseDict(statistics, ModelStatisticsResponse(), ignore_unknown_fields=True)
        return bytes(parsed.SerializeToString())
