"""The fuzz runs of the front ends, short and from a fixed seed; by hand they go on for a million inputs."""

from __future__ import annotations

from tests.server.fuzz import fuzz_json, fuzz_predict_request


def test_bent_json_bodies_are_read_or_refused() -> None:
    assert fuzz_json.fuzz(inputs=4000, seconds=30, seed=20) > 0


def test_bent_grpc_messages_get_one_answer_each() -> None:
    assert fuzz_predict_request.fuzz(inputs=4000, seconds=30, seed=20) > 0
