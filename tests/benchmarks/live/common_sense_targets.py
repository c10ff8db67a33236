"""The twelve models of common_sense.py, and what a new user would ask of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from tests.benchmarks.emulated import Emulated
from tests.benchmarks.zoo.zoo_models import model_directory, save_onnx

Objective = Literal["capacity", "closed", "latency"]
OBJECTIVES: tuple[Objective, ...] = ("capacity", "closed", "latency")
ONNX_NET = "net.onnx"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and the figures of its three questions, of which `objective` is one.

    `limit_ms` on p95 is that of capacity and of the closed loop of so many `clients`; `rate_rps` is asked without one.
    """

    name: str
    model: Emulated | str
    limit_ms: float
    clients: int = 32
    rate_rps: float
    objective: Objective = "capacity"

    def model_path(self, folder: Path) -> str:
        """What is typed after `batchtune sweep`: written into the folder, built once, or a sample's name."""
        if self.model == ONNX_NET:
            return str(_written_onnx_net(folder / ONNX_NET))
        return model_directory(self.model, self.name, folder)

    def words(self) -> list[str]:
        """The options of the question."""
        limit = ["--slo-p95", f"{self.limit_ms:g}ms"]
        match self.objective:
            case "capacity":
                return limit
            case "closed":
                return [*limit, "--concurrency", str(self.clients)]
            case "latency":
                return ["--rate", f"{self.rate_rps:g}/s"]


def _emulated(name: str, base_ms: float, per_row_ms: float, **question: float) -> Target:
    model = Emulated(base_ms=base_ms, per_row_ms=per_row_ms)
    clients = int(question.pop("clients", 32))
    return Target(name=name, model=model, clients=clients, **question)


TARGETS = {
    target.name: target
    for target in (
        _emulated("flat-0.05ms", 0.05, 0.0, limit_ms=10, rate_rps=5000, clients=64),
        _emulated("0.08+0.008ms", 0.08, 0.008, limit_ms=10, rate_rps=5000, clients=64),
        _emulated("1+0.01ms", 1.0, 0.01, limit_ms=30, rate_rps=2000),
        _emulated("7+0.11ms", 7.0, 0.11, limit_ms=45, rate_rps=500),
        _emulated("40+2ms", 40.0, 2.0, limit_ms=400, rate_rps=100),
        _emulated("flat-100ms", 100.0, 0.0, limit_ms=400, rate_rps=100),
        Target(name="transformer", model="imdb_transformer", limit_ms=60, rate_rps=1000),
        Target(name="onnx-net", model=ONNX_NET, limit_ms=30, rate_rps=4000),
        Target(name="keras-two-inputs", model="two-inputs", limit_ms=30, rate_rps=2000),
        Target(name="text", model="words", limit_ms=30, rate_rps=2000),
        _emulated("cannot-pay", 0.05, 1.5, limit_ms=100, rate_rps=300),
        _emulated("defaults-best", 30.0, 0.03, limit_ms=150, rate_rps=2000, clients=256),
    )
}


def _written_onnx_net(path: Path) -> Path:
    """Three dense layers of 512 units between 128 numbers and 16 scores."""
    from onnx import TensorProto, helper

    random = np.random.default_rng(1)
    sizes = (128, 512, 512, 512, 16)
    weights, nodes, given = {}, [], "x"
    for layer, (before, after) in enumerate(pairwise(sizes)):
        weights[f"w{layer}"] = random.normal(0.0, before**-0.5, (before, after)).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [given, f"w{layer}"], [f"m{layer}"]))
        given = f"h{layer}" if layer < len(sizes) - 2 else "scores"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [given]))
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, sizes[0]])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, sizes[-1]])
    save_onnx(path, nodes, taken, [scores], **weights)
    return path
