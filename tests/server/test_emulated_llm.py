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
from tests.server.server_process import can_connect, free_ports
from tests.waiting import wait_until

DEVICE = Device(
    step_ms=4.0,
    sequence_ms=0.5,
    prefill_token_ms=0.1,
    memory_tokens=1000,
    sequence_tokens=10,
    batched_token_tokens=1,
)


def scheduler(*sequences: Sequence, **limits: int) -> Scheduler:
    steps = Scheduler(DEVICE, **({"max_num_seqs": 8, "max_num_batched_tokens": 64} | limits))
    for sequence in sequences:
        steps.add(sequence)
    return steps


def run(steps: Scheduler) -> list[tuple[float, list[Sequence]]]:
    done = []
    while not steps.is_idle:
        done.append(steps.step())
    assert steps.used_tokens == 0
    return done


def test_a_long_prompt_is_prefilled_in_chunks_and_then_decodes_a_token_a_step() -> None:
    done = run(scheduler(Sequence(prompt=150, output=3)))
    steps = [(round(seconds * 1e3, 3), len(answered)) for seconds, answered in done]
    assert steps == [(10.9, 0), (10.9, 0), (6.7, 1), (4.5, 1), (4.5, 1)]


def test_decoding_comes_first_and_prefill_takes_what_is_left_of_the_budget() -> None:
    first, second = Sequence(prompt=5, output=9), Sequence(prompt=30, output=1)
    steps = scheduler(first, max_num_batched_tokens=10)
    steps.step()
    steps.add(second)
    steps.step()
    assert (first.produced, second.computed) == (2, 9)


def test_no_more_sequences_run_than_allowed() -> None:
    steps = scheduler(*(Sequence(prompt=4, output=4) for _ in range(5)), max_num_seqs=2)
    steps.step()
    assert (len(steps.running), len(steps.waiting)) == (2, 3)


def test_the_newest_is_preempted_where_the_memory_is_full_and_all_end_in_spite_of_it() -> None:
    sequences = [Sequence(prompt=50, output=300) for _ in range(4)]
    steps = scheduler(*sequences)
    assert steps.kv_tokens == 1000 - 80 - 64
    assert sum(len(answered) for _, answered in run(steps)) == 4 * 300
    assert steps.preemptions > 0
    assert [sequence.produced for sequence in sequences] == [300] * 4


def test_one_that_the_client_gave_up_leaves_its_memory() -> None:
    sequence = Sequence(prompt=50, output=300)
    steps = scheduler(sequence)
    steps.step()
    sequence.gone = True
    assert steps.step() == (0.0, [])
    assert (steps.used_tokens, steps.is_idle) == (0, True)


COMMAND = [sys.executable, "-m", "batchtune.server.emulated_llm"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    (port,) = free_ports(1)
    command = [*COMMAND, f"--port={port}", "--tokens-per-chunk=2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: can_connect(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            assert server.wait(20) == 0


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
    content = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        content
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as raw:
        raw.sendall(head + content)
        read = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert read.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"messages": 1}', b'{"messages": [{"content": "a"}], "max_tokens": 99999999}']
)
def test_what_is_no_request_is_refused(url: str, body: bytes) -> None:
    assert httpx.post(f"{url}/v1/chat/completions", content=body).status_code == 400


def test_it_says_that_it_is_emulated(url: str) -> None:
    assert httpx.get(f"{url}/nowhere").status_code == 404
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["owned_by"] == "emulated"
    assert ":batchtune:serving:emulated_device 1" in httpx.get(f"{url}/metrics").text


def test_settings_that_do_not_fit_into_memory_end_it_at_its_start() -> None:
    command = [*COMMAND, "--port=0", "--max-num-seqs=100000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert OUT_OF_MEMORY in ended.stderr
