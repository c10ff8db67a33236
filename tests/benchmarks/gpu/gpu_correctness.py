"""Are the answers the same, alone and in company? Against plain PyTorch on the same device, one request at a time.

Requests of one to three rows are sent at once, so that batches mix and are padded; then again with batching off. And
on a GPU: is a batch that finds no memory an error of that batch, after which the server answers as before?
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import torch

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.sample_models.torch_models import FORMS
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.endpoint import control_channel
from batchtune.target.telemetry import activity
from batchtune.target.tfserving import TfServingTarget
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.benchmarks.gpu.gpu_ceiling import example, loaded
from tests.benchmarks.gpu.gpu_models import NAMES, Asked, base_path

REQUESTS = 48
# Of the difference between two requests' answers, so that a mix-up cannot pass for rounding. On a GPU convolutions
# round to TF32's ten bits, and choose their algorithm by batch size.
TOLERANCE = {"cpu": 1e-3, "cuda": 0.1}
# The timeout is long enough for requests sent at once to meet in a batch on a busy machine too.
BATCHING = BatchingParameters(
    max_batch_size=8,
    batch_timeout_micros=200_000,
    num_batch_threads=2,
    max_enqueued_batches=1000,
    allowed_batch_sizes=(1, 2, 4, 8),
)


def correctness(asked: Asked) -> None:
    """Keep, for each model, the largest differences relative to how far two requests' answers are apart."""
    requests = 8 if asked.tiny else REQUESTS
    tolerance = TOLERANCE[asked.device.split(":")[0]]
    wrong = []
    for name in NAMES:
        module = loaded(base_path(asked, name), asked.device)
        given = [distinct(name, number) for number in range(requests)]
        with torch.inference_mode():
            plain = [module(one.to(asked.device)).cpu().numpy() for one in given]
        with TfServingTarget(TargetSpec(model=str(base_path(asked, name)), device=asked.device)) as target:
            target.apply(Configuration(batching=BATCHING))
            before = target.counters()
            batched = answers(target, name, given)
            seen = activity(before, target.counters())
            target.apply(Configuration(batching=None))
            alone = answers(target, name, given)
        scale = apart(plain[0:1], plain[3:4])
        found = {
            "batched_from_plain": apart(batched, plain) / scale,
            "unbatched_from_plain": apart(alone, plain) / scale,
            "batched_from_unbatched": apart(batched, alone) / scale,
            "requests_differ_ratio": scale / float(np.abs(plain[0]).max()),
            "mean_batch_rows": seen.mean_batch_rows,
            "tolerance": tolerance,
        }
        found["right"] = max(found["batched_from_plain"], found["unbatched_from_plain"]) <= tolerance
        asked.keep(name, found)
        wrong += [] if found["right"] else [name]
    if asked.device.startswith("cuda") and asked.left_s > 15.0:
        asked.keep("out_of_memory", without_memory(asked))
    if wrong:
        raise SystemExit(f"answers differ by more than {tolerance}: {', '.join(wrong)}")


def without_memory(asked: Asked) -> dict[str, Any]:
    """Take all but 1 GB of the card away, send one batch that needs several, give it back, ask again."""
    name, rows, requests = "text_recognition", 128, 16
    size = rows * requests
    # Without allowed sizes no graph is recorded, whose memory would be there already.
    large = BatchingParameters(max_batch_size=size, batch_timeout_micros=500_000, num_batch_threads=1)
    small = [distinct(name, 0)]
    spec = TargetSpec(
        model=str(base_path(asked, name)), device=asked.device, flags={"enable_model_warmup": False}
    )
    with TfServingTarget(spec) as target:
        target.apply(Configuration(batching=large))
        before = answers(target, name, small)
        free_bytes, _ = torch.cuda.mem_get_info()
        taken = torch.empty(max(free_bytes - 2**30, 1), dtype=torch.uint8, device=asked.device)
        codes = []
        try:
            answers(target, name, [example(name, rows, seed=number) for number in range(requests)])
        except grpc.RpcError as error:
            codes.append(f"{error.code().name}: {error.details()[:200]}")
        del taken
        torch.cuda.empty_cache()
        after = answers(target, name, small)
        return {"errors": codes, "alive": target.alive(), "same_afterwards": apart(before, after) == 0.0}


def distinct(name: str, number: int) -> Any:
    """One to three rows; images of different strength, because a network that has learnt nothing tells no others."""
    rows = example(name, 1 + number % 3, seed=number)
    return rows if name == "imdb_transformer" else rows * (0.25 + number % 5)


def answers(target: TfServingTarget, name: str, given: list[Any]) -> list[np.ndarray]:
    """The answer to each request, all of them under way at once."""
    form, endpoint = FORMS[name], target.endpoint

    def ask(one: Any) -> np.ndarray:
        message = encode_predict_request(
            endpoint.model_name, "serving_default", {form.input_name: one.numpy()}
        )
        return decode_predict_response(call(message, timeout=60))[form.output_name]

    with control_channel(endpoint) as channel, ThreadPoolExecutor(len(given)) as pool:
        grpc.channel_ready_future(channel).result(timeout=30)
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        return list(pool.map(ask, given))


def apart(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))
