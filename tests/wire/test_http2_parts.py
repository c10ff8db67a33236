"""Windows, header blocks, timeouts and messages, each for itself."""

from __future__ import annotations

import itertools
import math

import hpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchtune.wire.grpc.framing import (
    MessageBuffer,
    decode_grpc_message,
    decode_timeout_ns,
    encode_grpc_message,
    encode_timeout,
)
from batchtune.wire.grpc.server_call import read_head
from batchtune.wire.grpc.server_connection import RateLimit
from batchtune.wire.http2 import (
    STREAM_ID,
    OutgoingFlow,
    PeerError,
    decode_block,
    encode_block,
    header_frames,
    new_decoder,
)
from batchtune.wire.status import StatusError
from tests.wire.wire_peers import frames_of, grpc_message

NAMES = st.sampled_from([":path", ":authority", "content-type", "user-agent", "x-key", "authorization", "a"])
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("queue"), st.integers(0, 3_000)),
        st.tuples(st.just("extend"), st.integers(1, 3_000)),
        st.tuples(st.just("connection"), st.integers(1, 5_000)),
        st.tuples(st.just("stream"), st.integers(1, 2_000)),
        st.tuples(st.just("initial"), st.integers(0, 3_000)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
    ),
    max_size=40,
)


@pytest.mark.timeout(30)
def test_streams_that_may_not_send_cost_nothing() -> None:
    """With a loop over all of them at each answer, these take minutes."""
    flow = OutgoingFlow()
    flow.set_initial_window(0)
    out: list[bytes] = []
    count = 65_000
    for number in range(count):
        flow.queue(2 * number + 1, b"answer", None)
        flow.pump(out)
    for _ in range(count):
        flow.grow_connection(1)
        flow.pump(out)
    assert (out, flow.waiting) == ([], count)
    assert flow.grow_stream(7, 6)
    assert flow.pump(out) == [7]
    assert len(out) == 2


@given(STEPS)
@example([("queue", 1_001), ("extend", 1), ("stream", 2_000), ("queue", 3_000), ("extend", 7), ("drop", 0)])
def test_no_window_is_ever_exceeded_and_no_byte_is_lost(steps: list[tuple[str, int]]) -> None:
    flow = OutgoingFlow()
    flow.set_initial_window(1_000)
    flow.window = 2_000
    bodies: dict[int, bytes] = {}
    sent: dict[int, bytes] = {}
    grants: dict[int, int] = {}
    held: dict[int, int] = {}
    connection, initial, ended = 2_000, 1_000, set()

    def pump() -> None:
        out: list[bytes] = []
        finished = flow.pump(out)
        for _, flags, stream_id, payload in frames_of(b"".join(out)):
            sent[stream_id] += payload
            assert len(sent[stream_id]) <= grants[stream_id] + initial
            if flags & 1:
                ended.add(stream_id)
        assert sum(map(len, sent.values())) <= connection
        assert set(finished) <= ended

    for step, amount in steps:
        waiting = [i for i in bodies if flow.waits(i)]
        if step == "queue":
            stream_id = 2 * len(bodies) + 1
            bodies[stream_id], sent[stream_id], grants[stream_id] = bytes([stream_id % 256]) * amount, b"", 0
            held[stream_id] = amount
            flow.queue(stream_id, bodies[stream_id], None)
        elif step == "extend" and waiting:
            bodies[waiting[-1]] += bytes(amount)
            held[waiting[-1]] = len(bodies[waiting[-1]]) - len(sent[waiting[-1]])
            flow.extend(waiting[-1], bytes(amount), None)
        elif step == "connection":
            connection += amount
            flow.grow_connection(amount)
        elif step == "stream" and waiting:
            grants[waiting[0]] += amount
            assert flow.grow_stream(waiting[0], amount)
        elif step == "initial" and amount >= initial:  # what is sent already stays sent
            initial = amount
            flow.set_initial_window(amount)
        elif step == "drop" and waiting:
            assert flow.drop(waiting[amount % len(waiting)])
            ended.add(waiting[amount % len(waiting)])
            bodies[waiting[amount % len(waiting)]] = sent[waiting[amount % len(waiting)]]
        pump()
        assert flow.queued_bytes == sum(held[i] for i in bodies if flow.waits(i))
    flow.grow_connection(10**6)
    for stream_id in filter(flow.waits, bodies):
        grants[stream_id] += 10**5
        flow.grow_stream(stream_id, 10**5)
    connection += 10**6
    pump()
    assert sent == bodies
    assert ended == set(bodies)
    assert flow.waiting == flow.queued_bytes == 0
    assert flow.at_once > 0 or initial == 0


@given(FIELDS)
def test_header_blocks_are_read_by_the_library_without_a_dynamic_table(fields: list[tuple[str, str]]) -> None:
    block = encode_block(fields)
    decoder = hpack.Decoder()
    assert [tuple(field) for field in decoder.decode(block)] == fields
    assert decoder.header_table_size == 0
    assert decode_block(new_decoder(table_bytes=0, header_list_bytes=65_536), block) == tuple(fields)
    read_head(tuple(fields))


@given(st.binary(max_size=40_000), st.integers(1, 2**31 - 1))
def test_long_header_blocks_are_cut_into_frames_of_the_default_size(block: bytes, stream_id: int) -> None:
    block = block or b"x"
    frames = frames_of(STREAM_ID.pack(stream_id).join(header_frames(block, 1)))
    assert b"".join(payload for *_, payload in frames) == block
    assert [kind for kind, *_ in frames] == [1] + [9] * (len(frames) - 1)
    assert [flags & 4 for _, flags, *_ in frames] == [0] * (len(frames) - 1) + [4]
    assert frames[0][1] & 1
    assert all(len(payload) <= 16_384 for *_, payload in frames)


@given(st.floats(1e-9, 1e12))
def test_a_timeout_is_never_cut_short_nor_much_longer(timeout_s: float) -> None:
    text = encode_timeout(timeout_s)
    read_ns = decode_timeout_ns(text)
    assert read_ns is not None
    assert len(text) <= 9
    if timeout_s < 99_999_999 * 3_600:
        assert timeout_s * 1e9 * (1 - 1e-9) <= read_ns <= timeout_s * 1e9 * 1.0001 + 1_000


def test_what_is_no_timeout_is_refused() -> None:
    for timeout_s in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="timeout"):
            encode_timeout(timeout_s)
    for text in ("", "S", "10", "-1S", "1.5S", "123456789S", "10s", "٣S", " 1S"):
        assert decode_timeout_ns(text) is None


@given(st.text(max_size=200))
def test_a_grpc_message_keeps_its_text(text: str) -> None:
    text = text.encode(errors="replace").decode()
    encoded = encode_grpc_message(text)
    assert all(" " <= character <= "~" for character in encoded)
    assert decode_grpc_message(encoded) == text


def test_a_raw_or_broken_grpc_message_is_read_as_far_as_it_goes() -> None:
    assert decode_grpc_message("ü".encode().decode("latin-1")) == "ü"
    assert decode_grpc_message("100% %zz %FF") == "100% %zz \ufffd"


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=6), st.lists(st.integers(0, 2_000))
)
def test_messages_are_cut_out_wherever_frames_end(parts: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    data = b"".join(grpc_message(payload, compress=compress) for payload, compress in parts)
    buffer = MessageBuffer("gzip", 1_000)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    messages = [m for a, b in itertools.pairwise(edges) for m in buffer.feed(data[a:b])]
    assert messages == [payload for payload, _ in parts]
    assert not buffer.incomplete
    assert buffer.completed == len(parts)


def test_a_message_that_inflates_beyond_the_limit_is_refused() -> None:
    with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED"):
        MessageBuffer("gzip", 1_000).feed(grpc_message(b"0" * 1_001, compress=True))
    assert MessageBuffer("gzip", 1_000).feed(grpc_message(b"0" * 1_000, compress=True)) == [b"0" * 1_000]


def test_a_rate_limit_refuses_the_frame_that_is_one_too_many() -> None:
    limit = RateLimit(10, "pings")
    for _ in range(10):
        limit.count()
    with pytest.raises(PeerError, match="too many pings"):
        limit.count()
    limit._since_s -= 1
    limit.count()
