"""How fast is the model itself on the device, for each batch size, with nothing of a server around it?

`eager`: operator by operator from Python. `graph`: a recorded CUDA graph, replayed. `graph_two_streams`: two of them
on two streams. `with_copies`: one batch at a time as a batch thread runs it, from page-locked memory and back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from batchtune.sample_models.torch_models import FORMS
from tests.benchmarks.gpu.gpu_models import NAMES, Asked, base_path

SIZES = {
    "text_recognition": (1, 2, 4, 8, 16, 32, 64, 128),
    "imdb_transformer": (1, 5, 32, 128, 512, 1000),
    "resnet50": (1, 2, 4, 8, 16, 32, 64),
}
TINY_SIZES = (1, 8)
ROUNDS = 3
ROUND_S = 0.12


def ceiling(asked: Asked) -> None:
    for name in NAMES:
        module, rows = loaded(base_path(asked, name), asked.device), {}
        for size in TINY_SIZES if asked.tiny else SIZES[name]:
            if asked.left_s < 2.0:
                break
            rows[str(size)] = figures(module, example(name, size), asked.device)
            asked.keep(name, rows)
        del module


def loaded(base: Path, device: str) -> Any:
    """The exported program as plain PyTorch runs it; on a GPU it must say that its tensors are expected there."""
    program = torch.export.load(base / "1" / "model.pt2")
    if device.startswith("cuda"):
        program = move_to_device_pass(program, device)
    return program.module().to(device)


def example(name: str, rows: int, seed: int = 3) -> Any:
    chance = torch.Generator().manual_seed(seed)
    shape = (rows, *FORMS[name].input_shape)
    if name == "imdb_transformer":
        return torch.randint(0, 20_000, shape, generator=chance).float()
    return torch.randn(shape, generator=chance)


def figures(module: Any, given: Any, device: str) -> dict[str, float | None]:
    """Rows per second of each way to run it; None where the device has no such way."""
    rows, on_gpu = given.shape[0], device.startswith("cuda")
    with torch.inference_mode():
        inside = given.to(device)
        found: dict[str, float | None] = {"eager": rows / seconds(lambda: module(inside), on_gpu)}
        if on_gpu:
            one, two = recorded(module, inside), recorded(module, inside)
            found["graph"] = rows / seconds(one.replay, on_gpu)
            found["graph_two_streams"] = 2 * rows / seconds(side_by_side(one, two), on_gpu)
            found["with_copies"] = rows / seconds(one.from_host_and_back(given), on_gpu)
    return found


class recorded:  # noqa: N801 - reads as what it is
    """A CUDA graph of one run, on a stream of its own."""

    def __init__(self, module: Any, inside: Any) -> None:
        self.inside = inside.clone()
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                module(self.inside)
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.outside = module(self.inside)

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def from_host_and_back(self, given: Any) -> Callable[[], None]:
        here = given.pin_memory()
        there = torch.empty(self.outside.shape, dtype=self.outside.dtype, pin_memory=True)

        def once() -> None:
            with torch.cuda.stream(self.stream):
                self.inside.copy_(here, non_blocking=True)
                self.graph.replay()
                there.copy_(self.outside, non_blocking=True)
            self.stream.synchronize()

        return once


def side_by_side(one: recorded, two: recorded) -> Callable[[], None]:
    def both() -> None:
        one.replay()
        two.replay()

    return both


def seconds(run: Callable[[], Any], on_gpu: bool) -> float:
    """Of one run: the median over a few rounds, each as long as clocks need to rise and settle."""
    settle = torch.cuda.synchronize if on_gpu else (lambda: None)
    for _ in range(3):
        run()
    settle()
    started_s = time.perf_counter()
    run()
    settle()
    repeats = max(3, int(ROUND_S / max(time.perf_counter() - started_s, 1e-6)))
    rounds = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        for _ in range(repeats):
            run()
        settle()
        rounds.append((time.perf_counter() - started_s) / repeats)
    return statistics.median(rounds)
