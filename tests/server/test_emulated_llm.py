"""The emulated language model: what its scheduler computes in each step, its memory, and its API over a socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from batchtune.server.emulated_llm import OUT_OF_MEMORY, Device, Scheduler, Sequence
from tests.server.server_process import free_ports
from tests.waiting import wait_until

DEVICE = Device(
    step_ms=4.0,
    sequence_ms=0.5,
    prefill_token_ms=0.1,
    memory_tokens=1000,
    sequence_tokens=10,
    batched_token_tokens=1,
)


def scheduler(**limits: int) -> Scheduler:
    return Scheduler(DEVICE, **({"max_num_seqs": 8, "max_num_batched_tokens": 64} | limits))


def run(steps: Scheduler) -> list[tuple[float, list[Sequence]]]:
    done = []
    while not steps.is_idle:
        done.append(steps.step())
    return done


def test_a_long_prompt_is_prefilled_in_chunks_and_then_decodes_a_token_a_step() -> None:
    steps, sequence = scheduler(), Sequence(prompt=150, output=3)
    steps.add(sequence)
    done = run(steps)
    assert [round(seconds * 1e3, 3) for seconds, _ in done] == [10.9, 10.9, 6.7, 4.5, 4.5]
    assert [len(answered) for _, answered in done] == [0, 0, 1, 1, 1]
    assert steps.used_tokens == 0


def test_decoding_comes_first_and_prefill_takes_what_is_left_of_the_budget() -> None:
    steps = scheduler(max_num_batched_tokens=10)
    first, second = Sequence(prompt=5, output=9), Sequence(prompt=30, output=1)
    steps.add(first)
    steps.step()
    steps.add(second)
    steps.step()
    assert (first.produced, second.computed) == (2, 9)


def test_no_more_sequences_run_than_allowed() -> None:
    steps = scheduler(max_num_seqs=2)
    for _ in range(5):
        steps.add(Sequence(prompt=4, output=4))
    steps.step()
    assert (len(steps.running), len(steps.waiting)) == (2, 3)


def test_the_newest_is_preempted_where_the_memory_is_full_and_all_end_in_spite_of_it() -> None:
    steps = scheduler()
    assert steps.kv_tokens == 1000 - 80 - 64
    sequences = [Sequence(prompt=50, output=300) for _ in range(4)]
    for sequence in sequences:
        steps.add(sequence)
    done = run(steps)
    assert steps.preemptions > 0
    assert [sequence.produced for sequence in sequences] == [300] * 4
    assert sum(len(answered) for _, answered in done) == 4 * 300
    assert steps.used_tokens == 0


def test_one_that_the_client_gave_up_leaves_its_memory() -> None:
    steps, sequence = scheduler(), Sequence(prompt=50, output=300)
    steps.add(sequence)
    steps.step()
    sequence.gone = True
    assert steps.step() == (0.0, [])
    assert (steps.used_tokens, steps.is_idle) == (0, True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "batchtune.server.emulated_llm",
        f"--port={port}",
        "--tokens-per-chunk=2",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(address))
            yield address
        finally:
            server.terminate()
            assert server.wait(20) == 0


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_chat_is_streamed_and_usage_counts_tokens_not_chunks(url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "a b c"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = httpx.post(f"{url}/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") for each in events for choice in each["choices"]]
    assert len([words for words in texts if words]) == 3
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert text.rstrip().endswith("data: [DONE]")


def test_an_answer_that_is_not_streamed_comes_whole(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a b", "max_tokens": 2}).json()
    assert answer["choices"][0]["text"] == " tok tok"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_connection_is_closed_where_the_client_asks_for_that(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    with (
        httpx.Client() as client,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw,
    ):
        request = client.build_request("POST", f"{url}/v1/chat/completions", json=body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(request.content)}\r\n\r\n"
        raw.settimeout(30)
        raw.sendall(head.encode() + request.content)
        read = b""
        while piece := raw.recv(1 << 16):
            read += piece
    assert read.endswith(b"0\r\n\r\n")


def test_what_is_no_request_is_refused_and_it_says_that_it_is_emulated(url: str) -> None:
    for body in (
        b"{",
        b"[]",
        b'{"messages": 1}',
        b'{"messages": [{"content": "a"}], "max_tokens": 99999999}',
    ):
        assert httpx.post(f"{url}/v1/chat/completions", content=body).status_code == 400
    assert httpx.get(f"{url}/nowhere").status_code == 404
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["owned_by"] == "emulated"
    assert ":batchtune:serving:emulated_device 1" in httpx.get(f"{url}/metrics").text


def test_settings_that_do_not_fit_into_memory_end_it_at_its_start() -> None:
    command = [sys.executable, "-m", "batchtune.server.emulated_llm", "--port=0", "--max-num-seqs=100000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert OUT_OF_MEMORY in ended.stderr
